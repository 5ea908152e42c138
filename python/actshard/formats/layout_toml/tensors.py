"""Arrays of a file by keys and positions with captures: of each layer, joined along tokens, with ``dim`` last."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from actshard._native import StoredArray
from actshard.base._arguments import stored
from actshard.base.errors import ActshardError, FormatError
from actshard.formats.layout_toml.description import CAPTURE, Name, Part, Pattern
from actshard.formats.layout_toml.files import OpenedFile


def fill(steps: Sequence[Name], captured: Mapping[str, Name]) -> list[Name]:
    """Steps with the captured values in braces."""

    def value_of(match: re.Match[str]) -> str:
        return str(captured.get(match[1], match[0]))

    return [CAPTURE.sub(value_of, step) if isinstance(step, str) else step for step in steps]


def matching_keys(file: OpenedFile, steps: Sequence[Name], text: str) -> Iterator[tuple[dict[str, Name], str]]:
    """Keys after ``steps`` that match a key with captures, and the captured values. Raises FormatError if there are none."""
    pattern = Pattern.of(text)
    matches_none = True
    for key in file.names(steps):
        if (values := pattern.match(key)) is not None:
            matches_none = False
            yield values, key
    if matches_none:
        existing = ", ".join(file.names(steps)[:12]) or "nothing"
        raise FormatError(f"expected keys such as {text!r}, found {existing}", path=file.path)


def _place_of(steps: Sequence[Name], capture: str) -> int | None:
    """The position of the step with a capture."""
    places = (n for n, step in enumerate(steps) if isinstance(step, str) and f"{{{capture}" in step)
    return next(places, None)


def layer_keys(file: OpenedFile, steps: Sequence[Name], captured: Mapping[str, Name]) -> dict[Name, list[Name]]:
    """Keys and positions of each layer's array in a file; of layer 0 if they do not contain the layer."""
    steps = fill(steps, captured)
    index = _place_of(steps, "layer")
    if index is None:
        return {0: steps}
    keys_by_layer: dict[Name, list[str]] = {}
    for values, key in matching_keys(file, listable(file, steps[:index]), str(steps[index])):
        keys_by_layer.setdefault(values["layer"], []).append(key)
    order = sorted(keys_by_layer, key=lambda layer: (isinstance(layer, str), layer))
    return {
        layer: [*steps[:index], _one_key(file, steps[index], layer, keys_by_layer[layer]), *steps[index + 1 :]]
        for layer in order
    }


def _one_key(file: OpenedFile, step: Name, layer: Name, keys: Sequence[str]) -> str:
    """The key of a layer; the step with the layer filled in if the same key captures the steps to join.

    Raises:
        FormatError: several keys have the layer, so one would hide the others.
    """
    if "{token" not in str(step):
        if len(keys) > 1:
            raise FormatError(f"keys {keys[0]!r} and {keys[1]!r} are both of layer {layer!r}", path=file.path)
        return keys[0]
    (filled,) = fill([step], {"layer": layer})
    pattern = Pattern.of(str(filled))
    lost = next((key for key in keys if pattern.match(key) is None), None)
    if lost is not None:
        raise FormatError(
            f"key {lost!r}: expected {str(filled)!r} for layer {layer!r}, without leading zeros", path=file.path
        )
    return str(filled)


def listable(file: OpenedFile, steps: Sequence[Name]) -> list[Name]:
    """Steps to what can be listed: of arrays that are joined, the first."""
    return next(iter(_pieces(file, steps)))


def _pieces(file: OpenedFile, steps: Sequence[Name]) -> list[list[Name]]:
    """Steps of each array that is joined along tokens, in the order of the captured numbers; otherwise the steps."""
    at = _place_of(steps, "token")
    if at is None:
        return [list(steps)]
    keys: dict[Name, str] = {}
    for values, key in matching_keys(file, steps[:at], str(steps[at])):
        other = keys.setdefault(values["token"], key)
        if other != key:
            raise FormatError(f"keys {other!r} and {key!r} are both of step {values['token']!r}", path=file.path)
    order = sorted(keys, key=lambda token: (isinstance(token, str), token))
    return [[*steps[:at], keys[token], *steps[at + 1 :]] for token in order]


def array_at(file: OpenedFile, part: Part, steps: Sequence[Name]) -> StoredArray:
    """The array of activations at keys and positions, joined along the axis of tokens if a key captures ``{token}``.

    Raises:
        FormatError: there is no tensor, its dtype is unknown or differs, or arrays to join differ.
    """
    arrays = [_array(file, part, piece) for piece in _pieces(file, steps)]
    if _place_of(steps, "token") is None:
        return arrays[0]
    axis = part.axes.index("token")
    for array in arrays:
        if len(array.shape) != len(part.axes):
            raise FormatError(
                f"axes {list(part.axes)}: expected {len(part.axes)} axes, found the shape {array.shape}", path=file.path
            )
    try:
        return StoredArray.joined(axis, arrays)
    except ActshardError as error:
        raise FormatError(f"{'.'.join(map(str, steps))}: {error.detail}", path=file.path) from error


def _array(file: OpenedFile, part: Part, steps: Sequence[Name]) -> StoredArray:
    array = file.find(steps)
    if not isinstance(array, StoredArray):
        key_path = ".".join(map(str, steps)) or "the file"
        raise FormatError(
            f"{key_path}: expected a tensor stored in the file, found {type(array).__name__}", path=file.path
        )
    if part.dtype is None and file.is_of_bits(steps):
        size = stored(array.dtype).itemsize
        names = "bfloat16" if size == 2 else "float8_e4m3fn or float8_e5m2"
        raise FormatError(
            f"activations: expected 'dtype', such as {names}: the elements are {8 * size} bits of a type that the file does "
            "not name, as numpy writes those of ml_dtypes",
            path=file.path,
        )
    if part.dtype is not None and array.dtype != part.dtype:
        if stored(array.dtype).itemsize != stored(part.dtype).itemsize:
            raise FormatError(f"activations: expected {part.dtype}, found {array.dtype}", path=file.path)
        array = array.viewed(part.dtype)
    return array


def dim_last(axes: Sequence[str], array: StoredArray) -> tuple[tuple[str, ...], StoredArray]:
    """The axes and the array with ``dim`` last."""
    place = next(n for n, axis in enumerate(axes) if "dim" in axis.split("*"))
    if place == len(axes) - 1 or len(axes) != len(array.shape):
        return tuple(axes), array
    order = [n for n in range(len(axes)) if n != place] + [place]
    return tuple(axes[n] for n in order), array.transposed(order)
