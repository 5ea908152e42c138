"""Streams with PyTorch's loaders: the same batches with any number of workers, forked or spawned, and after any interruption."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, saev_dump
from waiting import PATIENCE

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 -- skipped without torch

import actshard.torch  # noqa: E402 -- skipped without torch

SAEV = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")
WAYS = [(0, None), (2, "fork"), (2, "spawn"), (8, "fork")]


def stream(shuffle: Any, **options: Any) -> actshard.Stream:
    return actshard.open(SAEV).stream(5, 7, shuffle=shuffle, seed=3, memory=30_000, **options)


def plain(batch: Any) -> tuple[bytes, list[int], list[int]]:
    """Ids of the rows in a batch, ours or a loader's."""
    if isinstance(batch, actshard.Batch):
        batch = actshard.torch.tensors(batch)
    return batch["activations"].numpy().tobytes(), batch["examples"].tolist(), batch["tokens"].tolist()


@pytest.mark.parametrize("shuffle", [None, "window", "exact"])
@pytest.mark.parametrize(("workers", "method"), WAYS)
@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_give_the_streams_batches(shuffle: Any, workers: int, method: Any, persistent: bool) -> None:
    if persistent and workers == 0:
        pytest.skip("no workers")
    reference = stream(shuffle)
    want = [[plain(b) for b in reference] for _ in range(3)]
    dataset = actshard.torch.IterableDataset(stream(shuffle))
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context=method, persistent_workers=persistent
    )
    assert len(loader) == len(reference)
    for epoch in range(3):
        assert [plain(b) for b in loader] == want[epoch]
    dataset.set_epoch(1)
    assert [plain(b) for b in loader] == want[1]


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("shuffle", ["window", "exact"])
def test_a_stateful_loader_goes_on_where_it_was(workers: int, shuffle: Any) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    reference = stream(shuffle)
    want = [plain(b) for b in reference]
    second = [plain(b) for b in reference]

    def loader() -> Any:
        return stateful(actshard.torch.IterableDataset(stream(shuffle)), batch_size=None, num_workers=workers)

    for stop in (1, 4, 5, len(want) - 1):
        first = loader()
        batches = iter(first)
        for _ in range(stop):
            next(batches)
        state = pickle.loads(pickle.dumps(first.state_dict()))
        rest = loader()
        rest.load_state_dict(state)
        assert [plain(b) for b in rest] == want[stop:]
        assert [plain(b) for b in rest] == second


def test_tensors_share_memory_with_the_arrays() -> None:
    for path in (SAEV, GOLDEN / "lmprobe/fullseq_bf16", GOLDEN / "lmprobe/pooled_f16"):
        store = actshard.open(path)
        for batch in store.stream(store.layers[0], 5):
            made = actshard.torch.tensors(batch)
            assert made["activations"].data_ptr() == batch.activations.ctypes.data
            assert str(made["activations"].dtype) == f"torch.{batch.activations.dtype.name}"
            assert made["examples"].data_ptr() == batch.examples.ctypes.data
    view = actshard.open(GOLDEN / "lmprobe/fullseq_bf16").sequence(0, 0 if 0 in store.layers else store.layers[0])
    assert actshard.torch.tensor(view).dtype == torch.bfloat16
    labels = next(iter(stream(None)))
    assert actshard.torch.tensors(labels)["labels"].dtype == torch.uint8


def test_batches_are_written_into_torchs_memory() -> None:
    s = stream("exact")
    mine = [torch.empty(s.batch_shape) for _ in range(2)]
    other = actshard.open(SAEV).stream(5, 7, shuffle="exact", seed=3, buffers=mine)
    for want, got in zip(stream("exact"), other, strict=True):
        assert isinstance(got.activations, torch.Tensor)
        assert got.activations.data_ptr() in {m.data_ptr() for m in mine}
        assert np.array_equal(got.activations.numpy(), want.activations)


