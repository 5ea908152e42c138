"""Fixed inputs and digests of the results; ``tests/test_digests.py`` compares them with the recorded ones.

One module per group: ``streams``, ``states``, ``token_batches``, ``files``, ``complaints``, ``reads``. Each has
``found(folder)``, which works in an empty folder and returns plain values.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import actshard
from actshard import _native

GOLDEN = Path(__file__).parents[1] / "golden"
NOW = time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0))


def short(data: bytes) -> str:
    """A digest short enough for a line."""
    return hashlib.sha256(data).hexdigest()[:20]


def of_arrays(*arrays: Any) -> str:
    """A digest of dtypes, shapes and bytes of arrays."""
    digest = hashlib.sha256()
    for array in map(np.asarray, arrays):
        digest.update(f"{array.dtype.name}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def still(folder: Path) -> Iterator[None]:
    """Fixes what files contain besides their inputs: time, version and working directory."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.object(time, "gmtime", return_value=NOW),
            mock.patch.object(time, "monotonic", return_value=0.0),
            mock.patch.object(actshard, "__version__", "0"),
            mock.patch.object(_native, "build_info", return_value={**_native.build_info(), "version": "0"}),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.chdir(before)
