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
from actshard.base.containers import read_footer
from actshard.base.errors import FormatError
from actshard.base.location import Location
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
            offset = max(self.first - 1, 0)
            raw.seek(offset)
            stream = io.BufferedReader(Watched(raw, tell), 1 << 18)
            if self.first:
                offset = _after_line_break(stream, offset, self.stop)
            number = 0
            while offset < self.stop and (line := stream.readline(LONGEST_LINE + 1)):
                number += 1
                yield number, offset, line
                offset += len(line)


def _after_line_break(stream: IO[bytes], offset: int, stop: int) -> int:
    """Reads to the end of a line, or to ``stop``. Returns the next byte's position."""
    while offset < stop and (part := stream.readline(min(_SKIPPED_AT_ONCE, stop - offset))):
        offset += len(part)
        if part.endswith(b"\n"):
            return offset
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


def divisible(source: Source, size: int, undivided_bytes: int) -> Divisible:
    """How a source of ``size`` bytes may be divided. Parquet files of up to ``undivided_bytes`` are not read and not divided."""
    if compression(source.path) is not None:
        return Divisible(size)
    kind = kind_of(source.path)
    if kind == ".jsonl":
        return Divisible(size, "any")
    if kind == ".parquet" and size > undivided_bytes:
        return _row_groups(source.path, size)
    return Divisible(size)


def _row_groups(path: Path, size: int) -> Divisible:
    groups = _groups(path)
    weights = [group.total_compressed_size + 1 for group in groups]
    total = sum(weights)
    if len(groups) < 2:
        return Divisible(size)
    borders = tuple(size * weight_before // total for weight_before in itertools.accumulate(weights, initial=0))
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
    values = [piece.source, piece.first, piece.stop]
    if (piece.first, piece.stop) == (0, how.bytes):
        return values[:1]
    if isinstance(how.borders, tuple):
        group = how.borders.index(piece.first)
        values += [group, how.borders.index(piece.stop), how.rows[group]]
    return values


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
    task_pieces = _cut_in_order(list(enumerate(sources)), [1] * tasks)
    if all(how.borders == "any" for how in sources) or tasks == 1:
        return _sort_pieces(task_pieces)
    heaviest, mean = _heaviest(task_pieces), sum(how.bytes for how in sources) / tasks
    if heaviest > _UNEVEN * mean:
        dealt = _deal_files(sources, tasks)
        if _heaviest(dealt) < heaviest:
            task_pieces = dealt
    return _sort_pieces(task_pieces)


def divide_files(
    sources: Sequence[Source], sizes: Sequence[int], tasks: int, undivided_bytes: int
) -> list[tuple[int, list[list[int]]]]:
    """Divides files among tasks, see :func:`divide`. Returns the bytes and the pieces, as of :func:`as_list`, of each task.

    Args:
        sources: the files.
        sizes: their bytes.
        tasks: maximum number of tasks.
        undivided_bytes: Parquet files of up to this number of bytes are not divided.
    """
    how = [divisible(source, size, undivided_bytes) for source, size in zip(sources, sizes, strict=True)]
    return [
        (sum(p.stop - p.first for p in task), [as_list(p, how[p.source]) for p in task]) for task in divide(how, tasks)
    ]


def _heaviest(tasks: list[list[SourcePart]]) -> int:
    return max(sum(piece.stop - piece.first for piece in task) for task in tasks)


def _sort_pieces(tasks: list[list[SourcePart]]) -> list[list[SourcePart]]:
    return [sorted(task, key=lambda piece: (piece.source, piece.first)) for task in tasks if task]


def _cut_in_order(sources: list[tuple[int, Divisible]], shares: Sequence[int]) -> list[list[SourcePart]]:
    """Cuts the concatenation of sources in proportion to ``shares``."""
    ends = list(itertools.accumulate((how.bytes for _, how in sources), initial=0))
    total_shares, total = sum(shares), ends[-1]
    task_pieces: list[list[SourcePart]] = [[] for _ in shares]
    if not total:
        task_pieces[0] = [SourcePart(i, 0, how.bytes) for i, how in sources]
        return task_pieces
    cuts = [0]
    for share in itertools.accumulate(shares[:-1]):
        cuts.append(max(cuts[-1], _cut(sources, ends, total * share // total_shares, _SNAP * total / len(shares))))
    cuts.append(total)
    for index, (i, _) in enumerate(sources):
        begin, end = ends[index], ends[index + 1]
        task = bisect_right(cuts, begin, hi=len(cuts) - 1) - 1
        if begin == end:  # an empty file
            task_pieces[task].append(SourcePart(i, 0, 0))
        while begin < end:
            stop = min(end, cuts[task + 1])
            if stop > begin:
                task_pieces[task].append(SourcePart(i, begin - ends[index], stop - ends[index]))
            begin, task = max(stop, begin), task + 1
    return task_pieces


def _cut(sources: list[tuple[int, Divisible]], ends: list[int], goal: int, near: float) -> int:
    """The position closest to ``goal`` at which the sources may be cut. Prefers a border of files within ``near`` bytes."""
    index = min(bisect_right(ends, goal) - 1, len(sources) - 1)
    begin, end = ends[index], ends[index + 1]
    nearer = begin if goal - begin <= end - goal else end
    borders = sources[index][1].borders
    if borders is None or abs(nearer - goal) <= near:
        return nearer
    if isinstance(borders, str):
        return goal
    right = min(max(bisect_left(borders, goal - begin), 1), len(borders) - 1)
    left = borders[right - 1]
    return begin + (left if goal - begin - left <= borders[right] - (goal - begin) else borders[right])


def _deal_files(sources: Sequence[Divisible], tasks: int) -> list[list[SourcePart]]:
    task_pieces: list[list[SourcePart]] = [[] for _ in range(tasks)]
    loads = [(0, task) for task in range(tasks)]
    indivisible = [(how.bytes, i) for i, how in enumerate(sources) if how.borders != "any"]
    for size, i in sorted(indivisible, key=lambda pair: (-pair[0], pair[1])):
        load, task = heapq.heappop(loads)
        task_pieces[task].append(SourcePart(i, 0, size))
        heapq.heappush(loads, (load + size, task))
    rest = [(i, how) for i, how in enumerate(sources) if how.borders == "any"]
    if rest:
        task_loads = [load for load, _ in sorted(loads, key=lambda pair: pair[1])]
        level = _level(task_loads, sum(how.bytes for _, how in rest))
        for task, pieces in enumerate(_cut_in_order(rest, [max(level - load, 0) for load in task_loads])):
            task_pieces[task] += pieces
    return task_pieces


def _level(loads: Sequence[int], extra_bytes: int) -> int:
    """The smallest level, rounded up, to which ``extra_bytes`` fill up the lowest ``loads``."""
    total, sorted_loads = extra_bytes, sorted(loads)
    for count, load in enumerate(sorted_loads, 1):
        total += load
        level = -(-total // count)
        if count == len(sorted_loads) or level <= sorted_loads[count]:
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
