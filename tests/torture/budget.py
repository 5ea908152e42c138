"""Budgets of randomized tests: seconds in `make test`, large with `ACTSHARD_TORTURE=1`."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine

TORTURE = os.environ.get("ACTSHARD_TORTURE", "") not in ("", "0")


def runs(small: int, large: int) -> int:
    """`small`, or `large` under `make torture`, scaled by `ACTSHARD_TORTURE_SCALE`."""
    return max(1, int(large * float(os.environ.get("ACTSHARD_TORTURE_SCALE", "1")))) if TORTURE else small


def machine_settings(small: int, large: int, steps: int = 20) -> settings:
    """Hypothesis settings of a state machine. No deadline, because the machine may be busy.

    Without the explain phase, which before Python 3.12 traces every line of every run, also in forked children.
    """
    return settings(
        max_examples=runs(small, large),
        stateful_step_count=steps,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        derandomize=not TORTURE,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


class CountedMachine(RuleBasedStateMachine):
    """A state machine that counts its runs: one byte each in the file `ACTSHARD_TORTURE_COUNTS/<module>.<class>`.

    So a long campaign that is stopped, or fails, still has a count.
    """

    def __init__(self) -> None:
        super().__init__()
        # Excludes objects of earlier runs and of Hypothesis from garbage collection: after a thousand runs, a collection
        # took 0.2 s, most of the time of machines that trigger one.
        gc.collect()
        gc.freeze()
        folder = os.environ.get("ACTSHARD_TORTURE_COUNTS")
        if folder:
            with (Path(folder) / f"{type(self).__module__}.{type(self).__qualname__}").open("ab") as file:
                file.write(b".")
