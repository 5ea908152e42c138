"""Shared by plans that only read a dataset: its path, the working folder, and the result, which is kept next to that folder.

.. code-block:: text

    WORK/            the working folder, by default .actshard-VERB-XXXXXXXX in the current folder; a commit removes it
    WORK.json        the commit's value; its existence shows that the plan was committed
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard import formats
from actshard.base import _arguments
from actshard.base._json import read_json
from actshard.base.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExistsError,
    FormatError,
    MissingFileError,
    boundary,
    from_reader,
)
from actshard.base.work import make_folder, write_json
from actshard.plan.data import Planned, fewer
from actshard.reading.store import Store

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

NO_LISTING = (
    "path: a web server cannot list its files, so a plan cannot detect changes; copy them with actshard.stage, or use a "
    "bucket"
)


def place(path: object) -> str:
    """A dataset's absolute path, because tasks may run in other folders; or its URL."""
    if isinstance(path, Store):
        raise ArgumentError(
            "path: expected a path, because tasks in other processes open it, found a store; pass store.path"
        )
    if _arguments.is_url_elsewhere(path):
        return path
    return str(_arguments.local_path(path))


def described(layout: object, format: str | None) -> Any:
    """A description of files as JSON values. A file is read now: tasks have its text, also if it changes.

    ``format``: the format that takes the description; None: the one of this package.
    """
    if layout is None:
        return None
    read = layout
    if not isinstance(layout, Mapping):
        format_name = format if format in formats.names() else formats.described()
        read = formats.get(format_name).read_layout(layout)
    if isinstance(read, str):
        return str(read)
    if isinstance(read, os.PathLike):  # a plugin reads the file itself
        return str(_arguments.local_path(read, "layout"))
    try:
        return json.loads(json.dumps(dict(read) if isinstance(read, Mapping) else read, allow_nan=False))
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ArgumentTypeError(f"layout: expected JSON values in a plan: {error}") from error


def work_folder(verb: str, identity: str, path: str, work: str | os.PathLike[str] | None) -> Path:
    """The given working folder, or one in the current folder.

    Raises:
        ArgumentError: the folder is inside the dataset, whose files are checked.
        ExistsError: another file has the name of the result's file.
    """
    folder = Path.cwd() / f".actshard-{verb}-{identity[:8]}" if work is None else _arguments.local_path(work, "work")
    if "://" not in path and Path(path) in (folder, *folder.parents):
        raise ArgumentError(f"work: expected a folder outside of the dataset, found {folder}; pass work=")
    _refuse_others(kept_at(folder))
    return folder


def wide_groups(store: Store, groups: list[int]) -> list[int]:
    """The groups in which the stored type of some examples differs from the dataset's: their rows are read as float64."""
    if not groups or all(dtype == store.dtype for dtype in store.rows.stored_types(groups[0], None)):
        return []
    every = np.arange(store.num_examples)
    return [g for g in groups if any(dtype != store.dtype for dtype in store.rows.stored_types(g, every))]


def notes(count: int, requested_count: int, why: str, work: Path) -> tuple[str, ...]:
    """Notes of a plan: fewer tasks than requested, and an existing result."""
    existing = [f"{kept_at(work)} contains the result of an earlier run; remove it to run again"]
    return (*fewer(count, requested_count, why), *(existing if kept_at(work).exists() else ()))


def kept_at(work: Path) -> Path:
    """The file of a commit's result, next to the working folder."""
    return work.with_name(f"{work.name}.json")


def keep(plan: Planned, value: object) -> None:
    """Writes the result of a commit, as JSON values, next to the working folder."""
    _refuse_others(kept_at(plan.work))
    make_folder(plan.work.parent)
    write_json(kept_at(plan.work), {"actshard_result": 1, "plan": plan.id, "verb": plan.verb, "value": value}, None)


def _refuse_others(file: Path) -> None:
    """Raises ExistsError if a file with a result's name is not a result, because the result would replace it."""
    try:
        record = read_json(file) if file.is_file() else {"actshard_result": 1}
    except MissingFileError:  # removed meanwhile
        return
    except FormatError:
        record = None
    if file.is_dir() or not isinstance(record, dict) or "actshard_result" not in record:
        raise ExistsError("expected no file, or the result of a plan; pass another work=", path=file)


def kept(plan: Planned) -> Any | None:
    """The value that :func:`keep` wrote; None if there is none, or it belongs to another plan."""
    file = kept_at(plan.work)
    try:
        record = read_json(file)
    except MissingFileError:
        return None
    if not isinstance(record, dict) or record.get("plan") != plan.id or "value" not in record:
        return None
    return record["value"]


def broken(plan: Planned, error: Exception) -> FormatError:
    """The error for a kept result that cannot be read."""
    return FormatError(
        f"expected the result of a {plan.verb} plan: {error!r:.200}; remove the file, and run the plan again",
        path=kept_at(plan.work),
    )


def save(file: Path, values: NDArray[np.generic]) -> None:
    """Writes an array of a task, synced."""
    # Not by numpy, which reports a full disk as a short write without the reason.
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
    with boundary(file, "write"), file.open("wb") as out:
        out.write(header.getvalue())
        out.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    _native.sync_files([file])


def saved(file: Path, dtype: DTypeLike, dims: int) -> NDArray[np.generic]:
    """Reads an array that :func:`save` wrote.

    Raises:
        FormatError: its dtype or number of dimensions differs, or the file is truncated.
    """
    try:
        array: NDArray[np.generic] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise from_reader(error, file, "read", f"expected an array of a task: {error}") from error
    if array.dtype != dtype or array.ndim != dims:
        raise FormatError(f"expected {dims} dimensions of {dtype}, found {array.dtype} {array.shape}", path=file)
    return array
