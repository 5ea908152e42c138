"""``actshard.plan``: work on datasets, divided into tasks that any machine may run.

A plan is data (:class:`Plan`); a task is a function of the plan and its number; engines run tasks (:func:`actshard.run`).

- ``data``: the plan as data, and its JSON
- ``plan``: running a task, status and commit
- ``book``: the working folder, through which tasks, status and commit share their state
- ``verb``: the interface of the kinds of plans; each kind has its own module: ``converting``, ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from actshard.plan.data import Predicted
from actshard.plan.plan import Plan, Status, load

if TYPE_CHECKING:
    from actshard.plan.capturing import capture
    from actshard.plan.converting import convert
    from actshard.plan.creating import create
    from actshard.plan.merging import merge
    from actshard.plan.staging import stage
    from actshard.plan.summing import stats
    from actshard.plan.tokenizing import tokenize
    from actshard.plan.verifying import verify

__all__ = [
    "Plan",
    "Predicted",
    "Status",
    "capture",
    "convert",
    "create",
    "load",
    "merge",
    "stage",
    "stats",
    "tokenize",
    "verify",
]

_MAKERS = {
    "capture": "capturing",
    "convert": "converting",
    "create": "creating",
    "merge": "merging",
    "stage": "staging",
    "stats": "summing",
    "tokenize": "tokenizing",
    "verify": "verifying",
}
"""Functions that make plans, and their modules, which load on first use."""


def __getattr__(name: str) -> object:
    if name not in _MAKERS:
        raise AttributeError(f"module 'actshard.plan' has no attribute {name!r}")
    attribute = getattr(importlib.import_module(f"actshard.plan.{_MAKERS[name]}"), name)
    globals()[name] = attribute
    return attribute
