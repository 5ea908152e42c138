"""Proposes a ``layout.toml`` for a folder, from the names, shapes and dtypes of its files.

The proposal is a starting point: comments mark everything that the files do not record. Nothing is written.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actshard._native import StoredArray
from actshard.base._arguments import numpy_type
from actshard.base._json import read_json
from actshard.base.errors import ActshardError, DtypeError, FormatError
from actshard.base.location import Location
from actshard.formats.candidates import rank_of
from actshard.formats.foreign import explained
from actshard.formats.layout_toml import description, index
from actshard.formats.layout_toml.description import Name, Part, Pattern
from actshard.formats.layout_toml.files import (
    OpenedFile,
    ShardedFile,
    is_lines,
    is_shard_index,
    kind_of,
    lines_of,
    open_files,
    shard_index,
)
from actshard.formats.layout_toml.ordering import ExampleOrder
from actshard.formats.layout_toml.tensors import matching_keys
from actshard.formats.layout_toml.units import units_of

_LAYER_WORDS = re.compile(r"(?:^|[^a-z])(?:l|layers?|blocks?|h|resid_l|resid)[_.\-]?$", re.IGNORECASE)
_BATCH_WORDS = re.compile(r"(?:batch|chunk|shard|part|activations)[_.\-]?$", re.IGNORECASE)
_TOKENS = ("input_ids", "token_ids", "tokens", "input_tokens", "ids")
_MASKS = ("attention_mask", "mask")
_LENGTHS = ("lengths", "length", "seq_lens", "num_tokens")
_FLOATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
_MOST_FILES = 100_000
_MOST_TRIED = 4096
"""Files up to which a draft is opened before it is proposed."""
_SHOWN = 6
_LEAST_WIDTH = 16
"""Elements of a vector that may be activations; shorter ones are scores or labels."""
_DATA = (
    ".json",
    ".jsonl",
    ".ndjson",
    ".csv",
    ".tsv",
    ".parquet",
    ".npy",
    ".npz",
    ".pt",
    ".safetensors",
    ".h5",
    ".hdf5",
)
"""Endings of files that a remark names if they are left out."""
_STATES = re.compile(r"(?:hidden_states?|residuals?|all_layers)[_.\-]?$", re.IGNORECASE)
"""Words before the number of a layer in lists that models return."""
_PART = Part("activations", None, None, (), (), None, None, 0, "C", False)


@dataclass
class Proposal:
    """A proposed description.

    Attributes:
        text: TOML, with comments.
        unsure: remarks on everything that the files do not record.
    """

    text: str
    unsure: list[str] = field(default_factory=list)


@dataclass
class _Group:
    """Files whose names differ only in numbers."""

    pattern: str
    files: list[Location]
    bytes: int
    sharded: bool = False
    """Whether each array is in one of the files."""


def _groups(root: Location) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for number, (path, entry) in enumerate(root.files(sizes=True)):
        if number >= _MOST_FILES:
            break
        name = path.relative_to(root)
        if name.count("/") > 2 or path.name.startswith("."):
            continue
        group = groups.setdefault(re.sub(r"[0-9]+", "#", name), _Group(name, [], 0))
        group.files.append(path)
        group.bytes += entry.size or 0
    return sorted(groups.values(), key=lambda group: (-rank_of(group.pattern), -group.bytes, group.pattern))


def _pattern(root: Location, group: _Group) -> tuple[str, list[str], list[str]]:
    """The pattern of a group's names, in which varying numbers are captured; the captures; and remarks."""
    names = [path.relative_to(root) for path in group.files]
    pieces = re.split(r"([0-9]+)", names[0])
    varying = [n for n in range(1, len(pieces), 2) if len({re.split(r"([0-9]+)", name)[n] for name in names}) > 1]
    unsure: list[str] = []
    captures: list[str] = []
    for n in varying:
        before = "".join(pieces[:n])
        if group.sharded and "_" not in captures and re.match(r"-of-[0-9]", "".join(pieces[n + 1 :])):
            captures.append("_")
            pieces[n] = "{_:d}"
            continue
        if _LAYER_WORDS.search(before) and "layer" not in captures:
            captures.append("layer")
        elif _BATCH_WORDS.search(before) and "batch" not in captures:
            captures.append("batch")
        elif "example" not in captures:
            captures.append("example")
            unsure.append(f"the number in {names[0]!r} is taken as the example; it may be a batch or a layer")
        else:
            free = next((name for name in ("batch", "layer") if name not in captures), None)
            if free is None:
                raise FormatError(f"names with more than three numbers, such as {names[0]!r}", path=root)
            captures.append(free)
            unsure.append(f"a number in {names[0]!r} is taken as the {free}")
        pieces[n] = "{" + captures[-1] + ":d}"
    return "".join(pieces), captures, unsure


