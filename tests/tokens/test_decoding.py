"""Guarantee: ``summarize`` and ``decode_rows`` equal loops over documents; ``info`` and ``head --text`` print them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tokens.conftest import GPT2, LLAMA, write_lines
from typer.testing import CliRunner

import actshard
from actshard import tokens
from actshard.cli import app
from conftest import GOLDEN
from shell import run_command as command

LEVANTER = GOLDEN / "levanter"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def written(folder: Path, rows: list[dict[str, Any]], **dtypes: Any) -> tokens.TokenCache:
    with tokens.CacheWriter(folder, {"input_ids": np.int64, **dtypes}) as writer:
        writer.append(rows)
    return tokens.open_cache(folder)


def packed_examples(lengths: list[int], size: int) -> int:
    """Examples of documents in order. A document that does not fit uncut, and every 65th, begins the next example."""
    examples, room, held = 0, 0, 64
    for length in lengths:
        if length > room or held == 64:
            examples, room, held = examples + 1, size, 0
        room, held = room - length, held + 1
    return examples


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.integers(1, 30))
def test_a_summary_is_that_of_a_loop_over_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], size: int
) -> None:
    cache = written(tmp_path_factory.mktemp("c") / "c", [{"input_ids": np.arange(n)} for n in lengths])
    summary = tokens.summarize(cache, [size])
    assert (summary.documents, summary.tokens) == (len(lengths), sum(lengths))
    order = sorted(lengths)
    ranks = {"min": 0, "median": math.ceil(len(order) / 2) - 1, "p95": math.ceil(len(order) * 95 / 100) - 1, "max": -1}
    assert summary.lengths._asdict() == {name: order[rank] for name, rank in ranks.items()}
    (fill,) = summary.fills
    kept = sum(min(length, size) for length in lengths)
    assert fill.cut == sum(lengths) - kept
    assert fill.alone == pytest.approx(kept / (size * len(lengths)))
    assert fill.examples == packed_examples(lengths, size)
    assert fill.fill == pytest.approx(kept / (size * fill.examples))


def test_a_cache_without_documents_has_a_summary(tmp_path: Path) -> None:
    summary = tokens.summarize(written(tmp_path / "c", []))
    assert (summary.documents, summary.tokens, summary.lengths) == (0, 0, (0, 0, 0, 0))
    assert all(math.isnan(fill.fill) and math.isnan(fill.alone) for fill in summary.fills)
    assert command("info", str(tmp_path / "c")).returncode == 0


def test_info_prints_documents_lengths_tokenizer_and_padding(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "word " * n} for n in (1, 2, 3000)])
    cache = tokens.build_cache(lines, tmp_path / "c", LEVANTER / LLAMA)
    about = json.loads(command("info", str(tmp_path / "c"), "--json").stdout)
    summary = tokens.summarize(cache)
    assert about | summary.as_dict() == about
    assert about["documents"] == about["rows"] == 3
    assert about["tokenizer"] == str(LEVANTER / LLAMA)
    assert [row["length"] for row in about["padding"]] == [1024, 2048, 4096, 8192]
    printed = command("info", str(tmp_path / "c")).stdout
    assert f"median {summary.lengths.median:,}, 95 % up to {summary.lengths.p95:,}" in printed
    assert f"{1 - summary.fills[0].alone:.1%} with a document per example" in printed
    assert f"{summary.fills[0].cut:,} tokens cut" in printed


@pytest.mark.parametrize("tokenizer", [LLAMA, GPT2, "tokenizers/wordpiece_bertstyle"])
@pytest.mark.parametrize("masks", ["assistant_masks", "loss_weights", None])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_spans_are_the_text_of_their_tokens(
    masks: str | None, tokenizer: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Every run of equal masks is a span; the text of the spans is that of all tokens."""
    loaded = tokens.load_tokenizer(LEVANTER / tokenizer)
    ids = loaded.encode([data.draw(st.text(st.sampled_from("ab é🙂한 \n"), max_size=20))])[0]
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    row = {"input_ids": ids} | ({} if masks is None else {masks: mask})
    dtypes = {} if masks is None else {masks: np.float32}
    limit = data.draw(st.integers(1, 30))
    (decoded,) = tokens.decode_rows(
        written(tmp_path_factory.mktemp("c") / "c", [row], **dtypes), tokenizer=loaded, tokens=limit
    )
    expected = {
        "assistant_masks": [True, *(not one for one in mask[1:])][: len(ids)],
        "loss_weights": [True, *(not one for one in mask)][: len(ids)],
        None: [False] * len(ids),
    }[masks]
    assert [span.masked for span in decoded.spans for _ in range(span.tokens)] == expected[:limit]
    assert all(a.masked != b.masked for a, b in zip(decoded.spans, decoded.spans[1:], strict=False))
    assert decoded.text == loaded.decode(ids[:limit])
    assert (decoded.row, decoded.tokens, decoded.decoded_tokens) == (0, len(ids), min(len(ids), limit))


