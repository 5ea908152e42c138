"""``Chosen``: the examples of a dataset that a filtered store contains."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from actshard.base._columns import pick_rows

if TYPE_CHECKING:
    import pyarrow as pa

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Example numbers of a dataset, in the order of a filtered store.

    Attributes:
        numbers: a range, or native int64 numbers as bytes. The Rust core reads the same bytes object. Evenly spaced
            numbers are always a range, so that equal choices have equal numbers.
    """

    numbers: range | bytes

    @classmethod
    def of(cls, numbers: range | NDArray[np.int64]) -> Chosen:
        """A choice of these numbers; copies an array that is not a range."""
        if isinstance(numbers, range) or len(numbers) < 2:
            first, count = (int(numbers[0]) if len(numbers) else 0), len(numbers)
            step = numbers.step if isinstance(numbers, range) and count > 1 else 1
        else:
            first, count, step = int(numbers[0]), len(numbers), int(numbers[1]) - int(numbers[0])
            if not step or (np.diff(numbers) != step).any():
                return cls(np.ascontiguousarray(numbers, np.int64).tobytes())
        return cls(range(first, first + count * step, step))

    def __len__(self) -> int:
        return len(self.numbers) if isinstance(self.numbers, range) else len(self.numbers) // 8

    @property
    def native(self) -> tuple[int, int, int] | bytes:
        """The form that the binding takes."""
        numbers = self.numbers
        return (numbers.start, numbers.step, len(numbers)) if isinstance(numbers, range) else numbers

    def at(self, position: int) -> int:
        """The number at a position."""
        return self.numbers[position] if isinstance(self.numbers, range) else int(self.array()[position])

    def numbers_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers at several positions, int64."""
        numbers = self.numbers
        return numbers.start + positions * numbers.step if isinstance(numbers, range) else self.array()[positions]

    def array(self) -> NDArray[np.int64]:
        """The numbers, int64; read-only unless they are a range."""
        numbers = self.numbers
        if isinstance(numbers, range):
            return np.arange(numbers.start, numbers.stop, numbers.step, dtype=np.int64)
        return np.frombuffer(numbers, np.int64)

    def pick(self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """The chosen entries of an array with one entry per example: a view for a range, else a copy. Read-only."""
        numbers = self.numbers
        if isinstance(numbers, range):
            picked = values[numbers.start : numbers.stop if numbers.stop >= 0 else None : numbers.step]
        else:
            picked = values[np.frombuffer(numbers, np.int64)]
        picked.flags.writeable = False
        return picked

    def pick_rows(self, table: pa.Table) -> pa.Table:
        """The chosen rows of a table."""
        if isinstance(self.numbers, range) and self.numbers.step == 1:
            return table.slice(self.numbers.start, len(self))
        return pick_rows(table, self.array())

    def within(self, outer: Chosen) -> Chosen:
        """These positions of another choice, as numbers of the dataset."""
        inner, numbers = self.numbers, outer.numbers
        if isinstance(inner, range) and isinstance(numbers, range):
            step, first = numbers.step * inner.step, numbers.start + numbers.step * inner.start
            return Chosen.of(range(first, first + step * len(inner), step))
        return Chosen.of(outer.array()[self.array()])

    def digest(self) -> bytes:
        """SHA-256 of the numbers; equal for equal choices on any machine."""
        numbers = self.numbers
        data = repr(numbers).encode() if isinstance(numbers, range) else self.array().astype("<i8").tobytes()
        return hashlib.sha256(data).digest()
