"""``actshard.merge``: parts that many processes wrote, or datasets of one kind, become one dataset.

Files are renamed (parts of ours) or linked (datasets that stay); bytes are copied only where they must be: into saev's equal
shards, and across file systems. Every step can be done again, and sources go last: a merge that was killed is run again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import actshard._native as _native
from actshard import _arguments, formats
from actshard._json import Fields, read_json, show
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
    UnsupportedError,
    boundary,
)
from actshard.finding import beside_parts, existing, find
from actshard.formats.merging import Merge, Merger
from actshard.formats.target import refuse_existing, refuse_in_the_way
from actshard.location import Location
from actshard.opening import open_quietly
from actshard.work import (
    EMPTY,
    FOLDER,
    MERGING,
    PART,
    PARTS,
    locked,
    remove_made,
    rename,
    tidy,
    unfinished,
    write_json,
)

_MARKER = MERGING
_LEFT = "left-in-parts"
"""Where files of others that were in parts' folders are kept after a merge."""


def merge(
    path: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]] | None = None,
    *,
    physical: bool = False,
    different_models: bool = False,
) -> Path:
    """Makes one dataset of parts.

    Everything that can be refused is refused before a file is moved, linked or written; what is refused leaves nothing behind. A
    merge that was killed, or stopped by a full disk, is finished by the same call; another call is refused until then.

    Args:
        path: the dataset: where :func:`actshard.create` was called with ``part=``, or a new folder for ``parts``.
        parts: datasets of one format to put together, in this order; they stay as they are (files are linked where they can be).
            None: the parts that were written below ``path``, in the order of their numbers; they become the dataset.
        physical: Zarr stores become one store, not a run of several with a manifest.
        different_models: join datasets of different models too; the result keeps the first one's name.

    Files of others beside the parts, such as a README or logs, stay where they are; those among the parts are kept in
    ``path/left-in-parts``.

    Returns:
        Path of the merged dataset (for saev ``path/<HASH>``). If parts that were written below ``path`` are merged
        already, returns the same path; with ``parts`` a second call is refused once the first is done, as nothing tells whether
        the dataset that is there was made of them.

    Raises:
        UnfinishedError: a part is missing, or is not finished; the message lists them.
        FormatError: parts that are not of one kind, or two of which have the same sample numbers.
        ExistsError: a dataset is there already. LockedError: another process is merging.
        ArgumentError: ``physical`` for another format, or stores with different chunks; another merge was begun here.
    """
    root = _arguments.local_path(path)
    asked = _asked(parts, physical)
    different_models = _arguments.switch(different_models, "different_models")
    with boundary(root, "merge"):
        return _merged(root, asked, different_models)


@dataclass(frozen=True)
class _AskedMerge:
    """What a call asks for."""

    parts: tuple[Path, ...] | None
    physical: bool

    def as_dict(self) -> dict[str, Any]:
        return {"parts": None if self.parts is None else [str(p) for p in self.parts], "physical": self.physical}


def _asked(parts: Any, physical: bool) -> _AskedMerge:
    if parts is None:
        return _AskedMerge(None, _arguments.switch(physical, "physical"))
    if isinstance(parts, str | bytes | os.PathLike) or not isinstance(parts, Iterable):
        raise ArgumentTypeError(f"parts: expected a list of paths, found {type(parts).__name__}")
    return _AskedMerge(tuple(_arguments.local_path(p, "parts") for p in parts), _arguments.switch(physical, "physical"))


def _merged(root: Path, asked: _AskedMerge, different_models: bool) -> Path:
    marker = root / FOLDER / _MARKER
    if not marker.exists() and asked.parts is None and not (root / PARTS).is_dir():
        return _there(root, asked.physical)
    lock = locked(root / FOLDER)
    try:
        if not marker.exists():
            if asked.parts is None and not (root / PARTS).is_dir():  # another process has merged them meanwhile
                _leave(root)
                return _there(root, asked.physical)
            try:
                _begin(root, asked, marker, different_models)
            except BaseException:
                if not marker.exists():
                    _leave(root)
                raise
        plan, listed = _begun(root, asked, marker)
        try:
            place = root / listed["place"] if listed.get("finished") else _merger(plan.format).run(plan)
        except ActshardError as error:
            # A disk can get room again; what contradicts itself will do so again.
            if not plan.move and not isinstance(
                error, DiskFullError | FileAccessError | InterruptedReadError | NoMemoryError
            ):
                _undo(plan)
            raise
        if not listed.get("finished"):
            write_json(marker, {**listed, "finished": True, "place": os.path.relpath(place, root)})
        if plan.move:
            _remove_parts(root, _merger(plan.format).files)
        _leave(root)
    finally:
        lock.release()
    _native.sync_files([root])
    return place


