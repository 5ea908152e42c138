"""Modules that only annotations need, imported when :func:`typing.get_type_hints` asks for them: importing actshard stays fast."""

from __future__ import annotations

import importlib


class Late:
    """A placeholder for a module, which is imported when an attribute is accessed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        return getattr(importlib.import_module(self._name), attribute)

    def __repr__(self) -> str:
        return f"<actshard.base.late.Late {self._name}>"
