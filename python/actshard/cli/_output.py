"""Prints the result of a command, as text or as JSON."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable
from typing import Any

import typer


def output(json: bool, data: Callable[[], Any], pretty: Callable[[], None]) -> None:
    """Calls ``pretty``, or prints the value of ``data()`` as JSON."""
    if not json:
        pretty()
        return
    text = json_module.dumps(data(), indent=2, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a lone surrogate in a name or text, or a terminal without Unicode
        text = json_module.dumps(data(), indent=2, default=str)
    typer.echo(text)
