"""The cached index of a folder of draft-model examples, stored by :mod:`actshard.formats.kept`.

Names and order of files follow from the folder's listing. The index contains only the number of tokens of each example and, for
each of its tensors, offset, row stride and byte order. Shapes and dtypes are the same in all files. No index is stored for a folder
with damaged or gzipped files, or with tensors that are decoded as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.location import Location
from actshard.formats.draft_examples import (
    FLOATS,
    IDS,
    INTEGERS,
    MASKS,
    DraftExample,
    DraftKeys,
    PlacedTensor,
    PlacedTensors,
    values_of_files,
)
from actshard.formats.kept import LEAST_FILES, KeptIndex, Listing

_VERSION = 1
_STATES = ("aux", "last")
_WIDEST = 1 << 32
"""Row strides and widths, in elements, are below this limit."""
_FURTHEST = 1 << 40
"""Offsets are below this limit."""


def place_of(root: Location, format: str, paths: Sequence[Location], keep: bool) -> KeptIndex | None:
    """The cached index of a folder; None if the folder has no index. Lists the folders of all files."""
    if not keep or not root.is_local or len(paths) < LEAST_FILES:
        return None
    listing = Listing(root)
    for folder in dict.fromkeys((root.key, *(path.parent.key for path in paths))):
        listing.entries(Location.at(folder), "")
    return KeptIndex(listing, format, _VERSION)


def stored_of(
    keys: DraftKeys, examples: Sequence[DraftExample | None]
) -> tuple[dict[str, Any], list[NDArray[Any]]] | None:
    """The index's header and arrays; None if an example is damaged, compressed or has to be decoded."""
    valid_examples = [example for example in examples if example is not None]
    if len(valid_examples) < len(examples):
        return None
    parts = {name: [_parts(example)[name] for example in valid_examples] for name in _parts(valid_examples[0])}
    every = [part for column_parts in parts.values() for part in column_parts]
    if any(example.gzipped for example in valid_examples) or any(map(_is_decoded, every)):
        return None
    header = {
        "kind": keys.kind,
        "parts": [[name, column_parts[0].array.dtype, column_parts[0].width] for name, column_parts in parts.items()],
        "values": values_of_files(valid_examples),
    }
    arrays = [np.array([example.tokens for example in valid_examples], np.uint32)]
    for column_parts in parts.values():
        arrays.append(np.array([part.array.offset for part in column_parts], np.uint64))
        arrays.append(np.array([part.token_stride for part in column_parts], np.uint64))
        arrays.append(np.array([part.array.swapped for part in column_parts], np.uint8))
    return header, arrays


def _parts(example: DraftExample) -> dict[str, PlacedTensor]:
    states = {name: part for name, part in zip(_STATES, (example.aux, example.last), strict=True) if part is not None}
    return {**states, **example.columns}


def _is_decoded(part: PlacedTensor) -> bool:
    """Whether the core decodes the tensor as a whole, for which its stored shape is needed."""
    is_strided = (part.stride != 1 and part.width > 1) or (part.tokens > 1 and part.token_stride < part.width)
    return is_strided or part.array.deflated is not None


@dataclass(frozen=True)
class KeptExamples:
    """The examples of an index. ``parts`` are tensors: ``"aux"``, ``"last"`` and columns; ``values`` are numbers and strings."""

    keys: DraftKeys
    tokens: NDArray[np.uint32]
    parts: dict[str, PlacedTensors]
    values: dict[str, list[object]]


def restored(
    kinds: Sequence[DraftKeys], n: int, header: Mapping[str, object], arrays: Sequence[NDArray[Any]]
) -> KeptExamples | None:
    """The examples of n files; None if the index is invalid. Offsets are checked against files when rows are read."""
    keys = next((keys for keys in kinds if keys.kind == header.get("kind")), None)
    parts = _checked_parts(keys, header.get("parts"))
    values = _checked_values(header.get("values"), n)
    if keys is None or parts is None or values is None or len(arrays) != 1 + 3 * len(parts):
        return None
    types = ("<u4", *("<u8", "<u8", "|u1") * len(parts))
    if any(a.dtype.newbyteorder("<").str != kind or len(a) != n for a, kind in zip(arrays, types, strict=True)):
        return None
    tokens = arrays[0]
    if not tokens.all() or any((a >= (_FURTHEST, _WIDEST, 2)[k % 3]).any() for k, a in enumerate(arrays[1:])):
        return None
    tensors = {}
    for k, (name, dtype, width) in enumerate(parts):
        tensors[name] = PlacedTensors(dtype, width, *arrays[1 + 3 * k : 4 + 3 * k])
        if ((tokens > 1) & (tensors[name].steps < width)).any():
            return None
    return KeptExamples(keys, tokens, tensors, values)


def _checked_parts(keys: DraftKeys | None, parts: object) -> list[tuple[str, str, int]] | None:
    """Names, dtypes and widths of the kind's tensors, in the order in which files are read."""
    if keys is None or not isinstance(parts, list):
        return None
    descriptors: list[tuple[str, str, int]] = []
    for part in parts:
        if not isinstance(part, list) or len(part) != 3 or type(part[2]) is not int or not isinstance(part[0], str):
            return None
        name, dtype, width = part
        sound = dtype in (FLOATS if name in _STATES else INTEGERS) and 0 < width < 1 << 31
        if not sound or (name not in _STATES and (name not in (IDS, *MASKS) or width != 1)):
            return None
        descriptors.append((name, dtype, width))
    names = [name for name, _, _ in descriptors]
    states = [name for name in names if name in _STATES]
    expected_states = [name for name, key in zip(_STATES, (keys.aux, keys.last), strict=True) if key is not None]
    if (
        len(set(names)) < len(names)
        or not {IDS, *keys.masks} <= set(names)
        or states not in (expected_states, ["last"])
    ):
        return None
    return None if "last" in expected_states and "last" not in states else descriptors


def _checked_values(values: Any, n: int) -> dict[str, list[object]] | None:
    """For each name, a number, a string or None per example."""
    sound = isinstance(values, dict) and all(
        isinstance(column, list)
        and len(column) == n
        and all(x is None or type(x) in (str, int, float, bool) for x in column)
        for column in values.values()
    )
    return values if sound else None
