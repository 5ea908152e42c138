"""A state machine that uses a stream of activations in all ways at once, compared with a simple model.

Every row occurs once per epoch over all ranks; the other rules are in ``loops``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from tests.torture.budget import machine_settings
from tests.torture.datasets import FORMATS, LAYERS, D, dataset
from tests.torture.loops import LoopMachine

import actshard

pytestmark = pytest.mark.machine

Keys = list[tuple[int, int, int]]


def keys(batch: actshard.Batch) -> Keys:
    """(example, token, layer) of each row. An aligned row has the first layer's name."""
    layers = batch.layers[:1] if batch.activations.ndim == 3 else batch.layers
    layers = np.resize(layers, len(batch))
    return list(zip(batch.examples.tolist(), batch.tokens.tolist(), layers.tolist(), strict=True))


DEFAULTS = st.fixed_dictionaries({"shuffle": st.sampled_from([None, "window", "exact"])})
ANY = st.fixed_dictionaries(
    {
        "shuffle": st.sampled_from([None, "window", "exact"]),
        "seed": st.integers(0, 5),
        "tokens": st.sampled_from(["content", "all", "last"]),
        "interleave": st.booleans(),
        "drop_last": st.booleans(),
        "world_size": st.integers(1, 3),
        "memory": st.sampled_from([200, 300, 1500, "1MiB"]),
        "reuse": st.booleans(),
        "dtype": st.sampled_from([None, "bfloat16", "float64"]),
        "center": st.sampled_from([None, 0.5]),
        "epoch": st.integers(0, 3),
    }
)


class Machine(LoopMachine):
    """The rules; `options` differ."""

    options = DEFAULTS
    damaged = ("dataset", "selection", "seed", "rows", "batch", "epoch", "settings")

    @initialize(data=st.data(), format=st.sampled_from(FORMATS), io=st.sampled_from(["mmap", "pread"]))
    def make(self, data: st.DataObject, format: str, io: str) -> None:
        self.data = dataset(format)
        self.store = self.data.open(io=io)
        self.asked = data.draw(self.options, "options")
        self.several = self.asked.get("interleave", False) or data.draw(st.booleans(), "layers")
        self.batch_size = data.draw(st.integers(1, 40), "batch_size")
        world = self.asked.get("world_size", 1)
        self.rank = data.draw(st.integers(0, world - 1), "rank")
        self.orders: dict[int, list[Keys]] = {}
        self.start()

    def another(self, rank: int | None = None) -> actshard.Stream:
        """A stream with the same settings."""
        options = {"memory": 400, **self.asked, "rank": self.rank if rank is None else rank}
        layers: Any = "all" if self.several else LAYERS[1]
        return self.store.stream(layers, self.batch_size, **options)

    def order(self, epoch: int) -> list[Keys]:
        """Batches of an epoch, read by a separate stream and checked against the dataset."""
        if epoch not in self.orders:
            shares = []
            for rank in range(self.asked.get("world_size", 1)):
                other = self.another(rank)
                other.set_epoch(epoch)
                shares.append([])
                for batch in other:
                    self.check(batch)
                    shares[-1].append(keys(batch))
                assert len(shares[-1]) == len(other)
            seen = [k for share in shares for batch in share for k in batch]
            layers = LAYERS if self.asked.get("interleave") else LAYERS[:1] if self.several else LAYERS[1:]
            every = [(e, t, x) for e, t in self.data.keys(self.asked.get("tokens", "content")) for x in layers]
            assert len(set(seen)) == len(seen)
            assert set(seen) <= set(every)
            full = self.batch_size * len(shares)
            assert len(seen) == (len(every) // full * full if self.asked.get("drop_last") else len(every))
            self.orders[epoch] = shares[self.rank]
        return self.orders[epoch]

    def keys(self, batch: actshard.Batch) -> Keys:
        return keys(batch)

    def check(self, batch: actshard.Batch) -> None:
        """Compares a batch's rows with the dataset."""
        aligned = self.several and not self.asked.get("interleave")
        assert batch.activations.shape == ((len(batch), len(LAYERS), D) if aligned else (len(batch), D))
        for row, (example, token, layer) in zip(batch.activations, keys(batch), strict=True):
            values = self.data.values[example][:, token]
            want = values if aligned else values[LAYERS.index(layer)]
            if self.asked.get("center") is not None:
                want = (
                    want.astype(batch.activations.dtype if self.asked["dtype"] == "float64" else "f4")
                ) - np.float32(0.5)
            assert np.array_equal(row, want.astype(batch.activations.dtype))

    @rule()
    def read_beside(self) -> None:
        example = self.batch_size % len(self.data.values)
        found = self.store.sequence(example, LAYERS[1])
        assert np.array_equal(found, self.data.values[example][1])


class AnyMachine(Machine):
    """Every option."""

    options = ANY


TestDefaults = Machine.TestCase
TestDefaults.settings = machine_settings(15, 10_000, steps=25)
TestAnyOptions = AnyMachine.TestCase
TestAnyOptions.settings = machine_settings(15, 10_000, steps=25)
