"""Shards are parsed and never unpickled: values equal those of the standard unpickler, and no code runs."""

from __future__ import annotations

import contextlib
import importlib.util
import io as stdio
import json
import os
import pickle
import pickletools
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import actshard
from actshard import _native
from conftest import GOLDEN, bits, refuses
from pickle_files import change, dataset, item, opened, values, write
from waiting import PATIENCE

PICKLE = sorted(p.parent for p in (GOLDEN / "pickle").glob("*/expected.npz"))


HOSTILE = json.loads((GOLDEN / "pickle/hostile/cases.json").read_text())


@pytest.mark.parametrize("variant", PICKLE, ids=lambda p: p.name)
def test_golden_shards_equal_expected(variant: Path, io: str) -> None:
    arrays = np.load(variant / "expected.npz")
    items = json.loads((variant / "expected.json").read_text())
    items = items if isinstance(items, list) else items["items"]
    store = opened(variant, io)
    table = store.table
    assert store.format == "pickle"
    assert store.layers == tuple(sorted({x["layer"] for x in items}))
    ids = table["sample_idx"].to_pylist()
    assert sorted(ids) == sorted({x["sample_idx"] for x in items})
    for x in items:
        want, i, layer = arrays[x["key"]], ids.index(x["sample_idx"]), x["layer"]
        assert str(store.dtype) == x["dtype"]
        for got in (store.sequence(i, layer), store.sequences([i], layer)[0], store.gather(layer, i, range(len(want)))):
            assert got.shape == want.shape
            assert np.array_equal(bits(got), bits(want))
        if len(want):
            assert np.array_equal(bits(store.last_tokens(layer, [i])[0]), bits(want[-1]))
        assert table["text_preview"][i].as_py() == x["text_preview"]
        assert table["shape"][i].as_py() == list(want.shape)
        assert store.token_counts[i] == len(want)
        assert layer in table["layers"][i].as_py()
        for name, value in (x["metadata"] or {}).items():
            got = table[name][i].as_py()
            # A list of numbers and strings has no arrow type and is returned as JSON text.
            assert (json.loads(got) if isinstance(value, list) and isinstance(got, str) else got) == value, name


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_shards_do_what_cases_say(case: str, io: str) -> None:
    folder = GOLDEN / "pickle/hostile" / HOSTILE[case]["dir"]
    if HOSTILE[case]["expect"] == "ok-or-refuse" and case != "trailing_bytes":  # refused: no bytes are ignored
        store = opened(folder, io)
        assert all(len(store.sequences(range(len(store)), layer)) == len(store) for layer in store.layers)
        return
    with pytest.raises(actshard.ActshardError) as caught:
        opened(folder, io)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.path is not None
    assert caught.value.path.is_relative_to(folder)


def test_hostile_shards_take_no_memory_and_end() -> None:
    """All of them in one new process: 64 MB more than the process itself; a hang exceeds the time limit."""
    code = (
        "import json, resource, sys, time, warnings; warnings.simplefilter('ignore'); import actshard, pyarrow\n"
        f"root = {str(GOLDEN / 'pickle')!r}; cases = json.load(open(root + '/hostile/cases.json'))\n"
        "actshard.open(root + '/numpy2_proto5').table\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak()\n"
        "for c in cases.values():\n"
        "    try: actshard.open(root + '/hostile/' + c['dir']).table\n"
        "    except actshard.ActshardError: pass\n"
        "print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert int(done.stdout) < 64e6


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("global_os_getcwd", "names the global os.getcwd"),
        ("stack_global_pathlib", "names the global pathlib.PurePosixPath"),
        ("dotted_name_under_numpy", "names the global numpy._core.records.os.getcwd"),
        ("inst_opcode", "opcode INST"),
        ("persistent_id", "opcode BINPERSID"),
        ("ndarray_called_directly", "calls numpy.ndarray"),
    ],
)
def test_code_is_named_and_not_run(case: str, said: str) -> None:
    folder = GOLDEN / "pickle/hostile" / case
    with refuses(actshard.UnsafePickleError, folder / "shard_0001.pkl.gz", said) as caught:
        opened(folder)
    assert caught.value.offset is not None
    assert isinstance(caught.value, actshard.FormatError)


def test_checksums_can_be_left_out() -> None:
    folder = GOLDEN / "pickle/hostile/wrong_checksum"
    with refuses(actshard.FormatError, folder / "shard_0001.pkl.gz", "checksums=False reads it"):
        opened(folder)
    assert opened(folder, checksums=False).num_examples > 0


# --- the parser, compared with the standard unpickler -----------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(), st.binary(),
    st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.float16(0.1), np.uint8(255)]),
)  # fmt: skip


PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner, inner), st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=20,
)


