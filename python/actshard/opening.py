"""``actshard.open``: from a path to a store, whatever system wrote it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from actshard import _arguments, _native, formats
from actshard.errors import (
    ActshardError,
    ActshardWarning,
    ArgumentError,
    MissingFileError,
    UnfinishedError,
    UnknownFormatError,
    boundary,
    from_os,
)
from actshard.formats._contents import Contents, Evidence, Options
from actshard.store import Store
from actshard.writing.work import FOLDER, MERGING, PARTS, Journal, unfinished

_DEPTH = 6
"""How far below a path datasets are looked for when the path itself is none: saev nests three deep by itself."""
_STANDS_FOR = 3
"""How far below a path its only dataset may lie to be opened by it: ``saev/shards/<HASH>``."""
_LOOK_AT_MOST = 2_000
"""Folders looked into at most, so that a mistyped "/" answers at once."""
LEDGER = "shard_ledger.json"
"""The file that makes a folder a token cache."""
TOKENS = "levanter"
"""The format's name of token caches."""


def open(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str | None = None,
    io: str = "auto",
    *,
    decoded_memory: int | str = "1GiB",
    checksums: bool = True,
) -> Store:
    """Opens a dataset.

    Args:
        path: the dataset's folder, or a file that stands for it (an lmprobe index), or a folder that holds a single dataset.
            ``~`` is expanded. A list of folders opens
            the pickle shards of several machines as one dataset, in that order; so does the folder that holds them, in the
            order of their names.
        format: ``"saev"``, ``"lmprobe"``, ...; None detects it.
        io: ``"mmap"`` maps files: fastest, and gives views. ``"pread"`` never maps: for file systems where faults are slow,
            and where files may be truncated while they are read. ``"auto"`` is ``"pread"`` on network file systems and
            ``"mmap"`` elsewhere.
        decoded_memory: how much may be kept of what had to be decoded (compressed Zarr chunks, ``.pkl.gz`` shards), in bytes or
            as ``"4GiB"``. One shard is decoded whole even if it is larger.
        checksums: whether files are held against the checksums that the dataset lists (pickle shards), each when it is first
            read.

    Returns:
        An open :class:`~actshard.Store`. What its reader should know about the dataset is in ``store.warnings`` and is
        also warned of as :class:`~actshard.ActshardWarning`.

    Raises:
        MissingFileError: the path, or a file that the dataset needs, is not there.
        UnknownFormatError: no format recognises the path, or several do; the message says what was looked for, what was
            found, and which datasets lie below the path.
        FormatError, UnsupportedError, FileAccessError, NotAFileError: the dataset is broken, too new, or cannot be read.
    """
    store = open_quietly(path, format, io, decoded_memory, checksums)
    for warning in store.warnings:
        warnings.warn(f"{store.path}: {warning}", ActshardWarning, stacklevel=2)
    return store


def open_quietly(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str | None,
    io: str,
    decoded_memory: int | str = "1GiB",
    checksums: bool = True,
) -> Store:
    """Opens without warnings: workers reopen what their parent has been warned of."""
    if not _arguments.is_one_of(io, ("auto", "mmap", "pread")):
        raise ArgumentError(f"io must be 'auto', 'mmap' or 'pread', not {io!r}")
    with boundary(path, "open"):
        return _opened(path, format, io, decoded_memory, checksums)


def _opened(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str | None,
    io: str,
    decoded_memory: int | str,
    checksums: bool,
) -> Store:
    together = [existing(p) for p in path] if isinstance(path, list | tuple) else None
    if together is not None:
        root = _common(together)
        name = format if format is not None else detect(together[0])
    else:
        # Lists and tuples were taken above; no other sequence is a path, which existing() says.
        root = existing(path)  # type: ignore[arg-type]
        check_finished(root)
        if format is not None:
            name = format
        else:
            root, name = find(root)
    if not _arguments.is_one_of(name, formats.names()):
        raise ArgumentError(f"format must be one of {', '.join(formats.names())}, not {name!r}")
    mode = io if io != "auto" else network_io(root)
    options = Options(
        mode, _arguments.size(decoded_memory, "decoded_memory"), _arguments.switch(checksums, "checksums")
    )
    try:
        module = formats.load(name)
        if together is not None and not hasattr(module, "open_many"):
            raise ArgumentError(f"path: a list of folders is for pickle shards, not for {name}; open one path")
        contents: Contents = (
            module.open(root, options) if together is None else module.open_many(root, together, options)
        )
    except ActshardError as error:
        if error.path is None:  # from the core, which knows numbers and not whose they are
            error.path = root
        raise
    return Store(contents, io=mode, asked=(together or root, name, io, decoded_memory, checksums))


def network_io(path: Path) -> str:
    """What ``io="auto"`` means for a path."""
    return "pread" if _native.is_network(path) else "mmap"


def _common(paths: Sequence[Path]) -> Path:
    if not paths:
        raise ArgumentError("path: expected at least one folder, found an empty list")
    if len(set(paths)) < len(paths):
        raise ArgumentError("path: a folder is in the list twice")
    return Path(os.path.commonpath(paths))


