"""What a layer's rows look like besides their sums: norms, positions, the largest values, repeated rows.

All parts are counts, or lists of a fixed length. They are joined in the core, in ``stream/stats/summary.rs``. These classes read
them; arrays are new at each call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actshard.base.errors import ESCAPES, ArgumentError

MANTISSA_BITS = 7
"""Bits of a norm's mantissa in the number of its bin; the core's ``MANTISSA_BITS``."""
BAND_BITS = 3
"""Bits of the mantissa of a norm in the number of its bin at a position; the core's ``BAND_BITS``."""
LARGEST = 16
"""Most largest rows and columns; the core's ``LARGEST``."""
HASHES = 1024
"""Most hashes of a sample of rows; the core's ``HASHES``."""
POSITION_QUANTILES = {"p5": 0.05, "median": 0.5, "p95": 0.95}
"""Quantiles of norms by position in tables and JSON, by name."""
_EXACT, _EIGHTHS = 64, 8
"""Positions that are counted each, and ranges of a power of two above them; see ``position`` in the core."""
_MOST_BIN = 0x7FF << MANTISSA_BITS
_MOST_BAND = 0x7FF << BAND_BITS
_MOST_POSITION = _EXACT + (64 - 6) * _EIGHTHS


@dataclass(frozen=True, eq=False)
class Norms:
    """A histogram of the L2 norms of rows, with bins of less than 1 % of their norm.

    Attributes:
        edges: float64 ``(bins + 1,)``, ascending; bins without rows between others are included as one wide bin.
        counts: int64 ``(bins,)``: rows with ``edges[i] <= norm < edges[i + 1]``.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, bins: Sequence[tuple[int, int]]) -> Norms:
        """The histogram of (bin, rows) pairs of the core, in ascending order."""
        edges: list[float] = []
        counts: list[int] = []
        for number, rows in bins:
            low, high = _edge(number), _edge(number + 1)
            if edges and edges[-1] != low:
                counts.append(0)
            if not edges or edges[-1] != low:
                edges.append(low)
            edges.append(high)
            counts.append(rows)
        return cls(np.array(edges or [0.0]), np.array(counts, np.int64))

    def __repr__(self) -> str:
        span = f"{self.edges[0]:.4g} to {self.edges[-1]:.4g}"
        return f"<actshard.Norms of {int(self.counts.sum()):,} rows in {len(self.counts):,} bins, {span}>"

    @property
    def rows(self) -> int:
        """Number of rows with a finite norm."""
        return int(self.counts.sum())

    def quantile(self, q: ArrayLike) -> NDArray[np.float64]:
        """Norms at the fractions ``q`` of the rows, in the shape of ``q``; NaN without rows.

        The norm of the row at that rank (``numpy.quantile(..., method="inverted_cdf")``), within 1/256 of it.
        """
        fractions = _fractions(q)
        if not self.rows:
            return np.full(fractions.shape, np.nan)
        bins = _ranked(self.counts, fractions)
        low, high = self.edges[bins], self.edges[bins + 1]
        return np.asarray(np.where(low == 0, 0.0, low + (high - low) / 2))

    @property
    def median(self) -> float:
        """The norm of the middle row; NaN without rows."""
        return float(self.quantile(0.5))


def _fractions(q: ArrayLike) -> NDArray[np.float64]:
    try:
        fractions = np.asarray(q, np.float64)
    except (TypeError, ValueError, OverflowError):
        fractions = np.array(np.nan)
    if not ((fractions >= 0) & (fractions <= 1)).all():
        raise ArgumentError(f"q: expected fractions from 0 to 1, found {q!r:.80}")
    return fractions


def _ranked(counts: NDArray[np.int64], fractions: NDArray[np.float64]) -> NDArray[np.intp]:
    """The bin of the row at each fraction of the rows, which are at least one."""
    ends = np.cumsum(counts)
    return np.asarray(np.searchsorted(ends, np.maximum(np.ceil(fractions * ends[-1]), 1), "left"))


def _edge(number: int, bits: int = MANTISSA_BITS) -> float:
    """The smallest norm of a bin whose number has ``bits`` bits of the mantissa."""
    pattern = np.array([number << (52 - bits)], np.uint64)
    return float(pattern.view(np.float64)[0])


@dataclass(frozen=True, eq=False)
class NormsByPosition:
    """Norms of rows by their token's position in the example. Positions from 64 on are in ranges of an eighth or less.

    Attributes:
        first, end: int64 ``(ranges,)``: positions ``first`` to ``end - 1``.
        rows: int64 ``(ranges,)``: rows with a finite norm.
        mean: float64 ``(ranges,)``: their mean norm.
    """

    first: NDArray[np.int64]
    end: NDArray[np.int64]
    rows: NDArray[np.int64]
    mean: NDArray[np.float64]
    _bands: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...] = ()
    """Bins and their rows, for each range."""

    def __repr__(self) -> str:
        positions = f"positions 0 to {int(self.end[-1]) - 1}" if len(self.end) else "no positions"
        return f"<actshard.NormsByPosition of {int(self.rows.sum()):,} rows, {positions} in {len(self.end):,} ranges>"

    @classmethod
    def of(
        cls, positions: Sequence[tuple[int, float, int]], bands: Sequence[tuple[int, int, int]] = ()
    ) -> NormsByPosition:
        """Norms of the core's (range, sum of norms, rows), with its counts (range, bin, rows)."""
        firsts = [_first_position(number) for number, _, _ in positions]
        ends = [_first_position(number + 1) for number, _, _ in positions]
        rows = np.array([n for _, _, n in positions], np.int64)
        sums = np.array([total for _, total, _ in positions], np.float64)
        counts = np.array(bands, np.int64).reshape(-1, 3)
        cuts = np.searchsorted(counts[:, 0], [number for number, _, _ in positions] + [_MOST_POSITION])
        range_bins = tuple((counts[a:b, 1], counts[a:b, 2]) for a, b in itertools.pairwise(cuts))
        return cls(np.array(firsts, np.int64), np.array(ends, np.int64), rows, sums / np.maximum(rows, 1), range_bins)

    def quantile(self, q: ArrayLike) -> NDArray[np.float64]:
        """Norms at the fractions ``q`` of each range's rows, float64 ``(*q.shape, ranges)``, each within 1/16.

        Raises:
            ArgumentError: a fraction is not from 0 to 1.
        """
        fractions = _fractions(q)
        quantiles = np.full((*fractions.shape, len(self.first)), np.nan)
        for i, (bins, counts) in enumerate(self._bands):
            if len(bins):
                row_bins = bins[_ranked(counts, fractions)]
                edges = np.array([(_edge(int(k), BAND_BITS), _edge(int(k) + 1, BAND_BITS)) for k in row_bins.flat])
                low, high = edges.reshape(*fractions.shape, 2)[..., 0], edges.reshape(*fractions.shape, 2)[..., 1]
                quantiles[..., i] = np.where(low == 0, 0.0, low + (high - low) / 2)
        return quantiles


