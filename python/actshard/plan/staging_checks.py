"""Checks of plans of staged copies that were read from a file: their names and sizes determine which files are accessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actshard import formats
from actshard._json import MAX_INT, Fields
from actshard.errors import ActshardError, FormatError
from actshard.layers import several
from actshard.location import Location, is_url
from actshard.plan.checking import absolute, arguments_of, divided
from actshard.plan.data import Planned
from actshard.request import RECORD
from actshard.work import FOLDER


def check_plan(plan: Planned, path: Path) -> None:
    """Raises FormatError if the arguments or tasks are invalid for a staged copy; ``path`` is the plan's file."""
    fields = arguments_of(plan, path)
    if not is_url(fields.text("source")):
        absolute(fields, "source")
    if not Path(absolute(fields, "folder")).name:
        raise fields.error("folder", "a folder below /")
    for name in ("revision", "origin"):
        if fields.value.get(name) is not None or name not in fields.value:
            fields.text(name)
    if fields.text("below") != ".":
        _name(fields, "below", fields.value["below"])
    if "/" in fields.text("inside") or fields.value["inside"]:
        _name(fields, "inside", fields.value["inside"])
    _check_place(fields)
    _check_files(fields)
    if "layers" not in fields.value:
        raise fields.error("layers", "names of layers, or null")
    if fields.value["layers"] is None:
        _check_tasks(plan, path)
        return
    try:
        layers = several(fields.value["layers"])
    except ActshardError as error:
        raise fields.error("layers", "names of layers") from error
    if list(layers) != fields.value["layers"]:
        raise fields.error("layers", "a list of names of layers")
    if fields.text("format") not in formats.written():
        raise fields.error("format", "a format that can be written")
    inner = fields.value.get("convert")
    if not isinstance(inner, dict) or inner.get("format") != fields.value["format"] or "dst" in inner:
        raise fields.error("convert", "the arguments of a conversion")


def _check_place(fields: Fields) -> None:
    """Checks that the source is a valid location, and that its URL can contain the revision."""
    text = fields.value["source"]
    try:
        Location.of_any(text)
    except ActshardError as error:
        raise FormatError(f"field 'arguments.source': {error.detail}", path=fields.path) from error
    if fields.value.get("revision") is not None and (not text.startswith("hf://") or len(text.split("/")) < 5):
        raise fields.error("revision", "null, because the source is not a dataset on the hub")


def _is_name(name: Any) -> bool:
    """Whether a value is a relative path below a folder, and not a path that staging itself creates."""
    if not isinstance(name, str) or "\0" in name or any("\ud800" <= c <= "\udbff" for c in name):
        return False
    return all(
        part not in ("", ".", "..") and (part == RECORD or not part.startswith(FOLDER)) for part in name.split("/")
    )


def _name(fields: Fields, field: str, name: Any) -> None:
    if not _is_name(name):
        raise fields.error(field, "the name of a folder below the source")


def _check_files(fields: Fields) -> None:
    found = fields.value.get("files")
    if not isinstance(found, list) or not found:
        raise fields.error("files", "a list of files")
    names: set[str] = set()
    folders: set[str] = set()
    for number, each in enumerate(found):
        if not (
            isinstance(each, list)
            and len(each) == 3
            and _is_name(each[0])
            and type(each[1]) is int
            and 0 <= each[1] < MAX_INT
            and isinstance(each[2], str)
        ):
            raise FormatError(
                f"field 'arguments.files[{number}]': expected name, size and version of a file, found {each!r:.80}",
                path=fields.path,
            )
        name: str = each[0]
        names.add(name)
        while (name := name.rpartition("/")[0]) and name not in folders:
            folders.add(name)
    if len(names) < len(found) or names & folders:
        raise fields.error("files", "different names, none of which is a folder of others")


def _check_tasks(plan: Planned, path: Path) -> None:
    files = plan.arguments["files"]
    if divided(plan, "files", path) != len(files):
        raise FormatError(f"field 'tasks': expected ranges that end with file {len(files):,}", path=path)
    for i, task in enumerate(plan.tasks):
        first, end = task["files"]
        if (total := sum(size for _, size, _ in files[first:end])) != task["bytes"] or first == end:
            raise Fields(dict(task), path, f"tasks[{i}]").error("bytes", f"{total:,}, the size of its files")
