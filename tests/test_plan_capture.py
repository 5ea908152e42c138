"""Guarantees of actshard.plan.capture: the rows of one capture for any number of tasks, whatever was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.plan import capturing
from conftest import refuses

WIDTH, N, BATCH = 8, 200, 16
TABLE = np.random.default_rng(0).standard_normal((500, WIDTH)).astype(np.float32)
CALLS: list[tuple[int, int]] = []
"""Shapes of the batches that this process computed."""
PLACES = {"shard_index", "row_offset", "token_offset", "sample_idx"}
"""Columns of formats that number the examples of each part, or name files."""
BREAKS = "ACTSHARD_TEST_BREAKS"
"""Environment variable: number of the call that fails, or after which the process kills itself if it is negative."""


def states(ids: np.ndarray, mask: np.ndarray) -> dict[actshard.Layer, np.ndarray]:
    """States that depend on the token, its position and the shape of the batch, so that other batches give other rows."""
    CALLS.append(ids.shape)
    breaks = int(os.environ.get(BREAKS, "0"))
    if breaks and len(CALLS) == abs(breaks):
        if breaks < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the model broke")
    x = TABLE[ids]
    x[~mask] = np.nan
    shape = np.float32(ids.shape[0] * 1000 + ids.shape[1]) if len(ids) > 1 else np.float32(0)
    return {0: x, 3: np.cumsum(x, axis=1) + shape}


def even_tokens(example: actshard.writing.capturing.Example) -> Any:
    return example.ids % 2 == 0


def words(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    file = tmp_path / "texts.jsonl"
    rows = [{"text": " ".join(map(str, rng.integers(0, 500, rng.integers(1, 30)))), "label": i % 3} for i in range(N)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def planned(texts: Path, path: Path, format: str = "zarr", tasks: int = 5, **more: Any) -> capturing.CapturePlan:
    arguments: dict[str, Any] = {"tokenizer": words, "batch_tokens": BATCH, **more}
    return actshard.plan.capture(states, texts, path, format, tasks=tasks, **arguments)


def finish(plan: actshard.plan.Plan) -> Path:
    for task in reversed(range(len(plan))):
        plan.run(task)
    path: Path = plan.commit()
    return path


def check_equal(path: Path, other: Path) -> None:
    """The same rows, bit for bit, and columns; places in files are those of the parts."""
    store, expected = actshard.open(path), actshard.open(other)
    assert len(store) == len(expected) == N
    assert store.layers == expected.layers
    for example in range(N):
        for layer in store.layers:
            assert np.array_equal(store.sequence(example, layer), expected.sequence(example, layer)), (example, layer)
    names = set(store.table.column_names) - PLACES
    assert names == set(expected.table.column_names) - PLACES
    for name in names:
        assert store.table[name].equals(expected.table[name]), name
    assert actshard.verify(path).ok


@pytest.mark.parametrize("format", ["zarr", "lmprobe", "pickle"])
def test_any_number_of_tasks_computes_the_batches_and_rows_of_one_capture(
    texts: Path, tmp_path: Path, format: str
) -> None:
    arguments: dict[str, Any] = {"tokenizer": words, "batch_tokens": BATCH}
    if format == "lmprobe":
        arguments["options"] = {"storage": "full_sequence"}
    one = actshard.capture(states, texts, tmp_path / "one", format, **arguments)
    for tasks in (1, 3):
        plan = planned(texts, tmp_path / f"d{tasks}", format, tasks, **arguments)
        assert len(plan) == tasks
        check_equal(finish(plan), one.path)
        assert plan.commit() == tmp_path / f"d{tasks}", "a repeated commit returns the same"
        assert not list((tmp_path / f"d{tasks}").rglob(".actshard")) + list((tmp_path / f"d{tasks}").rglob(".parts"))
        written = sum(p.stat().st_size for p in (tmp_path / f"d{tasks}").rglob("*") if "label" not in str(p))
        assert plan.predicted.bytes <= written


@pytest.mark.parametrize("tokens", ["last", "mean", [0], "test_plan_capture:even_tokens", even_tokens])
def test_chosen_tokens_are_those_of_one_capture(texts: Path, tmp_path: Path, tokens: Any) -> None:
    function = even_tokens if isinstance(tokens, str) and ":" in tokens else tokens
    with pytest.warns(actshard.ActshardWarning) if callable(function) else _silent():
        arguments: dict[str, Any] = {"tokenizer": words, "batch_tokens": BATCH}
        one = actshard.capture(states, texts, tmp_path / "one", "zarr", tokens=function, **arguments)
        path = finish(planned(texts, tmp_path / "d", tokens=tokens))
    check_equal(path, one.path)


def _silent() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_a_constant_number_of_rows_is_that_of_all_texts(texts: Path, tmp_path: Path) -> None:
    with refuses(actshard.ArgumentError, None, "rows? for every example"):
        planned(texts, tmp_path / "dumps", "saev")
    path = finish(planned(texts, tmp_path / "dumps", "saev", tokens="last"))
    one = actshard.capture(states, texts, tmp_path / "one", "saev", tokens="last", tokenizer=words, batch_tokens=BATCH)
    store, expected = actshard.open(path), actshard.open(one.path)
    assert np.array_equal(store.last_tokens(3), expected.last_tokens(3))


def test_tasks_are_balanced_by_tokens(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    lengths = [200] * 20 + [4] * 1000
    file.write_text("".join(json.dumps({"input_ids": list(range(n))}) + "\n" for n in lengths))
    plan = actshard.plan.capture(states, file, tmp_path / "d", tasks=2, batch_tokens=32)
    (first, end), (_, last) = [task["examples"] for task in plan.tasks]
    assert (first, last) == (0, 1020)
    assert 20 <= end < 270, "half of the tokens are those of the first 20 examples"


def test_few_texts_give_fewer_tasks_and_a_note_says_why(texts: Path, tmp_path: Path) -> None:
    plan = planned(texts, tmp_path / "d", tasks=64, batch_tokens=1000)
    assert len(plan) == 1
    assert plan.notes == (
        "1 task instead of 64: the texts fill 1 window of 32 batches; smaller batch_tokens= allow more",
    )


def test_a_plan_is_data(texts: Path, tmp_path: Path) -> None:
    plan = planned(texts, tmp_path / "d")
    again = actshard.plan.load(plan.save(tmp_path / "plan.json"))
    assert type(again) is capturing.CapturePlan
    assert again == plan == planned(texts, tmp_path / "d")
    assert again.id != planned(texts, tmp_path / "d", dtype="float16").id
    assert not (tmp_path / "d").exists(), "nothing is written"
    again.run(1)
    assert planned(texts, tmp_path / "d").status().done == (1,)
    finish(again)
    with refuses(actshard.ExistsError, tmp_path / "d"):
        planned(texts, tmp_path / "d")
    assert planned(texts, tmp_path / "d", exist_ok=True).status().committed
    with refuses(actshard.ExistsError, tmp_path / "d"):
        planned(texts, tmp_path / "d", exist_ok=True, dtype="float16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan["arguments"]["settings"].pop("batch_tokens"), "batch_tokens"),
        (lambda plan: plan["arguments"]["settings"].update(texts=["relative"]), "texts"),
        (lambda plan: plan["arguments"]["creation"].update(format="npy"), "cannot be written in parts"),
        (lambda plan: plan["arguments"].update(computes=[]), "computes"),
        (lambda plan: plan["tasks"].pop(), "examples"),
    ],
)
def test_a_plan_with_other_fields_is_refused(
    change: Callable[[Any], object], message: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = planned(texts, tmp_path / "d").as_dict()
    change(value)
    file = tmp_path / "plan.json"
    changed = capturing.CapturePlan(
        "capture",
        value["arguments"],
        tuple(actshard.reading.inputs.Input(*item) for item in value["inputs"]),
        tuple(value["tasks"]),
        actshard.plan.Predicted(**value["predicted"]),
        Path(value["work"]),
    )
    changed.save(file)
    with refuses(actshard.FormatError, file, message):
        actshard.plan.load(file)


def test_a_task_that_failed_continues_after_its_committed_examples(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finish(planned(texts, tmp_path / "whole", tasks=1))
    plan = planned(texts, tmp_path / "d", tasks=1)
    CALLS.clear()
    monkeypatch.setenv(BREAKS, "170")
    with pytest.raises(actshard.ActshardError, match="the model broke"):
        plan.run(0)
    assert plan.status().failed.keys() == {0}
    monkeypatch.delenv(BREAKS)
    CALLS.clear()
    again = actshard.plan.load(plan.save(tmp_path / "plan.json"))
    again.run(0)
    assert len(CALLS) < 170, "committed windows are not computed again"
    check_equal(again.commit(), whole)


SCRIPT = """
import sys
import actshard
actshard.plan.load(sys.argv[1]).run(int(sys.argv[2]))
"""


def test_killed_tasks_lose_and_repeat_nothing(texts: Path, tmp_path: Path) -> None:
    whole = finish(planned(texts, tmp_path / "whole", tasks=1))
    plan = planned(texts, tmp_path / "d", tasks=2)
    file = plan.save(tmp_path / "plan.json")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    for breaks in ("-40", "-60"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(file), "0"],
            env={**environment, BREAKS: breaks},
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        with refuses(actshard.UnfinishedError, tmp_path / "d"):
            actshard.open(tmp_path / "d")
    check_equal(finish(plan), whole)


def test_other_texts_are_refused_by_each_task(texts: Path, tmp_path: Path) -> None:
    plan = planned(texts, tmp_path / "d")
    stat = texts.stat()
    content = texts.read_text()
    texts.write_text(content.replace('"label": 0', '"label": 2', 1))
    with refuses(actshard.ChangedInputError, texts):
        plan.run(0)
    os.utime(texts, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with refuses(actshard.ChangedInputError, plan.work, "texts: expected"):
        plan.run(0)
    texts.write_text(content)
    os.utime(texts, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    finish(plan)


def test_another_tokenizer_is_refused_by_each_task(texts: Path, tmp_path: Path) -> None:
    import tokenizers

    folder = tmp_path / "tokenizer"
    folder.mkdir()

    def save(unknown: int) -> None:
        vocabulary = {str(i): i for i in range(500) if i != unknown} | {"[UNK]": unknown}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))

    save(7)
    plan = planned(texts, tmp_path / "d", tokenizer=folder)
    save(8)
    with refuses(actshard.ChangedInputError, plan.work, "tokenizer_digest: expected"):
        plan.run(0)
    save(7)
    finish(plan)


def test_empty_examples_are_noted_by_the_plan_and_named_by_the_commit(texts: Path, tmp_path: Path) -> None:
    with texts.open("a") as file:
        file.write('{"text": "", "label": 1}\n')
    plan = planned(texts, tmp_path / "d")
    assert plan.notes == (f"1 example will be empty: example {N}: its text is empty",)
    for task in range(len(plan)):
        plan.run(task)
    with pytest.warns(actshard.ActshardWarning, match=f"1 example of {N + 1} is empty: example {N}: its text is empty"):
        plan.commit()
    assert actshard.open(tmp_path / "d").table["problem"][N].as_py() == "its text is empty"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"texts": ["1 2"]}, "texts: expected files, because tasks in other processes read them"),
        ({"model": lambda ids, mask: {0: TABLE[ids]}}, "model: expected a function that other processes can import"),
        ({"model": "test_plan_capture:nothing"}, "model: cannot import 'test_plan_capture:nothing'"),
        ({"tokenizer": lambda text: [1]}, "tokenizer: expected a function that other processes can import"),
        ({"tokens": lambda example: [0]}, "tokens: expected a function that other processes can import"),
        ({"tokens": "lsat"}, "tokens: expected all, content, last, mean"),
        ({"format": "safetensors"}, "safetensors datasets cannot be written in parts"),
        ({"tasks": 0}, "tasks"),
        ({"device": "cuda"}, "device: expected the name of a model with it"),
    ],
)
def test_what_other_processes_cannot_load_is_refused(
    arguments: dict[str, Any], message: str, texts: Path, tmp_path: Path
) -> None:
    given = {"model": states, "texts": texts, "path": tmp_path / "d", "tokenizer": words, **arguments}
    with pytest.raises(actshard.ArgumentError) as caught:
        actshard.plan.capture(**given)
    assert message in str(caught.value)
    assert not (tmp_path / "d").exists()


def test_a_capture_by_commands_alone(texts: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}

    def command(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "actshard", *arguments],
            env=environment,
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    told = command(
        "plan", "capture", "test_plan_capture:states", texts.name, "d", "--tokenizer", "test_plan_capture:words",
        "--tasks", "2", "--batch-tokens", str(BATCH), "--layers", "3", "-o", "plan.json",
    )  # fmt: skip
    assert "capture in 2 tasks" in told
    assert "not measured: the time depends on the model" in told
    assert command("run", "plan.json").endswith(f"{tmp_path / 'd'}: capture in 2 tasks, committed\n")
    one = actshard.capture(states, texts, tmp_path / "one", "zarr", layers=[3], tokenizer=words, batch_tokens=BATCH)
    check_equal(tmp_path / "d", one.path)


@pytest.mark.peers
def test_tasks_load_a_model_from_its_folder_and_refuse_other_weights(tmp_path: Path) -> None:
    import torch
    import transformers

    from capture_models import sentences, trained_tokenizer

    torch.manual_seed(0)
    folder = tmp_path / "model"
    tokenizer = trained_tokenizer()
    settings = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 400, "n_positions": 128}
    model = transformers.GPT2Model(transformers.GPT2Config(**settings))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(sentences(300)) + "\n")
    plan = actshard.plan.capture(folder, file, tmp_path / "d", tasks=3, layers=[0, 2], batch_tokens=64, device="cpu")
    assert len(plan) == 3
    path = finish(actshard.plan.load(plan.save(tmp_path / "plan.json")))
    one = actshard.capture(folder, file, tmp_path / "one", "zarr", layers=[0, 2], batch_tokens=64, device="cpu")
    alone = actshard.capture(folder, file, tmp_path / "alone", "zarr", layers=[0, 2], batch_tokens=1, device="cpu")
    store, same, single = actshard.open(path), actshard.open(one.path), actshard.open(alone.path)
    for example in range(300):
        assert np.array_equal(store.sequence(example, 2), same.sequence(example, 2))
        np.testing.assert_allclose(store.sequence(example, 2), single.sequence(example, 2), atol=1e-5, rtol=1e-4)
    other = actshard.plan.capture(folder, file, tmp_path / "e", tasks=3, layers=[0, 2], batch_tokens=64, device="cpu")
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight += 0.01
    model.save_pretrained(folder)
    with refuses(actshard.ChangedInputError, other.work, "weights: expected"):
        other.run(0)
