"""lmprobe's parquet index: its parts, schema metadata, columns and addresses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard._native import Addresses
from actshard.base._columns import array_of
from actshard.base._json import parse_json, show
from actshard.base.codes import Remark
from actshard.base.containers import ParquetFooter, read_footer
from actshard.base.errors import (
    ActshardError,
    FormatError,
    MissingFileError,
    NotStoredError,
    TruncatedFileError,
    UnsupportedError,
    from_reader,
)
from actshard.base.location import Location

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


# The largest size of a Parquet text column after decoding, from the headers of its pages.
#
# Parquet stores repeated values once, so 12 kB can contain 5 GB of text. Reading such a column as a dictionary is safe, and
# takes eight times as long if its values do not repeat. Page headers give a bound before anything is decoded:
#
#     chunk of a column    [dictionary page] data page, data page, ...       each a header (thrift, compact protocol) and a body
#     PLAIN                values take no more than the page's uncompressed size, which pyarrow enforces
#     dictionary codes     each value takes no more than the longest value of the dictionary
#
# Only regular pages have a bound: headers that the core accepts, and at most one dictionary, in front.


_PLAIN, _CODES = 0, (2, 8)
"""Encodings; PLAIN_DICTIONARY (2) in a dictionary page means PLAIN."""
_PAGES, _PAGE = 1_000, 4_096
"""Limit on the pages of a chunk: ``_PAGES``, plus one per ``_PAGE`` bytes. Parsing must not take longer than decoding."""
_FACTOR = 64
"""The dictionary is not read for chunks that expand at most by this factor."""


class _NoBoundError(Exception):
    """The pages are irregular, so there is no bound."""


def decoded_at_most(part: Location, source: pa.NativeFile, footer: ParquetFooter, name: str) -> int | None:
    """An upper bound of a text column's size after decoding, in bytes; None if its pages have no bound.

    Args:
        part: a local file.
        source: the same file, opened for pyarrow.
        footer: its footer.
        name: the text column.
    """
    leaves = [i for i, leaf in enumerate(footer.leaves) if leaf.path == name and not leaf.max_repetition_level]
    if len(leaves) != 1:
        return None
    dictionaries = _Dictionaries(source, name)
    try:
        return sum(_chunk(part, footer, group, leaves[0], dictionaries) for group in range(footer.num_groups))
    except _NoBoundError:
        return None


def _chunk(part: Location, footer: ParquetFooter, group: int, leaf: int, dictionaries: _Dictionaries) -> int:
    chunks = footer.group(group)
    size = chunks.column(leaf).total_compressed_size
    try:
        pages = chunks.pages(part, leaf, _PAGES + size // _PAGE)
    except (FormatError, TruncatedFileError) as error:
        raise _NoBoundError from error
    plain = codes = dictionary = 0
    entries: int | None = None  # no dictionary
    for page in pages:
        length = max(page.raw, page.stored)  # readers ignore raw if the page is not compressed
        if page.is_dictionary:
            dictionary, entries = length, page.values
        elif page.encoding == _PLAIN:
            plain += length
        elif page.encoding in _CODES and entries is not None:
            codes += page.values
        else:
            raise _NoBoundError
    if entries is not None and codes * dictionary > _FACTOR * size:
        dictionary = dictionaries.longest(group, entries)
    return plain + codes * dictionary


class _Dictionaries:
    """The dictionaries of a text column."""

    def __init__(self, source: pa.NativeFile, name: str) -> None:
        self.source, self.name = source, name

    @cached_property
    def _file(self) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self.source, read_dictionary=[self.name], buffer_size=1 << 20, pre_buffer=False)

    def longest(self, group: int, entries: int) -> int:
        """The length of the longest value in a row group's dictionary, which is read with the first row."""
        import pyarrow.compute as pc

        for batch in self._file.iter_batches(batch_size=1, row_groups=[group], columns=[self.name]):
            values = batch.column(0).dictionary
            if len(values) != entries:  # the first row is not in this dictionary, or it has duplicates
                break
            return int(pc.max(pc.binary_length(values)).as_py() or 0)
        raise _NoBoundError


