"""Detects unfinished datasets, merges and builds by the files they leave."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from actshard.errors import (
    ActshardError,
    MissingFileError,
    NotAFileError,
    UnfinishedError,
    UnsupportedError,
    boundary,
    from_os,
)
from actshard.location import Location
from actshard.work.journal import Journal
from actshard.work.names import BUILDING, FOLDER, MERGING, PART, PARTS, PLAN, PLAN_FOLDER, STAGED, staging_folder


def count_parts(root: Path | Location) -> int | None:
    """Number of unmerged parts in a dataset's folder (or its folder of parts); None without a folder of parts."""
    folder = Location.at(root)
    parts = folder if folder.name == PARTS else folder / PARTS
    try:
        return sum(1 for entry in parts.entries() if PART.fullmatch(entry.name))
    except (MissingFileError, NotAFileError):  # no parts, or a merge has just removed them
        return None
    except UnsupportedError:  # the server cannot list names
        return None


def is_merging(root: Path | Location) -> bool:
    """Whether a folder contains an unfinished merge, which may already have moved parts."""
    return (Location.at(root) / FOLDER / MERGING).exists()


def refuse_merging(root: Path | Location) -> None:
    """Raises UnfinishedError for a folder with an unfinished merge: it may look like a finished dataset."""
    if is_merging(root):
        raise UnfinishedError(
            "contains a merge that is not finished: it is running, or was interrupted. Repeat the same call of actshard.merge to "
            "finish it.",
            path=root,
        )


def planned(root: Path | Location, prefix: str = PLAN_FOLDER, own: Path | None = None) -> Path | None:
    """The working folder, other than ``own``, of an uncommitted plan that writes a dataset to this folder; else None."""
    folder = Location.at(root)
    return _plan_in(folder.local / FOLDER, prefix, own) if folder.is_local else None


def _plan_in(work: Path, prefix: str, own: Path | None) -> Path | None:
    try:
        with os.scandir(work) as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith(prefix))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise from_os(error, work, "list") from error
    return next((work / name for name in names if work / name != own and (work / name / PLAN).exists()), None)


def refuse_planned(root: Path | Location, prefix: str = PLAN_FOLDER, own: Path | None = None) -> None:
    """Raises UnfinishedError for a folder with an uncommitted plan, unless the plan's working folder is ``own``.

    A staged copy that a plan updates remains a dataset until the commit replaces it.
    """
    work = planned(root, prefix, own)
    if work is not None:
        raise UnfinishedError(
            f"contains tasks of a plan that is not committed: see actshard status {work / PLAN}; when all tasks are done, actshard "
            "commit finishes it. To discard it, remove that folder",
            path=root,
        )
    folder = Location.at(root)
    if folder.is_local and not (folder / STAGED).exists():
        refuse_staging(folder.local, own)


def refuse_staging(target: Path, own: Path | None = None) -> None:
    """Raises UnfinishedError for a folder to which an uncommitted plan stages a copy, unless its working folder is ``own``."""
    work = _plan_in(staging_folder(target), PLAN_FOLDER, own) if target.name else None
    if work is not None:
        raise UnfinishedError(
            f"is staged by a plan that is not committed: see actshard status {work / PLAN}; when all tasks are done, actshard "
            "commit finishes it. To discard it, remove that folder",
            path=target,
        )


def is_building(root: Path | Location) -> bool:
    """Whether a folder contains an unfinished token cache: a build is running, or was interrupted."""
    return (Location.at(root) / BUILDING).exists()


def tidy(root: Path) -> None:
    """Removes the working folder of a finished dataset whose writer was killed after its last step."""
    journal = Journal(root)
    if not journal.folder.is_dir() or is_merging(root):
        return
    with contextlib.suppress(ActshardError):  # another process holds the lock, or the folder is read-only
        journal.lock.take()
        try:
            if journal.exists():
                journal.read()
            if journal.finished or not journal.exists():
                journal.remove()
        finally:
            journal.lock.release()


def unfinished(root: Path | Location) -> Journal | None:
    """The journal of an unfinished dataset in this folder; None without one, and for remote folders, which have no writers."""
    folder = Location.at(root)
    if not folder.is_local:
        return None
    journal = Journal(folder.local)
    with boundary(journal.path, "access"):  # an unreadable journal is an error: the dataset may be unfinished
        if journal.exists():
            with contextlib.suppress(ActshardError):
                journal.read()
            return None if journal.finished else journal
    return None


def only_begun(root: Path | Location) -> bool:
    """Whether a writer began a dataset in this folder and has not committed any examples: it has a lock, but no journal."""
    folder = Location.at(root)
    if not folder.is_local:
        return False
    journal = Journal(folder.local)
    return journal.lock.path.is_file() and not journal.exists()
