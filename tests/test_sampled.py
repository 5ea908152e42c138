"""Spectrum, similarity and separability: the sample, naive definitions on the whole matrix, and hostile rows."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from actshard.looking.sampled.separability import predicted
from actshard.looking.sampled.similarity import minibatches, u_centred
from actshard.looking.sampled.spectrum import decomposed, sample, spread
from actshard.streaming.readable import SelectedRows
from actshard.streaming.selection import CONTENT
from conftest import GOLDEN
from served import served

Array = np.ndarray[Any, Any]
SPECIAL = GOLDEN / "saev/v21_cls_labels_multishard/saev/shards/efe18415"
NOT_STORED = actshard.NotStoredError


def made(folder: Path, layers: dict[Any, Array], columns: dict[str, Any] | None = None) -> actshard.Store:
    """A dataset of arrays ``(examples, tokens, d_model)``, one for each layer."""
    first = next(iter(layers.values()))
    path = folder / f"run{len(list(folder.iterdir()))}"
    format = "safetensors" if first.dtype == ml_dtypes.bfloat16 else "zarr"
    with actshard.create(path, format, layers=list(layers), d_model=first.shape[2], dtype=first.dtype) as writer:
        writer.append(np.stack(list(layers.values()), axis=1), columns=columns or {})
    return actshard.open(path)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def refused(kind: type[BaseException], text: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(kind, match=re.escape(text)) as caught:
        call(*args, **options)
    assert len(str(caught.value).splitlines()) == 1


# The sample


@given(st.integers(0, 10_000), st.integers(1, 2_000), st.integers(0, 5))
def test_a_sample_has_a_row_of_each_range(total: int, count: int, seed: int) -> None:
    found = spread(total, count, seed)
    assert len(found) == min(total, count)
    assert (np.diff(found) > 0).all()
    if count < total:
        for i, row in enumerate(found.tolist()):
            assert i * total // count <= row < (i + 1) * total // count
    assert np.array_equal(found, spread(total, count, seed))


def one_of(first: int, end: int, seed: int, i: int) -> int:
    """A number of a range by splitmix64, in Python's integers."""
    key = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little")
    x = ((i + 1) * 0x9E3779B97F4A7C15 + key) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return first + int(((x ^ (x >> 31)) >> 11) * 2.0**-53 * (end - first))


@pytest.mark.parametrize(("total", "count"), [(1_000, 7), (10**17, 4), (2**40 + 1, 1_000)])
def test_samples_are_the_same_on_every_machine(total: int, count: int) -> None:
    """Also of datasets of any size: against integers that do not overflow."""
    for seed in (0, 3):
        edges = [i * total // count for i in range(count + 1)]
        expected = [one_of(edges[i], edges[i + 1], seed, i) for i in range(count)]
        assert spread(total, count, seed).tolist() == expected


@given(st.data())
@settings(max_examples=60)
def test_places_are_those_of_the_listed_rows(data: Any) -> None:
    """Of every form of a selection."""
    n = data.draw(st.integers(1, 12))
    count, seed = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 3))
    first = data.draw(st.integers(0, 2))
    counts = np.array(data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)), np.int64)
    flags = np.array(data.draw(st.lists(st.booleans(), min_size=int(counts.sum()), max_size=int(counts.sum()))), bool)
    last = counts - 1
    each = int(counts[0])
    every = [(e, first + t) for e in range(n) for t in range(counts[e])]
    forms: list[tuple[tuple[Any, ...], list[tuple[int, int]]]] = [
        ((first, counts), every),
        ((first, counts, flags), [row for row, kept in zip(every, flags, strict=True) if kept]),
        ((last,), [(e, int(last[e])) for e in range(n) if last[e] >= 0]),
        ((first, each), [(e, first + t) for e in range(n) for t in range(each)]),
    ]
    for native, listed in forms:
        rows = SelectedRows(native, n)
        numbers = spread(len(listed), count, seed)
        expected = [listed[i] for i in numbers.tolist()]
        lasts = [row for row, after in zip(listed, [*listed[1:], (-1, -1)], strict=False) if row[0] != after[0]]
        for some, places in ((rows, listed), (rows.take(numbers), expected), (rows.last(), lasts)):
            every = some.locate(np.arange(some.count))
            assert list(zip(*(each.tolist() for each in every), strict=True)) == places
            assert np.array_equal(np.diff(some.before), np.bincount([e for e, _ in places], minlength=n))
        found = sample(rows, count, seed)
        assert list(zip(found.examples.tolist(), found.tokens.tolist(), strict=True)) == expected
        assert found.total == len(listed)


