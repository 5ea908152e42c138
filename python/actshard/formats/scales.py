"""Scaled states: bfloat16 rows stored as float8 or int8 codes with float32 scales, and the resulting error.

::

    scale = max(largest finite magnitude / largest code, 1e-12)      per token, layer or channel of an example, or one for it
    code  = value / scale, rounded to nearest, ties to even
    read: code * scale rounded to bfloat16, the product rounded to bfloat16

Source: hs-connectors 0.9.0, which stores float8_e4m3fn with a scale per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base._arguments import NUMPY_BY_NAME, name_of
from actshard.base.errors import ArgumentError, DtypeError

CODES = ("F8_E4M3", "F8_E5M2", "I8")
"""Dtypes of codes."""
AXES: dict[str, tuple[bool, bool, bool]] = {
    "token": (True, False, False),
    "whole": (False, False, False),
    "layer": (False, True, False),
    "channel": (False, False, True),
}
"""For each kind of scales, whether they vary along tokens, layers and channels."""


@dataclass
class ScaleLoss:
    """The error of scaled states: differences between the bfloat16 rows as read and as given."""

    max_abs_error: float = 0.0
    max_row_error: float = 0.0
    """Error of the worst row, relative to its L2 norm."""
    squared_error: float = 0.0
    squared_values: float = 0.0
    saturated: int = 0
    vanished: int = 0
    """Number of non-zero values that became zero."""
    nan: int = 0

    @property
    def relative_error(self) -> float:
        """L2 norm of the errors divided by the L2 norm of the values."""
        return math.sqrt(self.squared_error / self.squared_values) if self.squared_values else 0.0

    def add(self, other: ScaleLoss) -> None:
        """Adds the error of further rows."""
        self.max_abs_error = max(self.max_abs_error, other.max_abs_error)
        self.max_row_error = max(self.max_row_error, other.max_row_error)
        for name in ("squared_error", "squared_values", "saturated", "vanished", "nan"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ScaleLoss:
        """Restores an error from the result of :func:`dataclasses.asdict`. Raises TypeError for other fields or values."""
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()):
            raise TypeError("expected numbers")
        return cls(**values)

    def __str__(self) -> str:
        nan = f"; {self.nan:,} values are NaN, as in the source" if self.nan else ""
        return (
            f"relative error {self.relative_error:.2g}, of the worst row {self.max_row_error:.2g}; largest absolute error "
            f"{self.max_abs_error:.3g}; {self.saturated:,} values saturated; {self.vanished:,} became zero{nan}"
        )


class Scaling:
    """The codes and scales of a dataset to write."""

    def __init__(self, dtype: np.dtype[np.generic], scales: str) -> None:
        self.dtype = dtype
        self.name = name_of(dtype)
        self.scales = scales
        self.per = AXES[scales]
        self.loss = ScaleLoss()
        """The error of all rows written."""

    @classmethod
    def asked(cls, dtype: np.dtype[np.generic] | None, scales: object, format: str) -> Scaling | None:
        """The scaling for the arguments ``dtype=`` and ``scales=``; None if rows are stored unscaled.

        Raises:
            ArgumentError, DtypeError: one of the arguments lacks the other, or ``scales`` is unknown.
        """
        name = None if dtype is None else name_of(dtype)
        if scales is None:
            if name in CODES:
                raise DtypeError(
                    f"dtype: {format} stores {dtype} with scales: pass scales='token' (speculators' own), or one of "
                    f"{', '.join(map(repr, AXES))}"
                )
            return None
        if not _arguments.is_one_of(scales, AXES):
            raise ArgumentError(f"scales: expected one of {', '.join(map(repr, AXES))}, found {scales!r:.80}")
        if dtype is None or name not in CODES:
            allowed = ", ".join(f"'{NUMPY_BY_NAME[code]}'" for code in CODES)
            actual = "none" if dtype is None else str(dtype)
            raise ArgumentError(f"scales: expected dtype= to be one of {allowed}, found {actual}")
        return cls(dtype, scales)

    def shape(self, tokens: int, layers: int, width: int) -> tuple[int, int, int]:
        """The shape of an example's scales."""
        sizes = (tokens, layers, width)
        first, second, third = (n if per else 1 for n, per in zip(sizes, self.per, strict=True))
        return first, second, third

    def fill(
        self, states: NDArray[np.generic], codes: NDArray[np.uint8], scales: NDArray[np.float32], example: int
    ) -> ScaleLoss:
        """Fills the codes and scales of an example, and returns their error.

        Args:
            states: bfloat16 ``(tokens, layers, width)``, C-contiguous.
            codes: receives the codes, one byte per value.
            scales: receives the scales; has the shape of :meth:`shape`.
            example: the example's number, for messages.

        Raises:
            DtypeError: values that codes and scales cannot represent.
        """
        tokens, layers, width = states.shape
        raw = states.reshape(-1).view(np.uint8)
        shape = (tokens, layers, width)
        most, worst, errors, squares, saturated, vanished, nan, refused, row = _native.quantise(
            raw, shape, self.name, self.per, codes, scales
        )
        if refused:
            assert row is not None
            raise DtypeError(
                f"example {example}, token {row // layers}: expected values that {self.dtype} with scales can represent, found "
                f"{refused:,} from this token on that are NaN, infinite or too large. Leave the example out, or store bfloat16."
            )
        return ScaleLoss(most, worst, errors, squares, saturated, vanished, nan)

    def again(self, states: NDArray[np.generic], example: int) -> NDArray[np.generic]:
        """The states as a reader returns them, bfloat16 ``(tokens, layers, width)``."""
        codes, scales = np.empty(states.size, np.uint8), np.empty(self.shape(*states.shape), np.float32)
        self.fill(states, codes, scales, example)
        with np.errstate(invalid="ignore"):
            values: NDArray[np.generic] = codes.view(self.dtype).reshape(states.shape).astype(
                states.dtype
            ) * scales.astype(states.dtype)
        return values

    def as_dict(self) -> dict[str, Any]:
        """Dtype, scales and error, for the dataset's metadata."""
        return {
            "dtype": str(self.dtype),
            "scales": self.scales,
            "relative_error": self.loss.relative_error,
            **asdict(self.loss),
        }
