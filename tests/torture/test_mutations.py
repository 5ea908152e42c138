"""A damaged dataset gives right values or one ActshardError, within seconds and a gigabyte."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.torture import mutations
from tests.torture.budget import TORTURE, runs


@pytest.mark.parametrize("format", mutations.FORMATS)
def test_a_damaged_dataset_gives_right_values_or_one_error(tmp_path: Path, format: str) -> None:
    wrong = mutations.hunt(format, runs(60, 4_000), 1 if TORTURE else 0, tmp_path)
    assert not wrong, "\n".join(wrong[:10])
