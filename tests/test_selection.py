"""Selections: the five arguments that choose rows mean the same rows in every verb, and results are kept by these rows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from numpy.typing import NDArray

import actshard
from actshard.streaming.readable import content_range
from actshard.streaming.selection import Selection

LAYERS, WIDTH = [2, 5], 4


def dump(path: Path, tokens: int, seed: int) -> actshard.Store:
    """A saev dump with CLS, whose CLS rows are large, and patch labels."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(6, 2, tokens, WIDTH)).astype(np.float32)
    rows[:, :, 0] += 50
    with actshard.create(path, "saev", layers=LAYERS, d_model=WIDTH, cls_token=True) as writer:
        writer.append(rows, labels=rng.integers(0, 3, (6, tokens - 1)).astype(np.uint8))
    return actshard.open(writer.path)


@pytest.fixture
def store(tmp_path: Path) -> actshard.Store:
    return dump(tmp_path / "a", 9, 0)


def naive(
    store: actshard.Store,
    layer: Any,
    tokens: str = "content",
    ignore_labels: Any = (),
    keep: Any = None,
    max_norm: float | None = None,
    min_token: int = 0,
) -> list[tuple[int, int]]:
    """The selected rows, token by token."""
    chosen = []
    for e in range(len(store)):
        rows, special = store.sequence(e, layer), store.special_tokens
        count = len(rows)
        stored = {"content": range(special, count), "all": range(count), "special": range(special)}
        for t in stored.get(tokens, range(count - 1, count)):
            label = None if t < special else int(store.labels[e, t - special])  # type: ignore[index]  # the dump has labels
            if label in ignore_labels or t < min_token or (keep is not None and not keep[e, t]):
                continue
            if max_norm is None or np.linalg.norm(rows[t].astype(np.float64)) <= max_norm:
                chosen.append((e, t))
    return chosen


def rows_of(store: actshard.Store, places: list[tuple[int, int]], layer: Any) -> NDArray[np.float64]:
    return np.array([store.sequence(e, layer)[t] for e, t in places], np.float64)


KEEP = np.random.default_rng(1).random((6, 9)) < 0.7
SELECTIONS: list[dict[str, Any]] = [
    {},
    {"tokens": "all"},
    {"tokens": "last"},
    {"ignore_labels": [1]},
    {"keep": KEEP},
    {"max_norm": 2.5},
    {"min_token": 3},
    {"tokens": "all", "ignore_labels": [0, 2], "keep": KEEP, "max_norm": 3.0, "min_token": 1},
    {"tokens": "last", "ignore_labels": [2], "keep": KEEP, "max_norm": 3.0},
]


@pytest.mark.parametrize("options", SELECTIONS, ids=lambda options: "+".join(options) or "default")
def test_every_verb_has_the_same_rows(store: actshard.Store, options: dict[str, Any], tmp_path: Path) -> None:
    options = {name: list(value) if name == "ignore_labels" else value for name, value in options.items()}
    places = naive(store, 2, **options)
    batches = list(store.stream(2, 7, **options))
    assert [(int(e), int(t)) for b in batches for e, t in zip(b.examples, b.tokens, strict=True)] == places
    if options.get("tokens") != "last":
        packed = list(store.sequences_stream(2, 20, **options))
        found = [(int(e), int(t)) for b in packed for e, t in zip(b.examples[b.segment_ids], b.tokens, strict=True)]
        assert sorted(found) == places
    mean = rows_of(store, places, 2).mean(0)
    for stats in (store.stats(2, **options), store.stats(2, save=tmp_path / "kept", **options)):
        assert stats.rows == len(places)
        np.testing.assert_allclose(stats.mean, mean, rtol=1e-6)
    assert store.stats(2, save=tmp_path / "kept", **options).rows == len(places)
    spectrum = store.spectrum(2, **options)
    assert spectrum.total == len(places)
    np.testing.assert_allclose(spectrum.mean, mean, rtol=1e-5)
    if "max_norm" not in options:  # it is a limit in every layer
        assert store.similarity(**options).total == len(places)
    lasts = [max(t for e2, t in places if e2 == e) for e in sorted({e for e, _ in places})]
    pooled = np.arange(6) % 2
    if len(lasts) == 6:
        assert store.separability(pooled, 2, **options).examples == 6
    mixed = next(iter(actshard.mix([(store, 1)]).stream(2, len(places), shuffle=None, **options)))
    assert list(zip(mixed.examples.tolist(), mixed.tokens.tolist(), strict=True)) == places
    both = actshard.pair(store, store).stream(2, 99, **options)
    assert both.num_rows == len(places)


