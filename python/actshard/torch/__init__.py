"""Torch tensors that share memory with a stream's arrays, and datasets for ``DataLoader``.

Requires torch, which actshard does not install.

>>> stream = store.stream(5, 16384, shuffle="window")
>>> for batch in actshard.torch.to_device(stream, "cuda"):             # copied to the GPU while it computes
...     loss = model(batch["activations"])
>>> for batch in actshard.torch.batches(stream):                       # on the host; threads read ahead, without a DataLoader
...     loss = model(batch["activations"])
>>> loader = DataLoader(actshard.torch.IterableDataset(stream), batch_size=None, num_workers=2)
>>> loader = DataLoader(actshard.torch.Dataset(store, 5), batch_size=4096, shuffle=True, collate_fn=actshard.torch.collate)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from actshard.base._arguments import many
from actshard.base.errors import ArgumentError, ArgumentTypeError, InternalError, OutOfRangeError, UnsupportedError
from actshard.base.layers import Layer
from actshard.streaming import Stream
from actshard.streaming.epochs import Epochs
from actshard.streaming.selection import Limit, Mask, Selection, Tokens
from actshard.tokens.stream import Examples
from actshard.torch._tensors import DeviceStream, data, dtype_of, stream_of, tensor, tensors, to_device, torch

if TYPE_CHECKING:
    from torch.utils.data._utils.worker import WorkerInfo

    from actshard.reading.store import Store

__all__ = [
    "Dataset",
    "DeviceStream",
    "IterableDataset",
    "TokenDataset",
    "batches",
    "collate",
    "pinned",
    "tensor",
    "tensors",
    "to_device",
]


def pinned(stream: Stream, count: int = 3) -> list[torch.Tensor]:
    """Returns pinned tensors for ``store.stream(..., buffers=)``, so batches go to a GPU without another copy on the host.

    A batch is valid until the next one is requested: its buffer is then refilled. If you copy it with ``non_blocking=True``,
    wait for the copy before you request the next batch, or use :func:`to_device`, which does so without stopping the GPU.

    Args:
        stream: the stream whose batch shape and dtype the tensors take.
        count: number of tensors, at least 2.

    Raises:
        UnsupportedError: this machine cannot pin memory.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise ArgumentError(f"count: expected an integer of at least 2, found {count!r}")
    if not isinstance(stream_of(stream), Stream):
        raise ArgumentTypeError("stream: expected a stream of activations; token streams have no buffers")
    dtype = dtype_of(stream.dtype)
    try:
        return [torch.empty(stream.batch_shape, dtype=dtype, pin_memory=True) for _ in range(count)]
    except RuntimeError as error:
        raise UnsupportedError(f"cannot pin memory on this machine: {str(error).splitlines()[0]}") from error


def batches(stream: Epochs[object]) -> Iterator[dict[str, Any]]:
    """Yields the rest of a stream's epoch as dicts of tensors."""
    return (tensors(batch) for batch in stream_of(stream))


class _LoaderBatch(dict[str, Any]):
    """A whole batch. The class lets a loader refuse to collate batches, which would add a dimension to each array."""


def _refuse(*_: object, **__: object) -> object:
    raise ArgumentError(
        "DataLoader: expected batch_size=None, because actshard.torch.IterableDataset yields whole batches; set their size in "
        "store.stream(layer, batch_size)"
    )


# torch's registry of collate functions by type. Without it, a loader's batch_size is not checked.
_COLLATE = getattr(getattr(data._utils, "collate", None), "default_collate_fn_map", None)
if _COLLATE is not None:
    _COLLATE[_LoaderBatch] = _refuse


