"""Footers of Parquet files: equal to pyarrow's for good files, errors for damaged ones, which never end the process."""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.torture.budget import seed
from tests.waiting import PATIENCE

import actshard
from actshard.base.containers import read_footer
from actshard.base.location import Location
from conftest import GOLDEN, refuses

MASKS = (0x55, 0x01, 0xFF)
ROOT = Path(__file__).parents[1]

TABLE = pa.table({
    "int": pa.array([3, None, 1, 2] * 40, pa.int32()),
    "long": pa.array(range(160), pa.int64()),
    "unsigned": pa.array([1, 1 << 31] * 80, pa.uint32()),
    "text": [f"text {i % 7}" for i in range(160)],
    "flag": [True, False] * 80,
    "vectors": pa.array([[1.0, 2.0]] * 160, pa.list_(pa.float32(), 2)),
    "lists": pa.array([[[1, 2], []], None, [], [[3]]] * 40, pa.list_(pa.list_(pa.int64()))),
    "struct": pa.array([{"a": 1, "b": [{"c": 0.5}]}, None] * 80),
    "nulls": pa.nulls(160, pa.int64()),
    "date": pa.array([1, 2] * 80, pa.date32()),
})  # fmt: skip

OPTIONS: list[dict[str, Any]] = [
    {},
    {"row_group_size": 7},
    {"use_dictionary": False, "compression": "none"},
    {"compression": "gzip", "data_page_version": "2.0", "data_page_size": 64, "write_batch_size": 8},
    {"compression": "zstd", "write_statistics": False, "store_schema": False},
    {"compression": "brotli", "write_page_index": True, "store_decimal_as_integer": True},
    {"compression": "lz4", "dictionary_pagesize_limit": 64, "write_page_checksum": True, "row_group_size": 50},
    {"version": "1.0", "use_deprecated_int96_timestamps": True, "sorting_columns": [pq.SortingColumn(1)]},
]


def check_footer(path: Path) -> None:
    """Compares a footer with pyarrow's, and the numbers of values in pages with those of chunks."""
    footer, expected = read_footer(Location.at(path)), pq.ParquetFile(path).metadata
    assert (footer.num_rows, footer.num_groups) == (expected.num_rows, expected.num_row_groups)
    schema = [expected.schema.column(i) for i in range(expected.num_columns)]
    leaves = [(leaf.path, leaf.physical_type, leaf.max_repetition_level) for leaf in footer.leaves]
    assert leaves == [(column.path, column.physical_type, column.max_repetition_level) for column in schema]
    names = ("num_values", "data_page_offset", "total_compressed_size", "total_uncompressed_size")
    for i in range(footer.num_groups):
        group, theirs = footer.group(i), expected.row_group(i)
        chunks = [(group.column(leaf), theirs.column(leaf)) for leaf in range(len(leaves))]
        assert group.num_rows == theirs.num_rows
        assert group.total_compressed_size == sum(chunk.total_compressed_size for _, chunk in chunks)
        for leaf, (ours, chunk) in enumerate(chunks):
            assert [getattr(ours, name) for name in names] == [getattr(chunk, name) for name in names]
            assert ours.dictionary_page_offset == chunk.dictionary_page_offset
            assert ours.codec.removesuffix("_RAW") == chunk.compression
            pages = group.pages(Location.at(path), leaf, 1_000)
            assert sum(page.values for page in pages if not page.is_dictionary) == chunk.num_values
            assert [page.is_dictionary for page in pages[1:]] == [False] * len(pages[1:])
            statistics = chunk.statistics
            # Without unsigned numbers, dates and times, of which pyarrow makes other values.
            is_signed = schema[leaf].physical_type in ("INT32", "INT64") and schema[leaf].converted_type == "NONE"
            has_range = statistics is not None and statistics.has_min_max
            if is_signed or not has_range:
                assert ours.range == ((statistics.min, statistics.max, statistics.null_count) if has_range else None)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 160])
def test_a_footer_equals_pyarrows(tmp_path: Path, options: dict[str, Any], rows: int) -> None:
    pq.write_table(TABLE.slice(0, rows), tmp_path / "t.parquet", **options)
    check_footer(tmp_path / "t.parquet")


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.parquet")), ids=lambda p: f"{p.parent.parent.name}-{p.stem}")
def test_footers_of_golden_files_equal_pyarrows(path: Path) -> None:
    check_footer(path)


