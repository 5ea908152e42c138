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


LENGTHS = [3, 5, 2, 4, 6, 1]


def values(tag: int, layer: int, example: int, tokens: int) -> NDArray[np.float64]:
    """Rows that name their dataset, layer, example and token; all are exact in float32."""
    return tag * 10_000 + layer * 1_000 + example * 100 + np.arange(tokens)[:, None] * 10 + np.arange(8) / 8


def write(path: Path, format: str, tag: int, lengths: list[int], dtype: str) -> None:
    with actshard.create(path, format, layers=[0, 1], d_model=8, dtype=dtype) as writer:
        for example, tokens in enumerate(lengths):
            writer.append(np.stack([values(tag, layer, example, tokens) for layer in (0, 1)])[None].astype(dtype))


def write_files(path: Path, suffix: str, tag: int, lengths: list[int], dtype: str) -> dict[str, object]:
    """A file per example, and its layout."""
    path.mkdir()
    for example, tokens in enumerate(lengths):
        rows = np.stack([values(tag, layer, example, tokens) for layer in (0, 1)]).astype(dtype)
        match suffix:
            case "npy":
                np.save(path / f"{example}.npy", rows)
            case "fortran.npy":
                np.save(path / f"{example}.fortran.npy", np.asfortranarray(rows))
            case "npz":
                np.savez_compressed(path / f"{example}.npz", acts=rows)
            case _:
                rows.tofile(path / f"{example}.bin")
    activations: dict[str, object] = {
        "files": "{example:d}." + suffix,
        "axes": ["layer", "token", "dim"],
        "layers": [0, 1],
    }
    activations |= {"tensor": "acts"} if suffix == "npz" else {}
    activations |= {"dtype": dtype, "shape": [2, -1, 8]} if suffix == "bin" else {}
    return {"version": 1, "activations": activations}


def take_names(old: Path, new: Path) -> None:
    """Each file of the new dataset takes the name of an old one."""
    for path in sorted(new.rglob("*")):
        if path.is_file():
            path.replace(old / path.relative_to(new))


def reads(store: actshard.Store, tag: int) -> int:
    """How many examples are read; each must be as it was when the dataset was opened, or an error."""
    count = 0
    for layer in (0, 1):
        for example, tokens in enumerate(LENGTHS):
            try:
                rows = store.sequence(example, layer)
            except (actshard.FormatError, actshard.TruncatedFileError):
                continue
            np.testing.assert_array_equal(rows.astype(np.float64), values(tag, layer, example, tokens))
            count += 1
    return count


@pytest.mark.parametrize("io", ["pread", "mmap"])
@pytest.mark.parametrize(
    ("lengths", "dtype"), [(LENGTHS[::-1], "float32"), (LENGTHS, "float64")], ids=["lengths", "dtype"]
)
@pytest.mark.parametrize("format", ["npy", "safetensors", "hf_arrow", "lmprobe", "pickle"])
def test_a_dataset_that_is_replaced_before_it_is_first_read_is_not_read_with_old_facts(
    format: str, lengths: list[int], dtype: str, io: str, tmp_path: Path
) -> None:
    for number in (0, 1):  # without an example that was read before, and with one
        old, new = tmp_path / f"old{number}", tmp_path / f"new{number}"
        write(old, format, 1, LENGTHS, "float32")
        write(new, format, 2, lengths, dtype)
        store = actshard.open(old, io=io)
        store.gather(0, [2] * number, [0] * number)
        take_names(store.path, actshard.open(new).path)
        reads(store, 1)


@pytest.mark.parametrize("io", ["pread", "mmap"])
@pytest.mark.parametrize(
    ("lengths", "dtype"), [(LENGTHS[::-1], "float32"), (LENGTHS, "float64")], ids=["lengths", "dtype"]
)
@pytest.mark.parametrize("suffix", ["npy", "fortran.npy", "npz", "bin"])
def test_a_file_that_is_replaced_before_it_is_first_read_is_not_read_with_old_facts(
    suffix: str, lengths: list[int], dtype: str, io: str, tmp_path: Path
) -> None:
    layout = write_files(tmp_path / "old", suffix, 1, LENGTHS, "float32")
    write_files(tmp_path / "new", suffix, 2, lengths, dtype)
    store = actshard.open(tmp_path / "old", layout=layout, io=io)
    take_names(tmp_path / "old", tmp_path / "new")
    assert reads(store, 1) == 0


@pytest.mark.parametrize("version", [2, 3])
def test_a_zarr_store_that_is_replaced_before_it_is_first_read_is_not_read_with_old_facts(
    version: int, tmp_path: Path
) -> None:
    for number, lengths in enumerate((LENGTHS, LENGTHS[::-1])):
        with actshard.create(
            tmp_path / f"{number}.zarr", "zarr", layers=[0, 1], d_model=8, dtype="float32", version=version
        ) as writer:
            for example, tokens in enumerate(lengths):
                rows = [values(number, layer, example, tokens) for layer in (0, 1)]
                writer.append(np.stack(rows)[None].astype(np.float32))
    store = actshard.open(tmp_path / "0.zarr")
    (tmp_path / "0.zarr").rename(tmp_path / "2.zarr")
    (tmp_path / "1.zarr").rename(tmp_path / "0.zarr")
    with pytest.raises(actshard.FormatError, match="was replaced after it was opened"):
        store.gather(0, [0], [0])
    with pytest.raises(actshard.FormatError, match="was replaced after it was opened"):
        store.gather(0, range(6), [0])
    assert reads(store, 0) == 0


def test_chunks_may_be_added_to_a_zarr_store_while_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", "zarr", 1, LENGTHS, "float32")
    store = actshard.open(tmp_path / "a.zarr")
    (tmp_path / "a.zarr" / "arrays" / "activations" / "9.0.0.0").write_bytes(b"")
    assert reads(store, 1) == 12
