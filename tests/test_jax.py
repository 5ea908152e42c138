"""``actshard.jax`` on four CPU devices, and rows in grain's loaders. JAX must see its flags before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import actshard
from actshard.jax import DataSource, batches
from conftest import GOLDEN, saev_dump
from waiting import PATIENCE

SOURCE = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")


def run(code: str, *more: str) -> None:
    """Runs a program that asserts, on four devices."""
    setup = f"import sys, numpy as np, actshard, actshard.jax\nfolder = {str(SOURCE)!r}\n"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", setup + code, *more],
        capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_source_of_rows_reads_what_a_stream_reads_and_names_itself_alike() -> None:
    import pickle

    store = actshard.open(SOURCE)
    layer = store.layers[1]
    source = DataSource(store, layer)
    rows = [
        row
        for batch in store.stream(layer, 7)
        for row in zip(batch.activations, batch.examples, batch.tokens, strict=True)
    ]
    assert len(source) == len(rows)
    for item, (activation, example, token) in zip(source.__getitems__(range(len(source))), rows, strict=True):
        assert np.array_equal(item["activation"], activation, equal_nan=True)
        assert (item["example"], item["token"]) == (example, token)
    copy = pickle.loads(pickle.dumps(source))
    assert repr(copy) == repr(source) == repr(DataSource(actshard.open(SOURCE), layer))
    # grain refuses checkpoints of earlier releases if other fields are added.
    assert [field.partition("=")[0] for field in repr(source).removesuffix(")").partition("(")[2].split(", ")] == [
        *("dataset", "layer", "tokens", "selection", "rows", "dtype")
    ]
    assert repr(source) not in (repr(DataSource(store, layer, tokens="all")), repr(DataSource(store, store.layers[0])))
    assert np.array_equal(copy[-1]["activation"], rows[-1][0], equal_nan=True)
    assert source.__getitems__([]) == []
    with pytest.raises(IndexError, match="out of range"):
        source[len(source)]
    with pytest.raises(actshard.ArgumentTypeError, match="integers"):
        source[True]
    with pytest.raises(actshard.ArgumentTypeError, match="integers"):
        source[1.0]
    with pytest.raises(actshard.ArgumentTypeError, match="stream"):
        batches(store)  # type: ignore[arg-type]


@pytest.mark.peers
def test_batches_equal_the_streams_and_keep_their_dtype(tmp_path: Path) -> None:
    run(
        """
import jax, ml_dtypes
from actshard import ArgumentError, DtypeError
store = actshard.open(folder)
layer = store.layers[1]
for dtype, reuse in ((None, False), (None, True), ("bfloat16", False), ("float16", True)):
    options = dict(shuffle="exact", dtype=dtype, reuse=reuse)
    wanted = [(np.array(b.activations), b.examples, b.tokens, b.layers, b.labels) for b in store.stream(layer, 8, **options)]
    found = list(actshard.jax.batches(store.stream(layer, 8, **options)))
    assert len(found) == len(wanted) > 3
    for one, (activations, *rest) in zip(found, wanted):
        assert one["activations"].dtype == activations.dtype
        assert np.array_equal(np.asarray(one["activations"]).view(np.uint8), activations.view(np.uint8))
        for name, array in zip(("examples", "tokens", "layers", "labels"), rest):
            assert np.array_equal(np.asarray(one[name]), array), name
            assert one[name].dtype == (np.int32 if array.dtype == np.int64 else array.dtype)
for several, interleave in ((True, False), (True, True)):
    made = dict(interleave=interleave)
    for b, a in zip(store.stream("all", 8, **made), actshard.jax.batches(store.stream("all", 8, **made))):
        assert np.array_equal(np.asarray(a["activations"]), b.activations, equal_nan=True)
        assert np.array_equal(np.asarray(a["layers"]), b.layers)
try:
    actshard.jax.batches(store.stream(layer, 8, dtype="float64"))
except DtypeError as error:
    assert "float32" in str(error)
else:
    raise AssertionError
"""
    )


@pytest.mark.peers
def test_rows_are_split_over_devices_and_a_state_counts_yielded_batches() -> None:
    run(
        """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from actshard import ArgumentError
store = actshard.open(folder)
layer = store.layers[0]
mesh = jax.make_mesh((4,), ("data",))
options = dict(shuffle="exact", drop_last=True)
wanted = [np.array(b.activations) for b in store.stream(layer, 8, **options)]
stream = store.stream(layer, 8, **options)
for i, batch in enumerate(actshard.jax.batches(stream, sharding=NamedSharding(mesh, P("data", None)))):
    rows = batch["activations"]
    assert np.array_equal(np.asarray(rows), wanted[i], equal_nan=True)
    assert [s.data.shape[0] for s in rows.addressable_shards] == [2, 2, 2, 2]
    assert len({s.device for s in batch["examples"].addressable_shards}) == 4
    assert batch["layers"].sharding.is_fully_replicated
    if i == 2:
        break
