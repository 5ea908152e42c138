"""Permuted datasets, and weighted mixtures compatible with Levanter's."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError, warn
from actshard.tokens.examples import TokenBatch
from actshard.tokens.orders import Key, Permutation, prng_key
from actshard.tokens.stream import Composed, Examples, recipe_of, short_digest

STOP_STRATEGIES = ("restart", "first_exhausted", "all_exhausted")
DEFAULT_MIXTURE_BLOCK = 2048
MOST_MIXTURE_BLOCK = (1 << 16) - 1
_MOST = (1 << 62) - 1
"""The largest index of an endless mixture."""
_whole = partial(_arguments.whole, wrong_type=ArgumentTypeError)


class Permuted(Composed):
    """A dataset in the order of a permutation."""

    def __init__(self, dataset: Examples, order: Permutation) -> None:
        if len(order) != len(dataset):
            raise ArgumentError(f"an order of {len(order)} indices does not fit a dataset of {len(dataset)} examples")
        self.dataset = dataset
        self.order = order

    def __len__(self) -> int:
        return len(self.dataset)

    def recipe(self) -> dict[str, object]:
        """Identifies the examples; see :func:`~actshard.tokens.stream.recipe_of`."""
        return {"order": short_digest(self.order.made_of), "dataset": recipe_of(self.dataset)}

    def get_batch(self, indices: Sequence[int] | NDArray[np.generic]) -> Any:
        """The examples at these positions of the permuted order."""
        return self.dataset.get_batch(self.order(_arguments.members(indices, len(self), "example")))


class Sliced(Composed):
    """Examples ``start`` to ``stop`` of a dataset."""

    def __init__(self, dataset: Examples, start: int, stop: int) -> None:
        self.dataset = dataset
        self.start = int(start)
        self._length = max(int(stop) - self.start, 0)

    def __len__(self) -> int:
        return self._length

    def recipe(self) -> dict[str, object]:
        """Identifies the examples; see :func:`~actshard.tokens.stream.recipe_of`."""
        return {"start": self.start, "length": self._length, "dataset": recipe_of(self.dataset)}

    def get_batch(self, indices: Sequence[int] | NDArray[np.generic]) -> Any:
        """Examples by index relative to ``start``."""
        return self.dataset.get_batch(np.asarray(_arguments.members(indices, self._length, "example")) + self.start)


class Mixture(Composed):
    """Several datasets mixed by weights, with the order of Levanter's ``MixtureDataset``.

    Each block of ``block_size`` examples contains a fixed number of examples of every dataset; the largest dataset gets the
    rounding remainder. The order within a block depends on the key and the block number.

    Args:
        datasets: datasets by name. Lengths by name are enough for :meth:`locate`.
        weights: weights by name, or a list of stages ``(first example, weights)``. The first stage starts at 0, the others at
            multiples of ``block_size``.
        block_size: examples per block, below 65,536.
        key: a seed or a JAX key.
        stop_strategy: ``"restart"`` repeats datasets and never ends. ``"first_exhausted"`` ends with the last example of the
            dataset that is exhausted first, ``"all_exhausted"`` with that of the one exhausted last.

    Where a dataset ends within a block, Levanter (June 2026) returns indices past its end. This class returns the remaining
    examples of that dataset, in order.

    Raises:
        ArgumentError: weights are negative, sum to 0 or name an unknown dataset; stages are out of order.
    """

    def __init__(
        self,
        datasets: Mapping[str, Examples | int],
        weights: Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]],
        *,
        block_size: int = DEFAULT_MIXTURE_BLOCK,
        key: int | Key | NDArray[np.generic] = 0,
        stop_strategy: str = "restart",
    ) -> None:
        _arguments.one_of(stop_strategy, STOP_STRATEGIES, "stop_strategy")
        block_size = _whole(block_size, "block_size", 1, MOST_MIXTURE_BLOCK)
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
        self._starts = _checked_starts([start for start, _ in stages], block_size)
        normal = [_normalized(w, datasets) for _, w in stages]
        self.names = tuple(name for name in datasets if any(w.get(name, 0) > 0 for w in normal))
        chosen = {name: datasets[name] for name in self.names}
        self._datasets = {name: int(d) if isinstance(d, np.integer) else d for name, d in chosen.items()}
        self.lengths = tuple(d if isinstance(d, int) else len(d) for d in self._datasets.values())
        for name, length in zip(self.names, self.lengths, strict=True):
            if length <= 0 and stop_strategy != "first_exhausted":
                raise ArgumentError(f"dataset '{name}' is empty and cannot be repeated; give it weight 0")
        self._counts = np.array([self._counts_per_block(w) for w in normal], dtype=np.int64)
        self._weights = normal
        self._warn_of_no_examples()
        blocks = np.diff(np.array(self._starts, dtype=np.int64)) // block_size
        before = np.cumsum(self._counts[:-1] * blocks[:, None], axis=0)
        self._before = np.concatenate([np.zeros((1, len(self.names)), np.int64), before])
        self._blocks: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._length = None if stop_strategy == "restart" else self._finite_length()

    def _counts_per_block(self, weights: dict[str, float]) -> list[int]:
        counts = [int(weights.get(name, 0) * self.block_size) for name in self.names]
        counts[int(np.argmax(counts))] += self.block_size - sum(counts)
        return counts

    @property
    def shares(self) -> list[dict[str, tuple[float, float]]]:
        """For each stage and dataset: the normalized weight, and the fraction of examples, a multiple of 1 / block_size."""
        return [
            {
                name: (weights.get(name, 0.0), int(n) / self.block_size)
                for name, n in zip(self.names, counts, strict=True)
            }
            for weights, counts in zip(self._weights, self._counts, strict=True)
        ]

    def recipe(self) -> dict[str, object]:
        """Identifies the examples; see :func:`~actshard.tokens.stream.recipe_of`. Stages are numbers of examples per block."""
        stages = [
            [start, [[name, int(n)] for name, n in zip(self.names, counts, strict=True) if n]]
            for start, counts in zip(self._starts, self._counts, strict=True)
        ]
        datasets = {name: d if isinstance(d, int) else recipe_of(d) for name, d in self._datasets.items()}
        order = short_digest([self.block_size, self._key, self.stop_strategy])
        return {"order": order, "stages": stages, "datasets": datasets}

    def _warn_of_no_examples(self) -> None:
        for start, stage in zip(self._starts, self.shares, strict=True):
            for name, (weight, share) in stage.items():
                if weight > 0 and not share:
                    warn(
                        f"dataset '{name}' gets no example from example {start:,} on: its weight {weight:.3g} is less than one in "
                        f"block_size={self.block_size}; pass a larger block_size",
                        code="no-example-chosen",
                    )

    def __len__(self) -> int:
        if self._length is None:
            raise ArgumentTypeError(f"a mixture with stop_strategy={self.stop_strategy!r} is endless and has no length")
        return self._length

    def __bool__(self) -> bool:
        """True unless the mixture is empty. Defined because ``len`` raises for endless mixtures."""
        return self._length != 0

    @property
    def is_finite(self) -> bool:
        """Whether the mixture ends."""
        return self._length is not None

    def _stage(self, block: int) -> int:
        return int(np.searchsorted(self._starts, block * self.block_size, side="right")) - 1

    def _block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns, for each example of a block, its dataset and its index before wrapping."""
        entry = self._blocks.get(block)
        if entry is not None:
            return entry
        stage = self._stage(block)
        counts = self._counts[stage]
        datasets = np.repeat(np.arange(len(self.names)), counts)
        indices = np.arange(self.block_size) - np.repeat(np.cumsum(counts) - counts, counts)
        order = _native.jax_permutation(_native.jax_fold_in(self._key, block & 0xFFFFFFFF), self.block_size)
        datasets, indices = datasets[order], indices[order]
        into_stage = block - self._starts[stage] // self.block_size
        base = self._before[stage] + into_stage * counts
        if self.stop_strategy == "first_exhausted":
            for number, length in enumerate(self.lengths):
                if base[number] + counts[number] > length:
                    same = datasets == number
                    indices[same] = np.arange(int(same.sum()))
        entry = (datasets, base[datasets] + indices)
        if len(self._blocks) >= 64:
            self._blocks.pop(next(iter(self._blocks)))
        self._blocks[block] = entry
        return entry

    def _exhausted_at(self, number: int, length: int) -> int | None:
        """Returns the position of a dataset's example ``length - 1``; None if it never occurs."""
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
        finite_ends = [end for end in ends if end is not None]
        if self.stop_strategy == "all_exhausted":
            return None if len(finite_ends) < len(ends) else max(finite_ends) + 1
        return min(finite_ends) + 1 if finite_ends else None

    def locate(self, indices: Sequence[int] | NDArray[np.generic]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the dataset (its index in ``names``) and the example within it, for each index: two (n,) int64 arrays.

        Raises:
            OutOfRangeError: an index is past the end.
        """
        numbers = _arguments.members(indices, _MOST + 1 if self._length is None else self._length, "example")
        datasets = np.empty(len(numbers), np.int64)
        places = np.empty(len(numbers), np.int64)
        blocks = numbers // self.block_size
        order = np.argsort(blocks, kind="stable")
        borders = np.flatnonzero(np.diff(blocks[order])) + 1
        for same in np.split(order, borders) if len(numbers) else []:
            which, index = self._block(int(blocks[same[0]]))
            offsets = numbers[same] % self.block_size
            datasets[same], places[same] = which[offsets], index[offsets]
        if self.stop_strategy != "first_exhausted" and len(numbers):
            places %= np.array(self.lengths, np.int64)[datasets]
        return datasets, places

    def get_batch(self, indices: Sequence[int] | NDArray[np.generic]) -> TokenBatch:
        """Returns the examples at these indices, in the order given.

        Raises:
            ArgumentError: the mixture was created from lengths only.
            ArgumentTypeError: a dataset returns arrays of tokens, without loss weights.
        """
        datasets, places = self.locate(indices)
        parts: list[tuple[NDArray[np.int64], TokenBatch]] = []
        for number, dataset in enumerate(self._datasets.values()):
            chosen = np.flatnonzero(datasets == number)
            if not len(chosen):
                continue
            if isinstance(dataset, int):
                raise ArgumentError("this mixture was created from lengths; create it from datasets to read examples")
            batch = dataset.get_batch(places[chosen])
            if not hasattr(batch, "loss_weight"):
                raise ArgumentTypeError(
                    f"datasets.{self.names[number]}: expected batches with loss weights, found {type(batch).__name__}; pass "
                    "windows as CausalLmDataset(windows, eos_id=...)"
                )
            parts.append((chosen, batch))
        return TokenBatch.merged(parts, len(places))


def _stages(weights: object) -> list[tuple[int, Mapping[str, float]]]:
    """Normalizes weights to a list of stages: first example and weights."""
    if isinstance(weights, Mapping):
        weights = [(0, weights)]
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise ArgumentTypeError(
            f"weights: expected weights by name, or a list of stages, found {type(weights).__name__}"
        )
    stages = []
    for stage in weights:
        if not isinstance(stage, Sequence) or len(stage) != 2 or not isinstance(stage[1], Mapping):
            raise ArgumentTypeError(f"weights: expected stages of (first example, weights), found {stage!r}")
        for name, weight in stage[1].items():
            if isinstance(weight, bool) or not isinstance(weight, int | float | np.integer | np.floating):
                raise ArgumentTypeError(f"weights: expected a number for '{name}', found {type(weight).__name__}")
        stages.append((_whole(stage[0], "weights: a stage's first example", 0, _MOST), stage[1]))
    return stages


def _checked_starts(starts: list[int], block_size: int) -> list[int]:
    if not starts or starts[0] != 0:
        raise ArgumentError(f"weights: expected the first stage to start at 0, found {starts[:1]}")
    for previous, start in itertools.pairwise(starts):
        if start % block_size or start <= previous:
            raise ArgumentError(
                f"weights: expected stages to start at increasing multiples of block_size={block_size}, found {starts}"
            )
    return starts


def _normalized(weights: Mapping[str, float], datasets: Mapping[str, object]) -> dict[str, float]:
    for name, weight in weights.items():
        if name not in datasets and weight != 0:
            raise ArgumentError(f"weights: unknown dataset '{name}'; expected one of {', '.join(datasets)}")
        if not 0 <= weight <= sys.float_info.max:
            raise ArgumentError(f"the weight of '{name}' must be finite and at least 0, not {weight}")
    total = sum(weights.values())
    if total == 0:
        raise ArgumentError("weights sum to 0")
    return {name: weight / total for name, weight in weights.items() if weight > 0}
