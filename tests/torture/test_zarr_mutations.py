"""Damaged compressed chunks: correct values or one ActshardError, and never values where zarr-python raises an error.

`tests/golden/zarr_codecs/make.py` wrote the stores and recorded what zarr-python 3.1.6 reads from damaged copies.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import shutil
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.torture.budget import first_number, runs

import actshard
from conftest import GOLDEN
from torture.chunk_damage import DAMAGES, chunk_files, damaged, values

FOLDER = GOLDEN / "zarr_codecs"
STORES = sorted(FOLDER.glob("*.zarr"))
WITH_ZARR = {"v2_lzma", "v2_delta_gzip"}
"""Stores with codecs that only the zarr package supports."""
CHECKED = {"v2_bz2", "v2_gzip", "v2_zlib", "v2_zlib_f_order", "v2_zstd_checksum", "v3_crc32c", "v3_gzip"} | {
    "v3_shards_crc32c",
    "v3_shards_gzip_start",
    "v3_shards_zstd_crc32c",
    "v3_transpose_gzip",
    "v3_zstd_crc32c",
}
"""Stores with a checksum over all decoded bytes: every change is detected."""


def read(path: Path) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(path)
    return np.stack([[store.sequence(i, layer) for layer in store.layers] for i in range(len(store))])


def stores() -> list[Path]:
    there = importlib.util.find_spec("zarr") is not None
    return [p for p in STORES if there or p.stem not in WITH_ZARR]


def copy_damaged(path: Path, folder: Path, seed: int) -> Path:
    copy = folder / f"{path.stem}-{seed}.zarr"
    shutil.copytree(path, copy)
    victim = random.Random(seed).choice(chunk_files(copy))
    victim.write_bytes(damaged(victim.read_bytes(), seed))
    return copy


@pytest.mark.parametrize("path", stores(), ids=lambda p: p.stem)
def test_every_codec_gives_what_zarr_python_wrote(path: Path) -> None:
    assert read(path).tobytes() == values().tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("path", stores(), ids=lambda p: p.stem)
def test_what_zarr_python_refuses_gives_no_other_values(path: Path, tmp_path: Path) -> None:
    verdicts = json.loads((FOLDER / "verdicts.json").read_text())[path.stem]
    right = values().tobytes()
    refused = 0
    assert len(verdicts) == DAMAGES
    for number, verdict in enumerate(verdicts):
        copy = copy_damaged(path, tmp_path, number)
        try:
            found = read(copy).tobytes()
        except actshard.ActshardError:
            refused += 1
        else:
            assert found == right or str(zlib.crc32(found)) == verdict, (path.stem, number, verdict)
        shutil.rmtree(copy)
    assert refused > DAMAGES // 4


@pytest.mark.machine
@pytest.mark.parametrize("path", [p for p in stores() if p.stem in CHECKED], ids=lambda p: p.stem)
def test_a_checksum_catches_every_change(path: Path, tmp_path: Path) -> None:
    right = values().tobytes()
    for number in range(first_number(), first_number() + runs(15, 2000)):
        copy = copy_damaged(path, tmp_path, number)
        with contextlib.suppress(actshard.ActshardError):
            assert read(copy).tobytes() == right, (path.stem, number)
        shutil.rmtree(copy)


@pytest.mark.machine
@pytest.mark.parametrize("path", sorted(FOLDER.glob("v3_*crc32c.zarr")), ids=lambda p: p.stem)
def test_every_bit_of_a_chunk_with_crc32c_counts(path: Path, tmp_path: Path) -> None:
    right = values().tobytes()
    copy = tmp_path / path.name
    shutil.copytree(path, copy)
    victim = chunk_files(copy)[0]
    data = victim.read_bytes()
    for bit in range(0, len(data) * 8, max(1, len(data) * 8 // runs(40, 4000))):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(changed)
        with contextlib.suppress(actshard.FormatError):
            assert read(copy).tobytes() == right, bit
        report = actshard.verify(copy, deep=True)
        assert not report.ok or bytes(changed) == data


@pytest.mark.machine
@pytest.mark.peers
@pytest.mark.parametrize("path", STORES, ids=lambda p: p.stem)
def test_damaged_stores_give_what_zarr_gives_or_an_error(path: Path, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    right = values().tobytes()
    for number in range(first_number(), first_number() + runs(20, 2000)):
        copy = copy_damaged(path, tmp_path, number)
        try:
            found = read(copy).tobytes()
        except actshard.ActshardError:
            pass
        else:
            if found != right:
                theirs = zarr.open_group(copy, mode="r")["arrays/activations"][...]
                assert np.ascontiguousarray(theirs).tobytes() == found, (path.stem, number)
        shutil.rmtree(copy)