def test_the_sample_is_the_same_in_every_format_and_layer(tmp_path: Path) -> None:
    rows = normal(40, 5, 6)
    store = made(tmp_path, {0: rows, 1: rows, 2: normal(40, 5, 6, seed=1)})
    other = actshard.open(actshard.convert(store, tmp_path / "saev", "saev").path)
    a, b = store.spectrum(0, rows=50), other.spectrum(0, rows=50)
    assert (a.rows, a.total) == (50, 200)
    assert np.array_equal(a.eigenvalues, b.eigenvalues)
    assert np.array_equal(a.mean, store.spectrum(1, rows=50).mean)
    assert not np.array_equal(a.mean, store.spectrum(0, rows=50, seed=1).mean)
    both = store.similarity(rows=50)
    assert both.rows == 50
    assert np.array_equal(both.cka, other.similarity(rows=50).cka)


# Spectrum


@pytest.mark.parametrize("shape", [(60, 4, 7), (3, 2, 30), (1, 1, 5), (2, 1, 1), (9, 1, 9)])
@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_a_spectrum_is_that_of_the_covariance(tmp_path: Path, shape: tuple[int, int, int], kind: Any) -> None:
    rows = (normal(*shape) * np.arange(1, shape[2] + 1) + 3).astype(kind)
    store = made(tmp_path, {5: rows})
    found = store.spectrum(5, directions=3)
    whole = rows.reshape(-1, shape[2]).astype(np.float64)
    covariance = np.cov(whole, rowvar=False, bias=True).reshape(shape[2], shape[2])
    expected = np.linalg.eigvalsh(covariance)[::-1][: min(whole.shape)]
    top = max(float(expected[0]), 1e-300)
    assert found.rows == found.total == len(whole)
    assert np.allclose(found.eigenvalues, np.maximum(expected, 0), rtol=0, atol=1e-10 * top)
    assert np.allclose(found.mean, whole.mean(0), rtol=1e-12)
    for direction, value in zip(found.directions, found.eigenvalues, strict=False):
        assert np.linalg.norm(direction) == pytest.approx(1)
        assert np.allclose(covariance @ direction, value * direction, atol=1e-9 * top)
        assert direction[np.abs(direction).argmax()] > 0
    if len(whole) > 1:
        p = expected[expected > 1e-12 * top] / expected[expected > 1e-12 * top].sum()
        assert found.effective_rank == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-6)
        assert found.participation_ratio == pytest.approx(covariance.trace() ** 2 / (covariance**2).sum(), rel=1e-6)
        assert found.participation_ratio <= found.effective_rank * (1 + 1e-9)
        assert found.explained.sum() == pytest.approx(1)
        assert np.allclose(found.explained.cumsum()[found.rank_for(0.8) - 1 :], 0.9, atol=0.1000001)
        assert found.rank_for(1) <= len(found.eigenvalues)
    else:
        assert np.isnan(found.effective_rank)
        assert np.isnan(found.participation_ratio)
        assert found.rank_for(0.5) == len(found.directions) == 0
    assert json.loads(json.dumps(found.as_dict()))["rows"] == len(whole)


def test_ranks_of_known_covariances() -> None:
    """d directions with equal variances: d; one direction: 1."""
    corners = np.concatenate([np.eye(6), -np.eye(6)])
    for rows, rank in (
        (corners, 6),
        (np.outer(np.arange(9.0), np.ones(4)), 1),
        (np.hstack([corners, np.full((12, 3), 7.1)]), 6),
    ):
        _, values, directions, _ = decomposed(rows, 99)
        p = values[values > 0] / values.sum()
        assert np.exp(-(p * np.log(p)).sum()) == pytest.approx(rank)
        assert len(directions) == rank


def test_constant_rows_have_no_spectrum(tmp_path: Path) -> None:
    """Also of a value that is rounded when it is added up."""
    for value in (0, 0.1, 1e30, -3.3e-20):
        found = made(tmp_path, {0: np.full((50, 3, 4), value, np.float32)}).spectrum(0)
        assert found.eigenvalues.tolist() == [0] * 4
        assert found.mean == pytest.approx(np.float64(np.float32(value)))
        assert np.isnan(found.effective_rank)
        assert "effective rank nan" in repr(found)
        json.dumps(found.as_dict(), allow_nan=False)


