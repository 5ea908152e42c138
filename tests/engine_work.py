"""Work for engines in tests: a conversion whose tasks take a while and leave notes, in all processes with a PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

import actshard
from waiting import PATIENCE, wait_until

N, TASKS = 60, 20

CAPTURE = """
import os, pathlib, time
import numpy as np

def slow(writer, examples):
    (pathlib.Path(os.environ["NOTES"]) / f"{examples[0]}.{os.getpid()}").write_text("")
    for n in examples:
        time.sleep(0.1)
        writer.append(np.full((1, 2, 3, 8), n, np.float32))

def fails(writer, examples):
    if 5 in examples:
        raise ZeroDivisionError("example 5")
    slow(writer, examples)
"""
SLOWLY = """
import os
if os.environ.get("SLOWLY"):
    import pathlib, time
    from actshard.plan.converting import Converting

    convert = Converting.run

    def slowly(self, plan, task, folder, tell):
        notes = pathlib.Path(os.environ["NOTES"])
        threads = os.environ.get("ACTSHARD_NUM_THREADS", "")
        (notes / f"{task}.{os.getpid()}.{os.environ.get('SLURM_JOB_ID', '')}").write_text(threads)
        time.sleep(float(os.environ["SLOWLY"]))
        return convert(self, plan, task, folder, tell)

    Converting.run = slowly
"""
"""A sitecustomize: Python imports it when a process starts."""


def source(path: Path) -> Path:
    """A dataset to convert."""
    rng = np.random.default_rng(0)
    with actshard.create(
        path, "lmprobe", layers=[0, 1], d_model=8, num_examples=N, tokens_per_example=3, storage="full_sequence"
    ) as writer:
        writer.append(rng.standard_normal((N, 2, 3, 8)).astype(np.float32))
    return path


def planned(path: Path, capture: str = "slow") -> actshard.plan.Plan:
    """An extraction."""
    return actshard.plan.create(
        path, "lmprobe", layers=[0, 1], d_model=8, num_examples=N, tasks=TASKS, tokens_per_example=3,
        storage="full_sequence", capture=f"engine_captured:{capture}",
    )  # fmt: skip


def converted(source: Path, path: Path) -> actshard.plan.Plan:
    """A conversion in some twenty tasks."""
    return actshard.plan.convert(source, path, "saev", tasks=TASKS, pad=True, shard_bytes=1000)


def files(root: Path) -> dict[str, bytes]:
    """Bytes of all files below a folder."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class Work:
    """A conversion and what it gives in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.source = source(folder / "source")
        self.one = folder / "one"
        actshard.convert(self.source, self.one, "saev", pad=True, shard_bytes=1000)
        self.plan = converted(self.source, folder / "many")
        self.file = self.plan.save(folder / "plan.json")
        assert len(self.plan) > 10

    def begun(self) -> set[int]:
        """Tasks that have begun."""
        return {int(note.name.partition(".")[0]) for note in self.notes.iterdir()}

    def check(self) -> None:
        """The result is that of one process, bit for bit, and nothing else is left."""
        assert files(self.folder / "many") == files(self.one)

    def finish_after_a_kill(self, *options: str) -> None:
        """Kills a driver when some tasks have begun, and starts it again."""
        driver = self.driver(*options)
        wait_until(lambda: len(self.begun()) >= 3, "tasks")
        driver.kill()
        driver.wait()
        assert self.plan.left()
        assert self.driver(*options).wait(PATIENCE) == 0
        self.check()

    def driver(self, *options: str) -> subprocess.Popen[bytes]:
        """Starts ``actshard run`` with an engine, to be killed."""
        return subprocess.Popen(
            [sys.executable, "-m", "actshard.cli", "run", str(self.file), *options],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def when(condition: Callable[[], object], then: Callable[[], object]) -> threading.Thread:
    """Calls a function, in a thread, once something is so."""

    def wait() -> None:
        wait_until(condition, "the moment")
        then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def environment(folder: Path) -> dict[str, str]:
    """Writes what other processes import; returns the variables by which they find it. ``SLOWLY`` has the seconds of a task."""
    (folder / "notes").mkdir()
    (folder / "engine_captured.py").write_text(CAPTURE)
    (folder / "sitecustomize.py").write_text(SLOWLY)
    return {
        "NOTES": str(folder / "notes"),
        "PYTHONPATH": os.pathsep.join((str(folder), str(Path(__file__).parent))),
        "PYTHONWARNINGS": "ignore",
    }
