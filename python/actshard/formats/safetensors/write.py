"""Writes folders of .safetensors files; see docs/formats/plain.md."""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np

from actshard.base._arguments import name_of
from actshard.formats.plain_writing import KEY, LARGEST, PlainTarget
from actshard.formats.target import FLOATS, only


class SafetensorsTarget(PlainTarget):
    """Writes .safetensors files with one tensor each, named ``activations``."""

    format: ClassVar[str] = "safetensors"
    suffix: ClassVar[str] = ".safetensors"
    hint: ClassVar[str] = f'safetensors.safe_open("{{file}}", "pt").get_slice("{KEY}")'

    def check_dtype(self, dtype: np.dtype[np.generic]) -> None:
        only(dtype, FLOATS, "safetensors", "")

    def header(self, key: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
        """A header with room for any shape, filled with spaces."""
        name = "I64" if dtype.kind == "i" else name_of(dtype)
        header, largest = (
            json.dumps(
                {key: {"dtype": name, "shape": list(header_shape), "data_offsets": [0, end]}}, separators=(",", ":")
            )
            for header_shape, end in (
                (shape, int(np.prod(shape, dtype=object)) * dtype.itemsize),
                ((*LARGEST, *shape[-1:]), 10**18),
            )
        )
        text = header.encode().ljust(-(-len(largest) // 64) * 64 + 56)
        return len(text).to_bytes(8, "little") + text

    def more_lines(self, key: str) -> list[str]:
        return [f'tensor = "{key}"']
