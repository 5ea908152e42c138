"""Guarantees of create(): examples read back after any batching and interruption; unsupported data are rejected."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import actshard
from conftest import bits, refuses
from waiting import PATIENCE

FORMATS = ("saev", "lmprobe", "zarr", "pickle")
LAYERS = [3, 7]
WIDTH = 8
RAGGED = ("lmprobe", "zarr", "pickle")


def examples(lengths: list[int], dtype: str = "float32", layers: int = 2, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((layers, n, WIDTH)).astype(np.dtype(actshard.base._arguments.dtype(dtype)[0]))
        for n in lengths
    ]


def check(path: Path, wanted: list[np.ndarray], layers: list[int] = LAYERS) -> actshard.Store:
    store = actshard.open(path)
    assert store.layers == tuple(layers)
    assert len(store) == len(wanted)
    for e, example in enumerate(wanted):
        for k, layer in enumerate(layers):
            found = store.sequence(e, layer)
            assert found.dtype == example.dtype
            assert found.shape == example[k].shape
            assert np.array_equal(bits(found), bits(example[k]))
    return store


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    flush=st.booleans(),
    format=st.sampled_from(RAGGED),
    shard=st.sampled_from([None, 300, 2000]),
)
def test_ragged_examples_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    cuts: list[int],
    flush: bool,
    format: str,
    shard: int | None,
) -> None:
    wanted = examples(lengths)
    path = tmp_path_factory.mktemp("made") / "d"
    own: dict[str, Any] = {} if format == "zarr" else {"shard_bytes": shard}
    if format == "zarr":
        own["chunk_tokens"] = 4
    if format == "lmprobe":
        own["storage"] = "full_sequence"
    with actshard.create(path, format, layers=LAYERS, d_model=WIDTH, **own) as writer:
        bounds = [0, *sorted(min(c, len(wanted)) for c in cuts), len(wanted)]
        for a, b in itertools.pairwise(bounds):
            writer.append(wanted[a:b], columns={"label": list(range(a, b)), "note": [f"é{i}" for i in range(a, b)]})
            if flush:
                assert writer.flush() == b
    store = check(path, wanted)
    assert store.table["label"].to_pylist() == list(range(len(wanted)))
    assert store.table["note"].to_pylist() == [f"é{i}" for i in range(len(wanted))]
    report = actshard.verify(path)
    assert report.codes() <= {"zero-token-example"}, report.findings


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    n=st.integers(1, 23),
    tokens=st.integers(2, 5),
    eps=st.integers(1, 6),
    batch=st.integers(1, 9),
    protocol=st.sampled_from(["2.0", "2.1"]),
    labels=st.booleans(),
)
def test_saev_comes_back(
    tmp_path_factory: pytest.TempPathFactory, n: int, tokens: int, eps: int, batch: int, protocol: str, labels: bool
) -> None:
    wanted = np.stack(examples([tokens] * n))
    classes = np.arange(n * (tokens - 1)).reshape(n, -1).astype(np.uint8)
    writer = actshard.create(
        tmp_path_factory.mktemp("made"),
        "saev",
        layers=LAYERS,
        d_model=WIDTH,
        protocol=protocol,
        cls_token=True,
        max_tokens_per_shard=eps * tokens * 2 + 1,
        metadata={"family": "clip", "ckpt": "ViT-B-16/öpenai", "dataset": "/data"},
    )
    for a in range(0, n, batch):
        writer.append(wanted[a : a + batch], labels=classes[a : a + batch] if labels else None)
    writer.close()
    store = check(writer.path, list(wanted))
    assert store.special_tokens == 1
    assert store.metadata["protocol"] == protocol
    assert store.warnings == ()
    assert (store.labels is None) != labels
    if labels:
        assert np.array_equal(store.labels, classes)
    # Exactly as many shards as needed: no empty one, and the last as long as the protocol requires.
    shards = sorted(writer.path.glob("acts*.bin"))
    assert len(shards) == -(-n // eps)
    size = 2 * tokens * WIDTH * 4
    assert shards[-1].stat().st_size == (eps if protocol == "2.1" else n - (len(shards) - 1) * eps) * size
    assert [int(p.stat().st_size) for p in shards[:-1]] == [eps * size] * (len(shards) - 1)
    assert len(writer.path.name) == (8 if protocol == "2.1" else 64)
    assert [path.name for path in writer.path.glob(".*")] == [".actshard-record.json"]
    # As upstream reads it: a map with the shard's shape.
    whole = np.concatenate([np.fromfile(p, np.float32).reshape(-1, 2, tokens, WIDTH) for p in shards])[:n]
    assert np.array_equal(whole, wanted)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_types_are_kept_or_refused_and_converted_when_asked(tmp_path: Path, format: str, dtype: str) -> None:
    held = {
        "saev": {"float32"},
        "lmprobe": {"float16", "bfloat16", "float32", "float64"},
        "zarr": {"float16", "float32", "float64"},
        "pickle": {"float16", "float32", "float64"},
    }
    wanted = examples([3, 3], dtype)
    writer = actshard.create(tmp_path / "a", format, layers=LAYERS, d_model=WIDTH)
    if dtype in held[format]:
        writer.append(wanted)
        writer.close()
        check(writer.path, wanted)
        with actshard.create(tmp_path / "c", format, layers=LAYERS, d_model=WIDTH) as other:
            other.append(wanted)
            with pytest.raises(actshard.DtypeError, match="dtype="):
                other.append(examples([3], "float32" if dtype != "float32" else "float16"))
    else:
        with pytest.raises(actshard.DtypeError, match="dtype="):
            writer.append(wanted)
        writer.abort()
    with actshard.create(tmp_path / "b", format, layers=LAYERS, d_model=WIDTH, dtype="float32") as writer:
        writer.append(wanted)
    check(writer.path, [x.astype(np.float32) for x in wanted])


def test_one_row_per_example_and_padded_batches(tmp_path: Path) -> None:
    rows = np.stack(examples([1] * 6))
    with actshard.create(tmp_path / "pooled", "lmprobe", layers=LAYERS, d_model=WIDTH) as writer:
        writer.append(rows[:4, :, 0])
        writer.append(rows[4:])
    store = check(tmp_path / "pooled", list(rows))
    assert store.metadata["tensors"]["hidden_layers"]["storage"] == "pooled"
    padded = np.stack(examples([5] * 4))
    with actshard.create(tmp_path / "padded", "zarr", layers=LAYERS, d_model=WIDTH) as writer:
        writer.append(padded, lengths=[5, 2, 0, 1])
    check(tmp_path / "padded", [p[:, :n] for p, n in zip(padded, [5, 2, 0, 1], strict=True)])
    # Not contiguous, and byte-swapped: only values count.
    with actshard.create(tmp_path / "views", "pickle", layers=LAYERS, d_model=WIDTH) as writer:
        writer.append(padded[::2].astype(">f4"))
        writer.append(np.asfortranarray(padded)[1::2])
    check(tmp_path / "views", [padded[0], padded[2], padded[1], padded[3]])


def test_pad_and_truncate_fit_examples_to_saev(tmp_path: Path) -> None:
    wanted = examples([4, 2, 6])
    with actshard.create(
        tmp_path, "saev", layers=LAYERS, d_model=WIDTH, tokens_per_example=4, pad=True, truncate=True
    ) as writer:
        writer.append(wanted)
    short = np.concatenate([wanted[1], np.zeros((2, 2, WIDTH), np.float32)], axis=1)
    check(writer.path, [wanted[0], short, wanted[2][:, :4]])


def test_logits_router_and_labels_have_their_places(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    values, indices = rng.standard_normal((5, 3)).astype(np.float16), rng.integers(0, 99, (5, 3)).astype(np.int32)
    router = {3: rng.standard_normal((5, 4)).astype(np.float32), 7: rng.standard_normal((5, 4)).astype(np.float32)}
    with actshard.create(tmp_path / "l", "lmprobe", layers=LAYERS, d_model=WIDTH, shard_bytes=150) as writer:
        writer.append(examples([3] * 2), logits=(values[:2], indices[:2]), router={k: v[:2] for k, v in router.items()})
        writer.append(examples([3] * 3), logits=(values[2:], indices[2:]), router={k: v[2:] for k, v in router.items()})
    store = actshard.open(tmp_path / "l")
    assert all(
        np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(store.logits(), (values, indices), strict=True)
    )
    assert all(np.array_equal(store.router(layer), v) for layer, v in router.items())
    assert actshard.verify(tmp_path / "l").findings == []
    with actshard.create(tmp_path / "z", "zarr", layers=LAYERS, d_model=WIDTH) as writer:
        writer.append(examples([3] * 5), logits=(values, indices), labels=np.ones((5, 3), np.uint8))
    table = actshard.open(tmp_path / "z").table
    assert np.array_equal(np.array(table["logits_indices"].to_pylist()), indices)
    assert table["patch_labels"].to_pylist() == [[1, 1, 1]] * 5


@pytest.mark.parametrize("compress", [True, False])
def test_pickle_shards_are_opened_by_the_texts_own_example(tmp_path: Path, compress: bool) -> None:
    wanted = examples([3, 0, 5])
    long = "ä" * 450
    with actshard.create(
        tmp_path / "p",
        "pickle",
        layers=LAYERS,
        d_model=WIDTH,
        compress=compress,
        metadata={"model_name": "m", "batch_size": 2},
    ) as writer:
        writer.append(
            wanted,
            columns={"text": ["a", None, long], "n": [1, None, 3], "big": [2**70, 0, 1], "tags": [["x"], [], None]},
        )
    metadata = json.loads((tmp_path / "p" / "metadata.json").read_text())
    assert {"version", "created_at", "extraction_config", "shards", "statistics"} <= metadata.keys()
    assert metadata["extraction_config"]["model_params"]["hidden_size"] == WIDTH
    for k, layer in enumerate(LAYERS):
        found = []
        for shard in metadata["shards"]:  # iter_activations() of the published text
            opener: Any = gzip.open if shard["compressed"] else open
            with opener(tmp_path / "p" / shard["filename"], "rb") as file:
                found += pickle.load(file)[f"layer_{layer}"]
        assert [i["sample_idx"] for i in found] == [0, 1, 2]
        assert all(
            np.array_equal(i["activation"], w[k]) and i["activation"].dtype == np.float32
            for i, w in zip(found, wanted, strict=True)
        )
        assert all(i["shape"] == i["activation"].shape for i in found)
        assert all(i["activation"].flags.c_contiguous for i in found)
        assert [i["text_preview"] for i in found] == ["a", None, long[:200]]
        assert found[2]["metadata"] == {"n": 3, "big": 1, "tags": None, "text": long}
        assert found[0]["metadata"]["big"] == 2**70
    assert actshard.open(tmp_path / "p", checksums=True).warnings == ()
    if not compress:
        view = actshard.open(tmp_path / "p").sequence(2, 3)
        assert view.ctypes.data % 64 == 0


def test_zarr_metadata_are_those_of_the_text(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "z", "zarr", layers=[0, 1], d_model=WIDTH, metadata={"model_id": "m"}) as writer:
        writer.append(
            examples([4, 300]),
            columns={"prompt": ["a", "b"], "response": ["c", "d"], "label": [1, 0], "gap": [None, 2]},
        )
    root = tmp_path / "z"
    assert json.loads((root / ".zgroup").read_text()) == {"zarr_format": 2}
    listed = json.loads((root / ".zmetadata").read_text())["metadata"]
    array = json.loads((root / "arrays/activations/.zarray").read_text())
    assert listed["arrays/activations/.zarray"] == array
    assert (array["compressor"], array["filters"], array["order"], array["dtype"]) == (None, None, "C", "<f4")
    assert array["shape"] == [2, 2, 300, WIDTH]
    assert array["chunks"] == [1, 1, 300, WIDTH]  # shorter than a MiB: one chunk
    assert [json.loads(x) for x in (root / "text/prompts.jsonl").read_text().splitlines()] == [
        {"i": 0, "prompt": "a"},
        {"i": 1, "prompt": "b"},
    ]
    assert (root / "text/responses.jsonl").exists()
    assert np.fromfile(root / "arrays/seq_len/0", np.int32).tolist() == [4, 300]
    attributes = json.loads((root / ".zattrs").read_text())
    assert attributes["num_layers"] == 2
    assert attributes["T_max"] == 300
    assert attributes["model_id"] == "m"
    big = actshard.create(tmp_path / "big", "zarr", layers=[0], d_model=1024, dtype="float16")
    big.append(np.zeros((1, 1, 900, 1024), np.float32))
    big.close()
    chunks = json.loads((tmp_path / "big/arrays/activations/.zarray").read_text())["chunks"]
    assert chunks == [1, 1, 512, 1024]  # 1 MiB
    assert all(p.stat().st_size == 1 << 20 for p in (tmp_path / "big/arrays/activations").glob("0.*"))


BAD: list[tuple[str, dict[str, Any], Callable[[actshard.Writer], Any], type[actshard.ActshardError], str]] = [
    ("saev", {}, lambda w: w.append(examples([3, 4])), actshard.ArgumentError, "truncate=True"),
    (
        "saev",
        {},
        lambda w: w.append(examples([4, 3])),
        actshard.ArgumentError,
        "example 1: expected 4 tokens .*found 3",
    ),
    ("lmprobe", {"storage": "pooled"}, lambda w: w.append(examples([3])), actshard.ArgumentError, "full_sequence"),
    ("zarr", {"t_max": 2}, lambda w: w.append(examples([3])), actshard.ArgumentError, "t_max"),
    (
        "zarr",
        {},
        lambda w: w.append(np.zeros((1, 3, 2, WIDTH), np.float32)),
        actshard.ArgumentError,
        r"\(batch, 2, tokens, 8\)",
    ),
    ("zarr", {}, lambda w: w.append(np.zeros((1, 2, 2, 9), np.float32)), actshard.ArgumentError, "expected"),
    ("zarr", {}, lambda w: w.append("words"), actshard.ArgumentError, "numbers"),
    ("zarr", {}, lambda w: w.append(np.zeros((2, 2, 2, WIDTH)), lengths=[1, 3]), actshard.ArgumentError, "lengths"),
    ("zarr", {}, lambda w: w.append(examples([1, 2]), columns={"a": [1]}), actshard.ArgumentError, "2 values"),
    ("zarr", {}, lambda w: w.append(examples([1]), columns={"a": [object()]}), actshard.ArgumentError, "'a'"),
    (
        "lmprobe",
        {},
        lambda w: w.append(examples([1, 2]), columns={"row_offset": [1, 2]}),
        actshard.ArgumentError,
        "row_offset",
    ),
    (
        "pickle",
        {},
        lambda w: w.append(examples([1, 2]), columns={"sample_idx": [1, 1]}),
        actshard.ArgumentError,
        "sample_idx",
    ),
    (
        "saev",
        {},
        lambda w: w.append(examples([2]), columns={"a": [1]}),
        actshard.NotStoredError,
        "no columns",
    ),
    (
        "saev",
        {},
        lambda w: w.append(examples([2]), labels=np.zeros((1, 3), np.uint8)),
        actshard.ArgumentError,
        "labels",
    ),
    ("saev", {}, lambda w: w.append(examples([2]), labels=np.zeros((1, 2))), actshard.DtypeError, "uint8"),
    ("zarr", {}, lambda w: w.close(), actshard.ArgumentError, "nothing was appended"),
    (
        "zarr",
        {"num_examples": 3},
        lambda w: (w.append(examples([2])), w.close()),
        actshard.ArgumentError,
        "num_examples",
    ),
]


@pytest.mark.parametrize(("format", "own", "do", "kind", "match"), BAD, ids=[f"{b[0]}-{b[4]}" for b in BAD])
def test_what_cannot_be_held_is_refused(
    tmp_path: Path, format: str, own: dict[str, Any], do: Any, kind: type[actshard.ActshardError], match: str
) -> None:
    writer = actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH, **own)
    with pytest.raises(kind, match=match):
        do(writer)
    writer.abort()
    with pytest.raises(actshard.ActshardError):
        actshard.open(tmp_path / "d")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"format": "parquet"}, "one of saev"),
        ({"layers": []}, "layers: expected at least one"),
        ({"layers": [1, 1]}, "different names"),
        ({"d_model": 0}, "d_model"),
        ({"part": (3, 2)}, "part"),
        ({"chunk": 3}, "not an option of zarr; options are chunk_tokens"),
        ({"format": "saev", "metadata": {"model": "x"}}, "no field 'model'"),
        ({"format": "saev", "protocol": "3.0"}, "protocol"),
        ({"format": "saev", "max_tokens_per_shard": 0}, "positive"),
        ({"format": "lmprobe", "storage": "all"}, "storage"),
        ({"format": "pickle", "level": 12}, "level"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, arguments: dict[str, Any], match: str) -> None:
    whole: dict[str, Any] = {"format": "zarr", "layers": LAYERS, "d_model": WIDTH, **arguments}
    with pytest.raises(actshard.ArgumentError, match=match):
        actshard.create(tmp_path / "d", **whole)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_an_exception_leaves_what_can_be_resumed(tmp_path: Path, format: str) -> None:
    wanted = examples([4] * 9)
    writer = actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH)

    def fail() -> None:
        with writer:
            writer.append(wanted[:4])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    folder = writer.path
    with refuses(actshard.UnfinishedError, folder, "4 examples"):
        actshard.open(folder)
    assert writer.committed == len(writer) == 4
    assert actshard.verify(folder).codes() == {"unfinished"}
    with refuses(actshard.ExistsError, folder, "resume=True"):
        actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH)
    if format == "saev":  # another configuration has another folder
        with pytest.warns(actshard.ActshardWarning, match=f"unfinished one in {folder.name}, of 4 examples.*d_model"):
            other = actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH * 2, resume=True)
        assert other.path != folder
        other.abort()
    else:
        with pytest.raises(actshard.ArgumentError, match="d_model"):
            actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH * 2, resume=True)
    writer = actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH, resume=True)
    assert writer.committed == len(writer) == 4
    writer.append(wanted[4:])
    writer.close()
    check(writer.path, wanted)
    assert not (writer.path / ".actshard").exists()
    with pytest.raises(actshard.ClosedError, match="complete"):
        writer.append(wanted)


@pytest.mark.parametrize("format", FORMATS)
def test_a_finished_dataset_is_taken_or_refused(tmp_path: Path, format: str) -> None:
    def make(**own: Any) -> actshard.Writer:
        return actshard.create(
            tmp_path / "d", format, layers=LAYERS, d_model=WIDTH, num_examples=3, tokens_per_example=2, **own
        )

    with make() as writer:
        writer.append(examples([2] * 3))
    with refuses(actshard.ExistsError, writer.path, "exist_ok"):
        make()
    for again in (make(exist_ok=True), make(resume=True)):
        assert again.complete
        assert again.path == writer.path
        with again:
            pass
    check(writer.path, examples([2] * 3))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    if format != "saev":
        with refuses(actshard.ExistsError, tmp_path / "other", "file"):
            actshard.create(tmp_path / "other", format, layers=LAYERS, d_model=WIDTH)


def test_identical_saev_dumps_collide_and_divergent_ones_do_not(tmp_path: Path) -> None:
    def make(ckpt: str, n: int, **own: Any) -> Path:
        writer = actshard.create(tmp_path, "saev", layers=LAYERS, d_model=WIDTH, metadata={"ckpt": ckpt}, **own)
        writer.append(examples([2] * n))
        writer.close()
        return writer.path

    first = make("a", 3)
    assert len({first, make("b", 3), make("a", 4)}) == 3
    with refuses(actshard.ExistsError, first, "exist_ok"):
        make("a", 3)
    assert [p.name for p in tmp_path.glob(".writing-*")]  # nothing is lost
    writer = actshard.create(tmp_path, "saev", layers=LAYERS, d_model=WIDTH, metadata={"ckpt": "a"}, resume=True)
    assert writer.committed == 3
    writer.close()
    assert writer.path == first
    assert not list(tmp_path.glob(".writing-*"))
    metadata = json.loads((first / "metadata.json").read_text())
    (first / "metadata.json").write_text(json.dumps({**metadata, "ckpt": "c"}))
    with refuses(actshard.FormatError, first, "hash"):
        make("a", 3, num_examples=3, tokens_per_example=2)


def test_a_small_dump_is_a_small_file_and_is_found_by_its_name(tmp_path: Path) -> None:
    """saev's default shard has gigabytes and full size, whatever its contents."""
    writer = actshard.create(tmp_path, "saev", layers=LAYERS, d_model=WIDTH)
    writer.append(examples([3] * 5))
    writer.close()
    assert (writer.path / "acts000000.bin").stat().st_size == 5 * 2 * 3 * WIDTH * 4
    check(writer.path, examples([3] * 5))
    again = actshard.create(
        tmp_path, "saev", layers=LAYERS, d_model=WIDTH, num_examples=5, tokens_per_example=3, exist_ok=True
    )
    assert again.complete
    assert again.path == writer.path
    done = actshard.convert(writer.path, tmp_path / "b", "saev", examples=[1], layers=[7])
    assert (done.path / "acts000000.bin").stat().st_size == 3 * WIDTH * 4


