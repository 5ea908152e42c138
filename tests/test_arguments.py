"""Every word in which indices, outputs and types may be given, and every one that is refused, with its exception."""

from __future__ import annotations

import array
import inspect
import json
import pickle
import struct
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import actshard
from actshard import _native, errors
from conftest import GOLDEN, bits, saev_dump

VARIANT = GOLDEN / "saev/v21_cls_labels_multishard"
ACTS = np.load(VARIANT / "expected.npz")["acts"]  # (examples, layers, tokens, d_model)
N, _, T, D = ACTS.shape
STORE = actshard.open(saev_dump(VARIANT))
LAYER, GROUP = STORE.layers[1], 1
FLOATS = [np.float16, ml_dtypes.bfloat16, "bfloat16", "float16", "f4", np.float32, np.float64, float]
READS = {
    "gather": lambda e: STORE.gather(LAYER, e, 0),
    "last_tokens": lambda e: STORE.last_tokens(LAYER, e),
    "sequences": lambda e: STORE.sequences(e, LAYER),
}


def equal(got: np.ndarray, want: np.ndarray) -> bool:
    return got.shape == want.shape and got.dtype == want.dtype and np.array_equal(bits(got), bits(want))


# Indices


@pytest.mark.parametrize("scalar", [int, np.int8, np.int64, np.uint8, np.uint64, lambda x: np.array(x, np.int32)])
def test_scalars_give_one_row(scalar: Any) -> None:
    assert equal(STORE.gather(LAYER, scalar(4), scalar(2)), ACTS[4:5, GROUP, 2])
    assert equal(STORE.last_tokens(LAYER, scalar(4)), ACTS[4:5, GROUP, -1])
    assert equal(STORE.sequence(scalar(4), LAYER), ACTS[4, GROUP])


@pytest.mark.parametrize(
    ("e", "t"),
    [
        (np.arange(4)[:, None], np.arange(5)[None]),
        (np.arange(4)[:, None], np.arange(5)),
        (3, np.arange(T)),
        (range(N), -1),
        ([[1, 2], [3, 4]], [[0], [5]]),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), 1),
        (np.zeros((2, 1, 3), int), np.zeros((4, 1), int)),
        (np.zeros((0, 3), int), [0, 1, 2]),
        (np.zeros((1,) * 30, int), 0),
    ],
    ids=range(9),
)
def test_broadcast_indices_give_their_shape_and_one_row_each(e: Any, t: Any) -> None:
    want = ACTS[:, GROUP][np.asarray(e), np.asarray(t)]
    assert want.shape == (*np.broadcast_shapes(np.shape(e), np.shape(t)), D)
    assert equal(STORE.gather(LAYER, e, t), want)


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda x: array.array("q", x),
        *(
            lambda x, kind=kind: np.array(x, kind)
            for kind in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i8", ">u2")
        ),
        lambda x: np.array(x[::-1])[::-1],
        lambda x: np.repeat(np.array(x), 2)[::2],
        lambda x: np.stack([x, x], axis=1)[:, 1],
        lambda x: np.array(x, np.int64, copy=True).view(type("Sub", (np.ndarray,), {})),
    ],
)
def test_any_sequence_of_integers_is_an_index(make: Any) -> None:
    e, t = [7, 0, 7, 3], [5, 0, 1, 2]
    frozen = make(e)
    if isinstance(frozen, np.ndarray):
        frozen.flags.writeable = False
    assert equal(STORE.gather(LAYER, frozen, make(t)), ACTS[e, GROUP, t])
    assert equal(STORE.gather(LAYER, e, make(t)), ACTS[e, GROUP, t])
    assert equal(STORE.last_tokens(LAYER, frozen), ACTS[e, GROUP, -1])
    assert all(equal(a, b) for a, b in zip(STORE.sequences(frozen, LAYER), ACTS[e, GROUP], strict=True))


