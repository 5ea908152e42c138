"""The part of a plan that one process runs stays small: the commit does not decode the source, and long tasks begin first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import actshard
from actshard.plan.data import Predicted
from actshard.plan.plan import Plan
from actshard.plan.runners.local import last_to_first
from actshard.reading.store import Store
from actshard.writing.converting.planning import ConversionRequest


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Deflated shards, which hold their token counts inside."""
    path = tmp_path / "shards"
    rng = np.random.default_rng(0)
    with actshard.create(path, "pickle", layers=[0, 1], d_model=8, shard_bytes="2KiB") as writer:
        for _ in range(6):
            writer.append(rng.standard_normal((4, 2, 5, 8)).astype(np.float32))
    assert len(list(path.glob("*.pkl*"))) > 2
    return path


def refuses(*_: Any) -> NoReturn:
    raise AssertionError("token counts of the source were read")


@pytest.mark.parametrize("verb", ["convert", "verify"])
def test_the_commit_reads_no_token_counts(
    verb: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some formats decode all of their shards for them."""
    if verb == "convert":
        plan = actshard.plan.convert(shards, tmp_path / "made", "zarr", tasks=3)
    else:
        plan = actshard.plan.verify(shards, tasks=3, work=tmp_path / "work")
    assert len(plan) == 3
    for task in range(3):
        plan.run(task)
    with monkeypatch.context() as patched:
        patched.setattr(ConversionRequest, "stored_of", refuses)
        patched.setattr(ConversionRequest, "stored", property(refuses))
        patched.setattr(Store, "token_counts", property(refuses))
        made = plan.commit()
    if verb == "convert":
        alone = actshard.convert(shards, tmp_path / "alone", "zarr")
        assert made.losses == alone.losses
    else:
        assert made == actshard.verify(shards, deep=True)


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ([100, 101, 100, 101], [0, 1, 2, 3]),  # task 0 of a check also checks the files
        ([10, 100, 50, 99], [1, 3, 2, 0]),
        ([0, 0], [0, 1]),
    ],
)
def test_long_tasks_begin_first_and_of_equal_ones_the_first(sizes: list[int], order: list[int], tmp_path: Path) -> None:
    plan = Plan("nothing", {}, (), tuple({"bytes": size} for size in sizes), Predicted(0, 0, 0, 0), tmp_path)
    assert last_to_first(plan, range(len(sizes)))[::-1] == order
