"""Records the state of the files of a dataset, to detect later changes."""

from __future__ import annotations

import hashlib
import itertools
import json
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np

from actshard.base._schema import Amount, Rule, is_file_text
from actshard.base.errors import ActshardError, UnsupportedError
from actshard.base.location import Location
from actshard.base.request import RECORD

if TYPE_CHECKING:
    from pathlib import Path

    from actshard.formats.contents import Contents
    from actshard.streaming.readable import Readable

LOOKED_AT = 4096
"""Approximate maximum number of checked files: evenly spaced ones, and those in the dataset's folder."""
_ROWS_LOOKED_AT = 64
_LEAST_OF_A_PART = 16
_FOLDERS = 64
"""Maximum number of folders with rows that are searched for other files."""


class Input(NamedTuple):
    """The recorded state of a file. In JSON it is a list.

    Attributes:
        path: its path or URL.
        size: its bytes; None if it does not exist: a chunk of fill values, or a shard that was not downloaded.
        version: modification time in nanoseconds, or the ETag of a remote object.
    """

    path: Annotated[str, Rule("a path, or a URL", is_file_text)]
    size: Amount | None
    version: int | str | None

    @classmethod
    def at(cls, file: Location) -> Input:
        """A file as it is now."""
        stat = file.found()
        name = str(file)
        if stat is None:
            return cls(name, None, None)
        return cls(name, stat.size, stat.modified if file.is_local else stat.version)


def inputs_of(store: Readable) -> tuple[Input, ...] | None:
    """The recorded files of a store, about :data:`LOOKED_AT` at most; None if files cannot be listed."""
    files = _files(store)
    return None if files is None else tuple(map(Input.at, files))


def store_folders(store: Readable) -> list[Location]:
    """Folders, or single files, of the datasets of a store. The path of a joined store is the folder above them."""
    if parts := (store.contents.whole or store.contents).parts:
        return [folder for part in parts for folder in store_folders(part)]
    return [Location.at(folder) for folder in store.contents.folders] or [Location.at(store.path)]


def read_inputs(store: Readable, most: int = LOOKED_AT) -> tuple[Input, ...]:
    """The recorded files of rows and columns of a store, about ``most`` at most; none if files cannot be listed.

    Other files in the folders of a dataset, such as a log, may change while it is read.
    """
    return tuple(map(Input.at, _files(store, most, with_siblings=False) or ()))


