"""Proposes a ``layout.toml`` for a folder, from the names, shapes and dtypes of its files.

The proposal is a starting point: comments mark everything that the files do not record. Nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from actshard._json import read_json
from actshard._native import StoredArray
from actshard.errors import ActshardError, FormatError
from actshard.formats.layout_toml.description import Name, Part
from actshard.formats.layout_toml.files import OpenedFile, kind_of, open_files
from actshard.location import Location

_LAYER_WORDS = re.compile(r"(?:^|[^a-z])(?:l|layers?|blocks?|h|resid_l|resid)[_.\-]?$", re.IGNORECASE)
_BATCH_WORDS = re.compile(r"(?:batch|chunk|shard|part|activations)[_.\-]?$", re.IGNORECASE)
_TOKENS = ("input_ids", "token_ids", "tokens", "input_tokens", "ids")
_MASKS = ("attention_mask", "mask")
_LENGTHS = ("lengths", "length", "seq_lens", "num_tokens")
_FLOATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
_MOST_FILES = 100_000
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
    return sorted(groups.values(), key=lambda group: (-group.bytes, group.pattern))


def _pattern(root: Location, group: _Group) -> tuple[str, list[str], list[str]]:
    """The pattern of a group's names, in which varying numbers are captured; the captures; and remarks."""
    names = [path.relative_to(root) for path in group.files]
    pieces = re.split(r"([0-9]+)", names[0])
    varying = [n for n in range(1, len(pieces), 2) if len({re.split(r"([0-9]+)", name)[n] for name in names}) > 1]
    unsure: list[str] = []
    captures: list[str] = []
    for n in varying:
        before = "".join(pieces[:n])
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
    pieces = re.split(r"([0-9]+)", group.files[0].relative_to(root))
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
    arrays = getattr(file, "arrays", None)
    if arrays is not None:
        return [((name,) if name else (), array) for name, (array, kind) in arrays.items() if kind != "text"]
    torch = getattr(file, "file", None)
    if torch is not None:
        return list(_arrays(torch.value, file))
    return [((name,), value) for name, value in getattr(file, "sets", {}).items() if isinstance(value, StoredArray)]


def _steps_text(steps: tuple[Name, ...]) -> str:
    shown = [f'"{step}"' if isinstance(step, str) else str(step) for step in steps]
    return shown[0] if len(shown) == 1 and isinstance(steps[0], str) else "[" + ", ".join(shown) + "]"


def _with_layer(steps: tuple[Name, ...], every: list[tuple[Name, ...]]) -> tuple[tuple[Name, ...], int]:
    """The steps with a capture in place of the layer's number, and the number of layers."""
    for n, step in enumerate(steps):
        for match in re.finditer(r"[0-9]+", str(step)):
            front, back = str(step)[: match.start()], str(step)[match.end() :]
            regex = re.compile(re.escape(front) + r"[0-9]+" + re.escape(back))
            alike = {
                str(s[n])
                for s in every
                if len(s) == len(steps)
                and s[:n] == steps[:n]
                and s[n + 1 :] == steps[n + 1 :]
                and regex.fullmatch(str(s[n]))
            }
            if len(alike) > 1 or _LAYER_WORDS.search(front):
                return (*steps[:n], f"{front}{{layer}}{back}", *steps[n + 1 :]), len(alike)
    return steps, 1


def guess(root: Location) -> Proposal:
    """Proposes a description of a folder.

    Raises:
        FormatError: no file in the folder contains a floating-point array with two or more axes.
    """
    groups = _groups(root)
    for group in groups:
        kind = kind_of(group.files[0].name, _PART)
        if kind == "raw":
            continue
        try:
            (file,) = open_files([group.files[0]], _PART)
            arrays = _all_arrays(file)
        except ActshardError:
            continue
        wide = [(steps, array) for steps, array in arrays if len(array.shape) >= 2 and array.dtype in _FLOATS]
        wide = wide or [(s, a) for s, a in arrays if len(a.shape) >= 2 and a.dtype in ("U16", "I16") and kind == "npy"]
        if wide:
            return _proposed(root, group, groups, arrays, wide)
    raw = next((group for group in groups if group.files[0].name.endswith((".bin", ".memmap", ".dat", ".raw"))), None)
    if raw is not None:
        return _propose_raw(root, raw)
    raise FormatError("found no file with a floating-point array of two or more axes", path=root)


