"""Views, truncation, forks, threads, signals, descriptors: a store keeps its promises in the programs people write."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, bits, saev_dump

N, L, T, D = 40, 2, 9, 256
SMALL = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")


def values() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((N, L, T, D), np.float32)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Four shards of 184 kB rows: gathers of it use the thread pool."""
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
    assert store.sequence(many, 0).flags.owndata  # its last token lies in another shard


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
    """Descriptors of this process that are files under a folder."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.lexists(link))


def mappings(folder: Path) -> int:
    """Mappings of this process that are of files under a folder."""
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
    assert mappings(dataset) == 1  # the view's own
    assert np.array_equal(bits(view), bits(values()[7, 0]))
    del view
    gc.collect()
    assert mappings(dataset) == 0
    rows.close()  # a second time is nothing
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
        signal.alarm(20)  # a hang is a failure
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
import signal, sys, numpy as np, actshard
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with SIGINT ignored
store = actshard.open(sys.argv[1])
rng = np.random.default_rng(0)
e, t = rng.integers(0, 40, 3_000_000), rng.integers(0, 9, 3_000_000)
out = np.empty((1, 256), np.float32)
print("ready", flush=True)
try:
    while True:
        store.gather(3, e, t)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_interrupts_a_long_gather(dataset: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", INTERRUPT, str(dataset)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)  # well inside the first gather
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=20)[0] == "interrupted\n"
    finally:
        child.kill()


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
    assert held() == before


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
