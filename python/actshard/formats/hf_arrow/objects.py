"""Saves ``datasets.Dataset`` objects to folders.

The files behind an object can differ from its contents: ``select``, ``shuffle`` and ``filter`` add an indices mapping, and columns
may be renamed or removed. ``save_to_disk`` writes the contents.
"""

from __future__ import annotations

from actshard.base.errors import ArgumentTypeError
from actshard.base.location import Location


def save(dataset: object, folder: Location) -> None:
    """Writes a ``datasets.Dataset`` to a new folder.

    Raises:
        ArgumentTypeError: the object is a ``DatasetDict`` or an ``IterableDataset``.
    """
    import datasets

    if not isinstance(dataset, datasets.Dataset):
        kind, remedy = type(dataset).__name__, "collect its rows in one first"
        if isinstance(dataset, dict):
            remedy = f"pass one of its splits: {', '.join(map(repr, dataset))}"
        raise ArgumentTypeError(f"src: expected a datasets.Dataset, found {kind}; {remedy}")
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))
    finally:
        if shown:
            datasets.enable_progress_bars()
