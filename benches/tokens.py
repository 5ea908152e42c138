"""Token caches, compared with Levanter, which runs in its own process and environment (``make bench`` creates it)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from actshard import tokens
from benches import corpus, data
from benches.measure import NotPermitted, Row, drop_page_cache
from benches.sizes import TINY, size
from benches.writing import settle

ROOT = data.ROOT / "tokens"
PYTHON = os.environ.get("LEVANTER_PYTHON", str(Path(__file__).parents[1] / ".venv-levanter" / "bin" / "python"))
SHAPES = ((1024, 32), (1024, 256), (4096, 32), (4096, 256))
SMALL_POOL = 16 << 20
LOOP = 24
"""Batches per run."""
EOS = 1


class Levanter:
    """Levanter's process. It runs one job at a time."""

    def __init__(self, pool: int | None = None) -> None:
        if not Path(PYTHON).exists():
            raise NotPermitted(f"no Levanter at {PYTHON}: `make test-levanter` installs it")
        script = Path(__file__).with_name("levanter_peer.py")
        command = [PYTHON, str(script)] + ([] if pool is None else [str(pool)])
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "LOGLEVEL": "ERROR"}
        self._log = (ROOT / "levanter.log").open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env
        )

    def run(self, what: str, **job: Any) -> tuple[float, str | None]:
        """Runs a job. Returns seconds and the digest of its output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"run": what, **job}, default=_plain) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"Levanter: {answer['error']}")
        return answer["seconds"], answer["digest"]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Levanter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def _digest(arrays: list[Any]) -> str:
    made = hashlib.sha256()
    for array in arrays:
        made.update(np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else np.int64).tobytes())
    return made.hexdigest()


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    made = run()
    return time.perf_counter() - began, made


def _row(
    workload: str,
    state: str,
    peer: str,
    times: dict[str, list[float]],
    amount: float,
    unit: str,
    target: float | None,
    note: str = "",
) -> Row:
    """A row of rates, ``amount`` per second."""
    theirs, ours = (amount / statistics.median(times[name]) for name in ("peer", "actshard"))
    ratio = ours / theirs
    met = None if target is None else ratio >= target
    return Row(
        workload, state, peer, theirs, ours, unit, ratio, f">= {target:g}x" if target else "", met, note, spread=times
    )


def _cache(name: str, **options: Any) -> tokens.TokenCache:
    """The corpus as a cache, built once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tokens.build_cache(corpus.text(), ROOT / name, corpus.tokenizer(), **options)


LIBRARY = """
import json, sys, time
from actshard import tokens
library = tokens.load_tokenizer(sys.argv[2])
with open(sys.argv[1], encoding="utf-8") as file:
    texts = [json.loads(line)["text"] + f" {library.eos_token}" for line in file]
began = time.perf_counter()
library.backend.encode_batch(texts, add_special_tokens=False) and None
print(time.perf_counter() - began)
"""
OURS = """
import sys, time
from actshard import tokens
form = tokens.ChatFormat(chat_template=sys.argv[4]) if len(sys.argv) > 4 else None
began = time.perf_counter()
tokens.build_cache(sys.argv[1], sys.argv[3], sys.argv[2], form)
print(time.perf_counter() - began)
"""


