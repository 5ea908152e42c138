"""``open(..., incomplete="skip")`` reads what is whole of a growing or damaged folder; detection does not depend on one file."""

from __future__ import annotations

import fcntl
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, refuses

DRAFTS = GOLDEN / "draft"
FOLDERS = {
    "speculators_bf16": "hidden_states/hs_{}.safetensors",
    "specforge_eagle3": "rows_*/data_{}.ckpt",
    "angelslim_eagle3": "rank_0/rows_*/data_{}.ckpt",
    "eagle_v1_vicuna": "0/data_{}.ckpt",
}
"""Golden folders whose files of states are numbered."""


def opened(path: Path, incomplete: str = "skip", format: str | None = None) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, format, incomplete=incomplete)  # type: ignore[arg-type]  # one of the two


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(DRAFTS / name, folder, copy_function=shutil.copyfile)
    return folder


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """The lock of a writer, as vLLM's connector holds it."""
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("name", FOLDERS)
def test_examples_that_are_not_whole_have_no_tokens_and_others_keep_their_numbers(name: str, tmp_path: Path) -> None:
    """The first file is empty, the second one truncated, the third one does not exist."""
    folder, whole = copied(name, tmp_path / "d"), opened(DRAFTS / name, "error")
    files = [next(folder.glob(FOLDERS[name].format(number))) for number in range(3)]
    files[0].write_bytes(b"")
    files[1].write_bytes(files[1].read_bytes()[:-3])
    files[2].unlink()
    for store in (opened(folder), pickle.loads(pickle.dumps(opened(folder)))):
        assert store.token_counts.tolist() == [0, 0, 0, *whole.token_counts.tolist()[3:]]
        assert len(store.table) == len(whole)
        for layer in whole.layers:
            for example in range(3, len(whole)):
                assert np.array_equal(store.sequence(example, layer), whole.sequence(example, layer))
            assert len(store.sequence(0, layer)) == 0
        examples = np.concatenate([batch.examples for batch in store.stream(store.layers[0], 4)])
        assert examples.tolist() == np.repeat(range(len(whole)), store.token_counts).tolist()
    (remark,) = [warning for warning in opened(folder).warnings if warning.code == "examples-left-out"]
    assert remark.startswith(f"3 of {len(whole)} examples are left out")
    assert any(f"{files[1].name}: " in warning for warning in opened(folder).warnings), "names the files"
    with pytest.raises(actshard.ActshardError):
        opened(folder, "error").sequence(0, whole.layers[0])


def test_a_whole_folder_is_the_same_with_skip() -> None:
    for name in FOLDERS:
        store, whole = opened(DRAFTS / name), opened(DRAFTS / name, "error")
        assert store.token_counts.tolist() == whole.token_counts.tolist()
        assert store.warnings == whole.warnings


def test_a_file_whose_lock_is_held_is_being_written(tmp_path: Path) -> None:
    folder = copied("speculators_vllm_requests", tmp_path / "d")
    first, *others = sorted(folder.glob("*.safetensors"))
    first.with_name(f"{first.name}.lock").touch()
    assert not opened(folder, "error").warnings, "a lock that nobody holds is left from a writer that has ended"
    with locked(first):
        store = opened(folder)
        assert store.token_counts[0] == 0
        assert (store.token_counts[1:] > 0).all()
        assert len(store) == 1 + len(others)
        with pytest.raises(actshard.ActshardError, match=rf"{first.name}: is being written"):
            opened(folder, "error").sequence(0, store.layers[0])
    assert (opened(folder).token_counts > 0).all()


def test_other_formats_refuse_skip(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "npy", layers=[0], d_model=2) as writer:
        writer.append(np.zeros((1, 1, 2), np.float32))
    with refuses(
        actshard.ArgumentError, tmp_path / "d", 'incomplete: "skip" is supported for .*speculators.*, not for npy'
    ):
        actshard.open(tmp_path / "d", incomplete="skip")
    with pytest.raises(actshard.ArgumentError, match="incomplete: expected 'error' or 'skip', found 'no'"):
        actshard.open(tmp_path / "d", incomplete="no")  # type: ignore[arg-type]  # wrong on purpose


def test_numbers_far_apart_are_refused(tmp_path: Path) -> None:
    folder = copied("specforge_eagle3", tmp_path / "d")
    file = next(folder.glob("rows_*/data_0.ckpt"))
    shutil.copyfile(file, file.with_name("data_4000000.ckpt"))
    with refuses(actshard.FormatError, folder, "expected at most 65,536 missing numbers, found 3,999,9"):
        opened(folder)


@pytest.mark.parametrize("name", ["modelopt_hf", "speculators_vllm_requests"])
def test_the_first_names_do_not_decide(name: str, tmp_path: Path) -> None:
    """Four files that are being written, and one of another program, come before the others."""
    folder = copied(name, tmp_path / "d")
    ending = ".pt" if name == "modelopt_hf" else ".safetensors"
    files = sorted(folder.glob(f"*{ending}"))
    for number in range(6):
        (folder / f"0{number}{ending}").write_bytes(b"")
    foreign = DRAFTS.parent / "containers"
    other = foreign / "pt_layer_files_f32" if ending == ".pt" else foreign / "st_layer_files_fp8"
    shutil.copyfile(next(other.rglob(f"*{ending}")), folder / f"06{ending}")
    assert len(files) > 2
    store = opened(folder)
    assert store.format == opened(DRAFTS / name, "error").format
    assert (store.token_counts > 0).sum() == len(files)