PREFIX = b"lmprobe:"
LAST_KNOWN = (2, 0)
TOKEN_LISTS = ("token_shard_ids", "token_shard_offsets")
_PART = re.compile(r"(?P<split>.+)-(?P<index>\d{5})-of-(?P<total>\d{5})\.parquet")
_BATCH_ROWS = 16_384
_BATCH_VALUES = 1 << 20
"""Limit on the average number of list values per batch: 16,384 rows with lists of 10,000 tokens would take gigabytes."""
_BUFFER = 1 << 20
"""Bytes of a column that are read at once from a local file."""
_AHEAD = 64 << 20
"""Bytes that are requested at once from a remote store, in whole row groups, because requests are slow."""
_EXPANDED, _EXPANSION = 256 << 20, 64
"""A text column is decoded if it takes at most ``_EXPANDED`` bytes plus ``_EXPANSION`` times the size of its file. A larger column
stays dictionary-encoded."""


_MOST_PARTS = 100_000


def find_parts(path: Location) -> tuple[Location, list[Location]]:
    """The folder to which patterns are relative, and the index files sorted by name."""
    if path.kind() == "file":
        root = path.parent.parent if path.parent.name == "index" else path.parent
        numbered = _PART.fullmatch(path.name)
        if numbered is None:
            return root, [path]
        # One part selects all parts of the index.
        if not path.lists:  # a web server: the other names are derived from this one
            total, width = min(int(numbered["total"]), _MOST_PARTS), len(numbered["total"])
            names = (f"{numbered['split']}-{i:0{width}d}-of-{numbered['total']}.parquet" for i in range(total))
            return root, [path.parent / name for name in names]
        return root, [
            path.parent / entry.name
            for entry in path.parent.entries()
            if entry.name.startswith(f"{numbered['split']}-")
            if entry.name[len(numbered["split"]) + 1 :].endswith(f"-of-{numbered['total']}.parquet")
        ]
    index = path / "index"
    if index.kind() != "folder":
        return path, []
    return path, [index / entry.name for entry in index.entries("*.parquet")]


