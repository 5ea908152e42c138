"""Tensors that share memory with arrays."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError, ClosedError, MissingExtraError, UnsupportedError
from actshard.streaming import Batch, Stream
from actshard.streaming.epochs import Epochs
from actshard.streaming.mixing import MixedBatch
from actshard.streaming.pairing import PairedBatch
from actshard.tokens.stream import arrays

__all__ = ["data", "dtype_of", "stream_of", "tensor", "tensors", "torch"]


try:
    import torch
    from torch.utils import data
except ImportError as error:
    raise MissingExtraError.of("actshard.torch", "torch") from error


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


# Batches on a device.
#
# A stream writes batches into ``depth`` pinned buffers. Each batch is copied on a side stream of the device, and an event is
# recorded after the copy. The event has two uses: on the device, the consumer's stream waits for it before it reads the batch;
# on the host, the buffer is returned to the stream, to be refilled, only after it. No additional thread is needed: the stream
# reads ahead on its own threads, copies run on the device, and each request for a batch starts the copies of all batches that
# are ready.


Tensors = dict[str, Any]
"""Tensors by name, as :func:`actshard.torch.tensors` returns them."""


class CopyEvent(Protocol):
    """A point in the order of copies."""

    def query(self) -> bool:
        """Whether all copies before it are complete."""

    def synchronize(self) -> None:
        """Waits until all copies before it are complete."""


class CopyBackend(Protocol):
    """Copies to a device that continue after the call that starts them."""

    def pin(self, size: int) -> torch.Tensor:
        """A uint8 tensor of ``size`` bytes on the host that copies can read."""

    def send(self, batch: Tensors) -> tuple[Tensors, CopyEvent]:
        """Starts to copy a batch from pinned memory, which must not change before the event."""

    def receive(self, batch: Tensors, event: CopyEvent) -> None:
        """Makes the caller's current stream wait for a sent batch, without stopping the host."""


