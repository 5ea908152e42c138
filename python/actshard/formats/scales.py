"""Scaled states: bfloat16 rows stored as float8 or int8 codes with float32 scales, and the resulting error.

::

    scale = max(largest finite magnitude / largest code, 1e-12)      per token, layer or channel of an example, or one for it
    code  = value / scale, rounded to nearest, ties to even
    read: code * scale rounded to bfloat16, the product rounded to bfloat16

Source: hs-connectors 0.9.0, which stores float8_e4m3fn with a scale per token.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base._arguments import NUMPY_BY_NAME, name_of
from actshard.base.errors import ArgumentError, DtypeError
from actshard.base.layers import Layer, plain
from actshard.formats.target import Block

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


# int8 codes of rows with float32 scales, for arrays of rows: of each layer or channel, of each row, or of blocks of its
# elements.
#
# ::
#
#     scale = max(largest finite magnitude / 127, 1e-12)
#     code  = row / scale, rounded to nearest, ties to even, at most 127
#     read  = code * scale, float32
#
# A row has ``parts`` scales, each for as many consecutive elements: one for a scale per layer or token, one per element for a
# scale per channel. Scales of layers and channels are the same for all rows of a layer, and are determined before the first row
# is coded: from all rows, if they can be read twice, else from the first block.


RowScaleKind = Literal["channel", "token", "layer", "block32", "block64"]
KINDS: dict[str, int | None] = {"channel": None, "token": None, "layer": None, "block32": 32, "block64": 64}
"""Kinds of scales, and the elements of a block."""
WORDS = {kind: f"{block} elements of a row" if block else kind for kind, block in KINDS.items()}
"""For messages: a scale per ..."""
_EXACT = 1074
"""Every float64 is a whole multiple of 2 to the power of minus this."""


def _whole(number: float) -> int:
    numerator, denominator = number.as_integer_ratio()
    return numerator << (_EXACT + 1 - denominator.bit_length())


def _as_text(total: int) -> str:
    zeros = (total & -total).bit_length() - 1 if total else 0
    return f"{total >> zeros:x}.{zeros:x}"


def _from_text(text: str) -> int:
    digits, zeros = (int(part, 16) for part in text.split("."))
    if not 0 <= zeros < 1 << 16:
        raise ValueError(f"sum {text!r:.80}")
    return digits << zeros


@dataclass
class RowLoss:
    """The error of coded rows. Sums are exact, so that they depend neither on blocks nor on tasks of a plan."""

    errors: list[int]
    """For each layer, the sum of squared errors, as a whole multiple of 2 to the power of -1074."""
    squares: list[int]
    """For each layer, the sum of squared values."""
    cosines: int = 0
    angles: int = 0
    """Number of rows with a cosine."""
    saturated: int = 0
    vanished: int = 0
    """Number of non-zero values that became zero."""
    values: int = 0
    max_abs_error: float = 0.0
    max_row_error: float = 0.0
    """Error of the worst row, relative to its L2 norm."""

    @classmethod
    def of(cls, layers: int) -> RowLoss:
        """No rows."""
        return cls([0] * layers, [0] * layers)

    def add_spans(self, sums: NDArray[np.float64], counts: NDArray[np.uint64], values: int) -> None:
        """Adds what ``quantise_spans`` measured for each example and layer."""
        layers = len(self.errors)
        self.max_abs_error = max(self.max_abs_error, float(sums[:, 0].max(initial=0)))
        self.max_row_error = max(self.max_row_error, float(sums[:, 1].max(initial=0)))
        for layer in range(layers):
            self.errors[layer] += sum(map(_whole, sums[layer::layers, 2].tolist()))
            self.squares[layer] += sum(map(_whole, sums[layer::layers, 3].tolist()))
        self.cosines += sum(map(_whole, sums[:, 4].tolist()))
        saturated, vanished, angles, _ = counts.sum(axis=0).tolist()
        self.saturated += saturated
        self.vanished += vanished
        self.angles += angles
        self.values += values

    def add(self, other: RowLoss) -> None:
        """Adds the error of further rows."""
        self.errors = [a + b for a, b in zip(self.errors, other.errors, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares, other.squares, strict=True)]
        for name in ("cosines", "angles", "saturated", "vanished", "values"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_abs_error = max(self.max_abs_error, other.max_abs_error)
        self.max_row_error = max(self.max_row_error, other.max_row_error)

    @property
    def relative_errors(self) -> list[float]:
        """For each layer, the L2 norm of the errors divided by that of the values."""
        pairs = zip(self.errors, self.squares, strict=True)
        return [math.sqrt(errors / squares) if squares else 0.0 for errors, squares in pairs]

    @property
    def relative_error(self) -> float:
        """The root of the mean square of the layers' relative errors."""
        return math.sqrt(math.fsum(error**2 for error in self.relative_errors) / len(self.errors))

    @property
    def cosine(self) -> float:
        """The mean cosine of rows and what is read."""
        return self.cosines / (self.angles << _EXACT) if self.angles else 1.0

    def as_state(self) -> dict[str, object]:
        """Values for the journal."""
        counts = {name: getattr(self, name) for name in ("angles", "saturated", "vanished", "values")}
        largest = {name: getattr(self, name) for name in ("max_abs_error", "max_row_error")}
        sums = {"errors": list(map(_as_text, self.errors)), "squares": list(map(_as_text, self.squares))}
        return {**counts, **largest, **sums, "cosines": _as_text(self.cosines)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], layers: int) -> RowLoss:
        """Restores what :meth:`as_state` returned. Raises ValueError, TypeError or LookupError for anything else."""
        errors, squares = ([_from_text(text) for text in state[name]] for name in ("errors", "squares"))
        counts = [state[name] for name in ("angles", "saturated", "vanished", "values")]
        largest = [float(state[name]) for name in ("max_abs_error", "max_row_error")]
        if len(errors) != layers or len(squares) != layers or any(type(n) is not int for n in counts):
            raise ValueError(f"expected the errors of {layers} layers")
        return cls(errors, squares, _from_text(state["cosines"]), *counts, *largest)

    def as_dict(self) -> dict[str, Any]:
        """What a dataset's metadata contain."""
        return {
            "relative_error": self.relative_error,
            "relative_error_of_layers": self.relative_errors,
            "cosine": self.cosine,
            "max_row_error": self.max_row_error,
            "max_abs_error": self.max_abs_error,
            "saturated": self.saturated,
            "vanished": self.vanished,
            "values": self.values,
        }

    def __str__(self) -> str:
        return (
            f"relative error {self.relative_error:.2g}, of the worst row {self.max_row_error:.2g}; mean cosine "
            f"{self.cosine:.6f}; {self.saturated:,} of {self.values:,} values saturated; {self.vanished:,} became zero"
        )