class Index:
    """The index of a dataset: one row per prompt, and the metadata that describe the tensors."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self.root, paths = find_parts(path)
        self.parts = _ordered_parts(paths, self.root)
        self.warnings: list[Remark] = []
        self.metadata = self._read_metadata()
        self._check_version()
        self.names: tuple[str, ...] = tuple(self.schema.names)
        self.num_rows = sum(read_footer(part).num_rows for part in self.parts)
        if self.num_rows == 0:
            raise FormatError("the index has no rows", path=self.parts[0])
        claimed = self.metadata.get("num_prompts")
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            self.warnings.append(
                Remark("format", f"duplicate column '{twice[0]}': activations can be read, but the table cannot")
            )
        if claimed is not None and claimed != self.num_rows:
            self.warnings.append(
                Remark("claim", f"num_prompts is {show(claimed)}, but the index has {self.num_rows} rows")
            )

    def _file(self, part: Location, coded: Sequence[str] = ()) -> pa.NativeFile:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = part.arrow()
        local = part.storage.local
        try:
            # pre_buffer, which is pyarrow's default, reads the columns of all requested row groups before the first batch.
            return pq.ParquetFile(
                file, read_dictionary=list(coded), buffer_size=_BUFFER if local else 0, pre_buffer=not local
            )
        except (pa.ArrowException, OSError, ValueError) as error:
            file.close()
            if isinstance(error, ActshardError):
                raise
            raise from_reader(error, part, "read", f"expected a Parquet file: {_one_line(error)}") from error

    @cached_property
    def schema(self) -> pa.Schema:
        """The index's schema, with metadata."""
        return self._file(self.parts[0]).schema_arrow

    def _read_metadata(self) -> dict[str, Any]:
        first: dict[str, object] | None = None
        for part in self.parts:
            schema = self._file(part).schema_arrow
            metadata = {}
            for key, value in (schema.metadata or {}).items():
                if key.startswith(PREFIX):
                    metadata[key[len(PREFIX) :].decode("utf-8", "replace")] = _json_or_text(value, part)
            if not metadata:
                raise UnsupportedError(
                    'expected "lmprobe:" schema metadata, found none: format 1.x is not supported; '
                    "convert it with lmprobe.upgrade_dataset_format",
                    path=part,
                )
            if first is None:
                first = metadata
            elif metadata.get("tensors") != first.get("tensors") or schema.names != self.schema.names:
                raise FormatError(f"describes other tensors or columns than {self.parts[0].name}", path=part)
        assert first is not None
        return first

    def _check_version(self) -> None:
        part = self.parts[0]
        stated = self.metadata.get("format_version", "1.0")
        numbers = re.fullmatch(r"(\d{1,6})(?:\.(\d{1,6}))?", str(stated))
        if numbers is None:
            raise FormatError(
                f"field 'format_version': expected a version such as \"2.0\", found {show(stated)}",
                path=part,
                code="metadata",
            )
        version = (int(numbers[1]), int(numbers[2] or 0))
        if version[0] > LAST_KNOWN[0]:
            raise UnsupportedError(
                f"format version {stated} is newer than the supported 2.x; upgrade actshard", path=part
            )
        if version[0] < LAST_KNOWN[0]:
            raise UnsupportedError(
                f"format version {stated} is not supported; convert it to 2.x with lmprobe.upgrade_dataset_format",
                path=part,
            )
        if version > LAST_KNOWN:
            self.warnings.append(
                Remark(
                    "version", f"format version {stated} is newer than actshard knows (2.0); it should only add fields"
                )
            )

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Reads columns by name, concatenated over all parts."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise NotStoredError(f"has no column {unknown[0]!r}; columns are {', '.join(self.names)}", path=self.path)
        self._refuse_twice(names)
        tables = []
        for part in self.parts:
            try:
                # Parquet stores repeated values once: 12 kB can contain 5 GB of text. Dictionaries keep it small.
                texts = [n for n in names if _is_text(self.schema.field(n).type)]
                most = _EXPANDED + _EXPANSION * part.stat().size
                with part.arrow() as file:
                    coded = _unbounded(part, file, texts, most)
                    table = pq.read_table(file, columns=list(names), partitioning=None, read_dictionary=coded)
                for name, column in zip(names, table.columns, strict=True):
                    # pyarrow checks neither strings nor dictionary codes, even if the file declares them (pandas categories).
                    if name in texts or _holds_codes(column.type):
                        column.validate(full=True)
                tables.append(_plain_texts(table, coded, most))
            except (pa.ArrowException, OSError, ValueError) as error:
                if isinstance(error, ActshardError):
                    raise
                message = f"cannot read columns {list(names)}: {_one_line(error)}"
                raise from_reader(error, part, "read", message) from error
        kinds = [{n: t.schema.field(n).type for n in names} for t in tables]
        mixed = [
            n for n in names if any(k[n] != kinds[0][n] for k in kinds) and any(map(_is_coded, (k[n] for k in kinds)))
        ]
        if mixed:  # one part's column was too large to decode
            tables = [_coded(t, mixed) for t in tables]
        try:
            index_table = pa.concat_tables(tables, promote_options="default")
        except pa.ArrowException as error:
            raise FormatError(
                f"the index's parts have incompatible columns: {_one_line(error)}", path=self.path
            ) from error
        return index_table.select(list(names)).replace_schema_metadata(None)

    def _refuse_twice(self, names: Sequence[str]) -> None:
        twice = [name for name in names if self.names.count(name) > 1]
        if twice:
            raise FormatError(f"duplicate column '{twice[0]}'", path=self.parts[0])

    def head(self, names: Sequence[str], n: int) -> pa.Table:
        """Reads columns of the first n rows. Decodes only the batches needed."""
        import pyarrow as pa

        tables, rest = [], n
        for table in self.column_batches(names, min(max(n, 1), _BATCH_ROWS)):
            tables.append(table.slice(0, rest))
            rest -= len(tables[-1])
            if rest <= 0:
                break
        return pa.concat_tables(tables, promote_options="default")

    def column_batches(self, names: Sequence[str], rows: int = _BATCH_ROWS) -> Iterator[pa.Table]:
        """Reads columns of all rows in order, in batches. Text columns that would become too large stay dictionaries."""
        import pyarrow as pa

        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise NotStoredError(f"has no column {unknown[0]!r}; columns are {', '.join(self.names)}", path=self.path)
        self._refuse_twice(names)
        texts = [n for n in names if _is_text(self.schema.field(n).type)]
        for part, _, batch in self.batches(names, rows, texts):
            table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
            if table.num_columns:
                yield _plain_texts(table.select(list(names)), texts, _EXPANDED + _EXPANSION * part.stat().size)

    def batches(
        self, names: Sequence[str], rows: int = _BATCH_ROWS, coded: Sequence[str] = ()
    ) -> Iterator[tuple[Location, int, pa.RecordBatch]]:
        """Reads columns in batches, each with its part and first row. Text columns in ``coded`` stay dictionaries."""
        import pyarrow as pa

        for part in self.parts:
            row = 0
            try:
                for batch in _batches(self._file(part, coded), read_footer(part), names, rows, part.storage.local):
                    for column in batch.columns:
                        if _holds_codes(column.type):  # pyarrow does not check codes against the dictionary
                            column.validate(full=True)
                    yield part, row, batch
                    row += batch.num_rows
            except (pa.ArrowException, OSError, ValueError) as error:
                if isinstance(error, ActshardError):
                    raise
                message = f"cannot read columns {list(names)}: {_one_line(error)}"
                raise from_reader(error, part, "read", message) from error

    def addresses(self, shards: int, shard_column: str, row_column: str, *, lists: bool) -> Addresses:
        """Reads the address columns into the core's table, in batches. No per-token data stay in Python."""
        import pyarrow as pa

        names = [shard_column, row_column, *(TOKEN_LISTS if lists else ())]
        missing = [name for name in names if name not in self.names]
        if missing:
            raise FormatError(f"expected a column '{missing[0]}', found {list(self.names)}", path=self.parts[0])
        self._refuse_twice(names)
        addresses = Addresses(shards)
        count = 0
        for part, row, batch in self.batches(names):
            shard, offset = (int64_of(batch.column(name), name, part, row) for name in names[:2])
            try:
                if lists:
                    (id_ends, ids), (row_ends, rows) = (
                        lists_of(batch.column(name), name, part, row) for name in TOKEN_LISTS
                    )
                    addresses.push(shard, offset, (id_ends, ids, row_ends, rows))
                else:
                    addresses.push(shard, offset)
            except FormatError as error:
                if error.path is None:
                    columns = f"{shard_column}/{row_column}" + ("/" + "/".join(TOKEN_LISTS) if lists else "")
                    raise FormatError(f"columns {columns}: {error.detail}", path=part) from error
                raise
            count += batch.num_rows
        if count != self.num_rows:
            raise FormatError(f"expected {self.num_rows} rows, read {count}", path=self.parts[0])
        if lists:
            # pyarrow's allocator would otherwise keep the memory of the lists.
            pa.default_memory_pool().release_unused()
        return addresses


