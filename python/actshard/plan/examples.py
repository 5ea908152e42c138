"""Lengths and columns of the examples that tasks of a conversion wrote, for the commit.

Up to 256 lengths are stored in the task's result, so that the commit of 10,000 tasks opens only one file per task. Longer tables,
and columns, are stored next to the result in an Arrow file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actshard.base._columns import numbers
from actshard.base.errors import FormatError
from actshard.base.work import read_table, write_table
from actshard.writing.recorded import TOKENS

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.plan.verb import Result

FILE, KEY = "examples.arrow", "tokens"
_INLINE = 256
"""Most examples of a task whose lengths are stored in its result."""


def write(folder: Path, table: pa.Table) -> dict[str, object]:
    """Stores the examples of a task: returns the values for its result, or writes a file in its folder and returns none."""
    if table.column_names == [TOKENS] and table.num_rows <= _INLINE and not table[TOKENS].null_count:
        return {KEY: table[TOKENS].to_pylist()}
    write_table(folder / FILE, table)
    return {}


def check(results: Sequence[Result], lacking: bool) -> None:
    """Raises FormatError for invalid lengths in results. ``lacking``: examples may lack layers, which is length -1."""
    for result in results:
        if (lengths := result.value.get(KEY)) is not None and min(_checked(lengths, result), default=0) < -lacking:
            raise FormatError(f"task {result.task}: expected lengths of at least 0, found -1", path=result.folder)


def read(results: Sequence[Result]) -> list[pa.Table]:
    """The examples of tasks, in order. Consecutive tasks whose lengths are in their results share one table.

    Raises:
        FormatError: a file or a result is damaged.
    """
    import pyarrow as pa

    tables: list[pa.Table] = []
    lengths: list[int] = []
    for result in results:
        task_lengths = result.value.get(KEY)
        if task_lengths is not None:
            lengths += _checked(task_lengths, result)
            continue
        if lengths:
            tables.append(pa.table({TOKENS: numbers(np.array(lengths, np.int64))}))
            lengths = []
        tables.append(read_table(result.folder / FILE))
    if lengths:
        tables.append(pa.table({TOKENS: numbers(np.array(lengths, np.int64))}))
    return tables


def _checked(lengths: object, result: Result) -> list[int]:
    """Returns the lengths; raises FormatError if they are not those of the task's examples."""
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
