"""Finds the dataset at or below a path: activations of any format, or a token cache.

All commands use it, so a path refers to the same dataset in each.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from actshard import formats
from actshard.base._arguments import is_one_of
from actshard.base._json import read_json
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ExistsError,
    FileAccessError,
    FormatError,
    MissingFileError,
    NotAFileError,
    UnfinishedError,
    UnknownFormatError,
)
from actshard.base.location import Location
from actshard.base.logs import LOG
from actshard.base.storage import Entry, Remote, one_look
from actshard.base.walking import STANDS_FOR, Walk, find_cache, is_cache_itself, new_caches
from actshard.base.work import PARTS, PLAN, Mark, Marks, look
from actshard.formats.contents import Evidence
from actshard.formats.foreign import FIRST, PAGE, explained, kind_of_bytes


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
    return _existing(Location.of(path), path)


def existing_anywhere(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, object] | None,
    cache: str | os.PathLike[str] | int | bool | None,
) -> Location:
    """As :func:`existing`, for URLs as well."""
    return _existing(Location.of_any(path, storage_options, cache), path)


def all_existing(
    paths: Sequence[object],
    storage_options: Mapping[str, object] | None,
    cache: str | os.PathLike[str] | int | bool | None,
) -> list[Location]:
    """As :func:`existing_anywhere`, for several. Locations of one bucket or server share its cached listings."""
    locations: list[Location] = []
    for path in paths:
        location = Location.of_any(path, storage_options, cache)
        # A web server's storage knows which escapes of one URL are the user's: those of another are not names of files.
        alike = (
            []
            if "%" in location.key
            else [earlier.storage for earlier in locations if earlier.storage == location.storage]
        )
        locations.append(Location(next(iter(alike), location.storage), location.key))
    return [_existing(location, path) for location, path in zip(locations, paths, strict=True)]


_HUB = re.compile(r"(?:hf:/*|huggingface\.co/|hf\.co/)?(?:datasets/)?([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@[\w.-]+)?")
"""The name of a dataset on the hub, as its page shows it."""


def _existing(root: Location, path: object) -> Location:
    """The location, if it exists; ``path`` is the user's, which may be a name on the hub."""
    if root.exists():
        return root
    if not root.is_local:
        raise MissingFileError("expected a dataset, found nothing", path=root)
    ancestor = root.parent
    while not ancestor.exists() and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    if ancestor.kind() not in ("folder", None):
        raise NotAFileError(f"expected a dataset, found that its parent {ancestor.name!r} is not a folder", path=root)
    look(root).refuse("staging")
    name = _HUB.fullmatch(path) if isinstance(path, str) else None
    is_hub_name = name is not None and not root.parent.exists()
    remedy = (
        f". A dataset of the Hugging Face hub is hf://datasets/{name[1]}" if name is not None and is_hub_name else ""
    )
    raise MissingFileError(f"expected a dataset, found nothing{remedy}", path=root)


@dataclass(frozen=True)
class Place:
    """What lies at a path, as one look saw it: one listing of a local folder, and each of its files looked at once.

    Attributes:
        root: the path.
        marks: unfinished work.
        is_cache: whether it is a token cache.
        evidence: what each format looked for and found.
    """

    root: Location
    marks: Marks
    is_cache: bool
    evidence: Mapping[str, Evidence]

    @classmethod
    def of(cls, root: Location, format: str | None = None) -> Place:
        """Looks at a path; with ``format`` only for a dataset of that format."""
        names = formats.names() if format is None else [format] if is_one_of(format, formats.names()) else []
        with one_look(root.key):
            marks = look(root)
            return cls(root, marks, root.lists and is_cache_itself(root), _evidence(root, names))

    @property
    def matches(self) -> list[str]:
        """The formats that recognise the path. What a writer marked has no other format."""
        matches = [name for name, e in self.evidence.items() if e.matches]
        return [name for name in matches if self.evidence[name].marked] or matches

    def is_a(self, format: str | None) -> bool:
        """Whether the path is a dataset of a format."""
        return format is not None and format in self.evidence and self.evidence[format].matches

    def check_finished(self, format: str | None = None, *, described: bool = False) -> None:
        """As :func:`check_finished`."""
        if not self.root.lists:
            return  # a web server, which cannot list names
        self.marks.refuse("uploading", "half copied")
        if self.is_cache and not described and not self.is_a(format):
            raise ArgumentError(
                "expected activations, found a token cache. Use actshard.tokens.open_cache.", path=self.root
            )
        if self.marks.parts is not None:
            plan_marks = look(self.root.parent) if self.root.name == PARTS else self.marks
            plan_marks.refuse("planned", "planned dumps")  # only the plan's commit merges them
            error = self.marks.error("parts")
            raise UnfinishedError(error.detail + beside_parts(plan_marks.root), path=self.root)
        self.marks.refuse("writing", "merging", "planned")
        if not self.marks.is_copy:
            self.marks.refuse("staging")
        if format is not None and self.root.is_local and not described and not self.is_a(format):
            self.check_begun()

    def check_begun(self) -> None:
        """Raises UnfinishedError for a folder without a dataset in which a writer, a merge or a build began."""
        if not self.root.is_local:
            return  # writers only write to local folders
        folder_marks = [look(folder) for name in formats.names() for folder in _begun(name, self.root)]
        for marks in folder_marks:
            marks.refuse("writing", path=self.root)
        self.marks.refuse("planned dumps", "merging", "building", "begun")
        for marks in folder_marks:
            marks.refuse("begun", path=self.root)


