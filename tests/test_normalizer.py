"""``store.normalizer``: one rescaling for streams, direct reads and rows in memory, with the same bits everywhere."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import formats
from conftest import GOLDEN, saev_dump
from pickle_files import mixed
from test_created_columns import DRAFTS

KINDS: list[dict[str, Any]] = [
    {},
    {"center": "mean"},
    {"scale": "unit-norm"},
    {"center": "mean", "scale": "mean-sqrt-d"},
    {"divide": "std"},
    {"center": np.linspace(-1, 1, 8), "scale": np.linspace(0.5, 1e-3, 8)},
]
DTYPES = ("float16", "bfloat16", "float32", "float64")


def rows_of(stream: Any) -> np.ndarray:
    return np.concatenate([b.activations for b in stream])


def written(path: Path, format: str, dtype: str) -> actshard.Store | None:
    """A dataset of ragged examples; None if the format does not store this dtype."""
    layers: list[Any] = ["last"] if format == "eagle" else [3, "last"] if format in DRAFTS else [3]
    options: dict[str, Any] = {"pad": True, "num_examples": 6} if format in ("saev", "automodel") else {}
    if format == "automodel":
        fields = {"target_model_type": "m", "target_vocab_size": 100, "num_hidden_layers": 2, "target_model": "m"}
        options["metadata"] = fields
    rng = np.random.default_rng(3)
    rows = (rng.normal(size=(6, len(layers), 5, 8)) * rng.uniform(0.1, 9, 8)).astype(np.float32)
    columns = {"input_ids": np.arange(30).reshape(6, 5)} if format in DRAFTS else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with actshard.create(path, format, layers=layers, d_model=8, dtype=dtype, **options) as writer:
                writer.append(rows, lengths=[5, 2, 4, 1, 3, 5], columns=columns)
            return actshard.open(path)
    except actshard.DtypeError:
        return None


@pytest.mark.parametrize("format", formats.written())
def test_streams_direct_reads_and_rows_in_memory_have_equal_bits(tmp_path: Path, format: str) -> None:
    covered = 0
    for dtype in DTYPES:
        if (store := written(tmp_path / dtype, format, dtype)) is None:
            continue
        covered += 1
        layer = store.layers[0]
        for options in KINDS:
            if store.d_model != 8 and "center" in options and not isinstance(options["center"], str):
                continue
            norm = store.normalizer(layer, tokens="all", **options)
            check_equal_bits(store, layer, norm, options)
    assert covered, "no dtype of this format"


def check_equal_bits(store: actshard.Store, layer: actshard.Layer, norm: actshard.Normalizer, options: Any) -> None:
    named = options or {"normalize": "stats"}
    acts = store.layer(layer)
    stored, examples, tokens = np.asarray(acts.rows()), acts.rows().examples, acts.rows().tokens
    for wanted in (None, "float32", "float64"):
        streamed = rows_of(store.stream(layer, 7, tokens="all", dtype=wanted, **named))
        assert (
            rows_of(store.stream(layer, 7, tokens="all", dtype=wanted, normalize=norm)).tobytes() == streamed.tobytes()
        )
        assert norm(stored, dtype=streamed.dtype).tobytes() == streamed.tobytes()
        reads = [
            store.gather(layer, examples, tokens, dtype=wanted, normalize=norm),
            np.concatenate(store.sequences(range(len(store)), layer, dtype=wanted, normalize=norm)),
            np.concatenate([store.sequence(i, layer, dtype=wanted, normalize=norm) for i in range(len(store))]),
            np.asarray(store.layer(layer, dtype=wanted, normalize=norm).rows()),
            store.layer(layer, dtype=wanted, normalize=norm).rows()[:],
            store.layer(layer, dtype=wanted, normalize=norm).ragged().values,
        ]
        for number, read in enumerate(reads):
            assert read.dtype == streamed.dtype, number
            assert read.tobytes() == streamed.tobytes(), number
        packed = rows_of(store.sequences_stream(layer, 9, tokens="all"))
        normalized = rows_of(store.sequences_stream(layer, 9, tokens="all", dtype=wanted, normalize=norm))
        assert normalized.tobytes() == norm(packed, dtype=streamed.dtype).tobytes()
        last = store.last_tokens(layer, dtype=wanted, normalize=norm)
        assert last.tobytes() == norm(store.last_tokens(layer), dtype=streamed.dtype).tobytes()
    assert norm(stored).dtype == np.float32


@pytest.mark.parametrize(
    "dataset",
    [
        saev_dump(GOLDEN / "saev/v21_cls_labels_multishard"),
        GOLDEN / "lmprobe/fullseq_bf16",
        GOLDEN / "zarr/single_consolidated",
        GOLDEN / "pickle/float16",
        GOLDEN / "pickle/ragged_layers_machine3",
        GOLDEN / "hf_arrow/saelens_f16_shuffled",
        GOLDEN / "jkminder/single_f16_truncated",
        GOLDEN / "icalens/v1_bf16",
        GOLDEN / "draft/speculators_fp8",
        GOLDEN / "probelab/memmap_v1_ragged",
        GOLDEN / "containers/npy_bf16_as_u16_and_v2",
        GOLDEN / "containers/pt_views_f16",
    ],
    ids=lambda path: path.name if path.parent.name != "shards" else "saev",
)
def test_datasets_of_other_systems_have_equal_bits(dataset: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            store = actshard.open(dataset)
        except actshard.UnknownFormatError:
            pytest.skip("needs a description")
    layer = store.layers[-1]
    norm = store.normalizer(layer)
    stats = store.stats(layer)
    streamed = rows_of(store.stream(layer, 11, normalize=norm, dtype="float32"))
    assert streamed.tobytes() == rows_of(store.stream(layer, 11, normalize="stats", dtype="float32")).tobytes()
    batches = list(store.stream(layer, 11))
    assert norm(np.concatenate([b.activations for b in batches])).tobytes() == streamed.tobytes()
    examples, tokens = (np.concatenate([getattr(b, name) for b in batches]) for name in ("examples", "tokens"))
    assert store.gather(layer, examples, tokens, normalize=norm, dtype="float32").tobytes() == streamed.tobytes()
    expected = (np.concatenate([b.activations for b in batches]).astype(np.float64) - stats.mean) * stats.inverse_std
    assert np.allclose(streamed, expected, rtol=1e-3, atol=1e-4)
    assert norm.rows == len(streamed)


def test_rows_of_several_dtypes_are_rescaled_in_float64(tmp_path: Path) -> None:
    folder, rows = mixed(tmp_path / "both", ["f4", "f2", "f4", "f8"] * 4, gz=False, protocol=4)
    store = actshard.open(folder)
    norm = store.normalizer(0)
    assert norm.dtype == np.float64
    streamed = rows_of(store.stream(0, 5, dtype="float32", normalize=norm))
    assert streamed.tobytes() == rows_of(store.stream(0, 5, dtype="float32", normalize="stats")).tobytes()
    assert norm(np.concatenate([r.astype(np.float64) for r in rows])).tobytes() == streamed.tobytes()
    assert np.asarray(store.layer(0, dtype="float32", normalize=norm).rows()).tobytes() == streamed.tobytes()
    # Rows of other dtypes than the first are not cast without dtype=, as by streams.
    other = next(i for i, x in enumerate(rows) if len(x) and x.dtype != store.dtype)
    for read in (
        lambda: list(store.stream(0, 5, normalize=norm)),
        lambda: store.gather(0, other, 0, normalize=norm),
        lambda: store.last_tokens(0, [other], normalize=norm),
        lambda: store.sequence(other, 0, normalize=norm),
        lambda: store.sequences([other], 0, normalize=norm),
        lambda: np.asarray(store.layer(0, normalize=norm).rows()),
    ):
        with pytest.raises(actshard.DtypeError, match="read with dtype="):
            read()
    alike = next(i for i, x in enumerate(rows) if len(x) and x.dtype == store.dtype)
    assert store.sequence(alike, 0, normalize=norm).tobytes() == norm(rows[alike].astype(np.float64)).tobytes()
    # It keeps its arithmetic for datasets of one narrower dtype.
    with actshard.create(tmp_path / "single", "npy", layers=[0], d_model=5) as writer:
        writer.append(np.random.default_rng(1).normal(size=(4, 1, 3, 5)).astype(np.float32))
    single = actshard.open(tmp_path / "single")
    streamed = rows_of(single.stream(0, 5, normalize=norm))
    assert streamed.tobytes() == norm(np.asarray(single.layer(0).rows())).tobytes()
    assert streamed.tobytes() == single.gather(0, np.arange(4)[:, None], np.arange(3), normalize=norm).tobytes()
    state = single.stream(0, 5, normalize=norm).state_dict()
    narrow = single.stream(0, 5, center=norm.center, scale=norm.scale)
    with pytest.raises(actshard.ArgumentError, match="arithmetic"):
        narrow.load_state_dict(state)


@pytest.mark.parametrize(("stored", "read"), [("float32", "float16"), ("float64", "float32"), ("bfloat16", "float32")])
def test_rows_that_a_join_reads_narrower_are_rescaled_as_they_are_stored(
    stored: str, read: str, tmp_path: Path
) -> None:
    parts = [written(tmp_path / name, "safetensors", stored) for name in "ab"]
    join = actshard.concat([part for part in parts if part is not None], dtype=read)
    filtered = join.filter(range(len(join))[::-1])
    of_join, of_part = join.normalizer(3), parts[0].normalizer(3)  # type: ignore[union-attr]  # a dtype of the format
    for store in (join, pickle.loads(pickle.dumps(join)), filtered):
        acts = store.layer(3)
        exact = np.asarray(store.layer(3, dtype="float64").rows())
        rows = acts.rows()
        for norm in (of_join, of_part):
            for dtype in (None, "float16", "float32", "float64"):
                streamed = rows_of(store.stream(3, 7, dtype=dtype, normalize=norm))
                direct = [
                    store.gather(3, rows.examples, rows.tokens, dtype=dtype, normalize=norm),
                    np.concatenate(store.sequences(range(len(store)), 3, dtype=dtype, normalize=norm)),
                    np.concatenate([store.sequence(i, 3, dtype=dtype, normalize=norm) for i in range(len(store))]),
                    np.asarray(store.layer(3, dtype=dtype, normalize=norm).rows()),
                    store.layer(3, dtype=dtype, normalize=norm).ragged().values,
                ]
                expected = norm(exact, dtype=streamed.dtype).tobytes()
                assert [streamed.dtype, store.dtype][dtype is None] == np.dtype(dtype or read)
                for number, read_rows in enumerate([streamed, *direct]):
                    assert read_rows.tobytes() == expected, (number, dtype)
            last = store.last_tokens(3, normalize=norm, dtype="float32")
            assert last.tobytes() == norm(store.last_tokens(3, dtype="float64")).tobytes()


def test_a_saved_normalizer_gives_the_same_bits_and_refuses_other_rows(tmp_path: Path) -> None:
    store = actshard.open(GOLDEN / "lmprobe" / "fullseq_f32")
    first, second = store.layers[:2]
    norm = store.normalizer(first, keep=np.arange(len(store)) % 2 == 0)
    norm.save(tmp_path / "norm.json")
    loaded = actshard.Normalizer.load(tmp_path / "norm.json")
    copy = pickle.loads(pickle.dumps(loaded))
    rows = np.asarray(store.layer(first).rows())
    for other in (loaded, copy):
        assert other == norm
        assert hash(other) == hash(norm)
        assert other(rows).tobytes() == norm(rows).tobytes()
    assert norm.selection is not None
    assert norm != store.normalizer(first)
    assert norm.selection != store.normalizer(first).selection
    assert norm.dataset == store.identity
    refused = [
        lambda: store.stream(second, 4, normalize=loaded),
        lambda: store.sequences_stream(second, 4000, normalize=loaded),
        lambda: store.gather(second, 0, 0, normalize=loaded),
        lambda: store.last_tokens(second, normalize=loaded),
        lambda: store.sequence(0, second, normalize=loaded),
        lambda: store.sequences([0], second, normalize=loaded),
        lambda: store.layer(second, normalize=loaded),
    ]
    for read in refused:
        with pytest.raises(actshard.ArgumentError, match=f"of layer {second}, found one of layer {first}"):
            read()
    narrow = written(tmp_path / "narrow", "npy", "float32")
    assert narrow is not None
    with pytest.raises(actshard.ArgumentError, match="of rows of 8, found one of rows of 32"):
        narrow.gather(3, 0, 0, normalize=loaded.without_layer())
    with pytest.raises(actshard.ArgumentError, match=r"rows: expected \(..., 32\), found \(2, 31\) of layer"):
        loaded(np.zeros((2, 31), np.float32))
    with pytest.raises(actshard.ArgumentTypeError, match=r"expected store.normalizer\(layer\)"):
        store.gather(first, 0, 0, normalize="stats")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(actshard.ArgumentError, match="one layer, found one per example"):
        store.sequences([0, 1], [first, second], normalize=loaded)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    store = actshard.open(GOLDEN / "lmprobe" / "fullseq_f32")
    file = tmp_path / "norm.json"
    store.normalizer(store.layers[0]).save(file)
    saved = json.loads(file.read_text())
    changes: list[tuple[str, Any]] = [
        ("center", saved["center"][1:]),
        ("center", "mean"),
        ("scale", [True] * 32),
        ("divide", saved["scale"]),
        ("norm", 1.0),
        ("dtype", "float7"),
        ("d_model", 0),
        ("actshard_normalizer", 2),
        ("unknown", 1),
    ]
    for name, value in changes:
        file.write_text(json.dumps({**saved, name: value}))
        with pytest.raises(actshard.FormatError, match=r"norm\.json"):
            actshard.Normalizer.load(file)
    file.write_text(json.dumps({**saved, "scale": None, "divide": [0.0] * 32}))
    with pytest.raises(actshard.FormatError, match="other than 0"):
        actshard.Normalizer.load(file)
    for text, kind in (
        ('{"mean": [0], "std": [1]}', "an object with 'mean', 'std'"),
        ("[1, 2]", r"\[1, 2\]"),
        ("{}", "{}"),
    ):
        file.write_text(text)
        with pytest.raises(actshard.FormatError, match=f"expected a file of Normalizer.save, .*, found {kind}"):
            actshard.Normalizer.load(file)
    with pytest.raises(actshard.MissingFileError):
        actshard.Normalizer.load(tmp_path / "nothing.json")


def test_several_layers_and_pairs_take_one_normalizer_per_layer() -> None:
    store = actshard.open(GOLDEN / "lmprobe" / "fullseq_f32")
    layers = list(store.layers[:2])
    norms = [store.normalizer(layer, center="mean", scale=2.0) for layer in layers]
    streamed = rows_of(store.stream(layers, 9, normalize=norms))
    for number, layer in enumerate(layers):
        rows = norms[number](np.asarray(store.layer(layer).rows()))
        assert streamed[:, number].tobytes() == rows.tobytes()
    with pytest.raises(actshard.ArgumentError, match=f"of layer {layers[0]}, found one of layer {layers[1]}"):
        store.stream(layers, 9, normalize=norms[::-1])
    with pytest.raises(actshard.ArgumentError, match="2 normalizers, one per layer, found 1"):
        store.stream(layers, 9, normalize=norms[:1])
    with pytest.raises(actshard.ArgumentError, match="of one kind"):
        store.stream(layers, 9, normalize=[norms[0], store.normalizer(layers[1], divide="std")])
    pair = actshard.pair(store, store)
    paired = rows_of(pair.stream(layers[0], 9, normalize=[norms[0], norms[0]]))
    assert paired[:, 1].tobytes() == streamed[:, 0].tobytes()
    with pytest.raises(actshard.ArgumentError, match=f"of layer {layers[0]}, found one of layer {layers[1]}"):
        pair.stream(layers[0], 9, normalize=norms)


def test_outputs_and_their_dtypes() -> None:
    store = actshard.open(GOLDEN / "lmprobe" / "fullseq_f32")
    norm = store.normalizer(store.layers[0], center=np.zeros(32), scale=1e30)
    rows = np.full((2, 3, 32), 3.0, np.float32)
    out = np.empty((2, 3, 32), np.float64)
    assert norm(rows, dtype="float64", out=out) is out
    assert np.allclose(out, 3e30)
    with pytest.warns(actshard.OverflowWarning, match="192 finite values"):
        assert np.isinf(norm(rows, dtype="float16")).all()
    with pytest.raises(actshard.ArgumentError, match="other memory"):
        norm(rows, out=rows)
    with pytest.raises(actshard.DtypeError):
        norm(rows.astype(np.int64))
    assert norm(rows.astype(">f4")).tobytes() == norm(rows).tobytes()
    assert norm(rows[:, ::2]).tobytes() == norm(np.ascontiguousarray(rows[:, ::2])).tobytes()
    assert norm(np.empty((0, 32), np.float32)).shape == (0, 32)
    buffer = np.empty((1, 32), np.float32)
    assert store.gather(store.layers[0], [0], [0], out=buffer, normalize=norm) is buffer
    with pytest.raises(actshard.ArgumentError, match="center: expected finite numbers, found nan"):
        store.normalizer(store.layers[0], center=np.full(32, np.nan))


def test_views_are_not_normalized_in_place() -> None:
    """A whole example is a view of the file; its normalized rows are a copy."""
    store = actshard.open(GOLDEN / "lmprobe" / "fullseq_f32")
    layer = store.layers[0]
    before = store.sequence(0, layer).copy()
    norm = store.normalizer(layer)
    acts = store.layer(layer, normalize=norm)
    for read in (acts[0], acts[0, :], acts[0, 1:], store.sequence(0, layer, normalize=norm)):
        assert read.tobytes() == norm(before)[-len(read) :].tobytes()
    assert store.sequence(0, layer).tobytes() == before.tobytes()
    assert pickle.loads(pickle.dumps(acts))[0].tobytes() == acts[0].tobytes()
