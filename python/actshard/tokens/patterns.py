"""Glob patterns as fsspec and Levanter write them: ``*``, ``?``, ``[...]``, ``**`` and ``{a,b}``.

Paths are returned as given, not made absolute, because shard names are derived from them.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator

from actshard.base._arguments import is_file_url, path_of_url
from actshard.base.errors import ActshardError, ArgumentError, MissingFileError, NotAFileError
from actshard.base.location import Location
from actshard.base.storage import Entry

_MAGIC = re.compile(r"[*?[]")


def matching(source: str) -> list[str]:
    """Returns the file of this name, or the files that match the pattern, sorted by name.

    Args:
        source: a path, a ``file://`` URL, or a pattern of either. A URL is decoded first: ``%2A`` is a ``*`` of the pattern.

    Raises:
        MissingFileError: nothing matches.
        NotAFileError: it is a folder. ArgumentError: it is the URL of another machine.
    """
    if is_file_url(source):
        source = path_of_url(source, "sources")
    elif "://" in source:
        raise ArgumentError(f"sources: {source} is a URL; download it and pass the local path")
    path = os.path.expanduser(source)  # noqa: PTH111 -- Path normalizes the string, which shard names are derived from
    kind = Location.at(path).kind()
    if kind == "folder":
        raise NotAFileError("expected a file or a glob of files, found a folder", path=path)
    if kind is not None:
        return [path]
    paths = [match for pattern in _braces(path) for match in sorted(filter(None, _matches(pattern)))]
    if not paths:
        raise MissingFileError("expected a file, or a glob that matches files, found none", path=path)
    return paths


def _braces(pattern: str) -> list[str]:
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None or ("," not in match[1] and ".." not in match[1]):
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if span is not None:
        width = max(len(span[1]), len(span[2])) if "0" in (span[1][:1], span[2][:1]) else 0
        choices = [f"{n:0{width}d}" for n in range(int(span[1]), int(span[2]) + 1)]
    else:
        choices = match[1].split(",")
    return [
        expansion
        for choice in choices
        for expansion in _braces(pattern[: match.start()] + choice + pattern[match.end() :])
    ]


def _matches(pattern: str, folders: bool = False) -> Iterator[str]:
    """Yields paths that match, by the rules of Python's ``glob``; with ``folders``, only folders."""
    folder, name = os.path.split(pattern)
    if not _MAGIC.search(pattern):
        if _is_named(pattern) if name else _is_folder(folder):
            yield pattern
        return
    for parent in _matches(folder, True) if _MAGIC.search(folder) else [folder]:
        for match in _names(parent, name, folders):
            yield os.path.join(parent, match)  # noqa: PTH118 -- paths stay as given


def _names(parent: str, name: str, folders: bool) -> Iterator[str]:
    """Yields names in a folder that match the last component of a pattern."""
    if name == "**":
        if _is_folder(parent):
            yield ""
            yield from _below(parent, folders)
    elif _MAGIC.search(name):
        for entry in _entries(parent, folders):
            if (name.startswith(".") or not entry.name.startswith(".")) and fnmatch.fnmatch(entry.name, name):
                yield entry.name
    elif _is_named(os.path.join(parent, name)) if name else _is_folder(parent):  # noqa: PTH118 -- as given
        yield name


def _below(folder: str, folders: bool) -> Iterator[str]:
    """Yields relative paths at any depth below a folder. Follows symlinks; skips hidden names."""
    for entry in _entries(folder, folders):
        if not entry.name.startswith("."):
            yield entry.name
            for name in _below(os.path.join(folder, entry.name), folders):  # noqa: PTH118 -- as given
                yield os.path.join(entry.name, name)  # noqa: PTH118 -- as given


def _entries(folder: str, folders: bool) -> list[Entry]:
    try:
        entries = Location.at(folder or ".").entries()
    except (ActshardError, ValueError):  # like glob: an unreadable folder matches nothing
        return []
    return [entry for entry in entries if not folders or entry.kind == "folder"]


def _is_folder(path: str) -> bool:
    return Location.at(path or ".").kind() == "folder"


def _is_named(path: str) -> bool:
    return Location.at(path).is_named()
