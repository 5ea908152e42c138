"""Batches on a GPU, and the training of a sparse autoencoder with them. Runs only where torch finds a CUDA device."""

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
FEATURES = size(16_384, 64)
"""Of the sparse autoencoder that is trained."""
_STEPS = 64
"""Steps of training that are timed at a time."""


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


def training(repeats: int) -> Iterator[Row]:
    """Steps of a sparse autoencoder of 768 by 16,384 in bfloat16, compared with rows that are on the device already."""
    what, target = "stream: an SAE trained on a GPU", 0.95
    peer = "rows on the device already"
    try:
        import torch
    except ImportError:
        yield Row(what, "hot", peer, None, None, "steps/s", None, f">= {target}x", None, "torch is not installed")
        return
    if not torch.cuda.is_available():
        yield Row(what, "hot", peer, None, None, "steps/s", None, f">= {target}x", None, "not measured: no CUDA device")
        return
    rates = training_rates(repeats, "cuda")
    theirs, ours = median(rates[peer]), median(rates["actshard"])
    yield Row(what, "hot", peer, theirs, ours, "steps/s", ours / theirs, f">= {target}x", ours / theirs >= target,
              f"{torch.cuda.get_device_name()}; DataLoader(pin_memory=True): {median(rates['DataLoader(pin_memory=True)']):.4g}",
              rates)  # fmt: skip


def training_rates(repeats: int, device: str) -> dict[str, list[float]]:
    """Steps per second with rows on the device, a DataLoader and ``to_device``. The steps cross the ends of epochs."""
    import torch
    from torch.utils.data import DataLoader

    import actshard.torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = actshard.open(data.saev())
    for file in data.saev().glob("acts*.bin"):
        file.read_bytes()
    d_model = store.d_model
    encoder, decoder = (torch.nn.Linear(*shape).to(device) for shape in ((d_model, FEATURES), (FEATURES, d_model)))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-4)

    def step(rows: Any) -> None:
        rows = rows.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            features = torch.relu(encoder(rows))
            loss = (decoder(features) - rows).square().mean() + 1e-3 * features.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    def stream() -> actshard.Stream:
        return store.stream(7, BATCH, shuffle="window", drop_last=True)

    def endless(batches: Any) -> Iterator[Any]:
        while True:
            yield from batches

    def done() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(batches: Iterator[Any]) -> float:
        done()
        began = time.perf_counter()
        for _ in range(size(_STEPS, 2)):
            step(next(batches)["activations"])
        done()
        return size(_STEPS, 2) / (time.perf_counter() - began)

    held = [
        {"activations": torch.from_numpy(batch.activations.copy()).to(device)}
        for _, batch in zip(range(4), stream(), strict=False)
    ]
    loader = DataLoader(actshard.torch.IterableDataset(stream()), batch_size=None, pin_memory=device == "cuda")
    sources = {
        "rows on the device already": endless(held),
        "DataLoader(pin_memory=True)": endless(loader),
        "actshard": endless(actshard.torch.to_device(stream(), device)),
    }
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for turn in range(min(repeats, 7) + 1):
        for name, batches in sources.items():
            rate = timed(batches)
            if turn:  # the first compiles and fills buffers
                rates[name].append(rate)
    return rates
