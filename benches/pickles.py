"""Pickle shards: inflating one and four shards, random items of twenty plain ones, and memory."""

from __future__ import annotations

import gzip
import pickle
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from benches import data
from benches.measure import Row


def _open(path: Path, **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, **options)


def _everything(path: Path) -> Iterator[Any]:
    """Yields every activation of a folder, in sample order. Opens it anew and verifies checksums."""
    store = _open(path)
    store.token_counts  # noqa: B018 -- reads all shards, in parallel
    for i in range(len(store)):
        for layer in store.layers:
            yield store.sequence(i, layer)


def _loaded(path: Path, opener: Callable[..., Any]) -> Iterator[Any]:
    """Yields the same with the text's load_shard, one shard after another, without verifying checksums."""
    for shard in sorted(path.glob("shard_*")):
        with opener(shard, "rb") as file:
            layers = pickle.load(file)
        for items in zip(*layers.values(), strict=True):
            yield from (item["activation"] for item in items)


def _consume(activations: Iterator[Any]) -> float:
    return sum(float(x[0, 0]) for x in activations)


def inflate(repeats: int) -> Iterator[Row]:
    """Opens and reads one and four .pkl.gz shards of 105 MB; random values, and values rounded to 1/64."""
    from isal import igzip

    for name, what, targets in (
        ("gz1", "one .pkl.gz shard of 105 MB", {"gzip + pickle": 2.5, "isal + pickle": 1.5}),
        ("gz1r", "the same, values rounded to 1/64", {"gzip + pickle": 2.5, "isal + pickle": 1.5}),
        ("gz4", "four such shards", {"gzip + pickle": 4.5}),
    ):
        path = data.pickles(name)
        if not all(np.array_equal(a, b) for a, b in zip(_everything(path), _loaded(path, gzip.open), strict=True)):
            raise AssertionError(f"{name} differs")
        engines: dict[str, Callable[[], Any]] = {
            "gzip + pickle": lambda path=path: _consume(_loaded(path, gzip.open)),
            "isal + pickle": lambda path=path: _consume(_loaded(path, igzip.open)),
            "actshard": lambda path=path: _consume(_everything(path)),
        }
        times: dict[str, list[float]] = {k: [] for k in engines}
        for turn in range(max(4, repeats // 2)):
            for engine, run in engines.items():
                began = time.perf_counter()
                kept = run()
                took = time.perf_counter() - began
                del kept
                if turn:
                    times[engine].append(took)
        medians = {k: statistics.median(v) for k, v in times.items()}
        for peer, target in targets.items():
            ratio = medians[peer] / medians["actshard"]
            yield Row(
                f"pickle: {what}", "hot", peer, medians[peer] * 1e3, medians["actshard"] * 1e3, "ms", ratio, f">= {target:g}x",
                ratio >= target, note="actshard verifies the checksum as well",
                spread={k: sorted(x * 1e3 for x in v) for k, v in times.items()},
            )  # fmt: skip


class TextDataset:
    """The Dataset of the published text: keeps one shard in memory and loads another when needed."""

    def __init__(self, path: Path, layer: int) -> None:
        self.shards = sorted(path.glob("shard_*"))
        self.key = f"layer_{layer}"
        self.index = []
        for s, shard in enumerate(self.shards):
            self.index += [(s, i) for i in range(len(self._load(shard)[self.key]))]
        self.current: tuple[int, Any] = (-1, None)

    @staticmethod
    def _load(shard: Path) -> Any:
        opener: Any = gzip.open if shard.suffix == ".gz" else open
        with opener(shard, "rb") as file:
            return pickle.load(file)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, at: int) -> Any:
        shard, i = self.index[at]
        if shard != self.current[0]:
            self.current = (shard, self._load(self.shards[shard]))
        return self.current[1][self.key][i]["activation"]


def items(repeats: int) -> Iterator[Row]:
    """Random items of 20 plain shards of 105 MB, from the page cache."""
    path = data.pickles("plain20")
    peer, store = TextDataset(path, 0), _open(path)
    n = len(store)
    store.token_counts  # noqa: B018 -- reads every shard, like the peer's constructor
    rng = np.random.default_rng(0)
    for at in rng.integers(0, n, 5).tolist():
        if not np.array_equal(store.sequence(at, 0), peer[at]):
            raise AssertionError("items differ")
    theirs, ours = [], []
    for _ in range(max(3, repeats // 3)):
        few, many = rng.integers(0, n, 20).tolist(), rng.integers(0, n, 500).tolist()
        began = time.perf_counter()
        for at in few:
            peer[at].sum()
        theirs.append((time.perf_counter() - began) / len(few))
        began = time.perf_counter()
        for at in many:
            store.sequence(at, 0).sum()
        ours.append((time.perf_counter() - began) / len(many))
    a, b = statistics.median(theirs), statistics.median(ours)
    yield Row(
        "pickle: a random item of 20 plain shards", "hot", "the text's own Dataset", a * 1e3, b * 1e3, "ms", a / b, ">= 100x",
        a / b >= 100, note="both sum the item's 2 MB",
    )  # fmt: skip


def memory(_: int) -> Iterator[Row]:
    """Memory for reading a .pkl.gz folder besides its output, with a budget of 256 MiB."""
    path = data.pickles("gz4")
    code = (
        "import resource, warnings; warnings.simplefilter('ignore'); import actshard, numpy as np, pyarrow\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6\n"
        "anon = lambda: sum(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith('RssAnon')) * 1024 / 1e6\n"
        "import threading, time; top = [anon()]; stop = []\n"
        "def watch():\n"
        "    while not stop: top[0] = max(top[0], anon()); time.sleep(0.002)\n"
        "threading.Thread(target=watch).start(); before = anon()\n"
        f"s = actshard.open({str(path)!r}, decoded_memory='256MiB')\n"
        "out = np.ones((2000, s.d_model), np.float32); before = anon()\n"
        "e = np.random.default_rng(0).integers(0, len(s), 2000)\n"
        "for layer in s.layers: s.gather(layer, e, -1, out=out)\n"
        "stop.append(1); print(top[0] - out.nbytes / 1e6)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    used = float(done.stdout)
    yield Row(
        "pickle: memory of a .pkl.gz folder", "256 MiB budget", "", None, used, "MB", None, "<= 268 + 64 MB", used <= 268.4 + 64,
        note="anonymous memory of the whole process at its peak, the interpreter included",
    )  # fmt: skip
