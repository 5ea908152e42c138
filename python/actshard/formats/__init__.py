"""The formats actshard reads, one module each.

A module whose name has no leading underscore is a format and is found by being here. It offers:

- ``detect(path) -> Evidence``: cheap, reads at most one small file, never raises for a path that is something else;
- ``open(path, io) -> Contents``: reads the metadata and names files, a layout and a table. Reading rows is not its
  business: that is the same for all formats.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def names() -> tuple[str, ...]:
    """The formats' names, in alphabetical order."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.ispkg and m.name != "levanter"))


def load(name: str, room: str = "read") -> ModuleType:
    """A module of a format; formats are imported when they are first needed."""
    return importlib.import_module(f"{__name__}.{name}.{room}")
