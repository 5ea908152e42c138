"""The model behind docs/scaling.md reproduces what is known in closed form."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from benches.plan_costs import KINDS, SYSTEMS, Costs, FileSystem, Work, commit, measured, rate, simulate, whole_calls
from tests.torture import faults

NONE = dict.fromkeys(KINDS, 0.0)


@pytest.mark.parametrize(
    ("workers", "delay", "demand"), [(1, 3.0, 0.5), (5, 2.0, 0.3), (40, 1.0, 0.1), (200, 0.5, 0.01)]
)
def test_one_server_is_the_machine_repairman(workers: int, delay: float, demand: float) -> None:
    """M/M/1//N: the server is idle with probability 1 / sum of N! / (N - k)! (demand / delay)^k."""
    terms = [
        math.exp(math.lgamma(workers + 1) - math.lgamma(workers - k + 1) + k * math.log(demand / delay))
        for k in range(workers + 1)
    ]
    per_second, (busy,) = rate(workers, delay, [demand])
    assert busy == pytest.approx(1 - 1 / math.fsum(terms))
    assert per_second == pytest.approx(busy / demand)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (7, 3), (100, 4)])
def test_equal_servers_without_delay(workers: int, servers: int) -> None:
    per_second, _ = rate(workers, 0.0, [0.2] * servers)
    assert per_second == pytest.approx(workers / (0.2 * (workers + servers - 1)))


def test_few_workers_do_not_meet_and_many_are_as_fast_as_the_busiest_server() -> None:
    assert rate(1, 2.0, [0.25, 0.75])[0] == pytest.approx(1 / 3)
    per_second, shares = rate(5000, 2.0, [0.25, 0.75])
    assert per_second == pytest.approx(1 / 0.75)
    assert shares == pytest.approx([1 / 3, 1])


IDEAL = FileSystem("ideal", dict.fromkeys(KINDS, 1e12), 0.0, 1e15, 1e15, "")


def test_a_file_system_that_costs_nothing_takes_the_time_of_the_work() -> None:
    work = Work(bytes=1e12, tasks=1000, files=1000, speed=1e8, beside=0.0)
    costs = Costs(NONE, NONE, NONE, NONE)
    for workers in (1, 10, 1000, 5000):
        found = simulate(work, IDEAL, costs, workers)
        assert found.tasks == pytest.approx(1e4 / min(workers, 1000), rel=1e-3)
        assert found.commit == 0
        assert found.limit == ("number of tasks" if workers > 1000 else "workers")


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_no_plan_is_faster_than_bandwidth_or_metadata_allow(system: FileSystem) -> None:
    costs = Costs(
        {**NONE, "open": 50.0}, {**NONE, "create": 1.0, "rename": 1.0}, {**NONE, "open": 5.0}, {**NONE, "rename": 1.0}
    )
    for files, limit in ((1000, "bandwidth"), (10**9, "metadata")):
        work = Work(bytes=1e13, tasks=1000, files=files, speed=1e9)
        found = simulate(work, system, costs, 1000)
        least = max(
            2e13 / system.bandwidth, files * (1 / system.per_second["create"] + 1 / system.per_second["rename"])
        )
        assert 0.999999 * least <= found.tasks <= 1.5 * least
        assert found.limit == limit
        assert commit(work, system, costs) >= files / system.per_second["rename"]


def test_calls_that_strace_cuts_in_two_are_one_with_all_their_flags() -> None:
    """A call of an open file is told by a flag in the second part; it is not counted."""
    log = """7 newfstatat(3</d/a>, "" <unfinished ...>
8 openat(AT_FDCWD, "/d/b", O_RDONLY) = 4</d/b>
7 <... newfstatat resumed>, {...}, AT_EMPTY_PATH) = 0
8 unlink("/d/c" <unfinished ...>
"""
    assert list(whole_calls(log)) == [
        '8 openat(AT_FDCWD, "/d/b", O_RDONLY) = 4</d/b>',
        '7 newfstatat(3</d/a>, "" , {...}, AT_EMPTY_PATH) = 0',
        '8 unlink("/d/c" ',
    ]


@pytest.mark.slow
@pytest.mark.skipif(
    not faults.usable(), reason="strace is not installed or may not attach (Debian: apt-get install strace)"
)
def test_the_page_has_the_calls_of_today() -> None:
    page = (Path(__file__).parents[1] / "docs/scaling.md").read_text()
    costs = measured("saev")
    for what, calls in (
        ("task", costs.task), ("each file of a task", costs.file),
        ("commit, each task", costs.commit_task), ("commit, each file", costs.commit_file),
    ):  # fmt: skip
        row = page.partition(f"| saev | {what} | ")[2].partition("\n")[0].strip(" |").split(" | ")
        assert sum(calls.values()) == pytest.approx(float(row[-1]), rel=0.05, abs=0.5), what
        for kind, told in zip(KINDS, row, strict=False):
            assert calls[kind] == pytest.approx(float(told), rel=0.1, abs=1.5), (what, kind)
