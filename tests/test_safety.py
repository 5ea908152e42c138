"""Nothing that happens around a store, to its files, its process or its threads, makes it crash, leak or lie."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, bits, saev_dump

N, LAYERS, T, D, EPS = 48, (2, 7), 17, 512, 12  # 3.3 MB in 4 shards
SMALL = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")
FULLSEQ = GOLDEN / "lmprobe/fullseq_f32"


def write_saev(root: Path, acts: np.ndarray) -> Path:
    n, layers, tokens, d = acts.shape
    metadata = {
        "family": "clip", "ckpt": "made", "layers": list(LAYERS), "content_tokens_per_example": tokens - 1,
        "cls_token": True, "d_model": d, "n_examples": n, "max_tokens_per_shard": EPS * layers * tokens, "data": "",
        "dataset": "/none", "pixel_agg": "majority", "dtype": "float32", "protocol": "2.1",
    }  # fmt: skip
    # The folder's name is the metadata's hash, as saev names it.
    folder = root / hashlib.sha256(json.dumps(metadata, separators=(",", ":")).encode()).hexdigest()[:8]
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps(metadata))
    shards = []
    for i in range(0, n, EPS):
        name = f"acts{i // EPS:06}.bin"
        acts[i : i + EPS].tofile(folder / name)
        shards.append({"name": name, "n_examples": len(acts[i : i + EPS])})
    (folder / "shards.json").write_text(json.dumps(shards))
    return folder


ACTS = np.random.default_rng(1).standard_normal((N, len(LAYERS), T, D), np.float32)


@pytest.fixture(scope="module")
def shared_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests that only read."""
    return write_saev(tmp_path_factory.mktemp("made"), ACTS)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """For tests that damage it."""
    return write_saev(tmp_path, ACTS)


def large_request_is_right(store: actshard.Store, seed: int = 0) -> bool:
    """2,000 rows of 2 kB: large enough for the thread pool."""
    rng = np.random.default_rng(seed)
    e, t = rng.integers(0, N, 2_000), rng.integers(-T, T, 2_000)
    return all(np.array_equal(bits(store.gather(x, e, t)), bits(ACTS[e, g, t])) for g, x in enumerate(LAYERS))


def child(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


# Views


def test_saev_sequence_is_a_read_only_view_of_the_map(shared_dataset: Path) -> None:
    store = actshard.open(shared_dataset, io="mmap")
    first, again = store.sequence(13, 7), store.sequence(13, 7)
    assert first.ctypes.data == again.ctypes.data
    assert not first.flags.owndata
    assert not first.flags.writeable
    assert first.flags.c_contiguous
    with pytest.raises(ValueError, match="WRITEABLE"):
        first.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        first += 1
    assert memoryview(first).readonly
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(shared_dataset) in line]
    spans = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in mapped]
    assert any(low <= first.ctypes.data and first.ctypes.data + first.nbytes <= high for low, high in spans)


def test_every_one_token_prompt_of_lmprobe_is_a_read_only_view() -> None:
    store = actshard.open(FULLSEQ, io="mmap")
    ones = np.flatnonzero(store.token_counts == 1).tolist()
    assert ones
    for layer in store.layers:
        for e in ones:
            view = store.sequence(e, layer)
            assert view.ctypes.data == store.sequence(e, layer).ctypes.data
            assert not view.flags.writeable
            assert np.array_equal(bits(view), bits(store.last_tokens(layer, [e])))


@pytest.mark.parametrize("end", ["close", "drop", "with", "deleted files"])
def test_views_outlive_the_store_and_its_files(dataset: Path, end: str) -> None:
    store = actshard.open(dataset, io="mmap")
    views = [store.sequence(e, 2) for e in range(N)]
    if end == "close":
        store.close()
    elif end == "with":
        with store:
            pass
    elif end == "deleted files":
        shutil.rmtree(dataset)
    del store
    gc.collect()
    parts = [view[1:, ::2] for view in views]
    assert all(np.array_equal(bits(view), bits(ACTS[e, 0])) for e, view in enumerate(views))
    del views
    gc.collect()  # a slice of a view keeps the map too
    assert all(np.array_equal(bits(part), bits(ACTS[e, 0, 1:, ::2])) for e, part in enumerate(parts))


