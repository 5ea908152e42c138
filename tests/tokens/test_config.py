"""Guarantee: Levanter's YAML is understood, its caches are built where Levanter expects them, and errors name the field."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tokens.conftest import GOLDEN, LLAMA, expected

import actshard
from actshard import tokens

YAML = """
data:
  tokenizer: tokenizers/bpe_llama3style
  cache_dir: {root}
  shuffle: {{io_block_size: 4, window_blocks: 2}}
  mixture_block_size: 16
  components:
    web:
      source: {{type: url, train_urls: ["text_llama3style_multishard/part{{0..2}}.*"],
                validation_urls: [text_llama3style_multishard/part4.jsonl.zst]}}
      format: {{type: text, text_key: body}}
      tags: [a, b]
    chat:
      source: {{train_urls: [chat_llama3style/train.jsonl]}}
      format: {{type: chat, messages_key: messages}}
      pack: 4
  train_weights: {{web: 0.75, chat: 0.25}}
trainer: {{whatever: 1}}
"""


@pytest.fixture
def config(in_golden, tmp_path) -> tokens.LmDataConfig:
    path = tmp_path / "data.yaml"
    path.write_text(YAML.format(root=tmp_path / "caches"))
    return tokens.LmDataConfig.from_yaml(path)


def test_caches_are_built_where_levanter_looks(config, tmp_path) -> None:
    states = {(p.component, p.split): p.state for p in config.plans()}
    assert states == {("web", "train"): "to build", ("web", "validation"): "to build", ("chat", "train"): "to build"}
    built = config.build()
    assert {p.state for p in built} == {"built"}
    assert {str(p.path.relative_to(tmp_path / "caches")) for p in built} == {
        "web/train",
        "web/validation",
        "chat/train",
    }
    assert {p.state for p in config.build()} == {"done"}
    chat = config.open("chat")
    assert np.array_equal(chat.view("input_ids").elements(), expected("chat_llama3style")["rows_input_ids"])
    assert len(config.open("web")) == 44
    assert len(config.open("web", "validation")) == 6


def test_training_sets_are_shuffled_and_mixed(config) -> None:
    config.build()
    mixture = config.train_set(128, 8, key=7)
    mix, shuffle = tokens.split(7)
    web = tokens.CausalLmDataset(tokens.TokenSeqDataset(config.open("web"), 128), eos_id=1)
    chat = tokens.ChatDataset(config.open("chat"), 128, pack=4)
    _, first = tokens.split(shuffle)
    second = tokens.split(tokens.split(shuffle)[0])[1]
    orders = [
        tokens.permutation("block", len(d), k, io_block_size=4, window_blocks=2)
        for d, k in ((web, first), (chat, second))
    ]
    plain = tokens.Mixture({"web": web, "chat": chat}, {"web": 0.75, "chat": 0.25}, block_size=16, key=mix)
    datasets, places = plain.locate(np.arange(32))
    batch = mixture.get_batch(np.arange(32))
    for i in range(32):
        dataset, order = ((web, orders[0]), (chat, orders[1]))[datasets[i]]
        assert np.array_equal(batch.tokens[i], dataset.get_batch([order[int(places[i])]]).tokens[0])
    assert set(config.validation_sets(128)) == {"web"}


def test_validation_is_taken_from_training_where_asked(in_golden, tmp_path) -> None:
    text = YAML.format(root=tmp_path / "caches") + "\n"
    (tmp_path / "d.yaml").write_text(
        text.replace("  mixture_block_size", "  num_validation_sequences: {web: 20}\n  mixture_block_size")
    )
    config = tokens.LmDataConfig.from_yaml(tmp_path / "d.yaml")
    config.build()
    web = tokens.CausalLmDataset(tokens.TokenSeqDataset(config.open("web"), 64), eos_id=1)
    order = tokens.permutation("feistel", len(web), 0)
    held = config.validation_sets(64)["web"]
    assert len(held) == 20
    assert np.array_equal(
        held.get_batch(range(20)).tokens, web.get_batch(order(np.arange(len(web) - 20, len(web)))).tokens
    )
    assert len(config.train_sets(64)["web"]) == len(web) - 20


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("tokenizer:", "tokeniser:"), "unknown key 'tokeniser' .did you mean 'tokenizer'"),
        (("train_urls: [chat", "train_url: [chat"), "unknown key 'train_url' .did you mean 'train_urls'"),
        (("text_key: body", "txt_key: body"), "unknown key 'txt_key' .did you mean 'text_key'"),
        (("type: chat", "type: chatt"), "did you mean 'chat'"),
        (("pack: 4", "pak: 4"), "did you mean 'pack'"),
        (("io_block_size", "io_blocksize"), "did you mean 'io_block_size'"),
        (("type: url", "type: uri"), "'url' or 'hf'"),
        (("web: 0.75", "wbe: 0.75"), "unknown component 'wbe' .did you mean 'web'"),
        (("tags: [a, b]", "tags: 3"), "expected a list of strings"),
        (("components:", "components: 3 #"), "expected"),
        (("data:", "data: ["), "expected YAML"),
    ],
)
def test_mistakes_are_named(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "data.yaml"
    path.write_text(YAML.format(root=tmp_path).replace(*change))
    with pytest.raises(actshard.FormatError, match=said) as caught:
        tokens.LmDataConfig.from_yaml(path)
    assert caught.value.path == path


def test_unused_keys_are_told(tmp_path) -> None:
    with pytest.warns(actshard.ActshardWarning, match="chat_template is ignored"):
        tokens.LmDataConfig(chat_template="x")


def test_a_missing_cache_is_missing(in_golden, tmp_path) -> None:
    config = tokens.LmDataConfig(
        tokenizer=LLAMA, components={"a": tokens.DatasetComponent(cache_dir=str(tmp_path / "a"))}
    )
    assert [p.state for p in config.plans()] == ["missing"]
    assert [p.state for p in config.build()] == ["missing"]
    flat = tokens.DatasetComponent(cache_dir=str(GOLDEN / "prebuilt_serial_varlen" / "cache"), flat_cache=True)
    config = tokens.LmDataConfig(tokenizer=LLAMA, components={"a": flat})
    assert [(p.split, p.state) for p in config.plans()] == [("train", "done")]
    assert len(config.open("a")) == 30


def hub(monkeypatch: pytest.MonkeyPatch, commit: str) -> None:
    """A fake hub on which all datasets have this commit."""
    module = types.ModuleType("huggingface_hub")
    info = types.SimpleNamespace(sha=commit)
    module.HfApi = lambda: types.SimpleNamespace(dataset_info=lambda name, revision, timeout: info)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_datasets_of_the_hub_come_through_their_library(monkeypatch, in_golden, tmp_path) -> None:
    """With a fake library: the cache is built from exactly the shards requested."""
    asked: list[Any] = []

    class Part(list):
        num_shards = 2

        def shard(self, num_shards: int, index: int) -> list[dict[str, str]]:
            return list(self)[index::num_shards]

    def load_dataset(path: str, **options: Any) -> Part:
        asked.append((path, options))
        if options["split"] == "validation":
            raise ValueError("Unknown split")
        return Part([{"text": f"document {i}"} for i in range(5)])

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    module.get_dataset_split_names = lambda path, config_name, revision: ["train", "test"]
    monkeypatch.setitem(sys.modules, "datasets", module)
    hub(monkeypatch, "a" * 40)
    source = tokens.HfDatasetSourceConfig(id="owner/name", name="small")
    config = tokens.LmDataConfig(
        tokenizer=LLAMA, cache_dir=str(tmp_path / "caches"), components={"hub": tokens.DatasetComponent(source=source)}
    )
    (plan,) = config.build()
    assert plan.cache is not None
    assert plan.cache.ledger.shard_rows == {"00000_0": 3, "00001_1": 2}
    assert asked[0] == ("owner/name", {"split": "train", "streaming": True, "name": "small", "revision": "a" * 40})
    assert [p.state for p in config.build()] == ["done"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(actshard.MissingExtraError, match=r"actshard\[datasets\]"):
        config.plans()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("trainer:", "  enforce_eos: 'false'\ntrainer:"), r"data.enforce_eos: expected true or false, found .false."),
        (
            ("mixture_block_size: 16", "mixture_block_size: '16'"),
            r"data.mixture_block_size: expected an integer, found .16.",
        ),
        (("io_block_size: 4", "io_block_size: yes"), r"data.shuffle.io_block_size: expected an integer, found true"),
        (("tags: [a, b]", "flat_cache: 'no'"), r"data.components.web.flat_cache: expected true or false, found .no."),
        (("text_key: body", "text_key: 3"), r"data.components.web.*text_key: expected a string, found 3"),
        (("pack: 4", "pack: dense"), r"data.components.chat.*pack: expected true, false, 'pad' or a number"),
        (("web: 0.75", "web: '0.75'"), r"data.train_weights: expected an object of numbers"),
        (("web: 0.75", "web: -1"), r"train_weights.web: expected a number of at least 0"),
        (("cache_dir: {root}", "cache_dir: [a]"), r"data.cache_dir: expected a string or null"),
        (
            ("type: url,", "type: url, cache_dir: 3,"),
            r"data.components.web.source.cache_dir: expected a string or null, found 3",
        ),
        (
            ("trainer:", "  num_validation_sequences: {{web: many}}\ntrainer:"),
            r"data.num_validation_sequences: expected",
        ),
    ],
)
def test_values_of_other_types_are_named_with_their_place(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "data.yaml"
    assert change[0] in YAML
    path.write_text(YAML.replace(*change).format(root=tmp_path))
    with pytest.raises(actshard.FormatError, match=said) as caught:
        tokens.LmDataConfig.from_yaml(path)
    assert caught.value.path == path


def test_arguments_of_other_types_are_refused() -> None:
    for make in (
        lambda: tokens.LmDataConfig(enforce_eos="false"),  # type: ignore[arg-type]
        lambda: tokens.UrlDatasetSourceConfig("a.jsonl"),  # type: ignore[arg-type]
        lambda: tokens.TextFormat(text_key=None),  # type: ignore[arg-type]
        lambda: tokens.DatasetComponent(flat_cache="no"),  # type: ignore[arg-type]
        lambda: tokens.DatasetComponent(source="a.jsonl"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="expected") as caught:
            make()
        assert isinstance(caught.value, actshard.ArgumentError)


def test_a_source_may_repeat_the_format_of_its_component(tmp_path: Path) -> None:
    text = YAML.format(root=tmp_path)
    path = tmp_path / "data.yaml"
    path.write_text(text.replace("type: url,", "type: url, format: {type: text, text_key: body},"))
    assert tokens.LmDataConfig.from_yaml(path).components["web"].source.format == tokens.TextFormat("body")
    path.write_text(text.replace("type: url,", "type: url, format: {type: chat},"))
    with pytest.raises(actshard.FormatError, match="move this there"):
        tokens.LmDataConfig.from_yaml(path)


def test_padding_counts_as_the_configuration_says(in_golden, tmp_path) -> None:
    """docs/tokens.md: True is Levanter since July 2026, False that of June, which made the golden examples."""
    component = tokens.DatasetComponent(
        cache_dir=str(GOLDEN / "chat_llama3style" / "cache"), format=tokens.ChatFormat(mask_user_turns=False), pack=4
    )
    made = {}
    for masking in (True, False):
        config = tokens.LmDataConfig(
            tokenizer=LLAMA, components={"a": component}, shuffle=False, loss_mask_padding=masking
        )
        dataset = config.train_sets(128)["a"]
        made[masking] = dataset.get_batch(range(len(dataset)))
    padding = made[True].segment_ids < 0
    assert padding.any()
    assert (made[True].loss_weight[padding] == 0).all()
    assert (made[False].loss_weight[padding][:-1] == 1).any()
    default = tokens.LmDataConfig(tokenizer=LLAMA, components={"a": component}, shuffle=False).train_sets(128)["a"]
    assert np.array_equal(default.get_batch(range(len(default))).loss_weight, made[True].loss_weight)


def test_a_mixture_that_does_not_end_is_true() -> None:
    assert tokens.Mixture({"a": 3}, {"a": 1})
    assert tokens.Mixture({"a": 3}, {"a": 1}, stop_strategy="all_exhausted")


def test_warnings_of_a_configuration_name_the_callers_line() -> None:
    """A dataclass's own code has no file."""
    settings: dict[str, Any] = {"components": {}, "chat_template": "x"}
    for make in (lambda: tokens.LmDataConfig(**settings), lambda: tokens.LmDataConfig.from_dict(settings)):
        with pytest.warns(actshard.ActshardWarning, match="chat_template is ignored") as told:
            make()
        assert [x.filename for x in told] == [__file__]