def _alone(code: str, *arguments: Any) -> float:
    """Seconds reported by a separate process, unaffected by earlier runs in this one."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def build(repeats: int) -> list[Row]:
    """Builds caches of text and of conversations: Levanter, the tokenizers library alone, actshard."""
    tokenizer = corpus.tokenizer()
    times: dict[str, list[float]] = {"levanter": [], "library": [], "ours": [], "levanter chat": [], "ours chat": []}
    text, chat = (
        {"source": str(corpus.text()), "tokenizer": tokenizer},
        {"source": str(corpus.chat()), "tokenizer": tokenizer},
    )
    with Levanter() as peer:
        for _ in range(min(repeats, 3)):
            for made in ("built", "built-chat"):
                shutil.rmtree(ROOT / made, ignore_errors=True)
            times["levanter"].append(peer.run("build", out=ROOT / "theirs", **text)[0])
            times["library"].append(_alone(LIBRARY, corpus.text(), tokenizer))
            times["ours"].append(_alone(OURS, corpus.text(), tokenizer, ROOT / "built"))
            times["levanter chat"].append(
                peer.run("build", out=ROOT / "theirs-chat", template=corpus.TEMPLATE, **chat)[0]
            )
            times["ours chat"].append(_alone(OURS, corpus.chat(), tokenizer, ROOT / "built-chat", corpus.TEMPLATE))
    counts = []
    for made, theirs in (("built", "theirs"), ("built-chat", "theirs-chat")):
        ours, other = tokens.open_cache(ROOT / made), tokens.open_cache(ROOT / theirs)
        counts.append(ours.num_tokens / 1e6)
        for name in ours.fields:
            assert np.array_equal(ours.view(name).offsets, other.view(name).offsets)
            assert np.array_equal(ours.view(name).elements(), other.view(name).elements())
    n, m = counts
    return [
        _row("tokens: build text, 100 MB", "1 file", "Levanter", {"peer": times["levanter"], "actshard": times["ours"]}, n, "M tokens/s", 2.2),
        _row("tokens: build text, 100 MB", "1 file", "encode_batch alone", {"peer": times["library"], "actshard": times["ours"]}, n, "M tokens/s", 0.95),
        _row("tokens: build chat, 20,000", "1 file", "Levanter", {"peer": times["levanter chat"], "actshard": times["ours chat"]}, m, "M tokens/s", 2),
    ]  # fmt: skip


def write(repeats: int) -> list[Row]:
    """Writes tokenized rows."""
    cache = _cache("plain32", dtype="int32")
    flat = np.array(cache.view("input_ids").elements(), np.int32)
    ends = cache.view("input_ids").offsets[1:]
    np.save(ROOT / "flat.npy", flat)
    np.save(ROOT / "ends.npy", ends)
    rows = [{"input_ids": np.array(r)} for r in np.split(flat, ends[:-1])]
    times: dict[str, list[float]] = {"peer": [], "actshard": [], "lz4": []}

    def ours(storage: str) -> None:
        with tokens.CacheWriter(ROOT / "written", {"input_ids": np.int32}, storage=storage, overwrite=True) as writer:
            for first in range(0, len(rows), 1024):
                writer.append(rows[first : first + 1024])

    with Levanter() as peer:
        for turn in range(min(repeats, 7) + 1):
            shutil.rmtree(ROOT / "written", ignore_errors=True)
            _quiet()
            theirs = peer.run("write", tokens=ROOT / "flat.npy", ends=ROOT / "ends.npy", out=ROOT / "written-theirs")[0]
            _quiet()
            plain = _timed(lambda: ours("plain"))[0]
            shutil.rmtree(ROOT / "written")
            _quiet()
            packed = _timed(lambda: ours("lz4"))[0]
            if turn:
                for name, seconds in (("peer", theirs), ("actshard", plain), ("lz4", packed)):
                    times[name].append(seconds)
    other = tokens.open_cache(ROOT / "written-theirs")
    assert np.array_equal(other.view("input_ids").elements(), flat)
    made = len(flat) / 1e6
    return [
        _row("tokens: store rows, int32", "plain, durable", "Levanter's writer", times, made, "M tokens/s", 3),
        _row("tokens: store rows, int32", "lz4, durable", "Levanter's writer", {**times, "actshard": times["lz4"]}, made, "M tokens/s", None),
    ]  # fmt: skip


def _quiet() -> None:
    """Waits until written data are on disk and the disk is idle."""
    if not TINY:
        os.sync()
        settle()


def windows(repeats: int) -> list[Row]:
    """Random windows from plain storage and from Levanter's; caches warm, and smaller than the data."""
    made: list[Row] = []
    stored = {"plain int64": _cache("plain64"), "plain int32": _cache("plain32", dtype="int32")}
    lz4_path = _cache("lz4", storage="lz4").path
    memmap = np.load(_flat_file(stored["plain int32"]), mmap_mode="r")
    rng = np.random.default_rng(0)
    with Levanter() as warm, Levanter(SMALL_POOL) as small:
        for length, batch in SHAPES:
            total = len(memmap) // length
            asked = [[rng.integers(0, total, batch) for _ in range(LOOP)] for _ in range(repeats + 2)]
            engines: dict[str, Callable[[Any], tuple[float, Any]]] = {
                "Levanter warm": lambda i, n=length: warm.run("windows", cache=lz4_path, length=n, batches=i),
                "Levanter 16 MB": lambda i, n=length: small.run("windows", cache=lz4_path, length=n, batches=i),
                "numpy": lambda i, n=length: _looped(
                    lambda some: np.stack([memmap[j * n : j * n + n] for j in some.tolist()]), i
                ),
            }
            for name, cache in stored.items():
                dataset = tokens.TokenSeqDataset(cache, length)
                engines[name] = lambda i, d=dataset: _looped(d.get_batch, i)
            large = tokens.TokenSeqDataset(tokens.open_cache(lz4_path, memory="1GiB"), length)
            tiny = tokens.TokenSeqDataset(tokens.open_cache(lz4_path, memory=SMALL_POOL), length)
            # Warm-up: every engine maps all pages and decodes all blocks once.
            for all_at_once in (large, *(tokens.TokenSeqDataset(cache, length) for cache in stored.values())):
                all_at_once.get_batch(np.arange(total))
            assert memmap.sum() > 0
            for first in range(0, total, 512):
                warm.run("windows", cache=lz4_path, length=length, batches=[np.arange(first, min(first + 512, total))])
            engines["lz4 warm"] = lambda i, d=large: _looped(d.get_batch, i)
            engines["lz4 16 MB"] = lambda i, d=tiny: _looped(d.get_batch, i)
            times = _in_turn(engines, asked)
            what, amount = f"tokens: windows L={length} B={batch}", length * batch / 1e6
            for ours_name, peer_name, target in (
                ("plain int64", "Levanter warm", 30),
                ("plain int64", "numpy", 0.5),
                ("plain int32", "numpy", 0.5),
                ("lz4 warm", "Levanter warm", 10),
                ("lz4 16 MB", "Levanter 16 MB", 4),
            ):
                both = {"peer": times[peer_name], "actshard": times[ours_name]}
                made.append(_row(what, ours_name, peer_name, both, amount, "M tokens/s", target))
    return made


