"""The result of a capture, or its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actshard.base.layers import Layer


@dataclass(frozen=True)
class Problem:
    """An example without states.

    Attributes:
        example: its number.
        reason: why it has none.
    """

    example: int
    reason: str

    def __str__(self) -> str:
        return f"example {self.example}: {self.reason}"


@dataclass(frozen=True)
class Captured:
    """The result of :func:`actshard.capture`.

    Attributes:
        path: path of the dataset.
        format: its format.
        layers: names of its layers.
        d_model: elements per row.
        dtype: dtype of its rows.
        examples: its number of examples, including those of earlier calls.
        resumed_at: number of examples that earlier calls had committed.
        tokens: tokens that this call computed.
        padding: positions that it computed in addition, because examples of a batch had different lengths. They are not stored.
        rows: rows per layer that this call stored.
        bytes: their size in all layers.
        files: number of files; None unless estimated.
        seconds: duration of this call.
        batch_tokens: token positions per batch; fewer than requested if the device ran out of memory.
        problems: examples of the dataset without states, with reasons.
        nonfinite: rows with NaN or infinite values, counted in each layer, while ``rows`` is per layer. Includes those of the calls
            that this one resumes; 0 if the dataset was finished before.
        nonfinite_examples: the first examples with such rows.
        provenance: the model, its layers' places, the tokenizer and the options, as the dataset records them.
        estimated: whether nothing was written, and all numbers are predictions.
    """

    path: Path
    format: str
    layers: tuple[Layer, ...]
    d_model: int
    dtype: str
    examples: int
    resumed_at: int
    tokens: int
    padding: int
    rows: int
    bytes: int
    files: int | None
    seconds: float
    batch_tokens: int
    problems: tuple[Problem, ...]
    nonfinite: int
    nonfinite_examples: tuple[int, ...]
    provenance: Mapping[str, object]
    estimated: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        problems = [{"example": p.example, "reason": p.reason} for p in self.problems]
        return fields | {
            "path": str(self.path),
            "layers": list(self.layers),
            "problems": problems,
            "nonfinite_examples": list(self.nonfinite_examples),
            "provenance": dict(self.provenance),
        }

    def __repr__(self) -> str:
        what = "estimate of" if self.estimated else "captured"
        empty = f", {len(self.problems)} empty" if self.problems else ""
        return (
            f"<actshard.Captured {what} {str(self.path)!r}: {self.format}, {self.examples} examples{empty}, {len(self.layers)} "
            f"layers, {self.dtype}, {self.tokens} tokens, {self.rows} rows, {self.bytes} bytes, {self.seconds:.1f} s>"
        )
