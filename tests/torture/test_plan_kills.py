"""SIGKILL of tasks, commits and drivers of plans. ``python -m tests.torture.plan_kills`` kills 500 over all verbs and formats."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.torture import plan_kills
from tests.torture.budget import first_number, runs
from tests.torture.plan_cases import Case, cases

CASES = ("convert-pickle", "tokenize-plain", "merge-saev", "create-pickle", "stats-npy")
COMMITS = (("convert-saev", 1), ("tokenize-lz4", 13), ("create-zarr", 7))
"""Cases, and of how many kill points ``make test-slow`` takes one. Of the first, it takes all that make or rename a file."""
traced = pytest.mark.skipif(
    not plan_kills.usable(), reason="strace is not installed or may not attach (Debian: apt-get install strace)"
)


def case_of(name: str) -> Case:
    (case,) = (case for case in cases() if case.name == name)
    return case


@pytest.mark.slow
@traced
@pytest.mark.parametrize("name", CASES)
def test_plans_are_finished_with_the_bytes_of_one_process_after_any_kill(tmp_path: Path, name: str) -> None:
    *_, told = plan_kills.campaign(tmp_path, [case_of(name)], runs(2, 100), first_number(), drivers=False)
    assert told["violations"] == []
    assert told["killed"] >= runs(2, 100)


@pytest.mark.slow
@traced
@pytest.mark.parametrize(("name", "each"), COMMITS)
def test_a_commit_killed_before_a_change_of_a_name_is_finished_by_the_next(
    tmp_path: Path, name: str, each: int
) -> None:
    bench = plan_kills.Bench(case_of(name), tmp_path / name)
    calls = ("rename", "openat") if each == 1 else ()
    kills, points = bench.every("commit", calls, (0, runs(each, 1)))
    assert kills == points >= 6


@pytest.mark.slow
def test_killed_drivers_and_workers_leave_a_plan_that_is_finished_with_the_same_bytes(tmp_path: Path) -> None:
    bench = plan_kills.Bench(case_of("merge-saev"), tmp_path / "merge")
    killed = rounds = 0
    while killed < runs(1, 60):
        rounds += 1
        assert rounds < 100 * runs(1, 10), "drivers end before they are killed"
        bench.reset()
        said = bench.kill_driver(random.Random(first_number() + rounds))
        killed += not said.startswith("late")
        bench.half_done(said)
        bench.finish(said, [0, 1, 2, 3])


def test_a_result_with_a_wrong_byte_or_a_lost_file_is_a_violation(tmp_path: Path) -> None:
    bench = plan_kills.Bench(case_of("merge-saev"), tmp_path / "bench")
    bench.round(0, drivers=False, traced=False)
    path = max((p for p in (bench.folder / "d").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(plan_kills.Violation, match="other bytes than those of one process"):
        bench.compare("here", bench.value)
    path.unlink()
    with pytest.raises(plan_kills.Violation, match="other files"):
        bench.compare("here", bench.value)
    path.write_bytes(data)
    (bench.folder / "d" / "more").mkdir()
    with pytest.raises(plan_kills.Violation, match="left over"):
        bench.compare("here", bench.value)
