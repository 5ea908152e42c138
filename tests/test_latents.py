"""Sparse latents, compared with plain numpy: every verb, every kind of files, conversions, damages."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import actshard
from actshard import latents
from actshard.formats.torch_zip import torch_bytes
from actshard.latents import writing
from doc_scenes import delphi_splits
from served import served
from shell import run_command

KINDS = ("delphi", "torch", "parquet")


class Oracle(NamedTuple):
    """Entries in order of example, token and feature, and the sizes."""

    locations: np.ndarray
    values: np.ndarray
    sizes: tuple[int, int, int]
    tokens: np.ndarray | None

    def where(self, mask: np.ndarray) -> tuple[np.ndarray, ...]:
        return (*self.locations[mask].T, self.values[mask])


def made(
    seed: int, sizes: tuple[int, int, int], density: float = 0.1, dtype: Any = np.float16, *, tokens: bool = True
) -> Oracle:
    rng = np.random.default_rng(seed)
    locations = np.argwhere(rng.random(sizes) < density)
    values = rng.standard_normal(len(locations)).astype(dtype)
    return Oracle(locations, values, sizes, rng.integers(0, 50_000, sizes[:2]) if tokens else None)


def write_delphi(folder: Path, oracle: Oracle, edges: list[int]) -> None:
    """As save_splits of delphi/latents/cache.py, with the edges of the splits; it cannot write splits without entries."""
    folder.mkdir(parents=True)
    delphi_splits(folder, oracle.locations, oracle.values, edges, oracle.tokens)


def write_torch(folder: Path, oracle: Oracle, latent_ids: np.ndarray | None = None) -> None:
    """As collect_dictionary_activations of diffing-toolkit's latent_activations.py."""
    folder.mkdir(parents=True)
    examples, context, features = oracle.sizes
    ids = np.arange(features) if latent_ids is None else latent_ids
    locations = oracle.locations.copy()
    locations[:, 2] = np.argsort(ids)[np.searchsorted(np.sort(ids), locations[:, 2])]
    values: dict[str, Any] = {
        "activations": oracle.values,
        "indices": locations,
        "ranges": np.searchsorted(oracle.locations[:, 0], np.arange(examples + 1)),
        "lengths": np.full(examples, context),
        "latent_ids": ids,
        "dataset_ids": np.zeros(examples, np.int64),
        "dataset_names": ["fineweb"],
        "max_activations": np.zeros(len(ids), np.float32),
    }
    if oracle.tokens is not None:
        values["sequences"] = oracle.tokens
    for name, value in values.items():
        (folder / f"{name}.pt").write_bytes(torch_bytes(value, name))


def write_parquet(folder: Path, oracle: Oracle, order: np.ndarray | None = None, group: int = 50) -> None:
    """Quadruples, as on the hub: ``sample_idx, token_pos, feature_idx, act_val``, and a text of the token."""
    folder.mkdir(parents=True)
    chosen = np.arange(len(oracle.values)) if order is None else order
    columns = [*oracle.locations[chosen].T, oracle.values[chosen]]
    names = ["sample_idx", "token_pos", "feature_idx", "act_val"]
    table = pa.table(dict(zip(names, map(pa.array, columns), strict=True)))
    pq.write_table(
        table.append_column("token", pa.array(["x"] * len(chosen))), folder / "a.parquet", row_group_size=group
    )


def written(kind: str, folder: Path, oracle: Oracle, edges: list[int] | None = None) -> Path:
    if kind == "delphi":
        write_delphi(folder / "layers.5", oracle, edges or [0, oracle.sizes[2]])
    elif kind == "torch":
        write_torch(folder, oracle)
    else:
        write_parquet(folder, oracle)
    return folder


def assert_rows(rows: latents.LatentRows, expected: tuple[np.ndarray, ...]) -> None:
    for field, array in zip((rows.examples, rows.tokens, rows.features, rows.values), expected, strict=True):
        assert np.array_equal(field, array)
        assert field.dtype in (np.int64, array.dtype)


