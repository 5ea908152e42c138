"""Sources of records: JSON lines, JSON and parquet files, plain or compressed, and Python iterables."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import fnmatch
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from actshard.base._arguments import is_file_url, path_of_url
from actshard.base._json import interrupted, lines
from actshard.base._schema import AnyText
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ArgumentTypeError,
    ChangedInputError,
    FormatError,
    MissingFileError,
    NotAFileError,
    UnsupportedError,
    from_os,
    from_reader,
)
from actshard.base.location import Location
from actshard.base.storage import Entry
from actshard.tokens.columns import ColumnBlock, joined, of_arrow

if TYPE_CHECKING:
    import pyarrow as pa


# Glob patterns as fsspec and Levanter write them: ``*``, ``?``, ``[...]``, ``**`` and ``{a,b}``.
#
# Paths are returned as given, not made absolute, because shard names are derived from them.


_MAGIC = re.compile(r"[*?[]")


def matching(source: str) -> list[str]:
    """Returns the file of this name, or the files that match the pattern, sorted by name.

    Args:
        source: a path, a ``file://`` URL, or a pattern of either. A URL is decoded first: ``%2A`` is a ``*`` of the pattern.

    Raises:
        MissingFileError: nothing matches.
        NotAFileError: it is a folder. ArgumentError: it is the URL of another machine.
    """
    if is_file_url(source):
        source = path_of_url(source, "sources")
    elif "://" in source:
        raise ArgumentError(f"sources: {source} is a URL; download it and pass the local path")
    path = os.path.expanduser(source)  # noqa: PTH111 -- Path normalizes the string, which shard names are derived from
    kind = Location.at(path).kind()
    if kind == "folder":
        raise NotAFileError("expected a file or a glob of files, found a folder", path=path)
    if kind is not None:
        return [path]
    paths = [match for pattern in _braces(path) for match in sorted(filter(None, _matches(pattern)))]
    if not paths:
        raise MissingFileError("expected a file, or a glob that matches files, found none", path=path)
    return paths


def _braces(pattern: str) -> list[str]:
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None or ("," not in match[1] and ".." not in match[1]):
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if span is not None:
        width = max(len(span[1]), len(span[2])) if "0" in (span[1][:1], span[2][:1]) else 0
        choices = [f"{n:0{width}d}" for n in range(int(span[1]), int(span[2]) + 1)]
    else:
        choices = match[1].split(",")
    return [
        expansion
        for choice in choices
        for expansion in _braces(pattern[: match.start()] + choice + pattern[match.end() :])
    ]


def _matches(pattern: str, folders: bool = False) -> Iterator[str]:
    """Yields paths that match, by the rules of Python's ``glob``; with ``folders``, only folders."""
    folder, name = os.path.split(pattern)
    if not _MAGIC.search(pattern):
        if _is_named(pattern) if name else _is_folder(folder):
            yield pattern
        return
    for parent in _matches(folder, True) if _MAGIC.search(folder) else [folder]:
        for match in _names(parent, name, folders):
            yield os.path.join(parent, match)  # noqa: PTH118 -- paths stay as given


def _names(parent: str, name: str, folders: bool) -> Iterator[str]:
    """Yields names in a folder that match the last component of a pattern."""
    if name == "**":
        if _is_folder(parent):
            yield ""
            yield from _below(parent, folders)
    elif _MAGIC.search(name):
        for entry in _entries(parent, folders):
            if (name.startswith(".") or not entry.name.startswith(".")) and fnmatch.fnmatch(entry.name, name):
                yield entry.name
    elif _is_named(os.path.join(parent, name)) if name else _is_folder(parent):  # noqa: PTH118 -- as given
        yield name


def _below(folder: str, folders: bool) -> Iterator[str]:
    """Yields relative paths at any depth below a folder. Follows symlinks; skips hidden names."""
    for entry in _entries(folder, folders):
        if not entry.name.startswith("."):
            yield entry.name
            for name in _below(os.path.join(folder, entry.name), folders):  # noqa: PTH118 -- as given
                yield os.path.join(entry.name, name)  # noqa: PTH118 -- as given


