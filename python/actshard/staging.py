"""``actshard.stage``: a complete local copy of a remote dataset, or of some of its layers.

.. code-block:: text

    <folder>/.actshard-staged.json         source, revision, layers, and the source's files with sizes and ETags
    .<folder>.actshard-stage/lock          the process that downloads
                             plan.json     the source's files, as the download began
                             new/          the copy so far: whole files only
                             parts/        files that are being downloaded
                             old/          the copy that is being replaced
    .<folder>.actshard-kept-<n>            a replaced copy with files of the user that could not be carried over

A folder under its final name is complete: ``new`` is renamed to it at the end. Files of the user in a copy that is replaced are
moved into the new one.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import os
import posixpath
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import actshard._native as _native
from actshard import _arguments, formats
from actshard.converting import convert
from actshard.errors import (
    ActshardError,
    ArgumentError,
    DiskFullError,
    ExistsError,
    FormatError,
    LockedError,
    MissingFileError,
    NotAFileError,
    UnfinishedError,
    UnsupportedError,
    boundary,
)
from actshard.finding import check_finished, find_any, of_tokens
from actshard.layers import Layer, listing, several
from actshard.location import Location
from actshard.logs import LOG
from actshard.opening import open_quietly
from actshard.storage import Remote
from actshard.work import PUSHING, Lock, make_folder, remove, sync_folders, sync_tree, write_json

MARKER = ".actshard-staged.json"
"""File in a staged folder that tells where it is from."""
_VERSION = 1
_PIECE = 64 << 20
"""Longest range of one copy: large files are downloaded in several ranges at once."""
_BATCH = 512 << 20
_FILES = 512
"""Bytes and files between two calls of ``progress``."""
_SLACK = 64 << 20
"""Free space that must remain on the disk."""
_DEEPEST = 32

Listed = dict[str, tuple[int, str]]
"""Maps names below a folder, joined by ``/``, to size and version (ETag)."""
StageProgress = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Staged:
    """Result of :func:`stage`.

    Attributes:
        path: the local dataset, for :func:`actshard.open`.
        source: URL or path of the source, without secrets.
        revision: the commit of a dataset of the hub; else None.
        layers: the staged layers; None: all.
        files: number of files of the copy.
        bytes: their total size.
        fetched: bytes that this call read from the source's files; 0 if the copy was complete.
        losses: properties of the source that a copy of some layers lacks.
    """

    path: Path
    source: str
    revision: str | None
    layers: tuple[Layer, ...] | None
    files: int
    bytes: int
    fetched: int
    losses: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"path": str(self.path)}


def stage(
    url: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    layers: Sequence[Layer] | Layer | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    check: bool = True,
    progress: StageProgress | None = None,
) -> Staged:
    """Copies a dataset of activations or tokens to a local folder, completely, once.

    A second call lists the source's files, compares sizes and versions (ETags) with those of the copy, and downloads what changed.
    Call it in every process of a node: one downloads, the others wait for it. The folder appears when it is complete; after a
    kill, the next call continues with the files that are missing. Files of your own in the folder stay when the copy is replaced.

    Args:
        url: URL or path of the dataset, as for :func:`actshard.open`, or of a token cache. A web server cannot list files:
            use :func:`actshard.convert` there.
        folder: the folder to create; ``~`` and environment variables (``"$TMPDIR/run"``) are expanded. A saev dump keeps its name,
            which is a hash, in this folder.
        layers: names of layers. Only their rows are read, and the copy is a dataset of these layers in the same format. None copies
            all files as they are.
        storage_options: as for :func:`actshard.open`.
        check: False returns a complete copy without a request, however old it is. So does ``HF_HUB_OFFLINE=1`` for the hub.
        progress: called with (what, bytes done, total bytes); for ``layers`` with (what, examples done, total examples).

    Returns:
        A :class:`Staged`; open its ``path``.

    Raises:
        ExistsError: the folder contains something else, or a copy of another source or of other layers; or the new copy has a file
            of the same name as one of your own in it; or a file of the copy was changed after it was staged.
        DiskFullError: there is not enough free space. Nothing was downloaded.
        UnsupportedError: a web server; or ``layers`` of a format that actshard does not write.
        Errors of :func:`actshard.open`.
    """
    target = _target(folder)
    chosen = _layers(layers)
    check = _arguments.switch(check, "check")
    source = Location.of_any(url, storage_options)
    if not source.lists:
        raise UnsupportedError("a web server cannot list files to stage. Use actshard.convert", path=source)
    with boundary(target, "stage"):
        return _staged(source, lambda: Location.of_any(url, storage_options), target, chosen, check, progress)


def origin(path: Path) -> dict[str, Any] | None:
    """Source, revision and layers of a staged dataset, from its folder or the one above; None for other datasets."""
    for folder in (path, path.parent):
        marker = _read_json(folder / MARKER)
        if marker is not None:
            return {"source": marker.source, "revision": marker.revision, "layers": marker.layers}
    return None


@dataclass(frozen=True)
class _Marker:
    """What a staged folder holds."""

    source: str
    revision: str | None
    layers: list[Layer] | None
    below: str
    """The dataset, relative to the source."""
    inside: str
    """The dataset, relative to the staged folder; empty: the folder."""
    listed: Listed
    files: dict[str, int]
    """Sizes of the copy's files."""
    losses: list[str]
    times: dict[str, int] = field(default_factory=dict)
    """Times of modification of the copy's files, in nanoseconds."""
    origin: str | None = None
    """A digest of the server, where URLs of two servers can be equal."""

    def result(self, target: Path, fetched: int = 0) -> Staged:
        """As returned to users."""
        layers = None if self.layers is None else tuple(self.layers)
        size = sum(self.files.values())
        path = target / self.inside if self.inside else target
        return Staged(path, self.source, self.revision, layers, len(self.files), size, fetched, tuple(self.losses))

    def is_whole(self, target: Path) -> bool:
        """Whether all files of the copy are there, with their sizes."""
        base = os.path.join(target, self.inside)  # noqa: PTH118 -- many files: Path would cost time
        return all(_size(f"{base}/{name}") == size for name, size in self.files.items())

    def is_as_staged(self, target: Path, name: str) -> bool:
        """Whether a file was not written since it was staged."""
        return _state(f"{target}/{self.inside}/{name}") == (self.files.get(name), self.times.get(name))

    def changed(self, target: Path) -> list[str]:
        """Files of the copy that were written since they were staged."""
        base = target / self.inside
        return [n for n in self.files if not self.is_as_staged(target, n) and os.path.lexists(base / n)]


