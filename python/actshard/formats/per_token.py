"""Columns with one value per token: token ids, masks. They are read like rows, with one element each.

The columns of a store are lists, one per example, with one value per stored token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard.base.errors import ArgumentError, NotStoredError
from actshard.base.layers import Layer
from actshard.base.location import Location
from actshard.formats.report import Report
from actshard.formats.tables import rows_only
from actshard.formats.target import Block, Spec, Target, uniform

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard._native import Rows


_SHOWN = 20
"""Number of examples with invalid values that are reported per column."""
_EXAMPLES = 1 << 16
"""Number of examples whose lengths are examined together."""
_VALUES = 1 << 24
"""Number of values of a column that are read at once, unless one example has more."""
LAST = "last"
"""Name of the layer of last hidden states."""


def layer_names(ids: Sequence[int], last: str | None = None) -> tuple[int | str, ...]:
    """Layer names from ids, in stored order; a repeated id also has a number (``"9 (2)"``). ``last`` follows, if given."""
    counts: dict[int, int] = {}
    names: list[int | str] = []
    for layer in ids:
        counts[layer] = counts.get(layer, 0) + 1
        names.append(layer if counts[layer] == 1 else f"{layer} ({counts[layer]})")
    return tuple(names) if last is None else (*names, last)


class TokenColumns:
    """Reads per-token columns of a dataset's examples.

    Args:
        rows: by column name, rows of one element, with one group.
        n: number of examples.
        path: the dataset, for errors.
    """

    def __init__(self, rows: Mapping[str, Rows], n: int, path: Path) -> None:
        self._rows = dict(rows)
        self._n = n
        self._path = path

    @property
    def names(self) -> tuple[str, ...]:
        """The columns, in order."""
        return tuple(self._rows)

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Reads columns of all examples.

        Raises:
            NotStoredError: there is no such column.
        """
        return self.head(names, self._n)

    def head(self, names: Sequence[str], n: int) -> pa.Table:
        """Reads columns of the first n examples."""
        import pyarrow as pa

        self._check(names)
        parts = list(self._batches(names, min(n, self._n)))
        return pa.concat_tables(parts) if parts else self._read(names, np.arange(0))

    def some(self, names: Sequence[str], numbers: NDArray[np.int64]) -> pa.Table:
        """Reads columns of these examples."""
        self._check(names)
        return self._read(names, numbers)

    def batches(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Reads columns of all examples in order, in batches of bounded size."""
        self._check(names)
        return self._batches(names, self._n)

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._rows:
                raise NotStoredError(f"has no column {name!r}; columns are {', '.join(self._rows)}", path=self._path)

    def _batches(self, names: Sequence[str], n: int) -> Iterator[pa.Table]:
        rows = next(iter(self._rows.values()), None)
        for start in range(0, n, _EXAMPLES):
            stop = min(start + _EXAMPLES, n)
            if rows is None or not names:
                yield self._read(names, np.arange(start, stop))
                continue
            ends = np.cumsum(rows.tokens_of(0, np.arange(start, stop)))
            first = start
            while first < stop:
                before = int(ends[first - start - 1]) if first > start else 0
                last = start + int(np.searchsorted(ends, before + _VALUES, side="right"))
                last = min(max(last, first + 1), stop)
                yield self._read(names, np.arange(first, last))
                first = last

    def _read(self, names: Sequence[str], numbers: NDArray[np.int64]) -> pa.Table:
        import pyarrow as pa

        columns = {}
        for name in names:
            rows = self._rows[name]
            values = rows.gather_whole(0, numbers, None, None).reshape(-1)
            ends = np.cumsum(rows.tokens_of(0, numbers))
            large = values.size >= 1 << 31
            kind = pa.LargeListArray if large else pa.ListArray
            offsets = np.concatenate([[0], ends]).astype(np.int64 if large else np.int32)
            columns[name] = kind.from_arrays(offsets, pa.array(values))
        if not columns:  # a table of no columns still has a length, which only a column gives it
            return rows_only(len(numbers))
        return pa.table(columns)


def wrong_values(
    name: str, values: NDArray[Any], vocabulary: int = 1 << 31
) -> tuple[NDArray[np.int64], str, Literal["token-range", "mask-value"]]:
    """Positions of invalid values (``"input_ids"``: not token ids; masks: not 0 or 1), the expected value, the finding's code."""
    if name == "input_ids":
        return (
            np.flatnonzero((values < 0) | (values >= vocabulary)),
            f"a token id, 0 to {vocabulary - 1}",
            "token-range",
        )
    return np.flatnonzero((values != 0) & (values != 1)), "0 or 1", "mask-value"


def check_token_values(
    columns: TokenColumns, report: Report, path_of: Callable[[int], Location], vocabulary: int = 1 << 31
) -> None:
    """Reports token ids out of range, and masks with other values than 0 and 1: the first of each example, for some examples.

    Args:
        columns: ``input_ids`` and masks.
        report: receives the findings.
        path_of: returns the file of an example's tokens.
        vocabulary: number of tokens.
    """
    first, shown = 0, dict.fromkeys(columns.names, 0)
    for batch in columns.batches(columns.names):
        for name in columns.names:
            column = batch[name].combine_chunks()
            ends = np.asarray(column.offsets.to_numpy(), np.int64)
            positions, expected, code = wrong_values(name, column.flatten().to_numpy(zero_copy_only=False), vocabulary)
            rows = np.searchsorted(ends, positions, side="right") - 1
            for row, k in dict(zip(rows[::-1].tolist(), positions[::-1].tolist(), strict=True)).items():
                shown[name] += 1
                if shown[name] <= _SHOWN:
                    where = f"example {first + row}, {name}, token {k - ends[row]}"
                    report.add(code, path_of(first + row), int(column.values[k].as_py()), expected, where)
        first += len(batch)


def check_lists(schema: pa.Schema, names: Sequence[str], format: str) -> None:
    """Raises ArgumentError for columns that are not lists of integers or flags, NotStoredError for others than ``names``."""
    import pyarrow as pa

    for field in schema:
        if field.name not in names:
            raise NotStoredError(f"columns: {format} stores {', '.join(names)} only, found {field.name!r}")
        kind = field.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        value = kind.value_type if is_list else kind
        if pa.types.is_null(value):
            continue
        if not is_list or not (pa.types.is_integer(value) or pa.types.is_boolean(value)):
            raise ArgumentError(f"columns: {field.name!r}: expected lists of integers, one per token, found {kind}")


def values_of(
    column: pa.Array | pa.ChunkedArray, name: str, first: int, dtype: DTypeLike
) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """Returns the values of a per-token column as a flat array, and the number of values of each example.

    Args:
        column: lists, one per example.
        name: the column's name, for errors.
        first: the number of the first example, for errors.
        dtype: an integer dtype, which must hold the values exactly.

    Raises:
        ArgumentError: an example without values, a null, or a value that the dtype cannot hold.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = pa.chunked_array([column]) if isinstance(column, pa.Array) else column
    if flat.null_count:
        bad = first + int(pc.index(pc.is_null(flat), True).as_py())
        raise ArgumentError(f"columns: {name!r}: expected one value per token, found nothing for example {bad}")
    counts = pc.list_value_length(flat).to_numpy().astype(np.int64)
    values = pc.list_flatten(flat)
    if values.null_count:
        index = int(pc.index(pc.is_null(values), True).as_py())
        bad = first + int(np.searchsorted(np.cumsum(counts), index, side="right"))
        raise ArgumentError(f"columns: {name!r}: expected one value per token, found null in example {bad}")
    array = values.to_numpy() if len(values) else np.zeros(0, np.int64)
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    info = np.iinfo(dtype)
    if array.size and (array.min() < info.min or array.max() > info.max):
        index = int(np.flatnonzero((array < info.min) | (array > info.max))[0])
        bad = first + int(np.searchsorted(np.cumsum(counts), index, side="right"))
        raise ArgumentError(
            f"columns: {name!r}: expected values that {np.dtype(dtype)} holds, found {array[index]} in example {bad}"
        )
    return array.astype(dtype, copy=False), counts


ColumnValues = dict[str, tuple[NDArray[Any], NDArray[np.int64]]]
"""By column name, the values of all tokens, and the number of values of each example."""


def token_values(table: pa.Table, types: Mapping[str, DTypeLike], first: int) -> ColumnValues:
    """The values of a table's per-token columns. ``types``: their names and dtypes; other arguments as for :func:`values_of`."""
    return {name: values_of(table[name], name, first, types[name]) for name in table.column_names if name in types}


def made_up_masks(stored: Sequence[str], columns: Sequence[str]) -> list[tuple[str, str]]:
    """Losses of a conversion whose source lacks masks. ``stored``: the format's columns; ``columns``: the source's."""
    lacking = [name for name in stored if name.endswith("_mask") and name not in columns]
    return [("masks", f"the source has no {name}: it is written as ones") for name in lacking]


def check_counts(counts: NDArray[np.int64], tokens: NDArray[np.int64], name: str, first: int) -> None:
    """Raises ArgumentError unless every example has one value per token."""
    if (wrong := np.flatnonzero(counts != tokens)).size:
        i = int(wrong[0])
        raise ArgumentError(
            f"columns: {name!r}: example {first + i}: expected {tokens[i]} values, one per token, found {counts[i]}"
        )


# The base of the formats for draft models: token ids and masks, and hidden states of which one layer is the model's last.


class TokenTarget(Target):
    """Writes token ids, masks and hidden states of the same tokens."""

    token_types: Mapping[str, DTypeLike]
    """Columns with one value per token, each with an integer dtype that holds the values."""
    reserved: ClassVar[Collection[str]] = ()
    """Metadata fields that describe the files."""
    needs_tokens: ClassVar[bool] = True
    holds_named_layers = True
    splits = "examples"
    needs_columns: ClassVar[tuple[str, ...]] = ("input_ids",)

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.part is not None:
            raise ArgumentError(f"part: not supported by {self.format}; write one dataset")
        if conflicts := sorted(spec.metadata.keys() & set(self.reserved)):
            raise ArgumentError(
                f"metadata: {conflicts[0]!r} describes the files and is written by actshard; leave it out"
            )
        last = spec.options.get("last", LAST)
        if last is not None and last not in spec.layers and "last" in spec.options:
            raise ArgumentError(f"last: expected one of the layers {list(spec.layers)}, found {last!r}")
        self.last = spec.layers.index(last) if last in spec.layers else None
        """Index of the layer that is stored as the last hidden state; None: not stored."""
        self.aux = [k for k in range(len(spec.layers)) if k != self.last]
        """Indices of the other layers, in stored order."""

    def require_last(self, what: str, remedy: str = "") -> None:
        """Raises ArgumentError without a last hidden state. ``what``: what stores it, with the verb."""
        if self.last is None:
            raise ArgumentError(
                f"layers: {what} the last hidden state: name a layer {LAST!r}, or pass last=NAME{remedy}; "
                f"found {list(self.spec.layers)}"
            )

    def layer_ids(self) -> list[int]:
        """The option ``layer_ids``: numbers of the layers of :attr:`aux`; by default their names."""
        ids = self.spec.options.get("layer_ids")
        if ids is None:
            ids = [self.spec.layers[k] for k in self.aux]
        elif not isinstance(ids, list | tuple) or len(ids) != len(self.aux):
            raise ArgumentError(
                f"layer_ids: expected {len(self.aux)} integers, one for each other layer, found {ids!r}"
            )
        if not ids:
            raise ArgumentError(
                f"layers: {self.format} stores other layers besides the last hidden state; found {list(self.spec.layers)}"
            )
        if any(type(x) is not int or not -1 <= x < 1 << 31 for x in ids) or len(set(ids)) < len(ids):
            raise ArgumentError(
                f"layers: expected different integers of at least -1 as target_layer_ids, found {list(ids)}; pass layer_ids=[...]"
            )
        return list(ids)

    @property
    def aux_names(self) -> Sequence[Layer]:
        """Names under which the layers of :attr:`aux` are read."""
        return [self.spec.layers[k] for k in self.aux]

    @property
    def reading(self) -> dict[Layer, Layer]:
        """The layers before the last hidden state, then the last hidden state."""
        names: dict[Layer, Layer] = dict(zip((self.spec.layers[k] for k in self.aux), self.aux_names, strict=True))
        return names if self.last is None else {**names, self.spec.layers[self.last]: LAST}

    def further_losses(self, columns: Sequence[str]) -> list[tuple[str, str]]:
        """The name of the last hidden state, and masks that the source lacks."""
        losses = []
        if self.last is not None and self.spec.layers[self.last] != LAST:
            name = self.spec.layers[self.last]
            losses.append(("layers", f"{self.format} does not record their names: {name} is read as {LAST!r}"))
        return losses + made_up_masks(self.only_columns or (), columns)

    # -- columns ---------------------------------------------------------------------------------------------------

    def check_columns(self, schema: pa.Schema) -> None:
        """Raises for columns that are not lists of integers, and for other columns."""
        check_lists(schema, self.only_columns or (), self.format)

    def check_count(self, n: int, columns: Sequence[str]) -> None:
        """Raises ArgumentError without token ids."""
        if "input_ids" not in columns:
            raise ArgumentError(
                f"columns: {self.format} stores token ids: pass columns={{'input_ids': [...]}}, a list per example"
            )

    def check_values(self, table: pa.Table, first: int) -> None:
        """Raises ArgumentError for nulls, and for values that the files cannot hold."""
        token_values(table, self.token_types, first)

    def tokens_of(self, block: Block) -> tuple[NDArray[np.int64], ColumnValues]:
        """Returns the number of tokens of each example of a block, and the values of its tokens.

        Raises:
            ArgumentError: an example without tokens, or with another number of values than tokens.
        """
        tokens = uniform(block.lengths, self.format, self.spec.layers)
        if (tokens <= 0).any():
            bad = self.n + int(np.flatnonzero(tokens <= 0)[0])
            raise ArgumentError(f"example {bad} has no tokens, and {self.format} requires at least one; leave it out")
        assert block.columns is not None  # as check_count requires
        values = token_values(block.columns, self.token_types, self.n)
        for name, (_, counts) in values.items():
            check_counts(counts, tokens, name, self.n)
        return tokens, values
