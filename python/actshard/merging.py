"""``actshard.merge``: combines parts that several processes wrote, or compatible datasets, into one dataset.

Files of parts are renamed; files of datasets that stay are hard-linked. Bytes are copied only into saev's equal shards and across
file systems. Every step is idempotent and sources are removed last, so a killed merge can be run again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import actshard._native as _native
from actshard import _arguments, formats
from actshard._json import Fields, read_json, show
from actshard._schema import MismatchError, read_value
from actshard.errors import (
    ActshardError,
    ArgumentError,
    ArgumentTypeError,
    DiskFullError,
    ExistsError,
    FileAccessError,
    FormatError,
    InterruptedReadError,
    MissingFileError,
    NoMemoryError,
    UnfinishedError,
    UnknownFormatError,
    UnsupportedError,
    boundary,
    warn,
)
from actshard.finding import beside_parts, check_opens, existing, find
from actshard.formats.carrying import first_difference, metadata_differences
from actshard.formats.merging import Merge, Merger
from actshard.formats.target import refuse_existing, refuse_in_the_way
from actshard.inputs import LOOKED_AT, Input, changed, fingerprint, read_inputs
from actshard.location import Location
from actshard.opening import open_quietly
from actshard.request import RECORD, Digests, Request, joined_digests
from actshard.work import (
    EMPTY,
    FOLDER,
    LOCK,
    MERGING,
    PART,
    PARTS,
    files_below,
    is_below,
    keep_request,
    locked,
    look,
    recorded_files,
    refuse_within,
    remove,
    remove_files,
    rename,
    sync_folders,
    tidy,
    write_json,
)

if TYPE_CHECKING:
    from actshard.formats.contents import Contents

_MARKER = MERGING
_MODELS = ". To merge them, pass different_models=True (--different-models)."
_DATA = ". The merged dataset has one; actshard.concat reads them together and keeps both."
_REMEDIES = {"model": _MODELS, "model revision": _MODELS, "dataset": _DATA, "data": _DATA}
_LEAST_FILES = 16
"""Files of each part that are looked at, however many parts there are."""
_GONE = f"merged{PARTS}"
"""The parts' folder, in the working folder, while it is removed."""
_LEFT = "left-in-parts"
"""Folder that keeps other programs' files from the parts' folders after a merge."""


def merge(
    path: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]] | None = None,
    *,
    physical: bool = False,
    different_models: bool = False,
    resume: bool = False,
) -> Path:
    """Merges parts into one dataset and returns its path.

    All checks run before a file is moved, linked or written, so a failed check leaves no files. If a merge was killed or the disk
    was full, the same call finishes it; any other merge into ``path`` fails until then.

    Args:
        path: the dataset: where :func:`actshard.create` was called with ``part=``, or a new folder for ``parts``.
        parts: datasets of one format, merged in this order. They are not changed; their files are hard-linked if the file
            system supports it. None: the parts written below ``path``, in the order of their numbers; they become the dataset.
        physical: for Zarr, make one store instead of a run of several stores with a manifest.
        different_models: also merge datasets of different models or revisions; the result keeps those of the first.
        resume: return a finished merge of these parts instead of raising, so that a job can be started again.

    Other files next to the parts, such as a README or logs, stay in place. Other files inside the parts' folders are moved to
    ``path/left-in-parts``.

    Returns:
        Path of the merged dataset (for saev ``path/<HASH>``). If the parts written below ``path`` are already merged, returns the
        same path. With ``parts``, a call after a finished merge raises ExistsError, or returns the same path with ``resume``.

    Raises:
        UnfinishedError: a part is missing or unfinished; the message lists them.
        FormatError: the parts differ in layers, d_model, dtype, model, ..., or two parts use the same sample numbers. Other
            metadata in which they differ are named in a warning (``metadata-dropped``): the result has those of the first.
        ExistsError: ``path`` already contains a dataset. LockedError: another process is merging.
        ArgumentError: ``physical`` for another format, or stores with different chunks; another merge was begun in ``path``.
    """
    root = _arguments.local_path(path)
    asked = MergeRequest.of(parts, physical, different_models)
    if _arguments.switch(resume, "resume"):
        asked = replace(asked, resume=True)
    with boundary(root, "merge"):
        return merged(root, asked)