def test_another_dataset_is_not_taken_for_the_one_asked_for(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "zarr", layers=LAYERS, d_model=WIDTH) as writer:
        writer.append(examples([3]))
    for other in ({"dtype": "float16"}, {"layers": [3, 8]}, {"num_examples": 2}):
        with refuses(actshard.ExistsError, tmp_path / "d", "another dataset"):
            actshard.create(tmp_path / "d", "zarr", **{"layers": LAYERS, "d_model": WIDTH, "resume": True, **other})


def test_the_second_writer_is_refused_with_pid_and_host(tmp_path: Path) -> None:
    writer = actshard.create(tmp_path / "d", "zarr", layers=LAYERS, d_model=WIDTH)
    with pytest.raises(actshard.LockedError, match="this process"):
        actshard.create(tmp_path / "d", "zarr", layers=LAYERS, d_model=WIDTH, resume=True)
    code = (
        "import actshard, sys\n"
        "try: actshard.create(sys.argv[1], 'zarr', layers=[3, 7], d_model=8, resume=True)\n"
        "except actshard.LockedError as e: print(e)"
    )
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path / "d")], capture_output=True, text=True, check=True)
    assert f"process {os.getpid()} on " in told.stdout
    writer.append(examples([2]))
    writer.close()
    check(tmp_path / "d", examples([2]))


