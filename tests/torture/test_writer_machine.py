"""A state machine that writes datasets with calls in any order, and is killed at any time.

The writer runs in a forked child that receives commands through a pipe. Killing it is cheap, and the test process never has a
writer's threads. The expected contents are kept here as plain lists.

Invariants: committed data are stored, bit for bit; a rejected call changes nothing; only ``ActshardError`` is raised; the same
call resumes; a finished dataset reads back completely, and ``verify(deep=True)`` finds no errors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pkgutil
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.torture.budget import CountedMachine, machine_settings
from tests.torture.doom import Doom
from tests.waiting import PATIENCE

import actshard
from actshard.base.request import RECORD

pytestmark = pytest.mark.machine

LAYERS, WIDTH = [3, 7], 4
FORMATS = ("saev", "lmprobe", "zarr", "pickle")
# Imported before forking, because every child would import them again.
for _name in ("numpy.ma", "pyarrow.compute", "pyarrow.parquet"):
    importlib.import_module(_name)
for _format in FORMATS:
    for _module in pkgutil.iter_modules(importlib.import_module(f"actshard.formats.{_format}").__path__):
        with contextlib.suppress(ModuleNotFoundError):  # the codec for the zarr package
            importlib.import_module(f"actshard.formats.{_format}.{_module.name}")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "saev": [{"max_tokens_per_shard": 12}, {"protocol": "2.0", "max_tokens_per_shard": 30}, {"cls_token": True}],
    "lmprobe": [{"shard_bytes": 150}, {"storage": "full_sequence", "shard_bytes": 16}, {"dtype": "float64"}],
    "zarr": [
        {"chunk_tokens": 2},
        {"t_max": 9},
        {"chunk_tokens": 3, "t_max": 7},
        {"dtype": "float16"},
        {"version": 3},
        {"version": 3, "shard_bytes": 200},
        {"version": 3, "shard_bytes": 200, "chunk_tokens": 3, "dtype": "bfloat16"},
        {"version": 3, "shard_bytes": 200, "chunk_tokens": 2, "pack": "lossless"},
        {"version": 3, "pack": "blosc", "dtype": "float16"},
    ],
    "pickle": [
        {"shard_bytes": 200},
        {"compress": False},
        {"compress": False, "shard_bytes": 1},
        {"samples_per_machine": 500},
    ],
}
TEXT = {"lmprobe": "text", "zarr": "prompt", "pickle": "text_preview"}
METADATA: dict[str, list[dict[str, Any]]] = {
    "saev": [{}, {"family": "clip", "ckpt": "é"}],
    "lmprobe": [{}, {"name": "m", "seeds": [1, None, 2.5]}],
    "zarr": [{}, {"model_id": "m", "sizes": (1, 2), "odd": "\ud800"}],
    "pickle": [{}, {"model_name": "m", "model_params": {"a": (1,)}}],
}
COLUMNS: dict[str, Callable[[int], Any]] = {
    "label": lambda i: i % 3,
    "gap": lambda i: None if i % 2 else i,
    "note": lambda i: f"é{i}\n",
    "score": lambda i: i / 7,
    "flag": lambda i: i % 2 == 0,
    "tags": lambda i: [f"t{k}" for k in range(i % 3)],
    "facts": lambda i: {"a": i, "b": [None, "x"][i % 2]},
    "big": lambda i: 2**70 + i,
    "sample_key": lambda i: f"{i:064x}",
    "activations": lambda i: i,
    "nothing": lambda _: None,
}
FINE = {
    "zero-token-example",
    "wide-dtype",
    "zero-row",
    "constant-row",
    "constant-column",
    "zero-column",
    "zero-example",
}


def example(number: int, tokens: int, dtype: str) -> np.ndarray:
    """Rows unique to an example, also in float16."""
    rng = np.random.default_rng(number)
    return rng.standard_normal((len(LAYERS), tokens, WIDTH)).astype(np.float16).astype(dtype)


def serve(pipe: multiprocessing.connection.Connection, call: dict[str, Any]) -> None:
    """The child: creates a writer, executes commands and returns results."""
    warnings.simplefilter("ignore")
    writer: actshard.Writer | None = None
    doom = Doom()
    while True:
        verb, arguments, doom.left = pipe.recv()
        try:
            if verb == "create":
                writer = actshard.create(**call, **arguments)
                answer: Any = writer.complete
            elif verb == "merge":
                answer = actshard.merge(arguments)
            elif verb == "check":
                answer = contents(*arguments)
            else:
                assert writer is not None
                if verb == "append":
                    arguments = as_arrays(arguments)
                answer = getattr(writer, verb)(**arguments)
                if verb == "append":
                    scribble(arguments)
            told = None if writer is None else (len(writer), writer.committed, writer.complete, writer.path)
            pipe.send((None, answer, told))
        except BaseException as error:
            kind = "ours" if isinstance(error, actshard.ActshardError) else type(error).__name__
            told = None if writer is None else (len(writer), writer.committed, writer.complete, writer.path)
            pipe.send(((kind, f"{type(error).__name__}: {error}"), None, told))


def as_arrays(given: Any) -> Any:
    """Columns of plain numbers as arrays, which an append could keep in place of copying them."""
    if isinstance(given, dict):
        return {name: as_arrays(value) if name == "columns" else _array(value) for name, value in given.items()}
    return given


def _array(value: Any) -> Any:
    if isinstance(value, list) and {type(v) for v in value} in ({int}, {float}) and max(map(abs, value)) < 1 << 63:
        return np.array(value)
    return value


def scribble(given: Any) -> None:
    """Overwrites all arrays that were given to an append: callers may reuse them."""
    if isinstance(given, np.ndarray):
        given[...] = 1
    elif isinstance(given, dict | list | tuple):
        for value in given.values() if isinstance(given, dict) else given:
            scribble(value)


def contents(path: Path, names: list[str]) -> tuple[list[list[np.ndarray]], dict[str, list[Any]], list[str]]:
    """Contents of a finished dataset, and findings of verify()."""
    store = actshard.open(path)
    rows = [[np.array(store.sequence(e, layer)) for layer in LAYERS] for e in range(len(store))]
    table = store.table if names else None
    columns = {name: [plain(v) for v in table[name].to_pylist()] for name in names} if table is not None else {}
    found = actshard.verify(path, deep=True).findings
    leftover = [
        f"left over: {p.name}"
        for p in path.rglob(".*")
        if p.name not in (".zgroup", ".zattrs", ".zarray", ".zmetadata", RECORD)
    ]
    return rows, columns, [str(f) for f in found if f.code not in FINE] + leftover


def plain(value: Any) -> Any:
    """A value as given: readers return lists as JSON where types differ between shards, and large integers as decimals."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        value = json.loads(value)
    return int(value) if isinstance(value, Decimal) else value


