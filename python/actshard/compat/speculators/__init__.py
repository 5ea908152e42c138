"""speculators' training data, from any store with token ids: a backend of hidden states, and its data set.

>>> from actshard.compat.speculators import ArrowDataset          # was: from speculators.train.data import ArrowDataset

Importing this module registers the backend ``"actshard"`` with hs-connectors, so that ``speculators.train`` takes its hidden states
from a store::

    python -m actshard.compat.speculators --data-path ROWS --hidden-states-backend actshard --actshard-store STORE ...

is ``python -m speculators.train`` with the backend; ``torchrun -m`` works too. ROWS is a folder of rows as ``prepare-data`` of
speculators writes it, or as :func:`write_rows` makes it of the store. Row i is example i, and their token ids are compared, as with
speculators' own files.

:class:`ArrowDataset` needs no rows: token ids and masks are the store's. Samples, dtypes, lengths and splits are those of
speculators 0.9.0, so its collate function and sampler work unchanged. A batch is one parallel read. Nothing is generated:
examples whose states are missing are skipped or raise, as ``on_missing`` says; damaged ones raise.

Requires hs-connectors; :class:`ArrowDataset` requires speculators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actshard.compat.speculators.transfer import StoreBackend, StoreTransfer, write_rows

if TYPE_CHECKING:
    from actshard.compat.speculators.datasets import ArrowDataset

__all__ = ["ArrowDataset", "StoreBackend", "StoreTransfer", "write_rows"]


def __getattr__(name: str) -> Any:
    # speculators imports transformers, which the backend alone does not need.
    if name == "ArrowDataset":
        from actshard.compat.speculators.datasets import ArrowDataset

        return ArrowDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