def test_maps_go_when_the_last_view_goes(dataset: Path) -> None:
    def maps() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count(str(dataset))

    store = actshard.open(dataset, io="mmap")
    view = store.sequence(0, 2)
    store.close()
    del store
    assert maps() == 1
    del view
    assert maps() == 0


def test_pread_gives_copies_that_belong_to_the_caller(shared_dataset: Path) -> None:
    for path, layer, example in ((shared_dataset, 7, 3), (FULLSEQ, 0, 0)):
        store = actshard.open(path, io="pread")
        first = store.sequence(example, layer)
        want = first.copy()
        assert first.flags.writeable
        assert not np.shares_memory(first, store.sequence(example, layer))
        first[:] = 0
        assert np.array_equal(bits(store.sequence(example, layer)), bits(want))


def test_gathered_rows_are_copies_in_both_modes(shared_dataset: Path, io: str) -> None:
    store = actshard.open(shared_dataset, io=io)
    big = [np.arange(N)[:, None], np.arange(T)[None]]
    for read in (
        lambda: store.gather(2, 0, 0),
        lambda: store.gather(2, np.tile(big[0], (12, 1)), big[1]),  # large outputs are recycled memory
        lambda: store.last_tokens(2),
        lambda: store.sequences([1, 0], 2)[1],
    ):
        kept = read()
        want = kept.copy()
        other = read()
        assert kept.flags.writeable
        assert not np.shares_memory(kept, other)
        other[:] = 7
        assert np.array_equal(bits(kept), bits(want))


def test_memory_of_a_large_output_is_not_reused_while_a_slice_of_it_lives(shared_dataset: Path) -> None:
    store = actshard.open(shared_dataset)
    e, t = np.zeros(6_000, int), np.zeros(6_000, int)
    part = store.gather(2, e, t)[5_999]
    for x in range(1, 6):
        store.gather(2, e + x, t)
    assert np.array_equal(bits(part), bits(ACTS[0, 0, 0]))


# Files that change


TRUNCATED = """
import os, sys, numpy as np, actshard
folder, io, shard, size, touch = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "touched"
layer = int(sys.argv[6])
store = actshard.open(folder, io=io)
n = store.num_examples
if touch:
    store.last_tokens(layer)
    store.sequences(range(n), layer)
os.truncate(shard, size)
everything = np.repeat(np.arange(n), store.token_counts)
tokens = np.concatenate([np.arange(x) for x in store.token_counts])
wrong = []
for name, read in {
    "gather": lambda: store.gather(layer, everything, tokens),
    "gather out": lambda: store.gather(layer, everything, tokens, out=bytearray(len(tokens) * store.d_model * 4)),
    "gather dtype": lambda: store.gather(layer, everything, tokens, dtype="float64"),
    "sequence": lambda: [store.sequence(e, layer) for e in range(n)],
    "last_tokens": lambda: store.last_tokens(layer),
    "sequences": lambda: store.sequences(range(n), layer),
}.items():
    try:
        read()
        wrong.append(f"{name}: no error")
    except actshard.TruncatedFileError as error:
        if not (isinstance(error, actshard.FormatError) and isinstance(error, EOFError)):
            wrong.append(f"{name}: {type(error).__mro__}")
        if os.path.basename(shard) not in str(error):
            wrong.append(f"{name}: {error}")
    except BaseException as error:
        wrong.append(f"{name}: {error!r}")
print(wrong or "all refused")
"""


@pytest.mark.parametrize(
    ("size", "touched"), [(0, "touched"), (4096, "untouched"), (EPS * len(LAYERS) * T * D * 4 - 1, "touched")]
)
def test_saev_shard_truncated_after_open_is_an_error_wherever_it_is_read(
    dataset: Path, io: str, size: int, touched: str
) -> None:
    done = child(TRUNCATED, dataset, io, dataset / "acts000001.bin", size, touched, 7)
    assert (done.returncode, done.stdout) == (0, "all refused\n"), done.stderr


