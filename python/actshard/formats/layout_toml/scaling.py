"""Scales of described activations: float8 or int8 codes whose products with the scales are the rows, in bfloat16.

::

    activations   float8 or int8, dense in C order              (example, layer, token, dim)
    scales        float32, float16 or bfloat16, broadcast       (example, 1, token, 1), or fewer axes, aligned at the last

Float32 scales in the same file as the codes are read with them; other scales are kept in memory. The core multiplies arrays of
three axes, so neighbouring axes with the same kind of scale are joined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard._native import StoredArray
from actshard.base._arguments import stored
from actshard.base.errors import ActshardError, FormatError, UnsupportedError
from actshard.base.location import Location
from actshard.formats.layout_toml.description import Description, DescriptionReader, Part
from actshard.formats.layout_toml.files import OpenedFile, viewed
from actshard.formats.scales import CODES

FLOATS = ("F32", "F16", "BF16")
Scaled = tuple[StoredArray, StoredArray, NDArray[np.float32] | None]
"""Codes and scales of three axes, and the values of scales that are not read from the file."""


class Scaler:
    """Joins codes and scales of a description."""

    def __init__(self, root: Location, description: Description, part: Part, limit: int) -> None:
        self.part, self.axes, self.limit = part, description.activations.axes, limit
        self._reader = DescriptionReader(root, description.source, description.text)

    def error(self, text: str, path: Location, kind: type[ActshardError] = FormatError) -> ActshardError:
        """An error about a file, with the line of the table."""
        line = self._reader.line("activations.scales")
        where = f"line {line} of the description: " if line else ""
        return kind(f"{where}activations.scales: {text}", path=path)

    def joined(self, codes_file: OpenedFile, codes: StoredArray, scales_file: OpenedFile, scale_array: Any) -> Scaled:
        """Codes and their scales, for the core.

        Raises:
            FormatError: scales have an unexpected shape or dtype, or are NaN or infinite.
            UnsupportedError: codes are compressed or not in C order, or scales do not fit in memory.
        """
        path = scales_file.path
        if codes.dtype not in CODES:
            raise self.error(f"expected activations of {', '.join(CODES)}, found {codes.dtype}", codes_file.path)
        shape = list(codes.shape)
        if codes_file.gzipped or codes.deflated is not None or list(codes.strides) != _dense(shape):
            text = "scaled activations must be stored uncompressed and in C order"
            raise self.error(text, codes_file.path, UnsupportedError)
        if not isinstance(scale_array, StoredArray):
            raise self.error(f"expected a tensor, found {type(scale_array).__name__}", path)
        dtype = self.part.dtype or scale_array.dtype
        if stored(dtype).itemsize != stored(scale_array.dtype).itemsize or dtype not in FLOATS:
            raise self.error(f"expected float32, float16 or bfloat16, found {scale_array.dtype}", path)
        ones = self._align_shape(list(scale_array.shape), shape, path)
        if 4 * math.prod(ones) > self.limit:
            text = f"{math.prod(ones):,} scales need more than the {self.limit:,} bytes of decoded_memory"
            raise self.error(text, path, UnsupportedError)
        values = viewed(scales_file, scale_array, self.part).reshape(ones).astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise self.error(f"expected finite scales, found {values.flat[bad[0]]} at {bad[0]}", path)
        codes_shape, per = _join_axes(shape, ones)
        code_array = StoredArray(codes.dtype, codes_shape, _dense(codes_shape), codes.offset, False)
        in_memory = None
        if per is None:  # scales vary along axes that cannot be joined: repeat them along all but the last
            per = [math.prod(shape[:-1]), 1, ones[-1]]
            codes_shape = [per[0], 1, shape[-1]]
            if 4 * math.prod(per) > self.limit:
                raise self.error(f"scales of {ones} for {shape}: too many to repeat in memory", path, UnsupportedError)
            code_array = StoredArray(codes.dtype, codes_shape, _dense(codes_shape), codes.offset, False)
            in_memory = np.ascontiguousarray(np.broadcast_to(values, (*shape[:-1], ones[-1]))).reshape(-1)
        elif not _in_place(codes_file, scales_file, scale_array, dtype):
            in_memory = np.ascontiguousarray(values).reshape(-1)
        offset = scale_array.offset if in_memory is None else 0
        return code_array, StoredArray("F32", per, _dense(per), offset, False), in_memory

    def _align_shape(self, scale_shape: list[int], shape: list[int], path: Location) -> list[int]:
        """The scales' shape with one axis per axis of the codes."""
        axes = self.part.axes
        if axes:
            if len(axes) != len(scale_shape):
                raise self.error(f"axes {list(axes)}: expected {len(axes)} axes, found the shape {scale_shape}", path)
            sizes = dict(zip(axes, scale_shape, strict=True))
            aligned_shape = [sizes.get(axis, 1) for axis in self.axes]
        else:
            aligned_shape = [1] * (len(shape) - len(scale_shape)) + scale_shape
        if len(aligned_shape) != len(shape) or any(n not in (1, m) for n, m in zip(aligned_shape, shape, strict=True)):
            remedy = "" if axes else "; name them with 'axes' if they are others than the last"
            raise self.error(f"expected axes of {shape} or 1, found {scale_shape}{remedy}", path)
        return aligned_shape


def _in_place(codes: OpenedFile, scales: OpenedFile, scale_array: StoredArray, dtype: str) -> bool:
    """Whether the core can read the scales from the file of the codes."""
    dense = list(scale_array.strides) == _dense(list(scale_array.shape))
    plain = dense and not scale_array.swapped and scale_array.deflated is None and not scales.gzipped
    return plain and dtype == "F32" and codes.path == scales.path


def _dense(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for n in range(len(shape) - 2, -1, -1):
        strides[n] = strides[n + 1] * max(shape[n + 1], 1)
    return strides


def _join_axes(shape: list[int], ones: list[int]) -> tuple[list[int], list[int] | None]:
    """Codes' and scales' shapes with axes joined to three; None for scales where this is not possible."""
    axes: list[list[int]] = []
    for count, scale_count in zip(shape, ones, strict=True):
        if count == 1:
            continue
        if axes and (axes[-1][1] > 1 or axes[-1][0] == 0) == (scale_count > 1):
            axes[-1] = [axes[-1][0] * count, axes[-1][1] * scale_count]
        else:
            axes.append([count, scale_count])
    if len(axes) > 3 or 0 in shape:
        return shape, None
    axes = [[1, 1]] * (3 - len(axes)) + axes
    return [count for count, _ in axes], [scale_count for _, scale_count in axes]