def existing(path: str | os.PathLike[str]) -> Path:
    """A local path at which there is something; MissingFileError if there is nothing."""
    root = _arguments.local_path(path)
    try:
        root.stat()
    except FileNotFoundError as error:
        raise MissingFileError("expected a dataset, found nothing", path=root) from error
    except OSError as error:
        raise from_os(error, root, "look at") from error
    return root


def check_finished(root: Path) -> None:
    """Raises UnfinishedError for what a writer has left or is still writing, ArgumentError for what holds no activations."""
    if is_cache_itself(root):
        raise ArgumentError("is a token cache and holds no activations: actshard.tokens.open_cache opens it", path=root)
    parts = root if root.name == PARTS else root / PARTS
    try:
        count = sum(1 for _ in parts.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # there are none, or a merge has just removed them
        count = None
    if count is not None:
        raise UnfinishedError(
            f"holds {count} parts of a dataset: when all are written, actshard.merge (or the command) makes one of them",
            path=root,
        )
    journal = unfinished(root) if root.is_dir() else None
    if journal is not None:
        raise _unfinished(root, journal)


def is_cache_itself(root: Path) -> bool:
    """Whether a folder is a token cache, and not one above it."""
    return (root / LEDGER).is_file()


def find_any(root: Path) -> tuple[Path, str]:
    """What a path stands for, activations or tokens: the dataset and its format, ``"levanter"`` for a token cache.

    The dataset *at* the path wins; then the one that :func:`open` would open below it; then the only token cache below it.
    """
    if is_cache_itself(root):
        return root, TOKENS
    try:
        return find(root)
    except UnknownFormatError as error:
        if error.candidates or error.ambiguous:
            raise
        from actshard.tokens import cache as caches

        try:
            return caches.find(root), TOKENS
        except MissingFileError:
            raise error from None


def find(root: Path) -> tuple[Path, str]:
    """The dataset that a path stands for, and its format: the path itself, or the only dataset below it.

    saev's folders are named by hashes that nobody types: ``saev/shards/`` with a single dump stands for the dump. Farther down
    nothing is opened that was not named.
    """
    try:
        return root, detect(root)
    except UnknownFormatError as error:
        if not error.candidates and not error.ambiguous:
            _check_begun(root)
        if len(error.candidates) != 1 or "/" in error.candidates[0][1]:
            raise
        (only,) = error.candidates
        if len(only[0].relative_to(root).parts) > _STANDS_FOR:
            raise
        check_finished(only[0])
        return only


def _check_begun(root: Path) -> None:
    """Raises UnfinishedError for a folder in which a saev dump or a merge was begun, and nothing else is."""
    from actshard.writing.saev import writing_folders

    for folder in writing_folders(root):
        journal = unfinished(folder)
        if journal is not None:
            raise _unfinished(root, journal)
    if (root / FOLDER / MERGING).is_file():
        raise UnfinishedError(
            "holds a merge that is not finished: it is at work, or was interrupted (the same call of actshard.merge finishes it)",
            path=root,
        )


def _unfinished(root: Path, journal: Journal) -> UnfinishedError:
    return UnfinishedError(
        f"holds {journal.examples} examples of a dataset that is not finished: its writer is at work, or was interrupted "
        "(create or convert with resume continues it)",
        path=root,
    )


def detect(root: Path) -> str:
    """The format of a dataset; UnknownFormatError if it is none or several."""
    evidence = {name: _evidence(name, root) for name in formats.names()}
    matches = [name for name, e in evidence.items() if e.matches]
    if len(matches) == 1:
        return matches[0]
    if matches:
        several = UnknownFormatError(
            f"looks like {' and like '.join(matches)}; say which with format=: "
            + "; ".join(f"{name}: {evidence[name].found}" for name in matches),
            path=root,
        )
        several.ambiguous = True
        raise several
    candidates = tuple(_datasets_below(root))
    if candidates:
        listed = ", ".join(f"{path.relative_to(root)} ({name})" for path, name in candidates[:20])
        more = f" and {len(candidates) - 20} more" if len(candidates) > 20 else ""
        what = "a dataset" if len(candidates) == 1 else f"{len(candidates)} datasets"
        unknown = UnknownFormatError(f"is no dataset itself but holds {what}, open one: {listed}{more}", path=root)
        unknown.candidates = tuple((path, name) for path, name in candidates)
        raise unknown
    raise UnknownFormatError(
        "is no dataset that actshard knows; "
        + "; ".join(f"{name}: looked for {e.looked_for}, found {e.found}" for name, e in evidence.items()),
        path=root,
    )


def _evidence(name: str, root: Path) -> Evidence:
    try:
        evidence: Evidence = formats.load(name).detect(root)
    except (ActshardError, OSError) as error:
        return Evidence(False, f"a {name} dataset", str(error))
    return evidence


def _datasets_below(root: Path) -> Iterator[tuple[Path, str]]:
    looked = 0
    level = [root]
    for _ in range(_DEPTH):
        below: list[Path] = []
        for folder in level:
            try:
                with os.scandir(folder) as entries:
                    children = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
            except OSError:
                continue
            for child in children:
                looked += 1
                if looked > _LOOK_AT_MOST:
                    return
                path = folder / child
                if is_cache_itself(path):
                    continue  # its arrays are no activations
                matches = [name for name in formats.names() if _evidence(name, path).matches]
                if matches:
                    yield path, "/".join(matches)
                else:
                    below.append(path)
        level = below
