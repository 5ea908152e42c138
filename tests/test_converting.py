"""What convert() promises: every golden dataset in every format and back, bit for bit, with every loss told before."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.converting import plan
from conftest import GOLDEN, bits, refuses, saev_dump

FORMATS = ("saev", "lmprobe", "zarr", "pickle")
SOURCES = [saev_dump(p.parent) for p in sorted((GOLDEN / "saev").glob("*/expected.npz"))]
SOURCES += [p.parent for kind in ("lmprobe", "pickle", "zarr") for p in sorted((GOLDEN / kind).glob("*/expected.npz"))]
SOURCES = [p for p in SOURCES if p.name != "logits_only"]
LAYOUT = {
    *("shard_index", "row_offset", "shard_index_logits", "row_offset_logits", "token_offset"),
    *("seq_len", "shape", "layers", "example_idx"),
}


def name(path: Path) -> str:
    return path.relative_to(GOLDEN).as_posix().split("/saev/")[0]


def open_quietly(path: Path) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", actshard.ActshardWarning)
        return actshard.open(path)


def options(store: actshard.Store, format: str) -> dict[str, Any]:
    """What a format needs to be told to hold a dataset."""
    made: dict[str, Any] = {}
    if format == "saev":
        made = {"pad": True, "dtype": "float32"}
    if store.dtype.name == "bfloat16" and format in ("zarr", "pickle"):
        made = {"dtype": "float32"}
    if any("lack layers" in w for w in store.warnings) and format != "pickle":
        made["pad"] = True
    return made


def same(a: Any, b: Any) -> bool:
    """Values of columns: NaN is NaN, and an integer is a float of the same value."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_there_and_back(tmp_path: Path, source: Path, format: str) -> None:
    store = open_quietly(source)
    there = actshard.convert(source, tmp_path / "there", format, verify=True, **options(store, format))
    made = open_quietly(there.path)
    assert made.layers == store.layers
    assert len(made) == len(store)
    told = {loss.what for loss in there.losses}
    assert actshard.verify(there.path).ok
    back_options: dict[str, Any] = {"dtype": str(store.dtype)} if made.dtype != store.dtype else {}
    if store.format == "saev":
        back_options["pad"] = True
    back = open_quietly(actshard.convert(there.path, tmp_path / "back", store.format, verify=True, **back_options).path)
    counts = store.token_counts
    assert "padding" in told or format == "saev" or np.array_equal(made.token_counts, counts)
    if made.dtype != store.dtype:
        assert "dtype" in told
    for layer in store.layers:
        held = store.tokens_in(layer)
        for e in np.flatnonzero(held).tolist():
            want = store.sequence(e, layer)
            for found in (made.sequence(e, layer), back.sequence(e, layer)):
                assert np.array_equal(bits(found[: len(want)].astype(want.dtype)), bits(np.ascontiguousarray(want)))
    if format == "saev" and store.format != "saev":
        assert {"columns"} <= told or set(store.table.column_names) - LAYOUT <= {"sample_idx", "num_tokens"}
        return
    if store.labels is not None:
        assert back.labels is not None
        assert np.array_equal(back.labels, store.labels)
    wanted, found_table = store.table, back.table
    for column in set(wanted.column_names) - LAYOUT:
        if column not in found_table.column_names:
            assert wanted[column].null_count == len(wanted), column
            continue
        assert same(wanted[column].to_pylist(), found_table[column].to_pylist()), column
    if store.contents.has_logits:
        assert back.contents.has_logits
        for a, b in zip(store.logits(), back.logits(), strict=True):
            assert np.array_equal(a, b)
    for layer in store.contents.router_layers:
        assert np.array_equal(store.router(layer), back.router(layer))
    if store.format == "saev":
        for key in ("family", "ckpt", "data", "dataset"):
            if key in store.metadata and isinstance(store.metadata[key], str):
                assert back.metadata[key] == store.metadata[key]
    assert back.contents.model == store.contents.model


