"""Budgets and seeds of randomized tests, for the three tiers of tests.

``ACTSHARD_TIER`` is ``test`` (the default), ``slow`` or ``torture``: `make test`, `make test-slow` and `make torture` set it.
``ACTSHARD_SEED`` is the seed; the default is the day, so that every day looks elsewhere, and a run can be repeated.
"""

from __future__ import annotations

import datetime
import gc
import os
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine

TIERS = ("test", "slow", "torture")
TIER = os.environ.get("ACTSHARD_TIER", "test")
if TIER not in TIERS:
    raise ValueError(f"ACTSHARD_TIER: expected one of {', '.join(TIERS)}, found {TIER!r}")
TORTURE = TIER == "torture"


def seed() -> int:
    """The seed of this run. Processes that it starts have the same one."""
    # Set once: a run that continues past midnight keeps its seed.
    return int(os.environ.setdefault("ACTSHARD_SEED", f"{datetime.datetime.now(datetime.UTC):%Y%m%d}"))


def first_number() -> int:
    """The first of a million numbers for choices that are numbered one by one; other days have other numbers."""
    return seed() * 1_000_000


def runs(small: int, large: int) -> int:
    """The budget of this tier: `small` in `make test-slow`, a third of it in `make test`, `large` in `make torture`.

    ``ACTSHARD_TORTURE_SCALE`` multiplies `large`.
    """
    if TORTURE:
        return max(1, int(large * float(os.environ.get("ACTSHARD_TORTURE_SCALE", "1"))))
    return small if TIER == "slow" else -(-small // 3)


def machine_settings(small: int, large: int, steps: int = 20) -> settings:
    """Hypothesis settings of a state machine; ``tests/conftest.py`` sets the seed.

    Without the explain phase, which before Python 3.12 traces every line of every run, also in forked children.
    """
    return settings(
        max_examples=runs(small, large),
        stateful_step_count=steps,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
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
