"""The contents of a store that joins others: :func:`actshard.concat`.

The examples of the parts are concatenated. A joined store is a :class:`~actshard.Store` like any other:

- rows: ``Rows.several`` of the binding distributes each read over the parts, which write into one output.
- columns: those of all parts, null where a part lacks one, and the column of sources.
- labels, lengths, logits, router: those of the parts, if every part has them.

Columns are read from the parts' stores, so these must stay open while the joined store is in use.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base import layers as naming
from actshard.base.codes import Remark
from actshard.base.errors import ArgumentError, DtypeError, NotStoredError
from actshard.base.layers import Layer
from actshard.formats.contents import Contents, Logits, Router
from actshard.formats.tables import cast_exactly, common_type, rows_only
from actshard.formats.target import OTHER_TEXT as TEXTS
from actshard.streaming.readable import content_range, tokens_anywhere

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import ArrayLike

    from actshard.streaming.readable import Readable

FORMAT = "concat"
"""The ``format`` of a joined store. It is not a file format."""
SOURCE = "source"
"""The column of sources; ``actshard:source`` if a part has a column of this name."""


def names_of(parts: Sequence[Readable]) -> list[str]:
    """Distinct names of the parts: file names if these differ, else paths, else paths with a number."""
    short_names, long = [Path(str(p.path)).name for p in parts], [str(p.path) for p in parts]
    for names in (short_names, long):
        if len(set(names)) == len(names):
            return names
    return [f"{name}#{i}" for i, name in enumerate(long)]


def join(
    parts: Sequence[Readable],
    names: Sequence[str],
    layers: Sequence[Layer] | None,
    dtype: DTypeLike | None,
    special_tokens: int | None,
) -> Contents:
    """The contents of these stores, one after the other; reads no rows."""
    first = parts[0]
    for part in parts:
        part.check_open()
        if part.d_model != first.d_model:
            raise ArgumentError(
                f"concat: expected one d_model, found {first.d_model} in {names[0]} and {part.d_model} in "
                f"{names[parts.index(part)]}",
                path=part.path,
            )
    chosen = common_layers(parts, names, layers, "concat")
    common_dtype = dtype_of(parts, names, dtype)
    special = special_of(parts, names, special_tokens)
    every = [part.contents for part in parts]
    rows = None
    if chosen:
        groups = [[part.group_of(layer) for layer in chosen] for part in parts]
        name = None if dtype is None else _arguments.dtype(dtype)[1]
        rows = _native.Rows.several([part.rows for part in parts], groups, name, common_dtype, io_of(parts))
    columns = _columns(every)
    source = _unused(columns)
    lengths = {contents.tokens_each for contents in every}
    ones = {contents.one_row_each for contents in every}
    models = {contents.model for contents in every}
    table = _JoinedColumns(parts, names, chosen, columns, source)
    units = _units(parts)
    differ = any(contents.layers_differ for contents in every)
    routed = every[0].router_layers
    return Contents(
        format=FORMAT,
        path=common_path(parts),
        metadata={
            "parts": [
                {"source": name, "format": part.format, "path": str(part.path), "metadata": part.contents.metadata}
                for name, part in zip(names, parts, strict=True)
            ]
        },
        layers=chosen,
        d_model=first.d_model,
        dtype=common_dtype,
        num_examples=sum(part.num_examples for part in parts),
        token_counts=lambda: _token_counts(parts, rows if differ else None, len(chosen)),
        rows=rows,
        column_names=[*columns, source],
        columns=table.read,
        files=lambda: list(dict.fromkeys(file for contents in every for file in contents.files())),
        model=models.pop() if len(models) == 1 else None,
        provenance={name: contents.provenance for name, contents in zip(names, every, strict=True)},
        extras=tuple(extra for extra in every[0].extras if all(extra in c.extras for c in every)),
        token_columns=tuple(name for name in columns if any(name in c.token_columns for c in every)),
        warnings=tuple(
            Remark(w.code, f"{name}: {w}") for name, part in zip(names, parts, strict=True) for w in part.warnings
        ),
        tokens_each=lengths.pop() if len(lengths) == 1 else None,
        content_lengths=lambda: _lengths(parts, special),
        special_tokens=special,
        counts_are_cheap=all(contents.counts_are_cheap for contents in every),
        units=units,
        unit_columns=None if units is None else lambda unit: table.of_unit(unit, units, differ),
        layers_differ=differ,
        lacks_layers=any(contents.lacks_layers for contents in every),
        one_row_each=ones.pop() if len(ones) == 1 else None,
        types_may_differ=any(c.types_may_differ for c in every) or {part.dtype for part in parts} != {common_dtype},
        converts=dtype is not None,
        has_logits=all(contents.has_logits for contents in every),
        router_layers=routed if all(set(c.router_layers) == set(routed) for c in every) else (),
        labels=lambda: _labels(parts, special),
        logits=lambda: _logits(parts, names),
        router=lambda: _router(parts, names, routed),
        parts=tuple(parts),
    )


def common_layers(
    parts: Sequence[Readable], names: Sequence[str], layers: Sequence[Layer] | None, what: str
) -> tuple[Layer, ...]:
    """The requested layers, which all parts must have. None: all layers, which must be equal in all parts."""
    if layers is not None:
        layer_names = naming.several(layers)
        for layer in layer_names:
            for part in parts:
                part.group_of(layer)
        return layer_names
    first = parts[0]
    for name, part in zip(names, parts, strict=True):
        if set(part.layers) != set(first.layers):
            common = [x for x in first.layers if all(x in p.layers for p in parts)]
            remedy = (
                f"Pass layers={naming.short(common)}, which all have." if common else "They have no layer in common."
            )
            raise ArgumentError(
                f"{what}: expected equal layers, found {naming.short(first.layers)} in {names[0]} and "
                f"{naming.short(part.layers)} in {name}. {remedy}",
                path=part.path,
            )
    return first.layers


def dtype_of(parts: Sequence[Readable], names: Sequence[str], dtype: DTypeLike | None) -> np.dtype[np.generic]:
    """The requested dtype, else the dtype of all parts."""
    if dtype is not None:
        return _arguments.dtype(dtype)[0]
    first = parts[0]
    for name, part in zip(names, parts, strict=True):
        if part.dtype != first.dtype:
            raise DtypeError(
                f"dtype: expected one dtype, found {first.dtype} in {names[0]} and {part.dtype} in {name}. Pass dtype= to "
                "convert while reading.",
                path=part.path,
            )
    return first.dtype


def special_of(parts: Sequence[Readable], names: Sequence[str], special: int | None, what: str = "concat") -> int:
    """The requested number of special tokens, else the number in all parts."""
    if special is not None:
        return _arguments.whole(special, "special_tokens")
    first = parts[0]
    remedy = " Pass special_tokens=0 to read every stored token as content, or the number of tokens to skip in every example."
    for name, part in zip(names, parts, strict=True):
        if part.special_tokens != first.special_tokens:
            raise ArgumentError(
                f"{what}: expected one number of special tokens, found {first.special_tokens} in {names[0]} and "
                f"{part.special_tokens} in {name}.{remedy if what == 'concat' else ''}",
                path=part.path,
            )
    return first.special_tokens


def io_of(parts: Sequence[Readable]) -> str:
    """``"mmap"`` if all parts are memory-mapped, else ``"pread"``."""
    return "mmap" if all(part.io == "mmap" for part in parts) else "pread"


def common_path(parts: Sequence[Readable]) -> Path:
    """The folder that contains all parts; the first part's path if they are not local."""
    places: list[object] = [part.path for part in parts]
    if all(isinstance(path, Path) for path in places):
        return Path(os.path.commonpath([str(path) for path in places]))
    return parts[0].path


