"""``actshard.pair``: aligned activations of several stores equal those of each store, and examples that differ are refused."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import actshard
from conftest import GOLDEN
from test_arrays import LAYERS, quietly, readable, same

SHUFFLES = ("window", "exact", None)


@pytest.fixture(scope="module")
def base() -> actshard.Store:
    return quietly(GOLDEN / "lmprobe" / "fullseq_f32")


@pytest.fixture(scope="module")
def chat(base: actshard.Store, tmp_path_factory: pytest.TempPathFactory) -> actshard.Store:
    """The same examples in another format, with other values."""
    path = tmp_path_factory.mktemp("pair") / "chat"
    with actshard.create(path, "pickle", layers=base.layers, d_model=base.d_model, dtype="float32") as writer:
        rng = np.random.default_rng(0)
        for i, n in enumerate(base.token_counts.tolist()):
            rows = rng.standard_normal((1, len(base.layers), n, base.d_model)).astype(np.float32)
            writer.append(rows, columns={"text": [base.table["text"][i].as_py()]})
    return quietly(path)


def check(pair: actshard.PairedStores, stream: Any) -> int:
    seen = 0
    for batch in stream:
        assert isinstance(batch, actshard.PairedBatch)
        for k, (s, layer) in enumerate(zip(batch.stores.tolist(), batch.layers.tolist(), strict=True)):
            same(
                batch.activations[:, k], pair.stores[s].gather(layer, batch.examples, batch.tokens, dtype=stream.dtype)
            )
        seen += len(batch)
    return seen


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_batches_are_aligned(base: actshard.Store, chat: actshard.Store, shuffle: Any) -> None:
    pair = actshard.pair(base, chat)
    assert pair.compared == ("examples", "tokens", "text")
    assert pair.warnings == ()
    assert (len(pair), pair.layers, pair.d_model) == (len(base), base.layers, base.d_model)
    layers = [base.layers[1], base.layers[0]]
    stream = pair.stream(layers, 7, shuffle=shuffle, tokens="all")
    first = next(iter(stream))
    assert first.stores.tolist() == [0, 0, 1, 1]
    assert first.layers.tolist() == layers * 2
    stream.close()
    assert check(pair, stream) == int(base.token_counts.sum())
    one = pair.stream(layers[0], 5, shuffle=shuffle, dtype="float64")
    assert one.batch_shape == (5, 2, base.d_model)
    assert check(pair, one) == one.num_rows
    row = pair.stream("all", 6, shuffle=shuffle, interleave=True)
    for batch in row:
        for i, (s, layer) in enumerate(zip(batch.stores.tolist(), batch.layers.tolist(), strict=True)):
            same(batch.activations[i : i + 1], pair.stores[s].gather(layer, batch.examples[i], batch.tokens[i]))


@pytest.mark.parametrize(("store", "layer"), LAYERS)
def test_every_golden_dataset_pairs_with_itself(store: actshard.Store, layer: int) -> None:
    if not store.token_counts.any() or store.tokens_in(layer).tolist() != store.token_counts.tolist():
        return
    dtype = None if readable(store) else "float64"
    pair = actshard.pair({"a": store, "b": store})
    for shuffle in SHUFFLES:
        stream = pair.stream([layer], 5, shuffle=shuffle, dtype=dtype)
        assert check(pair, stream) == stream.num_rows == store.stream(layer, 5, dtype=dtype).num_rows


def test_a_pair_of_no_examples_warns_at_the_callers_line(base: actshard.Store, chat: actshard.Store) -> None:
    pair = actshard.pair(base.filter([]), chat.filter([]))
    with pytest.warns(actshard.ActshardWarning, match="No example was chosen") as told:
        assert list(pair.stream(base.layers[0], 4)) == []
    assert {x.filename for x in told} == {__file__}


def test_parts_of_a_pair(base: actshard.Store, chat: actshard.Store) -> None:
    pair, layer = actshard.pair({"base": base, "chat": chat}), base.layers[0]
    some = pair.filter([3, 0, 3])
    same(some.gather(layer, [0, 1], -1)[:, 1], chat.gather(layer, [3, 0], -1))
    same(some.gather([layer], [[0], [1]], -1)[..., 0, :], base.gather(layer, [[3], [0]], -1))
    value = base.table["label"][0].as_py()
    labelled = pair.filter(pc.field("label") == value)
    assert len(labelled) == len(base.filter(pc.field("label") == value))
    train, test = pair.split(test=0.25, seed=2)
    assert len(train) + len(test) == len(pair)
    ids = [x.tolist() for x in (train.stores[1].chosen, test.stores[1].chosen)]
    assert sorted(ids[0] + ids[1]) == list(range(len(pair)))
    assert check(test, test.stream(layer, 4, shuffle="window")) > 0
    copy = pickle.loads(pickle.dumps(some))
    same(copy.gather(layer, [0, 1, 2], 0), some.gather(layer, [0, 1, 2], 0))
    assert "base, chat" in repr(pair)


def test_a_gather_of_a_pair_is_one_read_into_the_callers_memory(base: actshard.Store, chat: actshard.Store) -> None:
    pair = actshard.pair(base, chat)
    layers = list(base.layers[:2])
    rng = np.random.default_rng(3)
    for shape in ((), (1,), (7,), (2, 3)):
        examples = rng.integers(0, len(base), shape)
        for tokens in (-1, np.zeros(shape, np.int64)):
            for dtype in (None, "float64", "float16"):
                each = [s.gather(k, examples, tokens, dtype=dtype) for s in (base, chat) for k in layers]
                expected = np.stack(each, axis=-2)
                same(pair.gather(layers, examples, tokens, dtype=dtype), expected)
                out = np.empty_like(expected)
                assert pair.gather(layers, examples, tokens, out=out, dtype=dtype) is out
                same(out, expected)
    mask = np.arange(len(base)) % 3 == 0
    same(pair.gather(layers[0], mask, 0)[:, 1], chat.gather(layers[0], mask, 0))
    with pytest.raises(actshard.ArgumentError):
        pair.gather(layers, [0, 1], 0, out=np.empty(3, np.float32))
    with pytest.raises(actshard.OutOfRangeError):
        pair.gather(layers, [0, len(base)], 0)


def test_pairs_of_different_dtypes_are_converted_if_asked(base: actshard.Store, tmp_path: Path) -> None:
    actshard.convert(base, tmp_path / "half", "lmprobe", dtype="float16")
    half, layer = quietly(tmp_path / "half"), base.layers[0]
    with pytest.raises(actshard.DtypeError, match="Pass dtype="):
        actshard.pair(base, half)
    pair = actshard.pair(base, half, dtype="float32")
    for shuffle in SHUFFLES:
        stream = pair.stream(layer, 6, shuffle=shuffle)
        assert check(pair, stream) == stream.num_rows


def test_stores_that_differ_are_refused(base: actshard.Store, chat: actshard.Store, tmp_path: Path) -> None:
    with pytest.raises(actshard.ArgumentError, match="at least two"):
        actshard.pair(base)
    with pytest.raises(actshard.ArgumentError, match="numbers of examples"):
        actshard.pair(base, chat.filter(slice(1, None)))
    n = len(base)
    turned = chat.filter([*range(2), 3, 2, *range(4, n)])
    with pytest.raises(actshard.ArgumentError, match="example 2"):
        actshard.pair(base, turned)
    equal = np.zeros((2, len(base.layers), 3, base.d_model), np.float32)
    for name, texts in (("a", ["x", "y"]), ("b", ["x", "z"])):
        with actshard.create(tmp_path / name, "pickle", layers=base.layers, d_model=base.d_model) as writer:
            writer.append(equal, columns={"text": texts})
    with pytest.raises(actshard.ArgumentError, match=r"example 1: expected equal 'text.*'y' in a and 'z' in b"):
        actshard.pair(tmp_path / "a", tmp_path / "b")
    with actshard.create(tmp_path / "c", "zarr", layers=base.layers, d_model=base.d_model) as writer:
        writer.append(equal)
    with actshard.create(tmp_path / "wide", "zarr", layers=base.layers, d_model=base.d_model + 1) as writer:
        writer.append(np.zeros((2, len(base.layers), 3, base.d_model + 1), np.float32))
    with pytest.raises(actshard.ArgumentError, match=r"d_model.*shuffle=\"exact\""):
        actshard.pair(tmp_path / "c", tmp_path / "wide")
    assert actshard.pair(tmp_path / "a", tmp_path / "c").warnings != ()
    pair = actshard.pair(base, chat)
    with pytest.raises(actshard.LayerError):
        pair.stream(12345, 4)


def written(path: Path, format: str, lengths: list[int], columns: dict[str, list[Any]], **more: Any) -> actshard.Store:
    """A dataset of one layer; rows are the example's number."""
    with actshard.create(path, format, layers=[5], d_model=3, **more) as writer:
        for i, n in enumerate(lengths):
            rows = np.full((1, 1, n, 3), i, np.float32)
            writer.append(rows, columns={name: values[i : i + 1] for name, values in columns.items()})
    return quietly(path)