def test_a_forked_child_cannot_write_for_its_parent(tmp_path: Path) -> None:
    writer = actshard.create(tmp_path / "d", "zarr", layers=LAYERS, d_model=WIDTH)
    writer.append(examples([2]))
    pid = os.fork()
    if pid == 0:
        try:
            writer.flush()
        except actshard.ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    writer.append(examples([2], seed=1))
    writer.close()
    check(tmp_path / "d", [*examples([2]), *examples([2], seed=1)])


@pytest.mark.parametrize("format", FORMATS)
def test_a_dataset_killed_before_its_first_commit_can_be_given_up_and_begun_again(tmp_path: Path, format: str) -> None:
    wanted = examples([3, 3])
    pid = os.fork()
    if pid == 0:  # dies with uncommitted files on disk
        actshard.base.work.Journal.commit = lambda *_: os._exit(9)  # type: ignore[attr-defined,method-assign]  # of this child only
        with actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH) as writer:
            writer.append(wanted)
            writer.flush()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    writer = actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH, resume=True)
    assert len(writer) == 0
    with pytest.raises(actshard.ArgumentError, match="nothing was appended"):
        writer.close()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    with actshard.create(tmp_path / "d", format, layers=LAYERS, d_model=WIDTH) as writer:
        writer.append(wanted)
    check(writer.path, wanted)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("saev", {}),
        ("saev", {"max_tokens_per_shard": 6, "protocol": "2.0"}),
        ("lmprobe", {}),
        ("lmprobe", {"storage": "full_sequence", "shard_bytes": 64}),
        ("zarr", {}),
        ("pickle", {}),
        ("pickle", {"compress": False, "shard_bytes": 64}),
    ],
)
def test_no_file_of_examples_that_were_never_committed_stays(
    tmp_path: Path, format: str, options: dict[str, Any]
) -> None:
    wanted = examples([3] * 8)
    call: dict[str, Any] = {"layers": LAYERS, "d_model": WIDTH, **options}
    with actshard.create(tmp_path / "d", format, **call) as writer:
        writer.append(wanted[:2])
        writer.flush()
        writer.abort()
    pid = os.fork()
    if pid == 0:  # dies after the files are renamed, before the journal counts them
        actshard.base.work.Journal.commit = lambda *_: os._exit(9)  # type: ignore[attr-defined,method-assign]  # of this child only
        with actshard.create(tmp_path / "d", format, resume=True, **call) as writer:
            writer.append(wanted[2:])
            writer.flush()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    with actshard.create(tmp_path / "d", format, resume=True, **call) as writer:
        assert len(writer) == 2
    check(writer.path, wanted[:2])
    with actshard.create(tmp_path / "e", format, **call) as undisturbed:
        undisturbed.append(wanted[:2])
    assert [p.relative_to(writer.path) for p in sorted(writer.path.rglob("*"))] == [
        p.relative_to(undisturbed.path) for p in sorted(undisturbed.path.rglob("*"))
    ]


