"""Checks of plans of conversions that were read from a file, and of their tasks' results."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard._json import MAX_INT, Fields
from actshard.converting.planning import OVERFLOW, TOKENS
from actshard.errors import FormatError
from actshard.plan.book import work_folder
from actshard.plan.checking import absolute, arguments_of, check_layout, divided, is_place
from actshard.plan.data import Planned
from actshard.request import Request

_PIECE = 1 << 20
_MOST_EXAMPLES = 1 << 32
_SIZES = {"dtype", "tokens_per_example", "shard_bytes", "metadata", "options", "created"}


def packed(numbers: NDArray[np.int64]) -> str:
    """Encodes integers as text: base64 of zlib of little-endian int64."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(numbers, "<i8").tobytes())).decode()


def unpacked(text: str) -> NDArray[np.int64]:
    """Decodes the text of :func:`packed`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").astype(np.int64)


def _count(text: str, most: int) -> int | None:
    """Counts the integers in a packed text in little memory. Returns None if it is invalid or contains more than ``most``."""
    stream = zlib.decompressobj()
    size = 0
    try:
        data = base64.b64decode(text, validate=True)
        while not stream.eof:
            made = stream.decompress(data, _PIECE)
            data = stream.unconsumed_tail
            size += len(made)
            if size > 8 * most or (not made and not data and not stream.eof):
                return None
    except (binascii.Error, zlib.error, ValueError):
        return None
    return None if stream.unused_data or size % 8 else size // 8


def check_plan(plan: Planned, path: Path) -> None:
    """Raises FormatError if the arguments or tasks are invalid for a conversion; ``path`` is the plan's file."""
    fields = arguments_of(plan, path)
    absolute(fields, "dst")
    _check_source(fields)
    format = fields.text("format")
    if format not in formats.written():
        raise fields.error("format", "a format that can be written")
    for name in ("pad", "truncate", "cast"):
        fields.boolean(name)
    for name, known in (("tokens", TOKENS), ("overflow", OVERFLOW)):
        if fields.text(name) not in known:
            raise fields.error(name, f"one of {', '.join(known)}")
    if fields.value.get("numbers") is not None:
        fields.boolean("numbers")
    fillers = fields.value.get("fillers")  # absent in plans of earlier releases
    if fillers is not None and not (isinstance(fillers, list) and all(isinstance(name, str) for name in fillers)):
        raise fields.error("fillers", "a list of names")
    _check_pairs(fields, "layers", _is_layer)
    _check_pairs(fields, "columns", lambda name: isinstance(name, str))
    _check_sizes(fields)
    if not isinstance(fields.value.get("config"), dict):
        raise fields.error("config", "an object")
    Request.from_dict(fields.value.get("request"), path)
    _check_pairs(fields, "losses", lambda text: isinstance(text, str))
    if fields.value.get("losses") is None:
        raise fields.error("losses", "a list of pairs of texts")
    _check_tasks(plan, fields, path)


def check_work(plan: Planned, path: Path) -> None:
    """Raises FormatError unless the working folder is the one that the arguments determine. Call :func:`check_plan` first."""
    root, format = Path(plan.arguments["dst"]), plan.arguments["format"]
    hidden = work_folder(root, plan.id, dumps=formats.get(format).target().names_itself)
    if plan.work != hidden:
        raise FormatError(f"field 'work': expected {hidden}, found {plan.work}", path=path, code="metadata")


def _check_source(fields: Fields) -> None:
    found = fields.value.get("src")
    if not (is_place(found) or (isinstance(found, list) and found and all(map(is_place, found)))):
        raise fields.error("src", "an absolute path, a URL, or a list of them")
    if fields.value.get("src_format") is not None:
        fields.text("src_format")
    check_layout(fields)


def _check_pairs(fields: Fields, name: str, good: Callable[[Any], bool]) -> None:
    """Checks a list of [old name, new name], or null."""
    found = fields.value.get(name)
    if found is None:
        return
    if not isinstance(found, list) or any(
        not isinstance(pair, list) or len(pair) != 2 or not all(map(good, pair)) for pair in found
    ):
        raise fields.error(name, "a list of pairs of names, or null")


