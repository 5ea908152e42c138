"""Levanter's example orders, reproduced exactly.

Implements JAX's threefry generator (``jax_threefry_partitionable``, the default since jax 0.5) and numpy's PCG64 without either
dependency. The rules are in ``docs/formats/levanter.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError

Key = tuple[int, int]
"""A JAX random key: two unsigned 32-bit words."""

_MOST = (1 << 62) - 1
"""The largest supported dataset length."""
_MOST_KEYS = 1 << 20
"""Most keys per split: each is a pair of Python integers."""
DEFAULT_IO_BLOCK = 256
DEFAULT_WINDOW_BLOCKS = 512


def prng_key(seed: int | Sequence[int] | NDArray[np.generic]) -> Key:
    """``jax.random.PRNGKey(seed)``. A key (two words) is returned unchanged."""
    if isinstance(seed, int | np.integer):
        if not -(1 << 63) <= int(seed) < 1 << 64:
            raise ArgumentError(f"seed: expected a 64-bit integer, found {seed}")
        return _native.jax_key(int(seed) & (1 << 64) - 1)
    try:
        words = [int(word) for word in _arguments.as_array(seed, "expected a seed or a key").reshape(-1)]
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"key: expected a seed or two unsigned 32-bit words, found {seed!r}") from error
    if len(words) != 2 or any(not 0 <= word < 1 << 32 for word in words):
        raise ArgumentError(f"key: expected a seed or two unsigned 32-bit words, found {seed!r}")
    return (words[0], words[1])


_whole = partial(_arguments.whole, wrong_type=ArgumentTypeError)


def split(key: int | Key, n: int = 2) -> list[Key]:
    """``jax.random.split(key, n)``."""
    return _native.jax_split(prng_key(key), _whole(n, "n", 0, _MOST_KEYS))


def fold_in(key: int | Key, data: int) -> Key:
    """``jax.random.fold_in(key, data)``."""
    return _native.jax_fold_in(prng_key(key), _whole(data, "data", 0, (1 << 32) - 1))


def randint30(key: int | Key) -> int:
    """``jax.random.randint(key, (), 0, 2**30)``: the seed Levanter passes to numpy."""
    return _native.jax_randint30(prng_key(key))


class Permutation:
    """A pseudo-random permutation of 0 to n - 1. Create one with :func:`permutation`.

    ``order(indices)`` maps many indices at once, ``order[i]`` maps one. Memory is O(1).
    """

    def __init__(self, kind: str, how: str, length: int, key: Key, sizes: list[int]) -> None:
        self.made_of = (kind, how, length, key, sizes)
        self._native = _native.TokenOrder(*self.made_of)
        self._length = length

    def __reduce__(self) -> tuple[object, ...]:
        return (Permutation, self.made_of)

    def of_epoch(self, epoch: int) -> Permutation:
        """The permutation of an epoch: this one for epoch 0, otherwise one whose key has the epoch folded in."""
        if not epoch:
            return self
        kind, how, length, key, sizes = self.made_of
        return Permutation(kind, how, length, fold_in(key, epoch % (1 << 32)), sizes)

    def __len__(self) -> int:
        return self._length

    def __call__(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Maps indices: (n,) int64, a new array."""
        if isinstance(indices, np.ndarray) and indices.dtype == np.int64 and indices.flags.c_contiguous:
            return self._native.map(indices.reshape(-1))  # the native code checks the range
        return self._native.map(_arguments.members(indices, self._length, "index"))

    def __getitem__(self, index: int) -> int:
        return int(self([index])[0])

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self._length, 1 << 16):
            yield from self(np.arange(first, min(first + (1 << 16), self._length))).tolist()

    @property
    def parameters(self) -> tuple[int, ...]:
        """Parameters of the permutation: five round keys (feistel), or factor and offset (linear)."""
        return tuple(self._native.parameters())


def permutation(
    kind: str,
    length: int,
    key: int | Key | NDArray[np.generic] = 0,
    *,
    io_block_size: int = DEFAULT_IO_BLOCK,
    window_blocks: int = DEFAULT_WINDOW_BLOCKS,
    perm_type: str = "feistel",
    era_length: int | None = None,
    arithmetic: str = "exact",
) -> Permutation:
    """Returns one of Levanter's permutations of ``length`` indices.

    Args:
        kind: ``"feistel"`` (Levanter's default permutation), ``"linear"``, ``"block"`` (Levanter's default shuffle: permutes
            blocks of consecutive indices, then indices within windows of several blocks), or ``"era"`` (the 2025 shuffle:
            permutes one era after another).
        length: number of indices.
        key: a seed (``PRNGKey(seed)``) or a key.
        io_block_size: indices per block.
        window_blocks: blocks per window.
        perm_type: ``"feistel"`` or ``"linear"``: the permutation that block and era shuffles use.
        era_length: indices per era.
        arithmetic: for linear permutations. ``"exact"`` is a permutation for every length. ``"float64"`` reproduces Levanter's
            arithmetic: equal to ``"exact"`` while products stay below 2**53, and not a permutation beyond.

    Raises:
        ArgumentError: an invalid argument.
    """
    length = _whole(length, "length", 0, _MOST)
    io_block_size = _whole(io_block_size, "io_block_size", 1, _MOST)
    window_blocks = _whole(window_blocks, "window_blocks", 1, _MOST)
    if era_length is not None:
        era_length = _whole(era_length, "era_length", 1, _MOST)
    if not all(isinstance(word, str) for word in (kind, perm_type, arithmetic)):
        raise ArgumentTypeError("kind, perm_type and arithmetic: expected strings")
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
            raise ArgumentError("era_length: expected an integer of at least 1 for an era shuffle, found None")
        native, sizes = "era", [era_length]
    else:
        raise ArgumentError(f"kind must be 'feistel', 'linear', 'block' or 'era', not {kind!r}")
    return Permutation(native, how, length, prng_key(key), sizes)
