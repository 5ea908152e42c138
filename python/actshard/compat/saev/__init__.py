"""``saev.data``'s loaders on top of actshard.

>>> from actshard.compat.saev import ShuffledConfig, ShuffledDataLoader          # was: from saev.data import ...

Fields, keys, dtypes and errors are those of OSU-NLP-Group/saev as of March 2026. Improvements:

- no processes: threads read, start immediately, and end with the loop;
- :class:`ShuffledDataLoader` has the same order for the same seed, and another order in each pass;
- it supports ``tokens="special"`` and ``"all"`` and ``layer="all"``, which fail upstream, and ``drop_last``, which upstream
  ignores;
- :class:`IndexedDataset` addresses special tokens correctly (upstream divides instead of taking the remainder), supports
  ``"all"``, and reads whole batches with ``__getitems__``;
- a dump may be in any folder, not only in ``.../saev/shards/``;
- for dumps that actshard wrote, loaders skip padding rows.

Differences: ``n_threads``, ``min_buffer_fill``, ``batch_timeout_s``, ``log_every_s`` and ``debug`` are accepted and ignored,
because a window is filled before its first batch. ``buffer_size`` is the size of the shuffled loader's window in batches.
Upstream's ``data`` field is a pickle, which is never unpickled here.
"""

from __future__ import annotations

from actshard.compat.saev.dumps import (
    Index,
    IndexedConfig,
    IndexMap,
    Metadata,
    NotDoneError,
    OrderedConfig,
    PixelAgg,
    Shard,
    ShardInfo,
    ShuffledConfig,
    WrongError,
    make_ordered_config,
)
from actshard.compat.saev.loaders import (
    Example,
    ExampleBatch,
    IndexedDataset,
    LoaderError,
    NotSavedError,
    OrderedDataLoader,
    ShuffledDataLoader,
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
