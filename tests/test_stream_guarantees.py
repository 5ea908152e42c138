"""Guarantees of a loop over a stream: states are checked, loops do not interfere, and errors are never silent."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import pickle
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import actshard
from actshard.streaming import quality
from conftest import GOLDEN, refuses, saev_dump
from shell import run_script
from waiting import PATIENCE
from zarr_files import write_store

SAEV = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")
SHUFFLES = [None, "window", "exact"]


def made(path: Path, values: np.ndarray, format: str = "zarr", **columns: Any) -> actshard.Store:
    layers = list(range(values.shape[1]))
    with actshard.create(path, format, layers=layers, d_model=values.shape[3]) as writer:
        writer.append(values, columns=columns or None)
    return quietly(writer.path)


def quietly(path: Path, **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, **options)


def numbers(*shape: int, seed: int = 0, dtype: str = "f4") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_state_of_another_dataset_is_refused(tmp_path: Path, shuffle: Any) -> None:
    """Also a dataset with equally many examples, tokens and rows, but other values, width, dtype or format."""
    store = made(tmp_path / "a", numbers(50, 1, 6, 8))
    stream = store.stream(0, 16, shuffle=shuffle)
    next(iter(stream))
    state = json.loads(json.dumps(stream.state_dict()))
    others = {
        "values": made(tmp_path / "b", numbers(50, 1, 6, 8, seed=1)),
        "width": made(tmp_path / "c", numbers(50, 1, 6, 16)),
        "type": made(tmp_path / "d", numbers(50, 1, 6, 8, dtype="f2")),
        "format": made(tmp_path / "e", numbers(50, 1, 6, 8), "saev"),
    }
    for what, other in others.items():
        with pytest.raises(actshard.ArgumentError, match="the state belongs to another") as caught:
            other.stream(0, 16, shuffle=shuffle).load_state_dict(state)
        assert len(str(caught.value).splitlines()) == 1, what
    # Moved, copied, or opened with other options: the same dataset.
    moved = tmp_path / "somewhere/else"
    shutil.copytree(tmp_path / "a", moved)
    same = actshard.open(moved, io="pread").stream(0, 16, shuffle=shuffle)
    same.load_state_dict(state)
    assert same.state_dict()["batch"] == 1


def test_a_state_of_another_centre_or_scale_is_refused() -> None:
    store = quietly(SAEV)
    stats = store.stats(5)
    options: dict[str, Any] = {"center": stats.mean, "scale": stats.inverse_std}
    state = store.stream(5, 8, **options).state_dict()
    assert len(json.dumps(state)) < 1000
    store.stream(5, 8, **options).load_state_dict(state)
    for changed in (
        {"center": None},
        {"scale": None},
        {"scale": 2.0},
        {"scale": "unit-norm"},
        {"center": stats.mean + 1},
    ):
        with pytest.raises(actshard.ArgumentError, match=next(iter(changed))):
            store.stream(5, 8, **{**options, **changed}).load_state_dict(state)


def test_a_state_of_an_older_release_loads_with_a_warning_if_it_agrees() -> None:
    store = quietly(SAEV)
    stream = store.stream(5, 8, shuffle="window", memory=20_000)
    settings = stream.state_dict()["settings"]
    new = {"dataset", "format", "d_model", "stored", "units", "sample", "dtype", "shape"}
    old = {"version": 1, "epoch": 3, "batch": 2, "settings": {k: v for k, v in settings.items() if k not in new}}
    with pytest.warns(actshard.ActshardWarning, match="does not name its dataset"):
        stream.load_state_dict(old)
    assert (stream.epoch, stream.state_dict()["batch"]) == (3, 2)
    old["settings"]["rows"] += 1
    with pytest.raises(actshard.ArgumentError, match="rows"):
        stream.load_state_dict(old)
    later = {k: v for k, v in settings.items() if k not in ("sample", "dtype", "shape")}
    with pytest.warns(actshard.ActshardWarning, match=r"does not name its dataset completely \(dtype, sample, shape"):
        stream.load_state_dict({"version": 2, "epoch": 3, "batch": 2, "settings": later})
    with pytest.raises(actshard.ArgumentError, match="another dataset"):
        stream.load_state_dict({"version": 2, "epoch": 3, "batch": 2, "settings": {**later, "dataset": "0" * 16}})


# -- one loop at a time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_loop_that_another_one_supersedes_fails(shuffle: Any) -> None:
    store = quietly(SAEV)
    stream = store.stream(5, 8, shuffle=shuffle)
    with pytest.raises(actshard.ClosedError, match="another loop"):
        list(zip(stream, stream, strict=False))
    seen: list[int] = []
    with pytest.raises(actshard.ClosedError, match="another loop"):
        peek(stream, seen)
    assert len(seen) == 1
    loop = iter(stream)
    next(loop)
    stream.load_state_dict(stream.state_dict())
    for _ in range(2):
        with pytest.raises(actshard.ClosedError, match="a state was loaded"):
            next(loop)
    # A loop that ended or was closed stays ended.
    loop = iter(stream)
    assert len(list(loop)) == len(stream) - 1
    again = iter(stream)
    assert list(loop) == []
    stream.close()
    assert list(again) == []
    assert stream.epoch == 1


def peek(stream: actshard.Stream, seen: list[int]) -> None:
    for batch in stream:
        seen.append(len(batch))
        next(iter(stream))


def test_a_loop_closed_by_another_thread_is_no_finished_epoch() -> None:
    store = quietly(SAEV)
    for _ in range(30):
        stream = store.stream(5, 1, shuffle="window")
        loop = iter(stream)
        seen: list[int] = []
        thread = threading.Thread(target=lambda loop=loop, seen=seen: seen.extend(len(b) for b in loop))
        thread.start()
        stream.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert stream.epoch == (len(seen) == len(stream))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_an_epoch_chosen_within_a_loop_is_that_of_the_next_one(shuffle: Any) -> None:
    store = quietly(SAEV)
    epochs = []
    reference = store.stream(5, 8, shuffle=shuffle)
    for epoch in (0, 5):
        reference.set_epoch(epoch)
        epochs.append([b.examples.tolist() for b in reference])
    stream = store.stream(5, 8, shuffle=shuffle)
    seen = []
    for k, batch in enumerate(stream):
        seen.append(batch.examples.tolist())
        if k == 2:
            stream.set_epoch(5)
            assert (stream.state_dict()["epoch"], stream.state_dict()["batch"]) == (0, 3)
            resumed = pickle.loads(pickle.dumps(stream))
            assert [b.examples.tolist() for b in resumed] == epochs[0][3:]
    assert seen == epochs[0]
    assert stream.epoch == 5
    assert [b.examples.tolist() for b in stream] == epochs[1]
    # And at the position where the loop was left.
    stream.set_epoch(0)
    loop = iter(stream)
    next(loop)
    stream.set_epoch(5)
    assert [b.examples.tolist() for b in stream] == epochs[1]


def test_an_interrupted_loop_leaves_nothing_for_the_end_of_the_interpreter() -> None:
    code = (
        "import actshard, sys\n"
        "stream = actshard.open(sys.argv[1]).stream(5, 2, shuffle='window')\n"
        "for batch in stream:\n"
        "    kept = sys.modules['__main__'].__dict__.setdefault('loops', []); kept.append(stream._live())\n"
        "    raise KeyboardInterrupt\n"
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(SAEV)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert "Exception ignored" not in done.stderr
        assert done.stderr.strip().endswith("KeyboardInterrupt")


# -- close() and labels ------------------------------------------------------------------------------------------------


def held(folder: Path) -> tuple[int, int]:
    """This process's descriptors and mappings below a folder."""
    fds = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread has closed it meanwhile
            fds += str(link.readlink()).startswith(str(folder))
    return fds, sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("name", ["saev", "lmprobe", "zarr", "pickle", "logits"])
