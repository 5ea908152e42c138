"""Datasets of pickle shards: rows of many shards and machines, within a budget, with threads and processes."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from conftest import GOLDEN, bits, refuses
from pickle_files import change, dataset, item, mixed, opened, values, write
from waiting import PATIENCE, wait_until


@pytest.mark.parametrize("gz", [True, False])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_any_rows_from_any_shards(tmp_path: Path, gz: bool, protocol: int, io: str) -> None:
    store = opened(dataset(tmp_path / "d", gz=gz, protocol=protocol), io)
    assert (store.layers, store.num_examples, store.d_model, store.dtype) == ((3, 9), 24, 8, np.float32)
    counts = np.arange(24) % 5
    assert store.tokens_of([23, 0, 4]).tolist() == [3, 0, 4]
    assert store.token_counts.tolist() == counts.tolist()
    rng = np.random.default_rng(1)
    for layer in store.layers:
        e = rng.choice(np.repeat(np.arange(24), counts), 500)
        t = np.array([rng.integers(0, counts[x]) for x in e])
        want = np.stack([values(x, layer)[k] for x, k in zip(e, t, strict=True)])
        assert np.array_equal(store.gather(layer, e, t), want)
        assert np.array_equal(store.gather(layer, e, t - counts[e], dtype="float64"), want.astype(np.float64))
        for x, got in enumerate(store.sequences(range(24), layer)):
            assert np.array_equal(got, values(x, layer))
    with pytest.raises(actshard.OutOfRangeError, match="example 24 is out of range"):
        store.gather(3, 24, 0)
    with pytest.raises(actshard.OutOfRangeError, match="example 6 has 1 stored tokens"):
        store.gather(3, 6, 1)


@pytest.mark.parametrize("gz", [True, False])
def test_a_second_object_in_a_shard_is_an_error_not_ignored(tmp_path: Path, gz: bool, io: str) -> None:
    """As loops leave it that append to a file."""
    folder = dataset(tmp_path / "d", shards=1, gz=gz)
    (shard,) = folder.glob("shard_*")
    data = shard.read_bytes()
    end = len(gzip.decompress(data) if gz else data)
    shard.write_bytes(data + data)
    change(folder, lambda metadata: metadata["shards"][0].pop("size_bytes", None))
    change(folder, lambda metadata: metadata["shards"][0].pop("checksum", None))
    with refuses(actshard.FormatError, shard, f"byte {end}: expected the end of the pickle, found {end} more bytes"):
        opened(folder, io)
    assert any(str(end) in str(finding) for finding in actshard.verify(folder).errors)


def test_plain_shards_give_views_that_outlive_the_store(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d", gz=False)
    store = opened(folder)
    view = store.sequence(9, 3)
    assert not view.flags.writeable
    assert view.base is not None
    store.close()
    shutil.rmtree(folder)
    assert np.array_equal(view, values(9, 3))
    assert opened(dataset(tmp_path / "p", gz=False), "pread").sequence(9, 3).flags.writeable
    assert opened(dataset(tmp_path / "g")).sequence(9, 3).flags.writeable


def test_random_rows_over_many_shards_do_not_inflate_per_row(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d", shards=8)
    rng = np.random.default_rng(0)
    e = rng.choice(np.flatnonzero(np.arange(48) % 5), 2_000)
    want = np.stack([values(x, 9)[-1] for x in e])
    kept = opened(folder)
    for _ in range(3):
        assert np.array_equal(kept.gather(9, e, -1), want)
    assert kept._rows.inflated == 8  # each was inflated once and cached
    one_at_a_time = opened(folder, decoded_memory="3kB")
    assert np.array_equal(one_at_a_time.gather(9, e, -1), want)
    # Inflated once for metadata, and at most once more for rows: the budget is one shard.
    assert one_at_a_time._rows.inflated <= 17
    assert np.array_equal(opened(folder, decoded_memory=0).gather(9, e, -1), want)


def test_a_folder_is_read_within_the_decoded_budget(tmp_path: Path) -> None:
    d, per, shards = 1024, 24, 10
    made = [
        {"layer_0": [item(i * per + k, np.full((128, d), i * per + k, np.float32)) for k in range(per)]}
        for i in range(shards)
    ]
    folder = write(tmp_path / "d", made)  # 12.6 MB each
    code = (
        "import resource, warnings; warnings.simplefilter('ignore'); import actshard, numpy as np, pyarrow\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3\n"
        "out = np.ones((3000, 1024), np.float32); before = peak()\n"
        f"s = actshard.open({str(folder)!r}, decoded_memory='32MB')\n"
        "e = np.random.default_rng(0).integers(0, len(s), 3000)\n"
        "s.gather(0, e, -1, out=out); assert (out[:, 0] == e).all()\n"
        "print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 32 + 64


def test_samples_without_a_layer_are_named(io: str) -> None:
    folder = GOLDEN / "pickle/ragged_layers_machine3"
    with pytest.warns(actshard.ActshardWarning, match="1 of 2 shards lack layers"):
        store = actshard.open(folder, io=io)
    assert store.table["layers"].to_pylist() == [[15, 16]] * 2 + [[16]] * 3
    assert store.gather(16, [0, 4], [-1, -1]).shape == (2, 8)
    with refuses(
        actshard.NotStoredError,
        folder / "shard_0002.pkl.gz",
        r"example 3 \(sample_idx 3003\) has no layer 15; it has \[16\]",
    ):
        store.gather(15, [0, 3], [0, 0])


def test_several_machines_open_as_one_store(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for machine in (10, 2):
        shards = [
            {"layer_1": [item(machine * 100 + k, values(machine * 100 + k, 1, 2)) for k in range(i, i + 3)]}
            for i in (0, 3)
        ]
        write(root / f"machine_{machine}", shards, machine=machine)
    wanted = [200, 201, 202, 203, 204, 205, 1000, 1001, 1002, 1003, 1004, 1005]
    together = opened(root)
    assert together.path == root
    assert together.table["sample_idx"].to_pylist() == wanted
    assert np.array_equal(together.gather(1, [0, 11], 1), np.stack([values(s, 1, 2)[1] for s in (200, 1005)]))
    assert set(together.metadata["machines"]) == {"machine_2", "machine_10"}
    listed = opened([root / "machine_10", str(root / "machine_2")])
    assert listed.table["sample_idx"].to_pylist() == wanted[6:] + wanted[:6]
    again = pickle.loads(pickle.dumps(listed))
    assert np.array_equal(again.gather(1, 3, 0), listed.gather(1, 3, 0))
    with pytest.raises(actshard.ArgumentError, match="twice"):
        opened([root / "machine_2", root / "machine_2"])
    assert opened([GOLDEN / "lmprobe/pooled_f16"]).format == "concat"


@pytest.mark.parametrize("sparse", [False, True])
def test_a_sample_in_two_shards_is_an_error_that_names_both(tmp_path: Path, sparse: bool) -> None:
    root = tmp_path / "run"
    step = 2 if sparse else 1
    for machine in (0, 1):
        write(root / f"m{machine}", [{"layer_1": [item(machine * 4 + k * step, values(k, 1, 2)) for k in range(5)]}])
    with refuses(actshard.FormatError, root / "m0/shard_0001.pkl.gz", "sample_idx 4 is also in .*m1/shard_0001.pkl.gz"):
        opened(root)
    # Overlapping ranges alone are not an error.
    write(root / "m1", [{"layer_1": [item(5 + k * 10, values(k, 1, 2)) for k in range(5)]}])
    if sparse:
        assert opened(root).num_examples == 10


def test_shards_without_ranges_are_looked_into_once_to_compare_their_numbers(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d", shards=12, per=2)
    change(folder, lambda m: [s.pop("sample_id_range") for s in m["shards"]])
    assert (
        opened(folder, decoded_memory=0)._rows.inflated <= 12 + 2
    )  # the first shard is also opened for dtype and columns


@settings(max_examples=200)
@given(
    sets=st.lists(st.frozensets(st.integers(0, 30), min_size=1, max_size=5), min_size=1, max_size=8),
    ranged=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_numbers_in_two_shards_are_found_whatever_their_ranges(sets: list[frozenset[int]], ranged: list[bool]) -> None:
    from actshard.formats.pickle import read as module

    shards = [
        module.ListedShard(
            Path(f"s{i}"), True, None, None, len(ids), (min(ids), max(ids)) if r else (0, (1 << 62) - 1), (0,), 0
        )
        for i, (ids, r) in enumerate(zip(sets, ranged, strict=False))
    ]
    asked: list[int] = []

    class Inside:
        def samples(self, shard: int) -> list[int]:
            asked.append(shard)
            return sorted(sets[shard], reverse=True)

    if sum(map(len, sets)) == len(frozenset().union(*sets)):
        module._check_unique(shards, Inside())  # type: ignore[arg-type] -- a stand-in
    else:
        with pytest.raises(actshard.FormatError, match=r"is also in s\d") as caught:
            module._check_unique(shards, Inside())  # type: ignore[arg-type] -- a stand-in
        number = int(str(caught.value).split("sample_idx ")[1].split()[0])
        assert sum(number in ids for ids in sets) > 1
    assert len(asked) == len(set(asked))


def test_the_first_rows_of_columns_need_only_the_first_shards(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d", shards=4, per=6)
    (folder / "shard_0003.pkl.gz").unlink()
    head = opened(folder).contents.head_columns
    assert head is not None
    assert head(["sample_idx", "text_preview"], 7)["sample_idx"].to_pylist() == list(range(12))
    assert head(["sample_idx"], 0).num_rows == 0
    with pytest.raises(actshard.MissingFileError):
        head(["sample_idx"], 13)


@pytest.mark.parametrize("name", ["\u00b2", "m\u0663", "m\u00b9\u00b2", "00000000000000000000000000001"])
def test_folders_of_machines_may_have_any_names(tmp_path: Path, name: str) -> None:
    for i, machine in enumerate([name, "m1"]):
        write(tmp_path / machine, [{"layer_1": [item(i, values(i, 1, 2))]}])
    assert sorted(opened(tmp_path).table["sample_idx"].to_pylist()) == [0, 1]


def test_machines_whose_longest_sample_differs_are_one_extraction(tmp_path: Path) -> None:
    for m in range(3):
        rows = [np.full((1, t, 8), m, np.float32) for t in (1, m + 4)]
        with actshard.create(
            tmp_path / f"machine_{m}", "pickle", layers=[1], d_model=8, machine_id=m, total_machines=3
        ) as w:
            w.append(rows, columns={"sample_idx": [2 * m, 2 * m + 1]})
    lengths = [json.loads((tmp_path / f"machine_{m}/metadata.json").read_text()) for m in range(3)]
    assert [x["extraction_config"]["max_seq_length"] for x in lengths] == [4, 5, 6]
    store = opened(tmp_path)
    assert store.token_counts.tolist() == [1, 4, 1, 5, 1, 6]
    assert store.sequence(5, 1)[5].tolist() == [2.0] * 8
    change(tmp_path / "machine_2", lambda m: m["extraction_config"].update(model_name="another"))
    with pytest.raises(actshard.UnknownFormatError, match=r"extraction_config\.model_name differs|contains 3 datasets"):
        opened(tmp_path)


def test_shards_that_change_or_go_after_opening_are_errors(tmp_path: Path, io: str) -> None:
    folder = dataset(tmp_path / "d", gz=False)
    store = opened(folder, io)
    assert store.token_counts.sum() == 46
    last = folder / "shard_0004.pkl"
    os.truncate(last, 200)
    with refuses(actshard.TruncatedFileError, last, "truncated after it was indexed"):
        store.gather(3, 23, 0)
    (folder / "shard_0002.pkl").unlink()
    with refuses(actshard.MissingFileError, folder / "shard_0002.pkl"):
        store.gather(3, 9, 0)
    assert np.array_equal(store.gather(3, 4, 3)[0], values(4, 3)[3])


def test_shards_of_another_width_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, [{"layer_0": [item(1, values(1, 0))]}, {"layer_0": [item(3, values(3, 0, 2, d=9))]}])
    with refuses(actshard.FormatError, folder / "shard_0002.pkl.gz", "one dataset, one row"):
        opened(folder).gather(0, 1, 0)


@settings(max_examples=40)
@given(
    kinds=st.lists(st.sampled_from(["<f4", ">f4", "<f2", ">f2", "<f8", ">f8"]), min_size=2, max_size=14),
    gz=st.booleans(), protocol=st.integers(0, 5), dtype=st.sampled_from(["float16", "float32", "float64"]),
    seed=st.integers(0, 99), io=st.sampled_from(["mmap", "pread"]), memory=st.sampled_from([0, "2kB", "1GiB"]),
)  # fmt: skip
def test_examples_of_several_types_are_read_with_dtype(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], gz: bool, protocol: int, dtype: str, seed: int, io: str,
    memory: Any,
) -> None:  # fmt: skip
    folder, rows = mixed(tmp_path_factory.mktemp("d") / "d", kinds, gz=gz, protocol=protocol)
    store = opened(folder, io, decoded_memory=memory)
    assert store.dtype == rows[0].dtype.newbyteorder("=")
    assert store.token_counts.tolist() == [len(r) for r in rows]
    native = [r.astype(r.dtype.newbyteorder("=")) for r in rows]

    want = [r.astype(dtype) for r in rows]
    one_by_one = [store.sequence(i, 0, dtype=dtype) for i in range(len(rows))]
    for got in (store.sequences(range(len(rows)), 0, dtype=dtype), one_by_one):
        assert all(np.array_equal(bits(g), bits(w)) for g, w in zip(got, want, strict=True))
    has = np.flatnonzero(store.token_counts)
    if len(has):
        assert np.array_equal(bits(store.last_tokens(0, has, dtype=dtype)), bits(np.stack([want[i][-1] for i in has])))
        e = np.random.default_rng(seed).choice(np.repeat(np.arange(len(rows)), store.token_counts), 20)
        t = np.array([seed % len(rows[x]) for x in e])
        assert np.array_equal(
            bits(store.gather(0, e, t, dtype=dtype)), bits(np.stack([want[x][k] for x, k in zip(e, t, strict=True)]))
        )
        for shuffle in (None, "window", "exact"):
            seen = 0
            for batch in store.stream(0, 4, shuffle=shuffle, seed=seed, dtype=dtype, memory=4096):
                for row, x, k in zip(batch.activations, batch.examples, batch.tokens, strict=True):
                    assert np.array_equal(bits(row), bits(want[x][k]))
                    seen += 1
            assert seen == sum(map(len, rows))
        wide = np.concatenate(rows, dtype=np.float64)
        assert np.allclose(store.stats(0).mean, wide.mean(0), rtol=1e-9, atol=1e-12)
    # Without dtype=, rows of the store's dtype are unchanged, and others raise an error.
    for i, r in enumerate(native):
        if r.dtype == store.dtype or not len(r):
            assert np.array_equal(store.sequence(i, 0), r)
        else:
            reads: list[Any] = [
                lambda i=i: store.sequence(i, 0), lambda i=i: store.gather(0, i, 0), lambda i=i: store.sequences([i], 0),
                lambda i=i: store.last_tokens(0, [0, i] if len(rows[0]) else [i]), lambda: [*store.stream(0, 4)],
            ]  # fmt: skip
            for read in reads:
                with pytest.raises(actshard.DtypeError, match="read with dtype="):
                    read()


def test_mixed_types_are_converted_and_verified(tmp_path: Path) -> None:
    folder, rows = mixed(tmp_path / "d", ["<f4", ">f8", "<f2", "<f4", ">f4", "<f8", "<f2"], gz=True, protocol=4)
    report = actshard.verify(folder, deep=True)
    assert not report.errors, report.findings
    with pytest.raises(actshard.DtypeError, match="read with dtype="):
        actshard.convert(folder, tmp_path / "no", "pickle")
    actshard.convert(folder, tmp_path / "c", "pickle", dtype="float32", verify=True)
    converted = opened(tmp_path / "c")
    assert converted.dtype == np.float32
    for got, r in zip(converted.sequences(range(len(rows)), 0), rows, strict=True):
        assert np.array_equal(bits(got), bits(r.astype(np.float32)))


def test_metadata_of_any_kind_become_columns(tmp_path: Path) -> None:
    items = [
        item(0, values(1, 0), metadata={"n": 1, "shape": "x", "tags": ("a", None), "mixed": 1, "big": 2**80}),
        item(1, values(1, 0), metadata=None),
        item(2, values(1, 0), metadata={"n": np.int64(3), "mixed": "s", "vector": np.arange(2)}),
    ]
    table = opened(write(tmp_path / "d", [{"layer_0": items}])).table
    assert table["n"].to_pylist() == [1, None, 3]
    assert table["metadata.shape"].to_pylist() == ["x", None, None]
    assert table["tags"].to_pylist() == [["a", None], None, None]
    assert table["mixed"].to_pylist() == ["1", None, "s"]
    assert table["big"].to_pylist() == [2**80, None, None]  # decimals
    assert table["vector"].to_pylist() == [None, None, [0, 1]]


def _child(store: actshard.Store, queue: Any) -> None:
    queue.put(store.gather(9, [23, 1], [0, 0]).tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_stores_work_in_workers_and_threads(tmp_path: Path, start: str) -> None:
    store = opened(dataset(tmp_path / "d"))
    want = store.gather(9, [23, 1], [0, 0]).tobytes()
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: store.gather(9, [23, 1], [0, 0]).tobytes(), range(64))) == {want}
        context = multiprocessing.get_context(start)
        queue = context.Queue()
        workers = [context.Process(target=_child, args=(store, queue)) for _ in range(3)]
        for worker in workers:
            worker.start()
        assert {queue.get(timeout=PATIENCE) for _ in workers} == {want}
        for worker in workers:
            worker.join(PATIENCE)
            assert worker.exitcode == 0


def test_info_does_not_inflate_a_large_folder_to_count_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from actshard.formats.pickle import read as module

    folder = dataset(tmp_path / "d")
    assert opened(folder).info()["tokens"] == 46
    monkeypatch.setattr(module, "CHEAP_BYTES", 10)
    store = opened(folder)
    assert store.info()["tokens"] is None
    assert store._rows.inflated == 1


def test_a_shard_that_fits_the_budget_is_inflated_once_however_often_it_is_read(tmp_path: Path) -> None:
    """Also if two would exceed the budget: a shard must not evict itself."""
    with actshard.create(tmp_path / "d", "pickle", layers=[0, 1], d_model=64, shard_bytes=300_000) as writer:
        writer.append(np.random.default_rng(0).standard_normal((30, 2, 20, 64)).astype(np.float32))
    store = actshard.open(tmp_path / "d", decoded_memory=450_000)
    units = store.contents.units
    assert units is not None
    assert len(units) == 3
    for first, last in itertools.pairwise(units):
        for _ in range(3):
            for layer in store.layers:
                store.sequences(range(first, last), layer)
                store.tokens_of(range(first, last))
    assert store.rows.inflated == 2


@pytest.mark.parametrize("gz", [True, False])
@pytest.mark.parametrize("checked", [True, False])
def test_a_shard_that_is_replaced_is_not_read_by_the_index_of_the_old_one(
    tmp_path: Path, gz: bool, checked: bool, io: str
) -> None:
    folder = dataset(tmp_path / "d", shards=2, per=6, gz=gz)
    if not checked:
        change(folder, lambda m: [(s.pop("checksum"), s.pop("size_bytes")) for s in m["shards"]])
    store = opened(folder, io, decoded_memory=0)
    assert store.token_counts.sum() == 21
    path = folder / f"shard_0001.pkl{'.gz' if gz else ''}"
    # Same samples, other order in the file: old offsets point to other samples.
    made = {f"layer_{k}": [item(s, values(s, k)) for s in reversed(range(6))] for k in (3, 9)}
    data = pickle.dumps(made, 4)
    new = tmp_path / "new"
    new.write_bytes(gzip.compress(data, 1) if gz else data)
    store.gather(3, 11, 0)  # of another shard
    new.replace(path)
    said = "checksum|size_bytes" if checked else "replaced or changed after it was indexed"
    with pytest.raises(actshard.ActshardError, match=said) as caught:
        store.gather(3, 4, 3)
    assert caught.value.path == path
    # Shards that were not replaced still read.
    assert np.array_equal(store.gather(3, 11, 0)[0], values(11, 3)[0])


def test_a_plain_shard_that_is_replaced_after_its_first_look_is_compared_when_it_is_opened(
    tmp_path: Path, io: str
) -> None:
    folder = dataset(tmp_path / "d", shards=2, per=6, gz=False)
    store = opened(folder, io)
    assert store.token_counts.sum() == 21  # scanned, but not opened for rows
    path = folder / "shard_0002.pkl"
    raw = path.read_bytes()
    touched = tmp_path / "same"
    touched.write_bytes(raw)
    touched.replace(path)  # the same bytes in a new file
    assert np.array_equal(store.gather(3, 9, 0)[0], values(9, 3)[0])
    other = opened(folder, io)
    assert other.token_counts.sum() == 21
    touched.write_bytes(raw.replace(values(9, 3).tobytes(), values(9, 9).tobytes()))
    touched.replace(path)
    with refuses(actshard.FormatError, path, "checksum"):
        other.gather(3, 9, 0)


@pytest.mark.parametrize("empty", [0, 1, 2])
@pytest.mark.parametrize("gz", [True, False])
def test_a_dataset_with_an_empty_shard_is_streamed_and_converted(tmp_path: Path, empty: int, gz: bool) -> None:
    shards: list[dict[str, Any]] = [{"layer_0": [item(s, values(s, 0, 2))]} for s in range(2)]
    shards.insert(empty, {"layer_0": []})
    folder = tmp_path / "d"
    folder.mkdir()
    listed = []
    for i, layers in enumerate(shards, 1):
        data = pickle.dumps(layers)
        name = f"shard_{i:04}.pkl{'.gz' if gz else ''}"
        (folder / name).write_bytes(gzip.compress(data) if gz else data)
        listed.append({"filename": name, "num_samples": len(layers["layer_0"]), "layers": [0], "compressed": gz})
    (folder / "metadata.json").write_text(json.dumps({"version": "1.0", "extraction_config": {}, "shards": listed}))
    store = opened(folder)
    assert len(store.table) == 2
    for shuffle in (None, "window", "exact"):
        rows = [b.activations for b in store.stream(0, 3, shuffle=shuffle)]
        assert sorted(np.concatenate(rows)[:, 0]) == sorted(np.concatenate([values(s, 0, 2) for s in range(2)])[:, 0])
    actshard.convert(folder, tmp_path / "c", "pickle", verify=True)
    assert opened(tmp_path / "c").num_examples == 2


def test_threads_that_want_one_shard_inflate_it_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shards = [{"layer_0": [item(s, rng.standard_normal((4000, 64)).astype(np.float32))]} for s in range(3)]
    folder = write(tmp_path / "d", shards)
    store = opened(folder)
    with ThreadPoolExecutor(8) as threads:
        got = [*threads.map(lambda _: store.gather(0, [0, 1, 2], [0, 1, 2]).tobytes(), range(16))]
    assert len(set(got)) == 1
    assert store._rows.inflated == 3


@pytest.mark.slow
def test_indices_overwritten_while_they_are_read_are_the_callers_error(tmp_path: Path) -> None:
    import threading

    store = opened(dataset(tmp_path / "d", shards=6, per=4, gz=False))
    counts = store.token_counts
    has = np.flatnonzero(counts)
    examples, stop = np.repeat(has[:1], 50_000), threading.Event()

    def overwrite() -> None:
        while not stop.is_set():
            for e in has:
                examples[:] = e

    thread = threading.Thread(target=overwrite)
    thread.start()
    try:
        for _ in range(60):
            with contextlib.suppress(actshard.ArgumentError):
                store.gather(3, examples, 0)
    finally:
        stop.set()
        thread.join()


HANDLER = """
import signal, sys, numpy as np, actshard
store = actshard.open(sys.argv[1], checksums=False)
read = []
def handler(*_):
    signal.setitimer(signal.ITIMER_REAL, 0)
    read.append(store.gather(3, [1], 5))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.03)