def _layer_number(root: Location, group: _Group) -> int | None:
    """The number after a word for layers in the names of all files; None if there is none. Numbers that vary are captured."""
    # Not the number of an extension, such as that of .h5.
    pieces = re.split(r"([0-9]+)", re.sub(r"\.[a-z]+[0-9]+$", "", group.files[0].relative_to(root)))
    numbers = (n for n in range(1, len(pieces), 2) if _LAYER_WORDS.search("".join(pieces[:n])))
    return next((int(pieces[n]) for n in numbers), None)


def _arrays(
    value: Any, file: OpenedFile, steps: tuple[Name, ...] = (), depth: int = 0
) -> Iterator[tuple[tuple[Name, ...], StoredArray]]:
    """Arrays of a file, each with its keys and positions, at most four levels deep."""
    if isinstance(value, StoredArray):
        yield steps, value
    elif isinstance(value, dict) and depth < 4:
        for key, inner in list(value.items())[:512]:
            yield from _arrays(inner, file, (*steps, key if isinstance(key, str | int) else str(key)), depth + 1)
    elif isinstance(value, list | tuple) and depth < 4:
        for n, inner in enumerate(value[:512]):
            yield from _arrays(inner, file, (*steps, n), depth + 1)


def _all_arrays(file: OpenedFile) -> list[tuple[tuple[Name, ...], StoredArray]]:
    if isinstance(file, ShardedFile):
        return [entry for shard in file.files for entry in _all_arrays(shard)]
    arrays = getattr(file, "arrays", None)
    if arrays is not None:
        return [((name,) if name else (), array) for name, (array, kind) in arrays.items() if kind != "text"]
    torch = getattr(file, "file", None)
    if torch is not None:
        return list(_arrays(torch.value, file))
    sets = getattr(file, "sets", {})
    return [(tuple(name.split("/")), value) for name, value in sets.items() if isinstance(value, StoredArray)]


def _steps_text(steps: tuple[Name, ...]) -> str:
    shown = [f'"{step}"' if isinstance(step, str) else str(step) for step in steps]
    return shown[0] if len(shown) == 1 and isinstance(steps[0], str) else "[" + ", ".join(shown) + "]"


@dataclass(frozen=True)
class _CapturedSteps:
    """The steps to an array, with captures in place of numbers.

    Attributes:
        counts: number of layers and of examples that the captures match.
        first: the steps of the first example, up to the one with its capture.
    """

    steps: tuple[Name, ...]
    counts: Mapping[str, int]
    example_at: int | None
    unsure: list[str]


def _captured(
    steps: tuple[Name, ...],
    every: Mapping[tuple[Name, ...], StoredArray],
    lists: Collection[int],
    *,
    may_be_examples: bool,
) -> _CapturedSteps:
    """Finds the layer and the example among the numbers of an array's keys and positions.

    Args:
        steps: the keys and positions of the array.
        every: all arrays of the file that may be activations.
        lists: lengths of other lists and arrays, such as labels.
        may_be_examples: whether file names do not capture the example.
    """
    filled, counts, unsure = list(steps), {"layer": 1, "example": 1}, list[str]()
    example_at = None
    step_at = _decode_steps(steps, every)
    if step_at is not None:
        filled[step_at] = "{token}"
        unsure.append(
            f"the numbers after {_steps_text(steps[:step_at])} are taken as steps of a generation, whose arrays are joined along "
            "tokens"
        )
    for n, step in enumerate(steps):
        if n == step_at:
            continue
        text, position = "", 0
        for match in re.finditer(r"[0-9]+", str(step)):
            front, back = str(step)[: match.start()], str(step)[match.end() :]
            regex = re.compile(re.escape(front) + r"[0-9]+" + re.escape(back))
            alike = [
                array
                for other, array in every.items()
                if len(other) == len(steps)
                and other[:n] == steps[:n]
                and other[n + 1 :] == steps[n + 1 :]
                and regex.fullmatch(str(other[n]))
            ]
            before = front or (str(steps[n - 1]) + "_" if n else "")
            is_of_layers = bool(_LAYER_WORDS.search(before) or _STATES.search(before)) or n - 1 == step_at
            if len(alike) < 2 and not is_of_layers:
                continue
            capture = "layer"
            is_ragged = len({tuple(array.shape[:-1]) for array in alike}) > 1
            if may_be_examples and not is_of_layers:
                is_listed = len(alike) in lists or len(every[steps].shape) != 2
                capture = "example" if is_ragged or is_listed else "layer"
                if not is_ragged:
                    unsure.append(
                        f"the numbers in {_steps_text((*steps[:n], step))} are taken as the {capture}; the arrays are equally "
                        f"long, so they may be {'layers' if capture == 'example' else 'examples'}"
                    )
            if f"{{{capture}}}" in text or any(f"{{{capture}}}" in str(other) for other in filled):
                continue
            text += str(step)[position : match.start()] + f"{{{capture}}}"
            position = match.end()
            counts[capture] = max(len(alike), 1)
            if capture == "example":
                example_at = n
        if text:
            filled[n] = text + str(step)[position:]
    return _CapturedSteps(tuple(filled), counts, example_at, unsure)


