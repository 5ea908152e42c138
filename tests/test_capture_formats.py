"""Captures to formats with demands: a constant number of rows, no empty examples, options about layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from test_capture import WIDTH, expected, inputs, states


def test_an_empty_example_is_refused_before_it_would_become_zeros(tmp_path: Path) -> None:
    examples = [*inputs(40), list(range(50)), [1, 2]]
    arguments: dict[str, Any] = {"tokens": "last", "max_tokens": 30, "layers": [0]}
    for format, pad, options in (
        ("lmprobe", False, {}),
        ("hf_arrow", False, {}),
        ("saev", False, {}),
        ("saev", True, {}),
        ("speculators", False, {"last": 0}),
    ):
        calls: list[int] = []

        def counting(ids: np.ndarray, mask: np.ndarray, calls: list[int] = calls) -> Mapping[actshard.Layer, Any]:
            calls.append(ids.size)
            return states(ids, mask)

        with pytest.raises(
            actshard.ArgumentError, match="example 40 is empty: it has 50 tokens, more than 30"
        ) as caught:
            actshard.capture(counting, examples, tmp_path / "d", format, pad=pad, options=options, **arguments)
        assert len(calls) == 1, "to learn the width"
        assert not (tmp_path / "d").exists()
        assert ("pad=True" in str(caught.value)) == (format in ("lmprobe", "hf_arrow"))
    with pytest.warns(actshard.ActshardWarning, match="example 40: it has 50 tokens"):
        done = actshard.capture(states, examples, tmp_path / "e", "hf_arrow", pad=True, **arguments)
    assert [problem.example for problem in done.problems] == [40]
    with pytest.warns(actshard.ActshardWarning, match="example 40: it has 50 tokens"):
        done = actshard.capture(states, iter(examples), tmp_path / "f", "saev", pad=True, **arguments)
    assert [problem.example for problem in done.problems] == [40], "named also without a column for the reason"


@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
def test_saev_has_room_for_the_longest_example_or_differences_are_refused_at_once(tmp_path: Path) -> None:
    examples = [[1, 2], [3], [4, 5, 6, 7]]
    with pytest.raises(
        actshard.ArgumentError, match="expected 2 rows for every example, as for example 0, found 1 for ex"
    ):
        actshard.capture(states, examples, tmp_path / "d", "saev")
    assert not (tmp_path / "d").exists()
    done = actshard.capture(states, examples, tmp_path / "d", "saev", pad=True, memory=1)  # a window per example
    store = actshard.open(done.path)
    for number, ids in enumerate(examples):
        assert np.array_equal(store.sequence(number, 3)[: len(ids)], expected(ids, 3))
        assert store.sequence(number, 3)[len(ids) :].tolist() == [[0] * WIDTH] * (4 - len(ids))
    again = actshard.capture(states, examples, tmp_path / "d", "saev", pad=True, resume=True)
    assert (again.path, again.resumed_at) == (done.path, 3)


TARGET = {"target_model": "m", "target_model_type": "llama", "target_vocab_size": 500, "num_hidden_layers": 4}
DEMANDING: dict[str, dict[str, Any]] = {
    "saev": {},
    "speculators": {"options": {"last": 3}},
    "modelopt": {"options": {"last": 3}},
    "deepspec": {"options": {"last": 3}, "dtype": "bfloat16"},
    "automodel": {"options": {"last": 3}, "metadata": TARGET, "dtype": "bfloat16"},
}
"""Formats that need options about layers, the number of examples, or metadata."""


@pytest.mark.parametrize("format", DEMANDING)
def test_formats_with_options_about_layers_are_begun_and_estimated(format: str, tmp_path: Path) -> None:
    examples, arguments = [[1, 2, 3], [4, 5, 6]], DEMANDING[format]
    predicted = actshard.capture(states, examples, tmp_path / "d", format, estimate=True, **arguments)
    assert (predicted.examples, predicted.rows) == (2, 6)
    done = actshard.capture(states, examples, tmp_path / "d", format, **arguments)
    assert done.examples == 2
    again = actshard.capture(states, examples, tmp_path / "d", format, resume=True, **arguments)
    assert again.examples == 2
    with pytest.raises(actshard.ExistsError, match="finished d"):
        actshard.capture(states, examples, tmp_path / "d", format, **arguments)
