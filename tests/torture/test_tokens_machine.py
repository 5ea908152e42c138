"""Guarantee: after builds, interruptions and replacements in a folder, its cache is complete and other files are unchanged.

Interruptions are counted, not timed: a build is stopped (by an exception, or by SIGKILL of a forked child) before its n-th rename,
removal, sync or ledger.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from tests.torture.budget import CountedMachine, machine_settings

import actshard
from actshard import _native, tokens
from actshard.tokens.ledger import Ledger
from actshard.tokens.writing import FieldWriters

pytestmark = pytest.mark.machine

IDS = tokens.PrebuiltFormat()
DEFAULTS: dict[str, Any] = {}
Key = tuple[Any, ...]

builds = st.one_of(
    st.just(DEFAULTS),
    st.fixed_dictionaries(
        {},
        optional={
            "layout": st.sampled_from(["consolidated", "sharded"]),
            "storage": st.sampled_from(["plain", "lz4"]),
            "dtype": st.sampled_from(["int64", "uint16"]),
            "keep_shards": st.booleans(),
        },
    ),
)
picks = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple)


class Stopped(BaseException):
    """A build was stopped."""


@contextlib.contextmanager
def stopping(step: int, stop: Callable[[], None]) -> Iterator[None]:
    """Calls ``stop`` before the n-th step; never for step 0."""
    steps = 0
    places = [(Path, name) for name in ("rename", "replace", "unlink", "rmdir", "mkdir")]
    places += [(Ledger, "write"), (shutil, "rmtree"), (FieldWriters, "finish"), (os, "fsync"), (_native, "sync_files")]  # type: ignore[list-item]
    originals = [getattr(owner, name) for owner, name in places]

    def counted(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == step:
                stop()
            return original(*args, **kwargs)

        return wrapper

    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, counted(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def files(root: Path) -> dict[str, bytes]:
    """Contents of every file below a folder, by path."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