def _units(parts: Sequence[Readable]) -> tuple[int, ...] | None:
    """Boundaries of units. A part without units is one unit. None if no part has units."""

    def has(contents: Contents) -> bool:
        return contents.units is not None or (contents.whole is not None and contents.whole.units is not None)

    if not any(has(part.contents) for part in parts):
        return None
    bounds, start = [0], 0
    for part in parts:
        units = part.contents.units or (0, part.num_examples)
        bounds += [start + bound for bound in units[1:] if bound]
        start += part.num_examples
    return tuple(dict.fromkeys(bounds))


def _columns(every: Sequence[Contents]) -> list[str]:
    """Names of the columns of all parts. Texts have the first part's name for them, unless a part has columns with both names."""
    columns = dict.fromkeys(itertools.chain.from_iterable(c.column_names for c in every))
    if TEXTS.keys() <= columns.keys() and not any(TEXTS.keys() <= {*c.column_names} for c in every):
        del columns[[name for name in columns if name in TEXTS][1]]
    return list(columns)


def _unused(columns: Sequence[str]) -> str:
    """A name for the column of sources that no part uses."""
    fallback = f"actshard:{SOURCE}"
    names = itertools.chain((SOURCE, fallback), (f"{fallback}:{i}" for i in itertools.count(2)))
    return next(name for name in names if name not in columns)


