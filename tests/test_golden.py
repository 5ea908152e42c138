"""Datasets written by the original systems read back bit for bit, in both io modes."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import actshard
from conftest import GOLDEN, LMPROBE, SAEV, SHARED, bits, saev_dump


def open_expecting_rename(path: Path, io: str) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return actshard.open(path, io=io)


@pytest.mark.parametrize("variant", SAEV, ids=lambda p: p.name)
def test_saev_equals_expected(variant: Path, io: str) -> None:
    expected = np.load(variant / "expected.npz")
    acts = expected["acts"]
    n, _, t, d = acts.shape
    store = open_expecting_rename(saev_dump(variant), io)
    assert (store.format, store.layers, store.d_model, store.dtype, store.num_examples) == (
        "saev",
        tuple(expected["layers"].tolist()),
        d,
        np.float32,
        n,
    )
    assert store.token_counts.tolist() == [t] * n
    assert store.warnings == ()
    e, k = np.meshgrid(np.arange(n), np.arange(t), indexing="ij")
    shuffled = np.random.default_rng(0).permutation(n * t)
    for i, layer in enumerate(store.layers):
        want = acts[:, i]
        assert np.array_equal(bits(store.gather(layer, e, k)), bits(want))
        got = store.gather(layer, e.ravel()[shuffled], k.ravel()[shuffled] - t)
        assert np.array_equal(bits(got), bits(want.reshape(-1, d)[shuffled]))
        assert np.array_equal(bits(store.last_tokens(layer)), bits(want[:, -1]))
        assert all(np.array_equal(bits(store.sequence(x, layer)), bits(want[x])) for x in range(n))
        assert np.array_equal(bits(np.stack(store.sequences(range(n)[::-1], layer))), bits(want[::-1]))
    if "labels" in expected:
        assert np.array_equal(store.labels, expected["labels"])
        assert not store.labels.flags.writeable
    else:
        assert store.labels is None
    assert store.table["example_idx"].to_pylist() == list(range(n))


@pytest.mark.parametrize("variant", LMPROBE, ids=lambda p: p.name)
def test_lmprobe_equals_expected(variant: Path, io: str) -> None:
    expected = np.load(variant / "expected.npz")
    index = json.loads((variant / "expected_index.json").read_text())
    store = open_expecting_rename(variant, io)
    assert store.format == "lmprobe"
    assert store.warnings == ()
    assert store.layers == tuple(int(k[6:]) for k in expected if k.startswith("layer_") and k[6:].isdigit())
    n = store.num_examples
    if store.layers:
        lengths = expected["lengths"] if "lengths" in expected else np.ones(n, int)
        assert store.token_counts.tolist() == lengths.tolist()
        e = np.repeat(np.arange(n), lengths)
        t = np.concatenate([np.arange(x) for x in lengths])
        shuffled = np.random.default_rng(0).permutation(len(e))
    for layer in store.layers:
        stored = {
            name: (expected[f"{name}_bits"].view(store.dtype) if f"{name}_bits" in expected else expected[name])
            for name in (f"layer_{layer}", f"layer_{layer}_tokens")
            if name in expected
        }
        last = stored[f"layer_{layer}"]
        tokens = stored.get(f"layer_{layer}_tokens", last)
        assert store.dtype == last.dtype
        assert np.array_equal(bits(store.last_tokens(layer)), bits(last))
        assert np.array_equal(bits(store.last_tokens(layer, [n - 1, 0, 0])), bits(last[[n - 1, 0, 0]]))
        assert np.array_equal(bits(store.gather(layer, range(n), -1)), bits(last))
        assert np.array_equal(bits(store.gather(layer, e, t)), bits(tokens))
        back = t[shuffled] - lengths[e[shuffled]]
        assert np.array_equal(bits(store.gather(layer, e[shuffled], back)), bits(tokens[shuffled]))
        ends = np.cumsum(lengths)
        for x, sequence in enumerate(store.sequences(range(n), layer)):
            want = bits(tokens[ends[x] - lengths[x] : ends[x]])
            assert np.array_equal(bits(sequence), want)
            assert np.array_equal(bits(store.sequence(x, layer)), want)
        as_float32 = store.gather(layer, e, t, dtype=np.float32)
        assert np.array_equal(as_float32, tokens.astype(np.float32))
        if f"layer_{layer}" in expected:
            assert np.array_equal(store.last_tokens(layer, dtype="float32"), expected[f"layer_{layer}"])
    if "logits_values" in expected:
        values, indices = store.logits()
        assert np.array_equal(values.astype(np.float32), expected["logits_values"])
        assert np.array_equal(indices, expected["logits_indices"])
        assert indices.dtype == np.int32
        picked = store.logits([n - 1, 1])
        assert np.array_equal(picked[0], values[[n - 1, 1]])
        assert np.array_equal(picked[1], indices[[n - 1, 1]])
    else:
        with pytest.raises(actshard.NotStoredError):
            store.logits()
    routers = [k for k in expected if k.startswith("router_layer_")]
    for key in routers:
        layer = int(key.removeprefix("router_layer_"))
        assert np.array_equal(store.router(layer), expected[key])
        assert np.array_equal(store.router(layer, [3, 1]), expected[key][[3, 1]])
    if not routers:
        with pytest.raises(actshard.NotStoredError):
            store.router(0)
    table = store.table
    for name, values in index["columns"].items():
        if name != "input_index":  # the order in which prompts were given is not stored
            assert table[name].to_pylist() == values, name
    assert not {"token_shard_ids", "token_shard_offsets"} & set(table.column_names)


def test_bfloat16_arrives_as_bfloat16_and_float16_as_float16() -> None:
    assert actshard.open(GOLDEN / "lmprobe/pooled_bf16").dtype == ml_dtypes.bfloat16
    store = actshard.open(GOLDEN / "lmprobe/pooled_f16")
    assert store.dtype == np.float16
    assert store.logits()[0].dtype == np.float16


# sha256 of each layer's (200, 384) float32 last-token rows, from expected.npz of the real dataset.
REAL = {
    0: "e32329f94c5f2522083d574ff67e5f6ebf523af23a55b3527b1b75ca54d00759",
    1: "01826b33fa0f4fcbd8290da6aa88c30bf660c9129c5bec66fe683946782f25df",
    2: "46979b7ed497a6cf582cd3181ef2978b7dfad96dcca880bbefe3498068fc97ce",
    3: "a2a0d381f6201ed9d2cb1e5489e1e1770963ee8852b6fc2a638326467ac95eda",
    4: "7bce25edf18a7d012b35064c7de0a95b57877458be056644916cc72a722b2bed",
    5: "e485a09776b71485927173ffb2e75088f3498d74aed73c24d6624327682ad879",
    6: "d66611c4ddeec18df78882c623b3954ebbfa4489f66710e904ec46bbe3dda46a",
}


def test_real_lmprobe_equals_expected(io: str) -> None:
    store = actshard.open(Path(actshard.__file__).parent / "_demo/minilm-tense", io=io)
    assert (store.layers, store.num_examples, store.d_model) == (tuple(range(7)), 200, 384)
    got = {layer: hashlib.sha256(store.last_tokens(layer).tobytes()).hexdigest() for layer in store.layers}
    assert got == REAL


@pytest.mark.skipif(not (SHARED / "real").exists(), reason="the real saev dataset (5 MB) is not part of the repository")
def test_real_saev_equals_expected(io: str) -> None:
    real = SHARED / "real/minilm-tense"
    expected = np.load(real / "expected.npz")
    store = actshard.open(saev_dump(real / "saev"), io=io)
    got = np.stack([np.stack(store.sequences(range(96), layer)) for layer in store.layers], axis=1)
    assert np.array_equal(bits(got), bits(expected["saev"]))
    lmprobe = actshard.open(real / "lmprobe-pooled", io=io)
    got = np.stack([lmprobe.last_tokens(layer) for layer in lmprobe.layers], axis=1)
    assert np.array_equal(bits(got), bits(expected["last_token"]))
