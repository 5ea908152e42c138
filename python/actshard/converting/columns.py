"""What is known of examples on its way from one format to another: which columns go where, and what is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.formats.lmprobe.read import TOKEN_LISTS
from actshard.formats.lmprobe.write import MADE_UP
from actshard.formats.target import LOGITS, PATCH_LABELS, ROUTER, TEXTS, array_of, list_column

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.target import Target
    from actshard.store import Store

DERIVED = {
    "saev": frozenset[str](),
    "lmprobe": frozenset(
        ("shard_index", "row_offset", "shard_index_logits", "row_offset_logits", "token_offset", *TOKEN_LISTS)
    ),
    "zarr": frozenset(("seq_len",)),
    "pickle": frozenset(("shape", "layers")),
}
"""Columns that say where rows lie or how many there are: every format writes its own."""
NUMBERS = {"saev": "example_idx", "pickle": "sample_idx"}
"""Columns that number examples; left out where they say no more than their order does."""


def carried(store: Store) -> list[str]:
    """Names of columns that say something about examples, and not about files."""
    names = [n for n in store.contents.column_names if n not in DERIVED[store.format]]
    if store.format == "lmprobe" and _is_full(store):
        names.remove("num_tokens")
    return names


def _is_full(store: Store) -> bool:
    hidden = store.metadata.get("tensors", {}).get("hidden_layers", {})
    return isinstance(hidden, dict) and hidden.get("storage") == "full_sequence"


class NumbersMatterError(Exception):
    """Samples are not numbered by their order, although the list of shards says so: their numbers have to be kept."""


class Columns:
    """The columns of a store, examples at a time."""

    def __init__(
        self, store: Store, wanted: bool, labels: NDArray[np.uint8] | None, *, whole: bool, numbers: bool | None = None
    ) -> None:
        """``numbers``: keep a column that numbers examples; None: unless it says no more than their order, known beforehand."""
        self.store = store
        self.names = carried(store) if wanted else []
        self.shared_texts = 0
        """Examples whose text an earlier one has, where that was looked at."""
        self.made_up_texts = False
        """Whether the target has to make up texts, as the source has none; where that was looked at."""
        self.turned: dict[str, str] = {}
        """Columns that became of another type for the target, and what became of them."""
        self._whole: pa.Table | None = None
        self._unit: tuple[int, pa.Table] | None = None
        self._window: _Window | None = None
        self._logits = wanted and store.contents.has_logits
        self.routers: tuple[int, ...] = store.contents.router_layers if wanted else ()
        self.labels = labels
        self._numbers = (not whole or not _numbered_by_order(store)) if numbers is None else numbers
        self._without = _fillers(store) if self.names else frozenset()

    def of(self, examples: NDArray[np.int64], unit: int | None, target: Target) -> pa.Table | None:
        """The columns of some examples, as a target keeps them; None: there are none.

        Raises:
            NumbersMatterError: a column that was left out cannot be left out.
        """
        import pyarrow as pa

        if target.format == "saev":
            if self.labels is None:
                return None
            field, column = list_column(PATCH_LABELS, np.ascontiguousarray(self.labels[examples]))
            return pa.Table.from_arrays([column], schema=pa.schema([field]))
        made: list[tuple[pa.Field, Any]] = []
        table = _one_text(self._table(examples, unit), self.store.format, target.format)
        for field, column in zip(table.schema, table.columns, strict=True):
            if field.name == NUMBERS.get(self.store.format) != NUMBERS.get(target.format) and not self._numbers:
                if not _counts_up(column, examples):
                    raise NumbersMatterError(
                        f"{field.name}: samples are not numbered as their shards' sample_id_range says"
                    )
                continue
            if field.name == PATCH_LABELS and self.labels is not None:
                continue
            if target.format == "lmprobe" and (field.name in LOGITS or field.name.startswith(ROUTER)):
                made.append(_as_array(field, column))
                continue
            if pa.types.is_dictionary(field.type):
                made.append((pa.field(field.name, field.type.value_type), column.cast(field.type.value_type)))
                continue
            made.append((field, column))
        if self.labels is not None:
            made.append(list_column(PATCH_LABELS, np.ascontiguousarray(self.labels[examples])))
        if self._logits:
            made += map(list_column, LOGITS, self.store.logits(examples))
        made += [list_column(f"{ROUTER}{layer}", self.store.router(layer, examples)) for layer in self.routers]
        if not made:
            return None
        whole = pa.Table.from_arrays([column for _, column in made], schema=pa.schema([field for field, _ in made]))
        self.turned |= target.turned(whole.schema)
        return target.turn(whole)

    def _table(self, examples: NDArray[np.int64], unit: int | None) -> pa.Table:
        contents = self.store.contents
        if unit is not None and contents.unit_columns is not None and contents.units is not None:
            if self._unit is None or self._unit[0] != unit:
                table = contents.unit_columns(unit)
                keep = [n for n in table.column_names if n not in DERIVED[self.store.format]]
                self._unit = (unit, table.select(keep if self.names else []))
            return self._unit[1].take(examples - contents.units[unit])
        names = [n for n in self.names if n not in self._without]
        batches = contents.column_batches
        if batches is not None and self._whole is None and names:
            if self._window is None:
                self._window = _Window(lambda: batches(names))
            found = self._window.rows(examples)
            if found is not None:
                return found
        if self._whole is None:
            self._window = None
            self._whole = self.store.read_columns(names)
        whole = self._whole
        first, n = int(examples[0]) if len(examples) else 0, len(examples)
        if n and (np.diff(examples) == 1).all():
            return whole.slice(first, n)
        return whole.take(examples)


class _Window:
    """Rows of columns that are read in order: of the whole table, only what some examples need is in memory."""

    def __init__(self, begin: Callable[[], Iterator[pa.Table]]) -> None:
        self._begin = begin
        self._batches = begin()
        self._held: list[pa.Table] = []
        self._first = self._last = 0

    def rows(self, examples: NDArray[np.int64]) -> pa.Table | None:
        """Rows of ascending examples; None where they are not, or lie before those asked for last."""
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
        table = pa.concat_tables(self._held, promote_options="default")
        if high - low + 1 == len(examples):
            return table.slice(low - self._first, len(examples))
        return table.take(examples - self._first)


def _numbered_by_order(store: Store) -> bool:
    """Whether a column that numbers examples says no more than their order: for pickle shards, by their sample_id_range."""
    if store.format != "pickle":
        return True
    found: Any = store.metadata.get("shards")
    if not isinstance(found, list):
        return False
    at = 0
    for shard in found:
        if not isinstance(shard, dict):
            return False
        ids, count = shard.get("sample_id_range"), shard.get("num_samples")
        if count == 0:
            continue
        if not isinstance(count, int) or ids != [at, at + count - 1]:
            return False
        at += count
    return True


def _fillers(store: Store) -> frozenset[str]:
    """Columns that a format always has and that say nothing here: lmprobe's without a text, a label or a count."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if store.format != "lmprobe":
        return frozenset()
    made_up = store.metadata.get(MADE_UP)
    empty = {name for name in ("text", "label", "num_tokens") if name in store.contents.column_names}
    found = {"text"} & empty if isinstance(made_up, list) and "text" in made_up else set()
    empty -= found
    read = store.contents.column_batches
    batches = read(sorted(empty)) if read is not None and empty else iter(())
    for table in batches:
        for name in sorted(empty):
            column = table[name]
            nothing = column.null_count == len(column)
            if name == "text" and not nothing and not column.null_count and pa.types.is_string(column.type):
                nothing = not pc.max(pc.binary_length(column)).as_py()
            if not nothing:
                empty.discard(name)
        if not empty:
            break
    return frozenset(found | empty)