@st.composite
def arrays(draw: Any) -> np.ndarray:
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(["<f2", "<f4", "<f8", ">f4", "<i4", "|b1", "|u1"]))
    made = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    kind = draw(st.sampled_from(["c", "fortran", "transposed", "strided", "reversed", "read-only"]))
    if kind == "fortran":
        return np.asfortranarray(made)
    if kind == "transposed":
        return made.T
    if kind == "strided":
        return np.repeat(made, 2, axis=0)[::2]
    if kind == "reversed":
        return made[::-1]
    if kind == "read-only":
        made.flags.writeable = False
    return made


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        # numpy byte-swaps some big-endian arrays on reading, so byte orders may differ.
        native = [x.astype(x.dtype.newbyteorder("=")) for x in (a, b)]
        return native[0].dtype == native[1].dtype and a.shape == b.shape and native[0].tobytes() == native[1].tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def stock() -> Any:
    """The module pickle as the interpreter has it: dill, once imported, changes the pickler of the whole process."""
    found = importlib.util.find_spec("pickle")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


STOCK = stock()


@settings(max_examples=200)
@given(
    value=st.one_of(PLAIN, st.lists(st.one_of(PLAIN, arrays()), max_size=4)), protocol=st.integers(0, 5), data=st.data()
)
def test_what_the_stock_pickler_writes_is_read_as_the_stock_unpickler_reads_it(
    value: Any, protocol: int, data: st.DataObject
) -> None:
    shared = [value, value]  # shared objects stay shared
    pickler = data.draw(st.sampled_from(["c", "python", "optimized"]))
    file = stdio.BytesIO()
    try:
        (STOCK._Pickler if pickler == "python" else STOCK.Pickler)(file, protocol).dump(shared)
    except AssertionError:  # the Python pickler of CPython 3.11 fails for two empty arrays: it memoizes b"" twice
        assume(pickler != "python")
        raise
    raw = pickletools.optimize(file.getvalue()) if pickler == "optimized" else file.getvalue()
    got = _native.load_pickle(raw)
    assert same(got, pickle.loads(raw))
    if isinstance(value, list | dict):
        assert got[0] is got[1]


@settings(max_examples=300)
@given(data=st.data(), protocol=st.integers(0, 5))
def test_damaged_pickles_are_read_or_refused(data: st.DataObject, protocol: int) -> None:
    raw = bytearray(pickle.dumps({"layer_0": [item(1, values(1, 0, 2), metadata={"a": [1, 2.5, None]})]}, protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(actshard.ActshardError):
        _native.load_pickle(bytes(raw))


def test_values_that_contain_themselves_or_nest_too_deep_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(actshard.FormatError, match="contains itself"):
        _native.load_pickle(pickle.dumps(loop))
    with pytest.raises(actshard.UnsupportedError, match="nested more than 64 deep"):
        _native.load_pickle(b"\x80\x04" + b"]" * 70 + b"a" * 69 + b".")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda m: m["shards"][0].update(filename="a/b.pkl"), "the name of a file in this folder"),
        (lambda m: m["shards"][1].update(filename="shard_0001.pkl.gz"), "a different file for each shard"),
        (lambda m: m["shards"][0].update(num_samples=-1), "at least 0"),
        (lambda m: m["shards"][0].update(layers=[]), "a non-empty list of integers"),
        (lambda m: m["shards"][0].update(layers=[1 << 40]), "numbers of layers"),
        (lambda m: m["shards"][0].update(sample_id_range=[0, 4]), "both ends included"),
        (lambda m: m["shards"][0].update(sample_id_range=[0]), "the first and the last"),
        (lambda m: m["shards"][0].update(compressed="yes"), "true or false"),
        (lambda m: m["shards"][0].update(checksum="sha256:abcd1234..."), "64 hexadecimal digits"),
        (lambda m: m.update(shards=[]), "at least one shard"),
    ],
)
def test_metadata_that_make_no_sense_are_refused(tmp_path: Path, function: Any, said: str) -> None:
    folder = dataset(tmp_path / "d")
    change(folder, function)
    with refuses(actshard.FormatError, folder / "metadata.json", said):
        opened(folder, format="pickle")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda m: m["shards"][0].update(num_samples=5), "has 6 samples, metadata.json has 5"),
        (
            lambda m: m["shards"][0].update(sample_id_range=[1, 9]),
            "has sample_idx 0, metadata.json gives the range 1 to 9",
        ),
        (lambda m: m["shards"][0].update(layers=[3]), r"has layer 9, metadata.json lists \[3\]"),
        (lambda m: m["shards"][0].update(compressed=False), "the file is a gzip file"),
        (lambda m: m["shards"][0].update(size_bytes=3), "expected 3 bytes"),
        (lambda m: m["extraction_config"].update(model_params={"hidden_size": 1}, max_seq_length=1), None),
    ],
)
def test_shards_that_contradict_their_metadata_are_refused(tmp_path: Path, function: Any, said: str | None) -> None:
    folder = dataset(tmp_path / "d")
    change(folder, function)
    if said is None:
        return opened(folder).close()  # the declared size is too small, but small shards may exceed it
    with refuses(actshard.FormatError, folder / "shard_0001.pkl.gz", said):
        opened(folder)