@pytest.mark.parametrize(("workers", "method"), WAYS)
def test_rows_by_number(workers: int, method: Any) -> None:
    store = actshard.open(SAEV)
    dataset = actshard.torch.Dataset(store, 5)
    want = np.concatenate([b.activations for b in store.stream(5, 100)])
    assert len(dataset) == len(want)
    item = dataset[11]
    assert np.array_equal(item["activation"].numpy(), want[11])
    content = int(store.token_counts[0]) - store.special_tokens
    assert (item["example"], item["token"]) == (11 // content, store.special_tokens + 11 % content)
    assert np.array_equal(dataset[-1]["activation"].numpy(), want[-1])
    for bad in (len(want), -len(want) - 1):
        with pytest.raises(IndexError):
            dataset[bad]
    torch.manual_seed(0)
    for collate in (None, actshard.torch.collate):
        loader = DataLoader(
            dataset,
            batch_size=9,
            shuffle=True,
            num_workers=workers,
            multiprocessing_context=method,
            collate_fn=collate,
        )
        seen = []
        for batch in loader:
            names = ("activation", "example", "token") if collate is None else ("activations", "examples", "tokens")
            assert tuple(batch) == names, "collate uses the names of a stream's batches"
            rows, examples, tokens = (batch[name] for name in names)
            assert np.array_equal(rows.numpy(), store.gather(5, examples.numpy(), tokens.numpy()))
            seen += list(zip(examples.tolist(), tokens.tolist(), strict=True))
        assert len(set(seen)) == len(seen) == len(want)


def test_labels_and_masks_select_rows_by_number() -> None:
    store = actshard.open(SAEV)
    labels = store.labels
    assert labels is not None
    ignore = [int(labels[0, 0])]
    dataset = actshard.torch.Dataset(store, 5, ignore_labels=ignore)
    places = np.argwhere(~np.isin(labels, ignore))
    assert len(dataset) == len(places)
    for i in (0, len(places) // 2, len(places) - 1):
        assert (dataset[i]["example"], dataset[i]["token"] - 1) == tuple(places[i])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_one_clear_error_and_no_hang(victim: int, tmp_path: Path) -> None:
    """The loader raises an error if a worker died, without waiting.

    The error is torch's own: with the worker's number or, if it was killed between announcing a batch and sending the descriptor
    of its shared memory (`torch.multiprocessing`, `file_descriptor` strategy), a connection error. In a process of its own: torch
    raises it in its handler of SIGCHLD too, which may run once more after the error was caught.
    """
    code = f"import test_torch; test_torch.kill_one({victim})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    # Into a file: the other worker, which ends soon after its parent, would keep a pipe open.
    with (tmp_path / "said").open("wb") as file:
        subprocess.run(command, stdout=file, stderr=file, cwd=Path(__file__).parent, timeout=PATIENCE, check=False)
    said = (tmp_path / "said").read_text()
    assert "ended without an error" not in said, said
    assert re.search(r"worker.*(exited|killed)|ConnectionError|ConnectionResetError|BrokenPipeError|EOFError", said), (
        said
    )


def kill_one(victim: int) -> None:
    """Prints the error of a loader whose worker is killed."""
    loader = DataLoader(
        actshard.torch.IterableDataset(stream("window")), batch_size=None, num_workers=2, prefetch_factor=1
    )
    batches = iter(loader)
    next(batches)
    try:
        kill_and_drain(batches, victim)
    except (RuntimeError, ConnectionError, EOFError) as error:
        print(type(error).__name__, error, flush=True)
        os._exit(0)


def kill_and_drain(batches: Any, victim: int) -> None:
    os.kill(batches._workers[victim].pid, signal.SIGKILL)
    drain(batches)


def drain(batches: Any) -> None:
    for _ in batches:
        time.sleep(0.05)
    raise AssertionError("the loader ended without an error")


def test_an_error_in_a_worker_is_ours(tmp_path: Any) -> None:
    copy = tmp_path / SAEV.name
    shutil.copytree(SAEV, copy)
    store = actshard.open(copy)
    loader = DataLoader(actshard.torch.IterableDataset(store.stream(5, 7)), batch_size=None, num_workers=2)
    shard = sorted(copy.glob("acts*.bin"))[-1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        drain(iter(loader))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_epoch_is_chosen_for_workers_that_persist(workers: int, method: str) -> None:
    reference = stream("exact")
    want = [[plain(b) for b in reference] for _ in range(6)]
    dataset = actshard.torch.IterableDataset(stream("exact"))
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context=method, persistent_workers=True
    )
    for chosen, expected in ((None, 0), (4, 4), (None, 5), (1, 1), (1, 1), (0, 0), (None, 1)):
        if chosen is not None:
            dataset.set_epoch(chosen)
        assert [plain(b) for b in loader] == want[expected]


def test_the_state_of_a_stream_that_workers_read_is_refused() -> None:
    for persistent in (False, True):
        s = stream("exact")
        dataset = actshard.torch.IterableDataset(s)
        assert s.state_dict()["batch"] == 0
        loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        for state in (s.state_dict, dataset.state_dict):
            with pytest.raises(actshard.ArgumentError, match="StatefulDataLoader"):
                state()
        del batches, loader
        # Reading in this process makes the position known here again.
        alone = iter(DataLoader(dataset, batch_size=None))
        next(alone)
        assert s.state_dict()["batch"] == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_loader_that_batches_batches_is_refused(workers: int, batch_size: int) -> None:
    dataset = actshard.torch.IterableDataset(stream(None))
    with pytest.raises(actshard.ArgumentError, match="batch_size=None"):
        next(iter(DataLoader(dataset, batch_size=batch_size, num_workers=workers)))


def test_what_is_no_stream_is_refused_at_once() -> None:
    store: Any = actshard.open(SAEV)
    for make in (actshard.torch.IterableDataset, actshard.torch.batches, actshard.torch.pinned):
        with pytest.raises(actshard.ArgumentError, match=r"expected an actshard\.Stream"):
            make(store)
    if not torch.cuda.is_available():
        with pytest.raises(actshard.UnsupportedError, match="cannot pin memory on this machine"):
            actshard.torch.pinned(stream(None))


def _token_dataset(path: Path) -> Any:
    from actshard import tokens

    with tokens.CacheWriter(path / "cache", {"input_ids": np.int32}) as writer:
        writer.append([{"input_ids": np.arange(6) + 6 * i} for i in range(20)])
    return tokens.CausalLmDataset(tokens.TokenSeqDataset(tokens.open_cache(path / "cache"), 4), eos_id=5)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_batches_of_a_token_stream(tmp_path: Path, workers: int) -> None:
    dataset = _token_dataset(tmp_path)
    stream = dataset.stream(4, shuffle="block")
    loader = DataLoader(actshard.torch.IterableDataset(stream), batch_size=None, num_workers=workers)
    for epoch in range(2):
        found = list(loader)
        assert len(found) == len(loader) == len(stream)
        for i, batch in enumerate(found):
            wanted = dataset.get_batch(stream.indices(i, epoch))
            assert batch.keys() == {"tokens", "loss_weight", "segment_ids"}
            assert np.array_equal(batch["tokens"].numpy(), wanted.tokens)
            assert np.array_equal(batch["loss_weight"].numpy(), wanted.loss_weight)


def test_examples_of_a_token_dataset_by_number(tmp_path: Path) -> None:
    dataset = _token_dataset(tmp_path)
    items = actshard.torch.TokenDataset(dataset)
    assert len(items) == len(dataset)
    assert np.array_equal(items[3]["tokens"].numpy(), dataset[3].tokens[0])
    loader = DataLoader(items, batch_size=4, sampler=[5, 1, 7, 7, 0], collate_fn=actshard.torch.collate)
    found = [batch["tokens"].numpy() for batch in loader]
    assert np.array_equal(np.concatenate(found), dataset.get_batch([5, 1, 7, 7, 0]).tokens)


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_loaders_give_the_batches_of_mixtures(workers: int, method: Any) -> None:
    store = actshard.open(SAEV)

    def mixed() -> actshard.MixedStream:
        return actshard.mix([(store, 2), (store.filter(slice(None, None, 2)), 1)], exhausted="repeat").stream(5, 6)

    def listed(batch: Any) -> tuple[Any, ...]:
        made = batch if isinstance(batch, dict) else actshard.torch.tensors(batch)
        return (*plain(made), made["sources"].tolist())

    reference = mixed()
    want = [[listed(b) for b in reference] for _ in range(2)]
    loader = DataLoader(
        actshard.torch.IterableDataset(mixed()), batch_size=None, num_workers=workers, multiprocessing_context=method
    )
    assert [[listed(b) for b in loader] for _ in range(2)] == want
