"""One example, token by token: ids and texts of its tokens, norms of their rows, and their largest dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import NotStoredError, OutOfRangeError
from actshard.base.layers import Layer
from actshard.formats.target import OTHER_TEXT
from actshard.looking.stats import Stats
from actshard.reading.store import Store
from actshard.streaming.content import content_range
from actshard.tokens.tokenizer import Tokenizer

IDS = ("input_ids", "token_ids", "tokens", "input_tokens", "ids")
"""Columns of token ids."""
PIECES = ("str_tokens", "token_strings", "token_texts", "tokens")
"""Columns of texts, one per token."""
TEXTS = ("text", "prompt", "text_preview", "response")
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
    for name in TEXTS:
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