def test_separability_takes_the_last_or_the_mean_of_the_selected_rows(store: actshard.Store) -> None:
    """Labels that only token 3 of the examples shows."""
    label = np.array([0, 1] * 3)
    with actshard.create(store.path.parent.parent / "probe", "zarr", layers=[0], d_model=2) as writer:
        rows = np.random.default_rng(3).normal(size=(80, 1, 6, 2)).astype(np.float32)
        label = np.arange(80) % 2
        rows[:, 0, 3] += 20 * label[:, None]
        writer.append(rows)
    probe = actshard.open(store.path.parent.parent / "probe")
    keep = np.arange(6)[None] == np.full((80, 1), 3)
    for pool in ("last", "mean"):
        assert probe.separability(label, 0, pool=pool, keep=keep).accuracy[0] == 1  # type: ignore[arg-type]  # a literal in a loop
    assert probe.separability(label, 0).accuracy[0] < 0.9
    assert probe.separability(label, 0, min_token=4, pool="mean").accuracy[0] < 0.9
    with pytest.raises(actshard.ArgumentError, match="special tokens have no labels"):
        store.separability(store.labels, tokens="all")  # type: ignore[arg-type]  # the dump has labels


def test_statistics_of_other_special_tokens_are_not_reused(store: actshard.Store, tmp_path: Path) -> None:
    """``concat(special_tokens=)`` decides which rows are content."""
    skipping, reading = actshard.concat([store, store]), actshard.concat([store, store], special_tokens=0)
    one = skipping.stats(2, save=tmp_path / "kept")
    two = reading.stats(2, save=tmp_path / "kept")
    assert (one.rows, two.rows) == (96, 108)
    assert two.as_plain() == reading.stats(2).as_plain()


def test_a_rectangular_mask_has_one_meaning_for_the_whole_store(store: actshard.Store, tmp_path: Path) -> None:
    """Examples of 9 and of 5 stored tokens, one of them CLS."""
    both = actshard.concat([store, dump(tmp_path / "b", 5, 1)])
    content, stored = np.zeros((12, 8), bool), np.zeros((12, 9), bool)
    content[:, 2] = stored[:, 3] = True
    lists = [row[: 8 if i < 6 else 4] for i, row in enumerate(content)]
    for keep in (content, stored, lists):
        batch = next(iter(both.stream(2, 99, keep=keep)))
        assert batch.tokens.tolist() == [3] * 12
        assert both.stats(2, keep=keep).rows == 12
    for width in (7, 10):
        with pytest.raises(actshard.ArgumentError, match=rf"expected 9 columns \(or 8 without.*found {width}"):
            both.stream(2, 9, keep=np.ones((12, width), bool))


def test_a_rectangular_mask_is_wider_than_the_examples_only_if_longer_ones_were_filtered_out(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "run", "zarr", layers=[2], d_model=WIDTH) as writer:
        for tokens in (3, 5, 2):
            writer.append(np.ones((1, 1, tokens, WIDTH), np.float32))
    whole = actshard.open(tmp_path / "run")
    part = whole.filter([0, 2])
    for store, width, most in ((whole, 6, 5), (part, 6, 3), (part, 2, 3)):
        with pytest.raises(actshard.ArgumentError, match=f"expected {most} columns, .* found {width}"):
            store.stream(2, 9, keep=np.ones((len(store), width), bool))
    for width in (3, 5):
        assert part.stream(2, 9, keep=np.ones((2, width), bool)).num_rows == 5
    padded = np.arange(512) < whole.token_counts[:, None]  # as a tokenizer pads
    assert whole.stream(2, 9, keep=padded).num_rows == whole.stats(2, keep=padded).rows == 10


def test_digests_of_padded_examples_of_one_length_are_those_of_their_lengths(tmp_path: Path) -> None:
    """Saved states have them."""
    with actshard.create(tmp_path / "a", "saev", layers=[2], d_model=4, pad=True, tokens_per_example=6) as writer:
        writer.append(np.ones((3, 1, 4, 4), np.float32))
    store = actshard.open(writer.path)
    assert store.content_lengths is not None
    for tokens, parts in (("content", [b"0;", np.full(3, 4)]), ("last", [np.full(3, 3)]), ("all", [b"0;", b"6;"])):
        rows = Selection(tokens=tokens).resolve(store, [2])  # type: ignore[arg-type]  # one of several
        data = b"".join(part if isinstance(part, bytes) else part.astype(np.int64).tobytes() for part in parts)  # type: ignore[attr-defined]
        assert rows.digest == hashlib.sha256(data).hexdigest()[:16]


def test_a_plan_takes_selections_that_a_file_can_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with actshard.create(tmp_path / "run", "zarr", layers=[2], d_model=4) as writer:
        writer.append(
            rng.normal(size=(8, 1, 5, 4)).astype(np.float32),
            columns={"loss_mask": rng.integers(0, 2, (8, 5)).tolist()},
        )
    store = actshard.open(tmp_path / "run")
    for number, keep in enumerate((None, "loss_mask", actshard.up_to_last("loss_mask"))):
        plan = actshard.plan.stats(
            tmp_path / "run", tasks=2, keep=keep, min_token=2, save=True, work=tmp_path / f"w{number}"
        )
        plan.save(tmp_path / "plan.json")
        plan = actshard.plan.load(tmp_path / "plan.json")
        for task in range(len(plan.tasks)):
            plan.run(task)
        expected = store.stats(2, keep=keep, min_token=2)
        assert plan.commit()[2].as_plain() == expected.as_plain()
        rows = Selection(keep=keep, min_token=2).resolve(store, [2])
        kept = actshard.looking.saved.kept(store, 2, rows)
        assert kept is not None
        assert kept.rows == expected.rows == rows.count
    for options in ({"max_norm": 3.0}, {"keep": np.ones(8, bool)}, {"keep": lambda table: np.ones(8, bool)}):
        with pytest.raises(
            actshard.ArgumentError, match=r"max_norm: not supported by plans|keep: a plan's file holds no"
        ):
            actshard.plan.stats(tmp_path / "run", work=tmp_path / "w", **options)  # type: ignore[arg-type]  # one of several