UNLISTED = "names cannot be listed there to find the index: give the URL of the index file (.../index/NAME.parquet)"


def _ordered_parts(paths: list[Location], root: Location) -> list[Location]:
    """The index files in order. All parts of a numbered set must exist."""
    if not paths and not root.lists:
        raise UnsupportedError(UNLISTED, path=root / "index")
    if not paths:
        raise MissingFileError("expected an index, found no parquet file", path=root / "index")
    if len(paths) == 1 and _PART.fullmatch(paths[0].name) is None:
        return paths
    numbered = [_PART.fullmatch(part.name) for part in paths]
    if any(m is None for m in numbered):
        if len(paths) == 1:
            return paths
        raise FormatError(
            f"expected one index or parts named like train-00000-of-00002.parquet, found {[p.name for p in paths][:8]}",
            path=root / "index",
        )
    sets = {(m["split"], m["total"]) for m in numbered if m is not None}
    if len(sets) > 1:
        raise FormatError(
            f"expected one index, found several: {sorted(sets)}; open one of the files", path=root / "index"
        )
    ((split, total),) = sets
    if len(paths) > int(total):
        raise FormatError(
            f"expected {int(total)} parts, found {len(paths)}: {[p.name for p in paths][:8]}", path=root / "index"
        )
    for i in range(int(total)):
        part = paths[0].parent / f"{split}-{i:05}-of-{total}.parquet"
        if part not in paths:
            raise MissingFileError(f"expected part {i} of {int(total)} of the index, found nothing", path=part)
    return paths


def _unbounded(part: Location, source: pa.NativeFile, names: Sequence[str], most: int) -> list[str]:
    """Text columns that may take more than ``most`` bytes. All those of remote files: each page header costs a request."""
    if not names or not part.storage.local:
        return list(names)
    footer = read_footer(part)
    sizes = {name: decoded_at_most(part, source, footer, name) for name in names}
    return [name for name, size in sizes.items() if size is None or size > most]