while not read:
    rows = store.gather(3, [1], 5)
    store.close()
    store = actshard.open(sys.argv[1], checksums=False)
assert np.array_equal(rows, read[0])
"""


@pytest.mark.slow
def test_a_signal_handler_may_read_the_shard_whose_reading_it_interrupts(tmp_path: Path) -> None:
    array = np.resize(np.random.default_rng(0).standard_normal(100_003, np.float32), (6000, 2048))
    write(tmp_path, [{"layer_3": [item(0, values(0, 3, 1, 2048))]}, {"layer_3": [item(1, array)]}])
    subprocess.run([sys.executable, "-W", "ignore", "-c", HANDLER, str(tmp_path)], timeout=PATIENCE, check=True)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda c: c.update(layers_extracted=[99, 98]), r"layers_extracted is \[99, 98\].*contain \[3, 9\]"),
        (lambda c: c.update(layers_extracted=[-1, 9]), "layers_extracted"),
        (lambda c: c.update(layers_extracted=[3]), "layers_extracted"),
        (lambda c: c.update(layers_extracted=[3, 9, 9]), "layers_extracted"),
        (lambda c: c.update(layers_extracted="3, 9"), "layers_extracted"),
        (lambda c: c.update(model_params={"hidden_size": 999}), "hidden_size is 999, but rows have 8"),
    ],
)
def test_an_extraction_that_contradicts_its_shards_is_a_warning_and_a_finding(
    tmp_path: Path, function: Any, said: str
) -> None:
    folder = dataset(tmp_path / "d")
    change(folder, lambda m: m["extraction_config"].update(model_params={"hidden_size": 8}, layers_extracted=[9, 3]))
    assert opened(folder).warnings == ()
    assert not actshard.verify(folder).findings
    change(folder, lambda m: function(m["extraction_config"]))
    with pytest.warns(actshard.ActshardWarning, match=said):
        (warning,) = actshard.open(folder).warnings
    assert "extraction_config" in warning
    assert [f.code for f in actshard.verify(folder).findings] == ["claim"]


def read_ahead(store: actshard.Store, example: int) -> None:
    """Reads an example's shard ahead, and waits for the thread to end."""
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    store.rows.read_ahead(example)
    wait_until(lambda: set(tasks.iterdir()) <= before, "the thread")


