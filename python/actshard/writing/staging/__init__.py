"""``actshard.stage``: a complete local copy of a remote dataset, or of some of its layers.

.. code-block:: text

    <folder>/.actshard-staged.json         source, revision, layers, and the source's files with sizes and ETags
    .<folder>.actshard-stage/lock          the process that downloads
                             plan.json     the source's files at the start of the download
                             new/          the copy so far: complete files only
                             parts/        files that are being downloaded
                             old/          the copy that is being replaced
                             plan-<id>/    tasks of a plan that stages to this folder (actshard.plan.staging)
    .<folder>.actshard-kept-<n>            a replaced copy with files of the user that could not be moved

A folder with its final name is complete: ``new`` is renamed at the end. When a copy is replaced, the user's files in it are moved
to the new copy.

- ``folder``: the description of a staged copy, the files of a source, copying them, and replacing one copy by another
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from actshard import formats
from actshard.base import _arguments
from actshard.base.errors import ArgumentError, NotAFileError, UnsupportedError, boundary
from actshard.base.layers import Layer, several
from actshard.base.location import Location
from actshard.base.logs import LOG
from actshard.base.work import STAGED, look, make_folder, refuse_within, remove, staging_folder
from actshard.reading.finding import find_any, of_tokens
from actshard.reading.opening import open_quietly
from actshard.writing.converting import Conversion, convert
from actshard.writing.staging.folder import (
    Listed,
    Marker,
    Staged,
    StageProgress,
    check_digests,
    check_space,
    check_target,
    check_versions,
    complete,
    copy,
    is_same,
    keep,
    link,
    list_files,
    origin_of,
    put,
    read_marker,
    received,
    recover,
    revision_of,
    size_of,
    target_of,
    turn,
    within,
    write_marker,
)

__all__ = ["MARKER", "Staged", "origin", "stage"]

MARKER = STAGED
"""File in a staged folder that records its source."""


def stage(
    url: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    layers: Sequence[Layer] | Layer | None = None,
    *,
    storage_options: Mapping[str, object] | None = None,
    check: bool = True,
    progress: StageProgress | None = None,
) -> Staged:
    """Copies a complete dataset of activations or tokens to a local folder.

    A second call lists the source's files, compares sizes and versions (ETags) with those of the copy, and downloads only changed
    files. Call it in every process of a node: one downloads, the others wait for it. The folder appears when it is complete. After
    a kill, the next call continues with the missing files. Your own files in the folder stay when the copy is replaced.

    Args:
        url: URL or path of the dataset, as for :func:`actshard.open`, or of a token cache. A web server cannot list files:
            use :func:`actshard.convert` there.
        folder: the folder to create; ``~`` and environment variables (``"$TMPDIR/run"``) are expanded. A saev dump keeps its name,
            which is a hash, in this folder.
        layers: names of layers. Only their rows are read, and the copy is a dataset of these layers in the same format. None copies
            all files as they are.
        storage_options: as for :func:`actshard.open`.
        check: False returns an existing complete copy without a request, even if it is outdated, as does ``HF_HUB_OFFLINE=1`` for
            the hub.
        progress: called with (what, bytes done, total bytes); for ``layers`` with (what, examples done, total examples).

    Returns:
        A :class:`Staged`; open its ``path``.

    Raises:
        ExistsError: the folder contains other files, or a copy of another source or of other layers; or one of your own files in
            it has the name of a file of the new copy; or a file of the copy was changed after it was staged.
        FormatError: a file was replaced while it was copied, or differs from its checksum in a token cache's ledger or on the hub.
        DiskFullError: there is not enough free space. No file was downloaded.
        UnsupportedError: the URL is on a web server; or ``layers`` is given for a format that actshard does not write.
        Errors of :func:`actshard.open`.
    """
    target = target_of(folder)
    chosen = _layers(layers)
    check = _arguments.switch(check, "check")
    source = Location.of_any(url, storage_options)
    if not source.lists:
        raise UnsupportedError("a web server cannot list files to stage. Use actshard.convert", path=source)
    if source.is_local:
        refuse_within(target, source.local)
    with boundary(target, "stage"):
        return _staged(source, lambda: Location.of_any(url, storage_options), target, chosen, check, progress)


def origin(path: Path) -> dict[str, object] | None:
    """Source, revision and layers of a staged dataset, from its folder or the one above; None for other datasets."""
    for folder in (path, path.parent):
        marker = read_marker(folder / MARKER)
        if marker is not None:
            return {"source": marker.source, "revision": marker.revision, "layers": marker.layers}
    return None


def _layers(layers: Layer | Sequence[Layer] | None) -> tuple[Layer, ...] | None:
    if layers is None:
        return None
    return several(layers)


def _staged(
    source: Location,
    reopen: Callable[[], Location],
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
    work = staging_folder(target)
    look(target).refuse("staging")
    listing = None
    if check and not offline:
        listing = list_files(source)
    if not work.exists() and (complete_copy := complete(source, target, layers, listing)) is not None:
        LOG.info("%s: already staged at %s", source, target)
        return complete_copy
    make_folder(target.parent)
    with turn(work) as waited:
        look(target).refuse("staging")  # a plan may have begun in the meantime
        recover(target, work / "new", work / "old")
        complete_copy = complete(source, target, layers, listing)
        if complete_copy is None and (waited or listing is None):
            # Another process may have staged a newer state than the listing of this one.
            source = reopen()
            listing = list_files(source)
            complete_copy = complete(source, target, layers, listing)
        LOG.info("%s: %s %s", source, "staging to" if complete_copy is None else "another process staged it to", target)
        if complete_copy is None:
            assert listing is not None
            check_target(source, target, layers)
            tell = progress or (lambda what, n, total: None)
            complete_copy = _download(source, listing, target, work, layers, tell, reopen)
        for name in ("new", "parts", "plan.json"):
            remove(work / name)
        return complete_copy


def _download(
    source: Location,
    listing: Listed,
    target: Path,
    work: Path,
    layers: tuple[Layer, ...] | None,
    tell: StageProgress,
    reopen: Callable[[], Location],
) -> Staged:
    location, name, marker = find_source(source, listing, layers)
    subfolder, entries = marker.inside, marker.listed
    old = read_marker(work / "plan.json")
    if old is None or not is_same(old, source, layers) or (old.below, old.inside) != (marker.below, subfolder):
        remove(work / "new")
        old = None
    remove(work / "parts")
    if layers is not None:
        return _convert(location, name, marker, old, target, work, tell)
    base = work / "new" / subfolder
    keep(base, entries, old)
    unchecked = link(base, entries, target, source)
    missing = {n: size for n, (size, _) in entries.items() if size_of(f"{base}/{n}") != size}
    LOG.info("%s: reading %d of %d files; the copy has the others", source, len(missing), len(entries))
    check_space(target, sum(missing.values()))
    write_marker(work / "plan.json", marker)
    copy(location, missing, base, work / "parts", tell)
    if str(source).startswith("hf://"):
        check_digests(base, {n: version for n, (_, version) in unchecked.items()})
    check_versions(reopen, base, marker.below, {n: entries[n] for n in missing})
    formats.get(name).check_copy(base, location, entries)
    files = {n: size for n, (size, _) in entries.items()}
    return put(marker, files, sum(missing.values()), target, work / "new", work / "old")


def find_source(source: Location, listing: Listed, layers: tuple[Layer, ...] | None) -> tuple[Location, str, Marker]:
    """Returns the location and format of the dataset at or below a source, and the marker for its copy.

    Raises:
        UnfinishedError: the dataset is being written.
        MissingFileError: it lists a file that is not there.
        ArgumentError, UnsupportedError: ``layers`` of a dataset whose layers cannot be copied.
        Errors of :func:`actshard.open`.
    """
    location, name = find_any(source)
    look(location).refuse(
        "uploading", "half copied"
    )  # a token cache's ledger is uploaded last, but an earlier one may exist
    subpath = location.relative_to(source)
    files = within(listing, subpath)
    if not files:
        raise NotAFileError("expected the folder of a dataset, found a file", path=location)
    if layers is not None and name == of_tokens():
        raise ArgumentError("layers: a token cache has no layers", path=location)
    if layers is not None and name not in formats.written():
        raise UnsupportedError(f"layers: actshard does not write {name}. Stage all layers, or convert", path=location)
    dataset_format = formats.get(name)
    dataset_format.check_listing(location, files)
    subfolder = location.name if dataset_format.writes and dataset_format.target().names_itself else ""
    marker = Marker(
        str(source), revision_of(source), None if layers is None else list(layers), subpath, subfolder, files, {}, []
    )
    return location, name, replace(marker, origin=origin_of(source))


def _convert(
    location: Location, name: str, marker: Marker, old: Marker | None, target: Path, work: Path, tell: StageProgress
) -> Staged:
    """Writes a dataset of some layers, in the same format."""
    new_copy, layers = work / "new", marker.layers
    if old is None or old.listed != marker.listed:
        remove(new_copy)
    before = received(location)
    store = open_quietly(location, name, "auto", "160MiB")
    for layer in layers or ():
        store.group_of(layer)
    counts = store.token_counts if store.contents.counts_are_cheap else None
    if counts is not None:
        check_space(target, int(counts.sum()) * len(layers or ()) * store.d_model * store.dtype.itemsize)
    write_marker(work / "plan.json", marker)
    conversion = convert(
        store,
        new_copy,
        name,
        layers=layers,
        resume=True,
        progress=lambda n, total, _: tell("examples", n, total),
        **formats.get(name).carrying().copy_options(location, marker.listed),
    )
    fetched = received(location) - before if location.is_remote else None
    return put_layers(marker, conversion, fetched, target, new_copy, work / "old")


def put_layers(
    marker: Marker, conversion: Conversion, fetched: int | None, target: Path, new_copy: Path, old_copy: Path
) -> Staged:
    """As :func:`put`, for a dataset of some layers converted into ``new_copy``. ``fetched=None``: the size of the result."""
    subfolder = conversion.path.relative_to(new_copy).as_posix()
    files = {f: size for f, (size, _) in list_files(Location.of(conversion.path)).items()}
    new_marker = replace(
        marker, inside="" if subfolder == "." else subfolder, losses=[str(loss) for loss in conversion.losses]
    )
    return put(new_marker, files, sum(files.values()) if fetched is None else fetched, target, new_copy, old_copy)
