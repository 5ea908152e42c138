"""Zarr stores that claim, expand or block, or are damaged: one error, in bounded time and memory."""

from __future__ import annotations

import bz2
import contextlib
import gc
import gzip
import json
import os
import shutil
import struct
import sys
import threading
import types
import warnings
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import _native
from actshard.formats.zarr import package as _zarr_package
from actshard.reading import describing
from conftest import GOLDEN, refuses
from shell import run_script
from torture.chunk_damage import values
from waiting import PATIENCE
from zarr_files import change, write_array, write_store

CODECS = GOLDEN / "zarr_codecs"
MIB = 1 << 20


def opened(path: Path, **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, **options)


def bounded(code: str, *, mib: int = 700) -> str:
    """Output of a program that may map `mib` MiB more than after its imports."""
    before = (
        "import resource, warnings; warnings.simplefilter('ignore'); import actshard, pyarrow, numpy as np\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {mib} * 2**20,) * 2)\n"
        "def tried(f):\n"
        "    try: return f()\n"
        "    except actshard.ActshardError as e: assert len(str(e).splitlines()) == 1; return type(e).__name__\n"
    )
    done = run_script(before + code, ACTSHARD_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def zstd_zeros(size: int) -> bytes:
    """A zstd frame of RLE blocks, four bytes for 128 KiB (RFC 8878, 3.1.1.2)."""
    blocks = size // (128 << 10)
    body = b"".join(
        ((128 << 10) << 3 | 1 << 1 | (i == blocks - 1)).to_bytes(3, "little") + b"\0" for i in range(blocks)
    )
    return b"\x28\xb5\x2f\xfd" + bytes([0x00, 0x38]) + body


def blosc_claiming(size: int) -> bytes:
    return struct.pack("<BBBBIII", 2, 1, 0x21, 1, size, size, 64) + bytes(48)


BOMBS: dict[str, tuple[dict[str, Any], Callable[[], bytes]]] = {
    "gzip": ({"id": "gzip", "level": 1}, lambda: gzip.compress(bytes(8 * MIB)) * 256),
    "zlib": ({"id": "zlib", "level": 1}, lambda: zlib.compress(bytes(1024 * MIB), 1)),
    "bz2": ({"id": "bz2", "level": 9}, lambda: bz2.compress(bytes(16 * MIB)) * 128),
    "zstd": ({"id": "zstd", "level": 1}, lambda: zstd_zeros(2048 * MIB)),
    "blosc": (
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 0, "blocksize": 0},
        lambda: blosc_claiming(2040 * MIB),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("codec", BOMBS)
def test_a_chunk_decodes_to_no_more_than_its_shape_allows(tmp_path: Path, codec: str) -> None:
    compressor, bomb = BOMBS[codec]
    path = write_store(tmp_path / "a.zarr", np.ones((2, 1, 2, 3), "f4"), np.full(2, 2, "<i4"), (1, 1, 2, 3))
    change(path / "arrays/activations/.zarray", lambda m: m | {"compressor": compressor})
    (path / "arrays/activations/0.0.0.0").write_bytes(bomb())
    said = bounded(f"s = actshard.open({str(path)!r}); print(tried(lambda: s.gather(0, 0, 0)))")
    assert said == "FormatError"
    # The small arrays, too.
    write_array(path / "arrays/activations", np.ones((2, 1, 2, 3), "f4"), (1, 1, 2, 3))
    change(path / "arrays/seq_len/.zarray", lambda m: m | {"compressor": compressor})
    (path / "arrays/seq_len/0").write_bytes(bomb())
    assert bounded(f"print(tried(lambda: actshard.open({str(path)!r})))") == "FormatError"


def claims(tmp_path: Path) -> Path:
    return write_store(tmp_path / "a.zarr", np.ones((4, 1, 2, 3), "f4"), None, (1, 1, 2, 3))


def array_of(folder: Path, shape: list[int], chunks: list[int], dtype: str) -> None:
    folder.mkdir()
    meta = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": dtype, "compressor": None, "filters": None}
    (folder / ".zarray").write_text(json.dumps({**meta, "fill_value": 0, "order": "C"}))


ALL = (
    "def all():\n"
    "    s = actshard.open(PATH); s.info(); s.table; s.token_counts.sum(); return 'read'\n"
    "print(tried(all)); r = actshard.verify(PATH); print(len(r.findings) < 100)"
)


@pytest.mark.parametrize(
    ("samples", "shape", "chunks", "dtype"),
    [
        (1 << 22, [1 << 22], [1], "<i4"),
        (1 << 22, [1 << 22], [1 << 22], "<i8"),
        (1 << 30, [1 << 30], [1 << 30], "<i8"),
        ((1 << 31) - 1, None, None, None),
        (1 << 24, [1 << 24], [1], "<i4"),
    ],
)
def test_samples_that_no_file_accounts_for_take_no_time_and_little_memory(
    tmp_path: Path, samples: int, shape: Any, chunks: Any, dtype: Any
) -> None:
    path = claims(tmp_path)
    shutil.rmtree(path / "arrays/activations")
    array_of(path / "arrays/activations", [samples, 1, 2, 3], [1, 1, 2, 3], "<f4")
    if shape:
        array_of(path / "arrays/seq_len", shape, chunks, dtype)
    said = bounded(f"PATH = {str(path)!r}\n{ALL}").split()
    assert said[0] in ("read", "FormatError")
    assert said[1] == "True"


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [([4, 1 << 14, 1 << 14], [4, 1 << 14, 1 << 14]), ([4, 1 << 13, 1 << 11], [1, 1, 1]), ([4, 1 << 40], [1, 1])],
)
def test_columns_that_no_file_accounts_for_are_refused(tmp_path: Path, shape: list[int], chunks: list[int]) -> None:
    path = claims(tmp_path)
    array_of(path / "arrays/column", shape, chunks, "<f8")
    said = bounded(
        f"s = actshard.open({str(path)!r}); print(len(s), tried(lambda: s.table))\nactshard.verify({str(path)!r})"
    )
    assert said == "4 FormatError"


def test_many_columns_share_what_no_file_accounts_for(tmp_path: Path) -> None:
    path = claims(tmp_path)
    for i in range(40):
        array_of(path / f"arrays/column{i}", [4, 1 << 21], [4, 1 << 21], "<f8")
    assert bounded(f"s = actshard.open({str(path)!r}); print(tried(lambda: s.table))", mib=1500) == "FormatError"


def test_small_arrays_without_chunks_are_fill_values(tmp_path: Path) -> None:
    path = claims(tmp_path)
    array_of(path / "arrays/seq_len", [4], [1], "<i4")
    array_of(path / "arrays/label", [4], [2], "<i8")
    change(path / "arrays/seq_len/.zarray", lambda m: m | {"fill_value": 2})
    (path / "arrays/label/1").write_bytes(np.array([7, 8], "<i8").tobytes())
    store = opened(path)
    assert store.token_counts.tolist() == [2, 2, 2, 2]
    assert store.table["label"].to_pylist() == [0, 0, 7, 8]


def test_layers_that_are_only_claimed_are_refused(tmp_path: Path) -> None:
    path = claims(tmp_path)
    change(path / "arrays/activations/.zarray", lambda m: m | {"shape": [4, 1 << 40, 2, 3]})
    assert bounded(f"print(tried(lambda: actshard.open({str(path)!r})))") == "FormatError"


def test_an_inner_chunk_that_is_not_there_is_the_fill_value_whatever_it_claims(tmp_path: Path) -> None:
    path = tmp_path / "claim.zarr"
    rows, width = 1 << 24, 1 << 8  # 16 GiB of float32
    inner = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip", "configuration": {"level": 1}}]
    index = [{"name": "bytes", "configuration": {"endian": "little"}}]
    sharding = {"chunk_shape": [1, 1, rows, width], "codecs": inner, "index_codecs": index, "index_location": "end"}
    meta = {
        "zarr_format": 3,
        "node_type": "array",
        "data_type": "float32",
        "shape": [2, 1, rows, width],
        "fill_value": 1.5,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1, rows, width]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    (path / "arrays/activations/c/1/0/0").mkdir(parents=True)
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    for folder in (path, path / "arrays"):
        (folder / "zarr.json").write_text(json.dumps(group))
    (path / "arrays/activations/zarr.json").write_text(json.dumps(meta))
    # Example 0 has no shard. Example 1's shard contains the inner chunk: an empty gzip member.
    member = gzip.compress(b"")
    (path / "arrays/activations/c/1/0/0/0").write_bytes(member + struct.pack("<QQ", 0, len(member)))
    code = (
        f"s = actshard.open({str(path)!r}); print(float(s.gather(0, 0, 5).ravel()[3]))\n"
        "print(tried(lambda: s.gather(0, 1, 0)))"
    )
    assert bounded(code).split() == ["1.5", "FormatError"]


SPECIAL = {
    "a chunk that is decoded": ("v3_gzip", "arrays/activations/c/0/0/0/0", "sequence"),
    "a shard": ("v3_shards_zstd_start", "arrays/activations/c/0/0/0/0", "sequence"),
    "a chunk of lengths": ("v2_gzip", "arrays/seq_len/0", "open"),
    "attributes": ("v2_gzip", ".zattrs", "open"),
    "attributes of an array": ("v2_gzip", "arrays/activations/.zattrs", "sequence"),
    "texts": ("v2_gzip", "text/prompts.jsonl", "table"),
    "a chunk of strings": ("v2_gzip", "arrays/key/0", "table"),
}


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.parametrize("make", ["fifo", "zero", "folder"])
def test_special_files_are_refused_and_never_waited_for(tmp_path: Path, what: str, make: str) -> None:
    name, inside, _where = SPECIAL[what]
    path = tmp_path / "a.zarr"
    shutil.copytree(CODECS / f"{name}.zarr", path)
    if "strings" in what:
        array_of(path / "arrays/key", [3], [3], "|O")
        change(path / "arrays/key/.zarray", lambda m: m | {"filters": [{"id": "vlen-utf8"}], "fill_value": ""})
    victim = path / inside
    victim.unlink(missing_ok=True)
    victim.parent.mkdir(parents=True, exist_ok=True)
    if make == "fifo":
        os.mkfifo(victim)
    elif make == "zero":
        victim.symlink_to("/dev/zero")
    else:
        victim.mkdir()
    code = (
        f"def read():\n    s = actshard.open({str(path)!r}); s.sequence(0, 0); s.table; return 'read'\n"
        f"print(tried(read)); actshard.verify({str(path)!r}, deep=True)"
    )
    said = bounded(code)
    if what == "attributes of an array":  # ignored by readers
        assert said == "read"
    elif what == "texts" and make == "folder":
        assert said in ("read", "NotAFileError")
    else:
        assert said == "NotAFileError"


def test_a_fill_value_that_is_no_number_of_its_type_is_refused(tmp_path: Path) -> None:
    path = claims(tmp_path)
    array_of(path / "arrays/label", [4], [4], "<i4")
    text = (path / "arrays/label/.zarray").read_text()
    for value in ("1e999", "-1e999", "1.5", "1e30"):
        (path / "arrays/label/.zarray").write_text(text.replace('"fill_value": 0', f'"fill_value": {value}'))
        with refuses(actshard.FormatError, path / "arrays/label/.zarray", "fill_value"):
            _ = opened(path).table
        assert not actshard.verify(path).ok


ODD_JSON: dict[str, tuple[str, type[actshard.ActshardError] | None]] = {
    "an unknown integer beyond float64": ('"other": 1' + "0" * 400, None),
    "an unknown lone surrogate": (r'"other": {"\ud800": "\udfff"}', None),
    "an unknown infinite number": ('"other": [1e999]', actshard.FormatError),
    "a field twice": ('"order": "C"', actshard.FormatError),
    "a separator that is half a character": (r'"dimension_separator": "\ud83d"', actshard.FormatError),
    "a fill value beyond float64": ('"fill_value": 1' + "0" * 400, actshard.FormatError),
    "an integer just below int64": ('"fill_value": -9223372036854775809', actshard.FormatError),
}


@pytest.mark.parametrize("name", ODD_JSON)
def test_json_that_parsers_disagree_on(tmp_path: Path, name: str) -> None:
    """Python's parser reads all of these texts, the core's parser does not."""
    field, kind = ODD_JSON[name]
    path = claims(tmp_path)
    array_of(path / "arrays/label", [4], [4], "<i8")
    own = path / "arrays/label/.zarray"
    text = own.read_text()
    if field.startswith('"fill_value"'):
        text = text.replace('"fill_value": 0, ', "")
    own.write_text(text[:-1] + f", {field}}}")
    if kind is None:
        assert opened(path).table["label"].to_pylist() == [0, 0, 0, 0]
        assert actshard.verify(path).ok
        return
    with refuses(kind, own):
        _ = opened(path).table
    assert not actshard.verify(path).ok


def test_a_fill_value_keeps_the_bits_of_a_nan(tmp_path: Path) -> None:
    path = write_store(tmp_path / "a.zarr", np.ones((4, 1, 2, 3), "f2"), None, (1, 1, 2, 3))
    change(path / "arrays/activations/.zarray", lambda m: m | {"fill_value": "0x7e01"})
    (path / "arrays/activations/2.0.0.0").unlink()
    assert (opened(path).sequence(2, 0).view("<u2") == 0x7E01).all()


def test_links_to_themselves_and_odd_names_are_findings(tmp_path: Path) -> None:
    path = claims(tmp_path)
    chunk = path / "arrays/activations/0.0.0.0"
    chunk.unlink()
    chunk.symlink_to(chunk)
    (path / "arrays/activations/².0.0.0").write_bytes(b"")
    assert not actshard.verify(path).ok
    with pytest.raises(actshard.ActshardError):
        opened(path).sequence(0, 0)


def test_folders_that_cannot_be_listed_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = claims(tmp_path)
    array_of(path / "arrays/seq_len", [4], [4], "<i4")
    scandir = os.scandir

    def denied(folder: Any) -> Any:
        if str(folder).endswith(("activations", "seq_len")):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(actshard.FileAccessError):
        opened(path)
    assert not actshard.verify(path).ok


class TestPackage:
    """Arrays decoded by the zarr package, with a fake package."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setitem(sys.modules, "zarr", types.ModuleType("zarr"))
        path = write_store(tmp_path / "a.zarr", np.ones((2, 1, 4, 3), "f4"), np.full(2, 4, "<i4"), (1, 1, 4, 3))
        change(path / "arrays/activations/.zarray", lambda m: m | {"compressor": {"id": "lz4", "acceleration": 1}})
        return path

    @pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError, SystemExit, actshard.TruncatedFileError])
    def test_an_interrupt_while_decoding_is_not_taken_for_damage(
        self, store: Path, monkeypatch: pytest.MonkeyPatch, raised: Any
    ) -> None:
        def chunk(*_: Any) -> bytes:
            raise raised("stop")

        monkeypatch.setattr(_zarr_package.PackageArray, "_block", chunk)
        for io in ("mmap", "pread"):
            with pytest.raises(raised, match="stop") as caught:
                opened(store, io=io).gather(0, [0, 1, 1], 0)
            assert type(caught.value) is raised

    def test_what_was_raised_while_decoding_is_raised_in_every_thread_and_as_often_as_asked(
        self, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        together = threading.Barrier(48)

        def chunk(*_: Any) -> bytes:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(PATIENCE)
            raise MemoryError("stop")

        monkeypatch.setattr(_zarr_package.PackageArray, "_block", chunk)
        # Separate caches, because threads that share one wait for each other.
        stores = [opened(store) for _ in range(48)]
        with ThreadPoolExecutor(48) as threads:
            errors = [f.exception() for f in [threads.submit(s.gather, 0, 0, 0) for s in stores]]
        assert {type(e) for e in errors} == {MemoryError}
        together.abort()
        monkeypatch.setattr(describing, "_add_rows", lambda *_: None)  # the identity, which a stream compares
        batches = iter(stores[0].stream(0, 2))
        for _ in range(2):
            with pytest.raises(MemoryError, match="stop"):
                next(batches)

    def test_what_was_raised_while_decoding_and_never_asked_for_is_not_kept(
        self, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Raised(MemoryError):
            pass

        kept: list[weakref.ref[Raised]] = []
        called = threading.Event()

        def chunk(*_: Any) -> bytes:
            error = Raised()
            kept.append(weakref.ref(error))
            called.set()
            raise error

        monkeypatch.setattr(_zarr_package.PackageArray, "_block", chunk)
        monkeypatch.setattr(describing, "_add_rows", lambda *_: None)  # the identity, which a stream compares
        batches = iter(opened(store).stream(0, 2))
        assert called.wait(PATIENCE)
        batches.close()  # type: ignore[attr-defined]
        del batches
        _native.looks()  # references dropped by threads without the GIL are released by the next call
        gc.collect()
        assert [error() for error in kept] == [None] * len(kept)

    def test_other_errors_are(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def chunk(*_: Any) -> bytes:
            raise RuntimeError("damaged")

        monkeypatch.setattr(_zarr_package.PackageArray, "_block", chunk)
        with pytest.raises(actshard.FormatError, match="damaged"):
            opened(store).gather(0, 0, 0)

    @pytest.mark.parametrize("codec", ["lzma", "lz4", "gzip", "bz2", "zlib", "zstd"])
    def test_it_is_given_nothing_that_expands(self, store: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
        import lzma

        bomb = {
            "lzma": lambda: lzma.compress(bytes(8 * MIB)),
            "lz4": lambda: struct.pack("<I", 1 << 30) + bytes(50),
            "zstd": lambda: zstd_zeros(8 * MIB),
            "gzip": lambda: gzip.compress(bytes(MIB)),
            "bz2": lambda: bz2.compress(bytes(MIB)),
            "zlib": lambda: zlib.compress(bytes(MIB)),
        }[codec]()
        filters = [{"id": "delta", "dtype": "<f4"}]
        change(store / "arrays/activations/.zarray", lambda m: m | {"compressor": {"id": codec}, "filters": filters})
        (store / "arrays/activations/0.0.0.0").write_bytes(bomb)

        def array(*_: Any) -> Any:
            pytest.fail("the package was asked")

        monkeypatch.setattr(_zarr_package.PackageArray, "_array", array)
        with pytest.raises(actshard.FormatError, match=r"more than|at most"):
            opened(store).gather(0, 0, 0)


def test_a_shard_that_was_replaced_is_read_by_its_own_index(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    shutil.copytree(CODECS / "v3_shards_zstd_crc32c.zarr", path)
    right = values()
    store = opened(path)
    assert np.array_equal(store.gather(0, 0, [0, 1]), right[0, 0, :2])
    folder = path / "arrays/activations/c"
    new = tmp_path / "new"
    new.write_bytes((folder / "1/0/0/0").read_bytes())
    new.replace(folder / "0/0/0/0")
    assert np.array_equal(store.gather(1, 0, [4, 5]), right[1, 1, 4:6])


def test_a_child_forked_beside_decoding_threads_decodes(tmp_path: Path) -> None:
    code = (
        "import os, sys, threading\n"
        f"s = actshard.open({str(CODECS / 'v3_shards_zstd_crc32c.zarr')!r}); stop = False\n"
        "def work():\n"
        "    while not stop: [s.sequence(i, la) for i in range(3) for la in (0, 1)]\n"
        "threads = [threading.Thread(target=work) for _ in range(3)]; [t.start() for t in threads]\n"
        "want = s.sequence(1, 1).tobytes(); bad = 0\n"
        "for _ in range(40):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: os._exit(0 if all(s.sequence(1, 1).tobytes() == want for _ in range(50)) else 1)\n"
        "    bad += os.waitpid(pid, 0)[1] != 0\n"
        "stop = True; [t.join() for t in threads]; print(bad)"
    )
    assert bounded(code, mib=4000) == "0"


def test_threads_share_one_decoding_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zarr", types.ModuleType("zarr"))
    path = write_store(tmp_path / "a.zarr", np.ones((2, 1, 4, 3), "f4"), np.full(2, 4, "<i4"), (1, 1, 4, 3))
    change(path / "arrays/activations/.zarray", lambda m: m | {"compressor": {"id": "lz4", "acceleration": 1}})
    together, calls = threading.Barrier(4), []
    more = threading.Event()

    def chunk(_: Any, indices: list[int], shape: Any) -> bytes:
        calls.append(indices)
        more.wait(0.5)  # the other threads arrive meanwhile; the result does not depend on how many
        return np.ones(shape, "f4").tobytes()

    monkeypatch.setattr(_zarr_package.PackageArray, "_block", chunk)
    store = opened(path)

    def read() -> None:
        together.wait()
        assert (store.gather(0, 0, [0, 1]) == 1).all()

    threads = [threading.Thread(target=read) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert calls == [[0, 0, 0, 0]]


def test_names_and_models_that_are_no_unicode_are_escaped(tmp_path: Path, capsys: Any) -> None:
    path = claims(tmp_path)
    (path / ".zattrs").write_text('{"model_id": "\\ud800", "dataset_name": "\\udfff"}')
    (path / "text").mkdir()
    (path / "text/prompts.jsonl").write_text("".join(f'{{"i": {i}, "\\ud800": "x"}}\n' for i in range(4)))
    store = opened(path)
    about = store.info()
    assert about["model"] == "\\ud800"
    assert about["provenance"]["dataset_name"] == "\\udfff"
    assert store.table["\\ud800"].to_pylist() == ["x"] * 4
    json.dumps(about, ensure_ascii=False).encode()


def test_info_counts_chunk_files() -> None:
    for store, inside in (
        (GOLDEN / "zarr/single_consolidated/activations.zarr", "arrays/activations"),
        (GOLDEN / "zarr/separator_slash/activations.zarr", "arrays/activations"),
        (CODECS / "v3_shards.zarr", "arrays/activations/c"),
    ):
        files = [p for p in (store / inside).rglob("*") if p.is_file() and not p.name.startswith(".")]
        about = opened(store).info()
        assert (about["shards"], about["bytes"]) == (len(files), sum(p.stat().st_size for p in files))


def test_verify_counts_shards_and_misses_those_of_stored_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    shutil.copytree(CODECS / "v3_shards.zarr", path)
    assert actshard.verify(path, deep=True).ok
    (path / "arrays/activations/c/1/0/0/0").unlink()
    report = actshard.verify(path)
    assert [f.code for f in report.findings if f.code == "chunk-missing"] == ["chunk-missing"]


def test_sample_keys_are_one_column_arrays_first(tmp_path: Path) -> None:
    path = claims(tmp_path)
    (path / "text").mkdir()
    (path / "meta").mkdir()
    lines = [{"i": i, "sample_key": f"p{i}", "prompt": f"text {i}"} for i in range(4)]
    (path / "text/prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    index = [{"i": i, "sample_key": f"m{i}"} for i in range(4)]
    (path / "meta/sample_index.jsonl").write_text("".join(json.dumps(x) + "\n" for x in index))
    assert opened(path).table["sample_key"].to_pylist() == ["m0", "m1", "m2", "m3"]
    write_array(path / "arrays/sample_key", np.array([b"k%d" % i for i in range(4)], "S64"), (4,), fill="")
    table = opened(path).table
    assert table["sample_key"].to_pylist() == ["k0", "k1", "k2", "k3"]
    assert table.column_names.count("sample_key") == 1
    assert "prompt" in table.column_names
