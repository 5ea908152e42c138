"""Appends windows to a writer in a thread, so that copying, writing and committing go on during the next forward passes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa
from numpy.typing import NDArray

from actshard.writing import Writer

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Filled:
    """The states of a window.

    Attributes:
        states: ``(n, layers, d_model)`` for one row per example, or a list of ``(layers, tokens_i, d_model)``.
        columns: one value per example.
        release: called when the states are committed: their memory is used again.
    """

    states: NDArray[np.generic] | list[NDArray[np.generic]]
    columns: Mapping[str, pa.Array] | None
    release: Callable[[], None]


class Appender:
    """A context manager that appends windows in their order, and commits after each; an error is raised by the next call."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._windows: queue.Queue[Callable[[], Filled] | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="actshard-capture", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = self._stopped or kind is not None
        self._windows.put(None)
        self._thread.join()
        if kind is None:
            self._check()

    def append(self, wait: Callable[[], Filled]) -> None:
        """Queues a window, for whose states ``wait`` waits. Waits while two others are queued or being written."""
        self._check()
        self._windows.put(wait)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (wait := self._windows.get()) is not None:
            if self._stopped or self._error is not None:
                continue  # so that a waiting append returns
            try:
                window = wait()
                self._writer.append(window.states, columns=window.columns)
                self._writer.flush()
                window.release()
            except BaseException as error:  # raised in the capturing thread
                self._error = error