def _decode_steps(steps: tuple[Name, ...], every: Mapping[tuple[Name, ...], StoredArray]) -> int | None:
    """The position of the number of a step: of lists of layers, in which all but the first have one token."""
    for n in range(len(steps) - 1):
        if type(steps[n]) is not int or type(steps[n + 1]) is not int:
            continue
        shapes = [
            tuple(array.shape)
            for other, array in sorted(every.items(), key=lambda entry: str(entry[0][n : n + 1]).zfill(12))
            if len(other) == len(steps) and other[:n] == steps[:n] and other[n + 1 :] == steps[n + 1 :]
        ]
        if any(len(shape) < 2 for shape in shapes):
            continue
        first = min(shapes, key=lambda shape: shape[-2] == 1, default=())
        others = [shape for shape in shapes if shape[-2] == 1]
        if (
            len(others) >= max(1, len(shapes) - 1)
            and len(shapes) > 1
            and all((*shape[:-2], shape[-1]) == (*first[:-2], first[-1]) for shape in shapes)
        ):
            return n
    return None


def _sharded(files: list[OpenedFile], names: list[str]) -> bool:
    """Whether files that differ in a number have different arrays, as shards have."""
    return (
        len(files) > 1
        and len({frozenset(steps for steps, _ in _all_arrays(file)) for file in files}) > 1
        and any(re.search(r"[0-9]+-of-[0-9]+", name) for name in names)
    )


def _lists(value: Any) -> dict[tuple[Name, ...], int]:
    """Lengths of the lists and one-dimensional arrays of a dict."""
    if not isinstance(value, dict):
        return {}
    lengths: dict[tuple[Name, ...], int] = {}
    for key, inner in value.items():
        if isinstance(inner, StoredArray) and len(inner.shape) == 1:
            lengths[key,] = inner.shape[0]
        elif isinstance(inner, list | tuple) and inner and all(isinstance(entry, str | int | float) for entry in inner):
            lengths[key,] = len(inner)
    return {steps: n for steps, n in lengths.items() if isinstance(steps[0], str)}


def _named_lists(file: OpenedFile) -> dict[tuple[Name, ...], int]:
    """Lengths of the lists and one-dimensional arrays at the top of a file."""
    if isinstance(file, ShardedFile):
        return {steps: n for shard in file.files for steps, n in _named_lists(shard).items()}
    torch = getattr(file, "file", None)
    if torch is not None:
        return _lists(torch.value)
    arrays = getattr(file, "arrays", {})
    return {
        (name,): array.shape[0]
        for name, (array, kind) in arrays.items()
        if name and len(array.shape) == (2 if kind == "text" else 1)
    }


