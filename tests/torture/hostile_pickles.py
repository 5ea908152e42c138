"""Small pickles that are large to traverse, and a program that reads each of them under limits.

``python hostile_pickles.py FOLDER`` reads every dataset below FOLDER, each in a forked child with an address space limit, and
prints one JSON line per dataset: the result, CPU seconds, and bytes of memory relative to an idle child.
"""

# ruff: noqa: E501
from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ADDRESS_SPACE = 3 << 30
"""Address space above that of the process: room for a mapping of ``decoded_memory``, most of it never touched."""
SECONDS = 600
"""When a child hangs. Processor time is measured: the machine may be busy."""


def dataset(
    folder: Path,
    raw: bytes,
    *,
    samples: int,
    layers: list[int] | None = None,
    gz: bool = False,
    config: dict[str, Any] | None = None,
    stored: bytes | None = None,
) -> None:
    """A folder with one shard and metadata that match it as far as possible."""
    folder.mkdir(parents=True)
    data = stored if stored is not None else gzip.compress(raw, 9) if gz else raw
    name = "shard_0001.pkl.gz" if gz else "shard_0001.pkl"
    (folder / name).write_bytes(data)
    shard = {
        "shard_id": 1, "filename": name, "size_bytes": len(data), "num_samples": samples, "layers": layers or [0],
        "sample_id_range": [0, max(samples - 1, 0)], "compressed": gz, "checksum": "sha256:" + hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    metadata = {
        "version": "1.0", "created_at": "2026-01-01T00:00:00Z", "extraction_config": {"model_name": "m", **(config or {})},
        "shards": [shard], "statistics": {"total_shards": 1, "total_samples": samples},
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata))


# --- opcodes --------------------------------------------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return b"X" + len(raw).to_bytes(4, "little") + raw


def number(n: int) -> bytes:
    return b"J" + n.to_bytes(4, "little", signed=True)


def put(n: int) -> bytes:
    return b"r" + n.to_bytes(4, "little")


def get(n: int) -> bytes:
    return b"j" + n.to_bytes(4, "little")


def array(data: bytes | int, rows: int, width: int, code: str = "f4", order: str = "C") -> bytes:
    """``_frombuffer`` over bytes, or over bytes in the memo."""
    over = get(data) if isinstance(data, int) else b"B" + len(data).to_bytes(4, "little") + data
    return (
        b"cnumpy.core.numeric\n_frombuffer\n(" + over + b"cnumpy\ndtype\n(" + text(code.lstrip("<>")) + b"\x89\x88tR"
        + (b"(K\x03" + text(">" if code.startswith(">") else "<") + b"NNN" + number(-1) + number(-1) + b"K\x00tb")
        + b"(" + number(rows) + number(width) + b"t" + text(order) + b"tR"
    )  # fmt: skip


SAMPLE, ARRAY, TEXT, META, SHARED = range(900, 905)
"""Memo numbers of the four keys and of shared objects."""


def keys() -> bytes:
    """Stores the keys and an array of one row in the memo. Leaves the stack unchanged."""
    made = b"".join(
        text(name) + put(n) + b"0" for name, n in [("sample_idx", SAMPLE), ("text_preview", TEXT), ("metadata", META)]
    )
    return made + array(b"\0" * 16, 1, 4) + put(ARRAY) + b"0"


def item(n: int, more: bytes = b"") -> bytes:
    return b"}(" + get(SAMPLE) + number(n) + text("activation") + get(ARRAY) + more + b"u"


def shard(items: bytes, before: bytes = b"") -> bytes:
    return b"\x80\x04" + keys() + before + b"}(" + text("layer_0") + b"](" + items + b"eu."


def doubled(levels: int, open_: bytes = b"]", kind: bytes = b"(%se") -> bytes:
    """Nested lists ``[x, x]`` that double per level, in the memo as ``SHARED``."""
    made = b"N" + put(SHARED) + b"0"
    for _ in range(levels):
        made += open_ + kind % (get(SHARED) + get(SHARED)) + put(SHARED) + b"0"
    return made


def doubled_dicts(levels: int) -> bytes:
    made = b"N" + put(SHARED) + b"0"
    for _ in range(levels):
        made += b"}(K\x00" + get(SHARED) + b"K\x01" + get(SHARED) + b"u" + put(SHARED) + b"0"
    return made


