"""Unusual lmprobe tensor files and patterns: each is read correctly, or rejected with a clear error."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file, save_file

import actshard
from actshard.base.errors import HeaderError
from conftest import bits, refuses
from lmprobe_files import PART, Copy, Meta, check, golden, hidden, put, shard

# -- element types and keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", ["float64", "bfloat16", "nonsense", 7, None])
@pytest.mark.parametrize("variant", ["pooled_f16", "pooled_bf16", "fullseq_bf16", "fullseq_f32"])
def test_dtype_is_the_header_s_whatever_the_descriptor_says(
    lmprobe_copy: Copy, io: str, variant: str, claim: Any
) -> None:
    path = lmprobe_copy(variant, hidden(dtype=claim, row_bytes=1))
    store = actshard.open(path, io=io)
    assert str(store.dtype) == {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}[variant.split("_")[1]]
    check(store, variant)


def rename_logits(path: Path, values: str, indices: str, *, more: bool = False) -> None:
    for file in sorted((path / "tensors").glob("logits_topk_*.safetensors")):
        old = load_file(file)
        made = {values: old["logits_topk.values"], indices: old["logits_topk.indices"]}
        if more:
            made |= {"topk_values": np.zeros((1, 1), np.float32), "topk_indices": np.zeros((1, 1), np.int32)}
        save_file(made, file)


@pytest.mark.parametrize("variant", ["pooled_logits", "fullseq_logits_router", "logits_only"])
@pytest.mark.parametrize(
    ("keys", "more"),
    [(("topk_values", "topk_indices"), False), (("logits_topk.values", "logits_topk.indices"), True)],
)
def test_logits_read_under_the_text_s_keys_and_the_code_s(
    lmprobe_copy: Copy, io: str, variant: str, keys: tuple[str, str], more: bool
) -> None:
    path = lmprobe_copy(variant)
    rename_logits(path, *keys, more=more)
    values, indices = actshard.open(path, io=io).logits()
    assert np.array_equal(bits(values), bits(golden(variant)["logits_values"]))
    assert np.array_equal(indices, golden(variant)["logits_indices"])
    assert indices.dtype == np.int32


def test_logits_under_other_keys_are_an_error_that_lists_them(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("pooled_logits")
    rename_logits(path, "topk_values", "logits_topk.indices")
    store = actshard.open(path)
    check(store, "pooled_logits")
    with refuses(actshard.FormatError, path / "tensors/logits_topk_000.safetensors", "found .*'topk_values'"):
        store.logits()


def test_logits_values_and_indices_of_different_widths_are_an_error(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("pooled_logits")
    for file in (path / "tensors").glob("logits_topk_*.safetensors"):
        old = load_file(file)
        save_file({**old, "logits_topk.indices": np.ascontiguousarray(old["logits_topk.indices"][:, :-1])}, file)
    with refuses(actshard.FormatError, path / "tensors/logits_topk_000.safetensors", "6 indices and 7 values"):
        actshard.open(path).logits()


def test_logits_without_their_columns_are_an_error(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("pooled_logits", lambda t, _: t.drop_columns(["shard_index_logits"]))
    store = actshard.open(path)
    check(store, "pooled_logits")
    with refuses(actshard.FormatError, path / PART, "expected a column 'shard_index_logits'"):
        store.logits()


@pytest.mark.parametrize("keep_pair", [True, False])
def test_logits_only_has_no_layers_but_logits(lmprobe_copy: Copy, io: str, keep_pair: bool) -> None:
    names = [] if keep_pair else ["shard_index_logits", "row_offset_logits"]
    store = actshard.open(lmprobe_copy("logits_only", lambda t, _: t.drop_columns(names)), io=io)
    assert (store.layers, store.d_model, store.num_examples) == ((), 0, 15)
    assert store.token_counts.tolist() == [0] * 15
    values, indices = store.logits([3, 0, 14])
    assert np.array_equal(values, golden("logits_only")["logits_values"][[3, 0, 14]])
    assert np.array_equal(indices, golden("logits_only")["logits_indices"][[3, 0, 14]])
    for read in (lambda: store.gather(0, 0, 0), lambda: store.last_tokens(0), lambda: store.sequence(0, 0)):
        with refuses(actshard.LayerError, store.path, "layer 0 is not stored"):
            read()
    assert store.table.num_rows == 15


def test_logits_and_router_may_name_their_files_one_by_one(lmprobe_copy: Copy, io: str) -> None:
    def change(table: pa.Table, meta: Meta) -> pa.Table:
        for name in ("logits_topk", "router_logits"):
            del meta["tensors"][name]["file_pattern"]
            for i, entry in enumerate(meta["tensors"][name]["shards"]):
                entry["file"] = f"tensors/{name[:6]} {i}.st"
        return table

    path = lmprobe_copy("fullseq_logits_router", change)
    for i in range(2):
        (path / f"tensors/logits_topk_{i:03}.safetensors").rename(path / f"tensors/logits {i}.st")
    for i, file in enumerate(sorted((path / "tensors").glob("router_logits_*"))):
        file.rename(path / f"tensors/router {i}.st")
    store = actshard.open(path, io=io)
    want = golden("fullseq_logits_router")
    assert np.array_equal(store.logits()[0], want["logits_values"])
    for key in (k for k in want if k.startswith("router_layer_")):
        assert np.array_equal(store.router(int(key[13:])), want[key])
    assert store.info()["missing_shards"] == 0


def test_router_of_another_layer_is_an_error_that_names_the_list(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("fullseq_logits_router")
    store = actshard.open(path)
    layers = sorted(int(k[13:]) for k in golden("fullseq_logits_router") if k.startswith("router_layer_"))
    with refuses(actshard.LayerError, path, re.escape(", ".join(map(str, layers)))):
        store.router(99)


def test_router_shards_that_do_not_add_up_are_an_error(lmprobe_copy: Copy) -> None:
    def change(table: pa.Table, meta: Meta) -> pa.Table:
        meta["tensors"]["router_logits"]["shards"][0]["num_prompts"] -= 1
        return table

    path = lmprobe_copy("fullseq_logits_router", change)
    store = actshard.open(path)
    check(store, "fullseq_logits_router")
    with refuses(actshard.FormatError, path / PART, "expected 22 prompts in total, found 21"):
        store.router(2)


# -- shards without files, files in other places ---------------------------------------------------------------------


@pytest.mark.parametrize("at", [2, 5, 10])
def test_shard_without_tokens_has_no_file(lmprobe_copy: Copy, io: str, at: int) -> None:
    def change(table: pa.Table, meta: Meta) -> pa.Table:
        meta["tensors"]["hidden_layers"]["shards"].insert(at, {"num_prompts": 2, "num_tokens": 0})
        ids = [[s + (s >= at) for s in row] for row in table["token_shard_ids"].to_pylist()]
        return put(table, "token_shard_ids", ids)

    path = lmprobe_copy("fullseq_f32", change)
    for layer in (0, 3, 7):
        for i in range(9, at - 1, -1):
            shard(path, layer, i).rename(shard(path, layer, i + 1))
    store = actshard.open(path, io=io)
    check(store, "fullseq_f32")
    assert (store.info()["shards"], store.info()["missing_shards"]) == (30, 0)


def move(path: Path, files: str, keys: str) -> None:
    """Renames all hidden shards and their tensors."""
    for file in sorted((path / "tensors").glob("hidden_*")):
        layer, index = map(int, re.findall(r"\d+", file.name))
        (tensor,) = load_file(file).values()
        target = path / files.format(layer=layer, shard=index)
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file({keys.format(layer=layer, shard=index): tensor}, target)
        file.unlink()


@pytest.mark.parametrize(
    ("files", "keys"),
    [
        ("deep/er/{layer}/s-{shard:05d}.st", "acts"),
        ("{shard}.{layer:2d}", "x{layer:04}"),
        ("tensors/{{layer}}{layer}_{shard}", "{{0}}"),
        ("tensors/übung {layer} {shard}", "schlüssel {layer}"),
        ("tensors/..{layer}..{shard}", "{layer}{layer}"),
    ],
)
def test_patterns_are_followed(lmprobe_copy: Copy, io: str, files: str, keys: str) -> None:
    for variant in ("fullseq_f32", "pooled_f32"):
        path = lmprobe_copy(variant, hidden(file_pattern=files, key_pattern=keys))
        move(path, files, keys)
        check(actshard.open(path, io=io), variant)


HOSTILE = [
    "{layer.__class__}{shard}",
    "{layer[0]}{shard}",
    "{layer}{shard:0999999999d}",
    "{layer}{shard:999}",
    "{0}{shard}",
    "{}{shard}",
    "{x}{shard}",
    "{layer!r}{shard}",
    "{layer:{shard}}{shard}",
    "{layer:>9}{shard}",
    "{layer:x}{shard}",
    "{layer}{shard",
    "{layer}{shard}}",
    7,
    ["{layer}{shard}"],
    "{layer}{shard}\ud800",
]
SHARD_ONLY = "tensors/{shard}.safetensors"  # valid for tensors with all layers in one file
CLIMBING = [
    "../x{layer}{shard}",
    "tensors/../../x{layer}{shard}",
    "/etc/{layer}{shard}",
    "\\x{layer}{shard}",
    "tensors\\..\\..\\x{layer}{shard}",
    "{layer}{shard}\0",
    "tensors/{layer}{shard}/..",
    "tensors/{layer}.safetensors",
    SHARD_ONLY,
    "",
    "tensors/{layer}\n{shard}",
]


@pytest.mark.parametrize("name", ["file_pattern", "key_pattern"])
@pytest.mark.parametrize("pattern", HOSTILE, ids=ascii)
def test_pattern_that_is_not_layer_and_shard_is_refused(lmprobe_copy: Copy, name: str, pattern: Any) -> None:
    path = lmprobe_copy("fullseq_f32", hidden(**{name: pattern}))
    with refuses(actshard.FormatError, path / PART, rf"field 'tensors\.hidden_layers\.{name}': expected"):
        actshard.open(path)


@pytest.mark.parametrize("pattern", CLIMBING, ids=ascii)
def test_file_pattern_that_climbs_out_or_names_one_file_is_refused(lmprobe_copy: Copy, pattern: str) -> None:
    change = hidden(file_pattern=pattern, key_pattern="k")
    path = lmprobe_copy("fullseq_f32", change)
    with refuses(actshard.FormatError, path / PART, r"field 'tensors\.hidden_layers"):
        actshard.open(path)


@pytest.mark.parametrize("pattern", [p for p in [*HOSTILE, *CLIMBING] if p != SHARD_ONLY], ids=ascii)
@pytest.mark.parametrize("name", ["logits_topk", "router_logits"])
def test_patterns_of_logits_and_router_are_checked_too(lmprobe_copy: Copy, name: str, pattern: Any) -> None:
    def change(table: pa.Table, meta: Meta) -> pa.Table:
        entries = meta["tensors"][name]["shards"]
        meta["tensors"][name]["shards"] = [*entries, {"num_prompts": 0, "file": "tensors/x"}]
        meta["tensors"][name]["file_pattern"] = pattern
        return table

    path = lmprobe_copy("fullseq_logits_router", change)
    store = actshard.open(path)
    with refuses(actshard.FormatError, path / PART, rf"field 'tensors\.{name}"):
        store.logits() if name == "logits_topk" else store.router(2)


def test_file_name_too_long_for_the_system_is_an_error(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("fullseq_f32", hidden(file_pattern="x" * 300 + "{layer}{shard}"))
    with refuses(actshard.FileAccessError, path / ("x" * 300 + "00"), "too long"):
        actshard.open(path)


def test_opening_by_the_index_file_is_opening_the_dataset(lmprobe_copy: Copy, tmp_path: Path, io: str) -> None:
    path = lmprobe_copy("fullseq_f32")
    store = actshard.open(path / PART, io=io)
    assert store.path == path / PART
    check(store, "fullseq_f32")
    check(pickle.loads(pickle.dumps(store)), "fullseq_f32")
    beside = (path / PART).rename(path / "beside.parquet")
    check(actshard.open(beside, io=io), "fullseq_f32")
    with refuses(actshard.UnknownFormatError, path, r"no index/\*\.parquet"):
        actshard.open(path)
    with refuses(actshard.MissingFileError, path / "index", "found no parquet file"):
        actshard.open(path, format="lmprobe")


def test_missing_tensor_file_is_named_and_the_rest_still_reads(lmprobe_copy: Copy, io: str) -> None:
    path = lmprobe_copy("pooled_f32")
    shard(path, 1, 1).unlink()
    store = actshard.open(path, io=io)
    check(store, "pooled_f32", (0, 2))
    others = [e for e in range(28) if not 11 <= e < 22]
    assert np.array_equal(store.last_tokens(1, others), golden("pooled_f32")["layer_1"][others])
    reads: list[Callable[[], Any]] = [
        lambda: store.last_tokens(1),
        lambda: store.gather(1, [0, 11], 0),
        lambda: store.sequence(11, 1),
        lambda: store.sequences([0, 11], 1),
    ]
    for read in reads:
        with refuses(actshard.MissingFileError, shard(path, 1, 1), "found nothing") as caught:
            read()
        assert isinstance(caught.value, FileNotFoundError)
    assert (store.info()["shards"], store.info()["missing_shards"]) == (8, 1)


def test_first_tensor_file_may_be_missing_but_not_all(lmprobe_copy: Copy, io: str) -> None:
    path = lmprobe_copy("pooled_f32")
    for i in range(3):
        shard(path, 0, i).unlink()
    check(actshard.open(path, io=io), "pooled_f32", (1, 2))
    shutil.rmtree(path / "tensors")
    with refuses(actshard.MissingFileError, shard(path, 0, 0), "nor any other of 9 tensor files"):
        actshard.open(path, io=io)


# -- tensors ---------------------------------------------------------------------------------------------------------


def test_width_other_than_the_descriptor_s_is_refused_at_open(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("pooled_f32", hidden(dim=33))
    with refuses(actshard.FormatError, shard(path, 0, 0), r"has shape \[11, 32\], expected \(rows, 33\)"):
        actshard.open(path)


@pytest.mark.parametrize("dim", [0, -1, "32", 32.0, True, 2**70])
def test_width_that_is_no_integer_is_refused(lmprobe_copy: Copy, dim: Any) -> None:
    path = lmprobe_copy("pooled_f32", hidden(dim=dim))
    with refuses(actshard.FormatError, path / PART, r"field 'tensors\.hidden_layers\.dim'"):
        actshard.open(path)


def test_width_may_be_left_to_the_header(lmprobe_copy: Copy) -> None:
    check(actshard.open(lmprobe_copy("pooled_f32", hidden(dim=None))), "pooled_f32")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda key, x: {key: x[:, :-1].copy()}, r"has shape \[11, 31\], expected \(rows, 32\)"),
        (lambda key, x: {key: x.reshape(-1)}, r"has shape \[352\], expected \(rows, (dim|32)\)"),
        (lambda key, x: {key: x[None]}, r"has shape \[1, 11, 32\]"),
        (lambda key, x: {key: x[:, :0].copy()}, r"has shape \[11, 0\]"),
        (lambda key, x: {"other": x}, r"expected a tensor named 'hidden\.layer_0', found \[.other.\]"),
        (lambda key, x: {}, r"expected a tensor named 'hidden\.layer_0', found \[\]"),
    ],
)
def test_tensor_of_another_shape_or_name_is_an_error_that_names_the_file(
    lmprobe_copy: Copy, io: str, which: int, change: Callable[[str, np.ndarray], Any], words: str
) -> None:
    path = lmprobe_copy("pooled_f32")
    file = shard(path, 0, which)
    ((key, tensor),) = load_file(file).items()
    save_file(change(key, tensor), file)
    if which == 0:
        with refuses(actshard.FormatError, file, words):
            actshard.open(path, io=io)
        return
    store = actshard.open(path, io=io)
    check(store, "pooled_f32", (1, 2))
    assert np.array_equal(store.last_tokens(0, range(11)), golden("pooled_f32")["layer_0"][:11])
    with refuses(actshard.FormatError, file, words):
        store.last_tokens(0)
    with refuses(actshard.FormatError, file, words):
        store.sequence(12, 0)


def test_one_dataset_has_one_element_type(lmprobe_copy: Copy, io: str) -> None:
    path = lmprobe_copy("pooled_f32")
    ((key, tensor),) = load_file(shard(path, 0, 1)).items()
    save_file({key: tensor.astype(np.float16)}, shard(path, 0, 1))
    store = actshard.open(path, io=io)
    with refuses(actshard.FormatError, shard(path, 0, 1), "is F16, but the dataset's first file has F32"):
        store.last_tokens(0)


@pytest.mark.parametrize("size", [0, 3, 8, 40, 79, 80, 500, -1])
def test_truncated_tensor_file_is_an_error_that_names_it(lmprobe_copy: Copy, io: str, size: int) -> None:
    path = lmprobe_copy("pooled_f32")
    for which in (1, 0):
        file = shard(path, 0, which)
        file.write_bytes(file.read_bytes()[:size])
        with refuses(HeaderError, file) as caught:
            actshard.open(path, io=io).last_tokens(0, range(28))
        assert caught.value.reason


def test_folder_in_place_of_a_tensor_file_is_an_error(lmprobe_copy: Copy, io: str) -> None:
    path = lmprobe_copy("pooled_f32")
    for which in (1, 0):
        shard(path, 0, which).unlink()
        shard(path, 0, which).mkdir()
        with refuses(actshard.NotAFileError, shard(path, 0, which), "found a folder"):
            actshard.open(path, io=io).last_tokens(0, range(28))
