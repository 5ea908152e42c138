"""Columns of a described folder: token ids, and other values per example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard._native import StoredArray
from actshard.base._arguments import stored
from actshard.base._json import utf8
from actshard.base.errors import FormatError, NotStoredError
from actshard.base.location import Location
from actshard.formats.contents import OF_A_FILE
from actshard.formats.layout_toml.description import Description, Part
from actshard.formats.layout_toml.files import OpenedFile, array_in, is_lines, lines_of, open_files, parquet_of, viewed
from actshard.formats.layout_toml.index import RowIndex, line_number
from actshard.formats.layout_toml.units import Unit, by_capture, key_of, read_part
from actshard.formats.tables import table_of

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

TOKENS = "token_ids"
ID = "example"
"""The column of example numbers or names that are part of file names."""


class FolderColumns:
    """Reads columns of a dataset."""

    def __init__(self, root: Location, description: Description, index: RowIndex) -> None:
        self.root, self.description, self.index = root, description, index
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._fields: dict[str, Part] = {}
        self._read: dict[str, Callable[[], Sequence[Any]]] = {}
        if index.numbered:
            self._read[ID] = lambda: list(index.ids)
        if description.tokens is not None:
            tokens = description.tokens
            self._read[TOKENS] = lambda: self._read_tokens(tokens)
        for part in description.columns:
            self._add(part)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns."""
        return tuple(self._read)

    def table(self, names: Sequence[str], first: int | None = None) -> pa.Table:
        """Reads columns of all examples, or of the first ``first``."""
        for name in names:
            if name not in self._read:
                raise NotStoredError(f"has no column {name!r}; columns are {', '.join(self.names)}", path=self.root)
        n = len(self.index.ids)
        stop = n if first is None else min(first, n)
        columns = {name: self._read[name]()[:stop] for name in names}
        return table_of(list(names), [(columns, stop)])

    def check_first(self) -> None:
        """Checks the values of tokens and columns that the first unit has, by their shapes. Reads no elements of arrays.

        Raises:
            FormatError, MissingFileError: a file, a key or a field is missing, or there are other numbers of values.
        """
        if not len(self.index.ids):
            return
        parts = [self.description.tokens, *self.description.columns]
        for part in [part for part in parts if part is not None and not part.metadata]:
            if part.files is not None and not part.files.captures and is_lines(part.files.text):
                self._check_lines(part)
            elif part.pointer is not None:
                self._read_arrays(part)
            else:
                self._check_arrays(part)

    def _check_lines(self, part: Part) -> None:
        """Counts lines that are not joined by a number."""
        if part.tensor:
            self._read_arrays(part)
        elif not part.by and part.files is not None and not part.files.text.lower().endswith(".parquet"):
            self._check_count(self._lines_of(part), part)
        elif not part.by and part.files is not None:
            self._check_count(parquet_of(self.root.joinpath(*part.files.text.split("/"))), part)

    def _check_arrays(self, part: Part) -> None:
        if part.files is not None and not part.files.captures:
            (file,) = open_files([self.root.joinpath(*part.files.text.split("/"))], part)
            value, count, positions = file.find(part.tensor), self._count(), self._numbers()
            first = 0
        else:
            units, positions = self._units_of(part)
            unit = next(unit for unit in units if unit.fault is None)
            (path,) = self._paths(part, [unit])
            assert path is not None  # of a unit without a fault
            file, value = self._value(part, unit, path)
            first, count = unit.first, unit.count
        if isinstance(value, StoredArray):
            if (
                value.shape
                and self._is_per_row(part, value.shape, first, count)
                and value.shape[0] != self._rows(first, count)
            ):
                expected = self._rows(first, count)
                raise self._error(part, f"expected {expected} values, one per row, found {value.shape[0]}", file.path)
            value = np.broadcast_to(np.zeros((), stored(value.dtype)), value.shape)
        if self._is_shared(part):
            value = self._first(value)
        examples = [first] if self.index.selection is None else []
        column = self._spread(value, examples, part, count, positions)
        if part.table == "tokens" and column:
            self._check_length(column[0], first)

    def _rows(self, first: int, count: int) -> int:
        """Rows of some examples. Equal numbers are one in memory, and are not added up."""
        tokens = self.index.tokens[first : first + count]
        if len(tokens) and tokens.strides[0] == 0:
            return len(tokens) * int(tokens[0])
        return int(tokens.sum(dtype=np.int64))

    def _read_tokens(self, part: Part) -> list[Any]:
        """Token ids of each example, as many as it has rows."""
        column = self._read_arrays(part)
        return [self._check_length(ids, example) for example, ids in enumerate(column)]

    def _check_length(self, ids: Any, example: int) -> Any:
        """The token ids of an example, without those after its last row."""
        rows, skip = int(self.index.tokens[example]), int(self.index.skipped[example])
        if ids is None and not rows and self.index.absence:
            return []
        if not isinstance(ids, list) or len(ids) < rows:
            text = f"{len(ids)}" if isinstance(ids, list) else f"{ids!r:.40}"
            raise FormatError(
                f"tokens: expected at least {rows} token ids of example {example}, one per row, found {text}",
                path=self.root,
            )
        return ids if len(ids) == rows else ids[skip : skip + rows]

    def _error(self, part: Part, text: str, path: Location | None = None) -> FormatError:
        name = f"{part.table}: {part.name}" if part.name else part.table
        return FormatError(f"{name}: {text}", path=path or self.root)

    def folders(self) -> list[Path]:
        """Files of columns and lengths, or their folders if files are numbered, as named in the description.

        They can differ from the folder of activations.
        """
        parts = (self.description.tokens, self.description.lengths, *self.description.columns)
        paths = []
        for part in parts:
            if part is None or part.files is None:
                continue
            *folder, name = part.files.text.split("/")
            names = [*folder, name] if not part.files.captures else folder
            if names and "{" not in "".join(names):
                paths.append(self.root.joinpath(*names).place)
        return paths

    # -- columns of the description --------------------------------------------------------------

    def _add(self, part: Part) -> None:
        if part.metadata:
            first_metadata = [self._metadata(n) for n, unit in enumerate(self.index.units) if unit.fault is None][:1]
            for name in dict.fromkeys(key for meta in first_metadata for key in meta):
                self._put(name, part, lambda name=name: [meta.get(name) for meta in self._all_metadata()])  # type: ignore[misc]  # a lambda's default has no type
        elif part.files is not None and not part.files.captures and is_lines(part.files.text) and part.by:
            lines = self._lines_of(part)
            for name in dict.fromkeys(key for line in lines for key in line if key != part.by):
                self._put(name, part, lambda name=name: self._join_lines(part, name))  # type: ignore[misc]  # a lambda's default has no type
        elif part.files is not None and part.files.text.lower().endswith(".parquet") and not part.tensor:
            stored = parquet_of(self.root.joinpath(*part.files.text.split("/")))
            for name in stored.column_names:  # stays an Arrow array: Python values would lose their types
                self._put(name, part, lambda name=name: self._check_count(array_in(stored, name), part))  # type: ignore[misc]  # a lambda's default has no type
        elif part.files is not None and is_lines(part.files.text) and not part.tensor:
            lines = self._lines_of(part)
            for name in dict.fromkeys(key for line in lines for key in line):
                self._put(name, part, lambda name=name: self._check_count([line.get(name) for line in lines], part))  # type: ignore[misc]  # a lambda's default has no type
        else:
            fallback = part.files.text.rpartition("/")[2].partition(".")[0] if part.files else part.table
            fallback = fallback if part.pointer is None else part.pointer[1].rpartition("/")[2] or fallback
            self._put(part.name or fallback, part, lambda: self._read_arrays(part))

    def _put(self, name: str, part: Part, read: Callable[[], Sequence[Any]]) -> None:
        if name in self._read:
            raise FormatError(f"columns: two columns are named {name!r}; choose another with 'name'", path=self.root)
        self._read[name] = read

    def _lines_of(self, part: Part) -> list[dict[str, Any]]:
        assert part.files is not None
        text = part.files.text
        if text not in self._lines:
            path = self.root.joinpath(*text.split("/"))
            self._lines[text] = lines_of(path)
            if not self._lines[text] and self.index.ids:
                raise FormatError(f"{part.table}: expected lines with values of examples, found none", path=path)
        return self._lines[text]

    def _join_lines(self, part: Part, name: str) -> list[Any]:
        """A field of lines, joined to examples by the number that each line contains."""
        values_by_example: dict[int, Any] = {}
        for number, line in enumerate(self._lines_of(part), 1):
            example = line_number(line, part, self.root)
            if example in values_by_example:
                raise FormatError(f"line {number}: field {part.by!r}: {example} occurs twice", path=self.root)
            values_by_example[example] = line.get(name)
        return [values_by_example.get(example) if type(example) is int else None for example in self.index.ids]

    def _check_count(self, values: Sequence[Any], part: Part) -> Sequence[Any]:
        values = self._first(values)
        if len(values) != len(self.index.ids):
            raise self._error(part, f"expected {len(self.index.ids)} values, one per example, found {len(values)}")
        return values

    def _first(self, values: Any) -> Any:
        """Values of all examples, without those of examples after the last one that is known."""
        n = self._count()
        return values[:n] if self.index.absence.after and np.ndim(values) and len(values) > n else values

    # -- metadata of safetensors -----------------------------------------------------------------

    def _metadata(self, unit: int) -> dict[str, str]:
        path = self.index.units[unit].any
        if self.index.units[unit].fault is not None:
            return {}
        file = self.index.opened.get(path) or open_files([path], self.description.activations)[0]
        return {utf8(key): utf8(value) for key, value in file.metadata.items()}

    def _all_metadata(self) -> list[dict[str, str]]:
        unit_metadata = [self._metadata(n) for n in range(len(self.index.units))]
        return [unit_metadata[unit] for unit in self._units(self.index.units)]

    def _units_of(self, part: Part) -> tuple[list[Unit], Sequence[int] | NDArray[np.int64]]:
        """The units with a value of a part each, and the position of each example in its unit."""
        index = self.index
        if index.wholes is None or part.step_of("example") is not None:
            return index.units, index.positions
        positions = np.concatenate([np.arange(unit.count) for unit in index.wholes])
        return index.wholes, positions[np.asarray(self._numbers(), np.int64)]

    def _units(self, units: Sequence[Unit]) -> list[int]:
        """The unit of each example."""
        bounds = np.array([unit.first for unit in units], np.int64)
        counts = np.array([unit.count for unit in units], np.int64)
        every = np.repeat(np.arange(len(bounds)), counts)
        return list(every[np.asarray(self._numbers(), np.int64)].tolist())

    # -- arrays ----------------------------------------------------------------------------------

    def _read_arrays(self, part: Part) -> list[Any]:
        """One value per example, from an array or value of each unit, or of one file."""
        if self._is_shared(part):
            if part.files is not None and not is_lines(part.files.text):
                array_path = self.root.joinpath(*part.files.text.split("/"))
                (file,) = open_files([array_path], part)
                stored_value = file.find(part.tensor)
                values = stored_value if isinstance(stored_value, list) else viewed(file, stored_value, part)
            else:
                values = read_part(self.root, self.description, part)
            return self._spread(self._first(values), range(len(self.index.ids)), part, self._count(), self._numbers())
        column: list[Any] = [None] * len(self.index.ids)
        units, positions = self._units_of(part)
        paths = self._paths(part, units)
        lacking = [path for path in paths if path is not None and path not in self.index.opened]
        opened = dict(
            zip(lacking, open_files(lacking, part if part.files else self.description.activations), strict=True)
        )
        of_unit: dict[int, list[int]] = {}
        for example, number in enumerate(self._units(units)):
            of_unit.setdefault(number, []).append(example)
        for number, (unit, path) in enumerate(zip(units, paths, strict=True)):
            if path is None:
                continue
            try:
                file, stored_value = self._value(part, unit, path, opened.get(path))
                is_array = isinstance(stored_value, StoredArray | np.ndarray)
                value = viewed(file, stored_value, part) if is_array else stored_value
            except OF_A_FILE:
                if not unit.is_partial:
                    raise
                continue  # after the end of the file
            examples = of_unit.get(number, [])
            values = self._spread(value, examples, part, unit.count, positions)
            for example, example_value in zip(examples, values, strict=True):
                column[example] = example_value
        return column

    def _numbers(self) -> Sequence[int] | NDArray[np.int64]:
        """The number of each example among those of all units."""
        return range(len(self.index.ids)) if self.index.selection is None else self.index.selection

    def _count(self) -> int:
        return sum(unit.count for unit in self.index.units)

    def _paths(self, part: Part, units: Sequence[Unit]) -> list[Location | None]:
        """The file of a part for each unit; None for one that is left out, if it has none."""
        if part.files is None:
            return [unit.any if unit.fault is None else None for unit in units]
        files_by_capture = by_capture(self.root, part.files)
        paths: list[Location | None] = []
        for unit in units:
            path = files_by_capture.get(key_of(unit.captured, part.files))
            if path is None and unit.fault is None:
                raise self._error(part, f"expected a file {part.files.text!r} for {unit.any.name}")
            paths.append(path)
        return paths

    def _value(
        self, part: Part, unit: Unit, path: Location, opened: OpenedFile | None = None
    ) -> tuple[OpenedFile, Any]:
        """The file of a part for a unit, and the array or value in it."""
        steps = unit.fill(part.tensor)
        if opened is None:
            opened = self.index.opened.get(path)
        if opened is None:
            (opened,) = open_files([path], part if part.files else self.description.activations)
        file = opened.holding(steps)
        return file, file.find(steps)

    def _spread(
        self,
        values: Any,
        examples: Sequence[int],
        part: Part,
        count: int,
        positions: Sequence[int] | NDArray[np.int64],
    ) -> list[Any]:
        """Values of ``examples`` from an array or list with values of ``count`` examples, at their positions."""
        index = self.index
        if isinstance(values, np.ndarray):
            return self._spread_array(values, examples, part, count, positions)
        is_one_of_many = count == 1 and index.numbered and index.wholes is None and not self._is_shared(part)
        if isinstance(values, list | tuple) and len(values) == count and not is_one_of_many:
            return [_plain(values[int(positions[n])]) for n in examples]
        if len(examples) <= 1 or not isinstance(values, list | tuple):
            return [_plain(values)] * len(examples)
        raise self._error(part, f"expected {count} values, found {len(values)}")

    def _spread_array(
        self,
        values: NDArray[Any],
        examples: Sequence[int],
        part: Part,
        count: int,
        positions: Sequence[int] | NDArray[np.int64],
    ) -> list[Any]:
        index = self.index
        names = [axis for axis in part.axes if axis != "1"]
        if part.axes and len(part.axes) == values.ndim:
            for n in [n for n, axis in enumerate(part.axes) if axis == "1"][::-1]:
                values = values.take(0, axis=n)
        tokens = index.tokens[list(examples)].astype(np.int64)
        if len(examples) and self._is_per_row(part, values.shape, self._first_of(examples, positions), count):
            return self._of_rows(values, examples, part, count, positions)
        is_of_one = index.numbered and index.wholes is None and not self._is_shared(part)
        single = count == 1 and (values.ndim == 0 or values.shape[0] != 1 or is_of_one)
        if single and "example" not in names:
            values = values.reshape(1, *values.shape)
        elif values.ndim == 0 or values.shape[0] != count:
            raise self._error(part, f"expected {count} values, one per example, found {list(values.shape)}")
        column = []
        for example, n in zip(examples, tokens.tolist(), strict=True):
            example_values = values[int(positions[example]) if count != 1 else 0]
            skip = int(index.skipped[example])
            room = self._room(part)
            column.append(_plain(example_values[skip : skip + n] if example_values.ndim and room else example_values))
        return column

    def _first_of(self, examples: Sequence[int], positions: Sequence[int] | NDArray[np.int64]) -> int:
        """The first example of the unit of some examples."""
        return int(examples[0]) - int(positions[int(examples[0])]) if self.index.selection is None else 0

    def _of_rows(
        self,
        values: NDArray[Any],
        examples: Sequence[int],
        part: Part,
        count: int,
        positions: Sequence[int] | NDArray[np.int64],
    ) -> list[Any]:
        """Values of examples from an array with a value for each row of all examples of a unit."""
        index = self.index
        if index.selection is not None:
            raise self._error(part, "values of rows of some examples have no known place; expected values of examples")
        first = self._first_of(examples, positions)
        bounds = np.concatenate([[0], np.cumsum(index.tokens[first : first + count].astype(np.int64))])
        if bounds[-1] != len(values):
            raise self._error(part, f"expected {bounds[-1]} values, one per row, found {len(values)}")
        places = [int(positions[example]) for example in examples]
        return [_plain(values[bounds[place] : bounds[place + 1]]) for place in places]

    def _is_shared(self, part: Part) -> bool:
        """Whether one file has the values of all examples."""
        return part.pointer is not None or (part.files is not None and not part.files.captures)

    def _room(self, part: Part) -> bool:
        """Whether a part has a value for each token."""
        return part.table == "tokens" or "token" in part.axes

    def _is_per_row(self, part: Part, shape: Sequence[int], first: int, count: int) -> bool:
        """Whether an array of a part has a value for each row of the ``count`` examples of a unit."""
        if part.axes:
            return "row" in part.axes
        if "row" not in self.description.activations.axes or len(shape) == 0:
            return False
        return bool(shape[0] == self._rows(first, count) != count)


def _plain(value: Any) -> Any:
    """Converts values to types that Arrow accepts."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "V" or str(value.dtype) in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            value = value.astype(np.float32)
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, StoredArray):
        raise FormatError("expected a value, found a list of tensors")
    if isinstance(value, dict):
        return {utf8(str(key)): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(entry) for entry in value]
    return utf8(value) if isinstance(value, str) else value