@pytest.mark.parametrize("gz", [True, False])
def test_a_shard_read_ahead_is_not_read_again(tmp_path: Path, gz: bool, io: str) -> None:
    store = opened(dataset(tmp_path / "d", gz=gz), io)
    read_ahead(store, 13)
    kept, away = tmp_path / "d" / f"shard_0003.pkl{'.gz' if gz else ''}", tmp_path / "away"
    kept.rename(away)
    assert store.tokens_of([13, 14]).tolist() == [3, 4]
    away.rename(kept)  # rows of plain shards are read in place
    assert np.array_equal(store.sequence(13, 9), values(13, 9))
    assert store.rows.inflated == (2 if gz else 0)


@pytest.mark.parametrize("gz", [True, False])
def test_a_shard_read_ahead_is_forgotten_for_another_and_on_request(tmp_path: Path, gz: bool, io: str) -> None:
    folder = dataset(tmp_path / "d", gz=gz)
    for forget in (18, None, 1 << 40):  # another shard; none; an example that does not exist does not count
        store = opened(folder, io)
        read_ahead(store, 13)
        store.rows.read_ahead(forget)
        lost = next(folder.glob("shard_0003*"))
        data = lost.read_bytes()
        lost.unlink()
        if forget == 1 << 40:
            assert store.tokens_of([13]).tolist() == [3]
        else:
            with pytest.raises(actshard.MissingFileError, match="shard_0003"):
                store.tokens_of([13])
        lost.write_bytes(data)
        assert np.array_equal(store.sequence(13, 3), values(13, 3))
    rows = store.rows
    store.close()
    rows.read_ahead(0)