@pytest.mark.xfail(
    strict=True, raises=TypeError, reason="the native half refuses misaligned int64 with a bare TypeError"
)
def test_a_misaligned_array_is_an_index() -> None:
    e = np.frombuffer(b"\0" + np.array([7, 0]).tobytes(), np.uint8)[1:].view(np.int64)
    assert equal(STORE.gather(LAYER, e, 2), ACTS[[7, 0], GROUP, 2])
    assert equal(STORE.last_tokens(LAYER, e), ACTS[[7, 0], GROUP, -1])
    assert equal(STORE.sequences(e, LAYER)[0], ACTS[7, GROUP])


def test_a_range_is_an_index() -> None:
    assert equal(STORE.gather(LAYER, range(8, 0, -3), range(3)), ACTS[[8, 5, 2], GROUP, [0, 1, 2]])


@pytest.mark.parametrize("empty", [[], (), range(0), np.array([], int), np.array([], np.uint8)], ids=repr)
def test_no_indices_give_no_rows(empty: Any) -> None:
    for got in (
        STORE.gather(LAYER, empty, empty),
        STORE.gather(LAYER, empty, 0),
        STORE.last_tokens(LAYER, empty),
        STORE.gather(LAYER, empty, empty, dtype="float64"),
        STORE.gather(LAYER, empty, empty, out=np.zeros((0, D), np.float32)),
    ):
        assert got.shape == (0, D)
    assert STORE.sequences(empty, LAYER) == []


@given(
    data=st.data(),
    dtype=st.sampled_from([np.int64, np.int32, np.uint8, np.uint64, np.int8]),
    group=st.integers(0, 2),
    layout=st.sampled_from(["plain", "reversed", "strided"]),
)
@settings(max_examples=200, deadline=None)
def test_gather_equals_numpy_for_random_index_arrays(data: st.DataObject, dtype: Any, group: int, layout: str) -> None:
    shapes = data.draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=5, min_side=0))
    low = 0 if np.dtype(dtype).kind == "u" else -T
    e = data.draw(hnp.arrays(dtype, shapes.input_shapes[0], elements=st.integers(0, N - 1)))
    t = data.draw(hnp.arrays(dtype, shapes.input_shapes[1], elements=st.integers(low, T - 1)))
    if layout == "reversed":
        e, t = (x[(slice(None, None, -1),) * x.ndim] for x in (e, t))
    elif layout == "strided":
        e, t = (np.repeat(x, 2, axis=-1)[..., ::2] if x.ndim else x for x in (e, t))
    want = ACTS[:, group][e, t]
    assert equal(STORE.gather(STORE.layers[group], e, t), want.reshape(1, D) if want.ndim == 1 else want)


@pytest.mark.parametrize(
    "bad",
    [
        True,
        np.True_,
        [True, False],
        np.array([], bool),
        1.0,
        np.float32(1),
        [0.0, 1.0],
        np.array([]),
        "1",
        ["1"],
        b"1",
        {1: 2},
        {1},
        object(),
        1j,
        np.array([1], "m8[s]"),
        [[0], [1, 2]],
        [None],
    ],
    ids=repr,
)
def test_what_is_no_integer_is_an_argument_error(bad: Any) -> None:
    for name, read in {**READS, "token": lambda t: STORE.gather(LAYER, 0, t)}.items():
        with pytest.raises(actshard.ArgumentError, match="expected") as caught:
            read(bad)
        assert isinstance(caught.value, ValueError), name
    with pytest.raises(actshard.ArgumentError):
        STORE.sequence(bad, LAYER)


def test_none_is_an_index_for_last_tokens_only() -> None:
    for read in (
        lambda: STORE.gather(LAYER, None, 0),
        lambda: STORE.sequences(None, LAYER),
        lambda: STORE.sequence(None, LAYER),
    ):
        with pytest.raises(actshard.ArgumentError):
            read()
    assert equal(STORE.last_tokens(LAYER, None), ACTS[:, GROUP, -1])


