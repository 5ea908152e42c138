"""A worker process of ``local``: runs tasks one after another. ``python -m actshard.runners.worker DESCRIPTOR``.

Reads lines from stdin: first ``{"plan": FILE, "path": [...]}``, then one task number per line. Writes the outcome of each task as
a JSON line to the descriptor. Exits at end of file. If stdin ends while a task runs, the driver was killed: it exits at once.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading

ORPHANED = 5
"""Exit status of a worker whose driver ended while a task ran."""


class _Stdin:
    """Lines of stdin, read by a thread, which detects the end of the driver while a task runs."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.busy = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        rest = b""
        # Not through sys.stdin: interpreter shutdown would wait for its lock.
        while data := os.read(0, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._lines.put(line)
        if self.busy:
            os._exit(ORPHANED)
        self._lines.put(None)

    def next(self) -> bytes | None:
        self.busy = False
        line = self._lines.get()
        self.busy = line is not None
        return line


def main() -> None:
    """Runs tasks until end of file."""
    descriptor = int(sys.argv[1])
    lines = _Stdin()
    first = lines.next()
    if first is None:
        return
    settings = json.loads(first)
    sys.path[:] = settings["path"]
    from actshard.runners.tasks import outcomes_at

    while (line := lines.next()) is not None:
        for ended in outcomes_at(settings["plan"], [int(line)]):
            os.write(descriptor, json.dumps(ended).encode() + b"\n")


if __name__ == "__main__":
    main()
