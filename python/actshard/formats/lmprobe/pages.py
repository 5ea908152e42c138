"""The largest size of a Parquet text column after decoding, from the headers of its pages.

Parquet stores repeated values once, so 12 kB can contain 5 GB of text. Reading such a column as a dictionary is safe, and takes
eight times as long if its values do not repeat. Page headers give a bound before anything is decoded:

.. code-block:: text

    chunk of a column    [dictionary page] data page, data page, ...       each a header (thrift, compact protocol) and a body
    PLAIN                values take no more than the page's uncompressed size, which pyarrow enforces
    dictionary codes     each value takes no more than the longest value of the dictionary

Only regular pages have a bound: headers that the core accepts, and at most one dictionary, in front.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from actshard.base.errors import FormatError, TruncatedFileError
from actshard.base.footers import ParquetFooter
from actshard.base.location import Location

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

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
