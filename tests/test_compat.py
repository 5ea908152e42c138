"""Drop-in loaders: the functions of the published texts and of lmprobe, with their names, types and errors."""

from __future__ import annotations

import gzip
import pickle
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.compat import lmprobe, pickle_shards
from actshard.compat import zarr as ours
from conftest import GOLDEN
from zarr_files import write_store

PICKLES = sorted(p.parent for p in (GOLDEN / "pickle").glob("*/expected.npz"))
PICKLES = [p for p in PICKLES if (p / "metadata.json").exists()]
STORES = [GOLDEN / "zarr" / n for n in ("single_consolidated/activations.zarr", "zstd/activations.zarr", "run_20260122_101112",
          "missing_chunks_zero/activations.zarr", "big_endian/activations.zarr", "v3_sharded/activations.zarr",
          "hidden_split/activations.zarr")]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def stock(path: Path, compressed: bool) -> Any:
    """Loads a shard as in the text, with pickle. Only for golden shards."""
    with gzip.open(path, "rb") if compressed else path.open("rb") as file:
        return pickle.load(file)


@pytest.mark.parametrize("folder", PICKLES, ids=lambda p: p.name)
def test_pickle_shards_as_the_text_reads_them(folder: Path) -> None:
    metadata = pickle_shards.load_metadata(folder)
    layers = sorted({x for s in metadata["shards"] for x in s["layers"]})
    for layer in layers:
        want = []
        for s in metadata["shards"]:
            if layer in s["layers"]:
                theirs = stock(folder / s["filename"], s["compressed"])
                mine = pickle_shards.load_shard(folder / s["filename"], compressed=s["compressed"])
                assert same(theirs, mine)
                want += theirs.get(f"layer_{layer}", [])
        assert same(want, list(pickle_shards.iter_activations(folder, layer)))
        data = pickle_shards.ActivationDataset(folder, layer)
        assert len(data) == len(want)
        for got in (
            data.__getitems__(range(len(data))),
            [pickle.loads(pickle.dumps(data))[i] for i in range(len(data))],
        ):  # type: ignore[arg-type]
            for item, theirs in zip(got, want, strict=True):
                assert np.array_equal(item["activation"], theirs["activation"])
                assert item["activation"].dtype == theirs["activation"].dtype.newbyteorder("=")
                assert item["activation"].flags.writeable
                assert item["sample_idx"] == theirs["sample_idx"]
                assert item["text"] == theirs["text_preview"]
        with pytest.raises(IndexError):
            data[len(data)]
    with pytest.raises(actshard.LayerError):
        pickle_shards.ActivationDataset(folder, 999)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_shards_of_several_types_are_read_as_the_text_reads_them(tmp_path: Path, protocol: int) -> None:
    from pickle_files import mixed

    folder, rows = mixed(tmp_path / "d", ["<f4", ">f4", "<f2", ">f2", "<f8", ">f8", "<f4"], gz=True, protocol=protocol)
    shards = sorted(folder.glob("*.pkl.gz"))
    theirs = [x for path in shards for x in stock(path, True)["layer_0"]]
    mine = [x for path in shards for x in pickle_shards.load_shard(path)["layer_0"]]
    assert same(theirs, mine)  # byte orders, too, which depend on how numpy wrote an array
    data = pickle_shards.ActivationDataset(folder, 0)
    for i, (got, want) in enumerate(zip(data.__getitems__([*range(len(rows))]), theirs, strict=True)):
        native = want["activation"].dtype.newbyteorder("=")
        for item in (got, data[i]):
            assert item["activation"].dtype == native
            assert np.array_equal(item["activation"], want["activation"])


def test_hostile_shards_are_refused_here_too() -> None:
    for name, compressed in (("global_os_getcwd", True), ("builtins_eval", True), ("truncated_pickle", False)):
        folder = GOLDEN / "pickle/hostile" / name
        shard = next(folder.glob("shard_*"))
        with pytest.raises(actshard.FormatError) as caught:
            pickle_shards.load_shard(shard, compressed)
        assert caught.value.path == shard


