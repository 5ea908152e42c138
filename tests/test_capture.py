"""Captures with functions of numpy: rows, order, columns, problems, kills and resumes. test_capture_models.py has torch models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actshard
from actshard.base.errors import DiskFullError
from actshard.writing import Writer
from actshard.writing.capturing import windows
from actshard.writing.capturing.encoding import Encodings, Example
from conftest import refuses
from waiting import PATIENCE

WIDTH = 8
TABLE = np.random.default_rng(0).standard_normal((500, WIDTH)).astype(np.float32)


def states(ids: np.ndarray, mask: np.ndarray) -> dict[actshard.Layer, np.ndarray]:
    """States that depend on the token, its position, and all earlier tokens of the example; padding has NaN."""
    assert ids.shape == mask.shape
    x = TABLE[ids]
    x[~mask] = np.nan
    return {0: x, 3: np.cumsum(x, axis=1) + np.arange(ids.shape[1], dtype=np.float32)[None, :, None]}


def inputs(count: int, seed: int = 1, longest: int = 30) -> list[list[int]]:
    """Token ids of examples of 1 to ``longest`` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, len(TABLE), rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def expected(ids: list[int], layer: actshard.Layer) -> np.ndarray:
    """The oracle: the example alone."""
    array = np.array([ids], np.int64)
    return states(array, np.ones(array.shape, bool))[layer][0]


def check(path: Path, examples: list[list[int]]) -> None:
    store = actshard.open(path)
    assert len(store) == len(examples)
    for number, ids in enumerate(examples):
        for layer in (0, 3):
            assert np.array_equal(store.sequence(number, layer), expected(ids, layer)), (number, layer)
    if "input_ids" in store.table.column_names:
        assert store.table["input_ids"].to_pylist() == examples
    assert actshard.verify(path).ok


FORMATS = ("safetensors", "zarr", "npy", "hf_arrow", "pickle", "lmprobe")


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_in_the_order_of_the_inputs_whatever_the_batches(format: str, tmp_path: Path) -> None:
    examples = inputs(60)
    columns = {"text": [f"text {i}" for i in range(60)]} if format == "lmprobe" else {}
    rows = [{"input_ids": ids, **{k: v[i] for k, v in columns.items()}} for i, ids in enumerate(examples)]
    done = actshard.capture(states, rows, tmp_path / "d", format, text="input_ids", batch_tokens=64)
    check(done.path, examples)
    assert done.tokens == sum(map(len, examples)) == done.rows
    assert 0 < done.padding < done.tokens, "batches are of similar lengths"
    assert done.bytes == done.rows * 2 * WIDTH * 4


