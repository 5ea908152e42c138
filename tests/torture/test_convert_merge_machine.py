"""Interrupted conversions and merges, repeated: the result equals that of an undisturbed run, or the call is rejected.

A case creates sources and runs the verb undisturbed, then again with an interruption at the n-th change of the disk: an exception,
or SIGKILL of a forked child. Then follows a call with other arguments, and then the same call.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.torture import budget
from tests.torture.budget import CountedMachine, first_number, machine_settings, runs

import actshard
from actshard import formats
from actshard.base import work
from actshard.formats import merging as format_merging
from actshard.formats.lmprobe.index import TOKEN_LISTS
from actshard.formats.target import TEXTS
from actshard.writing.converting import running
from conftest import install

FORMATS = ("saev", "lmprobe", "zarr", "pickle")
CONVERTED = (*FORMATS, "flat")
"""Includes a format of another package; see ``plugin``."""
SMALL: dict[str, dict[str, Any]] = {
    "saev": {"max_tokens_per_shard": 24},
    "lmprobe": {"shard_bytes": 300},
    "zarr": {"chunk_tokens": 2},
    "pickle": {"shard_bytes": 900, "compress": False},
    "flat": {},
}


class Interrupted(actshard.DiskFullError):
    """The exception that the machine raises: a temporarily full disk."""


def fail() -> None:
    raise Interrupted("injected")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Steps:
    """Interrupts at the n-th change of the disk."""

    def __init__(self, at: int, stop: Callable[[], None]) -> None:
        self.left, self.stop = at, stop

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.stop()
            return function(*arguments, **named)

        return stepped


@contextlib.contextmanager
def interrupted_at(n: int, stop: Callable[[], None] = fail) -> Iterator[Steps]:
    steps = Steps(n, stop)
    with pytest.MonkeyPatch.context() as patch:
        for module in [m for n, m in sys.modules.items() if n.startswith("actshard.")]:
            for name in ("rename", "write_json", "make_folder", "write_bytes"):
                if hasattr(module, name):
                    patch.setattr(module, name, steps(getattr(module, name)))
        patch.setattr(work.Journal, "_append", steps(work.Journal._append))
        patch.setattr(format_merging, "_link", steps(format_merging._link))
        patch.setattr(running, "read", steps(running.read))
        yield steps


def digest(path: Path) -> dict[str, str]:
    return {
        str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(path.rglob("*"))
        if p.is_file()
    }


def values(path: Path) -> tuple[Any, ...]:
    """Everything in a dataset, except timestamps and file names."""
    store = actshard.open(path)
    table = {n: store.table[n].to_pylist() for n in store.table.column_names if n not in ("layers",)}
    rows = [
        store.sequence(e, la).tobytes() for la in store.layers for e in np.flatnonzero(store.tokens_in(la)).tolist()
    ]
    labels = None if store.labels is None else store.labels.tobytes()
    return store.format, store.layers, store.d_model, str(store.dtype), store.token_counts.tolist(), labels, table, rows


def make(path: Path, format: str, seed: int, small: bool, part: tuple[int, int] | None = None) -> Path:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    lengths = [3] * n if format == "saev" else rng.integers(1, 6, n).tolist()
    columns = {} if format == "saev" else {"columns": {"label": rng.integers(0, 9, n).tolist()}}
    if format == "pickle" and part is None:
        columns["columns"]["sample_idx"] = list(range(seed * 100, seed * 100 + n))
    if format == "lmprobe":
        columns["columns"]["text"] = [f"{seed}:{i}" for i in range(n)]
    own = SMALL[format] if small else {}
    if format == "lmprobe":
        own = {**own, "storage": "full_sequence"}
    with actshard.create(path, format, layers=[1, 4], d_model=6, part=part, **own) as writer:
        writer.append([rng.standard_normal((2, t, 6)).astype(np.float32) for t in lengths], **columns)
    return writer.path


class ConvertMergeMachine(CountedMachine):
    """One verb at a time, interrupted and finished."""

    root: Path

    @initialize(
        verb=st.sampled_from(["convert", "parts", "datasets"]),
        source=st.sampled_from(CONVERTED),
        to=st.sampled_from(CONVERTED),
        small=st.booleans(),
        physical=st.booleans(),
        seed=st.integers(0, 50),
        data=st.data(),
    )
    def begin(
        self, verb: str, source: str, to: str, small: bool, physical: bool, seed: int, data: st.DataObject
    ) -> None:
        warnings.simplefilter("ignore")
        if source == "flat" and verb != "convert":  # the format has no merger
            source = "zarr"
        small |= verb != "convert" and physical  # stores with different chunks cannot be merged into one
        self.root = Path(os.environ["ACTSHARD_MACHINE_FOLDER"]) / f"{random.getrandbits(60):x}"
        self.root.mkdir()
        self.verb, self.physical = verb, physical and source == "zarr"
        self.done: Path | None = None
        self.begun, self.as_asked = False, True
        if verb == "convert":
            self.sources = [make(self.root / "source", source, seed, small)]
            self.options: dict[str, Any] = {**(SMALL[to] if small else {}), "pad": to == "saev"}
            self.to = to
            self.chosen = self.choice(data)
            if self.chosen is not None:
                self.options["columns"] = self.chosen
        elif verb == "parts":
            self.sources = []
            for name in ("wanted", "target"):
                for i in (1, 0, 2):
                    make(self.root / name, source, seed + i, small, (i, 3))
        else:
            self.sources = [make(self.root / f"s{i}", source, seed + i, small) for i in range(3)]
        self.before = [digest(s) for s in self.sources]
        made = self.call("wanted")
        self.wanted = values(made)
        if verb == "convert":
            self.columns_are_those_asked_for(made)

    def choice(self, data: st.DataObject) -> dict[str, str] | None:
        """Some of the source's columns, reordered and renamed; None: all, the default."""
        if not data.draw(st.booleans(), "columns"):
            return None
        store = actshard.open(self.sources[0])
        names = formats.get(store.format).carrying().names(store.contents)
        some = data.draw(st.permutations(names).flatmap(lambda x: st.integers(0, len(x)).map(lambda n: x[:n])), "names")
        renamed = data.draw(st.lists(st.booleans(), min_size=len(some), max_size=len(some)), "renamed")
        return {name: f"my_{name}" if new else name for name, new in zip(some, renamed, strict=True)}

    def columns_are_those_asked_for(self, made: Path) -> None:
        """Compares columns, except texts, which each format names differently."""
        source, found = actshard.open(self.sources[0]), actshard.open(made)
        carrying = formats.get(source.format).carrying()
        carried = carrying.names(source.contents)
        chosen = dict.fromkeys(carried) if self.chosen is None else self.chosen
        kept = {new or name: source.table[name].to_pylist() for name, new in chosen.items()}
        table = {name: found.table[name].to_pylist() for name in found.table.column_names}
        if not found.table.column_names or self.to == "saev":
            return
        ours = {"sample_idx", "layers", *TEXTS}
        if self.chosen is None and carrying.number_column is not None:
            ours.add(carrying.number_column)  # left out if it equals the order
        for name in kept.keys() - ours:
            assert table[name] == kept[name], name
        if self.chosen is not None:
            for name in (set(carried) - set(chosen)) - ours - {"label", "num_tokens"}:
                assert name not in table, name

    def call(self, name: str, **other: Any) -> Path:
        path = self.root / name
        if self.verb == "convert":
            given = {"resume": True, **self.options, **other}
            return actshard.convert(self.sources[0], path, self.to, **given).path
        if self.verb == "parts":
            return actshard.merge(path, **{"physical": self.physical, **other})
        return actshard.merge(path, **{"parts": self.sources, "physical": self.physical, **other})

    @precondition(lambda self: self.done is None)
    @rule(n=st.integers(1, 60))
    def exception(self, n: int) -> None:
        with interrupted_at(n) as steps:
            try:
                self.until_done()
            except actshard.ActshardError:
                if steps.left > 0:
                    raise
                self.begun = True

    @precondition(lambda self: self.done is None)
    @rule(n=st.integers(1, 60))
    def kill(self, n: int) -> None:
        child = os.fork()
        if child == 0:
            try:
                with interrupted_at(n, die):
                    self.call("target")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        self.begun = True

    @precondition(lambda self: self.done is None and self.begun)
    @rule(which=st.integers(0, 3))
    def other_arguments(self, which: int) -> None:
        """A call with other arguments is rejected or done as requested; it never finishes the first."""
        if self.verb == "convert":
            other = [
                {"layers": [4]},
                {"examples": [0]},
                {"dtype": "float64" if self.to not in ("saev", "flat") else "float32", "layers": [4, 1]},
                {"columns": []},
            ][which]
        elif self.verb == "parts":
            other = [{"physical": not self.physical}, {"parts": [self.root / "wanted"]}, {"parts": []}][which % 3]
        else:
            other = [{"parts": self.sources[::-1]}, {"parts": self.sources[:2]}, {"parts": None}][which % 3]
        try:
            path = self.call("target", **other)
        except actshard.ActshardError:
            return
        store = actshard.open(path)
        if self.verb == "convert":
            assert store.layers == tuple(other.get("layers", store.layers))
            assert len(store) == (1 if "examples" in other else len(store))
        elif "physical" in other:
            assert values(path) == self.wanted
        else:  # nothing was begun, or the killed call finished it
            parts = other["parts"]
            wanted = self.wanted if parts is None else self.merged(parts)
            assert values(path)[4:] == wanted[4:]
        if self.verb == "parts":
            self.done, self.as_asked = path, False  # the parts were moved
        else:
            shutil.rmtree(self.root / "target")
            self.begun = False

    def merged(self, parts: list[Path]) -> tuple[Any, ...]:
        path = actshard.merge(self.root / f"m{random.getrandbits(60):x}", parts, physical=self.physical)
        return values(path)

    @precondition(lambda self: self.done is None)
    @rule()
    def same(self) -> None:
        self.until_done()

    def until_done(self) -> None:
        try:
            made = self.call("target")
        except actshard.ExistsError:
            # Killed after its last step: finished, but a merge that keeps its sources has no marker for that.
            assert self.verb == "datasets"
            assert self.begun
            (made,) = self.found()
        self.finished(made)

    @precondition(lambda self: self.done is not None)
    @rule()
    def again(self) -> None:
        """A finished result does not change."""
        before = digest(self.root / "target")
        refusals = (actshard.ExistsError,) if self.as_asked else (actshard.ExistsError, actshard.ArgumentError)
        with contextlib.suppress(*refusals):
            assert self.call("target") == self.done
        assert digest(self.root / "target") == before

    def found(self) -> list[Path]:
        target = self.root / "target"
        return [target] if actshard.open(target).path == target else [actshard.open(target).path]

    def finished(self, path: Path) -> None:
        assert values(path) == self.wanted
        report = actshard.verify(path, deep=True)
        bad = [f for f in report.findings if f.severity == "error" or f.code in ("unlisted-file", "unfinished")]
        assert bad == []
        assert not [p for p in path.rglob("*") if p.name.endswith(".part") or p.name in (".parts", ".merging")]
        self.done = path

    @invariant()
    def sources_are_as_they_were(self) -> None:
        if hasattr(self, "before"):
            assert [digest(s) for s in self.sources] == self.before

    def teardown(self) -> None:
        if hasattr(self, "root"):
            if self.done is None and hasattr(self, "wanted"):
                self.same()
            shutil.rmtree(self.root, ignore_errors=True)