def _read_json(path: Path) -> _Marker | None:
    """A marker or plan; None if there is none, or it is damaged."""
    try:
        made = json.loads(path.read_bytes())
        if made.pop("actshard") != _VERSION:
            return None
        made["listed"] = {name: (int(size), str(tag)) for name, (size, tag) in made["listed"].items()}
        made["files"] = {str(name): int(size) for name, size in made["files"].items()}
        made["losses"] = [str(loss) for loss in made["losses"]]
        made["times"] = {str(name): int(time) for name, time in made.get("times", {}).items()}
        if not all(isinstance(made[name], str) for name in ("source", "below", "inside")):
            return None
        return _Marker(**made)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 -- called for each of many files: Path would cost time
    except OSError:
        return -1


def _state(path: str) -> tuple[int | None, int | None]:
    try:
        found = os.stat(path)  # noqa: PTH116 -- called for each staged file: Path would cost time
    except OSError:
        return None, None
    return found.st_size, found.st_mtime_ns


def _target(folder: Any) -> Path:
    if isinstance(folder, str):
        folder = os.path.expandvars(folder)
        left = re.search(r"\$(?:\w+|\{[^}]*\})", folder)
        if left:
            raise ArgumentError(f"folder: expected a variable of the environment, found none named {left.group()}")
    path = _arguments.local_path(folder, "folder")
    if not path.name:
        raise ArgumentError("folder: expected a folder below /, found /")
    return Path(os.path.realpath(path.parent)) / path.name if not path.is_symlink() else path.resolve()


def _layers(layers: Any) -> tuple[Layer, ...] | None:
    if layers is None:
        return None
    return several(layers)


# -- the source -----------------------------------------------------------------------------------------------------------


def _list(source: Location) -> Listed:
    """All files below a location. Remote stores are listed once, in as few requests as they allow."""
    source.list_below()
    with boundary(source, "list"):
        if source.kind() == "file":
            raise NotAFileError("expected the folder of a dataset, found a file", path=source)
        found: Listed = {}
        if source.exists():
            _walk(source, "", found, 0)
    if not found:
        raise MissingFileError("expected a dataset, found nothing", path=source)
    return found


