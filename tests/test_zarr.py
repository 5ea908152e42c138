"""Zarr stores: any valid chunking reads like the array, only requested data are read, and errors name the file."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from actshard.base.request import RECORD
from conftest import GOLDEN, bits, refuses
from zarr_files import change, write_array, write_store

ZARR = sorted(p.parent for p in (GOLDEN / "zarr").glob("*/expected.npz"))


def opened(path: Path, io: str = "mmap", **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, io=io, **options)


def store_of(variant: Path) -> Path:
    return variant if variant.name.startswith("run_") else next(variant.glob("*.zarr"))


def check(store: actshard.Store, want: Any, lengths: np.ndarray) -> None:
    """Compares every way of reading with want(example, layer)."""
    n = len(store)
    assert store.token_counts.tolist() == lengths.tolist()
    assert not store.token_counts.flags.writeable
    e = np.repeat(np.arange(n), lengths)
    t = np.concatenate([np.arange(x) for x in lengths]) if n else e
    shuffled = np.random.default_rng(0).permutation(len(e))
    for layer in store.layers:
        whole = [want(i, layer) for i in range(n)]
        rows = np.concatenate(whole)
        assert rows.dtype == store.dtype
        for i in range(n):
            got = store.sequence(i, layer)
            assert got.shape == whole[i].shape
            assert np.array_equal(bits(got), bits(whole[i])), (i, layer)
        assert np.array_equal(bits(store.gather(layer, e[shuffled], t[shuffled])), bits(rows[shuffled]))
        back = t[shuffled] - lengths[e[shuffled]]
        assert np.array_equal(bits(store.gather(layer, e[shuffled], back)), bits(rows[shuffled]))
        assert np.array_equal(store.gather(layer, e, t, dtype="float64"), rows.astype(np.float64), equal_nan=True)
        some = np.flatnonzero(lengths)
        if some.size:
            last = np.stack([whole[i][-1] for i in some])
            assert np.array_equal(bits(store.last_tokens(layer, some)), bits(last))
        assert all(
            np.array_equal(bits(a), bits(b)) for a, b in zip(store.sequences(range(n), layer), whole, strict=True)
        )
    picks = np.random.default_rng(1).integers(0, (n, len(store.layers)), (30, 2)) if n else np.empty((0, 2), int)
    for (i, layer), got in zip(picks, store.sequences(picks[:, 0], picks[:, 1].tolist()), strict=True):
        assert np.array_equal(bits(got), bits(want(i, layer)))


@pytest.mark.parametrize("variant", ZARR, ids=lambda p: p.name)
def test_golden_stores_equal_expected(variant: Path, io: str) -> None:
    z = np.load(variant / "expected.npz")
    store = opened(store_of(variant), io)
    assert store.format == "zarr"
    if "acts" in z:
        lengths = z["seq_len"]
        check(store, lambda i, layer: z["acts"][i, layer, : lengths[i]], lengths)
        names = set(z) - {"acts", "shard_of", "local_index"}
    else:
        p, r = z["prompt_len"], z["response_len"]
        acts = z["prompt_activations"], z["response_activations"]
        check(store, lambda i, k: np.concatenate([acts[0][i, k, : p[i]], acts[1][i, k, : r[i]]]), p + r)
        names = set(z) - {"prompt_activations", "response_activations"}
    table = store.table
    assert table.num_rows == len(store)
    for name in names:
        want = [x.decode() for x in z[name]] if z[name].dtype.kind == "S" else z[name].tolist()
        assert json.dumps(table[name].to_pylist()) == json.dumps(want), name  # as text, so that NaN equals NaN


def test_texts_are_joined_by_sample() -> None:
    table = opened(GOLDEN / "zarr/single_consolidated/activations.zarr").table
    assert table["prompt"][1].as_py() == "Question 1: naïve “quoted”\nsecond line"
    assert table["response"].to_pylist() == [f"Answer {i} ✓" for i in range(5)]
    assert table["score"].to_pylist() == [0.0, 0.125, 0.25, 0.375, 0.5]
    assert table["tags"][4].as_py() == ["a", None]
    run = opened(GOLDEN / "zarr/run_20260122_101112").table
    assert run["prompt"][3].as_py().startswith("Question 3")
    logger = opened(GOLDEN / "zarr/hallulens_logger_v2/activations.zarr")
    assert logger.table["prompt"].to_pylist() == [f"prompt {i} ü" for i in range(4)]
    assert logger.table["key"][0].as_py() == "key-0-"
    assert logger.table["input_length"][3].as_py() == 10
    assert logger.read_columns(["response"]).column_names == ["response"]
    with pytest.raises(actshard.NotStoredError, match="no column 'nope'"):
        logger.read_columns(["nope"])


FORMS = st.tuples(*(st.integers(1, n) for n in (4, 3, 7, 9)))


@settings(max_examples=150)
@given(
    shape=FORMS,
    chunks=st.tuples(*(st.integers(1, n) for n in (5, 4, 9, 12))),
    dtype=st.sampled_from(["<f2", ">f2", "<f4", ">f4", "<f8", ">f8"]),
    order=st.sampled_from("CF"),
    separator=st.sampled_from([".", "/", None]),
    fill=st.sampled_from([0, 1.5, None, "NaN", "-Infinity"]),
    holes=st.integers(0, 3),
    io=st.sampled_from(["mmap", "pread"]),
    data=st.data(),
)
def test_any_chunking_equals_the_array(
    tmp_path_factory: pytest.TempPathFactory, shape: Any, chunks: Any, dtype: str, order: str, separator: Any, fill: Any,
    holes: int, io: str, data: st.DataObject,
) -> None:  # fmt: skip
    values = np.arange(1, np.prod(shape) + 1, dtype=dtype).reshape(shape)
    lengths = np.array(data.draw(st.lists(st.integers(0, shape[2]), min_size=shape[0], max_size=shape[0])), "<i4")
    missing = lambda at: holes > 0 and (at[0] * 5 + at[1] * 3 + at[2] + at[3]) % (holes + 1) == 0  # noqa: E731
    folder = tmp_path_factory.mktemp("z") / "a.zarr"
    write_store(folder, values, lengths, chunks, order=order, separator=separator, fill=fill, skip=missing)
    want = values.astype(np.dtype(dtype).newbyteorder("="))
    for at in np.ndindex(*(-(-n // c) for n, c in zip(shape, chunks, strict=True))):
        if missing(at):
            value = {None: 0, "NaN": np.nan, "-Infinity": -np.inf}.get(fill, fill)
            want[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunks, strict=True))] = value
    check(opened(folder, io), lambda i, layer: want[i, layer, : lengths[i]], lengths)
    shutil.rmtree(folder.parent)


def acts(n: int = 6, layers: int = 2, t: int = 8, h: int = 16) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((n, layers, t, h)).astype("<f2")


def test_a_sequence_in_one_chunk_is_a_view_that_outlives_everything(tmp_path: Path) -> None:
    values = acts()
    path = write_store(tmp_path / "a.zarr", values, np.array([8, 5, 0, 1, 8, 3], "<i4"), (1, 1, 8, 16))
    store = opened(path)
    view = store.sequence(1, 1)
    assert view.base is not None
    assert not view.flags.writeable
    store.close()
    del store
    shutil.rmtree(path)
    assert np.array_equal(view, values[1, 1, :5])
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1


@pytest.mark.parametrize("sharded", [True, False])
def test_views_share_the_mapping_of_their_file(sharded: bool, tmp_path: Path) -> None:
    """The kernel limits mappings (65,530 by default), so the number of views must not."""
    path = tmp_path / "a.zarr"
    if sharded:
        shutil.copytree(GOLDEN / "zarr/v3_sharded/activations.zarr", path)
    else:
        write_store(path, acts(), np.array([8, 5, 0, 1, 8, 3], "<i4"), (3, 2, 8, 16))
    store = opened(path)
    wanted = [(e, layer) for e in range(len(store)) for layer in store.layers]
    copies = {(e, layer): opened(path, "pread").sequence(e, layer) for e, layer in wanted}
    held = [(key, store.sequence(*key)) for _ in range(20) for key in wanted]
    views = sum(not rows.flags.writeable for _, rows in held)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    assert views >= 60
    assert len(maps) == len({line.split()[-1] for line in maps})
    store.close()
    assert all(np.array_equal(bits(rows), bits(copies[key])) for key, rows in held)
    del held
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_views_are_copies_where_rows_do_not_lie_together(tmp_path: Path) -> None:
    path = write_store(tmp_path / "a.zarr", acts(), np.full(6, 8, "<i4"), (1, 1, 3, 16))
    assert opened(path).sequence(0, 0).flags.writeable
    whole = write_store(tmp_path / "b.zarr", acts(), np.full(6, 8, "<i4"), (1, 1, 8, 16))
    assert opened(whole, "pread").sequence(0, 0).flags.writeable
    assert opened(whole).sequence(0, 0, dtype="float32").flags.writeable


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace shows which bytes are read; it is not installed")
def test_only_the_rows_wanted_of_the_chunks_touched_are_read(tmp_path: Path, io: str) -> None:
    path = write_store(tmp_path / "a.zarr", acts(4, 3, 64, 512), np.full(4, 50, "<i4"), (1, 1, 16, 512))
    code = (
        "import warnings, actshard; warnings.simplefilter('ignore'); import numpy as np\n"
        f"s = actshard.open({str(path)!r}, io={io!r}); open('/dev/null').read()\n"
        "s.gather(1, [2, 2, 0], [0, 17, 49]); np.asarray(s.sequence(3, 2)[20:22])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(actshard.__file__).parents[1])}
    done = subprocess.run(
        ["strace", "-f", "-y", "-e", "trace=openat,pread64,preadv,preadv2,read", sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env=env,
    )  # fmt: skip
    read: dict[str, int] = {}
    for line in done.stderr.splitlines():
        if "activations/" in line and "= " in line and ("pread" in line or "read(" in line):
            name = line.split("activations/")[1].split(">")[0]
            if name == ".zarray":
                continue
            count = line.rsplit("= ", 1)[1].split()[0]
            read[name] = read.get(name, 0) + (int(count) if count.isdigit() else 0)
    row = 512 * 2
    assert read == {
        "2.1.0.0": row,
        "2.1.1.0": row,
        "0.1.3.0": row,
        **{f"3.2.{c}.0": 16 * row for c in range(3)},
        "3.2.3.0": 2 * row,
    }


def test_opening_a_store_of_a_million_chunks_lists_nothing(tmp_path: Path) -> None:
    path = write_store(tmp_path / "a.zarr", acts(2, 1, 2, 4), np.full(2, 2, "<i4"), (1, 1, 1, 4))
    change(path / "arrays/activations/.zarray", lambda m: m | {"shape": [5000, 20, 10, 4]})
    write_array(path / "arrays/seq_len", np.full(5000, 10, "<i4"), (5000,))
    (path / "arrays/activations").chmod(0o311)  # entries can be opened but not listed
    assert len(opened(path)) == 5000
    if shutil.which("strace") is not None:
        # Opening a store of a million chunk files takes a few dozen system calls, not one per chunk.
        code = f"import warnings, actshard; warnings.simplefilter('ignore'); actshard.open({str(path)!r})"
        env = {**os.environ, "PYTHONPATH": str(Path(actshard.__file__).parents[1])}
        command = ["strace", "-f", "-y", "-e", "trace=%file,getdents64", sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        about = [line for line in done.stderr.splitlines() if "arrays/activations" in line]
        assert 0 < len(about) < 100
        assert not [line for line in about if "getdents64" in line]


def test_thousands_of_chunks_do_not_exhaust_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = acts(40, 4, 8, 4)
    path = write_store(tmp_path / "a.zarr", values, np.full(40, 8, "<i4"), (1, 1, 1, 4))
    code = (
        "import resource, warnings; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); warnings.simplefilter('ignore')\n"
        f"import actshard; s = actshard.open({str(path)!r})\n"
        "x = [s.sequences(range(40), layer) for layer in s.layers]; v = [s.sequence(i, 0) for i in range(40)]; print(len(x))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "4\n", done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_lengths_that_are_not_there_or_too_long_are_said(tmp_path: Path) -> None:
    path = write_store(tmp_path / "a.zarr", acts(), None, (1, 1, 8, 16))
    with pytest.warns(actshard.ActshardWarning, match="no arrays/seq_len: every sample is read with all 8 tokens"):
        store = actshard.open(path)
    assert store.token_counts.tolist() == [8] * 6
    write_array(path / "arrays/seq_len", np.array([8, 9, 3, 100, 0, 1], "<i8"), (4,))
    with pytest.warns(actshard.ActshardWarning, match="contains 100 tokens, but .* has room for 8: 2 samples"):
        store = actshard.open(path)
    assert store.token_counts.tolist() == [8, 8, 3, 8, 0, 1]
    write_array(path / "arrays/seq_len", np.array([8, 9, -1, 100, 0, 1], "<i8"), (6,))
    with refuses(actshard.FormatError, path / "arrays/seq_len", "found -1 for sample 2"):
        opened(path)


def test_a_chunk_of_the_wrong_size_is_named(tmp_path: Path, io: str) -> None:
    path = write_store(tmp_path / "a.zarr", acts(), np.full(6, 8, "<i4"), (1, 1, 4, 16))
    store = opened(path, io)
    chunk = path / "arrays/activations/2.1.1.0"
    chunk.write_bytes(chunk.read_bytes()[:100])
    with refuses(actshard.TruncatedFileError, chunk, "expected 128 bytes, a whole chunk of 1 x 1 x 4 x 16, found 100"):
        store.sequences([2], 1)
    chunk.write_bytes(bytes(129))
    with refuses(actshard.FormatError, chunk, "found 129"):
        store.gather(1, 2, 7)
    assert np.array_equal(store.gather(1, [2], [3])[0], acts()[2, 1, 3])
    shutil.rmtree(path)
    with refuses(actshard.MissingFileError, path / "arrays/activations/.zarray"):
        store.gather(0, 5, 0)


@pytest.mark.parametrize(
    ("field", "value", "kind", "said"),
    [
        ("shape", [6, 2, 8], actshard.FormatError, "one per dimension"),
        ("shape", [6, 2, -8, 16], actshard.FormatError, "at least 0"),
        ("shape", [6, 0, 8, 16], actshard.FormatError, "expected supported sizes"),
        ("shape", [1 << 40, 2, 8, 16], actshard.FormatError, "expected supported sizes"),
        ("shape", [6, 2, 1 << 40, 16], actshard.FormatError, "expected supported sizes"),
        ("chunks", [1, 1, 0, 16], actshard.FormatError, "at least 1"),
        ("chunks", [1, 1, 1 << 47, 1 << 47], actshard.FormatError, "too large for any disk"),
        ("chunks", "auto", actshard.FormatError, "list of integers"),
        ("dtype", "<V7", actshard.UnsupportedError, 'bytes of an unknown type are not read, found "<V7"'),
        ("dtype", "|O", actshard.UnsupportedError, "strings"),
        ("dtype", [["a", "<f2"]], actshard.UnsupportedError, "structured"),
        ("dtype", "<f3", actshard.FormatError, "element type"),
        ("order", "K", actshard.FormatError, '"C" or "F"'),
        ("fill_value", "one", actshard.FormatError, "a value of float16"),
        ("fill_value", {}, actshard.FormatError, "a value of float16"),
        ("dimension_separator", "-", actshard.FormatError, "or"),
        ("zarr_format", 3, actshard.FormatError, "2"),
        ("compressor", "zstd", actshard.FormatError, "codecs with an id"),
    ],
)
def test_broken_metadata_are_refused(tmp_path: Path, field: str, value: Any, kind: Any, said: str) -> None:
    path = write_store(tmp_path / "a.zarr", acts(), np.full(6, 8, "<i4"), (1, 1, 4, 16))
    change(path / "arrays/activations/.zarray", lambda m: m | {field: value})
    with refuses(kind, path / "arrays/activations/.zarray", said):
        opened(path)


def test_codecs_that_nobody_knows_and_damaged_chunks_are_errors(tmp_path: Path) -> None:
    copy = tmp_path / "a.zarr"
    shutil.copytree(GOLDEN / "zarr/zstd/activations.zarr", copy)
    chunk = copy / "arrays/activations/0.0.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-20])  # zstd without a checksum detects little besides truncation
    with refuses(actshard.FormatError, chunk, "cannot decode"):
        opened(copy).sequences([0], 0)
    change(copy / "arrays/activations/.zarray", lambda m: m | {"compressor": {"id": "nope"}})
    with pytest.raises(actshard.UnsupportedError, match="codec 'nope' is not supported"):
        opened(copy)


def test_decoded_chunks_are_kept_within_their_budget(io: str) -> None:
    path = GOLDEN / "zarr/zstd/activations.zarr"
    want = opened(path, io).gather(1, [0, 1, 2, 0], [0, 0, 0, 1])
    assert np.array_equal(opened(path, io, decoded_memory=0).gather(1, [0, 1, 2, 0], [0, 0, 0, 1]), want)
    with pytest.raises(actshard.ArgumentError, match="decoded_memory"):
        opened(path, io, decoded_memory="many")


def test_runs_without_a_manifest_are_taken_in_the_order_of_names(tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(GOLDEN / "zarr/run_20260122_101112", copy)
    (copy / "manifest.json").unlink()
    z = np.load(copy / "expected.npz")
    check(opened(copy), lambda i, layer: z["acts"][i, layer, : z["seq_len"][i]], z["seq_len"])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda m: m["shards"][0].update(path="../x.zarr"), "inside the run's folder"),
        (lambda m: m["shards"][0].update(path="/x.zarr"), "inside the run's folder"),
        (lambda m: m["shards"][1].update(path="shards/shard-0000.zarr"), "a different store for each shard"),
        (lambda m: m["shards"][1].update(start=4), "expected 3, the number of samples before, found 4"),
        (lambda m: m["shards"][1].update(n_samples=3), "at most 2"),
        (lambda m: m.update(n_samples=10), "expected 9, the sum"),
        (lambda m: m.update(shards=[]), "at least one shard"),
    ],
)
def test_a_manifest_that_contradicts_its_shards_is_refused(tmp_path: Path, function: Any, said: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(GOLDEN / "zarr/run_20260122_101112", copy)
    change(copy / "manifest.json", function)
    with refuses(actshard.FormatError, copy / "manifest.json", said):
        opened(copy)


def test_stores_of_a_run_must_be_alike(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_store(run / "shards/a.zarr", acts(), np.full(6, 8, "<i4"), (1, 1, 4, 16))
    write_store(run / "shards/b.zarr", acts(h=8), np.full(6, 8, "<i4"), (1, 1, 4, 8))
    with refuses(
        actshard.FormatError,
        run / "shards/b.zarr/arrays/activations/.zarray",
        "hidden size: expected 16, as in a.zarr, found 8",
    ):
        opened(run)
    shutil.rmtree(run / "shards/b.zarr")
    longer = acts(3, 2, 11)
    write_store(run / "shards/b.zarr", longer, np.array([11, 2, 7], "<i4"), (2, 2, 5, 7), fill="NaN")
    check(
        opened(run),
        lambda i, k: acts()[i, k] if i < 6 else longer[i - 6, k, : [11, 2, 7][i - 6]],
        np.array([8] * 6 + [11, 2, 7]),
    )


def test_hallulens_rows_that_no_line_names_have_no_tokens(tmp_path: Path) -> None:
    copy = tmp_path / "a.zarr"
    shutil.copytree(GOLDEN / "zarr/hallulens_logger_v2/activations.zarr", copy)
    index = copy / "meta/index.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    # Sample 1 is logged again as row 2, so its old row is unused; row 3 was allocated and never written.
    again = {**lines[2], "key": lines[1]["key"], "prompt": "again"}
    index.write_text("".join(json.dumps(x) + "\n" for x in (lines[0], lines[1], again)))
    with pytest.warns(actshard.ActshardWarning, match="1 row has no line"):
        store = actshard.open(copy)
    assert store.token_counts.tolist() == [8, 0, 2]
    assert store.table["prompt"].to_pylist() == ["prompt 0 ü", None, "again"]
    index.write_text(json.dumps({**lines[0], "sample_index": 4}))
    with refuses(actshard.FormatError, index, "line 1.sample_index"):
        opened(copy)
    index.write_text("".join(json.dumps({**x, "sample_index": 0}) + "\n" for x in lines[:2]))
    with refuses(actshard.FormatError, index, "lines 1 and 2: both have sample_index 0"):
        opened(copy)
    index.unlink()
    assert opened(copy).num_examples == 4


def test_broken_lines_of_text_are_named_and_missing_ones_said(tmp_path: Path) -> None:
    copy = tmp_path / "a.zarr"
    shutil.copytree(GOLDEN / "zarr/single_consolidated/activations.zarr", copy)
    prompts = copy / "text/prompts.jsonl"
    lines = prompts.read_text().splitlines()
    prompts.write_text("\n".join([lines[0], lines[3]]) + "\n")
    store = opened(copy)
    with pytest.warns(actshard.ActshardWarning, match=r"text/prompts.jsonl: 3 samples have no line \(of 2\): 1, 2, 4"):
        table = store.table
    assert [x is None for x in table["prompt"].to_pylist()] == [False, True, True, False, True]
    for text, said in (
        (lines[0] + "\n" + lines[1][:30], "line 2: expected a JSON object: .*interrupted"),
        (lines[0] + "\n[1]\n", r"line 2: expected a JSON object, found \[1\]"),
        (lines[0] + "\n" + lines[0] + "\n", "lines 1 and 2: both have sample 0"),
        ('{"i": 5}\n', "line 1: field 'i': expected a sample, 0 to 4, found 5"),
    ):
        prompts.write_text(text)
        with refuses(actshard.FormatError, prompts, said):
            _ = opened(copy).table
        assert opened(copy).gather(0, 0, 0).shape == (1, 16)  # rows do not need texts


def test_metadata_and_consolidated_metadata_that_differ_are_said(tmp_path: Path) -> None:
    copy = tmp_path / "a.zarr"
    shutil.copytree(GOLDEN / "zarr/single_consolidated/activations.zarr", copy)
    change(copy / ".zmetadata", lambda m: m["metadata"]["arrays/activations/.zarray"].update(shape=[4, 3, 12, 16]))
    change(copy / ".zattrs", lambda m: m.update(hidden_size=17))
    store = opened(copy)
    assert any("consolidated metadata differ" in w for w in store.warnings)
    assert any("'hidden_size' is 17, but the array has 16" in w for w in store.warnings)
    assert len(store) == 5
    # A store with only consolidated metadata is read by those.
    for path in copy.rglob(".zarray"):
        path.unlink()
    change(copy / ".zmetadata", lambda m: m["metadata"]["arrays/activations/.zarray"].update(shape=[5, 3, 12, 16]))
    assert opened(copy).token_counts.tolist() == store.token_counts.tolist()


def test_other_zarr_groups_are_not_taken_for_stores(tmp_path: Path) -> None:
    (tmp_path / ".zgroup").write_text('{"zarr_format": 2}')
    write_array(tmp_path / "weights", np.zeros((3, 4), "<f4"), (3, 4))
    with pytest.raises(actshard.UnknownFormatError, match="a Zarr group without these arrays"):
        actshard.open(tmp_path)
    with pytest.raises(actshard.UnknownFormatError, match="a single Zarr array; open the store that contains it"):
        actshard.open(GOLDEN / "zarr/single_minimal/activations.zarr/arrays/activations")
    with refuses(actshard.FormatError, tmp_path, "found .'weights'.|expected an array"):
        actshard.open(tmp_path, format="zarr")
    write_array(tmp_path / "folder/acts.zarr", np.zeros((3, 4), "<f4"), (3, 4))
    with pytest.raises(
        actshard.UnknownFormatError, match=r"acts\.zarr/\.zarray: of Zarr, but not a dataset.*numpy\.save"
    ):
        actshard.open(tmp_path / "folder")


def test_a_second_array_of_activations_is_named(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s.zarr", np.ones((2, 1, 4, 32), "f4"), None, (1, 1, 4, 32))
    write_array(store / "arrays/mlp_activations", np.zeros((2, 1, 4, 64), "<f4"), (1, 1, 4, 64))
    with warnings.catch_warnings(action="ignore"):
        read = actshard.open(store)
    assert read.d_model == 32
    assert any("arrays/mlp_activations, float32 of shape" in text for text in read.warnings)


def test_a_codec_of_the_zarr_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "s.zarr", np.ones((2, 1, 4, 3), "f4"), None, (1, 1, 4, 3))
    change(store / "arrays/activations/.zarray", lambda meta: meta | {"compressor": {"id": "lz4", "acceleration": 1}})
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(actshard.MissingExtraError, match=r"lz4.*pip install 'actshard\[zarr\]'"):
        actshard.open(store)


def test_a_malformed_codec_names_the_field_and_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "s.zarr", np.ones((2, 1, 4, 3), "f4"), None, (1, 1, 4, 3))
    change(store / "arrays/activations/.zarray", lambda meta: meta | {"compressor": {"id": "gzip", "level": "high"}})
    monkeypatch.setitem(sys.modules, "zarr", None)
    message = "field 'codecs': expected valid configurations of gzip"
    with refuses(actshard.FormatError, store / "arrays/activations/.zarray", message) as caught:
        actshard.open(store)
    assert "pip install" not in str(caught.value)


@pytest.mark.parametrize("rooms", [(4, 9), (9, 4), (5, 5, 7)])
def test_a_run_as_one_group_has_the_largest_t_max(tmp_path: Path, rooms: tuple[int, ...]) -> None:
    from actshard.compat.zarr import open_group

    want = np.full((2 * len(rooms), 2, max(rooms), 3), -1, "f4")
    for k, room in enumerate(rooms):
        values = acts(2, 2, room, 3).astype("f4") + 100 * k
        want[2 * k : 2 * k + 2, :, :room] = values
        write_store(tmp_path / f"run/shards/s{k}.zarr", values, np.full(2, room, "<i4"), (1, 1, 2, 3), fill=-1)
    group = open_group(tmp_path / "run")
    array = group["arrays/activations"]
    assert array.shape == want.shape
    assert array.fill_value == -1
    assert array.nbytes == want.nbytes
    picks: list[Any] = [
        ...,
        np.s_[:],
        np.s_[1],
        np.s_[-1, 1],
        np.s_[::2, 0, 3:],
        np.s_[1:3, :, ::2, 1:],
        np.s_[:, 1, -1],
        np.s_[:, :, :4],
        np.s_[2:2],
    ]
    for index in picks:
        assert np.array_equal(array[index], want[index]), index
    lengths = group["arrays/seq_len"][:]
    for i, n in enumerate(lengths.tolist()):
        assert np.array_equal(array[i, 0, :n, :], opened(tmp_path / "run").sequence(i, 0))


def test_a_group_has_the_members_that_zarr_names(tmp_path: Path) -> None:
    from actshard.compat.zarr import open_group

    path = write_store(tmp_path / "a.zarr", acts(4, 1, 2, 3), np.full(4, 2, "<i4"), (1, 1, 2, 3))
    write_array(path / "arrays/sample_key", np.array([b"a", b"bb", b"", b"d"], "S4"), (3,), fill="")
    (path / "arrays/seq_len/.zattrs").write_text('{"unit": "tokens"}')
    group = open_group(path)["arrays"]
    assert sorted(group.array_keys()) == ["activations", "sample_key", "seq_len"]
    assert len(group) == 3
    assert dict(group.members())["seq_len"].attrs == {"unit": "tokens"}
    assert group["activations"].attrs == {}
    assert group.get("nothing") is None
    assert group.get("seq_len").info["shape"] == (4,)
    keys = group["sample_key"]
    assert keys.dtype == "S4"
    assert keys[:].dtype == "S4"
    assert keys[:].tolist() == [b"a", b"bb", b"", b"d"]


@pytest.mark.parametrize("named", [[4], [4, 4], "x", [4, True], {"a": 1}])
def test_layer_names_that_make_no_sense_are_a_warning_and_a_finding(tmp_path: Path, named: Any) -> None:
    with actshard.create(tmp_path / "d", "zarr", layers=[4, 8], d_model=2) as writer:
        writer.append(np.ones((1, 2, 1, 2), np.float32))
    path = tmp_path / "d"
    assert (actshard.open(path).layers, actshard.verify(path).findings) == ((4, 8), [])
    for name in (".zattrs", ".zmetadata"):
        made = json.loads((path / name).read_text())
        (made if name == ".zattrs" else made["metadata"][".zattrs"])["layers"] = named
        (path / name).write_text(json.dumps(made))
    with pytest.warns(
        actshard.ActshardWarning, match="attribute 'layers': expected 2 different integers or strings, found"
    ):
        store = actshard.open(path)
    assert (store.layers, len(store.warnings)) == ((0, 1), 1)
    assert [f.code for f in actshard.verify(path).findings] == ["claim"]


def test_attributes_that_differ_from_the_consolidated_ones_are_a_warning_and_a_finding(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "zarr", layers=[4, 8], d_model=2) as writer:
        writer.append(np.ones((1, 2, 1, 2), np.float32))
    path = tmp_path / "d"
    made = json.loads((path / ".zattrs").read_text())
    (path / ".zattrs").write_text(json.dumps({**made, "layers": [7, 9]}))
    with pytest.warns(actshard.ActshardWarning, match="consolidated metadata differ"):
        assert actshard.open(path).layers == (7, 9)
    assert {f.code for f in actshard.verify(path).findings} == {"consolidated-differs"}


def written(folder: Path) -> Path:
    rows = np.random.default_rng(7).standard_normal((4, 2, 5, 3)).astype(np.float32)
    with actshard.create(folder / "d", "zarr", layers=[0, 1], d_model=3) as writer:
        writer.append(rows, columns={"label": np.array([1, 0, 1, 0])})
    return writer.path


@pytest.mark.parametrize("gone", [lambda path: path.unlink(), lambda path: path.unlink() or path.symlink_to("nowhere")])
def test_a_missing_chunk_of_a_store_that_actshard_wrote_is_an_error(tmp_path: Path, io: str, gone: Any) -> None:
    path = written(tmp_path)
    chunk = path / "arrays/activations/2.1.0.0"
    gone(chunk)
    store = actshard.open(path, io=io)
    assert store.sequences([2], 0)[0].any()
    with refuses(actshard.MissingFileError, chunk):
        store.sequences([2], 1)
    assert [(f.code, f.path) for f in actshard.verify(path).errors] == [("missing-file", chunk)]


@pytest.mark.parametrize("name", ["seq_len", "label"])
def test_a_missing_chunk_of_values_per_sample_is_an_error(tmp_path: Path, name: str) -> None:
    path = written(tmp_path)
    chunk = path / "arrays" / name / "0"
    chunk.unlink()
    with refuses(actshard.MissingFileError, chunk):
        actshard.open(path).read_columns(["label"])
    assert {(f.code, f.path) for f in actshard.verify(path).errors} == {("missing-file", chunk)}


def test_a_missing_chunk_of_lengths_of_another_writer_is_a_warning(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", np.ones((4, 2, 5, 3), np.float32), np.full(4, 5), (1, 1, 5, 3))
    (path / "arrays/seq_len/0").unlink()
    with pytest.warns(actshard.ActshardWarning, match="has no file: its samples are read as 0 tokens") as warned:
        store = actshard.open(path)
    assert [warning.message.code for warning in warned] == ["chunk-missing"]
    assert store.token_counts.tolist() == [0] * 4
    assert "chunk-missing" in actshard.verify(path).codes()


def test_stores_of_other_writers_keep_their_fill_values_when_they_are_merged(tmp_path: Path) -> None:
    parts = [tmp_path / "a", tmp_path / "b"]
    for part in parts:
        write_store(part, np.ones((2, 2, 5, 3), np.float32), np.full(2, 5), (1, 1, 5, 3))
    (parts[1] / "arrays/activations/1.1.0.0").unlink()
    merged = actshard.merge(tmp_path / "m", parts, physical=True)
    assert actshard.open(merged).sequences([3], 1)[0].tolist() == np.zeros((5, 3)).tolist()


def test_a_store_that_is_merged_of_stores_of_other_writers_keeps_its_fill_values(tmp_path: Path) -> None:
    """Merges of earlier releases have the attribute "written_by", too, but record another verb, or nothing."""
    path = written(tmp_path)
    (path / "arrays/activations/2.1.0.0").unlink()
    record = path / RECORD
    record.write_text(record.read_text().replace('"create"', '"merge"'))
    assert not actshard.open(path).sequences([2], 1)[0].any()
    record.write_text("{")  # of no use, but no reason to refuse the rows
    assert not actshard.open(path).sequences([2], 1)[0].any()
    record.unlink()
    assert not actshard.open(path).sequences([2], 1)[0].any()
    assert "written_by" in json.loads((path / ".zattrs").read_text())
    assert [f.code for f in actshard.verify(path).findings] == ["chunk-missing"]


def test_a_missing_chunk_of_a_store_that_was_written_as_a_part_is_an_error(tmp_path: Path) -> None:
    for part in range(2):
        with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=3, part=(part, 2)) as writer:
            writer.append(np.ones((2, 1, 5, 3), np.float32))
    path = actshard.merge(tmp_path / "d")
    chunk = next(path.rglob("arrays/activations/1.0.0.0"))
    chunk.unlink()
    with refuses(actshard.MissingFileError, chunk):
        actshard.open(path).sequences(range(4), 0)