def guess(path: Location) -> Proposal:
    """Proposes a description of a folder, or of one file for the folder that contains it.

    Raises:
        MissingFileError: there is neither a folder nor a file.
        FormatError: no file contains a floating-point array with two or more axes, or several vectors.
    """
    root = path if path.kind() == "folder" else path.parent
    groups = _groups(root) if root is path else [_Group(path.name, [path], path.regular("read").size)]
    foreign = explained(path, root.entries() if root is path else None, sure=True)
    indexed = next((group for group in groups if is_shard_index(group.pattern) and len(group.files) == 1), None)
    if indexed is not None and (proposal := _propose_indexed(root, indexed, groups)) is not None:
        return proposal
    for group in groups:
        kind = kind_of(group.files[0].name, _PART)
        if kind == "raw":
            continue
        ends = list(dict.fromkeys([group.files[0], group.files[-1]]))
        try:
            files = open_files(ends, _PART)
            group.sharded = _sharded(files, [path.name for path in ends])
            opened = ShardedFile(open_files(group.files, _PART)) if group.sharded else files[0]
            arrays = _all_arrays(opened)
        except ActshardError:
            continue
        wide = [(steps, array) for steps, array in arrays if len(array.shape) >= 2 and array.dtype in _FLOATS]
        wide = wide or [(s, a) for s, a in arrays if len(a.shape) >= 2 and a.dtype in ("U16", "I16") and kind == "npy"]
        wide = wide or _vectors(arrays, group)
        if wide:
            return _tried(root, _proposed(root, group, groups, opened, arrays, wide, foreign))
    if foreign:
        raise FormatError(f"found no file with a floating-point array of two or more axes, but {foreign[0]}", path=root)
    raw = next((group for group in groups if group.files[0].name.endswith((".bin", ".memmap", ".dat", ".raw"))), None)
    if raw is not None:
        return _propose_raw(root, raw)
    raise FormatError("found no file with a floating-point array of two or more axes", path=root)


def _vectors(
    arrays: list[tuple[tuple[Name, ...], StoredArray]], group: _Group
) -> list[tuple[tuple[Name, ...], StoredArray]]:
    """Arrays of one axis that may be the vector of an example: of several files, or several of one length."""
    vectors = [(s, a) for s, a in arrays if len(a.shape) == 1 and a.dtype in _FLOATS and a.shape[0] >= _LEAST_WIDTH]
    lengths = collections.Counter(array.shape[0] for _, array in vectors)
    return [(s, a) for s, a in vectors if len(group.files) > 1 or lengths[a.shape[0]] > 1]


def _propose_indexed(root: Location, group: _Group, groups: list[_Group]) -> Proposal | None:
    """A description of the files that an index names; None if their names have numbers, which a pattern captures."""
    shards = list(dict.fromkeys(shard_index(group.files[0]).values()))
    if any(re.search(r"[0-9]+-of-[0-9]+", shard.name) for shard in shards):
        return None
    files = open_files(shards, _PART)
    arrays = [entry for file in files for entry in _all_arrays(file)]
    wide = [(steps, array) for steps, array in arrays if len(array.shape) >= 2 and array.dtype in _FLOATS]
    rest = [other for other in groups if not set(other.files) & set(shards)]
    return _tried(root, _proposed(root, group, rest, ShardedFile(files), arrays, wide)) if wide else None


def _propose_raw(root: Location, group: _Group) -> Proposal:
    pattern, captures, unsure = _pattern(root, group)
    known: tuple[str, list[int]] | None = None
    for path, _ in root.files():
        value = None
        with contextlib.suppress(ActshardError):
            value = read_json(path) if path.name.endswith(".json") else None
        if isinstance(value, dict):
            known = known or _recorded_array(value, group)
            unsure.append(f"{path.relative_to(root)} has {', '.join(list(value)[:12])}")
    lines = ["version = 1", "[activations]", f'files = "{pattern}"']
    if known is not None:
        dtype, shape = known
        axes = ", ".join(f'"{axis}"' for axis in _axes(shape, captures, layered=False, tokens=None, unsure=unsure))
        return _tried(root, _proposal([*lines, f"axes = [{axes}]", f'dtype = "{dtype}"', f"shape = {shape}"], unsure))
    unsure.append("a raw file contains neither shape nor dtype: fill in both")
    lines += ['axes = ["row", "dim"]', 'dtype = "bfloat16"  # unsure']
    lines.append("shape = [-1, 0]  # unsure: rows (-1: all), d_model")
    return _proposal(lines, unsure)


def _recorded_array(value: Mapping[str, object], group: _Group) -> tuple[str, list[int]] | None:
    """The dtype and shape that a JSON file records, if all files of the group have their size."""
    name, shape = str(value.get("dtype")).removeprefix("torch."), value.get("shape")
    if not isinstance(shape, list) or len(shape) < 2 or not all(type(n) is int and n > 0 for n in shape):
        return None
    try:
        size = math.prod(shape) * numpy_type(name, "dtype").itemsize
    except DtypeError:
        return None
    return (name, shape) if group.bytes == size * len(group.files) else None


