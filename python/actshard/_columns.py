"""Arrow columns of numpy arrays.

``pyarrow.array`` imports pandas, if it is installed, to find out whether its argument is one of pandas' objects: 0.7 s in each new
process. A process that runs one task of a plan would spend more time there than on its task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


def numbers(values: NDArray[Any]) -> pa.Array:
    """A column of integers or floats ``(n,)``, without nulls. Shares memory with ``values`` where these are contiguous."""
    import pyarrow as pa

    flat = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])
