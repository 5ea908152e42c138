"""Rules for using a stream in all ways at once. Subclasses define the stream and its expected batches.

Interleaved loops, states, epochs chosen at any time, pickling, forks, abandoned loops. The next batch always equals the model's,
a state resumes with the remaining batches, and only ActshardError is raised.
"""

from __future__ import annotations

import gc
import json
import pickle
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, invariant, precondition, rule
from tests.torture.budget import CountedMachine
from tests.torture.datasets import in_a_child

import actshard
from actshard.streaming.epochs import Epochs


class LoopMachine(CountedMachine):
    """Subclasses set the options ``asked`` and call :meth:`start`."""

    states = Bundle("states")
    stream: Epochs[Any]
    asked: dict[str, Any]
    damaged = ("dataset", "batch_size", "batch", "epoch", "settings")
    """Required fields of a state."""

    def start(self) -> None:
        """Creates the stream that the rules use."""
        try:
            self.stream = self.another()
        except actshard.ArgumentError:  # fewer rows or examples than batches
            self.asked |= {"drop_last": True}
            self.stream = self.another()
        self.epoch, self.step, self.resume, self.chosen = self.asked.get("epoch", 0), 0, None, None
        # The current loop, earlier loops, and the exceptions expected from those.
        self.loop: Any = None
        self.old: list[tuple[Any, type[BaseException]]] = []

    def another(self) -> Epochs[Any]:
        """A stream with the same settings."""
        raise NotImplementedError

    def order(self, epoch: int) -> list[Any]:
        """Keys of an epoch's batches."""
        raise NotImplementedError

    def check(self, batch: Any) -> None:
        """Compares a batch with the dataset."""
        raise NotImplementedError

    def keys(self, batch: Any) -> Any:
        """A key that identifies a batch."""
        raise NotImplementedError

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
        """Marks the current loop as an earlier one."""
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
            assert self.keys(batch) == want[self.step]
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

    # -- position and state ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_state_is_the_models(self) -> None:
        if hasattr(self, "stream"):
            state = self.stream.state_dict()
            if self.chosen is not None and self.loop is None:
                assert (state["epoch"], state["batch"]) == (self.chosen, 0)  # of the next epoch
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
        assert [self.keys(b) for b in other] == want[batch:]

    @rule(state=states, what=st.integers(0, 20))
    def load_what_is_damaged(self, state: Any, what: int) -> None:
        bad, field = json.loads(json.dumps(state)), self.damaged[what % len(self.damaged)]
        (bad if field in bad else bad["settings"])[field] = "x"
        with pytest.raises(actshard.ActshardError):
            self.stream.load_state_dict(bad)

    @rule(epoch=st.integers(0, 4))
    def choose_an_epoch(self, epoch: int) -> None:
        self.stream.set_epoch(epoch)
        if self.loop is not None:
            self.chosen = epoch
            return
        if epoch != self.epoch or self.chosen is not None:  # an epoch chosen during a loop starts at its beginning
            self.epoch, self.step, self.resume, self.chosen = epoch, 0, None, None

    # -- other processes -----------------------------------------------------------------------------------------------------

    def left(self) -> list[Any]:
        """Batches that a copy of the stream reads next."""
        if self.chosen is not None and self.loop is None:
            return self.order(self.chosen)
        return self.order(self.epoch)[self.step if self.resume is None else self.resume :]

    @rule()
    def carry(self) -> None:
        other = pickle.loads(pickle.dumps(self.stream))
        assert [self.keys(b) for b in other] == self.left()

    @rule()
    def fork(self) -> None:
        loop, stream = self.loop, self.stream
        want = None if loop is None else self.order(self.reading)[self.step :]

        def read() -> Any:
            found = None if loop is None else [self.keys(b) for b in loop]
            return found, len([self.keys(b) for b in stream])

        assert in_a_child(read) == (want, len(self.order(self.epoch)) if loop is not None else self.in_a_row())

    def in_a_row(self) -> int:
        """Runs the next loop to its end."""
        if self.chosen is not None:
            return len(self.order(self.chosen))
        return len(self.order(self.epoch)) - (self.resume or 0)

    def teardown(self) -> None:
        if hasattr(self, "stream"):
            self.stream.close()