class IterableDataset(data.IterableDataset):
    """Yields whole batches of a stream as dicts of tensors. Use it with ``DataLoader(..., batch_size=None)``.

    With n workers, each worker reads every n-th batch. The loader yields the same batches in the same order as without workers,
    and the workers share the memory of a window. Each pass over the loader is the next epoch, with persistent or new workers.
    ``state_dict`` and ``load_state_dict`` implement the protocol of torchdata's ``StatefulDataLoader``.
    """

    def __init__(self, stream: Epochs[object]) -> None:
        super().__init__()
        self.stream = stream_of(stream)
        # Shared with all workers, forked or spawned: the next epoch, the token of the current set of workers, the number of
        # passes workers have begun, and (pass, epoch) of their last passes.
        self._shared = torch.tensor([stream.epoch, -1, 0] + [-1] * (2 * _PASSES), dtype=torch.int64).share_memory_()
        self._passes: tuple[int, int] = (-1, 0)
        self._at: dict[str, int] | None = None
        self._now: dict[str, int] | None = None
        self._begun = 0
        stream._elsewhere = self._read_by_workers

    def _read_by_workers(self) -> bool:
        """Whether workers have begun a pass since this process last did."""
        return data.get_worker_info() is None and int(self._shared[_BEGUN]) != self._begun

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, also for persistent workers. Call it between passes."""
        self.stream.set_epoch(epoch)
        self._shared[_NEXT] = int(epoch)
        self._at = None

    def __len__(self) -> int:
        return len(self.stream)

    def __getstate__(self) -> dict[str, object]:
        # A spawned worker starts at the beginning of the epoch, as a forked one does, unless a state was loaded.
        stream = self.stream
        return {**self.__dict__, "stream": stream if stream.resumes else stream.afresh()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.stream._elsewhere = self._read_by_workers

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = data.get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        stream, position, self._at = self.stream, self._at, None
        epoch = self._agree(worker, None if position is None else position["epoch"])
        if position is None:
            resumes = stream.resumes and stream.epoch == epoch
            position = {"epoch": epoch, "next": first + (stream.state()["batch"] if resumes else 0)}
        self._now = position
        if worker is None:
            self._begun = int(self._shared[_BEGUN])
        stream.set_epoch(epoch)
        return self._read(position, first, every)

    def _read(self, position: dict[str, int], first: int, every: int) -> Iterator[dict[str, object]]:
        # A worker's batches are sent by a thread while the loop reads the next ones.
        copies = self.stream.reuses and data.get_worker_info() is not None
        for batch in self.stream.batches_from(position["next"], every):
            position["next"] += every
            yield _LoaderBatch(tensors(batch, copy=copies))
        self._now = {"epoch": position["epoch"] + 1, "next": first}

    def _agree(self, worker: WorkerInfo, epoch: int | None) -> int:
        """Returns the epoch of this pass, the same in all workers.

        Args:
            worker: torch's worker info; None in the main process.
            epoch: the epoch of a loaded state; None for the next epoch.
        """
        shared = self._shared
        if worker is None:
            epoch = int(shared[_NEXT]) if epoch is None else epoch
            shared[_NEXT] = epoch + 1
            return epoch
        # A loader draws one base seed per set of workers. Persistent workers count their passes.
        token = worker.seed - worker.id
        count = self._passes[1] + 1 if self._passes[0] == token else 0
        self._passes = (token, count)
        # Each pass has its own slot, so a worker that is one pass late still finds its epoch.
        slot = _BEGUN + 1 + 2 * (count % _PASSES)
        if worker.id == 0:
            epoch = int(shared[_NEXT]) if epoch is None else epoch
            shared[_NEXT] = epoch + 1
            if count == 0:
                shared[_BEGUN + 1 :] = -1
            shared[slot + 1] = epoch
            shared[slot] = count
            shared[_SET] = token
            shared[_BEGUN] += 1
            return epoch
        for _ in range(300_000):
            if int(shared[_SET]) == token and int(shared[slot]) == count:
                return int(shared[slot + 1])
            time.sleep(0.001)
        raise InternalError("worker 0 of the DataLoader did not begin to read within five minutes")

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this worker, or of this process without workers, as plain values.

        Raises:
            ArgumentError: workers read this stream and this process is not a worker. Use the ``state_dict`` of torchdata's loader.
        """
        state = self.stream.state_dict()
        worker = data.get_worker_info()
        first = 0 if worker is None else worker.id
        position = self._at or self._now or {"epoch": state["epoch"], "next": state["batch"] + first}
        return {"stream": state["settings"], **position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved state. The loader must have the same number of workers.

        Raises:
            ArgumentError: the state belongs to another stream.
        """
        if not isinstance(state, dict) or not {"stream", "epoch", "next"} <= state.keys():
            raise ArgumentError("load_state_dict: expected a state that state_dict() returned")
        current = self.stream.state()
        self.stream.load_state_dict({**current, "settings": state["stream"], "epoch": state["epoch"], "batch": 0})
        self._at = {"epoch": int(state["epoch"]), "next": int(state["next"])}


_NEXT, _SET, _BEGUN = range(3)
_PASSES = 8
"""Number of passes whose epochs are kept for late workers."""


class _Items(list[dict[str, Any]]):
    """Items that are views of one batch, with that batch."""

    batch: dict[str, object]


class Dataset(data.Dataset):
    """Map-style dataset of one layer's rows: ``{"activation": (d_model,), "example": int, "token": int}``.

    Row numbers run over the selected tokens, example after example. ``__getitems__`` reads a whole batch at once. With
    ``collate_fn=actshard.torch.collate`` a ``DataLoader`` returns that batch's tensors without splitting and stacking them, under
    the names of a stream's batches: ``activations``, ``examples`` and ``tokens``.

    Args:
        store: an open store.
        layer: a name from ``store.layers``.
        tokens: as in ``store.stream``.
        ignore_labels: as in ``store.stream``.
        keep: as in ``store.stream``.
        max_norm: as in ``store.stream``.
        min_token: as in ``store.stream``.
        dtype: as in ``store.gather``.
    """

    def __init__(
        self,
        store: Store,
        layer: Layer,
        *,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        max_norm: Limit = None,
        min_token: int = 0,
        dtype: DTypeLike | None = None,
    ) -> None:
        self.store, self.layer, self.dtype = store, layer, dtype
        # Used only to map row numbers to (example, token); it is never read.
        self._rows = Stream(store, layer, 1, Selection(tokens, ignore_labels, keep, max_norm, min_token))

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
            raise OutOfRangeError(
                f"row {numbers[(numbers < -n) | (numbers >= n)][0]} is out of range: there {'is' if n == 1 else 'are'} "
                f"{many(n, 'row')}"
            )
        examples, tokens = self._rows.locate(np.where(numbers < 0, numbers + n, numbers))
        rows = tensor(self.store.gather(self.layer, examples, tokens, dtype=self.dtype))
        items = _Items(
            {"activation": row, "example": e, "token": t}
            for row, e, t in zip(rows.unbind(), examples.tolist(), tokens.tolist(), strict=True)
        )
        items.batch = {"activations": rows, "examples": tensor(examples), "tokens": tensor(tokens)}
        return items


class TokenDataset(data.Dataset):
    """Map-style dataset of token examples: each item is a dict of tensors, ``tokens`` and the dataset's other arrays.

    ``__getitems__`` reads a whole batch at once. With ``collate_fn=actshard.torch.collate`` a ``DataLoader`` returns that
    batch's tensors. To read ahead in a stream's order, use :class:`IterableDataset` with ``dataset.stream(...)``.

    Args:
        dataset: a finite dataset of :mod:`actshard.tokens`.
    """

    def __init__(self, dataset: Examples) -> None:
        self.dataset = dataset
        len(dataset)  # raises for an endless mixture

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        batch = tensors(self.dataset.get_batch(np.asarray(indices, np.int64)))
        items = _Items({name: rows[i] for name, rows in batch.items()} for i in range(len(indices)))
        items.batch = batch
        return items


def collate(items: object) -> Any:
    """Collate function for ``DataLoader(collate_fn=)``: returns the batch that :meth:`Dataset.__getitems__` read.

    Anything else goes to torch's ``default_collate``.
    """
    if isinstance(items, _Items):
        return items.batch
    return data.default_collate(items)