def test_shapes_that_cannot_be_broadcast_are_an_argument_error() -> None:
    for e, t in (([0, 1], [0, 1, 2]), (np.zeros((2, 3), int), np.zeros((3, 2), int)), ([], [0, 1])):
        with pytest.raises(actshard.ArgumentError, match="cannot be broadcast"):
            STORE.gather(LAYER, e, t)
    for e in ([[0]], np.zeros((2, 2), int)):
        with pytest.raises(actshard.ArgumentError, match="one dimension"):
            STORE.sequences(e, LAYER)
    with pytest.raises(actshard.ArgumentError, match="one integer"):
        STORE.sequence([0, 1], LAYER)


FAR = [2**63 - 1, 2**63, 2**64 - 1, np.uint64(2**64 - 1), -(2**63), np.int64(-(2**63))]


@pytest.mark.parametrize("bad", [N, -1, -N, *FAR], ids=str)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: np.array([x])], ids=["plain", "list", "array"])
def test_an_example_outside_is_out_of_range_and_negative_ones_too(bad: int, wrap: Any, io: str) -> None:
    store = actshard.open(STORE.path, io=io)
    for read in (
        lambda: store.gather(LAYER, wrap(bad), 0),
        lambda: store.last_tokens(LAYER, wrap(bad)),
        lambda: store.sequences(wrap(bad), LAYER),
        lambda: store.sequence(wrap(bad), LAYER),
    ):
        with pytest.raises(actshard.OutOfRangeError, match=str(int(bad))) as caught:
            read()
        assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("bad", [T, -T - 1, *FAR], ids=str)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: np.array([x])], ids=["plain", "list", "array"])
def test_a_token_outside_is_out_of_range(bad: int, wrap: Any, io: str) -> None:
    store = actshard.open(STORE.path, io=io)
    for example in (0, N - 1, [2]):
        with pytest.raises(actshard.OutOfRangeError, match=str(int(bad))) as caught:
            store.gather(LAYER, example, wrap(bad))
        assert isinstance(caught.value, IndexError)


def test_one_bad_row_among_many_is_found_wherever_it_stands() -> None:
    n = 100_000  # many parts, several threads
    for at in (0, n // 2, n - 1):
        e, t = np.zeros(n, int), np.zeros(n, int)
        e[at] = N
        with pytest.raises(actshard.OutOfRangeError, match=f"example {N} "):
            STORE.gather(LAYER, e, t)
        e[at], t[at] = 0, -T - 1
        with pytest.raises(actshard.OutOfRangeError, match=f"token {-T - 1} "):
            STORE.gather(LAYER, e, t)


def test_tokens_are_checked_against_their_own_example(io: str) -> None:
    store = actshard.open(GOLDEN / "lmprobe/fullseq_f32", io=io)
    for e, count in enumerate(store.token_counts.tolist()):
        store.gather(store.layers[0], e, [-count, count - 1])
        for token in (count, -count - 1):
            with pytest.raises(actshard.OutOfRangeError):
                store.gather(store.layers[0], e, token)


@pytest.mark.parametrize("layer", [99, -1, 2**70, "0", "layer_0", None, [0], {}, np.zeros(2), 2.5, slice(1)], ids=repr)
def test_a_layer_that_is_not_stored_is_a_key_error_that_lists_those_that_are(layer: Any) -> None:
    for read in (
        lambda: STORE.gather(layer, 0, 0),
        lambda: STORE.last_tokens(layer),
        lambda: STORE.sequence(0, layer),
        lambda: STORE.sequences([0], layer),
    ):
        with pytest.raises(actshard.LayerError) as caught:
            read()
        assert isinstance(caught.value, KeyError)
        assert f"[{', '.join(map(str, STORE.layers))}]" in str(caught.value)
        assert caught.value.path == STORE.path


# Outputs

E, K = [4, 2, 2], [1, -1, 0]
WANT = ACTS[E, GROUP, K]
BYTES = WANT.nbytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((3, D), np.float32),
        lambda: np.zeros(3 * D, np.float32),
        lambda: np.zeros((1, 3, D, 1), np.float32),
        lambda: np.zeros(BYTES, np.uint8),
        lambda: np.zeros((4, D), np.float32)[1:],
        lambda: bytearray(BYTES),
        lambda: memoryview(bytearray(BYTES)),
        lambda: memoryview(bytearray(BYTES)).cast("f"),
        lambda: array.array("f", [0] * 3 * D),
        lambda: np.frombuffer(bytearray(BYTES + 1), np.uint8)[1:].view(np.float32),  # not aligned
    ],
    ids=range(10),
)
def test_out_is_filled_and_the_very_object_comes_back(make: Any, io: str) -> None:
    store = actshard.open(STORE.path, io=io)
    out = make()
    assert store.gather(LAYER, E, K, out=out) is out
    assert bytes(memoryview(out).cast("B") if not isinstance(out, np.ndarray) else out.tobytes()) == WANT.tobytes()
    assert store.last_tokens(LAYER, E, out=out) is out