def _first_position(number: int) -> int:
    if number < _EXACT:
        return number
    power, eighth = divmod(number - _EXACT, _EIGHTHS)
    return min((_EIGHTHS + eighth) << (power + 3), (1 << 63) - 1)


@dataclass(frozen=True)
class LargestRow:
    """A row of a large norm: ``store.sequence(example, layer)[token]``."""

    norm: float
    example: int
    token: int


@dataclass(frozen=True)
class LargestColumn:
    """The largest magnitude of a column, and the first row that has it."""

    column: int
    magnitude: float
    example: int
    token: int


@dataclass(frozen=True)
class Repeats:
    """How many rows with finite norms equal another one, bit by bit. Exact up to 1,023 different rows, otherwise an estimate.

    The sample are the 1,024 different rows with the smallest hashes. The largest of these hashes gives the number of all different
    rows within 3 %, however often single rows come (Beyer et al., "On synopses for distinct-value estimation under multiset
    operations", SIGMOD 2007). Counts in the sample do not: whether a row that comes thousands of times is in it is chance.

    Attributes:
        different: different rows in the sample.
        repeated: those of them that came more than once.
        rows: rows equal to one of the sample.
        exact: whether the sample has all different rows.
        total: rows with finite norms.
        distinct: different rows among them; an estimate unless ``exact``.
    """

    different: int
    repeated: int
    rows: int
    exact: bool
    total: int
    distinct: float

    @property
    def fraction(self) -> float:
        """The part of the rows that could be left out: they equal an earlier row. An estimate unless :attr:`exact`."""
        if not self.total:
            return 0.0
        fraction = max(0.0, 1 - self.distinct / self.total)
        return fraction if self.exact else max(fraction, self._share * (1 - fraction))

    @property
    def error(self) -> float:
        """Standard error of :attr:`fraction`; 0 if it is exact."""
        return 0.0 if self.exact else (1 - self.fraction) / math.sqrt(self.different - 2)

    @property
    def least(self) -> float:
        """A part of the rows that equals an earlier row with a probability of about 98 %: the fraction if it is exact."""
        if self.exact:
            return self.fraction
        # Each different row that came more than once makes at least one repetition.
        share_error = math.sqrt(self._share * (1 - self._share) / self.different)
        of_share = (self._share - 2 * share_error) * (1 - self.fraction)
        return max(0.0, self.fraction - 2 * self.error, of_share)

    @property
    def _share(self) -> float:
        """The part of the different rows that came more than once."""
        return self.repeated / self.different


