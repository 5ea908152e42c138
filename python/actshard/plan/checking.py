"""Fields that the plans of several verbs have. A plan's hash detects accidental changes, but not a program that writes plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from actshard.base._schema import Amount, Rule, is_file_text
from actshard.base.errors import FormatError


def _is_place(text: str) -> bool:
    return (is_file_text(text) and Path(text).is_absolute()) or (text.isprintable() and "://" in text)


PlaceText = Annotated[str, Rule("an absolute path, or a URL", _is_place)]
LayoutValue = str | Mapping[str, object] | None
"""A description of files; see :func:`actshard.plan.reading.described`."""
OpenArguments = tuple[str | tuple[str, ...], str | None, LayoutValue]
"""Path, format and layout, as for :func:`actshard.open`."""


class Span(NamedTuple):
    """A range of examples, layers, files or leaves."""

    first: Amount
    end: Amount


@dataclass(frozen=True)
class ExamplesTask:
    """The examples that a task reads or writes."""

    examples: Span
    bytes: Amount


@dataclass(frozen=True)
class FilesTask:
    """The files that a task copies."""

    files: Span
    bytes: Amount


def check_spans(spans: Sequence[Span], name: str, count: int, path: Path) -> None:
    """Raises FormatError unless the tasks' ranges ``name`` follow each other from 0 to ``count``; ``path`` is the plan's file."""
    end = 0
    for i, span in enumerate(spans):
        if not end == span.first <= span.end:
            raise FormatError(
                f"field 'tasks[{i}].{name}': expected a range that starts at {end}, found {list(span)}",
                path=path,
                code="metadata",
            )
        end = span.end
    if end != count:
        raise FormatError(
            f"field 'tasks': expected ranges of {count:,} {name}, found {end:,}", path=path, code="metadata"
        )