def _one_text(table: pa.Table, source: str, target: str) -> pa.Table:
    """A pickle shard's preview, completed where the whole text is kept beside it; elsewhere these are two columns."""
    import pyarrow.compute as pc

    if source == "pickle" and "text_preview" in table.column_names and "text" in table.column_names:
        whole = pc.coalesce(table["text"].cast("string"), table["text_preview"].cast("string"))
        at = table.column_names.index("text_preview")
        table = table.drop_columns(["text"]).set_column(at, "text_preview", whole)
    if "text_preview" in table.column_names and pc.all(pc.equal(table["text_preview"], "")).as_py():
        return table.drop_columns(["text_preview"])
    if target == "pickle" or "text_preview" not in table.column_names:
        return table
    own = {"lmprobe": "text", "zarr": "prompt"}[target]
    taken = any(name in table.column_names for name in TEXTS if name != "text_preview")
    return table if taken else table.rename_columns([own if n == "text_preview" else n for n in table.column_names])


def _counts_up(column: Any, examples: NDArray[np.int64]) -> bool:
    """Whether a column says no more than the order of examples does."""
    return column.null_count == 0 and bool((column.to_numpy() == examples).all())


def _as_array(field: pa.Field, column: Any) -> tuple[pa.Field, Any]:
    """A column of equally long lists as a column of arrays, of the smallest type that holds every number exactly."""
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


def saev_labels(store: Store, content: int) -> NDArray[np.uint8] | None:
    """Patch labels that another format kept as a column, if they are what saev can keep."""
    if store.format == "saev":
        return store.labels
    if PATCH_LABELS not in store.contents.column_names:
        return None
    import pyarrow as pa

    column = store.read_columns([PATCH_LABELS])[PATCH_LABELS]

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lists = column.to_pylist()
        if any(row is None or len(row) != content for row in lists):
            return None
        values = np.array(lists)
    elif pa.types.is_fixed_size_list(kind) and kind.list_size == content and not column.null_count:
        values = array_of(column)
    else:
        return None
    if values.dtype.kind not in "iu" or (values.size and (values.min() < 0 or values.max() > 255)):
        return None
    return values.astype(np.uint8)


def dropped(store: Store, names: Sequence[str]) -> list[str]:
    """Columns that a target without columns loses; those that only number examples are no loss."""
    numbers = NUMBERS.get(store.format)
    return [n for n in names if n not in (numbers, PATCH_LABELS)]