def test_all_stores_are_compared_not_only_with_the_first(tmp_path: Path) -> None:
    bare = written(tmp_path / "bare", "zarr", [2, 2], {})
    a = written(tmp_path / "a", "lmprobe", [2, 2], {"text": ["x", "y"]})
    b = written(tmp_path / "b", "lmprobe", [2, 2], {"text": ["y", "x"]})
    for stores in ((bare, a, b), (a, bare, b)):
        with pytest.raises(actshard.ArgumentError, match=r"example 0.*'x' in a and 'y' in b"):
            actshard.pair(*stores)
    pair = actshard.pair({"bare": bare, "a": a, "again": a.filter([0, 1])})
    assert pair.compared == ("examples", "tokens", "text")
    assert len(pair.warnings) == 2
    assert all("bare and" in warning for warning in pair.warnings)
    assert actshard.pair(a, b, compare=[]).compared == ("examples", "tokens")


@pytest.mark.parametrize("column", ["input_ids", "token_ids", "prompt_token_ids", "id"])
def test_ids_are_compared_whatever_their_integer_type(column: str, tmp_path: Path) -> None:
    ids = [[1, 2], [3, 4]] if column != "id" else [1, 2]
    other = [[1, 2], [3, 5]] if column != "id" else [1, 3]
    a = written(tmp_path / "a", "lmprobe", [2, 2], {column: ids})
    same_ids = written(tmp_path / "b", "zarr", [2, 2], {column: ids})
    c = written(tmp_path / "c", "zarr", [2, 2], {column: other})
    assert column in actshard.pair(a, same_ids).compared
    with pytest.raises(actshard.ArgumentError, match=rf"example 1: expected equal '{column}'.*compare="):
        actshard.pair(a, c)


