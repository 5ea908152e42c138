"""Names of folders and files of draft-model examples: listing them in order, and finding numbers without a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actshard.base.codes import Remark
from actshard.base.errors import FormatError
from actshard.base.location import Location
from actshard.formats.numbered import MOST_MISSING, FileKey, Gap, Numbered, renumbered

NumberedFile = tuple[tuple[int, ...], Location]
"""The numbers in the names of a file and its folders, and its location."""
_SPAN = re.compile(r"\d+-\d+")


@dataclass(frozen=True)
class DraftTree:
    """Patterns of the names of a dataset's folders and files, from its folder down. Their groups are numbers.

    Attributes:
        levels: a pattern per level; the last matches files.
        order: positions of the groups by which examples are sorted.
        example: positions of the groups that identify an example; two files of one example are a fault.
        sure: whether the names alone identify the format, if no file can be read.
        series: positions of the groups that identify a series of files, then that of the file's number; empty: ``example``.
        first: the first number of each series; None: it may begin anywhere.
        span: positions of the groups in a folder's name that are the first number of its files and the one after the last.
    """

    levels: tuple[re.Pattern[str], ...]
    order: tuple[int, ...]
    example: tuple[int, ...]
    sure: bool = False
    series: tuple[int, ...] = ()
    first: int | None = None
    span: tuple[int, int] | None = None

    def files(self, root: Location, most: int | None = None) -> list[NumberedFile]:
        """Numbers and locations of files, in order. With ``most``: of about this many of the files found first."""
        files: list[NumberedFile] = [((), root)]
        for depth, level in enumerate(self.levels):
            kind = "file" if depth == len(self.levels) - 1 else "folder"
            children = []
            for numbers, folder in files:
                entries = folder.entries() if most is None else folder.first(4096)
                for entry in entries:
                    match = level.fullmatch(entry.name)
                    if match is not None and entry.kind == kind:
                        children.append(((*numbers, *map(int, match.groups())), folder / entry.name))
                if most is not None and len(children) >= most:
                    break
            files = children
        return self._sorted(files)

    def missing_files(
        self, root: Location, files: Sequence[NumberedFile]
    ) -> tuple[Numbered, Callable[[int, Gap], str]]:
        """The files with their gaps, and a function that returns the name of a missing file."""
        series = self.series or self.example
        paths: dict[FileKey, Location] = {tuple(numbers[n] for n in series): path for numbers, path in files}
        group = series[-1] + 1 - sum(level.groups for level in self.levels[:-1])

        def name(number: int, gap: Gap) -> str:
            neighbor = paths[gap.neighbor]
            match = self.levels[-1].fullmatch(neighbor.name)
            assert match is not None  # this pattern found the file
            file = renumbered(neighbor.name, match.span(group), number)
            # The folder of a missing file is known only if folders do not depend on the number.
            return file if self.span else f"{neighbor.relative_to(root).removesuffix(neighbor.name)}{file}"

        first = self.first
        if first is None and self.span is not None and files:
            first = min(numbers[self.span[0]] for numbers, _ in files)  # the folders name the numbers of their files
        return Numbered.of(paths, first=first), name

    def filled(self, root: Location, files: Sequence[NumberedFile]) -> list[NumberedFile]:
        """The files, and those that are missing between them: later examples of the series keep their numbers.

        Raises:
            FormatError: many more numbers have no file than have one.
        """
        numbered, name = self.missing_files(root, files)
        if numbered.missing > numbered.count + MOST_MISSING:
            raise FormatError(
                f"expected at most {MOST_MISSING:,} missing numbers, found {numbered.missing:,} between {numbered.count:,} files",
                path=root,
            )
        series = self.series or self.example
        neighbors = {tuple(numbers[n] for n in series): (numbers, path) for numbers, path in files}
        missing: list[NumberedFile] = []
        for number, gap in numbered.numbers():
            numbers, path = neighbors[tuple(map(int, gap.neighbor))]
            missing_numbers = (*numbers[: series[-1]], number, *numbers[series[-1] + 1 :])
            missing.append((missing_numbers, path.parent / name(number, gap).rpartition("/")[2]))
        return self._sorted([*files, *missing])

    def _sorted(self, files: Sequence[NumberedFile]) -> list[NumberedFile]:
        return sorted(files, key=lambda file: ([file[0][n] for n in self.order], file[1].key))

    def missing_folders(self, files: Sequence[NumberedFile]) -> list[Remark]:
        """A warning about missing folders between others, if folders are named by the numbers of their files."""
        if self.span is None:
            return []
        start, stop = self.span
        prefix = (self.series or self.example)[:-1]
        folders = {(tuple(numbers[n] for n in prefix), numbers[start], numbers[stop]): path for numbers, path in files}
        sizes = {end - first for _, first, end in folders}
        size = sizes.pop()
        if sizes or size < 1:
            return []  # folders of several sizes: the names of missing ones are unknown
        neighbors: dict[FileKey, Location] = {
            (*key, first // size): path.parent for (key, first, _), path in folders.items()
        }

        def name(number: int, gap: Gap) -> str:
            return _SPAN.sub(f"{number * size}-{number * size + size}", neighbors[gap.neighbor].name)

        return Numbered.of(neighbors, first=self.first).remarks(name, "numbered folders")
