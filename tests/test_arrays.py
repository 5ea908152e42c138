"""``store.layer(...)``: indexing, arrays, rows and ragged values equal those of a numpy array of the same numbers."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from conftest import GOLDEN, LMPROBE, SAEV, bits, saev_dump
from served import served
from zarr_files import write_store

FOLDERS = [
    *(saev_dump(variant) for variant in SAEV),
    *LMPROBE,
    *sorted(
        p
        for name in ("zarr", "pickle")
        for p in (GOLDEN / name).iterdir()
        if p.name not in ("hostile", "layouts_proto4")
    ),
]


def quietly(path: Any, **more: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", actshard.ActshardWarning)
        return actshard.open(path, **more)


def layers_of_golden_data() -> list[Any]:
    made = []
    for folder in FOLDERS:
        try:
            store = quietly(folder)
        except actshard.ActshardError:
            continue
        made += [
            pytest.param(store, layer, id=f"{folder.parent.name}-{folder.name}-{layer}") for layer in store.layers[:2]
        ]
    return made


LAYERS = layers_of_golden_data()


def stacked(store: actshard.Store, layer: int, dtype: Any = None) -> list[np.ndarray]:
    """Every example's rows; none for an example that lacks the layer."""
    lengths = store.tokens_in(layer).tolist()
    none = np.zeros((0, store.d_model), store.dtype if dtype is None else dtype)
    return [np.array(store.sequence(i, layer, dtype=dtype)) if n else none for i, n in enumerate(lengths)]


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert np.array_equal(bits(found), bits(expected))


def readable(store: actshard.Store) -> bool:
    """Whether all rows have one dtype, so that numpy can hold them."""
    try:
        for layer in store.layers:
            stacked(store, layer)
    except actshard.DtypeError:
        return False
    return True


@pytest.mark.parametrize(("store", "layer"), LAYERS)
def test_every_golden_layer_is_an_array_of_its_sequences(store: actshard.Store, layer: int) -> None:
    acts = store.layer(layer)
    if not readable(store):
        with pytest.raises(actshard.DtypeError, match="dtype="):
            acts.ragged()
        acts = store.layer(layer, dtype="float64")
        expected = stacked(store, layer, "float64")
    else:
        expected = stacked(store, layer)
    lengths = [len(x) for x in expected]
    flat = np.concatenate(expected) if expected else np.zeros((0, store.d_model), acts.dtype)
    each = lengths[0] if len(set(lengths)) == 1 else None
    assert acts.shape == (len(store), each, store.d_model)
    assert (acts.ndim, len(acts), acts.size, acts.nbytes) == (3, len(store), flat.size, flat.nbytes)
    values, offsets = acts.ragged()
    same(values, flat)
    assert np.diff(offsets).tolist() == lengths
    rows = acts.rows()
    assert (rows.shape, rows.ndim, rows.size, rows.dtype) == (flat.shape, 2, flat.size, flat.dtype)
    same(np.asarray(rows), flat)
    assert rows.examples.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert rows.tokens.tolist() == [k for n in lengths for k in range(n)]
    for i, x in enumerate(expected):
        if not len(x):
            continue
        same(np.asarray(acts[i - len(store)]), x)
        same(np.asarray(acts[i, 1:]), x[1:])
        same(np.asarray(acts[i, ::-2]), x[::-2])
        same(acts[i, -1], x[-1])
    some = [i for i, n in enumerate(lengths) if n]
    if some:
        same(acts[some, -1], np.stack([expected[i][-1] for i in some]))
    if each is not None:
        same(np.asarray(acts), np.stack(expected))
    else:
        with pytest.raises(actshard.ArgumentError, match=r"acts\.rows\(\).*acts\.ragged\(\)"):
            np.asarray(acts)


def part(size: int) -> st.SearchStrategy[Any]:
    """An index of one axis. Slices may exceed it; integers may be negative."""
    number = st.integers(-size, size - 1)
    bound = st.none() | st.integers(-2 * size, 2 * size)
    cut = st.builds(slice, bound, bound, st.none() | st.integers(-3, 3).filter(bool))
    return number | cut | st.lists(number, max_size=6) | st.lists(st.booleans(), min_size=size, max_size=size)


