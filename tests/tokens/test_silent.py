"""Guarantee: inputs that would change rows without a word are an error, a warning, or have no effect."""

from __future__ import annotations

import bz2
import itertools
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.tokens.conftest import GOLDEN, GPT2, write_lines

import actshard
from actshard import tokens
from actshard.tokens import processing, shards, templates
from actshard.tokens.formats import PrebuiltFormat
from actshard.tokens.shards import Task
from actshard.tokens.sources import Source
from actshard.tokens.tokenizer import Tokenizer

TEXTS = [{"text": "one"}, {"text": "a longer text of many more words"}, {"text": "two words"}]


def rows(cache: tokens.TokenCache, field: str = "input_ids") -> list[list[Any]]:
    return [row[field].tolist() for row in cache]


def padding_backend() -> Any:
    backend = tokenizers.Tokenizer.from_file(str(GOLDEN / GPT2 / "tokenizer.json"))
    backend.enable_padding()
    return backend


@pytest.mark.parametrize("kind", ["file", "object"])
def test_rows_of_a_tokenizer_that_pads_do_not_depend_on_their_batch(kind: str, tmp_path: Path) -> None:
    backend = padding_backend()
    backend.save(str(tmp_path / "tokenizer.json"))
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    cache = tokens.build_cache(
        source, tmp_path / "c", backend if kind == "object" else tmp_path / "tokenizer.json", enforce_eos=False
    )
    plain = tokens.load_tokenizer(GOLDEN / GPT2)
    assert rows(cache) == [plain.encode([record["text"]])[0] for record in TEXTS]
    assert backend.padding is not None  # the caller's object is as it was


def test_a_tokenizer_whose_rows_depend_on_their_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, texts: [[*ids, len(texts)] for ids in encode(self, texts)])
    with pytest.raises(actshard.ArgumentError, match="would depend on their batch"):
        tokens.load_tokenizer(GOLDEN / GPT2)


@pytest.mark.parametrize(("suffix", "compress"), [("bz2", bz2.compress), ("xz", lzma.compress)])
def test_every_stream_of_a_compressed_file_is_read_or_the_file_is_an_error(
    suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    lines = [json.dumps({"input_ids": [i]}).encode() + b"\n" for i in range(300)]
    streams = [compress(b"".join(lines[first : first + 100])) for first in (0, 100, 200)]
    path = tmp_path / f"a.jsonl.{suffix}"

    def build(content: bytes) -> tokens.TokenCache:
        path.write_bytes(content)
        return tokens.build_cache(path, tmp_path / "c", format="prebuilt", overwrite=True)

    whole = [[i] for i in range(300)]
    assert rows(build(b"".join(streams))) == whole
    assert rows(build(bytes(4).join(streams) + bytes(8))) == whole
    for at in (0, 3, len(streams[1]) // 2):
        damaged = bytearray(streams[1])
        damaged[at] ^= 0xFF
        with pytest.raises(actshard.FormatError, match="corrupt or truncated"):
            build(streams[0] + bytes(damaged) + streams[2])
    for content in (streams[0] + b"no stream", b"".join(streams)[:-5], b""):
        with pytest.raises(actshard.FormatError, match="corrupt or truncated"):
            build(content)


def test_a_source_that_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1]}])
    read = processing.PrebuiltProcessor.look

    def look(self: Any, record: Any) -> Any:
        write_lines(source, [{"input_ids": [8]}, {"input_ids": [9]}])
        return read(self, record)

    monkeypatch.setattr(processing.PrebuiltProcessor, "look", look)
    with pytest.raises(actshard.ChangedInputError, match="build the cache again"):
        tokens.build_cache(source, tmp_path / "c", format="prebuilt")
    monkeypatch.undo()
    assert rows(tokens.build_cache(source, tmp_path / "c", format="prebuilt")) == [[8], [9]]


def test_workers_compare_the_version_of_the_build(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1]}])
    source = Source(path, "s").at_version()
    task = Task(tmp_path / "s", tmp_path / "staged", "", "plain", False, False)
    assert shards.task_as_dict(source, task)["source"]["version"] == source.version
    write_lines(path, [{"input_ids": [8]}, {"input_ids": [9]}])
    with pytest.raises(actshard.ChangedInputError, match=r"a\.jsonl"):
        shards.build_shard(source, processing.processor(PrebuiltFormat(), None), task, lambda counts: None)


@pytest.mark.parametrize("loss", [3, 4])
def test_masks_of_other_row_lengths_than_the_tokens_are_an_error(loss: int, tmp_path: Path) -> None:
    fields = {"input_ids": np.int32, "assistant_masks": np.int32}
    with tokens.CacheWriter(tmp_path / "c", fields) as writer:
        writer.append([{"input_ids": np.arange(5), "assistant_masks": np.zeros(loss, np.int32)}])
        writer.append([{"input_ids": np.arange(4), "assistant_masks": np.ones(9 - loss, np.int32)}])
    cache = tokens.open_cache(tmp_path / "c")
    for masked in (True, False):
        with pytest.raises(actshard.FormatError, match=r"'input_ids' and 'assistant_masks' have different lengths"):
            tokens.ChatDataset(cache, 8, mask_user_turns=masked)


