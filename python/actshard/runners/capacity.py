"""How many tasks have room in a cluster at a time. Ray and Dask let a task wait for ever that no machine has room for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from actshard.errors import ArgumentError

MOST_IN_FLIGHT = 10_000
SOME_IN_FLIGHT = 1000
"""Tasks that a cluster is given if its machines are not known, because it makes them when there is work."""
_LOOK_SECONDS = 5.0
_NEARLY = 1e-9


def places(machines: Sequence[Mapping[str, float]], needed: Mapping[str, float]) -> int:
    """Number of tasks for which the machines have all resources at a time."""
    return sum(
        min(_times(machine, name, amount) for name, amount in needed.items() if amount > 0) for machine in machines
    )


class Capacity:
    """How many tasks to send to a cluster at a time."""

    def __init__(
        self,
        look: Callable[[], Sequence[Mapping[str, float]]],
        needed: Mapping[str, float],
        asked: int | None,
        *,
        spare: bool,
    ) -> None:
        """``look`` returns the machines; without any, they are not known. ``asked`` is the number that the caller wants.

        With ``spare``, as many tasks again are sent, and wait, so that no machine is idle.
        """
        self._look, self._needed, self._asked, self._times = look, needed, asked, 1 + spare
        self._looked, self._found = -math.inf, 0

    def tasks(self) -> int:
        """The number. Machines come and go: looks at them now and then."""
        if self._asked is not None:
            return self._asked
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            machines = self._look()
            self._looked, self._found = now, places(machines, self._needed) if machines else SOME_IN_FLIGHT
        return min(max(self._times * self._found, 1), MOST_IN_FLIGHT)


def check(engine: str, machines: Sequence[Mapping[str, float]], needed: Mapping[str, float], predicted: bool) -> None:
    """Raises ArgumentError if no machine has room for a task, naming what it lacks. ``needed`` is by names of options."""
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
