"""Findings about several layers: those of each, joined, and those of layers compared with each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from actshard.base.layers import Layer, listing, plain
from actshard.looking.stats import Stats
from actshard.looking.stats.advice import Advice, cut

_NORMS = 10.0
"""Layers whose median norms differ by more than this factor need scaling when they are trained on together."""
_JOINED = 3
"""From this many layers on, findings of one kind are one finding."""


def advice_of(stats_by_layer: Mapping[Layer, Stats]) -> list[Advice]:
    """The findings of some layers, with the layer in ``where``."""
    layer_advice = [(layer, advice) for layer, stats in stats_by_layer.items() for advice in stats.advice()]
    return [*together(layer_advice), *_between(stats_by_layer)]


def together(layer_advice: Sequence[tuple[Layer, Advice]]) -> list[Advice]:
    """Joins advice of one kind about several layers: it names all of them, and describes the worst."""
    kinds: dict[tuple[str, str], list[tuple[Layer, Advice]]] = {}
    for layer, advice in layer_advice:
        kinds.setdefault((advice.kind, advice.severity), []).append((layer, advice))
    advice_list = []
    for group in kinds.values():
        if len(group) < _JOINED:
            advice_list += [replace(advice, where=f"layer {cut(plain(layer), 60)}") for layer, advice in group]
            continue
        layer, worst = max(group, key=lambda pair: pair[1].size)
        names = cut(listing([name for name, _ in group]), 80)
        text = f"worst in layer {cut(plain(layer), 40)}: {worst.text}" if worst.size else worst.text
        advice_list.append(replace(worst, where=f"{len(group)} layers ({names})", text=text))
    return advice_list


def _between(stats_by_layer: Mapping[Layer, Stats]) -> Iterator[Advice]:
    norms = {layer: x.norms.median for layer, x in stats_by_layer.items()}
    norms = {layer: norm for layer, norm in norms.items() if np.isfinite(norm) and norm > 0}
    if len(norms) < 2:
        return
    low, high = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
    if norms[high] > _NORMS * norms[low]:
        yield Advice(
            "warning",
            "layers",
            f"median norms differ by a factor of {norms[high] / norms[low]:,.0f}: {norms[low]:.3g} in layer {cut(plain(low), 40)}, "
            f"{norms[high]:.3g} in layer {cut(plain(high), 40)}. A model of several layers mostly fits the large ones.",
            "Scale each layer when training on several.",
            "normalize=[store.stats(x) for x in layers]",
            "norms",
        )