@pytest.mark.machine
def test_conversions_and_merges_are_done_or_refused(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTSHARD_MACHINE_FOLDER", str(tmp_path / "machine"))
    (tmp_path / "machine").mkdir()
    install(plugins, "flat_plugin", "from tests.torture.plugin import Flat", "flat = flat_plugin:Flat")
    run_state_machine_as_test(ConvertMergeMachine, settings=machine_settings(10, 10_000, steps=6))


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_pair_of_formats_is_resumed_at_default_options(tmp_path: Path, source: str, to: str) -> None:
    made = make(tmp_path / "s", source, 3, small=False)
    own = {"pad": True} if to == "saev" else {}
    wanted = values(actshard.convert(made, tmp_path / "wanted", to, **own).path)
    chance = random.Random(f"{source}{to}{budget.seed()}")
    for k in range(runs(1, 20)):
        path = tmp_path / f"t{k}"
        with interrupted_at(chance.randrange(1, 20)) as steps:
            try:
                actshard.convert(made, path, to, resume=True, **own)
            except actshard.ActshardError:
                assert steps.left <= 0
        done = actshard.convert(made, path, to, resume=True, verify=True, **own)
        assert values(done.path) == wanted
        assert actshard.verify(done.path, deep=True).ok


# -- naive oracles for fast paths --------------------------------------------------------------------------------


@pytest.mark.machine
def test_merged_saev_shards_hold_the_parts_one_after_another(tmp_path: Path) -> None:
    """For any sizes of parts and shards: the rows of the parts in order, in shards of one size."""
    chance = random.Random(first_number() + 5)
    for k in range(runs(6, 500)):
        sizes = [chance.randrange(1, 9) for _ in range(chance.randrange(1, 5))]
        parts, wanted = [], []
        for i, n in enumerate(sizes):
            rows = np.random.default_rng(k * 10 + i).standard_normal((n, 2, 3, 4)).astype(np.float32)
            own = {"max_tokens_per_shard": 6 * chance.randrange(1, 6)}
            with actshard.create(tmp_path / f"{k}-{i}", "saev", layers=[0, 1], d_model=4, **own) as writer:
                writer.append(rows)
            parts.append(writer.path)
            wanted.append(rows)
        made = actshard.merge(tmp_path / f"{k}-made", parts)
        files = sorted(made.glob("acts*.bin"))
        flat = np.concatenate([np.fromfile(f, np.float32) for f in files])
        every = np.concatenate(wanted)
        assert np.array_equal(flat[: every.size], every.reshape(-1))
        assert not flat[every.size :].any()
        assert len({f.stat().st_size for f in files}) == 1


@pytest.mark.machine
def test_lmprobe_addresses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Shard and row of each token, assigned one by one: last tokens in separate shards, the others greedily after them."""
    chance = random.Random(first_number() + 6)
    for k in range(runs(6, 500)):
        lengths = [chance.randrange(0, 6) for _ in range(chance.randrange(1, 30))]
        if not any(lengths):
            continue
        row, limit = 4 * 4, 4 * 4 * chance.randrange(1, 9)
        with actshard.create(
            tmp_path / f"{k}", "lmprobe", layers=[0], d_model=4, storage="full_sequence", shard_bytes=limit
        ) as writer:
            writer.append([np.ones((1, n, 4), np.float32) for n in lengths])
        per = max(1, limit // row)
        lasts = -(-len(lengths) // per)
        shard, at, used = -1, 0, 0
        ids: list[list[int]] = []
        rows: list[list[int]] = []
        for i, n in enumerate(lengths):
            rest = max(n - 1, 0)
            if rest and (shard < 0 or (used and (used + rest) * row > limit)):
                shard, at, used = shard + 1, 0, 0
            ids.append([lasts + shard] * rest + [i // per] * (n > 0))
            rows.append([*range(at, at + rest), *([i % per] if n else [])])
            at, used = at + rest, used + rest
        store = actshard.open(tmp_path / f"{k}")
        found = store.read_columns([*TOKEN_LISTS, "shard_index", "row_offset"])
        assert found[TOKEN_LISTS[0]].to_pylist() == ids, (lengths, limit)
        assert found[TOKEN_LISTS[1]].to_pylist() == rows
        assert found["shard_index"].to_pylist() == [i // per for i in range(len(lengths))]
        assert found["row_offset"].to_pylist() == [i % per for i in range(len(lengths))]
