"""Reads a Parquet file with one changed byte after the other, in a process of its own: pyarrow ends the process for some of them.

    python -m tests.parquet_flips USE FILE PLACES          PLACES: JSON, [[offset, mask], ...]

``FILE`` is changed in place. Each place is printed before it is tried, so the last line of a process that died names it. An
exception that is not actshard's ends the process with its traceback.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

import actshard
from actshard import tokens
from actshard.base.errors import ActshardError
from actshard.tokens import pieces
from actshard.tokens.sources import Source, expand


def _whole(path: Path) -> None:
    store = actshard.open(path)
    with contextlib.suppress(ActshardError):
        for layer in store.layers[:1]:  # a changed key may hide the layers
            for batch in store.stream(layer, 64, tokens="all"):
                assert batch.activations.shape[1] == store.d_model
    with contextlib.suppress(ActshardError):
        store.table  # noqa: B018 -- reads it
    with contextlib.suppress(ActshardError):
        store.read_columns(list(store.contents.column_names)[:2])


def _index(part: Path) -> Path:
    return part.parent.parent


def _build(path: Path) -> None:
    target = path.parent / "cache"
    shutil.rmtree(target, ignore_errors=True)
    tokens.build_cache(path, target, format=tokens.PrebuiltFormat())


def _divide(path: Path) -> None:
    """As a plan and its tasks do."""
    sources = [source for source in expand(path) if isinstance(source, Source)]
    size = path.stat().st_size
    for _, task in pieces.divide_files(sources, [size], 3, size // 3):
        for piece in task:
            for _ in pieces.source_of(piece, sources).records(["input_ids"]):
                pass


def _nothing(path: Path) -> None:
    actshard.open(path)


USES: dict[str, Callable[[Path], object]] = {
    "lmprobe-open": lambda path: _nothing(_index(path)),
    "lmprobe-read": lambda path: _whole(_index(path)),
    "lmprobe-verify": lambda path: actshard.verify(_index(path)),
    "lmprobe-deep": lambda path: actshard.verify(_index(path), deep=True),
    "vectors-open": _nothing,
    "vectors-read": _whole,
    "vectors-verify": actshard.verify,
    "vectors-deep": lambda path: actshard.verify(path, deep=True),
    "tokens-build": _build,
    "tokens-divide": _divide,
}


def main(use: str, file: Path, places: list[tuple[int, int]]) -> None:
    """Tries all places."""
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")  # changed values may overflow
    contents = file.read_bytes()
    for offset, mask in places:
        print(use, offset, hex(mask), flush=True)
        changed = bytearray(contents)
        changed[offset] ^= mask
        file.unlink()
        file.write_bytes(changed)
        with contextlib.suppress(ActshardError):
            USES[use](file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