def _proposal(lines: list[str], unsure: list[str]) -> Proposal:
    return Proposal("\n".join([*(f"# unsure: {reason}" for reason in unsure), *lines]) + "\n", unsure)


def _files_left_out(group: _Group, groups: list[_Group], lines: Sequence[str]) -> list[str]:
    """Remarks about files that no table names: large ones that may be activations, and others with data."""
    suffix = group.files[0].name.rpartition(".")[2]
    text = "\n".join(lines)
    others = [g for g in groups if g is not group and f'"{g.pattern}' not in text and not is_shard_index(g.pattern)]
    large = [g for g in others if g.files[0].name.rpartition(".")[2] == suffix and g.bytes * 8 > group.bytes]
    remarks = []
    if count := sum(len(g.files) for g in large):
        remarks.append(
            f"{count:,} other .{suffix} files are left out, such as {large[0].pattern!r}: if they belong to the dataset, capture "
            "the varying part of their names with {layer:s}, {batch:s} or {example:s}"
        )
    small = [g.pattern for g in others if g not in large and g.pattern.endswith(_DATA)]
    if small:
        rest = f" and {len(small) - _SHOWN} more" if len(small) > _SHOWN else ""
        remarks.append(f"other files are left out: {', '.join(small[:_SHOWN])}{rest}")
    return remarks


def _proposed(
    root: Location,
    group: _Group,
    groups: list[_Group],
    opened: OpenedFile,
    arrays: list[tuple[tuple[Name, ...], StoredArray]],
    wide: list[tuple[tuple[Name, ...], StoredArray]],
    foreign: Sequence[str] = (),
) -> Proposal:
    pattern, captures, unsure = _pattern(root, group)
    unsure = [*foreign, *unsure]
    lists = _named_lists(opened)
    steps, array = max(wide, key=lambda entry: (rank_of(".".join(map(str, entry[0]))), math.prod(entry[1].shape)))
    alone = "example" not in captures and "batch" not in captures
    chosen = _captured(steps, dict(wide), set(lists.values()), may_be_examples=alone)
    tensor, layers = chosen.steps, chosen.counts["layer"]
    unsure += chosen.unsure
    unsure += _left_out(tensor, [entry for entry, _ in wide])
    if chosen.example_at is not None:
        captures = [*captures, "example"]
    names = {str(s[-1]): (s, a) for s, a in arrays if s}
    single = {g.pattern.rpartition("/")[2].partition(".")[0]: g for g in groups if g is not group and len(g.files) == 1}
    tokens = next((name for name in _TOKENS if name in names), None)
    mask = next((name for name in _MASKS if name in names), None)
    shape = list(array.shape)
    axes = _axes(shape, captures, layers > 1 or "layer" in captures, names[tokens][1].shape if tokens else None, unsure)
    if chosen.example_at is None and "example" in captures and any("example" in axis.split("*") for axis in axes):
        pattern = pattern.replace("{example:d}", "{batch:d}")
    lines = ["version = 1", "[activations]", f'files = "{pattern}"']
    if tensor:
        lines.append(f"tensor = {_steps_text(tensor)}")
    lines.append("axes = [" + ", ".join(f'"{axis}"' for axis in axes) + f"]  # shape {shape} in {group.files[0].name}")
    if array.dtype in ("U16", "I16"):
        lines.append('dtype = "bfloat16"')
        unsure.append(f"elements are {array.dtype}, taken as bfloat16: they may be float16")
    if "layer" in axes:
        lines.append(f"layers = {list(range(shape[axes.index('layer')]))}")
        unsure.append("names of layers are positions: put the real names in 'layers'")
    elif "layer" not in captures and not any("{layer" in str(step) for step in tensor):
        number = _layer_number(root, group)
        lines.append(f"layers = [{number or 0}]")
        if number is None:
            unsure.append("the files do not contain the layer's number: put it in 'layers'")
        else:
            unsure.append(f"the layer's number is taken from {group.pattern!r}")
    if array.dtype in ("F8_E4M3", "F8_E5M2", "I8"):
        scales = next((s for s, _ in arrays if s and re.search(r"scale", str(s[-1]), re.IGNORECASE)), None)
        if scales is None or layers > 1:
            unsure.append(f"elements are {array.dtype}, read without scales: if they have scales, describe them")
        else:
            lines += ["[activations.scales]", f"tensor = {_steps_text(scales)}"]
            unsure.append(f"elements are {array.dtype}, and {str(scales[-1])!r} is taken as their scales")
    lengths = _lengths_table(axes, shape, lists, single, names[mask][0] if mask else None)
    lines += lengths
    if not lengths and "example" in axes and "token" in axes:
        unsure.append("neither lengths nor a mask were found: all tokens count as content, even padding")
    elif not lengths and "row" in axes:
        unsure.append("no lengths were found: each row is taken as an example of one token")
    if tokens:
        lines += ["[tokens]", f"tensor = {_steps_text(names[tokens][0])}"]
        if len(axes) > 1 and axes[0] == "1" and len(names[tokens][1].shape) == 2:
            lines.append('axes = ["1", "token"]')
    elif file := next((single[name] for name in _TOKENS if name in single), None):
        lines += ["[tokens]", f'file = "{file.pattern}"']
    choice = _ChosenArray(steps, chosen, captures, axes, shape)
    order = choice.order(root, group, Pattern.of(pattern), opened)
    if order.doubt and (shared := [line for line in lines if line.startswith("file = ")]):
        unsure.append(f"{', '.join(shared)}: taken in the order of the examples, but {order.doubt}")
    columns, remarks = _all_columns(group, groups, opened, choice, order, lines)
    lines += columns
    left_out = [*_files_left_out(group, groups, lines), *_unused_keys(opened, lines, [entry for entry, _ in wide])]
    unsure += [*remarks, *left_out]
    return _proposal(lines, unsure)


