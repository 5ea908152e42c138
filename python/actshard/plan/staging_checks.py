"""The arguments and tasks of plans of staged copies: their names and sizes determine which files are accessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

from actshard import formats
from actshard.base._schema import OMITTED, Amount, MismatchError, Rule, is_file_name, is_file_text
from actshard.base.errors import ActshardError, FormatError
from actshard.base.layers import Layer, several
from actshard.base.location import Location, is_url
from actshard.base.request import RECORD
from actshard.base.work import COLUMNS, FOLDER, staging_folder
from actshard.plan.checking import FilesTask, check_spans
from actshard.plan.data import Planned
from actshard.writing.staging.folder import complete
from actshard.writing.staging.marker import Listed, Marker, Staged


def _is_source(text: str) -> bool:
    try:
        return (is_url(text) or (is_file_text(text) and Path(text).is_absolute())) and Location.of_any(text) is not None
    except ActshardError:
        return False


def _is_name(text: str) -> bool:
    """Whether a text is a relative path below a folder, and not a path that staging itself creates."""
    return is_file_name(text) and all(
        part in (RECORD, COLUMNS) or not part.startswith(FOLDER) for part in text.split("/")
    )


def _are_layers(layers: tuple[Layer, ...]) -> bool:
    try:
        return several(layers) == layers
    except ActshardError:
        return False


_Folder = Annotated[Path, Rule("a folder below /", lambda path: bool(path.name))]
_Below = Annotated[str, Rule("the name of a folder below the source", lambda name: name == "." or _is_name(name))]
_Inside = Annotated[str, Rule("the name of a folder", lambda name: not name or ("/" not in name and _is_name(name)))]


class StagedFile(NamedTuple):
    """A file of the source: its name below the dataset, size and version."""

    name: Annotated[str, Rule("the name of a file below the source", _is_name)]
    size: Amount
    version: str


def _are_apart(files: tuple[StagedFile, ...]) -> bool:
    names, folders = {file.name for file in files}, set[str]()
    for name in names:
        while (name := name.rpartition("/")[0]) and name not in folders:
            folders.add(name)
    return 0 < len(files) == len(names) and not names & folders


@dataclass(frozen=True)
class StageArguments:
    """The arguments of :func:`actshard.plan.stage`, and the source's files; see :class:`actshard.writing.staging.marker.Marker`.

    Attributes:
        folder: the folder to create.
        format: the source's format.
        files: the source's files.
        convert: the arguments of the conversion of some layers, except ``dst``; None: whole files are copied.
    """

    source: Annotated[str, Rule("an absolute path, or a URL", _is_source)]
    folder: _Folder
    layers: Annotated[tuple[Layer, ...], Rule("a list of names of layers", _are_layers)] | None
    revision: str | None
    origin: str | None
    below: _Below
    inside: _Inside
    format: str
    files: Annotated[
        tuple[StagedFile, ...], Rule("different names of files, none of which is a folder of others", _are_apart)
    ]
    convert: Mapping[str, object] | None = field(default=None, metadata=OMITTED)

    def __post_init__(self) -> None:
        if self.revision is not None and (not self.is_hub or len(self.source.split("/")) < 5):
            raise MismatchError("null, because the source is not a dataset on the hub", self.revision, "revision")
        if self.layers is None:
            return
        if self.format not in formats.written():
            raise MismatchError("a format that can be written", self.format, "format")
        convert = {} if self.convert is None else self.convert
        same = {"src": self.place, "format": self.format}
        if convert and ("dst" in convert or same != {name: convert.get(name) for name in same}):
            raise MismatchError(f"the arguments of a conversion of {self.place}", convert, "convert")

    @property
    def staging(self) -> Path:
        """The hidden folder next to the copy."""
        return staging_folder(self.folder)

    @property
    def is_hub(self) -> bool:
        """Whether the source is on the hub."""
        return self.source.startswith("hf://")

    def location(self) -> Location:
        """A new location of the source, without cached listings."""
        return Location.of_any(self.source)

    @property
    def place(self) -> str:
        """Path or URL of the dataset; on the hub, with the commit that the plan was made for."""
        text = self.source
        if self.is_hub and self.revision is not None:
            parts = text.split("/")
            parts[4] = f"{parts[4].partition('@')[0]}@{self.revision}"  # hf://datasets/ORG/NAME@REVISION
            text = "/".join(parts)
        return text if self.below == "." else f"{text.rstrip('/')}/{self.below}"

    def listed(self, first: int = 0, end: int | None = None) -> Listed:
        """Files of the dataset."""
        return {file.name: (file.size, file.version) for file in self.files[first:end]}

    def marker(self) -> Marker:
        """The copy's marker, without the copy's files."""
        layers = None if self.layers is None else list(self.layers)
        return Marker(
            self.source, self.revision, layers, self.below, self.inside, self.listed(), {}, [], origin=self.origin
        )

    def done(self) -> Staged | None:
        """The copy in the folder, if it is complete and consists of these files."""
        prefix = "" if self.below == "." else f"{self.below}/"
        files = {f"{prefix}{name}": entry for name, entry in self.listed().items()}
        return complete(self.location(), self.folder, self.layers, files)


def check_tasks(plan: Planned, files: tuple[StagedFile, ...], path: Path) -> None:
    """Raises FormatError unless the tasks copy all files; ``path`` is the plan's file."""
    tasks = plan.tasks_as(FilesTask, path)
    check_spans([task.files for task in tasks], "files", len(files), path)
    for i, task in enumerate(tasks):
        total = sum(file.size for file in files[slice(*task.files)])
        if total != task.bytes or task.files.first == task.files.end:
            raise FormatError(
                f"field 'tasks[{i}].bytes': expected {total:,}, the size of its files, found {task.bytes:,}",
                path=path,
                code="metadata",
            )
