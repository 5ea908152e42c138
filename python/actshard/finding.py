"""Finds the dataset at or below a path: activations of any format, or a token cache.

All commands use it, so a path refers to the same dataset in each.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from actshard import formats
from actshard._arguments import is_one_of
from actshard._json import read_json
from actshard.errors import (
    ActshardError,
    ArgumentError,
    ExistsError,
    FileAccessError,
    MissingFileError,
    NotAFileError,
    UnfinishedError,
    UnknownFormatError,
)
from actshard.formats.contents import Evidence
from actshard.location import Location
from actshard.logs import LOG
from actshard.storage import Entry, Remote, one_look
from actshard.walking import STANDS_FOR, UNBUILT, find_cache, is_cache_itself, new_caches, walk
from actshard.work import (
    DUMPS_PLAN_FOLDER,
    PARTS,
    PLAN,
    PLAN_FOLDER,
    PUSHING,
    Journal,
    count_parts,
    is_building,
    is_merging,
    only_begun,
    planned,
    refuse_merging,
    refuse_planned,
    refuse_staging,
    unfinished,
)


def of_tokens() -> str:
    """Name of the format of token caches."""
    (name,) = formats.of_tokens()
    return name


def existing(path: str | os.PathLike[str]) -> Location:
    """Returns the location of an existing path.

    Raises:
        MissingFileError: the path does not exist.
        NotAFileError: a parent of the path is a file.
    """
    return _existing(Location.of(path))


def existing_anywhere(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, cache: Any) -> Location:
    """As :func:`existing`, for URLs as well."""
    return _existing(Location.of_any(path, storage_options, cache))


def all_existing(paths: Sequence[Any], storage_options: Mapping[str, Any] | None, cache: Any) -> list[Location]:
    """As :func:`existing_anywhere`, for several. Locations of one bucket or server share its cached listings."""
    found: list[Location] = []
    for path in paths:
        place = Location.of_any(path, storage_options, cache)
        same = next((other.storage for other in found if other.storage == place.storage), place.storage)
        found.append(Location(same, place.key))
    return [_existing(place) for place in found]


def _existing(root: Location) -> Location:
    if root.exists():
        return root
    if not root.is_local:
        raise MissingFileError("expected a dataset, found nothing", path=root)
    above = root.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    if above.kind() not in ("folder", None):
        raise NotAFileError(f"expected a dataset, found that its parent {above.name!r} is not a folder", path=root)
    refuse_staging(root.local)
    raise MissingFileError("expected a dataset, found nothing", path=root)


def check_finished(root: Location, format: str | None = None, *, described: bool = False) -> None:
    """Raises UnfinishedError for an unfinished dataset or unmerged parts, ArgumentError for a token cache.

    Args:
        root: the dataset's path.
        format: its format, if it is known; it may share its folder with a token cache.
        described: whether a ``layout=`` describes its files, which formats then need not recognise.
    """
    if not root.lists:
        return  # a web server, which cannot list names
    if not root.is_local and root.kind() != "file" and (root / PUSHING).exists():
        raise UnfinishedError(
            "is being uploaded, or its upload was interrupted: the same actshard.push completes it", path=root
        )
    if is_cache_itself(root) and not described and not _is_a(root, format):
        raise ArgumentError("expected activations, found a token cache. Use actshard.tokens.open_cache.", path=root)
    count = count_parts(root)
    if count is not None:
        _refuse_parts_of_a_plan(root)
        raise UnfinishedError(
            f"contains {count} unmerged parts of a dataset. When all are written, merge them with actshard.merge"
            + beside_parts(root),
            path=root,
        )
    if root.kind() != "folder":
        return
    journal = unfinished(root)
    if journal is not None:
        raise _unfinished(root, journal)
    if root.is_local:
        refuse_merging(root)
    refuse_planned(root)
    if format is not None and root.is_local and not described and not _is_a(root, format):
        _check_begun(root)


def _is_a(root: Location, format: str | None) -> bool:
    return format is not None and is_one_of(format, formats.names()) and _evidence(format, root).matches


def refuse_dataset(folder: Path) -> None:
    """Raises ExistsError if the path of a folder for a token cache refers to a dataset: it would open as the cache.

    Raises:
        ExistsError: the folder is a dataset, finished or not, or stands for the only dataset below it.
    """
    root = Location.at(folder)
    if root.kind() != "folder" or is_cache_itself(root) or is_building(root):
        return
    found = _activations_at(root)
    if found is not None:
        raise ExistsError(f"{found}; choose another folder for the token cache", path=root)


def _activations_at(root: Location) -> str | None:
    """What the path of a local folder refers to: a dataset of activations, or a beginning of one."""
    if count_parts(root) is not None:
        return "contains parts of a dataset"
    begun = unfinished(root) is not None or only_begun(root) or is_merging(root)
    if begun or planned(root, DUMPS_PLAN_FOLDER) is not None or _is_planned(root):
        return "is an unfinished dataset"
    try:
        at, name = find(root)
    except UnfinishedError:
        return "contains an unfinished dataset"
    except UnknownFormatError as error:
        return "is a dataset of several formats" if error.ambiguous else None
    return f"is a dataset ({name})" if at == root else f"stands for the only dataset below it ({at.relative_to(root)})"


def _is_planned(root: Location) -> bool:
    """Whether tasks of an uncommitted plan write a dataset of activations to a folder, not a token cache."""
    work = planned(root)
    if work is None:
        return False
    plan = read_json(Location.at(work / PLAN))
    return not isinstance(plan, dict) or plan.get("verb") != "tokenize"


new_caches.append(refuse_dataset)


def _refuse_parts_of_a_plan(root: Location) -> None:
    """Raises UnfinishedError if an uncommitted plan writes the parts in a folder: only the plan's commit merges them."""
    for prefix in (PLAN_FOLDER, DUMPS_PLAN_FOLDER):
        refuse_planned(root.parent if root.name == PARTS else root, prefix)


