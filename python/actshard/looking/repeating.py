"""Repeated examples: found by token ids or texts, if the dataset has them, otherwise by rows.

Ids and texts are compared by 64-bit hashes of their bytes, rows byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard.base._arguments import many
from actshard.base.errors import ActshardError
from actshard.base.layers import Layer
from actshard.formats.report import NOT_OF_DATA
from actshard.formats.target import PREVIEW, TEXTS
from actshard.looking.stats import Stats
from actshard.looking.stats.advice import Advice
from actshard.reading.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

_IDS = ("input_ids", "token_ids", "tokens", "input_tokens", "ids")
_WHOLE = 1 << 20
"""Maximum number of examples for which a column is read, if the format cannot read it in batches."""
_COMPARED = 256
"""Maximum number of pairs of examples with equal hashes that are compared byte by byte."""
_BLOCK = 4096
"""Number of examples whose values are hashed at a time."""
_ODD = np.int64(0x1E3779B97F4A7C15)
_FEW = 10
_SOME = 0.003
"""Share of the distinct rows that must repeat before examples are compared: first tokens repeat, but have few distinct rows."""


@dataclass(frozen=True)
class Repeated:
    """Examples that equal an earlier one.

    Attributes:
        by: what was compared: ``"token ids"``, ``"text"``, or ``"rows"``.
        examples: number of examples that were compared.
        repeated: number of them that equal an earlier one.
        pairs: some of them: (example, earlier example).
    """

    by: str
    examples: int
    repeated: int
    pairs: tuple[tuple[int, int], ...]

    @property
    def how(self) -> str:
        """The compared values as text."""
        if self.by != "rows":
            return f"equal {self.by} of {many(self.examples, 'example')}, by a 64-bit hash"
        return "identical rows in every layer, compared byte by byte where rows of a layer repeat"

    def advice(self) -> list[Advice]:
        """A finding, if examples are repeated."""
        if not self.repeated:
            return []
        shown = ", ".join(f"{a} = {b}" for a, b in self.pairs[:3]) + (" and others" if self.repeated > 3 else "")
        what = {"rows": "equals an earlier one in every layer"}.get(self.by, f"has the {self.by} of an earlier one")
        what = what if self.repeated == 1 else what.replace("equals", "equal").replace("has", "have")
        text = f"{many(self.repeated, 'example')} of {self.examples:,} {what}: {shown}. They count more than once."
        do = "Remove repeated inputs and extract again, or leave them out."
        return [Advice("warning", "examples", text, do, "store.filter(...)", "repeated examples", self.repeated)]


def repeated_examples(
    store: Store, stats_by_layer: Mapping[Layer, Stats], *, progress: Callable[[int, int], object] | None = None
) -> Repeated | None:
    """Looks for examples that equal an earlier one.

    Reads the columns of token ids or texts, if the dataset has them. Otherwise reads the rows of one layer again, but only if
    the statistics of every layer contain repeated rows, or rows whose norms are not finite.

    Args:
        store: a store.
        stats_by_layer: statistics by layer.
        progress: called with (rows done, total rows).

    Returns:
        None if the dataset has neither ids nor texts, and no statistics are given.
    """
    for by, names in _columns(store):
        hashes = _hashed(store, names)
        examples = np.flatnonzero(hashes != 0)
        if len(examples):
            later, earlier = _pairs(hashes[examples])
            few = zip(examples[later[:_FEW]].tolist(), examples[earlier[:_FEW]].tolist(), strict=True)
            return Repeated(by, len(examples), len(later), tuple(few))
    if not stats_by_layer:
        return None
    # Rows of NaN and infinite norms are not among the repeated ones, but examples of them may be equal.
    finite_stats = {layer: stats for layer, stats in stats_by_layer.items() if stats.norms.rows == stats.rows}
    layer, least = min((finite_stats or stats_by_layer).items(), key=lambda item: item[1].repeats.repeated)
    repeats, total = least.repeats, least.rows
    if finite_stats and repeats.repeated <= (0 if repeats.exact else _SOME * repeats.different):
        return Repeated("rows", store.num_examples, 0, ())
    group = store.group_of(layer)
    report = None if progress is None else lambda rows: progress(rows, total)
    n, pairs = equal_examples(store, store.rows.scan(group, report)["hashes"])
    return Repeated("rows", store.num_examples, n, tuple(pairs[:_FEW]))


def equal_examples(store: Store, hashes: NDArray[np.uint64]) -> tuple[int, list[tuple[int, int]]]:
    """Returns the number of examples whose rows equal those of an earlier example in all layers, and some (example, earlier) pairs.

    Compares examples with equal hashes byte by byte. If there are more than 256 pairs, the others are counted by hash.
    """
    ordered = np.sort(hashes)
    if not (ordered[1:] == ordered[:-1]).any():
        return 0, []  # token counts, for which some formats decode every shard, are not needed
    examples = np.flatnonzero(store.token_counts > 0)
    later, earlier = _pairs(hashes[examples])
    pairs = zip(examples[later[:_COMPARED]].tolist(), examples[earlier[:_COMPARED]].tolist(), strict=True)
    real = [(a, b) for a, b in pairs if _alike(store, store.layers, a, b)]
    return (len(later) if real and len(later) > _COMPARED else len(real)), real


def _pairs(hashes: NDArray[np.generic]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of repeated values, in order, and for each the previous position of the same value."""
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    later, earlier = order[same + 1], order[same]
    first = np.argsort(later, kind="stable")
    return later[first], earlier[first]