def test_rows_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = normal(20, 5, 4)
    clean = rows.reshape(-1, 4).astype(np.float64)
    bad = rows.copy()
    bad[3, 1, 2], bad[7, 4, 0], bad[7, 4, 1], bad[19, 0, 3] = np.nan, np.inf, np.nan, -np.inf
    gone = np.isin(np.arange(100), [16, 39, 95])
    store = made(tmp_path, {0: bad, 1: rows})
    found = store.spectrum(0)
    assert (found.rows, found.left_out, found.total) == (97, 3, 100)
    assert "3 not finite left out" in repr(found)
    _, values, _, power = decomposed(clean[~gone], 0)
    assert np.allclose(found.eigenvalues, np.ldexp(values, 2 * power))
    both = store.similarity()
    assert (both.rows, both.left_out, both.not_finite.tolist()) == (97, 3, [3, 0])
    assert both.cka == pytest.approx(np.ones((2, 2)))
    labels = np.arange(20) % 2
    scores = store.separability(labels, pool="last")
    assert scores.not_finite.tolist() == [1, 0]
    assert scores.examples == 20
    assert store.separability(labels, pool="mean").not_finite.tolist() == [3, 0]
    every = made(tmp_path, {0: np.full((5, 2, 3), np.nan, np.float32), 1: normal(5, 2, 3)})
    assert (every.spectrum(0).rows, every.spectrum(0).left_out) == (0, 10)
    assert np.isnan(every.similarity().cka).all()
    assert np.isnan(every.similarity().cosine).all()
    assert np.isnan(every.separability([0, 0, 1, 1, 1]).accuracy[0])
    assert np.isfinite(every.separability([0, 0, 1, 1, 1]).accuracy[1])


@pytest.mark.parametrize(
    ("kind", "size"), [(np.float16, 60_000), (np.float32, 3e38), (np.float64, 1e308), (np.float32, 1e-38)]
)
def test_huge_and_tiny_values_give_the_numbers_of_usual_ones(tmp_path: Path, kind: Any, size: float) -> None:
    """Squares of them are no longer finite."""
    rows = np.random.default_rng(0).uniform(-1, 1, (30, 4, 6))
    power = float(2 ** np.floor(np.log2(size)))
    labels = np.arange(30) % 3
    usual = made(tmp_path, {0: rows.astype(kind), 1: (rows[::-1] ** 2).astype(kind)})
    huge = made(tmp_path, {0: (rows.astype(kind) * kind(power)), 1: ((rows[::-1] ** 2).astype(kind) * kind(power))})
    with np.errstate(all="raise", under="ignore"):
        assert huge.spectrum(0).effective_rank == pytest.approx(usual.spectrum(0).effective_rank, rel=1e-3)
        a, b = huge.similarity(), usual.similarity()
        assert np.allclose(a.cka, b.cka, atol=1e-3)
        assert np.allclose(a.cosine, b.cosine, atol=1e-3)
        assert np.allclose(a.mean_cosine, b.mean_cosine, atol=1e-3)
        assert np.array_equal(huge.separability(labels).accuracy, usual.separability(labels).accuracy)


# Similarity


