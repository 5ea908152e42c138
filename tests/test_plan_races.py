"""Guarantees where one process ends a plan while another begins it, or runs one of its tasks again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.plan import Plan

VERBS: dict[str, Callable[[Path, Path], Plan]] = {
    "zarr": lambda source, at: actshard.plan.convert(source, at / "d", "zarr", tasks=2),
    "saev": lambda source, at: actshard.plan.convert(source, at / "d", "saev", tasks=2),
    "lmprobe": lambda source, at: actshard.plan.convert(source, at / "d", "lmprobe", tasks=2, shard_bytes=100),
    "stage": lambda source, at: actshard.plan.stage(source, at / "d", tasks=2),
    "verify": lambda source, at: actshard.plan.verify(source, tasks=2, work=at / "w"),
    "stats": lambda source, at: actshard.plan.stats(source, tasks=2, work=at / "w"),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    with actshard.create(path, "zarr", layers=[0, 1], d_model=8) as writer:
        writer.append(np.random.default_rng(0).standard_normal((6, 2, 3, 8)).astype(np.float32))
    return path


def _finish(plan: Plan) -> None:
    for task in range(len(plan)):
        plan.run(task)
    plan.commit()


def _all_of(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize("call", ["run", "begin"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_folder_that_a_commit_removed_does_not_come_again(
    verb: str, call: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process finds neither the plan's folder nor a result; before it makes the folder, others run and commit the plan."""
    plan, other = VERBS[verb](source, tmp_path), VERBS[verb](source, tmp_path)
    look = Plan._committed
    before: list[str] = []

    def late(self: Plan, book: Any) -> Any:
        monkeypatch.setattr(Plan, "_committed", look)
        found = look(self, book)
        _finish(other)
        before.extend(_all_of(tmp_path))
        return found

    monkeypatch.setattr(Plan, "_committed", late)
    if call == "run":
        assert plan.run(0)["committed"]
    else:
        assert not plan.begin()
    assert _all_of(tmp_path) == before, "what the commit left"
    assert plan.status().committed


@pytest.mark.parametrize("verb", VERBS)
def test_an_attempt_whose_folder_a_commit_removes_is_told_that_all_is_done(
    verb: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, other = VERBS[verb](source, tmp_path), VERBS[verb](source, tmp_path)
    plan.begin()
    kind = type(plan.implementation)
    run = kind.run
    before: list[str] = []

    def late(self: Any, *given: Any) -> Any:
        monkeypatch.setattr(kind, "run", run)
        _finish(other)
        before.extend(_all_of(tmp_path))
        return run(self, *given)

    monkeypatch.setattr(kind, "run", late)
    plan.run(0)
    assert _all_of(tmp_path) == before, "what the commit left"
    assert plan.status().committed
