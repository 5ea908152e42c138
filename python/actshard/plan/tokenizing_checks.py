"""Checks of plans of token caches that were read from a file: their names and numbers determine which files are accessed."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from actshard._json import MAX_INT, Fields
from actshard.errors import FormatError
from actshard.plan.checking import absolute, arguments_of
from actshard.plan.data import Planned
from actshard.tokens import formats
from actshard.tokens.building import ID_DTYPES, LAYOUTS, is_time
from actshard.tokens.writing import STORAGES

_SHARD = re.compile(r"\d{5,}_[\w-]+")
_SWITCHES = ("skip", "keep_shards", "tells_time")


def check_plan(plan: Planned, path: Path) -> None:
    """Raises FormatError if the arguments or tasks are invalid for a token cache; ``path`` is the plan's file."""
    fields = arguments_of(plan, path)
    absolute(fields, "out")
    for name in _SWITCHES:
        fields.boolean(name)
    for name, known in (("layout", LAYOUTS), ("storage", STORAGES)):
        if fields.text(name) not in known:
            raise fields.error(name, f"one of {', '.join(known)}")
    if not isinstance(fields.value.get("metadata"), dict):
        raise fields.error("metadata", "an object")
    if (now := fields.value.get("now")) is not None and not is_time(now):
        raise fields.error("now", "a time of 11 values")
    if not isinstance(fields.value.get("format"), dict):
        raise fields.error("format", "an object")
    formats.as_format(fields.value["format"])
    _check_options(fields)
    _check_fields(fields)
    _check_tokenizer(fields)
    _check_sources(plan, fields)
    _check_pieces(plan, path)


def _check_options(fields: Fields) -> None:
    found = fields.value.get("options")
    if not isinstance(found, dict) or found.get("dtype") not in (None, *ID_DTYPES):
        raise fields.error("options", f"an object with a dtype of {', '.join(ID_DTYPES)}")
    options = Fields(found, fields.path, "arguments.options")
    options.boolean("enforce_eos")
    options.boolean("enforce_bos")


def _check_fields(fields: Fields) -> None:
    found = fields.value.get("fields")
    known = (*ID_DTYPES, "float32")
    if not isinstance(found, dict) or not found or any(kind not in known for kind in found.values()):
        raise fields.error("fields", "an object of dtypes")
    for name in found:
        if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
            raise fields.error("fields", f"names of fields, not {name!r:.60}")


def _check_tokenizer(fields: Fields) -> None:
    found = fields.value.get("tokenizer")
    if found is None:
        return
    if not isinstance(found, dict) or (found.get("path") is None) == (found.get("packed") is None):
        raise fields.error("tokenizer", "an object with a path, or with a packed tokenizer")
    tokenizer = Fields(found, fields.path, "arguments.tokenizer")
    tokenizer.text("name")
    tokenizer.text("digest")
    if found["path"] is not None:
        absolute(tokenizer, "path")
    else:
        tokenizer.text("packed")


def _check_sources(plan: Planned, fields: Fields) -> None:
    found = fields.value.get("sources")
    if not isinstance(found, list) or not 0 < len(found) <= len(plan.inputs):
        raise fields.error("sources", "a list of files, which are among the inputs")
    seen: set[str] = set()
    for number, (pair, each) in enumerate(zip(found, plan.inputs, strict=False)):
        where = f"sources[{number}]"
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise FormatError(f"field 'arguments.{where}': expected a path and a shard's name", path=fields.path)
        file, shard = pair
        if not Path(file).is_absolute() or file != each.path or type(each.version) is not int or each.size is None:
            raise FormatError(
                f"field 'arguments.{where}': expected the path of input {number}, a local file", path=fields.path
            )
        if _SHARD.fullmatch(shard) is None or shard in seen:
            raise FormatError(
                f"field 'arguments.{where}': expected a shard's name, found {shard!r:.60}", path=fields.path
            )
        seen.add(shard)


def _check_pieces(plan: Planned, path: Path) -> None:
    """Checks that the tasks' pieces cover each source once."""
    sources = len(plan.arguments["sources"])
    by_source: list[list[list[int]]] = [[] for _ in range(sources)]
    for i, task in enumerate(plan.tasks):
        fields = Fields(dict(task), path, f"tasks[{i}]")
        fields.integer("bytes", minimum=0)
        found = fields.value.get("pieces")
        if not isinstance(found, list) or not all(map(_is_piece, found)) or any(p[0] >= sources for p in found):
            raise fields.error("pieces", "pieces of sources")
        for piece in found:
            by_source[piece[0]].append(piece)
    for source, pieces in enumerate(by_source):
        size = plan.inputs[source].size
        pieces.sort(key=lambda piece: piece[1:])
        if [piece[1:] for piece in pieces] == [[]]:
            continue
        kinds = {len(piece) for piece in pieces}
        tiles = kinds in ({3}, {6}) and pieces[0][1] == 0 and pieces[-1][2] == size
        joins = tiles and all(a[2] == b[1] and a[4:5] == b[3:4] for a, b in itertools.pairwise(pieces))
        if not (tiles and joins and pieces[0][3:4] in ([], [0]) and pieces[0][5:] in ([], [0])):
            raise FormatError(
                f"field 'tasks': expected pieces of source {source} without holes and overlaps", path=path
            )


def _is_piece(piece: Any) -> bool:
    if not isinstance(piece, list) or len(piece) not in (1, 3, 6):
        return False
    if any(type(n) is not int or not 0 <= n < MAX_INT for n in piece):
        return False
    return len(piece) == 1 or (piece[1] < piece[2] and (len(piece) == 3 or piece[3] < piece[4]))