def hsic(x: Array, y: Array) -> float:
    """The unbiased estimator of Song et al. 2012, equation 5, by its own formula."""
    n = len(x)
    k, m = x @ x.T, y @ y.T
    np.fill_diagonal(k, 0)
    np.fill_diagonal(m, 0)
    ones = np.ones(n)
    middle = (
        np.trace(k @ m)
        + (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
        - 2 / (n - 2) * (ones @ k @ m @ ones)
    )
    return float(middle / (n * (n - 3)))


def naive(batches: list[tuple[Array, Array]]) -> float:
    xy, xx, yy = (sum(len(a) * hsic(u, v) for a, b in batches for u, v in [pick(a, b)]) for pick in
                  (lambda a, b: (a, b), lambda a, b: (a, a), lambda a, b: (b, b)))  # fmt: skip
    return float(xy / np.sqrt(xx * yy))


@pytest.mark.parametrize("shape", [(4, 1, 3), (40, 3, 5), (10, 2, 50), (9, 1, 1), (350, 3, 6)])
def test_cka_is_that_of_its_definition(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    """Products of rows of all minibatches, by the formula of the paper."""
    a = normal(*shape)
    b = np.tanh(a @ normal(shape[2], shape[2], seed=1)) + normal(*shape, seed=2) / 3 + 1
    store = made(tmp_path, {"a": a, "b": b.astype(np.float32), "noise": normal(*shape, seed=3)})
    found = store.similarity(rows=1000)
    assert found.rows == min(1000, shape[0] * shape[1])
    every = spread(shape[0] * shape[1], 1000, 0)
    flat = [store.layer(name).rows()[:].astype(np.float64)[every] for name in store.layers]
    batches = list(minibatches(len(every), 0))
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(len(every)))
    for i, x in enumerate(flat):
        for j, y in enumerate(flat):
            expected = 1 if i == j else naive([(x[batch], y[batch]) for batch in batches])
            assert found.cka[i, j] == pytest.approx(np.clip(expected, -1, 1), abs=1e-6)
            unit = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y)]
            assert found.cosine[i, j] == pytest.approx((unit[0] * unit[1]).sum(1).mean(), abs=1e-6)
            means = x.mean(0), y.mean(0)
            assert found.mean_cosine[i, j] == pytest.approx(
                means[0] @ means[1] / np.linalg.norm(means[0]) / np.linalg.norm(means[1]), abs=1e-6
            )
    assert np.array_equal(found.cka, found.cka.T)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("period", [2, 3, 8, 64])
def test_cka_does_not_depend_on_the_order_of_rows(tmp_path: Path, period: int, seed: int) -> None:
    """Classes that alternate, and first tokens of large norm: minibatches of every n-th row had rows of one kind only."""
    alternating = np.where(np.arange(1920) % period == 0, 6.0, -6.0)[:, None]
    a = normal(1920, 16) + alternating * normal(1, 16, seed=1)
    b = normal(1920, 16, seed=2) + alternating * normal(1, 16, seed=3)
    layers = {"a": a.reshape(-1, period, 16).astype(np.float32), "b": b.reshape(-1, period, 16).astype(np.float32)}
    found = made(tmp_path, layers).similarity(seed=seed).cka[0, 1]
    assert found == pytest.approx(naive([(a, b)]), abs=0.05)
    shuffled = np.random.default_rng(0).permutation(1920)
    (tmp_path / "mixed").mkdir()
    mixed = {name: rows.reshape(1920, 1, 16)[shuffled] for name, rows in layers.items()}
    assert made(tmp_path / "mixed", mixed).similarity(seed=seed).cka[0, 1] == pytest.approx(found, abs=0.05)


def test_cka_ignores_rotation_scale_and_shift_and_noise_is_not_similar(tmp_path: Path) -> None:
    a = normal(60, 4, 32)
    turn = np.linalg.qr(normal(32, 32, seed=1))[0]
    layers = {"a": a, "turned": a @ turn, "scaled": a * 1e-3, "shifted": a + 50, "noise": normal(60, 4, 32, seed=5)}
    found = made(tmp_path, {name: rows.astype(np.float32) for name, rows in layers.items()}).similarity()
    assert found.cka[0, :4] == pytest.approx(1, abs=1e-5)
    assert abs(found.cka[0, 4]) < 0.05
    assert found.cosine[0, 1] < 0.5
    assert found.cosine[0, 2] == pytest.approx(1)


def test_rows_of_equal_values_have_no_cka(tmp_path: Path) -> None:
    constant = np.full((30, 2, 8), 0.1, np.float32)
    zero = np.zeros((30, 2, 8), np.float32)
    found = made(tmp_path, {0: normal(30, 2, 8), 1: constant, 2: zero}).similarity()
    assert np.isnan(found.cka).tolist() == [[False, True, True], [True] * 3, [True] * 3]
    assert found.cosine[1, 1] == pytest.approx(1)
    assert np.isnan(found.cosine[2]).all()
    assert np.isnan(found.mean_cosine[2]).all()
    few = made(tmp_path, {0: normal(3, 1, 8)}).similarity()
    assert np.isnan(few.cka).all()
    assert few.cosine[0, 0] == pytest.approx(1)
    json.dumps(found.as_dict(), allow_nan=False)


