"""Guarantees of convert(): every golden dataset converts to every format and back, bit for bit; losses are reported first."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.cli.convert import show_previews
from actshard.formats.saev.write import SaevTarget
from actshard.writing import sink
from actshard.writing.converting import blocks, preview
from conftest import GOLDEN, bits, refuses, saev_dump
from shell import run_command
from waiting import PATIENCE

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
    """Options a format needs to store a dataset."""
    made: dict[str, Any] = {}
    if format == "saev":
        made = {"pad": True, "dtype": "float32"}
    if store.dtype.name == "bfloat16" and format in ("zarr", "pickle"):
        made = {"dtype": "float32"}
    if any("lack layers" in w for w in store.warnings) and format != "pickle":
        made["pad"] = True
    return made


def same(a: Any, b: Any) -> bool:
    """Compares column values: NaN equals NaN, and an integer equals a float of the same value."""
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
    if np.array_equal(made.token_counts, counts):
        assert "padding" not in told
    else:
        assert format == "saev"
        assert "padding" in told
    assert ("dtype" in told) == (made.dtype != store.dtype)
    assert "overflow" not in told
    for layer in store.layers:
        held = store.tokens_in(layer)
        for e in np.flatnonzero(held).tolist():
            want = store.sequence(e, layer)
            for found in (made.sequence(e, layer), back.sequence(e, layer)):
                assert np.array_equal(bits(found[: len(want)].astype(want.dtype)), bits(np.ascontiguousarray(want)))
    if format == "saev" and store.format != "saev":
        lost = {n for n in store.table.column_names if n not in LAYOUT and n not in ("sample_idx", "patch_labels")}
        lost -= {"num_tokens"} if store.format == "lmprobe" and made.token_counts.max() > 1 else set()
        assert ("columns" in told) == bool(lost), lost
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
    half: dict[str, Any] = {"tokens": "content", "examples": np.arange(11) % 2 == 0, "dtype": "float16"}
    over = actshard.convert(dump, tmp_path / "d", "zarr", overflow="allow", **half)
    wanted = np.concatenate([actshard.open(dump).sequence(e, la)[1:] for e in range(0, 11, 2) for la in (0, 5, 11)])
    too_large = int((np.abs(wanted) >= 65_520).sum())
    assert f"{too_large:,} finite values" in next(x.detail for x in over.losses if x.what == "overflow")
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


@pytest.mark.slow
def test_a_misfit_far_behind_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "src", "zarr", layers=[0], d_model=8) as writer:
        writer.append([np.ones((1, 3 if i < 20_000 else 4, 8), np.float32) for i in range(20_001)])
    with pytest.raises(actshard.ArgumentError, match=r"example 20000: expected 3 tokens .*found 4"):
        actshard.convert(tmp_path / "src", tmp_path / "d", "saev")
    assert not (tmp_path / "d").exists()


def test_shards_are_as_large_as_they_were(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "src", "pickle", layers=[0], d_model=8) as writer:
        writer.append(np.arange(150 * 24, dtype=np.float32).reshape(150, 1, 3, 8))
    actshard.convert(tmp_path / "src", tmp_path / "d", "pickle", verify=True)
    assert len(list((tmp_path / "d").glob("shard_*"))) == 1


def test_blocks_wait_for_the_disk_while_the_next_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks are handed over although none of them is written yet; no more exist."""
    values = np.arange(10 * 3 * 8, dtype=np.float32).reshape(10, 1, 3, 8)
    with actshard.create(tmp_path / "src", "pickle", layers=[0], d_model=8) as writer:
        writer.append(values)
    monkeypatch.setattr(SaevTarget, "block_bytes", 3 * 32)
    handed, held, written, third = 0, 0, 0, threading.Event()
    memory, writing = sink.Sink.memory, SaevTarget.write

    def count(done: int, total: int, size: int) -> None:
        nonlocal handed
        handed += 1
        if handed == 3:
            third.set()

    def taken(self: sink.Sink, rows: int) -> Any:
        nonlocal held
        made = memory(self, rows)
        held += 1
        assert held - written <= 3
        assert made.ctypes.data % 4096 == 0
        return made

    def write(self: SaevTarget, block: Any) -> None:
        nonlocal written
        assert third.wait(PATIENCE)
        writing(self, block)
        written += 1

    monkeypatch.setattr(sink.Sink, "memory", taken)
    monkeypatch.setattr(SaevTarget, "write", write)
    actshard.convert(tmp_path / "src", tmp_path / "d", "saev", progress=count)
    monkeypatch.undo()
    assert handed == written == 10
    actshard.convert(tmp_path / "src", tmp_path / "d", "saev", exist_ok=True, verify=True)


