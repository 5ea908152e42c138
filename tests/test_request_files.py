"""Guarantees of actshard.compat.vllm.fold: each whole request file once, its rows its own; files being written are waited for."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import actshard
from actshard.compat import vllm
from conftest import GOLDEN, refuses

WIDTH, LAYERS = 8, ("0", "1", "last")


def states(request: int) -> np.ndarray:
    """The states of a request: ``(tokens, layers, d_model)``."""
    rng = np.random.default_rng(request)
    return rng.standard_normal((2 + request % 5, len(LAYERS), WIDTH)).astype(ml_dtypes.bfloat16)


def content(array: np.ndarray) -> bytes:
    ids = np.arange(len(array), dtype=np.int64)
    fields = {
        "hidden_states": {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [0, array.nbytes]},
        "token_ids": {"dtype": "I64", "shape": [len(ids)], "data_offsets": [array.nbytes, array.nbytes + ids.nbytes]},
    }
    head = json.dumps(fields).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + array.tobytes() + ids.tobytes()


def write(folder: Path, request: int) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"cmpl-{request}.safetensors"
    file.write_bytes(content(states(request)))
    return file


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """The lock of a writer, as vLLM's connector holds it."""
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check(path: Path, requests: list[int]) -> None:
    """These requests in this order, each with its own rows and ids."""
    store = actshard.open(path)
    assert store.table["request"].to_pylist() == [f"cmpl-{request}" for request in requests]
    for example, request in enumerate(requests):
        expected = states(request)
        assert store.table["input_ids"][example].as_py() == list(range(len(expected)))
        for number, layer in enumerate(LAYERS):
            assert np.array_equal(store.sequence(example, layer), expected[:, number])
    assert actshard.verify(path).ok


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    folder = tmp_path / "requests"
    for request in (10, 2, 33, 1):
        write(folder, request)
    return folder


def test_requests_are_in_the_order_of_their_numbers_with_their_rows(requests: Path, tmp_path: Path) -> None:
    done = vllm.fold(requests, tmp_path / "d")
    assert (done.examples, done.finished, done.leftovers) == (4, True, ())
    check(done.path, [1, 2, 10, 33])
    assert len(list(requests.iterdir())) == 4, "nothing is deleted"


