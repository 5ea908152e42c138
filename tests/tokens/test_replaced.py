"""Guarantee: a cache whose files are missing, removed or replaced is an error or gives its old rows, never zeros or a mixture."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.tokens.conftest import write_lines

import actshard
from actshard import tokens

PREBUILT = {"type": "prebuilt"}
CHUNK = 4
"""Elements per file of a handmade array; files of caches have 134,217,728."""


def build(out: Path, rows: int, length: int, first: int, layout: str, *, overwrite: bool = False) -> tokens.TokenCache:
    """A cache of two files of rows; every token of row i is ``first + i``."""
    records = [{"input_ids": [first + i] * length} for i in range(rows)]
    halves = (records[: rows // 2], records[rows // 2 :])
    sources = [out.parent / f"{first}-{i}.jsonl" for i in range(2)]
    for source, half in zip(sources, halves, strict=True):
        if not source.exists():
            write_lines(source, half)
    return tokens.build_cache(sources, out, format=PREBUILT, layout=layout, overwrite=overwrite, jobs=1)


def write_array(folder: Path, values: np.ndarray) -> None:
    """An array of plain chunks, without shards."""
    (folder / "c").mkdir(parents=True)
    (folder / "zarr.json").write_text(
        json.dumps(
            {
                "zarr_format": 3,
                "node_type": "array",
                "shape": [len(values)],
                "data_type": "int64",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [CHUNK]}},
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                "fill_value": 0,
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            }
        )
    )
    for number in range(-(-len(values) // CHUNK)):
        chunk = values[number * CHUNK : (number + 1) * CHUNK].astype("<i8")
        (folder / "c" / str(number)).write_bytes(np.pad(chunk, (0, CHUNK - len(chunk))).tobytes())


def cache_of_many_files(path: Path, token: int) -> Path:
    """A cache of 10 rows of 4 equal tokens, with a file for each row."""
    write_array(path / "input_ids/offsets", np.array([10, *range(4, 44, 4)]))
    write_array(path / "input_ids/data", np.full(40, token))
    ledger = {
        "total_num_rows": 10,
        "shard_rows": {"": 10},
        "is_finished": True,
        "finished_shards": [""],
        "field_counts": {"input_ids": 40},
        "layout": "consolidated",
    }
    (path / "shard_ledger.json").write_text(json.dumps(ledger))
    return path


@pytest.mark.parametrize("file", ["data/c/0", "offsets/c/0"])
@pytest.mark.parametrize("layout", ["consolidated", "sharded"])
def test_a_missing_file_of_a_built_cache_is_an_error(layout: str, file: str, tmp_path: Path) -> None:
    build(tmp_path / "c", 8, 5, 1, layout)
    missing = max(p for p in (tmp_path / "c").rglob("0") if p.match(f"input_ids/{file}"))  # of the last shard
    missing.unlink()
    with pytest.raises(actshard.MissingFileError, match="incomplete"):
        tokens.open_cache(tmp_path / "c")[7]
    with pytest.raises(actshard.ExistsError, match=r"incomplete.*pass overwrite=True"):
        build(tmp_path / "c", 8, 5, 1, layout)
    report = actshard.verify(tmp_path / "c")
    assert not report.ok
    assert any(missing == Path(finding.path or "") for finding in report.errors)


def test_a_missing_file_of_another_writer_is_a_warning_when_the_cache_is_opened(tmp_path: Path) -> None:
    path = cache_of_many_files(tmp_path / "c", 7)
    for number in (3, 8, 9):
        (path / f"input_ids/data/c/{number}").unlink()
    with pytest.warns(actshard.ActshardWarning, match=r"data/c/3 and 2 more files are missing; the rows read as zeros"):
        cache = tokens.open_cache(path)
    assert [int(row["input_ids"][0]) for row in cache] == [7, 7, 7, 0, 7, 7, 7, 7, 0, 0]


def remove(path: Path) -> None:
    shutil.rmtree(path)


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replace(path: Path) -> None:
    shutil.rmtree(path)
    cache_of_many_files(path, 9)


@pytest.mark.parametrize("change", [remove, rename, replace])
@pytest.mark.parametrize("row", [None, 0])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_cache_that_changes_while_it_is_open_gives_its_rows_or_an_error(
    io: str, row: int | None, change: Callable[[Path], None], tmp_path: Path
) -> None:
    cache = tokens.open_cache(cache_of_many_files(tmp_path / "c", 7), io=io)
    if row is not None:
        assert cache[row]["input_ids"].tolist() == [7] * 4
    change(tmp_path / "c")
    for other in range(1, 10):
        with pytest.raises(actshard.FormatError, match=r"open the (cache|dataset) again") as raised:
            cache[other]
        ledger, offsets = tmp_path / "c/shard_ledger.json", tmp_path / "c/input_ids/offsets/c"
        assert raised.value.path == ledger or Path(raised.value.path or "").parent == offsets


@pytest.mark.parametrize("layout", ["consolidated", "sharded"])
@pytest.mark.parametrize("before", ["nothing", "offsets", "a row"])
def test_a_cache_that_is_built_anew_while_it_is_open_is_no_mixture(before: str, layout: str, tmp_path: Path) -> None:
    cache = build(tmp_path / "c", 20, 8, 100, layout)
    if before == "offsets":
        cache.view("input_ids").offsets  # noqa: B018 -- reads them
    elif before == "a row":
        cache[0]
    build(tmp_path / "c", 30, 5, 500, layout, overwrite=True)
    errors = 0
    for number in range(20):
        try:
            row = cache[number]["input_ids"].tolist()
        except actshard.FormatError:
            errors += 1
        else:
            assert row == [100 + number] * 8
    assert errors or before == "a row"
