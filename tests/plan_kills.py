"""Kills processes of plans at fixed points and goes on with others; run by tests of plans.

    python plan_kills.py create|merge|stage FORMAT FOLDER [FIRST STEP]     # every STEP-th of the points

The children are forked and take milliseconds. Each kills itself when it calls one of the functions below for the k-th time, so what
is tested does not depend on which process is fast.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import actshard
import actshard._native as native
from actshard.base.work import files
from actshard.base.work.journal import Journal
from actshard.formats.merging import Assembled, Merge
from actshard.plan import plan as plans
from actshard.plan import staging as planned_staging
from actshard.plan.book import Book
from actshard.writing import merging
from actshard.writing.sink import Sink
from actshard.writing.staging import folder as staged

LAYERS, WIDTH, N, TASKS = [1, 4], 8, 17, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "saev": {"max_tokens_per_shard": 5 * 2 * 6, "tokens_per_example": 6},
    "lmprobe": {"shard_bytes": 600, "storage": "full_sequence"},
    "zarr": {"chunk_tokens": 4},
    "pickle": {"shard_bytes": 2000},
}
SIZES = [3, 8, 6]
"""Examples of the datasets that are merged."""
POINTS: tuple[tuple[Any, str], ...] = (
    (Sink, "commit"),
    (Journal, "commit"),
    (Journal, "close"),
    (Journal, "finish"),
    (Book, "begin_attempt"),
    (Book, "publish"),
    (Book, "remove"),
    (Merge, "take"),
    (plans, "write_json"),
    (merging, "_begin"),
    (merging, "_remove_parts"),
    (merging, "_remove_work"),
    (files, "sync_folders"),
    (Assembled, "write"),
)
"""Functions before, and after, whose calls a process kills itself."""
STAGED_POINTS: tuple[tuple[Any, str], ...] = (
    (Book, "begin_attempt"),
    (Book, "publish"),
    (Book, "remove"),
    (plans, "write_json"),
    (planned_staging, "copy"),
    (native, "move_files"),
    (planned_staging, "leave"),
    (staged, "write_marker"),
    (staged, "_discard"),
    (Path, "replace"),
)
"""As above, for staged copies."""


def data(format: str) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    lengths = [6] * N if format == "saev" else rng.integers(2, 9, N).tolist()
    return [rng.standard_normal((2, n, WIDTH)).astype(np.float32) for n in lengths]


def columns(format: str, first: int, count: int) -> dict[str, Any] | None:
    return None if format == "saev" else {"label": list(range(first, first + count))}


def create_plan(format: str, folder: Path) -> Any:
    return actshard.plan.create(
        folder / "made",
        format,
        layers=LAYERS,
        d_model=WIDTH,
        num_examples=N,
        tasks=TASKS,
        exist_ok=True,
        **OPTIONS[format],
    )


def run_create(plan: Any) -> None:
    examples = data(plan.arguments["format"])
    for task in (2, 0, 1):
        with plan.writer(task) as writer:
            for n in writer.left:
                writer.append([examples[n]], columns=columns(plan.arguments["format"], n, 1))
                if n % 2:
                    writer.flush()


def merge_plan(format: str, folder: Path) -> Any:
    return actshard.plan.merge(folder / "made", [folder / f"part{i}" for i in range(len(SIZES))], tasks=TASKS)


def run_merge(plan: Any) -> None:
    for task in reversed(range(len(plan))):
        plan.run(task)


def prepare_merge(format: str, folder: Path) -> None:
    examples, first = data(format), 0
    for i, n in enumerate(SIZES):
        options = dict(OPTIONS[format])
        if format == "pickle":
            options["machine_id"] = i
        with actshard.create(folder / f"part{i}", format, layers=LAYERS, d_model=WIDTH, **options) as writer:
            writer.append(examples[first : first + n], columns=columns(format, first, n))
        first += n


def prepare_stage(kind: str, folder: Path) -> None:
    """A source; and if it is staged ``again``, an older copy with a file of the user."""
    examples = data("zarr")
    if kind == "again":
        examples = [examples[0], *examples[2:], examples[1]]
    with actshard.create(folder / "source", "zarr", layers=LAYERS, d_model=WIDTH, chunk_tokens=4) as writer:
        writer.append(examples, columns=columns("zarr", 0, N))
    if kind == "again":
        actshard.stage(folder / "source", folder / "made")
        (folder / "made/mine.txt").write_text("mine")
        shutil.rmtree(folder / "source")
        prepare_stage("new", folder)


def stage_plan(kind: str, folder: Path) -> Any:
    return actshard.plan.stage(folder / "source", folder / "made", LAYERS if kind == "layers" else None, tasks=TASKS)


def check_stage(path: Path, kind: str) -> None:
    assert not (path.parent / ".made.actshard-stage").exists()
    if kind == "again":
        assert (path / "mine.txt").read_text() == "mine"
    assert actshard.stage(path.parent / "source", path, LAYERS if kind == "layers" else None).fetched == 0
    check(path, "zarr")


def check(path: Path, format: str) -> None:
    store = actshard.open(path)
    wanted = data(format)
    assert len(store) == N
    for e, example in enumerate(wanted):
        for k, layer in enumerate(store.layers):
            assert np.array_equal(store.sequence(e, layer), example[k]), (path, e, layer)
    if format != "saev":
        assert store.table["label"].to_pylist() == list(range(N))
    assert actshard.verify(path).ok
    assert not list(path.rglob(".actshard"))
    assert not list(path.parent.rglob(".parts"))


def forked(work: Callable[[], object]) -> int:
    """Runs a function in a child; returns the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        return 0
    return os.WTERMSIG(status)


