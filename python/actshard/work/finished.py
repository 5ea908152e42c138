"""Whether what is in a folder is finished: the one place that knows what unfinished work of any kind leaves."""

from __future__ import annotations

import contextlib
from pathlib import Path

from actshard.errors import ActshardError, MissingFileError, NotAFileError, boundary
from actshard.location import Location
from actshard.work.journal import Journal
from actshard.work.names import BUILDING, FOLDER, MERGING, PART, PARTS


def count_parts(root: Path | Location) -> int | None:
    """How many parts of a dataset wait to be merged in a folder, or in its folder of parts; None: there is no such folder."""
    folder = Location.at(root)
    parts = folder if folder.name == PARTS else folder / PARTS
    try:
        return sum(1 for entry in parts.entries() if PART.fullmatch(entry.name))
    except (MissingFileError, NotAFileError):  # there are none, or a merge has just removed them
        return None


def is_merging(root: Path | Location) -> bool:
    """Whether a merge was begun in a folder and has not ended. Parts may have been moved already."""
    return (Location.at(root) / FOLDER / MERGING).exists()


def is_building(root: Path | Location) -> bool:
    """Whether a token cache is being built in a folder, or its build was interrupted."""
    return (Location.at(root) / BUILDING).exists()


def tidy(root: Path) -> None:
    """Removes what is left in a finished dataset of a writer that was killed after its last step."""
    journal = Journal(root)
    if not journal.folder.is_dir() or is_merging(root):
        return
    with contextlib.suppress(ActshardError):  # somebody is at work, or the folder cannot be written
        journal.lock.take()
        try:
            if journal.exists():
                journal.read()
            if journal.finished or not journal.exists():
                journal.remove()
        finally:
            journal.lock.release()


def unfinished(root: Path | Location) -> Journal | None:
    """The journal of a dataset that is not finished, in this folder; None if there is none, or where no writer writes."""
    folder = Location.at(root)
    if not folder.is_local:
        return None
    journal = Journal(folder.local)
    with boundary(journal.path, "look at"):  # what cannot be looked at is not known to be finished
        if journal.exists():
            with contextlib.suppress(ActshardError):
                journal.read()
            return None if journal.finished else journal
    return None