@pytest.mark.parametrize("name", ["speculators_vllm_requests", "speculators_fp8/hidden_states"])
def test_rows_are_those_that_opening_the_folder_reads(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    shutil.copytree(GOLDEN / "draft" / name, folder)
    original = actshard.open(folder)
    store = actshard.open(vllm.fold(folder, tmp_path / "d").path)
    assert len(store) == len(original)
    by_request = dict(zip(store.table["request"].to_pylist(), range(len(store)), strict=True))
    for example, file in enumerate(sorted(folder.glob("*.safetensors"))):
        for layer in original.layers:
            rows = original.sequence(example, layer)
            assert np.array_equal(store.sequence(by_request[file.stem], str(layer)), rows)


def test_layers_are_named_and_other_dtypes_written_as_asked(requests: Path, tmp_path: Path) -> None:
    done = vllm.fold(requests, tmp_path / "d", "zarr", layers=[2, 18, 33], dtype="float32")
    store = actshard.open(done.path)
    assert store.layers == (2, 18, 33)
    assert np.array_equal(store.sequence(0, 18), states(1)[:, 1].astype(np.float32))
    with refuses(actshard.ArgumentError, None, "layers: expected 3 names"):
        vllm.fold(requests, tmp_path / "e", layers=[2, 18])


def test_files_with_a_held_lock_and_short_ones_wait(requests: Path, tmp_path: Path) -> None:
    whole = content(states(5))
    (requests / "cmpl-5.safetensors").write_bytes(whole[:-3])
    (requests / "cmpl-7.safetensors").touch()
    (requests / "cmpl-1.safetensors.lock").touch()  # left from a writer that has ended
    with locked(requests / "cmpl-10.safetensors"):
        state = vllm.fold(requests, tmp_path / "d")
    assert (state.examples, state.finished) == (3, False)
    assert [item.request for item in state.leftovers] == ["cmpl-5", "cmpl-7", "cmpl-10"]
    assert state.leftovers[2].reason == "it is being written"
    with refuses(actshard.UnfinishedError, tmp_path / "d"):
        actshard.open(tmp_path / "d")
    (requests / "cmpl-5.safetensors").write_bytes(whole)
    write(requests, 7)
    done = vllm.fold(requests, tmp_path / "d", resume=True)
    assert (done.examples, done.resumed_at, done.finished, done.leftovers) == (6, 3, True, ())
    check(done.path, [1, 2, 33, 5, 7, 10])
    assert vllm.fold(requests, tmp_path / "d", resume=True).finished, "a finished dataset is accepted"


def test_a_dataset_is_finished_without_truncated_files_only_if_asked(requests: Path, tmp_path: Path) -> None:
    (requests / "cmpl-5.safetensors").write_bytes(content(states(5))[:-3])
    other = np.zeros((2, 2, WIDTH), ml_dtypes.bfloat16)
    (requests / "cmpl-6.safetensors").write_bytes(content(other))
    assert not vllm.fold(requests, tmp_path / "d").finished
    with pytest.warns(
        actshard.ActshardWarning, match="2 request files are not in the dataset: cmpl-5: .*; cmpl-6: exp"
    ):
        done = vllm.fold(requests, tmp_path / "d", resume=True, incomplete="skip")
    assert done.finished
    check(done.path, [1, 2, 10, 33])


def test_following_folds_files_while_they_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()

    def serve() -> None:
        for request in range(6):
            file = folder / f"cmpl-{request}.safetensors"
            with locked(file):
                file.touch()
                time.sleep(0.05)
                whole = content(states(request))
                file.write_bytes(whole[:200])
                time.sleep(0.05)
                file.write_bytes(whole)
            file.with_name(f"{file.name}.lock").unlink()

    server = threading.Thread(target=serve)
    server.start()
    done = vllm.fold(folder, tmp_path / "d", follow=True, idle=3)
    server.join()
    assert (done.examples, done.finished) == (6, True)
    check(done.path, list(range(6)))


def test_ctrl_c_keeps_committed_examples_and_resume_goes_on(requests: Path, tmp_path: Path) -> None:
    def stop(state: vllm.Fold) -> None:
        raise KeyboardInterrupt

    state = vllm.fold(requests, tmp_path / "d", follow=True, progress=stop)
    assert (state.examples, state.finished) == (4, False)
    write(requests, 40)
    done = vllm.fold(requests, tmp_path / "d", resume=True)
    assert (done.examples, done.resumed_at) == (5, 4)
    check(done.path, [1, 2, 10, 33, 40])


SCRIPT = """
import os, signal, sys
from actshard.writing.capturing import request_files
from actshard.compat import vllm
from actshard.writing import Writer
request_files._BLOCK = 1
flush, calls = Writer.flush, []
def killing(writer):
    calls.append(0)
    if len(calls) == 3 and sys.argv[3] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    count = flush(writer)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return count
Writer.flush = killing
vllm.fold(sys.argv[1], sys.argv[2], delete=sys.argv[4] == "delete")
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("files", ["keep", "delete"])
def test_a_killed_fold_loses_and_repeats_nothing(requests: Path, tmp_path: Path, moment: str, files: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(requests), str(tmp_path / "d"), moment, files],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    fold = vllm.fold(requests, tmp_path / "d", resume=True, delete=files == "delete")
    assert fold.resumed_at == (2 if moment == "before" else 3)
    check(fold.path, [1, 2, 10, 33])
    assert len(list(requests.iterdir())) == (0 if files == "delete" else 4)


def test_deleted_are_committed_files_only(requests: Path, tmp_path: Path) -> None:
    (requests / "cmpl-5.safetensors").write_bytes(content(states(5))[:-3])
    (requests / "cmpl-1.safetensors.lock").touch()
    vllm.fold(requests, tmp_path / "d", delete=True)
    left = sorted(file.name for file in requests.iterdir())
    assert left == ["cmpl-33.safetensors", "cmpl-5.safetensors"], "the last one names the shape to a resumed call"
    write(requests, 5)
    check(vllm.fold(requests, tmp_path / "d", delete=True, resume=True).path, [1, 2, 10, 33, 5])
    assert not list(requests.iterdir())


def test_another_file_of_a_committed_request_is_refused(requests: Path, tmp_path: Path) -> None:
    (requests / "cmpl-5.safetensors").touch()
    vllm.fold(requests, tmp_path / "d")
    (requests / "cmpl-2.safetensors").write_bytes(content(states(3)))
    with refuses(actshard.ChangedInputError, requests / "cmpl-2.safetensors", "as when its example was committed"):
        vllm.fold(requests, tmp_path / "d", resume=True)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"requests": "absent"}, actshard.MissingFileError, "expected a folder of request files"),
        ({"format": "saev", "layers": [0, 1, 2], "dtype": "float32"}, actshard.ArgumentError, "stores no columns"),
        ({"incomplete": "ignore"}, actshard.ArgumentError, "incomplete"),
        ({"idle": -1}, actshard.ArgumentError, "idle"),
        ({"follow": "yes"}, actshard.ArgumentError, "follow"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: dict[str, Any], kind: type[Exception], message: str, requests: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind) as caught:
        vllm.fold(**{"requests": requests, "path": tmp_path / "d", **arguments})
    assert message in str(caught.value)


def test_a_folder_without_whole_files_is_an_error_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "cmpl-1.safetensors").write_bytes(b"12")
    with refuses(actshard.UnfinishedError, tmp_path, "expected request files that are whole, found cmpl-1: "):
        vllm.fold(tmp_path, tmp_path / "d")


def test_the_command_folds_names_what_waits_and_resumes(requests: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from actshard.cli import app

    file = requests / "cmpl-5.safetensors"
    file.write_bytes(content(states(5))[:-3])
    words = ["capture", "--from-vllm", str(requests), str(tmp_path / "d")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert "4 requests; unfinished: --resume continues" in result.output
    assert "cmpl-5: " in result.output
    write(requests, 5)
    result = CliRunner().invoke(app, [*words, "--resume", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["examples"] == 5
    check(tmp_path / "d", [1, 2, 10, 33, 5])
    for wrong in ([*words, "third"], ["capture", "gpt2", "texts.txt"]):
        assert isinstance(CliRunner().invoke(app, wrong).exception, actshard.ArgumentError)


@pytest.mark.parametrize(
    "words", [["--estimate", "--delete"], ["--tokens", "last"], ["--columns", "none"], ["--part", "0/2"]]
)
def test_options_of_other_captures_are_refused_and_no_file_is_written_or_removed(
    requests: Path, tmp_path: Path, words: list[str]
) -> None:
    from typer.testing import CliRunner

    from actshard.cli import app

    before = sorted(requests.iterdir())
    result = CliRunner().invoke(app, ["capture", "--from-vllm", str(requests), str(tmp_path / "d"), *words])
    assert isinstance(result.exception, actshard.ArgumentError)
    assert f"{words[0]}: has no effect with --from-vllm" in str(result.exception)
    assert sorted(requests.iterdir()) == before
    assert not (tmp_path / "d").exists()