def _remove_parts(root: Path, made: re.Pattern[str] | None) -> None:
    """Removes the parts' folder. It goes in one step: a dataset beside what is left of its parts would be taken for unfinished.

    Files in it that no writer made, by their names, are kept in a folder of the dataset.
    """
    gone = root / FOLDER / f"merged{PARTS}"
    _empty(root, gone, made)  # of a merge that was stopped here before
    if (root / PARTS).is_dir():
        rename(root / PARTS, gone)
        _native.sync_files([root])
        _empty(root, gone, made)


def _empty(root: Path, gone: Path, made: re.Pattern[str] | None) -> None:
    """Removes a folder of merged parts but for the files of others, which get a folder that is seen."""
    others = False
    for path, below, names in os.walk(gone, topdown=False):
        folder = Path(path)
        within = folder.relative_to(gone).parts
        # Beside the parts' own folders nothing is a writer's, whatever it is called.
        part = bool(within) and PART.fullmatch(within[0]) is not None
        ours = made is None or (part and FOLDER in within)
        for file in [folder / n for n in names] + [link for n in below if (link := folder / n).is_symlink()]:
            if ours or (part and (file.name == EMPTY or (made is not None and made.fullmatch(file.name)))):
                with contextlib.suppress(
                    OSError
                ):  # what cannot be removed now is removed with the working folder, or keeps it
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
    """Removes the working folder, the marker last: without it, nobody would know how to go on; and the dataset's if it is empty."""
    folder = root / FOLDER
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _MARKER:
                entry.unlink()
        # With anything left the marker stays: the next call goes on from it.
        (folder / _MARKER).unlink(missing_ok=True)
        folder.rmdir()
        root.rmdir()


def _undo(plan: Merge) -> None:
    """Removes what a merge has made of datasets that stay, and nothing else that is in its folder."""
    remove_made(plan.path, _merger(plan.format).makes)
    _leave(plan.path)


def _there(root: Path, physical: bool) -> Path:
    """A dataset that was merged before."""
    if not root.exists():
        raise MissingFileError("expected parts of a dataset, found nothing", path=root)
    if unfinished(root) is not None:
        raise UnfinishedError("expected parts of a dataset, found one whose writer has not finished", path=root)
    found, format = _found(root)
    if physical:
        merger = _merger(format)
        if merger.physical is None:
            raise ArgumentError(_not_physical(format), path=found)
        if merger.several(found):
            raise ArgumentError(
                "physical: is merged already, and is a run of several stores: merge it into a new folder "
                "(parts=[this one], physical=True)",
                path=found,
            )
    tidy(found)
    return found


def _found(folder: Path) -> tuple[Path, str]:
    """The dataset that a folder stands for, and its format."""
    found, format = find(Location.at(folder))
    return found.local, format


def _merger(format: str) -> Merger:
    """How a format merges."""
    merger = formats.get(format).merger()
    if merger is None:
        raise UnsupportedError(f"{format} datasets cannot be merged; convert them first")
    return merger


def _not_physical(format: str) -> str:
    mergers = [formats.get(name).merger() for name in formats.names()]
    others = " and ".join(merger.physical for merger in mergers if merger is not None and merger.physical is not None)
    return f"physical: is for {others}; {format} datasets are always one"


def _begun(root: Path, asked: _AskedMerge, marker: Path) -> tuple[Merge, dict[str, Any]]:
    """The merge that was begun here, which has to be the one that is asked for."""
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
    before = found.value.get("asked")
    if before is None:  # begun by an earlier release
        same = move == (asked.parts is None) and physical == asked.physical
    else:
        same = before == asked.as_dict()
    if not same:
        of = "the parts that were written here" if move else ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        remedy = "the same call finishes it" + ("" if move else f"; or remove {root} to begin another")
        raise ArgumentError(
            f"a merge of {of}{' with physical=True' if physical else ''} was begun here and is not finished, another is asked for: "
            f"{remedy}",
            path=root,
        )
    return Merge(root, format, tuple(root / n for n in names), move, {"physical": physical}), found.value


