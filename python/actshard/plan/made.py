"""Finds the dataset that a plan's commit already wrote, when the commit is repeated."""

from __future__ import annotations

import contextlib
from pathlib import Path

from actshard import formats
from actshard.work import FOLDER, PARTS, is_merging, unfinished


def is_finished(format: str, path: Path) -> bool:
    """Whether a folder is a finished dataset of a format. The plan's working folder may still exist inside it."""
    if not path.is_dir() or (path / PARTS).exists() or is_merging(path) or unfinished(path) is not None:
        return False
    return formats.detect(format, path).matches


def leave(root: Path) -> None:
    """Removes the folder of working folders if it is empty."""
    with contextlib.suppress(OSError):
        (root / FOLDER).rmdir()
