"""speculators' training data from any store with token ids: a backend for hidden states, and its dataset.

>>> from actshard.compat.speculators import ArrowDataset          # was: from speculators.train.data import ArrowDataset

Importing this module registers the backend ``"actshard"`` with hs-connectors, so that ``speculators.train`` reads hidden states
from a store::

    python -m actshard.compat.speculators --data-path ROWS --hidden-states-backend actshard --actshard-store STORE ...

runs ``python -m speculators.train`` with the backend; ``torchrun -m`` works too. ROWS is a folder of rows from speculators'
``prepare-data``, or from :func:`write_rows`, which takes them from the store. Row i is example i; their token ids are compared, as
with speculators' own files.

:class:`ArrowDataset` does not need ROWS: it reads token ids and masks from the store. Samples, dtypes, lengths and splits are those
of speculators 0.9.0, so its collate function and sampler work unchanged. A batch is one parallel read. Hidden states are never
generated: examples with missing files are skipped or raise an error, depending on ``on_missing``. Damaged files raise an error.

Requires hs-connectors; :class:`ArrowDataset` requires speculators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actshard.compat.speculators.transfer import StoreBackend, StoreTransfer, write_rows

if TYPE_CHECKING:
    from actshard.compat.speculators.datasets import ArrowDataset

__all__ = ["ArrowDataset", "StoreBackend", "StoreTransfer", "write_rows"]


def __getattr__(name: str) -> object:
    # speculators imports transformers, which the backend alone does not need.
    if name == "ArrowDataset":
        from actshard.compat.speculators.datasets import ArrowDataset

        return ArrowDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
