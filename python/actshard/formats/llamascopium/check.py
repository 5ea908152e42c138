"""Checks of folders of chunks; see docs/formats/llamascopium.md."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actshard.base.location import Location
from actshard.formats.contents import Options
from actshard.formats.format import Tell
from actshard.formats.llamascopium.files import TOKENS, Chunk
from actshard.formats.llamascopium.read import ChunkFolder, rows_of
from actshard.formats.report import Report


def check(root: Location, report: Report, tell: Tell) -> None:
    """Parses all chunks. Compares tokens and masks between hook points, and the number of objects with that of sequences."""
    folder = report.faults.parse(root, lambda: ChunkFolder(root, faults=report.faults))
    if folder is None:
        return
    options = Options.of(root)
    report.count("files", sum(len(chunks) for chunks in folder.hooks))
    for number, chunk in enumerate(folder.first):
        tell("chunks", number, len(folder.first))
        with report.noting(chunk.path):
            chunk.objects()
        for name in folder.per_token:
            with report.noting(chunk.path):
                values = _values(chunk, name, options)
                if name != TOKENS and values.size and not np.isin(values, (0, 1)).all():
                    report.add("mask-value", chunk.path, sorted(set(values.tolist()))[-1], "0 or 1", f"tensor '{name}'")
                for hook, chunks in zip(folder.names[1:], folder.hooks[1:], strict=True):
                    other_chunk = chunks[number]
                    if name in other_chunk.arrays and not np.array_equal(values, _values(other_chunk, name, options)):
                        report.add(
                            "claim",
                            other_chunk.path,
                            f"other values in {hook}",
                            f"the values in {folder.names[0]}",
                            f"tensor '{name}'",
                        )


def _values(chunk: Chunk, name: str, options: Options) -> NDArray[np.generic]:
    tokens = np.full(chunk.examples, chunk.tokens, np.uint32)
    rows = rows_of(name, [[chunk]], 1, tokens, options)
    values: NDArray[np.generic] = rows.gather_whole(0, np.arange(chunk.examples), None, None)
    return values.reshape(-1)
