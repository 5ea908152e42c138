"""Worker processes that run orders one after another: for local runs of plans, and for builds of token caches.

A worker is a module that is run with a descriptor as its argument and uses :class:`Driver`. Its stdin is a pipe from the process
that started it: a line of settings, then a line per order. When that process ends or is killed, the worker reads end of file and
exits. It writes messages as JSON lines to the descriptor, because libraries may print to stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

# Helpers for starting child processes and for measuring this one.


def stderr() -> int:
    """The descriptor of stderr, or DEVNULL if it is closed."""
    try:
        os.get_inheritable(2)  # raises if it is closed
    except OSError:
        return subprocess.DEVNULL
    return 2


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def peak_memory() -> int:
    """Peak memory of this process in bytes, including mapped pages."""
    try:  # not ru_maxrss, which on Linux starts at the value of the parent process
        with Path("/proc/self/status").open(encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


ORPHANED = 5
"""Exit status of a worker whose driver ended before its orders were done."""
WorkerMessage = Mapping[str, object]
T = TypeVar("T")


class _Worker(Generic[T]):
    """A process of a pool."""

    def __init__(self, module: str, settings: str, env: Mapping[str, str]) -> None:
        self.order: T | None = None
        """What it is working on; None when idle."""
        self._rest = b""
        reader, writer = os.pipe()
        self.messages = os.fdopen(reader, "rb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(writer)],
                stdin=subprocess.PIPE,
                stdout=stderr(),  # stdout of this process may be parsed by a program
                pass_fds=(writer,),
                env={**os.environ, **env},
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the workers
            )
        except BaseException:
            self.messages.close()
            raise
        finally:
            os.close(writer)
        self._write(settings)

    def give(self, order: T, line: str) -> None:
        """Sends an order. Lines are shorter than a pipe's buffer, so that a slow worker does not block the others."""
        self.order = order
        self._write(line)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the worker died: hear() will read its end of file
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def hear(self) -> Iterator[WorkerMessage] | None:
        """Messages received since the last call; None when the worker has ended."""
        data = os.read(self.messages.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return map(json.loads, lines)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Closes the worker's stdin, so that it exits when idle, and waits for it. Returns its exit status."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self.messages.close()
        return self._process.wait()


class WorkerPool(Generic[T]):
    """Gives orders to processes and replaces those that die.

    Args:
        module: the worker's module.
        settings: its first line.
        count: maximum number of processes, which share the processors.
        waiting: the orders; the last one is given first. May be changed while the pool runs.
        line: returns the line of an order.
        heard: called with an order and a message about it. Returns whether the order is done.
        lost: called with an order whose process ended, and how.
        stopped: called with an order whose process was killed, because another function raised an error.
        env: variables of the processes.
    """

    def __init__(
        self,
        module: str,
        settings: str,
        count: int,
        waiting: list[T],
        *,
        line: Callable[[T], str],
        heard: Callable[[T, WorkerMessage], bool],
        lost: Callable[[T, str], object],
        stopped: Callable[[T], object] = lambda order: None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._module, self._settings, self._count = module, settings, count
        self.waiting = waiting
        self._line, self._heard, self._lost, self._stopped = line, heard, lost, stopped
        threads = str(threads_of_each(count))
        self._env = {"RAYON_NUM_THREADS": threads, "ACTSHARD_NUM_THREADS": threads, **(env or {})}
        self._selector = selectors.DefaultSelector()
        self._workers: set[_Worker[T]] = set()

    def run(self) -> None:
        """Runs all orders. If a function of the pool raises an error, all processes are killed."""
        try:
            while self.waiting or self._workers:
                while self.waiting and len(self._workers) < self._count:
                    self._start()
                for key, _ in self._selector.select():
                    self._listen(key.data)
        finally:
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                worker.end()
                if worker.order is not None:
                    self._stopped(worker.order)
            self._selector.close()

    def _start(self) -> None:
        worker: _Worker[T] = _Worker(self._module, self._settings, self._env)
        self._workers.add(worker)
        self._selector.register(worker.messages, selectors.EVENT_READ, worker)
        self._give(worker)

    def _give(self, worker: _Worker[T]) -> None:
        order = self.waiting.pop()
        worker.give(order, self._line(order))

    def _listen(self, worker: _Worker[T]) -> None:
        messages = worker.hear()
        if messages is None:
            self._end(worker)
            return
        for message in messages:
            if worker.order is None or not self._heard(worker.order, message):
                continue
            worker.order = None
            if self.waiting:
                self._give(worker)
            else:
                self._end(worker)

    def _end(self, worker: _Worker[T]) -> None:
        self._selector.unregister(worker.messages)
        self._workers.discard(worker)
        status = worker.end()
        if worker.order is not None:
            self._lost(worker.order, describe_exit(status))


def threads_of_each(count: int) -> int:
    """Number of threads of each of ``count`` processes."""
    limit = os.environ.get("ACTSHARD_NUM_THREADS", "")
    is_number = limit.isascii() and limit.isdecimal() and int(limit) > 0
    return max(1, (int(limit) if is_number else processors()) // count)


def describe_exit(status: int) -> str:
    """Describes an exit status, or the signal that ended the process."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ", possibly because memory was short" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


class Driver:
    """The worker's side. If the driver's process ends before the orders are done, this process exits at once."""

    def __init__(self) -> None:
        self._descriptor = int(sys.argv[1]) if len(sys.argv) > 1 else 1
        os.set_inheritable(self._descriptor, False)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._received, self._done = 0, 0
        """Lines, and orders that are done. Each is changed by one thread."""
        threading.Thread(target=self._follow, daemon=True, name="actshard-follow").start()

    def _follow(self) -> None:
        # Not through sys.stdin: interpreter shutdown would wait for its lock.
        rest = b""
        while data := os.read(0, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._received += 1
                self._lines.put(line)
        if rest or self._received != self._done + 1:  # the first line is no order
            os._exit(ORPHANED)
        self._lines.put(None)

    def settings(self) -> str:
        """The first line."""
        return (self._lines.get() or b"").decode()

    def orders(self) -> Iterator[str]:
        """The lines that follow, until end of file. An order is done when the next one is asked for."""
        while (line := self._lines.get()) is not None:
            yield line.decode()
            self._done += 1

    def send(self, message: WorkerMessage) -> None:
        """Writes a message."""
        line = memoryview(json.dumps(message).encode() + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]
