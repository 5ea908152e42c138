"""Levanter's data configuration with Levanter's signatures, and its functions that build and open caches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actshard import tokens
from actshard.base.errors import ArgumentError, ExistsError, warn
from actshard.compat.levanter.datasets import (
    CausalLmDataset,
    Dataset,
    PrebuiltLmDataset,
    Prepared,
    TokenSeqDataset,
    TreeCache,
    cache_of,
    examples_of,
    length_of,
)
from actshard.tokens import components, formats
from actshard.tokens.building import Build, BuildOptions
from actshard.tokens.cache import open_cache
from actshard.tokens.processing import WEIGHTS
from actshard.tokens.recipe import name_difference, parts_of, settings_difference

if TYPE_CHECKING:
    from haliax import Axis

LmDatasetFormatBase = formats.FormatBase
TextLmDatasetFormat = formats.TextFormat
ChatLmDatasetFormat = formats.ChatFormat
PrebuiltLmDatasetFormat = formats.PrebuiltFormat
SupervisedLmDatasetFormat = formats.SupervisedFormat
LmDatasetSourceConfigBase = components.DatasetSourceConfigBase
UrlDatasetSourceConfig = components.UrlDatasetSourceConfig
HfDatasetSourceConfig = components.HfDatasetSourceConfig
DatasetComponent = components.DatasetComponent
BlockShuffleConfig = tokens.BlockShuffleConfig
DEFAULT_LM_DATA_SHUFFLE = BlockShuffleConfig()


class _Training(Dataset):
    """The training mixture of a configuration."""

    def __init__(self, mixture: tokens.Mixture) -> None:
        self.mixture = mixture

    def _count(self) -> int:
        return len(self.mixture) if self.mixture.is_finite else 1 << 62

    async def async_len(self) -> int:
        return len(self.mixture)

    def is_finite(self) -> bool:
        return self.mixture.is_finite

    def _read(self, indices: Sequence[int]) -> Sequence[object]:
        return examples_of(self.mixture.get_batch(indices))


@dataclass(frozen=True)
class LmDataConfig(tokens.LmDataConfig):
    """Levanter's ``data:`` block, with Levanter's signatures; see :class:`actshard.tokens.LmDataConfig`.

    The loss includes padding as in Levanter of June 2026, unless ``loss_mask_padding=True``.
    """

    loss_mask_padding: bool = False

    def train_set(self, Pos: Axis | int, batch_schedule: object, *, key: Any = 0) -> Any:  # noqa: N803 -- Levanter's name
        """Returns the mixture as an asynchronous dataset. ``batch_schedule``: a batch size, or Levanter's constant schedule."""
        size = _batch_size(batch_schedule)
        return _Training(super().train_set(length_of(Pos), size, key=key))

    def train_sets(
        self,
        Pos: Axis | int,  # noqa: N803 -- Levanter's name
        *,
        initial_batch_size: int | None = None,
        key: Any = 0,
        batch_size: int | None = None,
    ) -> Any:
        """Returns the training examples of each component; asynchronous datasets, except for :meth:`train_set`."""
        train_datasets = super().train_sets(length_of(Pos), key=key, batch_size=batch_size or initial_batch_size)
        return (
            train_datasets
            if batch_size is not None
            else {name: Prepared(dataset) for name, dataset in train_datasets.items()}
        )

    def validation_sets(self, Pos: Axis | int) -> Any:  # noqa: N803 -- Levanter's name
        """Returns the validation examples of each component as asynchronous datasets."""
        return {name: Prepared(dataset) for name, dataset in super().validation_sets(length_of(Pos)).items()}

    def tagged_eval_sets(self, Pos: Axis | int) -> list[tuple[Any, list[str]]]:  # noqa: N803 -- Levanter's name
        """Returns the validation examples of each component, with its tags and its name."""
        return [
            (dataset, [*(self.components[name].tags or ()), name])
            for name, dataset in self.validation_sets(Pos).items()
        ]

    def train_grug_sets(self, *, seq_len: int, initial_batch_size: int | None = None, key: Any = 0) -> Any:
        """:meth:`train_sets` by length instead of axis."""
        return self.train_sets(seq_len, initial_batch_size=initial_batch_size, key=key)

    def validation_grug_sets(self, *, seq_len: int) -> Any:
        """:meth:`validation_sets` by length instead of axis."""
        return self.validation_sets(seq_len)

    def tagged_eval_grug_sets(self, *, seq_len: int) -> list[tuple[Any, list[str]]]:
        """:meth:`tagged_eval_sets` by length instead of axis."""
        return self.tagged_eval_sets(seq_len)

    @property
    def sources(self) -> dict[str, components.DatasetSourceConfigBase]:
        """The sources by component, of components that have one."""
        sources = {name: component.source for name, component in self.components.items()}
        return {name: source for name, source in sources.items() if source is not None}

    def build_caches(self, split: str) -> dict[str, TreeCache]:
        """Builds the missing caches of a split, and opens all of its caches."""
        plans = self.build(splits=(split,)) if self.auto_build_caches else [p for p in self.plans() if p.split == split]
        caches = {}
        for plan in plans:
            is_needed = split != "train" or self._has_weight(plan.component)
            if is_needed:
                caches[plan.component] = TreeCache(plan.cache or open_cache(plan.path))
        return caches


