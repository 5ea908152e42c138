"""Prints the result of a command, as text or as JSON."""

from __future__ import annotations

import json as json_module
import math
import sys
from collections.abc import Callable

import typer


def output(json: bool, data: Callable[[], object], pretty: Callable[[], None]) -> None:
    """Calls ``pretty``, or prints the value of ``data()`` as JSON."""
    if not json:
        pretty()
        return
    content = _finite(data())
    text = json_module.dumps(content, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a lone surrogate in a name or text, or a terminal without Unicode
        text = json_module.dumps(content, indent=2, allow_nan=False, default=str)
    typer.echo(text)


def _finite(value: object) -> object:
    """A value with null for numbers that are not finite, which JSON does not have (RFC 8259, section 6)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(element) for key, element in value.items()}
    return [_finite(element) for element in value] if isinstance(value, list | tuple) else value