def _lengths_table(
    axes: Sequence[str],
    shape: Sequence[int],
    lists: Mapping[tuple[Name, ...], int],
    single: Mapping[str, _Group],
    mask: tuple[Name, ...] | None,
) -> list[str]:
    """The table of lengths: of a mask, of a list of the file, of a file, or of a list in a JSON file; empty if there is none."""
    if mask is not None and "token" in axes:
        return ["[lengths]", f"tensor = {_steps_text(mask)}", 'kind = "mask"']
    examples = shape[axes.index("example")] if "example" in axes and "token" in axes else None
    if listed := [steps for steps, n in lists.items() if str(steps[-1]) in _LENGTHS and n == examples]:
        return ["[lengths]", f"tensor = {_steps_text(listed[0])}"]
    if file := next((single[name] for name in _LENGTHS if name in single), None):
        return ["[lengths]", f'file = "{file.pattern}"']
    if "offsets" in single:
        return ["[lengths]", f'file = "{single["offsets"].pattern}"', 'kind = "offsets"']
    for group in single.values() if examples is not None else ():
        with contextlib.suppress(ActshardError):
            value = read_json(group.files[0]) if group.pattern.endswith(".json") else None
            if not isinstance(value, dict):
                continue
            for key in _LENGTHS:
                entries = value.get(key)
                if isinstance(entries, list) and len(entries) == examples:
                    return ["[lengths]", f"file = {json.dumps(f'{group.pattern}:/{key}')}"]
    return []


@dataclass(frozen=True)
class _ChosenArray:
    """The array that is taken as activations: its steps, captures of file names and keys, axes and shape."""

    steps: tuple[Name, ...]
    captured: _CapturedSteps
    captures: list[str]
    axes: list[str]
    shape: list[int]

    @property
    def is_of_files(self) -> bool:
        """Whether each file has one example."""
        names = [name for axis in self.axes for name in axis.split("*")]
        return "example" in self.captures and self.captured.example_at is None and "example" not in names

    def num_examples(self, num_files: int) -> int | None:
        """Number of examples; None if it is not that of files or of one file."""
        if self.is_of_files:
            return num_files if self.captures == ["example"] else None
        return None if self.captures[: len(self.captures) - self.is_of_keys] else self.num_in_file

    @property
    def is_of_keys(self) -> bool:
        """Whether a key of the file captures the example."""
        return self.captured.example_at is not None

    @property
    def num_in_file(self) -> int | None:
        """Number of examples of a file; None if it is unknown."""
        if self.is_of_files:
            return 1
        if self.is_of_keys:
            return self.captured.counts["example"]
        axis = next((n for n, name in enumerate(self.axes) if name in ("example", "row")), None)
        return None if axis is None else self.shape[axis]

    def order(self, root: Location, group: _Group, pattern: Pattern, opened: OpenedFile) -> ExampleOrder:
        """The examples in the order of the draft."""
        if self.is_of_files and self.captures == ["example"]:
            names = [path.relative_to(root) for path in group.files]
            numbers = [values["example"] for name in names if (values := pattern.match(name)) is not None]
            return ExampleOrder.of(numbers, names)
        if self.captured.example_at is not None:
            keys = matching_keys(
                opened, self.steps[: self.captured.example_at], str(self.captured.steps[self.captured.example_at])
            )
            numbered = {values["example"]: key for values, key in keys}
            is_as_written = kind_of(opened.path.name, _PART) in ("torch", "npz")
            return ExampleOrder.of(list(numbered), list(numbered.values()), is_as_written=is_as_written)
        return ExampleOrder.of(list(range(self.num_examples(0) or 0)))


