"""Waiting in tests: for events, and for as long as a busy machine takes.

Limits only matter to tests that fail: they end a hang, so they are minutes long. No test passes or fails by how fast it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 600
"""Seconds after which a process, a thread or a condition hangs. With four processes on a core, a second of work takes many."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Waits for a condition. AssertionError if it hangs."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, f"waited for {what}"
        time.sleep(0.002)


def thread_names() -> list[str]:
    """Names of all threads of this process; those of native threads too, which Python does not list."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it ended after it was listed
            continue
    return names


def wait_for_the_end_of(name: str) -> None:
    """Waits until no thread has a name. The system lists a thread for a moment after it was joined."""
    wait_until(lambda: name not in thread_names(), f"the end of threads {name}")
