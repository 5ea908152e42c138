"""Builds a token cache in a working folder and swaps it in. Removes only files listed in a cache's ledger.

.. code-block:: text

    <cache>/.actshard-build/lock          held by the process that builds
    <cache>/.actshard-build/build.json    state of the build, with the time passed to chat templates
    <cache>/.actshard-build/worker.json   settings of worker processes, with the tokenizer
    <cache>/.actshard-build/new/          the new cache: its shards, then its fields, its ledger last
    <cache>/.actshard-build/swap.json     written when the new cache is complete: paths to move out, names to move in
    <cache>/.actshard-build/old/          the replaced cache, until the swap is complete

The old cache stays readable until the new one is complete and synced. Then its ledger and arrays are moved out and the new ones
in, the new ledger last. Once the old ledger has been moved, the next build completes an interrupted swap, whatever its arguments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from actshard.base._json import read_json
from actshard.base.errors import ActshardError, ExistsError, FormatError, boundary
from actshard.base.work import BUILDING, locked, make_folder, remove, sync_folders, write_json
from actshard.tokens.ledger import NAME

WORK = BUILDING
NEW, OLD, SWAP, STATE, SETUP, LOCK = "new", "old", "swap.json", "build.json", "worker.json", "lock"
SUCCESS = ".success"
_ARRAYS = ("offsets", "data", "shapes")


@contextmanager
def turn(out: Path) -> Iterator[Path]:
    """Holds the lock of a cache's working folder, after an interrupted swap was completed. Yields the folder, and removes it.

    If the block raises, its files stay for the next build.

    Raises:
        LockedError: another process builds the cache.
    """
    work = out / WORK
    lock = locked(work)
    try:
        recover(out, work)
        yield work
        clear(work)
    finally:
        clear_if_idle(work)
        lock.release()


def keep_only(work: Path, names: Container[str], *files: str) -> None:
    """Removes everything from a working folder but these files, the lock, and these entries of the new cache."""
    for entry in [e for e in work.iterdir() if e.name not in (LOCK, NEW, *files)]:
        remove(entry)
    make_folder(work / NEW)
    for entry in [e for e in (work / NEW).iterdir() if e.name not in names]:
        remove(entry)


def clear(work: Path) -> None:
    """Removes a working folder, its lock file last. The caller holds the lock."""
    with suppress(OSError):
        for entry in work.iterdir():
            if entry.name != LOCK:
                remove(entry)
        (work / LOCK).unlink(missing_ok=True)
        work.rmdir()


def clear_if_idle(work: Path) -> None:
    """Removes a working folder that contains nothing but a lock and a state file. The caller holds the lock."""
    with suppress(OSError):
        if {entry.name for entry in work.iterdir()} <= {LOCK, STATE}:
            clear(work)


def _safe(name: object) -> bool:
    """Whether a name is a relative path below the cache and outside the working folder."""
    if not isinstance(name, str) or not name or "\0" in name or name.startswith("/"):
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and ".." not in parts and parts[0] != WORK


def _real(root: Path, name: str) -> bool:
    """Whether a path exists and all its parents up to the root are real folders, not symlinks."""
    path = root / name
    parents = [p for p in path.parents if p != root and root in p.parents]
    return os.path.lexists(path) and all(p.is_dir() and not p.is_symlink() for p in parents)


def owned(folder: Path) -> list[str]:
    """Relative paths of the files that a cache's ledger lists: the ledger first, arrays, ledgers of shards.

    Raises:
        FormatError: the ledger cannot be read.
    """
    if not os.path.lexists(folder / NAME):
        return []
    return [NAME, *_owned(folder, (), with_shards=True)]


def _owned(folder: Path, field_names: Iterable[str], *, with_shards: bool) -> list[str]:
    """As :func:`owned`, without the ledger. ``field_names``: more names of fields; ledgers of shards without rows list none."""
    ledger = read_json(folder / NAME)
    if not isinstance(ledger, dict):
        raise FormatError("expected an object", path=folder / NAME)
    counts, shards = ledger.get("field_counts"), ledger.get("finished_shards")
    fields = [
        name for name in dict.fromkeys([*(counts if isinstance(counts, dict) else ()), *field_names]) if _safe(name)
    ]
    paths = [path for name in fields for part in _ARRAYS if _real(folder, path := f"{name}/{part}")]
    for shard in shards if isinstance(shards, list) and with_shards else []:
        if not _safe(shard) or not _real(folder, f"{shard}/{NAME}"):
            continue
        with suppress(ActshardError):  # leave a shard alone if its ledger is unreadable
            inner = [NAME, SUCCESS, *_owned(folder / shard, fields, with_shards=False)]
            paths += [path for name in inner if _real(folder, path := f"{shard}/{name}")]
    return list(dict.fromkeys(paths))


def refuse_foreign(out: Path, new_paths: Iterable[str], existing: Iterable[str]) -> None:
    """Raises ExistsError if an unlisted path is in the way of the new cache, or an array to be removed contains foreign files.

    Args:
        out: the cache's folder.
        new_paths: relative paths of the new cache.
        existing: relative paths of the existing cache, which will be removed.
    """
    old = set(existing)
    for name in old:
        if PurePosixPath(name).name in _ARRAYS and (foreign := _foreign_in_array(out / name)) is not None:
            raise ExistsError(
                "is in an array of the cache to be replaced, but does not belong to it; move it away, or choose another folder",
                path=foreign,
            )
    for name in new_paths:
        path, parents = out / name, [p for p in (out / name).parents if out in p.parents]
        in_the_way = [p for p in parents if os.path.lexists(p) and (p.is_symlink() or not p.is_dir())]
        if not in_the_way and os.path.lexists(path) and name not in old:
            in_the_way = [path]
        if in_the_way:
            raise ExistsError(
                "is in the way of the new cache, and no ledger lists it; move it away, or choose another folder",
                path=in_the_way[0],
            )


def _foreign_in_array(array: Path) -> Path | None:
    """Returns a path in an array's folder that is neither its metadata nor a chunk; None if there is none.

    The folder is removed as a whole, so it may contain only the array's own files.
    """
    if array.is_symlink() or not array.is_dir():
        return None  # only the link is removed, not its target
    encoding: object = None
    with suppress(ActshardError):
        metadata = read_json(array / "zarr.json")
        encoding = metadata.get("chunk_key_encoding") if isinstance(metadata, dict) else None
    old = isinstance(encoding, dict) and encoding.get("name") == "v2"
    chunk = re.compile(r"[0-9]+([./][0-9]+)*" if old else r"c([./][0-9]+)*")
    for folder, folders, files in os.walk(array):
        for entry in sorted([*folders, *files]):
            path = Path(folder, entry)
            name = path.relative_to(array).as_posix()
            if name != "zarr.json" and not chunk.fullmatch(name):
                return path
    return None


def _leaves(root: Path, name: str) -> Iterator[str]:
    """Relative paths of the new cache that are moved as a unit: arrays and files."""
    path = root / name
    if not path.is_dir() or (path / "zarr.json").exists():
        yield name
        return
    for entry in path.iterdir():
        yield from _leaves(root, f"{name}/{entry.name}")


def swap(out: Path, work: Path, source: str, names: list[str]) -> None:
    """Moves the old cache out and the new cache in. The caller holds the lock.

    Args:
        out: the cache's folder.
        work: its working folder.
        source: name of the folder in ``work`` that contains the new cache, complete and synced.
        names: its entries; the ledger is moved last.

    Raises:
        ExistsError: a path that no ledger lists is in the way. Nothing was moved.
    """
    with boundary(out, "put the cache at"):
        mine = owned(out)
        leaves = [leaf for name in names for leaf in _leaves(work / source, name)]
        refuse_foreign(out, leaves, mine)
        write_json(work / SWAP, {"actshard": 1, "source": source, "names": names, "old": mine})
        sync_folders([work])
    _complete(out, work)


def recover(out: Path, work: Path) -> None:
    """Completes an interrupted swap, or discards it if the old cache is still in place. The caller holds the lock."""
    if not (work / SWAP).exists():
        return
    is_complete = _complete(out, work, resumed=True)
    for entry in work.iterdir():
        if entry.name == SWAP or (is_complete and entry.name != LOCK):
            remove(entry)


def _complete(out: Path, work: Path, *, resumed: bool = False) -> bool:
    swap_record = read_json(work / SWAP)
    if not isinstance(swap_record, dict):
        raise FormatError("expected an object", path=work / SWAP)
    old, names, source = swap_record.get("old"), swap_record.get("names"), swap_record.get("source")
    if (
        not isinstance(old, list)
        or not isinstance(names, list)
        or not all(map(_safe, [*old, *names, source]))
        or "/" in str(source)
    ):
        raise FormatError(f"expected paths below {out}", path=work / SWAP)
    with boundary(out, "put the cache at"):
        if resumed and NAME in old and not os.path.lexists(work / OLD / NAME):
            return False  # nothing was moved: keep the old cache
        for name in old:  # the ledger first
            if not os.path.lexists(work / OLD / name) and os.path.lexists(out / name):
                (work / OLD / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).rename(work / OLD / name)
        for name in old:
            with suppress(OSError):  # the folder contains other files
                for parent in (out / name).parents:
                    if parent == out or out not in parent.parents:
                        break
                    parent.rmdir()
        sync_folders([out])
        new_cache = work / str(source)
        for name in names:
            if name != NAME:
                _move(new_cache, out, name)
        sync_folders([out])
        if os.path.lexists(new_cache / NAME):
            (new_cache / NAME).rename(out / NAME)
        sync_folders([out])
    return True


def _move(source: Path, out: Path, name: str) -> None:
    """Moves an entry, merging with existing folders of the same name. Entries that were already moved are skipped."""
    entry_path, target = source / name, out / name
    if not os.path.lexists(entry_path):
        return
    if not os.path.lexists(target):
        entry_path.rename(target)
        return
    if target.is_symlink() or not target.is_dir() or not entry_path.is_dir() or (entry_path / "zarr.json").exists():
        refuse_foreign(out, [name], [])
    for entry in sorted(entry_path.iterdir()):
        _move(source, out, f"{name}/{entry.name}")
    sync_folders([target])
    entry_path.rmdir()


def read_state(work: Path) -> dict[str, object]:
    """The state of an interrupted build; empty if it cannot be read."""
    try:
        state = read_json(work / STATE)
    except ActshardError:
        return {}
    return state if isinstance(state, dict) else {}
