"""Streams and stores for PyTorch: tensors that share memory with the arrays, and datasets for ``DataLoader``.

Needs torch, which actshard does not install.

>>> stream = store.stream(5, 16384, shuffle="window")
>>> for batch in actshard.torch.batches(stream):                       # no DataLoader: reading is on threads already
...     loss = model(batch["activations"].to("cuda", non_blocking=True))
>>> loader = DataLoader(actshard.torch.IterableDataset(stream), batch_size=None, num_workers=2)
>>> loader = DataLoader(actshard.torch.Dataset(store, 5), batch_size=4096, shuffle=True, collate_fn=actshard.torch.collate)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard.epochs import Epochs
from actshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    InternalError,
    MissingExtraError,
    OutOfRangeError,
    UnsupportedError,
)
from actshard.stream import Batch, Stream
from actshard.stream.selection import Mask, Tokens
from actshard.tokens.stream import Examples, arrays

if TYPE_CHECKING:
    from actshard.store import Store

try:
    import torch
    from torch.utils import data
except ImportError as error:
    raise MissingExtraError.of("actshard.torch", "torch") from error


def tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor over an array's memory, bfloat16 and float8 too. Read-only arrays are copied: torch knows no such tensor."""
    if isinstance(array, torch.Tensor):
        return array
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype.kind == "V" or (type(array.dtype.type).__module__ != "numpy" and array.dtype.kind not in "biufc"):
        wanted = getattr(torch, array.dtype.name, None)
        if wanted is None:
            raise ArgumentError(f"torch has no type for {array.dtype}")
        size = array.dtype.itemsize
        return torch.from_numpy(array.view(f"i{size}")).view(wanted)
    return torch.from_numpy(array)


def tensors(batch: Any) -> dict[str, Any]:
    """A batch as a dict of tensors that share its memory.

    Of activations: activations, examples, tokens, layers, and labels if there are any. Of a token dataset: its arrays by name
    (``tokens``, ``loss_weight``, ``segment_ids``).
    """
    if not isinstance(batch, Batch):
        return {name: tensor(array) for name, array in arrays(batch).items()}
    made = {
        "activations": tensor(batch.activations),
        "examples": tensor(batch.examples),
        "tokens": tensor(batch.tokens),
        "layers": tensor(batch.layers),
    }
    if batch.labels is not None:
        made["labels"] = tensor(batch.labels)
    return made


def pinned(stream: Stream, count: int = 3) -> list[torch.Tensor]:
    """Pinned tensors for ``store.stream(..., buffers=)``: batches then go to a GPU without another copy on this side.

    Copy with ``non_blocking=True`` and synchronise before ``count - 1`` more batches were asked for.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise ArgumentError(f"count: expected an integer from 2 on, found {count!r}")
    if not isinstance(_stream(stream), Stream):
        raise ArgumentTypeError("stream: streams of tokens have no buffers")
    dtype = _dtype(stream.dtype)
    try:
        return [torch.empty(stream.batch_shape, dtype=dtype, pin_memory=True) for _ in range(count)]
    except RuntimeError as error:
        raise UnsupportedError(f"memory cannot be pinned here: {str(error).splitlines()[0]}") from error


def _stream(given: Any) -> Epochs[Any]:
    if not isinstance(given, Epochs):
        raise ArgumentTypeError(
            "stream: expected an actshard.Stream (store.stream(...)) or a stream of tokens (dataset.stream(...)), "
            f"found {type(given).__name__}"
        )
    return given


def _dtype(dtype: np.dtype[Any]) -> torch.dtype:
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(f"torch has no type for {dtype}")
    return found


def batches(stream: Epochs[Any]) -> Iterator[dict[str, Any]]:
    """What is left of a stream's epoch, as dicts of tensors."""
    return (tensors(batch) for batch in _stream(stream))


