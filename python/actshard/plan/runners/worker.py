"""A worker process of ``local``: runs tasks one after another; see :mod:`actshard.base.work.pool`.

Its settings are ``{"plan": FILE, "path": [...]}``, an order is the number of a task, a message is the outcome of a task.
"""

from __future__ import annotations

import json
import sys

from actshard.base.work.pool import Driver


def main() -> None:
    """Runs tasks until end of file."""
    driver = Driver()
    settings = json.loads(driver.settings())
    sys.path[:] = settings["path"]
    from actshard.plan.runners.tasks import outcomes_at

    for line in driver.orders():
        for ended in outcomes_at(settings["plan"], [int(line)]):
            driver.send(ended)


if __name__ == "__main__":
    main()