def _files(store: Readable, most: int = LOOKED_AT, *, with_siblings: bool = True) -> list[Location] | None:
    """Files of a store, at most about ``most``, and ``with_siblings`` others in its folders; None if they cannot be listed."""
    if parts := (
        store.contents.whole or store.contents
    ).parts:  # a joined store's path is the folder above its parts, which may contain other files
        share = max(_LEAST_OF_A_PART, most // len(parts))
        file_lists = [_files(part, share, with_siblings=with_siblings) for part in parts]
        return (
            list(dict.fromkeys(itertools.chain.from_iterable(f or () for f in file_lists)))
            if None not in file_lists
            else None
        )
    root = Location.at(store.path)
    root.list_below()
    try:
        store_files = store.contents.files()
    except UnsupportedError:
        if root.lists:
            raise
        return None
    files = [Location.at(file) for file in store_files[:: max(1, -(-len(store_files) // most))]]
    column_paths = list(map(Location.at, store.contents.columns_in()))
    if not with_siblings:
        return list(dict.fromkeys([*files, *(path for path in column_paths if path.kind() == "file")]))
    folders = store_folders(store)
    parents = [*dict.fromkeys(f.parent for f in files)][:_FOLDERS]
    for folder in dict.fromkeys([*folders, *column_paths, *parents]):
        kind = folder.kind() if folder.lists else None
        if kind == "folder":
            files += [
                folder / name
                for name in _names(
                    folder, store_files, most, alone=folder not in folders and folder not in column_paths
                )
            ]
        elif kind == "file":
            files.append(folder)
    return list(dict.fromkeys(files))


def _names(folder: Location, store_files: Sequence[Path], most: int, *, alone: bool) -> list[str]:
    """Names of files in a folder. If there are many, only of files that are not in ``store_files``, such as metadata.

    The result is the same on every machine. ``alone``: the folder contains only files of ``store_files``, such as a million
    chunks. If it has many, it is not listed completely.
    """
    entries = folder.first(most + 1)
    if len(entries) <= most:
        return sorted(e.name for e in entries if e.kind == "file" and e.name != RECORD)
    if alone:
        return []
    known_names = {
        posixpath.basename(Location.at(file).key) for file in store_files if Location.at(file).parent == folder
    } | {RECORD}
    names = sorted(e.name for e in folder.entries() if e.kind == "file" and e.name not in known_names)
    return names[:: max(1, -(-len(names) // most))]


def newest(store: Readable) -> int:
    """Modification time of a store's newest file, in seconds since 1970; 0 if unknown."""
    times = [stat.modified for file in _files(store) or () if (stat := file.found()) is not None]
    return max((int(time) // 1_000_000_000 for time in times if time), default=0)


def changed(inputs: Iterable[Input], since: str = "the plan was made") -> tuple[Location, str] | None:
    """Returns the first file that changed since an event, and a description of the change; None if no file changed."""
    for old in inputs:
        file = Location.of_any(old.path) if "://" in old.path else Location.at(old.path)
        try:
            text = _difference(old, Input.at(file), since)
        except ActshardError as error:
            text = f"cannot be compared with its state when {since}: {error.detail}."
        if text is not None:
            return file, text
    return None


def changed_read(inputs: Iterable[Input], store: Readable, since: str) -> tuple[str, str] | None:
    """As :func:`changed`, for those of :func:`read_inputs`, with the path of the file. Uses the connections of an open store."""
    current = {file.path: file for file in read_inputs(store)}
    texts = ((old.path, _difference(old, current.get(old.path, Input(old.path, None, None)), since)) for old in inputs)
    return next(((path, text) for path, text in texts if text is not None), None)


def _difference(old: Input, current: Input, since: str) -> str | None:
    if (current.size, current.version) == (old.size, old.version):
        return None
    if current.size is None:
        return f"expected a file of {old.size:,} bytes, as when {since}, found nothing."
    if old.size is None:
        return f"expected no file, as when {since}, found one of {current.size:,} bytes."
    if current.size != old.size:
        return f"expected {old.size:,} bytes, as when {since}, found {current.size:,}."
    return f"was written again since {since}: {told_versions(old.version, current.version)}."


def told_versions(before: int | str | None, current: int | str | None) -> str:
    """Two versions of a file for a message: modification times in nanoseconds as ISO text, or ETags."""
    if not (isinstance(before, int) and isinstance(current, int)):
        return f"expected ETag {before}, found {current}"
    first, second = (
        datetime.fromtimestamp(time // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S") for time in (before, current)
    )
    if first == second:
        first, second = (f"{text}.{time % 10**9:09}" for text, time in ((first, before), (second, current)))
    return f"expected modification time {first}Z, found {second}Z"


def fingerprint(store: Readable, most: int = LOOKED_AT) -> str:
    """Returns a digest of names, sizes and modification times of a dataset's files. It detects another dataset at the same path.

    Of a store that was opened with ``layout=``, the digest includes it: it decides which values the files contain.
    Objects of a remote store have ETags instead of times. If files cannot be listed, some rows are read instead. ``most``:
    approximate maximum number of files that are looked at.
    """
    digest = hashlib.sha256(f"{store.num_examples}".encode())
    if store.contents.parts:  # a filtered part has the same files as the whole dataset
        digest.update(store.identity.encode())
    dataset = store.contents.whole or store.contents
    if dataset.layout is not None:
        digest.update(_description_of(dataset))
    files = _files(store, most)
    if files is None:
        return _fingerprint_of_rows(store)
    root = Location.at(store.path)
    for file in files:
        state = Input.at(file)
        if state.size is not None:
            line = f"{posixpath.relpath(file.key, root.key)}\0{state.size}\0{state.version}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _description_of(contents: Contents) -> bytes:
    layout = contents.layout
    text = json.dumps(layout, sort_keys=True, default=str) if isinstance(layout, Mapping) else str(layout)
    return text.encode("utf-8", "surrogateescape")


def _fingerprint_of_rows(store: Readable) -> str:
    """A digest of metadata, token counts, and a row of evenly spaced examples in the first and last layer."""
    about = [store.layers, store.d_model, str(store.dtype), store.num_examples, store.contents.metadata]
    text = json.dumps(about, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape"))
    counts = store.token_counts
    sample = np.unique(np.linspace(0, max(len(counts) - 1, 0), LOOKED_AT).astype(np.int64))[: len(counts)]
    digest.update(np.asarray(counts[sample], np.int64).tobytes())
    stored = sample[counts[sample] > 0]
    read = stored[:: max(1, -(-len(stored) // _ROWS_LOOKED_AT))]
    for layer in dict.fromkeys((store.layers[0], store.layers[-1])):
        digest.update(store.gather(layer, read, (counts[read] - 1) // 2).tobytes())
    return digest.hexdigest()[:32]
