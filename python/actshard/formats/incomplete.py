"""Examples that ``incomplete="skip"`` leaves out: they keep their numbers, and have no tokens in any layer.

A format finds the examples whose files are missing or too short, as flags, and builds the rows of its files as usual.
:func:`leave_out` then places examples without tokens between runs of whole ones.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from actshard._native import Rows
from actshard.base import _arguments
from actshard.base.errors import ActshardError, FormatError, MissingFileError, UnsupportedError
from actshard.base.location import Location

OF_A_FILE = (FormatError, MissingFileError, UnsupportedError)
"""Errors of a file that is not whole, or not of the dataset. Others, such as a refusal, may have another answer next time."""
_MOST_RUNS = 65_536
"""Maximum number of runs of whole examples: each is a part of the joined rows."""


_MOST_EXAMPLES = 1 << 32
"""Maximum number of examples: each takes a byte while a dataset is opened."""


def none_whole(count: int, path: Location) -> NDArray[np.bool_]:
    """A flag per example, all set.

    Raises:
        FormatError: too many examples.
    """
    if count > _MOST_EXAMPLES:
        raise FormatError(f"incomplete: expected at most {_MOST_EXAMPLES:,} examples, found {count:,}", path=path)
    return np.ones(count, np.bool_)


def size_of_file(path: Location) -> int:
    """The size of a regular file; -1 if it is missing or cannot be read."""
    try:
        stat = path.found()
    except ActshardError:
        return -1
    return stat.size if stat is not None and stat.kind == "file" else -1


def leave_out(
    rows: Rows, absent: NDArray[np.bool_], num_layers: int, path: Location, *, are_dense: bool = False
) -> Rows:
    """Returns the rows of all examples, of which those with a flag have no tokens.

    Args:
        rows: the rows of the files.
        absent: a flag per example.
        num_layers: layers of ``rows``.
        path: the dataset, for messages.
        are_dense: whether ``rows`` contain only the other examples.

    Raises:
        FormatError: no example is whole, or there are too many runs of whole examples.
    """
    if not absent.any():
        return rows
    if absent.all():
        raise FormatError(f"expected at least one whole example, found none of {len(absent):,}", path=path)
    edges = [0, *(np.flatnonzero(np.diff(absent)) + 1).tolist(), len(absent)]
    if len(edges) > _MOST_RUNS:
        raise FormatError(f"expected at most {_MOST_RUNS:,} runs of whole examples, found {len(edges):,}", path=path)
    name, parts, shifts, before = _arguments.name_of(rows.descr), list[Rows](), list[int](), 0
    for first, last in itertools.pairwise(edges):
        count = last - first
        shifts.append(first if absent[first] else first - before if are_dense else 0)
        if absent[first]:
            parts.append(
                Rows.joined(
                    [],
                    (count, 0),
                    void=[],
                    num_groups=num_layers,
                    width=rows.width,
                    dtype=name,
                    descr=rows.descr,
                    io=rows.io,
                )
            )
        else:
            parts.append(rows.choose((before if are_dense else first, 1, count)))
            before += count
    return Rows.several(parts, [list(range(num_layers))] * len(parts), None, rows.descr, rows.io, shifts)
