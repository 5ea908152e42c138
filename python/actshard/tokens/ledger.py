"""The ledger of a token cache: ``shard_ledger.json`` (``docs/formats/levanter.md``)."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from actshard.base._json import Fields, read_json, show
from actshard.base.errors import FormatError, MissingFileError, UnfinishedError
from actshard.base.location import Location
from actshard.base.walking import LEDGER
from actshard.base.work import write_bytes

NAME = LEDGER
CONSOLIDATED = "consolidated"
SHARDED = "sharded"
OURS = "actshard"
"""The key actshard adds. Levanter ignores unknown keys."""


@dataclass(frozen=True)
class Ledger:
    """Contents of a ledger.

    Attributes:
        total_num_rows: number of rows in the cache.
        shard_rows: number of rows by shard.
        is_finished: whether the cache is complete.
        finished_shards: shard names, in row order.
        field_counts: number of elements by field; older Levanter wrote none.
        field_counts_by_shard: number of elements by shard and field, in sharded caches.
        layout: ``"consolidated"``: one array per field; ``"sharded"``: one array per field and shard.
        metadata: ``{"preprocessor_metadata": ...}``: the preprocessing options.
        extra: keys unknown to Levanter, such as actshard's own.
        version: size and time of change (ns) of the local file that was read.
    """

    total_num_rows: int
    shard_rows: dict[str, int]
    is_finished: bool
    finished_shards: tuple[str, ...] = ()
    field_counts: dict[str, int] = field(default_factory=dict)
    field_counts_by_shard: dict[str, dict[str, int]] = field(default_factory=dict)
    layout: str = CONSOLIDATED
    metadata: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    version: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def is_complete(self) -> bool:
        """Whether every file of an array exists. actshard writes all files of rows; Levanter leaves out files of zeros."""
        return OURS in self.extra and self.total_num_rows > 0

    @property
    def actshard(self) -> dict[str, Any] | None:
        """The value of actshard's key; None in ledgers of other writers."""
        value = self.extra.get(OURS)
        return value if isinstance(value, dict) else None

    @property
    def skipped(self) -> dict[str, int]:
        """Number of unusable records that were left out, by shard, without zeros."""
        value = (self.actshard or {}).get("skipped")
        by_shard = value if isinstance(value, dict) else dict.fromkeys(self.finished_shards[:1], value)
        return {str(shard): count for shard, count in by_shard.items() if type(count) is int and count > 0}

    @property
    def preprocessor(self) -> dict[str, Any]:
        """The preprocessing options; empty if the ledger contains none."""
        options = self.metadata.get("preprocessor_metadata")
        return options if isinstance(options, dict) else {}

    def as_dict(self) -> dict[str, Any]:
        """The ledger as JSON-compatible values."""
        return {
            "total_num_rows": self.total_num_rows,
            "shard_rows": self.shard_rows,
            "is_finished": self.is_finished,
            "finished_shards": list(self.finished_shards),
            "field_counts": self.field_counts,
            "field_counts_by_shard": self.field_counts_by_shard,
            "layout": self.layout,
            "metadata": self.metadata,
            **self.extra,
        }

    def write(self, folder: Path, checksums: Mapping[str, str] | None = None) -> Ledger:
        """Writes the ledger into a cache's folder, atomically; actshard's own with checksums. Returns the ledger that was written.

        Args:
            folder: the folder.
            checksums: as :attr:`checksums`, in any order of data files; None: the files that are there are read.

        Raises:
            DiskFullError, FileAccessError: the write failed; nothing was changed.
        """
        ledger = self
        if OURS in self.extra:
            file_checksums = checksums_in(Location.at(folder), self) if checksums is None else checksums
            names = list(file_checksums) if self.layout == SHARDED else sorted(file_checksums, key=_order)
            ledger = self.with_checksums({name: file_checksums[name] for name in names})
        write_bytes(folder / NAME, json.dumps(ledger.as_dict()).encode())
        return ledger

    @property
    def checksums(self) -> dict[str, str]:
        """CRC-32 (8 hexadecimal digits) by path in the cache: of data files, or of each shard's checksums. Empty if unknown."""
        stored = (self.actshard or {}).get("checksums")
        entries = stored.items() if isinstance(stored, dict) else ()
        return {str(path): crc for path, crc in entries if isinstance(crc, str)}

    @property
    def own_checksum(self) -> str:
        """CRC-32 of :attr:`checksums`, which the ledger of a sharded cache contains for each shard."""
        return shown_crc(zlib.crc32(json.dumps(self.checksums, sort_keys=True).encode()))

    def with_checksums(self, checksums: Mapping[str, str]) -> Ledger:
        """A copy with the checksums of its files; the ledger itself if it is not actshard's."""
        if OURS not in self.extra:
            return self
        return replace(self, extra={**self.extra, OURS: {**self.extra[OURS], "checksums": dict(checksums)}})