def assert_same(store: latents.LatentStore, oracle: Oracle, *, exact: bool = True) -> None:
    """Every verb, compared with the oracle. Not ``exact``: sizes are those of the entries."""
    examples, context, features = oracle.sizes
    if not exact:
        examples, context, features = (oracle.locations.max(axis=0, initial=-1) + 1).tolist()
    assert (store.n_examples, store.n_tokens, store.n_features) == (examples, context, features)
    assert (store.n_activations, len(store), store.dtype) == (len(oracle.values), examples, oracle.values.dtype)
    for example in range(examples):
        mask = oracle.locations[:, 0] == example
        assert_rows(store.example(example), oracle.where(mask))
        dense = np.zeros((context, features), oracle.values.dtype)
        dense[oracle.locations[mask, 1], oracle.locations[mask, 2]] = oracle.values[mask]
        assert np.array_equal(store.dense(example), dense)
        if store.has_tokens:
            assert oracle.tokens is not None
            assert np.array_equal(store.tokens(example), oracle.tokens[example])
    for feature in range(features):
        assert_rows(store.feature(feature), oracle.where(oracle.locations[:, 2] == feature))
    for batch in (1, 3, examples + 1):
        batches = list(store.stream(batch))
        assert len(batches) == -(-len(np.unique(oracle.locations[:, 0])) // batch)
        joined = [
            np.concatenate([np.zeros(0), *(getattr(b, n) for b in batches)])
            for n in ("examples", "tokens", "features", "values")
        ]
        for array, expected in zip(joined, (*oracle.locations.T, oracle.values), strict=True):
            assert np.array_equal(array, expected)
    counts = np.bincount(oracle.locations[:, 2], minlength=features)
    assert np.array_equal(store.counts(), counts)
    assert np.allclose(store.density(), counts / max(examples * context, 1))
    top = store.top_features(3)
    assert top == sorted([(f, int(n)) for f, n in enumerate(counts) if n], key=lambda pair: -pair[1])[:3]


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_verb_agrees_with_numpy(kind: str, io: Any, tmp_path: Path) -> None:
    oracle = made(0, (7, 5, 11), 0.3)
    path = written(kind, tmp_path / "d", oracle, [0, 4, 5, 11])
    store = latents.open(path, io=io)
    assert_same(store, oracle, exact=kind != "parquet")
    assert_same(pickle.loads(pickle.dumps(store)), oracle, exact=kind != "parquet")
    assert latents.verify(path, deep=True).ok


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    to=st.sampled_from(KINDS),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 9)),
    density=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    has_tokens=st.booleans(),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_random_stores_agree_with_numpy_before_and_after_a_conversion(
    kind: str, to: Any, sizes: tuple[int, int, int], density: float, has_tokens: bool, seed: int, data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("latents")
    oracle = made(seed, sizes, density, tokens=has_tokens)
    inner = data.draw(st.sets(st.integers(1, sizes[2]), max_size=4))
    source = written(kind, folder / "a", oracle, sorted({0, *inner, sizes[2]}))
    has_sizes = kind == "torch" or (kind == "delphi" and has_tokens)
    if kind == "delphi" and not has_sizes:  # features are known from the names
        oracle = oracle._replace(sizes=(*(oracle.locations.max(axis=0, initial=-1) + 1).tolist()[:2], sizes[2]))
    store = latents.open(source)
    assert_same(store, oracle, exact=kind != "parquet")
    if to == "delphi" and not store.n_features:
        with pytest.raises(actshard.ArgumentError, match="at least one feature"):
            latents.convert(source, folder / "b", to)
        return
    splits = data.draw(st.none() | st.integers(1, 12)) if to == "delphi" else None
    target = latents.convert(source, folder / "b", to, n_splits=splits)
    copy = latents.open(folder / "b")
    assert target == (folder / "b" / store.module if to == "delphi" else folder / "b")
    assert_same(copy, oracle, exact=kind != "parquet")
    assert copy.has_tokens == store.has_tokens
    assert latents.verify(folder / "b", deep=True).ok
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def delphi_reads(folder: Path) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """TensorBuffer.load and load_data_per_latent of delphi/latents/loader.py, with LatentDataset._edges, in numpy."""
    latents_of: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    edges = sorted(tuple(map(int, file.stem.split("_"))) for file in folder.glob("*.safetensors"))
    for start, end in edges:
        split = load_file(folder / f"{start}_{end}.safetensors")
        locations = split["locations"].astype(np.int64)
        locations[:, 2] += start
        order = np.argsort(locations[:, 2], kind="stable")
        for feature in np.unique(locations[:, 2]):
            chosen = order[locations[order, 2] == feature]
            latents_of[int(feature)] = (locations[chosen], split["activations"][chosen])
    return latents_of


def test_delphi_reads_what_was_written_bit_for_bit(tmp_path: Path) -> None:
    """Files equal those of safetensors' own writer, for each rule of delphi's."""
    oracle = made(3, (9, 6, 50))
    written("torch", tmp_path / "source", oracle)
    latents.convert(tmp_path / "source", tmp_path / "new", "delphi", n_splits=5)
    write_delphi(tmp_path / "theirs/m", oracle, [0, 10, 20, 30, 40, 50])
    ours = tmp_path / "new/source"
    for file in (tmp_path / "theirs/m").glob("*.safetensors"):
        assert (ours / file.name).read_bytes() == file.read_bytes()
    assert (ours / "config.json").exists()
    for feature, (locations, values) in delphi_reads(ours).items():
        assert_rows(latents.open(ours).feature(feature), (*locations.T, values))


EDGES = {
    (131072, 5): [0, 26214, 52428, 78643, 104857, 131072],
    (16, 14): [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 16],
    (32, 14): [0, 2, 4, 6, 9, 11, 13, 15, 18, 20, 22, 25, 27, 29, 32],
    (24576, 7): [0, 3510, 7021, 10532, 14043, 17554, 21065, 24576],
    (49152, 11): [0, 4468, 8936, 13405, 17873, 22341, 26810, 31278, 35746, 40215, 44683, 49152],
}
"""torch.linspace(0, width, steps=n + 1).long() of torch 2.15."""


@pytest.mark.parametrize(("width", "count"), EDGES)
def test_splits_have_the_edges_of_delphi(width: int, count: int, tmp_path: Path) -> None:
    oracle = Oracle(np.array([[0, 0, width - 1]]), np.ones(1, np.float16), (1, 1, width), None)
    write_torch(tmp_path / "a", oracle)
    bounds = writing._bounds(latents.open(tmp_path / "a"), count)
    edges = EDGES[width, count]
    assert bounds == [(a, b - 1) for a, b in itertools.pairwise(edges) if a < b]


@pytest.mark.parametrize(
    ("last", "dtype"),
    [
        ((65_535, 0, 65_535), np.uint16),
        ((65_536, 0, 0), np.uint32),
        ((0, 0, 65_536), np.uint32),
        ((0, 65_536, 0), np.uint32),
    ],
)
def test_uint16_never_wraps(last: tuple[int, int, int], dtype: Any, tmp_path: Path) -> None:
    sizes = tuple(n + 1 for n in last)
    oracle = Oracle(np.unique([[0, 0, 0], list(last)], axis=0), np.ones(2, np.float16), sizes, None)  # type: ignore[arg-type]
    write_torch(tmp_path / "a", oracle)
    folder = latents.convert(tmp_path / "a", tmp_path / "b", "delphi", n_splits=1)
    (file,) = folder.glob("*.safetensors")
    assert load_file(file)["locations"].dtype == dtype
    rows = latents.open(folder).examples([0, last[0]] if last[0] else [0])
    assert_rows(rows, oracle.where(np.ones(2, bool)))


def test_features_behind_65535_are_small_numbers_of_their_split(tmp_path: Path) -> None:
    oracle = Oracle(np.array([[0, 0, 5], [0, 1, 131_071]]), np.ones(2, np.float16), (1, 2, 131_072), None)
    write_torch(tmp_path / "a", oracle)
    folder = latents.convert(tmp_path / "a", tmp_path / "b", "delphi", n_splits=2)
    locations = load_file(folder / "65536_131071.safetensors")["locations"]
    assert locations.dtype == np.uint16
    assert locations.tolist() == [[0, 1, 65_535]]
    assert latents.open(folder).feature(131_071).tokens.tolist() == [1]


def test_a_feature_is_read_without_the_other_splits(tmp_path: Path) -> None:
    oracle = made(1, (6, 4, 20), 0.5)
    write_delphi(tmp_path / "m", oracle, [0, 10, 20])
    store = latents.open(tmp_path / "m")
    (tmp_path / "m/10_19.safetensors").write_bytes(b"")
    assert_rows(store.feature(3), oracle.where(oracle.locations[:, 2] == 3))
    with pytest.raises(actshard.ActshardError, match="10_19"):
        store.feature(13)


def test_memory_bounds_are_kept(tmp_path: Path) -> None:
    oracle = made(1, (6, 4, 20), 0.5)
    for kind in KINDS:
        path = written(kind, tmp_path / kind, oracle)
        with pytest.raises(actshard.NoMemoryError, match=r"expected at most 16 B.*memory="):
            latents.open(path, memory=16).example(0) if kind == "parquet" else latents.open(path, memory=16).dense(0)
    store = latents.open(tmp_path / "delphi", memory=100)
    assert_rows(store.feature(3), oracle.where(oracle.locations[:, 2] == 3))  # scanned
    with pytest.raises(actshard.NoMemoryError, match=r"counts|index"):
        store.example(0)


def test_a_hostile_name_allocates_nothing(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save_file(
        {"locations": np.array([[0, 0, 2**32 - 1]], np.uint32), "activations": np.ones(1, np.float16)},
        tmp_path / "m/0_4294967295.safetensors",
    )
    store = latents.open(tmp_path / "m")
    assert store.n_features == 1 << 32
    assert len(store.feature(2**32 - 1)) == 1
    for verb in (store.counts, lambda: store.dense(0)):
        with pytest.raises(actshard.NoMemoryError):
            verb()


@pytest.mark.parametrize("number", [2**40, 2**62 - 1])
def test_large_example_numbers_neither_hang_nor_allocate(number: int, tmp_path: Path) -> None:
    columns = {"example": [3, number], "token": [0, 1], "feature": [3, 4], "value": [1.0, 2.0]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    store = latents.open(tmp_path / "a.parquet")
    assert store.n_examples == number + 1
    assert [rows.examples.tolist() for rows in store.stream(1)] == [[3], [number]]
    assert latents.verify(tmp_path / "a.parquet", deep=True).ok
    with pytest.raises(actshard.NoMemoryError):
        latents.convert(store, tmp_path / "b", "torch")
    with pytest.raises(actshard.ArgumentError, match=r"below 2\*\*32"):
        latents.convert(store, tmp_path / "b", "delphi")
    copy = latents.open(latents.convert(store, tmp_path / "b", "parquet"))
    assert copy.example(number).values.tolist() == [2.0]


def test_the_shuffled_stream_is_a_permutation_that_only_the_seed_chooses(tmp_path: Path) -> None:
    oracle = made(5, (33, 3, 4), 0.9)
    paths = [written(kind, tmp_path / kind, oracle) for kind in KINDS]
    orders = []
    for path in paths:
        store = latents.open(path)
        batches = list(store.stream(4, shuffle=True, seed=7))
        again = list(latents.open(path).stream(4, shuffle=True, seed=7, first=3))
        assert [b.examples.tolist() for b in batches[3:]] == [b.examples.tolist() for b in again]
        order = [example for b in batches for example in dict.fromkeys(b.examples.tolist())]
        for rows in batches:
            expected = store.examples(list(dict.fromkeys(rows.examples.tolist())))
            assert_rows(rows, (expected.examples, expected.tokens, expected.features, expected.values))
        orders.append(order)
        assert sorted(order) == list(range(33)) != order
        others = [store.stream(4, shuffle=True, seed=8), store.stream(4, shuffle=True, seed=7, epoch=1)]
        assert all([e for b in other for e in dict.fromkeys(b.examples.tolist())] != order for other in others)
    assert orders[0] == orders[1] == orders[2]


def test_examples_may_repeat_and_count_from_the_end(tmp_path: Path) -> None:
    oracle = made(5, (6, 3, 4), 0.9)
    store = latents.open(written("delphi", tmp_path / "d", oracle, [0, 2, 4]))
    rows = store.examples([4, -1, 4, 0])
    expected = [oracle.where(oracle.locations[:, 0] == i) for i in (4, 5, 4, 0)]
    assert_rows(rows, tuple(np.concatenate(columns) for columns in zip(*expected, strict=True)))
    for wrong in (6, -7):
        with pytest.raises(actshard.OutOfRangeError, match="there are 6"):
            store.example(wrong)
    with pytest.raises(actshard.OutOfRangeError):
        store.feature(4)


def test_entries_in_any_order_are_read_in_order(tmp_path: Path) -> None:
    oracle = made(2, (8, 4, 6), 0.5)
    order = np.random.default_rng(0).permutation(len(oracle.values))
    write_parquet(tmp_path / "a", oracle, order, 10)
    assert_same(latents.open(tmp_path / "a"), oracle, exact=False)
    shuffled = oracle._replace(locations=oracle.locations[order], values=oracle.values[order])
    write_delphi(tmp_path / "b", shuffled, [0, 3, 6])
    assert_same(latents.open(tmp_path / "b"), oracle)
    report = latents.verify(tmp_path / "b", deep=True)
    assert report.ok
    assert report.codes() == {"layout"}
    latents.convert(tmp_path / "a", tmp_path / "c", "torch")
    assert_same(latents.open(tmp_path / "c"), oracle, exact=False)


def test_latent_ids_are_the_features(tmp_path: Path) -> None:
    oracle = made(2, (8, 4, 3), 0.5)
    ids = np.array([40, 7, 12])
    oracle = oracle._replace(
        locations=np.column_stack([oracle.locations[:, :2], ids[oracle.locations[:, 2]]]), sizes=(8, 4, 41)
    )
    order = np.lexsort(oracle.locations.T[::-1])
    oracle = oracle._replace(locations=oracle.locations[order], values=oracle.values[order])
    write_torch(tmp_path / "a", oracle, ids)
    assert_same(latents.open(tmp_path / "a"), oracle)
    assert latents.open(tmp_path / "a").metadata["dataset_names"] == ["fineweb"]


def test_lengths_of_examples(tmp_path: Path) -> None:
    oracle = made(2, (3, 4, 3), 1)
    oracle = oracle._replace(
        locations=oracle.locations[oracle.locations[:, 1] < 2], values=oracle.values[oracle.locations[:, 1] < 2]
    )
    write_torch(tmp_path / "a", oracle)
    (tmp_path / "a/lengths.pt").write_bytes(torch_bytes(np.array([2, 4, 3]), "lengths"))
    for path in (tmp_path / "a", latents.convert(tmp_path / "a", tmp_path / "b", "parquet")):
        store = latents.open(path)
        assert [store.length(i) for i in range(3)] == [2, 4, 3]
        assert store.dense(0).shape == (2, 3)
        assert len(store.tokens(2)) == 3
    (tmp_path / "a/lengths.pt").write_bytes(torch_bytes(np.array([1, 4, 3]), "lengths"))
    with pytest.raises(actshard.FormatError, match="expected 1 tokens, found token 1"):
        latents.open(tmp_path / "a").dense(0)
    assert "latent-location" in latents.verify(tmp_path / "a", deep=True).codes()


def test_several_modules_are_named(tmp_path: Path) -> None:
    oracle = made(2, (3, 4, 3), 1)
    for name in ("layers.0", "layers.5", "width_16k/layer_12"):
        write_delphi(tmp_path / "run/latents" / name, oracle, [0, 3])
    names = latents.modules(tmp_path / "run/latents")
    assert names == ("layers.0", "layers.5", "width_16k/layer_12")
    with pytest.raises(actshard.ArgumentError, match=r"expected module=.*'layers.0', 'layers.5'"):
        latents.open(tmp_path / "run/latents")
    with pytest.raises(actshard.ArgumentError, match=r"do you mean 'layers\.5'"):
        latents.open(tmp_path / "run/latents", "layer.5")
    for name in names:
        assert_same(latents.open(tmp_path / "run/latents", name), oracle)
        latents.convert(tmp_path / "run/latents", tmp_path / "copy", "delphi", module=name)
    assert latents.modules(tmp_path / "copy") == names
    done = run_command("info", tmp_path / "run/latents", "--json")
    assert [m["module"] for m in json.loads(done.stdout)["modules"]] == list(names)


COLUMNS = {"example": "who", "token": "where", "feature": "which", "value": "much"}


def test_columns_are_recognised_or_named(tmp_path: Path) -> None:
    oracle = made(2, (3, 4, 3), 1)
    write_parquet(tmp_path / "a", oracle)
    table = pq.read_table(tmp_path / "a/a.parquet")
    pq.write_table(table.rename_columns([*COLUMNS.values(), "token"]), tmp_path / "a/a.parquet")
    with pytest.raises(actshard.UnknownFormatError, match="columns="):
        latents.open(tmp_path / "a")
    assert_same(latents.open(tmp_path / "a", columns=COLUMNS), oracle)
    with pytest.raises(actshard.ArgumentError, match="columns: expected parquet"):
        latents.open(written("torch", tmp_path / "t", oracle), columns=COLUMNS)
    pq.write_table(table.append_column("sample_id", table["sample_idx"]), tmp_path / "a/a.parquet")
    with pytest.raises(actshard.UnknownFormatError):  # which of two columns is not guessed
        latents.open(tmp_path / "a")
    assert_same(latents.open(tmp_path / "a", columns={"example": "sample_id"}), oracle)
    assert_same(latents.open(tmp_path / "a/a.parquet", columns={"example": "sample_id"}), oracle)


# -- damages -------------------------------------------------------------------------------------------------------

Damage = Callable[[Path], object]


def split_of(**arrays: Any) -> Damage:
    """Another second split, 5_9.safetensors, with some arrays replaced; None removes one."""

    def change(folder: Path) -> None:
        file = folder / "5_9.safetensors"
        save_file({name: a for name, a in (load_file(file) | arrays).items() if a is not None}, file)

    return change


def values_of(change: Callable[[dict[str, np.ndarray]], object]) -> Damage:
    def apply(folder: Path) -> None:
        split = load_file(folder / "5_9.safetensors")
        change(split)
        save_file(split, folder / "5_9.safetensors")

    return apply


def cut(folder: Path) -> None:
    file = folder / "5_9.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def longer(folder: Path) -> None:
    file = folder / "5_9.safetensors"
    file.write_bytes(file.read_bytes() + b"\0" * 8)


def tensor(name: str, value: Any) -> Damage:
    return lambda folder: (folder / f"{name}.pt").write_bytes(torch_bytes(value, name))


ONES = np.ones(3, np.float16)
HEADERS: dict[str, tuple[str, Damage, str]] = {
    "cut": ("delphi", cut, "header|truncated"),
    "longer": ("delphi", longer, "header|too-long"),
    "no locations": ("delphi", split_of(locations=None), "format"),
    "no activations": ("delphi", split_of(activations=None), "format"),
    "two columns": ("delphi", split_of(locations=np.zeros((3, 2), np.uint16), activations=ONES), "format"),
    "fewer values": ("delphi", split_of(locations=np.zeros((4, 3), np.uint16), activations=ONES), "format"),
    "float locations": ("delphi", split_of(locations=np.zeros((3, 3), np.float32), activations=ONES), "format"),
    "integer values": (
        "delphi",
        split_of(locations=np.zeros((3, 3), np.uint16), activations=np.ones(3, np.int16)),
        "format",
    ),
    "mixed dtypes": ("delphi", split_of(locations=np.zeros((3, 3), np.uint16), activations=np.ones(3)), "format"),
    "other tokens": ("delphi", split_of(tokens=np.zeros((2, 2), np.int64)), "format"),
    "config": ("delphi", lambda folder: (folder / "config.json").write_text("[]"), "format"),
    "sizes": ("delphi", lambda folder: (folder / "config.json").write_text('{"actshard": {"context": -1}}'), "format"),
    "overlap": ("delphi", lambda f: (f / "5_9.safetensors").rename(f / "4_9.safetensors"), "duplicate-latent"),
    "backwards": ("delphi", lambda f: (f / "5_9.safetensors").rename(f / "9_5.safetensors"), "duplicate-latent"),
    "ranges": ("torch", tensor("ranges", np.array([0, 3])), "format"),
    "falling ranges": ("torch", tensor("ranges", np.array([0, 9, 4, 5, 6, 7, 8])), "format"),
    "list": ("torch", tensor("indices", [1, 2]), "format"),
    "latents twice": ("torch", tensor("latent_ids", np.zeros(10, np.int64)), "format"),
    "few lengths": ("torch", tensor("lengths", np.array([4])), "format"),
    "negative lengths": ("torch", tensor("lengths", np.full(6, -1)), "format"),
    "long lengths": ("torch", tensor("lengths", np.full(6, 9)), "format"),
    "few sequences": ("torch", tensor("sequences", np.zeros((2, 4), np.int64)), "format"),
    "names": ("torch", tensor("dataset_names", [1]), "format"),
    "ids": ("torch", tensor("dataset_ids", np.full(6, 5)), "format"),
    "code": (
        "torch",
        lambda f: (f / "indices.pt").write_bytes(pickle.dumps(print)),
        "format|unsafe-pickle|unsupported",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_damaged_headers_are_refused_and_found(name: str, tmp_path: Path) -> None:
    kind, damage, codes = HEADERS[name]
    oracle = made(2, (6, 4, 10), 0.5)
    path = tmp_path / "m"
    if kind == "delphi":
        write_delphi(path, oracle, [0, 5, 10])
    else:
        write_torch(path, oracle)
    assert latents.verify(path, deep=True).ok
    damage(path)
    with pytest.raises(actshard.ActshardError) as caught:
        latents.open(path)
    assert str(path) in str(caught.value)
    for report in (latents.verify(path), actshard.verify(path)):
        assert not report.ok
        assert report.codes() & set(codes.split("|")), report.findings


def at(name: str, place: Any, value: Any) -> Damage:
    return values_of(lambda split: split[name].__setitem__(place, value))


ENTRIES: dict[str, tuple[Damage, str]] = {
    "feature": (at("locations", (1, 2), 5), "latent-location"),
    "example": (at("locations", (1, 0), 6), "latent-location"),
    "token": (at("locations", (1, 1), 4), "latent-location"),
    "nan": (at("activations", 1, np.nan), "nan"),
    "infinite": (at("activations", 1, -np.inf), "infinite"),
    "repeated": (values_of(lambda s: s["locations"].__setitem__(1, s["locations"][0])), "duplicate-latent"),
    "tokens of another run": (at("tokens", (1, 2), -5), "format"),
    "unsorted": (values_of(lambda s: s["locations"].__setitem__(slice(None), s["locations"][::-1].copy())), "layout"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_bad_entries_are_found_and_never_read_silently(name: str, tmp_path: Path) -> None:
    damage, code = ENTRIES[name]
    write_delphi(tmp_path / "m", made(2, (6, 4, 10), 0.5), [0, 5, 10])
    damage(tmp_path / "m")
    report = latents.verify(tmp_path / "m", deep=True)
    assert report.codes() == {code}
    assert latents.verify(tmp_path / "m").codes() == set()
    assert run_command("verify", "--deep", tmp_path / "m").returncode == report.status
    store = latents.open(tmp_path / "m")
    if code == "latent-location":
        with pytest.raises(actshard.FormatError, match=f"entry 1: expected an? ?{name}|entry 1: expected {name}"):
            store.counts()
        with pytest.raises(actshard.FormatError):
            store.example(0)
    if code == "duplicate-latent":
        example = int(store.feature(5).examples[0])
        with pytest.raises(actshard.FormatError, match="found several"):
            store.dense(example)


def test_ranges_that_place_entries_elsewhere_are_found(tmp_path: Path) -> None:
    oracle = made(2, (6, 4, 10), 0.5)
    write_torch(tmp_path / "m", oracle)
    ranges = np.searchsorted(oracle.locations[:, 0], np.arange(7))
    ranges[2] += 1
    tensor("ranges", ranges)(tmp_path / "m")
    with pytest.raises(actshard.FormatError, match="expected example 1, found 2"):
        latents.open(tmp_path / "m").example(1)
    assert "latent-location" in latents.verify(tmp_path / "m", deep=True).codes()


@pytest.mark.parametrize("value", [None, -1, 2**63])
def test_bad_numbers_of_a_table_are_refused(value: Any, tmp_path: Path) -> None:
    columns = {"example": [0, 1], "token": [0, 1], "feature": [3, value], "value": [1.0, 2.0]}
    kinds = [pa.int64(), pa.int64(), pa.uint64() if value == 2**63 else pa.int64(), pa.float32()]
    arrays = [pa.array(c, kind) for c, kind in zip(columns.values(), kinds, strict=True)]
    pq.write_table(pa.table(arrays, list(columns)), tmp_path / "a.parquet")
    with pytest.raises(actshard.FormatError):
        latents.open(tmp_path / "a.parquet").counts()
    assert not latents.verify(tmp_path / "a.parquet", deep=True).ok


def test_a_missing_split_is_a_warning_and_an_error_of_verify(tmp_path: Path) -> None:
    oracle = made(2, (6, 4, 9), 0.5)
    write_delphi(tmp_path / "m", oracle, [0, 3, 6, 9])
    (tmp_path / "m/3_5.safetensors").unlink()
    with pytest.warns(actshard.ActshardWarning, match="no file has the features 3 to 5"):
        store = latents.open(tmp_path / "m")
    assert len(store.feature(4)) == 0
    assert latents.verify(tmp_path / "m").codes() == {"missing-file"}


@pytest.mark.parametrize("by", ["delphi", "actshard"])
def test_a_missing_last_split_is_a_warning(by: str, tmp_path: Path) -> None:
    write_delphi(tmp_path / "m", made(2, (6, 4, 9), 0.5), [0, 3, 6, 9])
    (tmp_path / "m/config.json").write_text('{"n_splits": 3}')
    folder = tmp_path / "m"
    if by == "actshard":  # whose config.json has the sizes, and n_splits of its source
        folder = latents.convert(folder, tmp_path / "copy", "delphi", n_splits=2)
    assert not latents.open(folder).warnings
    max(folder.glob("*.safetensors")).unlink()
    reason = "config.json names 3 splits, and 2 have a file" if by == "delphi" else "no file has the features 4 to 8"
    with pytest.warns(actshard.ActshardWarning, match=reason):
        latents.open(folder)
    assert latents.verify(folder).codes() == {"missing-file"}


# -- the rest ------------------------------------------------------------------------------------------------------


def test_values_are_never_changed_silently(tmp_path: Path) -> None:
    oracle = made(2, (3, 4, 5), 1, np.float32)
    oracle.values[7] = 1e6
    write_torch(tmp_path / "a", oracle)
    for to in KINDS:
        copy = latents.open(latents.convert(tmp_path / "a", tmp_path / to, to))  # type: ignore[arg-type]
        assert copy.dtype == np.float32
        assert_same(copy, oracle)
    with pytest.raises(actshard.OutOfRangeError, match=r"1e\+06|1000000"):
        latents.convert(tmp_path / "a", tmp_path / "b", "delphi", dtype="float16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "delphi", "parquet", "torch"]
    with pytest.raises(actshard.ArgumentError, match="bfloat16"):
        latents.convert(tmp_path / "a", tmp_path / "b", "parquet", dtype="bfloat16")
    for wrong in ({"to": "delhpi"}, {"to": "torch", "n_splits": 3}):
        with pytest.raises(actshard.ArgumentError, match=r"do you mean 'delphi'|n_splits"):
            latents.convert(tmp_path / "a", tmp_path / "b", **wrong)  # type: ignore[arg-type]


def killed(folder: Path) -> None:
    raise OSError("killed")


def test_a_conversion_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = made(2, (300, 4, 5), 0.5)
    write_torch(tmp_path / "a", oracle)
    for to in KINDS:
        with monkeypatch.context() as patch:
            patch.setattr(writing, "sync_tree", killed)
            with pytest.raises(OSError, match="killed"):
                latents.convert(tmp_path / "a", tmp_path / "b", to)  # type: ignore[arg-type]
        assert not (tmp_path / "b").exists()
        left = (tmp_path / ".b.actshard-latents/data") if to != "delphi" else tmp_path / "b/.a.actshard-latents/data"
        left.mkdir(parents=True)
        (left / "5_9.safetensors").write_bytes(b"of a killed call")
        path = latents.convert(tmp_path / "a", tmp_path / "b", to)  # type: ignore[arg-type]
        assert_same(latents.open(path), oracle)
        with pytest.raises(actshard.ExistsError):
            latents.convert(tmp_path / "a", tmp_path / "b", to)  # type: ignore[arg-type]
        assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}
        path.rename(tmp_path / "gone")
        for folder in (tmp_path / "gone", tmp_path / "b"):
            shutil.rmtree(folder, ignore_errors=True)


def test_metadata_come_back(tmp_path: Path) -> None:
    oracle = made(2, (3, 4, 5), 0.5, tokens=False)
    write_delphi(tmp_path / "m", oracle, [0, 2, 5])
    config = latents.open(tmp_path / "m").metadata
    assert config == {"model_name": "EleutherAI/pythia-160m", "ctx_len": 16}
    first = latents.convert(tmp_path / "m", tmp_path / "p", "parquet")
    assert (latents.open(first).metadata, latents.open(first).module) == (config, "m")
    again = latents.convert(tmp_path / "m", tmp_path / "d", "delphi")
    assert latents.open(again).metadata == config


def test_commands_and_errors_name_sparse_latents(tmp_path: Path) -> None:
    oracle = made(2, (6, 4, 10), 0.5)
    for kind in KINDS:
        path = written(kind, tmp_path / kind, oracle)
        with pytest.raises(actshard.UnknownFormatError, match=rf"sparse latents \({kind}\).*actshard.latents.open"):
            actshard.open(path)
        for command in ("info", "head", "verify"):
            done = run_command(command, path)
            assert done.returncode == 0, done.stderr
            assert "layers.5" in done.stdout or kind in done.stdout
        data = json.loads(run_command("head", path, "--json", "-n", "2").stdout)
        assert [row["entries"] for row in data] == [int((oracle.locations[:, 0] == i).sum()) for i in range(2)]
        assert json.loads(run_command("info", path, "--json").stdout)["modules"][0]["entries"] == len(oracle.values)
        assert actshard.verify(path).format == f"{kind} latents"
        assert actshard.verify(path, deep=True).checked["entries"] == len(oracle.values)
    (tmp_path / "empty").mkdir()
    with pytest.raises(actshard.UnknownFormatError, match="expected sparse latents"):
        latents.open(tmp_path / "empty")
    with pytest.raises(actshard.MissingFileError):
        latents.open(tmp_path / "none")
    with pytest.raises(actshard.NotStoredError, match="no token ids"):
        latents.open(tmp_path / "parquet").tokens(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_is_read_as_a_folder(kind: str, tmp_path: Path) -> None:
    oracle = made(2, (6, 4, 10), 0.5)
    written(kind, tmp_path / "bucket" / kind, oracle, [0, 5, 10])
    with served(tmp_path) as server:
        store = latents.open(f"s3://bucket/{kind}", storage_options=server.options)
        assert_same(store, oracle, exact=kind != "parquet")
