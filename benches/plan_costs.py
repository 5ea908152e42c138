"""What a plan asks of a shared file system, counted, and how long 1 to 1,000 workers take on one: docs/scaling.md, "Plans".

``python -m benches.plan_costs`` prints all tables; ``python -m benches.plan_costs counts`` or ``simulation`` some. The counts are
taken with ``strace``: calls on paths of the source or the result, so starting the interpreter does not count.

The simulation is a closed queueing network: W workers take one task after another. A task waits alone (its work, and the latency of
each call), and in two queues that all workers share: the metadata server and the data servers. Mean value analysis (Reiser and
Lavenberg, Journal of the ACM 27(2), 1980) gives the tasks per second. The commit is one process, after them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benches.scaling import show

KINDS = ("create", "open", "stat", "list", "sync", "mkdir", "rename", "remove")
RENAMING_THREADS = 16
"""Of the commit of a conversion: actshard.plan.converting."""
_KIND = {
    **dict.fromkeys(("stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink"), "stat"),
    **dict.fromkeys(("fsync", "fdatasync", "syncfs"), "sync"),
    **dict.fromkeys(("mkdir", "mkdirat"), "mkdir"),
    **dict.fromkeys(("rename", "renameat", "renameat2", "link", "linkat"), "rename"),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), "remove"),
    "getdents64": "list",
}
_CALLS = ",".join(("openat", "open", "creat", *_KIND))
Calls = Mapping[str, float]


# -- the model -----------------------------------------------------------------------------------------------------


def rate(workers: int, delay: float, demands: Sequence[float]) -> tuple[float, list[float]]:
    """Exact mean value analysis of a closed network.

    Args:
        workers: number of customers.
        delay: seconds of a cycle that need no shared server.
        demands: seconds of a cycle at each shared server, alone.

    Returns:
        Cycles per second, and the share of time that each server is busy.
    """
    waiting = np.zeros(len(demands))
    each = np.asarray(demands, np.float64)
    made = 0.0
    for n in range(1, workers + 1):
        residence = each * (1 + waiting)
        made = n / (delay + residence.sum())
        waiting = made * residence
    return made, list(made * each)


@dataclass(frozen=True)
class FileSystem:
    """A shared file system.

    Attributes:
        name: its name.
        per_second: calls of each kind that its metadata server answers per second, from all clients together.
        latency: seconds that a client waits for one call while the server is idle.
        bandwidth: bytes per second, all clients together; reading and writing share it.
        client: bytes per second of one client.
        source: where the figures are from.
    """

    name: str
    per_second: Mapping[str, float]
    latency: float
    bandwidth: float
    client: float
    source: str

    def busy(self, calls: Calls) -> float:
        """Seconds of the metadata server for these calls."""
        return sum(n / self.per_second[kind] for kind, n in calls.items())


@dataclass(frozen=True)
class Work:
    """A conversion.

    Attributes:
        bytes: read, and as many are written.
        tasks: number of tasks.
        files: files of the result.
        speed: bytes per second of the source that a worker converts if the file system costs nothing.
        beside: seconds of a task beside its work: Python, JSON.
    """

    bytes: float
    tasks: int
    files: int
    speed: float
    beside: float = 0.01


@dataclass(frozen=True)
class Costs:
    """Calls of a plan, by kind: of a task, of each file that it writes; of a commit's tasks and files."""

    task: Calls
    file: Calls
    commit_task: Calls
    commit_file: Calls


def _sum(*parts: tuple[float, Calls]) -> dict[str, float]:
    made: dict[str, float] = {}
    for factor, calls in parts:
        for kind, n in calls.items():
            made[kind] = made.get(kind, 0.0) + factor * n
    return made


@dataclass(frozen=True)
class Outcome:
    """Seconds of the tasks and of the commit, and what limits the tasks."""

    tasks: float
    commit: float
    limit: str


def simulate(work: Work, system: FileSystem, costs: Costs, workers: int) -> Outcome:
    """Predicts a plan's time with this many workers."""
    calls = _sum((1, costs.task), (work.files / work.tasks, costs.file))
    moved = 2 * work.bytes / work.tasks
    shared = moved / system.bandwidth
    alone = max(work.bytes / work.tasks / work.speed, moved / system.client)
    # The transfer's time at the servers is a part of the time that one client takes for it.
    delay = work.beside + sum(calls.values()) * system.latency + max(alone - shared, 0)
    busy = min(workers, work.tasks)
    per_second, shares = rate(busy, delay, [system.busy(calls), shared])
    limit = "workers"
    if max(shares) > 0.8:
        limit = "metadata" if shares[0] > shares[1] else "bandwidth"
    elif busy < workers:
        limit = "number of tasks"
    # Waves: the last task begins when the others run, so that no plan is faster than one task.
    seconds = max(work.tasks / per_second, busy / per_second)
    return Outcome(seconds, commit(work, system, costs), limit)


