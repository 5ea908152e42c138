"""Which rows a stream, statistics or sequences read: ``tokens``, ``ignore_labels``, ``keep``, ``min_token``, ``max_norm``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.oracle.examples import Example, Examples, Layer, Rows

Place = tuple[int, int]
"""(example, token)."""

Piece = tuple[int, tuple[int, ...], int]
"""(example, tokens, position of the first)."""


@dataclass(frozen=True)
class Chosen:
    """The arguments, with ``keep`` as one flag per stored token of each example."""

    tokens: str = "content"
    ignore_labels: tuple[int, ...] = ()
    keep: list[list[bool]] | None = None
    min_token: int = 0
    max_norm: float | str | None = None


def tokens_of(data: Examples, example: Example, layer: Layer, tokens: str) -> list[int]:
    """Positions of an example's tokens: "content", "all", "last" or "special"."""
    if layer not in example.rows:
        return []
    first, stop = data.content_of(example)
    return {
        "content": list(range(first, stop)),
        "all": list(range(example.tokens)),
        "special": list(range(first)),
        "last": [stop - 1] if stop else [],
    }[tokens]


def norm(row: Rows) -> float:
    """L2 norm of a stored row; NaN or infinite if the row has such a value."""
    values = [float(x) for x in row]
    return math.nan if any(math.isnan(x) for x in values) else math.hypot(*values)


def limits(data: Examples, layers: list[Layer], max_norm: float | str) -> dict[Layer, float]:
    """The largest norm of each layer. "2x median": of all content rows with finite norms."""
    if not isinstance(max_norm, str):
        return dict.fromkeys(layers, max_norm)
    found = {}
    for layer in layers:
        norms = [
            norm(example.rows[layer][t])
            for example in data.examples
            for t in tokens_of(data, example, layer, "content")
        ]
        finite = [x for x in norms if math.isfinite(x)]
        found[layer] = float(max_norm.partition("x")[0]) * (float(np.median(finite)) if finite else 0.0)
    return found


def select(data: Examples, layers: list[Layer], chosen: Chosen) -> tuple[list[Place], dict[str, int]]:
    """The selected rows in stored order, and how many the limits leave out."""
    left_out = {"min_token": 0, "not_finite": 0, "max_norm": 0}
    bounds = None if chosen.max_norm is None else limits(data, layers, chosen.max_norm)
    places: list[Place] = []
    for i, example in enumerate(data.examples):
        for t in tokens_of(data, example, layers[0], chosen.tokens):
            labels = None if data.labels is None else data.labels[i]
            if (
                chosen.ignore_labels
                and t >= data.special
                and labels
                and labels[t - data.special] in chosen.ignore_labels
            ):
                continue
            if chosen.keep is not None and not chosen.keep[i][t]:
                continue
            if t < chosen.min_token:
                left_out["min_token"] += 1
                continue
            if bounds is not None:
                norms = {layer: norm(example.rows[layer][t]) for layer in layers}
                if not all(math.isfinite(x) for x in norms.values()):
                    left_out["not_finite"] += 1
                    continue
                if any(norms[layer] > bounds[layer] for layer in layers):
                    left_out["max_norm"] += 1
                    continue
            places.append((i, t))
    return places, left_out


def label_of(data: Examples, place: Place) -> int | None:
    """A row's patch label; -1 for special tokens; None without labels."""
    labels = data.labels
    if labels is None:
        return None
    example, token = place
    return -1 if token < data.special else labels[example][token - data.special]


def batches(places: list[Any], size: int, drop_last: bool) -> list[list[Any]]:
    """Batches of one rank in stored order."""
    found = [places[at : at + size] for at in range(0, len(places), size)]
    return [batch for batch in found if len(batch) == size] if drop_last else found


def epoch_size(rows: int, size: int, ranks: int, drop_last: bool) -> int:
    """Number of rows of an epoch over all ranks."""
    return rows // (size * ranks) * size * ranks if drop_last else rows


def is_indivisible(rows: int, size: int, ranks: int, drop_last: bool) -> bool:
    """Whether ranks cannot have equally many batches, each with a row."""
    return not drop_last and 0 < rows < ranks * -(-rows // (size * ranks))


def pieces(places: list[Place], budget: int, too_long: str) -> list[Piece]:
    """Sequences of at most ``budget`` tokens: each one's example, tokens, and the position of its first token.

    Positions are counted without tokens that the selection leaves out, and go on in the second sequence of an example.
    """
    found = []
    for example, tokens in sequences(places).items():
        parts = [(tuple(tokens[at : at + budget]), at) for at in range(0, len(tokens), budget)]
        if len(parts) > 1:
            parts = {"split": parts, "truncate": parts[:1], "drop": []}[too_long]
        found += [(example, *part) for part in parts]
    return found


def sequences(places: list[Place]) -> dict[int, list[int]]:
    """Selected tokens by example."""
    found: dict[int, list[int]] = {}
    for example, token in places:
        found.setdefault(example, []).append(token)
    return found


def too_long(places: list[Place], budget: int, how: str) -> dict[str, int]:
    """Examples that are left out because they have more than ``budget`` tokens, and tokens that are."""
    longer = [len(tokens) for tokens in sequences(places).values() if len(tokens) > budget]
    return {
        "split": {"examples": 0, "tokens": 0},
        "truncate": {"examples": 0, "tokens": sum(longer) - budget * len(longer)},
        "drop": {"examples": len(longer), "tokens": sum(longer)},
    }[how]
