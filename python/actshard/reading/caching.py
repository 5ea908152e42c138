"""The cache on disk of remote datasets: its size, and clearing it. ``actshard.open(url, cache=...)`` fills it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import actshard._native as _native
from actshard.base._arguments import local_path
from actshard.base.errors import MissingFileError, NotAFileError
from actshard.base.location import cache_folder
from actshard.formats import kept


@dataclass(frozen=True)
class CacheInfo:
    """State of a cache on disk.

    Attributes:
        folder: the cache's folder.
        bytes: bytes on the disk; 0 without a cache.
        limit: the limit of the last process that used it; None if unknown.
        objects: number of cached objects, complete or in parts.
    """

    folder: Path
    bytes: int
    limit: int | None
    objects: int

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"folder": str(self.folder)}


def cache_info(folder: str | os.PathLike[str] | None = None) -> CacheInfo:
    """Returns the size of a cache on disk. Makes no folder.

    Args:
        folder: as passed to :func:`actshard.open` as ``cache=``; None: ``$ACTSHARD_CACHE``, or ``~/.cache/actshard``.

    Raises:
        MissingFileError: the folder was named, and contains no cache.
    """
    path = _folder(folder)
    usage = _native.disk_cache_info(path)
    if usage is None:
        _missing(path, folder)
        return CacheInfo(path, 0, None, 0)
    size, objects, limit = usage
    return CacheInfo(path, size, limit or None, objects)


def clear_cache(folder: str | os.PathLike[str] | None = None) -> CacheInfo:
    """Removes the content of a cache on disk, and returns what is left: blocks that are being downloaded now.

    Without ``folder``, removes kept indexes of local folders too.

    Processes that read through the cache continue, and download the data again.

    Args:
        folder: as for :func:`cache_info`.

    Raises:
        MissingFileError: the folder was named, and contains no cache. Nothing is removed.
    """
    path = _folder(folder)
    if folder is None:
        kept.clear()
    if not _native.clear_disk_cache(path):
        _missing(path, folder)
    return cache_info(folder)


def _folder(folder: str | os.PathLike[str] | None) -> Path:
    path = cache_folder() if folder is None else local_path(folder, "folder")
    if os.path.lexists(path) and not os.path.isdir(path):  # noqa: PTH112 -- also a broken link
        raise NotAFileError("expected the folder of a cache, found a file", path=path)
    return path


def _missing(path: Path, folder: object) -> None:
    if folder is not None:
        raise MissingFileError("expected a cache on disk, found none", path=path)
