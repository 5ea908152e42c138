"""Compares copied files of token caches with the checksums of their ledgers."""

from __future__ import annotations

from collections.abc import Collection

from actshard.base._arguments import many
from actshard.base.errors import FormatError, MissingFileError
from actshard.base.location import Location
from actshard.base.work import remove
from actshard.tokens import ledger as ledgers
from actshard.tokens.ledger import SHARDED, Ledger


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