def _is_layer(name: Any) -> bool:
    if isinstance(name, list):
        return all(isinstance(part, str) or type(part) is int for part in name)
    return isinstance(name, str) or (type(name) is int and abs(name) < MAX_INT)


def _check_sizes(fields: Fields) -> None:
    found = fields.value.get("sizes")
    if not isinstance(found, dict) or set(found) != _SIZES:
        raise fields.error("sizes", f"an object of {', '.join(sorted(_SIZES))}")
    sizes = Fields(found, fields.path, "arguments.sizes")
    if found["dtype"] is not None:
        sizes.text("dtype")
    if found["tokens_per_example"] is not None:
        sizes.integer("tokens_per_example", minimum=0)
    if found["shard_bytes"] is not None and not isinstance(found["shard_bytes"], str):
        sizes.integer("shard_bytes")
    if found["created"] is not None:
        sizes.integer("created", minimum=0)
    if found["metadata"] is not None and not isinstance(found["metadata"], dict):
        raise sizes.error("metadata", "an object, or null")
    if not isinstance(found["options"], dict):
        raise sizes.error("options", "an object")


def _check_tasks(plan: Planned, fields: Fields, path: Path) -> None:
    by_layers = bool(plan.tasks) and "layers" in plan.tasks[0]
    name = "layers" if by_layers else "examples"
    end = divided(plan, name, path)
    if any(("layers" in task) != by_layers for task in plan.tasks) or not end:
        raise FormatError("field 'tasks': expected ranges of examples, or of layers", path=path, code="metadata")
    pairs, chosen = fields.value["layers"], fields.value.get("examples")
    if by_layers and pairs is not None and end != len(pairs):
        raise fields.error("layers", f"the {end:,} layers of the tasks")
    if chosen is not None:
        count = _count(chosen, _MOST_EXAMPLES if by_layers else end) if isinstance(chosen, str) else None
        if count is None or (not by_layers and count != end):
            raise fields.error("examples", f"{'numbers' if by_layers else f'{end:,} numbers'} of examples, packed")
    for i, task in enumerate(plan.tasks if not by_layers else ()):
        its = Fields(dict(task), path, f"tasks[{i}]")
        if its.integer("origin", minimum=0) > task["examples"][0]:
            raise its.error("origin", f"at most {task['examples'][0]:,}")
        if not isinstance(task.get("state"), dict):
            raise its.error("state", "an object")


def check_config(config: Mapping[str, Any], own: Mapping[str, Any], work: Path) -> None:
    """Raises FormatError if a plan's target settings lack names, have unknown ones, or have values of other types than ``own``."""
    for name in sorted({*config, *own}):
        wrong = name not in own or name not in config
        if not wrong and own[name] is not None:
            wrong = type(config[name]) is not type(own[name])
        if wrong:
            raise FormatError(
                f"field 'arguments.config.{name}': expected {own.get(name, 'nothing')!r:.60}, found "
                f"{config.get(name, 'nothing')!r:.60}; make the plan again",
                path=work,
                code="metadata",
            )


def check_result(value: Mapping[str, Any], file: Path) -> None:
    """Raises FormatError for an invalid result of a task; ``file`` contains it."""
    fields = Fields(dict(value), file, "value")
    fields.integer("bytes", minimum=0)
    fields.integer("overflows", minimum=0)
    if not isinstance(fields.value.get("state"), dict):
        raise fields.error("state", "an object")
    changes = fields.value.get("changes", {})  # absent in results of earlier releases
    if not isinstance(changes, dict) or not all(isinstance(text, str) for text in changes.values()):
        raise fields.error("changes", "texts by column")
    found = fields.value.get("fragments")
    if not isinstance(found, list) or not all(map(_is_fragment, found)):
        raise fields.error("fragments", "names of files below the task's folder, with first byte and end")


def _is_fragment(found: Any) -> bool:
    if not isinstance(found, list) or len(found) != 3 or not isinstance(found[0], str):
        return False
    name, *span = found
    if any(c == "\0" or "\ud800" <= c <= "\udbff" for c in name):
        return False
    if any(part in ("", ".", "..") for part in name.split("/")):
        return False
    return all(type(n) is int and 0 <= n < MAX_INT for n in span) and span[0] <= span[1]