@dataclass(frozen=True)
class MergeRequest:
    """The arguments of a call to :func:`merge`, and what a plan adds to them."""

    parts: tuple[Path, ...] | None
    physical: bool
    different_models: bool
    resume: bool = False
    """Whether a finished merge of the same parts is returned."""
    plan: Path | None = None
    """Working folder of the plan that is committed."""
    counts: tuple[int, ...] | None = None
    """Number of examples that each part must have."""
    copies: Mapping[str, Path] = field(default_factory=dict)
    """Files that the plan's tasks copied; see :class:`~actshard.formats.merging.Merge`."""

    @classmethod
    def of(cls, parts: Any, physical: bool, different_models: bool) -> MergeRequest:
        """Checks the arguments of :func:`merge`."""
        physical = _arguments.switch(physical, "physical")
        different_models = _arguments.switch(different_models, "different_models")
        if parts is None:
            return cls(None, physical, different_models)
        if isinstance(parts, str | bytes | os.PathLike | Set) or not isinstance(parts, Iterable):
            raise ArgumentTypeError(f"parts: expected a list of paths in order, found {type(parts).__name__}")
        return cls(tuple(_arguments.local_path(p, "parts") for p in parts), physical, different_models)

    def request_of(self, format: str, sources: Sequence[str], examples: int, digests: Digests | None) -> Request:
        """The request of a merge of datasets whose files have the digests ``sources``. ``digests``: of their rows."""
        arguments = {"format": format, "physical": self.physical, "different_models": self.different_models}
        return Request.of("merge", arguments, sources).finished(examples, None, digests)

    def as_dict(self) -> dict[str, Any]:
        """Returns the arguments that the marker of an unfinished merge records."""
        return {"parts": None if self.parts is None else [str(p) for p in self.parts], "physical": self.physical}


def _request_of_parts(parts: Sequence[Request | None]) -> Request | None:
    """The request of a dataset from those of its parts, as if one writer had created it; None if they record none in common."""
    requests = [part for part in parts if part is not None]
    counts = [part.examples for part in requests if part.examples is not None]
    if len(counts) < len(parts):
        return None
    whole = [part.without_part(sum(counts)) for part in requests]
    digests = _digests_of(requests, counts)
    return replace(whole[0], digests=digests) if all(request == whole[0] for request in whole) else None


def _digests_of(parts: Sequence[Request | None], counts: Sequence[int]) -> Digests | None:
    """Digests of the rows of all parts, one after the other; None if a part records none for its number of examples."""
    shifted: list[Digests | None] = []
    for part, count, first in zip(parts, counts, itertools.accumulate(counts, initial=0), strict=False):
        known = None if part is None or part.examples != count else part.digests
        shifted.append(None if known is None else tuple(digest.after(first) for digest in known))
    return joined_digests(shifted)


def merged(root: Path, asked: MergeRequest) -> Path:
    """Merges, or finishes a merge that was interrupted; see :func:`merge`."""
    marker = root / FOLDER / _MARKER
    look(root).refuse("planned", "planned dumps", "staging", own=asked.plan)
    if not marker.exists() and asked.parts is None and not (root / PARTS).is_dir():
        return _there(root, asked.physical)
    if asked.resume and not marker.exists() and (place := _finished_before(root, asked)) is not None:
        return place
    lock = locked(root / FOLDER)
    try:
        if not marker.exists():
            if (
                asked.parts is None and not (root / PARTS).is_dir()
            ):  # another process merged them before we had the lock
                _leave(root)
                return _there(root, asked.physical)
            try:
                look(root).refuse("writing", is_locked=True)
                _begin(root, asked, marker)
            except BaseException:
                if not marker.exists():
                    _leave(root)
                raise
        plan, listed = _begun(root, asked, marker)
        try:
            with recorded_files() as files:
                place = root / listed["place"] if listed.get("finished") else merger_of(plan.format).run(plan)
        except ActshardError as error:
            # A full disk or a failed read may succeed later; other errors would occur again.
            if not plan.move and not isinstance(
                error, DiskFullError | FileAccessError | InterruptedReadError | NoMemoryError
            ):
                targets = [root / name for name in listed.get("targets") or ()]
                for target in targets:
                    remove(target)
                remove_files(root, [*targets, *files])
                _leave(root)
            raise
        if not listed.get("finished"):
            sync_folders([place.parent])
            if plan.request is None:  # an older dataset's record
                (place / RECORD).unlink(missing_ok=True)
            else:
                keep_request(place, plan.request, formats.get(plan.format).checked_files)
            write_json(marker, {**listed, "finished": True, "place": os.path.relpath(place, root)})
        if plan.move:
            _remove_parts(root, frozenset(listed["own"]))
        _leave(root)
        check_opens(place, plan.format)
    finally:
        lock.release()
    _native.sync_files([root])
    return place


