"""Helpers for starting child processes and for measuring this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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
