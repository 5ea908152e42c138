"""Rows of a store as batches, in an order that can be trusted, read ahead by a thread."""

from __future__ import annotations

import atexit
import hashlib
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from actshard import _arguments
from actshard._selection import Mask, Tokens, select
from actshard.errors import (
    ActshardWarning,
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    NotStoredError,
    OverflowWarning,
)
from actshard.stats import is_deviation

if TYPE_CHECKING:
    from actshard.readable import Readable

Shuffle = Literal["window", "exact"] | None
Scale = float | ArrayLike | Literal["unit-norm", "sqrt-d"] | None

_RING = 3
"""Arrays of a stream that reuses them: one with the user, one ready, one being filled."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch:
    """Rows of a stream.

    Attributes:
        activations: ``(b, d_model)``; ``(b, n_layers, d_model)`` where several layers are streamed aligned.
        examples: ``(b,)`` int64: the example of each row.
        tokens: ``(b,)`` int64: its token, a position among those stored (for saev, 0 is CLS where there is one).
        layers: int64 layer names: ``(b,)``, one per row, where layers are interleaved; else those along the second axis, or the
            one layer there is.
        labels: ``(b,)`` patch labels, uint8, where the dataset has some, or None. With ``tokens="all"`` int16, -1 for special
            tokens, which have none.
    """

    activations: Any
    examples: NDArray[np.int64]
    tokens: NDArray[np.int64]
    layers: NDArray[np.int64]
    labels: NDArray[Any] | None

    def __len__(self) -> int:
        return len(self.examples)

    def __repr__(self) -> str:
        labels = "" if self.labels is None else f", labels {self.labels.dtype}"
        layers = sorted(set(self.layers.tolist()))
        return f"<actshard.Batch: {tuple(self.activations.shape)} {self.activations.dtype}, layers {layers}{labels}>"


class Stream:
    """Batches of a store's rows. Made by :meth:`Store.stream`, where every argument is explained.

    ``for batch in stream`` reads one epoch; the next loop reads the next one, in another order. A loop that was left early
    begins again with the first batch of its epoch, unless a state was loaded in between. Pickles as its store and its state.

    A stream has one loop at a time: when another one begins, the iterator of the first raises :class:`ClosedError`. Two streams
    of one store can be read side by side.

    Attributes:
        epoch: the epoch that is being read, or comes next.
        batch_size, drop_last, rank, world_size, seed, shuffle: as asked for.
    """

    def __init__(
        self,
        store: Readable,
        layer: int | Sequence[int] | Literal["all"],
        batch_size: int,
        *,
        shuffle: Shuffle = None,
        seed: int = 0,
        epoch: int = 0,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        interleave: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dtype: DTypeLike | None = None,
        center: ArrayLike | None = None,
        scale: Scale = None,
        memory: int | str = "1GiB",
        reuse: bool = False,
        buffers: Sequence[Any] | None = None,
    ) -> None:
        one, interleave = False, _arguments.switch(interleave, "interleave")
        drop_last, reuse = _arguments.switch(drop_last, "drop_last"), _arguments.switch(reuse, "reuse")
        if isinstance(layer, int | np.integer):
            one, layer = True, [layer]
        elif not _arguments.is_one_of(layer, ("all",)) and (isinstance(layer, str) or not np.iterable(layer)):
            raise ArgumentError(f'layer: expected a layer\'s name, a list of them or "all", found {layer!r}')
        names = store.layers if isinstance(layer, str) else _arguments.listed(layer, "layer: expected names")
        if not names and isinstance(layer, str):
            raise NotStoredError("holds no hidden states", path=store.path)
        if not names:
            raise ArgumentError("layer: expected at least one layer")
        self._layers: list[int] = [int(x) if isinstance(x, np.integer) else x for x in names]
        groups = [store.group_of(x) for x in self._layers]
        if interleave and one:
            raise ArgumentError("interleave: there is only one layer")
        if shuffle is not None and not _arguments.is_one_of(shuffle, ("window", "exact")):
            raise ArgumentError(f'shuffle: expected "window", "exact" or None, found {shuffle!r}')
        self.store = store
        self.batch_size = _arguments.whole(batch_size, "batch_size", 1)
        self.rank, self.world_size = _arguments.whole(rank, "rank", 0), _arguments.whole(world_size, "world_size", 1)
        self.seed, self.epoch = _arguments.whole(seed, "seed", 0), _arguments.whole(epoch, "epoch", 0)
        self.shuffle, self.drop_last = shuffle, drop_last
        self._tokens = tokens
        asked, name = (store.dtype, _arguments.name_of(store.dtype)) if dtype is None else _arguments.dtype(dtype)
        self.dtype = asked
        norm = None
        if isinstance(scale, str):
            if scale not in ("unit-norm", "sqrt-d"):
                raise ArgumentError(f'scale: expected a number, an array, "unit-norm" or "sqrt-d", found {scale!r}')
            norm, scale = (1.0 if scale == "unit-norm" else store.d_model**0.5), None
        self._options: dict[str, Any] = {
            "groups": groups,
            "stacked": not one,
            "interleaved": interleave,
            "batch_size": self.batch_size,
            "shuffle": shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "rank": self.rank,
            "world_size": self.world_size,
            "memory": _arguments.size(memory, "memory"),
            "dtype": name,
            "descr": asked,
            "given": dtype is not None,
            "center": _vectors(center, "center", store.d_model, len(groups)),
            "scale": _vectors(scale, "scale", store.d_model, len(groups)),
            "norm": norm,
        }
        self._selection = select(store, self._layers, tokens, ignore_labels, keep)
        self._native = store.native_stream(self._selection, self._options)
        item = (len(groups), store.d_model) if not one and not interleave else (store.d_model,)
        if reuse and buffers is not None:
            raise ArgumentError("buffers: not with reuse=True, which makes its own")
        self._shape = (self.batch_size, *item)
        self._reuse = reuse
        self._buffers = None if buffers is None else list(buffers)
        if self._buffers is not None and len(self._buffers) < 2:
            raise ArgumentError(
                f"buffers: expected at least 2, of {self._shape} {asked}: one is with you while the next is filled"
            )
        self._step = 0
        self._resume: int | None = None
        self._chosen: int | None = None
        self._live: Any = lambda: None
        self._elsewhere: Any = lambda: False

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, of all ranks together; a row has all its layers unless they are interleaved."""
        return int(self._native.items)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of a whole batch's activations."""
        return self._shape

    @property
    def window(self) -> int:
        """Rows that a pool of ``memory`` bytes holds; an epoch is cut into as few windows of at most so many as it takes."""
        return int(self._native.window)

    @property
    def resumes(self) -> bool:
        """Whether the next loop goes on where a loaded state was taken."""
        return self._resume is not None

    def locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Examples and tokens of the selected rows by number, in stored order; of one layer, or aligned layers."""
        return self._native.locate(rows)

    @property
    def layers(self) -> tuple[int, ...]:
        """Names of the layers that are read."""
        return tuple(self._layers)

    def __len__(self) -> int:
        """Batches of an epoch, of this rank; every rank has as many."""
        return int(self._native.batches)

    def __repr__(self) -> str:
        return (
            f"<actshard.Stream of {self.store.path}: {len(self)} batches of {self._shape} {self.dtype}, "
            f"shuffle={self.shuffle!r}, seed={self.seed}, epoch {self.epoch}>"
        )

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next loop reads; a loop that is being read is not changed.

        The epoch of a state that was just loaded goes on where the state was taken.
        """
        epoch = _arguments.whole(epoch, "epoch", 0)
        live = self._live()
        if live is not None and live.reads:
            self._chosen = epoch
            return
        self._chosen = None
        if epoch != self.epoch:
            self.epoch, self._step, self._resume = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, as plain values (JSON holds them): a few hundred bytes, whatever was read.

        The state is after the last batch that was handed out; it is the same on every rank. Loading it into a stream of the
        same dataset, wherever that lies, and of the same settings, in any process and with any number of threads or workers,
        gives exactly the batches that were left.

        Raises:
            ArgumentError: workers of a ``DataLoader`` read this stream: their position is not known here.
        """
        if self._elsewhere():
            raise ArgumentError(
                "state_dict: workers of a DataLoader read this stream, and this process does not know how far they are; use "
                "torchdata's StatefulDataLoader and its state_dict(), or num_workers=0"
            )
        return self.state()

    def state(self) -> dict[str, Any]:
        """:meth:`state_dict` of this process's own loop: for actshard's own rooms."""
        self._turn_if_idle()
        pending = self._resume if self._resume is not None else self._step
        return {"version": 2, "epoch": self.epoch, "batch": pending, "settings": self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state was taken; the next loop reads what was left of that epoch.

        A state of an older release does not name its dataset: it is loaded, with a warning, if everything it names agrees.

        Raises:
            ArgumentError: the state is of another dataset or other settings, which would give other batches.
        """
        if (
            not isinstance(state, dict)
            or type(state.get("version")) is not int
            or state["version"] not in (1, 2)
            or not isinstance(state.get("settings"), dict)
        ):
            raise ArgumentError("load_state_dict: expected a state that state_dict() returned")
        mine, theirs = self._settings(), state["settings"]
        names: set[str] = mine.keys() | theirs.keys()
        if old := "dataset" not in theirs:
            names -= _SINCE_2
        differ = [k for k in names if mine.get(k) != theirs.get(k)]
        if differ:
            what = ", ".join(f"{k}: {theirs.get(k)!r} then, {mine.get(k)!r} now" for k in sorted(differ))
            which = "another dataset" if differ == ["dataset"] else "another stream"
            raise ArgumentError(f"load_state_dict: the state is of {which}, whose batches differ ({what})")
        epoch, batch = (
            _arguments.whole(state.get("epoch"), "epoch", 0),
            _arguments.whole(state.get("batch"), "batch", 0),
        )
        if batch > len(self):
            raise ArgumentError(f"load_state_dict: batch {batch} of {len(self)}")
        if old:
            warnings.warn(
                f"load_state_dict: a state of an older release does not name its dataset; check that it is {self.store.path}",
                ActshardWarning,
                stacklevel=2,
            )
        self._supersede("a state was loaded into this stream")
        if batch == len(self) and batch:
            epoch, batch = epoch + 1, 0
        self.epoch, self._step, self._resume, self._chosen = epoch, batch, batch, None

    def _settings(self) -> dict[str, Any]:
        """All that decides which rows make up which batch, and what is in them."""
        o = self._options
        made: dict[str, Any] = {
            "dataset": self.store.identity,
            "format": self.store.format,
            "d_model": self.store.d_model,
            "stored": self.store.dtype.name,
            "examples": self.store.num_examples,
            "rows": self.num_rows,
            "layers": self._layers,
            "interleave": o["interleaved"],
            "tokens": self._tokens,
            "selection": self._fingerprint(),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "world_size": self.world_size,
        }
        for name in ("center", "scale"):
            if o[name] is not None:
                made[name] = hashlib.sha256(o[name].tobytes()).hexdigest()[:16]
        if o["norm"] is not None:
            made["scale"] = o["norm"]
        if self.shuffle == "window":
            made["window"] = int(self._native.window)
            made["units"] = f"{self._native.units:016x}"
        return made

    def _fingerprint(self) -> str:
        made = self.__dict__.get("_print")
        if made is None:
            digest = hashlib.sha256()
            for part in self._selection:
                digest.update(part.tobytes() if isinstance(part, np.ndarray) else str(part).encode() + b";")
            made = self._print = digest.hexdigest()[:16]
        return made

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, first: int = 0, every: int = 1) -> Iterator[Batch]:
        """Reads batches ``first``, ``first + every``, ... of what is left of the epoch: one worker's part of ``every`` workers'.

        The batches themselves do not depend on ``every``. Iterating over the stream is ``batches(0, 1)``.
        """
        self._turn()
        return self.batches_from((self._resume or 0) + _arguments.whole(first, "first", 0), every)

    def batches_from(self, batch: int, every: int = 1) -> Iterator[Batch]:
        """Reads batches ``batch``, ``batch + every``, ... of the epoch."""
        self.store.check_open()
        # Read while the files are as they were opened; a state may be asked for when they are closed.
        _ = self.store.identity
        self._supersede("another loop over this stream was begun; make a stream for each")
        self._turn()
        self._resume = None
        self._step = batch
        made = _Batches(self, batch, every)
        self._live = weakref.ref(made)
        return made

    def afresh(self) -> Stream:
        """The same stream at the beginning of its epoch; the two share the selection and the open store."""
        made = Stream.__new__(Stream)
        made.__dict__.update(self.__dict__)
        made._step, made._resume, made._chosen, made._live = 0, None, None, lambda: None
        made._elsewhere = lambda: False
        return made

    def close(self) -> None:
        """Stops reading ahead, and ends the loop that is being read. The stream can be used again."""
        live = self._live()
        if live is not None:
            live.close()
        self._turn_if_idle()

    def _turn(self) -> None:
        """Begins the epoch that was chosen while a loop was being read."""
        if self._chosen is not None:
            self.epoch, self._step, self._resume, self._chosen = self._chosen, 0, None, None

    def _turn_if_idle(self) -> None:
        """The same where the loop has ended: there is nothing left of it that would come before."""
        live = self._live()
        if live is None or not live.reads:
            self._turn()

    def _supersede(self, why: str) -> None:
        live = self._live()
        if live is not None:
            live.close(why)

    def _ring(self) -> list[NDArray[Any]] | None:
        """What batches are written into, if that is to be reused."""
        if self._buffers is not None:
            return [
                _arguments.writable(b, self.dtype, list(self._shape)).view(self.dtype).reshape(self._shape)
                for b in self._buffers
            ]
        if self._reuse:
            return [np.empty(self._shape, self.dtype) for _ in range(_RING)]
        return None

    def _labels_of(
        self, labels: NDArray[np.uint8] | None, examples: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> NDArray[Any] | None:
        special = self.store.special_tokens
        if labels is None:
            return None
        if self._tokens != "all" or not special:
            return labels[examples, tokens - special]
        found = labels[examples, np.maximum(tokens - special, 0)].astype(np.int16)
        found[tokens < special] = -1
        return found

    def __getstate__(self) -> dict[str, Any]:
        self._turn_if_idle()
        state = dict(self.__dict__)
        del state["_native"], state["_live"], state["_elsewhere"]
        state["_chosen"] = None
        if self._step:
            state["_resume"] = self._resume if self._resume is not None else self._step
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._live, self._elsewhere = lambda: None, lambda: False
        self._native = self.store.native_stream(self._selection, self._options)


class _Batches:
    """Batches on their way to one loop."""

    def __init__(self, stream: Stream, first: int, every: int) -> None:
        self._stream = stream
        self._next = _arguments.whole(first, "batch", 0)
        self._every = _arguments.whole(every, "every", 1)
        self._epoch = stream.epoch
        self._layers = np.array(stream.layers, np.int64)
        self._done = False
        self._why: str | None = None
        self._overflows = 0
        # Kept, like the files, until the loop ends, also if the store is closed.
        self._labels = None if stream._tokens == "special" else stream.store.labels
        self._ring = stream._ring()
        self._begin()
        _LIVE.add(self)

    @property
    def reads(self) -> bool:
        """Whether more batches may come."""
        return not self._done

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._native: Any = self._stream._native.start(self._epoch, self._next, self._every, self._ring)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Batch:
        stream = self._stream
        found = None
        if not self._done:
            if self._pid != os.getpid():
                self._begin()  # a forked child has no thread of its parent's
            native = self._native
            found = None if native is None else native.next()
        # Asked after waiting: another thread may have closed this, or begun another loop.
        if self._why is not None:
            raise ClosedError(self._why, path=stream.store.path)
        if self._done:
            raise StopIteration
        if found is None:
            self.close()
            if stream.epoch == self._epoch and stream._live() is self:
                stream.epoch, stream._step = stream.epoch + 1, 0
                stream._turn()
            raise StopIteration
        activations, examples, tokens, groups = found
        self._next += self._every
        if stream._live() is self:
            stream._step = min(self._next - self._every + 1, len(stream))
        if more := stream._native.take_overflows():
            self._warn(more)
        layers = self._layers if groups is None else self._layers[groups]
        if stream._buffers is not None:
            activations = self._yours(activations)
        return Batch(activations, examples, tokens, layers, stream._labels_of(self._labels, examples, tokens))

    def _warn(self, more: int) -> None:
        """Once for every loop: batches that overflow tend to come by the thousand."""
        if not self._overflows:
            stream = self._stream
            named = ", ".join(map(str, stream.layers))
            warnings.warn(
                f"{stream.store.path}: layers {named}: {more} finite values became infinite as {stream.dtype}, and perhaps "
                "more to come; a wider dtype= or a smaller scale= holds them",
                OverflowWarning,
                stacklevel=3,
            )
        self._overflows += more

    def _yours(self, activations: NDArray[Any]) -> Any:
        """The caller's own object for the buffer that was filled."""
        assert self._ring is not None
        assert self._stream._buffers is not None
        at = activations.__array_interface__["data"][0]
        for array, theirs in zip(self._ring, self._stream._buffers, strict=True):
            if array.__array_interface__["data"][0] == at and hasattr(theirs, "__getitem__"):
                whole = len(activations) == len(array) or len(theirs) != len(array)
                return theirs if whole else theirs[: len(activations)]
        return activations

    def close(self, why: str | None = None) -> None:
        """Ends the thread; ``why`` is raised when another batch is asked for, if there might have been one."""
        if not self._done:
            self._why = why
        self._done = True
        native, self._native = self._native, None
        if native is not None:
            _LIVE.discard(self)
            if self._pid == os.getpid():
                native.stop()

    def __del__(self) -> None:
        # Nothing is left to do when the interpreter ends, and little is left to do it with.
        if getattr(self, "_native", None) is not None:
            self.close()


_SINCE_2 = {"dataset", "format", "d_model", "stored", "center", "scale", "units"}
"""Settings that states of version 1 do not have."""

_LIVE: weakref.WeakSet[_Batches] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # Threads that fill memory of numpy's must not outlive it.
    for batches in list(_LIVE):
        batches.close()


def _vectors(value: Any, what: str, d_model: int, layers: int) -> NDArray[np.float64] | None:
    """A factor or offset per column, or per layer and column, flat."""
    if value is None:
        return None
    if is_deviation(value):
        raise ArgumentError(
            f"{what}: rows are multiplied by it, and this is stats.std; stats.inverse_std divides by it"
        )
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu().double().numpy()
        if np.asarray(value).dtype == np.bool_:
            raise ArgumentTypeError(f"{what}: expected numbers, found {value!r:.50}")
        array = np.asarray(value, np.float64)
    except ArgumentError:
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{what}: expected numbers, found {type(value).__name__}") from error
    if array.ndim == 0:
        array = np.broadcast_to(array, (d_model,))
    if array.shape not in ((d_model,), (layers, d_model)):
        raise ArgumentError(f"{what}: expected ({d_model},) or ({layers}, {d_model}), found {array.shape}")
    return np.ascontiguousarray(array).reshape(-1)