def _walk(folder: Location, above: str, found: Listed, depth: int) -> None:
    if depth > _DEEPEST:
        raise FormatError(f"expected at most {_DEEPEST} folders below each other", path=folder)
    for entry in folder.entries():
        if entry.name.startswith(".actshard"):  # working files of writers; markers of staged copies
            continue
        below, name = folder / entry.name, f"{above}{entry.name}"
        if entry.kind == "folder":
            _walk(below, f"{name}/", found, depth + 1)
        elif entry.kind == "file":
            state = below.stat()
            found[name] = (state.size, state.version)


def _within(listed: Listed, below: str) -> Listed:
    """The part of a listing below a folder."""
    if below == ".":
        return listed
    return {name[len(below) + 1 :]: entry for name, entry in listed.items() if name.startswith(f"{below}/")}


def _revision(source: Location) -> str | None:
    return source.storage.native.revision if isinstance(source.storage, Remote) else None


def _received(source: Location) -> int:
    return source.storage.native.counts()[1] if isinstance(source.storage, Remote) else 0


# -- turns ----------------------------------------------------------------------------------------------------------------


def _staged(
    source: Location,
    again: Callable[[], Location],
    target: Path,
    layers: tuple[Layer, ...] | None,
    check: bool,
    progress: StageProgress | None,
) -> Staged:
    offline = str(source).startswith("hf://") and os.environ.get("HF_HUB_OFFLINE", "").upper() in (
        "1",
        "ON",
        "YES",
        "TRUE",
    )
    work = target.with_name(f".{target.name}.actshard-stage")
    listed = None
    if check and not offline:
        listed = _list(source)
    if not work.exists() and (done := _complete(source, target, layers, listed)) is not None:
        LOG.info("%s: already staged at %s", source, target)
        return done
    make_folder(target.parent)
    with _turn(work) as waited:
        _recover(target, work)
        done = _complete(source, target, layers, listed)
        if done is None and (waited or listed is None):
            # Another process may have staged a newer state than the listing of this one.
            source = again()
            listed = _list(source)
            done = _complete(source, target, layers, listed)
        LOG.info("%s: %s %s", source, "staging to" if done is None else "another process staged it to", target)
        if done is None:
            assert listed is not None
            _check_target(source, target, layers)
            tell = progress or (lambda what, n, total: None)
            done = _download(source, listed, target, work, layers, tell, again)
        for name in ("new", "parts", "plan.json"):
            remove(work / name)
        return done


@contextlib.contextmanager
def _turn(work: Path) -> Iterator[bool]:
    """Holds the lock of a working folder; yields whether it had to wait. Removes the folder, unless it holds a part of a copy."""
    lock, waited, pause = Lock(work), False, 0.02
    while True:
        try:
            make_folder(work)
            lock.take()
            break
        except LockedError:
            waited = True
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        except MissingFileError:  # a process that finished removed the folder in between
            continue
    try:
        yield waited
    finally:
        with contextlib.suppress(OSError):
            if not (work / "new").exists():
                remove(work / "plan.json")
                remove(work / "parts")
                if [entry.name for entry in work.iterdir()] == [lock.path.name]:
                    lock.path.unlink()
        lock.release()
        with contextlib.suppress(OSError):
            work.rmdir()  # not if another process locks it again


def _recover(target: Path, work: Path) -> None:
    """Finishes or undoes a replacement that was interrupted between its two renames."""
    old, new = work / "old", work / "new"
    if old.exists() and not target.exists():
        (new if (new / MARKER).exists() else old).replace(target)
    _discard(old, target)


def _others(folder: Path) -> list[str]:
    """Files and links in a copy that were not staged, relative to it."""
    marker = _read_json(folder / MARKER)
    staged = {MARKER, *(posixpath.join(marker.inside, name) for name in marker.files)} if marker else set()
    found = []
    for at, folders, names in os.walk(folder, onerror=_refuse):
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]  # noqa: PTH114, PTH118 -- walk gives texts
        below = os.path.relpath(at, folder)
        found += [os.path.normpath(os.path.join(below, name)) for name in (*names, *links)]  # noqa: PTH118 -- walk gives texts
    return sorted(name for name in found if name not in staged)


def _refuse(error: OSError) -> None:
    raise error


