"""Datasets behind a network: a server 30 ms and 100 ms away, with 80 MB/s a connection and 200 MB/s in all.

The server is :mod:`benches.slow_server`, another process of this machine. Peers: s3fs with numpy, obstore, zarr-python with its
object store, huggingface_hub. Every engine has its own connections, which stay open between runs.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from benches import data
from benches.measure import NotPermitted, Row, drop_page_cache, in_child
from benches.sizes import size, turns

LINK = 200e6
TOKENS, D_MODEL, ROWS = size((128, 2_048, 4_096), (8, 64, 64))
ROW = D_MODEL * 4
EXAMPLES = size(256, 32)
"""Of the dataset with one layer: 256 MiB."""
LAYERS = (3, 7)
BATCH, MEMORY = size(4_096, 64), "256MiB"
LATENCIES = size({0.03: 0.9, 0.1: 1.8}, {0.001: 0.9})
"""Latencies in s, each with the longest time of the random rows."""
HUB = {"examples": size(4_096, 512), "layers": (5, 6, 7, 8), "d_model": size(2_048, 64)}


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _made(name: str, make: Callable[[Path], Any]) -> Path:
    folder = data.ROOT / "remote" / name
    if not (folder.with_name(f"{folder.name}.complete")).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(folder)
        (folder.with_name(f"{folder.name}.complete")).touch()
    return folder


def _saev(layers: tuple[int, ...], examples: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        rng = np.random.default_rng(0)
        with actshard.create(folder, "saev", layers=layers, d_model=D_MODEL, num_examples=examples,
                             tokens_per_example=TOKENS) as writer:  # fmt: skip
            for _ in range(examples // 32):
                writer.append(rng.standard_normal((32, len(layers), TOKENS, D_MODEL), np.float32))

    return make


def _zarr(folder: Path) -> None:
    rng = np.random.default_rng(0)
    with actshard.create(folder, "zarr", layers=[7], d_model=D_MODEL, num_examples=EXAMPLES) as writer:
        for _ in range(EXAMPLES // 32):
            writer.append(rng.standard_normal((32, 1, TOKENS, D_MODEL), np.float32))


def _lmprobe(folder: Path) -> None:
    rng, n = np.random.default_rng(0), HUB["examples"]
    columns = {"text": [f"prompt number {i}" for i in range(512)]}
    with actshard.create(folder, "lmprobe", layers=HUB["layers"], d_model=HUB["d_model"], num_examples=n,
                         shard_bytes="16MiB") as writer:  # fmt: skip
        for first in range(0, n, 512):
            columns = {"text": [f"prompt number {i}" for i in range(first, first + 512)]}
            writer.append(
                rng.standard_normal((512, len(HUB["layers"]), 1, HUB["d_model"]), np.float32), columns=columns
            )


class Server:
    """A running slow server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.options = {"endpoint_url": self.url, "anon": True, "region": "us-east-1"}

    def reset(self, **limits: float) -> None:
        """Sets limits and forgets the counts."""
        request = urllib.request.Request(f"{self.url}/_reset", json.dumps(limits).encode(), method="POST")
        urllib.request.urlopen(request).close()

    def stats(self) -> tuple[dict[str, int], int]:
        """Requests by kind, and bytes of bodies, since the last reset."""
        with urllib.request.urlopen(f"{self.url}/_stats") as answer:
            found = json.load(answer)
        return found["requests"], found["bytes"]

    def counted(self, work: Callable[[], Any]) -> tuple[Any, int, int]:
        """The result of some work, its requests and its bytes."""
        self.reset()
        made = work()
        requests, received = self.stats()
        return made, sum(requests.values()), received


