"""What a writer refuses; the dataset stays as it was."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard


def test_a_second_thread_in_a_writer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    class Slow:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            begun.set()
            ended.wait()
            return np.ones((2, 1, 3, 4), np.float32)

    writer = actshard.create(tmp_path / "d", "npy", layers=[0], d_model=4)
    thread = threading.Thread(target=writer.append, args=(Slow(),))
    thread.start()
    try:
        begun.wait()
        for call in (lambda: writer.append(np.zeros((1, 1, 3, 4), np.float32)), writer.flush, writer.close):
            with pytest.raises(actshard.ArgumentError, match="another thread"):
                call()
    finally:
        ended.set()
        thread.join()
    writer.append(np.zeros((1, 1, 3, 4), np.float32))
    writer.close()
    store = actshard.open(tmp_path / "d")
    assert [store.sequence(i, 0).max() for i in range(3)] == [1, 1, 0]


def test_an_example_without_its_special_token_is_refused(tmp_path: Path) -> None:
    """A row of zeros, the padding, would be its CLS."""
    options: dict[str, Any] = {"layers": [0], "d_model": 4, "pad": True, "tokens_per_example": 3, "cls_token": True}
    writer = actshard.create(tmp_path, "saev", **options)
    with pytest.raises(actshard.ArgumentError, match=r"example 1: expected at least 1 special token.*found 0 tokens"):
        writer.append([np.ones((1, n, 4), np.float32) for n in (2, 0)])
    writer.append([np.ones((1, n, 4), np.float32) for n in (2, 1)])
    writer.close()
    assert actshard.open(writer.path).content_lengths.tolist() == [1, 0]
