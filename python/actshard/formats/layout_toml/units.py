"""Units of a described folder: the files of a batch, an example or the dataset, and the values that are stored with each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.errors import ActshardError, FormatError, MissingFileError
from actshard.base.location import Location
from actshard.formats.kept import Listing
from actshard.formats.layout_toml.description import Description, DescriptionReader, Name, Part, Pattern
from actshard.formats.layout_toml.files import (
    OpenedFile,
    absent_files,
    array_files,
    is_lines,
    is_shard_index,
    lines_of,
    matches,
    missing,
    open_files,
    order_of,
    viewed,
)
from actshard.formats.layout_toml.tensors import fill


@dataclass
class Unit:
    """The files of one batch or example, or of the dataset: one file, or one per layer."""

    captured: dict[str, Name]
    paths: dict[Name | None, Location]
    """Files by layer; None if file names do not contain the layer. The first shard, if there are several."""
    shards: dict[Name | None, list[Location]] = field(default_factory=dict)
    """The other shards."""
    keys: dict[str, str] = field(default_factory=dict)
    """Captures of keys in the file, as they stand there."""
    first: int = 0
    """Number of its first example."""
    count: int = 0
    fault: ActshardError | None = None
    """Why its examples are left out, if examples that are not whole are."""
    is_partial: bool = False
    """Whether a file of it ends before its array."""

    @property
    def any(self) -> Location:
        """The file that contains lengths, tokens and columns."""
        return next(iter(self.paths.values()))

    @property
    def files(self) -> list[Location]:
        """All files."""
        return [path for layer, first in self.paths.items() for path in (first, *self.shards.get(layer, ()))]

    def fill(self, steps: Sequence[Name]) -> list[Name]:
        """Steps with the captured values in braces."""
        return fill(steps, self.captured | self.keys)


def units_of(
    root: Location, description: Description, listing: Listing | None = None, *, skips_incomplete: bool = False
) -> list[Unit]:
    """Matches files and groups them into units, in order. Every unit has the same layers.

    With ``skips_incomplete``, units that lack a file, and numbers between others that have none, have a fault.
    """
    pattern = description.activations.files
    assert pattern is not None  # checked when the description was read
    files = array_files(root, pattern, listing)
    if not files:
        raise MissingFileError(f"expected files named {pattern.text!r}, found none", path=root)
    units_by_key: dict[tuple[Name | None, Name | None], Unit] = {}  # in the order of the files
    for captured, path in files:
        layer = captured.pop("layer", None)
        captured.pop("_", None)
        key = (captured.get("batch"), captured.get("example"))
        unit = units_by_key.setdefault(key, Unit(captured, {}))
        if layer in unit.paths:
            unit.shards.setdefault(layer, []).append(path)
        else:
            unit.paths[layer] = path
    units = list(units_by_key.values())
    if skips_incomplete and not is_shard_index(pattern.text):
        units = _with_absent(root, pattern, units)
    layers = sorted({layer for unit in units for layer in unit.paths}, key=lambda n: (isinstance(n, str), n))
    for unit in units:
        for layer in layers:
            if layer not in unit.paths:
                name = ", ".join(f"{k} {v}" for k, v in unit.captured.items()) or "the dataset"
                unit.fault = unit.fault or MissingFileError(f"{name} has no file of layer {layer!r}", path=unit.any)
                if not skips_incomplete:
                    raise unit.fault
        if len(layers) > 1:
            unit.paths = {layer: unit.paths[layer] for layer in layers if layer in unit.paths}
    return units


def _with_absent(root: Location, pattern: Pattern, units: Sequence[Unit]) -> list[Unit]:
    """The units, and one with a fault for each number between them that has no file."""
    absent = []
    for captured, path in absent_files(root, pattern, ((unit.captured, unit.any) for unit in units)):
        layer = captured.pop("layer", None)
        captured.pop("_", None)
        fault = MissingFileError("expected a file of this number, found none", path=path)
        absent.append(Unit(captured, {layer: path}, fault=fault))
    return sorted([*units, *absent], key=lambda unit: order_of(unit.captured))


class Lengths:
    """The number of tokens of each example, and of padding before them."""

    def __init__(self, root: Location, description: Description) -> None:
        self.part = description.lengths
        self.root = root
        self.description = description
        self.whole: NDArray[Any] | None = None
        self.used = 0
        self.committed: list[int] | None = None

    def is_shared(self) -> bool:
        """Whether one file contains the lengths of all units."""
        part = self.part
        return part is not None and (part.pointer is not None or (part.files is not None and not part.files.captures))

    def of(
        self, unit: Unit, opened: OpenedFile | None, paths_by_capture: Mapping[str, Location]
    ) -> NDArray[Any] | None:
        """The stored array for a unit: lengths, masks, offsets or starts; None: shapes determine the lengths."""
        part = self.part
        if part is None:
            return None
        if self.is_shared():
            if self.whole is None:
                self.whole = read_part(self.root, self.description, part)
            return self.whole
        if part.files is None:
            assert opened is not None
            file = opened.holding(unit.fill(part.tensor))
            return file.array(file.find(unit.fill(part.tensor)))
        path = paths_by_capture.get(key_of(unit.captured, part.files))
        if path is None:
            raise missing(unit.any, f"a file {part.files.text!r} with its lengths")
        (file,) = open_files([path], part)
        return viewed(file, file.find(unit.fill(part.tensor)), part)


def key_of(captured: Mapping[str, Name], pattern: Pattern) -> str:
    """The captures of a pattern without the layer: of all files of an example or a batch."""
    return "\0".join(f"{name}={captured.get(name)!r}" for name in sorted(pattern.captures) if name != "layer")


def by_capture(root: Location, pattern: Pattern) -> dict[str, Location]:
    """Files of a pattern by their captures."""
    return {key_of(captured, pattern): path for captured, path in matches(root, pattern)}


def read_part(root: Location, description: Description, part: Part) -> NDArray[Any]:
    """The array of a part in one file: a value of a JSON file, a field of lines, or an array."""
    if part.pointer is not None:
        reader = DescriptionReader(root, description.source, description.text)
        value = reader.follow(*part.pointer, lambda text: reader.error(part.table, "file", text))
        array = np.asarray(value)
        if array.dtype == object:
            raise FormatError(f"{part.table}: expected a list of equal items", path=root / part.pointer[0])
        return array
    assert part.files is not None
    path = root.joinpath(*part.files.text.split("/"))
    if is_lines(path.name):
        if len(part.tensor) != 1:
            raise FormatError(f"{part.table}: expected 'tensor', the field of the lines", path=path)
        lines = lines_of(path)
        lacking = next((n for n, line in enumerate(lines) if part.tensor[0] not in line), None)
        if lacking is not None:
            raise FormatError(f"line {lacking + 1}: expected a field {part.tensor[0]!r}, found none", path=path)
        return np.asarray([line[str(part.tensor[0])] for line in lines])
    (file,) = open_files([path], part)
    return viewed(file, file.find(part.tensor), part)