def test_content_begins_after_special_tokens_and_ends_before_padding(tmp_path: Path) -> None:
    parts = [np.ones((1, n, 4), np.float32) for n in (6, 4, 1)]
    with actshard.create(
        tmp_path / "a", "saev", layers=[2], d_model=4, cls_token=True, pad=True, tokens_per_example=6
    ) as writer:
        writer.append(parts)
    store = actshard.open(writer.path)
    first, stop = content_range(store, store.token_counts)
    assert (first.tolist(), stop.tolist()) == ([1, 1, 1], [6, 4, 1])
    first, stop = content_range(store, store.token_counts[:1], np.array([1]))
    assert (first.tolist(), stop.tolist()) == ([1], [4])
    reading = actshard.concat([store], special_tokens=0)
    assert [each.tolist() for each in content_range(reading, reading.token_counts)] == [[0, 0, 0], [6, 4, 1]]


@pytest.mark.parametrize("format", ["npy", "safetensors", "hf_arrow"])
def test_tables_without_columns_have_a_row_for_each_example(format: str, tmp_path: Path) -> None:
    with actshard.create(tmp_path / "a", format, layers=[2], d_model=4) as writer:
        writer.append(np.zeros((9, 1, 3, 4), np.float32))
    store = actshard.open(tmp_path / "a")
    assert store.table.shape == (9, 0)
    assert store.read_columns([], [3, 3]).shape == (2, 0)
    for chosen in (
        slice(2, 5),
        slice(1, None, 3),
        [5, 1],
        [1, 1],
        np.arange(9) % 2 == 0,
        lambda t: np.arange(t.num_rows) < 4,
    ):
        some = store.filter(chosen)
        assert some.table.num_rows == len(some) > 0
    odd = store.filter([5, 1, 0]).stream(2, 4, keep=lambda table: np.arange(table.num_rows) % 2 == 1)
    assert odd.num_rows == 3
    assert actshard.concat([store, store.filter([5, 1])]).table.num_rows == 11
    with pytest.raises(actshard.ArgumentError, match=r"filter: .*The columns are: $"):
        store.filter(pc.field("label") == 1)


def masked(values: Any, at: Any = (1,)) -> np.ma.MaskedArray[Any, Any]:
    """Values of which one is masked."""
    mask = np.zeros(np.shape(values), np.bool_)
    mask[at] = True
    return np.ma.MaskedArray(values, mask)


NUMBERS, FLAGS = masked([0, 1, 2]), masked([True] * 6)


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.gather(2, NUMBERS, 0),
        lambda store: store.gather(2, [0, 1, 2], NUMBERS),
        lambda store: store.gather(2, FLAGS, 0),
        lambda store: store.last_tokens(2, NUMBERS),
        lambda store: store.last_tokens(2, FLAGS),
        lambda store: store.sequences(NUMBERS, 2),
        lambda store: store.tokens_of(FLAGS),
        lambda store: store.read_columns("example_idx", FLAGS),
        lambda store: store.filter(FLAGS),
        lambda store: store.layer(2)[NUMBERS, 0],
        lambda store: store.stream(2, 4, keep=FLAGS),
        lambda store: store.stream(2, 4, keep=lambda _: FLAGS),
        lambda store: store.stream(2, 4, keep=masked(KEEP, (0, 0))),
        lambda store: store.stream(2, 4, keep=[masked([True] * 9)] * 6),
        lambda store: store.stream(2, 4, center=masked([1.0, 2.0, 3.0, 4.0])),
        lambda store: store.stream(2, 4, divide=masked([1.0, 2.0, 3.0, 4.0])),
        lambda store: store.stream(2, 4, scale=masked([1.0, 2.0, 3.0, 4.0])),
    ],
)
def test_masked_values_choose_and_rescale_no_rows(store: actshard.Store, read: Any) -> None:
    """numpy would take the numbers below the masks."""
    with pytest.raises(actshard.ArgumentError, match="masked value"):
        read(store)


def test_masked_arrays_without_masked_values_are_arrays(store: actshard.Store) -> None:
    numbers, flags = np.ma.MaskedArray([0, 1, 2]), np.ma.MaskedArray([True] * 6)
    assert store.gather(2, numbers, 0).tobytes() == store.gather(2, [0, 1, 2], 0).tobytes()
    assert store.last_tokens(2, numbers).tobytes() == store.last_tokens(2, [0, 1, 2]).tobytes()
    assert store.stream(2, 4, keep=flags).num_rows == store.stream(2, 4).num_rows