def test_content_tokens_are_compared(tmp_path: Path) -> None:
    """Padding of one store is not paired with tokens of another, in either order."""
    short = written(tmp_path / "short", "lmprobe", [1, 4], {})
    actshard.convert(short, tmp_path / "padded", "saev", pad=True)
    padded = quietly(tmp_path / "padded")
    full = written(tmp_path / "full", "saev", [4, 4], {})
    assert padded.token_counts.tolist() == full.token_counts.tolist() == [4, 4]
    for stores in ((padded, full), (full, padded)):
        with pytest.raises(actshard.ArgumentError, match="example 0: expected equal numbers of content tokens"):
            actshard.pair(*stores)
    assert actshard.pair(padded, padded).stream(5, 2).num_rows == 5


def test_what_says_nothing_is_not_compared(tmp_path: Path) -> None:
    """Nulls, empty previews and made-up texts: they refuse no pair, and are not listed as compared."""
    a = written(tmp_path / "a", "lmprobe", [2, 2, 2], {"text": ["x", "y", "z"]})
    made_up = written(tmp_path / "made_up", "lmprobe", [2, 2, 2], {})
    empty = written(tmp_path / "empty", "pickle", [2, 2, 2], {})
    for other in (made_up, empty):
        pair = actshard.pair(a, other)
        assert "text" not in pair.compared
        assert len(pair.warnings) == 1
    bare = written(tmp_path / "bare", "zarr", [2], {})
    one, two = actshard.concat([a.filter([0, 1]), bare]), actshard.concat([bare, a.filter([1, 2])])
    pair = actshard.pair(one, two)
    assert "text" in pair.compared
    assert "2 examples is null" in pair.warnings[0]
    with pytest.raises(actshard.ArgumentError, match="example 1"):
        actshard.pair(one, actshard.concat([bare, a.filter([2, 1])]))
    with pytest.raises(actshard.NotStoredError):
        actshard.pair(a, empty, compare=["text"])
    with pytest.raises(actshard.ArgumentError, match="list of columns"):
        actshard.pair(a, a, compare="text")  # type: ignore[arg-type]
    with pytest.raises(actshard.ArgumentError, match="different names"):
        actshard.pair({"1": a, 1: a})