class CudaCopies:
    """Copies on a side stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(f"device: torch {torch.__version__} finds no CUDA device on this machine")
        count = torch.cuda.device_count()
        number = torch.cuda.current_device() if device.index is None else device.index
        if number >= count:
            raise ArgumentError(f"device: expected cuda:0 to cuda:{count - 1}, found {device}")
        self._device = torch.device("cuda", number)
        self._side = torch.cuda.Stream(self._device)

    def pin(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise UnsupportedError(f"cannot pin {size} bytes of memory: {str(error).splitlines()[0]}") from error

    def send(self, batch: Tensors) -> tuple[Tensors, CopyEvent]:
        with torch.cuda.stream(self._side):
            device_batch = {name: _sent(host, self._device, non_blocking=True) for name, host in batch.items()}
            event: CopyEvent = self._side.record_event()
        return device_batch, event

    def receive(self, batch: Tensors, event: CopyEvent) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for value in batch.values():
            # The memory belongs to the side stream. Without this, it could be given to a later copy while the
            # consumer's kernels still read it.
            if isinstance(value, torch.Tensor):
                value.record_stream(current)


def _sent(value: object, device: torch.device, **options: bool) -> torch.Tensor:
    """A tensor on the device; a list of layer names as it is."""
    return value.to(device, **options) if isinstance(value, torch.Tensor) else value


@dataclass(eq=False)
class HostSlot:
    """Pinned memory of one batch.

    Attributes:
        rows: bytes that the stream writes activations into; None if it allocates its batches.
        others: bytes that the other arrays of a batch are copied to, by name.
    """

    number: int
    rows: Any = None
    others: dict[str, torch.Tensor] = field(default_factory=dict)

    def hold(self, batch: object, backend: CopyBackend) -> Tensors:
        """The batch as tensors in pinned memory."""
        pinned_batch: Tensors = {}
        for name, value in tensors(batch).items():
            if isinstance(value, list):  # names of layers
                pinned_batch[name] = value
                continue
            size = value.numel() * value.element_size()
            written = name == "activations" and self.rows is not None
            if not written and (name not in self.others or self.others[name].numel() < size):
                self.others[name] = backend.pin(size)
            pinned = self.rows if written else self.others[name]
            pinned_batch[name] = pinned[:size].view(value.dtype).view(value.shape)
            if not written:
                # Not copy_(): torch's threads would wait for cores on which the reader works. For the 0.5 MB of numbers of 65,536
                # rows this took 16 ms on 16 cores, three times as long as the batch itself.
                np.copyto(pinned[:size].numpy(), value.contiguous().reshape(-1).view(torch.uint8).numpy())
        return pinned_batch


@dataclass(eq=False)
class SentBatch:
    """A batch whose copy was started."""

    batch: Tensors
    event: CopyEvent
    slot: HostSlot


class DeviceStream:
    """A stream whose batches are on a device. Created by :func:`to_device`.

    Each ``for`` loop reads the next epoch, as loops over the stream do; a stream has one active loop. ``state_dict`` counts
    the batches that were handed out, not those that were read or copied ahead.

    Attributes:
        stream: the stream.
        device: the device.
        depth: number of pinned buffers.
    """

    def __init__(self, stream: Epochs[object], device: torch.device, depth: int, backend: CopyBackend | None) -> None:
        self.stream, self.device, self.depth = stream, device, depth
        self._backend = backend
        self._slots: list[HostSlot] = []
        self._live: Callable[[], DeviceLoop | None] = lambda: None

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Tensors]:
        if self._backend is None:
            return self._plain()
        self._end_loop()
        if not self._slots:
            self._slots = [self._slot(number, self._backend) for number in range(self.depth)]
        loop = DeviceLoop(self.stream, self._backend, self._slots)
        self._live = weakref.ref(loop)
        return loop

    def _plain(self) -> Iterator[Tensors]:
        # Copies to other devices are complete when they return; to the CPU there are none.
        copies = self.stream.reuses and self.device.type == "cpu"
        return (
            {name: _sent(host, self.device) for name, host in tensors(batch, copy=copies).items()}
            for batch in self.stream
        )

    def _slot(self, number: int, backend: CopyBackend) -> HostSlot:
        stream = self.stream
        if not isinstance(stream, Stream):
            return HostSlot(number)
        dtype_of(stream.dtype)  # raises for a dtype that torch lacks
        return HostSlot(number, backend.pin(int(np.prod(stream.batch_shape)) * stream.dtype.itemsize))

    def state_dict(self) -> dict[str, Any]:
        """The stream's position behind the last batch that was handed out, as :meth:`Stream.state_dict` returns it."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continues the stream at a saved state."""
        self.stream.load_state_dict(state)

    def close(self) -> None:
        """Ends the active loop, waits for its copies, and frees the pinned buffers. It can be iterated again."""
        self._end_loop()
        if self._backend is None:
            self.stream.close()
        self._slots = []

    def _end_loop(self) -> None:
        live = self._live()
        if live is not None:
            live.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DeviceLoop:
    """The iterator of one loop."""

    def __init__(self, stream: Epochs[Any], backend: CopyBackend, slots: list[HostSlot]) -> None:
        self._backend, self._slots = backend, slots
        self._pid = os.getpid()
        # Batches that are not handed out yet, and batches whose copies may still read their slots; in order.
        self._pending: deque[SentBatch] = deque()
        self._copying: deque[SentBatch] = deque()
        self._free = deque(slots)
        self._ended = self._closed = False
        self._failed: BaseException | None = None
        buffers = None
        self._by_address: dict[int, HostSlot] = {}
        if isinstance(stream, Stream):
            buffers = [slot.rows.numpy().view(stream.dtype).reshape(stream.batch_shape) for slot in slots]
            self._by_address = {array.ctypes.data: slot for array, slot in zip(buffers, slots, strict=True)}
        self._loop = stream.loop(buffers)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensors:
        self._check()
        try:
            while self._copying and self._copying[0].event.query():
                self._release()
            # A ready batch is sent at once. The reader is waited for only if there is nothing to hand out.
            while len(self._pending) < len(self._slots) - 1 and (not self._pending or self._loop.ready()):
                if not self._send_next():
                    break
            if self._pending:
                sent = self._pending.popleft()
                self._backend.receive(sent.batch, sent.event)
                self._loop.hand_out()
                return sent.batch
        except StopIteration:  # the stream was closed
            self.close()
            raise
        except BaseException as error:
            self._failed = error
            self.close()
            raise
        self._loop.finish()
        self.close()
        raise StopIteration

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError("batches on a device cannot be read in a forked process; call to_device there")
        if self._failed is not None:
            raise ClosedError(
                f"an error ended this loop: {type(self._failed).__name__}: {self._failed}"
            ) from self._failed
        if not self._closed:
            try:
                self._loop.check()
            except ClosedError as error:
                self._failed = error
                self.close()
                raise
        if self._closed or not self._loop.reads:
            self.close()
            raise StopIteration

    def _send_next(self) -> bool:
        """Waits for the next batch and starts its copy; returns False at the end of the epoch."""
        if self._ended:
            return False
        if len(self._copying) == len(self._slots):
            # All slots are in use by copies, so no slot can be filled.
            self._copying[0].event.synchronize()
            self._release()
        batch = self._loop.take()
        if batch is None:
            self._ended = True
            return False
        slot = self._by_address[batch.activations.ctypes.data] if self._by_address else self._free.popleft()
        sent = SentBatch(*self._backend.send(slot.hold(batch, self._backend)), slot)
        self._copying.append(sent)
        self._pending.append(sent)
        return True

    def _release(self) -> None:
        """Returns the slot of the oldest copy, which is complete, so that it can be refilled."""
        slot = self._copying.popleft().slot
        if self._by_address:
            self._loop.release(slot.number)
        else:
            self._free.append(slot)

    def close(self) -> None:
        """Ends the loop: waits for the copies that were started, and stops the reader."""
        self._closed = True
        self._pending.clear()
        if self._pid != os.getpid():
            return
        try:
            while self._copying:
                self._copying.popleft().event.synchronize()
        finally:
            self._loop.close()

    def __del__(self) -> None:
        # At the end of the interpreter attributes may be gone, and the driver's memory with them.
        if not getattr(self, "_closed", True) and getattr(self, "_loop", None) is not None:
            self.close()