def test_a_character_of_two_spans_belongs_to_the_second(tmp_path: Path) -> None:
    loaded = tokens.load_tokenizer(LEVANTER / GPT2)
    ids = loaded.encode(["a🙂b"])[0]
    assert len(ids) > 3, "the emoji has several tokens"
    row = {"input_ids": ids, "assistant_masks": [0, 0, *[1] * (len(ids) - 2)]}
    (decoded,) = tokens.decode_rows(written(tmp_path / "c", [row], assistant_masks=np.int32), tokenizer=loaded)
    assert [(span.text, span.masked) for span in decoded.spans] == [("a", True), ("🙂b", False)]


def chats(folder: Path) -> Path:
    lines = write_lines(
        folder / "chat.jsonl",
        [{"messages": [{"role": "user", "content": "ask[0]\n"}, {"role": "assistant", "content": "reply"}]}] * 3,
    )
    tokens.build_cache(lines, folder / "c", LEVANTER / LLAMA, tokens.ChatFormat(chat_template=TEMPLATE))
    return folder / "c"


def test_head_marks_tokens_without_loss(tmp_path: Path) -> None:
    path = chats(tmp_path)
    done = command("head", str(path), "--text", "-n", "2")
    assert done.stdout.count("[[ask[0]\n]]reply\n") == 2
    assert "2 of 3 documents; [[ ]]: tokens without loss" in done.stdout
    rows = json.loads(command("head", str(path), "--text", "--json").stdout)
    assert rows == [row.as_dict() for row in tokens.decode_rows(tokens.open_cache(path))]
    assert [(span["text"], span["masked"]) for span in rows[0]["spans"]] == [("ask[0]\n", True), ("reply", False)]


def test_head_colours_tokens_without_loss_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = chats(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    text = CliRunner().invoke(app, ["head", str(path), "--text", "-n", "1"]).stdout
    assert "\x1b[36mask[0]\x1b[0m\n" in text
    assert "[[" not in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "[[ask[0]\n]]reply" in CliRunner().invoke(app, ["head", str(path), "--text", "-n", "1"]).stdout


def test_control_characters_of_documents_are_escaped(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "a\x1b[31mb"}])
    tokens.build_cache(lines, tmp_path / "c", LEVANTER / GPT2)
    assert "a\\x1b[31mb" in command("head", str(tmp_path / "c"), "--text").stdout


def test_another_tokenizer_than_the_caches_is_a_warning(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "a b"}])
    cache = tokens.build_cache(lines, tmp_path / "c", LEVANTER / LLAMA)
    with pytest.warns(actshard.ActshardWarning, match="built with another tokenizer") as warned:
        tokens.decode_rows(cache, tokenizer=LEVANTER / GPT2)
    assert [w.message.code for w in warned] == ["cache-settings"]  # type: ignore[union-attr]
    done = command("head", str(tmp_path / "c"), "--text", "--tokenizer", str(LEVANTER / GPT2))
    assert "warning: the cache was built with another tokenizer, of " in done.stderr
    assert command("head", str(tmp_path / "c"), "--text").stderr == ""
    marked = tokens.load_tokenizer(LEVANTER / LLAMA, chat_template="{{ messages }}")
    with pytest.warns(actshard.ActshardWarning, match="another chat template, which do not change texts"):
        tokens.decode_rows(cache, tokenizer=marked)


def test_caches_that_were_built_without_a_tokenizer_are_decoded_without_a_warning(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6]}])
    cache = tokens.build_cache(lines, tmp_path / "c", format="prebuilt")
    for tokenizer in (LEVANTER / LLAMA, LEVANTER / GPT2):
        assert len(tokens.decode_rows(cache, tokenizer=tokenizer)) == 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.integers(0, 12), max_size=20), st.integers(1, 9), st.integers(1, 25))
