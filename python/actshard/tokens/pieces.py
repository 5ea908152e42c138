"""Pieces of sources: ranges of bytes of JSON lines, row groups of Parquet files, whole files; and dividing sources among tasks.

A range of bytes contains the lines that begin in it; its last line may end after the range. So adjoining ranges contain every line
exactly once, and a file can be divided at any byte without reading it. To find its first line, a range is read from the byte
before it up to the first line break.
"""

from __future__ import annotations

import codecs
import heapq
import io
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from actshard._native import ParquetGroup
from actshard.errors import FormatError
from actshard.footers import read_footer
from actshard.location import Location
from actshard.tokens.sources import (
    LONGEST_LINE,
    AnySource,
    RecordOrBlock,
    RowProblem,
    Source,
    Watched,
    compression,
    kind_of,
    parquet_rows,
    parsed_lines,
    reading,
)

_SNAP = 0.02
"""A cut moves to the border of a file if that is within this fraction of a task's bytes, because whole files are not copied."""
_UNEVEN = 1.05
"""Tasks get consecutive pieces unless the largest task exceeds this multiple of the mean."""
_SKIPPED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class LineRange(Source):
    """The lines of a file that begin in a range of bytes. They are numbered from 1 in each range.

    Attributes:
        first, stop: the range. If it does not start at 0, error messages name the byte at which a line begins.
    """

    first: int = 0
    stop: int = 0

    def size(self) -> int:
        """Size of the range in bytes."""
        return self.stop - self.first

    @property
    def what(self) -> str:
        """The unit of record numbers."""
        return "line"

    def error(self, problem: RowProblem) -> FormatError:
        """The error names the line; or the byte at which it begins, if the number of lines before the range is unknown."""
        if self.first == 0:
            return problem.error(self.path)
        for number, begin, _ in self.lines():
            if number == problem.number:
                return RowProblem(begin, problem.detail, "line at byte").error(self.path)
        return problem.error(self.path)

    def records(
        self, columns: Sequence[str], tell: Callable[[int], object] | None = None, *, blocks: bool = False
    ) -> Iterator[RecordOrBlock]:
        """Yields records with their numbers in the range, from 1."""
        with reading(self.path):
            yield from parsed_lines(self._short_lines(tell), columns, blocks=blocks)

    def _short_lines(self, tell: Callable[[int], object] | None) -> Iterator[tuple[int, bytes]]:
        for number, begin, line in self.lines(tell):
            if len(line) > LONGEST_LINE:
                raise self.error(RowProblem(number, f"expected at most {LONGEST_LINE} bytes"))
            yield number, line.removeprefix(codecs.BOM_UTF8) if begin == 0 else line

    def lines(self, tell: Callable[[int], object] | None = None) -> Iterator[tuple[int, int, bytes]]:
        """Yields (number from 1, first byte, line). Lines that are too long are truncated."""
        with Location.at(self.path).open("read") as raw:
            at = max(self.first - 1, 0)
            raw.seek(at)
            stream = io.BufferedReader(Watched(raw, tell), 1 << 18)
            if self.first:
                at = _after_line_break(stream, at, self.stop)
            number = 0
            while at < self.stop and (line := stream.readline(LONGEST_LINE + 1)):
                number += 1
                yield number, at, line
                at += len(line)


def _after_line_break(stream: IO[bytes], at: int, stop: int) -> int:
    """Reads to the end of a line, or to ``stop``. Returns the next byte's position."""
    while at < stop and (part := stream.readline(min(_SKIPPED_AT_ONCE, stop - at))):
        at += len(part)
        if part.endswith(b"\n"):
            return at
    return stop


@dataclass(frozen=True)
class RowGroups(Source):
    """Consecutive row groups of a Parquet file. Rows are numbered as in the file.

    Attributes:
        first, stop: the row groups.
        before: number of rows before them.
        bytes: their share of the file's bytes.
    """

    first: int = 0
    stop: int = 0
    before: int = 0
    bytes: int = 0

    def size(self) -> int:
        """The row groups' share of the file's bytes."""
        return self.bytes

    def records(
        self, columns: Sequence[str], tell: Callable[[int], object] | None = None, *, blocks: bool = False
    ) -> Iterator[RecordOrBlock]:
        """Yields records with their numbers in the file, from 1."""
        groups = list(range(self.first, self.stop))
        with reading(self.path), Location.at(self.path).open("read") as raw:
            for number, rows in parquet_rows(raw, columns, self.path, groups=groups, blocks=blocks):
                yield number + self.before, rows
        if tell is not None:
            tell(self.bytes)