def test_lmprobe_shard_truncated_after_use_is_an_error_wherever_it_is_read(tmp_path: Path, io: str) -> None:
    # The last tokens' shard, whose one-token prompts are views.
    copy = tmp_path / "copy"
    shutil.copytree(FULLSEQ, copy)
    shard = copy / "tensors/hidden_layer003_shard000.safetensors"
    done = child(TRUNCATED, copy, io, shard, 900, "touched", 3)
    assert (done.returncode, done.stdout) == (0, "all refused\n"), done.stderr


def test_shards_deleted_or_replaced_after_first_use_still_read(dataset: Path) -> None:
    store = actshard.open(dataset, io="mmap")
    assert large_request_is_right(store)
    (dataset / "acts000000.bin").unlink()
    (dataset / "new").write_bytes(bytes((dataset / "acts000001.bin").stat().st_size))
    (dataset / "new").rename(dataset / "acts000001.bin")
    (dataset / "new").write_bytes(b"short")
    (dataset / "new").rename(dataset / "acts000002.bin")
    assert large_request_is_right(store, 1)
    assert np.array_equal(bits(store.sequence(EPS, 2)), bits(ACTS[EPS, 0]))


# Processes


@pytest.mark.parametrize("depth", [1, 2])
def test_forked_children_gather_with_their_own_threads(shared_dataset: Path, io: str, depth: int) -> None:
    store = actshard.open(shared_dataset, io=io)
    assert large_request_is_right(store)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a hang becomes a signal
        try:
            right = large_request_is_right(store, 1)
            if depth == 2:
                grandchild = os.fork()
                if grandchild == 0:
                    signal.alarm(20)
                    os._exit(0 if large_request_is_right(store, 2) else 1)
                right &= os.waitpid(grandchild, 0)[1] == 0
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert large_request_is_right(store, 3)


def test_fork_while_threads_gather_leaves_the_child_working(shared_dataset: Path) -> None:
    code = """
import os, sys, signal, threading, warnings
sys.path.insert(0, sys.argv[2])
import actshard, test_safety
store = actshard.open(sys.argv[1])
stop = threading.Event()
def work():
    while not stop.is_set():
        assert test_safety.large_request_is_right(store)
threads = [threading.Thread(target=work) for _ in range(3)]
[t.start() for t in threads]
statuses = []
for seed in range(5):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if test_safety.large_request_is_right(store, seed) else 1)
    statuses.append(os.waitpid(pid, 0)[1])
stop.set()
[t.join() for t in threads]
print(statuses)
"""
    done = child(code, shared_dataset, Path(__file__).parent)
    assert done.stdout == "[0, 0, 0, 0, 0]\n", done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pool_workers_gather_from_a_pickled_store(shared_dataset: Path, method: str) -> None:
    stores = [actshard.open(shared_dataset, io=io) for io in ("mmap", "pread")]
    assert all(large_request_is_right(store) for store in stores)
    with multiprocessing.get_context(method).Pool(2) as pool:
        jobs = pool.starmap_async(large_request_is_right, [(store, seed) for store in stores for seed in range(3)])
        assert jobs.get(timeout=60) == [True] * 6


@pytest.mark.parametrize("asked", ["mmap", "pread", "auto"])
def test_pickle_keeps_path_format_and_io(shared_dataset: Path, asked: str) -> None:
    store = actshard.open(shared_dataset, io=asked)
    store.close()  # a closed store pickles as what it was opened from
    back = pickle.loads(pickle.dumps(store))
    assert (back.path, back.format, back.io) == (store.path, store.format, store.io)
    assert (back.layers, back.d_model, len(back)) == (store.layers, store.d_model, len(store))
    assert back.__reduce__() == store.__reduce__()
    assert large_request_is_right(back)