def test_layers_that_some_examples_lack_are_named(tmp_path: Path) -> None:
    ragged = quietly(GOLDEN / "pickle" / "ragged_layers_machine3")
    lengths = ragged.token_counts.tolist()
    with actshard.create(tmp_path / "full", "zarr", layers=[15, 16], d_model=ragged.d_model) as writer:
        for n in lengths:
            writer.append(np.ones((1, 2, n, ragged.d_model), np.float32))
    pair = actshard.pair({"ragged": ragged, "full": tmp_path / "full"})
    with pytest.raises(
        actshard.NotStoredError, match=r"example 2.*0 in layer 15 of ragged and 6 in layer 15 of full.*filter"
    ):
        pair.stream(15, 4)
    stream = pair.stream(16, 4, shuffle="exact")
    assert check(pair, stream) == sum(lengths)
    some = pair.filter([i for i, n in enumerate(ragged.tokens_in(15).tolist()) if n])
    assert check(some, some.stream("all", 4)) > 0


def test_a_stream_of_a_pair_resumes_on_all_ranks(base: actshard.Store, chat: actshard.Store) -> None:
    pair, layer = actshard.pair(base, chat), base.layers[0]
    for shuffle in SHUFFLES:
        whole = [b.activations.copy() for b in pair.stream(layer, 4, shuffle=shuffle, seed=1)]
        stream = pair.stream(layer, 4, shuffle=shuffle, seed=1)
        for i, _ in enumerate(stream):
            if i == 2:
                break
        state = stream.state_dict()
        again = pickle.loads(pickle.dumps(pair)).stream(layer, 4, shuffle=shuffle, seed=1)
        again.load_state_dict(state)
        for found, expected in zip(again, whole[3:], strict=True):
            assert isinstance(found, actshard.PairedBatch)
            same(found.activations, expected)
        carried = pickle.loads(pickle.dumps(stream))
        same(next(iter(carried)).activations, whole[3])
        with pytest.raises(actshard.ArgumentError, match="another"):
            actshard.pair(chat, base).stream(layer, 4, shuffle=shuffle, seed=1).load_state_dict(state)
        rows = sum(len(b) for r in range(3) for b in pair.stream(layer, 4, shuffle=shuffle, rank=r, world_size=3))
        assert rows == stream.num_rows


def _first(pair: actshard.PairedStores, layer: int) -> bytes:
    return next(iter(pair.stream(layer, 8, shuffle="window"))).activations.tobytes()


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_children_read_a_pair(base: actshard.Store, chat: actshard.Store, how: str) -> None:
    pair, layer = actshard.pair(base, chat), base.layers[0]
    expected = _first(pair, layer)
    with multiprocessing.get_context(how).Pool(1) as pool:
        assert pool.apply(_first, (pair, layer)) == expected


