"""A damaged dataset returns correct values or raises one ActshardError, within seconds and a gigabyte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.torture import mutations
from tests.torture.budget import runs, seed

pytestmark = pytest.mark.machine


@pytest.mark.parametrize("format", mutations.FORMATS)
def test_a_damaged_dataset_gives_right_values_or_one_error(tmp_path: Path, format: str) -> None:
    wrong = mutations.hunt(format, runs(60, 4_000), seed(), tmp_path)
    assert not wrong, "\n".join(wrong[:10])


def test_a_width_that_there_is_no_memory_for_is_an_error_of_ours(tmp_path: Path) -> None:
    """Missing chunks read as zeros, so a store may claim any width. This raised a bare MemoryError."""
    copy = tmp_path / "copy"
    shutil.copytree(mutations.GOLDEN / "zarr/missing_chunks_zero", copy)
    path = copy / "activations.zarr/arrays/activations/.zarray"
    array = json.loads(path.read_text())
    array["shape"][3] = 1 << 31
    path.write_text(json.dumps(array))
    assert not mutations.attempt(copy / "activations.zarr", cache=False)
