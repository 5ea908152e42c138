"""How many tasks fit into a cluster at a time. In Ray and Dask, a task that fits on no machine would wait forever."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from actshard.base.errors import ArgumentError

MOST_IN_FLIGHT = 10_000
SOME_IN_FLIGHT = 1000
"""Number of tasks to send if the machines are unknown, because the cluster adds them when there is work."""
_LOOK_SECONDS = 5.0
_NEARLY = 1e-9


def places(machines: Sequence[Mapping[str, float]], needed: Mapping[str, float]) -> int:
    """Number of tasks that fit on the machines at a time."""
    return sum(
        min(_times(machine, name, amount) for name, amount in needed.items() if amount > 0) for machine in machines
    )


class Capacity:
    """How many tasks to send to a cluster at a time."""

    def __init__(
        self,
        look: Callable[[], Sequence[Mapping[str, float]]],
        needed: Mapping[str, float],
        limit: int | None,
        *,
        spare: bool,
    ) -> None:
        """``look`` returns the machines, or an empty list if they are unknown. ``limit`` is a number given by the caller.

        With ``spare``, twice as many tasks are sent as fit, so that no machine waits for work.
        """
        self._look, self._needed, self._asked, self._times = look, needed, limit, 1 + spare
        self._looked, self._found = -math.inf, 0

    def tasks(self) -> int:
        """Returns the number. Looks at the machines every few seconds, because clusters change."""
        if self._asked is not None:
            return self._asked
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            machines = self._look()
            self._looked, self._found = now, places(machines, self._needed) if machines else SOME_IN_FLIGHT
        return min(max(self._times * self._found, 1), MOST_IN_FLIGHT)


def check(engine: str, machines: Sequence[Mapping[str, float]], needed: Mapping[str, float], predicted: bool) -> None:
    """Raises ArgumentError, with the lacking resource, if a task fits on no machine. ``needed`` has names of options as keys."""
    if places(machines, needed):
        return
    for name, amount in needed.items():
        most = max((machine.get(name, 0) for machine in machines), default=0)
        if most * (1 + _NEARLY) < amount:
            why = (
                ", which the plan predicts: plan more tasks, or pass memory=" if name == "memory" and predicted else ""
            )
            raise ArgumentError(
                f"{name}: expected at most {most:,.12g}, the most that a machine of this {engine} cluster has for a task, "
                f"found {amount:,.12g}{why}"
            )
    raise ArgumentError(
        f"expected a machine of this {engine} cluster with {dict(needed)} together, found {list(machines)[:4]}"
    )


def _times(machine: Mapping[str, float], name: str, amount: float) -> int:
    has = machine.get(name, 0)
    return MOST_IN_FLIGHT if math.isinf(has) else int(has * (1 + _NEARLY) / amount)