def _all_columns(
    group: _Group,
    groups: list[_Group],
    opened: OpenedFile,
    choice: _ChosenArray,
    order: ExampleOrder,
    lines: list[str],
) -> tuple[list[str], list[str]]:
    """Tables of columns of the file and of other files, and remarks about values whose order is not that of the examples."""
    columns, remarks = _columns(opened, choice, order)
    text = "\n".join(lines)
    described = {group.pattern, *(other.pattern for other in groups if f'"{other.pattern}"' in text)}
    examples = choice.num_examples(len(group.files))
    if examples is None:
        return columns, remarks
    tables = _columns_of_files([other for other in groups if other.pattern not in described], examples, order)
    return columns + tables[0], remarks + tables[1]


def _unsure(table: list[str], reason: str) -> tuple[list[str], list[str]]:
    """A table whose values may be those of other examples: as comments, and the remark."""
    return [f"# {line}" for line in table], [f"{table[1]} is left out, as a comment: {reason}"]


def _left_out(tensor: tuple[Name, ...], every: list[tuple[Name, ...]]) -> list[str]:
    """A remark about arrays of the file that the steps with captures do not match."""
    patterns = [Pattern.of(str(step)) for step in tensor]
    others = [
        steps
        for steps in every
        if len(steps) != len(patterns)
        or any(pattern.match(str(step)) is None for pattern, step in zip(patterns, steps, strict=True))
    ]
    if not others:
        return []
    rest = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    shown = ", ".join(_steps_text(steps) for steps in others[:_SHOWN])
    return [
        f"other arrays with two or more axes are left out: {shown}{rest}; put one of them in 'tensor' to read it instead"
    ]


def _columns(file: OpenedFile, choice: _ChosenArray, order: ExampleOrder) -> tuple[list[str], list[str]]:
    """Tables of columns: lists of the file that have a value for each example, and values next to its array; and remarks."""
    lines, remarks = list[str](), list[str]()
    steps, chosen = choice.steps, choice.captured
    used = {*_TOKENS, *_MASKS, *_LENGTHS, *map(str, steps)}
    for names, n in _named_lists(file).items():
        if n == choice.num_in_file and str(names[-1]) not in used:
            table = ["[[columns]]", f"tensor = {_steps_text(names)}"]
            reason = order.doubt if choice.is_of_keys else ""
            table, reasons = _unsure(table, reason) if reason else (table, [])
            lines, remarks = lines + table, remarks + reasons
    at = -1 if chosen.example_at is None else chosen.example_at
    if (at < 0 and not choice.is_of_files) or at + 1 >= len(steps):
        return lines, remarks
    file = file.holding(steps[: at + 1])
    siblings = None if getattr(file, "file", None) is None else file.find(steps[: at + 1])
    for key, value in siblings.items() if isinstance(siblings, dict) else ():
        is_scalar = isinstance(value, str | int | float) or (isinstance(value, StoredArray) and value.shape == [])
        if isinstance(key, str) and is_scalar and key not in used:
            lines += ["[[columns]]", f"tensor = {_steps_text((*chosen.steps[: at + 1], key))}"]
    return lines, remarks


def _columns_of_files(groups: list[_Group], examples: int, order: ExampleOrder) -> tuple[list[str], list[str]]:
    """Tables of columns of files with a value for each example: lists of JSON, lines and arrays; and remarks."""
    lines, remarks = list[str](), list[str]()
    for group in groups:
        if "/" in group.pattern or len(group.files) > 1 or is_shard_index(group.pattern):
            continue
        with contextlib.suppress(ActshardError):
            tables, reason = _tables_of_file(group.files[0], examples, order)
            for table in tables:
                shown, reasons = _unsure(table, reason) if reason else (table, [])
                lines, remarks = lines + shown, remarks + reasons
    return lines, remarks