def _propose_raw(root: Location, group: _Group) -> Proposal:
    pattern, _, unsure = _pattern(root, group)
    unsure.append("a raw file contains neither shape nor dtype: fill in both")
    for path, _ in root.files():
        if path.name.endswith(".json"):
            try:
                value = read_json(path)
            except ActshardError:
                continue
            if isinstance(value, dict):
                unsure.append(f"{path.relative_to(root)} has {', '.join(list(value)[:12])}")
    lines = [
        "version = 1",
        "[activations]",
        f'files = "{pattern}"',
        'axes = ["row", "dim"]',
        'dtype = "bfloat16"  # unsure',
    ]
    lines.append("shape = [-1, 0]  # unsure: rows (-1: all), d_model")
    return _proposal(lines, unsure)


def _proposal(lines: list[str], unsure: list[str]) -> Proposal:
    return Proposal("\n".join([*(f"# unsure: {reason}" for reason in unsure), *lines]) + "\n", unsure)


def _unmatched(group: _Group, groups: list[_Group]) -> list[str]:
    """Remarks about large files with the same suffix that the pattern does not match."""
    suffix = group.files[0].name.rpartition(".")[2]
    other_files = [path for g in groups if g is not group for path in g.files if path.name.rpartition(".")[2] == suffix]
    # Small files contain lengths, token ids and the like, which have separate tables.
    large = [g for g in groups if g is not group and g.files[0] in other_files and g.bytes * 8 > group.bytes]
    count = sum(len(g.files) for g in large)
    if not count:
        return []
    return [
        f"{count:,} other .{suffix} files are left out, such as {large[0].pattern!r}: if they belong to the dataset, capture the "
        "varying part of their names with {layer:s}, {batch:s} or {example:s}"
    ]


def _proposed(
    root: Location,
    group: _Group,
    groups: list[_Group],
    arrays: list[tuple[tuple[Name, ...], StoredArray]],
    wide: list[tuple[tuple[Name, ...], StoredArray]],
) -> Proposal:
    pattern, captures, unsure = _pattern(root, group)
    unsure += _unmatched(group, groups)

    def elements(array: StoredArray) -> int:
        count = 1
        for n in array.shape:
            count *= n
        return count

    steps, array = max(wide, key=lambda entry: elements(entry[1]))
    tensor, layers = _with_layer(steps, [s for s, _ in wide])
    names = {str(s[-1]): (s, a) for s, a in arrays if s}
    single = {g.pattern.rpartition("/")[2].partition(".")[0]: g for g in groups if g is not group and len(g.files) == 1}
    tokens = next((name for name in _TOKENS if name in names), None)
    mask = next((name for name in _MASKS if name in names), None)
    shape = list(array.shape)
    axes = _axes(shape, captures, layers > 1 or "layer" in captures, names[tokens][1].shape if tokens else None, unsure)
    if "example" in captures and any("example" in axis.split("*") for axis in axes):
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
    if mask and "token" in axes:
        lines += ["[lengths]", f"tensor = {_steps_text(names[mask][0])}", 'kind = "mask"']
    elif file := next((single[name] for name in _LENGTHS if name in single), None):
        lines += ["[lengths]", f'file = "{file.pattern}"']
    elif "offsets" in single:
        lines += ["[lengths]", f'file = "{single["offsets"].pattern}"', 'kind = "offsets"']
    elif "example" in axes and "token" in axes:
        unsure.append("neither lengths nor a mask were found: all tokens count as content, even padding")
    elif "row" in axes:
        unsure.append("no lengths were found: each row is taken as an example of one token")
    if tokens:
        lines += ["[tokens]", f"tensor = {_steps_text(names[tokens][0])}"]
        if len(axes) > 1 and axes[0] == "1" and len(names[tokens][1].shape) == 2:
            lines.append('axes = ["1", "token"]')
    elif file := next((single[name] for name in _TOKENS if name in single), None):
        lines += ["[tokens]", f'file = "{file.pattern}"']
    return _proposal(lines, unsure)


def _axes(
    shape: list[int], captures: list[str], layered: bool, tokens: list[int] | None, unsure: list[str]
) -> list[str]:
    """Names of axes by their number and by the shape of the token ids."""
    if len(shape) == 2 and tokens is not None and len(tokens) == 2 and tokens[0] * tokens[1] == shape[0]:
        return ["example*token", "dim"]
    is_one_example = "example" in captures
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