def test_close_gives_files_back_while_the_store_lives(name: str, io: str, tmp_path: Path) -> None:
    source = {
        "saev": SAEV,
        "lmprobe": GOLDEN / "lmprobe/fullseq_f32",
        "zarr": GOLDEN / "zarr/run_20260122_101112",
        "pickle": GOLDEN / "pickle/mixed_compression",
        "logits": GOLDEN / "lmprobe/logits_only",
    }[name]
    folder = tmp_path / source.name
    shutil.copytree(source, folder)
    store = quietly(folder, io=io)
    if store.layers:
        for layer in store.layers:
            store.sequences(np.arange(store.num_examples), layer)
        list(store.stream(store.layers[0], 5))
    assert store.table.num_rows == store.num_examples
    assert name not in ("saev",) or store.labels is not None
    if name == "logits":
        store.logits()
    assert io == "pread" or name == "pickle" or held(folder) != (0, 0)
    store.close()
    gc.collect()
    assert held(folder) == (0, 0)
    reads: list[Any] = [lambda: store.table, lambda: store.labels, lambda: store.read_columns([])]
    if store.layers:
        reads += [lambda: store.gather(store.layers[0], 0, 0), lambda: store.stream(store.layers[0], 4)]
    if name == "logits":
        reads.append(store.logits)
    for read in reads:
        with pytest.raises(actshard.ClosedError):
            read()
    store.close()


