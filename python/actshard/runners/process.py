"""A worker process of ``local``, from its driver's side; :mod:`actshard.runners.worker` is the other side.

The worker holds a pipe to its driver as stdin. When the driver ends, whatever killed it, the worker reads end of file and exits.
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
        """The task that it runs; None when idle."""
        self._rest = b""
        said, say = os.pipe()
        self.said = os.fdopen(said, "rb", buffering=0)
        """The pipe of its messages. Its stdout is left to what the tasks run."""
        count = str(threads)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "actshard.runners.worker", str(say)],
                stdin=subprocess.PIPE,
                stdout=children.stderr(),  # stdout of this process may be parsed by a program
                pass_fds=(say,),
                env={**os.environ, "RAYON_NUM_THREADS": count, "ACTSHARD_NUM_THREADS": count},
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the workers
            )
        except BaseException:
            self.said.close()
            raise
        finally:
            os.close(say)
        self._write(json.dumps({"plan": plan, "path": sys.path}))

    def give(self, task: int) -> None:
        """Sends it a task."""
        self.task = task
        self._write(str(task))

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it died; its end of file is read next
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def hear(self) -> Iterator[Mapping[str, Any]] | None:
        """What it said since the last call; None when it has ended."""
        data = os.read(self.said.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return map(json.loads, lines)

    def end(self) -> int:
        """Closes its stdin, so that it exits when idle, and waits. Returns its exit status."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.said.close()
        return self.process.wait()


def how_it_ended(status: int) -> str:
    """Describes an exit status: the status, or the signal."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ", as the kernel does when memory is short" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