def test_a_bomb_is_refused_by_what_the_metadata_declare(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", [{"layer_0": [item(0, np.zeros((3000, 1000), np.float32))]}])
    assert opened(folder).num_examples == 1
    change(folder, lambda m: m["extraction_config"].update(model_params={"hidden_size": 10}, max_seq_length=10))
    with refuses(actshard.FormatError, folder / "shard_0001.pkl.gz", "inflates to more than the"):
        opened(folder)


def test_arrays_over_one_buffer_in_two_byte_orders_are_two_arrays(tmp_path: Path, io: str) -> None:
    from torture import hostile_pickles as opcodes

    data = np.arange(12, dtype="<f4").tobytes()
    raw = b"\x80\x04B" + len(data).to_bytes(4, "little") + data + opcodes.put(opcodes.SHARED) + b"0}("
    raw += opcodes.text("layer_0") + b"]("
    kinds = [("<f4", "F"), (">f4", "F"), (">f4", "C"), ("<f4", "C")]
    for n, (kind, order) in enumerate(kinds):
        raw += b"}(" + opcodes.text("sample_idx") + opcodes.number(n) + opcodes.text("activation")
        raw += opcodes.array(opcodes.SHARED, 4, 3, kind, order) + b"u"
    raw += b"eu."
    want = [x["activation"] for x in pickle.loads(raw)["layer_0"]]
    opcodes.dataset(tmp_path / "d", raw, samples=4)
    store = opened(tmp_path / "d", io)
    for n, w in enumerate(want):
        assert np.array_equal(store.sequence(n, 0), w), kinds[n]


@pytest.mark.slow
def test_special_files_in_place_of_shards_are_errors(tmp_path: Path, io: str) -> None:
    """In a separate process, because opening a pipe may block."""
    for special in ("fifo", "zero", "folder"):
        for i in (1, 2):
            folder = dataset(tmp_path / f"{special}{i}{io}", shards=2, per=2)
            path = folder / f"shard_000{i}.pkl.gz"
            path.unlink()
            if special == "fifo":
                os.mkfifo(path)
            elif special == "zero":
                path.symlink_to("/dev/zero")
            else:
                path.mkdir()
            change(folder, lambda m: [s.pop("size_bytes") for s in m["shards"]])
            code = (
                "import warnings; warnings.simplefilter('ignore'); import actshard\n"
                "from actshard.compat.pickle_shards import load_shard\n"
                f"try: actshard.open({str(folder)!r}, io={io!r}).token_counts\n"
                "except actshard.ActshardError as e: print(type(e).__name__, end=' ')\n"
                f"try: load_shard({str(path)!r})\n"
                "except actshard.ActshardError as e: print(type(e).__name__)"
            )
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True
            )
            assert len(done.stdout.split()) == 2, done.stdout


def test_a_compressed_shard_that_was_cut_short_says_so(tmp_path: Path) -> None:
    made = np.random.default_rng(0).standard_normal((200, 64)).astype(np.float32)
    folder = write(tmp_path / "d", [{"layer_0": [item(0, made)]}])
    path = folder / "shard_0001.pkl.gz"
    whole = path.read_bytes()
    change(folder, lambda m: [(s.pop("checksum"), s.pop("size_bytes")) for s in m["shards"]])
    for cut in range(1000, len(whole), len(whole) // 17):
        path.write_bytes(whole[:cut])
        with refuses(actshard.FormatError, path, "end too early"):
            opened(folder)


def test_limits_follow_from_the_bytes_that_are_there(tmp_path: Path) -> None:
    """Metadata that declare terabytes do not raise the inflation limit of a 300 kB file above decoded_memory."""
    rows = np.zeros((40_000, 1000), np.float32)  # 160 MB
    folder = write(tmp_path / "d", [{"layer_0": [item(0, rows)]}])
    change(
        folder,
        lambda m: m["extraction_config"].update(
            model_params={"hidden_size": (1 << 24) - 1}, max_seq_length=(1 << 32) - 1
        ),
    )
    with refuses(actshard.FormatError, folder / "shard_0001.pkl.gz", "inflates to more than the 67108864 bytes"):
        opened(folder, decoded_memory=0)
    assert opened(folder).num_examples == 1  # the user's own limit of 1 GiB


def test_dicts_with_other_keys_in_each_shard_take_no_more_memory_than_their_text(tmp_path: Path) -> None:
    shards = [
        {"layer_3": [item(i, values(i, 1, 1, 4), metadata={"d": {f"{i}_{k}": k for k in range(300)}})]}
        for i in range(9)
    ]
    write(tmp_path, shards)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        column = actshard.open(tmp_path).table["d"]
    assert [json.loads(v) for v in column.to_pylist()] == [{f"{i}_{k}": k for k in range(300)} for i in range(9)]


def test_names_of_shards_that_are_no_text_are_findings(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d")
    change(folder, lambda m: m["shards"][0].update(filename=["shard_0000.pkl.gz"]))
    report = actshard.verify(folder)
    assert any("filename" in f.found for f in report.errors)
