"""Series of numbered files, and the numbers without a file.

A format with a file per example, batch or chunk stores no list of its files. If one of them is lost, the dataset opens with fewer
examples, and later examples have other positions. Only the numbers in the names show it.

Only names are compared, in linear time: no file is opened.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from actshard.base.codes import Remark

FileKey = tuple[int | str, ...]
"""The number of a file, after the numbers and names of its series."""
MOST_MISSING = 1 << 16
"""Numbers without a file that get an example without tokens, in addition to one for each file."""
SHOWN = 5
"""Number of missing files that are named."""


@dataclass(frozen=True)
class Gap:
    """Consecutive numbers of a series that have no file.

    Attributes:
        first, stop: the first number, and the one after the last.
        neighbor: key of the file before the gap, or after a gap at the beginning.
    """

    first: int
    stop: int
    neighbor: FileKey


@dataclass(frozen=True)
class Numbered:
    """Series of numbered files.

    Attributes:
        count: number of files. Files with equal keys count once.
        gaps: the gaps of all series, in order.
    """

    count: int
    gaps: list[Gap] = field(default_factory=list)

    @classmethod
    def of(cls, keys: Iterable[FileKey], *, first: int | None = None, stop: int | None = None) -> Numbered:
        """Finds the gaps of each series.

        Args:
            keys: a key per file, whose last item is a number. All items at one position have the same type.
            first: the first number of each series; None: the smallest one, so that a series may begin anywhere.
            stop: the number after the last one of each series; None: the files do not specify it.
        """
        distinct = set(keys)
        series: dict[FileKey, list[int]] = {}
        for key in distinct:
            number = key[-1]
            assert isinstance(number, int)
            series.setdefault(key[:-1], []).append(number)
        gaps: list[Gap] = []
        for prefix, numbers in sorted(series.items()):
            start = min(numbers) if first is None else first
            end = max(numbers) + 1 if stop is None else stop
            if min(numbers) < start or max(numbers) >= end or end - start > len(numbers):
                gaps += _gaps_of(prefix, sorted(numbers), start, end)
        return cls(len(distinct), gaps)

    @property
    def missing(self) -> int:
        """Number of missing files."""
        return sum(gap.stop - gap.first for gap in self.gaps)

    def sequential(self) -> Numbered:
        """The same files; without gaps if most numbers have no file, because these may be identifiers.

        A name such as ``acts/11.npy`` contains a position, or the identifier of an example in a larger set. A copy that lost files
        usually lost the smaller part. Numbers therefore count as positions if more of them have a file than lack one.
        """
        return self if self.missing < self.count else Numbered(self.count)

    def numbers(self) -> Iterator[tuple[int, Gap]]:
        """The missing numbers, each with its gap."""
        for gap in self.gaps:
            for number in range(gap.first, gap.stop):
                yield number, gap

    def names(self, name: Callable[[int, Gap], str]) -> str:
        """Names of the first missing files, for messages. ``name`` returns the name of one."""
        shown = [name(number, gap) for number, gap in itertools.islice(self.numbers(), SHOWN)]
        return ", ".join(shown) + (", ..." if self.missing > SHOWN else "")

    def remarks(self, name: Callable[[int, Gap], str], files: str = "numbered files") -> list[Remark]:
        """A warning that counts the missing files and names the first; none without gaps."""
        if not self.gaps:
            return []
        total, verb = self.missing + self.count, "is" if self.missing == 1 else "are"
        text = f"{self.missing} of {total} {files} {verb} missing: {self.names(name)}; without them, later examples move up"
        return [Remark("missing-file", text)]


def _gaps_of(series: FileKey, numbers: Sequence[int], expected: int, stop: int) -> Iterator[Gap]:
    before = numbers[0]
    for number in numbers:
        if number > expected:
            yield Gap(expected, number, (*series, before))
        expected, before = max(expected, number + 1), number
    if expected < stop:
        yield Gap(expected, stop, (*series, before))


def renumbered(name: str, span: tuple[int, int], number: int) -> str:
    """A file name with another number in place of the digits at ``span``, padded like them.

    >>> renumbered("sample_0009.pt", (7, 11), 10)
    'sample_0010.pt'
    """
    start, end = span
    is_padded = name[start] == "0" or len(str(number)) >= end - start
    return f"{name[:start]}{number:0{end - start if is_padded else 1}d}{name[end:]}"


TOTAL = re.compile(r"[_-]of[_-](\d{1,9})")
"""The number of files in a name, directly after the file's number, as in ``activations_1_of_40.pt``."""


def bounds_of(total: int, numbers: Iterable[int]) -> tuple[int, int]:
    """The first number of a series with a known number of files, and the number after the last.

    Writers count from 0 or from 1; a number that equals the total shows the latter, and so does a series without 0.
    """
    smallest, largest = 1, 0
    for number in numbers:
        smallest, largest = min(smallest, number), max(largest, number)
    return smallest, max(total + (0 if smallest == 0 else 1), largest + 1)
