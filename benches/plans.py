"""Plans: the time of a task beside its work, and the bookkeeping of 10,000 tasks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actshard.plan.data import VERBS, Predicted
from actshard.plan.plan import Plan
from actshard.plan.verb import Beat, Result, Verb
from benches.measure import Row
from benches.sizes import size

TASKS = size(10_000, 20)
TINY_TASKS = size(1_000, 10)


class Nothing(Verb):
    """Tasks without work."""

    name = "nothing"

    def run(self, plan: Any, task: int, folder: Path, tell: Beat) -> dict[str, Any]:
        """Returns a record, and does nothing else."""
        return {"bytes": 1}

    def commit(self, plan: Any, results: Sequence[Result]) -> int:
        """Returns the number of results."""
        return len(results)

    def told(self, result: Mapping[str, Any]) -> tuple[int, int]:
        """Returns one byte and one file."""
        return 1, 1


def _nothing(count: int, folder: Path) -> Plan:
    VERBS.setdefault("nothing", "benches.plans:Nothing")
    tasks = tuple({"bytes": 1, "n": i} for i in range(count))
    return Plan("nothing", {}, (), tasks, Predicted(0, 0, 0, 0), folder / "work")


def overhead(repeats: int) -> Iterator[Row]:
    """Time of a task beside its work, in one process, on the disk of the temporary folder, where files are synced."""
    with tempfile.TemporaryDirectory() as where:
        plan = _nothing(TINY_TASKS, Path(where))
        began = time.perf_counter()
        for task in range(len(plan)):
            plan.run(task)
        took = (time.perf_counter() - began) / len(plan) * 1e3
    yield Row(
        "plan: a task without work",
        "synced to a disk",
        "",
        None,
        took,
        "ms",
        None,
        "<= 50 ms",
        took <= 50,
        "in one process",
    )


def bookkeeping(repeats: int) -> Iterator[Row]:
    """What 10,000 finished tasks cost the driver: where it begins, its status, and the commit beside the verb's own work."""
    with tempfile.TemporaryDirectory() as where:
        plan = _nothing(TASKS, Path(where))
        began = time.perf_counter()
        plan.book.begin(plan.as_dict())
        left = len(plan.left())
        start = time.perf_counter() - began
        began = time.perf_counter()
        for task in range(left):
            plan.run(task)
        run = time.perf_counter() - began
        times = []
        for step in (plan.status, plan.commit):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
    status, commit = times
    what = f"plan: {TASKS:,} tasks"
    yield Row(f"{what}, start and commit", "on a disk", "", None, start + commit, "s", None, "<= 1 s", start + commit <= 1,
              f"start {start:.3f} s, commit {commit:.3f} s")  # fmt: skip
    yield Row(f"{what}, status", "on a disk", "", None, status, "s", None, "", None)
    yield Row(f"{what}, all", "on a disk", "", None, run, "s", None, "", None, f"{run / TASKS * 1e3:.1f} ms each")
