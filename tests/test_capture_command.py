"""``actshard capture``: the options reach the function, results and errors are printed; a missing library names its extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import actshard
from actshard.base.errors import ActshardError
from actshard.cli import app
from conftest import refuses

MODULE = """
import numpy as np

def states(ids, mask):
    x = np.repeat(ids[:, :, None], 4, axis=2).astype(np.float32)
    return {0: x, 1: 2 * x, 2: 3 * x}
"""
ROWS = [{"input_ids": [5, 6, 7], "label": 1}, {"input_ids": [8], "label": 0}, {"input_ids": [9, 10], "label": 1}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module and a file of token ids."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "client_of_a_model.py").write_text(MODULE)
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.delitem(sys.modules, "client_of_a_model", raising=False)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["capture", *words])


def test_a_function_is_captured_and_the_result_printed(folder: Path) -> None:
    done = run("client_of_a_model:states", "ids.jsonl", "acts", "--layers", "0-1", "-q")
    assert done.exit_code == 0, done.output
    assert "acts: safetensors, 3 examples, 2 layers (0, 1), d_model 4, float32" in done.output
    assert "6 tokens, 6 rows per layer, 192 B" in done.output
    store = actshard.open("acts")
    assert store.layers == (0, 1)
    assert np.array_equal(store.sequence(2, 1)[:, 0], [18, 20])
    assert store.table["label"].to_pylist() == [1, 0, 1]


def test_options_reach_the_capture(folder: Path) -> None:
    words = [
        "--to",
        "zarr",
        "--tokens",
        "0",
        "--dtype",
        "float16",
        "--columns",
        "none",
        "--max-tokens",
        "2",
        "--truncate",
    ]
    done = run("client_of_a_model:states", "ids.jsonl", "acts", *words, "--batch-tokens", "4", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["format"], result["dtype"], result["rows"], result["layers"]) == ("zarr", "float16", 3, [0, 1, 2])
    store = actshard.open("acts")
    assert "label" not in store.table.column_names
    assert store.table["text_tokens"].to_pylist() == [2, 1, 2]


def test_empty_examples_are_printed_and_exit_with_1(folder: Path) -> None:
    done = run("client_of_a_model:states", "ids.jsonl", "acts", "--max-tokens", "2", "-q")
    assert done.exit_code == 1
    assert "1 example is empty:\n    example 0: it has 3 tokens, more than 2" in done.output


def test_an_estimate_prints_and_writes_nothing(folder: Path) -> None:
    done = run("client_of_a_model:states", "ids.jsonl", "acts", "--estimate", "--max-tokens", "2")
    assert done.exit_code == 0
    assert "would write" in done.output
    assert "1 example would be empty" in done.output
    assert not (folder / "acts").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["client_of_a_model:state", "ids.jsonl", "acts"], "expected MODULE:FUNCTION"),
        (["nothing_here:states", "ids.jsonl", "acts"], "No module named 'nothing_here'"),
        (["client_of_a_model:states", "no.jsonl", "acts"], "expected a file, or a glob that matches files"),
        (["client_of_a_model:states", "ids.jsonl", "acts", "--layers", "7"], "layer 7 is not in the function's result"),
        (["client_of_a_model:states", "ids.jsonl", "acts", "--tokens", "lst"], "expected all, content, last, mean"),
        (["client_of_a_model:states", "ids.jsonl", "acts", "--part", "1"], "part: expected I/N"),
        (["client_of_a_model:states", "ids.jsonl", "acts", "--on-nonfinite", "x"], "expected refuse or count"),
        (["client_of_a_model:states", "ids.jsonl", "."], "expected no folder or an empty one"),
    ],
)
def test_wrong_words_are_one_error_before_anything_is_written(words: list[str], message: str, folder: Path) -> None:
    done = run(*words, "-q")
    assert done.exit_code != 0
    assert isinstance(done.exception, ActshardError)
    assert message in str(done.exception)
    assert not (folder / "acts").exists()


def test_a_finished_dataset_is_refused_before_the_model_runs(folder: Path) -> None:
    assert run("client_of_a_model:states", "ids.jsonl", "acts", "-q").exit_code == 0

    def never(ids: np.ndarray, mask: np.ndarray) -> dict[actshard.Layer, np.ndarray]:
        raise AssertionError

    with refuses(
        actshard.ExistsError, folder / "acts", r"already contains a finished dataset. Pass resume=True \(--resume\)"
    ):
        actshard.capture(never, [[1]], "acts")
    assert run("client_of_a_model:states", "ids.jsonl", "acts", "-q", "--resume").exit_code == 0


def test_parts_of_ranks_are_merged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        done = run("client_of_a_model:states", "ids.jsonl", "acts", "--to", "zarr", "--part", "auto", "-q")
        assert done.exit_code == 0, (done.output, done.exception)
    store = actshard.open(actshard.merge("acts"))
    assert [store.sequence(i, 0)[0, 0] for i in range(3)] == [5, 8, 9]


def test_ranks_that_are_no_numbers_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "x")
    done = run("client_of_a_model:states", "ids.jsonl", "acts", "--to", "zarr", "--part", "auto", "-q")
    assert isinstance(done.exception, ActshardError)
    assert "part: expected integers in RANK and WORLD_SIZE, found 'x' and '1'" in str(done.exception)


def test_info_shows_the_model(folder: Path) -> None:
    for format in ("safetensors", "zarr"):
        run("client_of_a_model:states", "ids.jsonl", format, "--to", format, "-q")
        shown = CliRunner().invoke(app, ["info", format, "--json"])
        assert json.loads(shown.stdout)["model"] == "function client_of_a_model.states"


def test_without_torch_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["torch"] = None
import actshard
try:
    actshard.capture("some/model", ["a text"], "never")
except actshard.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'actshard[capture]'" in done.stdout


def test_columns_are_named_and_not_renamed() -> None:
    from actshard.cli.capture import columns_chosen

    assert columns_chosen("") is None
    assert columns_chosen("none") == []
    assert columns_chosen("label,text") == ["label", "text"]
    with pytest.raises(actshard.ArgumentError, match="found label=y: columns are not renamed"):
        columns_chosen("text,label=y")
