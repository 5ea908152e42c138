"""Study: how far rows are from what 8 bits an element keep of them, by the kind of scales.

python -m benches.int8 [PATH]

PATH is any dataset that actshard opens; the default is the bundled one. int8 forms are written as Zarr 3 and read back.
float8_e4m3fn, which Zarr stores do not have, is rounded by ml_dtypes here, with a scale per token. Bits are those of codes and
scales, without index, padding and columns. The error of a form is the root of the mean square of the layers' relative errors, as of
``actshard.estimate``.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import actshard
from actshard.cli.demo import DATASET

KINDS = ("channel", "block32", "block64", "token", "layer")
LARGEST = 448
"""The largest float8_e4m3fn."""


def rows_of(store: actshard.Store) -> list[NDArray[np.float32]]:
    """All rows of each layer."""
    numbers = np.arange(len(store))
    return [np.concatenate(store.sequences(numbers, layer)).astype(np.float32) for layer in store.layers]


def error(rows: list[NDArray[np.float32]], stored: list[NDArray[np.float32]]) -> tuple[float, float]:
    """Relative error and mean cosine."""
    errors, cosines = [], []
    for a, b in zip(rows, stored, strict=True):
        x, y = a.astype(np.float64), b.astype(np.float64)
        errors.append(np.linalg.norm(x - y) / np.linalg.norm(x))
        norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
        cosines.append(((x * y).sum(axis=1)[norms > 0] / norms[norms > 0]).mean())
    return float(np.sqrt(np.mean(np.square(errors)))), float(np.mean(cosines))


def float8(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows as float8_e4m3fn keeps them with a scale per row."""
    scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True) / np.float32(LARGEST), np.float32(1e-12))
    codes = (rows / scales).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32) * scales


def measure(path: Path) -> list[tuple[str, float, float, float]]:
    """Name, bits of an element, relative error and mean cosine of each form."""
    source = actshard.open(path)
    rows, width = rows_of(source), source.d_model
    count = sum(map(len, rows))
    scales = {"channel": len(rows) * width, "layer": len(rows), "token": count}
    table = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in KINDS:
            number = scales.get(kind) or count * width // int(kind.removeprefix("block"))
            written = actshard.convert(source, Path(scratch) / kind, "zarr", version=3, dtype="int8", scales=kind)
            stored = actshard.open(written.path)
            table.append((f"int8, {kind}", 8 + 32 * number / (count * width), *error(rows, rows_of(stored))))
    table.append(("float8_e4m3fn, token", 8 + 32 / width, *error(rows, [float8(x) for x in rows])))
    return sorted(table, key=lambda row: row[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=None)
    path = parser.parse_args().path
    if path is None:
        path = DATASET
    warnings.simplefilter("ignore")
    print("| form | bits an element | relative error | cosine |\n|---|---|---|---|")
    for name, bits, relative, cosine in measure(path):
        print(f"| {name} | {bits:.2f} | {relative:.4f} | {cosine:.5f} |")


if __name__ == "__main__":
    main()