class Part:
    """One writer's expected dataset."""

    def __init__(self, call: dict[str, Any], first: int) -> None:
        self.call = call
        self.first = first
        self.tokens: list[int] = []
        """Of every example appended."""
        self.safe = 0
        self.complete = False
        self.child: int | None = None
        self.pipe: multiprocessing.connection.Connection | None = None

    def begin(self) -> None:
        assert self.child is None
        ours, theirs = multiprocessing.Pipe()
        gc.freeze()  # garbage collection in the child skips the parent's objects
        self.child = os.fork()
        if self.child == 0:
            try:
                ours.close()
                serve(theirs, self.call)
            finally:
                os._exit(0)
        theirs.close()
        self.pipe = ours

    def ask(self, verb: str, arguments: Any = None) -> tuple[tuple[str, str] | None, Any, Any]:
        answered = self.told(verb, arguments, -1)
        assert answered is not None, f"{verb}({arguments}) killed its process"
        error, answer, told = answered
        assert error is None or error[0] == "ours", f"{verb}({arguments}) raised {error}"
        if told is not None:
            assert told[1] >= self.safe, f"{self.safe} were committed, {told[1]} are"
            self.safe = told[1]
        return error, answer, told

    def told(self, verb: str, arguments: Any, doom: int) -> tuple[tuple[str, str] | None, Any, Any] | None:
        """The reply; None if the process was killed at its call number ``doom``."""
        assert self.pipe is not None
        try:
            self.pipe.send((verb, {} if arguments is None else arguments, doom))
            assert self.pipe.poll(PATIENCE), f"{verb} hangs"
            made: tuple[tuple[str, str] | None, Any, Any] = self.pipe.recv()
        except (EOFError, ConnectionError):
            return None
        return made

    def end(self) -> None:
        if self.child is not None:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            self.child = None
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None