@pytest.mark.parametrize("batch_tokens", [1, 7, 64, 100_000])
def test_batches_have_at_most_that_many_positions(batch_tokens: int, tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = []

    def recording(ids: np.ndarray, mask: np.ndarray) -> Mapping[actshard.Layer, np.ndarray]:
        shapes.append(ids.shape)
        return states(ids, mask)

    examples = inputs(50)
    actshard.capture(recording, examples, tmp_path / "d", batch_tokens=batch_tokens)
    check(tmp_path / "d", examples)
    assert all(
        n * t <= batch_tokens or n == 1 for n, t in shapes[1:]
    )  # the first call has one example, to learn the width


def test_chosen_tokens_and_their_columns(tmp_path: Path) -> None:
    examples = inputs(20)
    choices: dict[str, Any] = {
        "last": "last",
        "mean": "mean",
        "positions": [-1, 0],
        "one": 0,
        "function": lambda e: e.ids % 2 == 0,
    }
    for name, tokens in choices.items():
        done = actshard.capture(states, examples, tmp_path / name, tokens=tokens, batch_tokens=40)
        store = actshard.open(done.path)
        for number, ids in enumerate(examples):
            whole = expected(ids, 3)
            places = {
                "last": [len(ids) - 1],
                "positions": [len(ids) - 1, 0],
                "one": [0],
                "function": [i for i, token in enumerate(ids) if token % 2 == 0],
            }.get(name)
            if places is None:
                np.testing.assert_allclose(store.sequence(number, 3)[0], whole.mean(axis=0), rtol=1e-5)
                continue
            assert np.array_equal(store.sequence(number, 3), whole[places])
            assert store.table["positions"][number].as_py() == places
            assert store.table["input_ids"][number].as_py() == [ids[i] for i in places]
        assert store.table["text_tokens"].to_pylist() == [len(ids) for ids in examples]
        assert ("input_ids" in store.table.column_names) == (name != "mean")


def test_unusable_examples_are_empty_named_and_shift_nothing(tmp_path: Path) -> None:
    examples: list[Any] = [[1, 2, 3], [], [4, 5], list(range(40)), [6], None, 7.5]
    rows = [{"input_ids": ids} for ids in examples]
    with pytest.warns(
        actshard.ActshardWarning, match="4 examples of 7 are empty: example 1: it has no tokens; example 3"
    ) as caught:
        done = actshard.capture(states, rows, tmp_path / "d", max_tokens=30)
    assert [warning.message.code for warning in caught] == ["examples-left-empty"]  # type: ignore[union-attr]
    assert [p.example for p in done.problems] == [1, 3, 5, 6]
    assert done.problems[1].reason == "it has 40 tokens, more than 30"
    assert done.problems[3].reason == "expected a text, token ids or a chat, found float"
    check(done.path, [ids if isinstance(ids, list) and len(ids) <= 30 else [] for ids in examples])
    assert actshard.open(done.path).table["problem"].to_pylist()[:2] == [None, "it has no tokens"]


def test_an_example_that_lacks_a_position_is_empty(tmp_path: Path) -> None:
    with pytest.warns(actshard.ActshardWarning, match=r"example 1: it has 2 tokens, and no position 2"):
        done = actshard.capture(states, [[1, 2, 3], [4, 5], [6, 7, 8]], tmp_path / "d", tokens=[2])
    store = actshard.open(done.path)
    assert store.token_counts.tolist() == [1, 0, 1]
    assert np.array_equal(store.sequence(2, 0), TABLE[[8]])


def test_longer_examples_are_cut_if_asked(tmp_path: Path) -> None:
    examples = inputs(20)
    done = actshard.capture(states, examples, tmp_path / "d", max_tokens=5, truncate=True)
    check(done.path, [ids[:5] for ids in examples])
    assert done.problems == ()


def test_nothing_but_empty_examples_is_an_error(tmp_path: Path) -> None:
    for empty in ([], [[]], [{"input_ids": []}]):
        with pytest.raises(actshard.ArgumentError, match="expected at least one example with tokens"):
            actshard.capture(states, empty, tmp_path / "d")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(
        actshard.ArgumentError, match=r"expected at least one example with tokens in .*empty.jsonl, found none"
    ):
        actshard.capture(states, tmp_path / "empty.jsonl", tmp_path / "d")
    assert not (tmp_path / "d").exists()


# -- texts ---------------------------------------------------------------------------------------------------------------


def words(text: str) -> list[int]:
    """A tokenizer: a word is a number."""
    return [int(word) for word in text.split()]


ROWS = [{"prompt": "1 2 3", "label": 0}, {"prompt": "4", "label": 1}, {"prompt": "5 6", "label": 0}]


def jsonl(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "texts.parquet")
    return folder / "texts.parquet"


def lines(folder: Path) -> Path:
    (folder / "texts.txt").write_text("1 2 3\n4\n5 6\n")
    return folder / "texts.txt"


SOURCES: dict[str, Callable[[Path], Any]] = {
    "jsonl": jsonl,
    "parquet": parquet,
    "text": lines,
    "name": lambda folder: str(jsonl(folder)),
    "folder": lambda folder: jsonl(folder).parent,
    "paths": lambda folder: [jsonl(folder)],
    "table": lambda folder: pa.Table.from_pylist(ROWS),
    "mappings": lambda folder: ROWS,
    "texts": lambda folder: [row["prompt"] for row in ROWS],
    "iterator": lambda folder: iter(ROWS),
}


@pytest.mark.parametrize("source", SOURCES)
def test_texts_are_read_from_memory_tables_and_files(source: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    texts = SOURCES[source](tmp_path / "in")
    done = actshard.capture(states, texts, tmp_path / "d", tokenizer=words)
    check(done.path, [[1, 2, 3], [4], [5, 6]])
    table = actshard.open(done.path).table
    if source in ("text", "texts"):
        assert table["text"].to_pylist() == ["1 2 3", "4", "5 6"]
    else:
        assert table["prompt"].to_pylist() == ["1 2 3", "4", "5 6"]
        assert table["label"].to_pylist() == [0, 1, 0]


@pytest.mark.peers
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_data_frames_are_tables(library: str, tmp_path: Path) -> None:
    """Iterating over one yields the names of its columns."""
    frame = pytest.importorskip(library).DataFrame({"prompt": ["1 2 3", "4", "5 6"], "label": [0, 1, 0]})
    done = actshard.capture(states, frame, tmp_path / "d", tokenizer=words)
    check(done.path, [[1, 2, 3], [4], [5, 6]])
    assert actshard.open(done.path).table["label"].to_pylist() == [0, 1, 0]


def test_empty_lines_of_a_text_file_are_empty_examples(tmp_path: Path) -> None:
    """So that the number of an example is the number of its line."""
    (tmp_path / "texts.txt").write_text("1 2\n\n3\r\n")
    with pytest.warns(actshard.ActshardWarning, match="example 1: its text is empty"):
        done = actshard.capture(states, tmp_path / "texts.txt", tmp_path / "d", tokenizer=words)
    check(done.path, [[1, 2], [], [3]])


def test_columns_are_chosen_and_never_overwritten(tmp_path: Path) -> None:
    rows = [{"text": "1 2", "label": 1, "note": "x"}, {"text": "3", "label": 2}]
    done = actshard.capture(states, rows, tmp_path / "a", tokenizer=words)
    assert actshard.open(done.path).table["note"].to_pylist() == ["x", None]
    done = actshard.capture(states, rows, tmp_path / "b", tokenizer=words, columns=["label"])
    assert "note" not in actshard.open(done.path).table.column_names
    with pytest.raises(
        actshard.ArgumentError, match=r"columns: expected columns of texts, text, label, note, found 'labl'"
    ):
        actshard.capture(states, rows, tmp_path / "c", tokenizer=words, columns=["labl"])
    with pytest.raises(actshard.ArgumentError, match="'problem' is a column that capture writes itself"):
        actshard.capture(states, [{"text": "1", "problem": 3}], tmp_path / "c", tokenizer=words)
    with pytest.raises(actshard.ArgumentError, match="expected one of the columns text, prompt"):
        actshard.capture(states, [{"body": "1"}], tmp_path / "c", tokenizer=words)
    done = actshard.capture(states, [{"body": "1"}], tmp_path / "c", tokenizer=words, text="body")
    assert actshard.open(done.path).table["body"].to_pylist() == ["1"]


def test_integers_and_floats_of_a_column_are_floats_and_other_types_are_refused_at_once(tmp_path: Path) -> None:
    rows = [{"input_ids": [1], "score": 1}, {"input_ids": [2], "score": None}, {"input_ids": [3], "score": 0.5}]
    done = actshard.capture(states, rows, tmp_path / "d", memory=1)  # a window per example
    assert actshard.open(done.path).table["score"].to_pylist() == [1.0, None, 0.5]
    rows[2]["score"] = "high"
    with pytest.raises(
        actshard.ArgumentError, match="'score': expected 3 values of one type: Could not convert 'high'"
    ):
        actshard.capture(states, rows, tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_a_malformed_line_is_an_error_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "1"}\n{"text": \n')
    with refuses(actshard.FormatError, tmp_path / "texts.jsonl", "line 2: expected a JSON object"):
        actshard.capture(states, tmp_path / "texts.jsonl", tmp_path / "d", tokenizer=words)
    with pytest.raises(actshard.MissingFileError):
        actshard.capture(states, tmp_path / "no.jsonl", tmp_path / "d", tokenizer=words)
    (tmp_path / "texts.csv").touch()
    with pytest.raises(actshard.ArgumentError, match="expected a file name ending in"):
        actshard.capture(states, tmp_path / "texts.csv", tmp_path / "d", tokenizer=words)


def library() -> Any:
    """A tokenizer of the tokenizers library that pads on the left and truncates, with BOS."""
    import tokenizers

    vocabulary = {str(i): i for i in range(100)} | {"[UNK]": 100, "[BOS]": 101, "[PAD]": 102}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[BOS]", "[PAD]", "[UNK]"])
    made.post_processor = tokenizers.processors.TemplateProcessing("[BOS] $A", None, [("[BOS]", 101)])
    made.enable_padding(direction="left", pad_id=102, pad_token="[PAD]", length=20)
    made.enable_truncation(4)
    return made


def test_padding_and_truncation_of_a_tokenizer_are_not_used(tmp_path: Path) -> None:
    """The tokenizer.json of sentence-transformers pads and truncates to 128 tokens."""
    tokenizer = library()
    texts = ["1 2 3 4 5 6", "7 nothing"]
    done = actshard.capture(states, texts, tmp_path / "d", tokenizer=tokenizer)
    table = actshard.open(done.path).table
    assert table["input_ids"].to_pylist() == [[101, 1, 2, 3, 4, 5, 6], [101, 7, 100]]
    assert table["special_tokens_mask"].to_pylist() == [[1, 0, 0, 0, 0, 0, 0], [1, 0, 0]], "an unknown word is content"
    assert len(tokenizer.encode("1").ids) == 20, "the caller's tokenizer is unchanged"
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = actshard.capture(states, texts, tmp_path / "e", tokenizer=tmp_path, special_tokens=False, tokens="content")
    assert actshard.open(again.path).table["input_ids"].to_pylist() == [[1, 2, 3, 4, 5, 6], [7, 100]]


# -- functions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda i, m: [1], "expected a function that returns {layer"),
        (lambda i, m: {0: TABLE[i][:, :-1]}, "layer 0: expected (1, 3, d_model) states, found (1, 2, 8)"),
        (lambda i, m: {0: TABLE[i], 1: TABLE[i][..., :5]}, "expected layers of one width, found 8: [0]; 5: [1]"),
        (lambda i, m: {0: TABLE[i], 1: TABLE[i].astype(np.float16)}, "the layers have the dtypes float32, float16"),
        (lambda i, m: {0: TABLE[i]} if len(i) == 1 else {1: TABLE[i]}, "found a result without 0"),
        (7, "expected the name of a model, a torch module or a function"),
    ],
)
def test_results_of_a_function_that_do_not_fit_are_refused(function: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(actshard.ActshardError) as caught:
        actshard.capture(function, [[1, 2, 3], [4, 5, 6]], tmp_path / "d")
    assert message in str(caught.value)


def test_layers_of_a_function_are_chosen_by_name(tmp_path: Path) -> None:
    done = actshard.capture(states, inputs(5), tmp_path / "d", layers=[3])
    assert actshard.open(done.path).layers == (3,)
    with pytest.raises(
        actshard.ArgumentError, match=r"layers: layer 4 is not in the function's result; its layers are \[0, 3\]"
    ):
        actshard.capture(states, inputs(5), tmp_path / "e", layers=[4])


def test_an_error_of_the_function_keeps_what_was_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actshard.writing.capturing.job.BATCHES_OF_A_WINDOW", 1)
    calls = 0

    def failing(ids: np.ndarray, mask: np.ndarray) -> Mapping[actshard.Layer, np.ndarray]:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise ZeroDivisionError("the client lost its connection")
        return states(ids, mask)

    examples = inputs(60)
    with pytest.raises(ZeroDivisionError, match="lost its connection"):
        actshard.capture(failing, examples, tmp_path / "d", batch_tokens=50)
    with pytest.raises(actshard.ExistsError, match=r"of an unfinished dataset. Pass resume=True"):
        actshard.capture(failing, examples, tmp_path / "d", batch_tokens=50)
    done = actshard.capture(failing, examples, tmp_path / "d", batch_tokens=50, resume=True)
    assert 0 < done.resumed_at < 60
    check(done.path, examples)


def test_a_smaller_batch_follows_a_memory_error(tmp_path: Path) -> None:
    def limited(ids: np.ndarray, mask: np.ndarray) -> Mapping[actshard.Layer, np.ndarray]:
        if ids.size > 50:
            raise MemoryError
        return states(ids, mask)

    examples = inputs(40)
    with pytest.warns(actshard.ActshardWarning, match=r"out of memory with a batch of"):
        done = actshard.capture(limited, examples, tmp_path / "d", batch_tokens=400)
    check(done.path, examples)
    assert done.batch_tokens <= 50
    with pytest.raises(
        actshard.NoMemoryError, match="example 1: the model needs more memory than there is for 60 tokens"
    ):
        actshard.capture(limited, [[1], list(range(60))], tmp_path / "e", batch_tokens=1)


def test_nan_is_refused_with_its_place_or_counted(tmp_path: Path) -> None:
    def faulty(ids: np.ndarray, mask: np.ndarray) -> Mapping[actshard.Layer, np.ndarray]:
        found = states(ids, mask)
        found[3][(ids == 13) & mask] = np.inf
        return found

    examples = [[1, 2], [3, 13, 4], [5]]
    with pytest.raises(actshard.FormatError, match="example 1, token 1, layer 3: NaN or infinite values as float32"):
        actshard.capture(faulty, examples, tmp_path / "d")
    with pytest.warns(actshard.ActshardWarning, match="1 row with NaN or infinite values, in the examples 1"):
        done = actshard.capture(faulty, examples, tmp_path / "d", on_nonfinite="count", resume=True)
    assert (done.nonfinite, done.nonfinite_examples) == (1, (1,))
    assert np.isinf(actshard.open(done.path).sequence(1, 3)[1]).all()


def test_large_finite_values_are_not_taken_for_infinite_ones(tmp_path: Path) -> None:
    """Their sum is infinite."""
    done = actshard.capture(lambda i, m: {0: np.full((*i.shape, 4), 3e38, np.float32)}, [[1, 2]], tmp_path / "d")
    assert done.nonfinite == 0
    wide = actshard.capture(lambda i, m: {0: np.full((*i.shape, 4), 1e300)}, [[1, 2]], tmp_path / "e")
    assert wide.dtype == "float64"


def test_a_narrower_dtype_is_cast_or_refused(tmp_path: Path) -> None:
    examples = inputs(9)
    done = actshard.capture(states, examples, tmp_path / "d", dtype="bfloat16", layers=[0])
    store = actshard.open(done.path)
    assert str(store.dtype) == done.dtype == "bfloat16"
    assert np.array_equal(store.sequence(4, 0), expected(examples[4], 0).astype(store.dtype))
    with pytest.raises(actshard.FormatError, match="NaN or infinite values as float16"):
        actshard.capture(lambda i, m: {0: TABLE[i] * 1e6}, examples, tmp_path / "e", dtype="float16")


def test_an_error_of_the_writer_is_the_error_of_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Writer.append
    calls = 0

    def full(self: Writer, *arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise DiskFullError("no space left", path=tmp_path)
        append(self, *arguments, **named)

    monkeypatch.setattr("actshard.writing.capturing.job.BATCHES_OF_A_WINDOW", 1)
    examples = inputs(60)
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "append", full)
        with pytest.raises(actshard.DiskFullError, match="no space left"):
            actshard.capture(states, examples, tmp_path / "d", batch_tokens=50)
    assert calls == 3
    done = actshard.capture(states, examples, tmp_path / "d", batch_tokens=50, resume=True)
    assert done.resumed_at > 0
    check(done.path, examples)


# -- resuming ------------------------------------------------------------------------------------------------------------

CHILD = """
import os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import numpy as np
import actshard
import actshard.writing.capturing.job, actshard.writing.capturing.windows as windows
from test_capture import in_context, inputs

actshard.writing.capturing.job.BATCHES_OF_A_WINDOW = 2
windows.CELL = actshard.writing.capturing.job.CELL = 32
path, format, calls = sys.argv[2], sys.argv[3], int(sys.argv[4])

def killed(ids, mask):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), 9)
    return in_context(ids, mask)

killed.__module__, killed.__qualname__ = "tests", "states"
done = actshard.capture(killed, inputs(150), path, format, batch_tokens=60, resume=True)
print(done.resumed_at)
"""


def in_context(ids: np.ndarray, mask: np.ndarray) -> dict[actshard.Layer, np.ndarray]:
    """States that also depend on the batch, as a GPU's do in the last bits: its shape, and the first of its examples."""
    return {3: states(ids, mask)[3] + np.float32(ids.shape[0] + 100 * ids.shape[1] + ids[0, 0])}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "zarr", "pickle"])