def _batches(
    file: pa.NativeFile, footer: ParquetFooter, names: Sequence[str], rows: int, local: bool
) -> Iterator[pa.RecordBatch]:
    """Reads columns in batches of at most ``rows`` rows, and in memory that does not depend on the file's size."""
    paths = [leaf.path for leaf in footer.leaves]
    leaves = [i for i, path in enumerate(paths) if any(path == name or path.startswith(f"{name}.") for name in names)]
    groups = [footer.group(i) for i in range(footer.num_groups)]
    per_row = max((g.column(i).num_values // max(g.num_rows, 1) for g in groups for i in leaves), default=1)
    at_once = min(rows, max(1, _BATCH_VALUES // max(per_row, 1)))
    if local:
        yield from file.iter_batches(batch_size=at_once, columns=list(names))
        return
    first = size = 0
    for end, group in enumerate(groups, 1):
        size += sum(group.column(i).total_compressed_size for i in leaves)
        if size >= _AHEAD or end == len(groups):
            yield from file.iter_batches(batch_size=at_once, row_groups=range(first, end), columns=list(names))
            first, size = end, 0


def _json_or_text(value: bytes, part: Location) -> object:
    """A metadata value, parsed as JSON if possible, else the string itself, as in lmprobe's reader."""
    text = value.decode("utf-8", "replace")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parse_json(text, part)


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _is_coded(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_dictionary(kind))


def _holds_codes(kind: pa.DataType) -> bool:
    """Whether a column contains dictionary codes, directly or nested in lists and structs, according to the type's name."""
    return _is_coded(kind) or "dictionary<" in str(kind)


def _plain_texts(table: pa.Table, texts: Sequence[str], most: int) -> pa.Table:
    """Decodes dictionaries of text columns, except columns whose values would take more than ``most`` bytes.

    Codes must be valid.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for index, name in enumerate(table.column_names):
        column = table[name]
        if name not in texts or not _is_coded(column.type):
            continue
        size = 0
        for chunk in column.chunks:
            lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
            size += int(pc.sum(lengths.cast(pa.int64())).as_py() or 0)
        if size <= most:
            table = table.set_column(index, name, column.cast(column.type.value_type))
    return table


def _coded(table: pa.Table, names: Sequence[str]) -> pa.Table:
    for name in names:
        if not _is_coded(table.schema.field(name).type):
            table = table.set_column(table.column_names.index(name), name, table[name].dictionary_encode())
    return table


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def int64_of(
    column: pa.Array, name: str, part: Location, row: int, ends: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Converts an integer column without nulls to int64. If it holds values of lists, ``ends`` are the ends of each row's list."""
    import pyarrow as pa

    if not pa.types.is_integer(column.type):
        raise FormatError(f"column '{name}': expected integers, found {column.type}", path=part)
    if column.null_count:
        first = int(np.flatnonzero(~column.is_valid().to_numpy(zero_copy_only=False))[0])
        if ends is not None:
            first = int(np.searchsorted(ends, first, "right")) - 1
        raise FormatError(f"column '{name}': row {row + first} {'is' if ends is None else 'holds a'} null", path=part)
    numbers = array_of(column)
    if numbers.dtype == np.uint64 and numbers.size and numbers.max() > np.iinfo(np.int64).max:
        raise FormatError(f"column '{name}': {numbers.max()} is out of range", path=part)
    return np.ascontiguousarray(numbers, dtype=np.int64)


def lists_of(column: pa.Array, name: str, part: Location, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns list boundaries (rows + 1,) and all values of a column of integer lists. A null list has no tokens."""
    import pyarrow as pa

    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise FormatError(f"column '{name}': expected lists of integers, found {column.type}", path=part)
    ends = array_of(column.offsets).astype(np.int64)
    first, last = int(ends[0]), int(ends[-1])
    ends -= first
    values = int64_of(column.values.slice(first, last - first), name, part, row, ends)
    if column.null_count:
        # Arrow does not guarantee that a null list is empty.
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        lengths = np.diff(ends)
        if (lengths[~valid] != 0).any():
            values = values[np.repeat(valid, lengths)]
            ends = np.concatenate([[0], np.cumsum(np.where(valid, lengths, 0))])
    return ends, values