def _discard(old: Path, target: Path) -> None:
    """Removes a copy that was replaced. Files of the user are moved to the new one; what cannot be moved is kept beside it."""
    if not os.path.lexists(old):
        return
    others = _others(old)
    if others and _read_json(old / MARKER) is not None:  # else a file of the old copy could be taken for the user's
        for name in others:
            place = target / name
            if not os.path.lexists(place):
                with contextlib.suppress(OSError):
                    make_folder(place.parent)
                    (old / name).rename(place)
        others = _others(old)
    if others:
        number = next(n for n in itertools.count(1) if not os.path.lexists(_kept(target, n)))
        old.rename(_kept(target, number))
    else:
        remove(old)


def _kept(target: Path, number: int) -> Path:
    return target.with_name(f".{target.name}.actshard-kept-{number}")


def _complete(source: Location, target: Path, layers: tuple[Layer, ...] | None, listed: Listed | None) -> Staged | None:
    """The copy in the folder, if it is whole, and equal to the listing; None: it is not compared."""
    marker = _read_json(target / MARKER)
    if marker is None or not _same(marker, source, layers) or not marker.is_whole(target):
        return None
    if listed is not None and (_within(listed, marker.below) != marker.listed or marker.changed(target)):
        return None
    return marker.result(target)


def _same(marker: _Marker, source: Location, layers: tuple[Layer, ...] | None) -> bool:
    origin = _origin(source)
    elsewhere = marker.origin is not None and origin is not None and marker.origin != origin
    named = marker.source == str(source) and marker.layers == (None if layers is None else list(layers))
    return named and not elsewhere


def _origin(source: Location) -> str | None:
    """A digest of endpoint and account. None if it is not known, and for the hub: there the commit identifies the files."""
    if not isinstance(source.storage, Remote) or str(source).startswith("hf://"):
        return None
    try:
        return source.storage.native.origin()
    except ActshardError:  # options that cannot be used: the first request explains it
        return None


def _check_target(source: Location, target: Path, layers: tuple[Layer, ...] | None) -> None:
    """Raises unless the folder is missing, empty, or an older copy."""
    if not os.path.lexists(target):
        return
    if os.path.ismount(target):  # it cannot be renamed
        raise ExistsError("is a mount point, which cannot be replaced. Choose a folder below it", path=target)
    if _is_working_folder(target):
        raise ExistsError(
            "is the working folder of this process, or above it, and would be replaced. Choose a folder below the working folder",
            path=target,
        )
    if not target.is_dir():
        raise ExistsError("expected a folder, or nothing, found a file. Choose another folder", path=target)
    marker = _read_json(target / MARKER)
    if marker is None:
        if any(target.iterdir()):
            raise ExistsError("contains files that were not staged. Choose another folder", path=target)
    elif not _same(marker, source, layers):
        what = "all layers" if marker.layers is None else f"layers {listing(marker.layers)}"
        if marker.origin is not None and marker.origin != _origin(source):
            what += " (from another server)"
        raise ExistsError(f"contains {what} of {marker.source}. Choose another folder, or remove this one", path=target)


