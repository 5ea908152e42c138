"""Guarantee: inputs that would change rows without a word are an error, a warning, or have no effect."""

from __future__ import annotations

import asyncio
import bz2
import dataclasses
import gzip
import itertools
import json
import lzma
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tests.tokens.conftest import GOLDEN, GPT2, LLAMA, write_lines

import actshard
from actshard import tokens
from actshard.base._schema import read_value
from actshard.compat import levanter
from actshard.tokens import building, columns, processing, shards, sources
from actshard.tokens import ledger as ledgers
from actshard.tokens import tokenizer as templates
from actshard.tokens.formats import PrebuiltFormat
from actshard.tokens.shards import Task
from actshard.tokens.sources import Source
from actshard.tokens.tokenizer import Tokenizer, shared_tokenizer
from actshard.tokens.writing import FieldWriters

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
    read = processing.PrebuiltProcessor.of_block

    def of_block(self: Any, block: Any) -> Any:
        write_lines(source, [{"input_ids": [8]}, {"input_ids": [9]}])
        return read(self, block)

    monkeypatch.setattr(processing.PrebuiltProcessor, "of_block", of_block)
    with pytest.raises(actshard.ChangedInputError, match="build the cache again"):
        tokens.build_cache(source, tmp_path / "c", format="prebuilt")
    monkeypatch.undo()
    assert rows(tokens.build_cache(source, tmp_path / "c", format="prebuilt")) == [[8], [9]]


def test_workers_compare_the_version_of_the_build(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1]}])
    source = Source(path, "s").at_version()
    task = Task(tmp_path / "s", tmp_path / "staged", "", "plain", False, False)
    order = building._BuildPart(source, [0], task).order()
    assert read_value(shards.Order, json.loads(order)).records() == source
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
    config.write_text(json.dumps({"chat_template": [{"name": ["default"], "template": "D"}]}))
    with pytest.raises(actshard.FormatError, match="field 'chat_template': expected a string, found"):
        tokens.load_tokenizer(tmp_path)


def test_records_in_place_of_sources_are_refused_at_the_first(tmp_path: Path) -> None:
    taken = itertools.count()

    def endless() -> Iterator[dict[str, int]]:
        for number in taken:
            yield {"input_ids": number}

    with pytest.raises(actshard.ArgumentTypeError, match=r"found dict; pass records as RowSource"):
        tokens.build_cache(endless(), tmp_path / "c", format="prebuilt")
    assert next(taken) == 1
    with pytest.raises(actshard.ArgumentTypeError, match=r"sources: expected paths or RowSources, found int"):
        tokens.build_cache(5, tmp_path / "c", format="prebuilt")  # type: ignore[arg-type]


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


# -- states --------------------------------------------------------------------------------------------------------


def lengths_of(n: int, first: int = 0) -> list[dict[str, np.ndarray]]:
    return [{"input_ids": np.full(4, first + i, np.int32)} for i in range(n)]


def windows(path: Path, n: int, first: int = 0) -> tokens.TokenSeqDataset:
    with tokens.CacheWriter(path, {"input_ids": np.int32}) as writer:
        writer.append(lengths_of(n, first))
    return tokens.TokenSeqDataset(tokens.open_cache(path), 4)


