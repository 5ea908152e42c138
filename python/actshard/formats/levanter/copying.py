"""Compares copied files of token caches with the checksums of their ledgers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from actshard.errors import FormatError
from actshard.location import Location
from actshard.tokens import ledger as ledgers
from actshard.tokens.ledger import Ledger
from actshard.work import remove


@dataclass
class _Ledgers:
    """The ledgers of a cache that is being copied: those of the copy; where it has none yet, those of the source."""

    folder: Location
    source: Location
    read: dict[str, Ledger | None] = field(default_factory=dict)
    """Ledgers by folder relative to the cache; None: there is none."""

    def below(self, name: str) -> Ledger | None:
        if name not in self.read:
            self.read[name] = self._read(name)
        return self.read[name]

    def _read(self, name: str) -> Ledger | None:
        for root in (self.folder, self.source):
            place = root / name if name else root
            if not ledgers.exists(place):
                continue
            try:
                return ledgers.read(place)
            except FormatError:
                if root is self.folder:  # otherwise the next call would take it for complete
                    remove((place / ledgers.NAME).local)
                raise
        return None


def check_copy(folder: Location, source: Location, names: Iterable[str]) -> None:
    """See :meth:`actshard.formats.Format.check_copy`."""
    found = _Ledgers(folder, source)
    root = found.below("")
    if root is None:
        return
    shards = frozenset(root.finished_shards)
    expected: dict[str, str] = {}
    for name in names:
        shard, path = _divided(name, shards)
        ledger = root if shard is None else found.below(shard)
        if ledger is None:
            continue
        if path in ledger.checksums:
            expected[name] = ledger.checksums[path]
        elif path == ledgers.NAME and shard in root.checksums and ledger.own_checksum != root.checksums[shard]:
            _refuse(folder / name, ledger.own_checksum, root.checksums[shard], "of its checksums")
    files = [folder / name for name in expected]
    for file, stored, actual in zip(files, expected.values(), ledgers.checksums_of(files), strict=True):
        if actual != stored:
            _refuse(file, actual, stored, "")


def _divided(name: str, shards: frozenset[str]) -> tuple[str | None, str]:
    """The shard that contains a file, and the file's path in it; None for files of the cache itself."""
    end = name.find("/")
    while end >= 0:
        if name[:end] in shards:
            return name[:end], name[end + 1 :]
        end = name.find("/", end + 1)
    return None, name


def _refuse(file: Location, actual: str, stored: str, of: str) -> None:
    remove(file.local)
    what = f"CRC-32 {of}".strip()
    raise FormatError(
        f"expected {what} {stored}, as in {ledgers.NAME}, found {actual}: the source is damaged, or the copy. Stage again; if it "
        "fails again, `actshard verify --deep` of the source names its damaged files",
        path=file,
        code="checksum",
    )
