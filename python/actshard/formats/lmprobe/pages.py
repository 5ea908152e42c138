"""The largest size of a Parquet text column after decoding, from the headers of its pages.

Parquet stores repeated values once, so 12 kB can contain 5 GB of text. Reading such a column as a dictionary is safe, and takes
eight times as long if its values do not repeat. Page headers give a bound before anything is decoded:

.. code-block:: text

    chunk of a column    [dictionary page] data page, data page, ...       each a header (thrift, compact protocol) and a body
    PLAIN                values take no more than the page's uncompressed size, which pyarrow enforces
    dictionary codes     each value takes no more than the longest value of the dictionary

Only regular pages have a bound: increasing field numbers in headers, and at most one dictionary, in front.
Source: ``parquet.thrift`` of the format's repository.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_PLAIN, _CODES = 0, (2, 8)
"""Encodings; PLAIN_DICTIONARY (2) in a dictionary page means PLAIN."""
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_HEADERS = (512, 1 << 16)
"""Bytes read for a header: first the small number, then the large one, because statistics can make a header long."""
_PAGES, _PAGE = 1_000, 4_096
"""Limit on the pages of a chunk: ``_PAGES``, plus one per ``_PAGE`` bytes. Parsing must not take longer than decoding."""
_FACTOR = 64
"""The dictionary is not read for chunks that expand at most by this factor."""
_DEPTH = 4

Thrift = dict[int, Any]


class _NoBoundError(Exception):
    """The pages are irregular, so there is no bound."""


def decoded_at_most(source: pa.NativeFile, file: pq.ParquetFile, name: str) -> int | None:
    """An upper bound of a text column's size after decoding, in bytes; None if its pages have no bound.

    Args:
        source: the open file.
        file: the same file, opened by pyarrow.
        name: the text column.
    """
    found = [i for i in range(len(file.schema)) if file.schema.column(i).path == name]
    if len(found) != 1 or file.schema.column(found[0]).max_repetition_level:
        return None
    size = 0
    try:
        for group in range(file.metadata.num_row_groups):
            size += _chunk(source, file, name, group, found[0])
    except _NoBoundError:
        return None
    return size


def _chunk(source: pa.NativeFile, file: pq.ParquetFile, name: str, group: int, column: int) -> int:
    about = file.metadata.row_group(group).column(column)
    begin, size = about.data_page_offset, about.total_compressed_size
    first = about.dictionary_page_offset
    if first is not None and 0 < first < begin:
        begin = first
    plain = codes = dictionary = 0
    entries: int | None = None  # no dictionary
    at, end = begin, begin + size
    left = _PAGES + size // _PAGE
    while at < end and left:
        left -= 1
        header, body = _header(source, at, end)
        kind, raw, stored = (_number(header, i) for i in (1, 2, 3))
        if kind == _DICTIONARY and at == begin:
            dictionary, entries = (
                max(raw, stored),
                _number(header.get(7), 1),
            )  # readers ignore raw if the page is not compressed
        elif kind in (_DATA, _DATA_2):
            values, encoding = ((5, 2), (8, 4))[kind == _DATA_2]
            count, encoding = _number(header.get(values), 1), _number(header.get(values), encoding)
            if encoding == _PLAIN:
                plain += max(raw, stored)
            elif encoding in _CODES and entries is not None:
                codes += count
            else:
                raise _NoBoundError
        else:
            raise _NoBoundError
        at = body + stored
    if at != end:
        raise _NoBoundError
    if entries is not None and codes * dictionary > _FACTOR * size:
        dictionary = _longest(source, file, name, group, entries)
    return plain + codes * dictionary


def _longest(source: pa.NativeFile, file: pq.ParquetFile, name: str, group: int, entries: int) -> int:
    """The length of the longest value in a chunk's dictionary, which is read with the first row."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    coded = pq.ParquetFile(
        source, metadata=file.metadata, read_dictionary=[name], buffer_size=1 << 20, pre_buffer=False
    )
    for batch in coded.iter_batches(batch_size=1, row_groups=[group], columns=[name]):
        values = batch.column(0).dictionary
        if len(values) != entries:  # the first row is not in this dictionary, or it has duplicates
            break
        return int(pc.max(pc.binary_length(values)).as_py() or 0)
    raise _NoBoundError


def _header(source: pa.NativeFile, at: int, end: int) -> tuple[Thrift, int]:
    """A page's header, and the offset of its body."""
    for length in _HEADERS:
        source.seek(at)
        data = source.read(min(length, end - at))
        try:
            header, used = _struct(data, 0, 0)
        except IndexError:  # the header is longer
            continue
        return header, at + used
    raise _NoBoundError


def _number(header: Any, field: int) -> int:
    value = header.get(field) if isinstance(header, dict) else None
    if type(value) is not int or value < 0:
        raise _NoBoundError
    return value


def _struct(data: bytes, at: int, depth: int) -> tuple[Thrift, int]:
    """Parses a struct of numbers, flags, strings and structs. Field numbers must increase, so no field occurs twice."""
    found: Thrift = {}
    field = 0
    if depth > _DEPTH:
        raise _NoBoundError
    while (byte := data[at]) != 0:
        at += 1
        step, kind = byte >> 4, byte & 15
        field += step
        if not step:
            raise _NoBoundError
        if kind in (1, 2):
            found[field] = kind == 1
        elif kind == 3:
            at += 1
        elif kind in (4, 5, 6):
            value, at = _varint(data, at)
            found[field] = (value >> 1) ^ -(value & 1)
        elif kind == 8:
            length, at = _varint(data, at)
            at += length
        elif kind == 12:
            found[field], at = _struct(data, at, depth + 1)
        else:
            raise _NoBoundError
    return found, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise _NoBoundError