def test_only_tokens_to_decode_are_read(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], limit: int, n: int
) -> None:
    rows = [{"input_ids": np.arange(k) + 100 * i, "loss_weights": np.arange(k) % 3} for i, k in enumerate(lengths)]
    cache = written(tmp_path_factory.mktemp("c") / "c", rows, loss_weights=np.float32)
    reads: list[int] = []

    class Counted:
        def __init__(self, field: Any) -> None:
            self._field = field

        def __getattr__(self, name: str) -> Any:
            if name == "elements":
                return lambda start, count: reads.append(count) or self._field.elements(start, count)
            assert name in ("bounds", "descr", "has_shapes"), f"{name} reads whole rows"
            return getattr(self._field, name)

    cache._fields = {name: Counted(cache.field(name)) for name in cache.fields}
    decoded = tokens.decode_rows(cache, n, "passthrough", tokens=limit)
    assert [row.text for row in decoded] == [" ".join(map(str, row["input_ids"][:limit])) for row in rows[:n]]
    assert [row.tokens for row in decoded] == lengths[:n]
    masked = [[True, *(i % 3 == 0 for i in range(k - 1))][: min(k, limit)] for k in lengths[:n]]
    assert [[span.masked for span in row.spans for _ in range(span.tokens)] for row in decoded] == masked
    assert sum(reads) == 2 * sum(min(k, limit) for k in lengths[:n])


def test_fields_of_floats_are_not_ids(tmp_path: Path) -> None:
    with tokens.CacheWriter(tmp_path / "c", {"scores": np.float32}) as writer:
        writer.append([{"scores": [1.5, 1234567.0]}])
    with pytest.raises(actshard.NotStoredError, match="which are integers, found scores"):
        tokens.decode_rows(tokens.open_cache(tmp_path / "c"), tokenizer="passthrough")
    assert "1.5 1.23457e+06" in command("head", str(tmp_path / "c")).stdout


def test_head_decodes_the_beginning_of_long_documents(tmp_path: Path) -> None:
    written(tmp_path / "c", [{"input_ids": np.arange(5000)}, {"input_ids": []}, {"input_ids": [7]}])
    rows = json.loads(command("head", str(tmp_path / "c"), "--tokenizer", "passthrough", "--json").stdout)
    assert [row["text"] for row in rows] == [" ".join(map(str, range(512))), "", "7"]
    assert [(row["tokens"], row["input_ids"]) for row in rows] == [(5000, list(range(12))), (0, []), (1, [7])]


def test_large_ids_are_printed_with_all_digits(tmp_path: Path) -> None:
    written(tmp_path / "c", [{"input_ids": [1234567]}])
    for verb in ("head", "top"):
        assert "1234567" in command(verb, str(tmp_path / "c")).stdout
    assert "1234567" in command("head", str(tmp_path / "c"), "--text", "--tokenizer", "passthrough").stdout


def test_what_cannot_be_decoded_is_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 70_000]}]
    cache = written(tmp_path / "c", rows)
    with pytest.raises(actshard.ArgumentError, match="names none"):
        tokens.decode_rows(cache)
    for wrong in (70_000, -1, 1 << 40):
        other = written(tmp_path / f"{wrong}", [{"input_ids": [1, wrong]}])
        with pytest.raises(actshard.FormatError, match=f"row 0: expected ids of tokens of .*, found {wrong};"):
            tokens.decode_rows(other, tokenizer=LEVANTER / LLAMA)
    unequal = written(tmp_path / "u", [{"input_ids": [1, 2], "assistant_masks": [1]}], assistant_masks=np.int32)
    with pytest.raises(actshard.FormatError, match="row 0: expected 2 values in 'assistant_masks'"):
        tokens.decode_rows(unequal, tokenizer=LEVANTER / LLAMA)
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    moved = tmp_path / "tok"
    moved.symlink_to(LEVANTER / LLAMA)
    built = tokens.build_cache(lines, tmp_path / "t", moved)
    moved.unlink()
    with pytest.raises(actshard.MissingFileError, match="expected the cache's tokenizer"):
        tokens.decode_rows(built)


def test_ids_of_a_program_are_their_text(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "3 4 5"}])
    tokenizer = tokens.load_tokenizer("passthrough", vocab_size=9)
    cache = tokens.build_cache(lines, tmp_path / "c", tokenizer)
    assert [row.text for row in tokens.decode_rows(cache)] == ["3 4 5"]