def test_a_dataset_of_a_mixture_without_examples_is_a_warning() -> None:
    with pytest.warns(actshard.ActshardWarning, match=r"'rare' gets no example from example 0 on"):
        mixture = tokens.Mixture({"a": 10, "rare": 10}, {"a": 1, "rare": 0.0004})
    assert mixture.shares == [
        {"a": (pytest.approx(0.9996, abs=1e-6), 1.0), "rare": (pytest.approx(0.0004, abs=1e-6), 0.0)}
    ]
    with pytest.warns(actshard.ActshardWarning, match=r"'a' gets no example from example 2,048 on"):
        tokens.Mixture({"a": 10, "b": 10}, [(0, {"a": 1, "b": 1}), (2048, {"a": 0.0001, "b": 1})])


def test_components_of_weight_zero_need_no_dataset_in_any_stage() -> None:
    staged = [(0, {"a": 1.0, "b": 0.5, "c": 0.0}), (2048, {"a": 0.5, "b": 1.0, "c": 0.0})]
    mixture = tokens.Mixture({"a": 10, "b": 10}, staged, key=3)
    without = tokens.Mixture({"a": 10, "b": 10}, [(at, {"a": w["a"], "b": w["b"]}) for at, w in staged], key=3)
    for one, other in zip(mixture.locate(range(5000)), without.locate(range(5000)), strict=True):
        assert np.array_equal(one, other)
    with pytest.raises(actshard.ArgumentError, match="unknown dataset 'c'"):
        tokens.Mixture({"a": 10}, {"a": 1, "c": 0.1})


def test_an_eos_token_that_is_encoded_as_text_is_a_warning(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    tokenizer = tokens.load_tokenizer(GOLDEN / GPT2)
    assert tokenizer.has_special("eos")
    plain = next(text for text, _ in sorted(tokenizer.backend.get_vocab().items()) if len(text) == 4 and text.isalpha())
    tokenizer = tokens.load_tokenizer(tokenizer, eos_token=plain)
    assert not tokenizer.has_special("eos")
    with pytest.warns(actshard.ActshardWarning, match="encodes its eos token .* as ordinary text"):
        tokens.build_cache(source, tmp_path / "c", tokenizer)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e39"])
def test_loss_weights_are_finite(value: str, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(f'{{"input_ids": [1, 2], "loss_weights": [1.0, {value}]}}\n')
    form = {"type": "prebuilt", "loss_weights_key": "loss_weights"}
    with pytest.raises(actshard.FormatError, match="expected finite float32 weights"):
        tokens.build_cache(source, tmp_path / "c", format=form)


def render(template: str, text: str) -> list[tuple[str, bool]]:
    return templates.render(template, [{"role": "assistant", "content": text}], "", "", {})


BODY = "{% generation %}{{ messages[0].content }}{% endgeneration %}"


def test_texts_that_look_like_marks_are_texts() -> None:
    old = "\ue000actshard-generation\ue001secret\ue000/actshard-generation\ue001"
    assert render(f"u{BODY}e", old) == [("u", False), (old, True), ("e", False)]


@pytest.mark.parametrize("how", ["|trim", "[1:]", "[:-1]", "[5:-5]", "[-9:]", "[:9]", "|replace('1', '2')"])
def test_a_filter_that_cuts_a_generation_block_is_an_error(how: str) -> None:
    template = f"{{% set text %}}{BODY}{{% endset %}}u{{{{ (text|string){how} }}}}e"
    if how == "|trim":
        assert render(template, "words") == [("u", False), ("words", True), ("e", False)]
        return
    with pytest.raises(templates.TemplateProblemError, match="cuts or changes"):
        render(template, "words")


def test_nested_generation_blocks_end_with_the_outer_one() -> None:
    nested = "{% generation %}a{% generation %}b{% endgeneration %}c{% endgeneration %}d"
    assert render(nested, "") == [("a", True), ("b", True), ("c", True), ("d", False)]


def test_named_chat_templates_are_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / GPT2 / "tokenizer.json").read_bytes())
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert tokens.load_tokenizer(tmp_path).chat_template == "D"
    config.write_text(json.dumps({"chat_template": named[:1]}))
    assert tokens.load_tokenizer(tmp_path).chat_template is None
    config.write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(actshard.FormatError, match="pass chat_template="):
        tokens.load_tokenizer(tmp_path)
    assert tokens.load_tokenizer(tmp_path, chat_template="X").chat_template == "X"


def test_records_in_place_of_sources_are_refused_at_the_first(tmp_path: Path) -> None:
    taken = itertools.count()

    def endless() -> Iterator[dict[str, int]]:
        for number in taken:
            yield {"input_ids": number}

    with pytest.raises(actshard.ArgumentTypeError, match=r"found dict; pass records as RowSource"):
        tokens.build_cache(endless(), tmp_path / "c", format="prebuilt")
    assert next(taken) == 1


def test_a_file_that_is_listed_twice_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(actshard.ArgumentError, match=r"expected each file once, found .*a\.jsonl twice"):
        tokens.build_cache([source, source], tmp_path / "c", GOLDEN / GPT2)


def test_zstd_with_a_long_window_is_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    # A frame header with a window of 2^31 bytes, and an empty last block.
    path.write_bytes(bytes.fromhex("28b52ffd00a8010000"))
    with pytest.raises(actshard.UnsupportedError, match="--long") as raised:
        tokens.build_cache(path, tmp_path / "c", format="prebuilt")
    assert raised.value.path == path