def test_the_plan_is_what_happens(tmp_path: Path, ragged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")  # texts of the clock's times differ in length
    own_options: dict[str, dict[str, Any]] = {"saev": {"pad": True}, "pickle": {"compress": False}}
    for format in (*FORMATS, "npy", "hf_arrow"):
        own = own_options.get(format, {})
        (planned,) = preview(ragged, tmp_path / format, format, **own)
        assert not (tmp_path / format).exists()
        done = actshard.convert(ragged, tmp_path / format, format, **own)
        assert planned.losses == done.losses
        files = [p for p in done.path.rglob("*") if p.is_file()]
        size = sum(p.stat().st_size for p in files)
        assert (planned.files, planned.bytes) == (len(files), size), format
        assert planned.rows == done.bytes // (16 * 4)
    by_format = {p.format: p for p in preview(ragged, tmp_path / "x")}
    assert list(by_format)[:4] == list(FORMATS)
    assert by_format["deepspec"].refused
    assert "pad=True" in (by_format["saev"].refused or "")
    assert {x.what for x in preview(ragged, tmp_path / "x", "saev", pad=True)[0].losses} == {"padding", "columns"}
    assert preview(ragged, tmp_path / "x", "zarr", dtype="float16")[0].losses[0].what == "dtype"


def test_a_conversion_is_resumed_and_only_of_the_same(tmp_path: Path, ragged: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int, nbytes: int) -> None:
        if done >= 10:
            raise Stop

    own: dict[str, Any] = {"shard_bytes": 3000, "compress": False}
    with pytest.raises(Stop):
        actshard.convert(ragged, tmp_path / "d", "pickle", progress=stop, **own)
    # Some batches or none were committed; resuming gives the same result.
    with pytest.raises(actshard.ArgumentError, match="examples: expected nothing"):
        actshard.convert(ragged, tmp_path / "d", "pickle", resume=True, examples=slice(0, 20), **own) if (
            tmp_path / "d/.actshard/journal.jsonl"
        ).exists() else pytest.fail("no journal")
    done = actshard.convert(ragged, tmp_path / "d", "pickle", resume=True, verify=True, **own)
    assert done.examples == 40
    with refuses(actshard.ExistsError, tmp_path / "d"):
        actshard.convert(ragged, tmp_path / "d", "pickle", **own)
    assert actshard.convert(ragged, tmp_path / "d", "pickle", exist_ok=True, verify=True, **own).bytes == 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", ["resume", "exist_ok"])
def test_a_finished_dataset_is_taken_only_for_a_copy_of_the_same(tmp_path: Path, format: str, how: str) -> None:
    """Another source, example order, layer order or token selection: each gives another dataset of the same size and name."""
    rng = np.random.default_rng(3)
    paths = []
    for name in ("a", "b"):
        # saev's name also depends on the source's metadata, which contain the time of creation.
        made = {"created_at": "2026-01-01T00:00:00+00:00"}
        with actshard.create(tmp_path / name, "zarr", layers=[4, 8], d_model=4, metadata=made) as writer:
            writer.append(rng.standard_normal((100, 2, 3, 4)).astype(np.float32))
        paths.append(writer.path)
    first, other = paths
    path = actshard.convert(first, tmp_path / "t", format).path
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    taken: dict[str, Any] = {how: True}
    assert actshard.convert(first, tmp_path / "t", format, **taken).resumed_at == 100
    asked: list[tuple[Path, dict[str, Any]]] = [
        (other, {}),
        (first, {"examples": np.arange(100)[::-1]}),
        (first, {"examples": [*range(99), 0]}),
        (first, {"layers": {8: 4, 4: 8}}),
    ]
    if format != "saev":  # saev's name depends on the number of tokens
        asked += [(first, {"tokens": "last"}), (first, {"dtype": "float16"})]
    for source, options in asked:
        if format == "lmprobe":
            options["storage"] = "full_sequence"
        with refuses(actshard.ExistsError, path):
            actshard.convert(source, tmp_path / "t", format, **taken, **options)
    assert before == {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_verify_sees_one_changed_bit(tmp_path: Path, ragged: Path) -> None:
    done = actshard.convert(ragged, tmp_path / "d", "zarr")
    chunk = next(iter(sorted((done.path / "arrays/activations").glob("3.1.*"))))
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(actshard.FormatError, match="example 3, layer 5, token 0: differs"):
        actshard.convert(ragged, tmp_path / "d", "zarr", exist_ok=True, verify=True)


def test_a_preview_of_all_formats_fits_a_terminal(ragged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = actshard.writing.converting.preview(ragged, "d", dtype="float16")
    possible = [p for p in found if not p.refused]
    refused = [p for p in found if p.refused]
    assert len(possible) > 2
    assert len(refused) > 2
    show_previews(found)
    said = capsys.readouterr().out.splitlines()
    head = said.index(next(line for line in said if line.startswith("format ")))
    table = said[head : head + 1 + len(possible)]
    assert [line.split()[0] for line in table[1:]] == [p.format for p in possible]
    assert [line.split()[-1] for line in table[1:]] == [str(len(p.losses) or "none") for p in possible]
    assert max(map(len, said[: head + len(table)])) <= 80
    assert said[0].endswith("float16")
    listed = "\n".join(said[head + len(table) :])
    for p in possible:
        assert all(str(loss) in listed for loss in p.losses)
    for p in refused:
        assert (
            f"{p.format}: not possible: {p.refused}" in listed
            or f"{p.format}, " in listed
            or f", {p.format}:" in listed
        )
        assert str(p.refused) in listed


def test_the_commands(tmp_path: Path, ragged: Path) -> None:
    told = run_command("convert", str(ragged), "--dry-run")
    assert told.returncode == 0, told.stderr
    assert "--pad" in told.stdout
    assert all(f in told.stdout for f in FORMATS)
    told = run_command("convert", str(ragged), str(tmp_path / "d"), "--to", "saev", "--dry-run", "--json")
    assert told.returncode == 2
    assert "pad=True" in json.loads(told.stdout)[0]["refused"]
    told = run_command(
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
    assert "every row and column was compared" in told.stdout
    assert actshard.open(tmp_path / "d").layers == (1,)
    told = run_command("convert", str(ragged), str(tmp_path / "e"), "--to", "saev")
    assert told.returncode == 3
    assert told.stderr.startswith("actshard: example ")
    assert "Traceback" not in told.stderr
    told = run_command("convert", str(ragged))
    assert told.returncode == 3
    assert "--dry-run" in told.stderr
    clean = run_command("verify", str(ragged), "--deep", "--json")
    assert clean.returncode == 0
    assert json.loads(clean.stdout)["ok"]
    (ragged / "arrays/activations/3.1.0.0").write_bytes(b"short")
    broken = run_command("verify", str(ragged))
    assert broken.returncode == 2
    assert "[chunk-size]" in broken.stdout
    told = run_command("merge", str(tmp_path / "m"), "--part", str(tmp_path / "d"), "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["examples"] == 40


@pytest.fixture
def spiky(tmp_path: Path) -> Path:
    """600 examples with 3 values too large for float16."""
    rows = np.ones((600, 1, 2, 16), np.float32)
    rows[7, 0, 1, 3] = 1e6
    rows[599, 0, 0, :2] = -70_000, 65_520
    rows[5, 0, 0, 0] = np.inf  # was infinite before
    with actshard.create(tmp_path / "spiky", "zarr", layers=[0], d_model=16) as writer:
        writer.append(rows)
    return tmp_path / "spiky"


@pytest.mark.parametrize("format", ["lmprobe", "zarr", "pickle"])
def test_values_that_overflow_are_refused_or_counted(tmp_path: Path, spiky: Path, format: str) -> None:
    with refuses(actshard.DtypeError, spiky, "3 finite float32 values.*overflow='allow'"):
        actshard.convert(spiky, tmp_path / "d", format, dtype="float16")
    assert not (tmp_path / "d").exists()
    (planned,) = preview(spiky, tmp_path / "d", format, dtype="float16")
    assert "overflow" in (planned.refused or "")
    done = actshard.convert(spiky, tmp_path / "d", format, dtype="float16", overflow="allow", verify=True)
    (planned,) = preview(spiky, tmp_path / "d", format, dtype="float16", overflow="allow")
    assert planned.losses == done.losses
    assert [x.detail for x in done.losses if x.what == "overflow"] == [
        "3 finite values are too large for float16 and are infinite"
    ]
    # Examples and tokens that are left out do not count.
    some = actshard.convert(spiky, tmp_path / "e", format, dtype="float16", examples=slice(8, 599))
    assert "overflow" not in {x.what for x in some.losses}
    last = actshard.convert(spiky, tmp_path / "f", format, dtype="float16", examples=[9, 599], tokens="last")
    assert "overflow" not in {x.what for x in last.losses}
    with refuses(actshard.ArgumentError, None, "'refuse' or 'allow'"):
        actshard.convert(spiky, tmp_path / "g", format, overflow="clip")


def test_the_command_does_not_call_infinite_values_the_same(tmp_path: Path, spiky: Path) -> None:
    told = run_command("convert", str(spiky), str(tmp_path / "d"), "--to", "zarr", "--dtype", "float16")
    assert told.returncode == 3
    assert "overflow" in told.stderr
    words = ["convert", str(spiky), str(tmp_path / "d"), "--to", "zarr", "--dtype", "float16", "-o", "overflow=allow"]
    told = run_command(*words, "--verify")
    assert told.returncode == 0, told.stderr
    assert "as float16: the same, but 3 finite values are too large" in told.stdout


def stopped(source: Path, target: Path, format: str, **options: Any) -> None:
    """Begins a conversion and stops it after some commits."""

    class Stop(Exception):
        pass

    def stop(done: int, total: int, nbytes: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        actshard.convert(source, target, format, progress=stop, **options)
    assert (target / ".actshard/journal.jsonl").exists()


def test_a_conversion_is_not_resumed_from_other_examples_or_another_source(tmp_path: Path, ragged: Path) -> None:
    stopped(ragged, tmp_path / "d", "pickle", examples=[0, 2, 5])
    with pytest.raises(actshard.ArgumentError, match=r"examples: expected .3 numbers"):
        actshard.convert(ragged, tmp_path / "d", "pickle", resume=True, examples=[2, 0, 5])
    assert actshard.convert(ragged, tmp_path / "d", "pickle", resume=True, examples=[0, 2, 5]).examples == 3
    stopped(ragged, tmp_path / "e", "pickle")
    # Same path, another extraction: equally many examples, other values.
    chunk = sorted((ragged / "arrays/activations").glob("[0-9]*"))[0]
    chunk.write_bytes(bytes(chunk.stat().st_size))

    moved = tmp_path / "moved"
    shutil.copytree(ragged, moved, copy_function=shutil.copy)
    shutil.rmtree(ragged)
    moved.rename(ragged)
    with pytest.raises(actshard.ArgumentError, match="source: expected the same files"):
        actshard.convert(ragged, tmp_path / "e", "pickle", resume=True)


@pytest.mark.parametrize(
    ("format", "columns", "match"),
    [
        ("lmprobe", {"num_tokens": [1, 2]}, "num_tokens"),
        ("lmprobe", {"label": [1, 2**40]}, "label"),
        ("lmprobe", {"shard_index": [1, 2]}, "shard_index"),
    ],
)
def test_columns_that_the_target_cannot_hold_are_refused_before_anything_is_written(
    tmp_path: Path, format: str, columns: dict[str, Any], match: str
) -> None:
    with actshard.create(tmp_path / "src", "zarr", layers=[0], d_model=2) as writer:
        writer.append(np.ones((2, 1, 3, 2), np.float32), columns=columns)
    (planned,) = preview(tmp_path / "src", tmp_path / "d", format)
    assert match in (planned.refused or "")
    with pytest.raises(actshard.ArgumentError, match=match):
        actshard.convert(tmp_path / "src", tmp_path / "d", format)
    assert not (tmp_path / "d").exists()


def test_sample_numbers_that_are_not_the_order_are_kept(tmp_path: Path) -> None:
    """Sample numbers are consecutive within the first blocks, but not over all."""
    for name, ids in (
        ("gap", [*range(50), *range(70, 120)]),
        ("turned", [*range(98), 99, 98]),
        ("plain", list(range(100))),
    ):
        with actshard.create(tmp_path / name, "pickle", layers=[0], d_model=8, shard_bytes=2_000) as writer:
            for i in range(0, 100, 10):
                some = np.full((10, 1, 2, 8), i, np.float32)
                writer.append(some, columns={"sample_idx": ids[i : i + 10]})
        for format in ("lmprobe", "zarr"):
            made = actshard.open(actshard.convert(tmp_path / name, tmp_path / f"{name}-{format}", format).path)
            if name == "plain":
                assert "sample_idx" not in made.table.column_names
            else:
                assert made.table["sample_idx"].to_pylist() == ids


def test_texts_that_lmprobe_cannot_tell_apart_are_a_loss(tmp_path: Path) -> None:
    for name, texts in (("own", ["a", "b", "c"]), ("same", ["a", "b", "a"]), ("none", None)):
        with actshard.create(tmp_path / name, "zarr", layers=[0], d_model=2) as writer:
            writer.append(np.ones((3, 1, 3, 2), np.float32), columns=None if texts is None else {"prompt": texts})
        done = actshard.convert(tmp_path / name, tmp_path / f"{name}-made", "lmprobe")
        told = [x.detail for x in done.losses if x.what == "texts"]
        assert len(told) == (name != "own"), (name, told)
        if name == "same":
            assert told[0].startswith("1 example has the same text as another one")
        assert actshard.verify(done.path).codes() == ({"duplicate-text"} if name == "same" else set())
        # Generated texts are not converted back.
        back = actshard.open(actshard.convert(done.path, tmp_path / f"{name}-back", "zarr").path)
        assert ("prompt" in back.table.column_names or "text" in back.table.column_names) == (texts is not None)


def test_examples_that_lmprobe_cannot_find_are_a_loss(tmp_path: Path) -> None:
    """Some have a text and others have none: nothing is made up, and the number is told."""
    for name, own in (("named", "prompt"), ("previews", "text_preview")):
        format = "zarr" if own == "prompt" else "pickle"
        with actshard.create(tmp_path / name, format, layers=[0], d_model=2) as writer:
            writer.append(np.ones((3, 1, 3, 2), np.float32), columns={own: ["a", "b", "c"]})
    parts = [actshard.open(tmp_path / name) for name in ("named", "previews")]
    for order in (parts, parts[::-1]):
        both = actshard.concat(order)
        done = actshard.convert(both, tmp_path / f"made-{order[0].format}", "lmprobe")
        assert [x.detail.partition(":")[0] for x in done.losses if x.what == "texts"] == [
            "3 examples have no text, while others have one"
        ]
        assert actshard.open(done.path).table["text"].null_count == 3


def test_sample_keys_stay(tmp_path: Path) -> None:
    keys = np.array([bytes([97 + i]) * 64 for i in range(3)], "S64")
    with actshard.create(tmp_path / "src", "zarr", layers=[0], d_model=2) as writer:
        writer.append(np.ones((3, 1, 3, 2), np.float32), columns={"sample_key": keys})
    before = actshard.open(tmp_path / "src").table["sample_key"].to_pylist()
    done = actshard.convert(tmp_path / "src", tmp_path / "made", "zarr")
    assert actshard.open(done.path).table["sample_key"].to_pylist() == before
    assert done.losses == ()


def test_columns_are_read_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion keeps the columns of some examples in memory, not the whole table."""
    from actshard.formats.lmprobe import index as lmprobe

    n = 5000
    column = "prompt"
    with actshard.create(tmp_path / "src", "lmprobe", layers=[0], d_model=2) as writer:
        writer.append(np.ones((n, 1, 2), np.float32), columns={"text": [f"{i}" for i in range(n)]})
    monkeypatch.setattr(lmprobe, "_BATCH_ROWS", 100)
    monkeypatch.setattr(lmprobe.Index.column_batches, "__defaults__", (100,))

    def whole(*_: Any) -> Any:
        raise AssertionError("the whole table was read")

    monkeypatch.setattr(lmprobe.Index, "columns", whole)
    for examples in (None, [3, 4, 4999]):
        done = actshard.convert(tmp_path / "src", tmp_path / f"made{examples}", "zarr", examples=examples, verify=True)
        ids = list(range(n)) if examples is None else examples
        assert actshard.open(done.path).table[column].to_pylist() == [f"{i}" for i in ids]
    monkeypatch.undo()
    done = actshard.convert(tmp_path / "src", tmp_path / "turned", "zarr", examples=[4999, 3])
    assert actshard.open(done.path).table[column].to_pylist() == ["4999", "3"]


@pytest.mark.parametrize("format", ["saev", "lmprobe", "zarr", "pickle"])
def test_a_refused_conversion_removes_only_what_it_wrote(tmp_path: Path, format: str) -> None:
    """Parts to be merged are in the same folder; other files there belong to the user."""
    large = np.full((2, 1, 3, 2), 1e30, np.float32)
    with actshard.create(tmp_path / "src", "zarr", layers=[0], d_model=2) as writer:
        writer.append(large)
    for i in range(2):
        with actshard.create(tmp_path / "parts", format, layers=[0], d_model=2, part=(i, 2)) as writer:
            writer.append(large)
    how: dict[str, Any] = {} if format == "saev" else {"dtype": "float16"}
    if format != "saev":  # saev's folder contains several datasets
        with pytest.raises(actshard.ActshardError):
            actshard.convert(tmp_path / "src", tmp_path / "parts", format, **how)
    assert len(actshard.open(actshard.merge(tmp_path / "parts"))) == 4

    def stop(*_: Any) -> None:
        (tmp_path / "made" / "notes.txt").write_text("mine")
        raise actshard.ArgumentError("stop")

    with pytest.raises(actshard.ArgumentError, match="stop"):
        actshard.convert(tmp_path / "src", tmp_path / "made", format, progress=stop)
    assert [p.name for p in (tmp_path / "made").rglob("*")] == ["notes.txt"]


COLUMNS = {
    "label": [*range(6)],
    "shard_index": [f"s{i}" for i in range(6)],
    "verb": ["is", "was", None, "be", "am", "are"],
}


def with_columns(path: Path, format: str, more: dict[str, Any]) -> Path:
    text = {"pickle": "text_preview", "zarr": "prompt", "lmprobe": "text"}[format]
    with actshard.create(path, format, layers=[4], d_model=2) as writer:
        rows = np.arange(6, dtype=np.float32)[:, None, None, None] * np.ones((6, 1, 3, 2), np.float32)
        writer.append(rows, columns={text: [f"text {i}" for i in range(6)], **more})
    return writer.path


@pytest.mark.parametrize("source", ["zarr", "pickle"])
def test_columns_that_a_format_refuses_are_renamed_or_left_out(tmp_path: Path, source: str) -> None:
    """The error suggests a remedy, and the remedy works, in Python and in the command."""
    path = with_columns(tmp_path / "s", source, COLUMNS)
    with pytest.raises(actshard.ArgumentError, match=r"shard_index.*columns= \(--columns\) to rename columns"):
        actshard.convert(path, tmp_path / "t", "lmprobe")
    (refused,) = actshard.writing.converting.preview(path, tmp_path / "t", "lmprobe")
    assert "columns=" in str(refused.refused)
    text = "prompt" if source == "zarr" else "text_preview"
    renamed = {text: text, "shard_index": "part", "verb": "verb"}
    done = actshard.convert(path, tmp_path / "t", "lmprobe", columns=renamed, verify=True)
    assert [str(x) for x in done.losses if "left out" in str(x)] == [
        "columns: left out, because columns= does not list them: label"
    ]
    table = actshard.open(done.path).table
    assert table["part"].to_pylist() == COLUMNS["shard_index"]
    assert table["verb"].to_pylist() == COLUMNS["verb"]
    assert table["text"].to_pylist() == [f"text {i}" for i in range(6)]
    assert table["label"].null_count == 6
    told = run_command(
        "convert", str(path), str(tmp_path / "c"), "--to", "lmprobe", "--columns", f"{text},shard_index=part,verb"
    )
    assert told.returncode == 0, told.stderr
    assert actshard.open(tmp_path / "c").table.equals(table)
    told = run_command("convert", str(path), str(tmp_path / "j"), "--to", "lmprobe", "--columns", json.dumps(["verb"]))
    assert told.returncode == 0, told.stderr
    assert "part" not in actshard.open(tmp_path / "j").table.column_names


@pytest.mark.parametrize("target", ["lmprobe", "zarr", "pickle"])
@pytest.mark.parametrize("source", ["lmprobe", "zarr", "pickle"])
def test_columns_are_chosen_and_renamed(tmp_path: Path, source: str, target: str) -> None:
    more = {"label": COLUMNS["label"], "verb": COLUMNS["verb"]}
    path = with_columns(tmp_path / "s", source, more)
    done = actshard.convert(path, tmp_path / "t", target, columns={"verb": "word", "label": "id"}, verify=True)
    table = actshard.open(done.path).table
    assert table["word"].to_pylist() == more["verb"]
    assert table["id"].to_pylist() == more["label"]
    assert not {"verb"} & {*table.column_names}
    none = actshard.convert(path, tmp_path / "n", target, columns=[])
    assert not {"verb", "word", "id"} & {*actshard.open(none.path).table.column_names}
    # A result with other columns is not reused.
    for asked in ({"verb": "word", "label": "other"}, ["verb"], []):
        for how in ("exist_ok", "resume"):
            with refuses(actshard.ExistsError, done.path, "another dataset"):
                actshard.convert(path, tmp_path / "t", target, columns=asked, **{how: True})
    again = actshard.convert(path, tmp_path / "t", target, columns={"verb": "word", "label": "id"}, exist_ok=True)
    assert again.bytes == 0


def test_a_conversion_is_not_resumed_with_other_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_columns(tmp_path / "s", "zarr", {"verb": COLUMNS["verb"]})

    def stops(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        actshard.convert(path, tmp_path / "t", "pickle", columns={"verb": "word"}, progress=stops)
    if not (tmp_path / "t/.actshard/journal.jsonl").exists():
        pytest.skip("nothing was committed")
    with pytest.raises(actshard.ArgumentError, match=r"expected .*, as in the unfinished dataset in .*, found"):
        actshard.convert(path, tmp_path / "t", "pickle", columns={"verb": "other"}, resume=True)
    done = actshard.convert(path, tmp_path / "t", "pickle", columns={"verb": "word"}, resume=True)
    assert actshard.open(done.path).table["word"].to_pylist() == COLUMNS["verb"]


def test_columns_that_make_no_sense_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = with_columns(tmp_path / "s", "zarr", {"verb": COLUMNS["verb"], "label": COLUMNS["label"]})
    for asked, cls, said in (
        ("verb", TypeError, "expected names"),
        (5, TypeError, "expected names"),
        ([3], TypeError, "found 3"),
        ({"verb": 3}, TypeError, "found 3"),
        ([""], TypeError, "found ''"),
        (["none"], actshard.NotStoredError, r"columns of the source \(label, prompt, verb\), found 'none'"),
        (["seq_len"], actshard.NotStoredError, "expected columns of the source .*, found 'seq_len'"),
        ({"verb": "x", "label": "x"}, actshard.ArgumentError, "distinct"),
        (["verb", "verb"], actshard.ArgumentError, "distinct"),
        ({"verb": "patch_labels"}, actshard.ArgumentError, "patch_labels"),
        ({"verb": "logits_values"}, actshard.ArgumentError, "logits_values"),
    ):
        with pytest.raises(cls, match=said):
            actshard.convert(path, tmp_path / "t", "pickle", columns=asked)
        assert not (tmp_path / "t").exists()
    told = run_command("convert", str(path), str(tmp_path / "t"), "--to", "pickle", "--columns", "verb=a,verb=b")
    assert told.returncode != 0
    assert "every name once" in told.stderr


TEXT = "t" * 1200


@pytest.mark.parametrize(
    ("columns", "wanted", "lost"),
    [
        # The preview is completed from the whole text, in any column order.
        (["text", "text_preview"], {"prompt": [TEXT, "short"]}, "label, note"),
        # A renamed column is not mistaken for the column whose name it gets.
        ({"text_preview": "text_preview", "note": "text"}, {"prompt": ["n0", "n1"]}, "label, text"),
        ({"label": "sample_idx"}, {"sample_idx": [1, 0]}, "text_preview, note, text"),
        ({"label": "text_preview"}, {"text_preview": [1, 0]}, "text_preview, note, text"),
    ],
)
def test_columns_that_are_renamed_mean_what_they_meant(
    tmp_path: Path, columns: Any, wanted: dict[str, list[Any]], lost: str
) -> None:
    with actshard.create(tmp_path / "a", "pickle", layers=[0], d_model=4) as writer:
        own = {"text": [TEXT, "short"], "label": [1, 0], "note": ["n0", "n1"]}
        writer.append(np.ones((2, 1, 3, 4), np.float32), columns=own)
    made = actshard.convert(tmp_path / "a", tmp_path / "b", "zarr", columns=columns)
    table = actshard.open(made.path).table
    assert {name: table[name].to_pylist() for name in wanted} == wanted
    found = next(loss.detail for loss in made.losses if "does not list" in loss.detail).rpartition(": ")[2]
    assert sorted(found.split(", ")) == sorted(lost.split(", "))


def test_patch_labels_that_are_left_out_are_a_loss_and_names_are_unicode(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "a", "zarr", layers=[0], d_model=4) as writer:
        labels = np.ones((2, 3), np.uint8)
        writer.append(np.ones((2, 1, 3, 4), np.float32), columns={"patch_labels": labels.tolist(), "label": [1, 0]})
    made = actshard.convert(tmp_path / "a", tmp_path / "b", "lmprobe", columns=["label"])
    assert any("patch_labels" in loss.detail for loss in made.losses)
    with pytest.raises(actshard.ArgumentError, match="surrogate"):
        actshard.convert(tmp_path / "a", tmp_path / "c", "zarr", columns={"label": "\udcff"})


@pytest.mark.parametrize("by", ["saev", "npy"])
@pytest.mark.parametrize("cls_token", [False, True])
@pytest.mark.parametrize("format", ["saev", "npy", "zarr"])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"tokens": "last"}, [3]),
        ({"tokens": "content"}, [0, 1, 2, 3]),
        ({"truncate": True, "tokens_per_example": 3}, [0, 1, 2]),
        ({"pad": True, "tokens_per_example": 7}, None),
        ({"examples": [5, 0]}, [0, 1, 2, 3]),
    ],
)
def test_labels_follow_their_tokens_or_are_a_loss(
    tmp_path: Path, format: str, options: dict[str, Any], kept: list[int] | None, cls_token: bool, by: str
) -> None:
    """Labels of saev, and those that another format keeps as a column."""
    if by == "npy" and format == "saev" and cls_token:
        pytest.skip("only saev stores special tokens")
    if "tokens_per_example" in options:
        if format != "saev":
            pytest.skip("this format has any number of tokens")
        options = {**options, "tokens_per_example": options["tokens_per_example"] + cls_token}
    labels = np.arange(24, dtype=np.uint8).reshape(6, 4)
    with actshard.create(tmp_path / "s", "saev", layers=[0], d_model=4, cls_token=cls_token) as writer:
        writer.append(np.ones((6, 1, 4 + cls_token, 4), np.float32), labels=labels)
    source = writer.path if by == "saev" else actshard.convert(writer.path, tmp_path / "npy", "npy").path
    foretold = actshard.writing.converting.preview(source, tmp_path / "t", format, **options)
    done = actshard.convert(source, tmp_path / "t", format, **options)
    assert ("labels" in [loss.what for loss in done.losses]) == (kept is None)
    assert [[str(loss) for loss in each.losses] for each in foretold if each.format == format] == [
        [str(loss) for loss in done.losses]
    ]
    store = actshard.open(done.path)
    found = store.labels
    if format != "saev":
        found = np.array(store.table["patch_labels"].to_pylist())
    if kept is None:
        assert found is None
        return
    assert found is not None
    assert np.array_equal(found, labels[options.get("examples", range(6))][:, kept])


@pytest.mark.parametrize("way", ["verb", "plan"])
def test_errors_of_reading_name_the_examples_in_every_way(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with actshard.create(tmp_path / "src", "npy", layers=[0], d_model=8) as writer:
        writer.append(np.ones((10, 1, 3, 8), np.float32))
    monkeypatch.setattr(SaevTarget, "block_bytes", 2 * 3 * 32)
    plan = actshard.plan.convert(tmp_path / "src", tmp_path / "d", "saev", tasks=1)
    read, calls = blocks.read, itertools.count()

    def damaged(*arguments: Any) -> None:
        if next(calls) == 2:
            raise actshard.FormatError("a damaged shard", path=tmp_path / "src")
        read(*arguments)

    monkeypatch.setattr(blocks, "read", damaged)
    with pytest.raises(actshard.FormatError, match=r"a damaged shard \(reading examples 4 to 5\)"):
        plan.run(0) if way == "plan" else actshard.convert(tmp_path / "src", tmp_path / "e", "saev")