class Caches(CountedMachine):
    """A folder with a cache, another cache and files of a user; three source files are next to it."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="actshard-machine-"))
        self.out = self.root / "out"
        self.rows = [[[1, 2, 3], []], [[40]], [[5, 6], [7] * 9, [8]]]
        self.bad: set[int] = set()
        self.versions = [0, 0, 0]
        self.cache: Key | None = None
        """Key of the finished cache; None: there is none."""
        self.underway: Key | None = None
        """Key of the cache that an interrupted swap will install."""
        self.stopped: set[Key] = set()
        """Builds that were interrupted, or failed at a bad record; their finished shards can be resumed."""
        self.foreign: dict[str, bytes] = {}
        self.sibling = False
        self.written: dict[Key, list[list[int]]] = {}
        self.clean: dict[Key, dict[str, bytes]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @initialize()
    def begin(self) -> None:
        for i in range(3):
            self.write_source(i)

    def write_source(self, i: int) -> None:
        records = [{"input_ids": row} for row in self.rows[i]] + [{"input_ids": "bad"}] * (i in self.bad)
        path = self.root / f"{i}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        self.versions[i] += 1
        os.utime(path, ns=(self.versions[i] * 10**9, self.versions[i] * 10**9))

    def key(self, pick: tuple[int, ...], options: dict[str, Any]) -> Key:
        told = {"layout": "consolidated", "storage": "plain", "dtype": None, **options}
        told.pop("keep_shards", None)
        return (tuple((i, self.versions[i]) for i in pick), tuple(sorted(told.items(), key=str)))

    def undisturbed(self, pick: tuple[int, ...], options: dict[str, Any]) -> Key:
        """The expected result of a build: rows from the sources, files from a build in a new folder."""
        key = self.key(pick, options)
        if key not in self.written:
            self.written[key] = [row for i in pick for row in self.rows[i]]
            self.clean[key] = {}
            if not set(pick) & self.bad:
                fresh = Path(tempfile.mkdtemp(prefix="actshard-fresh-"))
                self.build(pick, {n: v for n, v in options.items() if n != "keep_shards"}, fresh / "c")
                self.clean[key] = files(fresh / "c")
                shutil.rmtree(fresh)
        return key

    def build(self, pick: tuple[int, ...], options: dict[str, Any], out: Path | None = None) -> tokens.TokenCache:
        return tokens.build_cache([self.root / f"{i}.jsonl" for i in pick], out or self.out, format=IDS, **options)

    @rule(i=st.integers(0, 2), bad=st.booleans(), row=st.lists(st.integers(0, 60_000), max_size=4))
    def change_a_source(self, i: int, bad: bool, row: list[int]) -> None:
        self.rows[i].append(row)
        (self.bad.add if bad else self.bad.discard)(i)
        self.write_source(i)

    @rule(name=st.sampled_from(["notes/a.txt", "input_ids/mine", "00000_0_jsonl/mine", "b.txt", "00001_mine/x"]))
    def a_user_puts_a_file(self, name: str) -> None:
        (self.out / name).parent.mkdir(parents=True, exist_ok=True)
        (self.out / name).write_text("mine")
        self.foreign[name] = b"mine"

    @precondition(lambda self: not self.sibling)
    @rule()
    def another_cache_beside(self) -> None:
        with tokens.CacheWriter(self.out / "validation", {"input_ids": np.int32}) as writer:
            writer.append([{"input_ids": [9, 9]}])
        self.foreign |= {f"validation/{name}": data for name, data in files(self.out / "validation").items()}
        self.sibling = True

    @rule(
        pick=picks,
        options=builds,
        overwrite=st.booleans(),
        step=st.one_of(st.just(0), st.integers(1, 120)),
        how=st.sampled_from(["exception", "kill", "beside"]),
    )
    def build_it(self, pick: tuple[int, ...], options: dict[str, Any], overwrite: bool, step: int, how: str) -> None:
        key = self.undisturbed(pick, options)
        held = self.underway or self.cache
        call = {**options, "overwrite": overwrite}
        made: tokens.TokenCache | None = None
        error: BaseException | None = None
        try:
            if step == 0:
                made = self.build(pick, call)
            elif how == "exception":

                def stop() -> None:
                    raise Stopped

                with stopping(step, stop):
                    made = self.build(pick, call)
            else:
                self.in_a_child(pick, call, step, beside=how == "beside")
                error = Stopped()
        except (actshard.ActshardError, Stopped) as caught:
            error = caught
        note(f"{how} {step}: {error!r}")
        if made is not None:
            assert held in (None, key) or overwrite
            assert not set(pick) & self.bad or held == key
            self.cache, self.underway = key, None
            self.same_as_undisturbed(key, pick, options)
            return
        if isinstance(error, Stopped):
            self.stopped.add(key)
            self.look(key)
            return
        self.look(key)
        if isinstance(error, actshard.ExistsError):
            assert held not in (None, key)
            assert not overwrite
        else:
            assert isinstance(error, actshard.FormatError), error
            assert set(pick) & self.bad
            assert self.cache == held
            self.stopped.add(key)

    def in_a_child(self, pick: tuple[int, ...], call: dict[str, Any], step: int, *, beside: bool) -> None:
        """Runs a build in a process killed at a step; with ``beside``, another process builds at the same time."""
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(here)

                def stop() -> None:
                    if beside:
                        os.write(there, b"x")
                        time.sleep(600)
                    os.kill(os.getpid(), signal.SIGKILL)

                with contextlib.suppress(actshard.ActshardError), stopping(step, stop):
                    self.build(pick, call)
            finally:
                os._exit(0)
        os.close(there)
        try:
            if os.read(here, 1):  # the child is paused: before, while or after it holds the lock
                before = files(self.out) if self.out.exists() else {}
                with contextlib.suppress(actshard.FormatError, actshard.ExistsError):
                    try:
                        self.build(pick, {**call, "overwrite": False})
                    except actshard.LockedError:
                        assert files(self.out) == before
        finally:
            os.close(here)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def look(self, key: Key) -> None:
        """Determines which cache is in place after an interrupted build: the old one, the new one, or one being swapped in."""
        old, work = self.underway or self.cache, self.out / ".actshard-build"
        known = [k for k in (old, key) if k is not None and (self.clean[k] or k[0] == "written")]

        def told_by(folder: Path) -> Key:
            own = json.loads((folder / "shard_ledger.json").read_text()).get("actshard")
            # A cache of a CacheWriter has checksums only.
            own = own if own and "settings" in own else None
            (found,) = dict.fromkeys(k for k in known if self.identity(k) == own)
            return found

        self.cache = self.underway = None
        if (self.out / "shard_ledger.json").exists():
            self.cache = told_by(self.out)
        elif (work / "swap.json").exists():
            self.underway = told_by(work / "new")
        else:
            assert old is None, "the cache that was there is gone"
        if self.cache is None and self.out.exists() and not self.sibling:
            with pytest.raises((actshard.UnfinishedError, actshard.MissingFileError)):
                tokens.open_cache(self.out)

    def expected(self, key: Key) -> list[list[int]]:
        return self.written[key]

    def identity(self, key: Key) -> Any:
        return json.loads(self.clean[key]["shard_ledger.json"])["actshard"] if self.clean[key] else None

    def read(self) -> list[list[int]]:
        return [row["input_ids"].tolist() for row in tokens.open_cache(self.out)]

    def same_as_undisturbed(self, key: Key, pick: tuple[int, ...], options: dict[str, Any]) -> None:
        """Compares byte for byte with a build in a new folder, including shards if the layout keeps them."""
        ours = {n: d for n, d in files(self.out).items() if n not in self.foreign}
        if self.stopped - {key}:
            # Shards of an interrupted build of another cache may remain.
            ours = {n: d for n, d in ours.items() if not n.startswith(".actshard-build")}
        plain = {n: d for n, d in ours.items() if not n.startswith("0000") or dict(key[1])["layout"] == "sharded"}
        assert plain == self.clean[key]
        assert actshard.verify(self.out, deep=True).ok
        assert not any(name.startswith(".actshard-build") for name in ours)

    @rule(
        rows=st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=4),
        overwrite=st.booleans(),
        end=st.sampled_from(["close", "close", "abort", "fail", "refused"]),
    )
    def write_it(self, rows: list[list[int]], overwrite: bool, end: str) -> None:
        held = self.underway or self.cache
        there = self.out.exists() and any(self.out.iterdir())
        try:
            writer = tokens.CacheWriter(self.out, {"input_ids": np.int32, "more": np.int32}, overwrite=overwrite)
        except actshard.ExistsError:
            assert there
            assert not overwrite
            return
        assert overwrite or not there
        writer.append([{"input_ids": row, "more": row} for row in rows])
        if end == "refused":
            with pytest.raises(actshard.ArgumentError):
                writer.append([{"input_ids": [1]}])
        if end == "fail":
            original = FieldWriters.append

            def full(self: Any, name: str, *rest: Any) -> None:
                if name == "more":
                    raise actshard.DiskFullError("cannot write: the disk is full")
                original(self, name, *rest)

            FieldWriters.append = full  # type: ignore[method-assign]
            try:
                with pytest.raises(actshard.DiskFullError):
                    writer.append([{"input_ids": [1], "more": [1]}])
            finally:
                FieldWriters.append = original  # type: ignore[method-assign]
            with pytest.raises(actshard.ClosedError):
                writer.append([{"input_ids": [1], "more": [1]}])
            with pytest.raises(actshard.ClosedError):
                writer.close()
        elif end == "abort":
            writer.abort()
        else:
            writer.close()
            key: Key = ("written", len(self.written))
            self.written[key], self.clean[key] = rows, {}
            self.cache, self.underway = key, None
            assert actshard.verify(self.out, deep=True).ok
            return
        assert (self.underway or self.cache) == held

    @invariant()
    def what_is_there_is_whole(self) -> None:
        for name, data in self.foreign.items():
            assert (self.out / name).read_bytes() == data, name
        if self.sibling:
            assert tokens.open_cache(self.out / "validation")[0]["input_ids"].tolist() == [9, 9]
        if self.cache is not None:
            assert self.read() == self.expected(self.cache)
        assert not [p.name for p in self.root.iterdir() if p.name.startswith("out.")]


TestCaches = Caches.TestCase
TestCaches.settings = machine_settings(8, 10_000, steps=12)