def test_out_is_written_nowhere_but_in_its_own_bytes() -> None:
    around = np.full((5, D), 9, np.float32)
    STORE.gather(LAYER, E, K, out=around[1:4])
    assert equal(around[1:4], WANT)
    assert (around[[0, 4]] == 9).all()


def test_out_of_broadcast_indices_has_their_shape_or_is_flat() -> None:
    e, t = np.arange(4)[:, None], np.arange(5)
    for shape in ((4, 5, D), (20, D), (20 * D,)):
        out = np.zeros(shape, np.float32)
        STORE.gather(LAYER, e, t, out=out)
        assert equal(out.reshape(4, 5, D), ACTS[:4, GROUP, :5])


def read_only() -> np.ndarray:
    out = np.zeros((3, D), np.float32)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: np.zeros((2, D), np.float32), actshard.ArgumentError),
        (lambda: np.zeros((4, D), np.float32), actshard.ArgumentError),
        (lambda: np.zeros((0, D), np.float32), actshard.ArgumentError),
        (lambda: np.zeros((3, D), np.float64), actshard.ArgumentError),  # twice the bytes
        (lambda: np.zeros((3, D), np.int32), actshard.DtypeError),
        (lambda: np.zeros((3, D), ">f4"), actshard.DtypeError),
        (lambda: np.zeros((3, 2 * D), np.float16), actshard.DtypeError),
        (lambda: np.zeros((3, D), object), actshard.ArgumentError),
        (read_only, actshard.ArgumentError),
        (lambda: np.zeros((3, 2 * D), np.float32)[:, ::2], actshard.ArgumentError),
        (lambda: np.zeros((3, D), np.float32)[::-1], actshard.ArgumentError),
        (lambda: np.zeros((3, D), np.float32, "F"), actshard.ArgumentError),
        (lambda: np.broadcast_to(np.zeros(D, np.float32), (3, D)), actshard.ArgumentError),
        (lambda: bytearray(BYTES - 1), actshard.ArgumentError),
        (lambda: bytearray(BYTES + 1), actshard.ArgumentError),
        (lambda: bytes(BYTES), actshard.ArgumentError),
        (lambda: memoryview(bytes(BYTES)), actshard.ArgumentError),
        (lambda: memoryview(bytearray(2 * BYTES))[::2], actshard.ArgumentError),
        (lambda: [0.0] * 3 * D, actshard.ArgumentError),
        (lambda: "x", actshard.ArgumentError),
        (lambda: 3, actshard.ArgumentError),
        (lambda: True, actshard.ArgumentError),
        (lambda: STORE.sequence(0, LAYER)[:3], actshard.ArgumentError),  # a view: mapped, read-only
    ],
    ids=range(23),
)
def test_out_that_does_not_fit_is_refused_and_not_touched(make: Any, error: type[Exception]) -> None:
    out = make()
    before = out.tobytes() if isinstance(out, np.ndarray) and out.dtype != object else None
    with pytest.raises(error, match="out: expected") as caught:
        STORE.gather(LAYER, E, K, out=out)
    assert type(caught.value) is error
    if before is not None:
        assert out.tobytes() == before


