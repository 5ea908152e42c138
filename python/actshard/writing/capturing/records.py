"""Inputs of a capture as records: texts in memory, tables, and files of texts.

A record is a mapping with a text, a chat, or token ids, and further columns. Records have an order, which the dataset keeps, and a
digest, with which a resumed capture recognises its texts.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from actshard.base._arguments import many
from actshard.base._json import lines
from actshard.base.errors import ArgumentError, ArgumentTypeError, ClosedError, FormatError
from actshard.base.location import Location
from actshard.tokens.sources import LONGEST_LINE, RowProblem, Source, compression, inflated, matching, reading
from actshard.writing.capturing.column_types import ColumnTypes

Row = Mapping[str, object]
TEXT, CHAT, IDS, MASK = "text", "messages", "input_ids", "attention_mask"
_KEYS = (TEXT, "prompt", CHAT, IDS)
"""Columns that are searched for an example's text, in this order."""
_PIECE = 1024
"""Records whose types are looked at together."""
_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".json", ".parquet")


@dataclass(frozen=True)
class RecordsSummary:
    """The first pass over records.

    Attributes:
        count: number of records; None if they can be read only once.
        names: columns, in the order in which they first occur.
        digest: SHA-256 of all records; None if they can be read only once.
        types: of the columns; none if the records can be read only once.
        texts: columns that need a tokenizer: with texts or chats; of records that can be read only once, those whose first value is
            no list of token ids.
    """

    count: int | None
    names: tuple[str, ...]
    digest: str | None
    types: ColumnTypes = field(default_factory=ColumnTypes)
    texts: frozenset[str] = frozenset()


class TextRecords:
    """Records in their order. :meth:`summary` reads them once; an iterator can be read only once, so its summary is partial.

    Attributes:
        what: what they are, for messages.
        files: the files that they are read from; none if they are in memory.
    """

    def __init__(
        self, begin: Callable[[], Iterable[object]], what: str, *, once: bool = False, files: Sequence[Path] = ()
    ) -> None:
        self._begin = begin
        self.what, self.files = what, tuple(files)
        self._iterator = iter(begin()) if once else None
        self._first: list[Row] = []
        self._summary: RecordsSummary | None = None

    def __iter__(self) -> Iterator[Row]:
        """Yields the records. Raises ArgumentError for other values, with their number."""
        if self._iterator is None:
            yield from (_row(record, number) for number, record in enumerate(self._begin()))
            return
        if self._summary is not None and not self._first and self._summary.names:
            raise ClosedError("texts: the iterator has been read; pass a list, or a new iterator")
        first, self._first = self._first, []
        yield from first
        yield from (_row(record, number) for number, record in enumerate(self._iterator, len(first)))

    def summary(self) -> RecordsSummary:
        """Number, columns and digest of the records. Reads all of them, except of an iterator, where it is the first record."""
        if self._summary is None:
            self._summary = self._read_once() if self._iterator is not None else self._read_all()
        return self._summary

    def _read_once(self) -> RecordsSummary:
        assert self._iterator is not None
        for number, record in enumerate(self._iterator):
            self._first.append(_row(record, number))
            if row := self._first[-1]:
                texts = frozenset(name for name, value in row.items() if value is None or _needs_tokenizer(value))
                return RecordsSummary(None, tuple(row), None, texts=texts - {IDS})
        return RecordsSummary(len(self._first), (), None)

    def _read_all(self) -> RecordsSummary:
        digest, count = hashlib.sha256(), 0
        types, texts, records = ColumnTypes(), set[str](), iter(self)
        names: dict[str, None] = {}
        while piece := list(itertools.islice(records, _PIECE)):
            for number, record in enumerate(piece, count):
                names |= dict.fromkeys(record)
                texts.update(name for name, value in record.items() if _needs_tokenizer(value))
                text = record.get(TEXT) if len(record) == 1 else None
                plain = text if isinstance(text, str) else _json(record, number)
                encoded = plain.encode("utf-8", "surrogatepass")
                digest.update(b"%d:" % len(encoded))
                digest.update(encoded)
            types.add(piece, count, [name for name in names if name != IDS])
            count += len(piece)
        return RecordsSummary(count, tuple(names), digest.hexdigest(), types, frozenset(texts - {IDS}))

    def text_key(self, name: str | None) -> str:
        """The column with the text. Raises ArgumentError if the records have none."""
        names = self.summary().names
        if name is None:
            key = next((key for key in _KEYS if key in names), None)
            if key is None and names:
                raise ArgumentError(
                    f"text: expected one of the columns {', '.join(_KEYS)} in {self.what}, found {', '.join(names[:20])}. Name the "
                    "column with text="
                )
            return key or TEXT
        if names and name not in names:
            raise ArgumentError(
                f"text: expected a column of {self.what}, one of {', '.join(names[:20])}, found {name!r:.80}"
            )
        return name


def _needs_tokenizer(value: object) -> bool:
    """Whether a value is a text or a chat."""
    return isinstance(value, str) or (isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping))


def _json(record: Row, number: int) -> str:
    try:
        return json.dumps(record, sort_keys=True, default=_plain)
    except TypeError as error:  # keys of several types, inside a column
        raise ArgumentTypeError(f"texts: expected dicts with str as keys at {number}: {error}") from error


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return repr(value)


