"""Guarantee: states of tokenizers, sources and caches that would change rows without a word are errors or warnings."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.tokens.conftest import GOLDEN, GPT2, write_lines
from typer.testing import CliRunner

import actshard
from actshard import tokens
from actshard.cli import app
from actshard.tokens import ledger as ledgers

TEXTS = [{"text": f"document {i} of some words " * (i % 5 + 1)} for i in range(20)]


def backend_with(**settings: Any) -> Any:
    """A tokenizer of the library, with settings of its file."""
    content = json.loads((GOLDEN / GPT2 / "tokenizer.json").read_bytes())
    content["model"] |= settings
    return tokenizers.Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("dropout", [0.5, 1e-9])
def test_dropout_is_refused_however_small(dropout: float) -> None:
    with pytest.raises(actshard.ArgumentError, match=r"dropout of .*model\.dropout"):
        tokens.load_tokenizer(backend_with(dropout=dropout))
    tokens.load_tokenizer(backend_with(dropout=0.0))


def test_a_state_that_other_processes_would_not_have_is_refused(tmp_path: Path) -> None:
    backend = backend_with()
    backend.encode_special_tokens = True
    with pytest.raises(actshard.ArgumentError, match="encode_special_tokens"):
        tokens.load_tokenizer(backend)
    backend.encode_special_tokens = False
    tokenizer = tokens.load_tokenizer(backend, eos_token=None)
    for change in ("encode_special_tokens = True", "enable_padding()"):
        tokenizer = tokens.load_tokenizer(backend_with())
        exec(f"tokenizer.backend.{change}", {"tokenizer": tokenizer})
        with pytest.raises(actshard.ArgumentError, match=change.partition(" ")[0].removesuffix("()")[-7:]):
            tokens.build_cache(write_lines(tmp_path / "a.jsonl", TEXTS), tmp_path / "c", tokenizer, enforce_eos=False)


@pytest.mark.filterwarnings("ignore:.*truncates texts")
def test_a_tokenizer_that_is_changed_after_a_build_is_another_one(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    backend = backend_with()
    backend.enable_truncation(3)
    tokenizer = tokens.load_tokenizer(backend)
    short = tokens.build_cache(source, tmp_path / "c", tokenizer, enforce_eos=False)
    assert tokenizer.backend is not None
    tokenizer.backend.no_truncation()
    with pytest.raises(actshard.ExistsError, match="tokenizer"):
        tokens.build_cache(source, tmp_path / "c", tokenizer, enforce_eos=False)
    whole = tokens.build_cache(source, tmp_path / "whole", tokenizer, enforce_eos=False)
    assert whole.num_tokens > short.num_tokens
    assert whole.ledger.actshard != short.ledger.actshard


@pytest.mark.parametrize("spelling", ["./a.jsonl", "sub/../a.jsonl", "link.jsonl", "{folder}/a.jsonl"])
def test_a_file_under_two_names_is_refused(spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}])
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    with pytest.raises(actshard.ArgumentError, match=r"expected each file once, found .* twice, also as a\.jsonl"):
        tokens.build_cache(["a.jsonl", spelling.format(folder=tmp_path)], "c", format="prebuilt")


@pytest.mark.parametrize("text", ["1 -5", "1 10", "99999999999999999999"])
def test_the_passthrough_tokenizer_has_a_vocabulary(text: str, tmp_path: Path) -> None:
    tokenizer = tokens.load_tokenizer("passthrough", vocab_size=10)
    assert tokenizer.encode(["0 9", ""]) == [[0, 9], []]
    source = write_lines(tmp_path / "a.jsonl", [{"text": "1 2"}, {"text": text}])
    with pytest.raises(actshard.FormatError, match="vocabulary of 10 tokens, found the id"):
        tokens.build_cache(source, tmp_path / "c", tokenizer)


@pytest.mark.parametrize("bad", ["1 x", "1 -5", "10", "1.0"])
@pytest.mark.parametrize("format", ["text", "supervised"])
def test_texts_that_are_no_ids_are_bad_records(bad: str, format: str, tmp_path: Path) -> None:
    tokenizer = tokens.load_tokenizer("passthrough", vocab_size=10)
    good: dict[str, Any] = {"text": "1 2"} if format == "text" else {"input": "1", "target": "2 3"}
    wrong = dict.fromkeys(good, bad)
    options: dict[str, Any] = {"format": {"type": format, "input_key": "input", "target_key": "target"}}
    options = {} if format == "text" else options
    source = write_lines(tmp_path / "a.jsonl", [good, wrong, good])
    with pytest.raises(actshard.FormatError, match=r"a\.jsonl: line 2: the passthrough tokenizer"):
        tokens.build_cache(source, tmp_path / "c", tokenizer, **options)
    with pytest.warns(actshard.ActshardWarning, match=r"1 record was skipped.*line 2: the passthrough tokenizer"):
        cache = tokens.build_cache(source, tmp_path / "c", tokenizer, on_error="skip", **options)
    assert len(cache) == 2


def test_a_replaced_model_is_another_tokenizer(tmp_path: Path) -> None:
    """A model of equal size: only its content differs."""
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a b"}])
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "u": 2}, unk_token="u"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = tokens.load_tokenizer(backend)
    first = tokens.build_cache(source, tmp_path / "c", tokenizer, enforce_eos=False)
    backend.model = tokenizers.models.WordLevel({"a": 1, "b": 0, "u": 2}, unk_token="u")
    assert tokenizer.encode(["a b"]) == [[1, 0]]
    with pytest.raises(actshard.ExistsError, match="tokenizer"):
        tokens.build_cache(source, tmp_path / "c", tokenizer, enforce_eos=False)
    second = tokens.build_cache(source, tmp_path / "d", tokenizer, enforce_eos=False)
    assert (first[0]["input_ids"].tolist(), second[0]["input_ids"].tolist()) == ([0, 1], [1, 0])


def test_parts_written_in_python_are_refused_where_a_tokenizer_is_serialized(tmp_path: Path) -> None:
    class Custom:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, part: part.split(" ", "removed"))

    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    backend = backend_with()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(Custom())
    with pytest.raises(
        actshard.ArgumentError, match=r"cannot be written as a tokenizer\.json.*[Cc]ustom.*tokenizers library"
    ):
        tokens.build_cache(source, tmp_path / "c", tokens.load_tokenizer(backend), enforce_eos=False)
    backend.enable_padding()
    with pytest.raises(actshard.ArgumentError, match=r"cannot be written as a tokenizer\.json"):
        tokens.load_tokenizer(backend)


def write_cache(
    path: Path, lengths: list[int], weight_lengths: list[int] | None = None, first: int = 0
) -> tokens.TokenCache:
    """A cache of rows of these lengths, with weights."""
    with tokens.CacheWriter(path, {"input_ids": np.int32, "loss_weights": np.float32}) as writer:
        for i, (n, m) in enumerate(zip(lengths, weight_lengths or lengths, strict=True)):
            ids = np.arange(first + i, first + i + n, dtype=np.int32)
            writer.append([{"input_ids": ids, "loss_weights": np.full(m, i % 2, np.float32)}])
    return tokens.open_cache(path)


def test_windows_refuse_weights_of_other_rows(tmp_path: Path) -> None:
    cache = write_cache(tmp_path / "c", [5, 3], [3, 5])
    with pytest.raises(actshard.FormatError, match="the rows of 'input_ids' and 'loss_weights' have different lengths"):
        tokens.TokenSeqDataset(cache, 8, "loss_weights")
    tokens.TokenSeqDataset(cache, 8)


@pytest.mark.parametrize("layout", ["consolidated", "sharded"])
def test_a_pickled_dataset_does_not_read_the_cache_that_replaced_its_own(layout: str, tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "c"

    def build(count: int) -> tokens.TokenCache:
        write_lines(source, [{"input_ids": [count, i]} for i in range(count)])
        return tokens.build_cache(source, out, format="prebuilt", layout=layout, overwrite=True)

    cache = build(30)
    datasets = [tokens.TokenSeqDataset(cache, 4), tokens.PackedTokenDataset(cache, 8)]
    data = [pickle.dumps(each) for each in (cache, *datasets, datasets[1].stream(2, shuffle="block"))]
    assert len(pickle.loads(data[0])) == 30
    shutil.copytree(out, tmp_path / "copy")
    shutil.rmtree(out)
    (tmp_path / "copy").rename(out)  # the same cache, restored
    assert pickle.loads(data[1]).get_batch([0]).tolist() == [[30, 0, 30, 1]]
    build(40)
    for pickled in data:
        with pytest.raises(actshard.FormatError, match="was replaced after it was opened and pickled"):
            pickle.loads(pickled)


def test_a_state_is_of_the_same_settings(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with tokens.CacheWriter(tmp_path / "c", {"input_ids": np.int32, "loss_weights": np.float32}) as writer:
        for i in range(400):
            n, weight = (40, 0.5) if i == 57 else (12, 1.0)  # no sampled example shows the difference
            ids = rng.integers(5, 99, n).astype(np.int32)
            writer.append([{"input_ids": ids, "loss_weights": np.full(n, weight, np.float32)}])
    cache = tokens.open_cache(tmp_path / "c")
    stream = tokens.PackedTokenDataset(cache, 16).stream(4, shuffle="block")
    next(iter(stream))
    state = stream.state_dict()
    tokens.PackedTokenDataset(cache, 16).stream(4, shuffle="block").load_state_dict(state)
    for other in ({"slice_strategy": "right"}, {"loss_weights_key": "loss_weights"}):
        with pytest.raises(actshard.ActshardError):
            tokens.PackedTokenDataset(cache, 16, **other).stream(4, shuffle="block").load_state_dict(state)


def test_settings_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    windows = tokens.TokenSeqDataset(write_cache(tmp_path / "c", [8] * 9), 4)
    streams = [tokens.CausalLmDataset(windows, eos_id=eos).stream(2) for eos in (np.int64(3), 3)]  # type: ignore[arg-type]
    assert streams[0].state_dict() == streams[1].state_dict()


def damaged_cache(folder: Path, layout: str, *, ours: bool = True) -> Path:
    """A cache of two files, without the last data file."""
    for name in "ab":
        write_lines(folder / f"{name}.jsonl", [{"input_ids": [1, 2, 3]}] * 5)
    out = folder / "c"
    tokens.build_cache([folder / "a.jsonl", folder / "b.jsonl"], out, format="prebuilt", layout=layout)
    if not ours:
        for file in out.rglob(ledgers.NAME):
            content = json.loads(file.read_bytes())
            content.pop(ledgers.OURS, None)
            file.write_text(json.dumps(content))
    sorted(out.rglob("data/c/0"))[-1].unlink()
    return out


@pytest.mark.parametrize("layout", ["consolidated", "sharded"])
def test_a_missing_file_of_another_writers_cache_is_a_warning(layout: str, tmp_path: Path) -> None:
    out = damaged_cache(tmp_path, layout, ours=False)
    with pytest.warns(actshard.ActshardWarning, match=r"data/c/0 is missing; the rows read as zeros"):
        assert tokens.open_cache(out)[9]["input_ids"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("layout", ["consolidated", "sharded"])
def test_a_cache_without_a_file_is_not_done_and_can_be_built_again(layout: str, tmp_path: Path) -> None:
    out = damaged_cache(tmp_path, layout)
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with pytest.raises(
        actshard.ExistsError, match=r"is damaged \(.*data/c/0: the file is missing.*pass overwrite=True"
    ):
        tokens.build_cache(sources, out, format="prebuilt", layout=layout)
    cache = tokens.build_cache(sources, out, format="prebuilt", layout=layout, overwrite=True)
    assert cache[9]["input_ids"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("layout", ["consolidated", "sharded"])
@pytest.mark.parametrize("what", ["data", "offsets", "folder"])
def test_an_incomplete_cache_is_not_staged(layout: str, what: str, tmp_path: Path) -> None:
    out = damaged_cache(tmp_path, layout)
    if what == "offsets":
        shutil.rmtree(sorted(out.rglob("offsets/c"))[-1])
    elif what == "folder":
        shutil.rmtree(sorted(out.rglob("input_ids"))[-1])
    with pytest.raises(actshard.MissingFileError, match="is missing, so the cache is incomplete"):
        actshard.stage(out, tmp_path / "staged")
    with pytest.raises(actshard.MissingFileError, match="is missing, so the cache is incomplete"):
        actshard.plan.stage(out, tmp_path / "staged", tasks=2)
    assert not (tmp_path / "staged").exists()


def test_the_shell_shows_the_warnings_of_a_build(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    backend = backend_with()
    backend.enable_truncation(3)
    (tmp_path / "tok").mkdir()
    backend.save(str(tmp_path / "tok" / "tokenizer.json"))
    common = [str(source), "--tokenizer", str(tmp_path / "tok")]
    for command in (
        ["tokenize", *common, "--out", str(tmp_path / "c"), "--quiet"],
        [
            "plan",
            "tokenize",
            *common,
            "--cache",
            str(tmp_path / "d"),
            "-o",
            str(tmp_path / "plan.json"),
            "--no-measure",
        ],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert "actshard: warning: " in done.stderr
        assert "truncates texts to 3 tokens" in " ".join(done.stderr.split())
        assert "no eos token" in " ".join(done.stderr.split())
