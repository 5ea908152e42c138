"""The bounded walk below a path, and the token caches that it finds.

Datasets of activations (``finding``) and token caches are looked for by the same walk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

from actshard.errors import ActshardError, ArgumentError, MissingFileError, UnfinishedError
from actshard.location import Location
from actshard.work import is_building

_DEPTH = 6
"""How far below a path datasets are looked for when the path itself is none: saev nests three deep by itself."""
STANDS_FOR = 3
"""How far below a path its only dataset may lie to be opened by it: ``saev/shards/<HASH>``, ``cache/web/train``."""
_LOOK_AT_MOST = 2_000
"""Folders looked into at most, so that a mistyped "/" answers at once."""
LEDGER = "shard_ledger.json"
"""The file that makes a folder a token cache."""
_SHARD = re.compile(r"\d{5}_")
"""The beginning of the name of a token cache's shard."""


def is_cache_itself(root: Location) -> bool:
    """Whether a folder is a token cache, and not one above it."""
    return (root / LEDGER).kind() == "file"


def walk(root: Location, kind: Callable[[Location], str | None], depth: int = _DEPTH) -> Iterator[tuple[Location, str]]:
    """Datasets below a folder with their kinds, level by level and by name; none below another.

    Hidden folders and folders that cannot be listed are left out. At most 2,000 folders are looked at.

    Args:
        root: the folder.
        kind: the kind of dataset that a folder is; None: none, and what is below is looked at.
        depth: how many levels.
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
                found = kind(child)
                if found is not None:
                    yield child, found
                else:
                    below.append(child)
        level = below


def find_cache(path: str | os.PathLike[str]) -> Location:
    """The token cache that a path stands for: itself, or the only one not far below it.

    Raises:
        UnfinishedError: a cache is being built there, or its build was interrupted.
        ArgumentError: there are several; the message lists them.
        MissingFileError: there is none.
    """
    root = Location.of(path)
    if is_cache_itself(root):
        return root
    working = is_building(root)
    below = [p for p, _ in walk(root, lambda folder: LEDGER if is_cache_itself(folder) else None, STANDS_FOR)]
    if working or any(_SHARD.match(p.parent.name) or _SHARD.match(p.name) for p in below):
        raise UnfinishedError(
            f"holds shards of a token cache, but no {LEDGER}: its build was interrupted, or is at work; build it again",
            path=root,
        )
    if len(below) == 1:
        return below[0]
    if below:
        listed = ", ".join(p.relative_to(root) for p in below[:8])
        raise ArgumentError(f"holds {len(below)} token caches, open one of them: {listed}", path=root)
    raise MissingFileError(f"expected a token cache with a {LEDGER}, found none", path=root)
