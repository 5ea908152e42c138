"""Faults of metadata. A parser adds them, and its caller decides whether the first one ends the parse.

``open`` raises the first fault, ``verify`` collects all of them. Both run the same parser, so they cannot disagree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Never, TypeVar

from actshard.base.errors import ActshardError

_SHOWN = 5
_P = TypeVar("_P", bound=os.PathLike[str])
_T = TypeVar("_T")


class Faults:
    """Raises the first fault. ``actshard.verify`` uses a subclass that collects faults, so that the parser continues."""

    def add(self, *errors: ActshardError) -> None:
        """Adds faults of one kind. The first one is raised, and names the files of the others, unless faults are collected."""
        first, *rest = errors
        if rest:
            names = [error.path.name for error in rest if error.path is not None]
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            first.detail += f" (and {len(rest)} more bad files: {shown})"
        raise first

    def refuse(self, *errors: ActshardError) -> Never:
        """Adds faults without which the parser cannot continue. Always raises."""
        self.add(*errors)
        raise errors[0]

    @contextmanager
    def noting(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Context manager around a block that raises faults. If faults are collected, the parser continues after the block."""
        yield

    def batch(self, paths: Sequence[_P], parse: Callable[[Sequence[_P]], list[_T]]) -> list[_T]:
        """Parses files at once: returns ``parse(paths)``.

        If faults are collected and a file is damaged, each file is parsed alone, so that the faults of all are added, and the
        first one is raised: what the files have in common is then not known.
        """
        return parse(paths)


RAISE = Faults()
"""For ``open``: the first fault is raised."""
