"""Worker processes that build sources in parallel, because Python's part of tokenizing holds the GIL."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from actshard.errors import InternalError, from_plain
from actshard.tokens.shards import Counts
from actshard.work import children


class Worker:
    """A process that builds sources one after another. It loads the tokenizer once."""

    def __init__(self, setup: bytes, threads: int) -> None:
        self.shard: str | None = None
        """The shard it is building; None when idle."""
        self._heard = bytearray()
        count = str(threads)
        env = {
            **os.environ,
            "RAYON_NUM_THREADS": count,
            "ACTSHARD_NUM_THREADS": count,
            "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
            "PYTHONWARNINGS": "ignore",
        }
        reader, writer = os.pipe()
        self.messages = os.fdopen(reader, "rb", buffering=0)
        """The pipe of the worker's messages. Its stdout is free for output of libraries."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "actshard.tokens.shards", str(writer)],
                stdin=subprocess.PIPE,
                stdout=children.stderr(),  # stdout of this process may be parsed by a program
                pass_fds=(writer,),
                env=env,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the workers
            )
        except BaseException:
            self.messages.close()
            raise
        finally:
            os.close(writer)
        assert self._process.stdin is not None
        # Stdin stays open until this process ends, even if it is killed. Then the worker reads end of file and exits.
        self._stdin = self._process.stdin
        # A tokenizer is larger than a pipe's buffer: writing from a thread keeps a slow worker from blocking the others.
        self._sending = threading.Thread(target=self._send, args=(setup,), daemon=True)
        self._sending.start()

    def _send(self, line: bytes) -> None:
        with suppress(OSError, ValueError):  # the worker died; its exit status is checked later
            self._stdin.write(line + b"\n")
            self._stdin.flush()

    def give(self, order: Order) -> None:
        """Sends an order."""
        self.shard = order.name
        before, line = self._sending, order.line

        def send() -> None:
            before.join()
            self._send(line)

        self._sending = threading.Thread(target=send, daemon=True)
        self._sending.start()

    def hear(self) -> Iterator[dict[str, Any]] | None:
        """Messages received since the last call; None at end of file."""
        data = os.read(self.messages.fileno(), 1 << 16)
        if not data:
            return None
        *lines, rest = bytes(self._heard + data).split(b"\n")
        self._heard = bytearray(rest)
        return map(json.loads, lines)

    def end(self) -> None:
        """Closes stdin, so that the worker exits."""
        self.shard = None
        self._sending.join()
        with suppress(OSError):
            self._stdin.close()

    def wait(self) -> int:
        """Waits for the process and returns its exit status."""
        with suppress(OSError):
            self._stdin.close()
        self.messages.close()
        return self._process.wait()

    def kill(self) -> None:
        """Kills the process."""
        with suppress(OSError):
            self._process.kill()


class Order(NamedTuple):
    """A file or a part of one: its name, its size in bytes, and the worker's order."""

    name: str
    size: int
    line: bytes


class Workers:
    """Builds parts in up to ``jobs`` worker processes, each one at a time."""

    def __init__(
        self,
        out: Path,
        setup: dict[str, Any],
        jobs: int,
        threads: int,
        heard: Callable[[str, Counts], object],
        done: Callable[[str], object],
    ) -> None:
        self._out = out
        self._setup = json.dumps(setup).encode()
        self._jobs = jobs
        self._threads = threads
        self._heard, self._done = heard, done
        self._waiting: list[Order] = []

    def run(self, parts: list[Order]) -> None:
        """Builds all parts.

        Raises:
            InternalError: a process died. Errors of a source are re-raised. In both cases the other processes are killed.
        """
        # Largest first (popped from the end), so that no long task is left for the end.
        self._waiting = sorted(parts, key=lambda part: part.size)
        workers: set[Worker] = set()
        selector = selectors.DefaultSelector()
        try:
            while self._waiting and len(workers) < self._jobs:
                worker = Worker(self._setup, self._threads)
                workers.add(worker)
                selector.register(worker.messages, selectors.EVENT_READ, worker)
                worker.give(self._waiting.pop())
            while workers:
                for key, _ in selector.select():
                    worker = key.data
                    if not self._hear(worker):
                        selector.unregister(worker.messages)
                        workers.discard(worker)
                        self._ended(worker)
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.wait()
            selector.close()

    def _hear(self, worker: Worker) -> bool:
        """Handles a worker's messages and sends it the next source. Returns False at end of file."""
        heard = worker.hear()
        if heard is None:
            return False
        for message in heard:
            if "error" in message:
                raise from_plain(message)
            if "done" in message:
                self._done(message["done"])
                if self._waiting:
                    worker.give(self._waiting.pop())
                else:
                    worker.end()
                continue
            assert worker.shard is not None
            self._heard(worker.shard, Counts(**message))
        return True

    def _ended(self, worker: Worker) -> None:
        status = worker.wait()
        if status or worker.shard is not None:
            raise InternalError(
                f"the process that built shard {worker.shard} ended with status {status}", path=self._out
            )
