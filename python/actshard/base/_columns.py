"""Arrow columns of numpy arrays, and arrays of columns.

``pyarrow.array`` and ``to_numpy`` import pandas, if it is installed: 0.7 to 1.2 s in each new process. A process that opens
a dataset, or runs one task of a plan, would spend more time there than on its work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


def numbers(values: NDArray[np.generic]) -> pa.Array:
    """A column of integers or floats ``(n,)``, without nulls. Shares memory with ``values`` where these are contiguous."""
    import pyarrow as pa

    flat = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])


def array_of(column: pa.Array | pa.ChunkedArray) -> NDArray[np.generic]:
    """The values of a column of integers or floats ``(n,)``, which must not have nulls. A read-only view of one chunk."""
    import pyarrow as pa

    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.from_dlpack(chunk) for chunk in chunks or [pa.nulls(0, column.type)]]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def pick_rows(table: pa.Table, places: NDArray[np.int64]) -> pa.Table:
    """Rows of a table, in this order.

    pyarrow's ``take`` returns lists with wrong offsets, without an error, if they have more than 2^31 elements together. Here they
    are in several chunks.
    """
    import pyarrow as pa

    if not len(places):
        return table.slice(0, 0)
    steps = np.diff(places)
    if (steps == 1).all():
        return table.slice(int(places[0]), len(places))
    if (steps > 0).all():  # chunk by chunk, and never more than a chunk has
        flags = np.zeros(table.num_rows, np.bool_)
        flags[places] = True
        bits = pa.py_buffer(np.packbits(flags, bitorder="little"))
        return table.filter(pa.Array.from_buffers(pa.bool_(), len(flags), [None, bits]))
    largest = max(
        (_most_elements(chunk) for column in table.columns for chunk in column.chunks if len(chunk)), default=1
    )
    count = max(_OFFSETS // largest, 1)
    if count > 1:
        blocks = [places[first : first + count] for first in range(0, len(places), count)]
        with contextlib.suppress(pa.ArrowInvalid):  # chunks that are too large together
            return pa.concat_tables([table.take(numbers(block)) for block in blocks])
    return pa.concat_tables([table.slice(place, 1) for place in places.tolist()])


_OFFSETS = (1 << 31) - 1
"""The largest offset of an array with 32-bit offsets."""


def _most_elements(values: pa.Array) -> int:
    """The most elements, at any depth, that a value of an array has, or more."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    types = pa.types
    if types.is_struct(kind):
        return max((_most_elements(child) for child in values.flatten()), default=1)
    if types.is_map(kind):
        longest = int(np.diff(array_of(values.offsets)).max(initial=1))
        return max(longest, 1) * max(_most_elements(values.keys), _most_elements(values.items))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return max(pc.max(pc.list_value_length(values)).as_py() or 0, 1) * _most_elements(values.flatten())
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return max(pc.max(pc.binary_length(values)).as_py() or 0, 1)
    if types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):  # unions and views, which no format has
        return _OFFSETS
    return 1


@contextmanager
def map_arrow(path: Path) -> Iterator[pa.MemoryMappedFile]:
    """Memory-maps a file of Arrow data. Arrays read from it keep the mapping."""
    import pyarrow as pa

    with path.open("rb") as file:
        name = str(path)
        try:
            name.encode()
        except UnicodeEncodeError:  # pyarrow accepts only UTF-8 paths
            name = f"/dev/fd/{file.fileno()}"
        with pa.memory_map(name) as source:
            yield source