def _batch_size(schedule: object) -> int:
    batch_size_at_step = getattr(schedule, "batch_size_at_step", None)
    if batch_size_at_step is None:
        if isinstance(schedule, bool) or not isinstance(schedule, int | np.integer) or schedule < 1:
            raise ArgumentError(f"batch_schedule: expected a batch size, found {schedule!r}")
        return int(schedule)
    if not isinstance(getattr(schedule, "schedule", 0), int):
        raise ArgumentError("batch_schedule: schedules that change the batch size are not supported")
    return int(batch_size_at_step(0))


def dataset_for_component(
    component: Any,
    Pos: Axis | int,  # noqa: N803 -- Levanter's name
    cache: Any,
    *,
    eos_id: int | None,
    block_cross_document_attention: bool,
    loss_mask_padding: bool = False,
) -> Any:
    """Returns the examples of a component as an asynchronous dataset; ``cache`` is a :class:`TreeCache`."""
    form, block_attention = formats.as_format(component.format), block_cross_document_attention
    if isinstance(form, formats.PrebuiltFormat):
        return PrebuiltLmDataset(
            cache,
            Pos,
            input_ids_key=form.input_ids_key,
            loss_weights_key=form.loss_weights_key,
            loss_weight_transform=form.loss_weight_transform,
            eos_id=eos_id,
            block_cross_document_attention=block_attention,
        )
    if isinstance(form, formats.TextFormat | formats.SupervisedFormat) and not component.pack:
        weights = WEIGHTS if isinstance(form, formats.SupervisedFormat) else None
        windows = TokenSeqDataset(cache, length_of(Pos), weights)
        return CausalLmDataset(windows, Pos, eos_id=eos_id, block_cross_document_attention=block_attention)
    dataset_component = DatasetComponent(format=form, pack=component.pack)
    return Prepared(
        tokens.dataset_for_component(
            dataset_component,
            cache_of(cache),
            length_of(Pos),
            eos_id=eos_id,
            block_cross_document_attention=block_attention,
            loss_mask_padding=loss_mask_padding,
        )
    )


def build_lm_dataset_cache(
    cache_dir: str | os.PathLike[str],
    source: Any,
    format: Any,
    tokenizer: object,
    options: object = None,
    enforce_eos: bool = True,
) -> TreeCache:
    """Builds a cache, or opens the existing one.

    Args:
        cache_dir: the folder.
        source: a source for :func:`actshard.tokens.build_cache`, or one of Levanter's sharded sources.
        format: a format of actshard or Levanter.
        tokenizer: a tokenizer for :func:`actshard.tokens.load_tokenizer`, or Levanter's.
        options: Levanter's options; ignored, because they do not change the cache.
        enforce_eos: whether to append eos to texts.
    """
    if hasattr(source, "shard_names") and hasattr(source, "open_shard"):

        def shard(name: str) -> tokens.RowSource:
            return tokens.RowSource(name, lambda: source.open_shard(name))

        source = [shard(name) for name in source.shard_names]
    return TreeCache(tokens.build_cache(source, cache_dir, tokenizer, format, enforce_eos=enforce_eos))


def load_lm_dataset_cache(
    cache_dir: str | os.PathLike[str], format: Any, tokenizer: Any, enforce_eos: bool = True
) -> TreeCache:
    """Opens an existing cache that was built with this tokenizer and format.

    Raises:
        MissingFileError: there is no cache.
        ExistsError: it was built with other settings; the message names them.

    Warns of another name of the tokenizer if the cache has no digest of it, as Levanter's: a local copy has another name.
    """
    cache = open_cache(cache_dir)
    build = Build([tokens.RowSource("none", list)], cache_dir, tokenizer, format, BuildOptions(enforce_eos=enforce_eos))
    recipe, metadata = build.recipe, build.process.metadata()
    differs = settings_difference(cache.ledger, parts_of(build.format, recipe.tokenizer, {}), metadata, recipe.settings)
    if differs is not None:
        raise ExistsError(f"was built with {differs}", path=cache.path)
    if (names := name_difference(cache.ledger, metadata)) is not None:
        text = f"{cache.path}: was built with {names}, and its ledger has no digest of it; check that they are the same"
        warn(text, code="cache-settings")
    return TreeCache(cache)


def cached_token_count(cache_path: str | os.PathLike[str], field: str = "input_ids") -> int:
    """Number of tokens in a finished cache."""
    return open_cache(Path(cache_path)).view(field).num_elements
