"""Kills tasks, drivers, workers and commits of plans with SIGKILL, and goes on with others: the bytes are those of one process.

    python -m tests.torture.plan_kills --kills 500                                  every verb and format in turn
    python -m tests.torture.plan_kills --kills 50 --verbs convert,tokenize --seed 7
    python -m tests.torture.plan_kills --case convert-zarr --rounds 1 --seed 123     one round again
    python -m tests.torture.plan_kills --every                                      every change of a name by a task and a commit

A round begins with a plan that nobody has begun, kills one to three processes that work on it, and then runs and commits it without
a kill. Processes die at a random moment of their measured duration, or at the n-th system call of a kind, which ``strace`` injects.
With ``--every``, a task and a commit die before each system call that makes, renames, links or removes a file or folder, in turn.

After each kill the result either raises an ActshardError when it is opened, or is complete, with the right bytes. At the end of a
round the bytes are those of the function in one process, and no other path is left than after a plan that nobody killed.

The interpreter is started once: children are forked, and all work with the library is done in children, with threads of their own.
Only drivers (``actshard run plan.json --workers 2``) and their workers are started as a user starts them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.torture import faults
from tests.torture.plan_cases import EPOCH, Case, cases, plain
from tests.waiting import PATIENCE

import actshard

_PAGE = 1 << 17


_NAMING = (
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "mkdir",
    "mkdirat",
    "unlink",
    "unlinkat",
    "rmdir",
    "ftruncate",
)
"""System calls that change names, or sizes, beside ``openat`` of a new file."""

_MOMENTS = {
    "begun": "plan-*/plan.json",
    "attempt": "attempts/0*",
    "task": "tasks/00001",
    "last": "tasks/00003",
    "commit": "commit.json",
}
"""Files at whose appearance a driver or a worker is killed."""
usable = functools.cache(faults.usable)


class Violation(AssertionError):
    """A guarantee was violated."""


# -- children ------------------------------------------------------------------------------------------------------


@dataclass
class Child:
    """A forked process that does some work; ``told`` is the value that it returned, through shared memory."""

    pid: int
    shared: mmap.mmap
    go: int
    tracer: subprocess.Popen[str] | None = None
    told: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def fork(
        cls, work: Callable[[], Any], inject: str | None = None, log: Path | None = None, only: str | None = None
    ) -> Child:
        shared = mmap.mmap(-1, _PAGE)
        begin, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(go)
            _do(work, shared, begin)
        os.close(begin)
        made = cls(pid, shared, go)
        if inject is not None or log is not None:
            made.tracer = faults._attach(pid, inject, log, only)
        os.write(go, b"x")
        os.close(go)
        return made

    def wait(self, until: float | None = None) -> bool:
        """Waits for its end, or for a moment. Whether it ended; ``told`` then has how."""
        limit = time.monotonic() + PATIENCE
        while (found := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            now = time.monotonic()
            if until is not None and now >= until:
                return False
            if now > limit:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.told = {"kind": "hung"}
                return True
            time.sleep(0.001)
        faults._join(self.tracer)
        raw = bytes(self.shared[4 : 4 + int.from_bytes(self.shared[:4], "little")])
        self.told = json.loads(raw or b"{}")
        if os.WIFSIGNALED(found[1]):
            name = signal.Signals(os.WTERMSIG(found[1])).name
            self.told = {"kind": "killed" if name == "SIGKILL" else name}
        return True

    def kill(self) -> None:
        """Kills it. It is not waited for yet, so its number is no other process's."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


