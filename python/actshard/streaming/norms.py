"""Rows that a stream leaves out for their position or their norm: ``min_token=`` and ``max_norm=``.

First tokens of texts are often attention sinks, and some rows have an L2 norm hundreds of times larger than all others. Both
dominate statistics and losses. The norms of a layer are computed once per store, in one pass with the stream's own reader, so
memory is bounded; 8 bytes per stored token are kept. Squares are summed in float64 in a fixed tree of additions, so norms are
bitwise equal on all machines. Rows whose squares overflow or underflow float64 are first multiplied by a power of two.
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, DtypeError
from actshard.base.layers import Layer
from actshard.streaming.content import content_range, positions
from actshard.streaming.readable import Readable, native_options

Limit = float | str | None

_BLOCK = 8 << 20
"""Bytes of rows that are read at a time."""

_LOCK = threading.Lock()
_KNOWN: weakref.WeakKeyDictionary[Readable, dict[Layer, NDArray[np.float64]]] = weakref.WeakKeyDictionary()


_SQUARABLE = (1e-280, 1e280)
"""Range of sums of squares that float64 represents with full precision."""


def norms_of_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """L2 norms of ``(n, d_model)`` rows; NaN or infinite exactly if the row has such values."""
    with np.errstate(all="ignore"):
        sums = _sums(rows * rows)
        norms: NDArray[np.float64] = np.sqrt(sums)
        odd = np.flatnonzero(~((sums > _SQUARABLE[0]) & (sums < _SQUARABLE[1])))
        if len(odd):
            values, power = rows[odd], np.where(sums[odd] < 1, 2.0**600, 2.0**-600)
            scaled_norms = np.sqrt(_sums((values * power[:, None]) ** 2)) / power
            most = np.where(np.isfinite(values).all(axis=1), np.finfo(np.float64).max, np.inf)
            norms[odd] = np.minimum(scaled_norms, most)
    return norms


def _sums(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of rows, overwritten, as a tree: halves are added until one column is left."""
    width = squares.shape[1]
    while width > 1:
        half = (width + 1) // 2
        squares[:, : width - half] += squares[:, half:width]
        width = half
    return squares[:, 0]


def parsed(max_norm: object) -> tuple[float, bool] | None:
    """Parses ``max_norm`` to (number, whether it is a multiple of the median); None if it is None.

    Raises:
        ArgumentError: it is neither a positive number nor a string such as ``"10x median"``.
    """
    if max_norm is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*x\s*median\s*", max_norm) if isinstance(max_norm, str) else None
    number = _arguments.real(float(match[1]) if match else max_norm)
    if number is None or not number > 0 or (match and math.isinf(number)):
        raise ArgumentError(
            'max_norm: expected a positive number, "10x median", or infinity (only rows with NaN or infinite values are left '
            f"out), found {max_norm!r:.80}"
        )
    return number, match is not None


def within(
    store: Readable, layers: Sequence[Layer], stored: NDArray[np.int64], max_norm: tuple[float, bool]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Two flags per stored token: norms are finite in every layer; norms are finite and at most ``max_norm`` in every layer."""
    if store.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise DtypeError(
            f"max_norm: expected rows of float16, bfloat16, float32 or float64, found {store.dtype}", path=store.path
        )
    number, of_median = max_norm
    finite = np.ones(int(stored.sum()), np.bool_)
    small = finite.copy()
    for layer in layers:
        norms = _norms(store, layer)
        ok = np.isfinite(norms)
        finite &= ok
        limit = number * _median(norms[ok & _content(store, stored)]) if of_median else number
        small &= norms <= limit
    return finite, small & finite


def _content(store: Readable, stored: NDArray[np.int64]) -> NDArray[np.bool_]:
    """One flag per stored token: neither special nor padding."""
    token_positions, (first, stop) = positions(stored), content_range(store, stored)
    return (token_positions >= np.repeat(first, stored)) & (token_positions < np.repeat(stop, stored))


def _median(norms: NDArray[np.float64]) -> float:
    return float(np.median(norms)) if len(norms) else 0.0


def _norms(store: Readable, layer: Layer) -> NDArray[np.float64]:
    """Norms of all stored rows of a layer, computed at the first call for a store."""
    with _LOCK:
        norms_by_layer = _KNOWN.setdefault(store, {})
    if layer not in norms_by_layer:
        parts = [norms_of_rows(rows) for rows in _rows_of(store, layer)]
        norms_by_layer[layer] = np.concatenate(parts) if parts else np.zeros(0)
    return norms_by_layer[layer]


def _rows_of(store: Readable, layer: Layer) -> Iterator[NDArray[np.float64]]:
    """All stored rows of a layer in stored order, in blocks ``(rows, d_model)`` of about 8 MiB."""
    counts = store.tokens_in(layer)
    if not counts.any():
        return
    rows = max(1, _BLOCK // (8 * store.d_model or 1))
    options = native_options([store.group_of(layer)], *_arguments.dtype(np.float64), True, batch_size=rows)
    reader = store.native_stream((0, np.ascontiguousarray(counts)), options).start(0, 0, 1, None)
    try:
        while (batch := reader.next()) is not None:
            yield batch[0]
    finally:
        reader.stop()