@pytest.fixture(scope="module")
def plain() -> tuple[actshard.Store, int, np.ndarray]:
    store = quietly(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"))
    layer = store.layers[1]
    return store, layer, np.stack(stacked(store, layer))


@settings(max_examples=400)
@given(data=st.data())
def test_keys_mean_what_they_mean_to_numpy(plain: Any, data: st.DataObject) -> None:
    store, layer, expected = plain
    n, t, d = expected.shape
    key: tuple[Any, ...] = (data.draw(part(n)),)
    if data.draw(st.booleans()):
        key = (*key, data.draw(part(t)))
    if len(key) == 2 and data.draw(st.booleans()):
        key = (*key, data.draw(st.integers(-d, d - 1) | st.builds(slice, st.integers(-d, d), st.integers(-d, d))))
    if len(key) == 1 and data.draw(st.booleans()):
        key = (*key, ..., slice(1, None))
    key = key[0] if len(key) == 1 and data.draw(st.booleans()) else key
    try:
        wanted = expected[np.array(key, np.int64) if key == [] else key]
    except IndexError:
        with pytest.raises((IndexError, actshard.ArgumentError)):
            store.layer(layer)[key]
        return
    same(store.layer(layer)[key], wanted)


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data())
def test_rows_are_indexed_as_numpy_does(plain: Any, data: st.DataObject) -> None:
    store, layer, expected = plain
    flat = expected.reshape(-1, expected.shape[-1])
    key = data.draw(part(len(flat)).filter(lambda key: not isinstance(key, list) or len(key) < 10))
    wide = data.draw(st.booleans())
    found = store.layer(layer).rows()[key, 2:-1] if wide else store.layer(layer).rows()[key]
    taken = flat[np.array(key, np.int64) if key == [] else key]
    same(found, taken[..., 2:-1] if wide else taken)


def test_empty_parts_are_empty_arrays_without_a_warning(plain: Any) -> None:
    store, layer, expected = plain
    _ = store.table  # a store that has a table in memory warns of empty lists
    for key in ((0, slice(3, 3)), ([], -1), (slice(0, 0), 1), ([], slice(None)), (slice(0, 0), [0, 1])):
        same(store.layer(layer)[key], expected[key if key[0] != [] else (np.zeros(0, int), key[1])])
    assert store.layer(layer).rows()[4:4].shape == (0, store.d_model)


def test_masks_columns_and_grids(plain: Any) -> None:
    store, layer, expected = plain
    acts, (n, t, _) = store.layer(layer), expected.shape
    mask = np.arange(n) % 2 == 1
    for given_mask in (mask, mask.tolist(), pa.array(mask), pa.chunked_array([mask])):
        same(acts[given_mask, 0], expected[mask, 0])
    both = np.random.default_rng(0).random((n, t)) < 0.3
    same(acts[both], expected[both])
    same(acts[:, np.arange(t) % 2 == 0], expected[:, ::2])
    grid = np.ix_([0, 2], [1, 3, 1])
    same(acts[grid], expected[grid])
    same(acts[[[0, 1], [2, 2]], :, 0], expected[[[0, 1], [2, 2]], :, 0])
    same(acts[:, -1, [2, 0]], expected[:, -1, [2, 0]])
    same(np.stack(list(acts)), expected)
    same(acts.rows()[acts.rows().examples == 2], expected[2])


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (True, TypeError),
        (1.0, ValueError),
        (None, TypeError),
        ("1", TypeError),
        (10_000, IndexError),
        ((0, 10_000), IndexError),
        ((0, 0, 10_000), IndexError),
        ((0, 0, 0, 0), IndexError),
        (([0, 1], [0, 1, 2]), ValueError),
        (np.ones(3, bool), ValueError),
        (np.ones((3, 2), bool), ValueError),
        ((0, np.ones(3, bool)), ValueError),
        ((0, slice(None), [0, 1]), ValueError),
        ((..., ...), ValueError),
        (slice("a"), TypeError),
        ((0, slice(None, None, 0)), ValueError),
    ],
)
def test_what_is_no_index_is_refused(plain: Any, key: Any, error: type[Exception]) -> None:
    store, layer, _ = plain
    with pytest.raises(error) as caught:
        store.layer(layer)[key]
    assert isinstance(caught.value, actshard.ActshardError)


def test_an_example_is_a_view_and_keeps_its_file(plain: Any) -> None:
    store = quietly(plain[0].path, io="mmap")
    acts = store.layer(plain[1])
    one, cut = acts[2], acts[2, 1:3]
    store.close()
    assert not one.flags.writeable
    assert np.shares_memory(one, cut)
    same(one, plain[2][2])
    with pytest.raises(actshard.ClosedError):
        acts[0]


