"""Finds the dataset that a plan's commit already merged, when the commit is repeated."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from actshard import formats
from actshard.formats.contents import Contents, Options
from actshard.location import Location
from actshard.work import FOLDER, PARTS, is_merging, unfinished


def finished(format: str, path: Path) -> Contents | None:
    """A finished dataset, by its metadata; None if there is none. The plan's working folder may still exist inside it."""
    if not path.is_dir() or (path / PARTS).exists() or is_merging(path) or unfinished(path) is not None:
        return None
    if not formats.detect(format, path).matches:
        return None
    return formats.get(format).open(Location.at(path), Options.of(path))


def shape_of(contents: Any) -> list[Any]:
    """Number of examples, layers, width and dtype of a dataset, or of a store, as JSON values."""
    return [contents.num_examples, list(contents.layers), contents.d_model, str(contents.dtype)]


def leave(root: Path) -> None:
    """Removes the folder of working folders if it is empty."""
    with contextlib.suppress(OSError):
        (root / FOLDER).rmdir()