def test_stores_of_other_widths_have_cka_and_say_why_no_cosine(tmp_path: Path) -> None:
    a = normal(30, 4, 8)
    wide = np.concatenate([a, a], axis=2)
    small, large = made(tmp_path, {0: a, 1: normal(30, 4, 8, seed=2)}), made(tmp_path, {"x": wide})
    found = small.similarity(other=large)
    assert found.cka.shape == (2, 1)
    assert found.cka[0, 0] == pytest.approx(1)
    assert abs(found.cka[1, 0]) < 0.1
    refused(NOT_STORED, "found d_model 8 and 16. Use cka", lambda: found.cosine)
    refused(NOT_STORED, "found d_model 8 and 16. Use cka", lambda: found.mean_cosine)
    assert found.as_dict()["cosine"] is None
    same = small.similarity([1], other=small, other_layers=0)
    assert same.cka[0, 0] == small.similarity().cka[1, 0]
    assert same.cosine.shape == (1, 1)
    refused(
        actshard.ArgumentError,
        "expected the same 30 examples, found 29",
        small.similarity,
        other=large.filter(slice(29)),
    )
    shorter = made(tmp_path, {0: a[:, :3]})
    refused(NOT_STORED, "example 0 has 4 tokens in layer 0 and 3 in layer 0 of", small.similarity, other=shorter)
    refused(actshard.ArgumentError, "other_layers: expected other=", small.similarity, other_layers=[0])
    refused(actshard.ArgumentTypeError, "other: expected a store, found str", small.similarity, other="x")


@given(st.integers(4, 30), st.integers(0, 100))
@settings(max_examples=30)
def test_u_centred_rows_have_the_sum_0(n: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(n, 3))
    found = u_centred(x @ x.T)
    assert np.allclose(found.sum(0), 0, atol=1e-12)
    assert np.array_equal(np.diag(found), np.zeros(n))
    shift = np.random.default_rng(seed + 1).normal(size=n)
    assert np.allclose(found, u_centred(x @ x.T + shift[:, None] + shift[None, :]), atol=1e-11)


# Separability


def labelled(folder: Path, n: int = 120, classes: int = 3) -> tuple[actshard.Store, Array]:
    """Layer 0 is noise; layer 1 has the class in its last token, layer 2 in the mean of its tokens only."""
    codes = np.random.default_rng(1).integers(0, classes, n)
    centres = normal(classes, 10, seed=4) * 4
    last, mean = normal(n, 6, 10, seed=2), normal(n, 6, 10, seed=3)
    last[:, -1] += centres[codes]
    mean[:, :-1] += centres[codes][:, None]
    names = np.array(["red", "green", "blue", "grey"])[codes].tolist()
    return made(folder, {0: normal(n, 6, 10), 1: last, 2: mean}, {"colour": names, "id": list(range(n))}), codes


def test_layers_that_have_the_label_are_told_from_those_without(tmp_path: Path) -> None:
    store, codes = labelled(tmp_path)
    found = store.separability("colour")
    assert found.classes == ("blue", "green", "red")
    assert found.accuracy[1] > 0.95
    assert found.accuracy[0] < 0.6
    assert found.accuracy[2] < 0.6
    assert found.best == 1
    assert found.chance == pytest.approx(1 / 3)
    assert (found.error > 0).all()
    assert found.train.sum() + found.test.sum() == found.examples == 120
    assert store.separability("colour", pool="mean").accuracy[2] > 0.95
    assert np.array_equal(store.separability(codes, 1).accuracy, found.accuracy[1:2])
    few = store.separability("colour", examples=60, seed=3)
    assert (few.examples, few.total) == (60, 120)
    assert "colour" in repr(few)
    json.dumps(found.as_dict(), allow_nan=False)


