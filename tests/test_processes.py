"""Views, truncation, forks, threads, signals, descriptors: guarantees of a store in real programs."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, bits, saev_dump
from waiting import PATIENCE

N, L, T, D = 40, 2, 9, 256
SMALL = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")


def values() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((N, L, T, D), np.float32)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Four shards with rows of 184 kB, so that gathers use the thread pool."""
    eps = 10
    metadata = {
        "family": "clip",
        "ckpt": "x",
        "layers": [3, 4],
        "content_tokens_per_example": T,
        "cls_token": False,
        "d_model": D,
        "n_examples": N,
        "max_tokens_per_shard": eps * L * T,
        "data": "",
        "dataset": "/x",
        "pixel_agg": "majority",
        "dtype": "float32",
        "protocol": "2.1",
    }
    digest = hashlib.sha256(json.dumps(metadata, separators=(",", ":")).encode()).hexdigest()[:8]
    folder = tmp_path / digest
    folder.mkdir()
    (folder / "metadata.json").write_text(json.dumps(metadata))
    names = [f"acts{i:06}.bin" for i in range(N // eps)]
    (folder / "shards.json").write_text(json.dumps([{"name": name, "n_examples": eps} for name in names]))
    for name, part in zip(names, np.split(values(), N // eps), strict=True):
        (folder / name).write_bytes(part.tobytes())
    return folder


def indices(n: int = 4_000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, N, n), rng.integers(0, T, n)


def is_right(store: actshard.Store, seed: int = 0) -> bool:
    e, t = indices(seed=seed)
    return np.array_equal(bits(store.gather(4, e, t)), bits(values()[e, 1, t]))


def test_view_is_zero_copy_read_only_and_survives_store_drop_and_close(dataset: Path) -> None:
    store = actshard.open(dataset, io="mmap")
    view, again = store.sequence(7, 3), store.sequence(7, 3)
    assert not view.flags.writeable
    assert not view.flags.owndata
    assert np.shares_memory(view, again)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0
    store.close()
    del store, again
    gc.collect()
    assert np.array_equal(bits(view), bits(values()[7, 0]))


def test_lmprobe_rows_that_lie_together_are_a_view() -> None:
    store = actshard.open(GOLDEN / "lmprobe/fullseq_f32", io="mmap")
    one = int(np.flatnonzero(store.token_counts == 1)[0])
    many = int(np.argmax(store.token_counts))
    assert np.shares_memory(store.sequence(one, 0), store.sequence(one, 0))
    assert store.sequence(many, 0).flags.owndata  # its last token is in another shard


def test_pread_gives_copies(dataset: Path) -> None:
    store = actshard.open(dataset, io="pread")
    assert store.io == "pread"
    assert store.sequence(7, 3).flags.owndata


def test_closed_store_refuses_to_read(dataset: Path) -> None:
    with actshard.open(dataset) as store:
        pass
    for read in (
        lambda: store.gather(3, 0, 0),
        lambda: store.sequence(0, 3),
        lambda: store.sequences([0], 3),
        store.logits,
    ):
        with pytest.raises(actshard.ClosedError):
            read()


def open_files(folder: Path) -> int:
    """This process's descriptors of files below a folder."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself is closed
            found += str(link.readlink()).startswith(str(folder))
    return found


def mappings(folder: Path) -> int:
    """This process's mappings of files below a folder."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closed_rows_keep_no_descriptor_and_no_mapping_but_those_of_views(dataset: Path) -> None:
    store = actshard.open(dataset, io="mmap")
    rows = store.rows
    assert is_right(store)
    assert open_files(dataset) == mappings(dataset) == 4
    view = store.sequence(7, 3)
    rows.close()
    assert open_files(dataset) == 0
    assert mappings(dataset) == 1  # the mapping of the view
    assert np.array_equal(bits(view), bits(values()[7, 0]))
    del view
    gc.collect()
    assert mappings(dataset) == 0
    rows.close()  # closing twice is allowed
    one = np.zeros(1, np.int64)
    for read in (
        lambda: rows.gather(0, 0, 0, None, None),
        lambda: rows.gather_whole(0, one, None, None),
        lambda: rows.tokens_of(0, one),
        lambda: rows.view(0, 0),
        rows.token_counts,
        lambda: rows.scan(0),
        lambda: rows.stats(0, (0, T)),
    ):
        with pytest.raises(actshard.ClosedError):
            read()
    assert rows.width == D


def test_a_stream_that_was_begun_outlives_closed_rows(dataset: Path) -> None:
    store = actshard.open(dataset)
    batches = iter(store.stream(4, 50))
    first = next(batches)
    store.rows.close()
    read = np.concatenate([first.activations, *(b.activations for b in batches)])
    assert np.array_equal(bits(read), bits(values()[:, 1].reshape(-1, D)))


@pytest.mark.parametrize("name", ["saev", "zarr"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_views_hold_no_descriptors(dataset: Path, tmp_path: Path, name: str) -> None:
    if name == "zarr":
        with actshard.open(dataset) as saev:
            actshard.convert(saev.path, tmp_path / "store.zarr", "zarr", layers=[4])
        dataset = tmp_path / "store.zarr"
    store = actshard.open(dataset, io="mmap")
    views = [store.sequence(i, 4) for i in range(N)]
    assert not any(view.flags.owndata for view in views)
    store.rows.close()
    del store
    gc.collect()
    assert open_files(dataset) == 0
    for i, view in enumerate(views):
        assert np.array_equal(bits(np.asarray(view)), bits(values()[i, 1]))


TRUNCATE = """
import os, sys, actshard
folder, io = sys.argv[1:]
store = actshard.open(folder, io=io)
store.gather(3, range(40), 0)
shard = os.path.join(folder, "acts000002.bin")
os.truncate(shard, 4096)
import numpy as np
for read in (
    lambda: store.gather(3, [25], [8]),
    lambda: store.gather(3, np.repeat(np.arange(40), 9), np.tile(np.arange(9), 40)),
    lambda: store.last_tokens(3),
    lambda: store.sequence(25, 3),
    lambda: store.sequences(range(40), 3),
):
    try:
        read()
    except actshard.TruncatedFileError as error:
        assert isinstance(error, EOFError) and str(error.path) == shard and "truncated" in str(error) or io == "pread", error
    else:
        sys.exit("no error")
print("survived")
"""


def test_shard_truncated_after_open_is_an_error_and_not_a_crash(dataset: Path, io: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRUNCATE, str(dataset), io], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "survived"), done.stderr


def test_missing_and_short_files_are_found_when_touched(dataset: Path, io: str) -> None:
    store = actshard.open(dataset, io=io)
    (dataset / "acts000001.bin").unlink()
    assert np.array_equal(store.gather(3, 0, 0)[0], values()[0, 0, 0])
    with pytest.raises(actshard.MissingFileError, match="acts000001"):
        store.gather(3, 12, 0)


def test_fork_after_use_works(dataset: Path, io: str) -> None:
    store = actshard.open(dataset, io=io)
    assert is_right(store)
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE)  # a hang is a failure
        os._exit(0 if is_right(store, 1) else 3)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert is_right(store, 2)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_a_pickled_store(dataset: Path, method: str) -> None:
    store = actshard.open(dataset)
    assert is_right(store)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.starmap(is_right, [(store, seed) for seed in range(4)]) == [True] * 4


def test_pickle_is_path_and_options(dataset: Path, io: str) -> None:
    store = actshard.open(dataset, io=io)
    data = pickle.dumps(store)
    assert len(data) < 1_000
    back = pickle.loads(data)
    assert (back.path, back.io, back.format) == (store.path, io, "saev")
    assert is_right(back)


def test_eight_threads_at_once(dataset: Path, io: str) -> None:
    store = actshard.open(dataset, io=io)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda seed: is_right(store, seed), range(32)))


def test_one_thread_gives_the_same(dataset: Path) -> None:
    code = "import sys, actshard; s = actshard.open(sys.argv[1]); "
    code += "print(hash(s.gather(3, list(range(40)) * 9, [1] * 360).tobytes()))"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    outputs = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(dataset)],
            env={**environment, "ACTSHARD_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2", "7")
    }
    assert len(outputs) == 1