@pytest.mark.parametrize("gz", [True, False])
def test_errors_of_a_shard_read_ahead_are_those_of_reading_it(tmp_path: Path, gz: bool, io: str) -> None:
    folder = dataset(tmp_path / "d", gz=gz)
    file = next(folder.glob("shard_0003*"))
    good = file.read_bytes()
    for bad in (good[:-5], b"", good[:40] + b"xxxx" + good[44:], None):
        file.unlink() if bad is None else file.write_bytes(bad)
        found = []
        for ahead in (False, True):
            store = opened(folder, io)
            if ahead:
                read_ahead(store, 13)
            with pytest.raises(actshard.ActshardError) as caught:
                store.sequence(13, 9)
            found.append((type(caught.value), str(caught.value)))
            assert np.array_equal(store.sequence(18, 9), values(18, 9))
        assert found[0] == found[1]


def test_a_forked_child_reads_the_shard_that_its_parent_reads_ahead(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d")
    for _ in range(20):
        store = opened(folder)
        store.rows.read_ahead(13)
        pid = os.fork()
        if pid == 0:
            signal.alarm(PATIENCE)  # a hang is a failure
            os._exit(0 if np.array_equal(store.sequence(13, 9), values(13, 9)) else 3)
        assert os.waitpid(pid, 0)[1] == 0
        assert np.array_equal(store.sequence(13, 9), values(13, 9))


@pytest.mark.parametrize("gz", [True, False])
@pytest.mark.parametrize("examples", [None, list(range(24))[::-1], [0, 23, 7, 12, 1, 18, 6]])
def test_conversions_read_each_shard_ahead(tmp_path: Path, gz: bool, examples: list[int] | None) -> None:
    folder = dataset(tmp_path / "d", gz=gz)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actshard.convert(folder, tmp_path / "made.zarr", "zarr", examples=examples, verify=True)
    made = actshard.open(tmp_path / "made.zarr")
    for e, of in enumerate(range(24) if examples is None else examples):
        assert np.array_equal(made.sequence(e, 9), values(of, 9))


def test_a_conversion_that_fails_forgets_the_shard_read_ahead(tmp_path: Path) -> None:
    store = opened(dataset(tmp_path / "d"))
    told: list[int | None] = []

    class Rows:
        def __getattr__(self, name: str) -> Any:
            return getattr(rows, name)

        def read_ahead(self, example: int | None) -> None:
            told.append(example)
            rows.read_ahead(example)

    def stop(done: int, total: int, size: int) -> None:
        raise KeyboardInterrupt

    rows = store.contents.rows
    object.__setattr__(store.contents, "rows", Rows())
    store._rows = store.contents.rows
    with pytest.raises(KeyboardInterrupt) as caught:
        actshard.convert(store, tmp_path / "made.zarr", "zarr", progress=stop)
    assert told == [6, None]
    del caught
