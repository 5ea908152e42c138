"""``actshard.concat``: a joined store equals the list of its parts' examples, in every read."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from conftest import GOLDEN, saev_dump
from pickle_files import item
from pickle_files import write as write_pickles
from served import served
from test_arrays import LAYERS, quietly, readable, same, stacked
from test_filtering import rows_of

SHUFFLES = ("window", "exact", None)


def check_streams(joined: actshard.Store, layer: int, expected: list[np.ndarray], dtype: Any) -> None:
    for shuffle in SHUFFLES:
        acts, examples, tokens = rows_of(joined.stream(layer, 5, shuffle=shuffle, tokens="all", dtype=dtype))
        same(acts, np.stack([expected[e][t] for e, t in zip(examples, tokens, strict=True)]))
        places = sorted(zip(examples.tolist(), tokens.tolist(), strict=True))
        assert places == [(e, t) for e, rows in enumerate(expected) for t in range(len(rows))]
        if shuffle is None:
            assert list(zip(examples.tolist(), tokens.tolist(), strict=True)) == places


@pytest.mark.parametrize(("store", "layer"), LAYERS)
def test_every_read_of_joined_golden_data_is_that_of_the_parts(store: actshard.Store, layer: int) -> None:
    n = len(store)
    numbers = [*range(n), *reversed(range(n)), *range(1, n, 2)]
    joined = actshard.concat(
        [store, store.filter(slice(None, None, -1)), store.filter(np.arange(1, n, 2)), store.filter([])]
    )
    dtype = None if readable(store) else "float64"
    every = stacked(store, layer, dtype)
    expected = [every[i] for i in numbers]
    assert (len(joined), joined.layers, joined.dtype) == (len(numbers), store.layers, store.dtype)
    assert joined.tokens_in(layer).tolist() == [len(x) for x in expected]
    assert joined.token_counts.tolist() == store.token_counts[numbers].tolist()
    picked = joined.filter(slice(None, None, 3))
    assert picked.token_counts.tolist() == store.token_counts[numbers[::3]].tolist()
    parts, examples = joined.origins()
    assert np.bincount(parts, minlength=4).tolist() == [n, n, len(range(1, n, 2)), 0]
    assert [joined.parts[p].origins is not None and e for p, e in zip(parts, examples, strict=True)] == [
        *range(n),
        *range(n),
        *range(len(range(1, n, 2))),
    ]
    theirs = store.table.take(numbers)
    assert repr(joined.table.select(theirs.column_names).to_pylist()) == repr(theirs.to_pylist())
    for name in ("labels", "content_lengths"):
        whole, cut = getattr(store, name), getattr(joined, name)
        assert (cut is None) == (whole is None)
        assert whole is None or np.array_equal(cut, whole[numbers])
    has = [i for i, x in enumerate(expected) if len(x)]
    if not has:
        return
    mixed = np.random.default_rng(0).permutation(has)
    for i in has:
        same(np.asarray(joined.sequence(i, layer, dtype=dtype)), expected[i])
        same(joined.gather(layer, i, -1, dtype=dtype), expected[i][-1:])
    same(joined.gather(layer, mixed, -1, dtype=dtype), np.stack([expected[i][-1] for i in mixed]))
    for found, i in zip(joined.sequences(mixed, layer, dtype=dtype), mixed, strict=True):
        same(found, expected[i])
    flat = np.concatenate(expected)
    same(joined.layer(layer, dtype=dtype).ragged().values, flat)
    if store.content_lengths is None:
        check_streams(joined, layer, expected, dtype)
        if len(has) == len(numbers):
            same(joined.last_tokens(layer, dtype=dtype), np.stack([x[-1] for x in expected]))
    if store.contents.has_logits:
        for whole, cut in zip(store.logits(numbers), joined.logits(), strict=True):
            same(cut, whole)
    for routed in store.contents.router_layers:
        same(joined.router(routed), store.router(routed, numbers))


@pytest.fixture(scope="module")
def source() -> actshard.Store:
    return quietly(GOLDEN / "lmprobe" / "fullseq_f32")


@pytest.fixture(scope="module")
def mixed(source: actshard.Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, actshard.Store]:
    """One dataset in four formats and three dtypes."""
    root = tmp_path_factory.mktemp("joined")
    made = {"lmprobe": source}
    for name, dtype, more in (
        ("pickle", "float32", {}), ("zarr", "float16", {"truncate": True}), ("saev", "float32", {"truncate": True}),
    ):  # fmt: skip
        actshard.convert(source, root / name, name, dtype=dtype, **more)
        made[name] = quietly(root / name)
    return made


@pytest.fixture(scope="module")
def joined(mixed: dict[str, actshard.Store]) -> actshard.Store:
    return actshard.concat(mixed, dtype="float32")


def oracle(mixed: dict[str, actshard.Store], layer: int, dtype: Any) -> list[np.ndarray]:
    return [np.asarray(rows).astype(dtype) for store in mixed.values() for rows in stacked(store, layer)]


def test_different_formats_and_dtypes_are_one_store(mixed: dict[str, actshard.Store], joined: actshard.Store) -> None:
    layer = joined.layers[0]
    for dtype in ("float32", "float64", "float16"):
        expected = oracle(mixed, layer, dtype)
        check_streams(joined, layer, expected, dtype)
        same(joined.layer(layer, dtype=dtype).ragged().values, np.concatenate(expected))
    check_streams(joined, layer, oracle(mixed, layer, "float32"), None)
    flat = np.concatenate(oracle(mixed, layer, "float64"))
    stats = joined.stats(layer)
    np.testing.assert_allclose(stats.mean, flat.mean(0), rtol=1e-9, atol=1e-12)
    assert stats.max.tolist() == flat.max(0).tolist()
    ends = np.cumsum([len(s) for s in mixed.values()])
    train, test = joined.split(test=1, by="source")
    assert {len(train), len(test)} & set(map(len, mixed.values()))
    part = joined.filter(pc.field("source") == "zarr")
    assert part.chosen.tolist() == list(range(ends[1], ends[2]))
    assert set(part.origins()[0].tolist()) == {2}
    assert set(part.table["source"].to_pylist()) == {"zarr"}
    both = joined.stream("all", 7, shuffle="window", dtype="float32")
    for batch in both:
        for k, name in enumerate(joined.layers):
            same(batch.activations[:, k], joined.gather(name, batch.examples, batch.tokens))


@settings(max_examples=60)
@given(data=st.data())
def test_a_join_is_a_concatenation(mixed: dict[str, actshard.Store], data: st.DataObject) -> None:
    stores = list(mixed.values())
    layer = stores[0].layers[-1]
    whole = [stacked(store, layer, "float64") for store in stores]

    def drawn(depth: int) -> tuple[actshard.Store, list[np.ndarray]]:
        kind = data.draw(st.sampled_from(["store", "filter", "concat"] if depth else ["store", "filter"]))
        if kind == "concat":
            parts = [drawn(depth - 1) for _ in range(data.draw(st.integers(1, 3)))]
            return actshard.concat([s for s, _ in parts], dtype="float64"), [x for _, rows in parts for x in rows]
        at = data.draw(st.integers(0, len(stores) - 1))
        store, rows = stores[at], whole[at]
        if kind == "filter":
            ids = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
            return store.filter(ids), [rows[i] for i in ids]
        return store, rows

    parts = [drawn(2) for _ in range(data.draw(st.integers(1, 3)))]
    made, expected = actshard.concat([s for s, _ in parts], dtype="float64"), [x for _, rows in parts for x in rows]
    assert len(made) == len(expected)
    assert made.token_counts.tolist() == [len(x) for x in expected]
    if not expected:
        return
    ids = np.array(data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=20)))
    same(made.gather(layer, ids, -1), np.stack([expected[i][-1] for i in ids]))
    out = np.empty((len(ids), made.d_model))
    assert made.gather(layer, ids, 0, out=out) is out
    same(out, np.stack([expected[i][0] for i in ids]))
    for found, i in zip(made.sequences(ids, layer), ids, strict=True):
        same(found, expected[i])
    copy = pickle.loads(pickle.dumps(made))
    assert copy.identity == made.identity
    same(copy.gather(layer, ids, -1), np.stack([expected[i][-1] for i in ids]))


def test_joins_are_flattened_and_told_apart(source: actshard.Store) -> None:
    part = source.filter([1, 2])
    flat = actshard.concat([actshard.concat([source, part]), part])
    assert [len(p) for p in flat.parts] == [len(source), 2, 2]
    assert flat.identity == actshard.concat([source, part, part]).identity
    assert flat.identity != actshard.concat([part, source, part]).identity
    assert len(set(flat.table["source"].to_pylist())) == 3
    assert source.parts == ()
    with pytest.raises(actshard.NotStoredError):
        source.origins()
    named = actshard.concat({"base": source, "chat": part})
    assert named.table["source"].to_pylist() == ["base"] * len(source) + ["chat"] * 2
    again = actshard.concat({"x": named})
    assert again.column_names if hasattr(again, "column_names") else "actshard:source" in again.table.column_names
    assert f"{len(source) + 2} examples" in repr(named)
    assert named.info()["examples"] == len(source) + 2


def test_what_cannot_be_joined_is_refused(
    mixed: dict[str, actshard.Store], source: actshard.Store, tmp_path: Path
) -> None:
    with pytest.raises(actshard.DtypeError, match="Pass dtype="):
        actshard.concat(mixed)
    with pytest.raises(actshard.ArgumentError, match="at least one"):
        actshard.concat([])
    for wrong in (source, "abc", 3):
        with pytest.raises(TypeError, match="several stores"):
            actshard.concat(wrong)
    actshard.convert(source, tmp_path / "one", "lmprobe", layers=source.layers[1:])
    fewer = quietly(tmp_path / "one")
    with pytest.raises(actshard.ArgumentError, match=r"equal layers.*Pass layers="):
        actshard.concat([source, fewer])
    both = actshard.concat([source, fewer], layers=fewer.layers)
    assert both.layers == fewer.layers
    layer = fewer.layers[0]
    same(both.gather(layer, [len(source), 0], 0), source.gather(layer, [0, 0], 0))
    with pytest.raises(actshard.LayerError):
        actshard.concat([source, fewer], layers=source.layers)
    with actshard.create(tmp_path / "narrow", "zarr", layers=source.layers, d_model=2) as writer:
        writer.append(np.zeros((1, len(source.layers), 3, 2), np.float32))
    with pytest.raises(actshard.ArgumentError, match="d_model"):
        actshard.concat([source, tmp_path / "narrow"])
    with pytest.raises(actshard.OutOfRangeError, match="the dataset has"):
        both.gather(layer, len(both), 0)
    with pytest.raises(actshard.OutOfRangeError, match=r"numbered as in part 1, whose first is"):
        both.gather(layer, len(source), 10_000)
    closed = quietly(tmp_path / "one")
    closed.close()
    with pytest.raises(actshard.ClosedError):
        actshard.concat([source, closed], layers=fewer.layers)


def test_overflows_of_a_narrower_join_are_told(tmp_path: Path) -> None:
    big = np.full((1, 1, 4, 3), 1e6, np.float32)
    for name in ("a", "b"):
        with actshard.create(tmp_path / name, "zarr", layers=[0], d_model=3) as writer:
            writer.append(big)
    joined = actshard.concat([tmp_path / "a", tmp_path / "b"], dtype="float16")
    with pytest.warns(actshard.OverflowWarning):
        assert np.isinf(joined.gather(0, [0, 1], 0)).all()
    for shuffle in SHUFFLES:
        with pytest.warns(actshard.OverflowWarning):
            list(joined.stream(0, 2, shuffle=shuffle))
    assert joined.stats(0).max.tolist() == [1e6] * 3


def test_streams_of_a_join_resume_and_are_shared_by_ranks_and_workers(joined: actshard.Store) -> None:
    layer = joined.layers[0]
    for shuffle in SHUFFLES:
        stream = joined.stream(layer, 4, shuffle=shuffle, seed=3)
        whole = [b.examples.tolist() for b in stream]
        stream = joined.stream(layer, 4, shuffle=shuffle, seed=3)
        for i, _ in enumerate(stream):
            if i == 3:
                break
        state = pickle.loads(pickle.dumps(joined)).stream(layer, 4, shuffle=shuffle, seed=3)
        state.load_state_dict(stream.state_dict())
        assert [b.examples.tolist() for b in state] == whole[4:]
        seen = [
            (e, t)
            for rank in range(2)
            for b in joined.stream(layer, 4, shuffle=shuffle, seed=3, rank=rank, world_size=2)
            for e, t in zip(b.examples.tolist(), b.tokens.tolist(), strict=True)
        ]
        assert len(set(seen)) == len(seen) == stream.num_rows


def _read(store: actshard.Store, layer: int) -> list[bytes]:
    return [x.tobytes() for x in store.sequences(range(len(store)), layer)]


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_children_read_a_join(joined: actshard.Store, how: str) -> None:
    layer = joined.layers[0]
    expected = _read(joined, layer)
    with multiprocessing.get_context(how).Pool(1) as pool:
        assert pool.apply(_read, (joined, layer)) == expected


def test_remote_and_local_parts_are_read_together(source: actshard.Store, tmp_path: Path) -> None:
    shutil.copytree(source.path, tmp_path / "bucket" / "data")
    layer = source.layers[0]
    with served(tmp_path) as server:
        far = quietly("s3://bucket/data", storage_options=server.options)
        near = actshard.concat([source, source, source])
        made = pickle.loads(pickle.dumps(actshard.concat([far, source, far])))
        ids = np.random.default_rng(1).permutation(len(made))
        same(made.gather(layer, ids, -1), near.gather(layer, ids, -1))
        same(made.layer(layer).ragged().values, near.layer(layer).ragged().values)
        expected = stacked(near, layer)
        check_streams(made, layer, expected, None)


def test_a_join_is_converted_and_verified(
    mixed: dict[str, actshard.Store], joined: actshard.Store, tmp_path: Path
) -> None:
    expected = {layer: oracle(mixed, layer, "float32") for layer in joined.layers}
    with pytest.raises(actshard.ArgumentError, match=r"text_preview.*columns="):
        actshard.convert(joined, tmp_path / "refused", "pickle")
    for name, columns in (("lmprobe", None), ("pickle", ["text", "label", "source"])):
        made = actshard.convert(joined, tmp_path / name, name, columns=columns, verify=True)
        assert made.examples == len(joined)
        store = quietly(tmp_path / name)
        for layer, rows in expected.items():
            same(store.layer(layer).ragged().values, np.concatenate(rows))
        assert store.table["source"].to_pylist() == joined.table["source"].to_pylist()
    some = joined.filter(slice(3, None, 5))
    actshard.convert(some, tmp_path / "some", "pickle", columns=["source"], verify=True)
    layer = joined.layers[0]
    same(quietly(tmp_path / "some").layer(layer).ragged().values, np.concatenate(expected[layer][3::5]))
    report = actshard.verify(joined, deep=True)
    assert report.ok
    assert report.checked["examples"] == len(joined)


def test_tables_are_united_and_conflicts_are_named(source: actshard.Store, tmp_path: Path) -> None:
    rows = np.zeros((1, 1, 2, 3), np.float32)
    for name, value in (("a", 1), ("b", "x"), ("c", None)):
        with actshard.create(tmp_path / name, "pickle", layers=[0], d_model=3) as writer:
            writer.append(rows, columns={"note": [value], f"only_{name}": [name]})
    fits = actshard.concat([tmp_path / "a", tmp_path / "c"])
    assert fits.table["note"].to_pylist() == [1, None]
    assert fits.table["only_a"].to_pylist() == ["a", None]
    assert fits.table["source"].to_pylist() == ["a", "c"]
    clash = actshard.concat([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(actshard.ArgumentError, match=r"'note'.*int64 in a and string in b"):
        _ = clash.table
    assert clash.read_columns(["only_a"])["only_a"].to_pylist() == ["a", None]
    assert isinstance(fits.table, pa.Table)
    with pytest.raises(actshard.NotStoredError):
        fits.read_columns(["absent"])


def test_open_takes_a_list_of_any_formats(mixed: dict[str, actshard.Store]) -> None:
    made = quietly([mixed["lmprobe"].path, mixed["pickle"].path])
    assert made.format == "concat"
    assert [p.format for p in made.parts] == ["lmprobe", "pickle"]
    layer = made.layers[0]
    expected = [*stacked(mixed["lmprobe"], layer), *stacked(mixed["pickle"], layer)]
    same(made.layer(layer).ragged().values, np.concatenate(expected))
    assert quietly([mixed["pickle"].path]).format == "pickle"


def test_special_tokens_of_a_join_move_lengths_and_labels(source: actshard.Store, tmp_path: Path) -> None:
    """A part's content lengths and patch labels count from its own first content token."""
    actshard.convert(source, tmp_path / "padded", "saev", pad=True)
    padded, layer = quietly(tmp_path / "padded"), source.layers[0]
    counts = [*source.token_counts.tolist()] * 2
    for special in (0, 1, 3):
        joined = actshard.concat([padded, source], special_tokens=special)
        expected = [(e, k) for e, n in enumerate(counts) for k in range(special, n)]
        for shuffle in SHUFFLES:
            acts, examples, tokens = rows_of(joined.stream(layer, 7, shuffle=shuffle))
            assert sorted(zip(examples.tolist(), tokens.tolist(), strict=True)) == expected
            same(acts, joined.gather(layer, examples, tokens))
    labelled = quietly(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"))
    assert labelled.special_tokens == 1
    layer = labelled.layers[0]
    whole = next(iter(labelled.stream(layer, 10_000)))
    both = next(iter(actshard.concat([labelled]).stream(layer, 10_000)))
    assert whole.labels is not None
    assert both.labels.tolist() == whole.labels.tolist()
    shifted = actshard.concat([labelled, labelled], special_tokens=0)
    assert shifted.labels is None
    assert all(batch.labels is None for batch in shifted.stream(layer, 9, tokens="all"))
    with pytest.raises(actshard.NotStoredError, match="number of patches or of special tokens"):
        shifted.stream(layer, 9, ignore_labels=[0])


def test_a_join_of_joins_keeps_their_options_and_names(source: actshard.Store) -> None:
    labelled = quietly(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"))
    one, other = labelled.layers[:2]
    inner = actshard.concat([labelled, labelled], layers=[one], special_tokens=0)
    again = actshard.concat([inner, inner], layers=[one])
    assert (again.special_tokens, again.stream(one, 9).num_rows) == (0, 2 * int(inner.token_counts.sum()))
    with pytest.raises(actshard.ArgumentError, match="special tokens, found 0"):
        actshard.concat([inner, labelled], layers=[one])
    with pytest.raises(actshard.LayerError):
        actshard.concat([inner, labelled], layers=[other], special_tokens=0)
    named = actshard.concat([actshard.concat({"wiki": source, "code": source.filter([1])}), source.filter([2])])
    sources = named.table["source"].to_pylist()
    assert sources[: len(source) + 1] == ["wiki"] * len(source) + ["code"]
    assert len(set(sources)) == len(named.parts) == 3
    assert pickle.loads(pickle.dumps(named)).table["source"].to_pylist() == sources
    twice = actshard.concat([actshard.concat({"a": source}), actshard.concat({"a": source.filter([0])})])
    assert len(set(twice.table["source"].to_pylist())) == 2
    with pytest.raises(actshard.ArgumentError, match="different names"):
        actshard.concat({"1": source, 1: source})
    filtered = actshard.concat({"x": source, "y": source.filter([0])}).filter([0, len(source)])
    for depth in range(1, 4):
        filtered = actshard.concat({f"depth {depth}": filtered})
        names = list(filtered.contents.column_names)
        assert len(set(names)) == len(names)
        assert filtered.read_columns(["source"])["source"].to_pylist() == ["x", "y"]
        assert filtered.table[names[-1]].to_pylist() == [f"depth {depth}"] * 2
        filtered = filtered.filter([0, 1])
    closed = actshard.concat([source, source])
    closed.close()
    with pytest.raises(actshard.ClosedError):
        actshard.concat([closed, source])


def test_texts_of_a_join_have_one_name(tmp_path: Path) -> None:
    """Formats call them "text" or "prompt"; both names read the texts of all parts."""
    rows = np.ones((2, 1, 2, 3), np.float32)
    for name, format, column in (("a", "zarr", "prompt"), ("b", "lmprobe", "text"), ("c", "lmprobe", "")):
        with actshard.create(tmp_path / name, format, layers=[0], d_model=3) as writer:
            writer.append(rows, columns={column: [f"{name}0", f"{name}1"]} if column else {})
    a, b, c = (quietly(tmp_path / name) for name in "abc")
    texts = ["a0", "a1", "b0", "b1"]
    for parts, name in (([a, b], "prompt"), ([b, a], "text")):
        joined = actshard.concat(parts)
        assert [x for x in joined.contents.column_names if x in ("text", "prompt")] == [name]
        for asked in ("text", "prompt"):
            assert sorted(joined.read_columns([asked])[asked].to_pylist()) == texts
        actshard.convert(joined, tmp_path / f"made_{name}", "lmprobe", verify=True)
        assert sorted(quietly(tmp_path / f"made_{name}").table["text"].to_pylist()) == texts
    assert "text" in c.table.column_names  # made up by the writer
    actshard.convert(actshard.concat([c, a]), tmp_path / "filled", "lmprobe", verify=True)
    assert quietly(tmp_path / "filled").table["text"].to_pylist()[2:] == ["a0", "a1"]


def test_columns_that_are_read_only_if_named_are_read_from_a_join(source: actshard.Store, tmp_path: Path) -> None:
    actshard.convert(source, tmp_path / "other", "pickle", columns=["label"])
    name = "token_shard_offsets"
    assert name not in source.contents.column_names
    found = actshard.concat([tmp_path / "other", source]).read_columns([name])[name].to_pylist()
    assert found == [None] * len(source) + source.read_columns([name])[name].to_pylist()


def test_lists_with_a_value_per_token_are_cut_in_conversions_of_joins(tmp_path: Path) -> None:
    """Each part's own declaration counts: another part may have a plain list of that name."""
    draft = quietly(GOLDEN / "draft" / "speculators_bf16")
    lengths = draft.token_counts.tolist()
    with actshard.create(
        tmp_path / "plain", "zarr", layers=draft.layers, d_model=draft.d_model, dtype="float16"
    ) as writer:
        writer.append(np.ones((1, len(draft.layers), 2, draft.d_model), np.float16), columns={"input_ids": [[7, 8, 9]]})
    joined = actshard.concat([draft.filter([0, 2]), tmp_path / "plain", draft], dtype="float32")
    layers = {layer: i for i, layer in enumerate(joined.layers)}
    actshard.convert(
        joined, tmp_path / "last", "pickle", layers=layers, tokens="last", columns=["input_ids", "loss_mask"]
    )
    whole, last = draft.table["input_ids"].to_pylist(), quietly(tmp_path / "last").table
    assert [len(x) for x in whole] == lengths
    assert last["input_ids"].to_pylist() == [whole[0][-1:], whole[2][-1:], [7, 8, 9], *(x[-1:] for x in whole)]
    masks = draft.table["loss_mask"].to_pylist()
    assert last["loss_mask"].to_pylist() == [masks[0][-1:], masks[2][-1:], None, *(x[-1:] for x in masks)]


@pytest.mark.parametrize("format", ["lmprobe", "zarr", "pickle"])
def test_texts_and_labels_of_filtered_parts_are_converted(format: str, tmp_path: Path) -> None:
    """As the parts of splits are joined."""
    columns = {"text": ["x", "y", "z", "v"], "label": [1, 2, 3, 4]}
    with actshard.create(tmp_path / "whole", "lmprobe", layers=[0], d_model=3) as writer:
        writer.append(np.ones((4, 1, 2, 3), np.float32), columns=columns)
    whole = quietly(tmp_path / "whole")
    train, test = whole.split(test=0.5, seed=1)
    joined = actshard.concat([train, test])
    actshard.convert(joined, tmp_path / "made", format, verify=True)
    made = quietly(tmp_path / "made").table
    text = next(name for name in ("text", "prompt", "text_preview") if name in made.column_names)
    order = [*train.chosen.tolist(), *test.chosen.tolist()]
    assert made[text].to_pylist() == [columns["text"][i] for i in order]
    assert made["label"].to_pylist() == [columns["label"][i] for i in order]


def test_a_conversion_reads_the_columns_of_a_part_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts with many shards that are decoded whole: not all columns again for each shard."""
    path = GOLDEN / "pickle" / "mixed_compression"
    a, b = quietly(path), quietly(path)
    joined = actshard.concat({"a": a, "b": b}, layers=[27])
    assert joined.contents.units == (0, 2, 4, 5, 7, 9, 10)
    texts = a.table["text_preview"].to_pylist()
    reads = []
    for store in (a, b):
        read = store.read_columns
        monkeypatch.setattr(store, "read_columns", lambda names, read=read: reads.append(1) or read(names))
    actshard.convert(joined, tmp_path / "made", "zarr", columns=["text_preview", "source"])
    assert len(reads) <= 2 * 3  # for the types, the check of columns, and the conversion
    made = quietly(tmp_path / "made").table
    assert made["prompt"].to_pylist() == texts * 2
    assert made["source"].to_pylist() == ["a"] * 5 + ["b"] * 5


def test_a_join_of_some_layers_converts_if_its_parts_name_the_others_differently(tmp_path: Path) -> None:
    """Pickle shards store the layers of each example, which are numbers; a draft model's last layer has a name."""
    rows = np.ones((2, 2, 3), np.float16)
    with actshard.create(tmp_path / "draft", "deepspec", layers=[2, 5], d_model=3, dtype="bfloat16", last=5) as writer:
        writer.append([rows], columns={"input_ids": [[1, 2]]})
    with actshard.create(tmp_path / "numbers", "pickle", layers=[2, 5], d_model=3, dtype="float16") as writer:
        writer.append([rows, 2 * rows])
    joined = actshard.concat([tmp_path / "draft", tmp_path / "numbers"], layers=[2], dtype="float32")
    result = actshard.open(actshard.convert(joined, tmp_path / "result", "zarr").path)
    assert result.layers == (2,)
    assert result.gather(2, [0, 1, 2], 1)[:, 0].tolist() == [1, 1, 2]


def test_tokens_of_examples_without_a_joined_layer_are_not_counted(tmp_path: Path) -> None:
    """An example may lack a layer. The number of its tokens is that of the layers that a join or a pair has."""
    rows = [np.full((tokens, 3), tokens, np.float32) for tokens in (4, 2, 5)]
    shard = {"layer_2": [item(0, rows[0]), item(2, rows[2])], "layer_5": [item(i, x) for i, x in enumerate(rows)]}
    path = write_pickles(tmp_path / "pickle", [shard])
    whole = quietly(path)
    numbers = whole.table["sample_idx"].to_pylist()
    assert whole.token_counts.tolist() == [len(rows[i]) for i in numbers]
    lacks = numbers.index(1)
    joined = actshard.concat([path, path], layers=[2])
    pair = actshard.pair({"a": whole, "b": whole}, layers=[2], compare=[]).as_store()
    for store in (joined, joined.filter(range(5, -1, -1)), pair, pair.filter([2, 1, 0])):
        layer = store.layers[0]
        origin = np.arange(len(store)) if store.chosen is None else store.chosen
        expected = [0 if i % 3 == lacks else len(rows[numbers[i % 3]]) for i in origin.tolist()]
        assert store.tokens_of(np.arange(len(store))).tolist() == expected
        assert store.token_counts.tolist() == store.tokens_in(layer).tolist() == expected
        assert sum(len(batch) for batch in store.stream(layer, 100)) == sum(expected)