def _entries(folder: str, folders: bool) -> list[Entry]:
    try:
        entries = Location.at(folder or ".").entries()
    except (ActshardError, ValueError):  # like glob: an unreadable folder matches nothing
        return []
    return [entry for entry in entries if not folders or entry.kind == "folder"]


def _is_folder(path: str) -> bool:
    return Location.at(path or ".").kind() == "folder"


def _is_named(path: str) -> bool:
    return Location.at(path).is_named()


KINDS = (".jsonl", ".json", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
LONGEST_LINE = 1 << 30
"""A line longer than this is an error, so that a file without line breaks is not read into memory."""
_LINE_ENDS = ("\n", "", "\r\n")
_ROWS_AT_ONCE = 1024
_AT_ONCE = 1 << 18


class RowProblem(NamedTuple):
    """An unusable record.

    Attributes:
        number: its line, row or element number, from 1.
        detail: what was expected and what was found.
        what: the unit of ``number``: ``"line"``, ``"row"`` or ``"element"``.
    """

    number: int
    detail: AnyText
    what: str = "line"

    def error(self, path: Path | None) -> FormatError:
        """The exception to raise for this problem."""
        return FormatError(f"{self.what} {self.number}: {self.detail}", path=path)


Record = tuple[int, "Mapping[str, Any] | RowProblem"]
RecordOrBlock = tuple[int, "Mapping[str, Any] | RowProblem | ColumnBlock"]
"""A record, or a block of consecutive ones with the number of the first."""


@dataclass(frozen=True)
class Source:
    """A file of records.

    Attributes:
        path: the file.
        shard: name of the shard built from it.
        version: size and modification time (ns) when it was planned; None: those of now.
    """

    path: Path
    shard: str
    version: tuple[int, int] | None = None

    def size(self) -> int:
        """Size of the file in bytes."""
        return self._location.stat("read").size if self.version is None else self.version[0]

    @property
    def _location(self) -> Location:
        return Location.at(self.path)

    def identity(self) -> dict[str, object]:
        """Identifies the file and its version: path, size and modification time."""
        stat = self._location.stat("read") if self.version is None else None
        size, modified = (stat.size, stat.modified) if stat is not None else self.version or (0, 0)
        return {"path": os.path.abspath(self.path), "size": size, "mtime_ns": modified}  # noqa: PTH100 -- Path.resolve would follow links

    def at_version(self) -> Source:
        """The source with the file's version of now; a later version is an error of :meth:`check_version`."""
        stat = self._location.stat("read")
        return replace(self, version=(stat.size, stat.modified))

    def check_version(self) -> None:
        """Raises ChangedInputError if the file is not of the source's version."""
        stat = self._location.stat("read")
        if self.version is not None and stat.kind == "file" and self.version != (stat.size, stat.modified):
            raise ChangedInputError(
                f"expected {self.version[0]} bytes of {self.version[1]} ns, found {stat.size} of {stat.modified}: the file changed "
                "while it was read; build the cache again, or make the plan again",
                path=self.path,
            )

    @property
    def what(self) -> str:
        """The unit of record numbers."""
        return "row" if kind_of(self.path) == ".parquet" else "line"

    def error(self, problem: RowProblem) -> FormatError:
        """The exception to raise for an unusable record."""
        return problem.error(self.path)

    def records(
        self, columns: Sequence[str], tell: Callable[[int], object] | None = None, *, blocks: bool = False
    ) -> Iterator[RecordOrBlock]:
        """Yields records with their numbers from 1. Unusable ones are yielded as :class:`RowProblem`.

        With ``blocks``, consecutive records with nothing but lists of numbers may be yielded as one block.

        Raises:
            MissingFileError, FileAccessError, FormatError: the file cannot be read, or is truncated.
        """
        kind = kind_of(self.path)
        with reading(self.path), self._location.open("read", pipes=True) as raw:
            watched = Watched(raw, tell)
            if kind == ".parquet":
                plain = compression(self.path) is None
                share = _share_of(self.size(), tell) if plain else None
                yield from parquet_rows(
                    raw if plain else inflated(watched, self.path), columns, self.path, share, blocks=blocks
                )
                return
            stream = inflated(watched, self.path)
            if stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
                stream.read(len(codecs.BOM_UTF8))
            if kind == ".json" and _is_array(stream):
                yield from _array(stream, self.path)
            else:
                yield from parsed_lines(lines(stream, self.path, LONGEST_LINE), columns, blocks=blocks)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors of reading and decompressing into those of the package."""
    try:
        yield
    except ActshardError:
        raise
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise FormatError(f"the compressed data is corrupt or truncated: {error}", path=path) from error
    except OSError as error:
        if error.errno is None:  # raised by the decompressors
            raise FormatError(f"the compressed data is corrupt or truncated: {error}", path=path) from error
        raise from_os(error, path, "read") from error


@dataclass(frozen=True)
class RowSource:
    """Records from a Python function.

    Attributes:
        shard: name of the shard built from them.
        begin: returns a new iterator over all records.
        told: text that identifies the records when an interrupted build is resumed; default: the name.
    """

    shard: str
    begin: Callable[[], Iterable[Mapping[str, object]]] = field(compare=False)
    told: str = ""
    what: str = "row"
    path: Path | None = None

    def size(self) -> int:
        """Unknown, hence 0."""
        return 0

    def identity(self) -> dict[str, object]:
        """Identifies the records."""
        return {"rows": self.told or self.shard}

    def error(self, problem: RowProblem) -> FormatError:
        """The exception to raise for an unusable record."""
        return problem.error(self.path)

    def records(
        self, columns: Sequence[str], tell: Callable[[int], object] | None = None, *, blocks: bool = False
    ) -> Iterator[RecordOrBlock]:
        """Yields records with their numbers from 1."""
        for number, record in enumerate(self.begin(), 1):
            yield number, record if isinstance(record, Mapping) else _no_object(number, record, "row")


AnySource = Source | RowSource


class Watched(io.RawIOBase):
    """A file that reports the number of bytes read."""

    def __init__(self, raw: io.RawIOBase | io.BufferedIOBase, tell: Callable[[int], object] | None) -> None:
        self._raw = raw
        self._tell = tell

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads into a buffer."""
        n = self._raw.readinto(buffer)
        if self._tell is not None:
            self._tell(int(n or 0))
        return int(n or 0)


def kind_of(path: Path) -> str:
    """One of :data:`KINDS`. Raises ArgumentError for other names."""
    suffixes = [s.lower() for s in path.suffixes[-2:]]
    for kind in KINDS:
        if kind in suffixes:
            return kind
    if ".ndjson" in suffixes:
        return ".jsonl"
    if ".txt" in suffixes:
        raise ArgumentError(
            "nothing in a .txt file marks the end of a document: write a JSON line per document, or pass RowSource(name, f), where "
            'f yields {"text": ...} for each one (Levanter takes each line, with its line break, as a document)',
            path=path,
        )
    raise ArgumentError(
        f"expected a file name ending in {', '.join(KINDS)}, with or without {', '.join(COMPRESSIONS)}", path=path
    )


def compression(path: Path) -> str | None:
    """How a file is compressed, by its name."""
    return COMPRESSIONS.get(path.suffix.lower())


def inflated(raw: io.RawIOBase | io.BufferedIOBase, path: Path) -> Any:
    """A stream of a file's decompressed bytes."""
    buffered: io.BufferedReader = io.BufferedReader(raw, 1 << 18)
    how = compression(path)
    if how is not None and not buffered.peek(1):  # a copy that failed; gzip's reader would return no lines
        raise EOFError("the file has no bytes")
    if how == "gzip":
        return gzip.open(buffered)
    if how == "bz2":
        return io.BufferedReader(_Streams(buffered, bz2.BZ2Decompressor), 1 << 18)
    if how == "xz":
        return io.BufferedReader(_Streams(buffered, lzma.LZMADecompressor), 1 << 18)
    if how == "zstd":
        return io.BufferedReader(_Zstd(buffered, path), 1 << 18)
    return buffered


class _Streams(io.RawIOBase):
    """All compressed streams of a file. The readers of bz2 and lzma ignore a damaged stream after a complete one."""

    def __init__(
        self, raw: io.BufferedReader, begin: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]
    ) -> None:
        self._raw = raw
        self._begin = begin
        self._stream = begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self._stream.eof:
                # Zeros between streams, and after the last one, are padding.
                data = self._stream.unused_data.lstrip(b"\0")
                while not data and (data := self._raw.read(_AT_ONCE)):
                    data = data.lstrip(b"\0")
                if not data:
                    return 0
                self._stream = self._begin()
            elif self._stream.needs_input and not (data := self._raw.read(_AT_ONCE)):
                raise EOFError("the file ends within a compressed stream")
            block = self._stream.decompress(data, len(buffer))
            if block:
                buffer[: len(block)] = block
                return len(block)


