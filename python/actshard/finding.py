"""What dataset is at or below a path: activations of any format, or a token cache.

All verbs ask here, so that each means the same dataset by the same path.
"""

from __future__ import annotations

import os
from pathlib import Path

from actshard import formats
from actshard.errors import (
    ActshardError,
    ArgumentError,
    MissingFileError,
    NotAFileError,
    UnfinishedError,
    UnknownFormatError,
)
from actshard.formats.contents import Evidence
from actshard.location import Location
from actshard.walking import STANDS_FOR, find_cache, is_cache_itself, walk
from actshard.work import PARTS, Journal, count_parts, is_merging, unfinished


def of_tokens() -> str:
    """The format of token caches."""
    (name,) = formats.of_tokens()
    return name


def existing(path: str | os.PathLike[str]) -> Location:
    """The location of a path at which there is something.

    Raises:
        MissingFileError: there is nothing.
        NotAFileError: a file stands where a folder above it should.
    """
    root = Location.of(path)
    if root.exists():
        return root
    above = root.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    if above.kind() not in ("folder", None):
        raise NotAFileError(f"expected a dataset, but {above.name!r} above it is no folder", path=root)
    raise MissingFileError("expected a dataset, found nothing", path=root)


def check_finished(root: Location) -> None:
    """Raises UnfinishedError for what a writer has left or is still writing, ArgumentError for what holds no activations."""
    if is_cache_itself(root):
        raise ArgumentError("is a token cache and holds no activations: actshard.tokens.open_cache opens it", path=root)
    count = count_parts(root)
    if count is not None:
        raise UnfinishedError(
            f"holds {count} parts of a dataset: when all are written, actshard.merge (or the command) makes one of them"
            + beside_parts(root),
            path=root,
        )
    journal = unfinished(root) if root.kind() == "folder" else None
    if journal is not None:
        raise _unfinished(root, journal)


def beside_parts(root: Location) -> str:
    """For messages about parts that are not merged: which finished datasets lie beside them, and what to do then."""
    finished = [p.name for p, _ in walk(root, _kind, 1) if unfinished(p) is None and not is_merging(p)]
    if not finished:
        return ""
    shown = ", ".join(finished[:5]) + (", ..." if len(finished) > 5 else "")
    return (
        f"; beside them is a finished dataset ({shown}), which opens by its own path: if the parts are of a job that "
        f"ran again after they were merged, remove {PARTS}"
    )


def find_any(root: Location) -> tuple[Location, str]:
    """What a path stands for, activations or tokens: the dataset and its format.

    The dataset *at* the path wins; then the one that :func:`open` would open below it; then the only token cache below it.
    """
    if is_cache_itself(root):
        return root, of_tokens()
    try:
        return find(root)
    except UnknownFormatError as error:
        if error.candidates or error.ambiguous:
            raise
        try:
            return find_cache(root), of_tokens()
        except MissingFileError:
            raise error from None


def find(root: Location) -> tuple[Location, str]:
    """The dataset that a path stands for, and its format: the path itself, or the only dataset below it.

    saev's folders are named by hashes that nobody types: ``saev/shards/`` with a single dump stands for the dump. Farther down
    nothing is opened that was not named.
    """
    try:
        return root, detect(root)
    except UnknownFormatError as error:
        if not error.candidates and not error.ambiguous:
            _check_begun(root)
        if len(error.candidates) != 1 or "/" in error.candidates[0][1]:
            raise
        ((place, name),) = error.candidates
        only = Location.at(place)
        if only.relative_to(root).count("/") >= STANDS_FOR:
            raise
        check_finished(only)
        return only, name


def _check_begun(root: Location) -> None:
    """Raises UnfinishedError for a folder in which a saev dump or a merge was begun, and nothing else is."""
    if not root.is_local:
        return  # writers write local folders
    for folder in (Location.at(folder) for name in formats.names() for folder in _begun(name, root)):
        journal = unfinished(folder)
        if journal is not None:
            raise _unfinished(root, journal)
    if is_merging(root):
        raise UnfinishedError(
            "holds a merge that is not finished: it is at work, or was interrupted (the same call of actshard.merge finishes it)",
            path=root,
        )


def _begun(name: str, root: Location) -> list[Path]:
    format = formats.get(name)
    nothing: list[Path] = []
    return formats.asked(format, lambda: list(format.begun(root.place)), nothing)


def _unfinished(root: Location, journal: Journal) -> UnfinishedError:
    return UnfinishedError(
        f"holds {journal.examples} examples of a dataset that is not finished: its writer is at work, or was interrupted "
        "(create or convert with resume continues it)",
        path=root,
    )


def detect(root: Location) -> str:
    """The format of a dataset; UnknownFormatError if it is none or several."""
    evidence = {name: _evidence(name, root) for name in formats.names()}
    matches = [name for name, e in evidence.items() if e.matches]
    if len(matches) == 1:
        return matches[0]
    if matches:
        several = UnknownFormatError(
            f"looks like {' and like '.join(matches)}; say which with format=: "
            + "; ".join(f"{name}: {evidence[name].found}" for name in matches),
            path=root,
        )
        several.ambiguous = True
        raise several
    below = walk(root, _kind)
    candidates = [(at, name) for at, name in below if formats.get(name.partition("/")[0]).holds == "activations"]
    if candidates:
        listed = ", ".join(f"{at.relative_to(root)} ({name})" for at, name in candidates[:20])
        more = f" and {len(candidates) - 20} more" if len(candidates) > 20 else ""
        what = "a dataset" if len(candidates) == 1 else f"{len(candidates)} datasets"
        unknown = UnknownFormatError(f"is no dataset itself but holds {what}, open one: {listed}{more}", path=root)
        unknown.candidates = tuple((at.place, name) for at, name in candidates)
        raise unknown
    raise UnknownFormatError(
        "is no dataset that actshard knows; "
        + "; ".join(f"{name}: looked for {e.looked_for}, found {e.found}" for name, e in evidence.items()),
        path=root,
    )


def _evidence(name: str, root: Location) -> Evidence:
    try:
        return formats.detect(name, root.place)
    except (ActshardError, OSError) as error:
        return Evidence(False, f"a {name} dataset", str(error))


def _kind(folder: Location) -> str | None:
    """The formats that recognise a folder, joined by ``/``; None for no dataset."""
    if is_cache_itself(folder):
        return of_tokens()
    return "/".join(name for name in formats.names() if _evidence(name, folder).matches) or None