def commit(work: Work, system: FileSystem, costs: Costs) -> float:
    """Seconds of the commit, at most: calls of tasks one after the other (16 threads make some of them), of files by 16 threads."""
    tasks, files = _sum((work.tasks, costs.commit_task)), _sum((work.files, costs.commit_file))
    one = max(sum(tasks.values()) * system.latency, system.busy(tasks))
    many = max(sum(files.values()) * system.latency / RENAMING_THREADS, system.busy(files))
    return one + many


# -- the file systems ----------------------------------------------------------------------------------------------

_FSX = 12_000
SYSTEMS = (
    FileSystem(
        "NFS (EFS)",
        {**dict.fromkeys(KINDS, 25_000.0), "stat": 55_000.0, "list": 55_000.0, "open": 55_000.0},
        2.7e-3,
        3 * 2**30,
        500 * 2**20,
        "docs.aws.amazon.com/efs/latest/ug/performance.html: regional, provisioned throughput",
    ),
    FileSystem(
        "Lustre (FSx)",
        {
            **dict.fromkeys(("create", "open", "stat", "list", "sync"), 2.0 * _FSX),
            **dict.fromkeys(("mkdir", "rename"), 0.1 * _FSX),
            "remove": 0.2 * _FSX,
        },
        1e-3,
        6e9,
        1e9,
        "docs.aws.amazon.com/fsx/latest/LustreGuide/performance.html: 12,000 metadata IOPS; latency, bandwidths: assumed",
    ),
    FileSystem(
        "Lustre (disks)",
        {
            **dict.fromkeys(("create", "rename", "sync"), 15_000.0),
            "mkdir": 19_000.0,
            "remove": 70_000.0,
            **dict.fromkeys(("open", "stat", "list"), 400_000.0),
        },
        2e-3,
        5e9,
        1e9,
        "Dell white paper on Intel EE for Lustre, mdtest, 240 threads; rename, sync as create; bandwidths: assumed",
    ),
)


# -- counts --------------------------------------------------------------------------------------------------------

_RUN = """
import sys, warnings
warnings.simplefilter("ignore")
import actshard
plan = actshard.plan.load(sys.argv[1])
plan.commit() if sys.argv[2] == "commit" else plan.run(int(sys.argv[2]))
"""


def counted(folder: Path, file: Path, what: str) -> Counter[str]:
    """Calls by kind of a task, or of the commit, on paths below a folder."""
    log = folder / "strace.log"
    traced = ["strace", "-f", "-qq", "-y", "-s", "0", "-e", f"trace={_CALLS}", "-o", str(log)]
    # One thread: of several, two may open the same file at once, and a busy machine then counts more calls.
    alone = {**os.environ, "ACTSHARD_NUM_THREADS": "1"}
    subprocess.run([*traced, sys.executable, "-W", "ignore", "-c", _RUN, str(file), what], check=True, env=alone)
    made: Counter[str] = Counter()
    for line in whole_calls(log.read_text(errors="replace")):
        found = re.match(r"\d+ +(\w+)\(", line)
        if found is None or str(folder) not in line or str(file) in line:
            continue
        if "/progress.json" in line:
            continue  # every 5 s, so on a busy machine only
        call = found[1]
        if call in ("newfstatat", "statx") and "AT_EMPTY_PATH" in line:
            continue  # of an open file: the client answers it
        kind = _KIND.get(call) or ("create" if call == "creat" or "O_CREAT" in line else "open")
        made[kind] += 1
    log.unlink()
    return made


def whole_calls(log: str) -> Iterator[str]:
    """The lines of a log, each a whole call.

    strace cuts a call in two while another thread makes one. The first part lacks the flags that tell a call of an open file.
    """
    first_parts: dict[str, str] = {}
    for line in log.splitlines():
        thread, _, rest = line.partition(" ")
        if line.endswith("<unfinished ...>"):
            first_parts[thread] = line.removesuffix("<unfinished ...>")
        elif rest.lstrip().startswith("<... ") and thread in first_parts:
            yield first_parts.pop(thread) + rest.partition("resumed>")[2]
        else:
            yield line
    yield from first_parts.values()  # of threads that ended in a call


def _source(path: Path, examples: int) -> None:
    import actshard

    rng = np.random.default_rng(7)
    with actshard.create(path, "lmprobe", layers=range(3), d_model=64, storage="full_sequence") as writer:
        for _ in range(0, examples, 64):
            ids = rng.integers(0, 1000, (64, 16)).tolist()
            writer.append(rng.standard_normal((64, 3, 16, 64)).astype(np.float32), columns={"input_ids": ids})


