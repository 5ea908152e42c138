"""Footers of Parquet files: row groups, and the offsets, sizes and ranges of their columns.

The core parses them, because pyarrow's accessors of a column chunk (``metadata.row_group(i).column(j)``) end the process for some
damaged footers. pyarrow reads schemas and values: its errors for the same files are Python exceptions.
"""

from __future__ import annotations

import actshard._native as _native
from actshard._native import ParquetFooter
from actshard.base.errors import ActshardError
from actshard.base.location import Location

_END = 8
"""Bytes after the footer: its length, and a mark."""
_FIRST = 64 << 10
"""Bytes of the first read, which contain most footers."""

__all__ = ["ParquetFooter", "read_footer"]


def read_footer(path: Location) -> ParquetFooter:
    """Reads and checks the footer of a Parquet file, in one read or two. Values and the headers of pages are not read.

    Raises:
        MissingFileError, NotAFileError, FileAccessError: the file cannot be read.
        FormatError, TruncatedFileError: the footer is damaged; the error names the byte.
        UnsupportedError: the file is encrypted.
    """
    size = path.regular("open").size
    start = max(size - _FIRST, 0)
    tail = path.read(start, size - start)
    try:
        begin = _native.parquet_footer_begin(tail[-_END:], size)
        if begin < start:
            start = begin
            tail = path.read(start, size - start)
        return _native.parquet_footer(tail[begin - start : -_END], begin)
    except ActshardError as error:
        error.path = error.path or path.place
        raise