class CodedRows(NamedTuple):
    """The codes of a block's rows, the scales of each row or of each layer, the error, and the first refused row: (span, token)."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    loss: RowLoss
    refused: tuple[int, int] | None


@dataclass
class RowScaling:
    """The codes and scales of the rows of a dataset to write."""

    kind: str
    layers: tuple[Layer, ...]
    width: int
    values: NDArray[np.float32] | None = None
    """Scales of layers or channels, ``(layers, parts)``, once they are determined."""
    source: str = ""
    """The rows from which scales are determined."""
    loss: RowLoss = field(init=False)
    """The error of all rows written."""
    fresh: RowLoss = field(init=False)
    """The error of the rows since the last commit."""
    _largest: NDArray[np.float32] | None = None
    _rows: int = 0

    def __post_init__(self) -> None:
        self.loss, self.fresh = RowLoss.of(len(self.layers)), RowLoss.of(len(self.layers))
        if self.is_own:
            self.source = "each row"

    @classmethod
    def asked(
        cls, dtype: np.dtype[np.generic] | None, scales: object, layers: tuple[Layer, ...], width: int
    ) -> RowScaling | None:
        """The scaling for the arguments ``dtype=`` and ``scales=``; None if rows are stored unscaled.

        Raises:
            ArgumentError, DtypeError: one of the arguments lacks the other, or ``scales`` is unknown or does not fit the width.
        """
        is_int8 = dtype is not None and name_of(dtype) == "I8"
        if scales is None:
            if is_int8:
                kinds = ", ".join(map(repr, KINDS))
                raise DtypeError(
                    "dtype: int8 is stored with scales: pass scales='channel' (--option scales=channel), which suits most "
                    f"activations, or one of {kinds}"
                )
            return None
        kind = _arguments.one_of(scales, KINDS, "scales")
        if not is_int8:
            raise ArgumentError(f"scales: expected dtype='int8' (--dtype int8) with them, found {dtype or 'no dtype'}")
        block = KINDS[kind]
        if block is not None and width > block and width % block:
            raise ArgumentError(
                f"scales: {kind!r} expects a d_model that {block} divides, found {width}; 'token' fits any"
            )
        return cls(kind, layers, width)

    @property
    def is_own(self) -> bool:
        """Whether each row has its own scales."""
        return self.kind not in ("channel", "layer")

    @property
    def parts(self) -> int:
        """Scales of a row."""
        if self.kind == "channel":
            return self.width
        return max(1, self.width // (KINDS[self.kind] or self.width))

    def config(self) -> dict[str, object]:
        """Settings that must match when a writer resumes."""
        values = None if self.values is None else base64.b64encode(self.values.astype("<f4").tobytes()).decode()
        return {"scales": self.kind, "scale_values": values, "scale_source": self.source}

    def adopt(self, config: Mapping[str, Any]) -> None:
        """Adopts the scales that an earlier writer determined. Raises ValueError if they do not fit."""
        if config["scale_values"] is None or self.is_own:
            return
        values = np.frombuffer(base64.b64decode(config["scale_values"], validate=True), "<f4").astype(np.float32)
        if values.size != len(self.layers) * self.parts or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(f"{values.size} scales")
        self.values, self.source = values.reshape(len(self.layers), self.parts), str(config["scale_source"])

    # -- scales of layers and channels ------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether scales have to be determined before rows are coded."""
        return self.values is None and not self.is_own

    def survey(self, block: Block) -> tuple[int, int] | None:
        """Takes the largest magnitudes of rows into account. Returns the first with a value that is not finite: (span, token)."""
        if self._largest is None:
            self._largest = np.zeros((len(self.layers), self.parts), np.float32)
        lengths = np.ascontiguousarray(np.maximum(block.lengths, 0)).reshape(-1)
        self._rows += int(lengths.sum())
        return _native.raise_largest(block.bytes, self.width, lengths, len(self.layers), self._largest)

    def surveyed(self, source: str) -> None:
        """Determines the scales from the rows of :meth:`survey`. A channel of zeros has the largest scale of its layer."""
        assert self._largest is not None
        largest = np.where(self._largest > 0, self._largest, self._largest.max(axis=1, keepdims=True))
        self.values = np.maximum(largest / np.float32(127), np.float32(1e-12)).astype(np.float32)
        self.source, self._largest = source, None

    def take_first(self, block: Block) -> None:
        """Determines the scales from the first block, unless they are known.

        Raises:
            DtypeError: it has no rows of a layer, or only zeros: all later values would be clipped.
        """
        if not self.is_open:
            return
        self.survey(block)
        assert self._largest is not None
        if not (self._largest.max(axis=1, initial=0) > 0).all():
            layer = self.layers[int(np.argmin(self._largest.max(axis=1, initial=0)))]
            self._largest, self._rows = None, 0
            raise DtypeError(
                f"layer {plain(layer)}: scales='{self.kind}' are those of the first rows, and all of these are zero or none has a "
                "token. Append other examples first, pass scales='token', or write floats and convert them"
            )
        self.surveyed(f"the first {self._rows:,} rows")

    # -- codes -------------------------------------------------------------------------------------------------------

    def coded(self, block: Block) -> CodedRows:
        """The codes of float32 rows: those of the block, if it has some."""
        if isinstance(block.encoded, CodedRows):
            return block.encoded
        self.take_first(block)
        codes = np.empty(block.memory.shape, np.int8)
        lengths = np.ascontiguousarray(np.maximum(block.lengths, 0)).reshape(-1)
        scales = np.empty((len(codes), self.parts), np.float32) if self.is_own else self.values
        assert scales is not None
        sums, counts, refused = _native.quantise_spans(
            block.bytes, self.width, lengths, len(self.layers), self.parts, codes, scales, self.is_own
        )
        loss = RowLoss.of(len(self.layers))
        loss.add_spans(sums, counts, codes.size)
        return CodedRows(codes, scales, loss, refused)

    def written(self, block: Block, first: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Codes and scales of rows that are written, whose error is added to :attr:`loss`. ``first``: number of the first example.

        Raises:
            DtypeError: a value is not finite.
        """
        codes, scales, loss, refused = self.coded(block)
        if refused is not None:
            raise self.refusal(refused, first)
        self.loss.add(loss)
        self.fresh.add(loss)
        return codes, scales

    def committed(self) -> None:
        """Begins a new sum of :attr:`fresh`."""
        self.fresh = RowLoss.of(len(self.layers))

    def restore(self, states: Sequence[Mapping[str, object]]) -> None:
        """Continues after commits whose errors are these. Raises ValueError, TypeError or LookupError for anything else."""
        self.loss = RowLoss.of(len(self.layers))
        for state in states:
            self.loss.add(RowLoss.from_state(state, len(self.layers)))

    def refusal(self, refused: tuple[int, int], first: int) -> DtypeError:
        """The error about a row that int8 cannot express."""
        example, layer = divmod(refused[0], len(self.layers))
        return DtypeError(
            f"example {first + example}, layer {plain(self.layers[layer])}, token {refused[1]}: expected finite values for int8 "
            "with scales, found NaN, infinity, or a value at the end of float32's range. Leave the example out, or store floats."
        )

    def as_read(self, block: Block) -> NDArray[np.generic]:
        """The rows as a reader returns them."""
        codes, scales, _, _ = self.coded(block)
        if not self.is_own:
            lengths = np.maximum(block.lengths, 0).reshape(-1)
            scales = scales[np.repeat(np.arange(len(lengths)) % len(self.layers), lengths)]
        shape = (len(codes), self.parts, self.width // self.parts)
        rows: NDArray[np.generic] = (codes.reshape(shape) * scales[:, :, None]).reshape(codes.shape)
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Kind, source and error, for the dataset's metadata."""
        return {"kind": self.kind, "scales_from": self.source, **self.loss.as_dict()}
