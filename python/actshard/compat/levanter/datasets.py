"""Levanter's asynchronous datasets over token caches: rows, windows, and examples."""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard import tokens
from actshard.base.errors import ArgumentError, ExistsError, MissingExtraError, OutOfRangeError, warn
from actshard.base.location import Location
from actshard.tokens import components, formats
from actshard.tokens import ledger as ledgers
from actshard.tokens.building import Build, BuildOptions
from actshard.tokens.cache import open_cache
from actshard.tokens.processing import WEIGHTS
from actshard.tokens.recipe import name_difference, parts_of, settings_difference

if TYPE_CHECKING:
    from haliax import Axis


try:
    from levanter.data import AsyncDataset
    from levanter.data.text.examples import GrugLmExample
    from levanter.grug.attention import AttentionMask as GrugAttentionMask
    from levanter.grug.attention._core import ThdSegmentMetadata
except ImportError:
    AsyncDataset = object
    GrugLmExample = GrugAttentionMask = ThdSegmentMetadata = None


@dataclass(frozen=True)
class AttentionMask:
    """Causal attention within segments.

    Attributes:
        is_causal: always True.
        segment_ids: segment ids of queries and keys, (P,) int32 each, both equal; None if attention crosses documents.
        thd_segment_metadata: lengths and number of segments of a packed example.
    """

    is_causal: bool = True
    segment_ids: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
    thd_segment_metadata: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None


@dataclass(frozen=True)
class LmExample:
    """One example, with the attributes of Levanter's ``GrugLmExample``.

    Attributes:
        tokens: (P,) int32.
        loss_weight: (P,) float32.
        attn_mask: the attention mask.
    """

    tokens: NDArray[np.int32]
    loss_weight: NDArray[np.float32]
    attn_mask: AttentionMask


def examples_of(batch: tokens.Batch) -> Sequence[object]:
    """Splits a batch into examples; their arrays are views of the batch's rows."""
    thd = None
    if batch.segment_ids is not None and batch.max_segments is not None:
        thd = (batch.thd_segment_lengths, batch.thd_num_segments)
    examples = []
    for i in range(len(batch)):
        segments = None if batch.segment_ids is None else (batch.segment_ids[i], batch.segment_ids[i])
        runs = None if thd is None else (thd[0][i], thd[1][i])
        if GrugLmExample is None:
            examples.append(LmExample(batch.tokens[i], batch.loss_weight[i], AttentionMask(True, segments, runs)))
            continue
        metadata = None if runs is None else ThdSegmentMetadata(segment_lengths=runs[0], num_segments=runs[1])
        mask = GrugAttentionMask(is_causal=True, segment_ids=segments, thd_segment_metadata=metadata)
        examples.append(GrugLmExample(tokens=batch.tokens[i], loss_weight=batch.loss_weight[i], attn_mask=mask))
    return examples


def length_of(position: Axis | int) -> int:
    """The length of a haliax axis, or an integer itself."""
    size = getattr(position, "size", position)
    if not isinstance(size, int | np.integer) or isinstance(size, bool):
        raise ArgumentError(f"Pos: expected an axis or a length, found {type(position).__name__}")
    return int(size)


def _from_start(indices: Sequence[int], most: int) -> list[int]:
    """Checks indices; like Levanter, refuses negative ones."""
    positions = [int(i) for i in indices]
    for i in positions:
        if not 0 <= i < most:
            raise OutOfRangeError(f"index {i} is out of range: there are {most}")
    return positions


class Dataset(AsyncDataset):
    """Base class of the asynchronous datasets."""

    @abstractmethod
    def _count(self) -> int: ...

    @abstractmethod
    def _read(self, indices: Sequence[int]) -> Sequence[object]: ...

    async def async_len(self) -> int:
        """Number of examples."""
        return self._count()

    def is_finite(self) -> bool:
        """Always True."""
        return True

    async def get_batch(self, indices: Sequence[int]) -> Sequence[Any]:
        """Returns examples in the order of ``indices``, which may repeat."""
        if not len(indices):
            return []
        # On a thread, so that blocking reads do not stop the event loop.
        return await asyncio.to_thread(self._read, _from_start(indices, self._count()))

    async def getitem_async(self, index: int) -> Any:
        """Returns one example."""
        examples = await asyncio.to_thread(self._read, _from_start([index], self._count()))
        return examples[0]


