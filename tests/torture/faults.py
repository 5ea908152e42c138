"""Fails or kills a job at its n-th system call of a kind, for every n, and checks the result.

`strace` attaches to a forked child before its job begins and injects one fault, so that raw system calls of Rust are included.
After a fault the job has either succeeded, with the bytes of an undisturbed run, or raised one ActshardError. In both cases the
same call is then repeated without faults and must produce those bytes. The number of examples reported as safe never decreases.

    python -m tests.torture.faults                      every job, call and n
    python -m tests.torture.faults --jobs create-zarr --calls rename --most 3
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture import jobs
from tests.waiting import PATIENCE

import actshard

STRACE = shutil.which("strace")
FULL = ("ENOSPC", "EIO", "EDQUOT", "EINTR")
CALLS: dict[str, tuple[str, ...]] = {
    "write": FULL,
    "pwrite64": FULL,
    "writev": FULL,
    "pwritev": FULL,
    "copy_file_range": ("ENOSPC", "EIO", "EDQUOT"),
    "sendfile": ("ENOSPC", "EIO", "EDQUOT"),
    "fallocate": ("ENOSPC", "EIO", "EDQUOT"),
    "ftruncate": ("ENOSPC", "EIO", "EDQUOT", "EINTR"),
    "fsync": ("EIO", "ENOSPC", "EDQUOT", "EINTR"),
    "fdatasync": ("EIO", "ENOSPC", "EDQUOT", "EINTR"),
    "syncfs": ("EIO", "ENOSPC", "EDQUOT"),
    "rename": ("ENOSPC", "EIO", "EDQUOT"),
    "renameat": ("ENOSPC", "EIO", "EDQUOT"),
    "renameat2": ("ENOSPC", "EIO", "EDQUOT"),
    "openat": ("ENOSPC", "EIO", "EDQUOT", "EINTR"),
    "mkdir": ("ENOSPC", "EIO", "EDQUOT"),
    "mkdirat": ("ENOSPC", "EIO", "EDQUOT"),
    "link": ("ENOSPC", "EIO", "EDQUOT"),
    "linkat": ("ENOSPC", "EIO", "EDQUOT"),
    "symlink": ("ENOSPC", "EIO", "EDQUOT"),
    "symlinkat": ("ENOSPC", "EIO", "EDQUOT"),
    "unlink": ("EIO",),
    "unlinkat": ("EIO",),
    "rmdir": ("EIO",),
}
"""System calls that change a file system, with the errors that a disk, a quota or a signal causes."""
_PAGE = 1 << 17
_LATE = ("actshard", "pyarrow", "tokenizers", "jinja2", "markupsafe", "numpy", "yaml", "json", "concurrent", "pandas")
"""Packages imported on demand, pandas by pyarrow. Imported first, so that no faults are injected into imports."""


@dataclass
class Ending:
    """How a job ended: `kind` is "done", "error" (an ActshardError), "foreign" (another exception), "killed" or "hung"."""

    kind: str
    text: str = ""
    safe: list[int] = field(default_factory=list)
    trace: str = ""


class Violation(AssertionError):
    """A guarantee was violated."""


def run(job: str, folder: Path, inject: str | None = None, log: Path | None = None) -> Ending:
    """Runs a job in a forked child, under strace if a fault is injected or a log is written."""
    shared = mmap.mmap(-1, _PAGE)  # the child reports through shared memory, without system calls
    begin, go = os.pipe()
    child = os.fork()
    if child == 0:
        _child(job, folder, shared, begin)
    os.close(begin)
    tracer = None
    if inject is not None or log is not None:
        tracer = _attach(child, inject, log)
    os.write(go, b"x")
    os.close(go)
    until = time.monotonic() + PATIENCE
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            _join(tracer)
            return Ending("hung")
        time.sleep(0.002)
    _join(tracer)
    told = json.loads(shared[4 : 4 + int.from_bytes(shared[:4], "little")] or b"{}")
    status = found[1]
    if os.WIFSIGNALED(status):
        kind = "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"signal {os.WTERMSIG(status)}"
        return Ending(kind, safe=told.get("safe", []))
    return Ending(
        told.get("kind", "foreign"), told.get("text", "no report"), told.get("safe", []), told.get("trace", "")
    )


def warm(job: str, folder: Path) -> None:
    """Imports all modules of a job, for later children."""
    shared = mmap.mmap(-1, _PAGE)
    begin, go = os.pipe()
    child = os.fork()
    if child == 0:
        _child(job, folder, shared, begin)
    os.write(go, b"x")
    os.waitpid(child, 0)
    told = json.loads(shared[4 : 4 + int.from_bytes(shared[:4], "little")] or b"{}")
    for name in told.get("modules", []):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _child(job: str, folder: Path, shared: mmap.mmap, begin: int) -> None:
    told: dict[str, object] = {"safe": []}

    def write() -> None:
        raw = json.dumps(told).encode()[: _PAGE - 4]
        shared[4 : 4 + len(raw)] = raw
        shared[:4] = len(raw).to_bytes(4, "little")

    def tell(n: int) -> None:
        told["safe"].append(n)  # type: ignore[attr-defined]
        write()

    code = 1
    try:
        os.read(begin, 1)
        jobs.run(job, folder, tell)
        told["kind"], code = "done", 0
        told["modules"] = [name for name in sys.modules if name.split(".")[0] in _LATE]
    except actshard.ActshardError as error:
        told["kind"], told["text"] = "error", f"{type(error).__name__}: {error}"
    except BaseException as error:
        told["kind"], told["text"] = "foreign", f"{type(error).__name__}: {error}"
        told["trace"] = traceback.format_exc()[-3000:]
    finally:
        write()
        os._exit(code)


def _attach(child: int, inject: str | None, log: Path | None, only: str | None = None) -> subprocess.Popen[str]:
    """Attaches strace to a child; `only`: of the calls, those on this path are counted."""
    assert STRACE is not None
    command = [STRACE, "-f", "-p", str(child), *(["-P", only] if only else [])]
    if inject is not None:
        call = inject.split(":")[0]
        command += ["-e", f"trace={call}", "-e", f"inject={inject}", "-o", os.devnull]
    else:
        command += ["-y", "-s", "0", "-e", f"trace=close,{','.join(CALLS)}", "-o", str(log)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    line = tracer.stderr.readline()
    if "attached" not in line:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise RuntimeError(f"strace cannot attach here: {line.strip()}")
    return tracer


def _join(tracer: subprocess.Popen[str] | None) -> None:
    if tracer is not None:
        tracer.communicate(timeout=PATIENCE)


def usable() -> bool:
    """Whether strace is installed and may attach to a child."""
    if STRACE is None:
        return False
    child = os.fork()
    if child == 0:
        time.sleep(PATIENCE)
        os._exit(0)
    try:
        tracer = _attach(child, None, Path(os.devnull))
    except RuntimeError:
        return False
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _join(tracer)
    return True


class Bench:
    """A job, its folder, and the bytes of an undisturbed run."""

    def __init__(self, job: str, folder: Path) -> None:
        self.job = job
        self.template, self.folder = folder / "template", folder / "run"
        shutil.rmtree(self.template, ignore_errors=True)
        self.template.mkdir(parents=True)
        # Prepared under the job's final path, because results contain the path of their source.
        self.reset(empty=True)
        jobs.prepare(job, self.folder)
        shutil.rmtree(self.template)
        self.folder.rename(self.template)
        self.log = folder / "log"
        self.reset()
        warm(job, self.folder)
        whole = []
        for traced in (False, True):
            self.reset()
            ending = run(job, self.folder, log=self.log if traced else None)
            if ending.kind != "done":
                raise Violation(f"{job}: undisturbed, and it ended so: {ending}")
            path = jobs.result(job, self.folder)
            assert path is not None
            jobs.check(job, path)
            whole.append(jobs.digest(self.folder))
            time.sleep(1.1)  # reveals files that contain the time of day
        assert whole[0].keys() == whole[1].keys()
        self.bytes = {name: digest for name, digest in whole[0].items() if whole[1][name] == digest}
        self.names = set(whole[0])
        self.counts = _counts(self.log)

    def reset(self, empty: bool = False) -> None:
        """Restores the folder to its state before the job."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if empty:
            self.folder.mkdir()
        else:
            shutil.copytree(self.template, self.folder, symlinks=True)

    def disturb(self, inject: str) -> Ending:
        """Injects a fault, checks the result and repeats the call. Raises Violation if a guarantee is violated."""
        self.reset()
        ending = run(self.job, self.folder, inject)
        where = f"{self.job} inject={inject}"
        if ending.kind in ("foreign", "hung") or ending.kind.startswith("signal"):
            raise Violation(f"{where}: {ending.kind}: {ending.text}\n{ending.trace}")
        self.examine(where, ending)
        return ending

    def examine(self, where: str, ending: Ending) -> None:
        """Checks that a disturbed job left a complete or unfinished result, which the same call finishes."""
        if ending.kind == "error" and (len(ending.text.splitlines()) != 1 or "InternalError" in ending.text):
            raise Violation(f"{where}: a message that helps nobody: {ending.text!r}")
        found = jobs.result(self.job, self.folder)
        if ending.kind == "done" or found is not None:
            if found is None:
                raise Violation(f"{where}: it ended well, and there is no dataset")
            self._same(where, found, left_overs=True)
        safe = max(ending.safe, default=0)
        again = run(self.job, self.folder)
        if again.kind != "done":
            raise Violation(f"{where} ({ending.kind}: {ending.text}): repeated, it ended so: {again}\n{again.trace}")
        if again.safe and again.safe[0] < safe:
            raise Violation(f"{where}: {safe} examples were safe, then {again.safe[0]}")
        found = jobs.result(self.job, self.folder)
        if found is None:
            raise Violation(f"{where}: repeated, it ended well, and there is no dataset")
        self._same(where, found)
        left = {name for name in jobs.digest(self.folder) if name not in self.names}
        if left:
            raise Violation(f"{where}: left over: {sorted(left)}")

    def _same(self, where: str, path: Path, *, left_overs: bool = False) -> None:
        try:
            jobs.check(self.job, path, left_overs=left_overs)
        except (AssertionError, actshard.ActshardError) as error:
            raise Violation(f"{where}: wrong data: {error!r}") from error
        now = jobs.digest(self.folder)
        other = [name for name, digest in self.bytes.items() if now.get(name) != digest]
        if other:
            raise Violation(f"{where}: other bytes than undisturbed: {other}")

    def faults(self, calls: list[str], most: int | None, persistent: bool) -> Iterator[str]:
        """Injects every fault: each call, each n, each error; once and persistently."""
        for call in calls:
            count = self.counts.get(call, 0)
            for n in range(1, (count if most is None else min(most, count)) + 1):
                for error in CALLS[call]:
                    yield f"{call}:error={error}:when={n}"
                if persistent:
                    yield f"{call}:error={CALLS[call][0]}:when={n}+"

    def kills(self, calls: list[str], most: int | None) -> Iterator[str]:
        """A SIGKILL at each call."""
        for call in calls:
            count = self.counts.get(call, 0)
            for n in range(1, (count if most is None else min(most, count)) + 1):
                yield f"{call}:signal=SIGKILL:when={n}"


