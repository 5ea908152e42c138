"""The cached index of a described folder: a :class:`RowIndex`, stored by :mod:`actshard.formats.kept`.

Names and order of files follow from the folder's listing, so an index contains only numbers: per row file the position of its path,
row stride and byte order; per example and layer a row file and an offset. No index is stored for a folder with arrays that are
decoded (compressed, or without contiguous rows).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base._arguments import NUMPY_BY_NAME
from actshard.base.location import Location
from actshard.formats.kept import LEAST_FILES, KeptIndex, Listing
from actshard.formats.layout_toml.description import Description
from actshard.formats.layout_toml.files import matches
from actshard.formats.layout_toml.index import RowFile, RowIndex, build, examples_of, spread
from actshard.formats.layout_toml.units import Unit, units_of

_VERSION = 1
_MOST = 1 << 40


def index_of(
    root: Location, described: Description, limit: int, keep: bool, *, skips_incomplete: bool = False
) -> RowIndex:
    """The rows of a described folder, from its cached index if there is one."""
    if skips_incomplete:
        return build(root, described, limit, skips_incomplete=True)
    if (
        not keep
        or not root.is_local
        or described.scales is not None
        or described.activations.step_of("example") is not None
    ):
        return build(root, described, limit)
    listing = Listing(root)
    units = units_of(root, described, listing)
    if sum(len(unit.files) for unit in units) < LEAST_FILES:
        return build(root, described, limit, units)
    _list_part_files(root, described, listing)
    kept_index = KeptIndex(
        listing, "layout_toml", _VERSION, repr(replace(described, source=None, text="", metadata={}, remarks=()))
    )
    stored_index = kept_index.load()
    index = None if stored_index is None else restored(units, *stored_index)
    if index is None:
        index = build(root, described, limit, units)
        if not any(file.decoded is not None or file.gzipped for file in index.row_files):
            kept_index.save(*stored_of(index))
    return index


def _list_part_files(root: Location, described: Description, listing: Listing) -> None:
    """Lists the files of lengths, tokens and columns."""
    for part in (described.lengths, described.tokens, *described.columns):
        if part is None:
            continue
        if part.pointer is not None:
            listing.exists(root.joinpath(*part.pointer[0].split("/")))
        elif part.files is not None and part.files.captures:
            matches(root, part.files, listing)
        elif part.files is not None:
            listing.exists(root.joinpath(*part.files.text.split("/")))


def stored_of(index: RowIndex) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """The index's header and arrays."""
    index = spread(index)
    header = {"layers": list(index.layers), "d_model": index.d_model, "dtype": index.dtype}
    return header, [
        np.array([unit.count for unit in index.units], np.int64),
        np.array([file.path for file in index.row_files], np.uint32),
        np.array([file.step for file in index.row_files], np.uint64),
        np.array([file.swapped for file in index.row_files], np.uint8),
        index.numbers.reshape(-1),
        index.starts.reshape(-1),
        index.tokens,
        index.skipped,
        np.zeros(0, np.int64) if index.selection is None else index.selection,
        np.array([index.selection is not None], np.uint8),
    ]


_TYPES = ("<i8", "<u4", "<u8", "|u1", "<u4", "<u8", "<u4", "<i8", "<i8", "|u1")


def restored(units: list[Unit], header: dict[str, Any], arrays: list[NDArray[Any]]) -> RowIndex | None:
    """The rows of units; None if the index is invalid. Offsets are checked against files when rows are read."""
    layers, d_model, dtype = header.get("layers"), header.get("d_model"), header.get("dtype")
    if tuple(array.dtype.newbyteorder("<").str for array in arrays) != _TYPES:
        return None
    counts, paths, steps, swapped, numbers, starts, tokens, skipped, selection, has_kept = arrays
    places = [path for unit in units for path in unit.files]
    sound = (
        isinstance(layers, list)
        and 0 < len(layers) == len({(type(layer), layer) for layer in layers if type(layer) in (int, str)})
        and type(d_model) is int
        and 0 < d_model < _MOST
        and isinstance(dtype, str)
        and dtype in NUMPY_BY_NAME
        and len(counts) == len(units)
        and _between(counts, 0, _MOST)
        and len(paths) == len(steps) == len(swapped)
        and _between(paths, 0, len(places))
        and len(has_kept) == 1
        and len(tokens) == len(skipped)
        and _between(skipped, 0, _MOST)
        and len(numbers) == len(starts) == len(layers) * len(tokens)
    )
    if not sound or not isinstance(layers, list):
        return None
    total = sum(counts.tolist())
    if has_kept[0]:
        if len(selection) != len(tokens) or not _between(selection, 0, total) or bool((np.diff(selection) <= 0).any()):
            return None
    elif len(tokens) != total:
        return None
    first = 0
    for unit, count in zip(units, counts.tolist(), strict=True):
        unit.first, unit.count = first, count
        first += count
    positions, ids, numbered = examples_of(units)
    n = len(tokens)
    index = RowIndex(
        layers=tuple(layers),
        d_model=d_model,  # type: ignore[arg-type]  # `sound` has its type
        dtype=dtype,  # type: ignore[arg-type]  # `sound` has its type
        units=units,
        paths=places,
        row_files=[
            RowFile(path, step, swap, False, None)
            for path, step, swap in zip(paths.tolist(), steps.tolist(), (swapped != 0).tolist(), strict=True)
        ],
        numbers=numbers.reshape(len(layers), n),
        starts=starts.reshape(len(layers), n),
        tokens=tokens,
        skipped=skipped,
        positions=positions,
        ids=ids,
        numbered=numbered,
    )
    if not has_kept[0]:
        return index
    return replace(
        index, positions=np.asarray(positions)[selection], ids=[ids[i] for i in selection.tolist()], selection=selection
    )


def _between(values: NDArray[Any], low: int, high: int) -> bool:
    return not values.size or (int(values.min()) >= low and int(values.max()) < high)