class TreeCache(Dataset):
    """A cache's rows: ``TreeCache.load(path)``. Rows are dicts of numpy arrays."""

    def __init__(self, cache: tokens.TokenCache) -> None:
        self.cache = cache
        self.ledger = cache.ledger

    @staticmethod
    def load(cache_dir: str | os.PathLike[str], exemplar: object = None, options: object = None) -> TreeCache:
        """Opens a finished cache. ``exemplar`` and ``options`` are ignored: dtypes come from the files."""
        return TreeCache(open_cache(cache_dir))

    @staticmethod
    def build_or_load(
        cache_dir: str | os.PathLike[str], shard_source: object, processor: object, options: object = None
    ) -> Any:
        """Opens an existing cache. Cannot build one with Levanter's processors; use :func:`build_lm_dataset_cache`."""
        if ledgers.exists(Location.of_any(cache_dir)):
            return TreeCache.load(cache_dir)
        raise ArgumentError(
            "cache_dir: expected a finished cache, found none. Levanter's processors run in Levanter only: use "
            "build_lm_dataset_cache.",
            path=cache_dir,
        )

    @property
    def is_finished(self) -> bool:
        """Always True: unfinished caches cannot be loaded."""
        return True

    @property
    def is_sharded(self) -> bool:
        """Whether each shard has its own arrays."""
        return self.ledger.layout == ledgers.SHARDED

    @property
    def store(self) -> Any:
        """Levanter's store over the same files, read by TensorStore. Requires Levanter."""
        return self._levanters().store

    def jagged_array_tree(self) -> Any:
        """Levanter's arrays over the same files, read by TensorStore, for Levanter's own datasets. Requires Levanter."""
        return self._levanters().jagged_array_tree()

    def _levanters(self) -> Any:
        try:
            from levanter.store.cache import TreeCache as Theirs
        except ImportError as error:
            raise MissingExtraError(
                "Levanter's own arrays require Levanter, which is not installed", path=self.cache.path
            ) from error
        tree: dict[str, Any] = {}
        for name in self.cache.fields:
            *parents, last = name.split("/")
            node = tree
            for part in parents:
                node = node.setdefault(part, {})
            node[last] = np.zeros(0, self.cache.dtype(name))
        return Theirs.load(str(self.cache.path), tree)

    def flat_field_num_rows(self, field: str) -> int:
        """Number of rows of a field."""
        return len(self.cache.view(field))

    def _count(self) -> int:
        return len(self.cache)

    def _read(self, indices: Sequence[int]) -> Sequence[object]:
        return self.cache.rows(indices)

    def __len__(self) -> int:
        return len(self.cache)

    def __iter__(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        return iter(self.cache)

    def __getitem__(self, item: int | slice) -> Any:
        if isinstance(item, slice):
            return self.cache.rows(range(*item.indices(len(self.cache))))
        return self.cache[_from_start([item], len(self))[0]]

    def get_batch_sync(self, indices_or_slice: Sequence[int] | slice, *, timeout: float | None = None) -> Sequence[Any]:
        """Returns rows synchronously."""
        if isinstance(indices_or_slice, slice):
            indices_or_slice = range(*indices_or_slice.indices(len(self.cache)))
        return self.cache.rows(_from_start(indices_or_slice, len(self)))

    def flat_field_length(self, field: str) -> int:
        """Number of elements in all rows of a field."""
        return self.cache.view(field).num_elements

    async def async_flat_field_length(self, field: str) -> int:
        """:meth:`flat_field_length`, asynchronous."""
        return self.flat_field_length(field)

    async def get_flat_field_batch(self, field: str, offsets: Sequence[int], length: int) -> list[NDArray[np.generic]]:
        """Returns ranges of ``length`` elements of a field, in the stored dtype."""
        view = self.cache.view(field)
        return await asyncio.to_thread(lambda: [view.elements(int(offset), int(offset) + length) for offset in offsets])


def cache_of(cache: Any) -> tokens.TokenCache:
    """The cache of a :class:`TreeCache`, or the cache itself."""
    return cache.cache if isinstance(cache, TreeCache) else cache


class TokenSeqDataset(Dataset):
    """Windows of ``seq_len`` tokens: dicts of ``input_ids`` and optional ``loss_weights``, in the stored dtypes."""

    def __init__(self, doc_cache: object, seq_len: int, loss_weights_key: str | None = None) -> None:
        self.doc_cache = doc_cache
        self.seq_len = seq_len
        self.loss_weights_key = loss_weights_key
        self.windows = tokens.TokenSeqDataset(cache_of(doc_cache), seq_len, loss_weights_key)

    def _count(self) -> int:
        return len(self.windows)

    def _read(self, indices: Sequence[int]) -> Sequence[object]:
        starts = self.windows.starts(indices).tolist()
        samples = [{"input_ids": row} for row in self._ranges(self.windows.input_ids_key, starts)]
        if self.loss_weights_key is not None:
            for sample, weights in zip(samples, self._ranges(self.loss_weights_key, starts), strict=True):
                sample["loss_weights"] = weights
        return samples

    def _ranges(self, field: str, starts: list[int]) -> list[NDArray[np.generic]]:
        view = self.windows.cache.view(field)
        return [np.array(view.elements(start, start + self.seq_len)) for start in starts]


class Examples(Dataset):
    """Examples of a dataset of :mod:`actshard.tokens`."""

    dataset: Any

    def _count(self) -> int:
        return len(self.dataset)

    def _read(self, indices: Sequence[int]) -> Sequence[object]:
        return examples_of(self.dataset.get_batch(indices))


class CausalLmDataset(Examples):
    """Windows as examples; ``dataset`` is a :class:`TokenSeqDataset`."""

    def __init__(
        self,
        dataset: TokenSeqDataset,
        Pos: Axis | int | None = None,  # noqa: N803 -- Levanter's name
        *,
        eos_id: int | None = None,
        block_cross_document_attention: bool = True,
    ) -> None:
        self.dataset = tokens.CausalLmDataset(
            dataset.windows, eos_id=eos_id, block_cross_document_attention=block_cross_document_attention
        )


class PackedTokenDataset(Examples):
    """Packed documents as examples."""

    def __init__(
        self,
        cache: object,
        Pos: Axis | int,  # noqa: N803 -- Levanter's name
        max_segments_per_example: int = 64,
        slice_strategy: str = "left",
        loss_weights_key: str | None = None,
        block_cross_document_attention: bool = True,
        *,
        loss_mask_padding: bool = False,
    ) -> None:
        self.dataset = tokens.PackedTokenDataset(
            cache_of(cache),
            length_of(Pos),
            pack=max_segments_per_example,
            slice_strategy=slice_strategy,
            loss_weights_key=loss_weights_key,
            block_cross_document_attention=block_cross_document_attention,
            loss_mask_padding=loss_mask_padding,
        )


class ChatDataset(Examples):
    """Packed conversations as examples."""

    def __init__(
        self,
        cache: object,
        Pos: Axis | int,  # noqa: N803 -- Levanter's name
        max_segments_per_example: int = 64,
        slice_strategy: str = "left",
        mask_user_turns: bool = True,
        block_cross_document_attention: bool = True,
        *,
        loss_mask_padding: bool = False,
    ) -> None:
        self.dataset = tokens.ChatDataset(
            cache_of(cache),
            length_of(Pos),
            pack=max_segments_per_example,
            slice_strategy=slice_strategy,
            mask_user_turns=mask_user_turns,
            block_cross_document_attention=block_cross_document_attention,
            loss_mask_padding=loss_mask_padding,
        )


class PrebuiltLmDataset(Examples):
    """Rows as examples; ``dataset`` is a :class:`TreeCache`."""

    def __init__(
        self,
        dataset: Any,
        Pos: Axis | int,  # noqa: N803 -- Levanter's name
        *,
        input_ids_key: str,
        loss_weights_key: str | None,
        loss_weight_transform: Callable[[NDArray[np.float32]], object] | None,
        eos_id: int | None = None,
        block_cross_document_attention: bool = True,
    ) -> None:
        self.dataset = tokens.PrebuiltLmDataset(
            cache_of(dataset),
            length_of(Pos),
            input_ids_key=input_ids_key,
            loss_weights_key=loss_weights_key or "",
            loss_weight_transform=loss_weight_transform,
            eos_id=eos_id,
            block_cross_document_attention=block_cross_document_attention,
        )


class Prepared(Examples):
    """Examples of an existing dataset."""

    def __init__(self, dataset: object) -> None:
        self.dataset = dataset


# Levanter's data configuration with Levanter's signatures, and its functions that build and open caches.


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
