"""What unfinished work a folder contains: the marks that writers, merges, plans, builds and uploads leave until they finish.

Every verb asks :func:`look`, writers while they hold the lock. The messages are one table, :data:`MESSAGES`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from actshard.base._arguments import many
from actshard.base.errors import (
    ActshardError,
    FileAccessError,
    MissingFileError,
    NotAFileError,
    UnfinishedError,
    UnsupportedError,
    boundary,
    from_os,
)
from actshard.base.location import Location
from actshard.base.storage import one_look
from actshard.base.work.files import (
    BUILDING,
    DUMPS_PLAN_FOLDER,
    FOLDER,
    JOURNAL,
    LOCK,
    MERGING,
    PART,
    PARTS,
    PLAN,
    PLAN_FOLDER,
    PUSHING,
    STAGED,
    staging_folder,
)
from actshard.base.work.journal import Journal, state_of

Mark = Literal[
    "uploading",
    "half copied",
    "planned",
    "planned dumps",
    "parts",
    "writing",
    "merging",
    "staging",
    "building",
    "begun",
]
"""Kinds of unfinished work.

- ``uploading``: a push to this URL
- ``half copied``: a local folder with the file that marks a push: a copy or a mount of such a URL
- ``planned``, ``planned dumps``, ``staging``: tasks of a plan that is not committed and writes to this folder, writes saev's dumps
  below it, or stages to it
