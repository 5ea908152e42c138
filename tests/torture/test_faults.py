"""Failing and killing system calls, and a model of power failures: committed data are never lost.

`make test-slow` samples a few faults per job; `make torture` runs `python -m tests.torture.faults`, which injects all of them.
"""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path

import pytest
from tests.torture import durability, faults, jobs
from tests.torture.budget import TORTURE, runs, seed


@functools.cache
def _usable() -> bool:
    return faults.usable()


@pytest.fixture
def strace() -> None:
    if not _usable():
        pytest.skip("strace is not installed or may not attach (Debian: apt-get install strace)")


def _draw(bench: faults.Bench, n: int) -> list[str]:
    every = [*bench.faults(list(faults.CALLS), None, persistent=True), *bench.kills(list(faults.CALLS), None)]
    return random.Random(f"{bench.job} {n} {seed()}").sample(every, min(n, len(every)))


def _failing_removals(bench: faults.Bench) -> list[str]:
    """From each call on no file can be removed: what ended well must open, although its marks of unfinished work stay."""
    return [inject for inject in bench.faults(["unlink", "unlinkat"], None, persistent=True) if inject.endswith("+")]


@pytest.mark.slow
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("job", jobs.JOBS)
def test_nothing_committed_is_lost_when_a_system_call_fails_or_kills(tmp_path: Path, job: str) -> None:
    bench = faults.Bench(job, tmp_path)
    for inject in sorted({*_draw(bench, runs(6, 400)), *_failing_removals(bench)}):
        bench.disturb(inject)


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("job", jobs.JOBS)
def test_data_are_on_the_disk_before_the_manifest_and_folders_after_it(tmp_path: Path, job: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    jobs.prepare(job, folder)
    assert faults.run(job, folder, log=tmp_path / "log").kind == "done"
    assert durability.faults(tmp_path / "log", folder) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("job", jobs.JOBS)
def test_a_full_disk_is_said_and_costs_nothing_committed(tmp_path: Path, job: str) -> None:
    try:
        faults.full_disk(job, tmp_path, [24, 40, 64] if not TORTURE else list(range(8, 400, 8)))
    except OSError as error:
        pytest.skip(f"a disk cannot be mounted here: {error}")


def test_the_model_of_the_disk_finds_what_is_not_synced(tmp_path: Path) -> None:
    log, root = tmp_path / "log", "/x"
    good = [
        '1 openat(AT_FDCWD</>, "/x/d/.m.part", O_WRONLY|O_CREAT|O_TRUNC) = 3</x/d/.m.part>',
        "1 write(3</x/d/.m.part>, ...) = 5",
        "1 fsync(3</x/d/.m.part>) = 0",
        '1 rename("/x/d/.m.part", "/x/d/m") = 0',
        "1 fsync(4</x/d>) = 0",
    ]
    log.write_text("\n".join(good))
    assert durability.faults(log, Path(root)) == []
    log.write_text("\n".join(good[:2] + good[3:]))
    assert any("before its data are synced" in fault for fault in durability.faults(log, Path(root)))
    log.write_text("\n".join(good[:4]))
    assert durability.faults(log, Path(root)) == ["never synced: entry of d/m"]
    other = ['1 openat(AT_FDCWD</>, "/x/d/a", O_WRONLY|O_CREAT) = 5</x/d/a>', "2 pwrite64(5</x/d/a>, ...) = 5"]
    log.write_text("\n".join(other + good))
    assert any("(the manifest) gets its name before data of d/a" in f for f in durability.faults(log, Path(root)))
