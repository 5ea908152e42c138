"""Sparse latents: the activations of features of sparse autoencoders, by example and by feature.

A store of its own kind: entries (example, token, feature, value) of one module. Reads the files of EleutherAI's delphi, of the
diffing toolkit, and parquet files with a row per entry; see docs/formats/latents.md.

>>> store = actshard.latents.open("run/latents/layers.5")
>>> store.example(3)        # tokens, features, values
>>> store.feature(1042)     # examples, tokens, values
"""

from __future__ import annotations

from actshard.latents.checking import verify
from actshard.latents.store import LatentRows, LatentStore, modules, open
from actshard.latents.writing import convert

__all__ = ["LatentRows", "LatentStore", "convert", "modules", "open", "verify"]
