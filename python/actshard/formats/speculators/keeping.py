"""The cached index of speculators' training data: numbers of tokens and offsets of states, if all files are usable and unscaled.

The shape and dtype are the same in all files. Offsets are checked against files when rows are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.location import Location
from actshard.formats.kept import LEAST_FILES, KeptIndex, Listing
from actshard.formats.speculators.files import FLOATS, FOLDER, AllStates, StatesFile, data_files

if TYPE_CHECKING:
    from collections.abc import Mapping

_VERSION = 1
_FURTHEST = 1 << 40


def states_of_rows(
    root: Location, paths: Sequence[Location], tokens: NDArray[np.int64], keep: bool, read: Callable[[], AllStates]
) -> AllStates:
    """The states of all rows: from the cached index, or from ``read``, whose result is then cached."""
    if not keep or not root.is_local or len(paths) < LEAST_FILES:
        return read()
    listing = Listing(root)
    listing.entries(root / FOLDER, "hs_")
    for file in (root / "state.json", *data_files(root)):  # the token ids of files were compared with these rows
        listing.exists(file)
    kept_index = KeptIndex(listing, "speculators", _VERSION)
    index = kept_index.load()
    kept_states = None if index is None else _restore_states(tokens, *index)
    if kept_states is not None:
        return kept_states
    states = read()
    files = [file for file in states.files if file is not None and file.scaled is None]
    if len(files) == len(paths):
        header = {"layers": states.layers, "width": states.width, "dtype": states.dtype}
        columns = ([file.tokens for file in files], [file.start for file in files], [file.ids_start for file in files])
        kept_index.save(header, [np.array(column, np.uint64) for column in columns])
    return states


def _restore_states(
    tokens: NDArray[np.int64], header: Mapping[str, object], arrays: list[NDArray[Any]]
) -> AllStates | None:
    """The states; None if the index is invalid."""
    layers, width, dtype = header.get("layers"), header.get("width"), header.get("dtype")
    if type(layers) is not int or type(width) is not int or dtype not in FLOATS:
        return None
    if not 0 < layers < 1 << 20 or not 0 < width < 1 << 31 or len(arrays) != 3:
        return None
    for array in arrays:
        if array.dtype != np.uint64 or len(array) != len(tokens) or (array >= _FURTHEST).any():
            return None
    if not np.array_equal(arrays[0], tokens.astype(np.uint64)):
        return None
    counts, starts, ids = (array.tolist() for array in arrays)
    files: list[StatesFile | None] = [
        StatesFile(count, layers, width, dtype, start, id_offset)
        for count, start, id_offset in zip(counts, starts, ids, strict=True)
    ]
    return AllStates(files, layers, width, dtype, faults={}, warnings=[])
