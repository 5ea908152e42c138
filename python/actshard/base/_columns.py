"""Arrow columns of numpy arrays, and arrays of columns.

``pyarrow.array`` and ``to_numpy`` import pandas, if it is installed: 0.7 to 1.2 s in each new process. A process that opens
a dataset, or runs one task of a plan, would spend more time there than on its work.
"""

from __future__ import annotations

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