@contextmanager
def _server() -> Iterator[Server]:
    command = [sys.executable, "-m", "benches.slow_server", str(data.ROOT / "remote"), "--total", str(LINK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(json.loads(process.stdout.readline())["port"])
        finally:
            process.terminate()


def _open(url: str, **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(url, **options)


LONG_S = 15.0
"""An engine that has taken this long gets no further turns: 4,096 requests of s3fs take seconds."""


def _times(engines: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each engine's runs, which take turns; one more run before is not counted, unless it was a long one."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    spent = dict.fromkeys(engines, 0.0)
    for turn in range(repeats + 1):
        for name, run in engines.items():
            if times[name] and spent[name] > LONG_S:
                continue
            began = time.perf_counter()
            run()
            seconds = time.perf_counter() - began
            spent[name] += seconds
            if turn or seconds > LONG_S:
                times[name].append(seconds)
    return times


def _row(
    what: str, state: str, peer: str, times: dict[str, list[float]], target: str, met: bool | None, note: str
) -> Row:
    ours, theirs = statistics.median(times["actshard"]), statistics.median(times[peer]) if peer in times else None
    return Row(what, state, peer, theirs, ours, "s", theirs / ours if theirs else None, target, met, note,
               {name: sorted(some) for name, some in times.items()})  # fmt: skip


def rows(repeats: int) -> Iterator[Row]:
    """4,096 random rows of 8 KiB, from 256 MiB in one object."""
    folder = next(_made("rows", _saev((7,), EXAMPLES)).glob("*/metadata.json")).parent
    shard, key = next(folder.glob("acts*.bin")), f"rows/{folder.name}"
    rng = np.random.default_rng(1)
    examples, tokens = rng.integers(0, EXAMPLES, ROWS), rng.integers(0, TOKENS, ROWS)
    starts = ((examples * TOKENS + tokens) * ROW).tolist()
    want = np.memmap(shard, np.float32, "r", shape=(EXAMPLES, TOKENS, D_MODEL))[examples, tokens]
    with _server() as server:
        engines: dict[str, Callable[[], Any]] = {}
        store = _open(f"s3://{key}", storage_options=server.options)
        engines["actshard"] = lambda: store.gather(7, examples, tokens)
        if _has("s3fs"):
            import s3fs

            files = s3fs.S3FileSystem(anon=True, endpoint_url=server.url, client_kwargs={"region_name": "us-east-1"})
            paths, ends = [f"{key}/{shard.name}"] * ROWS, [start + ROW for start in starts]
            engines["s3fs + numpy"] = lambda: np.frombuffer(
                b"".join(files.cat_ranges(paths, starts, ends)), np.float32
            ).reshape(ROWS, D_MODEL)
        if _has("obstore"):
            import obstore
            from obstore.store import S3Store

            bucket = S3Store("rows", endpoint=server.url, skip_signature=True, region="us-east-1",
                             client_options={"allow_http": True})  # fmt: skip
            name = f"{folder.name}/{shard.name}"
            engines["obstore get_ranges"] = lambda: np.concatenate(
                [
                    np.frombuffer(x, np.float32)
                    for x in obstore.get_ranges(bucket, name, starts=starts, lengths=[ROW] * ROWS)
                ]
            ).reshape(ROWS, D_MODEL)
        yield from _random("remote: 4,096 random rows (8 KiB) of 256 MiB", server, engines, want, repeats)


def zarr_rows(repeats: int) -> Iterator[Row]:
    """The same from a Zarr store of 256 chunks."""
    folder = _made("zarr", _zarr)
    rng = np.random.default_rng(1)
    examples, tokens = rng.integers(0, EXAMPLES, ROWS), rng.integers(0, TOKENS, ROWS)
    want = actshard.open(folder).gather(7, examples, tokens)
    with _server() as server:
        store = _open("s3://zarr", storage_options=server.options)
        engines: dict[str, Callable[[], Any]] = {"actshard": lambda: store.gather(7, examples, tokens)}
        if _has("zarr") and _has("obstore"):
            import zarr
            from obstore.store import S3Store
            from zarr.storage import ObjectStore

            bucket = S3Store("zarr", endpoint=server.url, skip_signature=True, region="us-east-1",
                             client_options={"allow_http": True})  # fmt: skip
            group: Any = zarr.open_group(ObjectStore(bucket, read_only=True), mode="r")
            array = group["arrays/activations"]
            engines["zarr-python, ObjectStore, whole layer"] = lambda: array[:, 0][examples, tokens]
        yield from _random("remote: 4,096 random rows (8 KiB) of a Zarr store", server, engines, want, repeats)


def _random(what: str, server: Server, engines: dict[str, Any], want: Any, repeats: int) -> Iterator[Row]:
    read = {}
    for name, run in engines.items():
        made, requests, received = server.counted(run)
        if not np.array_equal(made, want):
            raise AssertionError(f"{name} differs")
        read[name] = (requests, received / want.nbytes)
    for latency, target in LATENCIES.items():
        server.reset(latency=latency)
        engines["actshard"]()
        _, requests, received = server.counted(engines["actshard"])
        times = _times(engines, turns(max(2, min(repeats, 5))))
        ours = statistics.median(times["actshard"])
        note = f"{requests} requests, {received / want.nbytes:.1f}x the bytes"
        for name in engines:
            if name != "actshard":
                theirs = f"peer: {read[name][0]} requests, {read[name][1]:.1f}x"
                yield _row(
                    what, f"{latency * 1e3:g} ms", name, times, f"<= {target} s", ours <= target, f"{note}; {theirs}"
                )
        if len(engines) == 1:
            yield _row(what, f"{latency * 1e3:g} ms", "", times, f"<= {target} s", ours <= target, note)


def _epoch(store: actshard.Store, layer: int, epoch: int, options: dict[str, Any]) -> tuple[float, int, float]:
    """Seconds and bytes of an epoch, and the sum of its first column."""
    began, total, first = time.perf_counter(), 0, 0.0
    for batch in store.stream(
        layer, BATCH, tokens="all", shuffle="window", epoch=epoch, reuse=True, memory=MEMORY, **options
    ):
        total += batch.activations.nbytes
        first += float(batch.activations[:, 0].astype(np.float64).sum())
    return time.perf_counter() - began, total, first


def streams(repeats: int) -> Iterator[Row]:
    """A layer of two interleaved ones, 512 MiB, by windows; then again from the cache on disk."""
    folder = next(_made("layers", _saev(LAYERS, 2 * EXAMPLES)).glob("*/metadata.json")).parent
    with _open(str(folder)) as local:
        _, size, want = _epoch(local, LAYERS[0], 0, {})
    cache = Path(tempfile.mkdtemp(prefix="remote-cache", dir=data.ROOT))
    url = f"s3://layers/{folder.name}"
    try:
        with _server() as server:
            for latency in LATENCIES:
                server.reset(latency=latency)
                store = _open(url, storage_options=server.options)
                rates, over, asked = [], 0.0, 0
                for epoch in range(max(1, min(repeats, 3))):
                    (took, got, first), asked, received = server.counted(
                        functools.partial(_epoch, store, LAYERS[0], epoch, {})
                    )
                    if got != size or not np.isclose(first, want):
                        raise AssertionError("other rows than those of the local stream")
                    rates.append(got / took / 1e6)
                    over = max(over, received / size)
                rate = statistics.median(rates)
                state, note = f"{latency * 1e3:g} ms", f"one layer of two, {size / 2**20:.0f} MiB; {asked} requests"
                yield Row("remote: stream of a layer (window)", state, "the link", LINK / 1e6, rate, "MB/s", rate * 1e6 / LINK,
                          ">= 0.9x", rate * 1e6 >= 0.9 * LINK, note, {"actshard": sorted(rates)})  # fmt: skip
                yield Row(
                    "remote: bytes read by that", state, "", None, over, "x the layer's", None, "<= 1.1x", over <= 1.1
                )
            store = _open(url, storage_options=server.options, cache=cache)
            first_epoch = _epoch(store, LAYERS[0], 0, {})[0]
            yield from _cached(server, folder, cache, size, first_epoch, repeats)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _cached(server: Server, folder: Path, cache: Path, size: int, before: float, repeats: int) -> Iterator[Row]:
    """Later epochs, each in a process of its own: from local files and from the cache, both on the disk or in the page cache."""
    for state, target in (("cold", 0.8), ("hot", None)):
        rates: dict[str, list[float]] = {"local": [], "actshard": []}
        sent = 0
        try:
            for _ in range(turns(max(1, min(repeats, 3)))):
                for name, where in (("local", str(folder)), ("actshard", f"s3://layers/{folder.name}")):
                    server.reset()
                    found = in_child("remote", state, where, server.url, str(cache), str(folder))
                    rates[name].append(size / found["seconds"] / 1e6)
                    sent += server.stats()[0].get("range", 0)
        except NotPermitted as why:
            yield Row(
                "remote: a later epoch from the cache",
                state,
                "a local stream",
                None,
                None,
                "MB/s",
                None,
                "",
                None,
                f"skipped: {why}",
            )
            continue
        ours, theirs = statistics.median(rates["actshard"]), statistics.median(rates["local"])
        yield Row("remote: a later epoch from the cache", state, "a local stream", theirs, ours, "MB/s", ours / theirs,
                  f">= {target:g}x" if target else "", ours / theirs >= target if target else None,
                  f"{sent} requests for ranges, to open; the first epoch had {size / before / 1e6:.0f} MB/s", rates)  # fmt: skip


def _child(state: str, where: str, url: str, cache: str, folder: str) -> None:
    """Prints the seconds of one epoch of one layer, after the page cache was emptied or filled."""
    files = [*Path(folder).glob("*.bin"), *Path(cache).rglob("data")]
    if state == "cold":
        drop_page_cache([file for file in files if file.stat().st_size > 1 << 20])
    options = {"endpoint_url": url, "anon": True, "region": "us-east-1"}
    store = _open(where, storage_options=options, cache=cache) if "://" in where else _open(where)
    if state == "hot":
        _epoch(store, LAYERS[0], 1, {})
    print(json.dumps({"seconds": _epoch(store, LAYERS[0], 2, {})[0]}))


def hub(repeats: int) -> Iterator[Row]:
    """One layer of a dataset of the hub, against the download of the repository."""
    folder = _made("hub/lab/acts", _lmprobe)
    layer = HUB["layers"][1]
    want = actshard.open(folder).last_tokens(layer)
    files = [f for f in folder.rglob("*") if f.is_file()]
    of_layer = sum(f.stat().st_size for f in files if f"layer{layer:03}" in f.name)
    whole = sum(f.stat().st_size for f in files)
    with _server() as server:
        server.reset(latency=0.1)
        before = {
            name: os.environ.get(name) for name in ("HF_ENDPOINT", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_XET")
        }
        os.environ.update(HF_ENDPOINT=server.url, HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_XET="1")
        try:
            times: dict[str, list[float]] = {"actshard": [], "hf_hub_download of all files": []}
            for _ in range(max(1, min(repeats, 3))):
                server.reset()
                began = time.perf_counter()
                got = _open("hf://datasets/lab/acts").last_tokens(layer)
                times["actshard"].append(time.perf_counter() - began)
                kinds, received = server.stats()
                if not np.array_equal(got, want):
                    raise AssertionError("the hub's rows differ")
                if _has("huggingface_hub"):
                    times["hf_hub_download of all files"].append(_download(server, folder, files))
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    if not times["hf_hub_download of all files"]:
        del times["hf_hub_download of all files"]
    shards = sum(f"layer{layer:03}" in f.name for f in files)
    note = f"{received / 1e6:.1f} of {whole / 1e6:.0f} MB; {kinds.get('resolve', 0)} resolves for {shards} files and the index"
    met = received <= 1.02 * of_layer + (1 << 20) and kinds.get("resolve", 0) <= shards + 1
    yield _row("remote: one layer of four of a hub dataset", "100 ms", "hf_hub_download of all files", times,
               "the layer's bytes", met, note)  # fmt: skip


def _download(server: Server, folder: Path, files: list[Path]) -> float:
    """Seconds of eight threads that download a repository."""
    code = """
import sys, time, concurrent.futures, huggingface_hub
names, cache = sys.argv[2:], sys.argv[1]
get = lambda name: huggingface_hub.hf_hub_download("lab/acts", name, repo_type="dataset", cache_dir=cache)
began = time.perf_counter()
list(concurrent.futures.ThreadPoolExecutor(8).map(get, names))
print(time.perf_counter() - began)
"""
    with tempfile.TemporaryDirectory(dir=data.ROOT) as cache:
        names = [str(f.relative_to(folder)) for f in files]
        command = [sys.executable, "-W", "ignore", "-c", code, cache, *names]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


OPENING = {"saev": ("rows", 3), "zarr": ("zarr", 8), "lmprobe": ("hub/lab/acts", 4)}
"""A dataset of each format, and the requests that opening it may take."""


def opening(repeats: int) -> Iterator[Row]:
    """Requests to open, with the format detected."""
    _made("rows", _saev((7,), EXAMPLES)), _made("zarr", _zarr), _made("hub/lab/acts", _lmprobe)
    with _server() as server:
        server.reset(latency=0)
        for name, (place, most) in OPENING.items():
            folder = data.ROOT / "remote" / place
            if name == "saev":
                folder = next(folder.glob("*/metadata.json")).parent
            bucket, _, key = str(folder.relative_to(data.ROOT / "remote")).partition("/")
            url = f"s3://{bucket}/{key}".rstrip("/")
            store, requests, received = server.counted(functools.partial(_open, url, storage_options=server.options))
            note = f"{received / 1e3:.1f} KB; {server.stats()[0]}"
            yield Row(f"remote: requests to open, {name}", store.format, "", None, requests, "", None, f"<= {most}",
                      requests <= most, note)  # fmt: skip


if __name__ == "__main__":
    try:
        _child(*sys.argv[1:])
    except NotPermitted as why:
        print(why, file=sys.stderr)
        sys.exit(3)
