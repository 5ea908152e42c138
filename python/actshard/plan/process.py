"""Memory of a task's process before its first row: the interpreter, imported modules, libraries, and the opened dataset.

Measured in a separate process, so that earlier work of the planning process is not counted. It imports the modules of a task, opens
the dataset or writes a small one, and reports its peak (``VmHWM`` on Linux, including mapped pages of libraries). Opening also
depends on the dataset's size: the core's tables are added separately (``Rows.table_bytes``), and datasets with the same kinds of
files and little metadata share one measurement. If the process fails, the result is :data:`UNKNOWN`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actshard import formats
from actshard.base.errors import ActshardError
from actshard.base.location import Location
from actshard.base.work.pool import peak_memory
from actshard.reading.inputs import Input
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.reading.verifying import of_path
from actshard.writing import create

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actshard.plan.verb import OpenArguments

UNKNOWN = 140 << 20
"""Bytes if a process cannot be measured: with pyarrow, 78 MiB of private memory and 40 to 70 MiB of libraries (CPython 3.11)."""
_PATIENCE = 120
"""Seconds."""
_LITTLE = 4 << 20
"""Bytes of files other than those with rows. A dataset with more is measured itself, because opening may load them."""

_memory_by_key: dict[tuple[str, ...], int] = {}


@functools.cache
def importing(*modules: str) -> int:
    """Bytes of memory of a process that imported these modules."""
    return _measure({"modules": modules}) or UNKNOWN


def writing(format: str, *modules: str) -> int:
    """Bytes of memory of a process that imported modules and wrote a dataset of one example, with a text."""
    return _format_memory(modules, None, format)


@functools.cache
def _format_memory(modules: tuple[str, ...], opened: str | None, written: str | None) -> int:
    """Bytes of memory of a process that imported modules, opened a dataset of one example of a format, and wrote another."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "opened")
        open_arguments = [str(path), None, None] if opened is not None and _write(path, opened) else None
        return _measure({"modules": modules, "open": open_arguments, "write": written}) or UNKNOWN


def opening(
    store: Store,
    open_arguments: OpenArguments,
    inputs: Sequence[Input],
    *modules: str,
    check: bool = False,
    write: str | None = None,
) -> int:
    """Bytes of memory of a process that imported modules and opened a dataset.

    Args:
        store: the dataset.
        open_arguments: path, format and layout, as for :func:`actshard.open`.
        inputs: the dataset's files.
        modules: what a task imports.
        check: whether it also checks the files, but not their values.
        write: a format that it writes; None if it does not write.
    """
    kinds = {kind for input_file in inputs if any(map(str.isalpha, kind := Path(input_file.path).suffix))}
    room = f"actshard.formats.{store.format}.read"
    imports = [*modules, room] if find_spec(f"actshard.formats.{store.format}") and find_spec(room) else [*modules]
    tables = store.rows.table_bytes() if store.layers else 0
    remote = not isinstance(open_arguments[0], str) or "://" in open_arguments[0]
    units = store.contents.units is not None
    if remote or (
        units and (store.format in formats.written() or sum(input_file.size or 0 for input_file in inputs) > _LITTLE)
    ):
        # Opening this dataset would decode a unit, which is counted separately, or send requests a second time. So a small
        # dataset of the format is opened instead.
        sample_format = store.format if units and store.format in formats.written() else None
        return _format_memory((*imports, *readers(inputs)), sample_format, write) + tables
    rows = {str(Location.at(file)) for file in store.contents.files()}
    besides = sum(input_file.size or 0 for input_file in inputs if input_file.path not in rows)
    itself = [] if besides <= _LITTLE else [str(open_arguments[0])]
    ways = [*(["decodes"] if store.layers and store.rows.decodes else []), *(["check"] if check else [])]
    key = (store.format, *sorted(kinds), *imports, *ways, *itself, f"writes {write}")
    if key not in _memory_by_key:
        memory = _measure({"modules": imports, "open": list(open_arguments), "check": check, "write": write})
        _memory_by_key[key] = UNKNOWN if memory is None else max(memory - tables, 0)
    return _memory_by_key[key] + tables


def checking(open_arguments: OpenArguments, inputs: Sequence[Input], *modules: str) -> int:
    """Bytes of memory of a process that imported modules and checked a dataset that cannot be opened or has no layers.

    Args:
        open_arguments: path, format and layout, as for :func:`actshard.open`.
        inputs: the files; empty: too many to check them for a measurement.
        modules: what a task imports.
    """
    if not inputs or not isinstance(open_arguments[0], str) or "://" in open_arguments[0]:
        return importing(*modules, *readers(inputs))
    return _measure({"modules": modules, "open": list(open_arguments), "check": True, "fails": True}) or UNKNOWN


def readers(inputs: Iterable[Input]) -> list[str]:
    """Modules that read a dataset's columns, by the names of its files."""
    return ["pyarrow.parquet"] if any(input_file.path.endswith(".parquet") for input_file in inputs) else []


def _measure(request: dict[str, object]) -> int | None:
    """Peak memory that a separate process reports; None if it fails."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", "actshard.plan.process"],
            input=json.dumps(request).encode(),
            capture_output=True,
            check=False,
            timeout=_PATIENCE,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        memory = json.loads(process.stdout.rpartition(b"\n")[2])
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return memory if type(memory) is int else None


def main() -> None:
    """Performs the request on stdin, and writes this process's peak memory as the last line of stdout."""
    request = json.load(sys.stdin)
    for name in request["modules"]:
        __import__(name)
    if request.get("open"):
        path, format, layout = request["open"]
        if request.get("check"):
            of_path(path, format, deep=False, layout=layout)
        if not request.get("fails"):
            _open(path, format, layout)
    if request.get("write"):
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder, "written"), request["write"])
    sys.stdout.write(f"\n{json.dumps(peak_memory())}")


def _write(path: Path, format: str) -> bool:
    """Writes a dataset of one example, with a column if the format stores columns. Returns whether it succeeded."""
    columns = {"text": ["one"]} if formats.get(format).target().holds_columns else None
    try:
        with create(path, format, layers=[0], d_model=8, dtype="float32") as writer:
            writer.append(np.ones((1, 1, 2, 8), np.float32), columns=columns)
    except ActshardError:
        return False
    return True


def _open(path: str, format: str | None, layout: str | Mapping[str, object] | None) -> None:
    store = open_quietly(path, format, "pread", cache=False, layout=layout)
    if store.layers:
        store.tokens_in(store.layers[0])


if __name__ == "__main__":
    main()