def written(folder: Any, format: str, acts: np.ndarray, **options: Any) -> actshard.Store:
    """A dataset of layers 0, 1, ... of these rows, ``(n, layers, tokens, d_model)`` or without tokens, read through mappings."""
    with actshard.create(
        folder / format, format, layers=range(acts.shape[1]), d_model=acts.shape[-1], **options
    ) as writer:
        writer.append(acts)
    return quietly(folder / format, io="mmap")


def viewed(found: np.ndarray, expected: np.ndarray) -> None:
    """Read-only memory of a file, with these numbers."""
    assert not found.flags.writeable
    assert not found.flags.owndata
    with pytest.raises(ValueError, match="WRITEABLE"):
        found.flags.writeable = True
    same(found, expected)


def test_a_layer_of_one_saev_shard_is_a_view_that_outlives_the_store(tmp_path: Any) -> None:
    acts = np.random.default_rng(0).random((5, 2, 3, 4), np.float32)
    store = written(tmp_path, "saev", acts)
    layer = store.layer(1)
    views = [np.asarray(layer), np.asarray(layer, np.float32), layer.__array__(copy=False)]
    copies = [np.array(layer), layer.__array__(copy=True)]
    flat = np.asarray(layer.rows())  # rows of other layers lie between
    part, back = (np.asarray(store.filter(which).layer(0)) for which in (slice(1, 5, 2), slice(None, None, -1)))
    assert np.shares_memory(views[0], views[1])
    store.close()
    del store, layer
    for view in views:
        viewed(view, acts[:, 1])
    viewed(part, acts[1::2, 0])
    viewed(back, acts[::-1, 0])
    same(flat, acts[:, 1].reshape(-1, 4))
    for copy in [*copies, flat]:
        copy[:] = 0
        assert copy.flags.writeable
    same(views[0], acts[:, 1])


def test_rows_that_follow_each_other_in_a_file_are_a_view(tmp_path: Any) -> None:
    acts = np.random.default_rng(0).random((5, 1, 3, 4), np.float32)
    store = written(tmp_path, "saev", acts)
    flat = acts.reshape(-1, 4)
    viewed(np.asarray(store.layer(0).rows()), flat)
    viewed(store.layer(0).ragged().values, flat)
    viewed(np.asarray(store.filter(slice(1, 4)).layer(0).rows()), flat[3:12])
    pooled = written(tmp_path, "lmprobe", acts[:, :, 0])
    viewed(np.asarray(pooled.layer(0).rows()), acts[:, 0, 0])
    viewed(np.asarray(pooled.layer(0)), acts[:, 0, :1])
    viewed(np.asarray(pooled.filter(slice(4, None, -2)).layer(0).rows()), acts[4::-2, 0, 0])


def test_a_zarr_array_in_one_plain_chunk_is_a_view(tmp_path: Any) -> None:
    acts = np.random.default_rng(0).random((4, 2, 3, 8)).astype(np.float16)
    made = write_store(tmp_path / "a.zarr", acts, np.full(4, 3, np.int32), acts.shape)
    viewed(np.asarray(quietly(made, io="mmap").layer(1)), acts[:, 1])
    cut = quietly(write_store(tmp_path / "b.zarr", acts, np.full(4, 3, np.int32), (1, 1, 3, 8)), io="mmap").layer(1)
    same(np.asarray(cut), acts[:, 1])
    assert np.asarray(cut).flags.writeable


def test_what_is_no_view_is_a_copy_or_refused(tmp_path: Any) -> None:
    acts = np.random.default_rng(0).random((6, 1, 3, 4), np.float32)
    one = written(tmp_path, "saev", acts)
    several = written(tmp_path / "shards", "saev", acts, max_tokens_per_shard=6)
    for store in (
        several,
        quietly(one.path, io="pread"),
        one.filter([0, 1, 3]),
        written(tmp_path, "lmprobe", acts),
        written(tmp_path, "pickle", acts.astype(np.float32), shard_bytes=10_000),
    ):
        layer = store.layer(0)
        expected = acts[:, 0] if len(store) == 6 else acts[[0, 1, 3], 0]
        for array, wanted in ((layer, expected), (layer.rows(), expected.reshape(-1, 4))):
            same(np.asarray(array), wanted)
            assert np.asarray(array).flags.writeable
            with pytest.raises(ValueError, match="copy=False"):
                array.__array__(copy=False)
    with pytest.raises(ValueError, match="copy=False"):
        one.layer(0).__array__(np.float16, copy=False)
    same(np.asarray(one.layer(0, dtype="float64")), acts[:, 0].astype(np.float64))
    viewed(np.asarray(one.layer(0, dtype="float32")), acts[:, 0])


