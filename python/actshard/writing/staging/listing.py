"""The files of a source, its revision, and its server."""

from __future__ import annotations

from actshard.base.errors import ActshardError, FormatError, MissingFileError, NotAFileError, boundary
from actshard.base.location import Location
from actshard.base.request import RECORD
from actshard.base.storage import Remote
from actshard.base.work import COLUMNS
from actshard.writing.staging.marker import Listed

_DEEPEST = 32


def list_files(source: Location) -> Listed:
    """All files below a location. Remote stores are listed once, in as few requests as they allow."""
    source.list_below()
    with boundary(source, "list"):
        if source.kind() == "file":
            raise NotAFileError("expected the folder of a dataset, found a file", path=source)
        files: Listed = {}
        if source.exists():
            _walk(source, "", files, 0)
    if not files:
        raise MissingFileError("expected a dataset, found nothing", path=source)
    return files


def _walk(folder: Location, prefix: str, files: Listed, depth: int) -> None:
    if depth > _DEEPEST:
        raise FormatError(f"expected at most {_DEEPEST} levels of folders", path=folder)
    for entry in folder.entries():
        # Others with such names are working files of writers, and markers of copies.
        if entry.name.startswith(".actshard") and entry.name not in (RECORD, COLUMNS):
            continue
        child, name = folder / entry.name, f"{prefix}{entry.name}"
        if entry.kind == "folder":
            _walk(child, f"{name}/", files, depth + 1)
        elif entry.kind == "file":
            state = child.stat()
            files[name] = (state.size, state.version)


def within(listing: Listed, subpath: str) -> Listed:
    """The part of a listing below a folder."""
    if subpath == ".":
        return listing
    return {name[len(subpath) + 1 :]: entry for name, entry in listing.items() if name.startswith(f"{subpath}/")}


def revision_of(source: Location) -> str | None:
    """The commit of a dataset of the hub; None for other sources."""
    return source.storage.native.revision if isinstance(source.storage, Remote) else None


def received(source: Location) -> int:
    """Bytes received from a remote store so far."""
    return source.storage.native.counts()[1] if isinstance(source.storage, Remote) else 0


def origin_of(source: Location) -> str | None:
    """A digest of endpoint and account. None if unknown, and for the hub, where the commit identifies the files."""
    if not isinstance(source.storage, Remote) or str(source).startswith("hf://"):
        return None
    try:
        return source.storage.native.origin()
    except ActshardError:  # options that cannot be used: the first request explains it
        return None