class _Zstd(io.RawIOBase):
    """pyarrow's decompressor as a Python file. Corrupt data raises EOFError."""

    def __init__(self, raw: io.RawIOBase | io.BufferedIOBase, path: Path) -> None:
        import pyarrow as pa

        self._path = path
        self._stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an operating system error, not corrupt data
            if "too much memory" in str(error):
                raise UnsupportedError(
                    "compressed with a window of more than 128 MiB (zstd --long); compress it without --long, or decompress it",
                    path=self._path,
                ) from error
            raise EOFError(str(error)) from error
        buffer[: len(data)] = data
        return len(data)


def _is_array(stream: io.BufferedReader) -> bool:
    """Whether a ``.json`` file is one value rather than JSON lines. Levanter decides by the first two bytes, too."""
    first = stream.peek(2)[:2] if hasattr(stream, "peek") else b""
    return first[:1] == b"[" or first in (b"{\n", b"{\r")


def _array(stream: IO[bytes], path: Path) -> Iterator[Record]:
    try:
        value = json.loads(stream.read().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"expected a JSON array of objects: {str(error)[:200]}", path=path) from error
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise FormatError(f"expected a JSON array of objects, found {str(value)[:60]}", path=path)
    for number, record in enumerate(value, 1):
        yield number, record if isinstance(record, dict) else _no_object(number, record, "element")