def _alike(store: Store, layers: Sequence[Layer], a: int, b: int) -> bool:
    try:
        return all(store.sequence(a, la).tobytes() == store.sequence(b, la).tobytes() for la in layers)
    except NOT_OF_DATA:
        raise
    except ActshardError:
        return False


def _columns(store: Store) -> Iterator[tuple[str, list[str]]]:
    """Yields lists of columns that together form an example's input, with their kind of content."""
    contents = store.contents
    if contents.column_batches is None and contents.num_examples > _WHOLE:
        return
    made_up = frozenset() if contents.parts else formats.get(contents.format).carrying().fillers(contents)
    stored = [name for name in contents.column_names if name not in made_up]
    for name in _IDS:
        if name in stored:
            yield "token ids", [name]
    texts = [name for name in (*TEXTS, "response") if name in stored and name != PREVIEW]
    if texts:
        yield "text", texts


def _hashed(store: Store, names: list[str]) -> NDArray[np.int64]:
    """A hash of each example's values; 0 if there are none, or if they have an unsupported type."""
    contents = store.contents
    batches = contents.column_batches or (lambda names: iter([contents.columns(names)]))
    blocks = [np.zeros(0, np.int64)]
    for table in batches(names):
        for batch in table.to_batches(max_chunksize=_BLOCK):
            first, *rest = [_hashes(batch.column(name)) for name in names]
            with np.errstate(over="ignore"):
                for hashes in rest:
                    first = np.where(first == 0, 0, (first * _ODD) ^ hashes)
            blocks.append(first)
    return np.concatenate(blocks)


def _hashes(column: pa.Array) -> NDArray[np.int64]:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind, n = column.type, len(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.fromiter((hash(text) if text else 0 for text in column.to_pylist()), np.int64, n)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return np.zeros(n, np.int64)
    if not pa.types.is_integer(kind.value_type) or column.null_count:
        return np.zeros(n, np.int64)
    values = column.flatten()
    if values.null_count:
        return np.zeros(n, np.int64)
    data, width = values.to_numpy(zero_copy_only=False).tobytes(), kind.value_type.bit_width // 8
    ends = np.cumsum(column.value_lengths().to_numpy().astype(np.int64) * width).tolist()
    starts = [0, *ends[:-1]]
    return np.fromiter((hash(data[a:b]) if a < b else 0 for a, b in zip(starts, ends, strict=True)), np.int64, n)