def test_a_shortened_file_is_an_error_and_no_view(tmp_path: Any) -> None:
    store = written(tmp_path, "saev", np.ones((5, 1, 3, 4), np.float32))
    layer = store.layer(0)
    _ = layer[0]
    (shard,) = store.path.glob("*.bin")
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 4)
    for array in (layer, layer.rows()):
        with pytest.raises(actshard.TruncatedFileError, match="truncated"):
            np.asarray(array)


def test_conversion_to_numpy_follows_copy_and_dtype(plain: Any) -> None:
    store, layer, expected = plain
    acts = store.layer(layer)
    with pytest.warns(actshard.OverflowWarning, match="Use a wider dtype"):
        halved = np.asarray(acts, np.float16)
    with np.errstate(over="ignore"):
        same(halved, expected.astype(np.float16))
    same(np.asarray(acts, np.int64), expected.astype(np.int64))
    same(np.array(acts, dtype=ml_dtypes.bfloat16), expected.astype(ml_dtypes.bfloat16))
    same(np.asarray(store.layer(layer, dtype="float64")), expected.astype(np.float64))
    same(store.layer(layer, dtype="float64")[:, 1], expected[:, 1].astype(np.float64))
    same(store.layer(layer, dtype="float64")[1, 1:], expected[1, 1:].astype(np.float64))
    with pytest.raises(ValueError, match="copy=False"):
        acts.__array__(copy=False)
    owned = acts.__array__(copy=True)
    owned[:] = 0
    same(np.ascontiguousarray(acts.rows()[1:9], np.float32), expected.reshape(-1, expected.shape[-1])[1:9])


def test_results_go_on_through_dlpack(plain: Any) -> None:
    store, layer, expected = plain
    same(np.from_dlpack(store.layer(layer)[[1]]), expected[[1]])
    same(np.from_dlpack(store.layer(layer)[1]), expected[1])


def test_nothing_is_read_before_indexing_and_copies_are_small() -> None:
    source = saev_dump(GOLDEN / "saev" / "v21_nocls_oneshard")
    store = quietly(source)
    acts = store.layer(store.layers[0])
    copy = pickle.loads(pickle.dumps(acts))
    assert len(pickle.dumps(acts)) < 2000
    same(copy[0], acts[0])
    with served(source.parent) as server:
        far = quietly(server.web(source.name))
        before = len(server.requests)
        seen = far.layer(far.layers[0])
        assert (seen.shape, repr(seen.rows())[:9]) == (acts.shape, "<actshard")
        assert server.since(before) == []
        same(np.asarray(seen), np.asarray(acts))
        same(seen[[2, 0], 1], acts[[2, 0], 1])


def test_a_repr_has_the_tokens_that_are_known_without_reading(tmp_path: Any) -> None:
    for lengths, before, after in ([3, 3], "3 tokens", "3 tokens"), ([4, 1], "tokens", "1 to 4 tokens"):
        path = tmp_path / str(len(before))
        format, options = ("pickle", {}) if len(set(lengths)) > 1 else ("saev", {"num_examples": 2})
        with actshard.create(path, format, layers=[0], d_model=2, **options) as writer:  # type: ignore[arg-type]  # of both
            writer.append([np.zeros((1, n, 2), np.float32) for n in lengths])
        acts = actshard.open(writer.path).layer(0)
        assert f": (2 examples, {before}, 2) float32>" in repr(acts)
        assert ("rows" if before == "tokens" else "6 rows") in repr(acts.rows())
        assert acts.nbytes == sum(lengths) * 8
        assert f": (2 examples, {after}, 2) float32>" in repr(acts)
        assert ": (2 examples, tokens" not in repr(acts)
        acts.store.close()  # type: ignore[attr-defined]  # a store
        repr(acts)


