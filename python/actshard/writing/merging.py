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
from actshard import formats
from actshard.base import _arguments
from actshard.base._json import Fields, read_json, show
from actshard.base._schema import MismatchError, read_value
from actshard.base.errors import (
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
from actshard.base.location import Location
from actshard.base.request import RECORD, Digests, Request, joined_digests
from actshard.base.work import (
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
from actshard.formats.carrying import first_difference, metadata_differences
from actshard.formats.merging import Merge, Merger
from actshard.formats.target import refuse_existing, refuse_in_the_way
from actshard.reading.finding import beside_parts, check_opens, existing, find
from actshard.reading.inputs import LOOKED_AT, Input, changed, fingerprint, read_inputs
from actshard.reading.opening import open_quietly

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
    request = MergeRequest.of(parts, physical, different_models)
    if _arguments.switch(resume, "resume"):
        request = replace(request, resume=True)
    with boundary(root, "merge"):
        return run_merge(root, request)


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
    def of(cls, parts: object, physical: bool, different_models: bool) -> MergeRequest:
        """Checks the arguments of :func:`merge`."""
        physical = _arguments.switch(physical, "physical")
        different_models = _arguments.switch(different_models, "different_models")
        if parts is None:
            return cls(None, physical, different_models)
        if isinstance(parts, str | bytes | os.PathLike | Set) or not isinstance(parts, Iterable):
            raise ArgumentTypeError(f"parts: expected a list of paths in order, found {type(parts).__name__}")
        return cls(tuple(_arguments.local_path(p, "parts") for p in parts), physical, different_models)

    def record_of(self, format: str, sources: Sequence[str], examples: int, digests: Digests | None) -> Request:
        """The request of a merge of datasets whose files have the digests ``sources``. ``digests``: of their rows."""
        arguments = {"format": format, "physical": self.physical, "different_models": self.different_models}
        return Request.of("merge", arguments, sources).finished(examples, None, digests)

    def as_dict(self) -> dict[str, Any]:
        """Returns the arguments that the marker of an unfinished merge records."""
        return {"parts": None if self.parts is None else [str(p) for p in self.parts], "physical": self.physical}


def _record_of_parts(parts: Sequence[Request | None]) -> Request | None:
    """The request of a dataset from those of its parts, as if one writer had created it; None if they record none in common."""
    records = [part for part in parts if part is not None]
    counts = [part.examples for part in records if part.examples is not None]
    if len(counts) < len(parts):
        return None
    dataset_records = [part.without_part(sum(counts)) for part in records]
    digests = _digests_of(records, counts)
    return (
        replace(dataset_records[0], digests=digests)
        if all(record == dataset_records[0] for record in dataset_records)
        else None
    )


def _digests_of(parts: Sequence[Request | None], counts: Sequence[int]) -> Digests | None:
    """Digests of the rows of all parts, one after the other; None if a part records none for its number of examples."""
    shifted: list[Digests | None] = []
    for part, count, first in zip(parts, counts, itertools.accumulate(counts, initial=0), strict=False):
        digests = None if part is None or part.examples != count else part.digests
        shifted.append(None if digests is None else tuple(digest.after(first) for digest in digests))
    return joined_digests(shifted)


def run_merge(root: Path, request: MergeRequest) -> Path:
    """Merges, or finishes a merge that was interrupted; see :func:`merge`."""
    marker = root / FOLDER / _MARKER
    look(root).refuse("planned", "planned dumps", "staging", own_plan=request.plan)
    if not marker.exists() and request.parts is None and not (root / PARTS).is_dir():
        return _existing_dataset(root, request.physical)
    if request.resume and not marker.exists() and (dataset_path := _finished_before(root, request)) is not None:
        return dataset_path
    lock = locked(root / FOLDER)
    try:
        if not marker.exists():
            if (
                request.parts is None and not (root / PARTS).is_dir()
            ):  # another process merged them before we had the lock
                _leave(root)
                return _existing_dataset(root, request.physical)
            try:
                look(root).refuse("writing", is_locked=True)
                _begin(root, request, marker)
            except BaseException:
                if not marker.exists():
                    _leave(root)
                raise
        plan, fields = _read_marker(root, request, marker)
        try:
            with recorded_files() as files:
                dataset_path = root / fields["place"] if fields.get("finished") else merger_of(plan.format).run(plan)
        except ActshardError as error:
            # A full disk or a failed read may succeed later; other errors would occur again.
            if not plan.move and not isinstance(
                error, DiskFullError | FileAccessError | InterruptedReadError | NoMemoryError
            ):
                targets = [root / name for name in fields.get("targets") or ()]
                for target in targets:
                    remove(target)
                remove_files(root, [*targets, *files])
                _leave(root)
            raise
        if not fields.get("finished"):
            sync_folders([dataset_path.parent])
            if plan.request is None:  # an older dataset's record
                (dataset_path / RECORD).unlink(missing_ok=True)
            else:
                keep_request(dataset_path, plan.request, formats.get(plan.format).checked_files)
            write_json(marker, {**fields, "finished": True, "place": os.path.relpath(dataset_path, root)})
        if plan.move:
            _remove_parts(root, frozenset(fields["own"]))
        _remove_work(root)
        check_opens(dataset_path, plan.format)
    finally:
        lock.release()
    _native.sync_files([root])
    return dataset_path


def _remove_parts(root: Path, own_names: Set[str]) -> None:
    """Removes the parts' folder.

    It is renamed first, because a dataset with remaining parts would look unfinished. Files that the writers did not make are kept
    in a folder of the dataset. ``own_names``: names of the others, see :func:`_own_files`.
    """
    gone = root / FOLDER / _GONE
    _empty(root, gone, own_names)  # left by a merge that was interrupted at this step
    if (root / PARTS).is_dir():
        rename(root / PARTS, gone)
        _native.sync_files([root])
        _empty(root, gone, own_names)


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
        record = Request.read(part)
        names = (record.checksums if record else None) or ()
        files += [part / name for name in (RECORD, *filter(is_below, names))]
    files += [entry for entry in (root / PARTS).iterdir() if PART.fullmatch(entry.name) and entry.is_symlink()]
    return sorted({file.relative_to(root / PARTS).as_posix() for file in files})


def _empty(root: Path, gone: Path, own_names: Set[str]) -> None:
    """Removes a folder of merged parts. Other programs' files in it move to a visible folder."""
    has_others = False
    if gone.is_symlink():  # to a folder elsewhere, whose files are kept
        gone.unlink()
    for path, folders, names in os.walk(gone, topdown=False):
        folder = Path(path)
        relative = folder.relative_to(gone)
        # Writers create files only inside the parts' folders.
        is_part = bool(relative.parts) and PART.fullmatch(relative.parts[0]) is not None
        is_own = (is_part and FOLDER in relative.parts) or any(
            str(ancestor) in own_names for ancestor in (relative, *relative.parents)
        )
        for file in [folder / n for n in names] + [link for n in folders if (link := folder / n).is_symlink()]:
            name = file.relative_to(gone).as_posix()
            if is_own or name in own_names or (is_part and len(relative.parts) == 1 and file.name in (EMPTY, RECORD)):
                with contextlib.suppress(
                    OSError
                ):  # removed later with the working folder, which stays if that fails too
                    file.unlink()
            else:
                has_others = True
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    if has_others:
        names_left = (f"{_LEFT}-{i}" if i > 1 else _LEFT for i in itertools.count(1))
        rename(gone, next(root / name for name in names_left if not os.path.lexists(root / name)))
        _native.sync_files([root])


def _leave(root: Path) -> None:
    """As :func:`_remove_work`, of a merge that raises another error."""
    with contextlib.suppress(ActshardError):
        _remove_work(root)


def _remove_work(root: Path) -> None:
    """Removes the merge's files from the working folder, and the folder and the dataset's if they are empty.

    Other files there belong to plans and writers.

    Raises:
        FileAccessError: a file cannot be removed. The marker, which is removed last, stays: the dataset would not open as finished,
            and the next call continues from it.
    """
    folder = root / FOLDER
    with boundary(folder, "remove"):
        gone = folder / _GONE
        if gone.is_dir():
            shutil.rmtree(gone)
        (folder / LOCK).unlink(missing_ok=True)
        (folder / _MARKER).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()
        root.rmdir()


def _existing_dataset(root: Path, physical: bool) -> Path:
    """Returns the path of a dataset that was merged before."""
    if not root.exists():
        raise MissingFileError("expected parts of a dataset, found nothing", path=root)
    look(root).refuse("writing")
    dataset_path, format = _find_dataset(root)
    if physical:
        merger = merger_of(format)
        if merger.physical is None:
            raise ArgumentError(_not_physical(format), path=dataset_path)
        if merger.several(dataset_path):
            raise ArgumentError(
                "physical: this dataset is merged already, as a run of several stores. Merge it into a new folder "
                "(parts=[this path], physical=True), or, if chunks differ, write it as one store with actshard convert.",
                path=dataset_path,
            )
    tidy(dataset_path)
    return dataset_path


def _find_dataset(folder: Path) -> tuple[Path, str]:
    """Path and format of the dataset at or below a folder."""
    location, format = find(Location.at(folder))
    return location.local, format


def merger_of(format: str) -> Merger:
    """The format's :class:`Merger`."""
    merger = formats.get(format).merger()
    if merger is None:
        raise UnsupportedError(f"{format} datasets cannot be merged; convert them to another format first")
    return merger


def _not_physical(format: str) -> str:
    mergers = [formats.get(name).merger() for name in formats.names()]
    supported_kinds = " and ".join(
        merger.physical for merger in mergers if merger is not None and merger.physical is not None
    )
    return f"physical: supported for {supported_kinds} only; a merged {format} dataset is always one dataset"


def _read_marker(root: Path, request: MergeRequest, marker: Path) -> tuple[Merge, dict[str, Any]]:
    """Returns the merge recorded in the marker. Raises ArgumentError if the call asks for another merge."""
    fields = Fields(read_json(marker), marker)
    format = fields.text("format")
    names = fields.value.get("parts")
    move, physical = fields.boolean("move"), fields.boolean("physical")
    if format not in formats.names():
        raise fields.error("format", f"one of {', '.join(formats.names())}")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n and "\0" not in n for n in names):
        raise fields.error("parts", "a list of paths")
    if fields.value.get("finished"):
        dataset_path = Path(os.path.normpath(root / fields.text("place")))
        if dataset_path not in (root, root / dataset_path.name):
            raise fields.error("place", "the dataset's folder")
        fields.value["place"] = str(dataset_path)
    if fields.value.get("asked") != request.as_dict():
        subject = (
            "the parts that were written here" if move else ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        )
        remedy = "repeat the same call to finish it" + ("" if move else ", or choose another folder")
        raise ArgumentError(
            f"a merge of {subject}{' with physical=True' if physical else ''} was begun here and is not finished, and this call is "
            f"for another merge: {remedy}",
            path=root,
        )
    for field_name in ("targets", "own"):
        paths = fields.value.get(field_name)
        if not isinstance(paths, list) or not all(isinstance(name, str) and is_below(name) for name in paths):
            raise fields.error(field_name, "paths below the dataset's folder")
    record = None if fields.value.get("request") is None else Request.from_dict(fields.value["request"], marker)
    try:
        inputs = read_value(tuple[Input, ...], fields.value.get("inputs"))
    except MismatchError as error:
        raise fields.error("inputs", "files with their sizes and times") from error
    if not fields.value.get("finished") and (difference := changed(inputs, "this merge was begun")) is not None:
        raise ArgumentError(f"{difference[1]} Merge the parts into another folder", path=difference[0])
    parts = tuple(root / name for name in names)
    return Merge(root, format, parts, move, {"physical": physical}, request.copies, record), fields.value


def _begin(root: Path, request: MergeRequest, marker: Path) -> None:
    """Checks a merge and writes its marker. From then on the merge must be finished."""
    plan = check_merge(root, request)
    # Relative paths for its own parts: the dataset may be moved between two calls.
    names = [os.path.relpath(s, root) if plan.move else str(s) for s in plan.parts]
    merger = merger_of(plan.format)
    targets = [target for _, target in merger.taken(plan)] + [root / file.name for file in merger.assembled(plan)]
    written = {
        "parts": names,
        "format": plan.format,
        "move": plan.move,
        "physical": request.physical,
        "targets": [] if plan.move else [target.relative_to(root).as_posix() for target in targets],
        "own": _own_files(root, plan) if plan.move else [],
        "inputs": [] if plan.move else _inputs(plan.parts),
    }
    record = None if plan.request is None else plan.request.as_dict()
    write_json(marker, {**written, "asked": request.as_dict(), "request": record})
    _native.sync_files([marker.parent, root])


def _finished_before(root: Path, request: MergeRequest) -> Path | None:
    """The dataset that the same call merged before; None if there is no dataset with a record. Raises ExistsError for another."""
    if request.parts is None or not root.exists():
        return None
    try:
        dataset_path = _find_dataset(root)[0]
    except (UnknownFormatError, UnfinishedError):  # nothing finished: what else lies here is checked under the lock
        return None
    record = Request.read(dataset_path)
    if record is None:
        return None
    format, expected_record, _ = _check_alike(_datasets(request.parts), request)
    assert expected_record is not None
    store = open_quietly(dataset_path, None, "auto")
    why = expected_record.difference(record) or (
        "its parts were others, or have changed" if expected_record != record else None
    )
    if why is None and (store.format, len(store)) != (format, expected_record.examples):
        why = f"expected {expected_record.examples} examples of {format}, found {len(store)} of {store.format}"
    if why is None:
        return dataset_path
    raise ExistsError(
        f"contains another {format} dataset than this merge writes: {why}. Choose another folder", path=dataset_path
    )


def _datasets(parts: Sequence[Path]) -> list[Path]:
    return [find(existing(path))[0].local for path in parts]


def check_merge(root: Path, request: MergeRequest) -> Merge:
    """Checks a merge that has not begun. Writes nothing."""
    look(root).refuse("writing")
    if request.parts is None:
        sources = _own_parts(root)
    else:
        if not request.parts:
            raise ArgumentError("parts: expected at least one dataset")
        sources = _datasets(request.parts)
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
            existing_format = _find_dataset(root)[1]
            raise ExistsError(
                f"expected no folder or an empty one, found a finished {existing_format} dataset. Pass resume=True "
                "(--resume) if these parts were merged into it, or choose another folder",
                path=root,
            )
        refuse_existing(root)
    format, record, differences = _check_alike(sources, request)
    merger = merger_of(format)
    if request.physical and merger.physical is None:
        raise ArgumentError(_not_physical(format))
    sources = [dataset for source in sources for dataset in merger.datasets(source)]
    places: dict[str, Path] = {}
    for source in sources:  # also a run and one of its stores, or a link to either
        if (earlier_source := places.setdefault(os.path.realpath(source), source)) is not source:
            raise ArgumentError(f"parts: the list contains a dataset twice: {earlier_source} and {source}")
    if request.parts is None and not merger.names_itself:
        refuse_in_the_way(root, merger.makes)
    move = request.parts is None
    plan = Merge(root, format, tuple(sources), move, {"physical": request.physical}, request=record)
    merger.check(plan)
    if differences and (request.physical or merger.physical is None):  # stores of a run keep their own metadata
        warn(f"the parts' metadata differ: {'; '.join(differences)}", code="metadata-dropped")
    return plan


def _own_parts(root: Path) -> list[Path]:
    """The parts written below ``root`` in the order of their numbers, without empty ones. All must be finished."""
    folders: dict[int, Path] = {}
    counts: set[int] = set()
    for folder in sorted((root / PARTS).iterdir()):
        numbered = PART.fullmatch(folder.name)
        if numbered is not None and any(files_below(folder)):  # a writer that was killed at once leaves empty folders
            folders[int(numbered[1])] = folder
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
    missing = [i for i in range(total) if i not in folders]
    datasets, unfinished, empty = [], [], []
    for i, folder in sorted(folders.items()):
        if (folder / EMPTY).is_file():
            empty.append(i)
            continue
        dataset_folders = [folder, *(p for p in folder.glob(".writing-*") if p.is_dir())]
        if any(look(part).journal is not None for part in dataset_folders):
            unfinished.append(i)
            continue
        datasets.append(_find_dataset(folder)[0])
    if missing or unfinished:
        problems = [
            f"part {', '.join(map(str, part_numbers))} {what}"
            for part_numbers, what in ((missing, "missing"), (unfinished, "unfinished"))
            if part_numbers
        ]
        raise UnfinishedError(
            f"expected {total} finished parts, {' and '.join(problems)}{beside_parts(Location.at(root))}",
            path=root / PARTS,
        )
    if not datasets:
        raise UnfinishedError(f"expected examples in at least one of {total} parts, found none", path=root / PARTS)
    return datasets


def _check_alike(sources: Sequence[Path], request: MergeRequest) -> tuple[str, Request | None, list[str]]:
    """Returns the common format, the request, and texts about other metadata in which parts differ.

    Raises:
        FormatError: layers, d_model, dtype, model, ... differ.
    """
    first: Any = None
    metadata: list[dict[str, object]] = []
    fingerprints: list[str] = []
    counts: list[int] = []
    most = max(_LEAST_FILES, LOOKED_AT // max(len(sources), 1))
    if request.counts is not None and len(sources) != len(request.counts):
        raise FormatError(
            f"expected {len(request.counts)} parts with examples, one of each task, found {len(sources)}",
            path=sources[0].parent,
        )
    for i, path in enumerate(sources):
        store = open_quietly(path, None, "auto")
        if store.contents.unextended is not None:
            raise UnsupportedError(
                "has columns that were added to it later (store.extend_columns), which a merge would not keep. Convert the parts "
                "instead: actshard.convert(actshard.concat([...]), ...)",
                path=path,
            )
        if request.parts is not None:
            fingerprints.append(fingerprint(store, most))
        counts.append(len(store))
        if request.counts is not None and len(store) != request.counts[i]:
            begin = sum(request.counts[:i])
            raise FormatError(
                f"task {i}: expected examples {begin} to {begin + request.counts[i] - 1} ({request.counts[i]}), found "
                f"{len(store)}; remove this part and {request.plan}/tasks/{i:05} and run the task again",
                path=path,
            )
        kind: dict[str, object] = {
            "format": store.format,
            "layers": list(store.layers),
            "d_model": store.d_model,
            "dtype": str(store.dtype),
            "special tokens": store.special_tokens,
        }
        kind |= merger_of(store.format).kind(store.contents)
        if not request.different_models:
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
    differences = metadata_differences(
        [(path.name, part_metadata) for path, part_metadata in zip(sources, metadata, strict=True)]
    )
    records = [Request.read(path) for path in sources]
    if request.parts is None:
        return format, _record_of_parts(records), differences
    return format, request.record_of(format, fingerprints, sum(counts), _digests_of(records, counts)), differences


def _metadata_of(contents: Contents) -> dict[str, object]:
    """The metadata of a dataset that do not describe its files."""
    carrying = formats.get(contents.format).carrying()
    metadata, _ = carrying.metadata_again(carrying.metadata_kept(contents), contents)
    return metadata
