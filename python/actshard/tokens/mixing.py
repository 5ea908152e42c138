"""Datasets in another order, and several mixed by weights, as Levanter mixes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard import _arguments
from actshard.errors import ArgumentError, ArgumentTypeError
from actshard.tokens.examples import Batch
from actshard.tokens.orders import Key, Permutation, prng_key
from actshard.tokens.stream import Examples, Streamed

STOP_STRATEGIES = ("restart", "first_exhausted", "all_exhausted")
DEFAULT_MIXTURE_BLOCK = 2048
_MOST = (1 << 62) - 1
"""The last index of a mixture that does not end."""
_whole = partial(_arguments.whole, wrong_type=ArgumentTypeError)


class Permuted(Streamed):
    """A dataset in another order."""

    def __init__(self, dataset: Examples, order: Permutation) -> None:
        if len(order) != len(dataset):
            raise ArgumentError(f"an order of {len(order)} indices does not fit a dataset of {len(dataset)} examples")
        self.dataset = dataset
        self.order = order

    def __len__(self) -> int:
        return len(self.dataset)

    def get_batch(self, indices: Sequence[int] | NDArray[Any]) -> Any:
        """The examples that come at these places of the order."""
        return self.dataset.get_batch(self.order(_arguments.members(indices, len(self), "example")))


class Sliced(Streamed):
    """A part of a dataset."""

    def __init__(self, dataset: Examples, start: int, stop: int) -> None:
        self.dataset = dataset
        self.start = start
        self._length = max(stop - start, 0)

    def __len__(self) -> int:
        return self._length

    def get_batch(self, indices: Sequence[int] | NDArray[Any]) -> Any:
        """Examples of the part."""
        return self.dataset.get_batch(np.asarray(_arguments.members(indices, self._length, "example")) + self.start)


class Mixture(Streamed):
    """Several datasets mixed by weights, as Levanter's ``MixtureDataset`` mixes them.

    In each block of ``block_size`` examples every dataset has its share (the largest takes what rounding leaves), in an order that
    depends on the key and the block.

    Args:
        datasets: datasets by name, or only their lengths, if :meth:`locate` is all that is wanted.
        weights: by name; or a list of (first example, weights), whose first is 0 and whose others are multiples of
            ``block_size``.
        block_size: examples per block, below 65,536.
        key: a seed or a key of JAX.
        stop_strategy: ``"restart"`` never ends and begins datasets again; ``"first_exhausted"`` ends with the last sample of the
            dataset that has none left first, ``"all_exhausted"`` with that of the last.

    Where a dataset ends within a block, Levanter (June 2026) hands out indices behind its end; here the last block of such a
    dataset hands out the samples that are left, in order.

    Raises:
        ArgumentError: weights that are negative, sum to 0 or name no dataset; stages that are not in order.
    """

    def __init__(
        self,
        datasets: Mapping[str, Examples | int],
        weights: Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]],
        *,
        block_size: int = DEFAULT_MIXTURE_BLOCK,
        key: int | Key | NDArray[Any] = 0,
        stop_strategy: str = "restart",
    ) -> None:
        if not isinstance(stop_strategy, str) or stop_strategy not in STOP_STRATEGIES:
            raise ArgumentError(f"stop_strategy must be one of {', '.join(STOP_STRATEGIES)}, not {stop_strategy!r}")
        block_size = _whole(block_size, "block_size", 1, (1 << 16) - 1)
        if not isinstance(datasets, Mapping):
            raise ArgumentTypeError(f"datasets: expected datasets by name, found {type(datasets).__name__}")
        for name, dataset in datasets.items():
            if isinstance(dataset, int | np.integer):
                _whole(dataset, f"datasets.{name}", 0, _MOST)
            elif not hasattr(dataset, "get_batch") or not hasattr(dataset, "__len__"):
                raise ArgumentTypeError(
                    f"datasets.{name}: expected a dataset or a length, found {type(dataset).__name__}"
                )
        stages = _stages(weights)
        self.block_size = block_size
        self.stop_strategy = stop_strategy
        self._key = prng_key(key)
        self._starts = _checked_starts([at for at, _ in stages], block_size)
        normal = [_normalized(w, datasets) for _, w in stages]
        self.names = tuple(name for name in datasets if any(w.get(name, 0) > 0 for w in normal))
        self._datasets = {name: datasets[name] for name in self.names}
        self.lengths = tuple(d if isinstance(d, int) else len(d) for d in self._datasets.values())
        for name, length in zip(self.names, self.lengths, strict=True):
            if length <= 0 and stop_strategy != "first_exhausted":
                raise ArgumentError(f"dataset '{name}' is empty: it cannot be begun again; give it weight 0")
        self._counts = np.array([self._counts_per_block(w) for w in normal], dtype=np.int64)
        blocks = np.diff(np.array(self._starts, dtype=np.int64)) // block_size
        before = np.cumsum(self._counts[:-1] * blocks[:, None], axis=0)
        self._before = np.concatenate([np.zeros((1, len(self.names)), np.int64), before])
        self._blocks: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._length = None if stop_strategy == "restart" else self._finite_length()

    def _counts_per_block(self, weights: dict[str, float]) -> list[int]:
        counts = [int(weights.get(name, 0) * self.block_size) for name in self.names]
        counts[int(np.argmax(counts))] += self.block_size - sum(counts)
        return counts

    def __len__(self) -> int:
        if self._length is None:
            raise ArgumentTypeError(f"a mixture with stop_strategy={self.stop_strategy!r} does not end")
        return self._length

    def __bool__(self) -> bool:
        """True unless it has no examples: ``if mixture:`` works for mixtures that do not end."""
        return self._length != 0

    @property
    def is_finite(self) -> bool:
        """Whether it ends."""
        return self._length is not None

    def _stage(self, block: int) -> int:
        return int(np.searchsorted(self._starts, block * self.block_size, side="right")) - 1

    def _block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Datasets of a block's examples, and their indices before any wrapping."""
        held = self._blocks.get(block)
        if held is not None:
            return held
        stage = self._stage(block)
        counts = self._counts[stage]
        datasets = np.repeat(np.arange(len(self.names)), counts)
        within = np.arange(self.block_size) - np.repeat(np.cumsum(counts) - counts, counts)
        order = _native.jax_permutation(_native.jax_fold_in(self._key, block & 0xFFFFFFFF), self.block_size)
        datasets, within = datasets[order], within[order]
        into_stage = block - self._starts[stage] // self.block_size
        base = self._before[stage] + into_stage * counts
        if self.stop_strategy == "first_exhausted":
            for number, length in enumerate(self.lengths):
                if base[number] + counts[number] > length:
                    mine = datasets == number
                    within[mine] = np.arange(int(mine.sum()))
        made = (datasets, base[datasets] + within)
        if len(self._blocks) >= 64:
            self._blocks.pop(next(iter(self._blocks)))
        self._blocks[block] = made
        return made

    def _exhausted_at(self, number: int, length: int) -> int | None:
        """Where a dataset's sample number ``length`` comes, if it comes."""
        if length <= 0:
            return -1
        for stage in range(len(self._starts)):
            count, base = int(self._counts[stage][number]), int(self._before[stage][number])
            if length <= base or count == 0:
                continue
            first = self._starts[stage] // self.block_size
            if stage + 1 < len(self._starts):
                blocks = self._starts[stage + 1] // self.block_size - first
                if length > base + count * blocks:
                    continue
            into = (length - base - 1) // count
            datasets, _ = self._block(first + into)
            places = np.flatnonzero(datasets == number)
            return (first + into) * self.block_size + int(places[length - base - into * count - 1])
        return None

    def _finite_length(self) -> int | None:
        ends = [self._exhausted_at(i, length) for i, length in enumerate(self.lengths)]
        known = [end for end in ends if end is not None]
        if self.stop_strategy == "all_exhausted":
            return None if len(known) < len(ends) else max(known) + 1
        return min(known) + 1 if known else None

    def locate(self, indices: Sequence[int] | NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which dataset, by its number in ``names``, and which of its examples: (n,) int64 each.

        Raises:
            OutOfRangeError: an index behind the end.
        """
        wanted = _arguments.members(indices, _MOST + 1 if self._length is None else self._length, "example")
        datasets = np.empty(len(wanted), np.int64)
        places = np.empty(len(wanted), np.int64)
        blocks = wanted // self.block_size
        order = np.argsort(blocks, kind="stable")
        borders = np.flatnonzero(np.diff(blocks[order])) + 1
        for mine in np.split(order, borders) if len(wanted) else []:
            which, index = self._block(int(blocks[mine[0]]))
            at = wanted[mine] % self.block_size
            datasets[mine], places[mine] = which[at], index[at]
        if self.stop_strategy != "first_exhausted" and len(wanted):
            places %= np.array(self.lengths, np.int64)[datasets]
        return datasets, places

    def get_batch(self, indices: Sequence[int] | NDArray[Any]) -> Batch:
        """Examples of the mixture, in this order.

        Raises:
            ArgumentError: the mixture was made of lengths only.
        """
        datasets, places = self.locate(indices)
        parts: list[tuple[NDArray[np.int64], Batch]] = []
        for number, dataset in enumerate(self._datasets.values()):
            mine = np.flatnonzero(datasets == number)
            if not len(mine):
                continue
            if isinstance(dataset, int):
                raise ArgumentError("this mixture was made of lengths; make it of datasets to get their examples")
            parts.append((mine, dataset.get_batch(places[mine])))
        return Batch.merged(parts, len(places))


def _stages(weights: Any) -> list[tuple[int, Mapping[str, float]]]:
    """Weights as stages: the first example of each, and its weights."""
    if isinstance(weights, Mapping):
        weights = [(0, weights)]
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise ArgumentTypeError(
            f"weights: expected weights by name, or a list of stages, found {type(weights).__name__}"
        )
    made = []
    for stage in weights:
        if not isinstance(stage, Sequence) or len(stage) != 2 or not isinstance(stage[1], Mapping):
            raise ArgumentTypeError(f"weights: expected stages of (first example, weights), found {stage!r}")
        for name, weight in stage[1].items():
            if isinstance(weight, bool) or not isinstance(weight, int | float | np.integer | np.floating):
                raise ArgumentTypeError(f"weights: expected a number for '{name}', found {type(weight).__name__}")
        made.append((_whole(stage[0], "weights: a stage's first example", 0, _MOST), stage[1]))
    return made


def _checked_starts(starts: list[int], block_size: int) -> list[int]:
    if not starts or starts[0] != 0:
        raise ArgumentError(f"the first stage of weights begins at 0, not {starts[:1]}")
    for before, at in itertools.pairwise(starts):
        if at % block_size or at <= before:
            raise ArgumentError(f"stages begin at multiples of block_size={block_size}, not at {starts}")
    return starts


def _normalized(weights: Mapping[str, float], datasets: Mapping[str, Any]) -> dict[str, float]:
    for name, weight in weights.items():
        if name not in datasets:
            raise ArgumentError(f"weights name '{name}', which is no dataset: {', '.join(datasets)}")
        if not weight >= 0 or math.isinf(weight):
            raise ArgumentError(f"the weight of '{name}' must be a number of at least 0, not {weight}")
    total = sum(weights.values())
    if total == 0:
        raise ArgumentError("weights sum to 0")
    return {name: weight / total for name, weight in weights.items() if weight > 0}
