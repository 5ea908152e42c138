"""``actshard.estimate``: what it tells is what a conversion then takes, and how far its rows are from the source's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import actshard
from actshard.writing.converting import previewing
from shell import run_command

WIDTH = 32


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty examples of float32 rows that bfloat16 holds, with the token ids that draft formats ask for."""
    rng = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("estimating") / "d"
    scale = np.exp(rng.normal(size=WIDTH))
    with actshard.create(path, "safetensors", layers=["last"], d_model=WIDTH, dtype="float32") as writer:
        for n in rng.integers(20, 60, 40).tolist():
            rows = (rng.standard_normal((1, n, WIDTH)) * scale).astype(np.float32)
            rounded = (rows.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            writer.append([rounded], columns={"input_ids": [list(range(n))]})
    return path


@pytest.fixture(scope="module")
def estimates(dataset: Path) -> list[actshard.Estimate]:
    return actshard.estimate(dataset)


@pytest.fixture(scope="module")
def conversions(
    dataset: Path, estimates: list[actshard.Estimate], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[actshard.Estimate, Path]]:
    """Each form that is possible, with the dataset in that form."""
    folder = tmp_path_factory.mktemp("converted")
    return [
        (
            e,
            Path(actshard.convert(dataset, folder / e.name, e.format, **e.options).path),
        )
        for e in estimates
        if e.refused is None
    ]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_each_form_takes_the_bytes_and_files_that_were_told(conversions: list[tuple[actshard.Estimate, Path]]) -> None:
    assert {e.format for e, _ in conversions} >= {"zarr", "npy", "safetensors", "speculators"}
    for estimate, path in conversions:
        # The record of the conversion contains the path of the result, in some formats.
        assert abs(size_of(path) - estimate.bytes) <= 0.02 * estimate.bytes, estimate
        assert sum(file.is_file() for file in path.rglob("*")) == estimate.files, estimate
        assert estimate.uncertainty == 0


def test_forms_are_sorted_by_size_and_those_that_are_not_possible_come_last_with_the_reason(
    estimates: list[actshard.Estimate],
) -> None:
    possible = [e.bytes for e in estimates if e.refused is None]
    assert possible == sorted(possible)
    assert all(e.refused is None for e in estimates[: len(possible)])
    assert all(e.refused for e in estimates[len(possible) :])
    assert len(possible) < len(estimates)


def test_the_errors_are_those_of_the_rows_that_a_conversion_stores(
    dataset: Path, conversions: list[tuple[actshard.Estimate, Path]]
) -> None:
    given = np.concatenate(list(actshard.open(dataset).sequences(range(40), "last"))).astype(np.float64)
    for estimate, path in conversions:
        store = actshard.open(path)
        stored = np.concatenate(list(store.sequences(range(40), store.layers[0]))).astype(np.float64)
        error = np.linalg.norm(stored - given) / np.linalg.norm(given)
        assert estimate.relative_error == pytest.approx(error, rel=1e-5, abs=1e-12), estimate
        cosine = ((stored * given).sum(1) / np.linalg.norm(stored, axis=1) / np.linalg.norm(given, axis=1)).mean()
        assert estimate.cosine == pytest.approx(cosine, abs=1e-6)
    forms = {e.name: e for e, _ in conversions}
    assert sum(e.relative_error > 0 for e in forms.values()) >= 6  # int8 five times, float8
    recorded = {e.name: actshard.open(path).metadata.get("activation_scales") for e, path in conversions}
    for name in ("zarr 3 int8 per channel", "zarr 3 int8 per token", "zarr 3 int8 per channel lossless"):
        assert forms[name].relative_error == pytest.approx(recorded[name]["relative_error"], rel=1e-5)
        assert forms[name].cosine == pytest.approx(recorded[name]["cosine"], rel=1e-6)
    assert all(forms[name].relative_error == 0 for name in ("zarr 3", "zarr 3 lossless", "zarr 3 bfloat16 lossless"))
    assert forms["zarr 3 lossless"].bytes < 0.7 * forms["zarr 3"].bytes  # two of four bytes are zero


@pytest.mark.parametrize("factor", [1e60, 1e-68])
def test_values_that_a_form_cannot_hold_are_refused_or_an_error(tmp_path: Path, factor: float) -> None:
    rows = np.random.default_rng(1).standard_normal((5, 3, 10, 16)) * np.array([1, factor, 1])[None, :, None, None]
    with actshard.create(tmp_path / "d", "safetensors", layers=[0, 1, 2], d_model=16, dtype="float64") as writer:
        writer.append(rows)
    lossless, bfloat16 = (
        next(e for e in actshard.estimate(tmp_path / "d") if e.name == name)
        for name in ("zarr 3 lossless", "zarr 3 bfloat16 lossless")
    )
    assert (lossless.relative_error, lossless.cosine) == (0, 1)
    if factor > 1:
        assert "would become infinite" in str(bfloat16.refused)
    else:
        assert bfloat16.relative_error == pytest.approx(np.sqrt(1 / 3), rel=0.01)


def test_values_that_are_not_finite_are_left_out_of_the_error(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((5, 1, 10, 16)).astype(np.float32)
    for name, number in (("some", 4), ("all", 16)):
        holed = rows.copy()
        holed[..., :number] = np.nan
        with actshard.create(tmp_path / name, "safetensors", layers=[0], d_model=16, dtype="float32") as writer:
            writer.append(holed)
    (some,), (nothing,) = (actshard.estimate(tmp_path / name, "zarr 3 bfloat16 lossless") for name in ("some", "all"))
    assert some.relative_error == pytest.approx(0.0017, rel=0.2)
    assert nothing.relative_error is None
    assert nothing.cosine is None


def test_the_size_of_ragged_examples_is_scaled_by_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    lengths = np.where(rng.random(700) < 0.02, 400, rng.integers(1, 12, 700)).tolist()
    with actshard.create(tmp_path / "d", "safetensors", layers=[0], d_model=64, dtype="float32") as writer:
        writer.append([rng.standard_normal((1, n, 64)).astype(np.float32) for n in lengths])
    monkeypatch.setattr(previewing, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(previewing, "SAMPLE_BYTES", 1 << 20)
    (estimate,) = actshard.estimate(tmp_path / "d", ["zarr 3 lossless"])
    size = size_of(Path(actshard.convert(tmp_path / "d", tmp_path / "z", "zarr", **estimate.options).path))
    assert abs(size - estimate.bytes) <= 0.08 * size


def test_the_size_of_what_is_not_written_whole_is_extrapolated_from_all_over_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    with actshard.create(tmp_path / "d", "npy", layers=[0], d_model=128) as writer:
        for example in range(400):  # the middle third can be packed much better
            rows = rng.standard_normal((32, 128)).astype(np.float32)
            writer.append([(np.round(rows) if 133 <= example < 266 else rows)[None]])
    monkeypatch.setattr(previewing, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(previewing, "SAMPLE_BYTES", 2 << 20)
    (estimate,) = actshard.estimate(tmp_path / "d", ["zarr 3 lossless"])
    done = actshard.convert(tmp_path / "d", tmp_path / "z", "zarr", **estimate.options)
    size = size_of(Path(done.path))
    assert abs(size - estimate.bytes) <= max(0.05 * size, estimate.uncertainty)
    assert 0 < estimate.uncertainty < 0.5 * size


def test_a_sample_has_runs_of_examples_from_all_over_the_dataset() -> None:
    rng = np.random.default_rng(7)
    for n, limit in ((1, 1), (3, 10), (8, 100), (1000, 5000), (1000, 10**9), (50, 1)):
        sizes = rng.integers(0, 100, n)
        sizes[n // 2] = 70
        numbers = previewing.spread(sizes, limit)
        assert len(numbers) > 0
        assert (np.diff(numbers) > 0).all()
        assert sizes[numbers].sum() <= max(limit, sizes[numbers[0]])
        assert sizes[numbers].sum() > 0
        if sizes.sum() > limit >= 5000:
            assert sizes[numbers].sum() > 0.8 * limit
            assert numbers[0] < n // 8
            assert numbers[-1] > n * 7 // 8


def test_an_unknown_form_and_a_dataset_without_rows_are_errors(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(actshard.ArgumentError, match=r"do you mean 'zarr 3 lossless'"):
        actshard.estimate(dataset, ["zarr 3 losless"])
    with actshard.create(tmp_path / "e", "safetensors", layers=[0], d_model=4) as writer:
        writer.append([np.zeros((1, 0, 4), np.float32)])
    with pytest.raises(actshard.NotStoredError, match="expected rows, found none"):
        actshard.estimate(tmp_path / "e")


def test_the_command_prints_a_line_per_form(dataset: Path) -> None:
    listed = run_command("convert", str(dataset), "--to", "zarr", "--estimate")
    assert listed.returncode == 0, listed.stderr
    assert "zarr 3 lossless" in listed.stdout
    values = json.loads(run_command("convert", str(dataset), "--to", "zarr", "--estimate", "--json").stdout)
    assert {value["format"] for value in values} == {"zarr"}
    assert all(value["bytes"] > 0 for value in values if value["refused"] is None)


def test_options_that_an_estimate_does_not_take_are_refused(dataset: Path) -> None:
    for words in (
        ["--dtype", "float16"],
        ["-o", "version=3"],
        ["--layer", "last"],
        ["--dry-run"],
        ["--tokens", "last"],
    ):
        refusal = run_command("convert", str(dataset), "--estimate", *words)
        assert refusal.returncode == 3, words
        assert "has no effect with --estimate" in refusal.stderr
    refusal = run_command("convert", str(dataset), "--estimate", "--to", "automodel", "--json")
    assert refusal.returncode == 2
    assert json.loads(refusal.stdout)[0].keys() == {"name", "format", "options", "refused"}