def checksums_in(folder: Location, ledger: Ledger) -> dict[str, str]:
    """CRC-32 of each data file of a cache, by its path; for a sharded cache that of each shard's checksums."""
    if ledger.layout == SHARDED:
        return {shard: read(folder / shard).own_checksum for shard in ledger.finished_shards}
    arrays = [folder / name / part for name in sorted(ledger.field_counts) for part in _PARTS]
    present = (array for array in arrays if array.kind() == "folder")  # only rows of several axes have shapes
    files = [file for array in present for file, _ in array.files() if file.name != "zarr.json"]
    return {file.relative_to(folder): crc for file, crc in zip(files, checksums_of(files), strict=True)}


def listed_files(folder: Location, ledger: Ledger) -> list[str]:
    """Paths of the data files that the checksums of a local cache list; without any, none is known."""
    if ledger.layout != SHARDED:
        return list(ledger.checksums)
    return [f"{shard}/{name}" for shard in summed_shards(ledger) for name in read(folder / shard).checksums]


def check_files(folder: Location, ledger: Ledger) -> None:
    """Raises MissingFileError for the first data file of a local cache that its checksums list and that is not there."""
    for name in listed_files(folder, ledger):
        if not (folder / name).exists():
            raise MissingFileError("the file is missing, so the cache is incomplete", path=folder / name)


def summed_shards(ledger: Ledger) -> tuple[str, ...]:
    """The shards whose ledgers contain the checksums of files of a cache. Those left in a consolidated cache do not."""
    return ledger.finished_shards if ledger.layout == SHARDED and ledger.checksums else ()


def checksums_of(files: Sequence[Location]) -> list[str]:
    """CRC-32 of each file."""
    with ThreadPoolExecutor(_READING_THREADS) as pool:
        return list(pool.map(_crc, files))


def _crc(file: Location) -> str:
    crc = 0
    with file.open("read") as stream:
        while block := stream.read(_AT_ONCE):
            crc = zlib.crc32(block, crc)
    return shown_crc(crc)


def _order(path: str) -> tuple[str, int, list[str]]:
    """Sorts paths of data files as :func:`checksums_in` lists them."""
    match = re.fullmatch(r"(.*)/(offsets|data|shapes)/(c/.*)", path)
    field, part, name = match.groups() if match is not None else (path, _PARTS[0], "")
    return field, _PARTS.index(part), name.split("/")


def shown_crc(crc: int) -> str:
    """A CRC-32 as 8 hexadecimal digits."""
    return f"{crc:08x}"


_PARTS = ("offsets", "data", "shapes")
_AT_ONCE = 1 << 22
_READING_THREADS = 4
_KNOWN = {
    "total_num_rows",
    "shard_rows",
    "is_finished",
    "finished_shards",
    "field_counts",
    "field_counts_by_shard",
    "layout",
    "metadata",
}


def exists(folder: Path | Location) -> bool:
    """Whether a folder contains a ledger, finished or not."""
    return (Location.at(folder) / NAME).exists()


