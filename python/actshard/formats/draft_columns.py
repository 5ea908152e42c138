"""Addresses of tensors in ``torch.save`` files, and the columns of draft-model examples: token ids, masks, values, file names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard._native import Rows, StoredArray
from actshard.base._arguments import stored
from actshard.base.errors import NotStoredError
from actshard.base.location import Location
from actshard.formats.contents import Options
from actshard.formats.draft_examples import DraftExample, PlacedTensor, PlacedTensors
from actshard.formats.per_token import TokenColumns
from actshard.formats.tables import table_of

if TYPE_CHECKING:
    import pyarrow as pa

_FILE = "file"
"""Column of the examples' files, relative to the folder."""
_Fault = tuple[int, str, str, Any]
"""An example that cannot be read: its number, the error's kind and message, the file."""


class PlaceTable:
    """Collects files of tensors for the core, which opens each with one row stride.

    The core decodes a whole tensor if its rows are not contiguous or if it is compressed.
    """

    def __init__(self, paths: Sequence[Location]) -> None:
        self._paths = paths
        self._files: list[tuple[Location, int, bool, bool, StoredArray | None]] = []
        self._numbers: dict[object, int] = {}

    def place(self, example: int, part: PlacedTensor, gzipped: bool, offset: int) -> tuple[int, int]:
        """Returns a tensor's file number, and the offset of its rows plus ``offset``, a position within a row in bytes."""
        item = stored(part.array.dtype).itemsize
        row = part.width * item
        step = part.token_stride * item if part.tokens > 1 else row
        is_decoded = (part.stride != 1 and part.width > 1) or step < row or part.array.deflated is not None
        swapped = part.array.swapped and not is_decoded
        key = (example, id(part.array), True) if is_decoded else (example, step, swapped, False)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._files)
            decoded = part.array if is_decoded else None
            self._files.append((self._paths[example], row if is_decoded else step, swapped, gzipped, decoded))
        return number, offset + (0 if is_decoded else part.array.offset)

    def add(self, steps: NDArray[np.uint64], swapped: NDArray[np.uint8]) -> int:
        """Adds every path once, with its row stride in bytes. Returns the number of the first."""
        first = len(self._files)
        files = zip(self._paths, steps.tolist(), (swapped != 0).tolist(), strict=True)
        self._files += [(path, step, swap, False, None) for path, step, swap in files]
        return first

    def unread(self, example: int) -> int:
        """Adds a file of which no rows are read, and returns its number."""
        self._files.append((self._paths[example], 1 << 20, False, False, None))
        return len(self._files) - 1

    def open(
        self,
        numbers: NDArray[np.uint32],
        starts: NDArray[np.uint64],
        tokens: NDArray[np.uint32],
        width: int,
        dtype: str,
        options: Options,
        faults: Sequence[_Fault] = (),
    ) -> Rows:
        """Opens rows by file number and offset of their first byte, both (groups, examples)."""
        return _native.placed_rows(
            self._files,
            np.ascontiguousarray(numbers.reshape(-1)),
            np.ascontiguousarray(starts.reshape(-1)),
            tokens,
            num_groups=len(numbers),
            width=width,
            dtype=dtype,
            decoded_memory=options.decoded_memory,
            descr=stored(dtype),
            io=options.io,
            faults=list(faults),
        )


def rows_of_columns(
    paths: Sequence[Location], examples: Sequence[DraftExample | None], options: Options
) -> dict[str, Rows]:
    """Rows of token ids and masks, by name."""
    n = len(paths)
    first = next(example for example in examples if example is not None)
    rows = {}
    for key, part in first.columns.items():
        table = PlaceTable(paths)
        numbers, starts, tokens = np.zeros((1, n), np.uint32), np.zeros((1, n), np.uint64), np.zeros(n, np.uint32)
        for e, example in enumerate(examples):
            if example is None:
                numbers[0, e] = table.unread(e)
                continue
            numbers[0, e], starts[0, e] = table.place(e, example.columns[key], example.gzipped, 0)
            tokens[e] = example.tokens
        rows[key] = table.open(numbers, starts, tokens, 1, part.array.dtype, options)
    return rows


def rows_of_parts(
    paths: Sequence[Location],
    groups: Sequence[tuple[PlacedTensors, int]],
    tokens: NDArray[np.uint32],
    width: int,
    options: Options,
) -> Rows:
    """Rows of tensors that all files have: one group for each pair of a tensor and an offset within its rows."""
    dtype = groups[0][0].dtype
    item, table = stored(dtype).itemsize, PlaceTable(paths)
    firsts: dict[int, int] = {}
    for part, _ in groups:
        if id(part) not in firsts:
            firsts[id(part)] = table.add(
                np.where(tokens > 1, part.steps, np.uint64(part.width)) * np.uint64(item), part.swapped
            )
    file_indices = np.arange(len(paths), dtype=np.uint32)
    numbers = np.stack([file_indices + np.uint32(firsts[id(part)]) for part, _ in groups])
    starts = np.stack([part.offsets + np.uint64(offset) for part, offset in groups])
    return table.open(numbers, starts, tokens, width, dtype, options)


class DraftColumns:
    """Columns of a folder of examples. Examples that cannot be read have empty lists.

    Args:
        root: the folder.
        paths: the examples' files.
        rows: rows of token ids and masks.
        values: numbers and strings of the files; None for a file without the value.
    """

    def __init__(
        self,
        root: Location,
        paths: Sequence[Location],
        rows: Mapping[str, Rows],
        values: Mapping[str, Sequence[object]],
    ) -> None:
        self._root, self._paths = root, paths
        self._tokens = TokenColumns(rows, len(paths), root.place)
        self._values = {name: column for name, column in values.items() if name not in (*self._tokens.names, _FILE)}
        self.names = (*self._tokens.names, *self._values, _FILE)
        self.per_token = self._tokens.names

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Reads columns of all examples."""
        return self.head(names, len(self._paths))

    def head(self, names: Sequence[str], n: int) -> pa.Table:
        """Reads columns of the first n examples."""
        return self.some(names, np.arange(min(n, len(self._paths))))

    def some(self, names: Sequence[str], numbers: NDArray[np.int64]) -> pa.Table:
        """Reads columns of these examples.

        Raises:
            NotStoredError: there is no such column.
        """
        for name in names:
            if name not in self.names:
                raise NotStoredError(
                    f"has no column {name!r}; columns are {', '.join(self.names)}", path=self._root.place
                )
        parts: dict[str, object] = {}
        if token_names := [name for name in names if name in self.per_token]:
            read = self._tokens.some(token_names, numbers)
            parts = {name: read[name].combine_chunks() for name in token_names}
        parts |= {name: self._plain(name, numbers.tolist()) for name in names if name not in parts}
        return table_of(list(names), [(parts, len(numbers))])

    def _plain(self, name: str, numbers: Sequence[int]) -> list[object]:
        if name == _FILE:
            return [self._paths[i].relative_to(self._root) for i in numbers]
        values = self._values[name]
        return [values[i] for i in numbers]