def _is_working_folder(target: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(target.resolve())
    except OSError:  # it was removed
        return False


# -- the download ---------------------------------------------------------------------------------------------------------


def _download(
    source: Location,
    listed: Listed,
    target: Path,
    work: Path,
    layers: tuple[Layer, ...] | None,
    tell: StageProgress,
    again: Callable[[], Location],
) -> Staged:
    if not _holds_cache(listed):
        check_finished(source)
    place, name = find_any(source)
    if (place / PUSHING).exists():  # a token cache's ledger is uploaded last, but may be there from before
        raise UnfinishedError(
            "is being uploaded, or its upload was interrupted: the same actshard.push completes it", path=place
        )
    below = place.relative_to(source)
    wanted = _within(listed, below)
    if not wanted:
        raise NotAFileError("expected the folder of a dataset, found a file", path=place)
    known = formats.get(name)
    inside = place.name if known.writes and known.target().names_itself else ""
    marker = _Marker(
        str(source), _revision(source), None if layers is None else list(layers), below, inside, wanted, {}, []
    )
    marker = replace(marker, origin=_origin(source))
    old = _read_json(work / "plan.json")
    if old is None or not _same(old, source, layers) or (old.below, old.inside) != (below, inside):
        remove(work / "new")
        old = None
    remove(work / "parts")
    if layers is not None:
        return _convert(place, name, marker, old, target, work, tell)
    base = work / "new" / inside
    _keep(base, wanted, old)
    _link(base, wanted, target, source)
    missing = {n: size for n, (size, _) in wanted.items() if _size(f"{base}/{n}") != size}
    LOG.info("%s: %d of %d files are read, the others are there", source, len(missing), len(wanted))
    _check_space(target, sum(missing.values()))
    _write(work / "plan.json", marker)
    _copy(place, missing, base, work / "parts", tell)
    if str(source).startswith("hf://"):
        _check_digests(base, {n: wanted[n][1] for n in missing})
    _check_versions(again, base, below, {n: wanted[n] for n in missing})
    files = {n: size for n, (size, _) in wanted.items()}
    return _put(marker, files, sum(missing.values()), target, work)


def _holds_cache(listed: Listed) -> bool:
    return any(name.rpartition("/")[2] == "shard_ledger.json" for name in listed)


def _write(path: Path, marker: _Marker) -> None:
    write_json(
        path, {"actshard": _VERSION, **{n: getattr(marker, n) for n in marker.__dataclass_fields__}}, indent=None
    )


def _keep(base: Path, wanted: Listed, plan: _Marker | None) -> None:
    """Removes from an interrupted copy all files that the source does not have in the same version."""
    if plan is None:
        remove(base)
    for folder, _, names in os.walk(base):
        for name in names:
            path = Path(folder) / name
            known = path.relative_to(base).as_posix()
            if plan is None or known not in wanted or plan.listed.get(known) != wanted[known]:
                remove(path)


def _link(base: Path, wanted: Listed, target: Path, source: Location) -> None:
    """Links unchanged files of the copy that is replaced. Files are replaced, never changed, so both may be open."""
    marker = _read_json(target / MARKER)
    if marker is None or not _same(marker, source, None):
        return
    for name, (size, version) in wanted.items():
        near, far = f"{target}/{marker.inside}/{name}", base / name
        if marker.listed.get(name) == (size, version) and marker.is_as_staged(target, name) and not far.exists():
            make_folder(far.parent)
            with contextlib.suppress(OSError):
                os.link(near, far)


def _check_space(target: Path, wanted: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if wanted and wanted + min(_SLACK, wanted) > free:
        raise DiskFullError(
            f"needs {wanted:,} bytes, {free:,} are free on this disk. Choose another folder", path=target
        )


def _copy(place: Location, missing: Mapping[str, int], base: Path, parts: Path, tell: StageProgress) -> None:
    """Downloads files, each under a temporary name until it is whole."""
    total, done = sum(missing.values()), 0
    folders = {base, *((base / name).parent for name in missing)}
    for folder in sorted(folders):
        folder.mkdir(parents=True, exist_ok=True)
    parts.mkdir(parents=True, exist_ok=True)
    tell("bytes", 0, total)
    for batch in _batches(missing, parts):
        ranges: Any = [(place / name, part, at, length) for name, part, at, length, _ in batch]
        _native.copy_ranges(ranges)
        # A file has its name only when it is on the disk: a later call trusts its size.
        _native.sync_files(list(dict.fromkeys(part for _, part, *_ in batch)))
        for name, part, _, length, last in batch:
            done += length
            if last:
                part.replace(base / name)
        tell("bytes", done, total)


_Range = tuple[str, Path, int, int, bool]
"""Name, temporary file, offset, length, and whether it is the file's last."""


def _batches(missing: Mapping[str, int], parts: Path) -> Iterator[list[_Range]]:
    batch: list[_Range] = []
    size = 0
    for number, (name, whole) in enumerate(missing.items()):
        for at in range(0, max(whole, 1), _PIECE):
            length = min(_PIECE, whole - at)
            batch.append((name, parts / str(number), at, length, at + length == whole))
            size += length
            if size >= _BATCH or len(batch) >= _FILES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _check_versions(again: Callable[[], Location], base: Path, below: str, copied: Listed) -> None:
    """Compares files with a new listing where reading does not notice a replacement: local ones, and empty ones."""
    source = again()
    if str(source).startswith("hf://"):  # of one commit
        return
    asked = {n: entry for n, entry in copied.items() if source.is_local or entry[0] == 0}
    if not asked:
        return
    found = _within(_list(source), below)
    wrong = [name for name, entry in asked.items() if found.get(name) != entry]
    for name in wrong:
        remove(base / name)
    if wrong:
        raise FormatError("was replaced while it was staged. Stage again", path=source / below / wrong[0])


def _check_digests(base: Path, tags: Mapping[str, str]) -> None:
    """Compares files of the hub with their SHA-256, where it is their tag (large files)."""
    for name, tag in tags.items():
        digest = re.search(r"\b[0-9a-f]{64}\b", tag)
        if digest and _native.digest_file(base / name)[1] != digest.group():
            remove(base / name)
            raise FormatError(
                f"expected SHA-256 {digest.group()}, found another. Stage again", path=base / name, code="checksum"
            )


def _convert(
    place: Location, name: str, marker: _Marker, old: _Marker | None, target: Path, work: Path, tell: StageProgress
) -> Staged:
    """Writes a dataset of some layers, in the same format."""
    if name == of_tokens():
        raise ArgumentError("layers: a token cache has no layers", path=place)
    if name not in formats.written():
        raise UnsupportedError(f"layers: actshard does not write {name}. Stage all layers, or convert", path=place)
    new, layers = work / "new", marker.layers
    if old is None or old.listed != marker.listed:
        remove(new)
    before = _received(place)
    store = open_quietly(place, name, "auto", "160MiB")
    for layer in layers or ():
        store.group_of(layer)
    counts = store.token_counts if store.contents.counts_are_cheap else None
    if counts is not None:
        _check_space(target, int(counts.sum()) * len(layers or ()) * store.d_model * store.dtype.itemsize)
    _write(work / "plan.json", marker)
    done = convert(
        store, new, name, layers=layers, resume=True, progress=lambda n, total, _: tell("examples", n, total)
    )
    fetched = _received(place) - before
    inside = done.path.relative_to(new).as_posix()
    inside = "" if inside == "." else inside
    files = {f: size for f, (size, _) in _list(Location.of(done.path)).items()}
    made = replace(marker, inside=inside, losses=[str(loss) for loss in done.losses])
    return _put(made, files, sum(files.values()) if place.is_local else fetched, target, work)


def _check_others(new: Path, target: Path) -> None:
    """Raises if files of the user in the folder could not be carried over into the new copy."""
    others, marker = _others(target), _read_json(target / MARKER)
    if others and marker is None:
        raise ExistsError("contains files that were not staged. Choose another folder", path=target)
    edited = (
        [] if marker is None else [name for name in marker.changed(target) if not _are_equal(marker, name, new, target)]
    )
    if edited:
        listed = ", ".join(edited[:20]) + (f" and {len(edited) - 20} more" if len(edited) > 20 else "")
        raise ExistsError(
            f"contains files that were changed after they were staged: {listed}. Move them away to have them staged again, or "
            "choose another folder",
            path=target,
        )
    taken = [name for name in others if any(_is_taken(new, name, above) for above in (name, *_above(name)))]
    if taken:
        listed = ", ".join(taken[:20]) + (f" and {len(taken) - 20} more" if len(taken) > 20 else "")
        raise ExistsError(
            f"contains files of yours whose names the new copy needs: {listed}. Move them, or choose another folder",
            path=target,
        )


def _are_equal(marker: _Marker, name: str, new: Path, target: Path) -> bool:
    near, far = target / marker.inside / name, new / marker.inside / name
    return near.is_file() and far.is_file() and filecmp.cmp(near, far, shallow=False)


def _is_taken(new: Path, name: str, above: str) -> bool:
    """Whether the new copy has a name, or a file where that of a user needs a folder."""
    return (
        os.path.lexists(new / above) if name == above else os.path.lexists(new / above) and not (new / above).is_dir()
    )


def _above(name: str) -> list[str]:
    return [str(above) for above in PurePosixPath(name).parents][:-1]


def _put(marker: _Marker, files: dict[str, int], fetched: int, target: Path, work: Path) -> Staged:
    """Gives the copy its name, in place of an older one."""
    new, old = work / "new", work / "old"
    times = {name: _state(f"{new}/{marker.inside}/{name}")[1] or 0 for name in files}
    made = replace(marker, files=files, times=times)
    if not made.is_whole(new):
        raise FormatError("expected a complete copy, found files that are missing. Stage again", path=target)
    _write(new / MARKER, made)
    sync_tree(new)
    if target.exists():
        _check_others(new, target)
        target.replace(old)
    new.replace(target)
    _discard(old, target)
    sync_folders([target.parent])
    return made.result(target, fetched)