def _no_object(number: int, value: object, what: str) -> RowProblem:
    return RowProblem(number, f"expected an object, found {str(value)[:60]!r}", what)


def parsed_lines(
    lines: Iterable[tuple[int, bytes]], columns: Sequence[str], *, blocks: bool
) -> Iterator[RecordOrBlock]:
    """The records of numbered lines; with ``blocks``, see :meth:`Source.records`."""
    if not blocks:
        return (parsed(number, line) for number, line in lines)
    return joined(lines, columns, parsed)


_decode_json = json.JSONDecoder().raw_decode  # without the checks of json.loads, which take time for each line


def parsed(number: int, line: bytes) -> Record:
    """The record of a line."""
    try:
        text = line.decode()
        record, end = _decode_json(text)
    except (ValueError, RecursionError):
        return _any_record(number, line)
    return (number, record) if type(record) is dict and text[end:] in _LINE_ENDS else _any_record(number, line)


def _any_record(number: int, line: bytes) -> Record:
    """The record of a line that may be unusable, or have spaces around it."""
    try:
        record = json.loads(line.decode("utf-8").rstrip("\r\n"))
    except json.JSONDecodeError as error:
        return number, RowProblem(number, _why(line, error))
    except UnicodeDecodeError as error:
        detail = f"expected UTF-8 text, found byte {line[error.start]:#04x} at {error.start}"
        return number, RowProblem(number, detail)
    except (ValueError, RecursionError) as error:
        return number, RowProblem(number, f"expected a JSON object: {str(error)[:200]}")
    return number, record if isinstance(record, dict) else _no_object(number, record, "line")


def _why(line: bytes, error: json.JSONDecodeError) -> str:
    if not line.strip():
        return "expected a JSON object, found a blank line"
    return f"expected a JSON object: {error.msg} at character {error.pos + 1}{interrupted(line)}"


def _share_of(size: int, tell: Callable[[int], object] | None) -> Callable[[int, int], object]:
    """Reports progress in bytes, proportional to the rows read, because parquet is not read sequentially."""
    reported = 0

    def share(rows: int, total: int) -> None:
        nonlocal reported
        bytes_read = size * rows // total if total else size
        if tell is not None:
            tell(bytes_read - reported)
        reported = bytes_read

    return share