def _remove_parts(root: Path, own: Set[str]) -> None:
    """Removes the parts' folder.

    It is renamed first, because a dataset with remaining parts would look unfinished. Files that the writers did not make are kept
    in a folder of the dataset. ``own``: names of the others, see :func:`_own_files`.
    """
    gone = root / FOLDER / _GONE
    _empty(root, gone, own)  # left by a merge that was interrupted at this step
    if (root / PARTS).is_dir():
        rename(root / PARTS, gone)
        _native.sync_files([root])
        _empty(root, gone, own)


def _inputs(parts: Sequence[Path]) -> list[Input]:
    """The files of rows and columns of parts, which must not change before an interrupted merge is finished."""
    most = max(_LEAST_FILES, LOOKED_AT // len(parts))
    return [file for part in parts for file in read_inputs(open_quietly(part, None, "auto"), most)]


def _own_files(root: Path, plan: Merge) -> list[str]:
    """Files and stores in the parts' folder: those that the merge takes or copies, and those in the records of the parts.

    Of a part that is a link to a folder elsewhere the link.
    """
    merger = merger_of(plan.format)
    files = [source for source, _ in merger.taken(plan)]
    files += [source for file in merger.assembled(plan) for source, *_ in file.pieces]
    for part in plan.parts:
        request = Request.read(part)
        names = (request.checksums if request else None) or ()
        files += [part / name for name in (RECORD, *filter(is_below, names))]
    files += [entry for entry in (root / PARTS).iterdir() if PART.fullmatch(entry.name) and entry.is_symlink()]
    return sorted({file.relative_to(root / PARTS).as_posix() for file in files})


def _empty(root: Path, gone: Path, own: Set[str]) -> None:
    """Removes a folder of merged parts. Other programs' files in it move to a visible folder."""
    others = False
    if gone.is_symlink():  # to a folder elsewhere, whose files are kept
        gone.unlink()
    for path, below, names in os.walk(gone, topdown=False):
        folder = Path(path)
        within = folder.relative_to(gone)
        # Writers create files only inside the parts' folders.
        is_part = bool(within.parts) and PART.fullmatch(within.parts[0]) is not None
        is_own = (is_part and FOLDER in within.parts) or any(str(above) in own for above in (within, *within.parents))
        for file in [folder / n for n in names] + [link for n in below if (link := folder / n).is_symlink()]:
            name = file.relative_to(gone).as_posix()
            if is_own or name in own or (is_part and len(within.parts) == 1 and file.name in (EMPTY, RECORD)):
                with contextlib.suppress(
                    OSError
                ):  # removed later with the working folder, which stays if that fails too
                    file.unlink()
            else:
                others = True
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    if others:
        names_left = (f"{_LEFT}-{i}" if i > 1 else _LEFT for i in itertools.count(1))
        rename(gone, next(root / name for name in names_left if not os.path.lexists(root / name)))
        _native.sync_files([root])


def _leave(root: Path) -> None:
    """Removes the merge's files from the working folder, and the folder and the dataset's if they are empty.

    Other files there belong to plans and writers. The marker is removed last: resuming needs it.
    """
    folder = root / FOLDER
    with contextlib.suppress(OSError):
        gone = folder / _GONE
        if gone.is_dir():
            shutil.rmtree(gone)
        (folder / LOCK).unlink(missing_ok=True)
        # If anything above failed, the marker stays and the next call continues from it.
        (folder / _MARKER).unlink(missing_ok=True)
        folder.rmdir()
        root.rmdir()


def _there(root: Path, physical: bool) -> Path:
    """Returns the path of a dataset that was merged before."""
    if not root.exists():
        raise MissingFileError("expected parts of a dataset, found nothing", path=root)
    look(root).refuse("writing")
    found, format = _found(root)
    if physical:
        merger = merger_of(format)
        if merger.physical is None:
            raise ArgumentError(_not_physical(format), path=found)
        if merger.several(found):
            raise ArgumentError(
                "physical: this dataset is merged already, as a run of several stores. Merge it into a new folder "
                "(parts=[this path], physical=True), or, if chunks differ, write it as one store with actshard convert.",
                path=found,
            )
    tidy(found)
    return found


def _found(folder: Path) -> tuple[Path, str]:
    """Path and format of the dataset at or below a folder."""
    found, format = find(Location.at(folder))
    return found.local, format


def merger_of(format: str) -> Merger:
    """The format's :class:`Merger`."""
    merger = formats.get(format).merger()
    if merger is None:
        raise UnsupportedError(f"{format} datasets cannot be merged; convert them to another format first")
    return merger


def _not_physical(format: str) -> str:
    mergers = [formats.get(name).merger() for name in formats.names()]
    others = " and ".join(merger.physical for merger in mergers if merger is not None and merger.physical is not None)
    return f"physical: supported for {others} only; a merged {format} dataset is always one dataset"


def _begun(root: Path, asked: MergeRequest, marker: Path) -> tuple[Merge, dict[str, Any]]:
    """Returns the merge recorded in the marker. Raises ArgumentError if the call asks for another merge."""
    found = Fields(read_json(marker), marker)
    format = found.text("format")
    names = found.value.get("parts")
    move, physical = found.boolean("move"), found.boolean("physical")
    if format not in formats.names():
        raise found.error("format", f"one of {', '.join(formats.names())}")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n and "\0" not in n for n in names):
        raise found.error("parts", "a list of paths")
    if found.value.get("finished"):
        place = Path(os.path.normpath(root / found.text("place")))
        if place not in (root, root / place.name):
            raise found.error("place", "the dataset's folder")
        found.value["place"] = str(place)
    if found.value.get("asked") != asked.as_dict():
        of = "the parts that were written here" if move else ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        remedy = "repeat the same call to finish it" + ("" if move else ", or choose another folder")
        raise ArgumentError(
            f"a merge of {of}{' with physical=True' if physical else ''} was begun here and is not finished, and this call is "
            f"for another merge: {remedy}",
            path=root,
        )
    for field_name in ("targets", "own"):
        below = found.value.get(field_name)
        if not isinstance(below, list) or not all(isinstance(name, str) and is_below(name) for name in below):
            raise found.error(field_name, "paths below the dataset's folder")
    request = None if found.value.get("request") is None else Request.from_dict(found.value["request"], marker)
    try:
        inputs = read_value(tuple[Input, ...], found.value.get("inputs"))
    except MismatchError as error:
        raise found.error("inputs", "files with their sizes and times") from error
    if not found.value.get("finished") and (difference := changed(inputs, "this merge was begun")) is not None:
        raise ArgumentError(f"{difference[1]} Merge the parts into another folder", path=difference[0])
    parts = tuple(root / name for name in names)
    return Merge(root, format, parts, move, {"physical": physical}, asked.copies, request), found.value


