"""Finds the elements of an array job that have ended, with ``squeue``.

submitit instead calls ``sacct`` every ten minutes, which requires Slurm's accounting.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator

from actshard.base.errors import ArgumentError

ASK_SECONDS = 15.0
"""Minimum seconds between two requests to Slurm's controller, which all users share."""
_LEAVE_SECONDS = 30.0
_ANSWER_SECONDS = 120.0
_OVER = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT")
)  # fmt: skip
GONE = "no longer in the queue"
"""State of an element that the controller no longer lists, some minutes after its end."""


class Queue:
    """The elements of one array job."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._ids = set(ids)
        self._array = next(iter(self._ids)).partition("_")[0]
        self._asked = time.monotonic()
        self._over: dict[str, str] = {}

    def lost(self, ids: Iterable[str]) -> dict[str, str]:
        """States of the given elements that have ended. Returns an empty dict if the last request was less than 15 s ago.

        An element counts only if two requests find it ended: it may change its state, and its result may not be visible here yet.
        """
        now = time.monotonic()
        if now - self._asked < ASK_SECONDS:
            return {}
        self._asked = now
        states = _states("--jobs", self._array)
        if states is None:
            return {}
        over = {job_id: states.get(job_id, GONE) for job_id in self._ids if states.get(job_id, "CANCELLED") in _OVER}
        before, self._over = self._over, over
        return {job_id: over[job_id] for job_id in ids if job_id in over and job_id in before}

    def cancel(self) -> None:
        """Cancels the array."""
        _slurm("scancel", "--quiet", self._array)


def check_installed() -> None:
    """Raises ArgumentError on a machine without Slurm's commands."""
    if lacking := [name for name in ("sbatch", "srun", "squeue", "scancel") if shutil.which(name) is None]:
        raise ArgumentError(
            f"on: expected sbatch, srun, squeue and scancel of a Slurm cluster on PATH, found no {', '.join(lacking)}"
        )


@contextlib.contextmanager
def outside_of_jobs() -> Iterator[None]:
    """Hides the variables of the job in which the driver runs. Otherwise its array could inherit resources, or be refused."""
    hidden = [n for n in os.environ if n.startswith(("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")) and n != "SLURM_CONF"]
    before = {name: os.environ.pop(name) for name in hidden}
    try:
        yield
    finally:
        os.environ.update(before)


def clear(name: str) -> None:
    """Cancels the caller's jobs with a name, such as those of a killed driver, and waits until they write no more logs."""
    _slurm("scancel", "--quiet", "--user", str(os.getuid()), "--name", name)
    limit = time.monotonic() + _LEAVE_SECONDS
    while time.monotonic() < limit:
        states = _states("--user", str(os.getuid()), "--name", name)
        if states is not None and all(state in _OVER for state in states.values()):
            return
        time.sleep(1.0)


def _states(*which: str) -> dict[str, str] | None:
    """States by element, such as ``{"17_3": "RUNNING"}``; None if Slurm does not answer."""
    process = _slurm("squeue", "--noheader", "--array", "--states=all", "--format=%i %T", *which)
    if process is None or (process.returncode != 0 and "Invalid job id" not in process.stderr):
        return None
    return dict(line.split(maxsplit=1) for line in process.stdout.splitlines() if len(line.split()) == 2)


def _slurm(*words: str) -> subprocess.CompletedProcess[str] | None:
    # Without the variables in which users set filters and formats.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCANCEL_"))}
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