@pytest.fixture
def ragged(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with actshard.create(tmp_path / "src", "zarr", layers=[2, 5, 9], d_model=16) as writer:
        writer.append(
            [rng.standard_normal((3, n, 16)).astype(np.float32) for n in rng.integers(1, 9, 40)],
            columns={"prompt": [f"p{i}" for i in range(40)]},
        )
    return tmp_path / "src"


def test_some_layers_examples_and_tokens(tmp_path: Path, ragged: Path) -> None:
    store = actshard.open(ragged)
    done = actshard.convert(ragged, tmp_path / "a", "pickle", layers={9: 0, 2: 4}, examples=[7, 3, 39])
    made = actshard.open(done.path)
    assert made.layers == (0, 4)
    assert made.table["text_preview"].to_pylist() == ["p7", "p3", "p39"]
    for e, of in enumerate([7, 3, 39]):
        assert np.array_equal(made.sequence(e, 0), store.sequence(of, 9))
        assert np.array_equal(made.sequence(e, 4), store.sequence(of, 2))
    actshard.convert(ragged, tmp_path / "b", "lmprobe", tokens="last", verify=True)
    pooled = actshard.open(tmp_path / "b")
    assert pooled.metadata["tensors"]["hidden_layers"]["storage"] == "pooled"
    assert np.array_equal(pooled.last_tokens(5), store.last_tokens(5))
    actshard.convert(ragged, tmp_path / "c", "saev", truncate=True, examples=slice(0, 10), verify=True)
    cut = actshard.open(tmp_path / "c")
    low = int(store.token_counts[:10].min())
    assert set(cut.token_counts.tolist()) == {low}
    assert np.array_equal(cut.sequence(3, 5), store.sequence(3, 5)[:low])
    dump = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")
    actshard.convert(dump, tmp_path / "d", "zarr", tokens="content", examples=np.arange(11) % 2 == 0, dtype="float16")
    content = actshard.open(tmp_path / "d")
    assert np.array_equal(content.sequence(1, 5), actshard.open(dump).sequence(2, 5)[1:].astype(np.float16))
    assert content.table["patch_labels"].to_pylist() == actshard.open(dump).labels[::2].tolist()
    assert content.table["example_idx"].to_pylist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("format", "own", "kind", "match"),
    [
        ("saev", {}, actshard.ArgumentError, "pad=True"),
        ("lmprobe", {"storage": "pooled"}, actshard.ArgumentError, "tokens='last'"),
        ("zarr", {"layers": [3]}, actshard.LayerError, "layer 3"),
        ("zarr", {"examples": [40]}, actshard.OutOfRangeError, "out of range"),
        ("zarr", {"examples": []}, actshard.ArgumentError, "at least one"),
        ("zarr", {"tokens": "first"}, actshard.ArgumentError, "tokens"),
        ("arrow", {}, actshard.ArgumentError, "one of saev"),
        ("zarr", {"dtype": "bfloat16"}, actshard.DtypeError, "no such type"),
        ("pickle", {"dtype": "bfloat16"}, actshard.DtypeError, "float32"),
    ],
)
def test_what_cannot_be_held_is_refused_before_anything_is_written(
    tmp_path: Path, ragged: Path, format: str, own: dict[str, Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        actshard.convert(ragged, tmp_path / "d", format, **own)
    with pytest.raises(actshard.ActshardError):
        actshard.open(tmp_path / "d")


def test_a_misfit_far_behind_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "src", "zarr", layers=[0], d_model=8) as writer:
        writer.append([np.ones((1, 3 if i < 20_000 else 4, 8), np.float32) for i in range(20_001)])
    with pytest.raises(actshard.ArgumentError, match="example 20000 has 4 tokens"):
        actshard.convert(tmp_path / "src", tmp_path / "d", "saev")
    assert not (tmp_path / "d").exists()


def test_shards_are_as_large_as_they_were(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "src", "pickle", layers=[0], d_model=8) as writer:
        writer.append(np.arange(150 * 24, dtype=np.float32).reshape(150, 1, 3, 8))
    actshard.convert(tmp_path / "src", tmp_path / "d", "pickle", verify=True)
    assert len(list((tmp_path / "d").glob("shard_*"))) == 1


def test_the_plan_is_what_happens(tmp_path: Path, ragged: Path) -> None:
    for format, own in (("saev", {"pad": True}), ("lmprobe", {}), ("zarr", {}), ("pickle", {"compress": False})):
        (planned,) = plan(ragged, tmp_path / format, format, **own)
        assert not (tmp_path / format).exists()
        done = actshard.convert(ragged, tmp_path / format, format, **own)
        assert planned.losses == done.losses
        files = [p for p in done.path.rglob("*") if p.is_file()]
        size = sum(p.stat().st_size for p in files)
        assert abs(len(files) - planned.files) <= 3, format  # texts, and metadata of small arrays
        assert planned.bytes <= size <= planned.bytes + 60_000, format
        assert planned.rows == done.bytes // (16 * 4)
    by_format = {p.format: p for p in plan(ragged, tmp_path / "x")}
    assert list(by_format) == list(FORMATS)
    assert "pad=True" in (by_format["saev"].refused or "")
    assert {x.what for x in plan(ragged, tmp_path / "x", "saev", pad=True)[0].losses} == {"padding", "columns"}
    assert plan(ragged, tmp_path / "x", "zarr", dtype="float16")[0].losses[0].what == "dtype"


def test_a_conversion_is_resumed_and_only_of_the_same(tmp_path: Path, ragged: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int, nbytes: int) -> None:
        if done >= 10:
            raise Stop

    own: dict[str, Any] = {"shard_bytes": 3000, "compress": False}
    with pytest.raises(Stop):
        actshard.convert(ragged, tmp_path / "d", "pickle", progress=stop, **own)
    # Nothing was committed, or some; either way it goes on and comes to the same.
    with pytest.raises(actshard.ArgumentError, match="source"):
        actshard.convert(ragged, tmp_path / "d", "pickle", resume=True, examples=slice(0, 20), **own) if (
            tmp_path / "d/.actshard/journal.jsonl"
        ).exists() else pytest.fail("no journal")
    done = actshard.convert(ragged, tmp_path / "d", "pickle", resume=True, verify=True, **own)
    assert done.examples == 40
    with refuses(actshard.ExistsError, tmp_path / "d"):
        actshard.convert(ragged, tmp_path / "d", "pickle", **own)
    assert actshard.convert(ragged, tmp_path / "d", "pickle", exist_ok=True, verify=True, **own).bytes == 0


def test_verify_sees_one_changed_bit(tmp_path: Path, ragged: Path) -> None:
    done = actshard.convert(ragged, tmp_path / "d", "zarr")
    chunk = next(iter(sorted((done.path / "arrays/activations").glob("3.1.*"))))
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(actshard.FormatError, match="example 3, layer 5, token 0: differs"):
        actshard.convert(ragged, tmp_path / "d", "zarr", exist_ok=True, verify=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "actshard.cli", *arguments], capture_output=True, text=True, check=False
    )