def test_labels_of_tokens_are_split_by_example(tmp_path: Path) -> None:
    """saev's patch labels: found where rows have them, chance where not; an example's tokens are on one side of the split."""
    rng = np.random.default_rng(0)
    rows, labels = normal(60, 2, 7, 8), rng.integers(0, 3, (60, 6)).astype(np.uint8)  # CLS and 6 patches
    # Layer 0 has a value of its own for each example, with one label: a split of its tokens would find it.
    rows[:, 0] += normal(60, 1, 8, seed=5) * 10
    labels[:40] = labels[:40, :1]
    rows[:, 1, 1:, :3] += 8 * np.eye(3, dtype=np.float32)[labels]
    with actshard.create(tmp_path / "run", "saev", layers=[0, 1], d_model=8, cls_token=True) as writer:
        writer.append(rows, labels=labels)
    store = actshard.open(tmp_path / "run")
    found = store.separability(store.labels, examples=300)
    assert (found.pool, found.label, found.total, found.classes) == ("token", "", 360, (0, 1, 2))
    assert found.examples + found.unlabelled == 300
    assert found.train.sum() + found.test.sum() == found.examples
    assert abs(found.accuracy[0] - found.chance) < 4 * found.error[0]
    every = store.separability(store.labels, [1], examples=10_000)
    assert (every.examples, every.accuracy[0] > 0.95) == (360, True)
    with pytest.raises(actshard.ArgumentError, match="labels of tokens are not pooled"):
        store.separability(store.labels, pool="mean")
    with pytest.raises(actshard.ArgumentError, match=r"60 examples and 6 content tokens, found shape \(60, 5\)"):
        store.separability(labels[:, :5])
    with pytest.raises(actshard.ArgumentError, match="occur in several examples"):
        store.separability(np.repeat([[1], [0], [0]], [1, 1, 58], axis=0) * np.ones((60, 6), int))
    store.filter(np.arange(30)).separability(store.filter(np.arange(30)).labels)


def test_labels_of_tokens_may_be_few_or_missing(tmp_path: Path) -> None:
    store = made(tmp_path, {0: normal(40, 5, 8), 1: normal(40, 5, 8, seed=1)})
    missing = np.full((40, 5), np.nan, object)
    missing[:, 0], missing[:, 1] = "a", "b"
    found = store.separability(missing)
    assert (found.classes, found.unlabelled, found.examples) == (("a", "b"), 120, 80)
    few = np.full((40, 5), np.nan)
    few[:4] = np.arange(5) % 2
    for seed in range(20):  # the examples to hold out are among those with labels
        assert store.separability(few, seed=seed).train.min() > 0
    with pytest.raises(actshard.ArgumentError, match=r"5 content tokens, found shape \(40, 6\)"):
        store.separability(np.zeros((40, 6), int))


def test_labels_of_tokens_of_examples_of_different_lengths(tmp_path: Path) -> None:
    """Columns beyond an example's tokens are not read."""
    path = tmp_path / "run"
    with actshard.create(path, "pickle", layers=[0], d_model=4) as writer:
        for n in (3, 2, 3, 1, 3, 2):
            writer.append(normal(n, 4)[None, None])
    store = actshard.open(path)
    for width in (3, 4):
        labels = np.arange(6 * width).reshape(6, width) % 2
        assert store.separability(labels, 0).examples == 14
    with pytest.raises(actshard.ArgumentError, match=r"6 examples and 3 content tokens, found shape \(6, 2\)"):
        store.separability(np.zeros((6, 2), int))


def test_means_are_those_of_content_tokens_of_each_example(tmp_path: Path) -> None:
    """Against a loop, for examples of different lengths and an example without tokens."""
    from actshard.looking.sampled.separability import _features

    lengths = [3, 1, 7, 4, 2]
    parts = [normal(n, 4, seed=n) for n in lengths]
    path = tmp_path / "run"
    with actshard.create(path, "pickle", layers=[0], d_model=4) as writer:
        for part in parts:
            writer.append(part[None, None])
    store = actshard.open(path)
    rows = CONTENT.resolve(store, [0])
    at = sample(rows.last(), 5, 0)
    expected = np.array([part.astype(np.float64).mean(0) for part in parts])
    assert np.allclose(_features(store, 0, at, "mean", rows), expected, rtol=1e-12)
    assert np.array_equal(_features(store, 0, at, "last", rows), [part[-1] for part in parts])


def test_special_tokens_are_not_in_the_mean(tmp_path: Path) -> None:
    from actshard.looking.sampled.separability import _features

    store = actshard.open(SPECIAL)
    assert store.special_tokens == 1
    layer = store.layers[0]
    rows = CONTENT.resolve(store, [layer])
    at = sample(rows.last(), len(store), 0)
    expected = [store.sequence(i, layer)[store.special_tokens :].astype(np.float64).mean(0) for i in range(len(store))]
    assert np.allclose(_features(store, layer, at, "mean", rows), expected)


