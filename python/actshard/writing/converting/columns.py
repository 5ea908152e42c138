"""Columns of examples in a conversion: which columns the target stores, under which names, and which are lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard.base._arguments import many
from actshard.base._columns import pick_rows
from actshard.base.errors import ArgumentError, ArgumentTypeError, NotStoredError
from actshard.base.layers import Layer
from actshard.formats.carrying import Carrying
from actshard.formats.contents import Contents
from actshard.formats.tables import IncompatibleTypesError, common_schema, concatenated
from actshard.formats.target import LOGITS, OTHER_TEXT, PATCH_LABELS, PREVIEW, ROUTER, TEXTS, array_of, list_column

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard._native import Rows
    from actshard.formats.target import Target
    from actshard.reading.store import Store
    from actshard.streaming.readable import Readable


# Returns the ``Carrying`` of a source: that of its format, or a :class:`JoinedCarrying` if the source joins several stores.


def carrying_of(contents: Contents) -> Carrying:
    """Returns the ``Carrying`` of a source, which selects the columns and metadata to convert."""
    return JoinedCarrying() if contents.parts else formats.get(contents.format).carrying()


class JoinedCarrying(Carrying):
    """Keeps the columns that each part's format keeps, and every part's metadata."""

    def names(self, contents: Contents) -> list[str]:
        """Columns that some part keeps, and the column of sources."""
        sources = [part.contents for part in contents.parts]
        stored_names = {name for source in sources for name in source.column_names}
        kept_names = {name for source in sources for name in carrying_of(source).names(source)}
        return [name for name in contents.column_names if name in kept_names or name not in stored_names]

    def left_behind(self, contents: Contents) -> list[str]:
        """Contents that at least one part cannot convert."""
        sources = [part.contents for part in contents.parts]
        return list(dict.fromkeys(what for source in sources for what in carrying_of(source).left_behind(source)))

    def fillers(self, contents: Contents) -> frozenset[str]:
        """Columns that are empty in every part."""
        has: dict[str, bool] = {}
        for part in contents.parts:
            source = part.contents
            fillers = carrying_of(source).fillers(source)
            for name in source.column_names:
                # A part's text column may have the other name in the joined store.
                joined = name if name in contents.column_names else OTHER_TEXT.get(name, name)
                has[joined] = has.get(joined, True) and name in fillers
        return frozenset(name for name, only in has.items() if only)

    def metadata_kept(self, contents: Contents) -> dict[str, object]:
        """Every part's metadata."""
        parts = [
            {**entry, "metadata": carrying_of(part.contents).metadata_kept(part.contents)}
            for entry, part in zip(contents.metadata["parts"], contents.parts, strict=True)
        ]
        return {"parts": parts}

    def origin(self, metadata: Mapping[str, object]) -> dict[str, object] | None:
        """None: the parts may come from several datasets."""
        return None


# Texts of a conversion's result: repeated and missing ones are losses in formats that find examples by text.


_AT_ONCE = 16_384
"""Number of texts in memory as Python strings."""


class Texts:
    """Counts the distinct and the missing texts of a dataset's examples."""

    def __init__(self) -> None:
        self._examples = 0
        self._stored = False
        """Whether some examples have a column of texts; otherwise the target generates texts."""
        self._hashes: list[NDArray[np.int64]] = []

    @classmethod
    def of(cls, result: Store) -> Texts:
        """The texts of a finished dataset, without those that its writer generated."""
        texts, contents = cls(), result.contents
        generated = formats.get(contents.format).carrying().generated(contents)
        names = [name for name in TEXTS if name in contents.column_names and name not in generated][:1]
        batches = contents.column_batches or (lambda names: iter([contents.columns(names)]))
        for table in batches(names) if names else ():
            texts.add(table, len(table))
        return texts

    def add(self, table: pa.Table | None, n: int) -> None:
        """Counts the texts of n more examples with these columns."""
        self._examples += n
        name = None if table is None else next((name for name in TEXTS if name in table.column_names), None)
        if table is None or name is None:
            return
        self._stored = True
        for first in range(0, n, _AT_ONCE):
            texts = table[name].slice(first, _AT_ONCE).drop_null().to_pylist()
            self._hashes.append(np.fromiter(map(hash, texts), np.int64, len(texts)))

    def losses(self, format: str) -> list[str]:
        """The losses in a format that looks rows up by text."""
        if not self._stored:
            return [f"the source has none; texts are generated because {format} looks rows up by text"]
        hashes = np.concatenate(self._hashes) if self._hashes else np.zeros(0, np.int64)
        shared, absent = len(hashes) - len(np.unique(hashes)), self._examples - len(hashes)
        details = []
        if shared:
            details.append(
                f"{many(shared, 'example', 'has', 'have')} the same text as another one: "
                f"{format} looks rows up by text and returns one example's rows for all"
            )
        if absent:
            details.append(
                f"{many(absent, 'example', 'has', 'have')} no text, while others have one: "
                f"{format}'s own reader cannot find them, and fails if it reads all examples"
            )
        return details


