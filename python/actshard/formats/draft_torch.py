"""Folders of draft-model examples, one file of ``torch.save`` each, as a dataset. See ``draft_examples`` for the files.

A format provides the names of its folders and files, in order, and the names of its tensors. An example that cannot be read keeps
its number. A warning and the error of a read contain the reason.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base import layers as names_of_layers
from actshard.base._arguments import stored
from actshard.base.codes import Remark
from actshard.base.containers import TorchFile, read_torch
from actshard.base.errors import RAISE, ActshardError, ArgumentError, Faults, FormatError, MissingFileError
from actshard.base.layers import Layer
from actshard.base.location import Location
from actshard.formats.contents import NOTHING_ABSENT, Absence, Contents, Evidence, Options
from actshard.formats.draft_examples import (
    DraftColumns,
    DraftExample,
    DraftKeys,
    KeptExamples,
    PlaceTable,
    example_of,
    kind_of,
    place_of,
    read_each,
    restored,
    rows_of_columns,
    rows_of_parts,
    stored_of,
    values_of_files,
)
from actshard.formats.kept import KeptIndex
from actshard.formats.numbered import MOST_MISSING, FileKey, Gap, Numbered, renumbered
from actshard.formats.per_token import LAST, wrong_values
from actshard.formats.report import Report, check_torch

# Names of folders and files of draft-model examples: listing them in order, and finding numbers without a file.


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


_SHOWN = 20
"""Number of damaged files that are named in warnings."""
_TRIED = 16
"""Number of files that detection tries, because the first ones may be damaged, or being written."""
_READ = 4
"""Number of files with other keys after which detection ends, if files may have any name."""
_Shape = tuple[int, int, str]
"""Width of the layers' states, width of the last hidden state, dtype."""


@dataclass(frozen=True)
class DraftFolder:
    """A format of folders of examples.

    Attributes:
        format: its name.
        looked_for: description of the files, for messages.
        kinds: kinds of files, the most specific first.
        trees: patterns of file names, the deepest first.
        listing: lists the files, for formats without fixed file names; None: ``trees`` finds them.
        extra_files: names of further files of a dataset.
        skips: the examples that the format's own writer leaves out although it counts them, so that numbers without a file are no
            fault; empty: it numbers files without gaps.
    """

    format: str
    looked_for: str
    kinds: tuple[DraftKeys, ...]
    trees: tuple[DraftTree, ...] = ()
    listing: Callable[[Location, int | None], list[Location]] | None = None
    extra_files: tuple[str, ...] = ()
    skips: str = ""

    def _files(self, root: Location, most: int | None) -> tuple[DraftTree | None, list[NumberedFile]]:
        if self.listing is not None:
            return None, [((number,), path) for number, path in enumerate(self.listing(root, most))]
        for tree in self.trees:
            if files := tree.files(root, most):
                return tree, files
        return None, []

    def detect(self, root: Location) -> Evidence:
        """Checks names, and the keys of files that can be read: of the first, or of most, if any name is allowed."""
        if root.kind() != "folder" or not root.lists:
            return Evidence(False, self.looked_for, "no folder that can be listed")
        tree, files = self._files(root, _TRIED)
        if not files:
            return Evidence(False, self.looked_for, "no such files")
        fault, other = "", ""
        counts: collections.Counter[bool] = collections.Counter()
        for _, path in files[:_TRIED]:
            try:
                (file,) = read_torch([path])
                kind = kind_of(file.value, self.kinds)
            except ActshardError as error:
                fault = fault or f"{path.name}: {error.detail}"
                continue
            counts[kind is not None] += 1
            if kind is not None and counts[True] >= counts[False]:
                return Evidence(True, self.looked_for, f"{kind.kind} examples")
            other = other or ("" if kind is not None else path.name)
            if self.listing is None or counts[False] == _READ:
                break
        if other:
            return Evidence(False, self.looked_for, f"other keys in {other}", near=True)
        if tree is not None and tree.sure:
            return Evidence(True, self.looked_for, f"files that cannot be read: {fault}")
        return Evidence(False, self.looked_for, fault, near=True)

    def dataset(self, root: Location, options: Options, faults: Faults = RAISE) -> DraftDataset:
        """Reads the pickles of all files, but no tensors.

        Raises:
            MissingFileError: there are no files.
            ActshardError: no file can be read; the error of the first file, unless ``faults`` collects them.
        """
        tree, files = self._files(root, None)
        if not files:
            raise MissingFileError(f"expected {self.looked_for}, found none", path=root)
        dataset = DraftDataset(self, root, skips_incomplete=options.skip_incomplete)
        if tree is not None and options.skip_incomplete:
            dataset.warnings += tree.missing_folders(files)
            files = tree.filled(root, files)
        example = tree.example if tree is not None else (0,)
        paths: dict[tuple[int, ...], Location] = {}
        for numbers, path in files:
            key = tuple(numbers[n] for n in example)
            if key in paths:
                text = f"{path.relative_to(root)}: contains example {'.'.join(map(str, key))}, as does {paths[key].name}; not read"
                dataset.warnings.append(Remark("duplicate-sample", text))
                continue
            paths[key] = path
            dataset.paths.append(path)
        if tree is not None and not options.skip_incomplete:
            dataset.warn_of_gaps(tree, files)
        kept_index = place_of(root, self.format, dataset.paths, options.keep and not options.skip_incomplete)
        index = None if kept_index is None else kept_index.load()
        if index is None or not dataset.restore(*index):
            dataset.read(options.decoded_memory, faults)
            dataset.keep(kept_index)
        return dataset

    def open(self, root: Location, options: Options) -> Contents:
        """Opens a dataset."""
        return self.dataset(root, options).contents(options)

    def check(self, root: Location, report: Report, tell: Callable[[str, int, int], object]) -> None:
        """Checks masks, token ids and storages much larger than their tensors; if deep, also checksums.

        Opening reports the first damaged files.
        """
        dataset = report.faults.parse(root, lambda: self.dataset(root, Options.of(root), report.faults))
        if dataset is None:
            return
        report.count("files", len(dataset.paths))
        if dataset.skipped:
            report.add("skipped-numbers", root, dataset.skipped)
        report.faults.add(*(dataset.faults[number] for number in sorted(dataset.faults)[_SHOWN:]))

        def look(number: int, file: TorchFile | ActshardError) -> None:
            tell("files", number, len(dataset.paths))
            if number not in dataset.faults and isinstance(file, TorchFile):
                with report.noting(file.path):
                    _check_file(file, dataset.examples[number], report)

        with report.noting(root):
            read_each(dataset.paths, 1 << 30, look)