INTERRUPT = """
import os, signal, sys, threading, time, numpy as np, actshard
from actshard import _native
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with SIGINT ignored
store = actshard.open(sys.argv[1])
rng = np.random.default_rng(0)
e, t = rng.integers(0, 40, 3_000_000), rng.integers(0, 9, 3_000_000)
def press():
    while _native.looks() == before: time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)  # the gather has begun
stopped = False
while not stopped:  # again, if this thread came so late that the gather had ended
    out, before = np.zeros((len(e), 256), np.float32), _native.looks()
    thread = threading.Thread(target=press)
    try:
        thread.start()
        store.gather(3, e, t, out=out)
        thread.join()
    except KeyboardInterrupt:
        stopped = not out[::1000].any(axis=1).all()  # the rest was not written
print("interrupted")
"""


def test_ctrl_c_interrupts_a_long_gather(dataset: Path) -> None:
    assert run(INTERRUPT, dataset) == "interrupted"


@pytest.mark.slow
def test_ten_thousand_opens_leak_no_descriptor_and_no_map(io: str) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        maps = sum("acts" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(list(Path("/proc/self/fd").iterdir())), maps

    before = held()
    for i in range(10_000):
        store = actshard.open(SMALL, io=io)
        if i % 10 == 0:
            store.gather(0, range(11), 0)
        if i % 2:
            store.close()
    del store
    # Fewer is right too: descriptors that earlier tests left to the collector.
    assert all(after <= first for after, first in zip(held(), before, strict=True)), (before, held())


def test_more_files_than_descriptors_still_read(tmp_path: Path) -> None:
    code = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy as np, actshard
store = actshard.open({str(tmp_path / "d")!r}, io=sys.argv[1])
got = store.gather(0, np.arange(200), np.zeros(200, int))
assert (got[:, 0] == np.arange(200)).all()
print("all")
"""
    folder = tmp_path / "d"
    folder.mkdir()
    metadata = {
        "layers": [0],
        "patches_per_ex": 1,
        "cls_token": False,
        "d_model": 2,
        "n_ex": 200,
        "patches_per_shard": 1,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata))
    (folder / "shards.json").write_text(json.dumps([{"name": f"acts{i:06}.bin", "n_ex": 1} for i in range(200)]))
    for i in range(200):
        (folder / f"acts{i:06}.bin").write_bytes(np.full(2, i, np.float32).tobytes())
    for mode in ("mmap", "pread"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, mode], capture_output=True, text=True, check=False
        )
        assert done.stdout == "all\n", done.stderr


def run(script: str, *args: object, **environment: str) -> str:
    """Output of a script in a separate process. A hang fails."""
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


CLOSED_WHILE_IT_WAITS = """
import signal, sys, threading, actshard
store = actshard.open(sys.argv[1])
stream = store.stream(4, 7)
stream._ring = lambda: []  # no memory to read into: the first batch never comes
batches = iter(stream)
if sys.argv[2] == "signal":
    signal.signal(signal.SIGALRM, lambda *_: batches.close())
    signal.setitimer(signal.ITIMER_REAL, 0.1)
else:
    threading.Timer(0.1, batches.close).start()
print(list(batches), stream.epoch, stream.state_dict() == store.stream(4, 7).state_dict())
"""


@pytest.mark.parametrize("by", ["signal", "thread"])
def test_an_iterator_can_be_closed_while_it_waits_for_a_batch(dataset: Path, by: str) -> None:
    assert run(CLOSED_WHILE_IT_WAITS, dataset, by) == "[] 0 True"


FORK_BESIDE_A_BUSY_THREAD = """
import os, sys, threading, numpy as np, actshard
store = actshard.open(sys.argv[1])
e, t = np.arange(8000) % 40, np.arange(8000) % 9
stop = False
def loop():
    while not stop:
        store.gather(4, e, t)
def child_threads():
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        store.gather(4, e, t)
        store.gather(4, e, t)
        os.write(w, str(len(os.listdir("/proc/self/task"))).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return int(os.read(r, 9))
threads = [threading.Thread(target=loop) for _ in range(3)]
for thread in threads: thread.start()
found = {child_threads() for _ in range(12)}
stop = True
for thread in threads: thread.join()
print(found)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_forked_beside_reading_threads_reads_with_all_threads(dataset: Path) -> None:
    assert run(FORK_BESIDE_A_BUSY_THREAD, dataset, ACTSHARD_NUM_THREADS="3") == "{3}"


FIRST_READS = """
import sys, numpy as np, actshard
store = actshard.open(sys.argv[1])
verbs = {
    "gather": lambda: store.gather(4, [3, 5], [0, 1]),
    "last_tokens": lambda: store.last_tokens(4),
    "sequence": lambda: store.sequence(3, 4),
    "layer": lambda: (store.layer(4)[3], store.layer(4)[np.arange(40) > 20]),
    "stream": lambda: next(iter(store.stream(4, 7))),
    "state": lambda: store.stream(4, 7).state_dict(),
    "sequences_stream": lambda: next(iter(store.sequences_stream(4, 20))),
}
for name, read in verbs.items():
    before = set(sys.modules)
    read()
    if modules := set(sys.modules) - before:
        print(name, sorted(modules))
"""


def test_the_first_read_imports_no_module(dataset: Path) -> None:
    """A child that is forked while another thread imports a module waits for that module's lock for ever."""
    assert not run(FIRST_READS, dataset)


MASKS = """
import os, sys, numpy as np, actshard
def masks():
    tasks = os.listdir("/proc/self/task")
    lines = [line for task in tasks for line in open(f"/proc/self/task/{task}/status")]
    return len(tasks), {line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")}
store = actshard.open(sys.argv[1])
e, t = np.arange(8000) % 40, np.arange(8000) % 9
before = masks()[1]
for _ in range(20): store.gather(4, e, t)
threads, after = masks()
print(threads > 1, after == before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("threads", ["2", "3"])
def test_no_thread_stays_bound_to_some_processors(dataset: Path, threads: str) -> None:
    assert run(MASKS, dataset, ACTSHARD_NUM_THREADS=threads) == "True True"


LOOKS = """
import sys, threading, time, numpy as np, actshard
from actshard import _native
store = actshard.open(sys.argv[1])
e, t = np.tile(np.arange(40), 3000), np.arange(120_000) % 9
def gathers():
    looks, begun = _native.looks(), time.monotonic()
    for _ in range(3): store.gather(4, e, t)
    found.append((_native.looks() - looks, time.monotonic() - begun))
found = []
gathers()
thread = threading.Thread(target=gathers)
thread.start()
thread.join()
(main, took), (other, _) = found
print(main <= took / 0.02, other == 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_read_takes_the_gil_every_20_ms_at_most_and_never_off_the_main_thread(dataset: Path, threads: str) -> None:
    assert run(LOOKS, dataset, ACTSHARD_NUM_THREADS=threads) == "True True"


LOOKS_NEXT_TO_A_BUSY_THREAD = """
import sys, threading, time, numpy as np, actshard
from actshard import _native
store = actshard.open(sys.argv[1])
e, t = np.tile(np.arange(40), 3000), np.arange(120_000) % 9
def spin():
    while not stop: pass
stop, thread = False, threading.Thread(target=spin)
sys.setswitchinterval(0.05)
thread.start()
def is_patient():
    store.gather(4, e, t)  # measures the wait for the GIL
    looks, begun = _native.looks(), time.monotonic()
    for _ in range(4): store.gather(4, e, t)
    looks, took = _native.looks() - looks, time.monotonic() - begun
    return looks <= 4 + took / 0.5
# On a busy machine the other thread may not run, and then nothing waits for it.
patient = any(is_patient() for _ in range(20))
stop = True
print(patient)
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_read_takes_the_gil_less_often_the_longer_it_waits_for_it(dataset: Path, threads: str) -> None:
    assert run(LOOKS_NEXT_TO_A_BUSY_THREAD, dataset, ACTSHARD_NUM_THREADS=threads) == "True"


MANY_THREADS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
from concurrent.futures import ThreadPoolExecutor
import numpy as np, actshard
store = actshard.open(sys.argv[1])
n = store.num_examples
def one(seed):
    e = np.random.default_rng(seed).permutation(n)
    return bool(np.array_equal(store.gather(0, e, 0)[:, 0], e))
with ThreadPoolExecutor(16) as threads:
    print(all(threads.map(one, range(48))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["saev", "zarr"])
@pytest.mark.parametrize("limit", [64, 1024])
def test_many_threads_read_more_files_than_there_are_descriptors(tmp_path: Path, name: str, limit: int) -> None:
    n = 600 if limit == 64 else 1500
    rows = [np.full((1, 1, 8), i, np.float32) for i in range(n)]
    small = {"saev": {"max_tokens_per_shard": 1}, "zarr": {"chunk_tokens": 1}}[name]
    with actshard.create(tmp_path / "new", name, layers=[0], d_model=8, **small) as writer:
        writer.append(rows)
    path = writer.path
    assert sum(file.stat().st_size == 32 for file in path.rglob("*") if file.is_file()) >= n
    assert run(MANY_THREADS, path, limit) == "True"


IDLE_STORE = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import numpy as np, actshard
first, second = map(actshard.open, sys.argv[1:])
def kept(store):
    return sum(str(store.path) in os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd"))
               if os.path.lexists(f"/proc/self/fd/{fd}"))
n = first.num_examples
first.gather(0, np.arange(n), 0)
filled = kept(first)
for _ in range(300):
    second.gather(0, 7, 0)
print(filled, kept(second), kept(first) >= filled - 1)
assert np.array_equal(first.gather(0, np.arange(n), 0)[:, 0], np.arange(n))
"""


MANY_STORES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import numpy as np, actshard
idle = [actshard.open(sys.argv[1]) for _ in range(1_000)]
for store in idle: store.gather(0, 0, 0)
hot = actshard.open(sys.argv[2])
def opened():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}").startswith(str(hot.path))]
for _ in range(300): hot.gather(0, 7, 0)
first = opened()
for _ in range(300):
    hot.gather(0, 7, 0)
    assert opened() == first
print(len(first))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_store_that_is_read_keeps_its_descriptor_next_to_1000_idle_ones(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        with actshard.create(tmp_path / name, "saev", layers=[0], d_model=8) as writer:
            writer.append([np.full((1, 1, 8), i, np.float32) for i in range(8)])
        paths.append(writer.path)
    assert run(MANY_STORES, *paths) == "1"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_store_gives_its_descriptors_to_one_that_is_read(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        rows = [np.full((1, 1, 8), i, np.float32) for i in range(140)]
        with actshard.create(tmp_path / name, "saev", layers=[0], d_model=8, max_tokens_per_shard=1) as writer:
            writer.append(rows)
        paths.append(writer.path)
    assert run(IDLE_STORE, *paths) == "128 1 True"


@pytest.mark.parametrize("detached", [False, True])
def test_a_panic_is_an_internal_error(detached: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(actshard.InternalError, match="on purpose"):
        actshard._native.panic_for_test(detached)
    capfd.readouterr()  # Rust prints the panic, too


def test_every_native_function_that_can_fail_goes_through_a_gate() -> None:
    """Only constants and fields are returned without the gate: a panic elsewhere would be an uncatchable exception."""
    plain = {"dtypes", "error_kinds", "finding_codes", "header_reasons", "num_threads", "looks"}
    plain |= {
        "descr",
        "width",
        "io",
        "batches",
        "all_batches",
        "decodes",
        "items",
        "window",
        "inflated",
        "table_bytes",
        "used",
        "has_shapes",
    }
    plain |= {"num_rows", "num_elements", "piece", "units", "unit_bytes", "take_overflows"}
    plain |= {"num_groups", "total_compressed_size"}
    plain |= {"stored_types"}  # only naming the dtypes found runs outside `detached`
    plain |= {"parameters", "jax_key", "jax_fold_in", "jax_randint30"}
    plain |= {
        "dtype",
        "shape",
        "strides",
        "offset",
        "swapped",
        "deflated",
        "sizes",
        "is_legacy",
        "is_gzipped",
        "is_chunked",
    }
    found = 0
    for source in (Path(__file__).parents[1] / "rust/py/src").rglob("*.rs"):
        text = source.read_text()
        functions = [m.end() for m in re.finditer(r"#\[pyfunction\](?:\n#\[[^\n]*)*\n", text)]
        for block in re.finditer(r"#\[pymethods\]\nimpl.*?\n}\n", text, re.S):
            functions += [block.start() + m.start() for m in re.finditer(r"\n    (pub )?fn ", block.group())]
        for start in functions:
            match = re.compile(r"\s*(?:pub )?fn (\w+)[^{]*{\s*(.{0,40})", re.S).match(text, start)
            assert match is not None
            name, body = match.groups()
            gated = body.startswith(("detach::guarded(", "detach::detached("))
            found += gated
            if not gated:
                whole = text[start : text.index("}\n", match.end())]
                assert name in plain or (name == "new" and whole.count("\n") < 8), f"{source.name}: {name}"
    assert found > 30


def test_an_output_over_indices_or_another_reads_memory_is_refused(dataset: Path) -> None:
    store = actshard.open(dataset)
    rows = store.rows
    out = np.zeros((2 * T, D), np.float32)
    groups = out.reshape(-1).view(np.int64)[:2]
    groups[:] = (0, 1)
    with pytest.raises(actshard.ArgumentError, match="indices"):
        rows.gather_whole(groups, np.zeros(2, np.int64), out, None)
    buffers = [np.empty((8, D), np.float32) for _ in range(2)]
    batches = iter(store.stream(4, 8, buffers=buffers))
    next(batches)
    for buffer in buffers:
        with pytest.raises(actshard.ArgumentError, match="another read"):
            store.gather(4, range(8), 0, out=buffer)
    batches.close()
    store.gather(4, range(8), 0, out=buffers[0])
    assert np.array_equal(bits(buffers[0]), bits(values()[:8, 1, 0]))
