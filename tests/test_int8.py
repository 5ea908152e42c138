"""int8 codes with scales in Zarr stores: products, errors and counts equal those of plain numpy, through every reading verb."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import actshard
import actshard._native as _native
from served import served
from shell import run_command

WIDTH = 64
LAYERS: list[int | str] = [3, "mid"]
KINDS = ("channel", "token", "layer", "block32", "block64")
SMALL: dict[str, Any] = {"version": 3, "chunk_tokens": 4, "shard_bytes": 2000}


def examples(lengths: list[int], seed: int = 0, dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.standard_normal((2, 1, WIDTH)))
    return [(rng.standard_normal((2, n, WIDTH)) * spread).astype(dtype) for n in lengths]


def oracle(rows: list[np.ndarray], kind: str, sample: list[np.ndarray] | None = None) -> tuple[list[np.ndarray], int]:
    """The rows as they must be read, and how many values saturate. ``sample``: the rows that determine scales of layers."""
    stored, saturated = [], 0
    largest = np.abs(np.concatenate(sample or rows, axis=1).astype(np.float32))
    for example in rows:
        x = example.astype(np.float32)
        if kind == "channel":
            most = largest.max(axis=1, keepdims=True)
            most = np.where(most > 0, most, most.max(axis=2, keepdims=True))
        elif kind == "layer":
            most = largest.max(axis=(1, 2), keepdims=True)
        else:
            block = {"token": WIDTH, "block32": 32, "block64": 64}[kind]
            blocks = np.abs(x).reshape(*x.shape[:2], WIDTH // block, block)
            most = np.repeat(blocks.max(axis=3), block, axis=2)
        scale = np.maximum(most / np.float32(127), np.float32(1e-12))
        quotient = x / scale
        saturated += int((np.abs(quotient) > 127.5).sum())
        stored.append(np.clip(np.round(quotient), -127, 127).astype(np.float32) * scale)
    return stored, saturated


def written(path: Path, rows: list[np.ndarray], step: int = 100, **options: Any) -> Path:
    with actshard.create(path, "zarr", layers=LAYERS, d_model=WIDTH, dtype="int8", **options) as writer:
        for first in range(0, len(rows), step):
            writer.append(rows[first : first + step])
    return path


def check_rows(store: actshard.Store, expected: list[np.ndarray]) -> None:
    for k, layer in enumerate(LAYERS):
        assert all(np.array_equal(store.sequence(i, layer), x[k]) for i, x in enumerate(expected))


def files(root: Path) -> dict[str, bytes]:
    every = (file for file in sorted(root.rglob("*")) if file.is_file() and not file.name.startswith(".actshard"))
    return {str(file.relative_to(root)): file.read_bytes() for file in every}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{"version": 2}, {"version": 3}, SMALL, {"version": 3, "pack": "lossless"}, {"version": 3, "pack": "zstd"}],
)
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_every_verb_reads_the_products_of_codes_and_scales(
    tmp_path: Path, kind: str, options: dict[str, Any], io: Any
) -> None:
    rows = examples([5, 0, 17, 90, 1])
    expected, _ = oracle(rows, kind)
    path = written(tmp_path / "d", rows, scales=kind, **options)
    store = actshard.open(path, io=io)
    assert (store.dtype, store.d_model, store.layers) == (np.float32, WIDTH, tuple(LAYERS))
    check_rows(store, expected)
    present = [0, 2, 3, 4]
    assert np.array_equal(store.last_tokens("mid", present), np.stack([expected[i][1, -1] for i in present]))
    numbers, tokens = np.array([3, 0, 3, 2, 4]), np.array([80, 4, 1, 16, 0])
    picked = np.stack([expected[i][0, t] for i, t in zip(numbers, tokens, strict=True)])
    assert np.array_equal(store.gather(3, numbers, tokens), picked)
    half = store.gather(3, numbers, tokens, dtype="bfloat16")
    assert np.array_equal(half, picked.astype(ml_dtypes.bfloat16))
    for shuffle in (None, "window", "exact"):
        count = 0
        for batch in store.stream("mid", 32, shuffle=shuffle, seed=2):
            places = zip(batch.examples.tolist(), batch.tokens.tolist(), strict=True)
            assert np.array_equal(batch.activations, np.stack([expected[i][1, t] for i, t in places]))
            count += len(batch.activations)
        assert count == 113
    assert actshard.verify(path, deep=True).ok


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_in_the_metadata_is_that_of_the_rows(tmp_path: Path, kind: str) -> None:
    rows = examples([30, 7, 90], dtype=ml_dtypes.bfloat16)
    with actshard.create(tmp_path / "s", "zarr", version=3, layers=LAYERS, d_model=WIDTH, dtype="bfloat16") as writer:
        writer.append(rows)
    done = actshard.convert(tmp_path / "s", tmp_path / "d", "zarr", version=3, dtype="int8", scales=kind, verify=True)
    (loss,) = (loss.detail for loss in done.losses if loss.what == "scales")
    store = actshard.open(done.path)
    about = store.metadata["activation_scales"]
    x = np.concatenate(rows, axis=1).astype(np.float64)
    y = np.concatenate(oracle(rows, kind)[0], axis=1).astype(np.float64)
    errors = [float(np.linalg.norm(x[k] - y[k]) / np.linalg.norm(x[k])) for k in range(2)]
    assert about["relative_error_of_layers"] == pytest.approx(errors, rel=1e-12)
    assert about["relative_error"] == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=1e-12)
    norms = np.linalg.norm(x, axis=2) * np.linalg.norm(y, axis=2)
    assert about["cosine"] == pytest.approx(((x * y).sum(axis=2) / norms).mean(), rel=1e-12)
    assert about["max_row_error"] == pytest.approx(
        (np.linalg.norm(x - y, axis=2) / np.linalg.norm(x, axis=2)).max(), rel=1e-9
    )
    assert about["max_abs_error"] == np.abs(x - y).max()
    assert about["vanished"] == int(((x != 0) & (y == 0)).sum())
    assert (about["kind"], about["saturated"], about["values"]) == (kind, 0, x.size)
    assert f"relative error {about['relative_error']:.2g}" in loss
    of_layers = kind in ("channel", "layer")
    assert about["scales_from"] == ("all rows" if of_layers else "each row")
    shown = run_command("info", str(done.path)).stdout
    assert "int8, scale per" in shown
    assert ("from all rows" in shown) == of_layers
    assert f"{about['relative_error']:.2g}" in shown


@pytest.mark.filterwarnings("ignore::actshard.OverflowWarning")
@pytest.mark.parametrize("kind", ["channel", "layer"])
def test_scales_of_created_layers_are_those_of_the_first_block_and_saturation_is_counted(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel that is zero in the first block has its layer's scale, not one with which every later value saturates."""
    monkeypatch.setattr("actshard.formats.target.Target.block_bytes", 10 * 2 * WIDTH * 4)
    rows = [x * (1 if i == 0 else 3) for i, x in enumerate(examples([10] * 4))]
    rows[0][:, :, 5] = 0
    expected, saturated = oracle(rows, kind, sample=rows[:1])
    store = actshard.open(written(tmp_path / "d", rows, scales=kind, version=3))
    check_rows(store, expected)
    about = store.metadata["activation_scales"]
    assert about["saturated"] == saturated > 0
    assert about["scales_from"] == "the first 20 rows"
    assert about["relative_error"] < 0.6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"version": 2}, SMALL, {**SMALL, "pack": "lossless"}])