def test_labels_that_are_cut_short_kill_nobody(tmp_path: Path, io: str) -> None:
    folder = tmp_path / SAEV.name
    code = (
        "import actshard, os, sys\n"
        "path, io, first = sys.argv[1:]\n"
        "store = actshard.open(path, io=io)\n"
        "if first == 'yes': before = store.labels.copy()\n"
        "os.truncate(path + '/labels.bin', 10)\n"
        "try:\n"
        "    n = sum(len(b) + int(b.labels.sum() * 0) for b in store.stream(5, 8, ignore_labels=[0]))\n"
        "    assert (store.labels == before).all()\n"
        "    print('read')\n"
        "except actshard.TruncatedFileError as error:\n"
        "    print('refused', error.path.name)\n"
    )
    for first, said in (("yes", "read"), ("no", "refused labels.bin")):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(SAEV, folder)
        done = run_script(code, folder, io, first)
        assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


# -- no silent errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["saev", "lmprobe", "zarr", "pickle"])
def test_values_that_become_infinite_are_told(tmp_path: Path, io: str, format: str) -> None:
    values = numbers(6, 2, 3, 8)
    values[2, 1, :, 3] = 1e6
    values[4, 1, 0, 0] = np.inf
    values[5, 1, 2, 7] = -70_000
    store = made(tmp_path / "d", values, format)
    store = quietly(store.path, io=io)
    told = "layer 1: 4 finite values became infinite as float16"
    every = (np.repeat(np.arange(6), 3), np.tile(np.arange(3), 6))
    with pytest.warns(actshard.OverflowWarning, match=told) as caught:
        found = store.gather(1, *every, dtype="float16")
    assert Path(caught[0].filename) == Path(__file__)
    assert np.isinf(found).sum() == 5
    with pytest.warns(actshard.OverflowWarning, match=told):
        store.sequences(np.arange(6), 1, dtype="float16")
    with pytest.warns(actshard.OverflowWarning, match="layer 1: 3 finite"):
        store.sequence(2, 1, dtype="float16")
    with pytest.warns(actshard.OverflowWarning, match="layer 1: 2 finite"):
        store.last_tokens(1, dtype="float16")
    with pytest.warns(actshard.OverflowWarning, match="layer 1: 1 finite"):
        store.gather(1, 2, 0, dtype="float16")
    for shuffle, options in itertools.product(SHUFFLES, ({}, {"center": 0.0}, {"scale": 1.0})):
        with pytest.warns(
            actshard.OverflowWarning, match="layers 1: . finite values became infinite as float16"
        ) as caught:
            list(store.stream(1, 5, shuffle=shuffle, dtype="float16", **options))
        assert len(caught) == 1
    with pytest.warns(actshard.OverflowWarning, match="float32"):
        list(store.stream(1, 50, scale=1e38))
    # No warning where nothing overflows.
    assert np.isinf(store.gather(1, *every, dtype="bfloat16").astype("f4")).sum() == 1
    store.gather(0, *every, dtype="float16")
    list(store.stream(0, 5, dtype="float16"))
    list(store.stream([0, 1], 5, dtype="bfloat16"))


