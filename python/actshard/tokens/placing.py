"""Where a token cache is made, and how it is put in its place: only what a cache's ledger names is ever removed.

.. code-block:: text

    <cache>/.actshard-build/lock          who builds
    <cache>/.actshard-build/build.json    what is built, and the time that chat templates see
    <cache>/.actshard-build/new/          the new cache: its shards, then its fields, its ledger last
    <cache>/.actshard-build/swap.json     the new cache is whole: paths to move out, names to move in
    <cache>/.actshard-build/old/          the cache that is replaced, until the new one is there

A cache that is replaced stays readable until the new one is whole and on the disk. Then its ledger and arrays are moved out and the
new ones in, the new ledger last. Once the old ledger has moved, the next build completes the swap whatever it was asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from actshard._json import read_json
from actshard.errors import ActshardError, ExistsError, FormatError, boundary
from actshard.tokens.ledger import NAME
from actshard.work import BUILDING, remove, sync_folders, write_json

WORK = BUILDING
NEW, OLD, SWAP, STATE, LOCK = "new", "old", "swap.json", "build.json", "lock"
SUCCESS = ".success"
_ARRAYS = ("offsets", "data", "shapes")


def clear(work: Path) -> None:
    """Removes a working folder. The lock has been taken, and is the last to go."""
    with suppress(OSError):
        for entry in work.iterdir():
            if entry.name != LOCK:
                remove(entry)
        (work / LOCK).unlink(missing_ok=True)
        work.rmdir()


def clear_if_idle(work: Path) -> None:
    """Removes a working folder that holds nothing of a build. The lock has been taken."""
    with suppress(OSError):
        if {entry.name for entry in work.iterdir()} <= {LOCK, STATE}:
            clear(work)


def _safe(name: object) -> bool:
    """Whether this names something below a cache, and not in a working folder."""
    if not isinstance(name, str) or not name or "\0" in name or name.startswith("/"):
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and ".." not in parts and parts[0] != WORK


def _real(root: Path, name: str) -> bool:
    """Whether a path is there, and all above it up to the root are folders and no links."""
    path = root / name
    above = [p for p in path.parents if p != root and root in p.parents]
    return os.path.lexists(path) and all(p.is_dir() and not p.is_symlink() for p in above)


def owned(folder: Path) -> list[str]:
    """Paths below a folder that belong to the cache there, as its ledger says: arrays, ledgers of shards, the ledger first.

    Raises:
        FormatError: there is a ledger, and it cannot be read.
    """
    if not os.path.lexists(folder / NAME):
        return []
    return [NAME, *_owned(folder, with_shards=True)]


def _owned(folder: Path, *, with_shards: bool) -> list[str]:
    said = read_json(folder / NAME)
    if not isinstance(said, dict):
        raise FormatError("expected an object", path=folder / NAME)
    counts, shards = said.get("field_counts"), said.get("finished_shards")
    fields = [name for name in (counts if isinstance(counts, dict) else {}) if _safe(name)]
    found = [path for name in fields for part in _ARRAYS if _real(folder, path := f"{name}/{part}")]
    for shard in shards if isinstance(shards, list) and with_shards else []:
        if not _safe(shard) or not _real(folder, f"{shard}/{NAME}"):
            continue
        with suppress(ActshardError):  # a shard without a ledger that can be read is left alone
            inner = [NAME, SUCCESS, *_owned(folder / shard, with_shards=False)]
            found += [path for name in inner if _real(folder, path := f"{shard}/{name}")]
    return list(dict.fromkeys(found))


def refuse_foreign(out: Path, wanted: Iterable[str], mine: Iterable[str]) -> None:
    """Raises ExistsError if something stands where a cache is to be that no ledger names, or in an array that is to be removed.

    Args:
        out: the cache's folder.
        wanted: paths below it that the new cache has.
        mine: paths below it that belong to the cache that is there, and go with it.
    """
    held = set(mine)
    for name in held:
        if PurePosixPath(name).name in _ARRAYS and (foreign := _foreign_in_array(out / name)) is not None:
            raise ExistsError(
                "is in an array of the cache that is to be replaced, and is no file of the array's; move it away, or choose "
                "another folder",
                path=foreign,
            )
    for name in wanted:
        path, above = out / name, [p for p in (out / name).parents if out in p.parents]
        in_the_way = [p for p in above if os.path.lexists(p) and (p.is_symlink() or not p.is_dir())]
        if not in_the_way and os.path.lexists(path) and name not in held:
            in_the_way = [path]
        if in_the_way:
            raise ExistsError(
                "stands where the cache is to be made, and no ledger names it; move it away, or choose another folder",
                path=in_the_way[0],
            )


def _foreign_in_array(array: Path) -> Path | None:
    """Something in an array's folder that is neither its metadata nor a chunk by the names that these give; None: there is nothing.

    An array is removed as a folder, so that everything in it has to be the array's.
    """
    if array.is_symlink() or not array.is_dir():
        return None  # the link goes, not what it names
    encoding: Any = None
    with suppress(ActshardError):
        said = read_json(array / "zarr.json")
        encoding = said.get("chunk_key_encoding") if isinstance(said, dict) else None
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
    """Paths of a new cache that are moved as one where something of that name is there already."""
    path = root / name
    if not path.is_dir() or (path / "zarr.json").exists():
        yield name
        return
    for entry in path.iterdir():
        yield from _leaves(root, f"{name}/{entry.name}")


def swap(out: Path, work: Path, source: str, names: list[str]) -> None:
    """Puts a new cache in its place, and what it replaces out of it. The lock has been taken.

    Args:
        out: the cache's folder.
        work: its working folder.
        source: the folder of the new cache in it, whole and on the disk.
        names: its entries; the ledger is moved last.

    Raises:
        ExistsError: something is in the way that no ledger names. Nothing was moved.
    """
    with boundary(out, "put the cache at"):
        mine = owned(out)
        leaves = [leaf for name in names for leaf in _leaves(work / source, name)]
        refuse_foreign(out, leaves, mine)
        write_json(work / SWAP, {"actshard": 1, "source": source, "names": names, "old": mine})
        sync_folders([work])
    _complete(out, work)


def recover(out: Path, work: Path) -> None:
    """Completes a swap that was interrupted, or drops it if the old cache is still in its place. The lock has been taken."""
    if not (work / SWAP).exists():
        return
    done = _complete(out, work, resumed=True)
    for entry in work.iterdir():
        if entry.name == SWAP or (done and entry.name != LOCK):
            remove(entry)


def _complete(out: Path, work: Path, *, resumed: bool = False) -> bool:
    said = read_json(work / SWAP)
    if not isinstance(said, dict):
        raise FormatError("expected an object", path=work / SWAP)
    old, names, source = said.get("old"), said.get("names"), said.get("source")
    if (
        not isinstance(old, list)
        or not isinstance(names, list)
        or not all(map(_safe, [*old, *names, source]))
        or "/" in str(source)
    ):
        raise FormatError(f"expected paths below {out}", path=work / SWAP)
    with boundary(out, "put the cache at"):
        if resumed and NAME in old and not os.path.lexists(work / OLD / NAME):
            return False  # nothing was moved: the old cache is the cache
        for name in old:  # the ledger first
            if not os.path.lexists(work / OLD / name) and os.path.lexists(out / name):
                (work / OLD / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).rename(work / OLD / name)
        for name in old:
            with suppress(OSError):  # other files are in it
                for above in (out / name).parents:
                    if above == out or out not in above.parents:
                        break
                    above.rmdir()
        sync_folders([out])
        new = work / str(source)
        for name in names:
            if name != NAME:
                _move(new, out, name)
        sync_folders([out])
        if os.path.lexists(new / NAME):
            (new / NAME).rename(out / NAME)
        sync_folders([out])
    return True


def _move(source: Path, out: Path, name: str) -> None:
    """Moves an entry to a place where folders of its name may be; one that was moved before is not there any more."""
    made, target = source / name, out / name
    if not os.path.lexists(made):
        return
    if not os.path.lexists(target):
        made.rename(target)
        return
    if target.is_symlink() or not target.is_dir() or not made.is_dir() or (made / "zarr.json").exists():
        refuse_foreign(out, [name], [])
    for entry in sorted(made.iterdir()):
        _move(source, out, f"{name}/{entry.name}")
    sync_folders([target])
    made.rmdir()


def read_state(work: Path) -> dict[str, Any]:
    """What an interrupted build said of itself; empty if it cannot be read."""
    try:
        said = read_json(work / STATE)
    except ActshardError:
        return {}
    return said if isinstance(said, dict) else {}
