"""``actshard demo``: in which layer is a verb's tense linearly decodable? Uses only the public API.

The bundled dataset contains the last-token activations of all-MiniLM-L6-v2 for 200 short sentences in the present or past tense,
in lmprobe's format. A linear probe per layer is fitted on half of the verbs and tested on the others, so that it must detect tense
and not single words.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import actshard
from actshard.base.layers import Layer
from actshard.cli._format import console, size

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


def run() -> None:
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
