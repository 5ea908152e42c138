"""Inputs of captures: what is an example, a text, padding or a special token, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from test_capture import check, expected, inputs, library, states, words


def test_padding_of_tokenized_records_is_not_stored(tmp_path: Path) -> None:
    """A table of a tokenizer that padded, on either side."""
    masks = [[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1], [1], None]
    rows = [{"input_ids": [3, 4, 7, 8], "attention_mask": mask, "label": i} for i, mask in enumerate(masks)]
    with pytest.warns(actshard.ActshardWarning, match="3 examples of 7 are empty"):
        done = actshard.capture(states, rows, tmp_path / "d")
    check(done.path, [[7, 8], [3, 4], [3, 4, 7, 8], [], [], [], [3, 4, 7, 8]])
    assert [str(problem) for problem in done.problems] == [
        "example 3: it has no tokens",
        "example 4: its attention_mask has zeros between tokens",
        "example 5: expected 4 values of attention_mask, one per token, found shape (1,)",
    ]
    assert "attention_mask" not in actshard.open(done.path).table.column_names
    arrays = [{"input_ids": np.array([3, 4, 7, 8]), "attention_mask": np.array([False, True, True, False])}]
    done = actshard.capture(states, arrays, tmp_path / "e", tokens="last")
    assert np.array_equal(actshard.open(done.path).sequence(0, 3), expected([4, 7], 3)[-1:])


@pytest.mark.parametrize("once", [False, True])
def test_empty_chats_and_lists_of_ids_are_empty_examples(once: bool, tmp_path: Path) -> None:
    """``[]`` may be either."""
    from actshard.writing.capturing.records import records_of

    def read(texts: list[Any]) -> tuple[str, list[Any]]:
        records = records_of(iter(texts) if once else texts)
        return records.text_key(None), list(records)

    chat = [{"role": "user", "content": "1 2"}]
    assert read([[], [], chat]) == ("messages", [{}, {}, {"messages": chat}])
    assert read([chat, []]) == ("messages", [{"messages": chat}, {}])
    ids: list[Any] = [[], [4, 5], [], [6]]
    with pytest.warns(actshard.ActshardWarning, match="2 examples of 4 are empty: example 0: it has no tokens"):
        done = actshard.capture(states, iter(ids) if once else ids, tmp_path / "d")
    check(done.path, ids)


@pytest.mark.parametrize("once", [False, True])
def test_token_ids_of_any_column_need_no_tokenizer(once: bool, tmp_path: Path) -> None:
    rows = [{"tokens": ids, "attention_mask": [1] * len(ids)} for ids in inputs(5)]
    done = actshard.capture(states, iter(rows) if once else rows, tmp_path / "d", text="tokens")
    check(done.path, inputs(5))
    names = actshard.open(done.path).table.column_names
    assert not {"tokens", "attention_mask"} & set(names)
    texts = [{"tokens": None}, {"tokens": "1 2"}]
    with pytest.raises(actshard.ArgumentError, match="tokenizer: expected one for texts, found none"):
        actshard.capture(states, iter(texts) if once else texts, tmp_path / "e", text="tokens")


def test_texts_are_not_overwritten_by_a_column_of_the_same_name(tmp_path: Path) -> None:
    for name in ("problem", "positions", "text_tokens"):
        with pytest.raises(actshard.ArgumentError, match=f"text: '{name}' is a column that capture writes itself"):
            actshard.capture(states, [{name: "1 2"}], tmp_path / "d", tokenizer=words, text=name)
    rows = [{"question": "1 2", "text": "another"}]
    for format in ("lmprobe", "safetensors"):  # lmprobe finds examples by `text`
        arguments: dict[str, Any] = {"tokenizer": words, "text": "question", "tokens": "last"}
        if format == "lmprobe":
            with pytest.raises(actshard.ArgumentError, match="columns: 'text' is the name by which the format stores"):
                actshard.capture(states, rows, tmp_path / "d", format, **arguments)
            arguments["columns"] = []
        done = actshard.capture(states, rows, tmp_path / format, format, **arguments)
        table = actshard.open(done.path).table
        assert table["text" if format == "lmprobe" else "question"].to_pylist() == ["1 2"]
    assert table["text"].to_pylist() == ["another"]
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("tokens", ["all", "last", "mean", "content"])
def test_an_empty_text_has_no_rows_although_the_tokenizer_adds_one(tokens: Any, tmp_path: Path) -> None:
    with pytest.warns(actshard.ActshardWarning, match="1 example of 3 is empty: example 1: its text is empty"):
        done = actshard.capture(states, ["1 2", "", "3"], tmp_path / "d", tokenizer=library(), tokens=tokens)
    store = actshard.open(done.path)
    assert store.token_counts[1] == 0
    assert store.table["problem"].to_pylist() == [None, "its text is empty", None]
    assert store.table["text"].to_pylist() == ["1 2", "", "3"]
    assert store.table["text_tokens"].to_pylist() == [3, 0, 2]


def test_an_example_without_chosen_tokens_is_named(tmp_path: Path) -> None:
    for name, tokens in {"content": "content", "function": lambda e: e.ids != 101}.items():
        with pytest.warns(actshard.ActshardWarning, match="1 example of 2 is empty: example 1: no token is chosen"):
            done = actshard.capture(states, [[1, 2], [101]], tmp_path / name, tokenizer=library(), tokens=tokens)
        store = actshard.open(done.path)
        assert store.token_counts.tolist() == [2, 0]
        assert store.table["text_tokens"].to_pylist() == [2, 1]
    with pytest.raises(actshard.ArgumentError, match="found none: example 0: no token is chosen"):
        actshard.capture(states, [[1, 2]], tmp_path / "d", tokens=lambda example: [])


def test_a_text_with_a_lone_surrogate_is_an_empty_example(tmp_path: Path) -> None:
    """JSON can contain them, UTF-8 cannot."""
    (tmp_path / "texts.jsonl").write_text('{"text": "1 2"}\n{"text": "3 \\ud800"}\n')
    with pytest.warns(
        actshard.ActshardWarning, match=r"example 1: its text has a lone surrogate, \\ud800, at character 2"
    ):
        done = actshard.capture(states, tmp_path / "texts.jsonl", tmp_path / "d", tokenizer=library())
    assert actshard.open(done.path).table["text"].to_pylist() == ["1 2", None]


@pytest.mark.parametrize("encoded", [[1.5, 2], np.array([[1, 2]]), ["1", "2"], [[1], [2, 3]], None, [True]])
def test_other_values_than_ids_of_a_tokenizing_function_are_refused(encoded: Any, tmp_path: Path) -> None:
    with pytest.raises(actshard.ArgumentError, match=r"tokenizer: expected that .* returns a list of token ids, found"):
        actshard.capture(states, ["1 2"], tmp_path / "d", tokenizer=lambda text: encoded)
    done = actshard.capture(states, ["1"], tmp_path / "e", tokenizer=lambda text: {"input_ids": np.array([7, 8])})
    check(done.path, [[7, 8]])


def test_special_tokens_of_a_text_are_content(tmp_path: Path) -> None:
    """The tokenizer added only BOS. In token ids, nothing tells them apart."""
    done = actshard.capture(states, ["1 [PAD] 2", "[BOS] 3"], tmp_path / "d", tokenizer=library())
    table = actshard.open(done.path).table
    assert table["input_ids"].to_pylist() == [[101, 1, 102, 2], [101, 101, 3]]
    assert table["special_tokens_mask"].to_pylist() == [[1, 0, 0, 0], [1, 0, 0]]
    arguments: dict[str, Any] = {"tokenizer": library(), "tokens": "content"}
    done = actshard.capture(states, ["1 [PAD] 2"], tmp_path / "e", max_tokens=3, truncate=True, **arguments)
    assert actshard.open(done.path).table["input_ids"].to_pylist() == [[1, 102]]
    done = actshard.capture(states, [[101, 1, 102, 2, 100]], tmp_path / "f", **arguments)
    assert actshard.open(done.path).table["input_ids"].to_pylist() == [[1, 2, 100]]


COLUMNS: dict[str, tuple[list[Any], str | None]] = {
    "large": ([1, 2**70, None, -1], "decimal128(38, 0)"),
    "lists": ([[1], [], [0.5, 2], None], "list<element: double>"),
    "dicts": ([{"a": 1}, {"a": 0.5, "b": "x"}, None, {}], "struct<a: double, b: string>"),
    "arrays": ([np.array([1, 2]), np.array([0.5]), [3], None], "list<element: double>"),
    "late": ([None, None, None, "x"], "string"),
    "bools": ([True, 2, None, None], None),
    "texts": (["1", 2, None, None], None),
    "nested": ([{"a": [1]}, {"a": ["x"]}, None, None], None),
    "large floats": ([2**70, 0.5, None, None], None),
    "surrogates": (["1", "\ud800", None, None], None),
}


@pytest.mark.parametrize("piece", [1, 1024])
@pytest.mark.parametrize("case", COLUMNS)
def test_a_column_has_one_type_whatever_the_windows_or_is_refused_at_once(
    case: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actshard.writing.capturing.records._PIECE", piece)
    values, kind = COLUMNS[case]
    rows = [{"input_ids": [i + 1], "c": value} for i, value in enumerate(values)]

    def never(ids: np.ndarray, mask: np.ndarray) -> dict[actshard.Layer, np.ndarray]:
        raise AssertionError

    if kind is None:
        with pytest.raises(actshard.ArgumentError, match=r"columns: 'c': expected .*, or leave the column out with"):
            actshard.capture(never, rows, tmp_path / "d")
        actshard.capture(states, rows, tmp_path / "d", columns=[])
        return
    done = actshard.capture(states, rows, tmp_path / "d", memory=1)  # a window per example
    column = actshard.open(done.path).table["c"]
    assert str(column.type).replace("item:", "element:") == kind
    fields = kind.startswith("struct")
    for value, stored in zip(values, column.to_pylist(), strict=True):
        other = value.tolist() if isinstance(value, np.ndarray) else value
        assert stored == ({"a": None, "b": None} | other if fields and other is not None else other)
