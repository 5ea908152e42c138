"""Bytes and files of a token cache, from its numbers of rows and elements, as ``rust/core/src/tokens/write.rs`` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from actshard.tokens.ledger import CONSOLIDATED, Ledger
from actshard.tokens.recipe import Recipe, shard_ledger

INNER, PER_FILE = 262_144, 512
"""Elements per frame, and frames per file."""
INDEX = PER_FILE * 16 + 4
"""Bytes of a file's index."""
_HEADER, _PAGE, _SMALLEST_BLOCK = 16, 4096, 32 << 10
"""Bytes of a frame's header, of the page before a full stored frame (which contains its header), and of the smallest block."""


@dataclass(frozen=True)
class Arrays:
    """How the arrays of a field are stored.

    Attributes:
        item: bytes of an element.
        texts: bytes of the ``zarr.json`` of ``data`` and ``offsets``.
        stored: for compressed fields, bytes per element of both without :func:`padding`; None for plain ones.
    """

    item: int
    texts: tuple[int, int]
    stored: tuple[float, float] | None

    def paths(self, field: str, rows: int, elements: int) -> list[str]:
        """Paths of the data files of both arrays, as in the ledger's checksums."""
        counts = {"offsets": _files(rows + 1 if rows else 0), "data": _files(elements)}
        return [f"{field}/{array}/c/{number}" for array, count in counts.items() for number in range(count)]

    def size(self, rows: int, elements: int) -> tuple[int, int]:
        """(bytes, files) of both arrays."""
        ends = rows + 1 if rows else 0
        files = 2 + _files(elements) + _files(ends)
        size = sum(self.texts) + (_files(elements) + _files(ends)) * INDEX
        if self.stored is not None:
            frames = elements * self.stored[0] + ends * self.stored[1]
            return size + round(frames) + padding(elements, self.item) + padding(ends, 8), files
        # The first frame of offsets is written last, and has no page before it.
        header_padding = _PAGE - _HEADER if ends >= INNER else 0
        return size + _plain(elements, self.item) + _plain(ends, 8) - header_padding, files


def padding(elements: int, item: int) -> int:
    """Approximate bytes of the zeros that fill up a compressed frame. Measured; each byte plane adds a constant."""
    zeros = -elements % INNER
    return zeros * item // 253 + 26 + 20 * item if zeros else 0


def _files(elements: int) -> int:
    return -(-elements // (INNER * PER_FILE))


def _plain(elements: int, item: int) -> int:
    full, rest = divmod(elements, INNER)
    return full * (_PAGE + INNER * item) + (_short(rest * item, INNER * item, item) if rest else 0)


def _short(used: int, size: int, item: int) -> int:
    """Bytes of a partial frame: one block with its elements, and other blocks that share one block of zeros (``short_frame``)."""
    block = max(-(-used // (item * 16)) * item * 16, _SMALLEST_BLOCK)
    if block * 2 > size:
        return _HEADER + size
    count = -(-size // block)
    last = size - (count - 1) * block
    frame_bytes = -(-(_HEADER + 4 * count + 4) // 16) * 16 + block
    if count > 2:
        frame_bytes += _zeros(block)
    return frame_bytes if last == block and count > 2 else frame_bytes + _zeros(last)


def _zeros(size: int) -> int:
    return 4 + 4 + (size - 25) // 255 + 1 + 6


def of_cache(
    recipe: Recipe, arrays: Mapping[str, Arrays], rows: Mapping[str, int], elements: Mapping[str, Mapping[str, int]]
) -> tuple[int, int]:
    """(bytes, files) of a finished cache, folders not counted.

    Args:
        recipe: the cache's recipe.
        arrays: how fields are stored, by name. Shards that are kept next to a consolidated cache are always plain.
        rows: number of rows by shard.
        elements: number of elements by shard and field.
    """
    ledger = recipe.ledger(rows, elements, {}, None)
    if recipe.layout == CONSOLIDATED:
        paths = [
            path
            for name, array in arrays.items()
            for path in array.paths(name, ledger.total_num_rows, ledger.field_counts[name])
        ]
    else:
        paths = list(rows)
    size, files = _ledger_size(ledger, paths), 1
    folders = [(shard, arrays) for shard in recipe.kept]
    plain = {name: Arrays(a.item, a.texts, None) for name, a in arrays.items()}
    if recipe.layout == CONSOLIDATED:
        folders = [(shard, plain) for shard in recipe.kept]
        for name, array in arrays.items():
            array_size = array.size(ledger.total_num_rows, ledger.field_counts[name])
            size, files = size + array_size[0], files + array_size[1]
    for shard, stored in folders:
        shard_entry = shard_ledger(shard, rows[shard], elements[shard], "0" * 32, 0, recipe.metadata)
        paths = [
            p for name, array in stored.items() for p in array.paths(name, rows[shard], elements[shard].get(name, 0))
        ]
        size, files = size + _ledger_size(shard_entry, paths), files + 1 + bool(rows[shard])
        for name, array in stored.items():
            array_size = array.size(rows[shard], elements[shard].get(name, 0))
            size, files = size + array_size[0], files + array_size[1]
    return size, files


def _ledger_size(ledger: Ledger, paths: Iterable[str]) -> int:
    return len(json.dumps(ledger.with_checksums(dict.fromkeys(paths, "0" * 8)).as_dict()))