def test_tasks_of_a_conversion_write_the_bytes_of_one_process(
    tmp_path: Path, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    rows = examples(np.random.default_rng(2).integers(0, 20, 30).tolist())
    with actshard.create(tmp_path / "s", "zarr", version=3, layers=LAYERS, d_model=WIDTH) as writer:
        writer.append(rows)
    options = {**options, "dtype": "int8", "scales": kind}
    actshard.convert(tmp_path / "s", tmp_path / "one", "zarr", **options)
    check_rows(actshard.open(tmp_path / "one"), oracle(rows, kind)[0])
    for tasks in (1, 5):
        plan = actshard.plan.convert(tmp_path / "s", tmp_path / f"d{tasks}", "zarr", tasks=tasks, **options)
        for task in reversed(range(len(plan))):
            plan.run(task)
        assert len(plan) == tasks
        assert files(plan.commit().path) == files(tmp_path / "one")
        assert plan.predicted.files == len(files(tmp_path / "one")) + 1  # and the record
    again = actshard.convert(tmp_path / "s", tmp_path / "one", "zarr", exist_ok=True, **options)
    assert any(loss.what == "scales" and "relative error" in loss.detail for loss in again.losses)


@pytest.mark.filterwarnings("ignore::actshard.OverflowWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"version": 2}, SMALL, {**SMALL, "pack": "lossless"}])
def test_a_resumed_writer_continues_with_the_first_scales_and_counts(
    tmp_path: Path, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    rows = examples(np.random.default_rng(2).integers(1, 20, 21).tolist())
    rows[10:] = [5 * x for x in rows[10:]]

    def written_to(path: Path, stops: bool) -> Path:
        done = False
        while not done:
            with actshard.create(
                path, "zarr", layers=LAYERS, d_model=WIDTH, dtype="int8", scales=kind, resume=True, **options
            ) as writer:
                while len(writer) < len(rows):
                    writer.append(rows[len(writer) : len(writer) + 7])
                    writer.flush()
                    if stops and len(writer) < len(rows):
                        writer.abort()
                        break
                else:
                    done = True
        return path

    whole, stopped = written_to(tmp_path / "whole", False), written_to(tmp_path / "stopped", True)
    assert files(whole) == files(stopped)
    expected, saturated = oracle(rows, kind, sample=rows[:7])
    check_rows(actshard.open(stopped), expected)
    assert actshard.open(stopped).metadata["activation_scales"]["saturated"] == saturated


def test_a_journal_with_other_errors_or_scales_is_an_error(tmp_path: Path) -> None:
    for place, value in (("loss", {}), ("loss", {"errors": ["!"]}), ("scale_values", "AAAA"), ("scale_values", 3)):
        path = tmp_path / f"{place}{value}"
        options: dict[str, Any] = {"layers": LAYERS, "d_model": WIDTH, "dtype": "int8", "scales": "channel", **SMALL}
        writer = actshard.create(path, "zarr", **options)
        writer.append(examples([9] * 7))
        writer.flush()
        writer.abort()
        (journal,) = path.glob(".actshard/*journal*")
        first, commit = map(json.loads, journal.read_text().splitlines())
        (commit["state"] if place == "loss" else first["config"])[place] = value
        journal.write_text("\n".join([json.dumps(first), json.dumps(commit), ""]))
        with pytest.raises(actshard.FormatError, match="zarr"):
            actshard.create(path, "zarr", resume=True, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_with_their_place(tmp_path: Path, kind: str, value: float) -> None:
    rows = examples([4, 6, 5])
    rows[1][1, 2, 60] = value
    with actshard.create(tmp_path / "s", "zarr", layers=LAYERS, d_model=WIDTH) as writer:
        writer.append(rows)
    place = "example 1, layer mid, token 2"
    with pytest.raises(actshard.DtypeError, match=place):
        actshard.convert(tmp_path / "s", tmp_path / "d", "zarr", version=3, dtype="int8", scales=kind)
    assert not (tmp_path / "d").exists()
    with pytest.raises(actshard.DtypeError, match=place):
        written(tmp_path / "c", rows, scales=kind)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"dtype": "int8"}, actshard.DtypeError, "pass scales="),
        ({"scales": "channel"}, actshard.ArgumentError, "expected dtype='int8'"),
        ({"scales": "channel", "dtype": "float32"}, actshard.ArgumentError, "expected dtype='int8'"),
        ({"scales": "chanel", "dtype": "int8"}, actshard.ArgumentError, "do you mean 'channel'"),
        ({"scales": "whole", "dtype": "int8"}, actshard.ArgumentError, "scales must be one of"),
        ({"scales": "block32", "dtype": "int8", "d_model": 48}, actshard.ArgumentError, "32 divides, found 48"),
        (
            {"scales": "channel", "dtype": "int8", "metadata": {"activation_scales": 1}},
            actshard.ArgumentError,
            "reserved",
        ),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        actshard.create(tmp_path / "d", "zarr", layers=LAYERS, **{"d_model": WIDTH, **options})


def test_stores_are_converted_joined_merged_filtered_and_served(tmp_path: Path) -> None:
    parts = [examples([4, 6, 5], seed) for seed in range(2)]
    expected = [x for rows in parts for x in oracle(rows, "channel")[0]]
    paths = [written(tmp_path / f"bucket/{k}", rows, scales="channel", **SMALL) for k, rows in enumerate(parts)]
    check_rows(actshard.concat(list(map(actshard.open, paths))), expected)
    run = actshard.merge(tmp_path / "run", paths)
    check_rows(actshard.open(run), expected)
    assert actshard.verify(run, deep=True).ok
    with pytest.raises(actshard.ArgumentError, match="plain version 2 chunks"):
        actshard.merge(tmp_path / "x", [written(tmp_path / "p", parts[0], scales="layer")], physical=True)
    chosen = actshard.open(run).filter(examples=[1, 4])
    assert np.array_equal(chosen.sequence(1, 3), expected[4][0])
    back = actshard.convert(run, tmp_path / "back", "hf_arrow", verify=True)
    check_rows(actshard.open(back.path), expected)
    again = actshard.convert(run, tmp_path / "again", "zarr", version=3, verify=True)
    check_rows(actshard.open(again.path), expected)
    assert "activation_scales" not in actshard.open(again.path).metadata


@pytest.mark.parametrize("kind", ["channel", "block32"])
@pytest.mark.parametrize("options", [{"version": 2}, {"version": 3}, {"version": 3, "pack": "lossless"}])
def test_remote_stores_read_the_same_rows(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    rows = examples([4, 60, 4])
    options = {"chunk_tokens": 4, **options}
    local = actshard.open(written(tmp_path / "bucket/d", rows, scales=kind, **options))
    with served(tmp_path) as server, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*inner chunks of remote shards are read whole .up to 256 bytes")
        store = actshard.open("s3://bucket/d", storage_options=server.options)
        check_rows(store, oracle(rows, kind)[0])
        batches = [s.stream("mid", 16, shuffle="exact") for s in (local, store)]
        assert all(np.array_equal(a.activations, b.activations) for a, b in zip(*batches, strict=True))


def damage(path: Path, **changes: Any) -> None:
    """Changes fields of the attribute, or of the metadata of an array."""
    for file in (path / ".zattrs", path / "meta/config.json"):
        value = json.loads(file.read_text())
        value["activation_scales"] = {**value["activation_scales"], **changes}
        file.write_text(json.dumps(value))
    (path / ".zmetadata").unlink()


def test_scales_that_do_not_fit_are_errors_that_name_the_file(tmp_path: Path) -> None:
    rows = examples([4, 6])
    for number, (array, match) in enumerate(
        [
            ("arrays/none", "found none"),
            (3, "a string"),
            ("../arrays", "below arrays"),
            ("arrays/seq_len", "expected float32"),
        ]
    ):
        path = written(tmp_path / f"a{number}", rows, scales="channel")
        damage(path, array=array)
        with pytest.raises(actshard.FormatError, match=match):
            actshard.open(path)
    for number, value in enumerate([0.0, -1.0, np.nan, np.inf]):
        path = written(tmp_path / f"v{number}", rows, scales="layer")
        (path / "arrays/activation_scales/0.0.0.0").write_bytes(np.array([1, value], "<f4").tobytes())
        with pytest.raises(actshard.FormatError, match="positive finite scales"):
            actshard.open(path)
        assert not actshard.verify(path).ok
    for field, value in (("shape", [1, 2, 1, 3]), ("shape", [2, 1, 1, 1]), ("shape", [1, 2, 1])):
        path = written(tmp_path / f"s{value}", rows, scales="layer")
        file = path / "arrays/activation_scales/.zarray"
        file.write_text(json.dumps({**json.loads(file.read_text()), field: value, "chunks": value}))
        with pytest.raises(actshard.FormatError, match="expected scales of"):
            actshard.open(path)
    path = written(tmp_path / "missing", rows, scales="token")
    (path / "arrays/activation_scales/1.1.0.0").unlink()
    store = actshard.open(path)
    assert store.sequence(0, 3).shape == (4, WIDTH)
    with pytest.raises(actshard.MissingFileError, match="scales of these codes") as caught:
        store.sequence(1, "mid")
    assert caught.value.path == path / "arrays/activation_scales/1.1.0.0"


def test_columns_of_unusual_types_are_proved_without_scales(tmp_path: Path) -> None:
    """The proof writes rows of one element, which no block of 32 divides."""
    rows = examples([4, 6])
    with actshard.create(
        tmp_path / "d", "zarr", version=3, layers=LAYERS, d_model=WIDTH, dtype="int8", scales="block32"
    ) as writer:
        writer.append(rows, columns={"tags": [["a", "b"], []], "activation_scales": [1, 2]})
    store = actshard.open(tmp_path / "d")
    assert store.table["tags"].to_pylist() == [["a", "b"], []]
    assert store.table["activation_scales"].to_pylist() == [1, 2]
    check_rows(store, oracle(rows, "block32")[0])


@pytest.mark.peers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"version": 2}, {"version": 3}, {"version": 3, "pack": "zstd"}])
def test_zarr_python_decodes_the_rows_in_four_lines(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    zarr = pytest.importorskip("zarr", minversion="3")
    rows = examples([4, 60, 5])
    path = written(tmp_path / "d", rows, scales=kind, **options)
    arrays = zarr.open_group(str(path), mode="r")["arrays"]
    for i, expected in enumerate(oracle(rows, kind)[0]):
        for layer in range(2):
            n = arrays["seq_len"][i]
            codes = arrays["activations"][i, layer, :n]
            scales = arrays["activation_scales"]
            scale = scales[0, layer, :1] if scales.shape[0] == 1 else scales[i, layer, :n]
            decoded = codes * np.repeat(scale, codes.shape[1] // scale.shape[1], axis=1)
            assert decoded.dtype == np.float32
            assert np.array_equal(decoded, expected[layer])


@pytest.mark.parametrize("kind", ["channel", "layer"])
def test_first_rows_that_cannot_decide_the_scales_are_refused(kind: str, tmp_path: Path) -> None:
    """With scales of zeros all later values would be clipped to nothing."""
    for first in (np.zeros((2, 1, 3, 4), np.float32), [np.zeros((1, 0, 4), np.float32)] * 2):
        writer = actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=4, dtype="int8", scales=kind, resume=True)
        writer.append(first)
        with pytest.raises(actshard.DtypeError, match=r"layer 0: .* all of these are zero or none has a token"):
            writer.flush()
        writer.abort()
    with actshard.create(tmp_path / "t", "zarr", layers=[0], d_model=4, dtype="int8", scales="token") as writer:
        writer.append([np.zeros((1, 0, 4), np.float32)] * 2)
        writer.flush()
        writer.append(np.ones((1, 1, 1, 4), np.float32))
    assert actshard.open(tmp_path / "t").token_counts.tolist() == [0, 0, 1]


@pytest.mark.filterwarnings("ignore::actshard.OverflowWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_each_block_is_encoded_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actshard.formats.target.Target.block_bytes", 10 * 2 * WIDTH * 4)
    encoded, encode = [], _native.quantise_spans
    monkeypatch.setattr(_native, "quantise_spans", lambda *args: encoded.append(len(args[5])) or encode(*args))
    rows = examples([10] * 4)
    store = actshard.open(written(tmp_path / "d", rows, scales=kind, version=3))
    assert sum(encoded) == sum(x.shape[0] * x.shape[1] for x in rows)
    assert len(store) == len(rows)


def test_values_beyond_the_first_scales_are_a_warning(tmp_path: Path) -> None:
    writer = actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=4, dtype="int8", scales="channel")
    writer.append(np.ones((1, 1, 1, 4), np.float32))
    writer.flush()
    writer.append(np.full((1, 1, 1, 4), 9, np.float32))
    with pytest.warns(actshard.OverflowWarning, match=r"4 of 8 values are beyond the scales, .* the first 1 rows"):
        writer.close()


