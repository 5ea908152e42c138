"""Reads batches ahead of a loop, on a thread of Python: for batches that one call of the core reads in parallel."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


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