def beside_parts(root: Location) -> str:
    """For messages about unmerged parts: lists finished datasets next to them, and a remedy. Empty if there are none."""
    finished = [p.name for p, _ in walk(root, _kind, 1) if unfinished(p) is None and not is_merging(p)]
    if not finished:
        return ""
    shown = ", ".join(finished[:5]) + (", ..." if len(finished) > 5 else "")
    return (
        f"; next to them is a finished dataset ({shown}), which opens by its own path. If the parts were written again after a "
        f"merge, remove {PARTS}"
    )


def find_any(root: Location) -> tuple[Location, str]:
    """Returns (location, format) of the dataset of activations or tokens at or below a path.

    Precedence: the dataset at the path; then the dataset that :func:`open` finds below it; then the only token cache below it.
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
    """Returns (location, format) of the dataset at a path, or of the only dataset below it.

    saev names its folders by hashes, so ``saev/shards/`` with a single dump refers to that dump. Datasets more than three levels
    down must be named.
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
    """Raises UnfinishedError for a folder without a dataset in which a writer or a merge began."""
    if not root.is_local:
        return  # writers only write to local folders
    folders = [Location.at(folder) for name in formats.names() for folder in _begun(name, root)]
    for folder in folders:
        journal = unfinished(folder)
        if journal is not None:
            raise _unfinished(root, journal)
    refuse_planned(root, DUMPS_PLAN_FOLDER)
    refuse_merging(root)
    if is_building(root):
        raise UnfinishedError(UNBUILT, path=root)
    if any(map(only_begun, [root, *folders])):
        raise UnfinishedError(
            "contains a dataset without examples: its writer has not committed any yet, or was interrupted (create or convert with "
            "resume begins again)",
            path=root,
        )


def _begun(name: str, root: Location) -> list[Path]:
    format = formats.get(name)
    nothing: list[Path] = []
    return formats.asked(format, lambda: list(format.begun(root.place)), nothing)


def _unfinished(root: Location, journal: Journal) -> UnfinishedError:
    return UnfinishedError(
        f"contains {journal.examples} examples of an unfinished dataset: its writer is running, or was interrupted "
        "(create or convert with resume continues it)",
        path=root,
    )


def _matching(root: Location) -> tuple[dict[str, Evidence], list[str]]:
    """The evidence of all formats, and the formats that recognise a path. What a writer marked has no other format."""
    with one_look():
        evidence = {name: _evidence(name, root) for name in formats.names()}
    matches = [name for name, e in evidence.items() if e.matches]
    return evidence, [name for name in matches if evidence[name].marked] or matches


