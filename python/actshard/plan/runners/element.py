"""An element of an array job, on its node: runs its tasks, and is queued again when it is preempted or its time is up.

Slurm sends a signal before it stops an element (submitit's ``slurm_signal_delay_s``, 90 s). submitit then calls ``checkpoint`` and
queues the element again, which runs the unfinished tasks. Python cannot handle a signal during a long call into Rust: such an
element is killed, and the driver runs its tasks again.
"""

from __future__ import annotations

import time

from actshard.base.errors import UnfinishedError
from actshard.plan.runners.tasks import done_at, lost, outcomes_at


class TimeIsUp(BaseException):
    """The time limit is near, and this run finished no task. Not an Exception, because it ends the element, not the task."""


class Element:
    """The function object that submitit sends to a node."""

    def __init__(self, minutes: int) -> None:
        self._minutes = minutes
        self._began = 0.0
        self._done = 0

    def __call__(self, file: str, tasks: list[int]) -> list[dict[str, object]]:
        """Runs the tasks. See :func:`actshard.plan.runners.tasks.outcomes_at`."""
        self._began, self._done = time.monotonic(), len(done_at(file, tasks))
        ended: list[dict[str, object]] = []
        try:
            for task in tasks:
                ended += outcomes_at(file, [task])
        except TimeIsUp:
            why = UnfinishedError(
                f"expected a task to end within the time limit of {self._minutes} minutes: ask for more time, or plan more tasks"
            )
            ended += [lost(task, why) for task in tasks[len(ended) :]]
        return ended

    def checkpoint(self, file: str, tasks: list[int]) -> object:
        """Called by submitit in its signal handler: returns the job to queue again.

        Raises:
            TimeIsUp: this run finished no task, so another would not either.
        """
        import submitit.helpers

        # submitit's rule: a signal means that time is up after 80 % of the limit, or in its last ten minutes; else preemption.
        late = time.monotonic() - self._began >= min(self._minutes * 48, self._minutes * 60 - 600)
        if late and len(done_at(file, tasks)) <= self._done:
            raise TimeIsUp
        return submitit.helpers.DelayedSubmission(self, file, tasks)