def test_scale_multiplies_and_the_deviation_itself_is_refused() -> None:
    store = quietly(SAEV)
    stats = store.stats(5)
    with pytest.raises(actshard.ArgumentError, match="inverse_std"):
        store.stream(5, 8, center=stats.mean, scale=stats.std)
    rows = np.concatenate([b.activations for b in store.stream(5, 8, center=stats.mean, scale=stats.inverse_std)])
    assert np.allclose(rows.mean(axis=0), 0, atol=1e-4)
    assert np.allclose(rows.std(axis=0)[stats.std > 0], 1, atol=1e-3)
    # Values computed from it are accepted as factors.
    for factor in (1 / stats.std, stats.std * 1, stats.std.copy(), stats.std.tolist()):
        next(iter(store.stream(5, 8, scale=factor)))
    for bad in (True, np.bool_(1), [True] * store.d_model):
        for name in ("center", "scale"):
            with pytest.raises(actshard.ArgumentError, match="expected numbers"):
                store.stream(5, 8, **{name: bad})  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [True, False, np.bool_(True), 1.0, np.float64(0)])
def test_a_bool_or_a_float_is_no_layer(tmp_path: Path, layer: Any) -> None:
    store = made(tmp_path / "d", numbers(3, 2, 4, 8))
    for read in (
        lambda: store.gather(layer, 0, 0),
        lambda: store.last_tokens(layer),
        lambda: store.sequence(0, layer),
        lambda: store.sequences([0], layer),
        lambda: store.sequences([0, 1], [layer, layer]),
        lambda: store.stats(layer),
        lambda: store.stream(layer, 4),
        lambda: store.stream([layer], 4),
    ):
        with pytest.raises((actshard.LayerError, actshard.ArgumentError)):
            read()
    for fine in (1, np.int64(1), np.array(1)):
        assert np.array_equal(store.gather(fine, 0, 0), store.gather(1, 0, 0))  # type: ignore[arg-type]
    with pytest.raises(actshard.LayerError, match="take several, sequences"):
        store.gather([0, 1], 0, 0)  # type: ignore[arg-type]


def test_masks_and_columns_choose_examples(tmp_path: Path) -> None:
    values = numbers(6, 1, 3, 8)
    store = made(tmp_path / "d", values, label=[1, 0, 1, 1, 0, None])
    column = store.table["label"]
    chosen = [0, 2, 3]
    equal = pc.equal(column, 1)
    for examples in (
        equal,
        equal.combine_chunks(),
        equal.fill_null(False).to_numpy(),
        [True, False, True, True, False, False],
    ):
        assert np.array_equal(store.last_tokens(0, examples), values[chosen, 0, -1])
        assert np.array_equal(store.gather(0, examples, 1), values[chosen, 0, 1])
        assert len(store.sequences(examples, 0)) == 3
        assert next(iter(store.stream(0, 100, keep=examples))).examples.tolist() == [0, 0, 0, 2, 2, 2, 3, 3, 3]
    # A comparison of the column gives one bool, which selected no example.
    wrong: Any = column == 1
    assert wrong is False
    for read in (
        lambda: store.last_tokens(0, wrong),
        lambda: store.sequences(wrong, 0),
        lambda: store.gather(0, wrong, 0),
        lambda: store.stream(0, 4, keep=lambda t: t["label"] == 1),
        lambda: store.stream(0, 4, keep=wrong),
    ):
        with pytest.raises(actshard.ArgumentError, match="to_numpy"):
            read()
    for read in (lambda e: store.last_tokens(0, e), lambda e: store.sequences(e, 0), lambda e: store.gather(0, e, 0)):
        with pytest.warns(actshard.ActshardWarning, match="no example was chosen.*to_numpy"):
            assert len(read(np.flatnonzero(wrong))) == 0
        assert len(read([])) == 0
    for bad in (np.ones(5, bool), np.ones((6, 3), bool), np.ones(0, bool)):
        with pytest.raises(actshard.ArgumentError, match="expected 6 flags, one per example"):
            store.last_tokens(0, bad)