class TestStates:
    """Guarantee: a state resumes only where the same examples were read, and there for any number of ranks."""

    @pytest.fixture
    def datasets(self, tmp_path: Path) -> dict[str, tokens.TokenSeqDataset]:
        return {"a": windows(tmp_path / "a", 50), "b": windows(tmp_path / "b", 30, 1000)}

    @staticmethod
    def mixture(datasets: Any, *stages: tuple[int, dict[str, float]], **options: Any) -> tokens.Mixture:
        examples = {name: tokens.CausalLmDataset(dataset) for name, dataset in datasets.items()}
        return tokens.Mixture(examples, list(stages), **{"block_size": 16, "key": 1, **options})

    @pytest.mark.parametrize("position", [0, 3, 8])
    def test_a_state_of_a_mixture_is_refused_by_one_that_differs_before_it(self, datasets: Any, position: int) -> None:
        begin = (0, {"a": 0.5, "b": 0.5})
        stream = self.mixture(datasets, begin, (16 * 4, {"a": 0.75, "b": 0.25})).stream(8)
        loop = iter(stream)
        for _ in range(position):
            next(loop)
        state = stream.state_dict()
        accepted = [
            self.mixture(datasets, begin, (16 * 4, {"a": 0.75, "b": 0.25})),
            self.mixture(datasets, begin, (16 * 4, {"a": 0.25, "b": 0.75})),  # from the state on
            self.mixture(datasets, begin, (16 * 4, {"a": 0.75, "b": 0.25}), (16 * 8, {"a": 1})),
        ]
        for other in accepted:
            other.stream(8).load_state_dict(state)
        refused = [
            self.mixture(datasets, (0, {"a": 0.25, "b": 0.75}), (16 * 4, {"a": 0.75, "b": 0.25})),
            self.mixture(datasets, begin, (16 * 4, {"a": 0.75, "b": 0.25}), key=2),
            self.mixture(datasets, begin, (16 * 4, {"a": 0.75, "b": 0.25}), block_size=32),
            *([self.mixture(datasets, begin, (16 * 2, {"a": 0.75, "b": 0.25}))] if position > 4 else []),
        ]
        for other in refused:
            with pytest.raises(actshard.ArgumentError, match="whose batches differ"):
                other.stream(8).load_state_dict(state)

    def test_a_state_of_a_shuffled_mixture_is_refused_by_one_with_other_stages(self, datasets: Any) -> None:
        def stream(second: dict[str, float]) -> tokens.TokenStream:
            stages = (0, {"a": 0.5, "b": 0.5}), (32, second)
            return self.mixture(datasets, *stages, stop_strategy="first_exhausted").stream(8, shuffle="feistel")

        state = json.loads(json.dumps(stream({"a": 0.75, "b": 0.25}).state_dict()))
        stream({"a": 0.75, "b": 0.25}).load_state_dict(state)
        with pytest.raises(actshard.ArgumentError, match="stages"):
            stream({"a": 1, "b": 0}).load_state_dict(state)

    def test_a_state_of_an_older_release_is_loaded_with_a_warning(self, datasets: Any) -> None:
        stream = datasets["a"].stream(6, world_size=2)
        loop = iter(stream)
        next(loop)
        state = stream.state_dict()
        settings = {key: state["settings"][key] for key in ("format", "examples", "shuffle", "drop_last")}
        # As the last release without "examples_per_batch" identified this dataset.
        settings |= {"dataset": "5f3d0df4c2051546", "batch_size": 6, "world_size": 2}
        older = {**state, "settings": settings}
        for size, ranks in [(6, 2), (3, 4)]:
            again = datasets["a"].stream(size, world_size=ranks)
            with pytest.warns(actshard.ActshardWarning, match="a state of an older release") as caught:
                again.load_state_dict(older)
            assert [str(w.message.code) for w in caught] == ["state-without-dataset"]  # type: ignore[union-attr]
            assert again.state_dict()["batch"] == 1
        with pytest.raises(actshard.ArgumentError, match="examples_per_batch: 12 in the state, 24 here"):
            datasets["a"].stream(6, world_size=4).load_state_dict(older)
        with pytest.raises(actshard.ArgumentError, match="another dataset"):
            windows(datasets["a"].cache.path.parent / "other", 50, 7).stream(6, world_size=2).load_state_dict(older)
        # In short batches at the end another number of ranks would leave out examples, or read some twice.
        later = {**older, "batch": 4}
        with pytest.raises(actshard.ArgumentError, match="examples_read: 48 in the state, 46 here"):
            datasets["a"].stream(3, world_size=4).load_state_dict(later)

    def test_identities_are_json_of_the_datasets_alone(self, datasets: Any) -> None:
        part = tokens.mixing.Sliced(datasets["a"], np.int64(3), np.int64(20))  # type: ignore[arg-type]
        assert json.loads(json.dumps(part.stream(4).state_dict())) == part.stream(4).state_dict()
        assert len(part.stream(4).identity) == 16

        class Cooked(tokens.TokenSeqDataset):
            recipe = staticmethod(lambda: {1, 2})

        cooked = Cooked(datasets["a"].cache, 4)
        assert cooked.stream(4).identity == datasets["a"].stream(4).identity

    def test_a_state_is_refused_by_a_cache_of_other_documents(self, datasets: Any, tmp_path: Path) -> None:
        state = datasets["a"].stream(4).state_dict()
        rows = lengths_of(50)
        rows[33]["input_ids"][2] = 7  # no sample of the dataset contains it
        with tokens.CacheWriter(tmp_path / "other", {"input_ids": np.int32}) as writer:
            writer.append(rows)
        other = tokens.TokenSeqDataset(tokens.open_cache(tmp_path / "other"), 4)
        with pytest.raises(actshard.ArgumentError, match="another dataset"):
            other.stream(4).load_state_dict(state)
        windows(tmp_path / "moved", 50).stream(4).load_state_dict(state)
        order = tokens.permutation("feistel", 50, 1)
        state = tokens.Permuted(datasets["a"], order).stream(4).state_dict()
        with pytest.raises(actshard.ArgumentError, match="order"):
            tokens.Permuted(datasets["a"], tokens.permutation("feistel", 50, 2)).stream(4).load_state_dict(state)

    @pytest.mark.parametrize(("size", "ranks"), [(4, 3), (12, 1), (3, 4), (2, 6)])
    @pytest.mark.parametrize("shuffle", [None, "feistel"])
    def test_other_ranks_with_as_many_examples_per_batch_go_on_where_it_stopped(
        self, datasets: Any, size: int, ranks: int, shuffle: Any
    ) -> None:
        def read(size: int, ranks: int, state: Any, batches: int | None) -> tuple[list[int], Any]:
            """First tokens of batches of all ranks, and the state after them."""
            streams = [datasets["a"].stream(size, shuffle=shuffle, rank=r, world_size=ranks) for r in range(ranks)]
            if state is not None:
                for stream in streams:
                    stream.load_state_dict(state)
            loops = [iter(stream) for stream in streams]
            count = len(streams[0]) - (0 if state is None else state["batch"]) if batches is None else batches
            examples = [int(row[0]) for _ in range(count) for loop in loops for row in next(loop)]
            return examples, streams[0].state_dict()

        before, state = read(6, 2, None, 2)
        after, _ = read(size, ranks, state, None)
        assert len(before) == 24
        assert sorted(before + after) == list(range(50))

    def test_a_state_in_the_short_batches_at_the_end_needs_as_many_ranks(self, datasets: Any) -> None:
        dataset = tokens.mixing.Sliced(datasets["a"], 0, 25)
        stream = dataset.stream(6, world_size=2)
        loop = iter(stream)
        next(loop), next(loop)
        state = stream.state_dict()
        dataset.stream(6, world_size=2, rank=1).load_state_dict(state)
        with pytest.raises(actshard.ArgumentError, match="examples_read: 23 in the state, 21 here"):
            dataset.stream(3, world_size=4).load_state_dict(state)
        with pytest.raises(actshard.ArgumentError, match="examples_per_batch: 12 in the state, 24 here"):
            dataset.stream(6, world_size=4).load_state_dict(state)


