"""Functions as models: ``function(ids, mask)`` returns ``{layer: (batch, tokens, d_model)}``, as numpy arrays or torch tensors.

The function may use any library: nnsight, TransformerLens, JAX, a client of an inference server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError, DtypeError
from actshard.base.layers import Layer, checked, not_stored, short
from actshard.writing.capturing.backend import BatchRows, PaddedBatch, finite_rows
from actshard.writing.capturing.encoding import Example, name_of_function
from actshard.writing.given import as_numpy

States = Callable[[NDArray[np.int64], NDArray[np.bool_]], Mapping[Layer, object]]


class FunctionStates:
    """A function as a :class:`~actshard.writing.capturing.backend.Backend`. The first example's call gives the width."""

    pads = True
    most_tokens: int | None = None
    batch_tokens = 8192
    pad_id: int | None = None

    def __init__(
        self, function: States, layers: tuple[Layer, ...] | None, dtype: DTypeLike | None, *, first: Example, mean: bool
    ) -> None:
        self._function, self._mean = function, mean
        states = self._call(first.ids[None], np.ones((1, len(first)), bool))
        self.layers = checked(states) if layers is None else layers
        for layer in self.layers:
            if layer not in states:
                raise ArgumentError(
                    f"layers: {not_stored(layer, tuple(states))}".replace(
                        "is not stored; the layers", "is not in the function's result; its layers"
                    )
                )
        arrays = [self._array(states, layer, (1, len(first))) for layer in self.layers]
        widths = [array.shape[2] for array in arrays]
        if len(set(widths)) > 1:
            raise ArgumentError(different_widths(self.layers, widths))
        dtypes = list(dict.fromkeys(array.dtype for array in arrays))
        if dtype is None and len(dtypes) > 1:
            raise DtypeError(f"dtype: the layers have the dtypes {', '.join(map(str, dtypes))}. Pass the one to store")
        self.width = widths[0]
        self.dtype = dtypes[0] if dtype is None else _arguments.dtype(dtype)[0]
        self.provenance: Mapping[str, object] = {"model": f"function {name_of_function(function)}"}

    def start(self, batch: PaddedBatch) -> BatchRows:
        """Calls the function; the rows are here at once."""
        shape = batch.ids.shape
        states = self._call(batch.ids, batch.mask)
        missing = [layer for layer in self.layers if layer not in states]
        if missing:
            raise ArgumentError(
                f"model: expected the layers {short(self.layers)}, found a result without {missing[0]!r}"
            )
        layers = [self._chosen(self._array(states, layer, shape), batch) for layer in self.layers]
        return BatchRows(layers, np.stack([finite_rows(rows) for rows in layers]))

    def _call(self, ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> Mapping[Layer, object]:
        states = self._function(ids, mask)
        if not isinstance(states, Mapping):
            raise ArgumentTypeError(
                f"model: expected a function that returns {{layer: (batch, tokens, d_model)}}, found {type(states).__name__}"
            )
        return states

    def _array(self, states: Mapping[Layer, object], layer: Layer, shape: tuple[int, ...]) -> NDArray[np.generic]:
        array = as_numpy(states[layer])
        if array.ndim != 3 or array.shape[:2] != shape or array.shape[2] == 0:
            raise ArgumentError(
                f"model: layer {layer!r}: expected ({shape[0]}, {shape[1]}, d_model) states, found {array.shape}"
            )
        return array

    def _chosen(self, array: NDArray[np.generic], batch: PaddedBatch) -> NDArray[np.generic]:
        if array.shape[2] != self.width:
            raise ArgumentError(f"model: expected states of width {self.width}, as before, found {array.shape[2]}")
        if batch.rows is not None:
            rows = array.reshape(-1, self.width)[batch.rows]
        else:
            exact = np.where(batch.mask[:, :, None], array.astype(np.float32), 0)
            rows = (exact.sum(axis=1) / batch.mask.sum(axis=1, keepdims=True)).astype(array.dtype)
        with np.errstate(over="ignore"):  # infinite values are found afterwards
            return rows.astype(self.dtype, copy=False)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the function ran out of memory."""
        return isinstance(error, MemoryError)

    def release(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing to restore."""


def different_widths(layers: tuple[Layer, ...], widths: list[int]) -> str:
    """The message about layers of different widths."""
    groups = {width: [layer for layer, w in zip(layers, widths, strict=True) if w == width] for width in widths}
    shown = "; ".join(f"{width}: {short(names)}" for width, names in groups.items())
    return f"layers: expected layers of one width, found {shown}. Capture each group to a dataset of its own"
