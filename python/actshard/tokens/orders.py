"""Levanter's orders: which example comes when, number for number.

The random numbers are JAX's threefry (``jax_threefry_partitionable``, the default since jax 0.5) and numpy's PCG64, computed here
without either; the rules are those of ``docs/formats/levanter.md``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from actshard import _arguments, _native
from actshard.errors import ArgumentError, ArgumentTypeError
from actshard.tokens.examples import Batch

Key = tuple[int, int]
"""A key of JAX's random numbers: two unsigned 32-bit words."""

_MOST = (1 << 62) - 1
"""The longest dataset, and the last index of an endless one."""
_MOST_KEYS = 1 << 20
"""Keys of one split: each is a pair of Python's integers."""
STOP_STRATEGIES = ("restart", "first_exhausted", "all_exhausted")
DEFAULT_IO_BLOCK = 256
DEFAULT_WINDOW_BLOCKS = 512
DEFAULT_MIXTURE_BLOCK = 2048


def prng_key(seed: int | Sequence[int] | NDArray[Any]) -> Key:
    """``jax.random.PRNGKey(seed)``; a key (two words) is returned as it is."""
    if isinstance(seed, int | np.integer):
        if not -(1 << 63) <= int(seed) < 1 << 64:
            raise ArgumentError(f"a seed is a 64-bit integer, not {seed}")
        return _native.jax_key(int(seed) & (1 << 64) - 1)
    try:
        words = [int(word) for word in _arguments.as_array(seed, "expected a seed or a key").reshape(-1)]
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"a key is a seed or two unsigned 32-bit words, not {seed!r}") from error
    if len(words) != 2 or any(not 0 <= word < 1 << 32 for word in words):
        raise ArgumentError(f"a key is a seed or two unsigned 32-bit words, not {seed!r}")
    return (words[0], words[1])


_whole = partial(_arguments.whole, wrong_type=ArgumentTypeError)


def split(key: int | Key, n: int = 2) -> list[Key]:
    """``jax.random.split(key, n)``."""
    return _native.jax_split(prng_key(key), _whole(n, "n", 0, _MOST_KEYS))


def fold_in(key: int | Key, data: int) -> Key:
    """``jax.random.fold_in(key, data)``."""
    return _native.jax_fold_in(prng_key(key), _whole(data, "data", 0, (1 << 32) - 1))


def randint30(key: int | Key) -> int:
    """``jax.random.randint(key, (), 0, 2**30)``: the seed that Levanter gives numpy."""
    return _native.jax_randint30(prng_key(key))


class Permutation:
    """An order of 0 to n - 1; :func:`permutation` makes one.

    ``order(indices)`` maps many indices at once, ``order[i]`` one. It takes O(1) memory.
    """

    def __init__(self, kind: str, how: str, length: int, key: Key, sizes: list[int]) -> None:
        self._made_of = (kind, how, length, key, sizes)
        self._native = _native.TokenOrder(*self._made_of)
        self._length = length

    def __reduce__(self) -> tuple[Any, ...]:
        return (Permutation, self._made_of)

    def __len__(self) -> int:
        return self._length

    def __call__(self, indices: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
        """Where indices go: (n,) int64."""
        if isinstance(indices, np.ndarray) and indices.dtype == np.int64 and indices.flags.c_contiguous:
            return self._native.map(indices.reshape(-1))  # checked while they are mapped
        return self._native.map(_arguments.members(indices, self._length, "index"))

    def __getitem__(self, index: int) -> int:
        return int(self([index])[0])

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self._length, 1 << 16):
            yield from self(np.arange(first, min(first + (1 << 16), self._length))).tolist()

    @property
    def parameters(self) -> tuple[int, ...]:
        """What it is made of: five round keys (feistel), or factor and offset (linear)."""
        return tuple(self._native.parameters())


def permutation(
    kind: str,
    length: int,
    key: int | Key | NDArray[Any] = 0,
    *,
    io_block_size: int = DEFAULT_IO_BLOCK,
    window_blocks: int = DEFAULT_WINDOW_BLOCKS,
    perm_type: str = "feistel",
    era_length: int | None = None,
    arithmetic: str = "exact",
) -> Permutation:
    """One of Levanter's permutations of ``length`` indices.

    Args:
        kind: ``"feistel"`` (Levanter's default), ``"linear"``, ``"block"`` (its default shuffle: blocks of neighbours are
            shuffled, and the members of several blocks among them), or ``"era"`` (2025's: eras one after another).
        length: how many indices.
        key: a seed (``PRNGKey(seed)``) or a key.
        io_block_size: members of a block.
        window_blocks: blocks whose members are mixed.
        perm_type: ``"feistel"`` or ``"linear"``: what block and era shuffles are made of.
        era_length: members of an era.
        arithmetic: for linear ones. ``"exact"`` is a permutation for every length. ``"float64"`` is what Levanter computes, which
            equals it as long as products stay below 2**53 and is no permutation for longer datasets.

    Raises:
        ArgumentError: an argument that makes no sense.
    """
    length = _whole(length, "length", 0, _MOST)
    io_block_size = _whole(io_block_size, "io_block_size", 1, _MOST)
    window_blocks = _whole(window_blocks, "window_blocks", 1, _MOST)
    if era_length is not None:
        era_length = _whole(era_length, "era_length", 1, _MOST)
    if not all(isinstance(word, str) for word in (kind, perm_type, arithmetic)):
        raise ArgumentTypeError("kind, perm_type and arithmetic: expected words")
    if arithmetic not in ("exact", "float64"):
        raise ArgumentError(f"arithmetic must be 'exact' or 'float64', not {arithmetic!r}")
    name = kind if kind in ("feistel", "linear") else perm_type
    if name not in ("feistel", "linear"):
        raise ArgumentError(f"perm_type must be 'feistel' or 'linear', not {perm_type!r}")
    how = "linear-float64" if name == "linear" and arithmetic == "float64" else name
    sizes: list[int]
    if kind in ("feistel", "linear"):
        native, sizes = "simple", []
    elif kind == "block":
        native, sizes = "block", [io_block_size, window_blocks]
    elif kind == "era":
        if era_length is None or era_length < 1:
            raise ArgumentError("an era shuffle needs era_length=, at least 1")
        native, sizes = "era", [era_length]
    else:
        raise ArgumentError(f"no permutation is called {kind!r}: feistel, linear, block or era")
    return Permutation(native, how, length, prng_key(key), sizes)


@runtime_checkable
class Examples(Protocol):
    """What can be mixed and permuted: a finite dataset of examples."""

    def __len__(self) -> int: ...

    def get_batch(self, indices: Sequence[int] | NDArray[Any]) -> Any:
        """The examples of some indices."""


class Permuted:
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


class Mixture:
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
            raise ArgumentError(f"a mixture with stop_strategy={self.stop_strategy!r} does not end")
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
