"""A machine that uses a stream in every way at once, beside a model of it in a few lines.

Interleaved loops, states, epochs chosen at any time, pickling, forks, loops that are dropped. At any time the next batch is the
one that the model expects; every row comes once in an epoch, of all ranks together; a state gives what was left; and only an
ActshardError comes out.
"""

from __future__ import annotations

import gc
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, invariant, precondition, rule
from tests.torture.budget import CountedMachine, machine_settings
from tests.torture.datasets import FORMATS, LAYERS, D, dataset, in_a_child

import actshard

Keys = list[tuple[int, int, int]]


def keys(batch: actshard.Batch) -> Keys:
    """(example, token, layer) of each row; an aligned row has the first layer's name."""
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


class Machine(CountedMachine):
    """The rules; `options` differ."""

    options = DEFAULTS
    states = Bundle("states")

    @initialize(data=st.data(), format=st.sampled_from(FORMATS), io=st.sampled_from(["mmap", "pread"]))
    def make(self, data: st.DataObject, format: str, io: str) -> None:
        self.data = dataset(format)
        self.store = self.data.open(io=io)
        self.asked = data.draw(self.options, "options")
        self.several = self.asked.get("interleave", False) or data.draw(st.booleans(), "layers")
        self.batch_size = data.draw(st.integers(1, 40), "batch_size")
        world = self.asked.get("world_size", 1)
        self.rank = data.draw(st.integers(0, world - 1), "rank")
        try:
            self.stream = self.another()
        except actshard.ArgumentError:  # fewer rows than batches there would have to be
            self.asked |= {"drop_last": True}
            self.stream = self.another()
        self.orders: dict[int, list[Keys]] = {}
        self.epoch, self.step, self.resume, self.chosen = self.asked.get("epoch", 0), 0, None, None
        # The loop that is being read, those before it, and what is expected of them when they are asked again.
        self.loop: Any = None
        self.old: list[tuple[Any, type[BaseException]]] = []

    def another(self, rank: int | None = None) -> actshard.Stream:
        """A stream of the same settings."""
        options = {"memory": 400, **self.asked, "rank": self.rank if rank is None else rank}
        layers: Any = "all" if self.several else LAYERS[1]
        return self.store.stream(layers, self.batch_size, **options)

    def order(self, epoch: int) -> list[Keys]:
        """Batches of an epoch, as a stream of its own reads them: checked against the dataset."""
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

    def check(self, batch: actshard.Batch) -> None:
        """A batch's rows are the dataset's."""
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

    # -- loops ---------------------------------------------------------------------------------------------------------

    @rule()
    def begin(self) -> None:
        if self.chosen is not None:
            self.epoch, self.step, self.resume, self.chosen = self.chosen, 0, None, None
        self.retire(actshard.ClosedError)
        self.loop = iter(self.stream)
        self.step, self.resume = self.resume or 0, None
        self.reading = self.epoch

    def retire(self, why: type[BaseException]) -> None:
        """The loop that is being read is not any more."""
        if self.loop is not None:
            self.old = [*self.old[-3:], (self.loop, why)]
            self.loop = None

    @precondition(lambda self: self.loop is not None)
    @rule(count=st.integers(1, 9))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            if self.loop is None:
                return
            want = self.order(self.reading)
            if self.step == len(want):
                with pytest.raises(StopIteration):
                    next(self.loop)
                self.retire(StopIteration)
                self.epoch, self.step = self.epoch + 1, 0
                if self.chosen is not None:
                    self.epoch, self.chosen = self.chosen, None
                return
            batch = next(self.loop)
            self.check(batch)
            assert keys(batch) == want[self.step]
            self.step += 1

    @precondition(lambda self: self.old)
    @rule(which=st.integers(0, 3))
    def ask_an_old_loop(self, which: int) -> None:
        loop, why = self.old[which % len(self.old)]
        with pytest.raises(why):
            next(loop)

    @precondition(lambda self: self.loop is not None)
    @rule()
    def drop_the_loop(self) -> None:
        self.loop = None
        gc.collect()

    @rule()
    def close(self) -> None:
        self.stream.close()
        self.retire(StopIteration)

    # -- where it is ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_state_is_the_models(self) -> None:
        if hasattr(self, "stream"):
            state = self.stream.state_dict()
            if self.chosen is not None and self.loop is None:
                assert (state["epoch"], state["batch"]) == (self.chosen, 0)  # of the epoch that comes next
                return
            assert (state["epoch"], state["batch"]) == (self.epoch, self.step if self.resume is None else self.resume)
            assert self.stream.epoch == self.epoch

    @rule(target=states)
    def save(self) -> Any:
        return json.loads(json.dumps(self.stream.state_dict()))

    @rule(state=states)
    def load(self, state: Any) -> None:
        self.stream.load_state_dict(state)
        self.retire(actshard.ClosedError)
        epoch, batch = state["epoch"], state["batch"]
        if batch == len(self.stream) and batch:
            epoch, batch = epoch + 1, 0
        self.epoch, self.step, self.resume, self.chosen = epoch, batch, batch, None

    @rule(state=states)
    def load_elsewhere(self, state: Any) -> None:
        other = self.another()
        other.load_state_dict(state)
        want, batch = self.order(state["epoch"]), state["batch"]
        if batch == len(want) and batch:
            want, batch = self.order(state["epoch"] + 1), 0
        assert [keys(b) for b in other] == want[batch:]

    @rule(state=states, what=st.sampled_from(["dataset", "selection", "seed", "rows", "batch", "epoch", "settings"]))
    def load_what_is_damaged(self, state: Any, what: str) -> None:
        bad = json.loads(json.dumps(state))
        (bad if what in bad else bad["settings"])[what] = "x"
        with pytest.raises(actshard.ActshardError):
            self.stream.load_state_dict(bad)

    @rule(epoch=st.integers(0, 4))
    def choose_an_epoch(self, epoch: int) -> None:
        self.stream.set_epoch(epoch)
        if self.loop is not None:
            self.chosen = epoch
            return
        if (
            epoch != self.epoch or self.chosen is not None
        ):  # an epoch that was chosen in a loop is read from its beginning
            self.epoch, self.step, self.resume, self.chosen = epoch, 0, None, None

    # -- elsewhere -----------------------------------------------------------------------------------------------------

    def left(self) -> list[Keys]:
        """What a copy of the stream reads next."""
        if self.chosen is not None and self.loop is None:
            return self.order(self.chosen)
        return self.order(self.epoch)[self.step if self.resume is None else self.resume :]

    @rule()
    def carry(self) -> None:
        other = pickle.loads(pickle.dumps(self.stream))
        assert [keys(b) for b in other] == self.left()

    @rule()
    def fork(self) -> None:
        loop, stream = self.loop, self.stream
        want = None if loop is None else self.order(self.reading)[self.step :]

        def read() -> Any:
            found = None if loop is None else [keys(b) for b in loop]
            return found, len([keys(b) for b in stream])

        assert in_a_child(read) == (want, len(self.order(self.epoch)) if loop is not None else in_a_row(self))

    @rule()
    def read_beside(self) -> None:
        example = self.batch_size % len(self.data.values)
        found = self.store.sequence(example, LAYERS[1])
        assert np.array_equal(found, self.data.values[example][1])

    def teardown(self) -> None:
        if hasattr(self, "stream"):
            self.stream.close()


def in_a_row(machine: Machine) -> int:
    """Batches of the next loop."""
    if machine.chosen is not None:
        return len(machine.order(machine.chosen))
    return len(machine.order(machine.epoch)) - (machine.resume or 0)


class AnyMachine(Machine):
    """Every option."""

    options = ANY


TestDefaults = Machine.TestCase
TestDefaults.settings = machine_settings(15, 10_000, steps=25)
TestAnyOptions = AnyMachine.TestCase
TestAnyOptions.settings = machine_settings(15, 10_000, steps=25)
