"""Errors of saev dumps: one line that names the file, and the right exception."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, bits, refuses

Copy = Callable[..., Path]
ERRORS = GOLDEN / "saev/errors"
CASES = json.loads((ERRORS / "cases.json").read_text())

# case -> (exception, its builtin base class, file name, part of the message); None: it opens.
REFUSED: dict[str, tuple[type[actshard.ActshardError], type[Exception], str, str] | None] = {
    "missing_shard": (actshard.MissingFileError, FileNotFoundError, "acts000001.bin", "found nothing"),
    "empty_shard": (actshard.TruncatedFileError, EOFError, "acts000001.bin", "empty file"),
    "short_shard": (
        actshard.TruncatedFileError,
        EOFError,
        "acts000001.bin",
        r"expected at least \d+ bytes .* found \d+",
    ),
    "no_shards_json": (actshard.MissingFileError, FileNotFoundError, "shards.json", "2 acts files"),
    "other_parent": None,
    "float16_dtype": (actshard.UnsupportedError, NotImplementedError, "metadata.json", "'dtype'.*float32.*float16"),
    "future_protocol": None,
    "shard_is_directory": (actshard.NotAFileError, IsADirectoryError, "acts000001.bin", "found a folder"),
}


@pytest.mark.parametrize("case", CASES)
def test_golden_error_case(case: str, io: str) -> None:
    path = ERRORS / CASES[case]["dump"]
    expected = REFUSED[case]
    if expected is not None:
        kind, builtin, file, words = expected
        assert issubclass(kind, builtin)
        with refuses(kind, path / file, words):
            actshard.open(path, io=io)
        return
    if case == "future_protocol":
        with pytest.warns(actshard.ActshardWarning, match=r"protocol 3\.0 is a MAJOR version newer"):
            store = actshard.open(path, io=io)
    else:
        store = actshard.open(path, io=io)
    n = store.num_examples
    want = np.concatenate([np.fromfile(f, np.float32) for f in sorted(path.glob("acts*.bin"))])
    want = want.reshape(-1, len(store.layers), store.token_counts[0], store.d_model)[:n]
    for i, layer in enumerate(store.layers):
        assert np.array_equal(bits(np.stack(store.sequences(range(n), layer))), bits(want[:, i]))


# -- metadata.json ---------------------------------------------------------------------------------------------------

SIZES = ["content_tokens_per_example", "d_model", "n_examples", "max_tokens_per_shard"]
REQUIRED = [*SIZES, "layers", "cls_token"]
BAD_SIZES = [None, True, False, "7", 7.0, 7.5, [7], {}, 0, -1, 2**62, 2**63, 2**70, -(2**70)]


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda m: m.update({name: value})


@pytest.mark.parametrize("value", BAD_SIZES, ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_size_must_be_a_positive_integer(saev_copy: Copy, name: str, value: Any) -> None:
    path = saev_copy(metadata=_set(name, value))
    with refuses(actshard.FormatError, path / "metadata.json", f"field '{name}': expected an integer of at least 1"):
        actshard.open(path)


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field_is_named(saev_copy: Copy, name: str) -> None:
    path = saev_copy(metadata=lambda m: m.pop(name) and None)
    with pytest.raises(actshard.FormatError) as caught:
        actshard.open(path)
    assert str(path) in str(caught.value)
    with refuses(actshard.FormatError, path / "metadata.json", f"field '{name}': expected .*, found nothing"):
        actshard.open(path, format="saev")


@pytest.mark.parametrize(
    "value", [None, 3, "0", {}, [], [True], [1.0], ["1"], [None], [[1]], [2**62], [2**70], [0, 0], [0, 5, 0]], ids=repr
)
def test_layers_must_be_distinct_integers(saev_copy: Copy, value: Any) -> None:
    path = saev_copy(metadata=_set("layers", value))
    with refuses(actshard.FormatError, path / "metadata.json", "field 'layers': expected .*integers"):
        actshard.open(path)


@pytest.mark.parametrize("value", [None, 0, 1, "true", [], 1.0])
def test_cls_token_must_be_a_boolean(saev_copy: Copy, value: Any) -> None:
    path = saev_copy(metadata=_set("cls_token", value))
    with refuses(actshard.FormatError, path / "metadata.json", "field 'cls_token': expected true or false"):
        actshard.open(path)


@pytest.mark.parametrize(
    "value", [None, 2, 2.1, "", "2", "two", "v2.1", "2.1-beta", "2.1\n", "-2.1", "9" * 5000 + ".0"]
)
def test_protocol_must_be_a_version(saev_copy: Copy, value: Any) -> None:
    path = saev_copy(metadata=_set("protocol", value))
    with refuses(actshard.FormatError, path / "metadata.json", "field 'protocol': expected"):
        actshard.open(path)


@pytest.mark.parametrize("value", [32, True, [], {}])
@pytest.mark.parametrize("name", ["family", "ckpt", "dtype"])
def test_text_must_be_a_string(saev_copy: Copy, name: str, value: Any) -> None:
    path = saev_copy(metadata=_set(name, value))
    with refuses(actshard.FormatError, path / "metadata.json", f"field '{name}': expected a string"):
        actshard.open(path)


@pytest.mark.parametrize("value", ["float16", "bfloat16", "<f4", "", "float32\n", "x" * 10_000])
def test_only_float32_is_defined(saev_copy: Copy, value: str) -> None:
    path = saev_copy(metadata=_set("dtype", value))
    with refuses(actshard.UnsupportedError, path / "metadata.json", "float32"):
        actshard.open(path)


@pytest.mark.parametrize("name", ["family", "ckpt", "data", "dataset", "pixel_agg", "dtype"])
def test_what_is_not_needed_may_be_absent_or_null(saev_copy: Copy, name: str) -> None:
    path = saev_copy(metadata=_set(name, None))
    (path / "metadata.json").rename(path / "null.json")
    meta = json.loads((path / "null.json").read_text())
    for change in (meta.copy(), {k: v for k, v in meta.items() if k != name}):
        (path / "metadata.json").write_text(json.dumps(change))
        with pytest.warns(actshard.ActshardWarning, match="hash"):
            store = actshard.open(path)
        assert store.metadata == change
        assert store.info()["examples"] == 11


@pytest.mark.parametrize("budget", [1, 17])
def test_budget_too_small_for_one_example_says_what_it_takes(saev_copy: Copy, budget: int) -> None:
    path = saev_copy(metadata=_set("max_tokens_per_shard", budget))
    with refuses(
        actshard.FormatError, path / "metadata.json", "at least tokens x layers = 6 x 3 = 18, found"
    ) as caught:
        actshard.open(path)
    assert str(caught.value).endswith(f"found {budget}")


@pytest.mark.parametrize("n_layers", [0, -1, 100_001, 2**61, True, None, [1]], ids=repr)
def test_number_of_layers_of_the_first_months_is_checked(saev_copy: Copy, n_layers: Any) -> None:
    def first_months(m: dict[str, Any]) -> None:
        del m["layers"]
        m["n_layers"] = n_layers

    path = saev_copy(metadata=first_months)
    with refuses(actshard.FormatError, path / "metadata.json", "field 'n_layers'"):
        actshard.open(path)


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_examples": 2**61},
        {"d_model": 2**61},
        {"max_tokens_per_shard": 2**61},
        {"content_tokens_per_example": 2**60, "max_tokens_per_shard": 2**61 + 2**60},
        {"n_examples": 2**31, "d_model": 2**31},
    ],
    ids=repr,
)
def test_sizes_whose_product_overflows_are_refused(saev_copy: Copy, sizes: dict[str, int]) -> None:
    path = saev_copy(metadata=lambda m: m.update(sizes))
    with pytest.raises(actshard.FormatError) as caught:
        actshard.open(path)
    assert str(path) in str(caught.value)


def test_huge_dataset_without_a_listing_is_refused_before_it_is_listed(saev_copy: Copy) -> None:
    def before_2025(m: dict[str, Any]) -> None:
        m.update(n_examples=2**50, d_model=1, layers=[0], content_tokens_per_example=1, max_tokens_per_shard=2)
        del m["protocol"]

    path = saev_copy(metadata=before_2025)
    (path / "shards.json").unlink()
    with refuses(actshard.MissingFileError, path / "acts000004.bin", f"expected {2**50} shards"):
        actshard.open(path)


def test_row_too_wide_to_read_is_refused(saev_copy: Copy, io: str) -> None:
    d = 2**30 + 1
    path = saev_copy(
        metadata=lambda m: m.update(n_examples=1, d_model=d, layers=[0], content_tokens_per_example=1, cls_token=False),
        shards=lambda _: [{"name": "acts000000.bin", "n_examples": 1}],
    )
    (path / "labels.bin").unlink()
    os.truncate(path / "acts000000.bin", 4 * d)  # sparse
    with refuses(actshard.FormatError, path, "4 GiB"):
        actshard.open(path, io=io)


def _text(path: Path, name: str, change: Callable[[str], str | bytes]) -> None:
    changed = change((path / name).read_text())
    (path / name).write_bytes(changed.encode() if isinstance(changed, str) else changed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: "", "expected JSON"),
        (lambda _: " \n", "expected JSON"),
        (lambda t: t[:-20], "expected JSON"),
        (lambda t: t + "x", "Extra data"),
        (lambda t: b"\xef\xbb\xbf" + t.encode(), "expected JSON"),
        (lambda t: t.encode("utf-16"), "expected UTF-8"),
        (lambda t: t.encode()[:30] + b"\xff\xfe" + t.encode()[30:], "byte 30: expected UTF-8"),
        (lambda t: t.replace(": 16,", ": NaN,"), "the constant NaN"),
        (lambda t: t.replace(": 16,", ": -Infinity,"), "the constant -Infinity"),
        (lambda t: t.replace(": 16,", ": 1e999,"), "field 'd_model'"),
        (lambda t: t.replace(": 16,", ": 1" + "0" * 5000 + ","), "expected JSON"),
        (lambda t: t.replace(": 16,", ": 1" + "0" * 4000 + ","), "field 'd_model'"),
        (lambda t: t.replace('"d_model"', '"d_model": 16, "d_model"'), "field 'd_model': appears twice"),
        (lambda t: t.replace('"d_model"', '"a\\nb\\u2028": 1, "a\\nb\\u2028": 2, "d_model"'), "appears twice"),
        (lambda t: t.replace('"d_model"', '"x": {"y": 1, "y": 1}, "d_model"'), "field 'y': appears twice"),
        (lambda t: t.replace(": 16,", ": " + "[" * 100_000 + "]" * 100_000 + ","), "nested too deep"),
        (lambda t: t.replace(": 16,", ": " + '{"a":' * 100_000 + "1" + "}" * 100_000 + ","), "nested too deep"),
        (lambda _: "[" * 100_000, "nested too deep|expected JSON"),
        (lambda _: "[]", "expected an object"),
        (lambda _: '"metadata"', "expected an object"),
        (lambda _: "null", "expected an object, found null"),
        (lambda _: "7", "expected an object, found 7"),
    ],
)
def test_metadata_that_is_no_such_json_is_refused(saev_copy: Copy, change: Callable[[str], str], words: str) -> None:
    path = saev_copy()
    _text(path, "metadata.json", change)
    with refuses(actshard.FormatError, path / "metadata.json", words):
        actshard.open(path, format="saev")
    with pytest.raises(actshard.FormatError) as caught:
        actshard.open(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("bracket", ["[]", '{"a":}'])
def test_nesting_is_read_or_refused_alike_at_any_depth_of_the_stack(saev_copy: Copy, bracket: str) -> None:
    path = saev_copy()
    original = (path / "metadata.json").read_text()
    for depth in (1, 90, 101, *range(700, 1000, 7), *range(930, 1000), 2000):
        deep = bracket[:-1] * depth + "1" + bracket[-1] * depth
        (path / "metadata.json").write_text(original.replace('"d_model"', f'"deep": {deep}, "d_model"'))
        if depth < 100:
            with pytest.warns(actshard.ActshardWarning, match="hash"):
                actshard.open(path, format="saev")
        else:
            with refuses(actshard.FormatError, path / "metadata.json", "nested too deep"):
                actshard.open(path, format="saev")


def test_metadata_as_a_folder_or_missing_is_refused(saev_copy: Copy) -> None:
    path = saev_copy()
    (path / "metadata.json").unlink()
    with refuses(actshard.MissingFileError, path / "metadata.json", "expected a file, found nothing"):
        actshard.open(path, format="saev")
    with refuses(actshard.UnknownFormatError, path, "no metadata.json"):
        actshard.open(path)
    (path / "metadata.json").mkdir()
    with refuses(actshard.NotAFileError, path / "metadata.json", "found a folder"):
        actshard.open(path, format="saev")
    with refuses(actshard.UnknownFormatError, path, "metadata.json: expected a regular file"):
        actshard.open(path)


def test_named_pipe_is_refused_and_not_waited_for(saev_copy: Copy) -> None:
    path = saev_copy()
    for name in ("acts000001.bin", "shards.json", "metadata.json"):
        (path / name).unlink()
        os.mkfifo(path / name)
        with refuses(actshard.NotAFileError, path / name, "special file"):
            actshard.open(path, format="saev")


# -- shards.json -----------------------------------------------------------------------------------------------------


def _entry(name: Any = "acts000000.bin", count: Any = 3) -> dict[str, Any]:
    return {"name": name, "n_examples": count}


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ({}, "expected a list"),
        (None, "expected a list"),
        ("acts000000.bin", "expected a list"),
        (3, "expected a list"),
        ([], "found 0 in 0"),
        ([["acts000000.bin", 3]], r"field '\[0\]': expected an object"),
        (["acts000000.bin"], r"field '\[0\]': expected an object"),
        ([None], r"field '\[0\]': expected an object, found null"),
        ([{"name": "acts000000.bin"}], r"field '\[0\]\.n_examples': expected an integer.*found nothing"),
        ([{"n_examples": 3}], r"field '\[0\]\.name': expected a string, found nothing"),
        *(
            ([_entry(count=c)], r"field '\[0\]\.n_examples': expected an integer")
            for c in (None, True, "3", 3.0, -1, 2**70)
        ),
        *(
            ([_entry(count=c)], r"field '\[0\]\.n_examples': expected 3 \(11 examples, 3 per shard\)")
            for c in (0, 2, 4)
        ),
        *(([_entry(name=n)], r"field '\[0\]\.name': expected a string") for n in (None, 0, [], True)),
    ],
)
def test_listing_of_the_wrong_shape_is_refused(saev_copy: Copy, shards: Any, words: str) -> None:
    path = saev_copy()
    (path / "shards.json").write_text(json.dumps(shards))
    with refuses(actshard.FormatError, path / "shards.json", words):
        actshard.open(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s[:2], "expected 11 examples in 4 shards, found 6 in 2: the dump was interrupted"),
        (lambda s: s[1:], "found 8 in 3|expected 3"),
        (lambda s: [*s, s[-1]], r"field '\[4\]\.n_examples': expected 0"),
        (lambda s: [*s[:-1], {**s[-1], "n_examples": 1}], r"field '\[3\]\.n_examples': expected 2"),
        (lambda s: [*s[:-1], {**s[-1], "n_examples": 3}], r"field '\[3\]\.n_examples': expected 2"),
        (lambda s: [s[3], *s[:3]], r"field '\[0\]\.n_examples': expected 3"),
    ],
)
def test_counts_that_do_not_add_up_are_refused(saev_copy: Copy, change: Callable[[Any], Any], words: str) -> None:
    path = saev_copy(shards=change)
    with refuses(actshard.FormatError, path / "shards.json", words):
        actshard.open(path)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/etc/passwd",
        "../acts000000.bin",
        "./acts000000.bin",
        "acts000000.bin/",
        "..\\x",
        "a\0b",
        "a\nb",
    ],
)
@pytest.mark.parametrize("usual_exists", [True, False])
def test_name_that_leaves_the_folder_is_refused(saev_copy: Copy, name: str, usual_exists: bool) -> None:
    path = saev_copy(shards=lambda s: s[1].update(name=name))
    if not usual_exists:
        (path / "acts000001.bin").unlink()
    with refuses(actshard.FormatError, path / "shards.json", r"field '\[1\]\.name'"):
        actshard.open(path)


def test_name_that_is_no_unicode_is_refused(saev_copy: Copy) -> None:
    path = saev_copy(shards=lambda s: s[1].update(name="\ud800"))
    (path / "acts000001.bin").unlink()
    with refuses(actshard.FormatError, path / "shards.json", r"field '\[1\]\.name'"):
        actshard.open(path)


def test_name_too_long_for_the_system_is_refused(saev_copy: Copy) -> None:
    path = saev_copy(shards=lambda s: s[1].update(name="x" * 300))
    (path / "acts000001.bin").unlink()
    with refuses(actshard.FileAccessError, path / ("x" * 300), "too long"):
        actshard.open(path)


def test_two_entries_for_one_file_are_refused(saev_copy: Copy) -> None:
    path = saev_copy(shards=lambda s: s[1].update(name="acts000000.bin"))
    (path / "acts000001.bin").unlink()
    with refuses(actshard.FormatError, path / "shards.json", r"field '\[1\]\.name': expected a different file"):
        actshard.open(path)


def test_name_other_than_saev_reads_is_a_warning(saev_copy: Copy, io: str) -> None:
    want = np.load(GOLDEN / "saev/v21_cls_labels_multishard/expected.npz")["acts"]
    path = saev_copy(shards=lambda s: s[1].update(name="other.bin"))
    for _ in range(2):
        with pytest.warns(actshard.ActshardWarning, match=r"names shard 1 'other\.bin', saev reads 'acts000001\.bin'"):
            store = actshard.open(path, io=io)
        assert np.array_equal(bits(np.stack(store.sequences(range(11), 5))), bits(want[:, 1]))
        if (path / "acts000001.bin").exists():
            (path / "acts000001.bin").rename(path / "other.bin")


# -- the shards ------------------------------------------------------------------------------------------------------

FULL = 3 * 3 * 6 * 16 * 4


@pytest.mark.parametrize("io_mode", ["mmap", "pread"])
@pytest.mark.parametrize(
    ("index", "size", "kind", "words"),
    [
        (1, 0, actshard.TruncatedFileError, f"byte 0: expected {FULL} bytes, found an empty file"),
        (1, 1, actshard.TruncatedFileError, f"byte 1: expected {FULL} bytes .3 examples of {FULL // 3}., found 1"),
        (1, FULL - 1, actshard.TruncatedFileError, f"found {FULL - 1}"),
        (1, FULL // 3 * 2, actshard.TruncatedFileError, f"found {FULL // 3 * 2}"),
        (3, FULL // 3 * 2 - 1, actshard.TruncatedFileError, f"expected at least {FULL // 3 * 2} bytes"),
        (1, FULL + 1, actshard.FormatError, f"byte {FULL}: expected at most {FULL} bytes"),
        (3, FULL + 4, actshard.FormatError, "expected at most"),
        (0, 1 << 40, actshard.FormatError, f"found {1 << 40}"),
    ],
)
def test_shard_of_the_wrong_size_is_refused(
    saev_copy: Copy, io_mode: str, index: int, size: int, kind: type[actshard.ActshardError], words: str
) -> None:
    path = saev_copy()
    shard = path / f"acts{index:06}.bin"
    os.truncate(shard, size)
    with refuses(kind, shard, words):
        actshard.open(path, io=io_mode)


@pytest.mark.parametrize("size", [FULL // 3 * 2, FULL // 3 * 2 + 1, FULL - 1, FULL])
def test_last_shard_may_have_any_size_that_holds_its_examples(saev_copy: Copy, io: str, size: int) -> None:
    want = np.load(GOLDEN / "saev/v21_cls_labels_multishard/expected.npz")["acts"]
    path = saev_copy()
    os.truncate(path / "acts000003.bin", size)
    store = actshard.open(path, io=io)
    assert np.array_equal(bits(store.last_tokens(11)), bits(want[:, 2, -1]))


def test_every_bad_shard_is_named(saev_copy: Copy) -> None:
    path = saev_copy()
    for i in (1, 2, 3):
        (path / f"acts{i:06}.bin").unlink()
    with refuses(
        actshard.MissingFileError, path / "acts000001.bin", r"2 more bad files: acts000002\.bin, acts000003\.bin"
    ):
        actshard.open(path)


def test_shard_may_be_a_link_but_not_a_broken_one(saev_copy: Copy, tmp_path: Path, io: str) -> None:
    want = np.load(GOLDEN / "saev/v21_cls_labels_multishard/expected.npz")["acts"]
    path = saev_copy()
    shard = (path / "acts000001.bin").rename(tmp_path / "elsewhere.bin")
    (path / "acts000001.bin").symlink_to(shard)
    store = actshard.open(path, io=io)
    assert np.array_equal(bits(store.last_tokens(0)), bits(want[:, 0, -1]))
    shard.unlink()
    with refuses(actshard.MissingFileError, path / "acts000001.bin", "found nothing"):
        actshard.open(path, io=io)
    (path / "acts000001.bin").unlink()
    (path / "acts000001.bin").symlink_to("acts000001.bin")
    with refuses(actshard.FileAccessError, path / "acts000001.bin", "symbolic links"):
        actshard.open(path, io=io)


def test_shard_truncated_or_lost_after_opening_is_an_error(saev_copy: Copy, io: str) -> None:
    path = saev_copy()
    store = actshard.open(path, io=io)
    (path / "acts000002.bin").unlink()
    with refuses(actshard.MissingFileError, path / "acts000002.bin"):
        store.gather(0, [0, 6], 0)
    store.gather(0, [0, 3], 0)
    os.truncate(path / "acts000001.bin", FULL - 4)
    with refuses(
        actshard.TruncatedFileError, path / "acts000001.bin", "truncated after it was opened|expected at least"
    ):
        store.gather(0, [0, 3], 0)


# -- labels.bin ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "kind"), [(0, actshard.TruncatedFileError), (54, actshard.TruncatedFileError), (56, actshard.FormatError)]
)
def test_labels_of_the_wrong_size_warn_at_open_and_fail_when_asked_for(
    saev_copy: Copy, io: str, size: int, kind: type[actshard.ActshardError]
) -> None:
    path = saev_copy()
    os.truncate(path / "labels.bin", size)
    with pytest.warns(actshard.ActshardWarning, match=rf"labels\.bin: expected 11 x 5 = 55 bytes, found {size}"):
        store = actshard.open(path, io=io)
    assert store.last_tokens(0).shape == (11, 16)
    for _ in range(2):
        with refuses(kind, path / "labels.bin", f"expected 11 x 5 = 55 bytes, found {size}"):
            _ = store.labels


def test_labels_as_a_folder_fail_when_asked_for(saev_copy: Copy, io: str) -> None:
    path = saev_copy()
    (path / "labels.bin").unlink()
    (path / "labels.bin").mkdir()
    store = actshard.open(path, io=io)
    with refuses(actshard.NotAFileError, path / "labels.bin", "expected a regular file"):
        _ = store.labels


def test_no_labels_are_none(saev_copy: Copy, io: str) -> None:
    path = saev_copy()
    (path / "labels.bin").unlink()
    assert actshard.open(path, io=io).labels is None


# -- arguments -----------------------------------------------------------------------------------------------


def test_layer_not_in_list_is_an_error_that_names_the_list(saev_copy: Copy, io: str) -> None:
    store = actshard.open(saev_copy(), io=io)
    for layer in (1, -1, "0", None, [0], 0.5):
        with refuses(actshard.LayerError, store.path, re.escape("[0, 5, 11]")) as caught:
            store.last_tokens(layer)
        assert isinstance(caught.value, KeyError)


def test_what_saev_does_not_hold_is_said(saev_copy: Copy) -> None:
    store = actshard.open(saev_copy())
    with refuses(actshard.NotStoredError, store.path, "no logits"):
        store.logits()
    with refuses(actshard.NotStoredError, store.path, "no router"):
        store.router(0)
    with refuses(actshard.NotStoredError, store.path, "no column 'text'.*example_idx"):
        store.read_columns(["example_idx", "text"])


def test_missing_path_is_an_error(tmp_path: Path) -> None:
    with refuses(actshard.MissingFileError, tmp_path / "nowhere", "expected a dataset, found nothing"):
        actshard.open(tmp_path / "nowhere")
    with refuses(actshard.ArgumentError, None, "null"):
        actshard.open("a\0b")
    with refuses(actshard.ArgumentTypeError, None, "expected a path, found int"):
        actshard.open(3)
    with refuses(actshard.ArgumentError, None, "lmprobe"):
        actshard.open(tmp_path, format="nonsense")
    with refuses(actshard.ArgumentError, None, "mmap"):
        actshard.open(tmp_path, io="fast")


def test_folder_above_its_only_dump_stands_for_it_and_farther_up_says_where_it_is(
    saev_copy: Copy, tmp_path: Path
) -> None:
    path = saev_copy()
    assert actshard.open(tmp_path).path == path
    deep = tmp_path / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    path = path.rename(deep / path.name)
    assert actshard.open(tmp_path / "a" / "b").path == path
    with refuses(actshard.UnknownFormatError, tmp_path, f"contains a dataset. Open one: a/b/c/d/{path.name}") as caught:
        actshard.open(tmp_path)
    assert caught.value.candidates == ((path, "saev"),)