def test_the_commands(tmp_path: Path, ragged: Path) -> None:
    told = run("convert", str(ragged), "--dry-run")
    assert told.returncode == 0, told.stderr
    assert "--pad" in told.stdout
    assert all(f in told.stdout for f in FORMATS)
    told = run("convert", str(ragged), str(tmp_path / "d"), "--to", "saev", "--dry-run", "--json")
    assert told.returncode == 1
    assert "pad=True" in json.loads(told.stdout)[0]["refused"]
    told = run(
        "convert",
        str(ragged),
        str(tmp_path / "d"),
        "--to",
        "saev",
        "--pad",
        "--verify",
        "--layer",
        "9=1",
        "-o",
        "protocol=2.0",
    )
    assert told.returncode == 0, told.stderr
    assert "lost" in told.stdout
    assert "every row was compared" in told.stdout
    assert actshard.open(tmp_path / "d").layers == (1,)
    told = run("convert", str(ragged), str(tmp_path / "e"), "--to", "saev")
    assert told.returncode == 1
    assert told.stderr.startswith("actshard: example ")
    assert "Traceback" not in told.stderr
    told = run("convert", str(ragged))
    assert told.returncode == 1
    assert "--dry-run" in told.stderr
    clean = run("verify", str(ragged), "--deep", "--json")
    assert clean.returncode == 0
    assert json.loads(clean.stdout)["ok"]
    (ragged / "arrays/activations/3.1.0.0").write_bytes(b"short")
    broken = run("verify", str(ragged))
    assert broken.returncode == 2
    assert "[chunk-size]" in broken.stdout
    told = run("merge", str(tmp_path / "m"), "--part", str(tmp_path / "d"), "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["examples"] == 40
