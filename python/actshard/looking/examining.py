"""One example, token by token: ids and texts of its tokens, norms of their rows, and their largest dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base.errors import ActshardError, NotStoredError, OutOfRangeError
from actshard.base.layers import Layer
from actshard.formats.report import NOT_OF_DATA
from actshard.formats.target import OTHER_TEXT, PREVIEW, TEXTS
from actshard.looking.stats import Stats
from actshard.looking.stats.summary import Advice
from actshard.reading.store import Store
from actshard.streaming.readable import content_range
from actshard.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    import pyarrow as pa


IDS = ("input_ids", "token_ids", "tokens", "input_tokens", "ids")
"""Columns of token ids."""
PIECES = ("str_tokens", "token_strings", "token_texts", "tokens")
"""Columns of texts, one per token."""
TEXTS_OF_EXAMPLES = ("text", "prompt", "text_preview", "response")
"""Columns of whole texts."""
_MASSIVE = 5
"""Default maximum number of massive rows per layer."""
_BLOCK = 1 << 22
"""Number of elements that are converted to float64 at a time."""


@dataclass(frozen=True, eq=False)
class Examined:
    """The rows of one example in one layer; T tokens.

    Attributes:
        example, layer: their number and name.
        text: the example's text, or None.
        ids: token ids, or None if the dataset has none for each row.
        pieces: the text of each token, or None if it is not known.
        norms: ``(T,)`` float64, L2. NaN or infinite where a row has such values.
        dimensions: ``(T, k)`` int64: the dimensions with the largest absolute values, largest first; NaN values count as infinite.
        values: ``(T, k)`` float64, the values there.
        content: tokens before the padding.
        special: number of special tokens at the start.
    """

    example: int
    layer: Layer
    text: str | None
    ids: list[int] | None
    pieces: list[str] | None
    norms: NDArray[np.float64]
    dimensions: NDArray[np.int64]
    values: NDArray[np.float64]
    content: int
    special: int

    def __len__(self) -> int:
        return len(self.norms)

    @property
    def median(self) -> float:
        """The median of the finite norms of content tokens; NaN if there are none."""
        norms = self.norms[self.special : self.content]
        norms = norms[np.isfinite(norms)]
        return float(np.median(norms)) if norms.size else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """JSON values; norms and values that are not finite are None."""
        return {
            "example": self.example,
            "layer": self.layer,
            "text": self.text,
            "median_norm": _finite(self.median),
            "tokens": [
                {
                    "token": i,
                    "id": None if self.ids is None else self.ids[i],
                    "text": None if self.pieces is None else self.pieces[i],
                    "norm": _finite(float(self.norms[i])),
                    "largest": {
                        str(d): _finite(v)
                        for d, v in zip(self.dimensions[i].tolist(), self.values[i].tolist(), strict=True)
                    },
                }
                for i in range(len(self))
            ],
        }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def examine(
    store: Store,
    example: int = 0,
    layer: Layer | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    largest: int = 3,
) -> Examined:
    """Reads one example of one layer.

    Args:
        store: a store.
        example: its number; negative ones count from the end.
        layer: a name from ``store.layers``; None: the last.
        tokenizer: decodes the token ids of the dataset, or encodes its text, if the result has one token per row.
        largest: number of dimensions for each token.

    Raises:
        OutOfRangeError: there is no such example.
        NotStoredError: the dataset has no hidden states.
        Errors of :meth:`Store.sequence`.
    """
    number = _arguments.whole(example, "example", -(1 << 62))
    if not -store.num_examples <= number < store.num_examples:
        raise OutOfRangeError(
            f"example {example} is out of range: the dataset has {_arguments.many(store.num_examples, 'example')}",
            path=store.path,
        )
    number %= store.num_examples
    if not store.layers:
        raise NotStoredError("the dataset contains no hidden states", path=store.path)
    name = store.layers[-1] if layer is None else store.layers[store.group_of(layer)]
    rows = store.sequence(number, name, dtype=np.float32 if store.contents.types_may_differ else None)
    largest = min(_arguments.whole(largest, "largest", 0), store.d_model)
    norms, dimensions, values = _looked(rows, largest)
    text = text_of(store, number)
    ids, pieces = _tokens(store, number, len(rows), text, tokenizer)
    first, stop = content_range(store, np.array([len(rows)]), np.array([number]))
    return Examined(number, name, text, ids, pieces, norms, dimensions, values, int(stop[0]), int(first[0]))


def _looked(rows: NDArray[np.generic], k: int) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Norms, and the k largest dimensions with their values."""
    n, width = rows.shape
    norms, dimensions, values = np.zeros(n), np.zeros((n, k), np.int64), np.zeros((n, k))
    step = max(_BLOCK // max(width, 1), 1)
    for first in range(0, n, step):
        block = rows[first : first + step].astype(np.float64)
        span = slice(first, first + len(block))
        with np.errstate(all="ignore"):
            norms[span] = np.linalg.norm(block, axis=1)
            order = np.argsort(-np.nan_to_num(np.abs(block), nan=np.inf), axis=1, kind="stable")[:, :k]
        dimensions[span], values[span] = order, np.take_along_axis(block, order, axis=1)
    return norms, dimensions, values


@dataclass(frozen=True)
class MassiveRow:
    """A row whose norm is over 100 times the median norm of its layer.

    Attributes:
        layer, example, token: where it is.
        norm: its L2 norm.
        times: its norm divided by the median norm.
        id: the token's id, or None.
        text: the token's text, or None.
        context: the text of the example, or None.
    """

    layer: Layer
    example: int
    token: int
    norm: float
    times: float
    id: int | None
    text: str | None
    context: str | None


def massive_rows(
    store: Store, stats_by_layer: Mapping[Layer, Stats], *, tokenizer: Tokenizer | None = None, most: int = _MASSIVE
) -> list[MassiveRow]:
    """The massive rows of some layers with the text of their tokens, the largest first in each layer.

    Args:
        store: a store.
        stats_by_layer: statistics of layers; see :attr:`actshard.Stats.massive_rows`.
        tokenizer: as for :func:`examine`.
        most: maximum number of rows per layer.

    Raises:
        Errors of :meth:`Store.read_columns`.
    """
    inputs: dict[int, tuple[str | None, list[int] | None, list[str] | None]] = {}
    rows = []
    for layer, stats in stats_by_layer.items():
        for row in stats.massive_rows[:most]:
            if row.example not in inputs:
                text = text_of(store, row.example)
                n = len(store.sequence(row.example, layer))
                inputs[row.example] = (text, *_tokens(store, row.example, n, text, tokenizer))
            text, ids, pieces = inputs[row.example]
            position = row.token
            id = ids[position] if ids is not None and position < len(ids) else None
            piece = pieces[position] if pieces is not None and position < len(pieces) else None
            times = row.norm / stats.norms.median
            rows.append(MassiveRow(layer, row.example, position, row.norm, times, id, piece, text))
    return rows


def text_of(store: Store, example: int) -> str | None:
    """The text of an example, or None."""
    for name in TEXTS_OF_EXAMPLES:
        if name in store.contents.column_names or OTHER_TEXT.get(name) in store.contents.column_names:
            text = store.read_columns([name], [example])[name][0].as_py()
            if isinstance(text, str):
                return text
    return None


def _tokens(
    store: Store, example: int, n: int, text: str | None, tokenizer: Tokenizer | None
) -> tuple[list[int] | None, list[str] | None]:
    """Ids and texts of n tokens."""
    ids, pieces = _column(store, IDS, example, n, int), _column(store, PIECES, example, n, str)
    if ids is None and tokenizer is not None and text is not None:
        ids = _encoded(tokenizer, text, n)
    if pieces is None and ids is not None and tokenizer is not None:
        pieces = [tokenizer.decode([i]) if 0 <= i < 1 << 32 else f"<{i}>" for i in ids]
    return ids, pieces


def _column(store: Store, names: Sequence[str], example: int, n: int, kind: type) -> list[Any] | None:
    """The first of the columns that has a value of this type for each of n rows."""
    for name in names:
        if name not in (*store.contents.column_names, *store.contents.token_columns):
            continue
        values = store.read_columns([name], [example])[name][0].as_py()
        if isinstance(values, list) and len(values) == n and all(type(x) is kind for x in values):
            return values
    return None


def _encoded(tokenizer: Tokenizer, text: str, n: int) -> list[int] | None:
    """The text's token ids, with or without special tokens, if there are n; else None."""
    if tokenizer.backend is not None:
        with_special = list(tokenizer.backend.encode(text).ids)
        if len(with_special) == n:
            return with_special
        plain = tokenizer.encode([text])[0]
        if len(plain) == n:
            return plain
    return None


# Repeated examples: found by token ids or texts, if the dataset has them, otherwise by rows.
#
# Ids and texts are compared by 64-bit hashes of their bytes, rows byte by byte.


_IDS = ("input_ids", "token_ids", "tokens", "input_tokens", "ids")
_WHOLE = 1 << 20
"""Maximum number of examples for which a column is read, if the format cannot read it in batches."""
_COMPARED = 256
"""Maximum number of pairs of examples with equal hashes that are compared byte by byte."""
_ROWS_AT_ONCE = 4096
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
        for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
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