def _begin(root: Path, asked: MergeRequest, marker: Path) -> None:
    """Checks a merge and writes its marker. From then on the merge must be finished."""
    plan = checked(root, asked)
    # Relative paths for its own parts: the dataset may be moved between two calls.
    names = [os.path.relpath(s, root) if plan.move else str(s) for s in plan.parts]
    merger = merger_of(plan.format)
    targets = [target for _, target in merger.taken(plan)] + [root / file.name for file in merger.assembled(plan)]
    written = {
        "parts": names,
        "format": plan.format,
        "move": plan.move,
        "physical": asked.physical,
        "targets": [] if plan.move else [target.relative_to(root).as_posix() for target in targets],
        "own": _own_files(root, plan) if plan.move else [],
        "inputs": [] if plan.move else _inputs(plan.parts),
    }
    request = None if plan.request is None else plan.request.as_dict()
    write_json(marker, {**written, "asked": asked.as_dict(), "request": request})
    _native.sync_files([marker.parent, root])


def _finished_before(root: Path, asked: MergeRequest) -> Path | None:
    """The dataset that the same call merged before; None if there is no dataset with a record. Raises ExistsError for another."""
    if asked.parts is None or not root.exists():
        return None
    try:
        place = _found(root)[0]
    except (UnknownFormatError, UnfinishedError):  # nothing finished: what else lies here is checked under the lock
        return None
    found = Request.read(place)
    if found is None:
        return None
    format, request, _ = _check_alike(_datasets(asked.parts), asked)
    assert request is not None
    store = open_quietly(place, None, "auto")
    why = request.difference(found) or ("its parts were others, or have changed" if request != found else None)
    if why is None and (store.format, len(store)) != (format, request.examples):
        why = f"expected {request.examples} examples of {format}, found {len(store)} of {store.format}"
    if why is None:
        return place
    raise ExistsError(
        f"contains another {format} dataset than this merge writes: {why}. Choose another folder", path=place
    )


