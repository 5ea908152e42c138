"""The position of a stream: its epoch, its next batch, the states that are saved and loaded, and the one loop that reads it.

Streams of activations and of token datasets are both :class:`Epochs`, so that resuming, workers and pickling are the same.
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from actshard import _arguments
from actshard.errors import ActshardWarning, ArgumentError, ClosedError

B = TypeVar("B")


class Reader(Protocol):
    """Reads batches ahead of a loop, on threads of its own."""

    def next(self) -> Any:
        """Waits for the next batch; None at the end of the epoch."""

    def stop(self) -> None:
        """Ends its threads; twice does no harm."""


class Epochs(ABC, Generic[B]):
    """Batches, epoch after epoch.

    ``for batch in stream`` reads one epoch; the next loop reads the next one. A loop that was left early begins again with the
    first batch of its epoch, unless a state was loaded in between.

    A stream has one loop at a time: when another one begins, the iterator of the first raises :class:`ClosedError`.

    Attributes:
        epoch: the epoch that is being read, or comes next.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._step = 0
        self._resume: int | None = None
        self._chosen: int | None = None
        self._live: Any = lambda: None
        self._elsewhere: Any = lambda: False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _count(self) -> int | None:
        """Batches of an epoch, of this rank; None: it does not end."""

    @abstractmethod
    def _place(self) -> Path | None:
        """The dataset's path, for messages."""

    @abstractmethod
    def _ready(self) -> None:
        """Raises what keeps a loop from beginning."""

    @abstractmethod
    def _loop(self, first: int, every: int) -> Loop[B]:
        """A loop over batches ``first``, ``first + every``, ... of the epoch."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Everything that decides which batches there are, and what is in them, as plain values."""

    def _added(self, theirs: dict[str, Any]) -> set[str]:
        """Settings that a state of an older release does not have."""
        return set()

    @property
    def resumes(self) -> bool:
        """Whether the next loop goes on where a loaded state was taken."""
        return self._resume is not None

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next loop reads; a loop that is being read is not changed.

        The epoch of a state that was just loaded goes on where the state was taken.
        """
        epoch = _arguments.whole(epoch, "epoch")
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
        added = self._added(theirs)
        names: set[str] = (mine.keys() | theirs.keys()) - added
        differ = [k for k in names if mine.get(k) != theirs.get(k)]
        if differ:
            what = ", ".join(f"{k}: {theirs.get(k)!r} then, {mine.get(k)!r} now" for k in sorted(differ))
            which = "another dataset" if differ == ["dataset"] else "another stream"
            raise ArgumentError(f"load_state_dict: the state is of {which}, whose batches differ ({what})")
        epoch, batch = _arguments.whole(state.get("epoch"), "epoch"), _arguments.whole(state.get("batch"), "batch")
        count = self._count()
        if count is not None and batch > count:
            raise ArgumentError(f"load_state_dict: batch {batch} of {count}")
        if added:
            said = f"load_state_dict: a state of an older release does not name its dataset; check that it is {self._place()}"
            warnings.warn(ActshardWarning(said, code="state-without-dataset"), stacklevel=2)
        self._supersede("a state was loaded into this stream")
        if batch == count and batch:
            epoch, batch = epoch + 1, 0
        self.epoch, self._step, self._resume, self._chosen = epoch, batch, batch, None

    def __iter__(self) -> Iterator[B]:
        return self.batches()

    def batches(self, first: int = 0, every: int = 1) -> Iterator[B]:
        """Reads batches ``first``, ``first + every``, ... of what is left of the epoch: one worker's part of ``every`` workers'.

        The batches themselves do not depend on ``every``. Iterating over the stream is ``batches(0, 1)``.
        """
        self._turn()
        return self.batches_from((self._resume or 0) + _arguments.whole(first, "first"), every)

    def batches_from(self, batch: int, every: int = 1) -> Iterator[B]:
        """Reads batches ``batch``, ``batch + every``, ... of the epoch."""
        self._ready()
        self._supersede("another loop over this stream was begun; make a stream for each")
        self._turn()
        self._resume = None
        self._step = batch
        made = self._loop(batch, every)
        self._live = weakref.ref(made)
        return made

    def afresh(self) -> Self:
        """The same stream at the beginning of its epoch; the two share the selection and the open dataset."""
        made = object.__new__(type(self))
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

    def __getstate__(self) -> dict[str, Any]:
        self._turn_if_idle()
        state = dict(self.__dict__)
        del state["_live"], state["_elsewhere"]
        state["_chosen"] = None
        if self._step:
            state["_resume"] = self._resume if self._resume is not None else self._step
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._live, self._elsewhere = lambda: None, lambda: False


class Loop(ABC, Generic[B]):
    """The iterator of one loop. It reads until it ends, is closed, or another loop over its stream begins."""

    def __init__(self, stream: Epochs[B], first: int, every: int) -> None:
        self._stream = stream
        self._next = _arguments.whole(first, "batch")
        self._every = _arguments.whole(every, "every", 1)
        self._epoch = stream.epoch
        self._done = False
        self._why: str | None = None
        self._begin()
        _LIVE.add(self)

    @abstractmethod
    def _start(self) -> Reader:
        """Begins to read from the next batch on."""

    @abstractmethod
    def _made(self, found: Any) -> B:
        """The batch, of what the reader found."""

    @property
    def reads(self) -> bool:
        """Whether more batches may come."""
        return not self._done

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._reader: Reader | None = self._start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        stream = self._stream
        found = None
        if not self._done:
            if self._pid != os.getpid():
                self._begin()  # a forked child has no thread of its parent's
            reader = self._reader
            found = None if reader is None else reader.next()
        # Asked after waiting: another thread may have closed this, or begun another loop.
        if self._why is not None:
            raise ClosedError(self._why, path=stream._place())
        if self._done:
            raise StopIteration
        if found is None:
            self.close()
            if stream.epoch == self._epoch and stream._live() is self:
                stream.epoch, stream._step = stream.epoch + 1, 0
                stream._turn()
            raise StopIteration
        self._next += self._every
        if stream._live() is self:
            count, step = stream._count(), self._next - self._every + 1
            stream._step = step if count is None else min(step, count)
        return self._made(found)

    def close(self, why: str | None = None) -> None:
        """Ends the reader; ``why`` is raised when another batch is asked for, if there might have been one."""
        if not self._done:
            self._why = why
        self._done = True
        reader, self._reader = self._reader, None
        if reader is not None:
            _LIVE.discard(self)
            if self._pid == os.getpid():
                reader.stop()

    def __del__(self) -> None:
        # Nothing is left to do when the interpreter ends, and little is left to do it with.
        if getattr(self, "_reader", None) is not None:
            self.close()


_LIVE: weakref.WeakSet[Loop[Any]] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # Threads that fill memory of numpy's must not outlive it.
    for loop in list(_LIVE):
        loop.close()
