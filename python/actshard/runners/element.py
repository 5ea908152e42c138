"""An element of an array job, on its node: runs its tasks, and is queued again when it is preempted or its time is up.

Slurm sends a signal some time before it takes an element's node (submitit's ``slurm_signal_delay_s``, 90 s). submitit then calls
``checkpoint`` and queues the element again, which runs what is not done. Python handles signals between its own instructions: an
element that is in a long call into Rust then is killed, and the driver runs its tasks again.
"""

from __future__ import annotations

import time
from typing import Any

from actshard.errors import UnfinishedError
from actshard.runners.tasks import done_at, lost, outcomes_at


class TimeIsUp(BaseException):
    """The time limit is near, and no task was finished in this run. No Exception: it ends the element, not the task."""


class Element:
    """What submitit sends to a node."""

    def __init__(self, minutes: int) -> None:
        self._minutes = minutes
        self._began = 0.0
        self._done = 0

    def __call__(self, file: str, tasks: list[int]) -> list[dict[str, Any]]:
        """Runs the tasks. See :func:`actshard.runners.tasks.outcomes_at`."""
        self._began, self._done = time.monotonic(), len(done_at(file, tasks))
        said: list[dict[str, Any]] = []
        try:
            for task in tasks:
                said += outcomes_at(file, [task])
        except TimeIsUp:
            why = UnfinishedError(
                f"expected a task to end within the time limit of {self._minutes} minutes: ask for more time, or plan more tasks"
            )
            said += [lost(task, why) for task in tasks[len(said) :]]
        return said

    def checkpoint(self, file: str, tasks: list[int]) -> Any:
        """Called by submitit in its signal handler: returns what is queued again.

        Raises:
            TimeIsUp: the next run would get no further.
        """
        import submitit.helpers

        # submitit's rule: a signal means that time is up if it comes after 80 % of it, or in the last ten minutes.
        late = time.monotonic() - self._began >= min(self._minutes * 48, self._minutes * 60 - 600)
        if late and len(done_at(file, tasks)) <= self._done:
            raise TimeIsUp
        return submitit.helpers.DelayedSubmission(self, file, tasks)
