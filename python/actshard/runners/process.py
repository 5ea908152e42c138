"""The driver's side of a worker process of ``local``; :mod:`actshard.runners.worker` is the worker's side.

The worker's stdin is a pipe from its driver. When the driver ends or is killed, the worker reads end of file and exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from actshard.work import children


class Process:
    """A process that runs tasks one after another."""

    def __init__(self, plan: str, threads: int) -> None:
        self.task: int | None = None
        """The task that the worker is running; None when idle."""
        self._rest = b""
        reader, writer = os.pipe()
        self.said = os.fdopen(reader, "rb", buffering=0)
        """The pipe of the worker's messages. Its stdout is free for output of the tasks."""
        count = str(threads)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "actshard.runners.worker", str(writer)],
                stdin=subprocess.PIPE,
                stdout=children.stderr(),  # stdout of this process may be parsed by a program
                pass_fds=(writer,),
                env={**os.environ, "RAYON_NUM_THREADS": count, "ACTSHARD_NUM_THREADS": count},
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the workers
            )
        except BaseException:
            self.said.close()
            raise
        finally:
            os.close(writer)
        self._write(json.dumps({"plan": plan, "path": sys.path}))

    def give(self, task: int) -> None:
        """Sends the worker a task."""
        self.task = task
        self._write(str(task))

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # the worker died: hear() will read its end of file
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def hear(self) -> Iterator[Mapping[str, Any]] | None:
        """Messages received since the last call; None when the worker has ended."""
        data = os.read(self.said.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return map(json.loads, lines)

    def end(self) -> int:
        """Closes the worker's stdin, so that it exits when idle, and waits for it. Returns its exit status."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.said.close()
        return self.process.wait()


def how_it_ended(status: int) -> str:
    """Describes an exit status, or the signal that ended the process."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ", possibly because memory was short" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
