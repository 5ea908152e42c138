"""Opens folders of plain files by their description."""

from __future__ import annotations

from typing import Any

import numpy as np

import actshard._native as _native
from actshard._native import Rows
from actshard.base import layers
from actshard.base._arguments import stored
from actshard.base.codes import Remark
from actshard.base.location import Location
from actshard.formats.contents import Contents, Options
from actshard.formats.layout_toml import description
from actshard.formats.layout_toml.columns import FolderColumns
from actshard.formats.layout_toml.description import Description
from actshard.formats.layout_toml.files import is_shard_index, missing_files
from actshard.formats.layout_toml.index import RowIndex
from actshard.formats.layout_toml.keeping import index_of


def native(index: RowIndex, options: Options, *, is_raw: bool) -> Rows:
    """The rows of an index. Raw files may grow while they are read."""
    files = [(index.paths[file.path], file.step, file.swapped, file.gzipped, file.decoded) for file in index.row_files]
    return _native.placed_rows(
        files,
        np.ascontiguousarray(index.numbers.reshape(-1)),
        np.ascontiguousarray(index.starts.reshape(-1)),
        np.ascontiguousarray(index.tokens if index.even is None else index.tokens[:0]),
        even=None if index.even is None else (len(index.tokens), int(index.tokens[0]), index.even),
        num_groups=len(index.layers),
        width=index.d_model,
        dtype=index.dtype,
        decoded_memory=options.decoded_memory,
        descr=stored(index.dtype),
        io=options.io,
        grows=is_raw,
        scaled=[(n, *file.scaled) for n, file in enumerate(index.row_files) if file.scaled is not None],
    )


def open(path: Location, options: Options) -> Contents:
    """Reads the description and the headers of all files, but no rows. The index of many files is cached."""
    described = description.read(path, options.layout)
    skips = options.skip_incomplete
    index = index_of(path, described, options.decoded_memory, options.keep, skips_incomplete=skips)
    return contents(path, described, index, options)


def contents(path: Location, described: Description, index: RowIndex, options: Options) -> Contents:
    """The dataset's contents, for a store."""
    columns = FolderColumns(path, described, index)
    columns.check_first()
    tokens = index.tokens
    same = int(tokens[0]) if index.even is not None or (len(tokens) and bool((tokens == tokens[0]).all())) else None
    provenance: dict[str, Any] = {"files": len(index.paths), "layout": described.source and str(described.source)}
    if described.program:
        provenance["program"] = described.program
    codes = sorted({file.scaled[0].dtype for file in index.row_files if file.scaled is not None})
    if codes:
        provenance["stored_dtype"] = " and ".join(codes)
    copied = sum(file.decoded is not None or file.gzipped for file in index.row_files)
    if copied:
        provenance["decoded_arrays"] = copied
    return Contents(
        format="layout_toml",
        path=path.place,
        metadata=dict(described.metadata) or ({"layout": described.text} if described.text else {}),
        layers=layers.stored(index.layers, path),
        d_model=index.d_model,
        dtype=stored(index.dtype),
        num_examples=len(tokens),
        token_counts=lambda: tokens.astype(np.int64) if same is None else np.broadcast_to(np.int64(same), len(tokens)),
        rows=native(index, options, is_raw=described.activations.shape is not None),
        column_names=columns.names,
        columns=columns.table,
        head_columns=columns.table,
        files=lambda: [location.place for location in index.paths],
        columns_in=columns.folders,
        provenance=provenance,
        tokens_each=same,
        absence=index.absence,
        warnings=tuple(remarks(path, described, index)),
    )


def remarks(path: Location, described: Description, index: RowIndex) -> list[Remark]:
    """Warnings about missing files. A column of committed examples lists the examples, so other numbers may have no file."""
    pattern = described.activations.files
    if (
        index.absence
        or pattern is None
        or is_shard_index(pattern.text)
        or any(column.commit for column in described.columns)
    ):
        return list(described.remarks)
    if "_" in pattern.captures:
        names = ((pattern.match(file.relative_to(path)), file) for unit in index.units for file in unit.files)
        shards = [(captured, file) for captured, file in names if captured is not None]
        return [*described.remarks, *missing_files(path, pattern, shards)]
    files = ((unit.captured, unit.any) for unit in index.units)
    return [*described.remarks, *missing_files(path, pattern, files)]