def test_pickled_store_whose_dataset_is_gone_is_a_missing_file(dataset: Path) -> None:
    data = pickle.dumps(actshard.open(dataset))
    shutil.rmtree(dataset)
    with pytest.raises(actshard.MissingFileError):
        pickle.loads(data)


def test_eight_threads_gather_at_once(shared_dataset: Path, io: str) -> None:
    store = actshard.open(shared_dataset, io=io)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda seed: large_request_is_right(store, seed), range(32)))


def test_close_during_gathers_gives_right_rows_or_closed_error(shared_dataset: Path, io: str) -> None:
    def read(store: actshard.Store, seed: int) -> bool:
        try:
            return large_request_is_right(store, seed)
        except actshard.ClosedError:
            return True

    for _ in range(5):
        store = actshard.open(shared_dataset, io=io)
        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(read, store, seed) for seed in range(8)]
            store.close()
            assert all(job.result() for job in jobs)


@pytest.mark.parametrize("threads", ["1", "3", "many"])
def test_any_number_of_threads_gives_the_same_rows(shared_dataset: Path, threads: str) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[2]); import actshard, test_safety; "
    code += "print([test_safety.large_request_is_right(actshard.open(sys.argv[1], io=io)) for io in ('mmap', 'pread')]"
    code += ", actshard._native.num_threads())"
    done = child(code, shared_dataset, Path(__file__).parent, ACTSHARD_NUM_THREADS=threads)
    right, _, used = done.stdout.rpartition(" ")
    assert right == "[True, True]", done.stderr
    assert int(used) >= 1
    if threads in "13":
        assert int(used) == int(threads)


INTERRUPTED = """
import sys, numpy as np, actshard
store = actshard.open(sys.argv[1], io=sys.argv[2])
rng = np.random.default_rng(0)
n = 50_000
e, t = rng.integers(0, store.num_examples, n), rng.integers(0, store.token_counts[0], n)
out = np.empty((n, store.d_model), np.float32)
store.gather(2, e, t, out=out)
print("ready", flush=True)
try:
    while True:
        store.gather(2, e, t, out=out)
except KeyboardInterrupt:
    store.gather(2, e[:5], t[:5])  # and it still works
    print("interrupted", flush=True)
    raise
"""


def test_ctrl_c_stops_a_loop_of_gathers(shared_dataset: Path, io: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED, str(shared_dataset), io],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert out == "interrupted\n"
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode in (1, 130, -signal.SIGINT)


# Ends


def test_opening_and_closing_leaks_no_descriptor_and_no_map(io: str) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        lines = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum(".bin" in line for line in lines)  # noqa: PTH208

    def once(i: int) -> None:
        with actshard.open(SMALL, io=io) as store:
            if i % 10 == 0:
                store.gather(5, range(store.num_examples), 0)

    once(0)
    before = held()
    for i in range(2_000):  # tests/test_processes.py does it 10,000 times
        once(i)
    assert held() == before


def test_reading_a_missing_layer_or_row_leaks_no_descriptor(io: str) -> None:
    store = actshard.open(SMALL, io=io)
    store.last_tokens(5)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(500):
        with pytest.raises(actshard.OutOfRangeError):
            store.gather(5, [0, 99], 0)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_closed_store_refuses_every_read_and_may_be_closed_again(shared_dataset: Path, io: str) -> None:
    store = actshard.open(shared_dataset, io=io)
    kept = store.sequence(5, 7)
    store.close()
    store.close()
    for read in (
        lambda: store.gather(2, 0, 0),
        lambda: store.gather(2, 0, 0, out=np.zeros((1, D), np.float32), dtype="float32"),
        lambda: store.last_tokens(2),
        lambda: store.sequence(0, 2),
        lambda: store.sequences([0, 1], 2),
        store.logits,
        lambda: store.router(2),
    ):
        with pytest.raises(actshard.ClosedError, match="closed") as caught:
            read()
        assert isinstance(caught.value, ValueError)
        assert caught.value.path == shared_dataset
    assert np.array_equal(bits(kept), bits(ACTS[5, 1]))
    assert (store.layers, len(store), store.d_model) == (LAYERS, N, D)