def killed_at(place: Any, name: str, call: int, after: bool) -> None:
    """From now on, the call of this number kills the process."""
    calls = itertools.count(1)
    whole = getattr(place, name)

    def call_or_die(*args: Any, **named: Any) -> Any:
        last = next(calls) == call
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        made = whole(*args, **named)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    setattr(place, name, call_or_die)


def main(verb: str, format: str, folder: Path, first: int = 0, step: int = 1) -> None:
    warnings.simplefilter("ignore")
    make, run = {
        "create": (create_plan, run_create),
        "merge": (merge_plan, run_merge),
        "stage": (stage_plan, run_merge),
    }[verb]
    prepare = {"merge": prepare_merge, "stage": prepare_stage}.get(verb)
    checked = check_stage if verb == "stage" else check
    killed = 0
    points = [*itertools.product(STAGED_POINTS if verb == "stage" else POINTS, (1, 3), (False, True))]
    for (place, name), call, after in points[first::step]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if prepare is not None:
            forked(lambda: prepare(format, folder))
        forked(lambda: make(format, folder).save(folder / "plan.json"))

        def dies(
            place: Any = place,
            name: str = name,
            call: int = call,
            after: bool = after,
            file: Path = folder / "plan.json",
        ) -> None:
            killed_at(place, name, call, after)
            plan = actshard.plan.load(file)
            run(plan)
            plan.commit()

        def goes_on(file: Path = folder / "plan.json") -> None:
            plan = actshard.plan.load(file)
            assert not _opens(folder / "made"), "half of a dataset was taken for one"
            run(plan)
            made = plan.commit()
            place = getattr(made, "path", made)
            checked(place, format)
            assert getattr(plan.commit(), "path", made) == place
            assert plan.status().committed
            assert not plan.work.exists()

        killed += forked(dies) == signal.SIGKILL
        forked(goes_on)
    print(json.dumps({"killed": killed}))


def _opens(path: Path) -> bool:
    """Whether a dataset opens that is not complete."""
    try:
        store = actshard.open(path)
    except actshard.ActshardError:
        return False
    return len(store) != N


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