@pytest.mark.parametrize("shape", [(60, 5), (30, 80)])
def test_the_probe_is_the_ridge_of_its_definition(shape: tuple[int, int]) -> None:
    """Both decompositions, against the normal equations; the best penalty leaves the least cross-validation error."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, shape[0])
    x = rng.normal(size=shape) + codes[:, None] * rng.normal(size=shape[1])
    z = rng.normal(size=(40, shape[1])) + 1
    weights = 1 / np.bincount(codes)[codes] / 3
    mean, std = (
        np.average(x, axis=0, weights=weights),
        np.sqrt(np.average((x - x.T.dot(weights)) ** 2, axis=0, weights=weights)),
    )
    a, y = (x - mean) / std, np.where(codes[:, None] == np.arange(3), 1.0, -1.0)
    middle = weights @ y
    square = np.diag(weights)
    values = np.linalg.eigvalsh(np.sqrt(square) @ a @ a.T @ np.sqrt(square))
    size = values.sum() / min(shape)
    best, least = None, np.inf
    for penalty in 10.0 ** np.arange(-4, 5) * size:
        solve = np.linalg.inv(a.T @ square @ a + penalty * np.eye(shape[1])) @ a.T @ square
        hat = np.trace(a @ solve)
        left = ((np.sqrt(weights)[:, None] * (y - middle - a @ solve @ (y - middle))) ** 2).sum()
        error = left / (1 - (hat + 1) / shape[0]) ** 2 if hat + 1 < shape[0] else np.inf
        if error < least:
            best, least = (z - mean) / std @ solve @ (y - middle) + middle, error
    assert best is not None
    assert np.array_equal(predicted(x, codes, z, 3), best.argmax(1))


def test_chance_stays_chance_for_classes_of_unequal_size(tmp_path: Path) -> None:
    """A probe that always names the large class has the accuracy of chance."""
    codes = (np.arange(400) % 10 == 0).astype(int)
    found = made(tmp_path, {0: normal(400, 1, 4)}).separability(codes)
    assert found.accuracy[0] == pytest.approx(0.5, abs=3 * found.error[0])
    assert found.test.tolist() == [90, 10]
    constant = made(tmp_path, {0: np.ones((400, 1, 4), np.float32)}).separability(codes)
    assert constant.accuracy[0] == 0.5


def test_labels_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    store, codes = labelled(tmp_path)
    refused(NOT_STORED, "no column", store.separability, "nothing")
    refused(actshard.ArgumentError, "expected at least two classes of two examples, found 0", store.separability, "id")
    refused(actshard.ArgumentError, "found 1 such classes among 1", store.separability, [1] * 120)
    refused(
        actshard.ArgumentError,
        "at most 100 classes",
        made(tmp_path, {0: normal(202, 1, 2)}).separability,
        np.arange(202) // 2 + 0,
    )
    refused(actshard.ArgumentError, "expected 120 values, one per example, found 3", store.separability, [1, 2, 3])
    refused(actshard.ArgumentTypeError, "found 3", store.separability, 3)
    refused(actshard.ArgumentTypeError, "found a list", store.separability, [[1]] * 120)
    refused(actshard.ArgumentError, "test: expected a share", store.separability, "colour", test=1)
    refused(actshard.ArgumentError, 'pool: expected "last" or "mean"', store.separability, "colour", pool="first")
    some = [None, float("nan"), *codes[2:].tolist()]
    some[5] = 77  # a class of one example
    assert store.separability(some).unlabelled == 3


# Stores of every kind


def test_filters_joins_and_pairs_are_sampled_like_datasets(tmp_path: Path) -> None:
    rows = normal(30, 3, 4)
    store = made(tmp_path, {0: rows, 1: rows[::-1].copy()}, {"label": [i % 2 for i in range(30)]})
    part = store.filter(slice(5, 25))
    alone = made(tmp_path, {0: rows[5:25], 1: rows[::-1][5:25].copy()}, {"label": [i % 2 for i in range(5, 25)]})
    joined = actshard.concat([store.filter(slice(5, 15)), store.filter(slice(15, 25))])
    for one in (part, joined):
        assert np.array_equal(one.spectrum(1, rows=33).eigenvalues, alone.spectrum(1, rows=33).eigenvalues)
        assert np.array_equal(one.similarity(rows=33).cka, alone.similarity(rows=33).cka)
        assert np.array_equal(one.separability("label").accuracy, alone.separability("label").accuracy)
    kept = store.spectrum(0, keep=np.arange(30) < 10)
    assert kept.total == 30
    assert np.array_equal(kept.eigenvalues, store.filter(slice(10)).spectrum(0).eigenvalues)
    assert store.spectrum(0, tokens="last").total == 30
    store.close()
    for look in (lambda: store.spectrum(0), store.similarity, lambda: store.separability("label")):
        refused(actshard.ClosedError, "closed", look)


def test_arguments_are_checked(tmp_path: Path) -> None:
    store = made(tmp_path, {0: normal(5, 2, 3)})
    refused(actshard.LayerError, "layer 9 is not stored", store.spectrum, 9)
    refused(actshard.LayerError, "layer 9 is not stored", store.similarity, [0, 9])
    refused(actshard.ArgumentError, "rows: expected an integer", store.spectrum, 0, rows=0)
    refused(actshard.ArgumentError, "rows: expected an integer", store.similarity, rows=1 << 40)
    refused(actshard.ArgumentError, "directions: expected an integer", store.spectrum, 0, directions=-1)
    refused(actshard.ArgumentError, "seed: expected an integer", store.spectrum, 0, seed=-1)
    refused(actshard.ArgumentError, "tokens: expected", store.spectrum, 0, tokens="some")
    for share in (0, 1.1, True, "x"):
        refused(actshard.ArgumentError, "share: expected a number", store.spectrum(0).rank_for, share)
    told: list[tuple[int, int]] = []
    store.spectrum(0, progress=lambda *x: told.append(x))
    store.similarity(progress=lambda *x: told.append(x))
    store.separability([0, 0, 1, 1, 1], progress=lambda *x: told.append(x))
    assert told == [(10, 10), (10, 10), (5, 5)]


def test_any_number_of_threads_gives_the_same_numbers(tmp_path: Path) -> None:
    """The sample and what is read have the same bits; sums of the library for matrices may differ by rounding."""
    store, _ = labelled(tmp_path, 300)
    code = """