def test_bad_indices_are_refused_with_an_out_as_without() -> None:
    with pytest.raises(actshard.OutOfRangeError):
        STORE.gather(LAYER, [0, N, 0], 0, out=np.zeros((3, D), np.float32))


# Types


@pytest.mark.parametrize("variant", ["pooled_f32", "pooled_f16", "pooled_bf16"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtype_converts_as_astype_does(variant: str, dtype: Any, io: str) -> None:
    store = actshard.open(GOLDEN / "lmprobe" / variant, io=io)
    layer = store.layers[0]
    rows = store.last_tokens(layer)
    with np.errstate(over="ignore"):
        want = rows.astype(dtype)
    n = len(store)
    out = np.zeros(want.shape, dtype)
    for got in (
        store.last_tokens(layer, dtype=dtype),
        store.gather(layer, range(n), 0, dtype=dtype),
        np.concatenate(store.sequences(range(n), layer, dtype=dtype)),
        store.gather(layer, range(n), 0, dtype=dtype, out=out),
    ):
        assert got.dtype == np.dtype(dtype)
        assert np.array_equal(got, want, equal_nan=True)
    raw = bytearray(want.nbytes)
    store.last_tokens(layer, dtype=dtype, out=raw)
    assert raw == want.tobytes()


@pytest.mark.parametrize(
    "dtype",
    [np.int32, int, "uint8", bool, np.complex64, ">f4", ">f8", "float33", "U3", object, object(), 3, "float8_e5m2"],
    ids=repr,
)
def test_a_type_that_rows_cannot_be_given_as_is_a_type_error(dtype: Any) -> None:
    for read in (
        lambda: STORE.gather(LAYER, 0, 0, dtype=dtype),
        lambda: STORE.last_tokens(LAYER, dtype=dtype),
        lambda: STORE.sequences([0], LAYER, dtype=dtype),
    ):
        with pytest.raises(actshard.DtypeError) as caught:
            read()
        assert isinstance(caught.value, TypeError)


def test_out_must_be_of_the_type_asked_for() -> None:
    with pytest.raises(actshard.DtypeError):
        STORE.gather(LAYER, E, K, out=np.zeros((3, D), np.float16), dtype=ml_dtypes.bfloat16)
    with pytest.raises(actshard.ArgumentError):
        STORE.gather(LAYER, E, K, out=np.zeros((3, D), np.float32), dtype=np.float16)


# Names shared by both halves


def test_every_kind_of_the_native_half_has_its_exception() -> None:
    kinds = _native.error_kinds()
    assert sorted(kinds) == sorted(errors._NATIVE)
    assert len(set(kinds)) == len(kinds)


EXCEPTIONS = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.ActshardError)]


@pytest.mark.parametrize("cls", EXCEPTIONS, ids=lambda c: c.__name__)
def test_every_exception_is_ours_and_a_builtin_and_pickles(cls: type[actshard.ActshardError]) -> None:
    assert getattr(actshard, cls.__name__) is cls
    if cls is not actshard.ActshardError:
        assert any(b.__module__ == "builtins" and b not in (Exception, BaseException, object) for b in cls.__mro__)
    error = cls("what\nwas", path="/some/where", offset=7, reason="gap")
    error.extra = [1]  # type: ignore[attr-defined]
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert (str(back), vars(back)) == (str(error), vars(error))
    assert str(error) == r"/some/where: byte 7: what\nwas"


