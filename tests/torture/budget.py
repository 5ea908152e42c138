"""How long a machine runs: a few seconds in `make test`, as long as it takes with `ACTSHARD_TORTURE=1`."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine

TORTURE = os.environ.get("ACTSHARD_TORTURE", "") not in ("", "0")


def runs(small: int, large: int) -> int:
    """`small`, or `large` under `make torture`; `ACTSHARD_TORTURE_SCALE` multiplies the latter."""
    return max(1, int(large * float(os.environ.get("ACTSHARD_TORTURE_SCALE", "1")))) if TORTURE else small


def machine_settings(small: int, large: int, steps: int = 20) -> settings:
    """Hypothesis settings of a stateful machine. No deadline: a busy computer is no fault.

    Without the phase that explains a failure: before Python 3.12 it traces every line of every run, and of forked children.
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
    """A machine whose runs are counted: a byte each in the file `ACTSHARD_TORTURE_COUNTS/<module>.<class>`.

    A campaign of hours that is stopped, or fails, has a number then.
    """

    def __init__(self) -> None:
        super().__init__()
        # What earlier runs left, and all that Hypothesis remembers of them, is not looked at again: after a thousand runs a
        # collection took a fifth of a second, most of the time of machines that ask for one.
        gc.collect()
        gc.freeze()
        folder = os.environ.get("ACTSHARD_TORTURE_COUNTS")
        if folder:
            with (Path(folder) / f"{type(self).__module__}.{type(self).__qualname__}").open("ab") as file:
                file.write(b".")
