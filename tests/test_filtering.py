"""``store.filter`` and ``store.split``: a filtered store equals a list of its examples, in every read."""

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
from actshard.formats.report import Report
from conftest import GOLDEN, saev_dump
from served import served
from test_arrays import LAYERS, quietly, readable, same, stacked


def rows_of(stream: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batches = list(stream)
    return tuple(np.concatenate([getattr(b, n) for b in batches]) for n in ("activations", "examples", "tokens"))  # type: ignore[return-value]


@pytest.mark.parametrize(("store", "layer"), LAYERS)
@pytest.mark.parametrize("kind", ["listed", "range", "reversed"])
def test_every_read_of_a_filtered_golden_dataset_is_that_of_its_examples(
    store: actshard.Store, layer: int, kind: str
) -> None:
    n = len(store)
    listed = np.random.default_rng(3).integers(0, n, n + 3)
    numbers = {"listed": listed, "range": np.arange(1, n, 2), "reversed": np.arange(n)[::-1]}[kind]
    part = store.filter({"listed": listed, "range": slice(1, None, 2), "reversed": slice(None, None, -1)}[kind])
    dtype = None if readable(store) else "float64"
    every = stacked(store, layer, dtype)
    expected = [every[i] for i in numbers]
    assert part.chosen is not None
    assert part.chosen.tolist() == numbers.tolist()
    assert (len(part), part.layers, part.dtype, part.format) == (len(numbers), store.layers, store.dtype, store.format)
    assert part.tokens_in(layer).tolist() == [len(x) for x in expected]
    assert part.token_counts.tolist() == store.token_counts[numbers].tolist()
    assert repr(part.table.to_pylist()) == repr(store.table.take(numbers).to_pylist())  # NaN equals NaN
    for name in ("labels", "content_lengths"):
        whole, cut = getattr(store, name), getattr(part, name)
        assert (cut is None) == (whole is None)
        assert whole is None or np.array_equal(cut, whole[numbers])
    has = [i for i, x in enumerate(expected) if len(x)]
    if not has:
        return
    for i in has:
        same(np.asarray(part.sequence(i, layer, dtype=dtype)), expected[i])
    same(part.gather(layer, has, -1, dtype=dtype), np.stack([expected[i][-1] for i in has]))
    for found, i in zip(part.sequences(has, layer, dtype=dtype), has, strict=True):
        same(found, expected[i])
    flat = np.concatenate(expected)
    same(part.layer(layer, dtype=dtype).ragged().values, flat)
    if store.content_lengths is None:
        if len(has) == len(part):
            same(part.last_tokens(layer, dtype=dtype), np.stack([x[-1] for x in expected]))
        acts, examples, tokens = rows_of(part.stream(layer, 5, tokens="all", dtype=dtype))
        same(acts, flat)
        assert examples.tolist() == [i for i, x in enumerate(expected) for _ in x]
        for shuffle in ("exact", "window"):
            acts, examples, tokens = rows_of(part.stream(layer, 5, shuffle=shuffle, tokens="all", dtype=dtype))
            for row, e, t in zip(acts, examples, tokens, strict=True):
                same(row, expected[e][t])
            assert len(acts) == len(flat)
    if store.contents.has_logits:
        for whole, cut in zip(store.logits(numbers), part.logits(), strict=True):
            same(cut, whole)
    for routed in store.contents.router_layers:
        same(part.router(routed), store.router(routed, numbers))


@pytest.fixture(scope="module")
def store() -> actshard.Store:
    return quietly(GOLDEN / "lmprobe" / "fullseq_f32")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no example was chosen")
@settings(max_examples=150)
@given(data=st.data())
def test_a_choice_of_a_choice_is_a_choice_of_the_dataset(store: actshard.Store, data: st.DataObject) -> None:
    part, numbers = store, np.arange(len(store))
    for _ in range(data.draw(st.integers(1, 4))):
        n = len(numbers)
        bound, step = st.none() | st.integers(-n - 2, n + 2), st.none() | st.sampled_from([-2, -1, 1, 2])
        mask = st.lists(st.booleans(), min_size=n, max_size=n).map(lambda flags: np.array(flags, bool))
        ids = st.lists(st.integers(-n, n - 1), max_size=9).map(lambda x: np.array(x, np.int64)) if n else mask
        chosen = data.draw(mask | ids | st.builds(slice, bound, bound, step))
        part, numbers = part.filter(chosen), numbers[chosen]
    assert part.chosen is not None
    assert part.chosen.tolist() == numbers.tolist()
    layer = store.layers[0]
    some = numbers[store.token_counts[numbers] > 0]
    same(part.gather(layer, np.arange(len(numbers)), 0), store.gather(layer, some, 0))
    copy = pickle.loads(pickle.dumps(part))
    assert copy.chosen.tolist() == numbers.tolist()
    assert copy.identity == part.identity


def test_expressions_functions_and_columns_choose_examples(store: actshard.Store) -> None:
    labels = store.table["label"].to_numpy()
    wanted = np.flatnonzero(labels == labels[0]).tolist()
    for chosen in (
        pc.field("label") == labels[0].item(),
        lambda table: table["label"].to_numpy() == labels[0],
        lambda table: pc.equal(table["label"], labels[0].item()),
        pc.equal(store.table["label"], labels[0].item()),
        (labels == labels[0]).tolist(),
        wanted,
        pa.array(wanted),
    ):
        assert store.filter(chosen).chosen.tolist() == wanted
    assert store.filter(range(1, 4)).chosen.tolist() == [1, 2, 3]
    assert len(store.filter([])) == 0
    assert store.filter([]).layer(store.layers[0]).rows().shape == (0, store.d_model)


@pytest.mark.parametrize(
    ("chosen", "error", "match"),
    [
        (pc.field("lable") == 1, ValueError, "The columns are: .*label"),
        (3, TypeError, r"\[3\] keeps one"),
        (True, TypeError, "to_numpy"),
        (None, TypeError, "found None"),
        ([0, 10_000], IndexError, "out of range"),
        (np.ones(3, bool), ValueError, "flags"),
        ([[0]], ValueError, "one dimension"),
        ([0.5], ValueError, "integers"),
        ("label", ValueError, "must evaluate to bool"),
        ("lable == 1", ValueError, "do you mean 'label'"),
        (lambda table: None, ValueError, "function"),
        (slice("a"), TypeError, "slice: expected an integer"),
        (slice(True), TypeError, "slice: expected an integer"),
        (slice(0, 9, 0), ValueError, "step"),
    ],
)
def test_what_chooses_no_examples_is_refused(
    store: actshard.Store, chosen: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match) as caught:
        store.filter(chosen)
    assert isinstance(caught.value, actshard.ActshardError)


def test_errors_name_the_numbering(store: actshard.Store) -> None:
    part, layer = store.filter([2, 3]), store.layers[0]
    with pytest.raises(actshard.OutOfRangeError, match="has 2 examples"):
        part.gather(layer, 2, 0)
    with pytest.raises(actshard.OutOfRangeError, match=r"example 3 .*numbered as in the whole dataset"):
        part.gather(layer, 1, 10_000)
    with pytest.raises(actshard.OutOfRangeError):
        part.sequence(2, layer)
    assert repr(part).startswith("<actshard.Store lmprobe")
    assert f"2 of {len(store)} examples" in repr(part)
    assert part.info()["examples"] == 2


def test_a_range_costs_nothing_and_a_list_8_bytes_an_example(store: actshard.Store) -> None:
    whole, cut, listed = (
        len(pickle.dumps(s)) for s in (store, store.filter(slice(1, 9)), store.filter([3, 1, 2] * 1000))
    )
    assert cut - whole < 250
    assert listed - whole < 24_300
    assert isinstance(store.filter(np.arange(2, 9, 3)).contents.chosen.numbers, range)


def test_identities_tell_choices_apart(store: actshard.Store) -> None:
    n = len(store)
    assert store.filter(slice(None)).identity == store.identity
    mask = np.arange(n) < n - 2
    assert store.filter(mask).identity == store.filter(slice(0, n - 2)).identity == store.filter(range(n - 2)).identity
    others = [[0, 2, 1], [0, 1, 1], [0, 1, 2], [1, 2, 3], [2, 1, 0]]
    assert len({store.filter(x).identity for x in others}) == len(others)
    stream = store.filter([0, 2, 1]).stream(store.layers[0], 2, tokens="last")
    state = stream.state_dict()
    with pytest.raises(actshard.ActshardError, match="dataset"):
        store.filter([0, 1, 1]).stream(store.layers[0], 2, tokens="last").load_state_dict(state)
    store.filter([0, 2, 1]).stream(store.layers[0], 2, tokens="last").load_state_dict(state)


def _read(part: actshard.Store, layer: int) -> list[bytes]:
    return [x.tobytes() for x in part.sequences(range(len(part)), layer)]


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_children_read_a_filtered_store(store: actshard.Store, how: str) -> None:
    part, layer = store.filter([3, 1, 1]), store.layers[0]
    expected = _read(part, layer)
    with multiprocessing.get_context(how).Pool(1) as pool:
        assert pool.apply(_read, (part, layer)) == expected


def test_views_and_statistics_of_a_part() -> None:
    saev = quietly(saev_dump(GOLDEN / "saev" / "v21_nocls_oneshard"), io="mmap")
    layer = saev.layers[0]
    part = saev.filter([2, 0])
    assert not part.sequence(0, layer).flags.writeable
    flat = np.concatenate(stacked(part, layer)).astype(np.float64)
    found = part.stats(layer)
    assert found.rows == len(flat)
    assert np.allclose(found.mean, flat.mean(axis=0))


@pytest.mark.parametrize("format", ["lmprobe", "zarr", "pickle"])
def test_a_conversion_of_a_part_equals_one_of_its_examples(store: actshard.Store, format: str, tmp_path: Path) -> None:
    numbers = [5, 1, 2, 4]
    part = store.filter([5, 0, 1, 2, 3, 4]).filter([0, 2, 3, 5])
    actshard.convert(part, tmp_path / "part", format, verify=True)
    actshard.convert(store, tmp_path / "whole", format, examples=numbers)
    ours, theirs = quietly(tmp_path / "part"), quietly(tmp_path / "whole")
    assert ours.identity == theirs.identity
    assert ours.table.equals(theirs.table)
    for layer in store.layers:
        same(ours.layer(layer).ragged().values, part.layer(layer).ragged().values)
    actshard.convert(part, tmp_path / "some", format, examples=[3, 0])
    same(quietly(tmp_path / "some").sequence(0, store.layers[0]), store.sequence(4, store.layers[0]))


def test_an_empty_part_is_no_dataset(store: actshard.Store, tmp_path: Path) -> None:
    with pytest.raises(actshard.ArgumentError, match="at least one"):
        actshard.convert(store.filter([]), tmp_path / "none", "zarr")
    with pytest.warns(actshard.ActshardWarning, match="the stream has no rows. No example was chosen"):
        assert list(store.filter([]).stream(store.layers[0], 4)) == []


def test_labels_of_saev_are_cut() -> None:
    whole = quietly(saev_dump(GOLDEN / "saev" / "v21_cls_labels_multishard"))
    part = whole.filter([4, 2])
    assert np.array_equal(part.labels, whole.labels[[4, 2]])
    batch = next(iter(part.stream(whole.layers[0], 3)))
    assert np.array_equal(batch.labels, part.labels[batch.examples, batch.tokens - 1])
    none = whole.filter([])
    for tokens in ("content", "all", "last"):
        with pytest.warns(actshard.ActshardWarning, match="No example was chosen"):
            assert list(none.stream(whole.layers[0], 3, tokens=tokens, ignore_labels=[0])) == []
        assert none.stats(whole.layers[0], tokens=tokens, ignore_labels=[0]).rows == 0


def test_verify_takes_a_part_and_names_its_examples_as_the_dataset_does(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(6, 1, 4, 8)).astype(np.float32)
    rows[4, 0, 1] = np.nan
    with actshard.create(tmp_path / "data", "lmprobe", layers=[0], d_model=8) as writer:
        writer.append(rows, columns={"text": list("abcdef")})
    store = quietly(tmp_path / "data")
    report = actshard.verify(store.filter([5, 4, 3]), deep=True)
    assert any("(4, 1)" in str(f.detail if hasattr(f, "detail") else f) for f in report.findings)
    clean = actshard.verify(store.filter([0, 1]), deep=True)
    assert clean.ok
    assert not any(f.code == "nan" for f in clean.findings)


def test_verify_does_not_call_sound_data_broken_because_a_store_was_closed() -> None:
    path = GOLDEN / "lmprobe" / "fullseq_f32"
    with quietly(path) as whole:
        part = whole.filter([0, 1])
    for closed in (part, whole):
        with pytest.raises(actshard.ClosedError):
            actshard.verify(closed, deep=True)
        assert actshard.verify(closed).ok, "only the files are checked"


@pytest.mark.parametrize("error", [actshard.ClosedError, actshard.NoMemoryError, actshard.InterruptedReadError])
def test_errors_that_say_nothing_about_the_files_are_no_findings(tmp_path: Path, error: type[Exception]) -> None:
    report = Report(tmp_path, None, True)

    def fail() -> None:
        raise error("stop")

    with pytest.raises(error):
        report.faults.parse(tmp_path, fail)
    with pytest.raises(error), report.noting(tmp_path):
        fail()
    assert report.findings == []


def test_parts_behind_a_url_read_what_local_ones_read(store: actshard.Store, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "bucket" / "data")
    with served(tmp_path) as server:
        far = quietly("s3://bucket/data", storage_options=server.options)
        for chosen in ([3, 0, 0], slice(4, None, -2), pc.field("label") == 1):
            near = store.filter(chosen)
            part = pickle.loads(pickle.dumps(far.filter(chosen)))
            same(part.layer(store.layers[0]).ragged().values, near.layer(store.layers[0]).ragged().values)


def test_a_split_is_disjoint_whole_and_the_same_everywhere(store: actshard.Store) -> None:
    n = len(store)
    train, test = store.split(test=0.25, seed=1)
    assert sorted([*train.chosen, *test.chosen]) == list(range(n))
    assert len(test) == round(n * 0.25)
    assert np.all(np.diff(train.chosen) > 0)
    assert store.split(test=3)[1].chosen.size == 3
    assert {tuple(store.split(test=3, seed=s)[1].chosen.tolist()) for s in range(20)} != {()}
    assert len({tuple(store.split(test=3, seed=s)[1].chosen.tolist()) for s in range(20)}) > 5


def test_a_split_never_changes(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "data", "lmprobe", layers=[0], d_model=2) as writer:
        columns = {"text": [f"t{i}" for i in range(40)], "verb": [f"verb {i % 10}" for i in range(40)]}
        writer.append(np.zeros((40, 1, 2), np.float32), columns=columns)
    store = quietly(tmp_path / "data")
    assert store.split(test=0.2, seed=0)[1].chosen.tolist() == ALONE
    train, test = store.split(test=0.2, by="verb", seed=0)
    assert test.chosen.tolist() == GROUPED
    assert not set(train.table["verb"].to_pylist()) & set(test.table["verb"].to_pylist())
    backwards = store.filter(slice(None, None, -1)).split(test=0.2, by="verb", seed=0)[1]
    assert set(backwards.table["verb"].to_pylist()) == set(test.table["verb"].to_pylist())
    given = store.split(test=0.2, by=columns["verb"], seed=0)[1]
    assert given.chosen.tolist() == GROUPED
    assert len(store.split(test=0.001, by="verb")[1]) == 4


ALONE = [2, 7, 16, 18, 22, 23, 30, 38]
GROUPED = [7, 8, 17, 18, 27, 28, 37, 38]


@settings(max_examples=100)
@given(
    keys=st.lists(st.sampled_from([None, 1, 2, 3, 4]), min_size=8, max_size=8),
    share=st.floats(0.05, 0.95),
    seed=st.integers(0, 9),
)
def test_groups_never_straddle(store: actshard.Store, keys: list[Any], share: float, seed: int) -> None:
    part = store.filter(np.arange(8) % len(store))
    if len(set(keys)) < 2:
        with pytest.raises(actshard.ArgumentError, match="two groups"):
            part.split(test=share, by=keys, seed=seed)
        return
    train, test = (x.contents.chosen.array() for x in part.split(test=share, by=keys, seed=seed))
    assert len(train) + len(test) == 8
    assert len(train)
    assert len(test)
    if len(store) >= 8:
        assert not {keys[i] for i in train} & {keys[i] for i in test}


@pytest.mark.parametrize("share", [0, 0.0, 1.0, True, -0.5, 10_000, "half", float("nan")])
def test_a_share_that_is_none_is_refused(store: actshard.Store, share: Any) -> None:
    with pytest.raises(actshard.ArgumentError, match="test: expected"):
        store.split(test=share)


def test_groups_are_values_however_a_column_encodes_them(store: actshard.Store) -> None:
    part = store.filter(slice(0, 6))
    plain = ["a", "b", None, "a", "c", None]
    twice = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2, 3, None]), pa.array(["a", "b", "a", "c"]))
    apart = pa.chunked_array([["a", "b"], pa.array([None, "a", "c", None], pa.string())])
    for seed in range(8):
        wanted = part.split(test=0.4, by=plain, seed=seed)[1].contents.chosen.array().tolist()
        for by in (twice, apart, np.array(plain, object)):
            assert part.split(test=0.4, by=by, seed=seed)[1].contents.chosen.array().tolist() == wanted


