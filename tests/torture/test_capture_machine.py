"""A state machine that reads and converts HalluLens captures while their writer runs, compared with a model in numpy.

A store contains the samples committed when it was opened, whatever is written later; incomplete samples are not included.
Every conversion contains the same rows and columns, also when converted again.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from tests.torture.budget import CountedMachine, machine_settings
from tests.torture.captures import Capture, Sample, Sizes
from tests.torture.datasets import in_a_child

import actshard

pytestmark = pytest.mark.machine

SIZES = st.builds(
    Sizes,
    blocks=st.integers(1, 3),
    width=st.integers(1, 5),
    prompt=st.integers(1, 5),
    response=st.integers(1, 4),
    attended=st.integers(0, 3),
    top=st.integers(0, 2),
    prompts=st.booleans(),
)
LENGTHS = st.tuples(st.integers(0, 7), st.integers(0, 6))
WRITTEN = ("saev", "lmprobe", "zarr", "pickle")


class Machine(CountedMachine):
    """The rules; `options` differ."""

    options: Any = st.fixed_dictionaries({})
    root: Path

    @initialize(data=st.data(), sizes=SIZES, allocated=st.integers(0, 6), lengths=st.lists(LENGTHS, max_size=6))
    def make(self, data: st.DataObject, sizes: Sizes, allocated: int, lengths: list[tuple[int, int]]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="actshard-capture-"))
        self.capture = Capture(self.root / "capture", sizes, allocated, seed=len(lengths))
        for prompt_len, response_len in lengths:
            self.capture.append(prompt_len, response_len)
        self.asked = data.draw(self.options, "options")
        self.made = 0
        self.open_again()

    def opened(self, path: Path) -> actshard.Store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return actshard.open(path, **self.asked)

    @rule()
    def open_again(self) -> None:
        self.store = self.opened(self.capture.path)
        self.samples = list(self.capture.samples)
        self.closed = False

    @invariant()
    def the_store_is_the_models(self) -> None:
        if not hasattr(self, "store"):
            return
        s = self.capture.sizes
        assert self.store.format == "hallulens"
        assert self.store.num_examples == len(self.samples)
        assert self.store.layers == tuple(range(s.blocks + 1))
        assert (self.store.d_model, self.store.dtype) == (s.width, np.float16)
        assert self.store.token_counts.tolist() == [x.rows.shape[1] for x in self.samples]

    # -- the writer ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.capture.torn)
    @rule(lengths=LENGTHS, skip=st.integers(0, 2), commit=st.booleans())
    def append(self, lengths: tuple[int, int], skip: int, commit: bool) -> None:
        self.capture.append(*lengths, skip=skip, commit=commit)

    @precondition(lambda self: not self.capture.torn)
    @rule(name=st.sampled_from(["meta.jsonl", "generation.jsonl"]), at=st.integers(0, 100))
    def tear(self, name: str, at: int) -> None:
        self.capture.tear(name, at)

    @precondition(lambda self: self.capture.torn)
    @rule()
    def mend(self) -> None:
        self.capture.mend()

    # -- reading -------------------------------------------------------------------------------------------------------

    def reads(self) -> bool:
        """Whether rows can be read. A closed store raises ClosedError."""
        if self.closed:
            with pytest.raises(actshard.ClosedError):
                self.store.gather(0, [], [])
        return not self.closed

    def some(self) -> list[int]:
        """Samples with tokens."""
        return [i for i, sample in enumerate(self.samples) if sample.rows.shape[1]]

    @rule(
        picks=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.booleans()), min_size=1, max_size=9),
        layer=st.integers(0, 9),
    )
    def gather(self, picks: list[tuple[int, int, bool]], layer: int) -> None:
        some, layer = self.some(), layer % (self.capture.sizes.blocks + 1)
        if not self.reads() or not some:
            return
        examples = [some[e % len(some)] for e, _, _ in picks]
        tokens = [t % self.samples[e].rows.shape[1] for e, (_, t, _) in zip(examples, picks, strict=True)]
        want = [self.samples[e].rows[layer, t] for e, t in zip(examples, tokens, strict=True)]
        asked = [
            t - self.samples[e].rows.shape[1] if end else t
            for e, t, (_, _, end) in zip(examples, tokens, picks, strict=True)
        ]
        found = self.store.gather(layer, np.array(examples, np.int64), np.array(asked, np.int64))
        assert found.shape == (len(picks), self.capture.sizes.width)
        assert not picks or np.array_equal(found, want)
        wide = self.store.gather(layer, np.array(examples, np.int64), np.array(tokens, np.int64), dtype="float64")
        assert np.array_equal(wide, found.astype("f8"))

    @rule(which=st.integers(0, 99), layer=st.integers(0, 9))
    def sequence(self, which: int, layer: int) -> None:
        layer %= self.capture.sizes.blocks + 1
        if not self.reads() or not self.samples:
            return
        which %= len(self.samples)
        want = self.samples[which].rows[layer]
        assert np.array_equal(self.store.sequence(which, layer), want)
        out = np.empty(want.shape, np.float16)
        assert np.array_equal(self.store.sequence(which, layer, out=out), want)
        every = self.store.sequences(range(len(self.samples)), layer)
        assert all(np.array_equal(a, s.rows[layer]) for a, s in zip(every, self.samples, strict=True))

    @rule(layer=st.integers(0, 9))
    def last_tokens(self, layer: int) -> None:
        layer %= self.capture.sizes.blocks + 1
        some = self.some()
        if self.reads() and some:
            assert np.array_equal(self.store.last_tokens(layer, some), [self.samples[i].rows[layer, -1] for i in some])

    @rule(
        shuffle=st.sampled_from([None, "window", "exact"]),
        size=st.integers(1, 9),
        tokens=st.sampled_from(["content", "all", "last"]),
        several=st.booleans(),
    )
    def stream(self, shuffle: str | None, size: int, tokens: str, several: bool) -> None:
        if not self.reads():
            return
        stream = self.store.stream("all" if several else 1, size, shuffle=shuffle, tokens=tokens, memory=100)  # type: ignore[arg-type]
        seen = []
        for batch in stream:
            for row, e, t in zip(batch.activations, batch.examples.tolist(), batch.tokens.tolist(), strict=True):
                assert np.array_equal(row, self.samples[e].rows[:, t] if several else self.samples[e].rows[1, t])
                seen.append((e, t))
        counts = [s.rows.shape[1] for s in self.samples]
        want = [(e, t) for e, n in enumerate(counts) for t in (range(n - 1, n) if n and tokens == "last" else range(n))]
        assert (seen if shuffle is None else sorted(seen)) == want

    @rule()
    def statistics(self) -> None:
        rows = [s.rows[1] for s in self.samples]
        if self.reads() and sum(map(len, rows)):
            found, want = self.store.stats(1), np.concatenate(rows).astype("f8")
            assert found.rows == len(want)
            assert np.allclose(found.mean, want.mean(0))
            assert np.array_equal(found.max, want.max(0))

    @precondition(lambda self: not self.closed)
    @rule()
    def columns(self) -> None:
        """Columns are read on first use: those of the store's samples, whatever was written since."""
        table = self.store.table
        assert table.num_rows == len(self.samples)
        for name in ("key", "prompt_len", "response_len", "hallucinated"):
            assert table[name].to_pylist() == [s.line[name] for s in self.samples]
        for name in ("prompt_token_ids", "response_token_ids"):
            assert [x or [] for x in table[name].to_pylist()] == [s.ids[name] for s in self.samples]
        if self.samples and "generation" in table.column_names:
            assert table["generation"].to_pylist() == [f"g {s.row}" for s in self.samples]
        found = self.store.read_columns(["response_attention"])["response_attention"].to_pylist()
        for value, sample in zip(found, self.samples, strict=True):
            flat = np.ravel(np.array(value, np.float16)) if sample.attention.size else np.zeros(0, np.float16)
            assert np.array_equal(flat, sample.attention.ravel())

    @rule()
    def elsewhere(self) -> None:
        """Pickled, and in a forked child: contains the samples committed by now."""
        if self.closed:
            return
        now = self.capture.samples
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = pickle.loads(pickle.dumps(self.store))
        assert other.token_counts.tolist() == [s.rows.shape[1] for s in now]
        if some := self.some():
            rows = in_a_child(lambda: self.store.last_tokens(0, some))
            assert np.array_equal(rows, [self.samples[i].rows[0, -1] for i in some])

    @rule()
    def close(self) -> None:
        self.store.close()
        self.closed = True

    # -- whole datasets -----------------------------------------------------------------------------------------------------

    @rule(deep=st.booleans())
    def verify(self, deep: bool) -> None:
        report = actshard.verify(self.capture.path, deep=deep)
        assert report.errors == []
        assert report.checked.get("examples", 0) == len(self.capture.samples)

    @precondition(lambda self: self.capture.samples)
    @rule(to=st.sampled_from(WRITTEN), then=st.sampled_from(WRITTEN), columns=st.booleans())
    def convert(self, to: str, then: str, columns: bool) -> None:
        """Converts to a format, and from that to another. Examples without tokens may be rejected with an error."""
        samples = list(self.capture.samples)
        source, made = self.capture.path, []
        for step, format in enumerate((to, then)):
            self.made += 1
            given: dict[str, Any] = {"pad": True, "dtype": "float32"} if format == "saev" else {}
            if columns and step == 0:
                given["columns"] = {"key": "asked", "prompt_len": "prompt_len"}
            done = self.converted(source, format, given)
            if isinstance(done, actshard.ActshardError):
                assert any(not s.rows.shape[1] for s in samples), done
                assert not isinstance(done, actshard.InternalError | actshard.FormatError), done
                return
            source = done.path
            made.append(format)
            self.holds(self.opened(source), samples, made, columns)
            bad = [f for f in actshard.verify(source, deep=True).findings if f.severity == "error"]
            assert bad == []

    def converted(
        self, source: Path, format: str, given: dict[str, Any]
    ) -> actshard.Conversion | actshard.ActshardError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return actshard.convert(source, self.root / f"made{self.made}", format, verify=True, **given)
            except actshard.ActshardError as error:
                return error

    def holds(self, store: actshard.Store, samples: list[Sample], formats: list[str], chosen: bool) -> None:
        assert store.num_examples == len(samples)
        for i, sample in enumerate(samples):
            for layer in store.layers:
                want = sample.rows[layer].astype(store.dtype)
                found = store.sequence(i, layer)
                if "saev" not in formats:
                    assert found.shape == want.shape
                assert np.array_equal(found[: len(want)], want)
                assert not found[len(want) :].any()
        if "saev" not in formats:
            name = "asked" if chosen else "key"
            assert store.table[name].to_pylist() == [s.line["key"] for s in samples]
            assert store.table["prompt_len"].to_pylist() == [s.prompt_len for s in samples]

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)


class AnyMachine(Machine):
    """With the options of open()."""

    options = st.fixed_dictionaries(
        {"io": st.sampled_from(["mmap", "pread"]), "format": st.sampled_from([None, "hallulens"])}
    )

    def opened(self, path: Path) -> actshard.Store:
        own = path == self.capture.path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return actshard.open(path, io=self.asked["io"], format=self.asked["format"] if own else None)


TestDefaults = Machine.TestCase
TestDefaults.settings = machine_settings(12, 10_000, steps=15)
TestAnyOptions = AnyMachine.TestCase
TestAnyOptions.settings = machine_settings(12, 10_000, steps=15)