def _do(work: Callable[[], Any], shared: mmap.mmap, begin: int) -> None:
    code, said = 1, {"kind": "foreign", "text": "no report"}
    try:
        os.read(begin, 1)
        warnings.simplefilter("ignore")
        said, code = {"kind": "done", "value": work()}, 0
        said["modules"] = [name for name in sys.modules if name.split(".")[0] in faults._LATE]
    except actshard.ActshardError as error:
        said = {"kind": "error", "text": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        said = {"kind": "foreign", "text": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
    finally:
        raw = json.dumps(said).encode()[: _PAGE - 4]
        shared[4 : 4 + len(raw)] = raw
        shared[:4] = len(raw).to_bytes(4, "little")
        os._exit(code)


def _done(work: Callable[[], Any], where: str) -> Any:
    """What a child that nobody kills returns. Raises Violation if it fails."""
    child = Child.fork(work)
    child.wait()
    if child.told.get("kind") != "done":
        raise Violation(f"{where}: {child.told}")
    _import(child.told)
    return child.told["value"]


def _import(told: dict[str, Any]) -> None:
    """Imports what a child has imported, for later children."""
    for name in told.get("modules", []):
        if name not in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


# -- a case --------------------------------------------------------------------------------------------------------


def _files(root: Path) -> dict[str, bytes]:
    hidden = (".actshard", ".actshard-build", ".parts")
    return {
        name: path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not (name := path.relative_to(root).as_posix()).startswith(hidden)
    }


class Bench:
    """A case in a folder, with the bytes of one process and the durations of its stages."""

    driver_seconds = 2.0
    """Duration of the command, of any case; measured whenever it ends before it is killed."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.file = case, folder, folder / "plan.json"
        folder.mkdir(parents=True)
        os.environ.setdefault(EPOCH, "1700000000")
        _done(lambda: case.prepare(folder) and None, f"{case.name}: prepare")
        self.tasks: int = _done(self._make, f"{case.name}: plan")
        self.before = self._paths()
        self.source = {path: (folder / path).read_bytes() for path in self.before if (folder / path).is_file()}
        one = folder.with_name(f"{folder.name}-one")
        self.value = _done(lambda: case.one(folder, one, self.plan()), f"{case.name}: in one process")
        self.bytes = _files(one) if case.opened is not None else {}
        shutil.rmtree(one, ignore_errors=True)
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self._measure()

    def _make(self) -> int:
        plan = self.case.make(self.folder)
        plan.save(self.file)
        return len(plan)

    def plan(self) -> Any:
        """The plan, loaded from its file."""
        return actshard.plan.load(self.file)

    def _paths(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")}

    def stage(self, name: str, order: list[int]) -> Callable[[], Any]:
        """A child's work: tasks in an order, or the commit."""

        def tasks() -> None:
            plan = self.plan()
            for task in order:
                plan.run(task)

        return tasks if name == "tasks" else lambda: plain(self.plan().commit())

    def _measure(self) -> None:
        """Runs all without a kill, with and without strace; compares; takes durations and counts of calls."""
        order = list(range(self.tasks))
        log = self.folder.with_name(f"{self.folder.name}.log")
        for traced in (False, False, *([True] if usable() else [])):  # the first imports what is imported on demand
            self.reset()
            for name in ("tasks", "commit"):
                began = time.monotonic()
                child = Child.fork(self.stage(name, order), log=log if traced else None)
                child.wait()
                if child.told.get("kind") != "done":
                    raise Violation(f"{self.case.name}: undisturbed, {name}: {child.told}")
                _import(child.told)
                if traced:
                    counts = faults._counts(log)
                    self.counts[name] = {call: n for call, n in counts.items() if call != "close"}
                else:
                    self.seconds[name] = time.monotonic() - began
            if not traced:
                self.after = self._paths()
            self.compare("undisturbed", child.told["value"])
        log.unlink()

    def reset(self) -> None:
        """Removes all but the inputs and the plan's file."""
        for path in sorted(self._paths() - self.before):
            found = self.folder / path
            if found.is_dir():
                shutil.rmtree(found)
            else:
                found.unlink(missing_ok=True)

    def compare(self, where: str, value: Any) -> None:
        """Compares what is left with the result of one process."""
        if value != self.value:
            raise Violation(f"{where}: expected {self.value!s:.300}, found {value!s:.300}")
        if self.case.opened is not None:
            self._same(where)
        if more := self._paths() - self.after:
            raise Violation(f"{where}: left over: {sorted(more)[:10]}")
        for path, data in self.source.items():
            if (self.folder / path).read_bytes() != data:
                raise Violation(f"{where}: the source was changed: {path}")

    def _same(self, where: str) -> None:
        found = _files(self.folder / "d")
        if found.keys() != self.bytes.keys():
            raise Violation(f"{where}: other files: {sorted(found.keys() ^ self.bytes.keys())[:10]}")
        if other := [name for name, data in self.bytes.items() if found[name] != data]:
            raise Violation(f"{where}: other bytes than those of one process: {other[:10]}")

    def half_done(self, where: str) -> bool:
        """Raises Violation if half of a result is taken for one. Whether it is complete."""
        if self.case.opened is None:
            return False
        opened = self.case.opened
        child = Child.fork(lambda: opened(self.folder / "d") and None)
        child.wait()
        if child.told.get("kind") == "error":
            return False
        if child.told.get("kind") != "done":
            raise Violation(f"{where}: opened: {child.told}")
        self._same(f"{where}: opens as a dataset")
        return True

    # -- every change of a name ------------------------------------------------------------------------------------

    def every(self, stage: str, calls: tuple[str, ...] = (), part: tuple[int, int] = (0, 1)) -> tuple[int, int]:
        """Kills a task, or the commit, before each change of a name, and goes on. Returns the numbers of kills and points.

        A point is missed if it has the random name of another run.

        Args:
            stage: ``"task"``: the second, after all others; or ``"commit"``.
            calls: only these system calls; none: all that change names.
            part: ``(k, n)``: of these points, the k-th, the (k + n)-th and so on.
        """
        task = min(1, self.tasks - 1)
        work = self.stage("tasks", [task]) if stage == "task" else self.stage("commit", [])
        others = [i for i in range(self.tasks) if stage == "commit" or i != task]
        self.reset()
        _done(self.stage("tasks", others), f"{self.case.name}: before {stage}")
        kept, log = self.folder.with_name("kept"), self.folder.with_name("every.log")
        self._copy(self.folder, kept)
        child = Child.fork(work, log=log)
        child.wait()
        points = [point for point in _points(log) if not calls or point[0] in calls][part[0] :: part[1]]
        killed = 0
        for call, n, only in points:
            where = f"{self.case.name}: {stage} killed at {call} {n} {only or ''}"
            self.reset()
            self._copy(kept, self.folder)
            child = Child.fork(work, f"{call}:signal=SIGKILL:when={n}", only=only)
            child.wait()
            if child.told.get("kind") not in ("killed", "done"):
                raise Violation(f"{where}: {child.told}")
            killed += child.told["kind"] == "killed"
            self.half_done(where)
            self.finish(where, [task])
        shutil.rmtree(kept)
        log.unlink()
        return killed, len(points)

    def _copy(self, source: Path, target: Path) -> None:
        """Copies all but the inputs and the plan's file."""
        paths = {path.relative_to(source).as_posix(): path for path in source.rglob("*")}
        for name in sorted(paths.keys() - self.before):
            if paths[name].is_dir():
                (target / name).mkdir(parents=True, exist_ok=True)
            else:
                shutil.copy2(paths[name], target / name)

    # -- kills -----------------------------------------------------------------------------------------------------

    def round(self, seed: int, drivers: bool, traced: bool) -> Counter[str]:
        """Kills some processes of a plan, and finishes it. Returns what was killed."""
        chance = random.Random(f"{self.case.name} {seed}")
        killed: Counter[str] = Counter()
        self.reset()
        said: list[str] = []
        for _ in range(chance.randint(1, 3)):
            order = self._left()
            chance.shuffle(order)
            what = chance.choice(["tasks", "tasks", "commit", "commit", *(["driver"] if drivers else [])])
            if what == "tasks" and not order:
                what = "commit"
            if what == "driver":
                how = self.kill_driver(chance)
            else:
                if what == "commit":
                    self._finish_tasks(order, said)
                how = self._kill_stage(what, order, chance, traced, said)
            said.append(how)
            killed[how.split(" ")[0]] += 1
            self.half_done(f"{self.case.name} --seed {seed}: {said}")
        order = list(range(self.tasks))
        chance.shuffle(order)
        self.finish(f"{self.case.name} --seed {seed}: {said}", order)
        return killed

    def _left(self) -> list[int]:
        """Numbers of tasks that are not done."""
        tasks = next(iter(self.folder.rglob("plan-*/tasks")), None) or next(iter(self.folder.glob("work/tasks")), None)
        done = {path.name for path in tasks.iterdir()} if tasks else set()
        return [task for task in range(self.tasks) if f"{task:05}" not in done]

    def _finish_tasks(self, order: list[int], said: list[str]) -> None:
        _done(self.stage("tasks", order), f"{self.case.name}: {said}: tasks before a commit")

    def _kill_stage(self, what: str, order: list[int], chance: random.Random, traced: bool, said: list[str]) -> str:
        inject, delay = None, 0.0
        if traced and chance.random() < 0.6:
            call, n = chance.choice([(c, k) for c, n in sorted(self.counts[what].items()) for k in range(1, n + 1)])
            inject = f"{call}:signal=SIGKILL:when={n}"
        else:
            share = len(order) / self.tasks if what == "tasks" else 1.0
            delay = chance.uniform(0, share * self.seconds[what])
        child = Child.fork(self.stage(what, order), inject)
        if inject is None:
            if not child.wait(time.monotonic() + delay):
                child.kill()
        else:
            child.wait()
        kind = child.told.get("kind")
        if kind not in ("killed", "done"):
            raise Violation(f"{self.case.name}: {said}: {what} ({inject or delay}): {child.told}")
        return f"{what if kind == 'killed' else 'late'} {order if what == 'tasks' else ''} {inject or round(delay, 4)}"

    def kill_driver(self, chance: random.Random) -> str:
        """Starts the command, and kills it, or one of its workers, or all at once."""
        command = [sys.executable, "-W", "ignore", "-m", "actshard.cli", "run", str(self.file), "--on", "local"]
        began = time.monotonic()
        driver = subprocess.Popen([*command, "--workers", "2", "--retries", "1"], stdout=-3, stderr=subprocess.PIPE)
        until = began + chance.uniform(0.3, 1.0) * Bench.driver_seconds  # before that, the interpreter starts
        whom = chance.choice(["driver", "worker", "all"])
        moment = chance.choice([*_MOMENTS, "time"])
        workers: list[int] = []
        while driver.poll() is None and (time.monotonic() < until if moment == "time" else not self._come(moment)):
            workers = _children(driver.pid) or workers
            time.sleep(0.001)
        if driver.poll() is not None:
            Bench.driver_seconds = time.monotonic() - began
        workers = _children(driver.pid)
        targets = {"driver": [driver.pid], "worker": workers[:1], "all": [driver.pid, *workers]}[whom]
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, stderr = driver.communicate(timeout=PATIENCE)
        found = 2 if self.case.name == "verify-broken" else 0  # the status of the report
        if driver.returncode not in (found, -signal.SIGKILL) and whom != "worker":
            raise Violation(f"{self.case.name}: the driver ended with {driver.returncode}: {stderr.decode()[-2000:]}")
        if driver.returncode == 1 and b"Traceback" in stderr:
            raise Violation(f"{self.case.name}: {stderr.decode()[-2000:]}")
        _gone(workers, f"{self.case.name}: workers outlive their driver")
        hit = driver.returncode == -signal.SIGKILL or (whom == "worker" and targets)
        return f"{whom if hit else 'late'} {moment} {round(until - began, 3)} status {driver.returncode}"

    def _come(self, moment: str) -> bool:
        """Whether a plan has come so far that a file matches."""
        with contextlib.suppress(FileNotFoundError):  # a folder was removed while it was listed
            return next(self.folder.rglob(_MOMENTS[moment]), None) is not None
        return False

    def finish(self, where: str, order: list[int]) -> None:
        """Runs tasks, commits twice, and compares the result with that of one process."""

        def finish() -> Any:
            plan = self.plan()
            for task in order:
                plan.run(task)
            made = plain(plan.commit())
            if plain(plan.commit()) != made or not plan.status().committed:
                raise AssertionError("a second commit gives something else")
            return made

        self.compare(where, _done(finish, where))
        if self.case.opened is not None and not self.half_done(where):
            raise Violation(f"{where}: committed, and it does not open")


def _points(log: Path) -> list[tuple[str, int, str | None]]:
    """Calls that change names, each with its number among the calls of its kind and thread, and its path.

    strace counts calls per thread. So the number names a call if the thread that made the first made it; of other calls, those on
    the same path are counted, or in the same folder.
    """
    made: list[tuple[str, int, str | None]] = []
    counts: Counter[tuple[str, str]] = Counter()
    first = ""
    for line in log.read_text(errors="replace").splitlines():
        found = re.match(r"(\d+) +(\w+)\(", line)
        if found is None:
            continue
        thread, call = found[1], found[2]
        counts[thread, call] += 1
        if call in _NAMING or (call == "openat" and "O_CREAT" in line and "/dev/" not in line):
            first = first or thread
            if thread == first:
                made.append((call, counts[thread, call], None))
                continue
            folder = re.match(r"\d+ +\w+\(\d+<([^>]*)>, \"[^/]", line)  # relative to an open folder
            only = folder[1] if folder else re.findall(r'"([^"]*)"', line)[0]
            counts[only, call] += 1
            made.append((call, counts[only, call], only))
    return list(dict.fromkeys(made))


def _children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def _gone(pids: list[int], where: str) -> None:
    """Waits until processes that are not ours have ended."""
    until = time.monotonic() + PATIENCE
    for pid in pids:
        while _runs(pid):
            if time.monotonic() > until:
                raise Violation(f"{where}: process {pid}")
            time.sleep(0.005)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- a campaign ----------------------------------------------------------------------------------------------------


def campaign(
    folder: Path, chosen: list[Case], kills: int, seed: int, *, drivers: bool = True
) -> Iterator[dict[str, Any]]:
    """Kills in turn over cases until there are as many as asked for. Yields a record for each case, and one of all."""
    traced = usable()
    benches = [Bench(case, folder / case.name) for case in chosen]
    totals: dict[str, Counter[str]] = {case.name: Counter() for case in chosen}
    wrong: list[str] = []
    for number in itertools.count(seed):
        for bench in benches:
            if _killed(totals) >= kills:
                break
            try:
                totals[bench.case.name] += bench.round(number, drivers, traced)
            except Violation as error:
                wrong.append(str(error))
                print(f"VIOLATION {error}", file=sys.stderr, flush=True)
            totals[bench.case.name]["rounds"] += 1
        if _killed(totals) >= kills or len(wrong) > kills:
            break
    for bench in benches:
        yield {"case": bench.case.name, "tasks": bench.tasks, **totals[bench.case.name]}
    summed: Counter[str] = sum(totals.values(), Counter())
    yield {"case": "all", **summed, "killed": _killed(totals), "violations": wrong}


def _killed(totals: dict[str, Counter[str]]) -> int:
    return sum(found[what] for found in totals.values() for what in ("tasks", "commit", "driver", "worker", "all"))


def main() -> None:
    """Prints a JSON line for each case, and every violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--verbs", default="", help="convert, tokenize, merge, stats, verify; default: all")
    parser.add_argument("--case", default="", help="one case")
    parser.add_argument("--seed", type=int, default=0, help="number of the first round")
    parser.add_argument("--no-drivers", action="store_true", help="kill no driver and no worker")
    parser.add_argument("--every", action="store_true", help="kill before every change of a name, once")
    parser.add_argument("--rounds", type=int, help="end after this many rounds, whatever the number of kills")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [c for c in cases() if not asked.verbs or c.name.partition("-")[0] in asked.verbs.split(",")]
    chosen = [c for c in chosen if not asked.case or c.name == asked.case]
    folder = Path(tempfile.mkdtemp(prefix="actshard-plan-kills-"))
    began = time.monotonic()
    try:
        if asked.rounds:
            for case in chosen:
                bench = Bench(case, folder / case.name)
                for number in range(asked.seed, asked.seed + asked.rounds):
                    print(case.name, number, dict(bench.round(number, not asked.no_drivers, usable())))
            return
        if asked.every:
            for case in chosen:
                bench = Bench(case, folder / case.name)
                print(
                    json.dumps({"case": case.name, **{stage: bench.every(stage) for stage in ("task", "commit")}}),
                    flush=True,
                )
            return
        for told in campaign(folder, chosen, asked.kills, asked.seed, drivers=not asked.no_drivers):
            print(json.dumps(told), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"seconds": round(time.monotonic() - began)}))
    sys.exit(1 if told["violations"] else 0)


if __name__ == "__main__":
    main()