# -- ledgers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["consolidated", "sharded"])
@pytest.mark.parametrize("keep", [False, True])
def test_the_ledger_of_a_shard_is_read_once(
    keep: bool, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands of shards, on a file server."""
    sources = [write_lines(tmp_path / f"{i}.jsonl", [{"input_ids": [i]}]) for i in range(3)]
    opened: list[str] = []
    read_json = ledgers.read_json
    monkeypatch.setattr(ledgers, "read_json", lambda path: opened.append(Path(path).parent.name) or read_json(path))
    cache = tokens.build_cache(sources, tmp_path / "c", format="prebuilt", layout=layout, keep_shards=keep, jobs=1)
    shards = cache.ledger.finished_shards
    assert {name: opened.count(name) for name in shards} == dict.fromkeys(shards, 1)
    opened.clear()
    tokens.open_cache(tmp_path / "c")
    assert opened == ["c"]


@pytest.mark.parametrize("layout", ["consolidated", "sharded", "written"])
@pytest.mark.parametrize("file", ["input_ids/data/c/0", "input_ids/offsets/c/0"])
def test_zeroed_bytes_of_plain_data_fail_a_deep_check(layout: str, file: str, tmp_path: Path) -> None:
    if layout == "written":
        windows(tmp_path / "c", 50, 1)
    else:
        sources = [write_lines(tmp_path / f"{i}.jsonl", [{"input_ids": [5, 6, 7, 8]}] * 9) for i in range(2)]
        tokens.build_cache(sources, tmp_path / "c", format="prebuilt", layout=layout)
    assert actshard.verify(tmp_path / "c", deep=True).ok
    path = next(p for p in sorted((tmp_path / "c").rglob("0")) if p.match(file))
    data = bytearray(path.read_bytes())
    data[16 + 9] = 1  # the second byte of a token, or of the end of a row
    path.write_bytes(data)
    report = actshard.verify(tmp_path / "c", deep=True)
    assert "checksum" in report.codes()
    assert any(Path(finding.path or "") == path for finding in report.errors)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"dtype": "int32"}, "dtype"),
        ({"format": {"type": "text", "special_tokens": "if_missing"}}, "format.special_tokens"),
        ({"on_error": "skip"}, "on_error"),
        ({"dtype": "uint16", "enforce_bos": False}, "append_bos true instead of false|dtype"),
    ],
)
def test_a_cache_that_was_built_differently_names_the_part(change: dict[str, Any], parts: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    tokens.build_cache(source, tmp_path / "c", GOLDEN / GPT2)
    with pytest.raises(actshard.ExistsError, match=parts):
        tokens.build_cache(source, tmp_path / "c", GOLDEN / GPT2, **change)


def test_a_tokenizer_that_changed_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    shutil.copytree(GOLDEN / GPT2, tmp_path / "tokenizer")
    tokens.build_cache(source, tmp_path / "c", tmp_path / "tokenizer")
    path = tmp_path / "tokenizer/tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(content))
    with pytest.raises(actshard.ExistsError, match="built with other settings: tokenizer;"):
        tokens.build_cache(source, tmp_path / "c", tmp_path / "tokenizer")


class TestConfiguration:
    """Guarantee: a configuration's caches are those that it describes, or it warns."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> tokens.LmDataConfig:
        source = write_lines(tmp_path / "a.jsonl", TEXTS * 20)
        component = tokens.DatasetComponent(tokens.UrlDatasetSourceConfig((str(source),)))
        config = tokens.LmDataConfig(
            str(GOLDEN / GPT2), cache_dir=str(tmp_path / "caches"), components={"a": component}
        )
        config.build()
        return config

    def test_a_cache_of_the_same_tokenizer_at_another_path_is_no_difference(self, config: Any, tmp_path: Path) -> None:
        shutil.copytree(GOLDEN / GPT2, tmp_path / "copy")
        moved = dataclasses.replace(config, tokenizer=str(tmp_path / "copy"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(moved.train_sets(4)["a"]) == len(config.train_sets(4)["a"])
        form = levanter.TextLmDatasetFormat()
        levanter.load_lm_dataset_cache(tmp_path / "caches/a/train", form, str(tmp_path / "copy"))

    @pytest.mark.parametrize("writer", ["an older release", "Levanter"])
    def test_caches_without_digests_of_parts_are_compared_by_all_that_they_have(
        self, config: Any, writer: str, tmp_path: Path
    ) -> None:
        def edit(folder: Path) -> Path:
            ledger = json.loads((folder / "shard_ledger.json").read_text())
            if writer == "Levanter":
                del ledger["actshard"]
            else:
                del ledger["actshard"]["parts"], ledger["actshard"]["checksums"]
            (folder / "shard_ledger.json").write_text(json.dumps(ledger))
            return folder

        form, path = levanter.TextLmDatasetFormat(), edit(tmp_path / "caches/a/train")
        shutil.copytree(GOLDEN / GPT2, tmp_path / "copy")
        other = shutil.copytree(GOLDEN / GPT2, tmp_path / "other") / "tokenizer.json"
        content = json.loads(other.read_text())
        other.write_text(json.dumps({**content, "normalizer": {"type": "Lowercase"}}))
        with warnings.catch_warnings():  # of a tokenizer at another path
            warnings.simplefilter("error")
            dataclasses.replace(config, tokenizer=str(tmp_path / "copy")).train_sets(4)
        if writer == "Levanter":
            with pytest.warns(actshard.ActshardWarning, match="no digest"):
                levanter.load_lm_dataset_cache(path, form, str(tmp_path / "copy"))
            return
        levanter.load_lm_dataset_cache(path, form, str(tmp_path / "copy"))
        with pytest.raises(actshard.ExistsError, match="was built with tokenizer"):
            levanter.load_lm_dataset_cache(path, form, str(tmp_path / "other"))
        with pytest.warns(actshard.ActshardWarning, match="was built with tokenizer"):
            dataclasses.replace(config, tokenizer=str(tmp_path / "other")).train_sets(4)
        source = write_lines(tmp_path / "texts.jsonl", TEXTS)
        tokens.build_cache(source, tmp_path / "built", GOLDEN / GPT2)
        before = edit(tmp_path / "built").joinpath("shard_ledger.json").read_text()
        tokens.build_cache(source, tmp_path / "built", tmp_path / "copy")
        assert (tmp_path / "built/shard_ledger.json").read_text() == before
        with pytest.raises(actshard.ExistsError, match="was built with tokenizer"):
            tokens.build_cache(source, tmp_path / "built", tmp_path / "other")

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"num_validation_sequences": {"a": -5}}, "num_validation_sequences.a: expected a number of at least 0"),
            ({"num_validation_sequences": {"A": 5}}, "num_validation_sequences: unknown component 'A'"),
            ({"max_train_batches": {"a": -5}}, "max_train_batches.a: expected a number of at least 0"),
            ({"max_train_batches": {"aa": 5}}, "max_train_batches: unknown component 'aa'"),
            ({"train_weights": [(0, {"a": 1}), (2048, {"b": 1})]}, "train_weights: unknown component 'b'"),
            ({"target_budget": 0, "experiment_budget": 0}, "target_budget: "),
            ({"target_budget": 10, "experiment_budget": -1}, "experiment_budget: "),
            ({"target_budget": 10, "experiment_budget": 11}, "experiment_budget: expected at most target_budget=10"),
            ({"target_budget": 9, "experiment_budget": 3, "max_train_batches": {"a": 1}}, "together with budgets"),
            (
                {"target_budget": 9, "experiment_budget": 3, "num_validation_sequences": {"a": 1}},
                "together with budgets",
            ),
            ({"mixture_block_size": 0}, "mixture_block_size"),
            ({"mixture_block_size": 1 << 16}, "mixture_block_size"),
            ({"permutation_type": "fiestel"}, "permutation_type: expected feistel or linear"),
            ({"shuffle": {"io_block_size": 0}}, "shuffle.io_block_size"),
            ({"shuffle": {"window_blocks": -1}}, "shuffle.window_blocks"),
            ({"shuffle": {"perm_type": "x"}}, "shuffle.perm_type"),
        ],
    )
    def test_settings_out_of_range_are_refused_when_the_configuration_is_read(
        self, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(actshard.ArgumentError, match=message):
            tokens.LmDataConfig.from_dict({"components": {"a": {}}, **settings})

    def test_validation_examples_are_held_out_of_components_without_a_weight(self, config: Any) -> None:
        changed = dataclasses.replace(config, train_weights={"a": 0.0}, num_validation_sequences={"a": 3})
        assert len(changed.validation_sets(4)["a"]) == 3

    def test_levanters_evaluation_has_tagged_sets(self, config: Any, tmp_path: Path) -> None:
        component = dataclasses.replace(config.components["a"], tags=("en", "web"))
        changed = levanter.LmDataConfig(
            config.tokenizer,
            cache_dir=config.cache_dir,
            components={"a": component},
            num_validation_sequences={"a": 3},
        )
        ((examples, tags),) = changed.tagged_eval_sets(4)
        assert tags == ["en", "web", "a"]
        assert asyncio.run(examples.async_len()) == 3
        assert list(changed.sources) == ["a"]
        assert changed.tagged_eval_grug_sets(seq_len=4)[0][1] == tags
        assert asyncio.run(changed.validation_grug_sets(seq_len=4)["a"].async_len()) == 3
        assert asyncio.run(changed.train_grug_sets(seq_len=4)["a"].async_len()) > 3

    @pytest.mark.parametrize(
        "change", [{"enforce_eos": False}, {"tokenizer": str(GOLDEN / LLAMA)}, {"format": "if_missing"}]
    )
    def test_a_cache_that_was_built_differently_is_a_warning(self, config: Any, change: dict[str, Any]) -> None:
        if "format" in change:
            form = tokens.TextFormat(special_tokens="if_missing")
            change = {"components": {"a": dataclasses.replace(config.components["a"], format=form)}}
        changed = dataclasses.replace(config, **change)
        with pytest.warns(actshard.ActshardWarning, match="the cache was built with"):
            changed.train_sets(4)


# -- prebuilt rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "large_list", "sliced", "fixed_size"])
def test_lists_of_parquet_files_are_the_rows_that_json_gives(kind: str, tmp_path: Path) -> None:
    ids: list[list[int]] = [[], [1, 2, 3], [70_000], list(range(500)), []]
    weights: list[list[float]] = [[], [0.5, 0, 1], [2.5], [i / 7 for i in range(500)], []]
    make = pa.large_list if kind == "large_list" else pa.list_
    if kind == "fixed_size":
        ids, weights, make = (
            [[i, 2 * i] for i in range(5)],
            [[1, i / 3] for i in range(5)],
            lambda item: pa.list_(item, 2),
        )
    table = pa.table(
        {
            "other": list("abcde"),
            "loss_weights": pa.array(weights, make(pa.float64())),
            "input_ids": pa.array(ids, make(pa.int32())),
        }
    )
    first = 1 if kind == "sliced" else 0
    pq.write_table(table.slice(first), tmp_path / "a.parquet", row_group_size=2)
    records = [{"input_ids": i, "loss_weights": w} for i, w in zip(ids, weights, strict=True)][first:]
    form = {"type": "prebuilt", "loss_weights_key": "loss_weights"}
    caches = [
        tokens.build_cache(source, tmp_path / source.stem / source.suffix[1:], format=form)
        for source in (tmp_path / "a.parquet", write_lines(tmp_path / "a.jsonl", records))
    ]
    for field in ("input_ids", "loss_weights"):
        assert rows(caches[0], field) == rows(caches[1], field)


_number = st.one_of(
    st.integers(0, 70_000),
    st.sampled_from([-1, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 1e39, 0.5, 1.0, -0.0, True, False, None, "1", [1]]),
)
_row = st.fixed_dictionaries(
    {"input_ids": st.one_of(st.lists(st.integers(0, 70_000), max_size=6), st.lists(_number, max_size=3), st.none())},
    optional={
        "loss_weights": st.one_of(st.lists(st.sampled_from([1, 0, 0.1, 2**53 + 1, 2**60 + 1]), max_size=6), st.none()),
        "text": st.sampled_from(["true", "false", ""]),
    },
)


@given(drawn=st.lists(_row, max_size=12), at_once=st.sampled_from([1, 60, 1 << 19]), weighs=st.booleans())
@example(drawn=[{"input_ids": []}, {"input_ids": [], "loss_weights": []}], at_once=1 << 19, weighs=True)
@example(drawn=[{"input_ids": [1]}, {"input_ids": [1.0]}, {"input_ids": [2]}], at_once=1 << 19, weighs=False)
@example(
    drawn=[{"input_ids": [1], "loss_weights": [1]}, {"input_ids": [2], "loss_weights": [0.5]}],
    at_once=1 << 19,
    weighs=True,
)
def test_blocks_of_rows_are_what_single_rows_are(drawn: list[dict[str, Any]], at_once: int, weighs: bool) -> None:
    """Also rows that follow an unusable one, and which rows are unusable for what reason."""
    form = PrebuiltFormat(loss_weights_key="loss_weights" if weighs else None)
    for row in drawn:
        if len(row.get("loss_weights") or []) != len(row["input_ids"] or []) and len(row["input_ids"] or []) % 2:
            row["loss_weights"] = [1] * len(row["input_ids"])

    class Recorder:
        def __init__(self) -> None:
            self.rows: dict[str, list[list[Any]]] = {}

        def append(self, name: str, elements: Any, lengths: Any) -> None:
            ends = np.cumsum(lengths).tolist()
            held = np.asarray(elements, process.fields[name]).tolist()
            self.rows.setdefault(name, []).extend(held[end - n : end] for end, n in zip(ends, lengths, strict=True))

    results = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_AT_ONCE", at_once)
        source = Source(write_lines(Path(folder) / "a.jsonl", drawn), "s")
        for takes_blocks in (False, True):
            process, recorder = processing.processor(form, None), Recorder()
            process.takes_blocks = takes_blocks
            counts = shards.write_rows(source, process, cast("FieldWriters", recorder), skip=True)
            problems = sorted((p.number, p.detail) for p in counts.unusable)
            results.append((counts.rows, counts.tokens, counts.skipped, problems[:3], recorder.rows or None))
    assert results[1] == results[0]


@pytest.mark.parametrize(
    "line",
    [b'{"a": 1}\n', b'{"a": 1}\r\n', b'{"a": 1}', b' {"a": 1} \n', b'{"a": 1}\t\r\n', b'{"a": 1}\n\n', b'{"a": 1}x\n', b"{} {}",
     b'{"a": NaN}\n', b'{"a": 1, "a": 2}\n', b"[1]\n", b"\n", b"", b'{"a"', b'\xef\xbb\xbf{}\n', b'{"a": "\xff"}\n', b"[" * 99_999],
)  # fmt: skip
def test_records_read_without_checks_are_those_of_json(line: bytes) -> None:
    assert sources.parsed(7, line) == sources._any_record(7, line)


def test_chat_templates_get_lists_of_parquet_files_as_lists(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}"
    record = {"messages": [{"role": "assistant", "content": "a"}], "system": [1, 2]}
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    write_lines(tmp_path / "a.jsonl", [record])
    form = {"type": "chat", "chat_template": template, "system_prompt": "system"}
    parquet, lines = (
        tokens.build_cache(tmp_path / f"a.{kind}", tmp_path / kind, GOLDEN / GPT2, form)
        for kind in ("parquet", "jsonl")
    )
    assert rows(parquet) == rows(lines)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1, 2], [3, None]]), "row 2: .*expected"),
        (pa.array([[1], None]), "row 2: .*expected a list of numbers"),
        (pa.array([[1], [-1]]), "row 2: .*expected ids from 0"),
        (pa.array([[True], [False]]), "row 1: .*true or false"),
        (pa.array([[1.0], [2.0]]), "row 1: .*expected integers, found float64"),
        (pa.array([["1"], ["2"]]), "row 1: .*expected numbers"),
    ],
)
def test_lists_of_parquet_files_that_are_no_ids_are_errors_with_their_row(
    column: Any, message: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "a.parquet")
    with pytest.raises(actshard.FormatError, match=message):
        tokens.build_cache(tmp_path / "a.parquet", tmp_path / "c", format="prebuilt")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz"])
