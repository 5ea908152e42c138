"""``open`` refuses a damaged dataset if and only if its parser reported a fault to ``verify``."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.torture import agreement
from tests.torture.budget import runs, seed

pytestmark = pytest.mark.machine


@pytest.mark.parametrize("kind", agreement.KINDS)
def test_open_and_verify_agree_on_damaged_datasets(kind: str, tmp_path: Path) -> None:
    wrong = agreement.hunt(kind, runs(6, 400), seed(), tmp_path)
    assert not wrong, "\n".join(wrong[:10])