def _flat_file(cache: tokens.TokenCache) -> Path:
    path = ROOT / "flat.npy"
    if not path.exists() or np.load(path, mmap_mode="r").shape != (cache.num_tokens,):
        np.save(path, np.array(cache.view("input_ids").elements(), np.int32))
    return path


def _looped(run: Callable[[Any], Any], batches: list[Any]) -> tuple[float, str]:
    """Reads batches one after another, like a training loop. Returns seconds per batch and the digest of the last."""
    made = None
    began = time.perf_counter()
    for indices in batches:
        made = run(indices)
    return (time.perf_counter() - began) / len(batches), _digest([made])


def _in_turn(engines: dict[str, Callable[[Any], tuple[float, Any]]], asked: list[Any]) -> dict[str, list[float]]:
    """Seconds by engine for the same requests, in turn. Outputs are compared. The first two turns are warm-ups."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn, indices in enumerate(asked):
        found = {name: run(indices) for name, run in engines.items()}
        assert len({digest for _, digest in found.values()}) == 1, f"outputs differ: {found}"
        if turn >= 2:
            for name, (seconds, _) in found.items():
                times[name].append(seconds)
    return times


def rows(repeats: int) -> list[Row]:
    """Single rows."""
    plain, lz4 = _cache("plain64"), _cache("lz4", storage="lz4")
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, len(plain), 200).tolist() for _ in range(repeats + 2)]
    held = tokens.open_cache(lz4.path, memory="1GiB")
    held.rows(np.arange(len(held)))
    with Levanter() as peer:

        def ours(cache: tokens.TokenCache, indices: list[int]) -> tuple[float, str]:
            seconds, made = _timed(lambda: [cache[i] for i in indices])
            return seconds / len(indices), _digest([m["input_ids"] for m in made])

        times = _in_turn(
            {
                "peer": lambda i: peer.run("row", cache=lz4.path, indices=i),
                "actshard": lambda i: ours(plain, i),
                "lz4": lambda i: ours(held, i),
            },
            asked,
        )
    micro = {name: [1 / (s * 1e6) for s in seconds] for name, seconds in times.items()}
    made = []
    for state, name, target in (("plain int64", "actshard", 30.0), ("lz4, warm", "lz4", None)):
        theirs, mine = (1 / statistics.median(micro[n]) for n in ("peer", name))
        made.append(
            Row("tokens: one row, cache[i]", state, "Levanter warm", theirs, mine, "us", theirs / mine,
                f">= {target:g}x" if target else "", None if target is None else theirs / mine >= target, spread=times)
        )  # fmt: skip
    return made


def examples(repeats: int) -> list[Row]:
    """Windows and packs as training examples."""
    plain, lz4 = _cache("plain64"), _cache("lz4", storage="lz4")
    chat = tokens.build_cache(
        corpus.chat(),
        ROOT / "chat-lz4",
        corpus.tokenizer(),
        tokens.ChatFormat(chat_template=corpus.TEMPLATE),
        storage="lz4",
    )
    rng = np.random.default_rng(0)
    made = []
    with Levanter() as peer:
        for length in (1024, 4096):
            ours: Any = tokens.CausalLmDataset(tokens.TokenSeqDataset(plain, length), eos_id=EOS)
            asked = [[rng.integers(0, len(ours), 32) for _ in range(LOOP)] for _ in range(repeats + 2)]
            times = _in_turn(
                {
                    "peer": lambda i, n=length: peer.run("causal", cache=lz4.path, length=n, eos=EOS, batches=i),
                    "actshard": lambda i, d=ours: _examples(d, i),
                },
                asked,
            )
            made.append(
                _row(
                    f"tokens: CausalLmDataset L={length} B=32",
                    "plain int64",
                    "Levanter warm",
                    times,
                    length * 32 / 1e6,
                    "M tokens/s",
                    20,
                )
            )
        for what, cache, theirs, length in (
            ("packed", plain, lz4.path, 2048),
            ("packed", plain, lz4.path, 8192),
            ("chat", tokens.open_cache(chat.path, memory="1GiB"), chat.path, 8192),
        ):
            cls: Any = tokens.ChatDataset if what == "chat" else tokens.PackedTokenDataset
            ours = cls(cache, length, loss_mask_padding=False)
            asked = [
                [rng.choice(len(ours), min(32, len(ours)), replace=False) for _ in range(LOOP)]
                for _ in range(repeats + 2)
            ]
            times = _in_turn(
                {
                    "peer": lambda i, n=length, p=theirs, w=what: peer.run(
                        "packed", cache=p, length=n, chat=w == "chat", batches=i
                    ),
                    "actshard": lambda i, d=ours: _examples(d, i),
                },
                asked,
            )
            state = "lz4, warm" if what == "chat" else "plain int64"
            made.append(
                _row(
                    f"tokens: {what} P={length} B=32",
                    state,
                    "Levanter warm",
                    times,
                    length * 32 / 1e6,
                    "M tokens/s",
                    20,
                )
            )
    return made


def _examples(dataset: Any, batches: list[Any]) -> tuple[float, str]:
    batch: Any = None
    began = time.perf_counter()
    for indices in batches:
        batch = dataset.get_batch(indices)
    return (time.perf_counter() - began) / len(batches), _digest([*batch.tokens, *batch.segment_ids])


def plan(repeats: int) -> list[Row]:
    """Packs ten million documents into examples."""
    documents = size(10_000_000, 20_000)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 600, documents)
    folder = ROOT / "plan"
    if not (folder / "shard_ledger.json").exists():
        with tokens.CacheWriter(folder, {"input_ids": np.uint16}, overwrite=True) as writer:
            for some in np.array_split(lengths, 100):
                writer.append_flat({"input_ids": np.zeros(int(some.sum()), np.uint16)}, some)
    few = documents // 20
    np.save(ROOT / "lengths.npy", lengths[:few])
    cache = tokens.open_cache(folder)
    times: dict[str, list[float]] = {"peer": [], "actshard": []}
    with Levanter() as peer:
        for _ in range(min(repeats, 5)):
            seconds, digest = peer.run("plan", lengths=ROOT / "lengths.npy", length=2048)
            times["peer"].append(seconds * documents / few)
            seconds, made = _timed(lambda: tokens.PackedTokenDataset(cache, 2048).pack_ranges)
            times["actshard"].append(seconds)
    cut = int(np.searchsorted(made[:, 1], few, side="right"))
    ours = np.concatenate([made[:cut], [[made[cut, 0], few]]]) if made[cut - 1, 1] < few else made[:cut]
    assert _digest([ours]) == digest, "plans differ"
    return [
        _row(
            "tokens: packing plan, 10 M documents",
            "plain",
            "Levanter, 0.5 M documents",
            times,
            documents / 1e6,
            "M documents/s",
            50,
        )
    ]


def orders(repeats: int) -> list[Row]:
    """Maps many indices through permutations."""
    n, count = size((100_000_000, 10_000_000), (100_000, 10_000))
    few = size(4_000, 100)
    times: dict[str, list[float]] = {name: [] for name in ("feistel", "ours feistel", "block", "ours block")}
    feistel, block = tokens.permutation("feistel", n, 0), tokens.permutation("block", n, 0)
    some, all_of_it = np.arange(count), np.arange(0, n, n // few)[:few]
    with Levanter() as peer:
        for _ in range(min(repeats, 7)):
            seconds, digest = peer.run("feistel", n=n, count=count)
            times["feistel"].append(seconds)
            seconds, made = _timed(lambda: feistel(some))
            times["ours feistel"].append(seconds)
            assert _digest([made]) == digest
            seconds, digest = peer.run("block", n=n, count=few)
            times["block"].append(seconds / few * count)
            seconds, made = _timed(lambda: block(some))
            times["ours block"].append(seconds)
            assert _digest([block(all_of_it)]) == digest
    return [
        _row("tokens: Feistel permutation", "10 M indices", "Levanter's array", {"peer": times["feistel"], "actshard": times["ours feistel"]}, count / 1e6, "M/s", 2),
        _row("tokens: block shuffle", "10 M indices", "Levanter, 4,000", {"peer": times["block"], "actshard": times["ours block"]}, count / 1e6, "M/s", 300),
    ]  # fmt: skip


def shards(repeats: int) -> list[Row]:
    """Opens a cache of 1,113 shards and reads the first window, from a cold page cache."""
    count, per = size((1_113, 40_000), (7, 4_000))
    folder = ROOT / "shards"
    if not (folder / "shard_ledger.json").exists():
        _many_shards(folder, count, per)
    times = []
    state = "cold"
    for turn in range(min(repeats, 5)):
        try:
            drop_page_cache(list(folder.glob("*/input_ids/data/c/0"))[:50])
        except NotPermitted:
            state = "hot"
        code = (
            "import sys, time; from actshard import tokens; import numpy as np; b = time.perf_counter();"
            f"c = tokens.open_cache({str(folder)!r}); w = tokens.TokenSeqDataset(c, 4096).get_batch([{turn * 1000 + size(5, 0)}]);"
            "print(time.perf_counter() - b, int(w[0, 0]))"
        )
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
        times.append(float(done.stdout.split()[0]))
    took = statistics.median(times)
    return [
        Row(
            "tokens: open 1,113 shards, first window",
            state,
            "",
            None,
            took,
            "s",
            None,
            "< 0.5 s",
            took < 0.5,
            spread={"actshard": times},
        )
    ]


def _many_shards(folder: Path, count: int, per: int) -> None:
    from actshard.tokens.ledger import Ledger

    shutil.rmtree(folder, ignore_errors=True)
    names = [f"{i:05d}_part" for i in range(count)]
    for i, name in enumerate(names):
        with tokens.CacheWriter(folder / name, {"input_ids": np.int64}) as writer:
            writer.append_flat({"input_ids": np.arange(per) + i}, np.full(per // 400, 400))
    rows = dict.fromkeys(names, per // 400)
    counts = {name: {"input_ids": per} for name in names}
    Ledger(sum(rows.values()), rows, True, tuple(names), {"input_ids": per * count}, counts, "sharded", {}).write(
        folder
    )


def memory(repeats: int) -> list[Row]:
    """Memory used for reading, besides the batch and the cache budget."""
    made = []
    for name, budget in (("plain64", 0), ("lz4", 64 << 20)):
        _cache(name, storage="lz4" if name == "lz4" else "plain")
        code = (
            "import sys, numpy as np; from actshard import tokens;"
            "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]);"
            f"c = tokens.open_cache({str(ROOT / name)!r}, memory={budget}, io='pread'); d = tokens.TokenSeqDataset(c, 4096);"
            "d.get_batch([0]); open('/proc/self/clear_refs', 'w').write('5'); before = peak();"
            "r = np.random.default_rng(0);"
            "any(d.get_batch(r.integers(0, len(d), 256)) is None for _ in range(60));"
            "print((peak() - before) / 1e3)"
        )
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
        took, most = float(done.stdout), (256 * 4096 * 4 + budget + (64 << 20)) / 1e6
        made.append(
            Row(
                "tokens: memory of random windows",
                f"{name}, pread, {budget >> 20} MiB",
                "",
                None,
                took,
                "MB",
                None,
                f"<= {most:.0f} MB",
                took <= most,
            )
        )
    return made