def test_two_processes_write_parts_at_once(tmp_path: Path) -> None:
    code = (
        "import actshard, numpy as np, sys\n"
        "i = int(sys.argv[2])\n"
        "with actshard.create(sys.argv[1], 'pickle', layers=[3, 7], d_model=8, part=(i, 3)) as w:\n"
        "    w.append(np.full((4, 2, 5, 8), i, np.float32))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "d"), str(i)]) for i in range(3)]
    assert [p.wait() for p in running] == [0, 0, 0]
    store = actshard.open(actshard.merge(tmp_path / "d"))
    assert [float(store.sequence(e, 3)[0, 0]) for e in range(12)] == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert len(set(store.table["sample_idx"].to_pylist())) == 12


def test_a_torn_journal_counts_what_was_whole(tmp_path: Path) -> None:
    wanted = examples([4] * 6)
    writer = actshard.create(tmp_path / "d", "zarr", layers=LAYERS, d_model=WIDTH)
    writer.append(wanted[:3])
    writer.flush()
    writer.append(wanted[3:5])
    writer.abort()
    journal = tmp_path / "d/.actshard/journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    journal.write_bytes(b"".join(lines[:2]) + lines[2][:-9])
    with actshard.create(tmp_path / "d", "zarr", layers=LAYERS, d_model=WIDTH, resume=True) as writer:
        assert writer.committed == 3
        writer.append(wanted[3:])
    check(tmp_path / "d", wanted)
    # An invalid line in the middle is not a torn line: another program wrote it.
    writer = actshard.create(tmp_path / "e", "zarr", layers=LAYERS, d_model=WIDTH)
    writer.append(wanted[:3])
    writer.abort()
    journal = tmp_path / "e/.actshard/journal.jsonl"
    journal.write_bytes(b"nonsense\n" + journal.read_bytes())
    with refuses(actshard.FormatError, journal):
        actshard.create(tmp_path / "e", "zarr", layers=LAYERS, d_model=WIDTH, resume=True)


def test_a_full_disk_is_told_and_what_was_committed_stays(tmp_path: Path) -> None:
    code = """
import actshard, numpy as np, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = actshard.create(sys.argv[1], "pickle", layers=[3, 7], d_model=8, compress=False)
writer.append(np.ones((10, 2, 50, 8), np.float32)); print(writer.flush())
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # no file may be larger: as good as a full disk
try:
    writer.append(np.ones((40, 2, 50, 8), np.float32)); writer.flush()
except actshard.ActshardError as error:
    print(type(error).__name__, error.path.name); print(writer.committed)
try: writer.append(np.ones((1, 2, 50, 8), np.float32))
except actshard.ClosedError: print("closed")
"""
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path / "d")], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["10", "FileAccessError", ".shard_0002.pkl.part", "10", "closed"]
    with actshard.create(tmp_path / "d", "pickle", layers=LAYERS, d_model=8, compress=False, resume=True) as writer:
        assert writer.committed == 10
    assert len(actshard.open(tmp_path / "d")) == 10


