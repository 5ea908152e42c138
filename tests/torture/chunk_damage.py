"""Damages files, deterministically by seed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

DAMAGES = 60
"""Number of damaged copies per store for which zarr-python's results are recorded."""


def values() -> np.ndarray:
    """Values of the stores in `golden/zarr_codecs`: compressible, with distinct rows."""
    flat = np.arange(3 * 2 * 8 * 4, dtype=np.float32)
    return (np.floor(flat / 3) * 0.25 - 7).reshape(3, 2, 8, 4)


def chunk_files(store: Path) -> list[Path]:
    """Chunk files of the activations, sorted by name."""
    folder = store / "arrays" / "activations"
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in (".zarray", ".zattrs", "zarr.json"))


def damaged(data: bytes, seed: int) -> bytes:
    """The bytes after one to three changes."""
    rng = random.Random(seed)
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(made)) if made else 0
        kind = rng.randrange(8)
        if kind <= 2 and made:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 3 and made:
            made[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 4:
            del made[at:]
        elif kind == 5:
            made[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 2, 4, 16))))
        elif kind == 6:
            del made[at : at + rng.choice((1, 4, 8))]
        else:
            made += bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 64))))
    return bytes(made)
