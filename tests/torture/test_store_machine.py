"""A state machine that reads a store while its files are truncated, replaced and extended.

Every read returns rows that a file contained, or raises one ActshardError. It never returns other numbers and never ends the
process: reads after damage run in a forked child, so that a crash is detected. `Store.close` and `Store.sequence` document what
closed stores and views may still do.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.torture.budget import CountedMachine, machine_settings
from tests.torture.datasets import EXAMPLES, FORMATS, LAYERS, D, dataset, in_a_child

import actshard

pytestmark = pytest.mark.machine

Work = Callable[[], Any]
DAMAGE = ("cut", "empty", "remove", "grow", "replace", "overwrite", "restore")


class Machine(CountedMachine):
    """The rules; `options` differ."""

    options = st.fixed_dictionaries({})

    @initialize(data=st.data(), format=st.sampled_from(FORMATS), io=st.sampled_from(["auto", "mmap", "pread"]))
    def make(self, data: st.DataObject, format: str, io: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="actshard-store-"))
        self.data, self.other = dataset(format, 0), dataset(format, 1)
        self.path = self.root / self.data.path.name
        shutil.copytree(self.data.path, self.path)
        self.rows = sorted(p for p in self.path.rglob("*") if p.is_file() and self.holds_rows(p))
        self.asked = {"io": io, **data.draw(self.options, "options")}
        self.store = self.data.open(self.path, **self.asked)
        self.views: list[tuple[Any, np.ndarray]] = []
        self.damaged = False
        self.closed = False

    def holds_rows(self, path: Path) -> bool:
        relative = path.relative_to(self.path)
        return (
            (path.name.startswith("acts") and path.suffix == ".bin")
            or path.suffix == ".safetensors"
            or ("activations" in relative.parts and not path.name.startswith("."))
            or path.name.startswith("shard_")
        )

    def read(self, work: Work, *wanted: tuple[int, int, int], shape: Any = None) -> None:
        """Runs `work`, which returns one row per (example, layer position, token): rows of an existing file, or an error."""
        try:
            found = in_a_child(work) if self.damaged else work()
        except actshard.ActshardError as error:
            found = error
        if self.closed:
            assert isinstance(found, actshard.ClosedError), found
            return
        if isinstance(found, actshard.ActshardError):
            assert self.damaged, found
            assert len(str(found).splitlines()) == 1
            assert not isinstance(found, actshard.InternalError), found
            return
        rows = np.asarray(found).reshape(-1, D)
        assert len(rows) == len(wanted)
        sources = [self.data, self.other] if self.damaged else [self.data]
        for row, (e, k, t) in zip(rows, wanted, strict=True):
            if self.damaged and self.data.format == "zarr" and not row.any():
                continue  # a missing chunk reads as its fill value
            assert any(np.array_equal(row, s.values[e][k, t]) for s in sources), (e, k, t, row)

    # -- reading -------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), n=st.integers(1, 30))
    def gather(self, data: st.DataObject, n: int) -> None:
        k = data.draw(st.integers(0, 1))
        picks = data.draw(
            st.lists(st.tuples(st.integers(0, EXAMPLES - 1), st.integers(0, 100)), min_size=n, max_size=n)
        )
        wanted = [(e, k, t % int(self.data.counts[e])) for e, t in picks]
        examples, tokens = [w[0] for w in wanted], [w[2] for w in wanted]
        self.read(lambda: self.store.gather(LAYERS[k], examples, tokens), *wanted)

    @rule(k=st.integers(0, 1))
    def last(self, k: int) -> None:
        wanted = [(e, k, int(n) - 1) for e, n in enumerate(self.data.counts)]
        self.read(lambda: self.store.last_tokens(LAYERS[k]), *wanted)

    @rule(e=st.integers(0, EXAMPLES - 1), k=st.integers(0, 1))
    def sequence(self, e: int, k: int) -> None:
        wanted = [(e, k, t) for t in range(int(self.data.counts[e]))]
        # A copy: reading a view of a truncated file would crash.
        if self.damaged:
            out = np.empty((len(wanted), D), "f4")
            self.read(lambda: self.store.sequence(e, LAYERS[k], out=out), *wanted)
        else:
            self.read(lambda: self.store.sequence(e, LAYERS[k]), *wanted)

    @rule(k=st.integers(0, 1), shuffle=st.sampled_from([None, "window", "exact"]), size=st.integers(1, 30))
    def stream(self, k: int, shuffle: str | None, size: int) -> None:
        def work() -> Any:
            found = list(self.store.stream(LAYERS[k], size, shuffle=shuffle, tokens="all", memory=500))
            examples, tokens = (np.concatenate([getattr(b, n) for b in found]) for n in ("examples", "tokens"))
            rows = np.concatenate([b.activations for b in found])
            return rows[np.lexsort((tokens, examples))]

        self.read(work, *[(e, k, t) for e, t in self.data.keys("all")])

    @rule()
    def read_in_a_child(self) -> None:
        if not self.closed and not self.damaged:
            rows = in_a_child(lambda: self.store.gather(LAYERS[0], np.arange(EXAMPLES), 0))
            assert np.array_equal(rows, [v[0, 0] for v in self.data.values])

    @rule(e=st.sampled_from([-1, EXAMPLES, 2**62]), layer=st.sampled_from([LAYERS[0], 1, True, None]))
    def ask_for_what_is_not_there(self, e: int, layer: Any) -> None:
        for work in (lambda: self.store.gather(layer, e, 0), lambda: self.store.sequence(e, layer)):
            with pytest.raises(actshard.ActshardError):
                work()

    @precondition(lambda self: not self.damaged and not self.closed)
    @rule(e=st.integers(0, EXAMPLES - 1), k=st.integers(0, 1))
    def hold_a_view(self, e: int, k: int) -> None:
        self.views.append((self.store.sequence(e, LAYERS[k]), self.data.values[e][k]))

    @precondition(lambda self: self.views and not self.damaged)
    @rule()
    def look_at_views(self) -> None:
        gc.collect()
        for view, values in self.views:
            assert np.array_equal(view, values)

    # -- opening and closing -------------------------------------------------------------------------------------------

    @rule()
    def close(self) -> None:
        self.store.close()
        self.closed = True
        for work in (lambda: self.store.table, lambda: self.store.labels, lambda: self.store.stream(LAYERS[0], 2)):
            with pytest.raises(actshard.ClosedError):
                work()
        gc.collect()  # frees stores opened earlier, referenced by exceptions
        below = str(self.path)
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a thread has closed it meanwhile
                assert not str(link.readlink()).startswith(below)
        if not self.views:
            assert below not in Path("/proc/self/maps").read_text()

    @rule(how=st.sampled_from(["path", "pickle"]))
    def open_again(self, how: str) -> None:
        def work() -> actshard.Store:
            if how == "pickle":
                made: actshard.Store = pickle.loads(pickle.dumps(self.store))
                return made
            return self.data.open(self.path, **self.asked)

        if self.damaged:
            # A child finds out whether it can be opened.
            if not isinstance(in_a_child(lambda: work().num_examples), actshard.ActshardError):
                self.store, self.closed = work(), False
            return
        self.store, self.closed = work(), False

    # -- damage --------------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1000), how=st.sampled_from(DAMAGE), at=st.integers(0, 10**6))
    def damage(self, which: int, how: str, at: int) -> None:
        path = self.rows[which % len(self.rows)]
        relative = path.relative_to(self.path)
        old, new = self.data.path / relative, self.other.path / relative
        if how == "remove":
            path.unlink(missing_ok=True)
        elif how in ("replace", "restore") or not path.exists():
            beside = path.with_name(".beside")
            shutil.copy(new if how == "replace" and new.exists() else old, beside)
            beside.rename(path)
        elif how == "overwrite" and new.exists():
            # In place, with the same size: views of it change, which is allowed.
            with path.open("r+b") as file:
                file.write(new.read_bytes())
                file.truncate()
        elif how == "grow":
            # Beyond the old end: extra bytes cannot be distinguished from data.
            with path.open("r+b") as file:
                if path.stat().st_size < old.stat().st_size:
                    file.write(old.read_bytes())
                file.seek(0, os.SEEK_END)
                file.write(b"\x7f" * (1 + at % 10_000))
        else:
            os.truncate(path, 0 if how == "empty" else at % max(path.stat().st_size, 1))
        self.damaged = True

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.views.clear()
            self.store.close()
            shutil.rmtree(self.root)


class AnyMachine(Machine):
    """With options of open()."""

    options = st.fixed_dictionaries(
        {"decoded_memory": st.sampled_from(["1GiB", 0, 100, 1000]), "checksums": st.booleans()}
    )


TestDefaults = Machine.TestCase
TestDefaults.settings = machine_settings(15, 10_000, steps=20)
TestAnyOptions = AnyMachine.TestCase
TestAnyOptions.settings = machine_settings(15, 10_000, steps=20)