def _begin(root: Path, asked: _AskedMerge, marker: Path, different_models: bool) -> None:
    """Checks everything that can be wrong with a merge, and notes it: from there on it is to be finished."""
    if asked.parts is None:
        sources = _own_parts(root)
    else:
        if not asked.parts:
            raise ArgumentError("parts: expected at least one dataset")
        sources = [find(existing(p))[0].local for p in asked.parts]
        if len(set(sources)) < len(sources):
            raise ArgumentError("parts: a dataset is in the list twice")
        if (root / PARTS).exists():
            raise ExistsError(
                "holds parts of a dataset of its own: merge without parts=, or into another folder", path=root
            )
        refuse_existing(root)
    format = _check_alike(sources, different_models)
    merger = _merger(format)
    if asked.physical and merger.physical is None:
        raise ArgumentError(_not_physical(format))
    sources = [dataset for source in sources for dataset in merger.datasets(source)]
    if asked.parts is None and not merger.names_itself:
        refuse_in_the_way(root, merger.makes)
    move = asked.parts is None
    plan = Merge(root, format, tuple(sources), move, {"physical": asked.physical})
    merger.check(plan)
    # A dataset that is moved while it is merged takes its parts along.
    names = [os.path.relpath(s, root) if move else str(s) for s in sources]
    made = {"parts": names, "format": format, "move": move, "physical": asked.physical, "asked": asked.as_dict()}
    write_json(marker, made)
    _native.sync_files([marker.parent, root])


def _own_parts(root: Path) -> list[Path]:
    """Parts of ours in the order of their numbers, all of them there and finished."""
    found: dict[int, Path] = {}
    counts: set[int] = set()
    for folder in sorted((root / PARTS).iterdir()):
        numbered = PART.fullmatch(folder.name)
        if numbered is not None:
            found[int(numbered[1])] = folder
            counts.add(int(numbered[2]))
    if len(counts) != 1:
        raise UnfinishedError(
            f"expected parts of one number of parts, found {sorted(counts)}{beside_parts(Location.at(root))}",
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
        if any(unfinished(p) is not None for p in below):
            behind.append(i)
            continue
        made.append(_found(folder)[0])
    if missing or behind:
        said = [
            f"part {', '.join(map(str, some))} {what}"
            for some, what in ((missing, "missing"), (behind, "unfinished"))
            if some
        ]
        raise UnfinishedError(
            f"expected {total} finished parts, {' and '.join(said)}{beside_parts(Location.at(root))}", path=root / PARTS
        )
    if not made:
        raise UnfinishedError(f"expected examples in one of {total} parts, found none in any", path=root / PARTS)
    return made


def _check_alike(sources: Sequence[Path], different_models: bool) -> str:
    """The format of datasets of one kind."""
    first: Any = None
    for path in sources:
        store = open_quietly(path, None, "auto")
        kind: dict[str, Any] = {
            "format": store.format,
            "layers": list(store.layers),
            "d_model": store.d_model,
            "dtype": str(store.dtype),
            "special tokens": store.special_tokens,
        }
        kind |= _merger(store.format).kind(store.contents)
        if not different_models:
            kind["model"] = store.contents.model
        if first is None:
            first = kind
        for name, value in kind.items():
            if first.get(name) != value:
                asked = "; different_models=True (--different-models) joins them" if name == "model" else ""
                expected, differs = show(first.get(name)), show(value)
                if isinstance(value, dict) and isinstance(first.get(name), dict):
                    expected, differs = _difference(first[name], value)
                raise FormatError(
                    f"expected {name} {expected} as in {sources[0].name}, found {differs}{asked}", path=path
                )
    return str(first["format"])


def _difference(a: dict[str, Any], b: dict[str, Any]) -> tuple[str, str]:
    """The first descriptors that differ."""
    name = next(k for k in [*a, *b] if a.get(k) != b.get(k))
    return show({name: a.get(name)}), show({name: b.get(name)})