@dataclass(frozen=True)
class Divisible:
    """How a source may be divided.

    Attributes:
        bytes: its size.
        borders: positions at which it may be cut, from 0 to ``bytes``; ``"any"``; or None if it cannot be cut.
        rows: for a Parquet file, the number of rows before each row group.
    """

    bytes: int
    borders: str | tuple[int, ...] | None = None
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class SourcePart:
    """A part of a source: bytes ``first`` to ``stop``; for a Parquet file, both are borders of row groups."""

    source: int
    first: int
    stop: int


def divisible(source: Source, size: int, wanted: int) -> Divisible:
    """How a source of ``size`` bytes may be divided. Parquet files of up to ``wanted`` bytes are not read and not divided."""
    if compression(source.path) is not None:
        return Divisible(size)
    kind = kind_of(source.path)
    if kind == ".jsonl":
        return Divisible(size, "any")
    if kind == ".parquet" and size > wanted:
        return _row_groups(source.path, size)
    return Divisible(size)


def _row_groups(path: Path, size: int) -> Divisible:
    groups = _groups(path)
    weights = [group.total_compressed_size + 1 for group in groups]
    total = sum(weights)
    if len(groups) < 2:
        return Divisible(size)
    borders = tuple(size * at // total for at in itertools.accumulate(weights, initial=0))
    rows = tuple(itertools.accumulate((g.num_rows for g in groups), initial=0))
    return Divisible(size, borders, rows) if len(set(borders)) == len(borders) else Divisible(size)


def _groups(path: Path) -> list[ParquetGroup]:
    footer = read_footer(Location.at(path))
    return [footer.group(i) for i in range(footer.num_groups)]


def rows_of_groups(path: Path) -> list[int]:
    """Number of rows of each row group of a Parquet file."""
    return [group.num_rows for group in _groups(path)]


def as_list(piece: SourcePart, how: Divisible) -> list[int]:
    """A piece as JSON values; see :func:`source_of`."""
    made = [piece.source, piece.first, piece.stop]
    if (piece.first, piece.stop) == (0, how.bytes):
        return made[:1]
    if isinstance(how.borders, tuple):
        group = how.borders.index(piece.first)
        made += [group, how.borders.index(piece.stop), how.rows[group]]
    return made


def source_of(piece: Sequence[int], sources: Sequence[AnySource]) -> Source:
    """The source of a piece that :func:`as_list` returned."""
    source = sources[piece[0]]
    if not isinstance(source, Source):
        raise TypeError("expected a file")
    if len(piece) == 1:
        return source
    common, (first, stop) = (source.path, source.shard, source.version), piece[1:3]
    if len(piece) == 3:
        return LineRange(*common, first, stop)
    return RowGroups(*common, piece[3], piece[4], piece[5], stop - first)


# -- dividing ------------------------------------------------------------------------------------------------------


def divide(sources: Sequence[Divisible], tasks: int) -> list[list[SourcePart]]:
    """Divides sources among at most ``tasks`` tasks of nearly equal bytes.

    Tasks get consecutive pieces if that is balanced. Otherwise each file that cannot be cut anywhere goes to the task with the
    fewest bytes, largest files first, and the other files fill the tasks up.
    """
    made = _in_order(list(enumerate(sources)), [1] * tasks)
    if all(how.borders == "any" for how in sources) or tasks == 1:
        return _filled(made)
    heaviest, mean = _heaviest(made), sum(how.bytes for how in sources) / tasks
    if heaviest > _UNEVEN * mean:
        dealt = _dealt(sources, tasks)
        if _heaviest(dealt) < heaviest:
            made = dealt
    return _filled(made)


def divide_files(
    sources: Sequence[Source], sizes: Sequence[int], tasks: int, whole: int
) -> list[tuple[int, list[list[int]]]]:
    """Divides files among tasks, see :func:`divide`. Returns the bytes and the pieces, as of :func:`as_list`, of each task.

    Args:
        sources: the files.
        sizes: their bytes.
        tasks: maximum number of tasks.
        whole: Parquet files of up to this number of bytes are not divided.
    """
    how = [divisible(source, size, whole) for source, size in zip(sources, sizes, strict=True)]
    return [
        (sum(p.stop - p.first for p in task), [as_list(p, how[p.source]) for p in task]) for task in divide(how, tasks)
    ]


def _heaviest(tasks: list[list[SourcePart]]) -> int:
    return max(sum(piece.stop - piece.first for piece in task) for task in tasks)


def _filled(tasks: list[list[SourcePart]]) -> list[list[SourcePart]]:
    return [sorted(task, key=lambda piece: (piece.source, piece.first)) for task in tasks if task]


def _in_order(sources: list[tuple[int, Divisible]], shares: Sequence[int]) -> list[list[SourcePart]]:
    """Cuts the concatenation of sources in proportion to ``shares``."""
    ends = list(itertools.accumulate((how.bytes for _, how in sources), initial=0))
    whole, total = sum(shares), ends[-1]
    made: list[list[SourcePart]] = [[] for _ in shares]
    if not total:
        made[0] = [SourcePart(i, 0, how.bytes) for i, how in sources]
        return made
    cuts = [0]
    for share in itertools.accumulate(shares[:-1]):
        cuts.append(max(cuts[-1], _cut(sources, ends, total * share // whole, _SNAP * total / len(shares))))
    cuts.append(total)
    for at, (i, _) in enumerate(sources):
        begin, end = ends[at], ends[at + 1]
        task = bisect_right(cuts, begin, hi=len(cuts) - 1) - 1
        if begin == end:  # an empty file
            made[task].append(SourcePart(i, 0, 0))
        while begin < end:
            stop = min(end, cuts[task + 1])
            if stop > begin:
                made[task].append(SourcePart(i, begin - ends[at], stop - ends[at]))
            begin, task = max(stop, begin), task + 1
    return made


def _cut(sources: list[tuple[int, Divisible]], ends: list[int], wanted: int, near: float) -> int:
    """The position closest to ``wanted`` at which the sources may be cut. Prefers a border of files within ``near`` bytes."""
    at = min(bisect_right(ends, wanted) - 1, len(sources) - 1)
    begin, end = ends[at], ends[at + 1]
    nearer = begin if wanted - begin <= end - wanted else end
    borders = sources[at][1].borders
    if borders is None or abs(nearer - wanted) <= near:
        return nearer
    if isinstance(borders, str):
        return wanted
    right = min(max(bisect_left(borders, wanted - begin), 1), len(borders) - 1)
    left = borders[right - 1]
    return begin + (left if wanted - begin - left <= borders[right] - (wanted - begin) else borders[right])


def _dealt(sources: Sequence[Divisible], tasks: int) -> list[list[SourcePart]]:
    made: list[list[SourcePart]] = [[] for _ in range(tasks)]
    loads = [(0, task) for task in range(tasks)]
    whole = [(how.bytes, i) for i, how in enumerate(sources) if how.borders != "any"]
    for size, i in sorted(whole, key=lambda pair: (-pair[0], pair[1])):
        load, task = heapq.heappop(loads)
        made[task].append(SourcePart(i, 0, size))
        heapq.heappush(loads, (load + size, task))
    rest = [(i, how) for i, how in enumerate(sources) if how.borders == "any"]
    if rest:
        held = [load for load, _ in sorted(loads, key=lambda pair: pair[1])]
        level = _level(held, sum(how.bytes for _, how in rest))
        for task, pieces in enumerate(_in_order(rest, [max(level - load, 0) for load in held])):
            made[task] += pieces
    return made


def _level(loads: Sequence[int], more: int) -> int:
    """The smallest level, rounded up, to which ``more`` bytes fill up the lowest ``loads``."""
    total, held = more, sorted(loads)
    for count, load in enumerate(held, 1):
        total += load
        level = -(-total // count)
        if count == len(held) or level <= held[count]:
            return level
    return 0


def adjoining(pieces: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[list[int]]:
    """Groups pieces of :func:`as_list` into runs in which each piece begins where the previous one ends. Returns their numbers."""
    runs: list[list[int]] = []
    end: tuple[int, int] | None = None
    for number, piece in enumerate(pieces):
        source, first, stop = piece[:3] if len(piece) > 1 else (piece[0], 0, sizes[piece[0]])
        if end is not None and ((source, first) == end or ((source - 1, sizes[source - 1]) == end and first == 0)):
            runs[-1].append(number)
        else:
            runs.append([number])
        end = (source, stop)
    return runs