@pytest.mark.parametrize("array", [False, True])
def test_a_byte_order_mark_is_no_part_of_the_first_record(suffix: str, array: bool, tmp_path: Path) -> None:
    text = '[{"input_ids": [1]}, {"input_ids": [2]}]' if array else '{"input_ids": [1]}\n{"input_ids": [2]}\n'
    data = text.encode("utf-8-sig")
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    if array and suffix != "json":
        with pytest.raises(actshard.FormatError, match="expected an object"):
            tokens.build_cache(path, tmp_path / "c", format="prebuilt")
        return
    assert rows(tokens.build_cache(path, tmp_path / "c", format="prebuilt")) == [[1], [2]]
    planned = actshard.plan.tokenize(path, tmp_path / "p", format="prebuilt", tasks=2)
    assert rows(actshard.run(planned)) == [[1], [2]]


def test_a_byte_order_mark_within_a_file_is_an_error_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(2 * '{"input_ids": [1]}\n'.encode("utf-8-sig"))
    with pytest.raises(actshard.FormatError, match=r"line 2: .*BOM"):
        tokens.build_cache(path, tmp_path / "c", format="prebuilt")


def test_a_text_file_is_refused_because_documents_have_no_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    with pytest.raises(actshard.ArgumentError, match=r"marks the end of a document.*RowSource"):
        tokens.build_cache(tmp_path / "a.txt", tmp_path / "c", GOLDEN / GPT2)