def cases() -> dict[str, Callable[[Path], None]]:
    """Datasets by name."""
    made: dict[str, Callable[[Path], None]] = {}

    def case(name: str, raw: Callable[[], bytes], **options: Any) -> None:
        made[name] = lambda folder: dataset(folder, raw(), **options)

    meta, shared = get(META), get(SHARED)
    for levels in (24, 26, 40, 60):
        case(f"lists_of_twice_the_same_{levels}", lambda n=levels: shard(item(0, meta + shared), doubled(n)), samples=1)
    case("dicts_of_twice_the_same", lambda: shard(item(0, meta + shared), doubled_dicts(40)), samples=1)
    case("tuples_of_twice_the_same", lambda: shard(item(0, meta + shared), doubled(40, b"", b"(%st")), samples=1)
    case("text_of_twice_the_same", lambda: shard(item(0, get(TEXT) + shared), doubled(40)), samples=1)
    case(
        "field_of_twice_the_same",
        lambda: shard(item(0, meta + b"}" + text("a") + shared + b"s"), doubled(40)),
        samples=1,
    )

    def many_layers(layers: int, samples: int, names: Callable[[int], int] = lambda k: k) -> bytes:
        items = b"](" + b"".join(item(n) for n in range(samples)) + b"e" + put(SHARED) + b"0"
        each = b"".join(text(f"layer_{names(k)}") + get(SHARED) for k in range(layers))
        return b"\x80\x04" + keys() + items + b"}(" + each + b"u."

    case("one_list_under_500_layers", lambda: many_layers(500, 5000), samples=5000, layers=[*range(500)])
    case("one_list_under_2000_layers", lambda: many_layers(2000, 20_000), samples=20_000, layers=[*range(2000)])
    case("one_list_under_layers_that_are_not_listed", lambda: many_layers(2000, 20_000), samples=20_000)
    case("one_list_under_one_key_200000_times", lambda: many_layers(200_000, 5000, lambda k: 0), samples=5000)
    case(
        "many_lists_of_one_large_sample",
        lambda: b"\x80\x04" + keys() + item(0, b"".join(text(f"k{i}") + b"N" for i in range(20_000))) + put(SHARED) + b"0}("
        + b"".join(text("layer_0") + b"]" + get(SHARED) + b"a" for _ in range(40_000)) + b"u.",
        samples=1,
    )  # fmt: skip
    case("many_keys", lambda: b"\x80\x04" + keys() + b"}(" + b"".join(text(f"layer_{k}") + b"]" for k in range(80_000)) + b"u.",
         samples=0, layers=[*range(80_000)])  # fmt: skip
    case(
        "a_long_key_many_times",
        lambda: (
            b"\x80\x04"
            + text("layer_" + "9" * 1_000_000)
            + put(SHARED)
            + b"0}("
            + (get(SHARED) + b"N") * 100_000
            + b"u."
        ),
        samples=1,
    )
    case("one_text_of_1mb_in_every_sample",
         lambda: shard(b"".join(item(n, get(TEXT) + get(SHARED)) for n in range(20_000)), text("x" * 1_000_000) + put(SHARED) + b"0"),
         samples=20_000)  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([k % 256]) for k in range(1000)) + b"e" + put(SHARED) + b"0"
    columns = b"}(" + b"".join(text(f"c{k}") + get(SHARED) for k in range(1000)) + b"u" + put(SHARED + 1) + b"0"
    case("one_list_in_1000_columns",
         lambda: shard(b"".join(item(n, get(META) + get(SHARED + 1)) for n in range(200)), numbers + columns), samples=200)  # fmt: skip
    case("one_list_in_every_sample",
         lambda: shard(b"".join(item(n, get(META) + b"}" + text("a") + get(SHARED) + b"s") for n in range(20_000)), numbers),
         samples=20_000)  # fmt: skip
    case("a_column_for_every_sample",
         lambda: shard(b"".join(item(n, get(META) + b"}" + text(f"c{n}") + b"Ns") for n in range(20_000))), samples=20_000)  # fmt: skip
    buffer = b"B" + (1_000_000).to_bytes(4, "little") + b"\0" * 1_000_000 + put(SHARED) + b"0"
    case("arrays_over_one_buffer_in_metadata",
         lambda: shard(item(0, get(META) + b"](" + b"".join(array(SHARED, 1000, 250) for _ in range(2000)) + b"e"), buffer), samples=1)  # fmt: skip
    case("arrays_of_one_buffer_turned_around",
         lambda: b"\x80\x04" + buffer + b"}(" + text("layer_0") + b"](" + b"".join(
             b"}(" + text("sample_idx") + number(n) + text("activation") + array(SHARED, 250_000 // 10, 10, kind, "F") + b"u"
             for n, kind in enumerate([">f4", "<f4"] * 100)) + b"eu.",
         samples=200)  # fmt: skip
    case("appends_without_end", lambda: shard(item(0, get(META) + b"](" + b"N" * 3_000_000 + b"e")), samples=1)
    case("empty_lists_without_end", lambda: b"\x80\x04" + b"]" * 4_000_000 + b".", samples=1)
    case("marks_without_end", lambda: b"\x80\x04" + b"(" * 4_000_000 + b".", samples=1)
    case("memos_without_end", lambda: b"\x80\x04N" + b"\x94" * 4_000_000 + b".", samples=1)
    case("encoded_over_and_over",
         lambda: b"\x80\x02" + text("x" * 1_000_000) + put(1) + b"0" + (b"c_codecs\nencode\n(" + get(1) + text("latin1") + b"tR0") * 1000 + b".",
         samples=1)  # fmt: skip
    case("a_value_of_4gib_in_a_bomb", lambda: b"", samples=1, gz=True,
         config={"max_seq_length": (1 << 32) - 1, "model_params": {"hidden_size": (1 << 24) - 1}},
         stored=gzip.compress(b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"\0" * (64 << 20), 9))  # fmt: skip
    case("a_bomb_of_arrays", lambda: shard(b"".join(
        b"}(" + text("sample_idx") + number(n) + text("activation") + array(b"\0" * 4_000_000, 1000, 1000) + b"u" for n in range(16))),
        samples=16, gz=True, config={"max_seq_length": 10, "model_params": {"hidden_size": 10}})  # fmt: skip
    case(
        "deep_and_shared_text",
        lambda: shard(item(0, get(TEXT) + get(SHARED)), b"]" + put(SHARED) + b"]" * 60 + b"a" * 60 + b"0"),
        samples=1,
    )
    case("a_list_in_itself", lambda: shard(item(0, get(META) + b"]" + put(SHARED) + get(SHARED) + b"a")), samples=1)
    case(
        "good",
        lambda: pickle.dumps({"layer_0": [{"sample_idx": 0, "activation": _row(), "metadata": {"a": 1}}]}),
        samples=1,
    )
    return made


def _row() -> Any:
    import numpy as np

    return np.ones((2, 3), np.float32)


# --- the reading process --------------------------------------------------------------------------------------------------


def read(folder: Path) -> str:
    """Reads a dataset in every way. Returns "read", or the name of the ActshardError."""
    import actshard

    found = "read"
    try:
        store = actshard.open(folder)
        counts = store.token_counts
        for layer in store.layers[:3]:
            if counts.sum() < 1 << 20:
                store.sequences(range(min(len(store), 1000)), layer)
        _ = store.table
        for _ in store.stream(store.layers[0], 64):
            break
        store.info()
    except actshard.ActshardError as error:
        found = type(error).__name__ if len(str(error).splitlines()) == 1 else "! an error of several lines"
    try:
        actshard.verify(folder, deep=True)
    except actshard.ActshardError as error:
        found += " " + type(error).__name__
    return found


def in_child(work: Callable[[], str]) -> tuple[str, float, int]:
    """Runs ``work`` in a child with limited memory and time. Returns its result, CPU seconds and peak resident size."""
    out, back = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE, size + ADDRESS_SPACE))
            said = work()
        except BaseException as error:
            said = f"! {type(error).__name__}: {error}"[:300]
        os.write(back, said.encode())
        os._exit(0)
    os.close(back)
    until = time.monotonic() + SECONDS
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    said = os.read(out, 1000).decode() if status == 0 else f"! died of signal {status & 127}"
    os.close(out)
    return said, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main(root: Path) -> None:
    import warnings

    import pyarrow  # noqa: F401 -- imported once, before the children are measured

    warnings.simplefilter("ignore")
    folders = sorted(p.parent for p in root.rglob("metadata.json"))
    good = next(p for p in folders if p.name == "good")
    in_child(lambda: read(good))
    read(good)
    _, idle_cpu, idle = in_child(lambda: read(good))
    for folder in folders:
        said, cpu, peak = in_child(lambda folder=folder: read(folder))  # type: ignore[misc]
        print(json.dumps([folder.name, said, max(cpu - idle_cpu, 0.0), peak - idle]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
