"""Finds the rows of a described folder: a file and an offset for each layer and example.

Files are matched, parsed in parallel, and assigned axes. Rows with contiguous elements are read in place, with any row stride and
offset. Others (compressed, or not contiguous) are decoded by the core, once per array.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard._native import StoredArray
from actshard.base._arguments import stored
from actshard.base.errors import FormatError, UnsupportedError
from actshard.base.location import Location
from actshard.formats.contents import NOTHING_ABSENT, OF_A_FILE, Absence
from actshard.formats.layout_toml.description import Description, Name, Part, Pattern
from actshard.formats.layout_toml.files import (
    OpenedFile,
    ShardedFile,
    lines_of,
    matches,
    missing,
    open_files,
)
from actshard.formats.layout_toml.geometry import (
    Axis,
    EvenNumbers,
    Geometry,
    Numbers,
    array_of,
    geometry,
    integers,
    repeated,
    span_of,
    weighted,
)
from actshard.formats.layout_toml.scaling import Scaled, Scaler
from actshard.formats.layout_toml.tensors import array_at, dim_last, fill, layer_keys, listable, matching_keys
from actshard.formats.layout_toml.units import Lengths, Unit, by_capture, key_of, units_of

_ALONE: tuple[Name, ...] = (0,)


@dataclass(frozen=True)
class RowFile:
    """A file with rows, as the core opens it: row stride in bytes, and the array to decode, if it is not read in place."""

    path: int
    step: int
    swapped: bool
    gzipped: bool
    decoded: StoredArray | None
    scaled: Scaled | None = None
    """Codes and scales, if rows are their products. Offsets then count bytes of the products."""


@dataclass
class RowIndex:
    """The rows of all examples.

    Attributes:
        numbers, starts: row file and offset of the first row, by layer and example, flattened.
        tokens: rows per example.
        skipped: leading tokens of each example that are padding, for columns.
        positions: position of each example in its unit.
        ids: the captured example, or its position.
        even: row file, first offset and bytes between examples, by layer, if all examples are at equal distances in one unit.
            Then ``numbers`` and ``starts`` are empty, and ``tokens`` and ``skipped`` repeat one value.
    """

    layers: tuple[Name, ...]
    d_model: int
    dtype: str
    units: list[Unit]
    paths: list[Location]
    row_files: list[RowFile]
    numbers: NDArray[np.uint32]
    starts: NDArray[np.uint64]
    tokens: NDArray[np.uint32]
    skipped: NDArray[np.int64]
    positions: Sequence[int] | NDArray[np.int64]
    ids: Sequence[Name]
    numbered: bool
    """Whether ``ids`` come from file names."""
    selection: NDArray[np.int64] | None = None
    """Positions of the selected examples among the examples of all units; None: all."""
    opened: dict[Location, OpenedFile] = field(default_factory=dict)
    wholes: list[Unit] | None = None
    """If files have an array for each example: a unit for each file. ``units`` are then the examples."""
    even: tuple[tuple[int, int, int], ...] | None = None
    absence: Absence = NOTHING_ABSENT


def spread(index: RowIndex) -> RowIndex:
    """The same index with a row file and an offset for each example."""
    if index.even is None:
        return index
    n = len(index.tokens)
    places = UnitPlaces(
        [file for file, _, _ in index.even],
        [EvenNumbers(first, step, n) for _, first, step in index.even],
        index.tokens,
        index.skipped,
    )
    return replace(index, numbers=places.numbers_each(), starts=places.starts_each(), even=None)


def _counts(tokens: NDArray[np.int64], path: Location) -> NDArray[np.uint32]:
    """Rows per example, as the core takes them. A repeated number stays one in memory."""
    is_repeated = len(tokens) > 0 and tokens.strides[0] == 0
    values = tokens[:1] if is_repeated else tokens
    if values.size and int(values.max()) >> 32:
        raise UnsupportedError(f"expected fewer than 2^32 tokens per example, found {values.max()}", path=path)
    return np.broadcast_to(values.astype(np.uint32), len(tokens)) if is_repeated else tokens.astype(np.uint32)


@dataclass
class UnitPlaces:
    """The examples of a unit: a row file and offsets for each layer, rows of each example, and leading padding."""

    numbers: list[int]
    starts: list[Numbers]
    tokens: NDArray[np.uint32]
    skipped: NDArray[np.int64]
    absent: NDArray[np.bool_] = field(init=False)
    """Flags of examples that are left out."""

    def __post_init__(self) -> None:
        self.absent = np.broadcast_to(np.False_, len(self.tokens))

    @classmethod
    def nothing(cls, layers: int, count: int) -> UnitPlaces:
        """The places of examples that are left out."""
        places = cls([0] * layers, [EvenNumbers(0, 0, count)] * layers, np.zeros(count, np.uint32), repeated(0, count))
        places.absent = np.ones(count, np.bool_)
        return places

    def numbers_each(self) -> NDArray[np.uint32]:
        """The row file by layer and example."""
        return np.repeat(np.array(self.numbers, np.uint32)[:, None], len(self.tokens), axis=1)

    def starts_each(self) -> NDArray[np.uint64]:
        """The offset by layer and example."""
        return np.stack([array_of(starts) for starts in self.starts]).astype(np.uint64)

    def even(self) -> tuple[tuple[int, int, int], ...] | None:
        """File, first offset and distance of each layer; None if distances or numbers of rows differ."""
        if len(self.tokens) == 0 or self.tokens.strides[0]:
            return None
        even = [starts for starts in self.starts if isinstance(starts, EvenNumbers)]
        if len(even) != len(self.starts):
            return None
        return tuple((n, starts.first, starts.step) for n, starts in zip(self.numbers, even, strict=True))


class Finder:
    """Builds an :class:`RowIndex`. With ``skips_incomplete``, examples whose files are not whole have no tokens."""

    def __init__(
        self,
        root: Location,
        description: Description,
        limit: int,
        units: list[Unit],
        *,
        skips_incomplete: bool = False,
    ) -> None:
        self.root, self.description, self.limit = root, description, limit
        self.skips_incomplete = skips_incomplete
        self.part = description.activations
        self.units = units
        self.after = ""
        self.paths = [path for unit in self.units for path in unit.files]
        self.place = {path: n for n, path in enumerate(self.paths)}
        self.opened = self._open()
        self.faulty = [unit for unit in self.units if unit.fault is not None]
        """Units that are not read, in order."""
        self._check_any_whole()
        if self.part.step_of("example") is not None and self.faulty:
            self._cut()  # the numbers of examples in a file that cannot be read are not known
        for unit in [unit for unit in self.units if unit.fault is None]:
            for layer, others in unit.shards.items():
                first = unit.paths[layer]
                self.opened[first] = ShardedFile([self.opened[path] for path in (first, *others)])
        self.wholes = None if self.part.step_of("example") is None else self.units
        if self.wholes is not None:
            self.units = [example for unit in self.wholes for example in self._examples(unit)]
        self.lengths = Lengths(root, description)
        self.row_files: dict[Any, int] = {}
        self.made_files: list[RowFile] = []
        self.decoded_arrays: list[StoredArray] = []
        """Arrays whose identities are keys of row_files: kept, so that no other array gets the identity of one of them."""
        self.d_model = 0
        self.dtype = ""
        self.length_files = self._files_by_capture(description.lengths)
        self.token_files = self._files_by_capture(description.tokens)
        self.scale_files = self._files_by_capture(description.scales)
        self.scaler = None if description.scales is None else Scaler(root, description, description.scales, limit)
        self.scale_opened: dict[Location, OpenedFile] = {}

    def _open(self) -> dict[Location, OpenedFile]:
        """The parsed files. Those of units with a fault are left out."""
        whole_paths = [path for unit in self.units if unit.fault is None for path in unit.files]
        try:
            return dict(zip(whole_paths, open_files(whole_paths, self.part, self.limit), strict=True))
        except OF_A_FILE:
            if not self.skips_incomplete:
                raise
        opened: dict[Location, OpenedFile] = {}
        for unit in [unit for unit in self.units if unit.fault is None]:
            for is_partial in (False, True):
                try:
                    files = open_files(unit.files, self.part, self.limit, is_partial=is_partial)
                except OF_A_FILE as error:
                    error.path = error.path or unit.any.place
                    unit.fault = unit.fault or error
                else:
                    opened |= zip(unit.files, files, strict=True)
                    unit.is_partial, unit.fault = is_partial, None
                    break
        return opened

    def _check_any_whole(self) -> None:
        """Raises the first fault if all units have one."""
        if self.faulty and all(unit.fault is not None for unit in self.units):
            assert self.faulty[0].fault is not None
            raise self.faulty[0].fault

    def _cut(self) -> None:
        """Leaves out the first unit with a fault and all after it: the numbers of their examples are not known."""
        first = next(n for n, unit in enumerate(self.units) if unit.fault is not None)
        lost, self.units = self.units[first:], self.units[:first]
        if not self.units:
            assert lost[0].fault is not None
            raise lost[0].fault
        name = lost[0].any.relative_to(self.root)
        self.after = f"{len(lost)} of {first + len(lost)} groups of files are left out, from {name} on"
        self.faulty = lost

    def _files_by_capture(self, part: Part | None) -> dict[str, Location]:
        if part is None or part.files is None or not part.files.captures:
            return {}
        return by_capture(self.root, part.files)

    # -- layers ----------------------------------------------------------------------------------

    def _examples(self, unit: Unit) -> list[Unit]:
        """A unit for each example of a file: numbers in their order, other names in that of the file."""
        at = self.part.step_of("example")
        assert at is not None
        file = self.opened[unit.any]
        layer = next(iter(unit.paths))
        steps = fill(self.part.tensor[: at + 1], unit.captured if layer is None else unit.captured | {"layer": layer})
        if any(isinstance(step, str) and "{layer" in step for step in steps[:at]):
            steps = [*next(iter(layer_keys(file, steps[:at], unit.captured).values())), steps[at]]
        text = str(steps[at])
        units: dict[Name, Unit] = {}
        for values, key in matching_keys(file, listable(file, steps[:at]), text):
            start, end = Pattern.of(text).span(key, "example")
            captured = unit.captured | {"example": values["example"]}
            units.setdefault(
                values["example"], Unit(captured, unit.paths, unit.shards, keys={"example": key[start:end]})
            )
        is_of_numbers = all(isinstance(name, int) for name in units)
        return [units[name] for name in (sorted(units, key=int) if is_of_numbers else units)]

    def layers(self) -> tuple[Name, ...]:
        """Names of layers: captured, given, or counted along an axis."""
        layer_names = self.description.layers
        first = next(unit for unit in self.units if unit.fault is None)
        if None not in first.paths:
            return self._choose_layers(tuple(layer for layer in first.paths if layer is not None), layer_names)
        file = self.opened[first.any]
        if any(isinstance(step, str) and "{layer" in step for step in self.part.tensor):
            return self._choose_layers(
                tuple(layer_keys(file, self.part.tensor, first.captured | first.keys)), layer_names
            )
        names = [name for axis in self.part.axes for name in axis.split("*")]
        if "layer" not in names:
            if len(layer_names) > 1:
                raise FormatError(
                    f"layers: expected one name, because the files do not distinguish layers, found {len(layer_names)}",
                    path=self.root,
                )
            return layer_names or _ALONE
        if layer_names:
            return layer_names
        if "layer" in self.part.axes:
            value = array_at(file, self.part, first.fill(self.part.tensor))
            if len(value.shape) == len(self.part.axes):
                return tuple(range(value.shape[self.part.axes.index("layer")]))
        raise FormatError("layers: expected the names along the axis with 'layer', found none", path=self.root)

    def _choose_layers(self, captured: tuple[Name, ...], layer_names: tuple[Name, ...]) -> tuple[Name, ...]:
        if not layer_names:
            return captured
        if set(layer_names) <= set(captured):
            return layer_names
        raise FormatError(
            f"layers: expected some of {list(captured)}, captured from names, found {list(layer_names)}", path=self.root
        )

    # -- arrays ----------------------------------------------------------------------------------

    def scaled(self, unit: Unit, file: OpenedFile, array: StoredArray, layer: Name) -> Scaled | None:
        """The array of a layer with its scales, if the description names scales."""
        part = self.description.scales
        if part is None or self.scaler is None:
            return None
        scales_file = file
        captured = unit.captured | unit.keys | ({} if None in unit.paths else {"layer": layer})
        if part.files is not None:
            path = self._scale_file(part.files, captured)
            if path is None:
                raise missing(file.path, f"a file {part.files.text!r} with its scales")
            if path not in self.scale_opened:
                (self.scale_opened[path],) = open_files([path], part, self.limit)
            scales_file = self.scale_opened[path]
        steps = fill(part.tensor, captured)
        if any(isinstance(step, str) and "{layer" in step for step in steps):
            keys = layer_keys(scales_file, part.tensor, captured)
            if layer not in keys:
                raise self.scaler.error(f"expected scales of layer {layer!r}, found {list(keys)}", scales_file.path)
            steps = keys[layer]
        try:
            scales = scales_file.find(steps)
        except FormatError as error:
            raise self.scaler.error(error.detail, scales_file.path) from error
        return self.scaler.joined(file, array, scales_file, scales)

    def _scale_file(self, pattern: Pattern, captured: Mapping[str, Name]) -> Location | None:
        if not pattern.captures:
            return self.root.joinpath(*pattern.text.split("/"))
        if "layer" not in pattern.captures:
            return self.scale_files.get(key_of(captured, pattern))
        scale_captures = {name: captured.get(name) for name in pattern.captures}
        return next((path for values, path in matches(self.root, pattern) if values == scale_captures), None)

    def factors(self, unit: Unit, layers: int) -> dict[str, int]:
        """Known sizes of axes: layers, and examples and tokens if they share an axis."""
        factors = {"layer": layers}
        if any("example" in axis.split("*") and "token" in axis.split("*") for axis in self.part.axes):
            tokens = self.description.tokens
            if tokens is None:
                raise FormatError("axes: 'example*token' needs [tokens], whose shape determines both", path=self.root)
            file, token_ids = self.unit_value(unit, tokens, self.token_files)
            shape = list(token_ids.shape) if isinstance(token_ids, StoredArray) else list(np.shape(token_ids))
            if len(shape) != 2:
                raise FormatError(f"tokens: expected (examples, tokens), found the shape {shape}", path=file.path)
            factors |= {"example": shape[0], "token": shape[1]}
        return factors

    def unit_value(self, unit: Unit, part: Part, paths_by_capture: Mapping[str, Location]) -> tuple[OpenedFile, Any]:
        """The file and the value of a part for one unit."""
        if part.files is None:
            file = self.opened[unit.any]
        else:
            path = (
                paths_by_capture.get(key_of(unit.captured, part.files))
                if part.files.captures
                else self.root / part.files.text
            )
            if path is None:
                raise missing(unit.any, f"a file {part.files.text!r} of {part.table}")
            (file,) = open_files([path], part, self.limit)
        file = file.holding(unit.fill(part.tensor))
        return file, file.find(unit.fill(part.tensor))

    def placed(
        self, file: OpenedFile, array: StoredArray, factors: Mapping[str, int], scaled: Scaled | None = None
    ) -> tuple[Geometry, int, int, str]:
        """The axes of an array, its row file, the offset of its first byte, and the name of the axis of rows."""
        axes = self.part.axes

        def assigned(strides: Sequence[int]) -> Geometry:
            return geometry(axes, array.shape, strides, self.description.select, factors, file.path)

        array_geometry = assigned(array.strides)
        dtype = array.dtype if scaled is None else "BF16"
        item = stored(dtype).itemsize
        dim = array_geometry.axes["dim"]
        if not self.d_model:
            self.d_model, self.dtype = dim.count, dtype
        if dim.count != self.d_model or dtype != self.dtype:
            raise FormatError(
                f"expected rows of {self.d_model} {self.dtype} as in {self.paths[0].name}, found {dim.count} {dtype}",
                path=file.path,
            )
        row = dim.count * item
        along = "row" if "row" in array_geometry.axes else "token"
        axis = array_geometry.get(along) or Axis(1, dim.count)

        def step_of(axis: Axis) -> int:
            return axis.stride * item if axis.count > 1 else row

        if scaled is not None:
            if (dim.stride != 1 and dim.count > 1) or step_of(axis) < row:
                raise UnsupportedError(f"axes {list(self.part.axes)}: expected 'dim' as the last axis", path=file.path)
            self.made_files.append(RowFile(self.place[file.path], step_of(axis), False, False, None, scaled))
            return array_geometry, len(self.made_files) - 1, array_geometry.first * item, along
        is_decoded = (
            (dim.stride != 1 and dim.count > 1) or step_of(axis) < row or array.deflated is not None or array.is_chunked
        )
        key_array = array
        if is_decoded:
            axes, array = dim_last(axes, array)
        decoded = array if is_decoded else None
        first = array.offset
        if is_decoded:
            dense = [1] * len(array.shape)
            for n in range(len(dense) - 2, -1, -1):
                dense[n] = dense[n + 1] * max(array.shape[n + 1], 1)
            array_geometry = assigned(dense)
            axis = array_geometry.get(along) or Axis(1, dim.count)
            if array_geometry.axes["dim"].stride != 1 and dim.count > 1:
                raise UnsupportedError(f"axes {list(self.part.axes)}: expected 'dim' as the last axis", path=file.path)
            first = 0
        step = step_of(axis)
        key = (file.path, step, array.swapped and not is_decoded, id(key_array) if is_decoded else None)
        if key not in self.row_files:
            self.row_files[key] = len(self.made_files)
            self.decoded_arrays.append(key_array)
            self.made_files.append(
                RowFile(self.place[file.path], step, array.swapped and not is_decoded, file.gzipped, decoded)
            )
        return array_geometry, self.row_files[key], first + array_geometry.first * item, along

    # -- examples --------------------------------------------------------------------------------

    def build(self) -> RowIndex:
        """Finds all rows."""
        layers = self.layers()
        unit_places = self._all_places(layers)
        total = 0
        for unit, places in zip(self.units, unit_places, strict=True):
            unit.first, unit.count = total, len(places.tokens)
            total += unit.count
        absent = np.concatenate([places.absent for places in unit_places])
        shared_lengths = self.lengths.whole
        if (
            shared_lengths is not None
            and not self.after
            and self.lengths.is_shared()
            and self.lengths.used not in (0, len(shared_lengths))
        ):
            raise FormatError(
                f"lengths: expected {self.lengths.used} for all files together, found {len(shared_lengths)}",
                path=self.root,
            )

        positions, ids, numbered = examples_of(self.units)
        even = unit_places[0].even() if len(unit_places) == 1 and not absent.any() else None
        return RowIndex(
            layers=layers,
            d_model=self.d_model,
            dtype=self.dtype,
            units=self.units,
            paths=self.paths,
            row_files=self.made_files,
            numbers=np.zeros((len(layers), 0), np.uint32)
            if even
            else np.concatenate([places.numbers_each() for places in unit_places], 1),
            starts=np.zeros((len(layers), 0), np.uint64)
            if even
            else np.concatenate([places.starts_each() for places in unit_places], 1),
            tokens=unit_places[0].tokens if even else np.concatenate([places.tokens for places in unit_places]),
            skipped=unit_places[0].skipped if even else np.concatenate([places.skipped for places in unit_places]),
            positions=positions,
            ids=ids,
            numbered=numbered,
            opened=self.opened,
            wholes=self._count_wholes(),
            even=even,
            absence=self._absence(absent),
        )

    def _absence(self, absent: NDArray[np.bool_]) -> Absence:
        """What is left out."""
        if not self.skips_incomplete:
            return NOTHING_ABSENT
        broken = [*self.faulty, *(unit for unit in self.units if unit.is_partial)]
        faults = [(unit.any.relative_to(self.root), unit.fault) for unit in broken]
        return Absence(
            absent,
            tuple(path.place for unit in broken for path in unit.files),
            self.after,
            tuple(f"{name}: {'is truncated' if fault is None else fault.detail}" for name, fault in faults),
        )

    def _all_places(self, layers: tuple[Name, ...]) -> list[UnitPlaces]:
        """The places of all units. Examples of units with a fault have no tokens."""
        places: list[UnitPlaces | None] = []
        for unit in self.units:
            places.append(None if unit.fault is not None else self._places(unit, layers))
            if unit.fault is not None and self.lengths.is_shared():
                self.lengths.used += self._num_examples_of([place for place in places if place is not None])
        self.faulty = [unit for unit in self.units if unit.fault is not None] or self.faulty
        self._check_any_whole()
        counts = [len(place.tokens) for place in places if place is not None]
        last = max(n for n, place in enumerate(places) if place is not None)
        is_known = self._is_one_example or (len(set(counts[:-1])) == 1 and None not in places[last:])
        if None in places and not is_known:
            self._cut()
            places = places[: len(self.units)]
        count = 1 if self._is_one_example else counts[0]
        return [UnitPlaces.nothing(len(layers), count) if place is None else place for place in places]

    @property
    def _is_one_example(self) -> bool:
        """Whether each unit is one example."""
        names = [name for axis in self.part.axes for name in axis.split("*")]
        return "example" not in names and "row" not in names

    def _num_examples_of(self, places: Sequence[UnitPlaces]) -> int:
        """The number of examples of a unit that is not read, whose lengths are in one list with those of the others."""
        if self._is_one_example:
            return 1
        if not places:
            raise FormatError(
                "lengths: expected the first file to be whole, to know which lengths are its own", path=self.root
            )
        return len(places[0].tokens)

    def _places(self, unit: Unit, layers: tuple[Name, ...]) -> UnitPlaces | None:
        """The places of a unit; None if it has a fault that leaves it out."""
        try:
            places = self._unit(unit, layers)
        except OF_A_FILE as error:
            if not self.skips_incomplete:
                raise
            unit.fault = error
            return None
        if unit.is_partial:
            places.absent = self._beyond_end(places)
            places.tokens = np.where(places.absent, np.uint32(0), places.tokens)
        return places

    def _beyond_end(self, places: UnitPlaces) -> NDArray[np.bool_]:
        """Flags of examples with rows after the end of their file. Files that are decoded whole have none before it."""
        absent = np.zeros(len(places.tokens), np.bool_)
        tokens, row = places.tokens.astype(np.int64), self.d_model * stored(self.dtype).itemsize
        for number, starts in zip(places.numbers, places.starts, strict=True):
            file = self.made_files[number]
            is_in_place = file.decoded is None and file.scaled is None
            size = self.paths[file.path].regular("read").size if is_in_place else 0
            absent |= (tokens > 0) & (array_of(starts) + (tokens - 1) * file.step + row > size)
        return absent

    def _count_wholes(self) -> list[Unit] | None:
        """Numbers the examples of files that have an array for each."""
        if self.wholes is None:
            return None
        counts = collections.Counter(id(unit.paths) for unit in self.units)
        first = 0
        for whole in self.wholes:
            whole.first, whole.count = first, counts[id(whole.paths)]
            first += whole.count
        return self.wholes

    def _arrays(self, unit: Unit, layers: tuple[Name, ...]) -> Iterator[tuple[OpenedFile, StoredArray, int | None]]:
        """For each layer: its file, its array, and its position along an axis of layers, if there is one."""
        if None not in unit.paths:
            for layer in layers:
                steps = fill(self.part.tensor, unit.captured | unit.keys | {"layer": layer})
                file = self.opened[unit.paths[layer]].holding(steps)
                yield file, array_at(file, self.part, steps), None
            return
        file = self.opened[unit.any]
        if any(isinstance(step, str) and "{layer" in step for step in self.part.tensor):
            keys = layer_keys(file, self.part.tensor, unit.captured | unit.keys)
            for layer in layers:
                if layer not in keys:
                    raise FormatError(f"expected layer {layer!r} as in other files, found {list(keys)}", path=file.path)
                holder = file.holding(keys[layer])
                yield holder, array_at(holder, self.part, keys[layer]), None
            return
        file = file.holding(unit.fill(self.part.tensor))
        array = array_at(file, self.part, unit.fill(self.part.tensor))
        has_axis = any("layer" in axis.split("*") for axis in self.part.axes)
        for position in range(len(layers)):
            yield file, array, position if has_axis else None

    def _unit(self, unit: Unit, layers: tuple[Name, ...]) -> UnitPlaces:
        factors = self.factors(unit, len(layers))
        item = 0
        numbers, starts = [], []
        spans: tuple[Numbers, Numbers, NDArray[np.int64]] | None = None
        shape: tuple[int, ...] | None = None
        before: tuple[StoredArray, tuple[Geometry, int, int, str]] | None = None
        for layer_name, (file, array, position) in zip(layers, self._arrays(unit, layers), strict=True):
            if position is not None and before is not None and before[0] is array:
                placement = before[1]  # layers are an axis of one array
            else:
                placement = self.placed(file, array, factors, self.scaled(unit, file, array, layer_name))
            before = (array, placement)
            array_geometry, number, first, along = placement
            item = stored(self.dtype).itemsize
            counts = tuple(
                (name, array_geometry.axes[name].count)
                for name in ("example", "token", "row")
                if name in array_geometry.axes
            )
            if spans is None:
                spans = self._spans(unit, array_geometry, along)
                shape = tuple(n for _, n in counts)
            elif shape != tuple(n for _, n in counts):
                raise FormatError(
                    f"expected the same examples and tokens in each layer, found {dict(counts)}", path=file.path
                )
            examples, skipped, _ = spans
            layer = array_geometry.get("layer")
            if position is not None and layer is not None:
                if layer.count != len(layers):
                    raise FormatError(f"expected {len(layers)} layers, found {layer.count}", path=file.path)
                first += position * layer.stride * item
            example, rows = array_geometry.get("example") or Axis(1, 0), array_geometry.get(along) or Axis(1, 0)
            starts.append(weighted(first, (examples, example.stride * item), (skipped, rows.stride * item)))
            numbers.append(number)
        assert spans is not None
        _, skipped, tokens = spans
        if "row" in self.part.axes or isinstance(skipped, EvenNumbers):  # even examples are not padded
            skipped = repeated(0, len(tokens))
        return UnitPlaces(numbers, starts, _counts(tokens, unit.any), skipped)

    def _spans(self, unit: Unit, array_geometry: Geometry, along: str) -> tuple[Numbers, Numbers, NDArray[np.int64]]:
        """For each example of a unit: position along the axis of examples, first row, and number of rows."""
        values = self.lengths.of(unit, self.opened.get(unit.any), self.length_files)
        path = unit.any
        rows = array_geometry.get(along)
        room = rows.count if rows is not None else 1
        if along == "row":
            firsts, counts = self._row_spans(values, room, path)
            return EvenNumbers(0, 0, len(counts)), firsts, counts
        examples = array_geometry.axes["example"].count if "example" in array_geometry.axes else 1
        positions = EvenNumbers(0, 1, examples)
        if values is None:
            return positions, EvenNumbers(0, 0, examples), repeated(room, examples)
        part = self.description.lengths
        assert part is not None
        if part.kind == "mask":
            mask = values.reshape(1, -1) if values.ndim == 1 else values
            mask = self._share(mask, examples)
            if mask.shape != (examples, room):
                raise FormatError(f"lengths: expected a mask of {(examples, room)}, found {mask.shape}", path=path)
            firsts, counts = span_of(mask, path)
            return positions, firsts, counts
        if part.kind != "lengths":
            raise FormatError(f"lengths: kind {part.kind!r} needs the axis 'row'", path=path)
        lengths = integers(np.atleast_1d(values).reshape(-1), "lengths", path)
        numbers = self._committed()
        if numbers is not None and len(lengths) == len(numbers) and len(lengths) != examples:
            if numbers and max(numbers) >= examples:
                raise FormatError(f"expected examples below {examples}, found {max(numbers)}", path=path)
            spread = np.zeros(examples, np.int64)
            spread[numbers] = lengths
            lengths = spread
        lengths = self._share(lengths, examples)
        if len(lengths) != examples:
            raise FormatError(f"lengths: expected {examples}, found {len(lengths)}", path=path)
        over = np.flatnonzero(lengths > room)
        if len(over):
            raise FormatError(
                f"lengths: expected at most {room} tokens, found {lengths[over[0]]} for example {over[0]}", path=path
            )
        return positions, self._padding_before(part, room, lengths), lengths

    @staticmethod
    def _padding_before(part: Part, room: int, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return room - lengths if part.pad == "left" else np.zeros_like(lengths)

    def _share(self, values: NDArray[Any], examples: int) -> NDArray[Any]:
        """Returns the next values of a list shared by all units, for one unit."""
        if not self.lengths.is_shared() or len(self.units) == 1:
            return values
        first = self.lengths.used
        self.lengths.used += examples
        return values[first : first + examples]

    def _committed(self) -> list[int] | None:
        for column in self.description.columns:
            if column.commit:
                assert column.files is not None
                lines = lines_of(self.root / column.files.text)
                return [line_number(line, column, self.root) for line in lines]
        return None

    def _row_spans(self, values: NDArray[Any] | None, rows: int, path: Location) -> tuple[Numbers, NDArray[np.int64]]:
        """First row and number of rows of each example, for consecutive examples."""
        if values is None:
            return EvenNumbers(0, 1, rows), repeated(1, rows)
        part = self.description.lengths
        assert part is not None
        if len(self.units) > 1 and self.lengths.is_shared():
            raise UnsupportedError("lengths: one list for the rows of several files is unsupported", path=path)
        if part.kind == "mask":
            raise FormatError("lengths: a mask needs the axis 'token'", path=path)
        numbers = integers(np.atleast_1d(values).reshape(-1), "lengths", path)
        if part.kind == "lengths":
            bounds = np.concatenate([[0], np.cumsum(numbers)])
        else:
            bounds = np.append(numbers, rows) if part.kind == "starts" else numbers
        if len(bounds) == 0 or np.any(np.diff(bounds) < 0):
            raise FormatError(f"lengths: expected {part.kind} in ascending order", path=path)
        if bounds[-1] > rows or (part.kind != "starts" and bounds[-1] != rows):
            raise FormatError(f"lengths: expected {rows} rows, found {bounds[-1]}", path=path)
        return bounds[:-1], np.diff(bounds)


def line_number(line: Mapping[str, Any], part: Part, root: Location) -> int:
    """The example's number in a line."""
    value = line.get(part.by)
    if type(value) is not int or value < 0:
        raise FormatError(f"columns: field {part.by!r}: expected an example's number, found {value!r:.40}", path=root)
    return value


