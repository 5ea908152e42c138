"""The memory of batches: who may write into it, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.streaming.epochs import Epochs
from conftest import GOLDEN


@pytest.fixture
def store(tmp_path: Path) -> actshard.Store:
    with actshard.create(tmp_path / "a", "zarr", layers=[2, 5], d_model=4) as writer:
        writer.append(np.random.default_rng(0).normal(size=(6, 2, 5, 4)).astype(np.float32))
    return actshard.open(tmp_path / "a")


def streams(store: actshard.Store, **options: Any) -> dict[str, Epochs[Any]]:
    return {
        "stream": store.stream([2, 5], 4, **options),
        "mixture": actshard.mix([(store, 1)]).stream([2, 5], 4, **options),
        "pair": actshard.pair(store, store).stream(2, 4, **options),
    }


def test_every_stream_has_an_answer_whether_it_reuses_memory(store: actshard.Store) -> None:
    for reuse in (False, True):
        assert {name: stream.reuses for name, stream in streams(store, reuse=reuse).items()} == dict.fromkeys(
            ("stream", "mixture", "pair"), reuse
        )
    assert store.stream(2, 4, buffers=[np.zeros((4, 4), np.float32) for _ in range(2)]).reuses
    assert not store.sequences_stream(2, 20).reuses
    assert "reuses" in Epochs.__abstractmethods__, "a new kind of stream must answer"


def test_arrays_that_batches_or_stores_share_are_read_only(store: actshard.Store, tmp_path: Path) -> None:
    loops: dict[str, Any] = streams(store) | {"sequences": store.sequences_stream([2, 5], 20)}
    del loops["pair"]  # each batch has its own arrays
    for stream in loops.values():
        for batch in stream:
            with pytest.raises(ValueError, match="read-only"):
                np.add(batch.layers, 100, out=batch.layers)
    parts = [np.ones((1, n, 4), np.float32) for n in (6, 4)]
    with actshard.create(
        tmp_path / "b", "saev", layers=[2], d_model=4, cls_token=True, pad=True, tokens_per_example=6
    ) as writer:
        writer.append(parts, labels=np.zeros((2, 5), np.uint8))
    padded = actshard.open(writer.path)
    for shared in (padded, actshard.concat([padded, padded]), padded.filter([1])):
        for array in (shared.token_counts, shared.content_lengths, shared.labels):
            assert array is not None
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0


def test_buffers_of_another_shape_are_refused(store: actshard.Store) -> None:
    """Of an incomplete last batch, a flat buffer would be returned with rows of an earlier one."""
    for shape in ((64,), (1, 16, 4), (16, 1, 4), (17, 4)):
        with pytest.raises(
            actshard.ArgumentError, match=r"buffers\[0\]: expected an array or tensor of shape \(16, 4\)"
        ):
            store.stream(2, 16, buffers=[np.zeros(shape, np.float32) for _ in range(3)])
    with pytest.raises(actshard.ArgumentError, match="found"):
        store.stream(2, 16, buffers=[bytearray(256), bytearray(256)])
    buffers = [np.zeros((16, 4), np.float32) for _ in range(2)]
    assert [len(batch.activations) for batch in store.stream(2, 16, buffers=buffers)] == [16, 14]


@pytest.mark.parametrize("kind", ["stream", "mixture"])
def test_jax_arrays_of_streams_that_reuse_memory_do_not_change(kind: str, store: actshard.Store) -> None:
    pytest.importorskip("jax")
    import actshard.jax

    held = [
        (batch["activations"], np.array(batch["activations"]))
        for batch in actshard.jax.batches(streams(store, reuse=True)[kind])
    ]
    assert len(held) > 3
    assert all(np.array_equal(np.asarray(array), copy) for array, copy in held)


@pytest.mark.parametrize("kind", ["stream", "mixture", "pair"])
def test_torch_tensors_of_streams_that_reuse_memory_do_not_change(kind: str, store: actshard.Store) -> None:
    torch = pytest.importorskip("torch")
    import actshard.torch

    expected = [batch.activations.copy() for batch in streams(store)[kind]]
    held = list(actshard.torch.to_device(streams(store, reuse=True)[kind], "cpu"))
    for batch, rows in zip(held, expected, strict=True):
        assert torch.equal(batch["activations"], torch.from_numpy(rows))


def test_workers_copy_batches_of_streams_that_reuse_memory(
    store: actshard.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's queue pickles batches on a thread while the worker reads the next ones."""
    pytest.importorskip("torch")
    import actshard.torch

    for worker in (None, object()):
        monkeypatch.setattr(actshard.torch.data, "get_worker_info", lambda worker=worker: worker)
        stream = streams(store, reuse=True)["mixture"]
        dataset = actshard.torch.IterableDataset(stream)
        batches = list(dataset._read({"epoch": 0, "next": 0}, 0, 1))
        addresses = {batch["activations"].data_ptr() for batch in batches}
        assert len(addresses) == (3 if worker is None else len(batches)), "three arrays, or a copy each"


def test_the_padding_of_a_dump_with_cls_is_not_content_of_an_example(tmp_path: Path) -> None:
    from actshard.looking.examining import examine

    parts = [np.arange(1, n + 1, dtype=np.float32)[None, :, None] * np.ones((1, 1, 4), np.float32) for n in (6, 4)]
    with actshard.create(
        tmp_path / "a", "saev", layers=[2], d_model=4, cls_token=True, pad=True, tokens_per_example=6
    ) as writer:
        writer.append(parts)
    example = examine(actshard.open(writer.path), 1)
    assert (example.special, example.content) == (1, 4)
    assert example.median == np.median(example.norms[1:4]) == 6


def test_golden_datasets_examine_all_their_tokens() -> None:
    from actshard.looking.examining import examine

    store = actshard.open(next(path for path in sorted((GOLDEN / "lmprobe").iterdir()) if path.is_dir()))
    example = examine(store, 0)
    assert (example.special, example.content) == (store.special_tokens, len(example.norms))