def _token_counts(parts: Sequence[Readable], rows: _native.Rows | None, layers: int) -> NDArray[np.int64]:
    """Stored tokens per example; ``rows``: of the join, if layers differ, because an example may have none of its layers."""
    if rows is None:
        return np.concatenate([part.token_counts for part in parts])
    return tokens_anywhere(rows, layers, np.arange(sum(part.num_examples for part in parts)))


def _lengths(parts: Sequence[Readable], special: int) -> NDArray[np.int64] | None:
    """Content tokens per example: stored tokens after the special ones, without padding."""
    if all(part.content_lengths is None for part in parts):
        return None
    stops = [content_range(part, part.token_counts)[1] for part in parts]
    return np.maximum(np.concatenate(stops) - special, 0)


def _labels(parts: Sequence[Readable], special: int) -> NDArray[np.uint8] | None:
    """Patch labels; None unless every part has them, with the same numbers of patches and special tokens."""
    if any(part.special_tokens != special for part in parts):
        return None
    arrays = [labels for part in parts if (labels := part.labels) is not None]
    if len(arrays) < len(parts) or len({labels.shape[1:] for labels in arrays}) > 1:
        return None
    return np.concatenate(arrays)


def _alike(rows: Sequence[_native.Rows], names: Sequence[str], what: str) -> None:
    for name, part_rows in zip(names, rows, strict=True):
        if (part_rows.descr, part_rows.width) != (rows[0].descr, rows[0].width):
            raise NotStoredError(
                f"{what}: expected rows of one kind, found {rows[0].width} {rows[0].descr} in {names[0]} and {part_rows.width} "
                f"{part_rows.descr} in {name}. Read them from each of store.parts."
            )


def _logits(parts: Sequence[Readable], names: Sequence[str]) -> Logits | None:
    part_logits = [logits for part in parts if (logits := part.contents.logits()) is not None]
    if len(part_logits) < len(parts):
        return None
    joined_rows = []
    for rows in ([x.values for x in part_logits], [x.indices for x in part_logits]):
        _alike(rows, names, "logits")
        joined_rows.append(_native.Rows.several(rows, [[0]] * len(rows), None, rows[0].descr, io_of(parts)))
    return Logits(*joined_rows)


def _router(parts: Sequence[Readable], names: Sequence[str], layers: tuple[Layer, ...]) -> Router | None:
    routers = [router for part in parts if (router := part.contents.router()) is not None]
    if len(routers) < len(parts) or any(set(router.layers) != set(layers) for router in routers):
        return None
    rows = [router.rows for router in routers]
    _alike(rows, names, "router tensors")
    groups = [[router.layers.index(layer) for layer in layers] for router in routers]
    return Router(layers, _native.Rows.several(rows, groups, None, rows[0].descr, io_of(parts)))