def test_kinds_of_exceptions_are_distinct() -> None:
    assert len({cls.kind for cls in EXCEPTIONS}) == len(EXCEPTIONS)


def test_types_without_a_numpy_type_are_those_smaller_than_a_byte() -> None:
    assert {name: bits for name, numpy, bits in _native.dtypes() if numpy is None} == {
        "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    }  # fmt: skip
    from actshard._arguments import NUMPY_BY_NAME

    for name, numpy, size in _native.dtypes():
        if numpy is not None:
            assert NUMPY_BY_NAME[name].name == numpy
            assert NUMPY_BY_NAME[name].itemsize * 8 == size


def test_import_brings_no_heavy_library() -> None:
    code = "import sys, actshard; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["torch", "pyarrow", "pandas", "typer", "rich", "safetensors", "lmprobe"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *heavy], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


# The safetensors header

STRICTER = {"duplicate_key", "not_an_object", "bad_tensor", "too_many_dims", "too_deep"}
STORED = [np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.float16, np.int32, np.float32, np.int64, np.float64,
          np.uint32, np.uint64]  # fmt: skip
TEXTS = ["a", "weight", "é", "名", "\u2028", '"', "\\", "\n", "\0", "a/b.c", "", "😀", "__metadata", " "]
LITERALS = ["0", "1", "-1", "-0", "01", "1.0", "1e2", "8", "255", "4294967296", "9223372036854775808",
            "18446744073709551615", "18446744073709551616", "null", "true", '"4"', "[]", "{}", "[1]", "NaN",
            "[[[[]]]]", "[" * 20 + "]" * 20, ",".join(["1"] * 70)]  # fmt: skip
PIECES = ["{", "}", "[", "]", ",", ":", '"', " ", "\n", "\t", "\\u0041", "\\ud800", "\\", "\0", "\ufeff", "null",
          '"x":1,', '"dtype":"F32",', '"__metadata__":{},', '"__metadata__":null,', '"__metadata__":{"a":"1","a":"2"},',
          '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},', '"a":["U8",[0],[0,0]],',
          '"e":{"dtype":"F4","shape":[0],"data_offsets":[0,0]},',
          '"f":{"dtype":"F8_E4M3","shape":[0,9],"data_offsets":[0,0],"more":[[[{}]]]},']  # fmt: skip


def make_file(rng: np.random.Generator) -> bytes:
    tensors = {}
    for _ in range(rng.integers(0, 5)):
        name = "".join(rng.choice(TEXTS, rng.integers(1, 4)))
        if name != "__metadata__":
            shape = tuple(rng.integers(0, 4, rng.integers(0, 4)).tolist())
            tensors[name] = np.zeros(shape, STORED[rng.integers(len(STORED))])
    metadata = {str(k): str(v) for k, v in rng.choice(TEXTS, (rng.integers(0, 3), 2))}
    # An empty metadata object without tensors is written by safetensors as a header that it cannot read.
    return safetensors.numpy.save(tensors, metadata or None)


def with_header(header: bytes, body: bytes, lie: int = 0) -> bytes:
    return struct.pack("<Q", (len(header) + lie) % 2**64) + header + body


def damage(rng: np.random.Generator, file: bytes) -> bytes:
    n = struct.unpack("<Q", file[:8])[0]
    header, body = file[8 : 8 + n], file[8 + n :]
    at = int(rng.integers(0, len(header) + 1))
    match rng.integers(0, 10):
        case 0:  # flip bits of any byte
            out = bytearray(file)
            out[rng.integers(len(out))] ^= int(rng.integers(1, 256))
            return bytes(out)
        case 1:
            return file[: rng.integers(0, len(file))]
        case 2:
            return file + bytes(rng.integers(1, 9))
        case 3:  # another size
            return with_header(header, body, int(rng.choice([-1, 1, 2, -8, 2**40, 2**63, -n, len(body)])))
        case 4 | 5:  # another number
            digits = [i for i, c in enumerate(header) if chr(c).isdigit()]
            if digits:
                i = int(rng.choice(digits))
                header = header[:i] + str(rng.choice(LITERALS)).encode() + header[i + 1 :]
        case 6:  # a piece of JSON somewhere
            header = header[:at] + PIECES[rng.integers(len(PIECES))].encode() + header[at:]
        case 7:  # a piece of JSON where an object begins
            opens = [i + 1 for i, c in enumerate(header) if c == ord("{")]
            i = int(rng.choice(opens))
            header = header[:i] + PIECES[rng.integers(len(PIECES))].encode() + header[i:]
        case 8:  # a value of another kind, or a changed one
            value = json.loads(header)
            names = [k for k in value if k != "__metadata__"]
            if names:
                one = value[names[rng.integers(len(names))]]
                field = str(rng.choice(["dtype", "shape", "data_offsets"]))
                one[field] = [None, 3, "F32", "f32", "F4", [], [0], [0, 0], [2, 1], [0, 4, 8], {}, "BF16"][
                    rng.integers(12)
                ]
                if rng.random() < 0.2:
                    del one[field]
            header = json.dumps(value, ensure_ascii=bool(rng.integers(2))).encode()
        case _:  # the same in other words
            value = json.loads(header)
            header = json.dumps(value, indent=int(rng.integers(0, 3)), ensure_ascii=bool(rng.integers(2))).encode()
            header = [b"", b" ", b"\n"][rng.integers(3)] + header + [b"", b"   ", b"\n", b"\0", b"x"][rng.integers(5)]
    return with_header(header, body)


def agree(file: bytes) -> str:
    """Asserts that both parsers say the same about a file; what was said."""
    try:
        theirs = {name: (t["dtype"], list(t["shape"]), len(t["data"])) for name, t in safetensors.deserialize(file)}
    except safetensors.SafetensorError:
        theirs = None
    try:
        tensors, _, start = _native.parse_safetensors(file)
    except actshard.HeaderError as error:
        refused = error
    else:
        assert theirs is not None, f"accepted what safetensors refuses: {file!r}"
        assert {t[0]: (t[1], t[2], t[4] - t[3]) for t in tensors} == theirs, file
        assert start + max((t[4] for t in tensors), default=0) == len(file)
        return "accepted"
    assert refused.reason in _native.header_reasons()
    assert len(str(refused).splitlines()) == 1
    if theirs is None:
        return refused.reason
    assert refused.reason in STRICTER, (refused, file)
    return f"stricter: {refused.reason}"


@pytest.mark.parametrize("seed", range(4))
def test_headers_are_accepted_and_refused_as_by_safetensors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    said: dict[str, int] = {}
    for _ in range(1_000):
        file = make_file(rng)
        assert agree(file) == "accepted"
        for _ in range(3):
            what = agree(damage(rng, file))
            said[what] = said.get(what, 0) + 1
    assert said["accepted"] > 100
    assert len(said) > 12, said


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
         "duplicate_key"),
        (b' {"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "not_an_object"),
        (b'{"a":["U8",[0],[0,0]]}', "bad_tensor"),
        (b'{"a":{"dtype":"U8","shape":[' + b",".join([b"0"] * 65) + b'],"data_offsets":[0,0]}}', "too_many_dims"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":' + b"[" * 20 + b"]" * 20 + b"}}", "too_deep"),
    ],
    ids=["duplicate_key", "not_an_object", "bad_tensor", "too_many_dims", "too_deep"],
)  # fmt: skip
def test_five_inputs_are_refused_that_safetensors_lets_pass(header: bytes, reason: str) -> None:
    assert agree(with_header(header, b"")) == f"stricter: {reason}"


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_judged_as_by_safetensors(data: bytes, prefixed: bool) -> None:
    agree(with_header(b"{" + data, b"") if prefixed else data)