@pytest.mark.parametrize("name", ["lmprobe/fullseq_bf16", "pickle/numpy2_proto5", "zarr/single_minimal"])
def test_layers_behind_a_url_equal_local_ones(name: str) -> None:
    with served(GOLDEN) as server:
        far, near = quietly(f"s3://{name}", storage_options=server.options), quietly(GOLDEN / name)
        for layer in near.layers[:1]:
            same(far.layer(layer).ragged().values, near.layer(layer).ragged().values)
            same(far.layer(layer)[[0, 0], -1], near.layer(layer)[[0, 0], -1])


def test_slices_of_ragged_examples_are_arrays_where_they_fit() -> None:
    store = quietly(GOLDEN / "lmprobe" / "fullseq_f32")
    layer, counts = store.layers[0], store.token_counts
    assert len(set(counts.tolist())) > 1
    acts, every = store.layer(layer), stacked(store, layer)
    least = int(counts.min())
    same(acts[:, :least], np.stack([x[:least] for x in every]))
    same(acts[:, -least:], np.stack([x[-least:] for x in every]))
    same(acts[::2, -1], np.stack([x[-1] for x in every[::2]]))
    with pytest.raises(actshard.ArgumentError, match=r"acts\.ragged\(\)"):
        acts[:, 1:]
    values, offsets = acts.ragged([3, 1])
    same(values, np.concatenate([every[3], every[1]]))
    assert offsets.tolist() == [0, len(every[3]), len(every[3]) + len(every[1])]
    listed = pa.LargeListArray.from_arrays(
        offsets, pa.FixedSizeListArray.from_arrays(values.reshape(-1), store.d_model)
    )
    assert [len(x) for x in listed] == [len(every[3]), len(every[1])]


def even_layer(folder: Any) -> Any:
    """Three examples of three tokens."""
    with actshard.create(folder / "a", "zarr", layers=[2], d_model=6) as writer:
        writer.append(np.arange(54, dtype=np.float32).reshape(3, 1, 3, 6))
    return actshard.open(folder / "a").layer(2)


def test_an_ellipsis_of_no_axes_between_a_list_and_a_number_is_refused(tmp_path: Any) -> None:
    """numpy moves the list's axis to the front there: with as many examples as tokens the values would be transposed."""
    acts = even_layer(tmp_path)
    whole = np.asarray(acts)
    for key in (np.s_[:, [0, 1, 2], ..., 3], np.s_[:, 1, ..., [0, 2, 3]], np.s_[::-1, -1, ..., np.array([[0, 2]])]):
        with pytest.raises(actshard.ArgumentError, match="an ellipsis between a list and a number is ambiguous"):
            acts[key]
    keys: list[Any] = [
        np.s_[..., [0, 1], 3], np.s_[:, [0, 1], 3], np.s_[:, ..., [0, 1], 3], np.s_[[0, 1], ..., 1, 3], np.s_[:, 1, ..., 3],
        np.s_[[0, 1], :, ..., 3], np.s_[:, [0, 1], ...], np.s_[:, [0, 1], ..., 2:4],
    ]  # fmt: skip
    for key in keys:
        assert np.array_equal(acts[key], whole[key]), key


def test_keys_without_examples_are_checked_as_in_numpy(tmp_path: Any) -> None:
    acts = even_layer(tmp_path)
    whole = np.asarray(acts)
    for key in (np.s_[[], 100], np.s_[3:2, 100], np.s_[0:0, [100]], np.s_[0:0, -100]):
        with pytest.raises(IndexError):
            whole[key]
        with pytest.raises(actshard.OutOfRangeError, match="token"):
            acts[key]
    for key in (np.s_[[], 1], np.s_[3:2, -1], np.s_[0:0, [0, 1]], np.s_[[], [100]]):
        assert acts[key].shape == whole[key].shape


def test_a_mask_of_the_tokens_of_one_example(tmp_path: Any) -> None:
    with actshard.create(tmp_path / "a", "zarr", layers=[2], d_model=4) as writer:
        for n in (3, 5):
            writer.append(np.random.default_rng(n).normal(size=(1, 1, n, 4)).astype(np.float32))
    acts = actshard.open(tmp_path / "a").layer(2)
    mask = np.array([True, False, True, False, True])
    assert np.array_equal(acts[1, mask], acts[1][mask])
    assert np.array_equal(acts[-2, mask[:3], 1], acts[0][mask[:3], 1])
    with pytest.raises(actshard.ArgumentError, match=r"expected \(3,\) flags, one per token, found \(5,\)"):
        acts[0, mask]
    with pytest.raises(actshard.ArgumentError, match="examples have different numbers of tokens"):
        acts[:, mask]
