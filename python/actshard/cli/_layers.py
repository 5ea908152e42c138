"""Parses ``--layer``: names of layers on a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from actshard.errors import ArgumentError
from actshard.layers import Layer, named

_INTEGER = re.compile(r"[+-]?\d{1,18}")


def several(words: str, option: str) -> list[Layer]:
    """Parses comma-separated integers and texts; or a JSON list, for names with commas and for texts that consist of digits."""
    if words.startswith("["):
        try:
            made: list[Layer] = json.loads(words)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{option}: expected names of layers, or a JSON list: {error}") from error
        return made
    return [_name(word, words, option) for word in words.split(",")]


def renamed(words: str, option: str) -> list[Layer] | dict[Layer, Layer] | None:
    """Parses ``3,7`` or ``-1=23,-2=22``, or JSON; returns None for an empty text."""
    if not words:
        return None
    if words.startswith("{"):
        try:
            made: dict[Layer, Layer] = json.loads(words)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{option}: expected names of layers, or JSON: {error}") from error
        return made
    if words.startswith("[") or "=" not in words:
        return several(words, option)
    pairs = [word.split("=") for word in words.split(",")]
    if any(len(pair) > 2 for pair in pairs):
        raise ArgumentError(f"{option}: expected names of layers, old=new, or JSON, found {words!r:.200}")
    return {_name(pair[0], words, option): _name(pair[-1], words, option) for pair in pairs}


def of_store(words: str, layers: Sequence[Layer], option: str) -> list[Layer]:
    """Like :func:`several`, for the layers of a dataset: digits become a text if the dataset's names are texts."""
    if (whole := named(words, layers)) is not None:  # a name with commas
        return [whole]
    found = [(name, named(str(name), layers)) for name in several(words, option)]
    return [name if match is None else match for name, match in found]


def _name(word: str, words: str, option: str) -> Layer:
    word = word.strip()
    if not word:
        raise ArgumentError(f"{option}: expected names of layers, comma-separated, found {words!r:.200}")
    return int(word) if _INTEGER.fullmatch(word) else word
