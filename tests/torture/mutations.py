"""Damages copies of datasets: each read must return correct values or raise one ActshardError, with bounded time and memory.

Damage is a flipped bit, a truncation, a hole, a repeated or swapped file, a hostile number in JSON, or a special file. The
damaged dataset is opened, read whole, streamed and verified in a forked child with limits on memory and time. *Correct*
values are rows whose bytes are in one of the dataset's files as they are now (decompressed where needed), or zeros where a
format has a fill value. Damaged bytes returned unchanged are correct; anything else is not.

    python -m tests.torture.mutations --each 4000
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute
import pyarrow.parquet  # noqa: F401 -- imported once, not by each child, whose memory is limited
from tests.waiting import PATIENCE

import actshard
from actshard import tokens

GOLDEN = Path(__file__).parents[1] / "golden"
SECONDS, MEMORY = 10, 1 << 30
"""Processor time and memory of a child. It is not the time of day: the machine may be busy."""
_SMALL = 400_000
HOSTILE: list[Any] = [
    0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**30, 0.5, 1e300, 1e999, -1e999, float("nan"),
    None, True, "", "x", "1.1", "\ud800", [], {}, [[]], [0], [10**9], {"x": 1}, "float16", "<f8", ">f4", "|O", "../..", "a" * 999,
]  # fmt: skip


def datasets(format: str) -> list[Path]:
    """Small readable golden datasets of a format."""
    found = []
    for expected in sorted((GOLDEN / format).glob("*/expected.npz")):
        size = sum(p.stat().st_size for p in expected.parent.rglob("*") if p.is_file())
        if size < _SMALL:
            found.append(expected.parent)
    return found


def damage(folder: Path, chance: random.Random) -> str:
    """Damages one file of a dataset. Returns a description."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    small = [p for p in files if p.suffix in (".json", ".jsonl", ".parquet") or p.name.startswith(".z")]
    path = chance.choice(small if small and chance.random() < 0.6 else files)
    name = str(path.relative_to(folder))
    data = bytearray(path.read_bytes())
    kind = chance.choice(
        ["bits", "bits", "cut", "hole", "insert", "json", "json", "json", "swap", "gone", "special", "grow"]
    )
    if kind == "json":
        with contextlib.suppress(ValueError):
            value = json.loads(data)
            where = _change(value, chance)
            path.write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")
            return f"{name}: {where}"
        kind = "bits"
    at = chance.randrange(len(data) + 1)
    if kind == "bits" and data:
        for _ in range(chance.choice([1, 1, 1, 4])):
            at = chance.randrange(len(data))
            data[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "hole" and data:
        end = min(len(data), at + chance.choice([1, 8, 512]))
        data[at:end] = bytes(end - at)
    elif kind == "insert":
        data[at:at] = chance.randbytes(chance.choice([1, 8, 64]))
    elif kind == "grow":
        data += chance.randbytes(chance.choice([1, 16, 4096]))
    elif kind == "swap":
        other = chance.choice(files)
        data = bytearray(other.read_bytes())
        name += f" in place of {other.relative_to(folder)}"
    else:
        path.unlink()
        if kind == "special":
            kind = chance.choice(["folder", "fifo", "zero", "loop", "dangling"])
            if kind == "folder":
                path.mkdir()
            elif kind == "fifo":
                os.mkfifo(path)
            else:
                path.symlink_to({"zero": "/dev/zero", "loop": path.name, "dangling": "nothing-here"}[kind])
        return f"{name}: {kind}"
    path.write_bytes(data)
    return f"{name}: {kind} at {at}"


def _change(value: Any, chance: random.Random) -> str:
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, below in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(below, dict | list) and len(places) < 2000:
                walk(below)

    if isinstance(value, dict | list):
        walk(value)
    if not places:
        raise ValueError("nothing to change")
    node, key = chance.choice(places)
    if chance.random() < 0.15 and isinstance(node, dict):
        del node[key]
        return f"without {key!r}"
    old = node[key]
    close = [old + 1, old - 1, -old, old * 2] if isinstance(old, int) and not isinstance(old, bool) else []
    node[key] = chance.choice(close) if close and chance.random() < 0.5 else chance.choice(HOSTILE)
    return f"{key!r} = {node[key]!r}"[:120]


def _pool(folder: Path) -> bytes | None:
    """The bytes of all files, decompressed; None if a compression is not supported here."""
    parts = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if path.name.endswith(".gz"):
            with contextlib.suppress(OSError, EOFError, ValueError, __import__("zlib").error):
                data = gzip.decompress(data)
        if path.name in (".zarray", ".zmetadata", "zarr.json"):
            text = data.decode("utf-8", "replace")
            if path.name == "zarr.json" or re.search(r'"compressor":\s*[^n\s]', text):
                return None
        parts.append(data)
    return b"\0".join(parts)


def use(path: Path, *, pooled: bool = True) -> list[str]:
    """Reads a dataset in every way. Returns the violations. `pooled`: rows are contiguous in the files."""
    wrong = []
    try:
        store = actshard.open(path)
        pool = _pool(path) if pooled else None
        swapped = store.dtype.newbyteorder()
        for layer in store.layers[:3]:
            count = min(len(store), 40)
            for sequence in store.sequences(range(count), layer) if count else []:
                for row in sequence[:4]:
                    data = np.ascontiguousarray(row).tobytes()
                    other = np.ascontiguousarray(row).astype(swapped).tobytes() if store.dtype.kind == "f" else data
                    # A neighboring chunk may be missing, and filled.
                    data, other = data.strip(b"\0"), other.strip(b"\0")
                    if pool is not None and data not in pool and other not in pool:
                        wrong.append(f"layer {layer}: a row that lies in no file")
                        break
            if count:
                store.last_tokens(layer, range(count))
                for batch, _ in zip(store.stream(layer, 64, memory="4MiB"), range(3), strict=False):
                    assert batch.activations.shape[-1] == store.d_model
        assert len(store.token_counts) == len(store)
        store.table.num_rows  # noqa: B018 -- reads it
        store.info()
    except actshard.ActshardError as error:
        wrong += _ours(error)
    return wrong + _verified(path)


def use_cache(path: Path) -> list[str]:
    """Likewise for a token cache."""
    wrong = []
    try:
        cache = tokens.open_cache(path)
        for start in range(0, min(len(cache), 64), 16):
            cache.rows(range(start, min(start + 16, len(cache))))
        windows = tokens.TokenSeqDataset(cache, 8)
        windows.get_batch(range(min(len(windows), 32)))
    except actshard.ActshardError as error:
        wrong += _ours(error)
    return wrong + _verified(path)


def _verified(path: Path) -> list[str]:
    try:
        actshard.verify(path, deep=True)
    except actshard.ActshardError as error:
        return _ours(error)
    return []


def _ours(error: actshard.ActshardError) -> list[str]:
    if isinstance(error, actshard.InternalError):
        return [f"InternalError: {error}"]
    return [] if len(str(error).splitlines()) == 1 else [f"a message of many lines: {error}"]


def attempt(path: Path, *, cache: bool, pooled: bool = True) -> str:
    """Uses a dataset in a forked child with limited memory and processor time. Returns "" or a violation."""
    shared = mmap.mmap(-1, 1 << 16)
    child = os.fork()
    if child == 0:
        text = ""
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            warnings.simplefilter("ignore")
            np.seterr(all="ignore")
            text = "; ".join(use_cache(path) if cache else use(path, pooled=pooled))
        except BaseException as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
        raw = text.encode("utf-8", "replace")[: (1 << 16) - 5]
        shared[4 : 4 + len(raw)] = raw
        shared[:4] = (len(raw) + 1).to_bytes(4, "little")
        os._exit(0)
    until = time.monotonic() + PATIENCE
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs"
        time.sleep(0.001)
    if os.WIFSIGNALED(found[1]) and os.WTERMSIG(found[1]) == signal.SIGXCPU:
        return f"more than {SECONDS} s of processor time"
    length = int.from_bytes(shared[:4], "little")
    if length == 0:
        return f"ended with status {found[1]:#x}"
    return shared[4 : 3 + length].decode("utf-8", "replace")


def root_of(copy: Path, format: str) -> Path:
    """The folder to open: golden folders contain a dataset at some depth."""
    if format == "levanter":
        for path in sorted(copy.rglob("shard_ledger.json"), key=lambda p: len(p.parts)):
            return path.parent
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in [copy, *sorted((p for p in copy.rglob("*") if p.is_dir()), key=lambda p: len(p.parts))]:
            with contextlib.suppress(actshard.ActshardError):
                actshard.open(path)
                return path
    return copy


FORMATS = ("saev", "lmprobe", "zarr", "pickle", "levanter", "hallulens_v1")


def hunt(format: str, count: int, seed: int, folder: Path) -> list[str]:
    """Damages and uses `count` copies. Returns the violations."""
    chance = random.Random(f"{format} {seed}")
    sources = datasets(format)
    roots = {source: root_of(source, format).relative_to(source) for source in sources}
    wrong = []
    copy = folder / "copy"
    # Rows split over files, or encoded, cannot be searched for. Undamaged datasets show which.
    pooled = {s: not attempt(s / r, cache=format == "levanter") for s, r in roots.items()}
    if not any(pooled.values()):
        return [f"{format}: no undamaged dataset gives right values"]
    for number in range(count):
        source = chance.choice(sources)
        shutil.copytree(source / roots[source], copy, symlinks=True)
        state = chance.random()
        once = random.Random(state)
        done = [
            damage(copy, once) for _ in range(once.choice([1, 1, 1, 2, 3])) if any(p.is_file() for p in copy.rglob("*"))
        ]
        found = attempt(copy, cache=format == "levanter", pooled=pooled[source])
        if found:
            wrong.append(f"{format} {source.name} #{number} ({', '.join(done)}): {found}")
        shutil.rmtree(copy)
    return wrong


def main() -> None:
    """Prints every violation, and a summary line for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=4000, help="damaged copies of each format")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    for format in asked.formats:
        with tempfile.TemporaryDirectory(prefix="actshard-mutations-") as folder:
            wrong = hunt(format, asked.each, asked.seed, Path(folder))
        for line in wrong:
            print(f"VIOLATION {line}", flush=True)
        counts["damaged"] += asked.each
        counts["violations"] += len(wrong)
        print(json.dumps({"format": format, "damaged": asked.each, "violations": len(wrong)}), flush=True)
    print(json.dumps({"format": "all", **counts}), flush=True)
    sys.exit(1 if counts["violations"] else 0)


if __name__ == "__main__":
    main()