@pytest.mark.parametrize("format", FORMATS)
def test_killed_while_it_is_finished_it_is_finished_by_the_next(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step of finishing. Finished shards cannot be appended to."""
    wanted = examples([3] * 7)
    own: dict[str, Any] = {"max_tokens_per_shard": 18} if format == "saev" else {}
    steps = 0
    rename, sync = actshard.base.work.rename, actshard._native.sync_files
    for fail_at in range(60):
        path = tmp_path / str(fail_at)
        writer = actshard.create(path, format, layers=LAYERS, d_model=WIDTH, **own)
        writer.append(wanted)
        writer.flush()
        done = 0

        def failing(source: Path, target: Path) -> None:
            nonlocal done
            done += 1
            if done > fail_at:  # noqa: B023 -- called before the next turn
                raise KeyboardInterrupt
            rename(source, target)

        def failing_sync(paths: list[Any]) -> None:
            nonlocal done
            done += 1
            if done > fail_at:  # noqa: B023 -- called before the next turn
                raise KeyboardInterrupt
            sync(paths)

        monkeypatch.setattr(actshard._native, "sync_files", failing_sync)
        for module in ("saev", "lmprobe", "pickle"):
            monkeypatch.setattr(f"actshard.formats.{module}.write.rename", failing)
        monkeypatch.setattr("actshard.writing.sink.rename", failing)
        try:
            writer.close()
        except KeyboardInterrupt:
            steps += 1
        monkeypatch.undo()
        if writer.complete:
            break
        again = actshard.create(path, format, layers=LAYERS, d_model=WIDTH, resume=True, **own)
        assert again.complete
        assert again.committed == 7
        check(again.path, wanted)
        with pytest.raises(actshard.ClosedError):
            again.append(wanted)
    else:
        pytest.fail("it never came to an end")
    assert steps >= 3


def test_metadata_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    with refuses(actshard.ArgumentError, None, "metadata: expected JSON values"):
        actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=8, metadata={"a": object()})


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(actshard.ActshardError) as caught:
        actshard.create(tmp_path / "file" / "d", "zarr", layers=[0], d_model=8)
    assert caught.value.path is not None


def test_errors_of_the_background_reach_the_caller(tmp_path: Path) -> None:
    writer = actshard.create(tmp_path / "d", "zarr", layers=LAYERS, d_model=WIDTH)
    writer.append(examples([2]))
    writer.flush()
    folder = tmp_path / "d/arrays/activations"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("a file where a folder was")
    writer.append(examples([2]))
    with pytest.raises(actshard.ActshardError) as caught:
        writer.flush()
    assert caught.value.path is not None
    with pytest.raises(actshard.ClosedError):
        writer.append(examples([2]))


def test_other_threads_run_while_a_writer_waits(tmp_path: Path) -> None:
    ticks = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE)  # the other thread runs only while this one has released the GIL
    try:
        with actshard.create(tmp_path / "d", "saev", layers=[0], d_model=1024) as writer:
            for _ in range(200):  # on a busy machine the other thread may not run at once
                writer.append(np.zeros((8, 1, 256, 1024), np.float32))
                if len(ticks) > 5:
                    break
    finally:
        sys.setswitchinterval(before)
        stop.set()
        thread.join()
    assert len(ticks) > 5


def test_only_what_is_written_has_to_fit_the_type(tmp_path: Path) -> None:
    """Values of padding and of rows that are cut off do not matter: uninitialized memory may contain anything."""
    batch = np.full((2, 1, 3, 2), 1e30, np.float32)
    batch[0, :, :1], batch[1, :, :2] = 1, 2
    asked: dict[str, Any] = {"layers": [0], "d_model": 2, "dtype": "float16"}
    with actshard.create(tmp_path / "padded", "zarr", **asked) as writer:
        writer.append(batch, lengths=[1, 2])
        with pytest.raises(actshard.DtypeError, match="2 values of the batch"):
            writer.append(batch, lengths=[1, 3])
    assert [actshard.open(tmp_path / "padded").sequence(i, 0).max() for i in range(2)] == [1, 2]
    with actshard.create(tmp_path / "cut", "zarr", t_max=1, truncate=True, **asked) as writer:
        writer.append(list(batch[:1]))
        with pytest.raises(actshard.DtypeError, match="2 values of example 1"):
            writer.append([batch[0, :, 1:]])
    assert len(actshard.open(tmp_path / "cut")) == 1


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (np.ones((2, 3), np.float32), np.full((2, 3), 0.1)),
        ([np.ones(3, np.float32), np.ones(1, np.float32)], [[0.1], [0.2, 0.3]]),
        ([{"a": np.float32(1)}, {"a": np.float32(2)}], [{"a": 0.1}, {"a": None}]),
        ([[{"a": np.float32(1)}], []], [[{"a": 0.1}], None]),
    ],
    ids=["rectangle", "lists", "dicts", "dicts in lists"],
)
def test_numbers_in_lists_and_dicts_are_never_rounded(tmp_path: Path, first: Any, then: Any) -> None:
    rows = np.ones((2, 1, 2), np.float32)
    with actshard.create(tmp_path / "d", "pickle", layers=[0], d_model=2) as writer:
        writer.append(rows, columns={"score": first})
        with pytest.raises(
            actshard.ArgumentError, match=r"'score', from example 2: .* values that it cannot represent exactly"
        ):
            writer.append(rows, columns={"score": then})
        writer.append(rows, columns={"score": first})
    assert len(actshard.open(tmp_path / "d")) == 4


@pytest.mark.parametrize("format", ["lmprobe", "zarr", "pickle"])
def test_no_dataset_is_made_among_the_parts_of_another(tmp_path: Path, format: str) -> None:
    rows = np.ones((2, 1, 2), np.float32)
    for i in range(2):
        with actshard.create(tmp_path / "d", format, layers=[0], d_model=2, part=(i, 2)) as writer:
            writer.append(rows)
    for arguments in ({}, {"resume": True}, {"exist_ok": True}):
        with pytest.raises(actshard.ExistsError, match="parts of a dataset"):
            actshard.create(tmp_path / "d", format, layers=[0], d_model=2, **arguments)
    assert len(actshard.open(actshard.merge(tmp_path / "d"))) == 4