import sys, json, actshard
store = actshard.open(sys.argv[1])
found = store.spectrum(1, rows=500), store.similarity(rows=700), store.separability("colour")
print(json.dumps([each.as_dict() for each in found]))
"""
    said = []
    for threads in ("1", "2", "7"):
        environment = {"OPENBLAS_NUM_THREADS": threads, "ACTSHARD_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(store.path)],
            check=True, capture_output=True, text=True, env={**os.environ, **environment},
        )  # fmt: skip
        said.append(json.loads(done.stdout))
    for other in said[1:]:
        assert np.allclose(said[0][0]["eigenvalues"], other[0]["eigenvalues"], rtol=1e-9)
        assert np.allclose(said[0][1]["cka"], other[1]["cka"], atol=1e-9)
        assert said[0][2] == other[2]
        assert [x["rows"] for x in said[0][:2]] == [x["rows"] for x in other[:2]]


def test_a_pair_of_models_is_compared_like_two_stores(tmp_path: Path) -> None:
    columns = {"prompt": [f"prompt {i}" for i in range(30)]}
    a, b = (made(tmp_path, {0: normal(30, 3, 4, seed=i), 1: normal(30, 3, 4, seed=i + 9)}, columns) for i in (0, 1))
    together = actshard.pair({"a": a, "b": b}).as_store().similarity()
    assert together.layers == ("a:0", "a:1", "b:0", "b:1")
    across = a.similarity(other=b)
    assert np.array_equal(across.cka, together.cka[:2, 2:])
    assert np.array_equal(across.cosine, together.cosine[:2, 2:])


def test_remote_rows_are_sampled_like_local_ones(tmp_path: Path) -> None:
    with actshard.create(
        tmp_path / "bucket", "saev", layers=[3, 7], d_model=64, num_examples=40, tokens_per_example=16
    ) as writer:
        writer.append(normal(40, 2, 16, 64))
    local = actshard.open(writer.path)
    with served(tmp_path) as server:
        remote = actshard.open(f"s3://bucket/{writer.path.name}", storage_options=server.options)
        assert np.array_equal(remote.spectrum(3, rows=50).eigenvalues, local.spectrum(3, rows=50).eigenvalues)
        assert np.array_equal(remote.similarity(rows=50).cka, local.similarity(rows=50).cka)
        labels = np.arange(40) % 2
        assert np.array_equal(remote.separability(labels).accuracy, local.separability(labels).accuracy)
