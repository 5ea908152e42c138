"""The logger ``actshard``. It reports decisions, and skipped and continued work. Silent unless the program configures logging.

``INFO`` has one line per call that opens, converts or stages a dataset; ``DEBUG`` adds one per stream, per loop and per decision.
Nothing is logged per batch or row. Warnings are those of :mod:`warnings`, not repeated here.
"""

from __future__ import annotations

import logging

LOG = logging.getLogger("actshard")
LOG.addHandler(logging.NullHandler())