def test_a_dataset_without_hidden_states_is_filtered() -> None:
    whole = quietly(GOLDEN / "lmprobe" / "logits_only")
    part = whole.filter([2, 0])
    same(part.logits()[0], whole.logits([2, 0])[0])
    assert part.token_counts.tolist() == whole.token_counts[[2, 0]].tolist()
    assert part.table["text"].to_pylist() == [whole.table["text"].to_pylist()[i] for i in (2, 0)]


def test_columns_that_cannot_group_are_refused(store: actshard.Store) -> None:
    with pytest.raises(actshard.ActshardError):
        store.split(by="no such column")
    with pytest.raises(actshard.ArgumentError, match="one per example"):
        store.split(by=[1, 2])


def test_a_part_decodes_only_its_shards_and_no_more_often(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 1, 3, 8)).astype(np.float32)
    with actshard.create(tmp_path / "data", "pickle", layers=[0], d_model=8, compress=True, shard_bytes=900) as writer:
        writer.append(rows, columns={"text_preview": [f"t{i}" for i in range(40)]})
    store = quietly(tmp_path / "data")
    shards = len(store.contents.units) - 1
    assert shards >= 5
    part = store.filter(slice(0, 3))
    before = store.rows.inflated
    assert part.token_counts.tolist() == [3, 3, 3]
    assert store.rows.inflated - before <= 2
    for shuffle in (None, "window"):
        decoded = []
        for chosen in (slice(None), np.arange(40) % 3 != 1):
            store = quietly(tmp_path / "data", decoded_memory=0)
            part = store.filter(chosen) if decoded else store
            acts, examples, tokens = rows_of(part.stream(0, 7, shuffle=shuffle, seed=2))
            same(acts, rows[examples if part.chosen is None else part.chosen[examples], 0, tokens])
            assert len(acts) == 3 * len(part)
            decoded.append(store.rows.inflated)
        assert decoded[1] <= decoded[0], "no more than for the whole dataset"


