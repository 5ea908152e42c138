"""What the tasks of a conversion tell of their examples, lengths and columns, for the commit.

Few equal lengths go into the task's result, so that the commit of 10,000 tasks opens no second file of each; what is longer, and
columns, lie beside the result as an Arrow file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import actshard._native as _native
from actshard._columns import numbers
from actshard.errors import FormatError, from_reader
from actshard.writing.recorded import TOKENS

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.plan.verb import Result

FILE, KEY = "examples.arrow", "tokens"
_INLINE = 256
"""Examples of a task whose lengths stand in its result."""


def write(folder: Path, table: pa.Table) -> dict[str, Any]:
    """Keeps the examples of a task: what its result must tell, or a file in its folder."""
    if table.column_names == [TOKENS] and table.num_rows <= _INLINE and not table[TOKENS].null_count:
        return {KEY: table[TOKENS].to_pylist()}
    import pyarrow as pa

    path = folder / FILE
    with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    _native.sync_files([path])
    return {}


def check(results: Sequence[Result], lacking: bool) -> None:
    """Raises FormatError for lengths in results that are none. ``lacking``: examples may lack layers, which is length -1."""
    for result in results:
        if (some := result.value.get(KEY)) is not None and min(_checked(some, result), default=0) < -lacking:
            raise FormatError(f"task {result.task}: expected lengths of at least 0, found -1", path=result.folder)


def read(results: Sequence[Result]) -> list[pa.Table]:
    """The examples of tasks, in order; neighbours that stood in results come as one table.

    Raises:
        FormatError: a file or a result is broken.
    """
    import pyarrow as pa

    made: list[pa.Table] = []
    lengths: list[int] = []
    for result in results:
        some = result.value.get(KEY)
        if some is not None:
            lengths += _checked(some, result)
            continue
        if lengths:
            made.append(pa.table({TOKENS: numbers(np.array(lengths, np.int64))}))
            lengths = []
        path = result.folder / FILE
        try:
            with path.open("rb") as file:
                made.append(pa.ipc.open_file(file).read_all())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise from_reader(error, path, "read", f"expected the examples of a task: {error}") from error
    if lengths:
        made.append(pa.table({TOKENS: numbers(np.array(lengths, np.int64))}))
    return made


def _checked(lengths: Any, result: Result) -> list[int]:
    """Raises FormatError if these are not lengths of the task's examples."""
    first, end = result.value["examples"]
    if (
        not isinstance(lengths, list)
        or len(lengths) != end - first
        or not all(type(n) is int and -1 <= n < 1 << 62 for n in lengths)
    ):
        raise FormatError(
            f"task {result.task}: expected the lengths of {end - first:,} examples, found {str(lengths)[:80]}",
            path=result.folder,
        )
    return lengths
