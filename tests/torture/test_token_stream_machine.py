"""A state machine that uses a token stream in all ways at once, compared with reading the dataset by index.

A batch equals `dataset.get_batch` of indices computed by simple arithmetic; the other rules are in ``loops``.
"""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from tests.torture.budget import machine_settings
from tests.torture.loops import LoopMachine

import actshard
from actshard import tokens
from actshard.tokens.mixing import Sliced
from actshard.tokens.stream import arrays

pytestmark = pytest.mark.machine

DATASETS = ("windows", "causal", "packed", "chat", "prebuilt", "permuted", "sliced", "mixture")
ROWS = 17


@functools.cache
def cache_at(storage: str, *, equal: bool) -> Path:
    """A cache of short rows of different or equal lengths, created once per process."""
    path = Path(tempfile.mkdtemp(prefix="actshard-token-streams-")) / "cache"
    rng = np.random.default_rng(5)
    fields = {"input_ids": np.int32, "loss_weights": np.float32, "assistant_masks": np.int32}
    with tokens.CacheWriter(path, fields, storage=storage) as writer:
        for n in [6] * ROWS if equal else rng.integers(0, 12, ROWS).tolist():
            ids = rng.integers(0, 1000, n)
            writer.append([{name: (ids if name == "input_ids" else ids % 2).astype(fields[name]) for name in fields}])
    return path


def dataset_of(kind: str, storage: str) -> Any:
    """A dataset with its own opened cache."""
    cache = tokens.open_cache(cache_at(storage, equal=kind == "prebuilt"))
    causal = tokens.CausalLmDataset(tokens.TokenSeqDataset(cache, 4, "loss_weights"), eos_id=5)
    if kind == "windows":
        return tokens.TokenSeqDataset(cache, 5)
    if kind == "packed":
        return tokens.PackedTokenDataset(cache, 13, loss_weights_key="loss_weights")
    if kind == "chat":
        return tokens.ChatDataset(cache, 9, pack=2)
    if kind == "prebuilt":
        return tokens.PrebuiltLmDataset(cache, 6, loss_weights_key="loss_weights")
    if kind == "permuted":
        return tokens.Permuted(causal, tokens.permutation("feistel", len(causal), 3))
    if kind == "sliced":
        return Sliced(causal, 3, len(causal) - 2)
    if kind == "mixture":
        parts = {"a": causal, "b": Sliced(causal, 0, 9)}
        return tokens.Mixture(parts, {"a": 0.6, "b": 0.4}, block_size=8, stop_strategy="first_exhausted")
    return causal


DEFAULTS = st.fixed_dictionaries({"shuffle": st.sampled_from([None, "block", "feistel", "linear"])})
ANY = st.fixed_dictionaries(
    {
        "shuffle": st.sampled_from([None, "block", "feistel", "linear"]),
        "seed": st.integers(0, 5),
        "drop_last": st.booleans(),
        "world_size": st.integers(1, 3),
        "epoch": st.integers(0, 3),
        "ahead": st.integers(1, 4),
    }
)