def _counts(log: Path) -> dict[str, int]:
    """Number of calls of each kind, maximum over threads, because strace counts per thread."""
    per: collections.Counter[tuple[str, str]] = collections.Counter()
    for line in log.read_text(errors="replace").splitlines():
        found = re.match(r"(\d+) +(\w+)\(", line)
        if found:
            per[found[2], found[1]] += 1
    most: dict[str, int] = {}
    for (call, _), n in per.items():
        most[call] = max(most.get(call, 0), n)
    return most


def full_disk(job: str, folder: Path, sizes: list[int]) -> tuple[int, int]:
    """Runs a job on a full tmpfs of each size, then with space. Returns how many ran out of space, and how many did not."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    short = fine = 0
    for size in sizes:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)], check=True)
        try:
            try:
                bench_folder = disk / "run"
                bench_folder.mkdir()
                jobs.prepare(job, bench_folder)
            except (OSError, actshard.ActshardError):
                continue  # not enough space for the input
            ending = run(job, bench_folder)
            if ending.kind not in ("done", "error"):
                raise Violation(f"{job} on a disk of {size} KiB: {ending}")
            if ending.kind == "done":
                fine += 1
            else:
                short += 1
                if "DiskFullError" not in ending.text:
                    raise Violation(f"{job} on a disk of {size} KiB: expected DiskFullError, found {ending.text}")
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            again = run(job, bench_folder)
            if again.kind != "done":
                raise Violation(f"{job} after a full disk of {size} KiB ({ending.text}): {again}")
            found = jobs.result(job, bench_folder)
            assert found is not None
            jobs.check(job, found)
            if max(ending.safe, default=0) > (again.safe or [N_MOST])[0]:
                raise Violation(f"{job} on a disk of {size} KiB: {ending.safe} were safe, then {again.safe}")
        finally:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)  # a child may still be ending
    return short, fine


N_MOST = 1 << 62


def main() -> None:
    """Runs everything or a part. Prints results as JSON lines, and every violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="*", default=list(jobs.JOBS))
    parser.add_argument("--calls", nargs="*", default=list(CALLS))
    parser.add_argument("--most", type=int, help="no more than this many n of a call")
    parser.add_argument("--what", nargs="*", default=["faults", "kills", "disks"])
    parser.add_argument("--stop", action="store_true", help="end at the first violation")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if not usable():
        sys.exit("strace is not there or may not attach; Debian: apt-get install strace")
    totals: collections.Counter[str] = collections.Counter()
    wrong = 0
    for job in asked.jobs:
        folder = Path(tempfile.mkdtemp(prefix="actshard-faults-"))
        bench = Bench(job, folder)
        count: collections.Counter[str] = collections.Counter()
        lists = []
        if "faults" in asked.what:
            lists.append(("faults", bench.faults(asked.calls, asked.most, persistent=True)))
        if "kills" in asked.what:
            lists.append(("kills", bench.kills(asked.calls, asked.most)))
        for what, each in lists:
            for inject in each:
                try:
                    ending = bench.disturb(inject)
                    count[f"{what}: {ending.kind}"] += 1
                except Violation as error:
                    wrong += 1
                    count[f"{what}: VIOLATED"] += 1
                    print(f"VIOLATION {error}", flush=True)
                    if asked.stop:
                        sys.exit(1)
        if "disks" in asked.what and os.geteuid() == 0:
            try:
                short, fine = full_disk(job, folder, list(range(8, 400, 8)))
                count["disks: full"], count["disks: enough"] = short, fine
            except Violation as error:
                wrong += 1
                print(f"VIOLATION {error}", flush=True)
        print(json.dumps({"job": job, "calls": bench.counts, **count}), flush=True)
        totals.update(count)
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"job": "all", **totals, "violations": wrong}), flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