class _LoaderBatch(dict[str, Any]):
    """A batch of its own: a loader that puts several together would add a dimension to each."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise ArgumentError(
        "DataLoader: expected batch_size=None, as actshard.torch.IterableDataset gives whole batches; their size is that of "
        "store.stream(layer, batch_size)"
    )


# torch's own way for collating further types; where it is not to be had, a loader's batch_size is not checked.
_COLLATE = getattr(getattr(data._utils, "collate", None), "default_collate_fn_map", None)
if _COLLATE is not None:
    _COLLATE[_LoaderBatch] = _refuse


class IterableDataset(data.IterableDataset):
    """Whole batches of a stream, as dicts of tensors; for ``DataLoader(..., batch_size=None)``.

    With workers each reads every n-th batch, so that the loader gives the same batches in the same order as without; the memory of
    a window is shared among them. Every pass over the loader is the next epoch, whether it keeps its workers or starts new ones.
    ``state_dict`` and ``load_state_dict`` are those of torchdata's ``StatefulDataLoader``.
    """

    def __init__(self, stream: Epochs[Any]) -> None:
        super().__init__()
        self.stream = _stream(stream)
        # Seen by all workers, whether forked or spawned: the epoch that comes next, which set of workers reads, how many passes
        # workers have begun, and the epochs of their last passes.
        self._shared = torch.tensor([stream.epoch, -1, 0] + [-1] * (2 * _PASSES), dtype=torch.int64).share_memory_()
        self._passes: tuple[int, int] = (-1, 0)
        self._at: dict[str, int] | None = None
        self._now: dict[str, int] | None = None
        self._begun = 0
        stream._elsewhere = self._read_by_workers

    def _read_by_workers(self) -> bool:
        """Whether workers began to read after this process did."""
        return data.get_worker_info() is None and int(self._shared[_BEGUN]) != self._begun

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next pass, also of workers that persist; call it between passes."""
        self.stream.set_epoch(epoch)
        self._shared[_NEXT] = int(epoch)
        self._at = None

    def __len__(self) -> int:
        return len(self.stream)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker begins where a forked one does: with the epoch, unless a state was loaded.
        stream = self.stream
        return {**self.__dict__, "stream": stream if stream.resumes else stream.afresh()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.stream._elsewhere = self._read_by_workers

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = data.get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        stream, at, self._at = self.stream, self._at, None
        epoch = self._agree(worker, None if at is None else at["epoch"])
        if at is None:
            resumes = stream.resumes and stream.epoch == epoch
            at = {"epoch": epoch, "next": first + (stream.state()["batch"] if resumes else 0)}
        self._now = at
        if worker is None:
            self._begun = int(self._shared[_BEGUN])
        stream.set_epoch(epoch)
        return self._read(at, first, every)

    def _read(self, at: dict[str, int], first: int, every: int) -> Iterator[dict[str, Any]]:
        for batch in self.stream.batches_from(at["next"], every):
            at["next"] += every
            yield _LoaderBatch(tensors(batch))
        self._now = {"epoch": at["epoch"] + 1, "next": first}

    def _agree(self, worker: Any, epoch: int | None) -> int:
        """The epoch of this pass, the same in all workers; ``epoch`` if a state says so."""
        shared = self._shared
        if worker is None:
            epoch = int(shared[_NEXT]) if epoch is None else epoch
            shared[_NEXT] = epoch + 1
            return epoch
        # A loader draws a number for each set of workers; persistent ones count their passes.
        token = worker.seed - worker.id
        count = self._passes[1] + 1 if self._passes[0] == token else 0
        self._passes = (token, count)
        # Each pass has a place of its own, so that a worker that is late by one still finds its epoch.
        place = _BEGUN + 1 + 2 * (count % _PASSES)
        if worker.id == 0:
            epoch = int(shared[_NEXT]) if epoch is None else epoch
            shared[_NEXT] = epoch + 1
            if count == 0:
                shared[_BEGUN + 1 :] = -1
            shared[place + 1] = epoch
            shared[place] = count
            shared[_SET] = token
            shared[_BEGUN] += 1
            return epoch
        for _ in range(300_000):
            if int(shared[_SET]) == token and int(shared[place]) == count:
                return int(shared[place + 1])
            time.sleep(0.001)
        raise InternalError("worker 0 of the loader did not begin to read within five minutes")

    def state_dict(self) -> dict[str, Any]:
        """Where this worker, or this process where there are none, is; plain values.

        Raises:
            ArgumentError: workers read, and this is not one of them: use the ``state_dict`` of torchdata's loader.
        """
        state = self.stream.state_dict()
        worker = data.get_worker_info()
        first = 0 if worker is None else worker.id
        now = self._at or self._now or {"epoch": state["epoch"], "next": state["batch"] + first}
        return {"stream": state["settings"], **now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state was taken, in a loader with as many workers.

        Raises:
            ArgumentError: it is of another stream.
        """
        if not isinstance(state, dict) or not {"stream", "epoch", "next"} <= state.keys():
            raise ArgumentError("load_state_dict: expected a state that state_dict() returned")
        mine = self.stream.state()
        self.stream.load_state_dict({**mine, "settings": state["stream"], "epoch": state["epoch"], "batch": 0})
        self._at = {"epoch": int(state["epoch"]), "next": int(state["next"])}


_NEXT, _SET, _BEGUN = range(3)
_PASSES = 8
"""Passes whose epochs are kept for workers that are late."""


class _Items(list[dict[str, Any]]):
    """Items, and the batch that they are views of."""

    batch: dict[str, Any]


class Dataset(data.Dataset):
    """Rows of one layer by number, for samplers of any kind: ``{"activation": (d_model,), "example": int, "token": int}``.

    Numbers run over the selected tokens, example after example. ``__getitems__`` reads a whole batch at once; with
    ``collate_fn=actshard.torch.collate`` a ``DataLoader`` gives its tensors as they are, without taking them apart and together
    again.

    Args:
        store: an open store.
        layer: a name from ``store.layers``.
        tokens: as in ``store.stream``.
        ignore_labels: as in ``store.stream``.
        keep: as in ``store.stream``.
        dtype: as in ``store.gather``.
    """

    def __init__(
        self,
        store: Store,
        layer: int,
        *,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        self.store, self.layer, self.dtype = store, layer, dtype
        # A stream knows which rows there are; it is never read from.
        self._rows = store.stream(layer, 1, tokens=tokens, ignore_labels=ignore_labels, keep=keep)

    def __len__(self) -> int:
        return self._rows.num_rows

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self._read([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return self._read(indices)

    def _read(self, indices: Sequence[int]) -> _Items:
        numbers = np.asarray(indices, np.int64)
        n = len(self)
        if numbers.size and (numbers.min() < -n or numbers.max() >= n):
            raise OutOfRangeError(f"row {numbers[(numbers < -n) | (numbers >= n)][0]} is out of range: there are {n}")
        examples, tokens = self._rows.locate(np.where(numbers < 0, numbers + n, numbers))
        rows = tensor(self.store.gather(self.layer, examples, tokens, dtype=self.dtype))
        made = _Items(
            {"activation": row, "example": e, "token": t}
            for row, e, t in zip(rows.unbind(), examples.tolist(), tokens.tolist(), strict=True)
        )
        made.batch = {"activation": rows, "example": tensor(examples), "token": tensor(tokens)}
        return made


class TokenDataset(data.Dataset):
    """Examples of a token dataset by number, for samplers of any kind: a dict of tensors, ``tokens`` and what else there is.

    ``__getitems__`` reads a whole batch at once; with ``collate_fn=actshard.torch.collate`` a ``DataLoader`` gives its tensors as
    they are. :class:`IterableDataset` of ``dataset.stream(...)`` reads ahead, in the stream's order.

    Args:
        dataset: a dataset of :mod:`actshard.tokens` that ends.
    """

    def __init__(self, dataset: Examples) -> None:
        self.dataset = dataset
        len(dataset)  # a mixture that does not end raises here

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        found = tensors(self.dataset.get_batch(np.asarray(indices, np.int64)))
        made = _Items({name: rows[i] for name, rows in found.items()} for i in range(len(indices)))
        made.batch = found
        return made


def collate(items: Any) -> Any:
    """For ``DataLoader(collate_fn=)``: what :meth:`Dataset.__getitems__` read together, as it is; anything else as usual."""
    if isinstance(items, _Items):
        return items.batch
    return data.default_collate(items)