def _tables_of_file(path: Location, examples: int, order: ExampleOrder) -> tuple[list[list[str]], str]:
    """Tables of columns of a file with a value for each example, and why these may be values of other examples."""
    name = path.name
    table = ["[[columns]]", f"file = {json.dumps(name)}"]
    if name.endswith(".npy"):
        ((_, array),) = _all_arrays(open_files([path], _PART)[0])
        return ([table] if array.shape == [examples] else []), order.doubt
    value = read_json(path) if name.endswith(".json") else None
    if isinstance(value, dict):
        columns = {key: v for key, v in value.items() if isinstance(v, list) and len(v) == examples}
        pointers = [key.replace("~", "~0").replace("/", "~1") for key in columns if key not in (*_TOKENS, *_LENGTHS)]
        tables = [["[[columns]]", f"file = {json.dumps(f'{name}:/{pointer}')}"] for pointer in pointers]
        field, reason = order.joined(columns)
        if field and len(columns) == len(value):
            return [[*table, f"by = {json.dumps(field)}"]], ""
        return tables, f"its {field!r} has the examples in another order" if field else reason
    lines = lines_of(path) if is_lines(name) else []
    if len(lines) != examples:
        return [], ""
    field, reason = order.joined({key: [line.get(key) for line in lines] for key in lines[0]})
    return [[*table, f"by = {json.dumps(field)}"] if field else table], reason


def _unused_keys(file: OpenedFile, lines: list[str], wide: list[tuple[Name, ...]]) -> list[str]:
    """A remark about keys at the top of the file that no table names. Arrays of activations have a remark of their own."""
    tensor_lines = "\n".join(line for line in lines if line.startswith("tensor"))
    top = {steps[0] for steps in wide if steps}
    keys = [
        key
        for key in file.names(())
        if key and key not in top and f'"{key}"' not in tensor_lines and not key.isdecimal()
    ]
    if not keys:
        return []
    rest = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return [f"other values of the file are left out: {', '.join(keys[:_SHOWN])}{rest}"]


def _tried(root: Location, proposal: Proposal) -> Proposal:
    """The proposal, with a remark if it does not open."""
    try:
        described = description.read(root, proposal.text)
        units = units_of(root, described)
        if sum(len(unit.files) for unit in units) > _MOST_TRIED:
            return proposal
        index.build(root, described, 1 << 30, units)
    except ActshardError as error:
        reason = f"this draft does not open yet: {error}"
        return Proposal(f"# unsure: {reason}\n{proposal.text}", [reason, *proposal.unsure])
    return proposal


def _axes(
    shape: list[int], captures: list[str], layered: bool, tokens: list[int] | None, unsure: list[str]
) -> list[str]:
    """Names of axes by their number and by the shape of the token ids."""
    if any(n > shape[-1] and ((n % 64 == 0 and shape[-1] % 64) or shape[-1] < _LEAST_WIDTH) for n in shape[:-1]):
        unsure.append(
            f"the last axis, of {shape[-1]}, is taken as 'dim'; a longer one may be: it may be any axis in 'axes'"
        )
    if len(shape) == 2 and tokens is not None and len(tokens) == 2 and tokens[0] * tokens[1] == shape[0]:
        return ["example*token", "dim"]
    is_one_example = "example" in captures
    if len(shape) == 1:
        unsure.append("one axis: taken as 'dim', the vector of an example of one token")
        return ["dim"]
    if len(shape) == 2:
        if not is_one_example:
            unsure.append("two axes: taken as rows of all examples; they may be the tokens of one example")
        return ["token" if is_one_example else "row", "dim"]
    if len(shape) == 3:
        if is_one_example:
            if shape[0] == 1:
                return ["1", "token", "dim"]
            unsure.append("the first of three axes is taken as the layer")
            return ["layer", "token", "dim"]
        unsure.append("three axes: taken as example, token, dim; one of the first two may be the layer")
        return ["example", "token", "dim"]
    if len(shape) == 4 and not layered:
        unsure.append("four axes: taken as example, layer, token, dim; layer and token may be swapped")
        return ["1" if is_one_example and shape[0] == 1 else "example", "layer", "token", "dim"]
    raise FormatError(f"an array of shape {shape}: write its axes by hand; see docs/formats/layout.md")
