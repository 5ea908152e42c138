"""A bounded walk over the folders below a path, and finding token caches with it.

``finding`` uses the same walk for datasets of activations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actshard.errors import ActshardError, ArgumentError, FileAccessError, MissingFileError, UnfinishedError
from actshard.location import Location
from actshard.work import is_building, refuse_planned

_DEPTH = 6
"""Maximum depth at which datasets are searched below a path; saev alone nests three folders."""
STANDS_FOR = 3
"""Maximum depth of a path's only dataset to be opened by that path: ``saev/shards/<HASH>``, ``cache/web/train``."""
_LOOK_AT_MOST = 2_000
"""Maximum number of folders to visit, so that a mistyped "/" returns quickly."""
LEDGER = "shard_ledger.json"
"""The file that identifies a token cache."""
UNBUILT = (
    f"contains a token cache without {LEDGER}: its build is running, or was interrupted (the same build continues it)"
)
"""Message about an unfinished token cache."""
_SHARD = re.compile(r"\d{5}_")
"""Prefix of the folder name of a token cache's shard."""


new_caches: list[Callable[[Path], None]] = []
"""Checks of a folder in which a token cache will be built, which raise if its path refers to something else. ``finding`` adds one:
builds of caches do not know the formats."""


def refuse_taken(folder: Path) -> None:
    """Raises ExistsError if a token cache cannot be built in a folder, because its path refers to something else."""
    for refuse in new_caches:
        refuse(folder)


def is_cache_itself(root: Location) -> bool:
    """Whether the folder itself is a token cache, rather than a folder above one."""
    return (root / LEDGER).kind() == "file"


def walk(root: Location, kind: Callable[[Location], str | None], depth: int = _DEPTH) -> Iterator[tuple[Location, str]]:
    """Yields the datasets below a folder with their kinds, breadth-first and sorted by name.

    Does not descend into datasets. Skips hidden folders, and local folders that cannot be read. Visits at most 2,000 folders.

    Args:
        root: the folder.
        kind: returns the kind of dataset of a folder; None if it is not a dataset, and its subfolders are searched.
        depth: maximum number of levels.
    """
    looked = 0
    level = [root]
    for _ in range(depth):
        below: list[Location] = []
        for folder in level:
            try:
                entries = folder.entries()
            except ActshardError:
                continue
            for entry in entries:
                if entry.kind != "folder" or entry.name.startswith("."):
                    continue
                looked += 1
                if looked > _LOOK_AT_MOST:
                    return
                child = folder / entry.name
                try:
                    found = kind(child)
                except FileAccessError:
                    if child.is_remote:
                        raise  # a server that does not answer, or refuses: each other folder would wait for it again
                    continue
                if found is not None:
                    yield child, found
                else:
                    below.append(child)
        level = below


def _is_cache_below(folder: Location) -> bool:
    folder.look_into()  # one listing shows whether it is a cache, and which folders to visit next
    return is_cache_itself(folder)


def find_cache(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, cache: Any = None
) -> Location:
    """Returns the token cache at a path or URL, or the only one up to three levels below it.

    Raises:
        UnfinishedError: a build of a cache or a plan is running there, or was interrupted.
        ArgumentError: there are several caches; the message lists them.
        MissingFileError: there is no cache.
    """
    root = Location.of_any(path, storage_options, cache)
    (root / LEDGER).look_ahead()
    if is_cache_itself(root):
        return root
    refuse_planned(root)
    working = is_building(root)
    below = [p for p, _ in walk(root, lambda folder: LEDGER if _is_cache_below(folder) else None, STANDS_FOR)]
    if working:
        raise UnfinishedError(UNBUILT, path=root)
    shards = [p for p in below if any(map(_SHARD.match, p.relative_to(root).split("/")[-2:]))]
    if shards:
        raise UnfinishedError(
            f"contains no {LEDGER}, but folders named like shards of a token cache: {_few(shards, root)}. If they are caches of "
            "their own, open one of them. If they are left of a build, remove them, and build the cache again.",
            path=root,
        )
    if len(below) == 1:
        return below[0]
    if below:
        raise ArgumentError(f"contains {len(below)} token caches. Open one of them: {_few(below, root)}", path=root)
    raise MissingFileError(f"expected a token cache with a {LEDGER}, found none", path=root)


def _few(folders: Sequence[Location], root: Location) -> str:
    return ", ".join(p.relative_to(root) for p in folders[:8]) + (", ..." if len(folders) > 8 else "")