def test_closing_a_part_leaves_the_dataset_open(store: actshard.Store) -> None:
    layer = store.layers[0]
    whole = quietly(store.path)
    part, other = whole.filter([1, 2]), whole.filter([2])
    part.close()
    with pytest.raises(actshard.ClosedError):
        part.gather(layer, 0, 0)
    with pytest.raises(actshard.ClosedError):
        part.filter([0])
    same(other.sequence(0, layer), whole.sequence(2, layer))


@pytest.mark.parametrize(("name", "read"), [("lmprobe/fullseq_f32", "token_counts"), ("pickle/numpy2_proto5", "table")])
def test_a_part_says_that_the_store_it_was_filtered_from_was_closed(name: str, read: str, tmp_path: Path) -> None:
    with quietly(GOLDEN / name) as whole:
        part = whole.filter([1])
    for call in (lambda: getattr(part, read), lambda: actshard.convert(part, tmp_path / "made", "zarr")):
        with pytest.raises(actshard.ClosedError, match="filtered from was closed: keep it open") as caught:
            call()
        assert caught.value.path == whole.path
    part.close()
    with pytest.raises(actshard.ClosedError, match="the store was closed"):
        part.sequence(0, part.layers[0])


@pytest.mark.parametrize("make", [np.asarray, list, pa.array, lambda flags: pa.chunked_array([flags])])
def test_masks_choose_examples_in_every_call(make: Any, tmp_path: Path) -> None:
    store = quietly(GOLDEN / "lmprobe" / "fullseq_logits_router")
    layer, flags = store.layers[0], np.arange(len(store)) % 3 == 0
    mask, numbers = make(flags.tolist()), np.flatnonzero(flags)
    same(store.gather(layer, mask, 0), store.gather(layer, numbers, 0))
    same(store.last_tokens(layer, mask), store.last_tokens(layer, numbers))
    same(store.logits(mask)[0], store.logits(numbers)[0])
    same(store.router(store.contents.router_layers[0], mask), store.router(store.contents.router_layers[0], numbers))
    assert store.tokens_of(mask).tolist() == store.token_counts[numbers].tolist()
    assert len(store.sequences(mask, layer)) == len(numbers)
    same(store.layer(layer)[mask, 0], store.gather(layer, numbers, 0))
    assert store.filter(mask).chosen.tolist() == numbers.tolist()
    assert actshard.convert(store, tmp_path / "some", "zarr", examples=mask).examples == len(numbers)


