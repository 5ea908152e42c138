"""Checks of token caches."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from actshard.base import errors
from actshard.base._arguments import many
from actshard.base.errors import ActshardError, FormatError, MissingFileError
from actshard.base.location import Location
from actshard.base.work import remove
from actshard.formats.report import Report
from actshard.tokens import ledger as ledgers
from actshard.tokens.cache import TokenCache
from actshard.tokens.ledger import SHARDED, Ledger

_AT_ONCE = 1 << 21


def check(root: Location, report: Report, tell: Callable[[str, int, int], object]) -> None:
    """Checks the ledger, arrays, frames and rows; with ``report.deep`` every value."""
    cache = report.faults.parse(root, lambda: TokenCache(root, memory=0))
    if cache is None:
        return
    for warning in cache.warnings:
        if warning.code == "chunk-missing":  # reported below, for shards too
            continue
        report.add(warning.code, root / ledgers.NAME, warning)
    _leftovers(cache, report)
    for number, name in enumerate(cache.fields):
        tell("fields", number, len(cache.fields))
        for kind, code, detail, path, offset, absent in cache.field(name).check(report.deep):
            if absent:
                report.add("chunk-missing", Location.at(path or root), detail)
                continue
            report.error(errors.from_native(kind, detail, path, offset, None, None, code), root)
    _same_lengths(cache, report)
    if report.deep:
        _checksums(cache, report)
    if report.deep and not report.errors:
        for name in cache.fields:
            _values(cache, name, report, tell)
    report.count("rows", len(cache))
    report.count("tokens", cache.num_tokens)


def _checksums(cache: TokenCache, report: Report) -> None:
    """Compares the files with the checksums of the ledger, or of the ledgers of shards."""
    root, ledger = Location.at(cache.path), cache.ledger
    shards = [root / shard for shard in ledgers.summed_shards(ledger)]
    for folder, part in [(root, ledger), *((shard, ledgers.read(shard)) for shard in shards)]:
        stored = part.checksums
        actual = ledgers.checksums_in(folder, part) if stored else {}
        for path in sorted(path for path in stored.keys() | actual.keys() if stored.get(path) != actual.get(path)):
            report.add(
                "checksum", folder / path, f"CRC-32 {actual.get(path)}", f"{stored.get(path)}, as in {ledgers.NAME}"
            )


def _leftovers(cache: TokenCache, report: Report) -> None:
    sharded = cache.ledger.layout == ledgers.SHARDED
    root = Location.at(cache.path)
    if not root.lists:
        return
    try:
        entries = root.entries()
        ledgers_in = {e.name for e in entries if e.kind == "folder" and ledgers.exists(root / e.name)}
    except ActshardError as error:
        report.error(error, root)
        return
    for name in (entry.name for entry in entries):
        if name in ("___temp", "__shards__", ".actshard-build") or ".tmp." in name or name.endswith(".bak"):
            report.add("leftover", root / name, "files of a build, or an older ledger")
        elif name in ledgers_in and not sharded and name in cache.ledger.finished_shards:
            report.add("leftover", root / name, "the cache of one shard, which was merged into this cache")
        elif sharded and name in ledgers_in and name not in cache.ledger.finished_shards:
            report.add("unlisted-file", root / name, "a shard that the ledger does not list")


def _same_lengths(cache: TokenCache, report: Report) -> None:
    """Checks that tokens, weights and masks have equal lengths in every row."""
    together = [name for name in cache.fields if not cache.field(name).has_shapes]
    try:
        offsets = {name: cache.view(name).offsets for name in together}
    except ActshardError as error:
        report.error(error, cache.path)
        return
    for name in together[1:]:
        differs = np.flatnonzero(np.diff(offsets[name]) != np.diff(offsets[together[0]]))
        if len(differs):
            report.add(
                "row-lengths-differ",
                cache.path / name,
                f"{len(differs)} rows differ, the first is row {int(differs[0])}",
                f"the row lengths of '{together[0]}'",
            )


def _values(cache: TokenCache, name: str, report: Report, tell: Callable[[str, int, int], object]) -> None:
    view = cache.view(name)
    vocabulary = cache.ledger.preprocessor.get("vocab_size")
    ids = name == cache.token_field and isinstance(vocabulary, int)
    most = int(vocabulary) if ids and vocabulary is not None else 2
    for start in range(0, view.num_elements, _AT_ONCE):
        tell("elements", start, view.num_elements)
        values = view.elements(start, min(start + _AT_ONCE, view.num_elements))
        if values.dtype.kind == "f":
            bad = np.flatnonzero(~np.isfinite(values))
            if len(bad):
                code = "nan" if np.isnan(values[bad[0]]) else "infinite"
                report.add(
                    code, cache.path / name, f"{values[bad[0]]}", "finite numbers", f"element {start + int(bad[0])}"
                )
                return
        elif ids or name == "assistant_masks":
            bad = np.flatnonzero((values < 0) | (values >= most))
            if len(bad):
                report.add(
                    "token-range" if ids else "mask-value",
                    cache.path / name,
                    f"{values[bad[0]]}",
                    f"values from 0 to {most - 1}",
                    f"element {start + int(bad[0])}",
                )
                return


# Compares copied files of token caches with the checksums of their ledgers.


def check_listing(source: Location, names: Collection[str]) -> None:
    """See :meth:`actshard.formats.Format.check_listing`. Of a remote cache in shards only the folders: each ledger is a request."""
    ledger = ledgers.read(source)
    if ledger.layout == SHARDED and not source.is_local:
        folders = {name.partition("/")[0] for name in names}
        missing = [f"{shard}/{ledgers.NAME}" for shard in ledgers.summed_shards(ledger) if shard not in folders]
    else:
        missing = [name for name in ledgers.listed_files(source, ledger) if name not in names]
    if missing:
        rest = f" (and {many(len(missing) - 1, 'more file')})" if len(missing) > 1 else ""
        raise MissingFileError(
            f"the file{rest} is missing, so the cache is incomplete: build it again", path=source / missing[0]
        )


def check_copy(folder: Location, source: Location, names: Collection[str]) -> None:
    """See :meth:`actshard.formats.Format.check_copy`. Ledgers are those of the copy; where it has none yet, those of the source."""

    def read(shard: str = "") -> Ledger:
        name = f"{shard}/{ledgers.NAME}".lstrip("/")
        if name not in names:
            return ledgers.read((source / name).parent)
        try:
            return ledgers.read((folder / name).parent)
        except FormatError:
            remove((folder / name).local)  # otherwise the next call would take it for complete
            raise

    root = read()
    parents = {name[:end] for name in names for end, sign in enumerate(name) if sign == "/"}
    stored = root.checksums if root.layout != SHARDED else {}
    wrong: dict[str, tuple[str | None, str]] = {}
    for shard in ledgers.summed_shards(root):
        if shard not in parents:
            continue
        ledger, expected = read(shard), root.checksums.get(shard)
        if ledger.own_checksum == expected:
            stored |= {f"{shard}/{path}": crc for path, crc in ledger.checksums.items()}
        else:
            wrong[f"{shard}/{ledgers.NAME}"] = expected, ledger.own_checksum
    stored = {name: crc for name, crc in stored.items() if name in names}
    actual = ledgers.checksums_of([folder / name for name in stored])
    wrong |= {name: (stored[name], crc) for name, crc in zip(stored, actual, strict=True) if crc != stored[name]}
    for name in wrong:
        remove((folder / name).local)
    if wrong:
        name, (expected, checksum) = next(iter(wrong.items()))
        rest = f" (and {many(len(wrong) - 1, 'more file', 'differs', 'differ')})" if len(wrong) > 1 else ""
        raise FormatError(
            f"expected CRC-32 {expected}, as in {ledgers.NAME}, found {checksum}{rest}: the source is damaged, or was "
            "read wrongly. Stage again; if that fails, too, `actshard verify --deep` of the source names its damaged files",
            path=source / name,
            code="checksum",
        )
