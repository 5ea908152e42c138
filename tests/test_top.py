"""``actshard top``: ids, texts, norms and largest dimensions of one example's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import actshard
from actshard.cli import app
from actshard.looking.examining import examine
from actshard.tokens import load_tokenizer
from conftest import GOLDEN, SAEV, refuses, saev_dump

TOKENIZER = GOLDEN / "levanter/tokenizers/bpe_gpt2style"


def top(*words: Any) -> Any:
    told = CliRunner().invoke(app, ["top", *map(str, words)])
    assert told.exit_code == 0, told.output
    return told.stdout


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three examples of 7, 1 and 2 tokens with ids; the second token of the first has a NaN."""
    rng = np.random.default_rng(0)
    ids = load_tokenizer(TOKENIZER).encode(["Hello \nworld", "a"])
    with actshard.create(tmp_path / "data", "lmprobe", layers=[2, 5], d_model=16) as writer:
        for tokens in (ids[0], ids[1], [1, 2]):
            rows = rng.normal(size=(2, len(tokens), 16)).astype(np.float32)
            if len(tokens) > 2:
                rows[:, 1, 3] = np.nan
                rows[:, 2, 7] = 900
            writer.append([rows], columns={"input_ids": [tokens], "text": ["Hello \n[bold]\x1b[31mworld"]})
    return tmp_path / "data"


def test_norms_and_largest_dimensions_are_those_of_numpy() -> None:
    for dump in SAEV[:2]:
        store = actshard.open(saev_dump(dump))
        for layer in store.layers:
            found = examine(store, -1, layer, largest=4)
            rows = store.sequence(len(store) - 1, layer).astype(np.float64)
            assert np.array_equal(found.norms, np.linalg.norm(rows, axis=1))
            for i, row in enumerate(rows):
                expected = sorted(range(len(row)), key=lambda d: (-abs(row[d]), d))[:4]
                assert found.dimensions[i].tolist() == expected
                assert found.values[i].tolist() == row[expected].tolist()


def test_tokens_have_their_ids_and_texts(data: Path) -> None:
    found = json.loads(top(data, "--tokenizer", TOKENIZER, "--layer", 2, "--json"))
    assert found["layer"] == 2
    assert "".join(token["text"] for token in found["tokens"]) == "Hello \nworld"
    assert [token["id"] for token in found["tokens"]] == load_tokenizer(TOKENIZER).encode(["Hello \nworld"])[0]
    assert found["tokens"][1]["norm"] is None
    assert next(iter(found["tokens"][1]["largest"])) == "3", "NaN values come first"
    assert next(iter(found["tokens"][2]["largest"])) == "7"


def test_the_text_of_a_dataset_without_ids_is_encoded_if_that_gives_a_token_for_each_row(tmp_path: Path) -> None:
    decode = load_tokenizer(TOKENIZER)
    n = len(decode.encode(["some words"])[0])
    for name, rows in (("fits", n), ("differs", n + 1)):
        with actshard.create(tmp_path / name, "lmprobe", layers=[0], d_model=4) as writer:
            writer.append([np.ones((1, rows, 4), np.float32)], columns={"text": ["some words"]})
    fits = examine(actshard.open(tmp_path / "fits"), tokenizer=decode)
    assert "".join(fits.pieces or ()) == "some words"
    assert examine(actshard.open(tmp_path / "differs"), tokenizer=decode).pieces is None


def test_the_terminal_shows_escapes_as_text_and_names_massive_tokens(data: Path) -> None:
    told = top(data, "--tokenizer", TOKENIZER)
    assert "\x1b" not in told
    assert "\\x1b[31mworld" in told
    assert "\x1b" not in CliRunner().invoke(app, ["head", str(data)]).stdout
    assert "[bold]" in told, "texts are no markup"
    assert "layer 5" in told, "the last layer"
    assert "not finite" in told
    assert "▶" in told, "a norm above the scale"
    assert "⏎" in told
    assert "tokens; --tokens prints more" in top(data, "--tokens", 1)


def test_a_row_of_a_token_cache(tmp_path: Path) -> None:
    cache = GOLDEN / "levanter/supervised_llama3style"
    found = json.loads(top(cache, "-e", -1, "--tokens", 5, "--json"))
    assert len(found["ids"]) == 5
    assert found["tokens"] > 5
    assert "--tokenizer DIR" in top(cache)


def test_options_without_a_use_are_refused(data: Path) -> None:
    cache = GOLDEN / "levanter/supervised_llama3style"
    for words, text in (
        (["top", str(cache), "--layer", "3"], "--layer: token caches have no layers."),
        (["top", str(cache), "--largest", "3"], "--largest: token caches have no layers."),
        (
            ["head", str(data), "--tokenizer", "/nope"],
            "--tokenizer: expected a token cache, found a dataset of activations.",
        ),
    ):
        told = CliRunner().invoke(app, words)
        assert isinstance(told.exception, actshard.ArgumentError)
        assert text in str(told.exception)


def test_wrong_requests_name_the_argument(data: Path) -> None:
    store = actshard.open(data)
    for example in (3, -4):
        with refuses(actshard.OutOfRangeError, store.path):
            examine(store, example)
    with refuses(actshard.LayerError, store.path):
        examine(store, 0, 3)
    assert CliRunner().invoke(app, ["top", str(data), "--layer", "2,5"]).exit_code == 1
