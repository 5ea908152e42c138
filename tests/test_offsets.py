"""Rows at file offsets: memmaps without headers, arrays after headers, one file per array."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import actshard
from actshard._native import Rows

RNG = np.random.default_rng(0)


def _array(shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    return (RNG.standard_normal(shape) * 100).astype(dtype)


def _rows(files, parts, array, *, groups, mode) -> Rows:  # type: ignore[no-untyped-def]
    descr = array.dtype.newbyteorder("=")
    name = {"float16": "F16", "float32": "F32"}[descr.name]
    return Rows.spans(files, parts, num_groups=groups, width=array.shape[-1], dtype=name, descr=descr, io=mode)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
@pytest.mark.parametrize("dtype", ["<f2", ">f2", "<f4", ">f4"])
@pytest.mark.parametrize("start", [0, 128, 77])
def test_rows_of_two_arrays_are_those_of_numpy(tmp_path: Path, mode: str, dtype: str, start: int) -> None:
    n, groups, p, s, width = 6, 3, 5, 4, 7
    prompt, response = _array((n, groups, p, width), dtype), _array((n, groups, s, width), dtype)
    for name, array in (("p", prompt), ("s", response)):
        (tmp_path / name).write_bytes(b"x" * start + array.tobytes() + b"tail")
    # Examples in any order, with gaps, and of any length.
    index = np.array([4, 0, 5, 2], np.uint64)
    lengths = [np.array([5, 0, 3, 1], np.uint32), np.array([1, 4, 0, 2], np.uint32)]
    swapped = dtype.startswith(">")
    rows = _rows(
        [(tmp_path / "p", start, n * groups * p, swapped), (tmp_path / "s", start, n * groups * s, swapped)],
        [(0, index * np.uint64(groups * p), lengths[0], p), (1, index * np.uint64(groups * s), lengths[1], s)],
        prompt,
        groups=groups,
        mode=mode,
    )
    native = prompt.dtype.newbyteorder("=")
    for group in range(groups):
        expected = [
            np.concatenate([prompt[i, group, :a], response[i, group, :b]]).astype(native)
            for i, a, b in zip(index, *lengths, strict=True)
        ]
        assert rows.token_counts().tolist() == [len(e) for e in expected]
        whole = rows.gather_whole(group, np.arange(4), None, None)
        np.testing.assert_array_equal(whole, np.concatenate(expected))
        for i, e in enumerate(expected):
            for t in range(-len(e), len(e)):
                np.testing.assert_array_equal(rows.gather(group, i, t, None, None)[0], e[t])
            with pytest.raises(actshard.OutOfRangeError):
                rows.gather(group, i, len(e), None, None)
        view = rows.view(group, 0)
        assert view is None  # in two files
    stream = np.array([[i, t] for i, e in enumerate(expected) for t in range(len(e))] * 50)
    RNG.shuffle(stream)
    found = rows.gather(groups - 1, stream[:, 0].copy(), stream[:, 1].copy(), None, None)
    np.testing.assert_array_equal(found, np.stack([expected[i][t] for i, t in stream]))


def test_arrays_of_npy_files_are_rows_after_their_headers(tmp_path: Path) -> None:
    arrays = [_array((k + 1, 5), "float32") for k in range(4)]
    files = []
    for k, array in enumerate(arrays):
        memory = io.BytesIO()
        np.save(memory, array)
        (tmp_path / f"{k}.npy").write_bytes(memory.getvalue())
        files.append((tmp_path / f"{k}.npy", len(memory.getvalue()) - array.nbytes, len(array), False))
    numbers = np.arange(4, dtype=np.uint32)
    part = (numbers, np.zeros(4, np.uint64), numbers + np.uint32(1), 0)
    rows = _rows(files, [part], arrays[0], groups=1, mode="mmap")
    for k, array in enumerate(arrays):
        view = rows.view(0, k)
        assert view is not None
        assert not view.flags.writeable
        np.testing.assert_array_equal(view, array)


@pytest.mark.parametrize(
    ("start", "rows", "error"),
    [
        (0, 11, actshard.TruncatedFileError),
        (4, 10, actshard.TruncatedFileError),
        (401, 0, actshard.TruncatedFileError),
        ((1 << 64) - 1, 1, actshard.FormatError),
        ((1 << 64) - 8, (1 << 40) - 1, actshard.FormatError),
        (0, (1 << 64) - 1, actshard.FormatError),
        (0, 1 << 40, actshard.FormatError),
        (0, 9, actshard.FormatError),  # the layout refers to a tenth row
    ],
)
def test_offsets_that_no_file_has_are_refused(tmp_path: Path, start: int, rows: int, error: type[Exception]) -> None:
    (tmp_path / "a").write_bytes(bytes(400))
    starts = np.arange(10, dtype=np.uint64)
    for mode in ("mmap", "pread"):
        made = _rows(
            [(tmp_path / "a", start, rows, False)], [(0, starts, 1, 0)], _array((1, 10), "float32"), groups=1, mode=mode
        )
        with pytest.raises(error):
            made.gather_whole(0, np.arange(10), None, None)


def test_places_that_no_layout_has_are_refused(tmp_path: Path) -> None:
    like = _array((1, 10), "float32")
    file = (tmp_path / "a", 0, 1, False)
    zero = np.zeros(1, np.uint64)
    for groups, parts in [
        (1, []),
        (0, [(0, zero, 1, 0)]),
        (1, [(1, zero, 1, 0)]),
        (1, [(0, zero + np.uint64(1 << 40), 1, 0)]),
        (2, [(0, zero, 1, 1 << 63)]),
        (1, [(0, zero, np.zeros(2, np.uint32), 0)]),
    ]:
        with pytest.raises(actshard.FormatError):
            _rows([file], parts, like, groups=groups, mode="mmap")