@pytest.mark.parametrize(
    "keep", [5, 1.5, object(), (x for x in [True] * 6), b"no", [5] * 6, [None] * 6, np.zeros(6), {}]
)
def test_flags_that_make_no_sense_are_our_errors(tmp_path: Path, keep: Any) -> None:
    store = made(tmp_path / "d", numbers(6, 1, 3, 8))
    with pytest.raises(actshard.ArgumentError):
        store.stream(0, 4, keep=keep)
    with pytest.raises(actshard.ArgumentError):
        store.stats(0, keep=lambda table: keep)


def test_a_text_as_flags_is_the_name_of_a_column(tmp_path: Path) -> None:
    store = made(tmp_path / "d", numbers(6, 1, 3, 8))
    with pytest.raises(actshard.NotStoredError, match="keep: no column 'no'"):
        store.stream(0, 4, keep="no")
    with pytest.raises(actshard.ArgumentError, match="expected 6 entries"):
        store.stats(0, keep=lambda table: "no")


def test_rows_that_fill_examples_up_are_no_content(tmp_path: Path) -> None:
    """saev's examples have equal lengths; the original lengths are stored separately."""
    lengths = np.array([4, 1, 0, 3, 4])
    values = numbers(5, 2, 5, 8) + 3
    for i, n in enumerate(lengths):
        values[i, :, 1 + n :] = 0
    with actshard.create(tmp_path / "d", "saev", layers=[0, 1], d_model=8, cls_token=True) as writer:
        writer.append(values)
    assert quietly(writer.path).content_lengths is None
    (writer.path / "actshard_lengths.bin").write_bytes(lengths.astype("<u4").tobytes())
    store = actshard.open(writer.path)
    assert store.info()["also"] == ["lengths before padding"]
    real = [(e, t) for e, n in enumerate(lengths) for t in range(1, 1 + n)]
    for shuffle in SHUFFLES:
        found = [
            k
            for b in store.stream(1, 3, shuffle=shuffle)
            for k in zip(b.examples.tolist(), b.tokens.tolist(), strict=True)
        ]
        assert sorted(found) == real
    assert store.stream(1, 3, tokens="all").num_rows == 25
    assert store.stream(1, 3, tokens="special").num_rows == 5
    kept = np.array([True, True, False, True, False])
    last = next(iter(store.stream(1, 30, tokens="last", keep=kept)))
    assert (last.examples.tolist(), last.tokens.tolist()) == ([0, 1, 3], lengths[kept].tolist())
    content = store.stream(1, 30, keep=kept)
    assert content.num_rows == lengths[kept].sum()
    assert store.stats(1).rows == len(real)
    assert store.stats(1).min.min() != 0
    assert np.array_equal(store.last_tokens(1), values[np.arange(5), 1, lengths])
    assert np.array_equal(store.last_tokens(0, [3, 3]), values[[3, 3], 0, 3])
    with pytest.raises(actshard.OutOfRangeError):
        store.last_tokens(0, [5])
    assert store.sequence(1, 0).shape == (5, 8)
    for damaged, kind in (
        (b"\1" * 19, actshard.TruncatedFileError),
        (b"\0" * 24, actshard.FormatError),
        (b"\1" * 20, actshard.FormatError),
    ):
        (writer.path / "actshard_lengths.bin").write_bytes(damaged)
        with refuses(kind, writer.path / "actshard_lengths.bin"):
            quietly(writer.path).stream(0, 4)
        assert damaged == b"\1" * 20 or not actshard.verify(writer.path).ok


