"""Reads folders of chunks. See ``files`` for the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import Rows
from actshard.base import layers as naming
from actshard.base._arguments import stored
from actshard.base.codes import Remark
from actshard.base.errors import FormatError, NotStoredError
from actshard.base.faults import RAISE, Faults
from actshard.base.location import Location
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.llamascopium.files import (
    ACTIVATION,
    PER_TOKEN,
    Chunk,
    check_same_chunks,
    chunks_of,
    hooks_of,
    is_hook,
    missing_chunks,
    missing_metadata,
    parsed,
)
from actshard.formats.per_token import TokenColumns
from actshard.formats.tables import table_of

if TYPE_CHECKING:
    import pyarrow as pa

_LOOKED_FOR = "a folder of hook points with chunk-00000000.safetensors or .pt"
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")


def detect(path: Location) -> Evidence:
    """Checks for chunks in a folder or in its folders."""
    if path.kind() != "folder" or not path.lists:
        return Evidence(False, _LOOKED_FOR, "no folder that can be listed")
    if is_hook(path):
        return Evidence(True, _LOOKED_FOR, "chunks")
    # Listing a remote folder costs a request, so only folders named like hook points are listed.
    folders = (e for e in path.first(64) if e.kind == "folder" and ("." in e.name or not path.is_remote))
    entry = next((e for e in folders if is_hook(path / e.name)), None)
    return Evidence(entry is not None, _LOOKED_FOR, "no chunks" if entry is None else f"chunks in {entry.name}")


def rows_of(
    name: str, hooks: Sequence[Sequence[Chunk]], width: int, tokens: NDArray[np.uint32], options: Options
) -> Rows:
    """The rows of a tensor: a group per hook point, ``width`` elements each."""
    array = hooks[0][0].arrays[name]
    row = width * stored(array.dtype).itemsize
    files, starts = [], []
    for chunks in hooks:
        for chunk in chunks:
            stored_array = chunk.arrays[name]
            decoded = stored_array if stored_array.deflated is not None else None
            files.append((chunk.path, row, stored_array.swapped and decoded is None, False, decoded))
            begin = 0 if decoded is not None else stored_array.offset
            starts.append(begin + np.arange(chunk.examples, dtype=np.uint64) * np.uint64(chunk.tokens * row))
    counts = [chunk.examples for chunks in hooks for chunk in chunks]
    return _native.placed_rows(
        files,
        np.repeat(np.arange(len(files), dtype=np.uint32), counts),
        np.concatenate(starts).astype(np.uint64),
        tokens,
        num_groups=len(hooks),
        width=width,
        dtype=array.dtype,
        decoded_memory=options.decoded_memory,
        descr=stored(array.dtype),
        io=options.io,
    )


class ChunkFolder:
    """The chunks of all hook points."""

    def __init__(self, path: Location, limit: int = 1 << 30, faults: Faults = RAISE) -> None:
        self.path = path
        self.warnings: list[Remark] = []
        hooks = hooks_of(path)
        if not hooks:
            raise FormatError(f"expected {_LOOKED_FOR}, found none", path=path)
        self.names = [hook.name for hook in hooks]
        listings = [chunks_of(hook) for hook in hooks]
        every = [(hook, chunks) for hook, (chunks, _) in zip(hooks, listings, strict=True)]
        check_same_chunks(every)
        chunks, metadata = listings[0]  # the other hook points have the same chunks, and their metadata are not read
        self.warnings += missing_chunks(chunks) + missing_metadata(chunks.values(), metadata)
        paths = [path for _, chunks in every for path in chunks.values()]
        flat = faults.batch(paths, lambda batch: parsed(batch, limit))
        chunks_per_hook = len(flat) // len(hooks)
        self.hooks = [flat[i * chunks_per_hook : (i + 1) * chunks_per_hook] for i in range(len(hooks))]
        self.first = self.hooks[0]
        self._check_alike()
        self.tokens = np.concatenate([np.full(chunk.examples, chunk.tokens, np.uint32) for chunk in self.first])
        self.units = np.cumsum([0, *(chunk.examples for chunk in self.first)]).tolist()
        self.per_token = self._per_token()
        self.meta = self._meta_names()

    def _check_alike(self) -> None:
        activations = self.first[0].arrays[ACTIVATION]
        self.d_model, self.dtype = activations.shape[-1], activations.dtype
        for chunks in self.hooks:
            for chunk, same in zip(chunks, self.first, strict=True):
                array = chunk.arrays[ACTIVATION]
                if (array.shape[-1], array.dtype) != (self.d_model, self.dtype):
                    raise FormatError(
                        f"activation: expected {self.dtype} and d_model {self.d_model} as in {self.first[0].path.name} of "
                        f"{self.names[0]}, found {array.dtype} and {array.shape[-1]}",
                        path=chunk.path,
                    )
                if chunk.leading != same.leading or (len(chunk.leading) == 1) != (len(self.first[0].leading) == 1):
                    raise FormatError(
                        f"tokens: expected the shape {same.leading}, as in {self.names[0]}, found {chunk.leading}",
                        path=chunk.path,
                    )

    def _per_token(self) -> list[str]:
        """The per-token columns with an integer dtype. Others were cast to the activations' dtype, which rounds ids."""
        names: list[str] = []
        for name in PER_TOKEN:
            types = {chunk.arrays[name].dtype if name in chunk.arrays else "" for chunk in self.first}
            if len(types) > 1:
                raise FormatError(f"{name}: expected one dtype in all chunks, found {sorted(types)}", path=self.path)
            (dtype,) = types
            if dtype in _INTEGERS:
                names.append(name)
            elif dtype:
                text = (
                    f"{name} were cast to {stored(dtype)} by override_dtype, which rounds token ids: they are not read "
                    "as a column"
                )
                self.warnings.append(Remark("layout", text))
        return names

    def _meta_names(self) -> list[str]:
        objects = self.first[0].objects()
        names = dict.fromkeys(str(key) for record in objects or [] for key in record)
        return [name for name in names if name not in PER_TOKEN]

    def objects(self, names: Sequence[str], most: int) -> dict[str, list[object]]:
        """Metadata values of the first examples."""
        columns: dict[str, list[object]] = {name: [] for name in names}
        for chunk, first in zip(self.first, self.units, strict=False):
            if first >= most:
                break
            for record in chunk.objects() or [{}] * chunk.examples:
                unknown = [key for key in record if key not in self.meta and key not in PER_TOKEN]
                if unknown:
                    raise FormatError(
                        f"meta: expected the fields of the first chunk, found {unknown[0]!r}", path=chunk.path
                    )
                for name in names:
                    columns[name].append(record.get(name))
        return {name: values[:most] for name, values in columns.items()}

    def contents(self, options: Options) -> Contents:
        """The dataset's contents, for a store."""
        n = len(self.tokens)
        rows = {name: rows_of(name, [self.first], 1, self.tokens, options) for name in self.per_token}
        columns = TokenColumns(rows, n, self.path.place)
        counts: NDArray[np.int64] = self.tokens.astype(np.int64)

        def read(names: Sequence[str], most: int = n) -> pa.Table:
            for name in names:
                if name not in (*self.per_token, *self.meta):
                    raise NotStoredError(f"has no column {name!r}", path=self.path.place)
            stop = min(most, n)
            values = self.objects([name for name in names if name in self.meta], stop)
            described = table_of(list(values), [(values, stop)])
            if len(values) == len(names):  # a table without columns has no rows, so no column can be appended to it
                return described.select(list(names))
            table = columns.head([name for name in names if name in self.per_token], stop)
            for name in described.column_names:
                table = table.append_column(name, described[name])
            return table.select(list(names))

        same = int(counts[0]) if n and bool((counts == counts[0]).all()) else None
        files = [chunk.path.place for chunks in self.hooks for chunk in chunks]
        return Contents(
            format="llamascopium",
            path=self.path.place,
            metadata={},
            layers=naming.stored(tuple(self.names), self.path),
            d_model=self.d_model,
            dtype=stored(self.dtype),
            num_examples=n,
            token_counts=counts.copy,
            rows=rows_of(ACTIVATION, self.hooks, self.d_model, self.tokens, options),
            column_names=(*self.per_token, *self.meta),
            columns=read,
            head_columns=read,
            token_columns=tuple(self.per_token),
            files=lambda: files,
            provenance={"chunks": len(self.first), "sequences": "none" if len(self.first[0].leading) == 1 else "whole"},
            warnings=tuple(self.warnings),
            tokens_each=same,
        )


def open(path: Location, options: Options) -> Contents:
    """Reads the headers of all chunks, but no elements."""
    return ChunkFolder(path, options.decoded_memory).contents(options)