- ``parts``: parts of a dataset, to be merged
- ``writing``: a dataset with committed examples; ``begun``: one without
- ``merging``: a merge, which may already have moved parts
- ``building``: a token cache
"""
MARKS: tuple[Mark, ...] = get_args(Mark)
"""All kinds, in the order in which they decide what a folder with several of them is."""
_PLAN = "see actshard status {plan}; when all tasks are done, actshard commit finishes it. To discard it, remove that folder"
MESSAGES: Mapping[Mark, str] = {
    "uploading": "is being uploaded, or its upload was interrupted: the same actshard.push completes it",
    "half copied": (
        f"contains {PUSHING}: it is a mount or a copy of a place that was being uploaded, and may lack files. Complete the upload "
        "and copy it again; if you know that all files are there, remove that file"
    ),
    "planned": f"contains tasks of a plan that is not committed: {_PLAN}",
    "planned dumps": f"contains tasks of a plan that is not committed: {_PLAN}",
    "parts": "contains {parts} of a dataset. When all are written, merge them with actshard.merge",
    "writing": (
        "contains {examples} of an unfinished dataset: its writer {state} (create or convert with resume continues it)"
    ),
    "merging": "contains a merge that is not finished: it {state}. Repeat the same call of actshard.merge to finish it",
    "staging": f"is staged by a plan that is not committed: {_PLAN}",
    "building": (
        "contains a token cache without shard_ledger.json: its build is running, or was interrupted (the same build continues it)"
    ),
    "begun": (
        "contains a dataset without examples: its writer has not committed any yet, or was interrupted (create or convert with "
        "resume begins again)"
    ),
}
"""Messages of UnfinishedError by kind; the path precedes them."""


@dataclass(frozen=True)
class Marks:
    """Unfinished work in a folder, as one look found it.

    Attributes:
        root: the folder; or a path where a file is, or nothing.
        parts: number of unmerged parts; None without a folder of parts.
        journal: the journal of an unfinished dataset with committed examples, or None.
        plans: working folders of uncommitted plans by kind.
        bare_kinds: kinds that have no details.
        is_copy: whether the folder is a staged copy, which remains a dataset while a plan stages a newer one.
    """

    root: Location
    parts: int | None
    journal: Journal | None
    plans: Mapping[Mark, tuple[Path, ...]]
    bare_kinds: frozenset[Mark]
    is_copy: bool = False

    def kinds(self, own_plan: Path | None = None) -> list[Mark]:
        """Kinds of unfinished work, in the order of :data:`MARKS`. A plan whose working folder is ``own_plan`` does not count."""
        kinds = {*self.bare_kinds, *(kind for kind in self.plans if self.plan(kind, own_plan) is not None)}
        kinds |= {"parts"} if self.parts is not None else set()
        kinds |= {"writing"} if self.journal is not None else set()
        return [mark for mark in MARKS if mark in kinds]

    def plan(self, kind: Mark, own_plan: Path | None = None) -> Path | None:
        """The working folder of an uncommitted plan of a kind, other than ``own_plan``."""
        return next((work for work in self.plans.get(kind, ()) if work != own_plan), None)

    def error(
        self, mark: Mark, own_plan: Path | None = None, path: Location | None = None, *, is_locked: bool = False
    ) -> UnfinishedError:
        """The error about unfinished work of a kind.

        Args:
            mark: the kind.
            own_plan: as for :meth:`kinds`.
            path: the path that a user named, if it is not the folder.
            is_locked: whether the caller holds the folder's lock: then no other writer is running.
        """
        plan = self.plan(mark, own_plan)
        state = None
        if mark in ("writing", "merging"):
            state = "was interrupted" if is_locked else state_of(self.root.local / FOLDER)
        text = MESSAGES[mark].format(
            parts=many(self.parts or 0, "unmerged part"),
            examples=None if self.journal is None else many(self.journal.examples, "example"),
            plan=None if plan is None else plan / PLAN,
            state=state,
        )
        return UnfinishedError(text, path=path or self.root)

    def refuse(
        self, *marks: Mark, own_plan: Path | None = None, path: Location | None = None, is_locked: bool = False
    ) -> None:
        """Raises UnfinishedError if the folder contains unfinished work of one of these kinds; see :meth:`error`."""
        for mark in self.kinds(own_plan):
            if mark in marks:
                raise self.error(mark, own_plan, path, is_locked=is_locked)


def look(root: Path | Location) -> Marks:
    """Returns the unfinished work in a folder.

    Raises:
        FileAccessError: the folder, or a working folder, cannot be read.
    """
    folder = Location.at(root)
    with one_look(folder.key):
        if folder.is_local:
            return _look(folder.local)
        if (
            not folder.lists or folder.kind() != "folder"
        ):  # a web server has no listings, and writers write to local folders
            return Marks(folder, None, None, {}, frozenset())
        folder.look_into()
        bare_kinds: set[Mark] = {"uploading"} if (folder / PUSHING).exists() else set()
        return Marks(folder, count_parts(folder), None, {}, frozenset(bare_kinds))


def _look(root: Path) -> Marks:
    folder = Location.at(root)
    working = root / FOLDER
    names = _names(
        working
    )  # before the folder is listed: a writer that finishes meanwhile is seen as unfinished, or not at all
    plans: dict[Mark, tuple[Path, ...]] = {
        "planned": _plans(working, names, PLAN_FOLDER),
        "planned dumps": _plans(working, names, DUMPS_PLAN_FOLDER),
    }
    if root.name:
        stage = staging_folder(root)
        with contextlib.suppress(FileAccessError):  # of another user, who stages it
            plans["staging"] = _plans(stage, _names(stage), PLAN_FOLDER)
    journal = _unfinished(root) if JOURNAL in names else None
    bare_kinds: set[Mark] = set()
    if MERGING in names:
        bare_kinds.add("merging")
    if (folder / BUILDING).exists():
        bare_kinds.add("building")
    if (folder / PUSHING).exists():
        bare_kinds.add("half copied")
    if LOCK in names and JOURNAL not in names:
        bare_kinds.add("begun")
    return Marks(folder, count_parts(folder), journal, plans, frozenset(bare_kinds), (folder / STAGED).exists())


def _names(folder: Path) -> list[str]:
    """Names of the entries of a working folder, sorted; none without the folder."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 -- only names
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # then there is no such folder
            return []
        raise from_os(error, folder, "list") from error


def _plans(working: Path, names: Iterable[str], prefix: str) -> tuple[Path, ...]:
    folders = (working / name for name in names if name.startswith(prefix))
    return tuple(folder for folder in folders if (folder / PLAN).exists())


def _unfinished(root: Path) -> Journal | None:
    """The journal in a folder; None if its dataset is finished."""
    journal = Journal(root)
    with boundary(journal.path, "access"):  # an unreadable journal is an error: the dataset may be unfinished
        if not journal.exists():  # removed since it was listed
            return None
        with contextlib.suppress(ActshardError):
            journal.read()
    return None if journal.finished else journal


def count_parts(folder: Location) -> int | None:
    """Number of unmerged parts in a dataset's folder (or its folder of parts); None without a folder of parts."""
    parts = folder if folder.name == PARTS else folder / PARTS
    try:
        return sum(1 for entry in parts.entries() if PART.fullmatch(entry.name))
    except (MissingFileError, NotAFileError):  # no parts, or a merge has just removed them
        return None
    except UnsupportedError:  # the server cannot list names
        return None


def tidy(root: Path) -> None:
    """Removes the working folder of a finished dataset whose writer was killed after its last step."""
    journal = Journal(root)
    if not journal.folder.is_dir() or "merging" in look(root).kinds():
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
