"""The dataset that a plan merged: for commits that are repeated."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from actshard import formats
from actshard.formats.contents import Contents, Options
from actshard.location import Location
from actshard.work import FOLDER, PARTS, is_merging, unfinished


def finished(format: str, path: Path) -> Contents | None:
    """A finished dataset, by its metadata; None if there is none. It may lie beside the working folder of the plan that made it."""
    if not path.is_dir() or (path / PARTS).exists() or is_merging(path) or unfinished(path) is not None:
        return None
    if not formats.detect(format, path).matches:
        return None
    return formats.get(format).open(Location.at(path), Options.of(path))


def shape_of(contents: Any) -> list[Any]:
    """Number of examples, layers, width and dtype of a dataset, or of a store, as JSON values."""
    return [contents.num_examples, list(contents.layers), contents.d_model, str(contents.dtype)]


def leave(root: Path) -> None:
    """Removes the folder of working folders, if none is left."""
    with contextlib.suppress(OSError):
        (root / FOLDER).rmdir()
