"""Helpers for starting child processes."""

from __future__ import annotations

import os
import subprocess


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
