"""Arguments of reading methods, their spellings, and the results."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from actshard import _native
from actshard.base import errors
from conftest import GOLDEN, bits, saev_dump

SAEV = GOLDEN / "saev/v21_cls_labels_multishard"
ACTS = np.load(SAEV / "expected.npz")["acts"]  # (11, 3, 6, 16); layers 0, 5, 11
N, _, T, D = ACTS.shape
STORE = actshard.open(saev_dump(SAEV))
FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@given(st.lists(st.tuples(st.integers(0, N - 1), st.integers(-T, T - 1)), max_size=50), st.sampled_from([0, 1, 2]))
@settings(max_examples=100)
def test_gather_equals_numpy_indexing(pairs: list[tuple[int, int]], group: int) -> None:
    e, t = [p[0] for p in pairs], [p[1] for p in pairs]
    got = STORE.gather(STORE.layers[group], e, t)
    want = ACTS[np.array(e, int), group, np.array(t, int)]
    assert got.shape == (len(pairs), D)
    assert np.array_equal(bits(got), bits(want))


def test_indices_broadcast_and_keep_their_shape() -> None:
    e, t = np.arange(4)[:, None], np.arange(5)[None, :]
    assert STORE.gather(5, e, t).shape == (4, 5, D)
    assert np.array_equal(STORE.gather(5, e, t), ACTS[e, 1, t])
    assert np.array_equal(STORE.gather(5, [1, 2], 3), ACTS[[1, 2], 1, 3])
    assert np.array_equal(STORE.gather(5, 2, range(T)), ACTS[2, 1])
    assert STORE.gather(5, 2, 3).shape == (1, D)
    assert STORE.gather(5, np.int64(2), np.uint8(3)).shape == (1, D)
    assert STORE.gather(5, [], []).shape == (0, D)
    assert STORE.last_tokens(5, []).shape == (0, D)
    assert STORE.sequences([], 5) == []


@pytest.mark.parametrize("name", ["lmprobe/fullseq_bf16", "lmprobe/pooled_f32", "zarr/single_minimal/activations.zarr"])
def test_token_counts_of_a_closed_store_name_it(name: str) -> None:
    for counted in (True, False):
        with actshard.open(GOLDEN / name) as store:
            want = store.token_counts.tolist() if counted else None
        if counted:
            assert store.token_counts.tolist() == want
            continue
        for read in (lambda s: s.token_counts, lambda s: s.tokens_of([0])):
            with pytest.raises(actshard.ClosedError) as raised:
                read(store)
            assert raised.value.path == GOLDEN / name
            assert str(raised.value) == f"{GOLDEN / name}: the store was closed"


@pytest.mark.parametrize(
    "examples",
    [
        [3, 1],
        (3, 1),
        np.array([3, 1], np.int32),
        np.array([3, 1], np.uint64),
        np.array([1, 3])[::-1],
        np.array([3, 0, 1])[::2],
    ],
    ids=str,
)
def test_any_integers_are_indices(examples: object) -> None:
    assert np.array_equal(STORE.gather(5, examples, 2), ACTS[[3, 1], 1, 2])
    assert np.array_equal(STORE.last_tokens(5, examples), ACTS[[3, 1], 1, -1])
    assert np.array_equal(STORE.sequences(examples, 5)[0], ACTS[3, 1])


def test_a_misaligned_array_is_an_index() -> None:
    e = np.frombuffer(b"\0" + np.array([7, 0]).tobytes(), np.uint8)[1:].view(np.int64)
    assert np.array_equal(STORE.gather(5, e, 2), ACTS[[7, 0], 1, 2])
    assert np.array_equal(STORE.last_tokens(5, e), ACTS[[7, 0], 1, -1])
    assert np.array_equal(STORE.sequences(e, 5)[0], ACTS[7, 1])


@pytest.mark.parametrize(
    "bad", [[True, False], [0.0, 1.0], "01", None, ["a"], [[0], [1, 2]], pytest.param(object(), id="object")], ids=repr
)
def test_indices_that_are_no_integers_are_refused(bad: object) -> None:
    with pytest.raises(actshard.ArgumentError, match="expected"):
        STORE.gather(5, bad, 0)


def test_out_over_the_indices_is_refused() -> None:
    buffer = np.zeros(4 * D, np.float32)
    e = buffer[:8].view(np.int64)
    with pytest.raises(actshard.ArgumentError, match="shares memory"):
        STORE.gather(5, e, 0, out=buffer)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(actshard.ArgumentError, match="16 dimensions"):
        STORE.gather(5, np.zeros((1,) * 32, int), 0)
    with pytest.raises(actshard.ArgumentError, match="broadcast"):
        STORE.gather(5, [0, 1, 2], [0, 1])


@pytest.mark.parametrize("example", [N, -1, 2**62, -(2**63), 2**64 - 1, 2**70])
def test_examples_outside_are_refused(example: int, io: str) -> None:
    store = actshard.open(STORE.path, io=io)
    for read in (
        lambda: store.gather(5, example, 0),
        lambda: store.gather(5, [0, example], 0),
        lambda: store.last_tokens(5, [example]),
        lambda: store.sequence(example, 5),
        lambda: store.sequences([example], 5),
    ):
        with pytest.raises((actshard.OutOfRangeError, actshard.ArgumentError)) as caught:
            read()
        if abs(example) < 2**63:
            assert isinstance(caught.value, IndexError)
            assert str(example) in str(caught.value)


@pytest.mark.parametrize("token", [T, -T - 1, 2**63 - 1, -(2**63)])
def test_tokens_outside_are_refused(token: int) -> None:
    for indices in ((0, token), ([0, 0], [0, token])):
        with pytest.raises(actshard.OutOfRangeError, match=f"token {token} .* example 0 has {T}"):
            STORE.gather(5, *indices)


@pytest.mark.parametrize("layer", [1, -1, "0", None, [0], 2.5])
def test_unknown_layer_is_an_error_that_names_the_list(layer: object) -> None:
    for read in (STORE.last_tokens, lambda x: STORE.gather(x, 0, 0), lambda x: STORE.sequence(0, x)):
        with pytest.raises(actshard.LayerError, match=r"\[0, 5, 11\]") as caught:
            read(layer)
        assert isinstance(caught.value, KeyError)


def test_out_is_filled_and_returned() -> None:
    e, t = [4, 2, 2], [1, -1, 0]
    want = ACTS[e, 1, t]
    for out in (np.zeros((3, D), np.float32), np.zeros(3 * D, np.float32), np.zeros(3 * D * 4, np.uint8)):
        assert STORE.gather(5, e, t, out=out) is out
        assert out.tobytes() == want.tobytes()
    raw = bytearray(3 * D * 4)
    assert STORE.gather(5, e, t, out=raw) is raw
    assert raw == want.tobytes()
    view = memoryview(bytearray(3 * D * 4)).cast("f")
    STORE.gather(5, e, t, out=view)
    assert view.tobytes() == want.tobytes()
    half = np.zeros((3, D), np.float16)
    with np.errstate(over="ignore"):
        assert np.array_equal(STORE.gather(5, e, t, out=half, dtype=np.float16), want.astype(np.float16))
    last = np.zeros((N, D), np.float32)
    assert STORE.last_tokens(5, out=last) is last


@pytest.mark.parametrize(
    ("out", "error", "says"),
    [
        (np.zeros((2, D), np.float32), actshard.ArgumentError, "bytes"),
        (np.zeros((4, D), np.float32), actshard.ArgumentError, "bytes"),
        (np.zeros((3, D), np.int32), actshard.DtypeError, "int32"),
        (np.zeros((3, D // 2), np.float64), actshard.DtypeError, "float64"),
        (np.zeros((3, 2 * D), np.float32)[:, ::2], actshard.ArgumentError, "strides"),
        (np.zeros((D, 3), np.float32).T, actshard.ArgumentError, "strides"),
        (np.broadcast_to(np.float32(0), (3, D)), actshard.ArgumentError, "strides"),
        (bytes(3 * D * 4), actshard.ArgumentError, "read-only"),
        ([0.0], actshard.ArgumentError, "list"),
        (3, actshard.ArgumentError, "int"),
    ],
    ids=range(10),
)
def test_out_that_does_not_fit_is_refused(out: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        STORE.gather(5, [4, 2, 2], [1, 1, 0], out=out)


@pytest.mark.parametrize("variant", ["pooled_f32", "pooled_f16", "pooled_bf16"])
@pytest.mark.parametrize("dtype", [*FLOATS, "bfloat16", "float64"], ids=str)
def test_dtype_converts_like_astype(variant: str, dtype: object, io: str) -> None:
    store = actshard.open(GOLDEN / "lmprobe" / variant, io=io)
    rows = store.last_tokens(store.layers[0])
    got = store.last_tokens(store.layers[0], dtype=dtype)
    assert got.dtype == np.dtype(dtype)
    assert np.array_equal(bits(got), bits(rows.astype(dtype)))
    listed = store.sequences([1, 0], store.layers[0], dtype=dtype)
    assert np.array_equal(bits(listed[0]), bits(rows[1:2].astype(dtype)))


@pytest.mark.parametrize(
    "dtype", [np.int32, ">f4", "float33", np.complex64, "U3", pytest.param(object(), id="object")], ids=str
)
def test_dtypes_that_cannot_be_given_are_refused(dtype: object) -> None:
    with pytest.raises(actshard.DtypeError) as caught:
        STORE.gather(5, 0, 0, dtype=dtype)
    assert isinstance(caught.value, TypeError)


def test_unknown_paths_say_what_was_looked_for_and_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(actshard.MissingFileError):
        actshard.open(tmp_path / "nothing")
    with pytest.raises(actshard.UnknownFormatError, match=r"expected a dataset, found an empty folder$"):
        actshard.open(tmp_path)
    (tmp_path / "metadata.json").write_text("{}")
    caplog.set_level("DEBUG", logger="actshard")
    with pytest.raises(
        actshard.UnknownFormatError, match=r"saev: looked for .*, found a metadata\.json without"
    ) as caught:
        actshard.open(tmp_path)
    assert "lmprobe" not in str(caught.value)  # nothing in the folder is near it
    assert re.search(r"lmprobe: no, looked for .*, found no index/\*\.parquet; ", caplog.text)
    with pytest.raises(actshard.ArgumentError, match="saev"):
        actshard.open(tmp_path, format="hdf5")
    with pytest.raises(actshard.ArgumentError, match="pread"):
        actshard.open(STORE.path, io="fast")


def test_a_folder_of_datasets_lists_them() -> None:
    with pytest.raises(actshard.UnknownFormatError, match="pt_saebench_bf16") as caught:
        actshard.open(GOLDEN)
    formats = {name for _, name in caught.value.candidates}
    assert formats == {
        "angelslim",
        "automodel",
        "deepspec",
        "eagle",
        "hallulens",
        "hf_arrow",
        "jkminder",
        "llamascopium",
        "parquet_vectors",
        "layout_toml",
        "modelopt",
        "saev",
        "lmprobe",
        "specforge",
        "speculators",
        "zarr",
        "pickle",
    }
    assert len(caught.value.candidates) >= 16


def test_ambiguous_folders_ask_for_the_format(saev_copy, lmprobe_copy) -> None:
    both = saev_copy()
    (lmprobe_copy("pooled_f32") / "index").rename(both / "index")
    with pytest.raises(actshard.UnknownFormatError, match="format="):
        actshard.open(both)
    assert actshard.open(both, format="saev").format == "saev"


def test_every_kind_of_the_core_has_an_exception_that_is_also_a_builtin() -> None:
    assert set(_native.error_kinds()) == set(errors._NATIVE)
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.ActshardError)]
    for cls in classes:
        if cls is not errors.ActshardError:
            assert any(
                b.__module__ == "builtins" and b not in (Exception, BaseException, object) for b in cls.__mro__
            ), cls
        back = pickle.loads(pickle.dumps(cls("d", path="/p", offset=3)))
        assert (type(back), str(back), back.offset) == (cls, f"{back.path}: byte 3: d", 3)


def test_sub_byte_dtypes_are_listed_and_have_no_numpy_type() -> None:
    named = {name: numpy for name, numpy, _ in _native.dtypes()}
    assert len(named) == 22
    assert {name for name, numpy in named.items() if numpy is None} == {"F4", "F6_E2M3", "F6_E3M2"}


def test_import_is_light() -> None:
    code = (
        "import actshard, sys; print([m for m in ('torch', 'pyarrow', 'rich', 'typer', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


STRICTER = {"duplicate_key", "not_an_object", "bad_tensor", "too_many_dims", "too_deep"}


def generated(rng: random.Random) -> bytes:
    dtypes = [np.float32, np.float16, np.int64, np.uint8, np.bool_, ml_dtypes.bfloat16]
    tensors = {}
    for _ in range(rng.randrange(4)):
        shape = [rng.randrange(4) for _ in range(rng.randrange(4))]
        name = "".join(rng.choice('ab"é\\ \n') for _ in range(rng.randrange(5)))
        tensors[name] = np.zeros(shape, rng.choice(dtypes))
    return safetensors.numpy.save(tensors, rng.choice([None, {"format": "pt"}]))


def mutated(rng: random.Random, data: bytes) -> bytes:
    n = struct.unpack("<Q", data[:8])[0]
    how = rng.randrange(6)
    if how == 0:
        return data[: rng.randrange(len(data) + 1)]
    if how == 1:
        return data + bytes(rng.randrange(1, 9))
    if how == 2:
        out = bytearray(data)
        out[rng.randrange(len(out))] = rng.randrange(256)
        return bytes(out)
    header = data[8 : 8 + n].decode()
    if how == 3:  # replaces one number
        digits = [i for i, c in enumerate(header) if c.isdigit()]
        if digits:
            i = rng.choice(digits)
            header = (
                header[:i]
                + rng.choice(["0", "7", "-1", "1.5", "1e3", "99999999999999999999", "4294967296"])
                + header[i + 1 :]
            )
    elif how == 4:
        value = json.loads(header)
        if value:
            key = rng.choice(list(value))
            value[key] = rng.choice([None, [], {}, "x", 3, value[key]])
        header = json.dumps(value)
    else:
        i = rng.randrange(len(header) + 1)
        header = header[:i] + rng.choice(['"', "{", "}", ",", " ", "\\", "é"]) + header[i:]
    encoded = header.encode()
    return struct.pack("<Q", len(encoded)) + encoded + data[8 + n :]


def test_headers_agree_with_safetensors_on_thousands_of_files() -> None:
    rng = random.Random(0)
    accepted = refused = 0
    for i in range(5_000):
        data = generated(rng)
        if i % 5:
            data = mutated(rng, data)
        try:
            theirs = {name: (t["dtype"], t["shape"]) for name, t in safetensors.deserialize(data)}
        except Exception:
            theirs = None
        try:
            ours = {t[0]: (t[1], t[2]) for t in _native.parse_safetensors(data)[0]}
        except actshard.HeaderError as error:
            refused += 1
            stricter = error.reason in STRICTER
            if theirs is not None and not stricter:
                pytest.fail(f"refused what safetensors accepts: {error}, {data!r}")
        else:
            accepted += 1
            assert ours == theirs, data
    assert accepted > 1_000
    assert refused > 1_000


def test_overflows_are_counted_as_ml_dtypes_casts() -> None:
    """Finite values that become infinite (or NaN in types without infinity) when cast."""
    import ml_dtypes

    from actshard import _native

    edges = [
        0,
        1,
        240,
        247.9,
        248,
        448,
        463,
        464,
        465,
        57344,
        61439,
        61440,
        65504,
        65519,
        65520,
        65536,
        1e38,
        3.4e38,
        1e39,
    ]
    near = [s * np.nextafter(x, x + d) for x in edges for d in (-1, 0, 1) for s in (1, -1)]
    wide = np.array([*near, np.inf, np.nan])
    names = [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e5m2",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    ]
    types = [np.dtype(getattr(ml_dtypes, name, name)) for name in names]
    with np.errstate(all="ignore"):
        sources = [wide, *(wide.astype(t) for t in types[1:4])]
        sources += [
            np.array([0, 239, 248, 464, 465, 61440, 65519, 65520, 2**31 - 1], t) for t in ("i4", "u4", "i8", "u8")
        ]
        for source, target in itertools.product(sources, types):
            if source.dtype.itemsize == 8 and target.itemsize < 4:
                continue  # ml_dtypes rounds these twice
            finite = np.isfinite(source.astype("f8"))
            expected = int((finite & ~np.isfinite(source.astype(target).astype("f8"))).sum())
            assert _native.count_overflows(source, target) == expected, (source.dtype, target)
    assert _native.count_overflows(wide, "float16") == int((np.isfinite(wide) & (abs(wide) >= 65520)).sum())
    many = np.full(3_000_001, 1e6, ">f4")
    assert _native.count_overflows(many[::2], "float16") == 1_500_001
    with pytest.raises(actshard.DtypeError):
        _native.count_overflows(np.zeros(3, "f4"), "int32")


def test_one_column_is_named_without_a_list() -> None:
    store = actshard.open(GOLDEN / "lmprobe/fullseq_logits_router")
    name = store.table.column_names[0]
    assert store.read_columns(name).equals(store.read_columns([name]))


@pytest.mark.parametrize(("typed", "meant"), [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_a_short_name_of_a_dtype_is_answered_with_its_name(typed: str, meant: str) -> None:
    store = actshard.open(GOLDEN / "lmprobe/fullseq_logits_router")
    with pytest.raises(actshard.DtypeError, match=f"'{typed}' is not a dtype; write '{meant}'"):
        store.gather(store.layers[0], [0], [0], dtype=typed)