def test_a_capture_that_is_killed_again_and_again_has_the_bytes_of_one_that_is_not(format: str, tmp_path: Path) -> None:
    """Even where states depend on the batch: a resumed capture computes the same batches."""
    here = str(Path(__file__).parent)

    def run(name: str, calls: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", CHILD, here, str(tmp_path / name), format, str(calls)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)

    assert run("whole", -1).returncode == 0
    kills = 0
    while (process := run("killed", 24)).returncode == -9:
        kills += 1
        assert kills < 60, "each run commits something"
    assert process.returncode == 0, process.stderr
    assert 0 < int(process.stdout) < 150
    assert kills >= 2
    whole, killed = (actshard.open(tmp_path / name) for name in ("whole", "killed"))
    assert killed.table.equals(whole.table)
    for number in range(150):
        assert np.array_equal(killed.sequence(number, 3), whole.sequence(number, 3)), number


def test_other_texts_or_options_are_refused_by_name_on_resume(tmp_path: Path) -> None:
    examples = inputs(30)
    actshard.capture(states, examples, tmp_path / "d")

    def refused(name: str, function: Any = states, texts: Any = examples, **other: Any) -> None:
        with pytest.raises(actshard.ExistsError, match=f"contains another dataset: {name}: expected"):
            actshard.capture(function, texts, tmp_path / "d", resume=True, **other)

    def others(ids: np.ndarray, mask: np.ndarray) -> Mapping[actshard.Layer, np.ndarray]:
        return states(ids, mask)

    refused("model", others)
    refused("texts", texts=[*examples[:-1], [1]])
    refused("texts", texts=examples[:-1])
    refused("tokens", tokens="last")
    refused("max_tokens", max_tokens=99)
    refused("layers", layers=[3])
    refused("dtype", dtype="float16")
    refused("note", metadata={"note": "x"})
    with pytest.raises(actshard.ExistsError, match=r"contains a finished dataset|already contains"):
        actshard.capture(states, examples, tmp_path / "d")
    done = actshard.capture(
        states, examples, tmp_path / "d", resume=True, batch_tokens=9, memory="1MiB", on_nonfinite="count"
    )
    assert (done.resumed_at, done.tokens, done.examples) == (30, 0, 30)


def test_an_iterator_is_read_once_and_not_resumed(tmp_path: Path) -> None:
    def texts() -> Iterator[list[int]]:
        yield from inputs(9000 // 100, longest=5)

    done = actshard.capture(states, texts(), tmp_path / "d")
    check(done.path, inputs(90, longest=5))
    with pytest.raises(actshard.ArgumentError, match="resume: expected a list or files as texts, found an iterator"):
        actshard.capture(states, texts(), tmp_path / "e", resume=True)


def test_the_request_and_the_metadata_record_what_was_captured(tmp_path: Path) -> None:
    done = actshard.capture(states, inputs(4), tmp_path / "d", tokens=[0], metadata={"note": "mine"})
    metadata = actshard.open(done.path).metadata
    assert metadata["note"] == "mine"
    assert metadata["capture"] == done.provenance
    assert metadata["capture"]["model"] == "function test_capture.states"
    assert metadata["capture"]["tokens"] == [0]
    assert done.as_dict()["provenance"] == done.provenance
    json.dumps(done.as_dict())
    assert len(repr(done)) < 400


# -- windows, parts, estimates -------------------------------------------------------------------------------------------


def test_windows_are_bounded_and_begin_anew_with_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CELL", 20)
    encodings = Encodings(None, "input_ids", (), True, None, False)
    from actshard.writing.capturing.choosing import choice_of

    rows = [{"input_ids": ids} for ids in inputs(103)]
    limits = windows.Limits(tokens=90, rows=40)
    every = list(windows.windows(rows, encodings, choice_of("all"), limits))
    assert [c.example.number for window in every for c in window] == list(range(103))
    for window in every:
        tokens = sum(len(c.example) for c in window)
        assert len(window) == 1 or tokens <= 40
        assert len({c.example.number // 20 for c in window}) == 1
    from_a_cell = list(windows.windows(rows[40:], encodings, choice_of("all"), limits, 40))
    starts = [[c.example.number for c in window] for window in every]
    assert [[c.example.number for c in window] for window in from_a_cell] == [w for w in starts if w[0] >= 40]


@pytest.mark.parametrize("pads", [True, False])
def test_little_padding_is_computed_also_where_windows_are_small(pads: bool) -> None:
    """Batches of a window with few examples, whose lengths differ widely."""
    rng = np.random.default_rng(4)
    for count in (1, 5, 40, 400):
        lengths = np.clip(rng.lognormal(4, 0.8, count), 1, 2000).astype(int)
        window = [
            windows.ChosenExample(Example(i, None, np.zeros(n, np.int64), np.zeros(n, bool)), np.arange(n))
            for i, n in enumerate(lengths.tolist())
        ]
        batches = list(windows.batches(window, 4096, pads=pads))
        assert sorted(i for batch in batches for i in batch) == list(range(count))
        for batch in batches:
            positions, tokens = len(batch) * lengths[batch].max(), lengths[batch].sum()
            assert positions <= 4096 or len(batch) == 1
            assert positions <= max(1.25 * tokens, 4096 // 8)
            assert pads or positions == tokens
        longest = [lengths[batch].max() for batch in batches]
        assert longest == sorted(longest, reverse=True), "the largest comes first"


def test_more_parts_than_examples_are_merged(tmp_path: Path) -> None:
    for i in range(4):
        actshard.capture(states, inputs(2), tmp_path / "d", "zarr", part=(i, 4))
    check(actshard.merge(tmp_path / "d"), inputs(2))


def test_parts_are_merged_to_the_whole(tmp_path: Path) -> None:
    examples = inputs(50)
    for i in (2, 0, 1):
        done = actshard.capture(states, examples, tmp_path / "d", "zarr", part=(i, 3))
        assert done.examples in (16, 17)
    check(actshard.merge(tmp_path / "d"), examples)


def test_an_estimate_writes_nothing_and_is_right(tmp_path: Path) -> None:
    examples = inputs(50)
    predicted = actshard.capture(states, examples, tmp_path / "d", estimate=True)
    assert not (tmp_path / "d").exists()
    assert predicted.estimated
    assert predicted.seconds > 0
    done = actshard.capture(states, examples, tmp_path / "d")
    assert (predicted.examples, predicted.tokens, predicted.rows) == (done.examples, done.tokens, done.rows)
    assert (predicted.layers, predicted.d_model, predicted.dtype) == (done.layers, done.d_model, done.dtype)
    assert predicted.bytes == pytest.approx(done.bytes, rel=0.2)
    assert predicted.files is not None


def test_an_estimate_names_the_number_of_an_example_with_nan(tmp_path: Path) -> None:
    examples = [[1, 2]] * 1100
    examples[516] = [1, 7]

    def faulty(ids: np.ndarray, mask: np.ndarray) -> Mapping[actshard.Layer, np.ndarray]:
        rows = states(ids, mask)
        rows[3][ids == 7] = np.nan
        return rows

    with pytest.raises(actshard.FormatError, match="example 516, token 1, layer 3: NaN") as caught:
        actshard.capture(faulty, examples, tmp_path / "d", estimate=True)
    assert "ommitted" not in str(caught.value), "nothing was"


def test_progress_ends_with_all_examples_and_tokens(tmp_path: Path) -> None:
    calls: list[actshard.CaptureProgress] = []
    examples = inputs(50)
    done = actshard.capture(states, examples, tmp_path / "d", batch_tokens=60, progress=calls.append)
    assert len(calls) > 5
    assert (calls[-1].examples, calls[-1].examples_total, calls[-1].tokens) == (50, 50, done.tokens)
    assert [c.tokens for c in calls] == sorted(c.tokens for c in calls)
    calls.clear()
    actshard.capture(states, examples, tmp_path / "part", "zarr", part=(1, 2), progress=calls.append)
    assert (calls[-1].examples, calls[-1].examples_total) == (25, 25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "first"}, "tokens: expected all, content, last, mean, positions or a function"),
        ({"tokens": [0, 0]}, "tokens: expected different positions"),
        ({"tokens": 1.5}, "tokens: expected all, content, last, mean, positions or a function"),
        ({"tokens": lambda e: [True]}, "expected 3 bools for example 0"),
        ({"tokens": lambda e: "x"}, "expected positions or bools for example 0"),
        ({"on_nonfinite": "skip"}, 'on_nonfinite: expected "refuse" or "count"'),
        ({"format": "tar"}, "format must be one of saev"),
        ({"format": "lmprob"}, "do you mean 'lmprobe'"),
        ({"batch_tokens": 0}, "batch_tokens: expected an integer of at least 1"),
        ({"memory": "much"}, "memory: expected a number of bytes"),
        ({"columns": [1]}, "columns: expected names"),
        ({"layers": []}, "layers: expected at least one"),
        ({"tokenizer": 5}, "tokenizer: expected a tokenizer of transformers"),
        ({"revision": "main"}, "revision: expected the name of a model with it, found a function"),
        ({"part": (0, 2)}, "part"),
        ({"part": (2, 2)}, "part: expected an integer from 0 to 1, found 2"),
        ({"part": 3}, "part: expected (i, n), found 3"),
        ({"metadata": 3}, "metadata: expected a mapping"),
        ({"progress": 3}, "progress: expected a function"),
        ({"texts": 3}, "texts: expected a path or a list of texts, found int"),
        ({"texts": {"train": pa.table({"text": ["x"]})}}, "found dict. Pass one split: 'train'"),
        ({"texts": {"text": "x"}}, "texts: expected a path or a list of texts, found dict"),
        ({"texts": [[1], {"input_ids": [1], 2: 3}]}, "texts: expected names of columns as str, found 2 at 1"),
        ({"texts": [{"input_ids": [1], "a": {"b": 1, 2: 3}}]}, "texts: expected dicts with str as keys at 0"),
        ({"texts": [b"x"]}, "texts: expected texts, lists of token ids or mappings, found bytes at 0"),
        ({"texts": "s3://bucket/x.jsonl"}, "is a URL; stage it"),
        ({"texts": ["a text"]}, "tokenizer: expected one for texts, found none"),
    ],
)
def test_invalid_arguments_are_named_and_nothing_is_written(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"texts": [[1, 2, 3], [4, 5]], "format": "safetensors", **options}
    with pytest.raises(actshard.ActshardError) as caught:
        actshard.capture(states, arguments.pop("texts"), tmp_path / "d", **arguments)
    assert message in str(caught.value)
    assert not (tmp_path / "d").exists()


def test_a_path_with_other_files_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/notes.txt").write_text("mine")
    with pytest.raises(actshard.ExistsError, match=r"expected no folder or an empty one, found notes.txt"):
        actshard.capture(states, inputs(3), tmp_path / "d")
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["notes.txt"]
