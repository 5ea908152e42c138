"""Batches on a GPU, compared with the link's rate and with a DataLoader. Runs only where torch finds a CUDA device."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import actshard
from benches import data
from benches.measure import Row, median
from benches.sizes import size

BATCH = size(16_384, 256)


def handing(repeats: int) -> Iterator[Row]:
    """Batches of 50 MB from the page cache to the device's memory; nothing computes there."""
    what = "stream: batches on a GPU"
    try:
        import torch
    except ImportError:
        yield Row(what, "hot", "the link", None, None, "MB/s", None, ">= 0.9x", None, "torch is not installed")
        return
    if not torch.cuda.is_available():
        yield Row(what, "hot", "the link", None, None, "MB/s", None, ">= 0.9x", None, "not measured: no CUDA device")
        return
    from torch.utils.data import DataLoader

    import actshard.torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(data.saev())

    def stream() -> actshard.Stream:
        return store.stream(7, BATCH, shuffle="window", drop_last=True)

    for file in data.saev().glob("acts*.bin"):
        file.read_bytes()
    for ours, plain in zip(actshard.torch.to_device(stream(), "cuda"), stream(), strict=True):
        if not torch.equal(ours["activations"].cpu(), torch.from_numpy(plain.activations)):
            raise AssertionError("batches on the device differ")

    def timed(batches: Any) -> float:
        torch.cuda.synchronize()
        began, size = time.perf_counter(), 0
        for batch in batches:
            moved = batch["activations"].to("cuda", non_blocking=True)
            size += moved.nbytes
        torch.cuda.synchronize()
        return size / (time.perf_counter() - began) / 1e6

    host = torch.ones((BATCH, store.d_model)).pin_memory()
    rates: dict[str, list[float]] = {"the link": [], "DataLoader(pin_memory=True)": [], "actshard": []}
    moved = actshard.torch.to_device(stream(), "cuda")
    loader = DataLoader(actshard.torch.IterableDataset(stream()), batch_size=None, pin_memory=True)
    for turn in range(min(repeats, 7) + 1):
        found = (timed({"activations": host} for _ in range(20)), timed(loader), timed(moved))
        if turn:
            for taken, rate in zip(rates.values(), found, strict=True):
                taken.append(rate)
    ours = median(rates["actshard"])
    for peer, target in (("the link", 0.9), ("DataLoader(pin_memory=True)", 1.0)):
        theirs = median(rates[peer])
        yield Row(what, "hot", peer, theirs, ours, "MB/s", ours / theirs, f">= {target:g}x", ours / theirs >= target,
                  torch.cuda.get_device_name(), rates)  # fmt: skip
