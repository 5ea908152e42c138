"""Writes folders of .npy files; see docs/formats/plain.md."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from actshard.formats.plain_writing import PlainTarget
from actshard.formats.target import only


class NpyTarget(PlainTarget):
    """Writes .npy files, which ``numpy.load(mmap_mode="r")`` maps."""

    format: ClassVar[str] = "npy"
    suffix: ClassVar[str] = ".npy"
    hint: ClassVar[str] = 'np.load("{file}", mmap_mode="r")'

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        why = ", because .npy files have no such type; safetensors files have" if dtype.name == "bfloat16" else ""
        only(dtype, ("F16", "F32", "F64"), "npy", why)

    def header(self, key: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
        """Version 1.0 with 128 bytes, as numpy writes it."""
        text = f"{{'descr': '{dtype.newbyteorder('<').str}', 'fortran_order': False, 'shape': {shape}, }}"
        return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.encode().ljust(117) + b"\n"
