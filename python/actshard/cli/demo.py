"""``actshard demo`` and ``bench-stream``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

import actshard
from actshard.base._arguments import many
from actshard.base.layers import Layer
from actshard.base.work.pool import peak_memory
from actshard.cli._format import console, size
from actshard.reading.store import Store
from actshard.streaming.quality import measure

DATASET = Path(actshard.__file__).parent / "_demo" / "minilm-tense"
RIDGE = 10.0
_BAR = 40


def probe_accuracy(store: actshard.Store, layer: Layer) -> float:
    """Returns the accuracy of a ridge classifier on last tokens, trained on half of the verbs and tested on the other half."""
    verbs = np.array(store.table["verb"].to_pylist())
    past = np.array(store.table["label"].to_pylist()) == 1
    train = np.isin(verbs, np.unique(verbs)[::2])
    rows = store.last_tokens(layer).astype(np.float64)
    mean, scale = rows[train].mean(axis=0), rows[train].std(axis=0) + 1e-6
    x = (rows - mean) / scale
    y = np.where(past, 1.0, -1.0)
    weights = _ridge(x[train], y[train] - y[train].mean())
    guess = x[~train] @ weights + y[train].mean() > 0
    return float((guess == past[~train]).mean())


def _ridge(x: NDArray[np.floating], y: NDArray[np.floating]) -> NDArray[np.generic]:
    """Ridge regression in its dual form, because there are fewer sentences than dimensions."""
    alpha: NDArray[np.floating] = np.linalg.solve(x @ x.T + RIDGE * np.eye(len(x)), y)
    weights: NDArray[np.floating] = x.T @ alpha
    return weights


def run_demo() -> None:
    """Opens the bundled dataset, prints its properties, and draws accuracy by layer."""
    out = console()
    began = time.perf_counter()
    store = actshard.open(DATASET)
    about = store.info()
    out.print(
        f"[bold]{about['model']}[/]: {about['examples']} sentences, layers {store.layers[0]} to {store.layers[-1]}, ",
        end="",
    )
    out.print(
        f"d_model {store.d_model}, {store.dtype}, {about['shards']} {store.format} shards, {size(about['bytes'])}"
    )
    texts = store.table.slice(0, 200)
    for label, name in ((0, "present"), (1, "past")):
        first = texts["label"].to_pylist().index(label)
        out.print(f"  [dim]{name:>8}[/]  {texts['text'][first].as_py()}")
    out.print(
        "\nIs the verb's tense readable from a layer's last token? Trained on half of the verbs, tested on the others:\n"
    )
    for layer in store.layers:
        accuracy = probe_accuracy(store, layer)
        bar = "█" * round(accuracy * _BAR)
        colour = "green" if accuracy >= 0.9 else "yellow" if accuracy >= 0.65 else "red"
        out.print(f"  layer {layer}  [{colour}]{bar:<{_BAR}}[/]  {accuracy:6.1%}")
    out.print(f"  [dim]chance   {'─' * (_BAR // 2)}┘{' ' * (_BAR // 2 - 1)}    50.0%[/]")
    seconds = time.perf_counter() - began
    rows = store.num_examples * len(store.layers)
    out.print(f"\n{rows:,} rows gathered, {len(store.layers)} probes fitted in {seconds:.2f} s. The same in Python:\n")
    out.print(f"  [cyan]store = actshard.open({str(DATASET)!r})[/]", soft_wrap=True)
    out.print("  [cyan]rows = store.last_tokens(layer=2)          # (200, 384) float32[/]")


def measure_stream(
    store: Store, layer: Layer | list[Layer], batch_size: int, seconds: float, **options: Any
) -> dict[str, object]:
    """Reads for ``seconds``, at most one epoch; returns speed, memory and the quality of the shuffle."""
    stream = store.stream(layer, batch_size, **options)
    batch_rows: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    total = 0
    began = time.perf_counter()
    first = 0.0
    batches = iter(stream)
    for batch in batches:
        elapsed = time.perf_counter() - began
        first = first or elapsed
        total += batch.activations.nbytes
        batch_rows.append((batch.examples, batch.tokens))
        if elapsed > seconds:
            break
    took = time.perf_counter() - began
    stream.close()
    rows = sum(len(e) for e, _ in batch_rows)
    return {
        "path": str(store.path),
        "format": store.format,
        "layers": list(stream.layers),
        "batch_size": batch_size,
        "shuffle": options.get("shuffle"),
        "memory": options.get("memory"),
        "batches": len(batch_rows),
        "of_batches": len(stream),
        "rows": rows,
        "bytes": total,
        "seconds": took,
        "first_batch_seconds": first,
        "bytes_per_second": total / took if took else 0.0,
        "rows_per_second": rows / took if took else 0.0,
        "peak_memory": peak_memory(),
        "quality": measure(batch_rows).as_dict(),
    }


def show_measurement(measurement: dict[str, Any]) -> None:
    """Prints the result of :func:`run`."""
    out = console()
    grid = Table(box=None, show_header=False, pad_edge=False)
    quality = measurement["quality"]
    part = (
        ""
        if measurement["batches"] == measurement["of_batches"]
        else f" (of {measurement['of_batches']:,}; increase --seconds for more)"
    )
    for name, value in (
        ("read", f"{size(measurement['bytes'])} in {many(measurement['batches'], 'batch', plural='batches')}{part}"),
        ("speed", f"{size(int(measurement['bytes_per_second']))}/s, {measurement['rows_per_second']:,.0f} rows/s"),
        ("first batch after", f"{measurement['first_batch_seconds']:.3f} s"),
        ("peak memory", f"{size(measurement['peak_memory'])} of the process, including mapped pages"),
        (
            "distinct examples",
            f"{quality['distinct']:,.0f} per batch; ideal {quality['ideal_distinct']:,.0f} ({quality['distinct_ratio']:.2f})",
        ),
        ("entropy", f"{quality['entropy']:.3f} of the ideal"),
        (
            "stored neighbours",
            f"{quality['apart']:,.0f} rows apart; ideal {quality['ideal_apart']:,.0f} ({quality['apart_ratio']:.2f})",
        ),
    ):
        grid.add_row(name, value)
    out.print(grid)
