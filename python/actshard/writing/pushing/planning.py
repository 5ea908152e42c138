"""What a push uploads: files in stages, the manifest last, and a dataset card."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from actshard import formats
from actshard.base._json import parse_json
from actshard.base.errors import ActshardError, ArgumentError, FormatError, boundary
from actshard.base.layers import listing
from actshard.base.location import Location
from actshard.base.request import RECORD
from actshard.base.work import BUILDING, COLUMNS, FOLDER, PARTS, PUSHING
from actshard.reading.finding import existing, find_any
from actshard.reading.opening import open_quietly
from actshard.reading.verifying import verify

# Chooses the files of a folder to upload: no hidden files, and no files from outside of the folder.
#
# A hidden file is uploaded if a format uses its name, if the dataset's metadata list it, or if the opened dataset reads it.


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


CARD = "README.md"
LICENSE = "# license: choose one, https://huggingface.co/docs/hub/repositories-licenses"
_SMALL_FILE = 256 << 10
_MANY_FILES = 10_000


@dataclass(frozen=True)
class Shipment:
    """A dataset to upload.

    Attributes:
        folder: the local folder.
        dataset: the dataset's folder relative to it; ``""`` for the folder itself.
        format: the dataset's format.
        stages: files in the order of upload. Those of a stage are uploaded before those of the next; the first stage contains all
            files that are not part of the manifest.
        digests: SHA-256 of all files by name.
        card: a generated dataset card; None if the folder has one.
        notes: properties that make remote reads slow.
        left_out: names of hidden files and folders that are not uploaded.
        links: whether links that lead outside of the folder are followed.
        needed: names of files and folders that the dataset reads, below its folder.
    """

    folder: Path
    dataset: str
    format: str
    stages: tuple[tuple[LocalFile, ...], ...]
    digests: dict[str, str]
    card: bytes | None
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    links: bool
    needed: frozenset[str]

    @property
    def files(self) -> list[LocalFile]:
        """All files."""
        return [file for stage in self.stages for file in stage]

    @property
    def identity(self) -> str:
        """Identifies the dataset: a digest of the names, sizes and digests of all files."""
        entries = sorted((file.name, file.size, self.digests[file.name]) for file in self.files)
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    @property
    def sums(self) -> dict[str, str]:
        """SHA-256 of the manifest's files by name."""
        return {file.name: self.digests[file.name] for stage in self.stages[1:] for file in stage}

    def check_unchanged(self) -> None:
        """Raises FormatError if files changed since they were verified. Called before the manifest is written."""
        current_files = {file.name: file for file in choose(self.folder, self.dataset, self.links, self.needed)[0]}
        wrong = next((file for file in self.files if current_files.pop(file.name, None) != file), None)
        wrong = wrong or next(iter(current_files.values()), None)
        if wrong is not None:
            raise FormatError("changed while the dataset was uploaded: push again", path=wrong.path)

    def below(self, name: str) -> str:
        """A name in the dataset's folder, relative to the pushed folder."""
        return f"{self.dataset}/{name}" if self.dataset else name


def shipment(folder: Path, url: str, check: bool, links: bool) -> Shipment:
    """Lists the files to upload. With ``check``, verifies the dataset first.

    Raises:
        ArgumentError: the dataset reads files that are not uploaded.
        FormatError: the dataset has errors.
        UnfinishedError: the dataset is not finished.
    """
    root = existing(folder)
    location, format = find_any(root)
    dataset = location.relative_to(root)
    dataset = "" if dataset == "." else dataset
    needed = _needed(location, format)
    # Before verification, so that later changes are detected.
    files, left_out = choose(root.local, dataset, links, needed)
    if check:
        report = verify(root.local, progress=None)
        if report.errors:
            count, first = len(report.errors), report.errors[0]
            raise FormatError(
                f"is not uploaded: {count} error{'s' * (count > 1)}, the first: {first}. actshard verify lists all of them.",
                path=folder,
            )
    _check_left_out(location, format, dataset, left_out)
    stages = _stages(files, dataset, formats.get(format).manifest)
    digests = {file.name: _digest(file.path) for stage in stages for file in stage}
    has_card = any(file.name == CARD for file in stages[0])
    card = None if has_card else _card(location, format, stages, url)
    return Shipment(root.local, dataset, format, stages, digests, card, _notes(stages), left_out, links, needed)


