"""Levanter's datasets over token caches, under Levanter's names.

>>> from actshard.compat.levanter import TreeCache, TokenSeqDataset, CausalLmDataset   # for levanter.data.text, levanter.store

The datasets are asynchronous, as Levanter's (``await dataset.get_batch(indices)``, ``async_len``, ``getitem_async``). If Levanter
is installed, they subclass its ``AsyncDataset`` and yield its ``GrugLmExample`` with numpy arrays; otherwise they yield
:class:`LmExample`, which has the same attributes. Reading uses neither JAX nor TensorStore.

By default the loss includes padding as in Levanter of June 2026; ``loss_mask_padding=True`` selects the later behaviour.

Configurations, components, sources and formats are those of :mod:`actshard.tokens` under Levanter's names
(``TextLmDatasetFormat`` is :class:`actshard.tokens.TextFormat`). If Levanter is installed, its own format and source objects are
accepted too. ``NamedLmDataset`` is Levanter's own class. Not supported: direct and concatenated components, preferences, traces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actshard.base.errors import MissingExtraError
from actshard.compat.levanter.datasets import (
    DEFAULT_LM_DATA_SHUFFLE,
    AttentionMask,
    BlockShuffleConfig,
    CausalLmDataset,
    ChatDataset,
    ChatLmDatasetFormat,
    DatasetComponent,
    HfDatasetSourceConfig,
    LmDataConfig,
    LmDatasetFormatBase,
    LmDatasetSourceConfigBase,
    LmExample,
    PackedTokenDataset,
    PrebuiltLmDataset,
    PrebuiltLmDatasetFormat,
    SupervisedLmDatasetFormat,
    TextLmDatasetFormat,
    TokenSeqDataset,
    TreeCache,
    UrlDatasetSourceConfig,
    _Training,  # noqa: F401 -- pickles of earlier versions name it here
    build_lm_dataset_cache,
    cached_token_count,
    dataset_for_component,
    load_lm_dataset_cache,
)
from actshard.compat.levanter.datasets import Prepared as _Prepared  # noqa: F401 -- pickles of earlier versions name it here

if TYPE_CHECKING:
    from haliax import Axis

try:
    from levanter.data.text import NamedLmDataset
except ImportError:

    class NamedLmDataset:  # type: ignore[no-redef]  # defined here if Levanter is not installed
        """Placeholder for Levanter's wrapper of examples into named arrays, which requires Levanter."""

        def __init__(self, dataset: object, Pos: Axis | int) -> None:  # noqa: N803 -- Levanter's name
            raise MissingExtraError(
                "NamedLmDataset returns haliax arrays and requires Levanter, which is not installed"
            )


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
