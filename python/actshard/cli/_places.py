"""Paths and URLs of commands, and the options of their storage."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer

from actshard.base.errors import ActshardError, ActshardWarning, ArgumentError
from actshard.base.location import Location
from actshard.cli._messages import message
from actshard.reading.finding import existing_anywhere


def options_named(words: Sequence[str] | None) -> dict[str, str]:
    """Parses ``--storage-option NAME=VALUE``. Messages do not contain the values, which may be secrets."""
    options: dict[str, str] = {}
    for number, word in enumerate(words or (), 1):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ArgumentError(f"--storage-option: expected KEY=VALUE, found no key or no '=' in option {number}")
        if name in options:
            raise ArgumentError(f"--storage-option: expected {name!r:.40} once, found it again in option {number}")
        options[name] = value
    return options


def place(path: str, words: Sequence[str] | None = None, cache: str = "") -> Location:
    """Returns the location of an existing path or URL. Prints a warning if the disk cache cannot be used."""
    return _located(path, options_named(words), cache)


def _located(path: str, options: Mapping[str, str], cache: str) -> Location:
    with shown_warnings():
        return existing_anywhere(path, options or None, cache or None)


@contextmanager
def shown_warnings(*listed: str) -> Iterator[None]:
    """Prints the warnings of calls whose results do not contain them, each once. ``listed``: codes of those that they contain."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ActshardWarning)
        try:
            yield
        finally:
            shown = [
                w.message for w in caught if isinstance(w.message, ActshardWarning) and w.message.code not in listed
            ]
            for text in dict.fromkeys(map(str, shown)):
                typer.echo(f"actshard: warning: {message(ActshardError(text))}", err=True)
