"""The marker of a staged copy: its source, and the recorded files of the source and of the copy."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actshard.base.layers import Layer
from actshard.base.work import write_json

_VERSION = 1

Listed = dict[str, tuple[int, str]]
"""Maps names below a folder, joined by ``/``, to size and version (ETag)."""


@dataclass(frozen=True)
class Staged:
    """Result of :func:`stage`.

    Attributes:
        path: the local dataset, for :func:`actshard.open`.
        source: URL or path of the source, without secrets.
        revision: the commit of a dataset of the hub; else None.
        layers: the staged layers; None: all.
        files: number of files of the copy.
        bytes: total size of these files.
        fetched: bytes that this call read from the source's files; 0 if the copy was complete.
        losses: properties of the source that a copy of some layers lacks.
    """

    path: Path
    source: str
    revision: str | None
    layers: tuple[Layer, ...] | None
    files: int
    bytes: int
    fetched: int
    losses: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"path": str(self.path)}


@dataclass(frozen=True)
class Marker:
    """The description of a staged copy."""

    source: str
    revision: str | None
    layers: list[Layer] | None
    below: str
    """The dataset's path relative to the source."""
    inside: str
    """The dataset's path relative to the staged folder; empty: the folder itself."""
    listed: Listed
    files: dict[str, int]
    """Sizes of the copy's files."""
    losses: list[str]
    times: dict[str, int] = field(default_factory=dict)
    """Modification times of the copy's files, in nanoseconds."""
    origin: str | None = None
    """A digest of the server, if URLs of different servers can be equal."""

    def result(self, target: Path, fetched: int = 0) -> Staged:
        """Returns the public result."""
        layers = None if self.layers is None else tuple(self.layers)
        size = sum(self.files.values())
        path = target / self.inside if self.inside else target
        return Staged(path, self.source, self.revision, layers, len(self.files), size, fetched, tuple(self.losses))

    def is_whole(self, target: Path) -> bool:
        """Whether all files of the copy exist with their sizes."""
        base = os.path.join(target, self.inside)  # noqa: PTH118 -- many files: Path would cost time
        return all(size_of(f"{base}/{name}") == size for name, size in self.files.items())

    def is_as_staged(self, target: Path, name: str) -> bool:
        """Whether a file was not modified since it was staged."""
        return state_of(f"{target}/{self.inside}/{name}") == (self.files.get(name), self.times.get(name))

    def changed(self, target: Path) -> list[str]:
        """Files of the copy that were modified since they were staged."""
        base = target / self.inside
        return [n for n in self.files if not self.is_as_staged(target, n) and os.path.lexists(base / n)]


def read_marker(path: Path) -> Marker | None:
    """Reads a marker or plan; None if there is none, or if it is damaged."""
    try:
        fields = json.loads(path.read_bytes())
        if fields.pop("actshard") != _VERSION:
            return None
        fields["listed"] = {name: (int(size), str(tag)) for name, (size, tag) in fields["listed"].items()}
        fields["files"] = {str(name): int(size) for name, size in fields["files"].items()}
        fields["losses"] = [str(loss) for loss in fields["losses"]]
        fields["times"] = {str(name): int(time) for name, time in fields.get("times", {}).items()}
        if not all(isinstance(fields[name], str) for name in ("source", "below", "inside")):
            return None
        return Marker(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_marker(path: Path, marker: Marker) -> None:
    """Writes a marker for :func:`read_marker`."""
    write_json(
        path, {"actshard": _VERSION, **{n: getattr(marker, n) for n in marker.__dataclass_fields__}}, indent=None
    )


def size_of(path: str) -> int:
    """Size of a file in bytes; -1 if there is no file."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 -- called for each of many files: Path would cost time
    except OSError:
        return -1


def state_of(path: str) -> tuple[int | None, int | None]:
    """Size in bytes and modification time of a file; (None, None) if there is no file."""
    try:
        status = os.stat(path)  # noqa: PTH116 -- called for each staged file: Path would cost time
    except OSError:
        return None, None
    return status.st_size, status.st_mtime_ns