def test_a_footer_longer_than_the_first_read_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({f"a column with a long name, number {i}": [1, 2, 3] for i in range(900)}), path)
    assert struct.unpack("<I", path.read_bytes()[-8:-4])[0] > 64 << 10
    check_footer(path)
    data = path.read_bytes()
    in_memory = Location.in_memory({"t.parquet": data}, "store") / "t.parquet"
    assert len(read_footer(in_memory).leaves) == 900


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda b: b"", actshard.TruncatedFileError, "at least 12 bytes, found 0"),
        (lambda b: b[:-1], actshard.FormatError, "which ends with PAR1"),
        (lambda b: b[:-4] + b"PARE", actshard.UnsupportedError, "encrypted"),
        (lambda b: b[:-8] + struct.pack("<I", len(b)) + b"PAR1", actshard.FormatError, "a footer of at most"),
        (lambda b: b[:-8] + bytes(8) + struct.pack("<I", 8) + b"PAR1", actshard.FormatError, "found 7 more bytes"),
    ],
)
def test_errors_of_a_footer_name_the_file_and_the_byte(
    tmp_path: Path, change: Callable[[bytes], bytes], kind: type[actshard.ActshardError], message: str
) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(TABLE, path)
    path.write_bytes(change(path.read_bytes()))
    with refuses(kind, path, message):
        read_footer(Location.at(path))
    with pytest.raises(kind, match=r"byte \d+: expected"):
        read_footer(Location.at(path))


def test_a_page_outside_the_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(TABLE, path)
    group = read_footer(Location.at(path)).group(0)
    path.write_bytes(path.read_bytes()[:100])
    with refuses(actshard.TruncatedFileError, path, "expected pages"):
        group.pages(Location.at(path), 1, 1_000)
    for number in (len(TABLE.column_names) + 90, 1 << 40):
        with pytest.raises(actshard.OutOfRangeError):
            group.column(number)


# -- changed bytes ---------------------------------------------------------------------------------------------------

PREBUILT = pa.table({"input_ids": pa.array([[1, 2, 3], [4], [5, 6]] * 4, pa.list_(pa.int32()))})


def lmprobe(folder: Path) -> Path:
    shutil.copytree(GOLDEN / "lmprobe/pooled_bf16", folder / "dataset")
    return folder / "dataset/index/train-00000-of-00001.parquet"


def vectors(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "vectors.parquet"
    rows = pa.array(np.arange(24, dtype=np.float32).reshape(6, 4).tolist(), pa.list_(pa.float32()))
    pq.write_table(pa.table({"activation_vector": rows, "activation_layer": [3] * 6}), path, row_group_size=4)
    return path


def prebuilt(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "tokens.parquet"
    pq.write_table(PREBUILT, path, row_group_size=3)
    return path


FILES: dict[str, Callable[[Path], Path]] = {"lmprobe": lmprobe, "vectors": vectors, "tokens": prebuilt}
USES = (
    "lmprobe-open", "lmprobe-read", "lmprobe-verify", "lmprobe-deep", "vectors-open", "vectors-read", "vectors-verify",
    "vectors-deep", "tokens-build", "tokens-divide",
)  # fmt: skip


def try_places(use: str, path: Path, places: list[tuple[int, int]]) -> None:
    """Tries a use with each changed byte, in a process, which must not die."""
    command = [sys.executable, "-m", "tests.parquet_flips", use, str(path), json.dumps(places)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, cwd=ROOT)
    tried = process.stdout.splitlines()
    assert process.returncode == 0, f"return code {process.returncode} at {tried[-1:]}: {process.stderr[-2000:]}"
    assert len(tried) == len(places)


@pytest.mark.parametrize(
    ("use", "name", "places"),
    [
        ("lmprobe-read", "lmprobe/pooled_bf16/index/train-00000-of-00001.parquet", [(964, 0x01), (981, 0x55)]),
        (
            "vectors-read",
            "hf_arrow/hub_parquet_array2d_f32/data/train-00001-of-00002.parquet",
            [(986, 0x01), (1033, 0x55)],
        ),
        ("tokens-divide", "levanter/prebuilt_weights/part1.parquet", [(9696, 0x01), (9731, 0x55)]),
    ],
)
def test_a_changed_byte_of_a_footer_never_ends_the_process(
    tmp_path: Path, use: str, name: str, places: list[tuple[int, int]]
) -> None:
    """pyarrow's accessors of a column chunk ended it at these places, and a few more are tried."""
    folder = Path(name).parts[:2]
    shutil.copytree(GOLDEN.joinpath(*folder), tmp_path.joinpath(*folder))
    chosen, size = random.Random(seed()), (tmp_path / name).stat().st_size
    try_places(use, tmp_path / name, places + [(chosen.randrange(size), chosen.choice(MASKS)) for _ in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_no_changed_byte_of_a_file_ends_the_process(tmp_path: Path, use: str) -> None:
    """All bytes of the footer, each with one of the masks, and some of the pages."""
    path = FILES[use.partition("-")[0]](tmp_path)
    data = path.read_bytes()
    begin = len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]
    at_random = random.Random(seed())
    schema = data.index(b"ARROW:schema", begin) if b"ARROW:schema" in data else len(data)  # text that pyarrow parses
    offsets = [*range(0, begin, 16), *range(begin, schema), *range(schema, len(data), 16)]
    try_places(use, path, [(at, at_random.choice(MASKS)) for at in offsets])
