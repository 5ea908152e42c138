"""Shared fixtures: golden datasets, and functions that damage copies of them."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.core
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import actshard
from actshard.formats import registry
from actshard.plan import converting, process
from durations import Durations
from torture import budget

# Processes that tests start would compile every module again, which takes longer than most tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell script; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no fault: neither an example nor the drawing of its data has a time limit. In CI, too, the day's seed counts.
settings.register_profile("actshard", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("actshard")

GOLDEN = Path(__file__).parent / "golden"
SAEV = sorted(p.parent for p in (GOLDEN / "saev").glob("*/expected.npz"))
LMPROBE = sorted(p.parent for p in (GOLDEN / "lmprobe").glob("*/expected.npz"))
SHARED = Path(__file__).parents[2] / "shared"


def saev_dump(variant: Path) -> Path:
    """The dump's folder, at the depth at which its writer created it."""
    return next(variant.rglob("metadata.json")).parent


def bits(array: np.ndarray) -> np.ndarray:
    """Floats as integers of the same bits, for exact comparison."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


@contextmanager
def refuses(
    kind: type[actshard.ActshardError], path: Path | None, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises exactly this error, with this path, in one line, unchanged by pickling."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, repr(error)
    assert error.path == path, repr(error)
    message = str(error)
    assert path is None or str(path).encode("utf-8", "backslashreplace").decode() in message
    assert len(message.splitlines()) == 1, message
    assert message.encode()  # it can be printed
    assert len(error.detail) < 1000
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    for name in ("offset", "reason", "detail", "errno", "filename"):
        assert getattr(back, name, None) == getattr(error, name, None), name
    # The store of a remote location, which may contain secrets, stays behind.
    assert back.path == (error.path if getattr(error.path, "is_local", True) else str(error.path))
    assert str(back) == message


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config))
    if config.getoption("hypothesis_seed") is None:
        hypothesis.core.global_force_seed = budget.seed()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Prints the seed first: a run that is killed has no summary."""
    if (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
        reporter.write_line(f"seed {budget.seed()}: ACTSHARD_SEED={budget.seed()} repeats the random choices")


@pytest.fixture(autouse=True)
def _assumed_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans assume a constant memory of a process, which they would otherwise measure by starting one.

    Tests that are marked ``measures_memory`` measure.
    """
    if not request.node.get_closest_marker("measures_memory"):
        # Not the fixture `monkeypatch`: a test that uses it to change the current folder must be undone at its own place.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "_measure", lambda _: process.UNKNOWN)
            yield
        return
    forget_memory()  # what other tests assumed
    yield
    forget_memory()


def forget_memory() -> None:
    """Clears what this process knows of the memory of tasks."""
    process.importing.cache_clear()
    process._format_memory.cache_clear()
    process._memory_by_key.clear()


@pytest.fixture(autouse=True)
def _no_results_in_the_current_folder() -> Iterator[None]:
    """Plans without ``work=`` write there, and git would add their results."""
    yield
    assert not list(Path.cwd().glob(".actshard-*"))


WITHOUT_PANDAS = """
import sys

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "pandas":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent)
"""
"""A sitecustomize: Python imports it when a process starts."""


@pytest.fixture(scope="module")
def without_pandas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that are started, and plans, find no pandas, as in an environment that has only what actshard needs.

    pyarrow imports pandas where it is installed, when it makes some columns: 30 MB. Plans count them for every task with columns,
    also for one that makes none of these.
    """
    if importlib.util.find_spec("pandas") is None:
        yield
        return
    folder = tmp_path_factory.mktemp("without")
    (folder / "sitecustomize.py").write_text(WITHOUT_PANDAS)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = importlib.util.find_spec

    def forget() -> None:
        process._memory_by_key.clear()
        process.importing.cache_clear()
        process._format_memory.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setattr(converting, "find_spec", lambda name: None if name == "pandas" else found(name))
        forget()
        yield
    forget()


@pytest.fixture(params=["mmap", "pread"])
def io(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def saev_copy(tmp_path: Path) -> Callable[..., Path]:
    """Copies a golden saev dump and changes its metadata or shards.json with functions."""

    def make(
        variant: str = "v21_cls_labels_multishard",
        metadata: Callable[[dict[str, Any]], Any] | None = None,
        shards: Callable[[list[dict[str, Any]]], Any] | None = None,
    ) -> Path:
        source = saev_dump(GOLDEN / "saev" / variant)
        copy = tmp_path / source.name
        shutil.copytree(source, copy)
        for name, change in (("metadata.json", metadata), ("shards.json", shards)):
            if change is not None:
                value = json.loads((copy / name).read_text())
                changed = change(value)
                (copy / name).write_text(json.dumps(value if changed is None else changed))
        return copy

    return make


def rewrite_index(dataset: Path, change: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Rewrites an lmprobe index. `change` receives the table and the lmprobe metadata, and returns the new table."""
    import pyarrow.parquet as pq

    (part,) = (dataset / "index").glob("*.parquet")
    table = pq.read_table(part)
    meta = {k[8:].decode(): json.loads(v) for k, v in table.schema.metadata.items() if k.startswith(b"lmprobe:")}
    table = change(table, meta)
    encoded = {f"lmprobe:{k}".encode(): json.dumps(v).encode() for k, v in meta.items()}
    pq.write_table(table.replace_schema_metadata(encoded), part)


@pytest.fixture
def lmprobe_copy(tmp_path: Path) -> Callable[..., Path]:
    """Copies a golden lmprobe dataset and changes its index with a function."""

    def make(variant: str = "fullseq_f32", change: Callable[[Any, dict[str, Any]], Any] | None = None) -> Path:
        copy = tmp_path / variant
        shutil.copytree(GOLDEN / "lmprobe" / variant, copy)
        if change is not None:
            rewrite_index(copy, change)
        return copy

    return make


@pytest.fixture
def open_all() -> Callable[[Path], list[actshard.Store]]:
    """Opens a dataset in both io modes."""
    return lambda path: [actshard.open(path, io=io) for io in ("mmap", "pread")]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages; formats are looked up anew before and after."""
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.installed.cache_clear()
    yield tmp_path
    registry.installed.cache_clear()
    for name in [name for name in sys.modules if name.endswith("_plugin")]:
        del sys.modules[name]


def install(folder: Path, package: str, source: str, *points: str) -> None:
    """A package with entry points for formats, in a folder on the path (the fixture ``plugins``)."""
    (folder / f"{package}.py").write_text(source)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[actshard.formats]\n" + "\n".join(points) + "\n")
    importlib.invalidate_caches()