def _check_file(file: TorchFile, example: DraftExample | None, report: Report) -> None:
    check_torch(file, report)
    if example is None:
        return
    for key, part in example.columns.items():
        values = file.array(part.array).reshape(-1)
        wrong, expected, code = wrong_values(key, values)
        if wrong.size:
            report.add(code, file.path, int(values[wrong[0]]), expected, f"{key}, token {wrong[0]}")


@dataclass
class DraftDataset:
    """The examples of a folder: their files, tensors, and faults by example."""

    folder: DraftFolder
    root: Location
    paths: list[Location] = field(default_factory=list)
    examples: list[DraftExample | None] = field(default_factory=list)
    faults: dict[int, ActshardError] = field(default_factory=dict)
    warnings: list[Remark] = field(default_factory=list)
    keys: DraftKeys | None = None
    shape: _Shape = (0, 0, "")
    skips_incomplete: bool = False
    """Whether examples with faults have no tokens."""
    kept_examples: KeptExamples | None = None
    """The examples, if they come from a cached index; :attr:`examples` is then empty."""
    skipped: str = ""
    """Description of numbers without a file that the format's writer may have left out."""

    def warn_of_gaps(self, tree: DraftTree, files: list[NumberedFile]) -> None:
        """Warns of missing folders and files. If the format's writer skips numbers, describes missing files in :attr:`skipped`."""
        self.warnings += tree.missing_folders(files)
        numbered, name = tree.missing_files(self.root, files)
        if not self.folder.skips:
            self.warnings += numbered.remarks(name)
        elif numbered.gaps:
            count = f"{numbered.missing} of {numbered.missing + numbered.count} numbers have no file"
            self.skipped = f"{count}: {numbered.names(name)}. {self.folder.skips}"

    def read(self, limit: int, faults: Faults = RAISE) -> None:
        """Reads the pickles. The most common kind and shape are the dataset's; other files are faults."""
        self.examples = [None] * len(self.paths)
        kinds: dict[int, DraftKeys] = {}

        def first(number: int, file: TorchFile | ActshardError) -> None:
            try:
                if isinstance(file, ActshardError):
                    raise file
                keys = kind_of(file.value, self.folder.kinds) or self.folder.kinds[0]
                self.examples[number] = example_of(file, keys)
                kinds[number] = keys
            except ActshardError as error:
                error.path = error.path or self.paths[number].place
                self.faults[number] = error

        read_each(self.paths, limit, first, may_lack=self.skips_incomplete)
        if not kinds:
            faults.refuse(*(self.faults[number] for number in sorted(self.faults)))
        self._agree(kinds)
        for number in sorted(self.faults)[:_SHOWN]:
            fault, name = self.faults[number], self.paths[number].relative_to(self.root)
            effect = "it is left out" if self.skips_incomplete else "reading it is an error"
            text = f"example {number}: {name}: {fault.detail}; {effect}"
            self.warnings.append(Remark(fault.code or _CODES.get(fault.kind, "format"), text))
        if len(self.faults) > _SHOWN:
            text = f"{len(self.faults)} of {len(self.paths)} examples cannot be read; the first {_SHOWN} are named"
            self.warnings.append(Remark("format", text))

    def keep(self, kept_index: KeptIndex | None) -> None:
        """Stores an index of the examples in ``kept_index``, unless that is None or a file is damaged."""
        if kept_index is None or self.faults or self.keys is None:
            return
        index = stored_of(self.keys, self.examples)
        if index is not None:
            kept_index.save(*index)

    def restore(self, header: dict[str, object], arrays: list[NDArray[np.generic]]) -> bool:
        """Restores the examples from a cached index instead of reading files; False if the index is invalid."""
        examples = restored(self.folder.kinds, len(self.paths), header, arrays)
        if examples is None:
            return False
        states = [examples.parts.get(name) for name in ("aux", "last")]
        aux, last = (0 if part is None else part.width for part in states)
        dtypes = {part.dtype for part in states if part is not None}
        if len(dtypes) != 1 or (last and aux % last):
            return False
        self.keys, self.kept_examples, self.shape = examples.keys, examples, (aux, last, dtypes.pop())
        return True

    def _agree(self, kinds: dict[int, DraftKeys]) -> None:
        """Chooses the most common kind, shape and dtypes of columns. Other files become faults."""

        def shape_of(number: int) -> tuple[object, ...]:
            example = self.examples[number]
            assert example is not None
            parts = [part for part in (example.aux, example.last) if part is not None]
            dtypes = sorted({part.array.dtype for part in parts})
            widths = [0 if part is None else part.width for part in (example.aux, example.last)]
            columns = tuple((key, part.array.dtype) for key, part in example.columns.items())
            return kinds[number], tuple(widths), tuple(dtypes), columns

        shapes = {number: shape_of(number) for number in kinds}
        counts: dict[tuple[Any, ...], int] = {}
        for shape in shapes.values():
            counts[shape] = counts.get(shape, 0) + 1
        common = max(counts, key=lambda shape: (counts[shape], -self.folder.kinds.index(shape[0])))
        for number, shape in shapes.items():
            if shape != common:
                text = f"expected {_format_shape(common)} as in most files, found {_format_shape(shape)}"
                self.faults[number] = FormatError(text, path=self.paths[number])
                self.examples[number] = None
        self.keys, (aux, last), dtypes, _ = common
        path = self.paths[next(number for number, shape in shapes.items() if shape == common)]
        if len(dtypes) != 1:
            raise FormatError(f"expected states of one dtype, found {' and '.join(dtypes)}", path=path)
        if last and aux % last:
            raise FormatError(f"expected layers of {last} columns side by side, found {aux} columns", path=path)
        if not aux and not last:
            raise FormatError("expected hidden states, found none", path=path)
        self.shape = (aux, last, dtypes[0])

    def layers(self, options: Options) -> tuple[tuple[Layer, ...], int]:
        """Names of layers, and the width of a layer."""
        aux, last, _ = self.shape
        names = _layer_names(options.layout)
        tail: tuple[Layer, ...] = (LAST,) if last else ()
        if names is None:
            if not last:
                text = (
                    f"hidden states of {aux} columns: the files do not record how many layers are concatenated, so they are one "
                    "layer named 0. Name them with layout={'layers': [...]}"
                )
                self.warnings.append(Remark("layout", text))
                return (0,), aux
            return (*range(aux // last), *tail), last
        if names and names[-1] == LAST and last:
            names = names[:-1]
        if last and len(names) != aux // last:
            raise ArgumentError(f"layout: expected {aux // last} layers, found {names_of_layers.short(names)}")
        if not names or aux % len(names):
            shown = names_of_layers.short(names)
            raise ArgumentError(
                f"layout: expected layers that divide {aux} columns evenly, found {len(names)}: {shown}"
            )
        return (*names, *tail), last or aux // len(names)

    def contents(self, options: Options) -> Contents:
        """The dataset's contents, for a store."""
        assert self.keys is not None
        layers, width = self.layers(options)
        dtype = self.shape[2]
        counts = self.counts()
        columns = DraftColumns(self.root, self.paths, *self.columns(options))
        extras = [name for name in self.folder.extra_files if (self.root.joinpath(name)).exists()]
        return Contents(
            format=self.folder.format,
            path=self.root.place,
            metadata={"kind": self.keys.kind},
            layers=names_of_layers.stored(layers, self.root.place),
            d_model=width,
            dtype=stored(dtype),
            num_examples=len(counts),
            token_counts=lambda: counts.astype(np.int64),
            rows=self.rows(width, options),
            column_names=columns.names,
            columns=columns.columns,
            head_columns=columns.head,
            example_columns=columns.some,
            token_columns=columns.per_token,
            files=lambda: [path.place for path in self.paths],
            absence=self._absence(),
            provenance={"kind": self.keys.kind, "files": len(self.paths)}
            | ({} if _layer_names(options.layout) else {"layers": "by position: their numbers are not stored"}),
            extras=tuple(extras),
            warnings=tuple(self.warnings),
        )

    def _absence(self) -> Absence:
        if not self.skips_incomplete:
            return NOTHING_ABSENT
        absent = np.zeros(len(self.paths), np.bool_)
        absent[list(self.faults)] = True
        return Absence(absent, tuple(self.paths[e].place for e in sorted(self.faults)))

    def counts(self) -> NDArray[np.uint32]:
        """Number of tokens of each example; 1 for damaged examples, or 0 if these are left out."""
        if self.kept_examples is not None:
            return self.kept_examples.tokens
        unread = 0 if self.skips_incomplete else 1
        return np.array([unread if example is None else example.tokens for example in self.examples], np.uint32)

    def columns(self, options: Options) -> tuple[dict[str, Rows], dict[str, list[object]]]:
        """Rows of token ids and masks, and values of files, by name."""
        if self.kept_examples is None:
            return rows_of_columns(self.paths, self.examples, options), values_of_files(self.examples)
        parts = {name: part for name, part in self.kept_examples.parts.items() if name not in ("aux", "last")}
        rows = {
            name: rows_of_parts(self.paths, [(part, 0)], self.kept_examples.tokens, 1, options)
            for name, part in parts.items()
        }
        return rows, self.kept_examples.values

    def rows(self, width: int, options: Options) -> Rows:
        """Rows of hidden states: a group per layer, then the last."""
        aux, last, dtype = self.shape
        groups = [("aux", k * width) for k in range(aux // width)] + ([("last", 0)] if last else [])
        if self.kept_examples is not None:
            item = stored(dtype).itemsize
            placed = [(self.kept_examples.parts[name], offset * item) for name, offset in groups]
            return rows_of_parts(self.paths, placed, self.kept_examples.tokens, width, options)
        table = PlaceTable(self.paths)
        numbers = np.zeros((len(groups), len(self.paths)), np.uint32)
        starts = np.zeros((len(groups), len(self.paths)), np.uint64)
        item = stored(dtype).itemsize
        for e, example in enumerate(self.examples):
            if example is None:
                numbers[:, e] = table.unread(e)
                continue
            parts = {"aux": example.aux, "last": example.last}
            for g, (which, offset) in enumerate(groups):
                part = parts[which]
                assert part is not None
                numbers[g, e], starts[g, e] = table.place(e, part, example.gzipped, offset * item)
        faults = [
            (e, error.kind, error.detail, error.path or self.paths[e].place)
            for e, error in sorted(self.faults.items())
            if not self.skips_incomplete
        ]
        return table.open(numbers, starts, self.counts(), width, dtype, options, faults)


_CODES = {
    "truncated": "truncated",
    "unsafe_pickle": "unsafe-pickle",
    "unsupported": "unsupported",
    "not_found": "missing-file",
}
"""Codes of findings by error kind."""


def _format_shape(shape: tuple[Any, ...]) -> str:
    keys, widths, dtypes, columns = shape
    shown = ", ".join(f"{key} {dtype}" for key, dtype in columns)
    states = ", ".join(f"{key} of {n} columns" for key, n in zip((keys.aux, keys.last), widths, strict=True) if n)
    return f"{states} {'/'.join(dtypes)}, {shown}"


def _layer_names(layout: object) -> tuple[Layer, ...] | None:
    """Layer names from the argument ``layout={"layers": [...]}``."""
    if layout is None:
        return None
    if not isinstance(layout, dict) or set(layout) != {"layers"}:
        raise ArgumentError("layout: expected {'layers': [...]}, the names of the layers of these files")
    return names_of_layers.several(layout["layers"])
