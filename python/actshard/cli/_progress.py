"""How far a long command is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from actshard.cli._format import size

_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""


class Tell(Protocol):
    """Told how far it is: done, in all, and bytes."""

    def __call__(self, done: int, total: int, nbytes: int) -> None: ...


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Tell]:
    """Shows progress on stderr, with bytes per second and the time that is left."""
    console = Console(stderr=True)
    began = time.monotonic()
    if quiet:
        yield lambda done, total, nbytes: None
        return
    if not console.is_terminal:
        told = began

        def line(done: int, total: int, nbytes: int) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told >= _EVERY:
                told = now
                rate = nbytes / (now - began)
                left = (now - began) / done * (total - done) if done else 0
                print(
                    f"{what}: {done:,} of {total:,}, {size(int(rate))}/s, {left:.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, rate="")

        def draw(done: int, total: int, nbytes: int) -> None:
            rate = nbytes / max(time.monotonic() - began, 1e-9)
            bar.update(task, completed=done, total=total or None, rate=f"{size(int(rate))}/s" if nbytes else "")

        yield draw
