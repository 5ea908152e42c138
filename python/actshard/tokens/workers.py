"""Sources built by processes of their own, so that Python's part of tokenizing uses every processor."""

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
from typing import Any

from actshard.errors import InternalError, from_plain
from actshard.tokens import shards
from actshard.tokens.shards import Counts, Task
from actshard.tokens.sources import Source


def _stderr() -> int:
    """The descriptor of standard error, or one that goes nowhere."""
    try:
        os.get_inheritable(2)  # raises if it is closed
    except OSError:
        return subprocess.DEVNULL
    return 2


class Worker:
    """A process that builds sources, one after another; its tokenizer is loaded once."""

    def __init__(self, setup: bytes, threads: int) -> None:
        self.shard: str | None = None
        """The source that it builds."""
        self._heard = bytearray()
        count = str(threads)
        env = {
            **os.environ,
            "RAYON_NUM_THREADS": count,
            "ACTSHARD_NUM_THREADS": count,
            "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
            "PYTHONWARNINGS": "ignore",
        }
        said, say = os.pipe()
        self.said = os.fdopen(said, "rb", buffering=0)
        """What it says, on a descriptor of its own: its standard output belongs to the libraries that it uses."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "actshard.tokens.shards", str(say)],
                stdin=subprocess.PIPE,
                stdout=_stderr(),  # what is printed is for people; this process's own output may be read by a program
                pass_fds=(say,),
                env=env,
                start_new_session=True,  # Ctrl-C is for this process, which ends them all
            )
        except BaseException:
            self.said.close()
            raise
        finally:
            os.close(say)
        assert self._process.stdin is not None
        # Stdin stays open: when this process is gone, however that came, it closes, and the worker ends.
        self._stdin = self._process.stdin
        # A tokenizer is larger than a pipe: a worker that reads slowly must not keep the others from being heard.
        self._sending = threading.Thread(target=self._send, args=(setup,), daemon=True)
        self._sending.start()

    def _send(self, line: bytes) -> None:
        with suppress(OSError, ValueError):  # it has died, which its status says
            self._stdin.write(line + b"\n")
            self._stdin.flush()

    def give(self, source: Source, task: Task) -> None:
        """Gives it a source to build."""
        self.shard = source.shard
        before, line = self._sending, json.dumps(shards.task_as_dict(source, task)).encode()

        def send() -> None:
            before.join()
            self._send(line)

        self._sending = threading.Thread(target=send, daemon=True)
        self._sending.start()

    def hear(self) -> Iterator[dict[str, Any]] | None:
        """What it says; None when it says no more."""
        data = os.read(self.said.fileno(), 1 << 16)
        if not data:
            return None
        *lines, rest = bytes(self._heard + data).split(b"\n")
        self._heard = bytearray(rest)
        return map(json.loads, lines)

    def end(self) -> None:
        """Lets it end: there is nothing more to build."""
        self.shard = None
        self._sending.join()
        with suppress(OSError):
            self._stdin.close()

    def wait(self) -> int:
        """Its status, when it has ended."""
        with suppress(OSError):
            self._stdin.close()
        self.said.close()
        return self._process.wait()

    def kill(self) -> None:
        """Ends it at once."""
        with suppress(OSError):
            self._process.kill()


class Workers:
    """Sources built by processes of their own, as many at a time as there are jobs; each builds one after another."""

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
        self._waiting: list[tuple[Source, Task]] = []

    def run(self, files: list[tuple[Source, Task]]) -> None:
        """Builds all of them.

        Raises:
            InternalError: a process died. Errors of a source are raised as they are; the other processes are ended.
        """
        # The largest first: the last to end is then a small one.
        self._waiting = sorted(files, key=lambda f: f[0].size())
        workers: set[Worker] = set()
        selector = selectors.DefaultSelector()
        try:
            while self._waiting and len(workers) < self._jobs:
                worker = Worker(self._setup, self._threads)
                workers.add(worker)
                selector.register(worker.said, selectors.EVENT_READ, worker)
                worker.give(*self._waiting.pop())
            while workers:
                for key, _ in selector.select():
                    worker = key.data
                    if not self._hear(worker):
                        selector.unregister(worker.said)
                        workers.discard(worker)
                        self._ended(worker)
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.wait()
            selector.close()

    def _hear(self, worker: Worker) -> bool:
        """Takes in what a worker says, and gives it the next source. False: it has ended."""
        heard = worker.hear()
        if heard is None:
            return False
        for said in heard:
            if "error" in said:
                raise from_plain(said)
            if "done" in said:
                self._done(said["done"])
                if self._waiting:
                    worker.give(*self._waiting.pop())
                else:
                    worker.end()
                continue
            assert worker.shard is not None
            self._heard(worker.shard, Counts(**said))
        return True

    def _ended(self, worker: Worker) -> None:
        status = worker.wait()
        if status or worker.shard is not None:
            raise InternalError(
                f"the process that built shard {worker.shard} ended with status {status}", path=self._out
            )
