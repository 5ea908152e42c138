"""``saev.data``'s loaders, reading through actshard.

>>> from actshard.compat.saev import ShuffledConfig, ShuffledDataLoader          # was: from saev.data import ...

Fields, keys, types and errors are those of OSU-NLP-Group/saev as of March 2026. What is better here:

- no process is started: reading is on threads, begins at once and ends with the loop;
- :class:`ShuffledDataLoader` gives the same order for the same seed, and another in each pass;
- it takes ``tokens="special"`` and ``"all"`` and ``layer="all"``, which upstream accepts and then fails over, and honours
  ``drop_last``, which upstream ignores;
- :class:`IndexedDataset` reads special tokens right (upstream divides where it should take the remainder), takes ``"all"``, and
  reads whole batches with ``__getitems__``;
- a dump does not have to lie in ``.../saev/shards/``;
- rows of zeros that fill up shorter examples are left out by the loaders, where actshard wrote the dump.

What is otherwise: ``n_threads``, ``min_buffer_fill``, ``batch_timeout_s``, ``log_every_s`` and ``debug`` are accepted and have no
effect: a window is filled before its first batch, and there is nothing to wait for. ``buffer_size`` batches are how much the
shuffled loader holds. Upstream's ``data`` field is a pickle; it is never unpickled here.
"""

from __future__ import annotations

from actshard.compat.saev.dumps import Index, IndexMap, Metadata, PixelAgg, Shard, ShardInfo, WrongError
from actshard.compat.saev.loaders import (
    Example,
    ExampleBatch,
    IndexedDataset,
    LoaderError,
    NotSavedError,
    OrderedDataLoader,
    ShuffledDataLoader,
)
from actshard.compat.saev.settings import (
    IndexedConfig,
    NotDoneError,
    OrderedConfig,
    ShuffledConfig,
    make_ordered_config,
)

__all__ = [
    "Example",
    "ExampleBatch",
    "Index",
    "IndexMap",
    "IndexedConfig",
    "IndexedDataset",
    "LoaderError",
    "Metadata",
    "NotDoneError",
    "NotSavedError",
    "OrderedConfig",
    "OrderedDataLoader",
    "PixelAgg",
    "Shard",
    "ShardInfo",
    "ShuffledConfig",
    "ShuffledDataLoader",
    "WrongError",
    "make_ordered_config",
]