_ALL = 1 << 40
"""Larger than the length of any list: no upper limit."""
_EXAMINED = 64
"""Number of examples that decide which columns have a value per token."""
_PER_TOKEN = ("input_ids", "token_ids", "loss_mask", "attention_mask", "position_ids", "labels")
"""Names of columns with a value per token in datasets for language models."""


class NumbersMatterError(Exception):
    """The shards' sample_id_range claims that samples are numbered by order, but they are not: keep the number column."""


class Columns:
    """Reads a store's columns for some examples at a time."""

    def __init__(
        self,
        store: Store,
        holds_columns: bool,
        labels: NDArray[np.uint8] | None,
        *,
        is_complete: bool,
        numbers: bool | None = None,
        chosen: Mapping[str, str] | None = None,
        token_ranges: Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.int64]]] | None = None,
        fillers: Iterable[str] | None = None,
        layers: Mapping[Layer, Layer] | None = None,
    ) -> None:
        """Prepares the columns.

        Args:
            store: the source.
            holds_columns: whether the target stores columns at all.
            labels: patch labels, uint8 ``(num_examples, patches)``; None for none.
            is_complete: whether all examples are taken, in order.
            numbers: keep the column of sample numbers; None: keep it unless the metadata shows that it equals the order.
            chosen: the columns to take, mapped to their names in the result; None: all columns under their own names.
            token_ranges: returns the first token and the number of tokens to take from each example; None: all tokens.
            fillers: columns that are empty in the whole dataset, as a plan recorded them; None: they are looked for.
            layers: the layers that are converted, mapped to their names in the result; None: all layers under their own names.
        """
        self._token_ranges = token_ranges
        self.store = store
        self.carrying = carrying_of(store.contents)
        self.chosen = chosen
        if chosen is not None and self.carrying.number_column in chosen:
            numbers = True
        self.names = self.carrying.names(store.contents) if holds_columns else []
        if chosen is not None:
            self.names = [n for n in self.names if n in chosen]
        self.texts = Texts()
        """The result's texts, for targets that find examples by text."""
        self.turned: dict[str, str] = {}
        """Columns whose type changes for the target, with a description of the change."""
        self._unchanged: dict[str, pa.Field] = {}
        """Columns of earlier examples whose type did not change for the target."""
        self._whole: pa.Table | None = None
        self._unit: tuple[int, pa.Table] | None = None
        self._window: _Window | None = None
        self._logits = holds_columns and store.contents.has_logits
        renamed = {} if layers is None else {old: new for old, new in layers.items() if old != new}
        self._router_names = {f"{ROUTER}{old}": f"{ROUTER}{new}" for old, new in renamed.items()}
        """Names of router tensors in the result, if they follow layers that get other names."""
        replaced = {*renamed.values()} - {*renamed}
        routers = store.contents.router_layers if holds_columns else ()
        self.routers: tuple[Layer, ...] = tuple(layer for layer in routers if layer not in replaced)
        self.replaced_routers: tuple[Layer, ...] = tuple(
            layer for layer in replaced if layer in routers or f"{ROUTER}{layer}" in self.names
        )
        """Layers whose router tensors are left out, because another layer gets their name."""
        self.labels = labels
        self.numbers = (
            (not is_complete or not self.carrying.numbered_by_order(store.contents)) if numbers is None else numbers
        )
        self.fillers = frozenset(fillers or ())
        """Columns that are empty in the whole dataset; they are not converted."""
        if fillers is None and self.names:
            self.fillers = self.carrying.fillers(store.contents)
        self._cut: list[frozenset[str]] = []
        """Of each part of the source: columns with a value per stored token, in formats that do not declare them."""
        self.uncut: tuple[str, ...] = ()
        """Columns that may have a value per stored token, and are not cut."""
        if token_ranges is not None:
            part_columns = [_find_token_columns(part.contents, part.rows, self._examined) for part in self._parts]
            self._cut = [cut for cut, _ in part_columns]
            self.uncut = tuple(dict.fromkeys(itertools.chain.from_iterable(uncut for _, uncut in part_columns)))
        self._token_columns = sorted({*store.contents.token_columns, *itertools.chain.from_iterable(self._cut)})

    def of(self, examples: NDArray[np.int64], unit: int | None, target: Target) -> pa.Table | None:
        """Returns the columns of some examples in the target's form; None if there are no columns.

        Args:
            examples: int64 example numbers.
            unit: the shard that contains them; None if the source has no such units.
            target: the target.

        Raises:
            NumbersMatterError: the column of sample numbers was left out, but differs from the order.
        """
        import pyarrow as pa

        if not target.holds_columns:
            if self.labels is None:
                return None
            field, column = list_column(PATCH_LABELS, np.ascontiguousarray(self.labels[examples]))
            return pa.Table.from_arrays([column], schema=pa.schema([field]))
        columns: list[tuple[pa.Field, object]] = []
        table = self._cut_token_columns(self._table(examples, unit), examples)
        table = self._one_text(self._outgoing(table), target)
        replaced = {f"{ROUTER}{layer}" for layer in self.replaced_routers}
        table = table.drop_columns([name for name in table.column_names if name in replaced])
        table = table.rename_columns([self._router_names.get(name, name) for name in table.column_names])
        number = self.carrying.number_column
        if number is not None and self.chosen is not None:
            number = self.chosen.get(number)
        if number == formats.get(target.format).carrying().number_column:
            number = None
        for field, column in zip(table.schema, table.columns, strict=True):
            if field.name == number and not self.numbers:
                if not _counts_up(column, examples):
                    raise NumbersMatterError(f"{field.name}: sample numbers differ from their shards' sample_id_range")
                continue
            if field.name == PATCH_LABELS and self.labels is not None:
                continue
            if target.holds_logits and (field.name in LOGITS or field.name.startswith(ROUTER)):
                columns.append(_as_array(field, column))
                continue
            if pa.types.is_dictionary(field.type):
                columns.append((pa.field(field.name, field.type.value_type), column.cast(field.type.value_type)))
                continue
            columns.append((field, column))
        if self.labels is not None:
            columns.append(list_column(PATCH_LABELS, np.ascontiguousarray(self.labels[examples])))
        if self._logits:
            columns += map(list_column, LOGITS, self.store.logits(examples))
        for layer in self.routers:
            name = f"{ROUTER}{layer}"
            columns.append(list_column(self._router_names.get(name, name), self.store.router(layer, examples)))
        if target.only_columns is not None:
            columns = [(field, column) for field, column in columns if field.name in target.only_columns]
        if not columns:
            return None
        result = pa.Table.from_arrays(
            [column for _, column in columns], schema=pa.schema([field for field, _ in columns])
        )
        changes = target.turned(result.schema)
        stored = target.turn(result)
        self._check_changes(changes, result.schema, stored.schema, target)
        self.turned |= changes
        return stored

    def _check_changes(self, changes: Iterable[str], schema: pa.Schema, stored: pa.Schema, target: Target) -> None:
        """Raises ArgumentError if columns change their type for the target that earlier examples had stored unchanged.

        ``schema``, ``stored``: before and after the changes. A later check would name the type after the change, which the source
        does not have.
        """
        import pyarrow as pa

        for name in changes:
            earlier_field = self._unchanged.get(name)
            if earlier_field is None:
                continue
            try:
                common_schema(pa.schema([earlier_field]), pa.schema([stored.field(name)]))
            except IncompatibleTypesError as error:
                raise ArgumentError(
                    f"columns: {name!r}: expected {earlier_field.type}, as in earlier examples, found {schema.field(name).type}, "
                    f"which {target.format} stores as {stored.field(name).type}. A column has one type: convert the values, or use "
                    "another name."
                ) from error
        for field in stored:
            if field.name not in changes and not pa.types.is_null(field.type):
                self._unchanged.setdefault(field.name, field)

    def _cut_token_columns(self, table: pa.Table, examples: NDArray[np.int64]) -> pa.Table:
        """Cuts the lists of per-token columns to the tokens that are taken."""
        names = [name for name in self._token_columns if name in table.column_names]
        if self._token_ranges is None or not names or not len(examples):
            return table
        from actshard.reading.joining import per_token

        first, count = self._token_ranges(examples)
        ends = np.cumsum([part.num_examples for part in self._parts])
        part_of = np.searchsorted(ends, examples, "right")
        for name in names:
            column = table.schema.get_field_index(name)
            if name in self.store.contents.token_columns:
                is_cut = per_token(self.store.contents, name, examples)
            else:
                is_cut = np.array([name in cut for cut in self._cut])[part_of]
                is_cut &= _list_lengths(table[name]) == self._stored_tokens(examples)
            lists = _cut_lists(table[name], np.where(is_cut, first, 0), np.where(is_cut, count, _ALL))
            table = table.set_column(column, name, lists)
        return table

    @property
    def _parts(self) -> Sequence[Readable]:
        """The parts of a join, or the store."""
        return self.store.contents.joined or (self.store,)

    def _examined(self, contents: Contents) -> list[str]:
        """Names of the columns that may have a value per token, although their format does not declare it."""
        declared = {*contents.token_columns, PATCH_LABELS}
        return [name for name in self.names if name in contents.column_names and name not in declared]

    def _stored_tokens(self, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens stored of each example, with padding."""
        rows = self.store.rows
        tokens: NDArray[np.int64] = rows.tokens_of(0, np.ascontiguousarray(examples))
        return tokens

    def _outgoing(self, table: pa.Table) -> pa.Table:
        """The chosen columns under their names in the result, in the form used by other formats."""
        # Only if text columns keep their names: a renamed column keeps its meaning.
        if self.chosen is None or all(self.chosen.get(name, name) == name for name in TEXTS):
            table = self.carrying.outgoing(table)
        if self.chosen is None:
            return table
        ordered = [name for name in self.chosen if name in table.column_names]
        return table.select(ordered).rename_columns([self.chosen[name] for name in ordered])

    def _one_text(self, table: pa.Table, target: Target) -> pa.Table:
        """Renames the column of text previews to the target's text column, if the dataset has no other text column."""
        import pyarrow as pa

        text_column = target.text_column
        if text_column in (None, PREVIEW) or PREVIEW not in table.column_names or not _is_text(table[PREVIEW].type):
            return table
        text_names = [name for name in TEXTS if name != PREVIEW]
        fields = [(name, pa.string()) for name in self.names if name not in self.fillers]
        if any(name in text_names for name in self._outgoing(pa.schema(fields).empty_table()).column_names):
            return table
        if text_name := next((name for name in text_names if name in table.column_names), None):
            raise ArgumentError(
                f"columns: some shards have {PREVIEW!r} only, others also {text_name!r}; list one of them"
            )
        return table.rename_columns([text_column if name == PREVIEW else name for name in table.column_names])

    def _table(self, examples: NDArray[np.int64], unit: int | None) -> pa.Table:
        contents = self.store.contents
        if unit is not None and contents.unit_columns is not None and contents.units is not None:
            if self._unit is None or self._unit[0] != unit:
                table = contents.unit_columns(unit)
                keep = [n for n in table.column_names if n not in self.carrying.derived]
                if contents.parts:  # each part has its own derived columns
                    keep = [n for n in keep if n in self.names]
                keep = [n for n in keep if n not in self.fillers and (self.chosen is None or n in self.chosen)]
                self._unit = (unit, table.select(keep if self.names else []))
            return pick_rows(self._unit[1], examples - contents.units[unit])
        names = [n for n in self.names if n not in self.fillers]
        batches = contents.column_batches
        if batches is not None and self._whole is None and names:
            if self._window is None:
                self._window = _Window(lambda: batches(names))
            window_rows = self._window.rows(examples)
            if window_rows is not None:
                return window_rows
        if self._whole is None:
            self._window = None
            self._whole = self.store.read_columns(names)
        return pick_rows(self._whole, examples)


def _find_token_columns(
    contents: Contents, rows: Rows, examined: Callable[[Contents], list[str]]
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Columns whose lists have a value per stored token, and those that may have one.

    The first examples decide. If all of them are equally long, or have no value, a list may also be a vector: then columns are cut
    only if their names are those of token ids and masks. The others may have a value per token.
    """
    names = examined(contents)
    n = min(_EXAMINED, contents.num_examples)
    if contents.units is not None:
        n = min(n, contents.units[1])  # of the first shard: each must be decoded
    if not names or not n:
        return frozenset(), ()
    head = contents.columns(names).slice(0, n) if contents.head_columns is None else contents.head_columns(names, n)
    stored = rows.tokens_of(0, np.arange(len(head)))
    cut: list[str] = []
    uncut: list[str] = []
    for name in names:
        if name not in head.column_names or not _is_list(head[name].type):
            continue
        valid = head[name].is_valid().to_numpy()
        lengths = _list_lengths(head[name])[valid] if valid.any() else stored[:0]
        if np.array_equal(lengths, stored[valid]):
            is_certain = name in _PER_TOKEN or len(set(stored[valid].tolist())) > 1
            (cut if is_certain else uncut).append(name)
    return frozenset(cut), tuple(uncut)


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _list_lengths(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Number of elements of each list; 0 of null lists."""
    import pyarrow.compute as pc

    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return lengths


def _cut_lists(column: pa.ChunkedArray, first: NDArray[np.int64], count: NDArray[np.int64]) -> pa.Array:
    """Elements ``first`` to ``first + count - 1`` of each list; null lists stay null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = _list_lengths(column)
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    is_kept = (positions >= np.repeat(first, lengths)) & (positions < np.repeat(first + count, lengths))
    values = pc.list_flatten(column).filter(pa.array(is_kept)).combine_chunks()
    sizes = np.maximum(np.minimum(first + count, lengths) - np.minimum(first, lengths), 0)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    absent = column.is_null().combine_chunks() if column.null_count else None
    if len(values) < 1 << 31:
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=absent)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values, mask=absent)


class _Window:
    """Columns read in order: keeps only the record batches that the requested examples need in memory."""

    def __init__(self, begin: Callable[[], Iterator[pa.Table]]) -> None:
        self._begin = begin
        self._batches = begin()
        self._held: list[pa.Table] = []
        self._first = self._last = 0

    def rows(self, examples: NDArray[np.int64]) -> pa.Table | None:
        """Returns rows of ascending examples; None if they are not ascending or precede the last request."""
        import pyarrow as pa

        if not len(examples) or (np.diff(examples) < 0).any():
            return None
        low, high = int(examples[0]), int(examples[-1])
        if low < self._first:
            if low:
                return None
            self._batches, self._held, self._first, self._last = self._begin(), [], 0, 0  # another pass
        while self._last <= high:
            batch = next(self._batches, None)
            if batch is None:
                return None
            self._held.append(batch)
            self._last += batch.num_rows
            while self._held and self._first + self._held[0].num_rows <= low:
                self._first += self._held.pop(0).num_rows
        if all(batch.schema.equals(self._held[0].schema) for batch in self._held):
            table = pa.concat_tables(self._held)
        else:  # formats of JSON lines infer the types of each batch
            table, mixed = concatenated(self._held)
            if mixed:
                raise ArgumentError(
                    f"columns: {mixed[0]!r}: expected values of one type, found several. Convert the values, or use another name."
                )
        return pick_rows(table, examples - self._first)


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    # Null: examples whose texts are all missing.
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _counts_up(column: pa.ChunkedArray, examples: NDArray[np.int64]) -> bool:
    """Whether a column equals the example numbers."""
    return column.null_count == 0 and bool((column.to_numpy() == examples).all())


def _as_array(field: pa.Field, column: pa.ChunkedArray) -> tuple[pa.Field, object]:
    """Converts a column of equally long lists to a fixed-size list column of the smallest dtype that holds all values exactly."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(field.type):
        return field, column
    try:
        values = np.array(column.to_pylist())
        if values.ndim != 2 or values.dtype.kind not in "if":
            return field, column
    except ValueError:
        return field, column
    smaller = (np.float16, np.float32) if values.dtype.kind == "f" else (np.int32,)
    with np.errstate(over="ignore"):
        for kind in smaller:
            if np.array_equal(values.astype(kind).astype(values.dtype), values, equal_nan=values.dtype.kind == "f"):
                return list_column(field.name, values.astype(kind))
    return list_column(field.name, values)


def labels_of(store: Store) -> NDArray[np.uint8] | None:
    """Patch labels as uint8 ``(num_examples, patches)``, also from a column of another format; None if there are none.

    A column with other numbers of labels per example, or numbers that do not fit, is no column of patch labels.
    """
    if store.labels is not None:
        return store.labels
    if PATCH_LABELS not in store.contents.column_names:
        return None
    import pyarrow as pa

    column = store.read_columns([PATCH_LABELS])[PATCH_LABELS]

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lists = column.to_pylist()
        if len({-1 if row is None else len(row) for row in lists} | {-1}) != 2 or None in lists:
            return None
        values = np.array(lists)
    elif pa.types.is_fixed_size_list(kind) and not column.null_count:
        values = array_of(column)
    else:
        return None
    if values.dtype.kind not in "iu" or (values.size and (values.min() < 0 or values.max() > 255)):
        return None
    return values.astype(np.uint8)


def dropped(store: Store, chosen: Mapping[str, str] | None) -> list[str]:
    """Columns that a target without columns loses. The column of sample numbers does not count as a loss."""
    carrying = carrying_of(store.contents)
    names = carrying.names(store.contents) if chosen is None else chosen
    as_labels = chosen is None or chosen.get(PATCH_LABELS) == PATCH_LABELS
    return [n for n in names if n != carrying.number_column and not (n == PATCH_LABELS and as_labels)]


def without_place(columns: Columns, stored_names: Iterable[str]) -> list[str]:
    """Columns that a target loses because it can only store ``stored_names``. The column of sample numbers does not count."""
    carrying, store, chosen = formats.get(columns.store.format).carrying(), columns.store, columns.chosen
    names = dict.fromkeys(carrying.names(store.contents)) if chosen is None else chosen
    new_names = {name: name if chosen is None else chosen[name] for name in names}
    return [
        n
        for n in names
        if n != carrying.number_column and n not in columns.fillers and new_names[n] not in stored_names
    ]


def left_out(store: Store, chosen: Mapping[str, str]) -> list[str]:
    """Columns that were not chosen. The column of sample numbers does not count as a loss."""
    carrying = carrying_of(store.contents)
    return [n for n in carrying.names(store.contents) if n != carrying.number_column and n not in chosen]


def choose(store: Store, columns: object) -> dict[str, str] | None:
    """Checks ``columns=`` and returns a mapping from names to names in the result; None: all columns.

    Raises:
        ArgumentError: an invalid or duplicate name. NotStoredError: the source has no such column.
    """
    if columns is None:
        return None
    if isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
        raise ArgumentTypeError(
            f"columns: expected names, or a mapping of names to new names, found {type(columns).__name__}"
        )
    pairs = list(columns.items()) if isinstance(columns, Mapping) else [(name, name) for name in columns]
    for name in itertools.chain.from_iterable(pairs):
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(f"columns: expected names, found {name!r:.80}")
        if name.encode(errors="ignore").decode() != name:
            raise ArgumentError(f"columns: {name!r:.80} contains a lone surrogate, which UTF-8 cannot encode")
    source_names = carrying_of(store.contents).names(store.contents)
    for name, new_name in pairs:
        if name not in source_names:
            raise NotStoredError(
                f"columns: expected columns of the source ({', '.join(source_names) or 'none'}), found {name!r}",
                path=store.path,
            )
        if new_name != name and (new_name == PATCH_LABELS or new_name in LOGITS or new_name.startswith(ROUTER)):
            raise ArgumentError(f"columns: {name!r}: cannot be renamed to {new_name!r}, which is reserved")
    for names in zip(*pairs, strict=True):
        if len(set(names)) < len(names):
            raise ArgumentError(f"columns: expected distinct names, found {list(names)}")
    return dict(pairs)
