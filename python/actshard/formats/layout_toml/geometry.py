"""Axes of a stored array, which give the address of row (layer, example, token).

``axes`` names the stored axes, outermost first. ``"1"`` is dropped, ``"a*b"`` is split, and an axis fixed by ``select`` becomes an
offset. The others (example, layer, token, row, dim) have a number of elements and a stride each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actshard.base.errors import FormatError, UnsupportedError
from actshard.base.location import Location


@dataclass(frozen=True)
class Axis:
    """An axis: its number of elements, and its stride in elements."""

    count: int
    stride: int


@dataclass(frozen=True)
class EvenNumbers:
    """Numbers at equal distances. Takes no memory, however many they are."""

    first: int
    step: int
    count: int

    def array(self) -> NDArray[np.int64]:
        """The numbers, ``(count,)`` int64."""
        return self.first + np.arange(self.count, dtype=np.int64) * self.step


Numbers: TypeAlias = "EvenNumbers | NDArray[np.int64]"


def array_of(numbers: Numbers) -> NDArray[np.int64]:
    """The numbers, ``(n,)`` int64."""
    return numbers.array() if isinstance(numbers, EvenNumbers) else numbers


def weighted(first: int, *terms: tuple[Numbers, int]) -> Numbers:
    """``first`` plus the products of numbers and weights, of equally many numbers in each term."""
    if all(isinstance(numbers, EvenNumbers) for numbers, _ in terms):
        even = [(numbers, weight) for numbers, weight in terms if isinstance(numbers, EvenNumbers)]
        total = sum(numbers.first * weight for numbers, weight in even)
        return EvenNumbers(first + total, sum(numbers.step * weight for numbers, weight in even), even[0][0].count)
    sums = np.full(len(array_of(terms[0][0])), first, np.int64)
    for numbers, weight in terms:
        sums += array_of(numbers) * weight
    return sums


@dataclass(frozen=True)
class Geometry:
    """The axes of an array by name, and its first element."""

    first: int
    axes: Mapping[str, Axis] = field(default_factory=dict)

    def get(self, name: str) -> Axis | None:
        return self.axes.get(name)


def geometry(
    names: Sequence[str],
    shape: Sequence[int],
    strides: Sequence[int],
    select: Mapping[str, int],
    factors: Mapping[str, int],
    path: Location,
) -> Geometry:
    """Assigns axes to a shape. ``factors`` are known counts, by which composite axes are split.

    Raises:
        FormatError: the shape does not fit the axes.
    """
    if len(names) != len(shape):
        raise FormatError(f"axes {list(names)}: expected {len(names)} axes, found the shape {list(shape)}", path=path)
    first = 0
    axis_by_name: dict[str, Axis] = {}
    for name, count, stride in zip(names, shape, strides, strict=True):
        if name == "1":
            if count != 1:
                raise FormatError(f"axis '1': expected 1, found {count} of the shape {list(shape)}", path=path)
        elif name in select:
            if select[name] >= count:
                raise FormatError(f"axis {name!r}: expected a position below {count}, found {select[name]}", path=path)
            first += select[name] * stride
        else:
            axis_by_name |= _split(name, Axis(count, stride), factors, path)
    return Geometry(first, axis_by_name)


def _split(name: str, axis: Axis, factors: Mapping[str, int], path: Location) -> dict[str, Axis]:
    """The axes of ``"a*b"``, of which at most one has an unknown count."""
    parts = name.split("*")
    if len(parts) == 1:
        return {name: axis}
    unknown = [part for part in parts if part not in factors]
    known_count = 1
    for part in parts:
        known_count *= factors.get(part, 1)
    counts = {part: factors.get(part, 0) for part in parts}
    if len(unknown) == 1 and known_count and axis.count % known_count == 0:
        counts[unknown[0]] = axis.count // known_count
    elif unknown or known_count != axis.count:
        shown = ", ".join(f"{part} {factors.get(part, '?')}" for part in parts)
        raise FormatError(f"axis {name!r} of {axis.count}: cannot be split ({shown})", path=path)
    axes: dict[str, Axis] = {}
    stride = axis.stride
    for part in reversed(parts):
        axes[part] = Axis(counts[part], stride)
        stride *= counts[part]
    return axes


def integers(values: NDArray[Any], what: str, path: Location) -> NDArray[np.int64]:
    """Non-negative integers. Refuses other dtypes than integers and bool."""
    if values.dtype.kind not in "iub" and values.size:
        raise FormatError(f"{what}: expected integers, found {values.dtype}", path=path)
    if values.size and (int(values.max()) >= 1 << 62 or int(values.min()) < 0):
        raise FormatError(f"{what}: expected integers from 0 up, found {values.min()} to {values.max()}", path=path)
    return values.astype(np.int64)


def span_of(mask: NDArray[Any], path: Location) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each row of a mask, the position of the first non-zero element and the number of them. They must be contiguous."""
    real = mask != 0
    counts = real.sum(axis=1, dtype=np.int64)
    firsts = np.where(counts > 0, real.argmax(axis=1), 0).astype(np.int64)
    lasts = mask.shape[1] - real[:, ::-1].argmax(axis=1) if mask.shape[1] else firsts
    holes = np.flatnonzero((counts > 0) & (lasts - firsts != counts))
    if len(holes):
        raise UnsupportedError(f"lengths: the mask of example {holes[0]} has zeros between its tokens", path=path)
    return firsts, counts


def repeated(value: int, n: int) -> NDArray[np.int64]:
    """``n`` times one value, in the memory of one."""
    return np.broadcast_to(np.int64(value), n)
