"""Tensors that share memory with arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.errors import ArgumentError, ArgumentTypeError, MissingExtraError
from actshard.streaming import Batch
from actshard.streaming.epochs import Epochs
from actshard.streaming.mixing import MixedBatch
from actshard.streaming.pairing import PairedBatch
from actshard.tokens.stream import arrays

try:
    import torch
    from torch.utils import data
except ImportError as error:
    raise MissingExtraError.of("actshard.torch", "torch") from error

__all__ = ["data", "dtype_of", "stream_of", "tensor", "tensors", "torch"]


def tensor(array: NDArray[np.generic]) -> torch.Tensor:
    """Returns a tensor that shares the array's memory, also for bfloat16 and float8.

    Read-only arrays are copied, because torch has no read-only tensors.
    """
    if isinstance(array, torch.Tensor):
        return array
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype.kind == "V" or (type(array.dtype.type).__module__ != "numpy" and array.dtype.kind not in "biufc"):
        torch_dtype = getattr(torch, array.dtype.name, None)
        if torch_dtype is None:
            raise ArgumentError(f"torch has no dtype for {array.dtype}")
        size = array.dtype.itemsize
        return torch.from_numpy(array.view(f"i{size}")).view(torch_dtype)
    return torch.from_numpy(array)


def tensors(batch: object, *, copy: bool = False) -> dict[str, Any]:
    """Returns a batch as a dict of tensors that share its memory; with ``copy`` the activations are a copy.

    Keys for activations: activations, examples, tokens, layers (a list, if the names are texts), labels if the dataset has
    labels, sources for a mixture, and stores for a pair. Keys for whole sequences: those of
    :meth:`actshard.SequenceBatch.arrays`. Keys for a token dataset: the names of its arrays (``tokens``, ``loss_weight``,
    ``segment_ids``).
    """
    if not isinstance(batch, Batch):
        # torch has no strings: names of layers are a list
        return {
            name: array.tolist() if array.dtype.kind in "UO" else tensor(array) for name, array in arrays(batch).items()
        }
    batch_tensors = {
        "activations": tensor(batch.activations).clone() if copy else tensor(batch.activations),
        "examples": tensor(batch.examples),
        "tokens": tensor(batch.tokens),
        # torch has no strings
        "layers": batch.layers.tolist() if batch.layers.dtype.kind in "UO" else tensor(batch.layers),
    }
    if batch.labels is not None:
        batch_tensors["labels"] = tensor(batch.labels)
    if isinstance(batch, MixedBatch):
        batch_tensors["sources"] = tensor(batch.sources)
    if isinstance(batch, PairedBatch):
        batch_tensors["stores"] = tensor(batch.stores)
    return batch_tensors


def stream_of(stream: object) -> Epochs[object]:
    """The argument, if it is a stream of activations or of tokens."""
    if not isinstance(stream, Epochs):
        raise ArgumentTypeError(
            "stream: expected an actshard.Stream (store.stream(...)) or a token stream (dataset.stream(...)), "
            f"found {type(stream).__name__}"
        )
    return stream


def dtype_of(dtype: np.dtype[np.generic]) -> torch.dtype:
    """torch's dtype of the same name."""
    torch_dtype = getattr(torch, dtype.name, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ArgumentError(f"torch has no dtype for {dtype}")
    return torch_dtype
