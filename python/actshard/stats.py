"""Statistics of a layer's rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.layers import Layer

_DEVIATIONS: weakref.WeakValueDictionary[int, NDArray[np.float64]] = weakref.WeakValueDictionary()
"""Arrays that :attr:`Stats.std` returned, by id. ``scale=`` refuses them: it multiplies, and users mean to divide."""


def is_deviation(value: object) -> bool:
    """Whether ``value`` is an array object that :attr:`Stats.std` returned. Arrays computed from one are not."""
    return _DEVIATIONS.get(id(value)) is value and value is not None


@dataclass(frozen=True, eq=False, repr=False)
class Stats:
    """Statistics of a layer's rows; arrays have shape ``(d_model,)``.

    NaN and infinite values are counted, and excluded from all other statistics.

    Attributes:
        rows: number of rows.
        mean, variance: float64; population variance (divided by n). NaN for columns without finite values.
        min, max: float64, of finite values; +inf and -inf for columns without finite values.
        nan, inf: int64 counts.
        std, inverse_std: float64, computed from the variance.
        mean_norm: mean L2 norm of the rows whose values are all finite; NaN without such rows.
        layer: the layer's name, by which ``stream(normalize=)`` refuses statistics of another layer. None: not known.
    """

    rows: int
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]
    nan: NDArray[np.int64]
    inf: NDArray[np.int64]
    mean_norm: float
    layer: Layer | None = None

    @property
    def std(self) -> NDArray[np.float64]:
        """Square root of the variance, float64.

        ``stream(scale=)`` multiplies and refuses this array: pass :attr:`inverse_std` to standardize rows.
        """
        made: NDArray[np.float64] = np.sqrt(self.variance)
        _DEVIATIONS[id(made)] = made
        return made

    @property
    def inverse_std(self) -> NDArray[np.float64]:
        """``1 / std``, float64; 1 for a column without variance.

        ``store.stream(..., center=stats.mean, scale=stats.inverse_std)`` yields columns with mean 0 and variance 1.
        """
        std = np.sqrt(self.variance)
        made: NDArray[np.float64] = 1 / np.where(std > 0, std, 1.0)
        return made

    def __repr__(self) -> str:
        bad = int(self.nan.sum()), int(self.inf.sum())
        return (
            f"<actshard.Stats of {self.rows} rows of {len(self.mean)}: mean norm {self.mean_norm:.6g}, "
            f"{bad[0]} NaN and {bad[1]} infinite values>"
        )

    def as_plain(self) -> dict[str, Any]:
        """JSON values, from which :meth:`of_plain` makes equal statistics; infinite and NaN values are texts."""
        made: dict[str, Any] = {name: _texts(getattr(self, name)) for name in ("mean", "variance", "min", "max")}
        counts = {"rows": self.rows, "nan": self.nan.tolist(), "inf": self.inf.tolist()}
        return {"layer": self.layer, **counts, "mean_norm": _texts(np.float64(self.mean_norm)), **made}

    @classmethod
    def of_plain(cls, said: dict[str, Any]) -> Stats:
        """The statistics of :meth:`as_plain`.

        Raises:
            LookupError, TypeError, ValueError: the values are no statistics.
        """
        made = cls(
            rows=int(said["rows"]),
            mean=np.array(said["mean"], np.float64),
            variance=np.array(said["variance"], np.float64),
            min=np.array(said["min"], np.float64),
            max=np.array(said["max"], np.float64),
            nan=np.array(said["nan"], np.int64),
            inf=np.array(said["inf"], np.int64),
            mean_norm=float(said["mean_norm"]),
            layer=said["layer"],
        )
        shapes = {x.shape for x in (made.mean, made.variance, made.min, made.max, made.nan, made.inf)}
        if len(shapes) > 1 or made.mean.ndim != 1:
            raise ValueError(f"expected one value per column, found {shapes}")
        return made

    @classmethod
    def of(cls, sums: dict[str, Any], layer: Layer | None = None) -> Stats:
        """Builds the statistics of a layer from the sums that the Rust core returns."""
        finite = sums["finite"]
        some = finite > 0
        n = np.where(some, finite, 1)
        total, count = sums["norms"]
        return cls(
            rows=sums["rows"],
            mean=np.where(some, sums["mean"], np.nan),
            variance=np.where(some, sums["squares"] / n, np.nan),
            min=sums["min"],
            max=sums["max"],
            nan=sums["nan"],
            inf=sums["infinite"],
            mean_norm=total / count if count else float("nan"),
            layer=layer,
        )


def _texts(values: NDArray[np.float64] | np.float64) -> Any:
    """Numbers as JSON values."""
    listed = np.atleast_1d(values).tolist()
    plain = [x if np.isfinite(x) else str(x) for x in listed]
    return plain if np.ndim(values) else plain[0]


_FLOATS = ("mean", "squares", "min", "max")
_COUNTS = ("finite", "nan", "infinite")
SUMMED = np.dtype([(name, "<f8") for name in _FLOATS] + [(name, "<i8") for name in _COUNTS])
"""Sums of a column."""


class Sums:
    """Sums over a range of a layer's rows, which add up to the same bits however the rows were divided into ranges.

    Rows are divided into leaves of a fixed size. A range of leaves is kept as the largest nodes of a binary tree that lie in it:
    few arrays, whatever its length. See the core's ``stream/stats.rs``.
    """

    def __init__(self, width: int, nodes: Sequence[dict[str, Any]] = ()) -> None:
        self.width = width
        self.nodes = list(nodes)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(int(node["rows"]) for node in self.nodes)

    @property
    def leaves(self) -> tuple[int, int]:
        """First leaf and end of the range."""
        if not self.nodes:
            return 0, 0
        last = self.nodes[-1]
        return int(self.nodes[0]["first"]), int(last["first"]) + (1 << int(last["level"]))

    def join(self, following: Sums) -> Sums:
        """The sums of this range and of the one that follows.

        Raises:
            ArgumentError: another range follows, or one of another width.
        """
        return Sums(self.width, _native.joined_sums([*self.nodes, *following.nodes]))

    def stats(self, layer: Layer | None = None) -> Stats:
        """The statistics, if these are the sums of all rows."""
        total = _native.total_sums(self.nodes)
        if total is None:
            start = {"min": np.inf, "max": -np.inf}
            total = {name: np.full(self.width, start.get(name, 0.0)) for name in _FLOATS}
            total |= {name: np.zeros(self.width, np.int64) for name in _COUNTS}
            total |= {"rows": 0, "norms": (0.0, 0)}
        return Stats.of(total, layer)

    def as_plain(self) -> tuple[list[list[Any]], NDArray[Any]]:
        """JSON values of each node, and an array ``(nodes, width)`` of its columns; see :meth:`of_plain`."""
        columns = np.empty((len(self.nodes), self.width), SUMMED)
        for node, row in zip(self.nodes, columns, strict=True):
            for name in (*_FLOATS, *_COUNTS):
                row[name] = node[name]
        said = [[n["first"], n["level"], n["rows"], float(n["norms"][0]).hex(), n["norms"][1]] for n in self.nodes]
        return said, columns

    @classmethod
    def of_plain(cls, said: Sequence[Sequence[Any]], columns: NDArray[Any], width: int) -> Sums:
        """The sums of :meth:`as_plain`.

        Raises:
            ValueError, TypeError: the values are not those of sums of this width.
        """
        if columns.dtype != SUMMED or columns.shape != (len(said), width):
            raise ValueError(f"expected {len(said)} sums of {width} columns, found {columns.dtype} {columns.shape}")
        nodes: list[dict[str, Any]] = []
        for (first, level, rows, norms, count), row in zip(said, columns, strict=True):
            for whole in (first, level, rows, count):
                if type(whole) is not int or whole < 0:
                    raise ValueError(f"expected a count, found {whole!r:.80}")
            node: dict[str, Any] = {"first": first, "level": level, "rows": rows}
            node["norms"] = (float.fromhex(norms), count)
            node |= {name: np.ascontiguousarray(row[name]) for name in (*_FLOATS, *_COUNTS)}
            nodes.append(node)
        return cls(width, nodes)
