"""Kills a process at its n-th call that changes the disk, so that failures are reproducible."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import actshard._native as _native

CALLS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("mkdir", "replace", "unlink", "rmdir", "pwrite", "ftruncate", "truncate", "fsync")),
    (_native, ("sync_files", "write_pieces", "write_segments", "copy_range")),
)
NAMING: tuple[tuple[Any, tuple[str, ...]], ...] = (
    *CALLS,
    (os, ("rename", "link", "symlink")),
    (_native, ("copy_ranges", "move_files", "remove_folders")),
)
"""Also calls that only merges, plans and staged copies make."""


class Doom:
    """Counts calls down from ``left``, and kills this process before the call that finds 0. Negative: it lives."""

    def __init__(self, calls: tuple[tuple[Any, tuple[str, ...]], ...] = CALLS, left: int = -1) -> None:
        self.left = left
        for module, names in calls:
            for name in names:
                setattr(module, name, self.counted(getattr(module, name)))

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return call(*given, **named)

        return counted
