"""Captures that are resumed: what is compared, and what is counted across calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.writing.capturing.encoding import Example
from test_capture import TABLE, inputs


def interrupted(function: Any, texts: Any, path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """A capture that ends in an error after some commits."""
    monkeypatch.setattr("actshard.writing.capturing.job.BATCHES_OF_A_WINDOW", 1)

    def stop(progress: actshard.CaptureProgress) -> None:
        if progress.examples > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        actshard.capture(function, texts, path, batch_tokens=50, progress=stop, **options)


@pytest.mark.parametrize("tokens", ["all", "mean", "last"])
def test_a_function_or_chooser_of_the_same_name_with_other_results_is_refused_on_resume(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names are equal: closures over other values."""

    def of_table(scale: float) -> Callable[..., Any]:
        return lambda ids, mask: {0: TABLE[ids] * np.float32(scale)}

    def at(place: int) -> Callable[[Example], list[int]]:
        return lambda example: [place]

    def tokenizer(shift: int) -> Callable[[str], list[int]]:
        return lambda text: [int(word) + shift for word in text.split()]

    texts = [" ".join(map(str, ids)) for ids in inputs(60)]
    arguments: dict[str, Any] = {"batch_tokens": 50, "tokenizer": tokenizer(0), "tokens": tokens}
    interrupted(of_table(1), texts, tmp_path / "d", monkeypatch, tokenizer=tokenizer(0), tokens=tokens)
    with pytest.raises(actshard.ArgumentError, match="model: expected the rows of example 0, layer 0, as in the unfin"):
        actshard.capture(of_table(1.01), texts, tmp_path / "d", resume=True, **arguments)
    with pytest.raises(actshard.ArgumentError, match=r"tokenizer: expected the token ids \[\d+, .* for example 0"):
        actshard.capture(of_table(1), texts, tmp_path / "d", resume=True, **{**arguments, "tokenizer": tokenizer(1)})
    done = actshard.capture(of_table(1 + 1e-6), texts, tmp_path / "d", resume=True, **arguments)
    assert 0 < done.resumed_at < 60, "other devices round differently"
    interrupted(of_table(1), texts, tmp_path / "e", monkeypatch, tokenizer=tokenizer(0), tokens=at(0))
    with pytest.raises(actshard.ArgumentError, match=r"tokens: expected the positions \[0\] for example 0"):
        actshard.capture(of_table(1), texts, tmp_path / "e", resume=True, **{**arguments, "tokens": at(-1)})


def test_nonfinite_rows_and_problems_of_earlier_calls_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(ids: np.ndarray, mask: np.ndarray) -> Mapping[actshard.Layer, np.ndarray]:
        rows = {0: TABLE[ids], 3: TABLE[ids]}
        rows[0][(ids == 499) & mask] = np.nan
        rows[3][(ids == 499) & mask] = np.nan
        return rows

    examples = [[i % 400 for i in ids[:20]] for ids in inputs(60)]
    examples[3][-1] = examples[50][-1] = 499
    examples[4], examples[55] = [], list(range(50))
    arguments: dict[str, Any] = {"on_nonfinite": "count", "max_tokens": 30}
    interrupted(faulty, examples, tmp_path / "d", monkeypatch, **arguments)
    with pytest.warns(
        actshard.ActshardWarning, match="4 rows with .* in the examples 3, 50|2 examples of 60 are empty"
    ):
        done = actshard.capture(faulty, examples, tmp_path / "d", batch_tokens=50, resume=True, **arguments)
    assert 4 < done.resumed_at <= 50
    assert (done.nonfinite, done.nonfinite_examples) == (4, (3, 50)), "a row of two layers counts twice"
    assert [problem.example for problem in done.problems] == [4, 55]
    assert done.problems[1].reason == "it has 50 tokens, more than 30"
