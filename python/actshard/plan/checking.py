"""Checks of plans that were read from a file: their hash detects accidental changes, but not a program that writes plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actshard._json import MAX_INT, Fields
from actshard.plan.data import Planned


def arguments_of(plan: Planned, path: Path) -> Fields:
    """The arguments of a plan; ``path`` is its file, for messages."""
    return Fields(dict(plan.arguments), path, "arguments")


def absolute(fields: Fields, name: str) -> str:
    """Returns a field that must be an absolute path."""
    text = fields.text(name)
    if not _is_absolute(text):
        raise fields.error(name, "an absolute path")
    return text


def absolutes(fields: Fields, name: str) -> list[str]:
    """Returns a field that must be a non-empty list of absolute paths."""
    found = fields.value.get(name)
    if not isinstance(found, list) or not found or not all(map(_is_absolute, found)):
        raise fields.error(name, "a list of absolute paths")
    return found


def _is_absolute(text: Any) -> bool:
    if not isinstance(text, str) or "\0" in text or any("\ud800" <= c <= "\udbff" for c in text):
        return False
    return Path(text).is_absolute()


def is_place(text: Any) -> bool:
    """Whether a value is an absolute path or a URL."""
    return _is_absolute(text) or (isinstance(text, str) and text.isprintable() and "://" in text)


def check_layout(fields: Fields) -> None:
    """Checks the argument ``layout``."""
    if not isinstance(fields.value.get("layout"), str | dict | None):
        raise fields.error("layout", "a description of files, or null")


def read_only(fields: Fields) -> None:
    """Checks the arguments of plans that only read: path, format, layout."""
    if not is_place(fields.value.get("path")):
        raise fields.error("path", "an absolute path, or a URL")
    if fields.value.get("format") is not None:
        fields.text("format")
    check_layout(fields)


def divided(plan: Planned, name: str, path: Path) -> int:
    """Checks that the tasks' ranges ``name`` are consecutive and start at 0; returns the end of the last."""
    end = 0
    for i, task in enumerate(plan.tasks):
        fields = Fields(dict(task), path, f"tasks[{i}]")
        fields.integer("bytes", minimum=0)
        found = fields.value.get(name)
        if not isinstance(found, list) or len(found) != 2 or any(type(n) is not int for n in found):
            raise fields.error(name, "two numbers")
        if not end == found[0] <= found[1] < MAX_INT:
            raise fields.error(name, f"a range that starts at {end}")
        end = found[1]
    return end