def _datasets(parts: Sequence[Path]) -> list[Path]:
    return [find(existing(path))[0].local for path in parts]


def checked(root: Path, asked: MergeRequest) -> Merge:
    """Checks a merge that has not begun. Writes nothing."""
    look(root).refuse("writing")
    if asked.parts is None:
        sources = _own_parts(root)
    else:
        if not asked.parts:
            raise ArgumentError("parts: expected at least one dataset")
        sources = _datasets(asked.parts)
        for source in sources:
            refuse_within(root, source)
            if Path(os.path.realpath(root)) in Path(os.path.realpath(source)).parents:
                raise ArgumentError(
                    f"parts: {source} lies inside of the folder of the merged dataset. Choose a folder outside",
                    path=root,
                )
        if (root / PARTS).exists():
            raise ExistsError(
                "contains parts of another dataset. Merge without parts=, or into another folder.", path=root
            )
        with contextlib.suppress(UnknownFormatError, UnfinishedError, MissingFileError):
            known = _found(root)[1]
            raise ExistsError(
                f"expected no folder or an empty one, found a finished {known} dataset. Pass resume=True (--resume) if these parts "
                "were merged into it, or choose another folder",
                path=root,
            )
        refuse_existing(root)
    format, request, differences = _check_alike(sources, asked)
    merger = merger_of(format)
    if asked.physical and merger.physical is None:
        raise ArgumentError(_not_physical(format))
    sources = [dataset for source in sources for dataset in merger.datasets(source)]
    places: dict[str, Path] = {}
    for source in sources:  # also a run and one of its stores, or a link to either
        if (other := places.setdefault(os.path.realpath(source), source)) is not source:
            raise ArgumentError(f"parts: the list contains a dataset twice: {other} and {source}")
    if asked.parts is None and not merger.names_itself:
        refuse_in_the_way(root, merger.makes)
    move = asked.parts is None
    plan = Merge(root, format, tuple(sources), move, {"physical": asked.physical}, request=request)
    merger.check(plan)
    if differences and (asked.physical or merger.physical is None):  # stores of a run keep their own metadata
        warn(f"the parts' metadata differ: {'; '.join(differences)}", code="metadata-dropped")
    return plan


