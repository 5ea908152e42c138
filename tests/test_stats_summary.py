"""Norms, positions, the largest values and repeated rows of a layer are what numpy finds in all rows."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import actshard
from actshard.looking.stats import MASSIVE, Stats
from actshard.looking.stats.summary import HASHES, Norms, NormsByPosition, Summary

N, T, D = 60, 100, 24


def made(path: Path, rows: NDArray[np.float32]) -> actshard.Store:
    with actshard.create(path, "npy", layers=["a"], d_model=rows.shape[-1]) as writer:
        writer.append(rows[:, None])
    return actshard.open(path)


@pytest.fixture(scope="module")
def rows() -> NDArray[np.float32]:
    rng = np.random.default_rng(5)
    made = rng.standard_normal((N, T, D)).astype(np.float32)
    made[:, :, 3] = 0
    made[:, :, 4] = 2.5
    made[:, 0] *= 500  # a sink
    made[7, 31, 9] = -90_000
    made[8:14] = made[2]
    made[1, 1, 1] = np.nan
    made[1, 2, 1] = -np.inf
    return made


@pytest.fixture(scope="module")
def stats(rows: NDArray[np.float32], tmp_path_factory: pytest.TempPathFactory) -> Stats:
    return made(tmp_path_factory.mktemp("stats") / "store", rows).stats("a")


def norms_of(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt((rows.astype(np.float64) ** 2).sum(-1)))


def test_zeros_are_counted(stats: Stats, rows: NDArray[np.float32]) -> None:
    assert stats.zeros.tolist() == (rows == 0).sum((0, 1)).tolist()
    assert stats.zeros[3] == N * T


def test_quantiles_of_norms_are_within_their_bound(stats: Stats, rows: NDArray[np.float32]) -> None:
    norms = norms_of(rows)
    norms = norms[np.isfinite(norms)]
    assert stats.norms.rows == len(norms) == N * T - 2
    wanted = np.linspace(0, 1, 101)
    expected = np.quantile(norms, wanted, method="inverted_cdf")
    assert (np.abs(stats.norms.quantile(wanted) - expected) <= expected / 256).all()
    found, _ = np.histogram(norms, stats.norms.edges)
    assert found.tolist() == stats.norms.counts.tolist()
    assert isinstance(stats.norms.median, float)


@settings(max_examples=60)
@given(st.lists(st.floats(0, 1e300), max_size=60), st.floats(0, 1))
def test_quantiles_of_any_norms(norms: list[float], q: float) -> None:
    bins: dict[int, int] = {}
    for norm in norms:
        number = int(np.array([norm]).view(np.uint64)[0]) >> 45
        bins[number] = bins.get(number, 0) + 1
    found = float(Norms.of(sorted(bins.items())).quantile(q))
    if not norms:
        assert np.isnan(found)
        return
    expected = float(np.quantile(norms, q, method="inverted_cdf"))
    assert abs(found - expected) <= max(expected / 256, 1e-300)


def test_norms_by_position(stats: Stats, rows: NDArray[np.float32]) -> None:
    norms = norms_of(rows)
    found = stats.norms_by_position
    assert found.first.tolist() == [*range(64), *range(64, T, 8)]
    assert found.end[:-1].tolist() == found.first[1:].tolist()
    for first, end, count, mean in zip(found.first, found.end, found.rows, found.mean, strict=True):
        some = norms[:, first:end]
        some = some[np.isfinite(some)]
        assert count == some.size
        np.testing.assert_allclose(mean, some.mean(), rtol=1e-12)


def test_quantiles_by_position_are_within_their_bound(stats: Stats, rows: NDArray[np.float32]) -> None:
    norms, found = norms_of(rows), stats.norms_by_position
    wanted = np.array([[0, 0.05, 0.5], [0.5, 0.95, 1]])
    made = found.quantile(wanted)
    assert made.shape == (2, 3, len(found.first))
    for i, (first, end) in enumerate(zip(found.first, found.end, strict=True)):
        some = norms[:, first:end]
        expected = np.quantile(some[np.isfinite(some)], wanted, method="inverted_cdf")
        assert (np.abs(made[..., i] - expected) <= expected / 16).all()
    assert found.quantile(0.5).shape == found.first.shape
    with pytest.raises(ValueError, match="fractions from 0 to 1"):
        found.quantile(1.5)


def test_ranges_of_positions_have_no_holes() -> None:
    found = NormsByPosition.of([(k, 1.0, 1) for k in range(300)])
    assert found.first.tolist() == [0, *found.end[:-1].tolist()]
    width = (found.end - found.first)[64:]
    assert (width * 8 <= found.first[64:]).all()


def test_the_largest_rows_and_columns_have_their_places(stats: Stats, rows: NDArray[np.float32]) -> None:
    norms = norms_of(rows)
    flat = np.where(np.isfinite(norms), norms, -1).reshape(-1)
    order = np.argsort(-flat, kind="stable")[:16]
    assert [(r.example, r.token) for r in stats.largest_rows] == [divmod(int(k), T) for k in order]
    np.testing.assert_allclose([r.norm for r in stats.largest_rows], flat[order], rtol=1e-12)
    sizes = np.where(np.isfinite(rows), np.abs(rows), -1).reshape(-1, D)
    best = np.argsort(-sizes.max(0), kind="stable")[:16]
    assert [c.column for c in stats.largest_columns] == best.tolist()
    for each in stats.largest_columns:
        assert each.magnitude == sizes[:, each.column].max()
        assert (each.example, each.token) == divmod(int(sizes[:, each.column].argmax()), T)


def test_massive_rows_and_columns_are_over_a_hundred_times_the_median(stats: Stats, rows: NDArray[np.float32]) -> None:
    norms = norms_of(rows)
    bound = MASSIVE * np.median(norms[np.isfinite(norms)])
    assert len(stats.massive_rows) == 16  # of more
    assert all(r.norm > bound for r in stats.massive_rows)
    assert {(r.example, r.token) for r in stats.massive_rows} >= {(7, 31)}
    assert stats.massive_columns[0].column == 9
    bound = MASSIVE * float(np.median(stats.rms))
    assert [c.column for c in stats.massive_columns] == [c.column for c in stats.largest_columns if c.magnitude > bound]


def test_repeated_rows_are_counted_exactly_while_there_are_few(tmp_path: Path, rows: NDArray[np.float32]) -> None:
    some = made(tmp_path / "few", rows[:14, 3:13]).stats("a").repeats
    # Examples 8 to 13 equal example 2.
    assert (some.different, some.repeated, some.rows, some.exact) == (80, 10, 140, True)
    assert some.fraction == pytest.approx(60 / 140)


def test_repeated_rows_of_many_are_estimated(stats: Stats) -> None:
    found = stats.repeats
    assert (found.different, found.exact) == (HASHES, False)
    assert 0.05 < found.fraction < 0.16  # 600 of 6,000
    assert abs(found.fraction - 0.1) < 3 * found.error
    assert found.error == pytest.approx(0.9 / 32, rel=0.1)


def test_rows_that_come_hundreds_of_times_are_estimated_within_the_error(tmp_path: Path) -> None:
    """Whether such a row is among the sampled ones does not matter."""
    rng = np.random.default_rng(3)
    frequent = rng.standard_normal((12, 4, 8)).astype(np.float32)
    rows = rng.standard_normal((12, 6000, 8)).astype(np.float32)
    rows[:, :1200] = frequent[:, rng.integers(0, 4, 1200)]  # 1,196 of 6,000 equal an earlier one, in each layer
    with actshard.create(tmp_path / "d", "npy", layers=range(12), d_model=8) as writer:
        writer.append(rows.transpose(1, 0, 2)[:, :, None])
    store = actshard.open(tmp_path / "d")
    repeats = [store.stats(layer).repeats for layer in store.layers]
    deviations = np.array([(x.fraction - 1196 / 6000) / x.error for x in repeats])
    assert (np.abs(deviations) < 4).all()
    assert abs(deviations.mean()) < 4 / math.sqrt(12)
    assert all(x.least <= 1196 / 6000 for x in repeats)
    for layer in store.layers:
        for advice in store.stats(layer).advice():
            if advice.kind == "repeats":
                assert re.match(r"about \d+% \(± \d%\) of the rows equal", advice.text)
                assert advice.size == 0, "no layer is the worst"


def test_a_dataset_of_different_rows_has_no_repeats_however_the_estimate_falls(tmp_path: Path) -> None:
    rows = np.random.default_rng(5).standard_normal((20, 3000, 4)).astype(np.float32)
    with actshard.create(tmp_path / "d", "npy", layers=range(20), d_model=4) as writer:
        writer.append(rows.transpose(1, 0, 2)[:, :, None])
    store = actshard.open(tmp_path / "d")
    assert not [x for layer in store.layers for x in store.stats(layer).advice() if x.kind == "repeats"]


def test_gamma_is_the_norm_of_the_mean_relative_to_that_of_the_deviations(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((20, 30, 8)) + 5).astype(np.float32)
    found = made(tmp_path / "shifted", values).stats("a")
    flat = values.reshape(-1, 8).astype(np.float64)
    np.testing.assert_allclose(found.gamma, np.linalg.norm(flat.mean(0)) / np.linalg.norm(flat.std(0)), rtol=1e-12)
    assert any("gamma is 5" in text and "center=stats.mean" in text for text in found.findings())
    assert made(tmp_path / "good", values - 5).stats("a").findings() == []
    assert np.isnan(made(tmp_path / "constant", values * 0).stats("a").gamma)


def test_findings_name_what_is_odd_and_where(stats: Stats) -> None:
    said = "\n".join(stats.findings())
    for text in (
        "1 NaN value in 1 of 24 dimensions",
        "1 infinite value in 1 of 24 dimensions",
        "1 of 24 dimensions is always 0: 3.",
        "9 (9e+04 at example 7, token 31)",
        "massive rows",
        "of the rows with finite norms equal an earlier row",
    ):
        assert text in said, said


def test_a_nearly_constant_dimension_is_found_and_can_be_limited(tmp_path: Path) -> None:
    rows = np.random.default_rng(4).standard_normal((20, 30, 8)).astype(np.float32)
    rows[:, :, 5] *= np.float32(1e-9)
    rows[:, :, 6] = 0
    store = made(tmp_path / "a", rows)
    stats = store.stats("a")
    (found,) = [each for each in stats.advice() if each.kind == "nearly constant"]
    assert "1 of 8 dimensions is nearly constant: 5 (1e-09)" in found.text
    limited = eval(found.code.removeprefix("divide="), {"np": np, "stats": stats})
    stream = store.stream("a", 600, center=stats.mean, divide=limited, dtype="float64")
    assert [float(f"{x:.1g}") for x in next(iter(stream)).activations.std(0)] == [1, 1, 1, 1, 1, 0.001, 0, 1]
    rows[:, :, :5] = 3  # most are constant: the limit is that of the others
    stats = made(tmp_path / "most", rows).stats("a")
    (found,) = [each for each in stats.advice() if each.kind == "nearly constant"]
    limited = eval(found.code.removeprefix("divide="), {"np": np, "stats": stats})
    assert 1e-7 < limited.min() < 1e-5
    rows[:, :, 5] *= np.float32(1e9)
    assert not [each for each in made(tmp_path / "b", rows).stats("a").advice() if each.kind == "nearly constant"]


def test_the_limit_of_nearly_constant_dimensions_can_be_used_beside_one_of_nan(tmp_path: Path) -> None:
    rows = np.random.default_rng(4).standard_normal((20, 30, 8)).astype(np.float32)
    rows[:, :, 5] *= np.float32(1e-9)
    rows[:, :, 6] = np.nan
    store = made(tmp_path / "a", rows)
    stats = store.stats("a")
    (found,) = [each for each in stats.advice() if each.kind == "nearly constant"]
    limited = eval(found.code.removeprefix("divide="), {"np": np, "stats": stats})
    assert next(iter(store.stream("a", 600, center=0.0, divide=limited))).activations.shape == (600, 8)


def test_repeated_rows_are_counted_among_those_with_finite_norms(tmp_path: Path) -> None:
    """Rows with one NaN are different, and rows of NaN equal: both have their own finding."""
    rows = np.random.default_rng(0).standard_normal((40, 10, 16)).astype(np.float32)
    flat = rows.reshape(400, 16)
    flat[:160, 3] = np.nan
    flat[280:] = flat[280]
    stats = made(tmp_path / "some", rows).stats("a")
    assert (stats.repeats.rows, stats.repeats.different) == (240, 121)
    (found,) = [each for each in stats.advice() if each.kind == "repeats"]
    assert "49.58% of the rows with finite norms equal an earlier row" in found.text
    flat[:] = np.random.default_rng(1).standard_normal((400, 16))
    flat[:160] = np.nan
    flat[-3:] = flat[-1]
    stats = made(tmp_path / "nan", rows).stats("a")
    assert (stats.repeats.rows, stats.repeats.different) == (240, 238)
    assert not [each for each in stats.advice() if each.kind == "repeats"]


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e200, 1e300])
def test_rows_whose_squares_overflow_or_vanish_have_norms(size: float, tmp_path: Path) -> None:
    rows = np.random.default_rng(4).standard_normal((1, 300, 5))
    rows[0, 7:9] *= size
    with actshard.create(tmp_path / "d", "npy", layers=[0], d_model=5, dtype="float64") as writer:
        writer.append(rows[:, None])
    stats = actshard.open(tmp_path / "d").stats(0)
    norms = [math.hypot(*row) for row in rows[0].tolist()]
    assert stats.norms.rows == 300
    assert stats.mean_norm == pytest.approx(math.fsum(norms) / 300, rel=1e-12)
    largest = sorted(range(300), key=lambda k: -norms[k])[:16]
    assert [row.token for row in stats.largest_rows] == largest
    assert [row.norm for row in stats.largest_rows] == pytest.approx([norms[k] for k in largest], rel=1e-12)
    assert stats.norms.quantile([0.0])[0] == pytest.approx(min(norms), rel=1 / 256)


def test_rows_of_nan_are_no_repeated_rows(tmp_path: Path) -> None:
    rows = np.random.default_rng(4).standard_normal((20, 30, 8)).astype(np.float32)
    rows[10:] = np.nan
    assert not [each for each in made(tmp_path / "a", rows).stats("a").advice() if each.kind == "repeats"]
    rows[10:] = 1
    assert [each for each in made(tmp_path / "b", rows).stats("a").advice() if each.kind == "repeats"]


def test_a_sink_after_a_special_token_is_found(tmp_path: Path) -> None:
    """Content begins at token 1: ``min_token=2`` leaves the first content token out."""
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((40, 1, 9, 16)).astype(np.float32)
    rows[:, :, 1] *= 50
    with actshard.create(tmp_path / "run", "saev", layers=[0], d_model=16, cls_token=True) as writer:
        writer.append(rows)
    store = actshard.open(tmp_path / "run")
    assert any("attention sinks" in text and "min_token=2" in text for text in store.stats(0).findings())
    assert not any("sinks" in text for text in store.stats(0, tokens="special").findings())


def test_an_empty_dataset_has_a_summary(tmp_path: Path) -> None:
    found = made(tmp_path / "empty", np.zeros((3, 0, D), np.float32)).stats("a")
    assert (found.rows, found.norms.rows, found.largest_rows, found.repeats.fraction) == (0, 0, (), 0.0)
    assert found.findings() == ["has no rows."]


def test_statistics_come_back_from_json(stats: Stats) -> None:
    again = Stats.of_plain(stats.as_plain())
    assert again.as_plain() == stats.as_plain()
    assert again.findings() == stats.findings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_bins", [[2, 1], [1, 1]]),
        ("norm_bins", [[1 << 40, 1]]),
        ("norm_bins", [[True, 1]]),
        ("positions", [[3, "nan", 1]]),
        ("positions", [[3, "inf", 1]]),
        ("largest_rows", [["-0x1p3", 1, 1]]),
        ("largest_columns", [[0, "0x1p3", -1, 1]]),
        ("bands", [[1, 2, 3], [1, 2, 3]]),
        ("bands", [[1, 0x7FF << 3, 3]]),
        ("bands", [[1 << 20, 2, 3]]),
        ("bands", [[1, 2, -3]]),
        ("bands", [[0, 100, 0]]),
        ("norm_bins", [[1, 1 << 43]]),
        ("largest_rows", [["0x1p+0", 0, 0]] * 17),
        ("hashes", [["g", 1]]),
        ("hashes", [[f"{k:x}", 1] for k in range(HASHES + 1)]),
        ("hashes", None),
    ],
)
def test_a_summary_that_was_changed_is_refused(stats: Stats, name: str, value: object) -> None:
    with pytest.raises((LookupError, TypeError, ValueError, OverflowError)):
        Summary.of_plain({**stats.as_plain(), name: value})


def test_equal_rows_are_one_finding_and_rows_of_embeddings_a_note(tmp_path: Path) -> None:
    same = np.ones((20, 3, 8), np.float32)
    (found,) = (x for x in made(tmp_path / "same", same).stats("a").advice())
    assert (found.kind, found.severity) == ("equal rows", "warning")
    assert "all 60 rows are equal" in str(found)
    same[0, 0] = np.nan
    said = [(x.kind, str(x)) for x in made(tmp_path / "bad", same).stats("a").advice()]
    assert [kind for kind, _ in said] == ["NaN", "constant"]
    assert "8 of 8 dimensions are constant, apart from NaN and infinite values: 0" in said[1][1]
    same[:] = np.nan
    assert {x.kind for x in made(tmp_path / "nan", same).stats("a").advice()} == {"NaN"}
    rng = np.random.default_rng(0)
    table = rng.standard_normal((10, 8))
    rows = table[rng.integers(0, 10, (20, 1, 30))].astype(np.float32)
    with actshard.create(tmp_path / "embedded", "zarr", layers=[0, 1], d_model=8) as writer:
        writer.append(np.repeat(rows, 2, axis=1))
    store = actshard.open(tmp_path / "embedded")
    kinds = [[(x.kind, x.severity) for x in store.stats(layer).advice() if x.kind == "repeats"] for layer in (0, 1)]
    assert kinds == [[("repeats", "note")], [("repeats", "warning")]]


@pytest.mark.parametrize(("times", "kinds"), [(1, []), (30, ["sinks"]), (500, ["massive rows"])])
def test_first_tokens_of_large_norms_are_sinks(times: int, kinds: list[str], tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((20, 9, 16)).astype(np.float32)
    rows[:, 0] *= times
    found = made(tmp_path / "a", rows).stats("a").advice()
    assert [x.kind for x in found] == kinds
    assert all(x.code == "min_token=1" for x in found)


def test_one_massive_first_token_is_no_sink(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((20, 9, 16)).astype(np.float32)
    rows[3, 0] *= 1e6
    (found,) = made(tmp_path / "a", rows).stats("a").advice()
    assert found.kind == "massive rows"
    assert str(found).startswith("1 massive row, over 100 times the median norm: example 3 token 0 (norm ")
    assert str(found).endswith('Leave it out: max_norm="10x median"')


def test_dimensions_of_a_large_root_mean_square_are_outliers(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((20, 9, 16)).astype(np.float32) * 0.1
    rows[:, ::2, 5] += 4
    rows[:, 1::2, 5] -= 4
    rows[:, :, 6] *= 300
    found = {x.kind: str(x) for x in made(tmp_path / "a", rows).stats("a").advice()}
    assert set(found) == {"massive dimensions", "outlier dimensions"}
    assert "1 outlier dimension: 5. It has 4" in found["outlier dimensions"]
    assert found["outlier dimensions"].endswith(": center=stats.mean, scale=stats.inverse_std")


@pytest.mark.parametrize("tokens", ["content", "last"])
def test_sampled_rows_are_those_of_the_seed(tmp_path: Path, rows: NDArray[np.float32], tokens: Any) -> None:
    """Against numpy over the rows that a spectrum of the same size and seed reads."""
    from actshard.looking.sampled.spectrum import sample
    from actshard.streaming.selection import Selection

    store = made(tmp_path / "store", rows)
    at = sample(Selection(tokens).resolve(store, ["a"]), 50, 3)
    found = store.stats("a", tokens=tokens, rows=50, seed=3)
    chosen = rows[at.examples, at.tokens].astype(np.float64)
    chosen[~np.isfinite(chosen)] = np.nan
    assert found.rows == len(chosen) == 50
    np.testing.assert_allclose(found.mean, np.nanmean(chosen, 0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.std, np.nanstd(chosen, 0), rtol=1e-9, atol=1e-12)
    largest = found.largest_rows[0]
    assert np.isclose(norms_of(rows)[largest.example, largest.token], largest.norm)
    every = store.stats("a", tokens=tokens, rows=10_000)
    assert every.as_plain() == store.stats("a", tokens=tokens).as_plain()


def test_samples_of_selected_rows_and_of_examples_of_different_lengths(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    parts = [rng.standard_normal((n, 4)).astype(np.float32) for n in (3, 0, 9, 40, 1)]
    with actshard.create(tmp_path / "run", "pickle", layers=[0], d_model=4) as writer:
        for part in parts:
            writer.append(part[None, None])
    store = actshard.open(tmp_path / "run")
    kept = np.array([True, True, False, True, False])
    assert store.stats(0, keep=kept, rows=11).rows == 11
    every = store.stats(0, keep=kept, rows=1000)
    np.testing.assert_allclose(every.mean, np.concatenate([parts[0], parts[3]]).mean(0, dtype=np.float64), rtol=1e-6)
    assert store.filter([2, 3]).stats(0, rows=5).rows == 5
    kept = [store.stats(0, rows=5, seed=seed, save=True).as_plain() for seed in (0, 1, 0)]
    assert kept == [store.stats(0, rows=5, seed=seed).as_plain() for seed in (0, 1, 0)]
    assert kept[0] != kept[1]
    with pytest.raises(actshard.ArgumentError, match="rows: expected"):
        store.stats(0, rows=0)