@pytest.mark.parametrize("path", STORES, ids=lambda p: p.name if p.suffix != ".zarr" else p.parent.name)
def test_arrays_answer_like_the_array_itself(path: Path) -> None:
    root = ours.open_group(path)
    acts = root["arrays/activations"]
    assert isinstance(acts, ours.Array)
    whole = acts[...]
    assert (whole.shape, acts.ndim, len(acts), acts.size) == (acts.shape, 4, acts.shape[0], whole.size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(path)
    assert acts.dtype == store.dtype
    for layer in store.layers:
        for i, rows in enumerate(store.sequences(range(len(store)), layer)):
            assert np.array_equal(whole[i, layer, : len(rows)], rows)
            assert np.array_equal(acts[i, layer, 0 : len(rows), :], rows)
    n, layers, t, h = acts.shape
    for index in (
        (0, 0), 0, -1, (n - 1, layers - 1, t - 1, h - 1), (slice(1, None), slice(None), 0), (..., 1),
        (slice(0, n, 2), -1, slice(1, t, 3)),
        (0, slice(None), slice(2, 2)), (slice(None), 0, slice(None), slice(1, 3)), slice(0, 0), (np.int64(0), 0, ..., slice(None)),
    ):  # fmt: skip
        got, want = acts[index], whole[index]
        assert np.array_equal(got, want), index
        assert np.shape(got) == np.shape(want)
    for bad, error in (
        ((n, 0), IndexError),
        ((0, 0, 0, 0, 0), ValueError),
        (([0, 1],), ValueError),
        ((slice(None, None, -1),), ValueError),
    ):
        with pytest.raises(error):
            acts[bad]
    assert np.array_equal(pickle.loads(pickle.dumps(acts))[0], whole[0])
    lengths = root["arrays"]["seq_len"]  # type: ignore[index]
    assert np.array_equal(lengths[:], store.table["seq_len"].to_numpy())
    assert "arrays/activations" in root
    assert "arrays/none" not in root
    assert "activations" in root["arrays"].keys()  # type: ignore[union-attr]  # noqa: SIM118
    with pytest.raises(KeyError):
        root["arrays/none"]
    with pytest.raises(actshard.ArgumentError, match="read-only"):
        ours.open_group(path, mode="w")


def test_the_training_pattern(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((9, 5, 8, 4)).astype("f2")
    lengths = np.array([8, 1, 0, 3, 8, 2, 7, 5, 6], "i4")
    path = write_store(tmp_path / "s.zarr", values, lengths, (1, 1, 3, 4))
    data = ours.TrainingDataset(path, seed=3)
    items = data.__getitems__(list(range(9)))
    assert len(data) == 9
    for i, item in enumerate(items):
        assert (item["i"], item["seq_len"], len(set(item["layers"].tolist()))) == (i, lengths[i], 2)
        assert item["activations"].shape == (2, lengths[i], 4)
        assert np.array_equal(item["activations"], values[i, item["layers"], : lengths[i]])
        one = pickle.loads(pickle.dumps(data))[i]
        assert np.array_equal(one["activations"], item["activations"])
    data.set_epoch(1)
    assert any(data.layers_of(i).tolist() != items[i]["layers"].tolist() for i in range(9))
    with pytest.raises(actshard.ArgumentError):
        ours.TrainingDataset(path, layers_per_sample=6)


@pytest.mark.parametrize("variant", ["pooled_f32", "pooled_f16", "pooled_bf16", "fullseq_f32", "fullseq_bf16"])
def test_lmprobes_functions_on_a_folder(variant: str) -> None:
    folder = GOLDEN / "lmprobe" / variant
    store = actshard.open(folder)
    layers = sorted(store.layers)
    texts = store.table["text"].to_pylist()
    every = lmprobe.load_activations(folder)
    assert list(every) == layers
    for layer in layers:
        assert every[layer].dtype == np.float32
        assert np.array_equal(every[layer], store.last_tokens(layer, dtype="float32"))
    some = [texts[3], texts[0]]
    stacked = lmprobe.load_activations(folder, prompts=some, layers=layers[::-1], as_dict=False)
    last = {text: i for i, text in enumerate(texts)}
    assert stacked.shape == (2, len(layers), store.d_model)
    for k, layer in enumerate(layers):
        assert np.array_equal(stacked[:, k], every[layer][[last[t] for t in some]])
    _, labels = lmprobe.load_activations(folder, return_labels=True)
    want = store.table["label"].to_pylist()
    assert labels is None if None in want else labels.tolist() == want
    with pytest.raises(ValueError, match="not in dataset"):
        lmprobe.load_activations(folder, layers=[999])
    with pytest.raises(FileNotFoundError, match="No activations for 1 prompt"):
        lmprobe.load_activations(folder, prompts=["nobody wrote this"])
    with pytest.raises(FileNotFoundError, match="snapshot_download"):
        lmprobe.load_activations("some/repository")
    mean = {"mean": lambda x: x.mean(axis=0), "first_token": lambda x: x[0], "max": lambda x: x.max(axis=0)}
    mean["min"] = lambda x: x.min(axis=0)
    for pooling, pool in mean.items():
        if variant.startswith("pooled"):
            with pytest.raises(FileNotFoundError, match="pooled by"):
                lmprobe.load_activations(folder, pooling=pooling)
        else:
            found = lmprobe.load_activations(folder, pooling=pooling, layers=layers[:1])[layers[0]]
            for row, rows in zip(found, store.sequences(range(len(store)), layers[0], dtype="float32"), strict=True):
                assert np.allclose(row, pool(rows), rtol=1e-6)


def test_lmprobe_pooling_all_returns_the_tokens_of_equally_long_prompts(tmp_path: Path) -> None:
    rows = np.arange(3 * 2 * 4 * 5, dtype=np.float32).reshape(3, 2, 4, 5)
    for name, lengths in (("even", [4, 4, 4]), ("ragged", [4, 2, 4])):
        with actshard.create(tmp_path / name, "lmprobe", layers=[0, 1], d_model=5) as writer:
            writer.append([x[:, :n] for x, n in zip(rows, lengths, strict=True)], columns={"text": ["a", "b", "c"]})
    found = lmprobe.load_activations(tmp_path / "even", prompts=["c", "a"], pooling="all")
    assert {layer: each.tolist() for layer, each in found.items()} == {k: rows[[2, 0], k].tolist() for k in (0, 1)}
    stacked = lmprobe.load_activations(tmp_path / "even", pooling="all", as_dict=False)
    assert np.array_equal(stacked, rows)
    held = lmprobe.ActivationStore.from_dataset(tmp_path / "even", pooling="all")
    assert np.array_equal(held.get_activations(["b"]), np.concatenate([rows[[1], 0], rows[[1], 1]], axis=-1))
    assert np.array_equal(
        lmprobe.load_activations(tmp_path / "ragged", prompts=["a", "c"], pooling="all")[1], rows[[0, 2], 1]
    )
    with pytest.raises(ValueError, match="equally many tokens, found 4 and 2"):
        lmprobe.load_activations(tmp_path / "ragged", pooling="all")


def test_lmprobes_store_and_folds() -> None:
    folder = GOLDEN / "lmprobe/pooled_f32"
    held = lmprobe.ActivationStore.from_dataset(folder, layers=None)
    texts = held.prompts
    assert held.is_loaded
    assert held.layers == sorted(actshard.open(folder).layers)
    assert held.get_activations().shape == (len(texts), len(held.layers) * actshard.open(folder).d_model)
    one = held.get_activations([texts[1]], layer=held.layers[0])
    assert np.array_equal(one[0], actshard.open(folder).last_tokens(held.layers[0], [held._prompt_to_idx[texts[1]]])[0])
    with pytest.raises(ValueError, match="not found in store"):
        held.get_activations(["nobody"])
    with pytest.raises(ValueError, match="not loaded"):
        held.get_activations(layer=999)
    if held.labels is not None:
        x, y, x2, y2 = held.get_fold(texts[:4], texts[4:6])
        assert (len(x), len(y), len(x2), len(y2)) == (4, 4, 2, 2)
        assert y.tolist() == held.get_labels(texts[:4]).tolist()  # type: ignore[union-attr]
    assert "prompts" in repr(held)
    with held as inside:
        assert inside.memory_bytes > 0
    assert repr(held) == "ActivationStore(not loaded)"
    with pytest.raises(RuntimeError, match="not loaded"):
        held.get_activations()
    with pytest.raises(NotImplementedError):
        lmprobe.ActivationStore.from_cache("m", [], layers=[0])


def test_lmprobe_types_that_a_dataset_lacks_are_left_out_and_poolings_are_checked(tmp_path: Path) -> None:
    """As in lmprobe: a missing tensor type is skipped, an unknown pooling raises ValueError; no hidden states, no activations."""
    pooled, logits = GOLDEN / "lmprobe/pooled_f32", GOLDEN / "lmprobe/logits_only"
    for dataset in (pooled, GOLDEN / "lmprobe/fullseq_f32"):
        with pytest.raises(ValueError, match="pooling"):
            lmprobe.load_activations(dataset, pooling="nonsense")
    with pytest.raises(FileNotFoundError, match="no hidden states"):
        lmprobe.load_activations(logits)
    pytest.importorskip("torch")
    found, _ = lmprobe.load_activation_dataset(pooled, tensors=["hidden_layers", "logits_topk"])
    assert sorted(found) == ["hidden.layer_0", "hidden.layer_1", "hidden.layer_2"]


@pytest.mark.parametrize(
    ("module", "absent", "named"),
    [
        ("deepspec", "torch", r"actshard\[torch\]"),
        ("specforge", "torch", r"actshard\[torch\]"),
        ("speculators", "torch", r"actshard\[torch\]"),
        ("speculators", "hs_connectors", "pip install speculators"),
        ("specforge.features", "specforge", "pip install specforge"),
    ],
)
def test_drop_ins_of_draft_trainers_name_what_is_not_installed(module: str, absent: str, named: str) -> None:
    """In a fresh process, in which the library cannot be imported; where torch is absent too, torch is named."""
    code = f"""
        import sys
        sys.modules[{absent!r}] = None
        import actshard
        try:
            import actshard.compat.{module}
        except actshard.MissingExtraError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert re.search(rf"{named}|actshard\[torch\]", run.stdout), run.stdout + run.stderr
    assert run.stdout.count("\n") == 1