def read(folder: Path | Location) -> Ledger:
    """Reads the ledger of a finished cache and applies Levanter's checks.

    Raises:
        MissingFileError: there is no ledger: not a cache, or its writer was interrupted.
        UnfinishedError: ``is_finished`` is false.
        FormatError: the ledger is inconsistent; the message names the field.
    """
    path = Location.at(folder) / NAME
    stat = path.found("look into")  # before its content: a later change is an error of the first read
    if stat is None:
        raise MissingFileError(f"expected a token cache with a {NAME}, found none", path=folder)
    fields = Fields(read_json(path), path)
    finished = fields.boolean("is_finished") if "is_finished" in fields.value else False
    if not finished:
        raise UnfinishedError(
            "is_finished is false: a writer is running or was interrupted; build the cache again", path=path
        )
    rows = _counts(fields, "shard_rows")
    layout = fields.text("layout") if fields.has("layout") else CONSOLIDATED
    if layout not in (CONSOLIDATED, SHARDED):
        raise fields.error("layout", f"'{CONSOLIDATED}' or '{SHARDED}'")
    ledger = Ledger(
        total_num_rows=fields.integer("total_num_rows", minimum=0),
        shard_rows=rows,
        is_finished=finished,
        finished_shards=_names(fields),
        field_counts=_counts(fields, "field_counts") if fields.has("field_counts") else {},
        field_counts_by_shard=_by_shard(fields),
        layout=layout,
        metadata=_metadata(fields),
        extra={key: value for key, value in fields.value.items() if key not in _KNOWN},
        version=(stat.size, stat.modified) if path.is_local else None,
    )
    if layout == SHARDED:
        _check_sharded(ledger, path)
    return ledger


def _counts(fields: Fields, name: str) -> dict[str, int]:
    value = fields.value.get(name)
    if not isinstance(value, dict) or any(type(n) is not int or not 0 <= n < 1 << 60 for n in value.values()):
        raise fields.error(name, "an object of counts")
    return dict(value)


def _names(fields: Fields) -> tuple[str, ...]:
    value = fields.value.get("finished_shards", [])
    if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
        raise fields.error("finished_shards", "a list of names")
    return tuple(value)


def _by_shard(fields: Fields) -> dict[str, dict[str, int]]:
    value = fields.value.get("field_counts_by_shard", {})
    if not isinstance(value, dict):
        raise fields.error("field_counts_by_shard", "an object of counts by shard")
    inner = {
        name: Fields({"counts": counts}, fields.path, f"field_counts_by_shard.{name}") for name, counts in value.items()
    }
    return {name: _counts(counts_of_shard, "counts") for name, counts_of_shard in inner.items()}


def _metadata(fields: Fields) -> dict[str, object]:
    value = fields.value.get("metadata", {})
    if not isinstance(value, dict):
        raise fields.error("metadata", "an object")
    return dict(value)


def _check_sharded(ledger: Ledger, path: Location) -> None:
    """Applies Levanter's checks of a sharded ledger."""
    shards = ledger.finished_shards

    def wrong(name: str, expected: str, found: object) -> FormatError:
        return FormatError(f"field '{name}': expected {expected}, found {show(found)}", path=path, code="metadata")

    if len(set(shards)) != len(shards):
        raise wrong("finished_shards", "each shard once", list(shards))
    for name in shards:
        parts = PurePosixPath(name).parts
        if not name or name.startswith("/") or ".." in parts or "\0" in name:
            raise wrong("finished_shards", "paths below the cache", name)
        if name not in ledger.shard_rows:
            raise wrong("shard_rows", f"the rows of shard '{name}'", sorted(ledger.shard_rows)[:8])
    total = sum(ledger.shard_rows[name] for name in shards)
    if total != ledger.total_num_rows:
        raise wrong("total_num_rows", f"{total}, the sum of the shards' rows", ledger.total_num_rows)
    unknown = set(ledger.field_counts_by_shard) - set(shards)
    if unknown:
        raise wrong("field_counts_by_shard", "shards that are in finished_shards", sorted(unknown)[0])
    for name in sorted(
        {f for counts in ledger.field_counts_by_shard.values() for f in counts} | set(ledger.field_counts)
    ):
        summed = sum(counts.get(name, 0) for counts in ledger.field_counts_by_shard.values())
        if summed != ledger.field_counts.get(name):
            raise wrong(f"field_counts.{name}", f"{summed}, the sum over the shards", ledger.field_counts.get(name))
    for shard in shards:
        for name in ledger.field_counts:
            if ledger.shard_rows[shard] and name not in ledger.field_counts_by_shard.get(shard, {}):
                raise wrong("field_counts_by_shard", f"the count of '{name}' in shard '{shard}'", None)