def test_lengths_survive_padding_converting_and_merging(tmp_path: Path) -> None:
    """Ragged examples in saev: its loaders read zero padding, ours and conversions do not."""
    counts = [3, 1, 5, 2, 5]
    items = [numbers(1, n, 8, seed=n) + 3 for n in counts]
    with actshard.create(tmp_path / "z", "zarr", layers=[0], d_model=8) as writer:
        writer.append(items)
    done = actshard.convert(writer.path, tmp_path / "s", "saev", pad=True, verify=True)
    assert [loss.what for loss in done.losses].count("padding") == 1
    dump = quietly(done.path)
    rows = np.concatenate([x[0] for x in items])
    for store in (
        dump,
        quietly(actshard.convert(dump, tmp_path / "again", "saev", metadata={"ckpt": "other"}).path),
        quietly(
            actshard.merge(
                tmp_path / "one", [done.path, actshard.convert(dump, tmp_path / "two", "saev", examples=[1, 2]).path]
            )
        ),
    ):
        want = [*counts, *(counts[1:3] if store.num_examples > 5 else [])]
        assert store.content_lengths is not None
        assert store.content_lengths.tolist() == want
        assert set(store.token_counts.tolist()) == {5}
        found = next(iter(store.stream(0, 1000))).activations
        assert np.array_equal(found[: len(rows)], rows)
        assert len(found) == sum(want)
        assert np.array_equal(store.last_tokens(0)[:5], [x[0, -1] for x in items])
        assert actshard.verify(store.path).ok
    with actshard.create(tmp_path / "made", "saev", layers=[0], d_model=8, pad=True, tokens_per_example=5) as writer:
        writer.append(items[:2])
        writer.append(items[2:])
    made = quietly(writer.path)
    assert made.content_lengths is not None
    assert made.content_lengths.tolist() == counts
    for format in ("zarr", "lmprobe", "pickle"):
        told = actshard.convert(dump, tmp_path / f"back-{format}", format, verify=True)
        assert "padding" not in [loss.what for loss in told.losses]
        back = actshard.open(told.path)
        assert back.token_counts.tolist() == counts
        assert all(np.array_equal(back.sequence(e, 0), item[0]) for e, item in enumerate(items))
    with actshard.create(
        tmp_path / "cls", "saev", layers=[0], d_model=8, pad=True, tokens_per_example=5, cls_token=True
    ) as writer:
        writer.append(items)
    for tokens, skipped in (("all", 0), ("content", 1)):
        made = actshard.open(
            actshard.convert(writer.path, tmp_path / f"cls-{tokens}", "pickle", tokens=tokens, examples=[4, 0, 3]).path
        )
        for e, item in enumerate((items[4], items[0], items[3])):
            assert np.array_equal(made.sequence(e, 0), item[0, skipped:])
    last = actshard.open(actshard.convert(dump, tmp_path / "last", "lmprobe", tokens="last").path)
    assert np.array_equal(last.last_tokens(0), [x[0, -1] for x in items])
    # No lengths are stored if nothing was padded.
    same = actshard.convert(tmp_path / "z", tmp_path / "same", "saev", examples=[2, 4])
    assert not (same.path / "actshard_lengths.bin").exists()