def examples_of(units: Sequence[Unit]) -> tuple[Sequence[int] | NDArray[np.int64], Sequence[Name], bool]:
    """Positions of all examples in their units, their names, and whether the names come from file names."""
    if len(units) == 1 and "example" not in units[0].captured:
        return range(units[0].count), range(units[0].count), False
    counts = np.array([unit.count for unit in units], np.int64)
    positions = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    if "example" not in units[0].captured:
        return positions, list(range(len(positions))), False
    return positions, [unit.captured["example"] for unit in units for _ in range(unit.count)], True


def build(
    root: Location,
    description: Description,
    limit: int,
    units: list[Unit] | None = None,
    *,
    skips_incomplete: bool = False,
) -> RowIndex:
    """Finds the rows of a described folder. If the description has a column with ``commit``, keeps only examples with a line.

    Args:
        root: the folder.
        description: its description.
        limit: memory for decoded files, in bytes.
        units: the result of :func:`units_of`, if it is known.
        skips_incomplete: whether examples whose files are not whole have no tokens.
    """
    units = units_of(root, description, skips_incomplete=skips_incomplete) if units is None else units
    finder = Finder(root, description, limit, units, skips_incomplete=skips_incomplete)
    index = finder.build()
    numbers = finder._committed()
    if numbers is None:
        return index
    return chosen(index, set(numbers))


def chosen(index: RowIndex, numbers: set[int]) -> RowIndex:
    """The examples with these numbers."""
    keep = np.flatnonzero([example in numbers for example in index.ids])
    index = spread(index)
    return replace(
        index,
        numbers=np.ascontiguousarray(index.numbers[:, keep]),
        starts=np.ascontiguousarray(index.starts[:, keep]),
        tokens=index.tokens[keep],
        skipped=index.skipped[keep],
        positions=np.asarray(index.positions)[keep],
        ids=[index.ids[n] for n in keep.tolist()],
        selection=keep.astype(np.int64),
        absence=replace(
            index.absence, examples=index.absence.examples[keep] if index.absence.examples.size else keep[:0] > 0
        ),
    )
