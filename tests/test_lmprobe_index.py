"""Unusual lmprobe indexes: columns, versions, descriptors and parts are read correctly, or rejected with a clear error."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

import actshard
from conftest import GOLDEN, refuses, rewrite_index
from lmprobe_files import LISTS, PART, Copy, Meta, changed, check, golden, hidden, put, shard

# -- columns ---------------------------------------------------------------------------------------------------------


def test_null_or_absent_num_tokens_changes_nothing(lmprobe_copy: Copy, io: str) -> None:
    for variant in ("pooled_f32", "pooled_f16"):
        store = actshard.open(GOLDEN / "lmprobe" / variant, io=io)
        assert store.table["num_tokens"].null_count == store.num_examples
        check(store, variant)
    for change in (
        lambda t, _: put(t, "num_tokens", [None] * 26, pa.int32()),
        lambda t, _: t.drop_columns(["num_tokens", "token_offset", "label", "text"]),
    ):
        path = lmprobe_copy("fullseq_f32", change)
        check(actshard.open(path, io=io), "fullseq_f32")
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("variant", "type"),
    [("pooled_f32", pa.int32()), ("pooled_f16", pa.string()), ("pooled_bf16", pa.int32()), ("fullseq_f32", pa.int32())],
)
def test_labels_are_integers_strings_or_null_as_stored(variant: str, type: pa.DataType) -> None:
    store = actshard.open(GOLDEN / "lmprobe" / variant)
    want = json.loads((GOLDEN / "lmprobe" / variant / "expected_index.json").read_text())["columns"]["label"]
    assert store.table.schema.field("label").type == type
    assert store.table["label"].to_pylist() == want
    assert store.labels is None


def test_token_perplexity_is_one_shorter_and_may_be_text(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("fullseq_f32")
    table = actshard.open(path).table
    assert [len(x) for x in table["token_perplexity"].to_pylist()] == [
        len(x) - 1 for x in table["token_ids"].to_pylist()
    ]
    texts = [[str(x) for x in row] for row in table["token_perplexity"].to_pylist()]
    rewrite_index(path, lambda t, _: put(t, "token_perplexity", texts, pa.list_(pa.string())))
    store = actshard.open(path)
    assert store.table["token_perplexity"].to_pylist() == texts
    check(store, "fullseq_f32")


def test_publisher_columns_of_any_type_are_in_the_table(lmprobe_copy: Copy) -> None:
    n = 28
    columns = {
        "meta": pa.array([{"source": "a", "n": i} for i in range(n)]),
        "meta.source": pa.array(["dotted"] * n),
        "raw": pa.array([b"\x00\xff"] * n),
        "when": pa.array([datetime.datetime(2026, 1, 1)] * n),
        "kind": pa.array(["x", "y"] * (n // 2)).dictionary_encode(),
        "vector": pa.array([[1.0, 2.0]] * n, pa.list_(pa.float32(), 2)),
        "nothing": pa.nulls(n),
        "": pa.array(range(n)),
        "with space/ünicode": pa.array([True, None] * (n // 2)),
    }

    def change(table: pa.Table, _: Meta) -> pa.Table:
        for name, array in columns.items():
            table = table.append_column(name, array)
        return table

    store = actshard.open(lmprobe_copy("pooled_f32", change))
    assert store.warnings == ()
    for name, array in columns.items():
        assert store.table[name].to_pylist() == array.to_pylist(), name
        assert store.read_columns([name]).column_names == [name]
    assert store.table.schema.metadata is None
    check(store, "pooled_f32")


def test_column_order_does_not_matter(lmprobe_copy: Copy, io: str) -> None:
    path = lmprobe_copy("fullseq_logits_router", lambda t, _: t.select(t.column_names[::-1]))
    store = actshard.open(path, io=io)
    check(store, "fullseq_logits_router")
    assert np.array_equal(store.logits()[0], golden("fullseq_logits_router")["logits_values"])


def test_address_lists_are_left_out_of_the_table_but_can_be_read() -> None:
    path = GOLDEN / "lmprobe/fullseq_f32"
    store = actshard.open(path)
    assert not set(LISTS) & set(store.table.column_names)
    assert set(store.table.column_names) | set(LISTS) == set(pq.read_schema(path / PART).names)
    got = store.read_columns([LISTS[1], "text", LISTS[0]])
    assert got.column_names == [LISTS[1], "text", LISTS[0]]
    assert [len(x) for x in got[LISTS[0]].to_pylist()] == store.token_counts.tolist()
    with refuses(actshard.NotStoredError, path, "no column 'nope'; columns are text, label") as caught:
        store.read_columns(["text", "nope"])
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("name", ["shard_index", "row_offset"])
@pytest.mark.parametrize("type", [pa.float64(), pa.string(), pa.bool_(), pa.list_(pa.int64())], ids=str)
def test_address_that_is_no_integer_is_refused(lmprobe_copy: Copy, name: str, type: pa.DataType) -> None:
    def change(table: pa.Table, _: Meta) -> pa.Table:
        column = table[name].combine_chunks()
        lists = pa.types.is_list(type)
        return put(table, name, pa.array([[x] for x in column.to_pylist()], type) if lists else column.cast(type))

    path = lmprobe_copy("pooled_f32", change)
    with refuses(actshard.FormatError, path / PART, rf"column '{name}': expected integers, found {str(type)[:4]}"):
        actshard.open(path)


@pytest.mark.parametrize("type", [pa.int8(), pa.int64(), pa.uint8(), pa.uint64()], ids=str)
def test_address_may_be_of_any_integer_type(lmprobe_copy: Copy, io: str, type: pa.DataType) -> None:
    def change(table: pa.Table, _: Meta) -> pa.Table:
        for name in ("shard_index", "row_offset"):
            table = put(table, name, table[name].cast(type))
        for name, made in zip(LISTS, (pa.large_list(type), pa.list_(type)), strict=True):
            table = put(table, name, table[name].to_pylist(), made)
        return table

    check(actshard.open(lmprobe_copy("fullseq_f32", change), io=io), "fullseq_f32")


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(
    ("type", "words"),
    [
        (pa.list_(pa.float64()), "expected integers, found double"),
        (pa.list_(pa.string()), "expected integers, found string"),
        (pa.int64(), "expected lists of integers, found int64"),
        (pa.string(), "expected lists of integers, found string"),
        (pa.list_(pa.list_(pa.int64())), "expected integers, found list"),
    ],
    ids=str,
)
def test_address_lists_of_another_type_are_refused(
    lmprobe_copy: Copy, name: str, type: pa.DataType, words: str
) -> None:
    def change(table: pa.Table, _: Meta) -> pa.Table:
        rows = table[name].to_pylist()
        if not pa.types.is_list(type):
            return put(table, name, [str(r[0]) if type == pa.string() else r[0] for r in rows], type)
        wrap: Callable[[int], Any] = {"double": float, "string": str}.get(str(type.value_type), lambda x: [x])
        return put(table, name, [[wrap(x) for x in r] for r in rows], type)

    path = lmprobe_copy("fullseq_f32", change)
    with refuses(actshard.FormatError, path / PART, f"column '{name}': {words}"):
        actshard.open(path)


@pytest.mark.parametrize("name", ["shard_index", "row_offset"])
def test_null_address_is_refused_and_its_row_named(lmprobe_copy: Copy, name: str) -> None:
    path = lmprobe_copy("fullseq_f32", lambda t, _: changed(t, name, 17, None))
    with refuses(actshard.FormatError, path / PART, f"column '{name}': row 17 is null"):
        actshard.open(path)


@pytest.mark.parametrize("name", LISTS)
def test_null_inside_an_address_list_is_refused_and_its_row_named(lmprobe_copy: Copy, name: str) -> None:
    path = lmprobe_copy("fullseq_f32", lambda t, _: changed(t, name, 17, [*t[name][17].as_py()[:-1], None]))
    with refuses(actshard.FormatError, path / PART, f"column '{name}': .*row 17"):
        actshard.open(path)


@pytest.mark.parametrize("value", [-1, 10, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", ["shard_index", "token_shard_ids"])
def test_shard_number_outside_the_descriptor_is_refused_at_open(lmprobe_copy: Copy, name: str, value: int) -> None:
    path = lmprobe_copy(
        "fullseq_f32",
        lambda t, _: changed(t, name, 4, [value, *t[name][4].as_py()[1:]] if name in LISTS else value),
    )
    with refuses(actshard.FormatError, path / PART, f"example 4: expected a shard number from 0 to 9, found {value}"):
        actshard.open(path)


@pytest.mark.parametrize("value", [-1, 2**40, 2**62, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("name", ["row_offset", "token_shard_offsets"])
def test_row_number_no_file_can_have_is_refused_at_open(lmprobe_copy: Copy, name: str, value: int) -> None:
    def change(table: pa.Table, _: Meta) -> pa.Table:
        table = put(table, "row_offset", table["row_offset"].cast(pa.int64()))
        return changed(table, name, 4, [value, *table[name][4].as_py()[1:]] if name in LISTS else value)

    path = lmprobe_copy("fullseq_f32", change)
    with refuses(actshard.FormatError, path / PART, rf"example 4: expected a row from 0 to 2\^40, found {value}"):
        actshard.open(path)


def test_unsigned_address_past_int64_is_refused(lmprobe_copy: Copy) -> None:
    def change(table: pa.Table, _: Meta) -> pa.Table:
        return changed(put(table, "row_offset", table["row_offset"].cast(pa.uint64())), "row_offset", 3, 2**63)

    path = lmprobe_copy("pooled_f32", change)
    with refuses(actshard.FormatError, path / PART, f"column 'row_offset': {2**63} is out of range"):
        actshard.open(path)


@pytest.mark.parametrize("row", [11, 10_000, 2**31 - 1])
def test_row_past_the_file_is_an_error_of_the_read_that_names_the_file(lmprobe_copy: Copy, io: str, row: int) -> None:
    path = lmprobe_copy("pooled_f32", lambda t, _: changed(t, "row_offset", 4, row))
    store = actshard.open(path, io=io)
    others = [e for e in range(28) if e != 4]
    assert np.array_equal(store.last_tokens(0, others), golden("pooled_f32")["layer_0"][others])
    reads: list[Callable[[], Any]] = [
        lambda: store.last_tokens(0),
        lambda: store.gather(0, 4, 0),
        lambda: store.gather(0, np.arange(28), -1),
        lambda: store.sequence(4, 0),
        lambda: store.sequences([3, 4], 0),
    ]
    for read in reads:
        with refuses(actshard.FormatError, shard(path, 0, 0), rf"row.* {row}.*has 11 rows"):
            read()


def test_token_row_past_the_file_is_an_error_of_the_read_that_names_the_file(lmprobe_copy: Copy, io: str) -> None:
    def change(table: pa.Table, _: Meta) -> pa.Table:
        lists = table["token_shard_offsets"].to_pylist()
        long = next(e for e, x in enumerate(lists) if len(x) > 3)
        return changed(table, "token_shard_offsets", long, [*(x + 1000 for x in lists[long][:-1]), lists[long][-1]])

    path = lmprobe_copy("fullseq_f32", change)
    store = actshard.open(path, io=io)
    table = store.read_columns(LISTS)
    bad = next(e for e, x in enumerate(table[LISTS[1]].to_pylist()) if max(x) >= 1000)
    file = shard(path, 3, table[LISTS[0]][bad].as_py()[0])
    for read in (lambda: store.sequence(bad, 3), lambda: store.sequences([bad], 3), lambda: store.gather(3, bad, 0)):
        with refuses(actshard.FormatError, file, r"has \d+ rows"):
            read()
    assert np.array_equal(store.last_tokens(3), golden("fullseq_f32")["layer_3"])


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("value", ["shorter", [], None])
def test_address_lists_of_different_lengths_are_refused(lmprobe_copy: Copy, name: str, value: Any) -> None:
    def change(table: pa.Table, _: Meta) -> pa.Table:
        return changed(table, name, 6, table[name][6].as_py()[:-1] if value == "shorter" else value)

    path = lmprobe_copy("fullseq_f32", change)
    with refuses(actshard.FormatError, path / PART, r"example 6: \d+ token shard numbers but \d+ token rows"):
        actshard.open(path)


@pytest.mark.parametrize("name", ["row_offset", "token_shard_offsets"])
def test_two_addresses_of_a_last_token_are_refused(lmprobe_copy: Copy, name: str) -> None:
    """Otherwise ``last_tokens`` and ``gather`` of token -1 return different rows."""

    def change(table: pa.Table, _: Meta) -> pa.Table:
        values = table[name].to_pylist()
        if name == "row_offset":
            other = next(i for i, shard in enumerate(table["shard_index"].to_pylist()) if i != 6 and shard == 0)
            return changed(table, name, 6, values[other])
        return changed(table, name, 6, [*values[6][:-1], values[6][-1] + 1])

    path = lmprobe_copy("fullseq_f32", change)
    pattern = r"example 6: expected the last token's address, shard \d+, row \d+, at the end of its list of tokens, found shard"
    with refuses(actshard.FormatError, path / PART, pattern):
        actshard.open(path)
    assert "last-token-address" in actshard.verify(path).codes()


@pytest.mark.parametrize("value", [None, []])
def test_example_without_address_lists_has_no_tokens(lmprobe_copy: Copy, io: str, value: Any) -> None:
    path = lmprobe_copy("fullseq_f32", lambda t, _: changed(changed(t, LISTS[0], 6, value), LISTS[1], 6, value))
    store = actshard.open(path, io=io)
    want = golden("fullseq_f32")
    lengths = want["lengths"].copy()
    ends = np.cumsum(lengths)
    lengths[6] = 0
    assert store.token_counts.tolist() == lengths.tolist()
    assert store.sequence(6, 3).shape == (0, 32)
    got = store.sequences([5, 6, 7], 3)
    assert [len(x) for x in got] == lengths[5:8].tolist()
    assert np.array_equal(got[2], want["layer_3_tokens"][ends[6] : ends[7]])
    for token in (0, -1):
        with refuses(actshard.OutOfRangeError, None, "example 6"):
            store.gather(3, 6, token)
    assert np.array_equal(store.last_tokens(3), want["layer_3"])


def test_tokens_stored_in_any_order_read_the_same(lmprobe_copy: Copy, io: str) -> None:
    path = lmprobe_copy("fullseq_f32")
    rng = np.random.default_rng(3)
    to_new: dict[int, np.ndarray] = {}
    for file in sorted((path / "tensors").glob("hidden_*")):
        index = int(re.findall(r"\d+", file.name)[1])
        ((key, tensor),) = load_file(file).items()
        new = to_new.setdefault(index, rng.permutation(len(tensor)))
        moved = np.empty_like(tensor)
        moved[new] = tensor
        save_file({key: moved}, file)

    def change(table: pa.Table, _: Meta) -> pa.Table:
        pairs = zip(*(table[name].to_pylist() for name in LISTS), strict=True)
        rows = [[int(to_new[s][r]) for s, r in zip(ids, offsets, strict=True)] for ids, offsets in pairs]
        lasts = zip(table["shard_index"].to_pylist(), table["row_offset"].to_pylist(), strict=True)
        table = put(table, "row_offset", [int(to_new[s][r]) for s, r in lasts], pa.int32())
        return put(table, LISTS[1], rows)

    rewrite_index(path, change)
    check(actshard.open(path, io=io), "fullseq_f32")


def test_codes_that_are_in_no_dictionary_of_texts_are_refused(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("pooled_f32", lambda t, _: put(t, "text", [f"text {i % 3}" for i in range(len(t))]))
    part = path / PART
    pq.write_table(pq.read_table(part), part, compression="NONE", use_dictionary=["text"])
    data, codes = part.read_bytes(), bytes.fromhex("244992244992")  # 0, 1, 2, 0, ... of two bits
    assert data.count(codes) == 1
    part.write_bytes(data.replace(codes, b"\xff" * 6))
    store = actshard.open(path)
    with refuses(actshard.FormatError, part, "cannot read columns"):
        store.read_columns(["text"])
    with refuses(actshard.FormatError, part, "cannot read columns"):
        list(store.contents.column_batches(["text"]))
    report = actshard.verify(path, deep=True)
    assert not report.ok


def test_column_named_twice_is_refused(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("pooled_f32", lambda t, _: t.append_column("shard_index", t["shard_index"]))
    with refuses(actshard.FormatError, path / PART, "duplicate column 'shard_index'"):
        actshard.open(path)


# -- descriptors and versions ----------------------------------------------------------------------------------------


def strip(path: Path) -> None:
    part = path / PART
    pq.write_table(pq.read_table(part).replace_schema_metadata(None), part)


def test_index_of_format_1_is_refused_with_what_converts_it(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("pooled_f32")
    strip(path)
    with refuses(
        actshard.UnsupportedError, path / PART, "not supported; convert it with lmprobe.upgrade_dataset_format"
    ):
        actshard.open(path, format="lmprobe")
    with refuses(actshard.UnknownFormatError, path, "without lmprobe keys"):
        actshard.open(path)
    (path / "lmprobe_info.json").write_text("{}")
    with refuses(actshard.UnsupportedError, path / PART, r"format 1\.x is not supported") as caught:
        actshard.open(path)
    assert isinstance(caught.value, NotImplementedError)


def version(value: Any) -> Callable[[pa.Table, Meta], pa.Table]:
    def change(table: pa.Table, meta: Meta) -> pa.Table:
        meta.pop("format_version")
        if value is not None:
            meta["format_version"] = value
        return table

    return change


@pytest.mark.parametrize("value", ["2.0", "2", 2, 2.0])
def test_version_2_reads_however_it_is_spelled(lmprobe_copy: Copy, value: Any) -> None:
    store = actshard.open(lmprobe_copy("pooled_f32", version(value)))
    check(store, "pooled_f32")


@pytest.mark.parametrize("value", ["2.1", "2.99", 2.5])
def test_newer_minor_version_is_a_warning(lmprobe_copy: Copy, value: Any) -> None:
    with pytest.warns(actshard.ActshardWarning, match=f"format version {value} is newer than actshard knows") as caught:
        store = actshard.open(lmprobe_copy("pooled_f32", version(value)))
    assert len(caught) == 1
    check(store, "pooled_f32")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("3.0", r"version 3\.0 is newer .* upgrade actshard"),
        ("17", "version 17 is newer"),
        ("1.9", r"version 1\.9 is not supported; convert it to 2\.x with lmprobe\.upgrade_dataset_format"),
        (1, "version 1 is not supported"),
        (None, "not supported"),
    ],
)
def test_other_major_versions_are_refused(lmprobe_copy: Copy, value: Any, words: str) -> None:
    path = lmprobe_copy("pooled_f32", version(value))
    with refuses(actshard.UnsupportedError, path / PART, words):
        actshard.open(path)


@pytest.mark.parametrize("value", ["", "two", "2.x", "-2.0", True, [], {"major": 2}, "2" * 5000, "2.0\n"])
def test_version_that_is_none_is_refused(lmprobe_copy: Copy, value: Any) -> None:
    path = lmprobe_copy("pooled_f32", version(value))
    with refuses(actshard.FormatError, path / PART, "field 'format_version': expected a version"):
        actshard.open(path)


def test_full_sequence_without_address_lists_is_refused(lmprobe_copy: Copy) -> None:
    for name in LISTS:
        path = lmprobe_copy("fullseq_f32", lambda t, _, name=name: t.drop_columns([name]))
        with refuses(actshard.UnsupportedError, path / PART, "without token_shard_ids.*lmprobe.migrate_dataset"):
            actshard.open(path)
        shutil.rmtree(path)


@pytest.mark.parametrize("pooling", ["mean", "first_token", 3])
def test_pooling_other_than_last_token_is_a_warning(lmprobe_copy: Copy, pooling: Any) -> None:
    path = lmprobe_copy("pooled_f32", hidden(pooling=pooling))
    with pytest.warns(
        actshard.ActshardWarning, match=f"pooling is {json.dumps(pooling)}.*not those of last tokens"
    ) as caught:
        store = actshard.open(path)
    assert len(caught) == 1
    check(store, "pooled_f32")


@pytest.mark.parametrize("descriptor", [{"type": "attention", "k": [1]}, {}, None, 7], ids=repr)
def test_unknown_tensor_type_is_kept_and_named_in_a_warning(lmprobe_copy: Copy, descriptor: Any) -> None:
    def change(table: pa.Table, meta: Meta) -> pa.Table:
        meta["tensors"]["attention_maps"] = descriptor
        return table

    with pytest.warns(actshard.ActshardWarning, match='"attention_maps"') as caught:
        store = actshard.open(lmprobe_copy("pooled_f32", change))
    assert len(caught) == 1
    assert store.metadata["tensors"]["attention_maps"] == descriptor
    check(store, "pooled_f32")


def test_number_of_prompts_other_than_claimed_is_a_warning(lmprobe_copy: Copy) -> None:
    def change(table: pa.Table, meta: Meta) -> pa.Table:
        meta["num_prompts"] = 29
        return table

    with pytest.warns(actshard.ActshardWarning, match="num_prompts is 29, but the index has 28 rows"):
        store = actshard.open(lmprobe_copy("pooled_f32", change))
    check(store, "pooled_f32")


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"layers": None}, actshard.FormatError, r"hidden_layers\.layers': expected a non-empty list of integers"),
        ({"layers": []}, actshard.FormatError, "non-empty list of integers"),
        ({"layers": [0, "1"]}, actshard.FormatError, "non-empty list of integers"),
        ({"layers": [0, 1, 1]}, actshard.FormatError, "distinct integers"),
        ({"shards": None}, actshard.FormatError, r"hidden_layers\.shards': expected a list of objects"),
        ({"shards": []}, actshard.FormatError, r"hidden_layers\.shards': expected 1 to"),
        ({"shards": 3}, actshard.FormatError, "a list of objects"),
        ({"shards": [3]}, actshard.FormatError, r"hidden_layers\.shards\[0\]': expected an object, found 3"),
        ({"storage": "ragged"}, actshard.UnsupportedError, r"hidden_layers\.storage': .ragged. is not supported"),
        ({"storage": 3}, actshard.FormatError, r"hidden_layers\.storage': expected a string"),
        ({"file_pattern": None}, actshard.FormatError, r"hidden_layers\.file_pattern': expected a string"),
        ({"key_pattern": None}, actshard.FormatError, r"hidden_layers\.key_pattern': expected a string"),
        ({"layers": list(range(3000)), "shards": [{}] * 1000}, actshard.FormatError, "3000 layers x 1000 shards"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_descriptor_of_the_wrong_shape_is_refused(
    lmprobe_copy: Copy, fields: Meta, kind: type[actshard.ActshardError], words: str
) -> None:
    path = lmprobe_copy("pooled_f32", hidden(**fields))
    with refuses(kind, path / PART, words):
        actshard.open(path)


@pytest.mark.parametrize("tensors", [None, [], "x", 3])
def test_tensors_must_be_an_object(lmprobe_copy: Copy, tensors: Any) -> None:
    def change(table: pa.Table, meta: Meta) -> pa.Table:
        meta["tensors"] = tensors
        return table

    path = lmprobe_copy("pooled_f32", change)
    with refuses(actshard.FormatError, path / PART, "field 'tensors': expected an object"):
        actshard.open(path)


# -- the index's files -----------------------------------------------------------------------------------------------


def split(path: Path, at: int, names: tuple[str, ...] = ("train-00000-of-00002", "train-00001-of-00002")) -> list[Path]:
    """Splits the index into two files."""
    table = pq.read_table(path / PART)
    (path / PART).unlink()
    parts = [path / f"index/{name}.parquet" for name in names]
    pq.write_table(table.slice(0, at), parts[0])
    pq.write_table(table.slice(at), parts[1])
    return parts


@pytest.mark.parametrize("at", [0, 1, 13, 25, 26])
def test_index_in_several_parts_is_one_dataset(lmprobe_copy: Copy, io: str, at: int) -> None:
    path = lmprobe_copy("fullseq_f32")
    whole = actshard.open(path).table
    parts = split(path, at)
    for opened in (path, *parts):
        store = actshard.open(opened, io=io)
        check(store, "fullseq_f32")
        assert store.table.equals(whole)


def test_missing_part_of_the_index_is_named(lmprobe_copy: Copy) -> None:
    for lost in (0, 1):
        path = lmprobe_copy("fullseq_f32")
        parts = split(path, 13)
        parts[lost].unlink()
        for opened in (path, parts[1 - lost]):
            with refuses(actshard.MissingFileError, parts[lost], f"expected part {lost} of 2 of the index"):
                actshard.open(opened)
        shutil.rmtree(path)


def test_more_parts_than_they_say_are_refused(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("fullseq_f32")
    parts = split(path, 13)
    shutil.copy(parts[1], path / "index/train-00002-of-00002.parquet")
    with refuses(actshard.FormatError, path / "index", "expected 2 parts, found 3"):
        actshard.open(path)


def test_several_indices_are_refused_until_one_is_named(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("pooled_f32")
    shutil.copy(path / PART, path / "index/test-00000-of-00001.parquet")
    with refuses(actshard.FormatError, path / "index", "several.*open one of the files"):
        actshard.open(path)
    check(actshard.open(path / PART), "pooled_f32")
    (path / "index/test-00000-of-00001.parquet").rename(path / "index/extra.parquet")
    with refuses(actshard.FormatError, path / "index", "found .*extra.parquet"):
        actshard.open(path)


def test_single_index_may_have_any_name(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("pooled_f32")
    (path / PART).rename(path / "index/data [1] ü.parquet")
    check(actshard.open(path), "pooled_f32")


@pytest.mark.parametrize("what", ["tensors", "columns"])
def test_parts_that_describe_different_things_are_refused(lmprobe_copy: Copy, what: str) -> None:
    path = lmprobe_copy("fullseq_f32")
    parts = split(path, 13)
    table = pq.read_table(parts[1])
    if what == "columns":
        table = table.drop_columns(["text"])
    else:
        meta = table.schema.metadata
        table = table.replace_schema_metadata(
            {**meta, b"lmprobe:tensors": meta[b"lmprobe:tensors"].replace(b"7", b"8")}
        )
    pq.write_table(table, parts[1])
    with refuses(
        actshard.FormatError, parts[1], "describes other tensors or columns than train-00000-of-00002.parquet"
    ):
        actshard.open(path)


def test_parts_whose_columns_have_different_types_are_an_error_of_the_table(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("fullseq_f32")
    parts = split(path, 13)
    table = pq.read_table(parts[1])
    pq.write_table(put(table, "label", table["label"].cast(pa.string())), parts[1])
    store = actshard.open(path)
    check(store, "fullseq_f32")
    with refuses(actshard.FormatError, path, "label"):
        _ = store.table
    assert store.read_columns(["text"]).num_rows == 26


def test_index_without_rows_is_refused(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("fullseq_f32", lambda t, _: t.slice(0, 0))
    with refuses(actshard.FormatError, path / PART, "no rows"):
        actshard.open(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b"",
        lambda b: b"PAR1",
        lambda b: b"PAR1PAR1PAR1",
        lambda b: b"hello\nworld\n" * 100,
        lambda b: b[: len(b) // 2],
        lambda b: b[:-1],
        lambda b: b[1:],
        lambda b: b[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
        lambda b: b[:-8] + struct.pack("<I", 0) + b"PAR1",
    ],
)
def test_index_that_is_no_parquet_is_refused(lmprobe_copy: Copy, change: Callable[[bytes], bytes]) -> None:
    path = lmprobe_copy("pooled_f32")
    (path / PART).write_bytes(change((path / PART).read_bytes()))
    for opened in (path, path / PART):
        with refuses(actshard.FormatError, path / PART, "expected a Parquet file|expected pages|cannot read columns"):
            actshard.open(opened)


def test_index_with_damaged_pages_is_refused(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("fullseq_f32")
    data = (path / PART).read_bytes()
    footer = len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]
    (path / PART).write_bytes(data[:4] + b"\xff" * (footer - 4) + data[footer:])
    with refuses(actshard.FormatError, path / PART, r"cannot read columns \['shard_index', 'row_offset'"):
        actshard.open(path)


def test_damaged_bytes_anywhere_in_the_index_read_or_are_refused(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("fullseq_f32")
    data = (path / PART).read_bytes()
    rng = np.random.default_rng(5)
    refused = 0
    for at in rng.integers(0, len(data), 200):
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.integers(8)
        (path / PART).write_bytes(damaged)
        try:
            store = actshard.reading.opening.open_quietly(path, "lmprobe", "mmap")
            assert store.table.num_rows == store.num_examples
            store.last_tokens(store.layers[0])
        except actshard.ActshardError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017 -- which bytes matter depends on pyarrow
            refused += 1
    assert refused > 10


def test_folder_or_pipe_in_place_of_the_index_file_is_an_error(lmprobe_copy: Copy) -> None:
    for make in (Path.mkdir, os.mkfifo):
        path = lmprobe_copy("pooled_f32")
        (path / PART).unlink()
        make(path / PART)
        with refuses(actshard.NotAFileError, path / PART, "found a folder or a special file"):
            actshard.open(path)
        shutil.rmtree(path)


def test_index_that_is_a_broken_link_is_missing(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("pooled_f32")
    (path / PART).unlink()
    (path / PART).symlink_to("nowhere")
    with refuses(actshard.MissingFileError, path / PART):
        actshard.open(path)


def test_texts_that_repeat_are_not_expanded(lmprobe_copy: Copy) -> None:
    """A few kB of parquet can contain the same long text thousands of times: it is decoded once, and heads and blocks are small."""
    path = lmprobe_copy("pooled_f32")
    (part,) = (path / "index").glob("*.parquet")
    table = pq.read_table(part)
    text = pa.DictionaryArray.from_arrays(pa.array([0] * len(table), pa.int32()), pa.array(["x" * (32 << 20)]))
    coded = table.set_column(0, "text", text).replace_schema_metadata(None)
    with pq.ParquetWriter(part, coded.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(coded)
        writer.add_key_value_metadata(table.schema.metadata)
    assert part.stat().st_size < 100_000
    del coded, table, text
    store = actshard.open(path)
    found = store.read_columns(["text"])
    assert found["text"].nbytes < 64 << 20
    assert len(found["text"][27].as_py()) == 32 << 20
    assert store.contents.head_columns is not None
    assert store.contents.head_columns(["text"], 3).num_rows == 3
    assert actshard.verify(path).codes() == {"duplicate-text"}


def test_the_head_is_the_beginning_of_the_table(lmprobe_copy: Copy) -> None:
    for variant in ("pooled_f32", "fullseq_logits_router"):
        store = actshard.open(lmprobe_copy(variant))
        assert store.contents.head_columns is not None
        assert store.contents.column_batches is not None
        names = list(store.contents.column_names)
        whole = store.read_columns(names)
        for n in (1, 3, len(store)):
            assert store.contents.head_columns(names, n).equals(whole.slice(0, n))
        assert pa.concat_tables(store.contents.column_batches(names)).equals(whole)
        with refuses(actshard.NotStoredError, store.path, "no column 'x'"):
            store.contents.head_columns(["x"], 1)


@pytest.mark.parametrize(
    "name", ["num_tokens", "shard_index", "row_offset", "token_shard_ids", "shard_index_logits", "text", "label"]
)
def test_a_column_that_is_there_twice_is_found_by_verify(lmprobe_copy: Copy, name: str) -> None:
    def twice(table: Any, meta: dict[str, Any]) -> Any:
        return table.append_column(name, table[name])

    path = lmprobe_copy("fullseq_logits_router", change=twice)
    found = [f for f in actshard.verify(path).findings if f.severity == "error"]
    assert any(
        "column" in (f.place or "") + f.found and "duplicate" in f.found and f.code == "format" for f in found
    ), found
    if name in ("shard_index", "row_offset", "token_shard_ids"):
        with pytest.raises(actshard.FormatError, match=f"duplicate column '{name}'"):
            actshard.open(path)
        return
    with pytest.warns(actshard.ActshardWarning, match=f"duplicate column '{name}'"):
        store = actshard.open(path)
    with pytest.raises(actshard.FormatError, match=f"duplicate column '{name}'"):
        store.read_columns([name])


def test_token_counts_of_another_type_are_a_finding(lmprobe_copy: Copy) -> None:
    def structs(table: Any, meta: dict[str, Any]) -> Any:
        at = table.column_names.index("num_tokens")
        return table.set_column(at, "num_tokens", pa.array([{"n": 1}] * len(table)))

    assert "column-type" in actshard.verify(lmprobe_copy("fullseq_f32", change=structs)).codes()


def test_prompts_that_share_a_text_are_found_by_verify(lmprobe_copy: Copy) -> None:
    """lmprobe finds rows by text: of equal texts it reads the last one's rows for all."""

    def texts(make: Callable[[int], Any]) -> Any:
        return lambda table, meta: table.set_column(
            0, "text", pa.array([make(i) for i in range(len(table))], pa.string())
        )

    for k, (make, place) in enumerate(
        [(lambda i: "", "27 prompts"), (lambda i: f"{max(i, 3)}", "3 prompts"), (lambda i: None, "27 prompts")]
    ):
        path = lmprobe_copy("pooled_f32", change=texts(make))
        (finding,) = actshard.verify(path).findings
        assert (finding.code, finding.severity) == ("duplicate-text", "warning")
        assert finding.found.startswith(place), k
        shutil.rmtree(path)
    assert actshard.verify(lmprobe_copy("pooled_f32")).findings == []
