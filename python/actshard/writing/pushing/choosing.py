"""Chooses the files of a folder to upload: no hidden files, and no files from outside of the folder.

A hidden file is uploaded if a format uses its name, if the dataset's metadata list it, or if the opened dataset reads it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from actshard.base._json import parse_json
from actshard.base.errors import ActshardError, ArgumentError, boundary
from actshard.base.request import RECORD
from actshard.base.work import BUILDING, COLUMNS, FOLDER, PARTS, PUSHING

_OF_DATASETS = frozenset({".zarray", ".zattrs", ".zgroup", ".zmetadata", ".success", ".gitattributes", RECORD, COLUMNS})
"""Hidden files of formats, the record of a dataset's request, columns that came later, and the hub's list of large files."""
_OF_WRITERS = frozenset({FOLDER, PARTS, BUILDING, PUSHING})
_MOST_METADATA = 64 << 20


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file to upload.

    Attributes:
        name: its name below the folder, joined by ``/``.
        path: its path.
        size: its size.
        modified: its time of modification in nanoseconds.
    """

    name: str
    path: Path
    size: int
    modified: int


def choose(
    folder: Path, dataset: str, links: bool, needed: Collection[str] = ()
) -> tuple[list[LocalFile], tuple[str, ...]]:
    """Returns the files to upload, sorted by name, and the names of left-out files and folders; folders end with ``/``.

    Args:
        folder: the folder.
        dataset: the dataset's folder relative to it; ``""``: the folder.
        links: whether to follow links that lead outside of the folder.
        needed: names below the dataset's folder that it reads, hidden or not.

    Raises:
        ArgumentError: such a link without ``links``, a link to a folder above it, a broken link, a device, or a name that objects
            cannot have.
    """
    choice = _Choice(folder, dataset, links, needed)
    with boundary(folder, "list"):
        choice.visit(folder, "")
    for file in choice.files:
        try:
            file.name.encode()
        except UnicodeEncodeError:
            raise ArgumentError("expected a UTF-8 file name", path=file.path) from None
        if any(ord(letter) < 32 or ord(letter) == 127 for letter in file.name):
            raise ArgumentError(
                "expected a file name without control characters, which objects cannot have", path=file.path
            )
    return choice.files, tuple(choice.left_out)


def link_chosen(folder: Path, left_out: Collection[str], to: Path) -> None:
    """Fills an empty folder ``to`` with links to the files of a folder, except those that are left out."""
    names_below: dict[str, list[str]] = {}
    for name in left_out:
        first, _, rest = name.partition("/")
        names_below.setdefault(first, []).append(rest)
    for entry in os.scandir(folder):
        if entry.name not in names_below:
            (to / entry.name).symlink_to(Path(entry.path).absolute())
        elif entry.is_dir() and all(names_below[entry.name]):
            (to / entry.name).mkdir()
            link_chosen(Path(entry.path), names_below[entry.name], to / entry.name)


class _Choice:
    """Collects the files of a folder."""

    def __init__(self, folder: Path, dataset: str, links: bool, needed: Collection[str]) -> None:
        self.folder, self.links, self.needed = folder, links, needed
        self.start = f"{dataset}/" if dataset else ""
        self.base = os.path.realpath(folder)
        self.files: list[LocalFile] = []
        self.left_out: list[str] = []
        self.inside: set[tuple[int, int]] = set()
        self.named: set[str] | None = None

    def visit(self, folder: Path, prefix: str) -> None:
        """Adds the files below a folder."""
        state = folder.stat()
        if (state.st_dev, state.st_ino) in self.inside:
            raise ArgumentError("a link leads back to a folder above it", path=folder)
        self.inside.add((state.st_dev, state.st_ino))
        with os.scandir(folder) as entries:
            sorted_entries = sorted(entries, key=lambda entry: entry.name)
        for entry in sorted_entries:
            name = prefix + entry.name
            if entry.name in _OF_WRITERS or (entry.name.startswith(".") and entry.name.endswith(".part")):
                continue
            if _is_hidden(entry.name) and not self._is_wanted(entry, name):
                self.left_out.append(f"{name}/" if entry.is_dir(follow_symlinks=False) else name)
                continue
            if entry.is_symlink():
                self._check_link(folder / entry.name)
            if entry.is_dir():
                self.visit(folder / entry.name, f"{name}/")
            elif entry.is_file():
                status = entry.stat()
                self.files.append(LocalFile(name, folder / entry.name, status.st_size, status.st_mtime_ns))
            else:
                raise ArgumentError(
                    "expected files and folders, found a broken link or a device", path=folder / entry.name
                )
        self.inside.remove((state.st_dev, state.st_ino))

    def _is_wanted(self, entry: os.DirEntry[str], name: str) -> bool:
        if entry.name in _OF_DATASETS and entry.is_file():
            return True
        if not name.startswith(self.start):
            return False
        if self.named is None:
            self.named = _named(self.folder / self.start) | _hidden(self.needed)
        subpath = f"/{name[len(self.start) :]}/"
        return any(
            f"/{text}/" in subpath or (entry.is_dir() and f"/{text}/".startswith(subpath)) for text in self.named
        )

    def _check_link(self, path: Path) -> None:
        target = os.path.realpath(path)
        if not self.links and os.path.commonpath([self.base, target]) != self.base:
            raise ArgumentError(
                f"leads to {target}, outside of the folder: such files are only published on request. Pass links=True (--links) to "
                "upload them, or remove the link",
                path=path,
            )


def _is_hidden(name: str) -> bool:
    """Whether a name is that of a hidden file or folder, or of an editor's backup."""
    return name.startswith(".") or name.endswith("~") or (name.startswith("#") and name.endswith("#"))


def _named(folder: Path) -> set[str]:
    """Texts of a dataset's metadata that contain the name of a hidden file."""
    texts: set[str] = set()
    for path in [*folder.glob("*.json"), folder / ".zmetadata"]:
        try:
            if path.is_file() and path.stat().st_size <= _MOST_METADATA:
                texts.update(_texts(parse_json(path.read_bytes().decode(), "metadata")))
        except (ActshardError, ValueError):
            continue
    return _hidden(texts)


def _hidden(names: Iterable[str]) -> set[str]:
    """The names with a hidden part."""
    return {name for name in names if any(_is_hidden(part) for part in name.split("/") if part not in ("", ".", ".."))}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value.strip("/")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key.strip("/")
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