@pytest.mark.parametrize("number", [True, 1.0, np.True_, np.float64(1)])
def test_flags_and_floats_are_no_integers(store: actshard.Store, number: Any) -> None:
    layer = store.layers[0]
    for call in (
        lambda: store.gather(number, 0, 0),
        lambda: store.gather(layer, number, 0),
        lambda: store.gather(layer, 0, number),
        lambda: store.sequence(number, layer),
        lambda: store.sequences([number], layer),
        lambda: store.last_tokens(layer, number),
        lambda: store.tokens_of(number),
        lambda: store.layer(number),
        lambda: store.layer(layer)[number],
        lambda: store.layer(layer)[0, number],
        lambda: store.filter(number),
        lambda: store.split(seed=number),
        lambda: store.stream(layer, number),
        lambda: store.stream(number, 4),
        *(lambda k=k: store.stream(layer, 4, **{k: number}) for k in ("seed", "epoch", "rank", "world_size", "memory")),
    ):
        with pytest.raises(actshard.ActshardError):
            call()


def test_masks_of_a_part_have_its_length(store: actshard.Store) -> None:
    part, layer = store.filter([4, 2, 6]), store.layers[0]
    same(part.last_tokens(layer, [True, False, True]), store.last_tokens(layer, [4, 6]))
    _, examples, _ = rows_of(part.stream(layer, 8, keep=np.array([False, True, True])))
    assert set(examples.tolist()) == {1, 2}
    with pytest.raises(actshard.ArgumentError, match="3"):
        part.last_tokens(layer, np.ones(len(store), bool))


