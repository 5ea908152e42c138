"""A local file that is written or replaced while a store is open is not read with what was known of the old one."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import actshard


def save_safetensors(path: Path, rows: NDArray[np.generic]) -> None:
    """As safetensors does: the file is truncated and written in place."""
    name = {"float16": "F16", "float32": "F32"}[rows.dtype.name]
    header = {"acts": {"dtype": name, "shape": list(rows.shape), "data_offsets": [0, rows.nbytes]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rows.tobytes())


def replace(path: Path, rows: NDArray[np.generic], save: Callable[[Path, NDArray[np.generic]], None]) -> None:
    """As a careful writer does: another file takes the name."""
    save(path.with_name(f"new-{path.name}"), rows)
    path.with_name(f"new-{path.name}").replace(path)


@pytest.mark.parametrize("io", ["pread", "mmap"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("suffix", "save"), [("npy", np.save), ("safetensors", save_safetensors)])
def test_a_file_that_is_saved_again_is_not_read_with_the_old_header(
    suffix: str, save: Callable[[Path, NDArray[np.generic]], None], in_place: bool, io: str, tmp_path: Path
) -> None:
    path = tmp_path / f"0.{suffix}"
    save(path, np.zeros((64, 8), np.float16))
    axes = {"files": "{example:d}." + suffix, "axes": ["token", "dim"]}
    layout = {"version": 1, "activations": axes | ({} if suffix == "npy" else {"tensor": "acts"})}
    store = actshard.open(tmp_path, layout=layout, io=io)
    assert not store.gather(0, [0], [1]).any()
    rows = np.ones((64, 8), np.float32)
    if in_place:
        save(path, rows)
    else:
        replace(path, rows, save)
    for read in (
        lambda: store.gather(0, [0], [1]),
        lambda: store.gather(0, [0] * 9, range(9)),
        lambda: store.sequence(0, 0),
    ):
        with pytest.raises(actshard.FormatError, match="was replaced after it was opened"):
            read()
    assert actshard.open(tmp_path, layout=layout, io=io).gather(0, [0], [1]).all()


def test_chunks_that_are_replaced_are_not_mixed_with_others(tmp_path: Path) -> None:
    rows = np.zeros((4, 2, 8), np.float32)
    with actshard.create(tmp_path / "a.zarr", "zarr", layers=[0], d_model=8, dtype="float32") as writer:
        writer.append(rows[:, None])
    store = actshard.open(tmp_path / "a.zarr")
    assert not store.gather(0, range(4), [0]).any()
    chunks = [
        path
        for path in (tmp_path / "a.zarr" / "arrays" / "activations").rglob("*")
        if path.is_file() and not path.name.startswith((".z", "zarr"))
    ]
    for path in chunks:
        replace(path, np.ones(path.stat().st_size // 4, np.float32), lambda path, rows: rows.tofile(path))
    with pytest.raises(actshard.FormatError, match="was replaced after it was opened"):
        store.gather(0, range(4), [0])


def test_raw_rows_may_grow_while_they_are_read(tmp_path: Path) -> None:
    np.zeros((4, 8), np.float16).tofile(tmp_path / "0.bin")
    activations = {"files": "{example:d}.bin", "axes": ["token", "dim"], "dtype": "float16", "shape": [-1, 8]}
    store = actshard.open(tmp_path, layout={"version": 1, "activations": activations})
    assert store.gather(0, [0], [1]).shape == (1, 8)
    with (tmp_path / "0.bin").open("ab") as file:
        file.write(bytes(160))
    assert store.gather(0, [0], [1]).shape == (1, 8)
