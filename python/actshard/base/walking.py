"""A bounded walk over the folders below a path, and finding token caches with it.

``finding`` uses the same walk for datasets of activations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from actshard.base.errors import ActshardError, ArgumentError, FileAccessError, MissingFileError, UnfinishedError
from actshard.base.location import Location
from actshard.base.work import look

_DEPTH = 6
"""Maximum depth at which datasets are searched below a path; saev alone nests three folders."""
STANDS_FOR = 3
"""Maximum depth of a path's only dataset to be opened by that path: ``saev/shards/<HASH>``, ``cache/web/train``."""
_LOOK_AT_MOST = 2_000
"""Maximum number of folders to visit, so that a mistyped "/" returns quickly."""
LEDGER = "shard_ledger.json"
"""The file that identifies a token cache."""
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


class Walk:
    """The datasets below a folder with their kinds, breadth-first and sorted by name.

    Does not descend into datasets. Skips hidden folders, and local folders that cannot be read. Visits a limited number of folders.

    Attributes:
        folders: number of folders that were visited.
        is_whole: whether all folders were visited, up to the depth. Known after the iteration.
    """

    def __init__(
        self,
        root: Location,
        kind: Callable[[Location], str | None],
        depth: int = _DEPTH,
        most: int = _LOOK_AT_MOST,
    ) -> None:
        """Walks at most ``depth`` levels down and visits at most ``most`` folders.

        ``kind`` returns the kind of dataset of a folder; None if it is not a dataset, and its subfolders are searched.
        """
        self._root, self._kind, self._depth, self._most = root, kind, depth, most
        self.folders, self.is_whole = 0, True

    def __iter__(self) -> Iterator[tuple[Location, str]]:
        level = [self._root]
        for _ in range(self._depth):
            next_level: list[Location] = []
            for folder in level:
                try:
                    entries = folder.entries()
                except ActshardError:
                    continue
                for entry in entries:
                    if entry.kind != "folder" or entry.name.startswith("."):
                        continue
                    if self.folders == self._most:
                        self.is_whole = False
                        return
                    self.folders += 1
                    child = folder / entry.name
                    kind = self._kind_of(child)
                    if kind is not None:
                        yield child, kind
                    else:
                        next_level.append(child)
            level = next_level

    def _kind_of(self, folder: Location) -> str | None:
        try:
            return self._kind(folder)
        except FileAccessError:
            if folder.is_remote:
                raise  # a server that does not answer, or refuses: each other folder would wait for it again
            return None


def _is_cache_below(folder: Location) -> bool:
    folder.look_into()  # one listing shows whether it is a cache, and which folders to visit next
    return is_cache_itself(folder)


def find_cache(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, object] | None = None,
    cache: str | os.PathLike[str] | int | bool | None = None,
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
    look(root).refuse("planned", "staging", "building")
    walk = Walk(root, lambda folder: LEDGER if _is_cache_below(folder) else None, STANDS_FOR)
    caches = [folder for folder, _ in walk]
    shards = [p for p in caches if any(map(_SHARD.match, p.relative_to(root).split("/")[-2:]))]
    if shards:
        raise UnfinishedError(
            f"contains no {LEDGER}, but folders named like shards of a token cache: {_few(shards, root)}. If they are caches of "
            "their own, open one of them. If they are left of a build, remove them, and build the cache again.",
            path=root,
        )
    if len(caches) == 1 and walk.is_whole:
        return caches[0]
    if caches:
        suffix = "" if walk.is_whole else f"; the search ended after {walk.folders:,} folders, so there may be others"
        raise ArgumentError(
            f"contains {len(caches)} token caches. Open one of them: {_few(caches, root)}{suffix}", path=root
        )
    raise MissingFileError(f"expected a token cache with a {LEDGER}, found none", path=root)


def _few(folders: Sequence[Location], root: Location) -> str:
    return ", ".join(p.relative_to(root) for p in folders[:8]) + (", ..." if len(folders) > 8 else "")