def test_a_pair_is_one_store_with_layers_of_both(base: actshard.Store, chat: actshard.Store, tmp_path: Path) -> None:
    """For the verbs that take a store: conversion, verification, sequences, arrays, statistics."""
    pair = actshard.pair({"base": base, "chat": chat})
    both = pair.as_store()
    first, last = base.layers[0], base.layers[-1]
    assert both.layers == tuple(f"{name}:{layer}" for name in ("base", "chat") for layer in base.layers)
    for store in (both, pickle.loads(pickle.dumps(both))):
        same(store.sequence(example=1, layer=f"chat:{last}"), chat.sequence(example=1, layer=last))
        same(store.gather(f"base:{first}", [0, 2], -1), base.gather(first, [0, 2], -1))
    made = actshard.open(actshard.convert(both, tmp_path / "both", "zarr", verify=True).path)
    assert made.layers == both.layers
    assert made.read_columns(["text"])["text"].to_pylist() == base.table["text"].to_pylist()
    for i in range(len(base)):
        same(made.sequence(example=i, layer=f"chat:{first}"), chat.sequence(example=i, layer=first))
    assert actshard.verify(both, deep=True).ok
    batch = next(iter(both.sequences_stream([f"base:{first}", f"chat:{first}"], int(base.token_counts.max()))))
    assert batch.activations.shape[1:] == (2, base.d_model)
    same(both.stats(f"chat:{last}").mean, chat.stats(last).mean)
    chosen = pair.filter([2, 0]).as_store()
    same(chosen.sequence(example=0, layer=f"chat:{last}"), chat.sequence(example=2, layer=last))
    assert actshard.pair(base, base, compare=[]).as_store().layers[0] == f"0:{first}"


def test_a_pair_as_a_store_converts_some_tokens_and_joins(
    base: actshard.Store, chat: actshard.Store, tmp_path: Path
) -> None:
    ids = [list(range(count)) for count in base.token_counts.tolist()]
    for name in ("a", "b"):
        with actshard.create(tmp_path / name, "zarr", layers=[2], d_model=2) as writer:
            writer.append([np.full((1, len(x), 2), i, "f4") for i, x in enumerate(ids)], columns={"input_ids": ids})
    both = actshard.pair(tmp_path / "a", tmp_path / "b").as_store()
    assert both.parts == both.filter([1]).parts == ()
    for store, chosen in ((both, list(range(len(ids)))), (both.filter([2, 0]), [2, 0])):
        path = actshard.convert(store, tmp_path / f"{len(chosen)}", "zarr", tokens="last").path
        assert actshard.open(path).table["input_ids"].to_pylist() == [ids[i][-1:] for i in chosen]
    whole = actshard.pair({"x": actshard.concat([base, base]), "y": actshard.concat([chat, chat])}).as_store()
    layers = [f"y:{base.layers[0]}"]
    joined = actshard.concat([whole, whole], layers=layers)
    same(joined.gather(layers[0], [0, 3 * len(base)], 0), chat.gather(base.layers[0], [0, 0], 0))
    assert joined.parts[0].layers == whole.layers


def test_a_pair_is_normalized_by_the_statistics_of_its_layers(base: actshard.Store, chat: actshard.Store) -> None:
    pair, layer, other = actshard.pair(base, chat), base.layers[0], base.layers[1]
    each = [base.stats(layer), chat.stats(layer)]
    batch = next(iter(pair.stream(layer, 5, normalize=each, dtype="float64", shuffle=None)))
    for k, (store, stats) in enumerate(zip((base, chat), each, strict=True)):
        rows = store.gather(layer, batch.examples, batch.tokens, dtype="float64")
        np.testing.assert_allclose(batch.activations[:, k], (rows - stats.mean) * stats.inverse_std)
    with pytest.raises(
        actshard.ArgumentError, match=rf"statistics of layer {layer} of .*, found those of layer {other}"
    ):
        pair.stream(layer, 5, normalize=[base.stats(layer), chat.stats(other)])
