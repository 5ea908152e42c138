"""What a model is to a capture: something that turns a batch of token ids into rows of the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from actshard.base.layers import Layer
from actshard.writing.capturing.encoding import Example


@dataclass(frozen=True)
class PaddedBatch:
    """Examples that one forward pass computes, padded on the right to the longest.

    Attributes:
        ids: ``(b, t)`` int64 token ids.
        mask: ``(b, t)`` bool: False for padding.
        rows: ``(n,)`` int64 places of the chosen tokens in the flattened batch; None: the mean over the tokens of each example.
        numbers: ``(n,)`` int64 example of each row, for messages.
        positions: ``(n,)`` int64 position of each row in its example; -1 for a mean.
    """

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    rows: NDArray[np.int64] | None
    numbers: NDArray[np.int64]
    positions: NDArray[np.int64]

    @classmethod
    def of(
        cls, examples: Sequence[Example], positions: Sequence[NDArray[np.int64]], pad_id: int, *, mean: bool
    ) -> PaddedBatch:
        """Returns the batch of examples with the chosen ``positions``. Padding is on the right, so that no position shifts."""
        lengths = np.array([len(example) for example in examples], np.int64)
        width = int(lengths.max())
        mask = np.arange(width) < lengths[:, None]
        ids = np.full(mask.shape, pad_id, np.int64)
        ids[mask] = np.concatenate([example.ids for example in examples])
        numbers = np.array([example.number for example in examples], np.int64)
        if mean:
            return cls(ids, mask, None, numbers, np.full(len(examples), -1, np.int64))
        counts = [len(chosen) for chosen in positions]
        flat = np.concatenate(positions)
        starts = np.repeat(np.arange(len(examples)) * width, counts)
        return cls(ids, mask, starts + flat, np.repeat(numbers, counts), flat)


@dataclass(frozen=True)
class BatchRows:
    """Rows of one batch.

    Attributes:
        layers: for each layer ``(n, d)``, in the dtype to store.
        finite: ``(layers, n)`` bool: False for rows with NaN or infinite values.
    """

    layers: Sequence[NDArray[np.generic]]
    finite: NDArray[np.bool_]

    def wait(self) -> BatchRows:
        """The rows themselves."""
        return self


class TorchModule(Protocol):
    """A ``torch.nn.Module``, by what distinguishes it from a function."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Computes."""
        ...

    def named_modules(self) -> object:
        """Its modules by name."""
        ...


class Transfer(Protocol):
    """Rows on their way to the host. :meth:`wait` is called after the next batch has been started."""

    def wait(self) -> BatchRows:
        """Returns the rows once they have arrived."""
        ...


class Backend(Protocol):
    """A model, whatever library it belongs to.

    Attributes:
        layers: names of the layers, in the order of ``BatchRows.layers``.
        width: elements per row.
        dtype: dtype of the rows.
        provenance: what identifies the model and the places of the layers, as JSON values.
        pads: whether examples of different lengths may share a batch.
        most_tokens: maximum number of tokens of an example; None: unknown.
        batch_tokens: token positions per batch, unless the caller sets them.
        pad_id: id with which the model expects shorter examples to be filled; None: the tokenizer's.
    """

    layers: tuple[Layer, ...]
    width: int
    dtype: np.dtype[np.generic]
    provenance: Mapping[str, object]
    pads: bool
    most_tokens: int | None
    batch_tokens: int
    pad_id: int | None

    def start(self, batch: PaddedBatch) -> Transfer:
        """Computes a batch. Its rows may still be on their way."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether a smaller batch may succeed."""
        ...

    def release(self) -> None:
        """Frees what a failed batch held."""
        ...

    def close(self) -> None:
        """Restores the model."""
        ...


def finite_rows(rows: NDArray[np.generic]) -> NDArray[np.bool_]:
    """``(n,)`` bool: rows without NaN and infinite values, ``(n, d)``."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum costs a fifth of looking at each value. It is finite only if all values are.
        finite: NDArray[np.bool_] = np.isfinite(rows.sum(axis=1, dtype=np.float32))
    return finite if finite.all() else np.isfinite(rows).all(axis=1)