state = stream.state_dict()
assert state["batch"] == 3
again = store.stream(layer, 8, **options)
again.load_state_dict(state)
rest = [np.asarray(b["activations"]) for b in actshard.jax.batches(again, jax.devices()[2])]
assert len(rest) == len(wanted) - 3
assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(rest, wanted[3:]))
assert again.state_dict()["epoch"] == 1 and again.state_dict()["batch"] == 0
columns = next(iter(actshard.jax.batches(store.stream(layer, 8), sharding=NamedSharding(mesh, P(None, "data")))))
assert {s.data.shape for s in columns["activations"].addressable_shards} == {(8, store.d_model // 4)}
for given, said in ((3, "NamedSharding"), (NamedSharding(mesh, P("data")), "drop_last=True")):
    try:
        list(actshard.jax.batches(store.stream(layer, 9), sharding=given))
    except ArgumentError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
"""
    )


@pytest.mark.peers
def test_grain_reads_rows_in_workers_and_continues_at_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("grain")
    file = tmp_path / "program.py"  # workers import the main module
    file.write_text(
        f"""
import numpy as np, actshard, grain
from actshard.jax import DataSource

def main():
    store = actshard.open({str(SOURCE)!r})
    layer = store.layers[0]
    source = DataSource(store, layer)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    wanted = np.concatenate([b.activations for b in store.stream(layer, 64)])
    sampler = grain.samplers.IndexSampler(
        len(source), shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=3
    )
    operations = [grain.transforms.Batch(8)]
    def loader(workers):
        return grain.DataLoader(data_source=source, sampler=sampler, operations=operations, worker_count=workers)
    alone = [b for b in loader(0)]
    seen = np.concatenate([b["activation"] for b in alone])
    assert seen.dtype == store.dtype
    assert sorted(map(bytes, seen)) == sorted(map(bytes, wanted))
    with_workers = iter(loader(2))
    first = [next(with_workers) for _ in range(2)]
    state = with_workers.get_state()
    rest = list(with_workers)
    assert sorted(bytes(row) for b in first + rest for row in b["activation"]) == sorted(map(bytes, wanted))
    resumed = iter(loader(2))
    resumed.set_state(state)
    assert [b["activation"].tobytes() for b in resumed] == [b["activation"].tobytes() for b in rest]
    dataset = grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset().batch(8)
    mapped = np.concatenate([b["activation"] for b in dataset])
    assert sorted(map(bytes, mapped)) == sorted(map(bytes, wanted))

if __name__ == "__main__":
    from absl import flags

    flags.FLAGS(["program"])  # as absl.app.run does; grain needs it for workers
    main()
"""
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.peers
def test_sequences_and_mixtures_keep_all_their_arrays(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "zarr", layers=["blocks.0", "blocks.1"], d_model=4) as writer:
        for i in range(12):
            writer.append([np.full((2, 2 + i % 3, 4), i, np.float32)], columns={"label": [i]})
    run(
        """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
store = actshard.open(sys.argv[1])
rows = NamedSharding(jax.make_mesh((4,), ("data",)), P("data"))
for options in ({}, {"pack": False}, {"fixed_shape": True}):
    for placed in (None, rows):
        if placed is not None and "fixed_shape" not in options:
            continue
        stream = store.sequences_stream(["blocks.1"], 16, columns=["label"], **options)
        wanted = [batch.arrays() for batch in stream.afresh()]
        for batch, want in zip(actshard.jax.batches(stream, placed), wanted, strict=True):
            assert batch.keys() == want.keys() and batch["layers"] == ["blocks.1"]
            assert all(np.array_equal(np.asarray(batch[name]), want[name]) for name in want)
            if placed is not None:
                assert [s.data.shape[0] for s in batch["activations"].addressable_shards] == [4, 4, 4, 4]
                assert not batch["segment_ids"].sharding.is_fully_replicated
                assert batch["offsets"].sharding.is_fully_replicated and batch["label"].sharding.is_fully_replicated
mixed = actshard.mix({store: 0.5, actshard.open(sys.argv[1]): 0.5}).stream("blocks.0", 4)
wanted = [batch.sources for batch in mixed]
mixed.set_epoch(0)
assert [np.asarray(b["sources"]).tolist() for b in actshard.jax.batches(mixed)] == [w.tolist() for w in wanted]
pair = actshard.pair(store, actshard.open(sys.argv[1])).stream("blocks.0", 4)
assert next(iter(actshard.jax.batches(pair)))["stores"].tolist() == [0, 1]
""",
        str(tmp_path / "d"),
    )


def test_a_source_has_one_name_whatever_integer_names_its_layer() -> None:
    store = actshard.open(SOURCE)
    layer = store.layers[0]
    assert repr(DataSource(store, np.int64(layer))) == repr(DataSource(store, layer))  # type: ignore[arg-type]