def detect(root: Location) -> str:
    """Returns the format of a dataset. Raises UnknownFormatError if no format, or more than one, recognises it."""
    evidence, matches = _matching(root)
    LOG.debug(
        "%s: %s",
        root,
        "; ".join(f"{name}: {'yes' if e.matches else 'no'}, {_looked(e)}" for name, e in evidence.items()),
    )
    if len(matches) == 1:
        return matches[0]
    if matches:
        several = UnknownFormatError(
            f"matches the formats {' and '.join(matches)}. Choose one with format=: "
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
        unknown = UnknownFormatError(f"is not a dataset, but contains {what}. Open one: {listed}{more}", path=root)
        unknown.candidates = tuple((at.place, name) for at, name in candidates)
        raise unknown
    if isinstance(root.storage, Remote) and root.storage.denied:
        denied = next(iter(root.storage.denied.values()))
        raise FileAccessError(f"cannot detect the format: {denied}. Choose a format=", path=root)
    raise UnknownFormatError(f"expected a dataset, found {_explained(root, evidence)}", path=root)


def _explained(root: Location, evidence: dict[str, Evidence]) -> str:
    """Describes a path that no format recognises, and the formats that are near: those with some of their files there."""
    kind, entries = root.kind(), _entries(root)
    if entries == []:
        return "an empty folder"
    damaged = [] if entries is None else remaining({entry.name for entry in entries})
    reasons = _reasons({name: e for name, e in evidence.items() if e.near and name not in damaged})
    reasons += [f"perhaps a damaged {name} dataset: {_looked(evidence[name])}" for name in damaged]
    found = "a folder that no format recognises"
    if kind != "folder":
        found = f"{'a file' if kind == 'file' else 'a special file'}. A dataset is usually a folder"
        reasons = reasons or ["pass the folder that contains the file"]
    elif entries is not None:
        found = f"a folder with {_summary(entries)}, which no format recognises"
    if _is_describable(root, entries):
        return f"{'; '.join([found, *reasons])}. {_DESCRIBE}"
    return "; ".join([found, *reasons])


_DESCRIBE = "Files of another layout need a layout.toml: actshard info FOLDER --guess proposes one"


def _reasons(evidence: Mapping[str, Evidence]) -> list[str]:
    """Reasons why formats do not match. An error that is the same for several formats is one reason."""
    failed: dict[str, list[str]] = {}
    for name, e in evidence.items():
        if e.looked_for == _any_of(name):
            failed.setdefault(e.found, []).append(name)
    looked = [f"{name}: {_looked(e)}" for name, e in evidence.items() if e.looked_for != _any_of(name)]
    return looked + [f"{', '.join(names)}: {error}" for error, names in failed.items()]


def _any_of(name: str) -> str:
    return f"a {name} dataset"


def _looked(e: Evidence) -> str:
    return f"looked for {e.looked_for}, found {e.found}"


def remaining(names: Set[str]) -> list[str]:
    """The formats of which a folder with entries of these names may be a damaged dataset, the likeliest first."""
    known = sorted(map(formats.get, formats.names()), key=lambda format: format.order)
    asked = {format.name: functools.partial(format.remains, frozenset(names)) for format in known}
    return [format.name for format in known if formats.asked(format, asked[format.name], False)]


def _entries(root: Location) -> list[Entry] | None:
    """The entries of a folder; None if it is no folder, or cannot be listed."""
    if root.kind() != "folder" or not root.lists:
        return None
    with contextlib.suppress(ActshardError):
        return root.entries()
    return None


def _summary(entries: Sequence[Entry]) -> str:
    """Names of a few files and folders; numbers of many, by ending."""
    if len(entries) <= 4:
        return ", ".join(f"{entry.name:.60}{'/' if entry.kind == 'folder' else ''}" for entry in entries)
    kinds = collections.Counter(
        "folders" if entry.kind == "folder" else f"{Path(entry.name).suffix[:20] or 'other'} files" for entry in entries
    )
    shown = [f"{count:,} {kind if count > 1 else kind[:-1]}" for kind, count in kinds.most_common(4)]
    rest = sum(kinds.values()) - sum(count for _, count in kinds.most_common(4))
    return ", ".join(shown) + (f" and {rest:,} more" if rest else "")


def _is_describable(root: Location, entries: Sequence[Entry] | None) -> bool:
    """Whether a path is, or contains, a file of a kind that a layout.toml describes. Looks below local folders only."""
    names: Iterator[str] = iter([root.name] if entries is None else [entry.name for entry in entries])
    if entries is not None and root.is_local:
        names = itertools.chain(names, (path.name for path, _ in itertools.islice(root.files(), 1000)))
    endings = formats.get(formats.described()).describes
    return any(name.lower().endswith(endings) for name in names)


def _evidence(name: str, root: Location) -> Evidence:
    try:
        return formats.detect(name, root.place)
    except FileAccessError as error:
        if root.is_remote:
            raise  # a server that does not answer, or refuses: each other format would wait for it again
        return Evidence(False, _any_of(name), str(error), near=True)
    except (ActshardError, OSError) as error:
        return Evidence(False, _any_of(name), str(error), near=True)


def _kind(folder: Location) -> str | None:
    """Names of the formats that recognise a folder, joined by ``/``; None if no format does."""
    if is_cache_itself(folder):
        return of_tokens()
    return "/".join(_matching(folder)[1]) or None