@pytest.mark.parametrize("version", [2, 3])
def test_verify_finds_damaged_scales_of_rows(version: int, tmp_path: Path) -> None:
    with actshard.create(
        tmp_path / "d", "zarr", layers=[0], d_model=4, dtype="int8", scales="token", version=version
    ) as writer:
        writer.append(np.random.default_rng(0).standard_normal((3, 1, 5, 4)).astype(np.float32))
    assert actshard.verify(tmp_path / "d").ok
    scales = next(p for p in (tmp_path / "d/arrays/activation_scales").iterdir() if p.name[0] in "0c")
    whole = scales.read_bytes()
    for data in (whole[:4], b"", None):
        scales.unlink() if data is None else scales.write_bytes(data)
        assert not actshard.verify(tmp_path / "d").ok, data


@pytest.mark.parametrize("kind", ["channel", "token", "block32"])
@pytest.mark.parametrize(("version", "in_place"), [(2, False), (3, False), (3, True)])
def test_codes_are_never_read_with_the_scales_of_another_dataset(
    kind: str, version: int, in_place: bool, tmp_path: Path
) -> None:
    """A dataset that is replaced while it is open has its old rows, its new ones, or an error."""
    rows = np.random.default_rng(0).standard_normal((2, 6, 1, 40, 32)).astype(np.float32)
    rows[1] *= 100
    for name, values in zip(("d", "other"), rows, strict=True):
        with actshard.create(
            tmp_path / name, "zarr", layers=[0], d_model=32, dtype="int8", scales=kind, version=version, chunk_tokens=8
        ) as writer:
            writer.append(values)
    old, new = (actshard.open(tmp_path / name, io="pread").layer(0)[:].copy() for name in ("d", "other"))
    store = actshard.open(tmp_path / "d")
    assert np.array_equal(store.gather(0, [0], [0]), old[0, :1])
    if in_place:
        for file in sorted((tmp_path / "other").rglob("*")):
            if file.is_file():
                (tmp_path / "d" / file.relative_to(tmp_path / "other")).write_bytes(file.read_bytes())
    else:
        (tmp_path / "d").rename(tmp_path / "gone")
        (tmp_path / "other").rename(tmp_path / "d")
    for example in range(6):
        for token in range(0, 40, 4):
            place = (example, token)
            with contextlib.suppress(actshard.FormatError):  # it was replaced
                row = store.gather(0, [example], [token])[0]
                assert np.array_equal(row, old[place]) or np.array_equal(row, new[place]), place