def is_finished(root: Path | Location, format: str) -> bool:
    """Whether a path is a finished dataset of a format."""
    place = Place.of(Location.at(root), format)
    return place.is_a(format) and not {"parts", "writing", "merging"} & set(place.marks.kinds())


def check_opens(path: Path, format: str) -> None:
    """The last step of writing: the dataset is found again, as one of the format that was written and of no other.

    Raises:
        UnknownFormatError: no format, or several, recognise it.
        FormatError: another format recognises it.
    """
    place = Place.of(Location.at(path))
    place.marks.refuse("writing", "merging")
    name = _detect(place)
    if name != format:
        raise FormatError(
            f"was written as {format}, and is whole, but opens as {name}: move other files out of its folder", path=path
        )


def check_finished(root: Location, format: str | None = None, *, described: bool = False) -> None:
    """Raises UnfinishedError for an unfinished dataset or unmerged parts, ArgumentError for a token cache.

    Args:
        root: the dataset's path.
        format: its format, if it is known; it may share its folder with a token cache.
        described: whether a ``layout=`` describes its files, which formats then need not recognise.
    """
    Place.of(root, format).check_finished(format, described=described)


def refuse_dataset(folder: Path) -> None:
    """Raises ExistsError if the path of a folder for a token cache refers to a dataset: it would open as the cache.

    Raises:
        ExistsError: the folder is a dataset, finished or not, or stands for the only dataset below it.
    """
    root = Location.at(folder)
    if root.kind() != "folder" or is_cache_itself(root):
        return
    dataset = _activations_at(root)
    if dataset is not None:
        raise ExistsError(f"{dataset}; choose another folder for the token cache", path=root)


def _activations_at(root: Location) -> str | None:
    """What the path of a local folder refers to: a dataset of activations, or a beginning of one."""
    marks = look(root)
    kinds = marks.kinds()
    if "building" in kinds:
        return None
    for kind in kinds:
        if kind in _OF_ACTIVATIONS or (kind == "planned" and not _plans_tokens(marks)):
            return marks.error(kind).detail
    try:
        location, name = find(root)
    except UnfinishedError as error:
        return error.detail
    except UnknownFormatError as error:
        return "is a dataset of several formats" if error.ambiguous else None
    return (
        f"is a dataset ({name})"
        if location == root
        else f"stands for the only dataset below it ({location.relative_to(root)})"
    )


_OF_ACTIVATIONS: frozenset[Mark] = frozenset({"parts", "writing", "begun", "merging", "planned dumps"})


def _plans_tokens(marks: Marks) -> bool:
    """Whether the tasks of an uncommitted plan write a token cache to a folder, not a dataset of activations."""
    work = marks.plan("planned")
    plan = None if work is None else read_json(Location.at(work / PLAN))
    return isinstance(plan, dict) and plan.get("verb") == "tokenize"


new_caches.append(refuse_dataset)


def beside_parts(root: Location) -> str:
    """For messages about unmerged parts: lists finished datasets next to them. Empty if there are none."""
    finished = [folder.name for folder, kind in Walk(root, _kind, 1) if kind != UNFINISHED]
    if not finished:
        return ""
    shown = ", ".join(finished[:5]) + (", ..." if len(finished) > 5 else "")
    return f"; next to them is a finished dataset ({shown}), which opens by its own path"


