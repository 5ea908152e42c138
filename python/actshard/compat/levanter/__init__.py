"""Levanter's datasets over token caches, by the names that its code imports.

>>> from actshard.compat.levanter import TreeCache, TokenSeqDataset, CausalLmDataset   # for levanter.data.text, levanter.store

They are asynchronous datasets, as Levanter's are (``await dataset.get_batch(indices)``, ``async_len``, ``getitem_async``). Where
Levanter is installed they are its ``AsyncDataset`` and yield its ``GrugLmExample``, with numpy arrays in it; elsewhere they yield
:class:`LmExample`, which has the same attributes. Neither JAX nor TensorStore reads anything.

What padding counts is what Levanter of June 2026 makes of it; ``loss_mask_padding=True`` gives the later behaviour.

Configurations, components, sources and formats are those of :mod:`actshard.tokens` by Levanter's names
(``TextLmDatasetFormat`` is :class:`actshard.tokens.TextFormat`). Where Levanter is installed its own format and source objects are
taken too. ``NamedLmDataset`` is Levanter's own. Not here: direct and concatenated components, preferences, traces.
"""

from __future__ import annotations

from typing import Any

from actshard.compat.levanter.configs import (
    DEFAULT_LM_DATA_SHUFFLE,
    BlockShuffleConfig,
    ChatLmDatasetFormat,
    DatasetComponent,
    HfDatasetSourceConfig,
    LmDataConfig,
    LmDatasetFormatBase,
    LmDatasetSourceConfigBase,
    PrebuiltLmDatasetFormat,
    SupervisedLmDatasetFormat,
    TextLmDatasetFormat,
    UrlDatasetSourceConfig,
    build_lm_dataset_cache,
    cached_token_count,
    dataset_for_component,
    load_lm_dataset_cache,
)
from actshard.compat.levanter.datasets import (
    AttentionMask,
    CausalLmDataset,
    ChatDataset,
    LmExample,
    PackedTokenDataset,
    PrebuiltLmDataset,
    TokenSeqDataset,
    TreeCache,
)
from actshard.errors import MissingExtraError

try:
    from levanter.data.text import NamedLmDataset
except ImportError:

    class NamedLmDataset:  # type: ignore[no-redef]  # stands in where Levanter is not installed
        """Levanter's wrapper of examples into named arrays, which needs Levanter."""

        def __init__(self, dataset: Any, Pos: Any) -> None:  # noqa: N803 -- Levanter's name
            raise MissingExtraError("NamedLmDataset makes arrays of haliax: it needs Levanter, which is not installed")


__all__ = [
    "DEFAULT_LM_DATA_SHUFFLE",
    "AttentionMask",
    "BlockShuffleConfig",
    "CausalLmDataset",
    "ChatDataset",
    "ChatLmDatasetFormat",
    "DatasetComponent",
    "HfDatasetSourceConfig",
    "LmDataConfig",
    "LmDatasetFormatBase",
    "LmDatasetSourceConfigBase",
    "LmExample",
    "NamedLmDataset",
    "PackedTokenDataset",
    "PrebuiltLmDataset",
    "PrebuiltLmDatasetFormat",
    "SupervisedLmDatasetFormat",
    "TextLmDatasetFormat",
    "TokenSeqDataset",
    "TreeCache",
    "UrlDatasetSourceConfig",
    "build_lm_dataset_cache",
    "cached_token_count",
    "dataset_for_component",
    "load_lm_dataset_cache",
]