def _check_copies(device: torch.device) -> None:
    """Raises ArgumentError unless torch copies to a device."""
    try:
        torch.zeros(1).to(device)
    except Exception as error:  # the type of error differs between kinds of devices
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArgumentError(f"device: torch {torch.__version__} cannot copy to {device}: {reason}") from error


def to_device(
    stream: Epochs[object],
    device: str | int | torch.device = "cuda",
    depth: int = 3,
    *,
    _backend: CopyBackend | None = None,
) -> DeviceStream:
    """Batches of a stream on a device, copied while the device computes.

    >>> for batch in actshard.torch.to_device(stream, "cuda"):
    ...     loss = model(batch["activations"])

    The stream writes activations directly into ``depth`` pinned buffers. They are copied on a side stream of the device; the
    stream that is current when a batch is requested waits for its copy, and the host does not. A buffer is refilled only
    after its copy is complete. If you use a batch on a stream other than the one that was current when you requested it,
    confirm it to torch with ``tensor.record_stream``.

    Host memory: ``depth`` batches. Device memory: at most ``depth - 1`` batches that were not handed out, besides those you
    keep. ``buffers=`` and ``reuse=`` of the stream are not used.

    Batches are dicts of tensors as :func:`tensors` returns them. On devices other than CUDA's, batches are copied when they
    are requested; to ``"cpu"``, only those of a stream that reuses their memory.

    Args:
        stream: a stream of activations or of tokens.
        device: a torch device or its name, such as ``"cuda:1"``.
        depth: number of pinned buffers, at least 2. One is filled while others are copied.

    Raises:
        ArgumentError: torch does not know the device, or cannot copy to it.
        UnsupportedError: torch finds no CUDA device, or cannot pin memory.
    """
    stream_of(stream)
    depth = _arguments.whole(depth, "depth", 2)
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device: {str(error).splitlines()[0]}") from error
    if _backend is None:
        if where.type == "cuda":
            _backend = CudaCopies(where)
        else:
            _check_copies(where)
    return DeviceStream(stream, where, depth, _backend)
