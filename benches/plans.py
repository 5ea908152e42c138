"""Plans: two workers against one, the time of a task beside its work, and the bookkeeping of 10,000 tasks.

Two workers against one: source and result are in memory (/dev/shm), so that no disk is the limit, with ``ACTSHARD_NUM_THREADS=1``
and as many processors as workers: a worker is one core. The start of the workers, about half a second each, and the commit count.
Outputs are compared first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from actshard.plan.data import VERBS, Predicted
from actshard.plan.plan import Plan
from actshard.plan.verb import Beat, Result, Verb
from benches import corpus
from benches.measure import Engine, Row, interleave, median
from benches.sizes import size

TASKS = size(10_000, 20)
TINY_TASKS = size(1_000, 10)
_EXAMPLES, _AT_ONCE = size(4_000, 40), 20
_MEMORY = Path("/dev/shm")


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder in memory; one thread for each worker, and a time that does not pass."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        before = dict(os.environ)
        os.environ |= {"ACTSHARD_NUM_THREADS": "1", "SOURCE_DATE_EPOCH": "1700000000"}
        try:
            yield Path(name)
        finally:
            os.environ.clear()
            os.environ |= before


def _source(path: Path, format: str, examples: int, **options: Any) -> int:
    """A store of float32 rows; returns its bytes."""
    rows = np.random.default_rng(0).standard_normal((_AT_ONCE, 4, 128, 256), np.float32)
    with actshard.create(path, format, layers=range(4), d_model=256, **options) as writer:
        for _ in range(0, examples, _AT_ONCE):
            writer.append(rows)
            rows += 1  # examples differ
    return examples * rows[0].nbytes


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).digest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _on(workers: int, plan: Plan) -> None:
    """Runs a plan with workers on as many processors: one worker reads ahead with a thread that may have another one."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(every)[:workers])
    try:
        actshard.run(plan, workers=workers)
    finally:
        os.sched_setaffinity(0, every)


def _compared(
    name: str, folder: Path, make: Callable[[], Plan], alone: Callable[[], Any], repeats: int, note: str
) -> Row:
    """Seconds with one worker and with two, and of the function in one process with all threads; the plan is made before."""

    def clean() -> None:
        for path in folder.glob("d*"):
            shutil.rmtree(path)
        for path in folder.glob("work*"):
            path.unlink() if path.is_file() else shutil.rmtree(path)

    def prepare() -> tuple[Plan]:
        clean()
        return (make(),)

    found = []
    for run in (lambda: actshard.run(make(), workers=2), alone):
        clean()
        made = run()
        found.append(_files(folder / "d") if (folder / "d").exists() else made.as_dict()["findings"])
    assert found[0] == found[1], name
    engines = [
        Engine(f"{n} workers", lambda plan, n=n: _on(n, plan), prepare)  # type: ignore[misc]  # bound
        for n in (1, 2)
    ]
    times = interleave(engines, max(1, repeats // 2), warmup=0)
    one, two = median(times["1 workers"]), median(times["2 workers"])
    return Row(
        f"plan: {name}",
        "in memory, 2 workers",
        "one worker",
        one,
        two,
        "s",
        one / two,
        ">= 1.8x",
        one / two >= 1.8,
        note,
        times,
    )


def workers(repeats: int) -> Iterator[Row]:
    """Two workers against one, for conversions and checks.

    Deflated shards keep a processor busy; uncompressed rows are as fast as memory, which both processors share. Results of all
    tokens need as much new memory as the source has; those of last tokens nearly none.
    """
    with _folder() as folder:
        to = folder / "d"
        for kind, examples, options in (
            ("pickle", _EXAMPLES // 2, {"level": 1, "shard_bytes": "8MiB"}),
            ("npy", _EXAMPLES * 2, {}),
        ):
            source = folder / "source"
            total = _source(source, kind, examples, **options)
            note = f"{total / 1e9:.1f} GB in 16 tasks, one thread each; start of the workers and commit count"
            for what, given in (("", {}), (", last tokens", {"tokens": "last"})):
                yield _compared(
                    f"convert {kind} to zarr{what}",
                    folder,
                    partial(actshard.plan.convert, source, to, "zarr", tasks=16, **given),
                    partial(actshard.convert, source, to, "zarr", **given),
                    repeats,
                    note,
                )
            yield _compared(
                f"verify --deep {kind}",
                folder,
                partial(actshard.plan.verify, source, tasks=16, work=folder / "work"),
                partial(actshard.verify, source, deep=True),
                repeats,
                note,
            )
            shutil.rmtree(source)


def tokenizing(repeats: int) -> Iterator[Row]:
    """Two workers against one, for token caches."""
    with _folder() as folder:
        texts, to = folder / "texts.jsonl", folder / "d"
        shutil.copy(corpus.text(), texts)
        given = (texts, to, corpus.tokenizer(), {"type": "text"})
        yield _compared(
            "tokenize",
            folder,
            partial(actshard.plan.tokenize, *given, tasks=16),
            partial(actshard.tokens.build_cache, *given, jobs=1),
            repeats,
            f"{texts.stat().st_size / 1e6:.0f} MB of text in 16 tasks",
        )


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
    """What 10,000 finished tasks cost the driver: where it begins, its status, and the commit beside the verb's own work.

    On a disk, most of it is the removal of the tasks' folders: ``rm -rf`` of the same folders is measured beside it.
    """
    for place, where in (("in memory", _MEMORY if _MEMORY.is_dir() else None), ("on a disk", None)):
        with tempfile.TemporaryDirectory(dir=where) as folder:
            plan = _nothing(TASKS, Path(folder))
            began = time.perf_counter()
            plan.begin()
            left = len(plan.left())
            start = time.perf_counter() - began
            began = time.perf_counter()
            for task in range(left):
                plan.run(task)
            run = time.perf_counter() - began
            copy = Path(folder) / "copy"
            shutil.copytree(plan.book.tasks, copy)
            os.sync()
            times = []
            for step in (plan.status, plan.commit, partial(subprocess.run, ["rm", "-rf", copy], check=True)):
                began = time.perf_counter()
                step()
                times.append(time.perf_counter() - began)
        status, commit, removal = times
        what = f"plan: {TASKS:,} tasks"
        both = start + commit
        note = f"start {start:.3f} s, commit {commit:.3f} s; rm -rf of these folders {removal:.3f} s"
        yield Row(f"{what}, start and commit", place, "", None, both, "s", None, "<= 1 s", both <= 1, note)
        yield Row(f"{what}, status", place, "", None, status, "s", None, "", None)
        yield Row(f"{what}, all", place, "", None, run, "s", None, "", None, f"{run / TASKS * 1e3:.1f} ms each")