def find_any(root: Location) -> tuple[Location, str]:
    """Returns (location, format) of the finished dataset of activations or tokens at or below a path.

    Precedence: the dataset at the path; then the dataset that :func:`open` finds below it; then the only token cache below it.

    Raises:
        Errors of :func:`check_finished`, :func:`find` and :func:`~actshard.base.walking.find_cache`.
    """
    place = Place.of(root)
    if place.is_cache or (not root.lists and is_cache_itself(root)):
        return root, of_tokens()
    place.check_finished()
    try:
        return find_in(place)
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

    Raises:
        UnknownFormatError: no format recognises the path, or several do, or several datasets are below it, or the search for others
            ended at its bound.
        UnfinishedError: a writer began a dataset here, or the only one below is unfinished.
    """
    return find_in(Place.of(root))


def find_in(place: Place) -> tuple[Location, str]:
    """As :func:`find`, for a path that was looked at."""
    root = place.root
    try:
        return root, _detect(place)
    except UnknownFormatError as error:
        if not error.candidates and not error.ambiguous:
            place.check_begun()
        if len(error.candidates) != 1 or not error.searched or "/" in error.candidates[0][1]:
            raise
        ((path, name),) = error.candidates
        dataset = Location.at(path)
        if name == UNFINISHED:
            marks = look(dataset)
            if not marks.kinds():  # finished since it was found
                return find(root)
            raise marks.error(marks.kinds()[0]) from None
        if dataset.relative_to(root).count("/") >= STANDS_FOR:
            raise
        check_finished(dataset, name)
        return dataset, name


def _begun(name: str, root: Location) -> list[Path]:
    format = formats.get(name)
    nothing: list[Path] = []
    return formats.asked(format, lambda: list(format.begun(root.place)), nothing)


def detect(root: Location) -> str:
    """Returns the format of a dataset. Raises UnknownFormatError if no format, or more than one, recognises it."""
    return _detect(Place.of(root))


def _detect(place: Place) -> str:
    root, evidence, matches = place.root, place.evidence, place.matches
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
    walk = Walk(root, _kind)
    candidates = [(folder, name) for folder, name in walk if name == UNFINISHED or _holds_activations(name)]
    if candidates:
        listing = ", ".join(f"{folder.relative_to(root)} ({name})" for folder, name in candidates[:20])
        suffix = f" and {len(candidates) - 20} more" if len(candidates) > 20 else ""
        suffix += "" if walk.is_whole else f"; the search ended after {walk.folders:,} folders, so there may be others"
        what = "a dataset" if len(candidates) == 1 else f"{len(candidates)} datasets"
        unknown = UnknownFormatError(f"is not a dataset, but contains {what}. Open one: {listing}{suffix}", path=root)
        unknown.candidates = tuple((folder.place, name) for folder, name in candidates)
        unknown.searched = walk.is_whole
        raise unknown
    if isinstance(root.storage, Remote) and root.storage.denied:
        denied = next(iter(root.storage.denied.values()))
        raise FileAccessError(f"cannot detect the format: {denied}. Choose a format=", path=root)
    refusal = next((e.denied for e in evidence.values() if e.denied is not None), None)
    if refusal is not None:
        raise FileAccessError(f"cannot detect the format of {root.name}: {refusal.detail}", path=refusal.path or root)
    raise UnknownFormatError(f"expected a dataset, found {_explained(root, evidence)}", path=root)


def _holds_activations(name: str) -> bool:
    return formats.get(name.partition("/")[0]).holds == "activations"


def _explained(root: Location, evidence: Mapping[str, Evidence]) -> str:
    """Describes a path that no format recognises, and the formats that are near: those with some of their files there."""
    kind, entries = root.kind(), _entries(root)
    if entries == []:
        return "an empty folder"
    if (latents := latents_at(root)) is not None:
        return f"sparse latents ({latents}), which are a store of their own kind: actshard.latents.open reads them"
    damaged = [] if entries is None else remaining({entry.name for entry in entries})
    reasons = _reasons({name: e for name, e in evidence.items() if e.near and name not in damaged})
    reasons += [f"perhaps a damaged {name} dataset: {_looked(evidence[name])}" for name in damaged]
    is_describable = _is_describable(root, entries)
    texts = explained(root, entries, sure=bool(is_describable or damaged))
    summary = "a folder that no format recognises"
    if not root.lists:
        summary, is_file = _answer(root)
        if is_file:
            return summary
    if kind != "folder":
        summary = "a file" if kind == "file" else "a special file"
        reasons = reasons or (
            [] if texts else ["a dataset is usually a folder: pass the folder that contains the file"]
        )
    elif entries is not None:
        summary = f"a folder with {_summary(entries)}, which no format recognises"
    text = "; ".join([summary, *reasons, *texts])
    describe = _DESCRIBE.format("FILE" if kind == "file" else "FOLDER")
    return text if texts or damaged else f"{text}. {describe if is_describable else _CREATE}"


def _answer(root: Location) -> tuple[str, bool]:
    """What a web server returns for the URL itself, which formats take for a folder, and whether it is a file."""
    try:
        data = root.storage.read(root.key, 0, FIRST)
    except MissingFileError as error:
        found = error.detail.partition("found ")[2]
        answer = f"{found} at this URL" if "nothing" not in found else found.replace("nothing", "nothing at this URL")
        answer += " (404)" if found == "nothing" else ""
    except ActshardError as error:
        return f"a folder of a web server, whose answer to the URL itself is: {error.detail}", False
    else:
        kind = kind_of_bytes("", data)
        name = kind.name if kind is not None else "of an unknown kind" if data else "without any bytes"
        if name != PAGE:
            return f"a file of a web server, {name}: download it, or give the URL of the folder of a dataset", True
        answer = f"{PAGE} at this URL"
    return f"{answer}, and no files of a dataset below it that need no listing: check the URL", False


_DESCRIBE = "Files of another layout need a layout.toml: actshard info {} --guess proposes one"
_CREATE = "If it contains activations, read them with the program that wrote them, and write them with actshard.create"


def _reasons(evidence: Mapping[str, Evidence]) -> list[str]:
    """Reasons why formats do not match. An error that is the same for several formats is one reason."""
    failed: dict[str, list[str]] = {}
    for name, e in evidence.items():
        if e.looked_for == _any_of(name):
            failed.setdefault(e.found, []).append(name)
    looked = [f"{name}: {_looked(e)}" for name, e in evidence.items() if e.looked_for != _any_of(name)]
    return looked + [f"{', '.join(names)}: {error}" for error, names in failed.items()]


def latents_at(root: Location) -> str | None:
    """The kind of sparse latents at a path that no format recognises; None for other paths."""
    from actshard.latents.files import stores_at

    with contextlib.suppress(ActshardError):
        latents = stores_at(root)
        return None if latents is None else latents[0]
    return None


def _any_of(name: str) -> str:
    return f"a {name} dataset"


def _looked(e: Evidence) -> str:
    return f"looked for {e.looked_for}, found {e.found}"


def remaining(names: Set[str]) -> list[str]:
    """The formats of which a folder with entries of these names may be a damaged dataset, the likeliest first."""
    known_formats = sorted(map(formats.get, formats.names()), key=lambda format: format.order)
    checks = {format.name: functools.partial(format.remains, frozenset(names)) for format in known_formats}
    return [format.name for format in known_formats if formats.asked(format, checks[format.name], False)]


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


def _evidence(root: Location, names: Sequence[str]) -> dict[str, Evidence]:
    """What each format found. Where names cannot be listed, those that formats look for are requested together before."""
    storage = root.storage
    if not isinstance(storage, Remote) or root.kind() != "folder" or storage.native.lists:
        return {name: _evidence_of(name, root) for name in names}
    signs, rare_signs = ([(root / sign).key for sign in formats.signs(names, rare=rare)] for rare in (False, True))
    storage.request_together(signs)
    with storage.without(rare_signs):
        evidence = {name: _evidence_of(name, root) for name in names}
    if any(e.matches for e in evidence.values()):
        return evidence
    storage.request_together(rare_signs)
    return {name: _evidence_of(name, root) for name in names}


def _evidence_of(name: str, root: Location) -> Evidence:
    try:
        return formats.detect(name, root.place)
    except FileAccessError as error:
        if root.is_remote:
            raise  # a server that does not answer, or refuses: each other format would wait for it again
        return Evidence(False, _any_of(name), str(error), near=True, denied=error)
    except (ActshardError, OSError) as error:
        return Evidence(False, _any_of(name), str(error), near=True)


_LOOK_BELOW = 32
"""Maximum number of subfolders to visit of a folder in which a writer may have been killed: a walk meets many such folders."""
UNFINISHED = "unfinished"
"""Kind of a folder with an unfinished dataset, for :class:`~actshard.base.walking.Walk`."""


def _kind(folder: Location) -> str | None:
    """Names of the formats that recognise a folder, joined by ``/``; :data:`UNFINISHED`; None for other folders."""
    place = Place.of(folder)
    if place.is_cache:
        return of_tokens()
    kinds = _OF_ACTIVATIONS & set(place.marks.kinds())
    # A finished dataset may keep its writer's lock after a kill, and a folder of dumps may have a plan and finished dumps.
    is_only_begun = kinds <= {"begun", "planned dumps"}
    if kinds and not (is_only_begun and (place.matches or any(Walk(folder, _kind, 1, _LOOK_BELOW)))):
        return UNFINISHED
    return "/".join(place.matches) or None
