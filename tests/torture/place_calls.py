"""What actors do to a folder, each in a child process, and what its datasets contain: for the machine of places."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.torture.doom import NAMING, Doom
from tests.waiting import PATIENCE

import actshard
from actshard import formats

FORMATS = ("zarr", "npy", "lmprobe", "pickle", "saev")
LAYERS, WIDTH = (1, 4), 4
WIDE = 7
"""The version whose last example has values that are too large for float16."""
VERSIONS = range(8)
OPTIONS: dict[str, dict[str, Any]] = {
    "zarr": {},
    "npy": {},
    "lmprobe": {"storage": "full_sequence", "shard_bytes": 100},
    "pickle": {"compress": False, "shard_bytes": 300},
    "saev": {"max_tokens_per_shard": 24},
}
"""Several shards or chunks of few bytes."""
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer": {"layers": [4]},
    "some": {"examples": [0, 2]},
    "narrow": {"dtype": "float16"},
    "bare": {"columns": []},
    "truncate": {"truncate": True},
}
"""Arguments of conversions."""

WORKING = (".actshard", ".parts")
Sequence = tuple[tuple[float, ...], ...]
Snapshot = dict[str, tuple[str, Any]]


@dataclass(frozen=True, repr=False)
class Contents:
    """Everything that a dataset is compared by: the rows of every example and layer, and the column ``label``."""

    format: str
    dtype: str
    layers: tuple[int, ...]
    rows: tuple[tuple[Sequence, ...], ...]
    """Of every example, the rows ``(tokens, d_model)`` of every layer."""
    labels: tuple[int, ...] | None

    def __repr__(self) -> str:
        firsts = [(example[0][0][0], len(example[0])) for example in self.rows]
        return f"<{self.format} {self.dtype} {self.layers} first values and lengths {firsts} labels {self.labels}>"


def array(version: int) -> np.ndarray:
    """The rows of a version: ``(examples, layers, tokens, d_model)``, exact in float16. Versions differ in shape, too."""
    examples, tokens = 3 + version % 3, 2 + version % 2
    shape = (examples, len(LAYERS), tokens, WIDTH)
    e, layer, t, d = np.indices(shape)
    rows = (version * 256 + e * 32 + layer * 16 + t * 2 + d % 2).astype(np.float32)
    if version == WIDE:
        rows[-1] += 1e6
    return rows


def labels(version: int) -> list[int]:
    return [version * 10 + e for e in range(len(array(version)))]


def created(version: int, format: str) -> Contents:
    """What a writer of a version makes."""
    rows = tuple(tuple(_sequence(layer) for layer in example) for example in array(version))
    return Contents(format, "float32", LAYERS, rows, None if format == "saev" else tuple(labels(version)))


def converted(source: Contents, format: str, choice: str) -> Contents | None:
    """What a conversion makes, in plain Python; None if it must refuse: a value is too large for float16."""
    rows, layers, dtype, numbers = source.rows, source.layers, source.dtype, source.labels
    if choice == "layer":
        rows, layers = tuple((example[layers.index(4)],) for example in rows), (4,)
    if choice == "some":
        rows, numbers = (rows[0], rows[2]), None if numbers is None else (numbers[0], numbers[2])
    if choice == "narrow":
        dtype = "float16"
        if any(x > 65504 for example in rows for layer in example for row in layer for x in row):
            return None
    return Contents(format, dtype, layers, rows, None if choice == "bare" or format == "saev" else numbers)


def merged(parts: list[Contents]) -> Contents:
    """What a merge makes."""
    numbers = [part.labels for part in parts]
    together = None if None in numbers else tuple(x for part in numbers for x in part or ())
    rows = tuple(example for part in parts for example in part.rows)
    return Contents(parts[0].format, parts[0].dtype, parts[0].layers, rows, together)


def _sequence(rows: np.ndarray) -> Sequence:
    return tuple(tuple(float(x) for x in row) for row in rows)


def contents(path: Path | str, options: Mapping[str, Any] | None = None) -> tuple[Path, Contents]:
    """Path and contents of the dataset that a path stands for, by the public interface."""
    store = actshard.open(path, storage_options=options)
    rows = tuple(tuple(_sequence(np.asarray(store.sequence(e, n))) for n in store.layers) for e in range(len(store)))
    names = store.table.column_names
    column = store.table["label"].to_pylist() if "label" in names else []
    numbers = None if column.count(None) == len(column) else tuple(map(int, column))  # lmprobe always has this column
    found = Contents(store.format, str(store.dtype), tuple(int(n) for n in store.layers), rows, numbers)
    return Path(store.path), found


# -- what actors do ------------------------------------------------------------------------------------------------


def create(
    path: Path, format: str, version: int, tell: Callable[[Any], None], *, upto: int | None = None, **more: Any
) -> Path | None:
    """Writes a version, one example at a time, and tells how many are safe. ``upto``: leaves it unfinished after so many."""
    about: dict[str, Any] = {"metadata": {"ckpt": f"v{version}"}, **OPTIONS[format], **more}
    writer = actshard.create(path, format, layers=LAYERS, d_model=WIDTH, **about)
    try:
        append(writer, format, version, upto, tell)
    except BaseException:
        writer.abort()
        raise
    if upto is not None and not writer.complete:
        writer.abort()
        return None
    writer.close()
    return Path(writer.path)


def append(writer: actshard.Writer, format: str, version: int, upto: int | None, tell: Callable[[Any], None]) -> None:
    rows, numbers = array(version), labels(version)
    for e in range(
        0 if writer.complete else len(writer), 0 if writer.complete else len(rows) if upto is None else upto
    ):
        writer.append(rows[e : e + 1], columns=None if format == "saev" else {"label": numbers[e : e + 1]})
        tell(writer.flush())


def hold(path: Path, format: str, version: int, go: int, tell: Callable[[Any], None]) -> Path | None:
    """A writer that commits one example, and waits: for ``f`` to finish, or ``a`` to abort."""
    about = {"metadata": {"ckpt": f"v{version}"}, **OPTIONS[format]}
    writer = actshard.create(path, format, layers=LAYERS, d_model=WIDTH, **about)
    append(writer, format, version, 1, tell)
    if os.read(go, 1) != b"f":
        writer.abort()
        return None
    append(writer, format, version, None, tell)
    writer.close()
    return Path(writer.path)


def convert(source: Path, path: Path, format: str, choice: str, **more: Any) -> Path:
    return actshard.convert(source, path, format, **CHOICES[choice], **OPTIONS[format], **more).path


def plan(source: Path, path: Path, format: str, choice: str, file: Path) -> int:
    """Makes and saves a plan; returns its number of tasks."""
    made = actshard.plan.convert(source, path, format, tasks=3, **CHOICES[choice], **OPTIONS[format])
    made.save(file)
    return len(made)


def run(file: Path, task: int) -> bool:
    """Runs a task of a plan; returns whether the plan was committed."""
    return bool(actshard.plan.load(file).run(task).get("committed"))


def commit(file: Path) -> Path:
    return Path(actshard.plan.load(file).commit().path)


def look(paths: list[Path | str], options: Mapping[str, Any] | None = None) -> list[Any]:
    """Of every path, what :func:`contents` returns, or the class of the error."""
    found: list[Any] = []
    for path in paths:
        try:
            found.append(contents(path, None if isinstance(path, Path) else options))
        except actshard.ActshardError as error:
            found.append((type(error), str(error)))
    return found


# -- child processes -----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How a call in a child ended: with a value, an ActshardError, or by a kill; and what it told before."""

    value: Any
    error: type[actshard.ActshardError] | None
    text: str
    killed: bool
    told: list[Any]