def _row(record: object, number: int) -> Row:
    """The record as a mapping. ``[]`` has no columns: it may be a chat or token ids."""
    if isinstance(record, str):
        return {TEXT: record}
    if isinstance(record, Mapping):
        bad_name = next((name for name in record if not isinstance(name, str)), None)
        if bad_name is not None:
            raise ArgumentTypeError(f"texts: expected names of columns as str, found {bad_name!r:.80} at {number}")
        return record
    if isinstance(record, list | tuple) and not record:
        return {}
    if isinstance(record, np.ndarray) or (
        isinstance(record, Sequence) and not isinstance(record, bytes | bytearray) and are_integers(record)
    ):
        return {IDS: record}
    if isinstance(record, Sequence) and not isinstance(record, bytes | bytearray):
        return {CHAT: record}
    if record is None:
        return {TEXT: None}
    raise ArgumentTypeError(
        f"texts: expected texts, lists of token ids or mappings, found {type(record).__name__} at {number}"
    )


def are_integers(values: Sequence[object]) -> bool:
    """Whether all values are integers. Looks at their types once each: a million token ids take milliseconds."""
    return all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, values)))


def records_of(texts: Any) -> TextRecords:
    """Returns the records of texts in memory, of a table or dataset, or of files.

    Args:
        texts: a path, a glob or a folder, as str or Path, or a list of Paths; a list of texts, of token ids, of chats or of
            mappings; a ``pyarrow.Table``, or a data frame of pandas or polars; a ``datasets.Dataset``; or an iterator over such
            values, which cannot be resumed.

    Raises:
        ArgumentError, ArgumentTypeError: other values. MissingFileError: there is no such file.
    """
    if isinstance(texts, str | os.PathLike):
        return _of_files([os.fspath(texts)])
    if hasattr(texts, "to_batches"):  # a pyarrow.Table
        table: Any = texts
        return TextRecords(
            lambda: itertools.chain.from_iterable(b.to_pylist() for b in table.to_batches(1024)), "the table"
        )
    if hasattr(texts, "to_arrow"):  # a polars.DataFrame
        return records_of(texts.to_arrow())
    if hasattr(texts, "iterrows"):  # a pandas.DataFrame, which iterates over names
        import pyarrow as pa

        return records_of(pa.Table.from_pandas(texts, preserve_index=False))
    if isinstance(texts, bytes | bytearray | Mapping) or not isinstance(texts, Iterable):
        several = isinstance(texts, Mapping) and all(hasattr(part, "column_names") for part in texts.values())
        advice = f". Pass one split: {', '.join(map(repr, texts))}" if several and texts else ""
        raise ArgumentTypeError(f"texts: expected a path or a list of texts, found {type(texts).__name__}{advice}")
    if isinstance(texts, Sequence) and texts and all(isinstance(item, os.PathLike) for item in texts):
        return _of_files([os.fspath(item) for item in texts])
    if isinstance(texts, Iterator):
        return TextRecords(lambda: texts, "the iterator", once=True)
    return TextRecords(lambda: texts, "texts")


def _of_files(names: list[str]) -> TextRecords:
    files = [Path(file) for name in names for file in _files(name)]
    shown = str(files[0]) if len(files) == 1 else many(len(files), "file")
    return TextRecords(lambda: itertools.chain.from_iterable(_records(file) for file in files), shown, files=files)


def _files(name: str) -> list[str]:
    """The file of this name, the files that match a glob, or a folder's files of texts, sorted by name."""
    if "://" in name and not name.startswith("file://"):
        raise ArgumentError(
            f"texts: {name} is a URL; stage it, or pass rows: datasets.load_dataset(...) for a dataset of the hub"
        )
    folder = Location.of(name, "texts")
    if folder.kind() != "folder":
        files = matching(name)
    else:
        names = sorted(entry.name for entry in folder.entries() if entry.kind == "file")
        files = [str(folder / file) for file in names if not file.startswith(".") and _suffix(Path(file)) is not None]
        if not files:
            raise ArgumentError(f"texts: expected files ending in {', '.join(_SUFFIXES)}, found none", path=folder)
    for file in files:
        if _suffix(Path(file)) is None:
            raise ArgumentError(f"texts: expected a file name ending in {', '.join(_SUFFIXES)}", path=file)
    return files


def _suffix(path: Path) -> str | None:
    """The ending that decides how a file is read: ``.txt``, or one of the files of records."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    return next((suffix for suffix in _SUFFIXES if suffix in suffixes), None)


def _records(path: Path) -> Iterator[Row]:
    if _suffix(path) == ".txt":
        yield from _lines(path)
        return
    source = Source(path, path.name)
    for _, record in source.records(_columns(path)):
        if isinstance(record, RowProblem):
            raise source.error(record)
        assert isinstance(record, Mapping), "blocks are yielded on request only"
        yield record


def _columns(path: Path) -> list[str]:
    """The columns of a Parquet file; files of JSON yield all fields."""
    if _suffix(path) != ".parquet":
        return []
    import pyarrow.parquet as pq

    raw: object
    with reading(path), Location.at(path).open("read") as raw:
        source = raw if compression(path) is None else io.BytesIO(inflated(raw, path).read())
        return list(pq.ParquetFile(source).schema_arrow.names)


def _lines(path: Path) -> Iterator[Row]:
    """A text per line, without its line break. Empty lines are empty examples, so that numbers of lines and examples agree."""
    raw: object
    with reading(path), Location.at(path).open("read", pipes=True) as raw:
        for number, line in lines(inflated(raw, path), path, LONGEST_LINE):
            try:
                yield {TEXT: line.decode("utf-8").rstrip("\r\n")}
            except UnicodeDecodeError as error:
                raise FormatError(
                    f"line {number}: expected UTF-8 text, found byte {line[error.start]:#04x} at {error.start}",
                    path=path,
                ) from error