@pytest.mark.parametrize("ids", ["[1, true]", "[false]", "[true, 500]"])
def test_booleans_are_no_ids(ids: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"input_ids": {ids}}}\n')
    with pytest.raises(actshard.FormatError, match="found true or false"):
        tokens.build_cache(tmp_path / "a.jsonl", tmp_path / "c", format="prebuilt")


def test_a_tokenizer_of_a_build_is_serialized_once_for_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of load_tokenizer may be changed by their owner, by a model of equal size too."""
    monkeypatch.setattr("actshard.tokens.tokenizer._CLOCK_STEP", -(1 << 62))
    tokenizer = shared_tokenizer(GOLDEN / GPT2)
    assert shared_tokenizer(GOLDEN / GPT2) is tokenizer
    digest = tokenizer.digest()
    assert digest == tokens.load_tokenizer(GOLDEN / GPT2).digest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "as_dict", lambda self: pytest.fail("serialized again"))
        assert tokenizer.digest() == digest
    assert tokens.load_tokenizer(tokenizer, eos_token=tokenizer.bos_token or tokenizer.eos_token).digest()


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_a_compressed_file_of_no_bytes_is_an_error(suffix: str, tmp_path: Path) -> None:
    """No compressor writes one, but copies that fail leave them."""
    (tmp_path / f"a.jsonl.{suffix}").touch()
    with pytest.raises(actshard.FormatError, match="the file has no bytes"):
        tokens.build_cache(tmp_path / f"a.jsonl.{suffix}", tmp_path / "c", format="prebuilt")


def test_a_mixture_of_windows_without_loss_weights_is_refused_by_name(tmp_path: Path) -> None:
    mixture = tokens.Mixture({"web": windows(tmp_path / "c", 5, 2)}, {"web": 1.0})
    with pytest.raises(actshard.ArgumentTypeError, match=r"datasets\.web: expected batches with loss weights"):
        mixture.get_batch([0])
