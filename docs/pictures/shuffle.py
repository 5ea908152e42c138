"""Draws docs/pictures/shuffle.svg: where rows come in three streams of one small dataset.

python docs/pictures/shuffle.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

import actshard

EXAMPLES, TOKENS, WIDTH = 48, 40, 1024
SIDE, GAP = 230, 46


def dataset(folder: Path) -> Path:
    """A Zarr store of one layer."""
    store = folder / "activations.zarr"
    array = store / "arrays/activations"
    array.mkdir(parents=True)
    (store / ".zgroup").write_text('{"zarr_format": 2}')
    shape = [EXAMPLES, 1, TOKENS, WIDTH]
    meta = {"zarr_format": 2, "shape": shape, "chunks": [1, 1, TOKENS, WIDTH], "dtype": "<f4", "compressor": None,
            "filters": None, "fill_value": 0, "order": "C"}  # fmt: skip
    (array / ".zarray").write_text(json.dumps(meta))
    for i in range(EXAMPLES):
        (array / f"{i}.0.0.0").write_bytes(np.zeros((TOKENS, WIDTH), np.float32).tobytes())
    return store


def main() -> None:
    """Writes the picture."""
    panels = []
    with tempfile.TemporaryDirectory() as folder:
        import warnings

        warnings.simplefilter("ignore")
        store = actshard.open(dataset(Path(folder)))
        quarter = EXAMPLES * TOKENS * WIDTH * 4 // 4 + (1 << 16)
        for name, options in (
            ("shuffle=None", {}),
            ('shuffle="window", a pool of a quarter', {"shuffle": "window", "memory": quarter}),
            ('shuffle="exact"', {"shuffle": "exact"}),
        ):
            stored = np.concatenate([b.examples * TOKENS + b.tokens for b in store.stream(0, 64, **options)])
            panels.append((name, stored))
    n = EXAMPLES * TOKENS
    parts = []
    for k, (name, stored) in enumerate(panels):
        x = 34 + k * (SIDE + GAP)
        parts.append(f'<text x="{x}" y="18">{name.replace(chr(34), "&quot;")}</text>')
        parts.append(f'<rect x="{x}" y="28" width="{SIDE}" height="{SIDE}" fill="none" stroke="#999"/>')
        dots = "".join(
            f"M{x + p * SIDE / n:.1f} {28 + SIDE - s * SIDE / n:.1f}h.1"
            for p, s in enumerate(stored.tolist())
            if p % 2 == 0
        )
        parts.append(f'<path d="{dots}" stroke="#2467b3" stroke-width="1.7" stroke-linecap="round"/>')
        parts.append(
            f'<text x="{x + SIDE / 2}" y="{SIDE + 46}" text-anchor="middle" fill="#666">place in the stream</text>'
        )
    parts.append(
        f'<text transform="translate(24 {28 + SIDE / 2}) rotate(-90)" text-anchor="middle" fill="#666">place on disk</text>'
    )
    width, height = 34 + 3 * SIDE + 2 * GAP + 6, SIDE + 56
    Path(__file__).with_suffix(".svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><title>Rows of three streams: place in the stream against place on disk</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    main()