class Child:
    """A forked process that works. With ``doom`` it is killed at that number of a call that changes the disk."""

    def __init__(self, work: Callable[[Callable[[Any], None]], Any], doom: int | None = None) -> None:
        gc.freeze()  # garbage collection in the child skips this process's objects
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(read)
                signal.alarm(PATIENCE)
                with os.fdopen(write, "wb", buffering=0) as pipe:
                    _work(work, pipe, doom)
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        self._pipe = os.fdopen(read, "rb")

    def next(self) -> Any:
        """The next value that it tells."""
        kind, value = pickle.load(self._pipe)
        assert kind == "told", value
        return value

    def wait(self) -> Outcome:
        told: list[Any] = []
        last: Any = None
        with self._pipe as pipe, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                kind, value = pickle.load(pipe)
                if kind == "told":
                    told.append(value)
                elif kind == "modules":
                    _import(value)
                else:
                    last = (kind, value)
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return Outcome(None, None, "", True, told)
        assert os.WIFEXITED(status), f"a child died of signal {os.WTERMSIG(status)}"
        assert last is not None, "a child said nothing"
        kind, value = last
        assert kind != "foreign", value
        if kind == "error":
            return Outcome(None, value[0], value[1], False, told)
        return Outcome(value, None, "", False, told)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


def _work(work: Callable[[Callable[[Any], None]], Any], pipe: Any, doom: int | None) -> None:
    warnings.simplefilter("ignore")
    small_blocks()

    def tell(value: Any) -> None:
        pipe.write(pickle.dumps(("told", value)))

    if doom is not None:
        Doom(NAMING, doom)
    last: tuple[str, Any]
    try:
        last = ("done", work(tell))
    except actshard.ActshardError as error:
        last = ("error", (type(error), str(error)))
    except BaseException:
        last = ("foreign", traceback.format_exc()[-4000:])
    pipe.write(pickle.dumps(last))
    pipe.write(pickle.dumps(("modules", sorted(sys.modules))))


def _import(names: list[str]) -> None:
    """Imports what a child imported, for later children."""
    for name in names:
        if name not in sys.modules and name.partition(".")[0] in ("actshard", "numpy", "pyarrow", "pandas"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def small_blocks() -> None:
    """Writers commit after every example, so that kills find something between."""
    from actshard.writing import sink

    sink.COMMIT_BYTES = 1
    for format in FORMATS:
        formats.get(format).target().block_bytes = 64


# -- folders ---------------------------------------------------------------------------------------------------------


def snapshot(root: Path) -> Snapshot:
    """All folders, links with their targets, and files with their bytes."""
    found: Snapshot = {}
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if path.is_symlink():
                found[relative] = ("link", str(path.readlink()))
            elif path.is_dir():
                found[relative] = ("folder", None)
            else:
                found[relative] = ("file", path.read_bytes())
    return found


class Templates:
    """Datasets of each format and version, written once."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="actshard-templates-"))
        self.paths: dict[tuple[str, int], Path] = {}

    def path(self, format: str, version: int) -> Path:
        if (format, version) not in self.paths:
            place = self.root / f"{format}-{version}"
            outcome = Child(partial(create, place, format, version)).wait()
            assert outcome.error is None, outcome.text
            self.paths[format, version] = outcome.value
        return self.paths[format, version]


def is_left(path: str) -> bool:
    """Whether a path is a working file or folder."""
    name = path.rpartition("/")[2]
    return name in WORKING or name.endswith((".part", ".joining")) or name.startswith(".writing-")