def parquet_rows(
    file: pa.NativeFile,
    columns: Sequence[str],
    path: Path,
    share: Callable[[int, int], object] | None = None,
    groups: list[int] | None = None,
    *,
    blocks: bool = False,
) -> Iterator[RecordOrBlock]:
    """Yields the rows of a Parquet file, or of some of its row groups, numbered from 1; with ``blocks``, see :func:`of_arrow`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # pre_buffer, which is pyarrow's default, reads the columns of all row groups before the first batch.
        parquet = pq.ParquetFile(file if hasattr(file, "fileno") else pa.BufferReader(file.read()), pre_buffer=False)
        present_columns = [name for name in columns if name in parquet.schema_arrow.names]
        number, rows = 0, int(parquet.metadata.num_rows)
        if share is not None and not rows:
            share(0, 0)
        for batch in parquet.iter_batches(batch_size=_ROWS_AT_ONCE, columns=present_columns, row_groups=groups):
            if share is not None:
                share(number + batch.num_rows, rows)
            if not present_columns:  # rows that lack all requested columns still count
                for _ in range(batch.num_rows):
                    number += 1
                    yield number, {}
                continue
            if blocks and (block := of_arrow(batch)) is not None:
                yield number + 1, block
                number += batch.num_rows
                continue
            for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                number += 1
                yield number, dict(zip(batch.schema.names, values, strict=True))
    except (pa.ArrowException, UnicodeDecodeError) as error:  # names of columns, and texts, may not be UTF-8
        raise from_reader(error, path, "read", f"pyarrow cannot read this Parquet file: {error}") from error


def expand(sources: str | os.PathLike[str] | Iterable[object]) -> list[AnySource]:
    """Expands paths and globs (``*``, ``?``, ``**``, ``{a,b}``) to sources, in the order given. Each file is one shard.

    Raises:
        MissingFileError: a path or glob matches nothing.
        ArgumentError: no sources, unsupported file names, or two files with the same shard name.
    """
    if not isinstance(sources, str | os.PathLike | RowSource | Iterable):
        raise ArgumentTypeError(f"sources: expected paths or RowSources, found {type(sources).__name__}")
    items: Iterable[object] = [sources] if isinstance(sources, str | os.PathLike | RowSource) else sources
    paths: list[str] = []
    row_sources: list[RowSource] = []
    for item in items:
        if isinstance(item, RowSource):
            row_sources.append(item)
        elif isinstance(item, str | os.PathLike):
            paths += matching(os.fspath(item))
        else:  # at the first item: a dataset may be endless
            raise ArgumentTypeError(
                f"sources: expected paths or RowSources, found {type(item).__name__}; pass records as RowSource(name, function), "
                "whose function returns an iterator over them"
            )
    if row_sources and paths:
        raise ArgumentError("sources: expected only files or only RowSources, found both")
    if not paths and not row_sources:
        raise ArgumentError("sources: expected at least one file, found none")
    if row_sources:
        expanded: list[AnySource] = [
            RowSource(_shard(i, o.shard), o.begin, o.told or o.shard, o.what) for i, o in enumerate(row_sources)
        ]
        return expanded
    real_paths: dict[str, str] = {}
    for path in paths:
        real_path = os.path.realpath(path)
        if real_path in real_paths:
            also = "" if real_paths[real_path] == path else f", also as {real_paths[real_path]}"
            raise ArgumentError(f"sources: expected each file once, found {path} twice{also}")
        real_paths[real_path] = path
    prefix = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonprefix(paths)  # noqa: PTH120, RUF071 -- by characters, as Levanter does
    names = [path[len(prefix) :].removeprefix("/") for path in paths]
    shards = [_shard(i, name) for i, name in enumerate(names)]
    dotted = [name.replace(".", "_") for name in names]
    for i, name in enumerate(dotted):
        if name in dotted[:i]:
            raise ArgumentError(
                f"sources: {paths[dotted.index(name)]} and {paths[i]} have the same shard name '{name}'; rename one"
            )
    for path in paths:
        kind_of(Path(path))
    return [Source(Path(path), shard) for path, shard in zip(paths, shards, strict=True)]


def _shard(number: int, name: str) -> str:
    """Levanter's name for a shard's folder."""
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    return f"{number:05d}_{safe or 'shard'}"
