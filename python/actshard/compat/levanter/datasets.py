"""Levanter's asynchronous datasets over token caches: rows, windows, and examples."""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard import tokens
from actshard.base.errors import ArgumentError, MissingExtraError, OutOfRangeError
from actshard.base.location import Location
from actshard.tokens import ledger as ledgers
from actshard.tokens.cache import open_cache

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