def _own_parts(root: Path) -> list[Path]:
    """The parts written below ``root`` in the order of their numbers, without empty ones. All must be finished."""
    found: dict[int, Path] = {}
    counts: set[int] = set()
    for folder in sorted((root / PARTS).iterdir()):
        numbered = PART.fullmatch(folder.name)
        if numbered is not None and any(files_below(folder)):  # a writer that was killed at once leaves empty folders
            found[int(numbered[1])] = folder
            counts.add(int(numbered[2]))
    if not counts:
        raise UnfinishedError(
            f"expected parts, found only empty folders: no writer has begun{beside_parts(Location.at(root))}",
            path=root / PARTS,
        )
    if len(counts) > 1:
        raise UnfinishedError(
            f"expected the same number of parts in all names, found {sorted(counts)}{beside_parts(Location.at(root))}",
            path=root / PARTS,
        )
    (total,) = counts
    missing = [i for i in range(total) if i not in found]
    made, behind, empty = [], [], []
    for i, folder in sorted(found.items()):
        if (folder / EMPTY).is_file():
            empty.append(i)
            continue
        below = [folder, *(p for p in folder.glob(".writing-*") if p.is_dir())]
        if any(look(part).journal is not None for part in below):
            behind.append(i)
            continue
        made.append(_found(folder)[0])
    if missing or behind:
        problems = [
            f"part {', '.join(map(str, some))} {what}"
            for some, what in ((missing, "missing"), (behind, "unfinished"))
            if some
        ]
        raise UnfinishedError(
            f"expected {total} finished parts, {' and '.join(problems)}{beside_parts(Location.at(root))}",
            path=root / PARTS,
        )
    if not made:
        raise UnfinishedError(f"expected examples in at least one of {total} parts, found none", path=root / PARTS)
    return made


def _check_alike(sources: Sequence[Path], asked: MergeRequest) -> tuple[str, Request | None, list[str]]:
    """Returns the common format, the request, and texts about other metadata in which parts differ.

    Raises:
        FormatError: layers, d_model, dtype, model, ... differ.
    """
    first: Any = None
    metadata: list[dict[str, Any]] = []
    fingerprints: list[str] = []
    counts: list[int] = []
    most = max(_LEAST_FILES, LOOKED_AT // max(len(sources), 1))
    if asked.counts is not None and len(sources) != len(asked.counts):
        raise FormatError(
            f"expected {len(asked.counts)} parts with examples, one of each task, found {len(sources)}",
            path=sources[0].parent,
        )
    for i, path in enumerate(sources):
        store = open_quietly(path, None, "auto")
        if asked.parts is not None:
            fingerprints.append(fingerprint(store, most))
        counts.append(len(store))
        if asked.counts is not None and len(store) != asked.counts[i]:
            begin = sum(asked.counts[:i])
            raise FormatError(
                f"task {i}: expected examples {begin} to {begin + asked.counts[i] - 1} ({asked.counts[i]}), found {len(store)}; "
                f"remove this part and {asked.plan}/tasks/{i:05} and run the task again",
                path=path,
            )
        kind: dict[str, Any] = {
            "format": store.format,
            "layers": list(store.layers),
            "d_model": store.d_model,
            "dtype": str(store.dtype),
            "special tokens": store.special_tokens,
        }
        kind |= merger_of(store.format).kind(store.contents)
        if not asked.different_models:
            kind["model"] = store.contents.model
            kind["model revision"] = store.contents.provenance.get("revision")
        metadata.append(_metadata_of(store.contents))
        if first is None:
            first = kind
        for name, value in kind.items():
            if first.get(name) != value:
                remedy = _REMEDIES.get(name, "")
                entry, expected, differs = first_difference(name, first.get(name), value)
                raise FormatError(
                    f"expected {entry} {show(expected)} as in {sources[0].name}, found {show(differs)}{remedy}",
                    path=path,
                )
    format = str(first["format"])
    differences = metadata_differences([(path.name, each) for path, each in zip(sources, metadata, strict=True)])
    requests = [Request.read(path) for path in sources]
    if asked.parts is None:
        return format, _request_of_parts(requests), differences
    return format, asked.request_of(format, fingerprints, sum(counts), _digests_of(requests, counts)), differences


def _metadata_of(contents: Contents) -> dict[str, Any]:
    """The metadata of a dataset that do not describe its files."""
    carrying = formats.get(contents.format).carrying()
    metadata, _ = carrying.metadata_again(carrying.metadata_kept(contents), contents)
    return metadata