WAYS: dict[str, dict[str, object]] = {
    "saev": {"columns": [], "shard_bytes": 3 * 16 * 64 * 4 * 8},
    "lmprobe": {"columns": [], "shard_bytes": 3 * 16 * 64 * 4 * 8, "storage": "full_sequence"},
    "specforge": {"layers": {0: 0, 1: 1, 2: "last"}},
}
"""Formats of shards, and of a file per example."""


def _planned(folder: Path, format: str, examples: int, tasks: int) -> tuple[Counter[str], Counter[str], int, int]:
    """Calls of a task and of the commit; number of tasks and of files."""
    import actshard

    source = folder.with_name(f"source{examples}")
    if not source.exists():
        _source(source, examples)
    plan = actshard.plan.convert(source, folder, format, tasks=tasks, **WAYS[format])  # type: ignore[arg-type]  # each format has options of other types
    file = plan.save(folder.with_name("plan.json"))
    one = counted(folder.parent, file, "1")
    for task in range(len(plan)):
        plan.run(task)
    end = counted(folder.parent, file, "commit")
    files = sum(path.is_file() for path in folder.rglob("*"))
    return one, end, len(plan), files


def measured(format: str) -> Costs:
    """Calls of tasks, files and commits of a format, from plans of few and many files, and of few and many tasks."""
    with tempfile.TemporaryDirectory() as where:
        few = _planned(Path(where) / "few", format, 128, 4)
        many = _planned(Path(where) / "many", format, 512, 4)
        apart = _planned(Path(where) / "apart", format, 128, 16)
    more = (many[3] - few[3]) / 4
    file = {kind: (many[0][kind] - few[0][kind]) / more for kind in KINDS}
    task = {kind: max(few[0][kind] - file[kind] * few[3] / 4, 0.0) for kind in KINDS}
    commit_file = {kind: max(many[1][kind] - few[1][kind], 0) / (many[3] - few[3]) for kind in KINDS}
    commit_task = {kind: (apart[1][kind] - few[1][kind]) / (apart[2] - few[2]) for kind in KINDS}
    return Costs(task, file, commit_task, commit_file)


def counts() -> dict[str, Costs]:
    """Prints calls per task and per file."""
    rows: list[list[object]] = []
    made = {}
    for format in WAYS:
        costs = made[format] = measured(format)
        for what, calls in (
            ("task", costs.task), ("each file of a task", costs.file),
            ("commit, each task", costs.commit_task), ("commit, each file", costs.commit_file),
        ):  # fmt: skip
            rows.append([format, what, *(round(calls[kind], 1) for kind in KINDS), round(sum(calls.values()), 1)])
    show("Calls of plans on a shared file system", ["to", "of", *KINDS, "all"], rows)
    return made


WORKERS = (1, 10, 30, 100, 300, 1000)
TB = 1e12


def simulation(made: Mapping[str, Costs], speed: float) -> None:
    """Prints hours of a conversion of 10 TB."""
    cases = (
        ("saev", "1 GB shards, 10,000 tasks", Work(10 * TB, 10_000, 10_000, speed)),
        ("saev", "1 GB shards, 1,000 tasks", Work(10 * TB, 1_000, 10_000, speed)),
        ("saev", "10 MB shards, 10,000 tasks", Work(10 * TB, 10_000, 1_000_000, speed)),
        ("saev", "10 MB shards, 1,000,000 tasks", Work(10 * TB, 1_000_000, 1_000_000, speed)),
        ("specforge", "2,000,000 files of 5 MB, 10,000 tasks", Work(10 * TB, 10_000, 2_000_000, speed)),
        ("specforge", "50,000,000 files of 200 kB, 10,000 tasks", Work(10 * TB, 10_000, 50_000_000, speed)),
    )
    for system in SYSTEMS:
        rows: list[list[object]] = []
        for format, name, work in cases:
            found = [simulate(work, system, made[format], n) for n in WORKERS]
            rows.append(
                [f"{format}, {name}", *(f"{o.tasks / 3600:,.2f}{_MARK[o.limit]}" for o in found),
                 f"{found[0].commit / 60:,.1f}"]
            )  # fmt: skip
        title = f"10 TB on {system.name}: hours with 1 to 1,000 workers, minutes of the commit ({system.source})"
        show(title, ["to", *map(str, WORKERS), "commit"], rows)


_MARK = {"workers": "", "metadata": " M", "bandwidth": " B", "number of tasks": " T"}


def main() -> None:
    """Prints the tables; ``speed=BYTES_PER_SECOND`` of a worker."""
    words = sys.argv[1:]
    speed = next((float(word[6:]) for word in words if word.startswith("speed=")), 4e8)
    os.environ.setdefault("ACTSHARD_NUM_THREADS", "1")
    made = counts()
    if "counts" not in words:
        simulation(made, speed)


if __name__ == "__main__":
    main()