def test_tokens_of_examples_do_not_depend_on_what_was_read_before() -> None:
    """Examples that lack the first layer are counted in the first layer that they have."""
    path = GOLDEN / "pickle" / "ragged_layers_machine3"
    for some in (None, [4, 2, 2, 0]):
        before, after = (quietly(path) if some is None else quietly(path).filter(some) for _ in range(2))
        counts = after.token_counts.tolist()
        assert min(counts) > min(after.tokens_in(15).tolist()) == 0
        order = [*range(len(counts)), 0]
        assert before.tokens_of(order).tolist() == after.tokens_of(order).tolist() == [counts[i] for i in order]
        with pytest.raises(actshard.OutOfRangeError):
            before.tokens_of(-1)


WITH_COLUMNS = [
    p.parent for name in ("draft", "lmprobe", "pickle") for p in sorted(GOLDEN.glob(f"{name}/*/expected.npz"))
]


@pytest.mark.parametrize("path", WITH_COLUMNS, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_columns_of_some_examples_are_those_of_the_table(path: Path) -> None:
    """In any order, repeated, by mask; of a part, too."""
    store = quietly(path)
    names = list(store.info()["columns"])
    whole, n = store.read_columns(names).to_pylist(), len(store)
    numbers = [n - 1, 0, n // 2, 0]
    flags = np.arange(n) % 2 == 0
    part = store.filter(numbers)
    for some, wanted in (
        (store.read_columns(names, numbers), [whole[i] for i in numbers]),
        (store.read_columns(names, flags), whole[::2]),
        (store.read_columns(names, []), []),
        (part.read_columns(names, [3, 1]), [whole[numbers[3]], whole[numbers[1]]]),
        (store.filter(slice(None, None, -1)).read_columns(names, [0]), whole[-1:]),
    ):
        assert some.column_names == names
        assert repr(some.to_pylist()) == repr(wanted)
    for bad in ([n], [-1]):
        with pytest.raises(actshard.OutOfRangeError):
            store.read_columns(names, bad)


NOTHING: dict[str, Any] = {
    "mask": lambda n: np.zeros(n, np.bool_),
    "list of flags": lambda n: [False] * n,
    "column": lambda n: pa.array([False] * n),
    "function": lambda n: lambda table: np.zeros(len(table), np.bool_),
    "function of numbers": lambda n: lambda table: np.flatnonzero(np.zeros(n)),
    "expression": lambda n: pc.scalar(False),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_a_condition_that_no_example_meets_warns(store: actshard.Store, kind: str) -> None:
    n = len(store)
    chosen = NOTHING[kind](n)
    with pytest.warns(actshard.ActshardWarning, match=f"filter: no example was chosen of {n}") as told:
        assert len(store.filter(chosen)) == 0
    assert [(x.filename, getattr(x.message, "code", "")) for x in told] == [(__file__, "no-example-chosen")]


def test_numbers_and_slices_of_no_example_do_not_warn_until_they_are_streamed(store: actshard.Store) -> None:
    layer = store.layers[0]
    for chosen in ([], np.empty(0, np.int64), slice(0, 0), range(0)):
        part = store.filter(chosen)
        joined = actshard.concat([part, part])
        for make in (
            lambda part=part: part.stream(layer, 4, max_norm=np.inf),
            lambda part=part: part.sequences_stream(layer, 64),
            lambda joined=joined: joined.stream(layer, 4),
        ):
            with pytest.warns(actshard.ActshardWarning, match="No example was chosen") as told:
                assert list(make()) == []
            assert [x.filename for x in told] == [__file__]
    assert "0 of 26 examples" in repr(part)
    assert "1 of 26 examples" in repr(store.filter([3]))