def test_a_sparse_file_claims_no_memory(tmp_path: Path) -> None:
    """10^11 examples without a byte on disk: opening, streaming and printing are immediate and take little memory."""
    n = 10**11
    fields = {
        "family": "x", "ckpt": "y", "layers": [0], "content_tokens_per_example": 1, "cls_token": False, "d_model": 1,
        "n_examples": n, "max_tokens_per_shard": n, "data": "", "dataset": "d", "dtype": "float32", "protocol": "2.1",
    }  # fmt: skip
    (tmp_path / "metadata.json").write_text(json.dumps(fields))
    (tmp_path / "shards.json").write_text(json.dumps([{"name": "acts000000.bin", "n_examples": n}]))
    try:
        with (tmp_path / "acts000000.bin").open("wb") as file:
            file.truncate(4 * n)
        with (tmp_path / "labels.bin").open("wb") as file:
            file.truncate(n)
    except OSError:
        pytest.skip("this file system has no files of 400 GB")
    code = (
        "import actshard, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "store = actshard.open(sys.argv[1], io='pread')\n"
        "print(store.info()['tokens'], store.token_counts[-1])\n"
        "for shuffle in (None, 'window', 'exact'):\n"
        "    stream = store.stream(0, 4, shuffle=shuffle, memory='1MiB', tokens='all')\n"
        "    print(stream.num_rows)\n"
        "for read in (lambda: store.table, lambda: store.labels, lambda: store.stream(0, 4, ignore_labels=[1]),\n"
        "             lambda: store.stream(0, 4, keep=lambda t: None)):\n"
        "    try: read()\n"
        "    except actshard.ActshardError as error: print(type(error).__name__)\n"
    )
    done = run_script(code, tmp_path)
    told = done.stdout.split()
    assert told[:5] == [f"{n}", "1", *[f"{n}"] * 3], done.stderr
    assert len(told) == 9
    assert set(told[5:]) <= {"UnsupportedError", "FileAccessError"}
    # Metadata alone create no list of shards.
    fields["max_tokens_per_shard"] = 1
    (tmp_path / "metadata.json").write_text(json.dumps(fields))
    (tmp_path / "shards.json").unlink()
    report = actshard.verify(tmp_path)
    assert not report.ok
    assert len(report.findings) < 100


def test_the_quality_of_many_batches_is_measured_in_linear_work() -> None:
    """The number of accesses per batch does not grow with the number of batches."""
    looks = 0

    class Counted(np.ndarray):
        def __len__(self) -> int:
            nonlocal looks
            looks += 1
            return super().__len__()

    examples = np.arange(4000).reshape(2000, 2)
    batches = [(e.view(Counted), np.zeros(2, np.int64)) for e in examples]
    found = quality.measure(batches)
    assert found.distinct == 2
    assert looks < 50 * len(batches)


def test_values_print_short() -> None:
    store = quietly(SAEV)
    batch = next(iter(store.stream([0, 5], 8)))
    for value in (batch, store.stats(5)):
        assert len(repr(value)) < 200
        assert "\n" not in repr(value)
    with pytest.raises(actshard.ArgumentError, match="shuffle"):
        store.stream(5, 8, shuffle=True)  # type: ignore[arg-type]


def test_a_dataset_that_lies_together_in_odd_lengths(tmp_path: Path) -> None:
    """keep= accepts padded rectangles for ragged examples, whatever the padding."""
    lengths = np.array([0, 3, 1, 4], "i4")
    values = numbers(4, 1, 4, 2)
    store = actshard.open(write_store(tmp_path / "s.zarr", values, lengths, (1, 1, 4, 2)))
    keep = np.ones((4, 4), bool)
    keep[1, 1] = False
    found = [k for b in store.stream(0, 3, keep=keep) for k in zip(b.examples.tolist(), b.tokens.tolist(), strict=True)]
    assert found == [(1, 0), (1, 2), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3)]


