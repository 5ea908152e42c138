"""A stream's position (epoch and next batch), its saved states, and the loop that reads it.

Streams of activations and of tokens are both :class:`Epochs`, so they share resuming, workers and pickling.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ClosedError, warn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


B_co = TypeVar("B_co", covariant=True)


class Reader(Protocol):
    """Reads batches ahead of a loop on its own threads."""

    def next(self) -> object:
        """Waits for the next batch; returns None at the end of the epoch."""

    def ready(self) -> bool:
        """Whether ``next`` would return a batch without waiting. False at the end and before an error."""

    def release(self, number: int) -> None:
        """Returns a buffer of a loop that holds them, by its index, for reuse."""

    def stop(self) -> None:
        """Stops the threads. May be called again."""


def _differences(
    state: Mapping[str, object], stream: Mapping[str, object], prefix: str = "", where: str = "the state"
) -> Iterator[str]:
    """Describes the differences between a state's settings and a stream's; for a mixture, those of each of its streams."""
    for name in sorted(state.keys() | stream.keys(), key=str):
        state_value, stream_value = state.get(name), stream.get(name)
        if state_value == stream_value:
            continue
        if (
            isinstance(state_value, list)
            and isinstance(stream_value, list)
            and all(isinstance(x, dict) for x in (*state_value, *stream_value))
        ):
            state_value = {str(i): x for i, x in enumerate(state_value)}
            stream_value = {str(i): x for i, x in enumerate(stream_value)}
        if isinstance(state_value, dict) and isinstance(stream_value, dict):
            yield from _differences(state_value, stream_value, f"{prefix}{name} ", where)
        else:
            yield f"{prefix}{name}: {state_value!r:.200} in {where}, {stream_value!r:.200} here"


class Epochs(ABC, Generic[B_co]):
    """Batches, epoch after epoch.

    ``for batch in stream`` reads one epoch; the next loop reads the next epoch. After a ``break`` the next loop starts the
    same epoch again, unless a state was loaded in between.

    A stream has one active loop: when another loop begins, the iterator of the first raises :class:`ClosedError`.

    Attributes:
        epoch: the current epoch, or the next one if no loop is active.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._step = 0
        self._resume: int | None = None
        self._chosen: int | None = None
        self._live: Callable[[], Loop[B_co] | None] = lambda: None
        self._elsewhere: Callable[[], object] = lambda: False
        self._pickled: dict[str, object] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _count(self) -> int | None:
        """Number of batches per epoch and rank; None for an endless epoch."""

    @abstractmethod
    def _place(self) -> Path | None:
        """Path of the dataset, for messages."""

    @abstractmethod
    def _ready(self) -> None:
        """Raises if a loop cannot begin, e.g. on a closed store."""

    @abstractmethod
    def _loop(self, first: int, every: int, buffers: list[NDArray[np.generic]] | None) -> Loop[B_co]:
        """Returns a loop over batches ``first``, ``first + every``, ... of the epoch; ``buffers`` as in :meth:`loop`."""

    @abstractmethod
    def _settings(self) -> dict[str, object]:
        """Everything that determines the batches and their values, as plain values."""

    def _covered(self) -> dict[str, object]:
        """What the stream reads, as plain values, which a pickle compares when it is read. Empty: nothing that can change."""
        return {}

    @property
    @abstractmethod
    def reuses(self) -> bool:
        """Whether the memory of a batch's activations is written again when a later batch is requested.

        Whoever holds a batch longer, on a device or in another thread or process, copies it then.
        """

    def _settings_at(self, batch: int) -> dict[str, object]:
        """Everything that determines the batches of an epoch before ``batch``, if that is less than :meth:`_settings`."""
        return self._settings()

    def _translated(self, saved: dict[str, object], batch: int) -> dict[str, object]:
        """The settings of a state before ``batch``, those of an older release under the names of this one."""
        return saved

    def _added(self, saved: dict[str, object]) -> set[str]:
        """Settings that a state of an older release lacks."""
        return set()

    def _common(
        self, current: dict[str, object], saved: dict[str, object]
    ) -> tuple[dict[str, object], dict[str, object], set[str]]:
        """The settings of this stream and of a state without those that the state's release lacked, and the names of these."""
        added = self._added(saved)
        mine, theirs = ({k: v for k, v in settings.items() if k not in added} for settings in (current, saved))
        return mine, theirs, added

    @property
    def resumes(self) -> bool:
        """Whether the next loop continues at a loaded state."""
        return self._resume is not None

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next loop. An active loop is not changed.

        Setting the epoch of a state that was just loaded keeps the state's position.
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
        """Returns the stream's position as JSON values: a few hundred bytes, independent of how much was read.

        The position is after the last batch returned, and is the same on every rank. A stream with the same settings over the
        same dataset (at any path, in any process, with any number of threads or workers) continues with exactly the
        remaining batches.

        Raises:
            ArgumentError: ``DataLoader`` workers read this stream; this process does not know their position.
        """
        if self._elsewhere():
            raise ArgumentError(
                "state_dict: workers of a DataLoader read this stream, and this process does not know their position. Use "
                "torchdata's StatefulDataLoader and its state_dict(), or num_workers=0."
            )
        return self.state()

    def state(self) -> dict[str, Any]:
        """:meth:`state_dict` of this process's own loop, without the check for workers. Internal."""
        self._turn_if_idle()
        pending = self._resume if self._resume is not None else self._step
        return {"version": 2, "epoch": self.epoch, "batch": pending, "settings": self._settings_at(pending)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved state: the next loop reads the rest of that epoch.

        A state of an older release names less of its dataset. It is loaded, with a warning, if all settings it contains agree.

        Raises:
            ArgumentError: the state belongs to another dataset or other settings, whose batches differ.
        """
        if (
            not isinstance(state, dict)
            or type(state.get("version")) is not int
            or state["version"] not in (1, 2)
            or not isinstance(state.get("settings"), dict)
        ):
            raise ArgumentError("load_state_dict: expected a state that state_dict() returned")
        epoch, batch = _arguments.whole(state.get("epoch"), "epoch"), _arguments.whole(state.get("batch"), "batch")
        current, saved, added = self._common(self._settings_at(batch), self._translated(state["settings"], batch))
        differ = [k for k in current.keys() | saved.keys() if current.get(k) != saved.get(k)]
        if differ:
            what = ", ".join(_differences({k: saved.get(k) for k in differ}, {k: current.get(k) for k in differ}))
            which = "another dataset" if differ == ["dataset"] else "another stream"
            raise ArgumentError(f"load_state_dict: the state belongs to {which}, whose batches differ ({what})")
        count = self._count()
        if count is not None and batch > count:
            raise ArgumentError(f"load_state_dict: batch: expected at most {count}, found {batch}")
        if added:
            text = (
                f"load_state_dict: a state of an older release does not name its dataset completely ({', '.join(sorted(added))} "
                f"are missing); check that it is {self._place()}"
            )
            warn(text, code="state-without-dataset")
        self._supersede("a state was loaded into this stream")
        if batch == count and batch:
            epoch, batch = epoch + 1, 0
        self.epoch, self._step, self._resume, self._chosen = epoch, batch, batch, None

    def __iter__(self) -> Iterator[B_co]:
        return self.batches()

    def batches(self, first: int = 0, every: int = 1) -> Iterator[B_co]:
        """Iterates over batches ``first``, ``first + every``, ... of the rest of the epoch: one of ``every`` workers' share.

        The batches themselves do not depend on ``every``. Iterating over the stream is ``batches(0, 1)``.
        """
        self._turn()
        return self.batches_from((self._resume or 0) + _arguments.whole(first, "first"), every)

    def batches_from(self, batch: int, every: int = 1) -> Iterator[B_co]:
        """Iterates over batches ``batch``, ``batch + every``, ... of the epoch."""
        return self._begin_loop(batch, every, None)

    def loop(self, buffers: list[NDArray[np.generic]] | None) -> Loop[B_co]:
        """Begins a loop over the rest of the epoch. Internal: for readers that hold several batches at once.

        Args:
            buffers: arrays of :meth:`Stream.batch_shape` that batches are written into. Each is filled again only after
                :meth:`Loop.release`. None: each batch gets new arrays.
        """
        self._turn()
        return self._begin_loop(self._resume or 0, 1, buffers)

    def _begin_loop(self, batch: int, every: int, buffers: list[NDArray[np.generic]] | None) -> Loop[B_co]:
        self._ready()
        self._check_pickled()
        self._supersede("another loop over this stream was begun; create one stream per loop")
        self._turn()
        self._resume = None
        self._step = batch
        loop = self._loop(batch, every, buffers)
        self._live = weakref.ref(loop)
        return loop

    def afresh(self) -> Self:
        """Returns a copy of the stream at the beginning of its epoch. Both share the selection and the open dataset."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._step, copy._resume, copy._chosen, copy._live = 0, None, None, lambda: None
        copy._elsewhere = lambda: False
        return copy

    def close(self) -> None:
        """Ends the active loop and its read-ahead. The stream can be iterated again."""
        live = self._live()
        if live is not None:
            live.close()
        self._turn_if_idle()

    def _check_pickled(self) -> None:
        """Raises ArgumentError if this stream was pickled over another dataset."""
        if self._pickled is not None and (covered := self._covered()) != self._pickled:
            what = ", ".join(_differences(self._pickled, covered, where="the pickle"))
            raise ArgumentError(
                f"the stream was pickled over another dataset, whose batches differ ({what}); create the stream again",
                path=self._place(),
            )
        self._pickled = None

    def _turn(self) -> None:
        """Moves to the epoch that :meth:`set_epoch` set while a loop was active."""
        if self._chosen is not None:
            self.epoch, self._step, self._resume, self._chosen = self._chosen, 0, None, None

    def _turn_if_idle(self) -> None:
        """:meth:`_turn`, unless a loop is still active."""
        live = self._live()
        if live is None or not live.reads:
            self._turn()

    def _supersede(self, why: str) -> None:
        live = self._live()
        if live is not None:
            live.close(why)

    def __getstate__(self) -> dict[str, object]:
        self._turn_if_idle()
        state = dict(self.__dict__)
        del state["_live"], state["_elsewhere"]
        state["_chosen"] = None
        if self._pickled is None:
            with contextlib.suppress(ClosedError):  # a closed store that was never read has nothing to compare
                state["_pickled"] = self._covered()
        if self._step:
            state["_resume"] = self._resume if self._resume is not None else self._step
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._live, self._elsewhere = lambda: None, lambda: False


class Loop(ABC, Generic[B_co]):
    """The iterator of one loop. It is active until it ends, is closed, or another loop over its stream begins."""

    def __init__(self, stream: Epochs[B_co], first: int, every: int) -> None:
        self._stream = stream
        # The next batch to read, and the next one to hand out.
        self._next = self._due = _arguments.whole(first, "batch")
        self._every = _arguments.whole(every, "every", 1)
        self._epoch = stream.epoch
        self._done = False
        self._why: str | None = None
        self._begin()
        _LIVE.add(self)

    @abstractmethod
    def _start(self) -> Reader:
        """Returns a reader that starts at the next batch."""

    @abstractmethod
    def _made(self, raw_batch: Any) -> B_co:
        """Builds the batch from the reader's result."""

    @property
    def reads(self) -> bool:
        """Whether the loop is active."""
        return not self._done

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._reader: Reader | None = self._start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B_co:
        raw_batch = self._next_raw_batch()
        if raw_batch is None:
            self.finish()
            raise StopIteration
        self.hand_out()
        return self._made(raw_batch)

    def _next_raw_batch(self) -> object:
        """Waits for the reader's next result; None at the end. Raises StopIteration if the loop was closed."""
        raw_batch = None
        if not self._done:
            if self._pid != os.getpid():
                self._begin()  # a forked child has none of its parent's threads
            reader = self._reader
            raw_batch = None if reader is None else reader.next()
        # Checked after the wait: another thread may have closed this loop or begun another one.
        self.check()
        if self._done:
            raise StopIteration
        if raw_batch is not None:
            self._next += self._every
        return raw_batch

    def check(self) -> None:
        """Raises ClosedError if another loop or a loaded state ended this loop."""
        if self._why is not None:
            raise ClosedError(self._why, path=self._stream._place())

    def take(self) -> B_co | None:
        """Waits for the next batch, without moving the stream's position; None at the end.

        Raises:
            StopIteration: the loop was closed.
        """
        raw_batch = self._next_raw_batch()
        return None if raw_batch is None else self._made(raw_batch)

    def hand_out(self) -> None:
        """Moves the stream's position behind the next batch in order, which :meth:`take` returned."""
        stream, position = self._stream, self._due + 1
        self._due += self._every
        if stream._live() is self:
            count = stream._count()
            stream._step = position if count is None else min(position, count)

    def finish(self) -> None:
        """Ends the loop after its last batch was handed out: the next loop reads the next epoch."""
        stream = self._stream
        self.close()
        if stream.epoch == self._epoch and stream._live() is self:
            stream.epoch, stream._step = stream.epoch + 1, 0
            stream._turn()

    def ready(self) -> bool:
        """Whether :meth:`take` would return a batch without waiting."""
        reader = self._reader
        return reader is not None and self._pid == os.getpid() and reader.ready()

    def release(self, number: int) -> None:
        """Returns a held array, by its index, to be filled again."""
        reader = self._reader
        if reader is not None and self._pid == os.getpid():
            reader.release(number)

    def close(self, why: str | None = None) -> None:
        """Stops the reader. An active loop raises ClosedError with the text ``why`` when the next batch is requested."""
        if not self._done:
            self._why = why
        self._done = True
        reader, self._reader = self._reader, None
        if reader is not None:
            _LIVE.discard(self)
            if self._pid == os.getpid():
                reader.stop()

    def __del__(self) -> None:
        # At interpreter shutdown attributes may already be gone; _stop_all has closed the loops.
        if getattr(self, "_reader", None) is not None:
            self.close()


_LIVE: weakref.WeakSet[Loop[object]] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # Reader threads write into numpy memory and must end before the interpreter frees it.
    for loop in list(_LIVE):
        loop.close()


# Reads batches ahead of a loop, on a thread of Python: for batches that one call of the core reads in parallel.


class ReadAhead:
    """Reads batches on a thread, up to ``ahead`` batches before they are requested."""

    def __init__(self, read: Callable[[int], object], numbers: Iterable[int], ahead: int) -> None:
        self._read, self._numbers, self._most = read, numbers, ahead
        self._changed = threading.Condition()
        self._held: deque[object] = deque()
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        # A daemon thread: an abandoned loop does not keep the process alive.
        self._thread = threading.Thread(target=self._fill, name="actshard-batches", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            for number in self._numbers:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or len(self._held) < self._most)
                    if self._stopped:
                        return
                batch = self._read(number)
                with self._changed:
                    self._held.append(batch)
                    self._changed.notify_all()
        except BaseException as error:  # re-raised by next()
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def next(self) -> Any:
        """Waits for the next batch and returns it; None at the end. Raises errors of the reading thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._held or self._ended or self._stopped)
            if self._held:
                batch = self._held.popleft()
                self._changed.notify_all()
                return batch
        if self._error is not None and not self._stopped:
            raise self._error
        return None

    def ready(self) -> bool:
        """Whether ``next`` would return a batch without waiting."""
        return bool(self._held) and not self._stopped

    def release(self, number: int) -> None:
        """Does nothing: batches are new arrays."""

    def stop(self) -> None:
        """Stops the thread after its current batch."""
        with self._changed:
            self._stopped = True
            self._held.clear()
            self._changed.notify_all()
        # The loop may be garbage-collected on its own thread, which cannot join itself.
        if self._thread is not threading.current_thread():
            self._thread.join()