class WriterMachine(CountedMachine):
    """Any format with default options."""

    default = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="actshard-machine-"))
        self.parts: list[Part] = []
        self.merging = False
        self.done = False

    def teardown(self) -> None:
        try:
            self.finish_all()
        finally:
            for part in self.parts:
                part.end()
            shutil.rmtree(self.folder, ignore_errors=True)

    @initialize(
        format=st.sampled_from(FORMATS),
        parts=st.sampled_from([None, None, 2, 3]),
        columns=st.lists(st.sampled_from(sorted(COLUMNS)), max_size=3, unique=True),
        text=st.booleans(),
        tokens=st.integers(2, 5),
        pooled=st.booleans(),
        data=st.data(),
    )
    def begin(
        self,
        format: str,
        parts: int | None,
        columns: list[str],
        text: bool,
        tokens: int,
        pooled: bool,
        data: st.DataObject,
    ) -> None:
        self.format, self.fixed = format, tokens if format == "saev" else 1 if pooled else None
        self.names = [] if format == "saev" else columns
        self.text = text and format != "saev"
        own = {} if self.default else data.draw(st.sampled_from(OPTIONS[format]))
        if pooled and format == "lmprobe":
            own = {k: v for k, v in own.items() if k != "storage"}
        self.dtype = own.get("dtype", "float32")
        self.most = own.get("t_max", 6)
        metadata = data.draw(st.sampled_from(METADATA[format]))
        whole = {
            "path": self.folder / "d",
            "format": format,
            "layers": LAYERS,
            "d_model": WIDTH,
            "metadata": metadata,
            **own,
        }
        self.parts = [
            Part({**whole, "part": None if parts is None else (i, parts)}, 1000 * i) for i in range(parts or 1)
        ]

    # -- actions ----------------------------------------------------------------------------------------------

    def writer(self, index: int) -> Part:
        part = self.parts[index % len(self.parts)]
        if part.child is None and not part.complete:
            self.resume(part)
        return part

    def resume(self, part: Part) -> None:
        part.begin()
        error, complete, told = part.ask("create", {"resume": True})
        assert error is None, error
        assert part.safe <= told[0] <= len(part.tokens), (told, len(part.tokens))
        assert told[0] == told[1]
        del part.tokens[told[0] :]
        part.complete = complete
        if complete:
            assert told[0] == len(part.tokens)
            self.check(part, told[3])

    @precondition(lambda self: self.parts and not self.done)
    @rule(index=st.integers(0, 2), lengths=st.lists(st.integers(0, 6), min_size=0, max_size=6), dense=st.booleans())
    def append(self, index: int, lengths: list[int], dense: bool) -> None:
        part = self.writer(index)
        if part.complete:
            error, _, _ = (
                part.ask("append", self.arguments(part, [2], dense)) if part.child is not None else (True, 0, 0)
            )
            assert error
            return
        lengths = [self.fixed or min(n, self.most) for n in lengths]
        error, _, told = part.ask("append", self.arguments(part, lengths, dense))
        assert error is None, error
        part.tokens += lengths
        assert told[0] == len(part.tokens)

    def arguments(self, part: Part, lengths: list[int], dense: bool) -> dict[str, Any]:
        first = part.first + len(part.tokens)
        arrays = [example(first + k, n, self.dtype) for k, n in enumerate(lengths)]
        made: dict[str, Any] = {"activations": arrays}
        if arrays and self.fixed == 1:
            made["activations"] = np.stack(arrays)[:, :, 0]
        elif arrays and dense:
            padded = np.full((len(arrays), len(LAYERS), max(lengths), WIDTH), 7, arrays[0].dtype)
            for row, array in zip(padded, arrays, strict=True):
                row[:, : array.shape[1]] = array
            made |= {"activations": padded, "lengths": lengths}
        numbers = range(first, first + len(lengths))
        columns = {name: [COLUMNS[name](i) for i in numbers] for name in self.names}
        if self.text:
            columns[TEXT[self.format]] = [f"text {i}" for i in numbers]
        if columns:
            made["columns"] = columns
        return made

    @precondition(lambda self: self.parts and not self.done)
    @rule(
        index=st.integers(0, 2),
        what=st.sampled_from(
            [
                "width",
                "layers",
                "kind",
                "words",
                "names",
                "count",
                "mixed",
                "type",
                "reserved",
                "ids",
                "lengths",
                "tokens",
                "raw",
            ]
        ),
    )
    def append_what_is_refused(self, index: int, what: str) -> None:
        part = self.writer(index)
        if part.complete:
            return
        before = part.ask("__len__")[1]
        n = self.fixed or 3
        good = self.arguments(part, [n, n], dense=False)
        arrays = np.stack([example(0, n, self.dtype)] * 2)
        columns = good.get("columns", {})
        bad: dict[str, dict[str, Any]] = {
            "width": {"activations": arrays[..., :-1]},
            "layers": {"activations": arrays[:, :1]},
            "kind": {"activations": arrays.astype(np.complex64)},
            "words": {"activations": "words"},
            "raw": {"activations": [[1, [2]]]},
            "count": {**good, "columns": {**columns, "label": [1]}},
            "mixed": {**good, "columns": {**columns, "x": [2**70, "a"]}},
            "reserved": {**good, "columns": {**columns, "actshard.tokens": [1, 2]}},
            "ids": {**good, "columns": {**columns, "sample_idx": [1, 1]}},
            "lengths": {**good, "activations": arrays, "lengths": [n + 1, 0]},
        }
        if part.tokens:
            bad["names"] = {**good, "columns": {**columns, "another": [1, 2]}}
            if self.names:
                # Dict columns accept new keys; all other columns keep their first type.
                odd: list[Any] = [3, 4] if self.names[0] == "facts" else [{"odd": {"k": [[1.5]]}}] * 2
                bad["type"] = {**good, "columns": {**columns, self.names[0]: odd}}
            if self.fixed is not None and self.format in ("saev", "lmprobe"):
                bad["tokens"] = {**good, "activations": np.concatenate([arrays] * 2, axis=2)}
        if "t_max" in part.call:
            bad["tokens"] = {**good, "activations": np.zeros((2, len(LAYERS), self.most + 1, WIDTH), self.dtype)}
        if what == "type" and self.names[:1] == ["nothing"]:
            return
        if what == "ids" and self.format not in ("pickle", "saev") and not part.tokens:
            return
        if what not in bad:
            return
        error, _, told = part.ask("append", bad[what])
        assert error is not None, what
        assert told[0] == before == len(part.tokens)

    @precondition(lambda self: self.parts and not self.done)
    @rule(index=st.integers(0, 2))
    def flush(self, index: int) -> None:
        part = self.writer(index)
        if not part.complete:
            error, answer, _ = part.ask("flush")
            assert error is None, error
            assert answer == len(part.tokens) == part.safe

    @precondition(lambda self: self.parts and not self.done)
    @rule(index=st.integers(0, 2))
    def abort_and_resume(self, index: int) -> None:
        part = self.writer(index)
        if not part.complete:
            error, _, told = part.ask("abort")
            assert error is None, error
            assert told[0] == told[1] == len(part.tokens)
            error, _, told = part.ask("create", {"resume": True})
            assert error is None, error
            assert told[0] == told[1] == len(part.tokens)

    @precondition(lambda self: self.parts and not self.done)
    @rule(index=st.integers(0, 2))
    def another_process_is_refused(self, index: int) -> None:
        part = self.writer(index)
        if part.complete:
            return
        other = Part(part.call, 0)
        try:
            other.begin()
            error, _, _ = other.ask("create", {"resume": True})
            assert error is not None
            assert "LockedError" in error[1]
        finally:
            other.end()

    @precondition(lambda self: self.parts and not self.done)
    @rule(index=st.integers(0, 2))
    def kill(self, index: int) -> None:
        self.writer(index).end()

    @precondition(lambda self: self.parts and not self.done)
    @rule(
        index=st.integers(0, 2),
        verb=st.sampled_from(["flush", "close", "close", "abort"]),
        call=st.integers(0, 60),
    )
    def kill_meanwhile(self, index: int, verb: str, call: int) -> None:
        part = self.writer(index)
        if part.complete:
            return
        if verb == "close" and not part.tokens and part.call["part"] is None:
            return
        answered = part.told(verb, None, call)
        if answered is not None:
            error, _, told = answered
            assert error is None, error
            assert told[1] >= part.safe
            part.safe = told[1]
        part.end()

    @precondition(lambda self: self.parts and not self.done)
    @rule(index=st.integers(0, 2))
    def close(self, index: int) -> None:
        part = self.writer(index)
        if part.complete:
            return
        error, _, told = part.ask("close")
        if not part.tokens and part.call["part"] is None:
            assert error is not None
            part.end()
            assert not (self.folder / "d").exists() or not list((self.folder / "d").rglob("*.jsonl"))
            return
        assert error is None, error
        assert told[2]
        assert told[0] == told[1] == len(part.tokens)
        part.complete = True
        self.check(part, told[3])

    # -- expectations --------------------------------------------------------------------------------------

    def check(self, part: Part, path: Path) -> None:
        if part.tokens:
            self.compare(path, [part], part)
        part.end()

    def compare(self, path: Path, parts: list[Part], asked: Part) -> None:
        names = [*self.names, *([TEXT[self.format]] if self.text else [])]
        error, answer, _ = asked.ask("check", (path, names))
        assert error is None, error
        rows, columns, findings = answer
        numbers = [part.first + i for part in parts for i in range(len(part.tokens))]
        tokens = [n for part in parts for n in part.tokens]
        assert len(rows) == len(numbers)
        for found, number, n in zip(rows, numbers, tokens, strict=True):
            wanted = example(number, n, self.dtype)
            for of_layer, expected in zip(found, wanted, strict=True):
                assert of_layer.dtype == expected.dtype
                assert np.array_equal(of_layer, expected), f"example {number}"
        for name in self.names:
            assert columns[name] == [COLUMNS[name](i) for i in numbers], name
        if self.text:
            assert columns[TEXT[self.format]] == [f"text {i}" for i in numbers]
        assert not findings, findings

    def finish_all(self) -> None:
        """Everything that was begun can be finished."""
        if not self.parts or self.done:
            return
        for part in self.parts:
            if part.complete:
                continue
            if part.child is None:
                self.resume(part)
            if not part.complete and not part.tokens and (part.call["part"] is None or part is self.parts[0]):
                error, _, _ = part.ask("append", self.arguments(part, [self.fixed or 2], dense=False))
                assert error is None, error
                part.tokens.append(self.fixed or 2)
            if not part.complete:
                error, _, told = part.ask("close")
                assert error is None, error
                part.complete = True
                self.check(part, told[3])
        if self.parts[0].call["part"] is not None and any(part.tokens for part in self.parts):
            asked = Part({}, 0)
            try:
                asked.begin()
                for call in (3, 8 + sum(len(p.tokens) for p in self.parts) % 17):
                    asked.told("merge", self.folder / "d", call)
                    asked.end()
                    asked.begin()
                asked.end()
                asked.begin()
                error, path, _ = asked.ask("merge", self.folder / "d")
                assert error is None, error
                self.compare(path, self.parts, asked)
            finally:
                asked.end()
        self.done = True


class WriterMachineWithOptions(WriterMachine):
    """Any format with any options."""

    default = False


TestWriterMachine = WriterMachine.TestCase
TestWriterMachine.settings = machine_settings(small=12, large=10_000)
TestWriterMachineWithOptions = WriterMachineWithOptions.TestCase
TestWriterMachineWithOptions.settings = machine_settings(small=12, large=10_000)