class Machine(LoopMachine):
    """The rules; `options` differ."""

    options = DEFAULTS
    damaged = ("dataset", "examples", "shuffle", "batch_size", "batch", "epoch", "settings")

    @initialize(data=st.data(), kind=st.sampled_from(DATASETS), storage=st.sampled_from(["plain", "lz4"]))
    def make(self, data: st.DataObject, kind: str, storage: str) -> None:
        self.dataset, self.plain = dataset_of(kind, storage), dataset_of(kind, storage)
        self.asked = data.draw(self.options, "options")
        self.batch_size = data.draw(st.integers(1, 20), "batch_size")
        self.world = self.asked.get("world_size", 1)
        self.rank = data.draw(st.integers(0, self.world - 1), "rank")
        self.orders: dict[int, list[Hashable]] = {}
        self.start()

    def another(self) -> tokens.TokenStream:
        """A stream of the same dataset with the same settings."""
        made: tokens.TokenStream = self.dataset.stream(
            self.batch_size, **{**self.asked, "rank": self.rank} if self.world > 1 else self.asked
        )
        return made

    def indices(self, epoch: int) -> list[list[int]]:
        """Indices of each batch of this rank. All ranks together have every index once."""
        n, full = len(self.plain), self.batch_size * self.world
        numbers = np.arange(n)
        if self.asked["shuffle"] is not None:
            key = tokens.prng_key(self.asked.get("seed", 0))
            order = tokens.permutation(self.asked["shuffle"], n, tokens.fold_in(key, epoch) if epoch else key)
            numbers = order(numbers)
            assert sorted(numbers.tolist()) == list(range(n))
        count = n // full if self.asked.get("drop_last") else -(-n // full)
        made, first = [], 0
        for later in reversed(range(count)):
            # The remaining examples do not fill all batches: each rank gets at least one per remaining batch.
            size = min(full, n - first - later * self.world)
            share = slice(first + size * self.rank // self.world, first + size * (self.rank + 1) // self.world)
            made.append(numbers[share].tolist())
            first += size
        return made

    def order(self, epoch: int) -> list[Hashable]:
        if epoch not in self.orders:
            self.orders[epoch] = [self.keys(self.plain.get_batch(where)) for where in self.indices(epoch)]
        return self.orders[epoch]

    def keys(self, batch: Any) -> Hashable:
        return tuple((name, a.dtype.str, a.shape, a.tobytes()) for name, a in sorted(arrays(batch).items()))

    def check(self, batch: Any) -> None:
        """Keys are whole batches, so comparing keys is sufficient."""
        assert arrays(batch)

    # -- outside the loop -----------------------------------------------------------------------------------------------

    @rule(epoch=st.integers(0, 2))
    def read_another_stream_of_the_dataset(self, epoch: int) -> None:
        other = self.another()
        other.set_epoch(epoch)
        assert [self.keys(b) for b in other] == self.order(epoch)
        assert [other.indices(i, epoch).tolist() for i in range(len(other))] == self.indices(epoch)

    @rule(counts=st.lists(st.integers(1, 3), min_size=1, max_size=6))
    def read_two_in_turn(self, counts: list[int]) -> None:
        first = self.asked.get("epoch", 0)
        loops, at = [iter(self.another()), iter(self.another())], [0, 0]
        for turn, count in enumerate(counts):
            for _ in range(count):
                batch = next(loops[turn % 2], None)
                want = self.order(first)[at[turn % 2] : at[turn % 2] + 1]
                assert ([] if batch is None else [self.keys(batch)]) == want
                at[turn % 2] += len(want)

    @rule()
    def read_from_threads(self) -> None:
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda: found.append([self.keys(b) for b in self.another()])) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [self.order(self.asked.get("epoch", 0))] * 2

    @rule(index=st.integers(0, 100))
    def read_the_dataset(self, index: int) -> None:
        n = len(self.plain)
        where = [index % n, -1 - index % n]
        assert self.keys(self.dataset.get_batch(where)) == self.keys(self.plain.get_batch(where))
        with pytest.raises(actshard.OutOfRangeError):
            self.dataset.get_batch([n])

    @rule(workers=st.integers(1, 3))
    def share_with_workers(self, workers: int) -> None:
        """Loader workers read every n-th batch each."""
        first = self.asked.get("epoch", 0)
        shares = [list(self.another().batches(i, workers)) for i in range(workers)]
        want = self.order(first)
        for i, share in enumerate(shares):
            assert [self.keys(b) for b in share] == want[i::workers]


class AnyMachine(Machine):
    """Every option."""

    options = ANY


TestDefaults = Machine.TestCase
TestDefaults.settings = machine_settings(15, 10_000, steps=25)
TestAnyOptions = AnyMachine.TestCase
TestAnyOptions.settings = machine_settings(15, 10_000, steps=25)