@dataclass(frozen=True, eq=False, repr=False)
class Summary:
    """The core's summary of rows, as lists; see the classes above for what they mean."""

    norm_bins: tuple[tuple[int, int], ...] = ()
    positions: tuple[tuple[int, float, int], ...] = ()
    bands: tuple[tuple[int, int, int], ...] = ()
    largest_rows: tuple[tuple[float, int, int], ...] = ()
    largest_columns: tuple[tuple[int, float, int, int], ...] = ()
    hashes: tuple[tuple[int, int], ...] = field(default=())

    @classmethod
    def of(cls, sums: Mapping[str, Any]) -> Summary:
        """The summary in a dict of the core."""
        return cls(**{name: tuple(map(tuple, sums[name])) for name in LISTS})

    def as_plain(self) -> dict[str, object]:
        """JSON values; floats as hexadecimal text, because JSON's readers round."""
        return {
            "norm_bins": [list(entry) for entry in self.norm_bins],
            "positions": [[position, total.hex(), n] for position, total, n in self.positions],
            "bands": [list(entry) for entry in self.bands],
            "largest_rows": [[norm.hex(), e, t] for norm, e, t in self.largest_rows],
            "largest_columns": [[column, x.hex(), e, t] for column, x, e, t in self.largest_columns],
            "hashes": [[f"{value:016x}", n] for value, n in self.hashes],
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Summary:
        """The summary of :meth:`as_plain`.

        Raises:
            LookupError, TypeError, ValueError: the values are no summary.
        """
        bins = [(_whole(b, _MOST_BIN), _count(n)) for b, n in plain["norm_bins"]]
        positions = [(_whole(position, _MOST_POSITION), _real(x), _count(n)) for position, x, n in plain["positions"]]
        bands = [
            (_whole(position, _MOST_POSITION), _whole(b, _MOST_BAND), _count(n)) for position, b, n in plain["bands"]
        ]
        hashes = [(_whole(int(str(value), 16), 1 << 64), _count(n)) for value, n in plain["hashes"]]
        ordered: tuple[list[Any], ...] = (
            [b for b, _ in bins],
            [position for position, _, _ in positions],
            [band[:2] for band in bands],
            [value for value, _ in hashes],
        )
        if any(a >= b for keys in ordered for a, b in itertools.pairwise(keys)):
            raise ValueError("expected ascending bins, positions, bands and hashes")
        if len(plain["largest_rows"]) > LARGEST or len(plain["largest_columns"]) > LARGEST:
            raise ValueError(f"expected at most {LARGEST} of the largest rows and columns")
        if len(hashes) > HASHES:
            raise ValueError(f"expected at most {HASHES} hashes, found {len(hashes):,}")
        return cls(
            tuple(bins),
            tuple(positions),
            tuple(bands),
            tuple((_real(x), _whole(e), _whole(t)) for x, e, t in plain["largest_rows"]),
            tuple((_whole(c), _real(x), _whole(e), _whole(t)) for c, x, e, t in plain["largest_columns"]),
            tuple(hashes),
        )

    def as_sums(self) -> dict[str, object]:
        """What the core takes."""
        return {name: list(getattr(self, name)) for name in LISTS}

    @property
    def repeats(self) -> Repeats:
        """Rows that equal another one."""
        counts = [n for _, n in self.hashes]
        exact, total = len(counts) < HASHES, sum(n for _, n in self.norm_bins) if counts else 0
        distinct = len(counts) if exact else min(total, (HASHES - 1) * 2.0**64 / (self.hashes[-1][0] + 1))
        return Repeats(len(counts), sum(n > 1 for n in counts), sum(counts), exact, total, distinct)


LISTS = ("norm_bins", "positions", "bands", "largest_rows", "largest_columns", "hashes")
"""Names of the lists in the core's sums."""


def _whole(value: object, limit: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"expected a count below {limit}, found {value!r:.80}")
    return value


def _count(value: object) -> int:
    """A number of rows: at least 1, and as small as the core requires, so that sums do not overflow."""
    return 1 + _whole(value - 1 if type(value) is int else value, (1 << 43) - 1)


def _real(value: Any) -> float:
    number = float.fromhex(value)
    if not (np.isfinite(number) and number >= 0):
        raise ValueError(f"expected a finite norm, found {value!r:.80}")
    return number


# Findings in words.


_TEXT = 300


@dataclass(frozen=True)
class Advice:
    """A finding in words: what was found, its consequence, and what to do.

    Attributes:
        severity: ``"error"``, ``"warning"`` or ``"note"``.
        where: such as ``layer 20``; empty: the layer of the statistics.
        text: what was found, and its consequence: one or more sentences.
        do: what to do, as a sentence; empty: nothing.
        code: an argument or command; empty: none.
        kind: advice of one kind about many layers is joined.
        size: how bad it is, compared with advice of its kind.
    """

    severity: str
    where: str
    text: str
    do: str = ""
    code: str = ""
    kind: str = ""
    size: float = 0.0

    def __str__(self) -> str:
        do = f"{self.do.removesuffix('.')}: {self.code}" if self.do and self.code else self.do or self.code
        return f"{self.text} {do}".strip()


def cut(text: object, most: int = _TEXT) -> str:
    """A text with escaped control characters, cut."""
    shown = str(text).translate(ESCAPES)
    return shown if len(shown) <= most else shown[: most - 1] + "…"
