"""Runs tasks on a Ray cluster. Ray itself runs a task again if its node or process dies; ``retries=`` is for errors of tasks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actshard.base import _arguments
from actshard.base.errors import ArgumentTypeError, LostWorkerError, MissingExtraError
from actshard.plan.plan import Plan
from actshard.plan.runners import capacity
from actshard.plan.runners.tasks import Heard, lost, outcomes_at, plan_file

if TYPE_CHECKING:
    from types import ModuleType

    import ray

_RESOURCES = {"cpus": "CPU", "gpus": "GPU", "memory": "memory"}


def execute(
    plan: Plan,
    tasks: Sequence[int],
    heard: Heard,
    *,
    keep_going: bool,
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    memory: int | str | None = None,
    in_flight: int | None = None,
    restarts: int = 3,
    autoscaling: bool = False,
    ray_options: Mapping[str, Any] | None = None,
) -> None:
    """Runs tasks on a Ray cluster; see :class:`actshard.plan.runners.Engine`.

    Args:
        plan: the plan; all nodes must see its paths.
        tasks: task numbers.
        heard: called with the outcome of each task.
        keep_going: continue after a failure. If False, the other tasks are cancelled.
        address: the cluster's address, or ``"auto"``; None: the connected cluster, or a new one on this machine.
        cpus: processors of a task, and its number of threads.
        gpus: GPUs of a task.
        memory: memory of a task, such as ``"4GiB"``; None: as the plan predicts.
        in_flight: maximum number of tasks sent to Ray at a time; None: twice as many as fit.
        restarts: how often Ray runs a task again if its node or process dies.
        autoscaling: whether the cluster adds nodes, possibly larger ones, when tasks wait.
        ray_options: further options of ``ray.remote``, such as ``{"scheduling_strategy": "SPREAD"}``.

    Raises:
        ArgumentError: a task fits on no node, and ``autoscaling`` is False.
    """
    size = plan.predicted.memory if memory is None else _arguments.size(memory, "memory")
    needed = {"cpus": _amount(cpus, "cpus"), "gpus": _amount(gpus, "gpus"), "memory": size}
    limit = None if in_flight is None else _arguments.whole(in_flight, "in_flight", 1, capacity.MOST_IN_FLIGHT)
    max_retries = _arguments.whole(restarts, "restarts", 0, 1000)
    elastic = _arguments.switch(autoscaling, "autoscaling")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError.of("running a plan on Ray", "ray") from error
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    needed |= (ray_options or {}).get("resources") or {}
    if not elastic:
        capacity.check("Ray", _nodes(ray), needed, memory is None)
    options = {"num_cpus": cpus, "num_gpus": gpus, "memory": size, "max_retries": max_retries, **(ray_options or {})}
    function = ray.remote(**options)(outcomes_at)
    file, threads = plan_file(plan), max(1, int(cpus))
    free = capacity.Capacity(lambda: [] if elastic else _nodes(ray), needed, limit, spare=True)
    waiting = list(reversed(tasks))
    sent: dict[object, int] = {}
    try:
        while waiting or sent:
            while waiting and len(sent) < free.tasks():
                task = waiting.pop()
                sent[function.remote(file, [task], threads)] = task
            for reference in ray.wait(list(sent), num_returns=1)[0]:
                ended = _outcome(ray, plan, sent.pop(reference), reference)
                heard(ended)
                if "error" in ended and not keep_going:
                    return
    finally:
        for reference in sent:
            ray.cancel(reference)


def _outcome(ray: ModuleType, plan: Plan, task: int, reference: ray.ObjectRef) -> Mapping[str, object]:
    try:
        (ended,) = ray.get(reference)
    except ray.exceptions.RayError as error:
        return lost(task, LostWorkerError(f"Ray could not run it: {error}", path=plan.work))
    return dict(ended)


def _nodes(ray: ModuleType) -> list[dict[str, float]]:
    """Resources of the live nodes, by names of options."""
    options = {resource: option for option, resource in _RESOURCES.items()}
    return [
        {options.get(name, name): amount for name, amount in node["Resources"].items()}
        for node in ray.nodes()
        if node["Alive"]
    ]


def _amount(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ArgumentTypeError(f"{what}: expected a number of at least 0, found {value!r:.40}")
    return value
