"""Runs tasks on this machine: in this process, or in worker processes that run many tasks each."""

from __future__ import annotations

import os
import selectors
from collections.abc import Mapping, Sequence
from typing import Any

from actshard import _arguments
from actshard.errors import LostWorkerError
from actshard.plan.plan import Plan
from actshard.runners.process import Process, how_it_ended
from actshard.runners.tasks import Heard, lost, outcome, plan_file
from actshard.work import children

MOST_WORKERS = 4096


def execute(plan: Plan, tasks: Sequence[int], heard: Heard, *, keep_going: bool, workers: int | None = None) -> None:
    """Runs tasks here; see :class:`actshard.runners.Engine`.

    Args:
        plan: the plan.
        tasks: task numbers.
        heard: called with the outcome of each task.
        keep_going: continue after a failure. If False, running tasks are finished and no other is started.
        workers: number of processes, which share the processors; None: run the tasks in this process, in order.
    """
    count = None if workers is None else _arguments.whole(workers, "workers", 1, MOST_WORKERS)
    if count is None:
        for task in tasks:
            ended = outcome(plan, task)
            heard(ended)
            if "error" in ended and not keep_going:
                return
        return
    _Crew(plan, min(count, len(tasks)), heard, keep_going).run(tasks)


def last_to_first(plan: Plan, tasks: Sequence[int]) -> list[int]:
    """Tasks in the reverse of the order in which workers get them: largest first, so that no long task is left for the end.

    Among tasks of about the same size, lower numbers go first, because task 0 of a check also checks the files.
    """
    sizes = {task: int(plan.tasks[task].get("bytes", 0)) for task in tasks}
    step = max(sizes.values(), default=0) // 10 + 1
    return sorted(tasks, key=lambda task: (sizes[task] // step, -task))


class _Crew:
    """Gives tasks to workers, the largest first, and replaces those that die."""

    def __init__(self, plan: Plan, count: int, heard: Heard, keep_going: bool) -> None:
        self._plan, self._count, self._heard, self._keep_going = plan, count, heard, keep_going
        self._threads = max(1, _processors() // count)
        self._file = plan_file(plan)
        self._waiting: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._workers: set[Process] = set()

    def run(self, tasks: Sequence[int]) -> None:
        self._waiting = last_to_first(self._plan, tasks)
        try:
            while self._waiting or self._workers:
                while self._waiting and len(self._workers) < self._count:
                    self._start()
                for key, _ in self._selector.select():
                    self._listen(key.data)
        finally:
            for worker in self._workers:
                worker.process.kill()  # harmless: a task may be killed at any time
            for worker in self._workers:
                worker.end()
                self._clear(worker)
            self._selector.close()

    def _start(self) -> None:
        worker = Process(self._file, self._threads)
        self._workers.add(worker)
        self._selector.register(worker.said, selectors.EVENT_READ, worker)
        worker.give(self._waiting.pop())

    def _listen(self, worker: Process) -> None:
        found = worker.hear()
        if found is None:
            self._ended(worker)
            return
        for ended in found:
            self._tell(ended)
            worker.task = None
            if self._waiting:
                worker.give(self._waiting.pop())
            else:
                self._ended(worker)

    def _ended(self, worker: Process) -> None:
        self._selector.unregister(worker.said)
        self._workers.discard(worker)
        status = worker.end()
        if worker.task is None:
            return
        self._clear(worker)
        why = LostWorkerError(f"its process {how_it_ended(status)}", path=self._plan.work)
        self._plan.book.failed(worker.task, why)
        self._tell(lost(worker.task, why))

    def _clear(self, worker: Process) -> None:
        """Removes the attempt of a dead process, so that its task does not count as running."""
        if worker.task is not None:
            self._plan.book.remove_dead(worker.task)

    def _tell(self, ended: Mapping[str, Any]) -> None:
        if "error" in ended and not self._keep_going:
            self._waiting.clear()
        self._heard(ended)


def _processors() -> int:
    asked = os.environ.get("ACTSHARD_NUM_THREADS", "")
    if asked.isascii() and asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return children.processors()