def test_a_state_is_of_the_epoch_that_comes_next(tmp_path: Path) -> None:
    """An epoch set during a loop is read next, however the loop ends."""
    with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=2) as writer:
        writer.append(np.arange(24, dtype=np.float32).reshape(3, 1, 4, 2))
    store = actshard.open(tmp_path / "d")
    for end in (lambda s, i: s.close(), lambda s, i: i.clear(), lambda s, i: list(i[0])):
        stream = store.stream(0, 2, shuffle="exact")
        loop = [iter(stream)]
        next(loop[0])
        stream.set_epoch(5)
        assert stream.state_dict()["epoch"] == 0  # the epoch being read
        end(stream, loop)
        state = stream.state_dict()
        again = store.stream(0, 2, shuffle="exact")
        again.load_state_dict(state)
        assert (state["epoch"], state["batch"]) == (5, 0)
        assert [b.examples.tolist() for b in again] == [b.examples.tolist() for b in stream]
        assert again.epoch == stream.epoch == 6


def test_no_examples_are_warned_of_only_where_a_column_was_compared(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=2) as writer:
        writer.append(np.zeros((3, 1, 4, 2), np.float32), columns={"label": [0, 1, 1]})
    store = actshard.open(tmp_path / "d")
    none = np.zeros(0, np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(store.gather(0, none, none)) == len(store.last_tokens(0, none)) == len(store.sequences(none, 0)) == 0
    wrong: Any = store.table["label"] == 1
    with pytest.warns(actshard.ActshardWarning, match="no example was chosen"):
        store.last_tokens(0, np.flatnonzero(wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"interleave": np.zeros(0)},
        {"drop_last": "no"},
        {"reuse": np.zeros(2)},
        {"layer": np.zeros(0)},
        {"layer": range(1 << 40)},
        {"tokens": np.array(["all", "last"])},
        {"shuffle": np.array(["exact", "window"])},
        {"ignore_labels": range(1 << 40)},
        {"dtype": {"": ""}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arguments_of_odd_types_raise_errors_of_ours(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """numpy compares arrays elementwise, and list() exceeds memory: neither's exceptions are raised."""
    with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=2) as writer:
        writer.append(np.zeros((3, 1, 4, 2), np.float32))
    with pytest.raises(actshard.ActshardError):
        actshard.open(tmp_path / "d").stream(**{"layer": 0, "batch_size": 2, **wrong})


@pytest.mark.parametrize("tokens", ["content", "last"])
@pytest.mark.parametrize("by_way_of", [None, "zarr", "lmprobe", "pickle"])
@pytest.mark.parametrize("counts", [[5, 5, 5], [3, 2, 5]])
def test_content_that_is_left_without_its_cls_is_content(
    tmp_path: Path, tokens: str, by_way_of: str | None, counts: list[int]
) -> None:
    """The first content token of a dump converted without CLS is not mistaken for CLS."""
    rng = np.random.default_rng(0)
    items = [rng.standard_normal((1, n, 8)).astype(np.float32) for n in counts]
    with actshard.create(
        tmp_path / "cls", "saev", layers=[0], d_model=8, pad=True, tokens_per_example=5, cls_token=True
    ) as writer:
        writer.append(items)
    path = writer.path
    if by_way_of is None:
        path = actshard.convert(path, tmp_path / "d", "saev", tokens=tokens, pad=True).path
    else:
        path = actshard.convert(path, tmp_path / "way", by_way_of, tokens=tokens).path
        path = actshard.convert(path, tmp_path / "d", "saev", pad=True).path
    made = quietly(path)
    assert made.special_tokens == 0
    wanted = [item[0, 1:] if tokens == "content" else item[0, -1:] for item in items]
    found = np.concatenate([batch.activations for batch in made.stream(0, 99)])
    assert np.array_equal(found, np.concatenate(wanted))
    if by_way_of is None:  # accepted as requested
        kept = actshard.convert(
            writer.path, tmp_path / "e", "saev", tokens=tokens, pad=True, tokens_per_example=5, cls_token=True
        )
        assert quietly(kept.path).special_tokens == 1
