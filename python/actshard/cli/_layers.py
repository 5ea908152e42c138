"""Parses ``--layer``: names of layers on a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from actshard.base.errors import ArgumentError
from actshard.base.layers import Layer, named, short

_INTEGER = re.compile(r"[+-]?\d{1,18}")
_RANGE = re.compile(r"(\d{1,18})(?:-|\.\.)(\d{1,18})")


def several(words: str, option: str) -> list[Layer]:
    """Parses comma-separated integers and texts; or a JSON list, for names with commas and for texts that consist of digits."""
    if words.startswith("["):
        try:
            layers: list[Layer] = json.loads(words)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{option}: expected names of layers, or a JSON list: {error}") from error
        return layers
    return [_name(word, words, option) for word in words.split(",")]


def has_range(words: str) -> bool:
    """Whether comma-separated names contain ``0-3`` or ``0..3``, for which the stored layers are needed."""
    return not words.startswith(("[", "{")) and any(_RANGE.fullmatch(word.strip()) for word in words.split(","))


def renamed(words: str, option: str) -> list[Layer] | dict[Layer, Layer] | None:
    """Parses ``3,7`` or ``-1=23,-2=22``, or JSON; returns None for an empty text."""
    if not words:
        return None
    if words.startswith("{"):
        try:
            mapping: dict[Layer, Layer] = json.loads(words)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{option}: expected names of layers, or JSON: {error}") from error
        return mapping
    if words.startswith("[") or "=" not in words:
        return several(words, option)
    pairs = [word.split("=") for word in words.split(",")]
    if any(len(pair) > 2 for pair in pairs):
        raise ArgumentError(f"{option}: expected names of layers, old=new, or JSON, found {words!r:.200}")
    return {_name(pair[0], words, option): _name(pair[-1], words, option) for pair in pairs}


def of_store(words: str, layers: Sequence[Layer], option: str) -> list[Layer]:
    """Like :func:`several`, for the layers of a dataset: digits become a text if the dataset's names are texts.

    ``0-3`` and ``0..3`` are the stored layers from 0 to 3, unless a layer has that name.
    """
    if (exact_match := named(words, layers)) is not None:  # a name with commas
        return [exact_match]
    is_json = words.startswith("[")
    selection: list[Layer] = []
    ranged: set[Layer] = set()
    for name in several(words, option):
        match, ends = named(str(name), layers), None if is_json else _RANGE.fullmatch(str(name))
        if match is not None or ends is None:
            if match not in ranged:  # 0-3,1
                selection.append(name if match is None else match)
            continue
        first, last = int(ends[1]), int(ends[2])
        range_layers = [layer for layer in layers if str(layer).isdecimal() and first <= int(layer) <= last]
        if not range_layers:
            raise ArgumentError(
                f"{option}: the range {name} contains no stored layer; the layers are {short(layers, 200)}"
            )
        selection += [layer for layer in range_layers if layer not in selection]
        ranged |= {*range_layers}
    return selection


def _name(word: str, words: str, option: str) -> Layer:
    word = word.strip()
    if not word:
        raise ArgumentError(f"{option}: expected names of layers, comma-separated, found {words!r:.200}")
    return int(word) if _INTEGER.fullmatch(word) else word