class _JoinedColumns:
    """The columns of all parts."""

    def __init__(
        self,
        parts: Sequence[Readable],
        names: Sequence[str],
        layers: tuple[Layer, ...],
        columns: Sequence[str],
        source: str,
    ) -> None:
        self._parts, self._names, self._layers, self._columns, self._source = parts, names, layers, columns, source
        self._kinds: pa.Schema | None = None
        self._held: tuple[int, pa.Table] | None = None

    def read(self, names: Sequence[str]) -> pa.Table:
        """Columns by name; null where a part lacks one."""
        import pyarrow as pa

        tables = [self._of_part(i, [n for n in names if n != self._source]) for i in range(len(self._parts))]
        columns = {}
        for name in names:
            if name == self._source:
                columns[name] = self._sources()
                continue
            if not any(name in table.column_names for table in tables):
                raise NotStoredError(f"the dataset has no column {name!r}; the columns are {', '.join(self._columns)}")
            kind = self._type_of(name, tables)
            chunks = [
                _as(name, table[name], kind).chunks
                if name in table.column_names
                else [pa.nulls(part.num_examples, kind)]
                for table, part in zip(tables, self._parts, strict=True)
            ]
            columns[name] = pa.chunked_array(itertools.chain.from_iterable(chunks), kind)
        return pa.table(columns) if columns else rows_only(sum(part.num_examples for part in self._parts))

    def of_unit(self, unit: int, units: Sequence[int], layers_differ: bool) -> pa.Table:
        """Columns of one unit; if layers differ, also each example's layers. A part's columns are read once for all its units."""
        import pyarrow as pa

        examples = range(units[unit], units[unit + 1])
        number, start = 0, 0
        while examples.start >= start + self._parts[number].num_examples:
            start += self._parts[number].num_examples
            number += 1
        table = self._of_one(number).slice(examples.start - start, len(examples))
        if not layers_differ:
            return table
        if "layers" in table.column_names:
            table = table.drop_columns(["layers"])
        return table.append_column("layers", pa.array(self._layers_of(examples)))

    def _of_one(self, number: int) -> pa.Table:
        """All columns of one part, with the types of the joined store."""
        import pyarrow as pa

        cache = self._held
        if cache is not None and cache[0] == number:
            return cache[1]
        if self._kinds is None:
            self._kinds = self.read(self._columns).schema
        part_table, n = self._of_part(number, self._columns), self._parts[number].num_examples
        columns = {
            field.name: _as(field.name, part_table[field.name], field.type)
            if field.name in part_table.column_names
            else pa.nulls(n, field.type)
            for field in self._kinds
        }
        columns[self._source] = (
            pa.array([self._names[number]]).dictionary_encode().take(pa.array(np.zeros(n, np.int32)))
        )
        table = pa.table(columns)
        self._held = (number, table)
        return table

    def _layers_of(self, examples: range) -> list[list[Layer]]:
        """The join's layers that each of these examples has, which must be in one part."""
        start = 0
        for part in self._parts:
            if examples.start < start + part.num_examples:
                numbers = range(examples.start - start, examples.stop - start)
                return [[layer for layer in names if layer in self._layers] for names in layers_held(part, numbers)]
            start += part.num_examples
        return []

    def _of_part(self, number: int, names: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        part = self._parts[number]
        part_columns = part.contents.column_names
        stored_names = [name for name in names if name in part_columns]
        table = part.read_columns(stored_names) if stored_names else None
        columns = {} if table is None else {name: table[name] for name in stored_names}
        for name in names:
            if name in part_columns or (name in self._columns and not self._is_text(name)):
                continue
            # A column that is only read on request, or texts, which this part has under the other name.
            with contextlib.suppress(NotStoredError):
                columns[name] = part.read_columns([name])[name]
        return pa.table(columns)

    def _is_text(self, name: str) -> bool:
        """Whether a column contains the texts of all parts, whatever their names in the parts."""
        return name in TEXTS and TEXTS[name] not in self._columns

    def _sources(self) -> pa.ChunkedArray:
        import pyarrow as pa

        names = pa.array(list(self._names), pa.string())
        numbers = np.repeat(np.arange(len(self._parts), dtype=np.int32), [p.num_examples for p in self._parts])
        return pa.chunked_array([pa.DictionaryArray.from_arrays(pa.array(numbers), names)])

    def _type_of(self, name: str, tables: Sequence[pa.Table]) -> pa.DataType:
        import pyarrow as pa

        kind, kind_source = pa.null(), ""
        for source, table in zip(self._names, tables, strict=True):
            if name not in table.column_names:
                continue
            part_type = table.schema.field(name).type
            common = common_type(kind, part_type)
            if common is None:
                raise ArgumentError(
                    f"column {name!r}: expected one type, found {kind} in {kind_source} and {part_type} in {source}. Read it from "
                    "each of store.parts, or other columns with read_columns()."
                )
            kind, kind_source = common, kind_source or source
        return kind


def _as(name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Casts a column. Raises ArgumentError for values that the type cannot represent exactly."""
    import pyarrow as pa

    try:
        values: pa.ChunkedArray = cast_exactly(column, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"column {name!r}: expected values of one type, found {column.type} values that {kind}, the type of all parts, cannot "
            f"represent exactly: {error}. Read it from each of store.parts, or other columns with read_columns()."
        ) from error
    return values


def layers_held(part: Readable, examples: range) -> list[list[Layer]]:
    """The layers that each of a part's examples has."""
    contents = part.contents
    dataset, chosen = contents.whole or contents, contents.chosen
    numbers = np.asarray(examples, np.int64) if chosen is None else chosen.array()[examples.start : examples.stop]
    if dataset.parts:
        return [
            layers_held(dataset.parts[p], range(e, e + 1))[0] for p, e in zip(*places(dataset, numbers), strict=True)
        ]
    if not dataset.layers_differ or dataset.units is None or dataset.unit_columns is None:
        return [list(dataset.layers)] * len(numbers)
    unit_layers: dict[int, list[object]] = {}
    layers = []
    for number in numbers.tolist():
        unit = int(np.searchsorted(dataset.units, number, "right")) - 1
        if unit not in unit_layers:
            unit_layers = {unit: dataset.unit_columns(unit)["layers"].to_pylist()}
        layers.append(unit_layers[unit][number - dataset.units[unit]])
    return layers


def per_token(contents: Contents, column: str, examples: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a column has one value per stored token in each of these examples of a dataset: parts may differ."""
    if not contents.parts:
        return np.full(len(examples), column in contents.token_columns)
    flags = np.zeros(len(examples), np.bool_)
    # A pair has the columns of its first store.
    part_numbers, part_examples = (np.zeros_like(examples), examples) if contents.paired else places(contents, examples)
    for number, part in enumerate(contents.parts):
        inner, in_part = part.contents, part_numbers == number
        dataset_examples = (
            part_examples[in_part] if inner.chosen is None else inner.chosen.array()[part_examples[in_part]]
        )
        flags[in_part] = per_token(inner.whole or inner, column, dataset_examples)
    return flags


def places(contents: Contents, examples: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns each example's part and its number in that part, for a joined store or a selection of one."""
    dataset, chosen = contents.whole or contents, contents.chosen
    if dataset.format != FORMAT:
        raise NotStoredError("origins: expected a store of actshard.concat", path=contents.path)
    positions = _arguments.members(_arguments.index(examples, "examples")[0], contents.num_examples, "example")
    numbers = positions if chosen is None else chosen.array()[positions]
    ends = np.cumsum([part.num_examples for part in dataset.parts])
    part = np.searchsorted(ends, numbers, "right")
    return part, numbers - np.concatenate([[0], ends])[part]