def _needed(location: Location, format: str) -> frozenset[str]:
    """Names below a dataset's folder of the files that it reads, and of folders of such files.

    Raises:
        ArgumentError: a file outside of the folder.
    """
    if formats.get(format).holds != "activations":
        return frozenset()
    try:
        contents = open_quietly(location.place, format, "pread").contents
        paths = [*contents.files(), *contents.columns_in()]
    except ActshardError:  # a damaged dataset, of which verification finds the errors
        return frozenset()
    prefix = f"{location.local}/"
    names = [os.path.normpath(path) for path in paths]
    outside = next((name for name in names if not f"{name}/".startswith(prefix)), None)
    if outside is not None:
        raise ArgumentError(
            f"is part of the dataset, but outside of its folder {location.local}: only files below it are uploaded. Move or link "
            "it into the folder",
            path=Path(outside),
        )
    return frozenset(name[len(prefix) :] for name in names if len(name) > len(prefix))


def _check_left_out(location: Location, format: str, dataset: str, left_out: tuple[str, ...]) -> None:
    """Raises ArgumentError if the dataset is another one without the files that are left out."""
    start = f"{dataset}/" if dataset else ""
    names = [name[len(start) :] for name in left_out if name.startswith(start)]
    if not names or formats.get(format).holds != "activations":
        return
    try:
        summary = _summary(location.local, format)
    except ActshardError:  # damaged, and pushed with verify=False
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / location.local.name
        folder.mkdir()
        link_chosen(location.local, names, folder)
        try:
            differs = _summary(folder, format) != summary
        except ActshardError:
            differs = True
    if differs:
        raise ArgumentError(
            f"expected a dataset without hidden files or backups, found that it reads one of {', '.join(names[:8])}, which are not "
            "uploaded: give the file a name that does not begin with '.' or '#' or end with '~'",
            path=location,
        )


def _summary(folder: Path, format: str) -> tuple[object, ...]:
    """Properties of a dataset that differ if a file is absent."""
    store = open_quietly(folder, format, "pread")
    contents, names = store.contents, store.contents.column_names
    counts, first = store.token_counts.tobytes(), ""
    if names:
        columns = contents.head_columns(names, 1) if contents.head_columns else store.table
        first = str(columns.slice(0, 1))
    return len(contents.files()), store.layers, store.d_model, store.dtype, counts, names, first


def _stages(files: list[LocalFile], dataset: str, manifest: tuple[str, ...]) -> tuple[tuple[LocalFile, ...], ...]:
    start = f"{dataset}/" if dataset else ""

    def stage(file: LocalFile) -> int:
        if not file.name.startswith(start):
            return 0
        name = file.name[len(start) :]
        return next((i for i, pattern in enumerate(manifest, 1) if fnmatchcase(name, pattern)), 0)

    stages: list[list[LocalFile]] = [[] for _ in range(len(manifest) + 1)]
    for file in files:
        stages[stage(file)].append(file)
    return tuple(map(tuple, [stages[0], *filter(None, stages[1:])]))


def _digest(path: Path) -> str:
    with boundary(path, "read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _notes(stages: tuple[tuple[LocalFile, ...], ...]) -> tuple[str, ...]:
    sizes = [file.size for file in stages[0]]
    if len(sizes) < _MANY_FILES or sum(sizes) >= _SMALL_FILE * len(sizes):
        return ()
    return (
        f"{len(sizes):,} files of {sum(sizes) // len(sizes):,} bytes on average: reading one costs a request. Convert the dataset "
        "with larger shards or chunks for remote reads.",
    )


_CATEGORIES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


def _card(location: Location, format: str, stages: tuple[tuple[LocalFile, ...], ...], url: str) -> bytes:
    """A dataset card with the hub's YAML header, without a license, which the user adds."""
    dataset_format = formats.get(format)
    tags = ["actshard", dataset_format.holds, format]
    rows = [("format", dataset_format.description or format)]
    lines = []
    if dataset_format.holds == "activations":
        store = open_quietly(location.place, format, "pread")
        count = store.num_examples
        lines = ["size_categories:", f"- {next((text for most, text in _CATEGORIES if count < most), '10M<n<100M')}"]
        rows += [
            ("examples", f"{count:,}"),
            ("layers", listing(store.layers) or "none"),
            ("d_model", str(store.d_model)),
            ("dtype", str(store.dtype)),
            ("columns", ", ".join(store.contents.column_names) or "none"),
        ]
        opening = f"store = actshard.open({url!r})"
    else:
        opening = f"cache = actshard.tokens.open_cache({url!r})"
    size = sum(file.size for stage in stages for file in stage)
    rows.append(("bytes", f"{size:,}"))
    header = ["---", LICENSE, "tags:"]
    header += [f"- {tag}" for tag in tags] + lines + ["---"]
    title = (location.name or "dataset").replace("\n", " ")
    cells = [f"| {name} | {text.replace('|', '/')} |" for name, text in rows]
    body = [
        "",
        f"# {title}",
        "",
        "| | |",
        "|---|---|",
        *cells,
        "",
        "```python",
        "import actshard",
        "",
        opening,
        "```",
        "",
    ]
    return "\n".join([*header, *body]).encode("utf-8", "replace")
