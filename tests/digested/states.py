"""Results of ``state_dict``, and batches of streams that load these states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import actshard
from digested.datasets import LAYOUTS, opened
from digested.streams import SHUFFLES, rows

ASKED: dict[str, dict[str, Any]] = {
    "default": {},
    "many": {"seed": 9, "epoch": 3, "memory": "2KiB", "rank": 1, "world_size": 3, "drop_last": True, "tokens": "all"},
    "interleaved": {
        "layer": "all",
        "interleave": True,
        "memory": "2KiB",
        "dtype": "float64",
        "center": 0.5,
        "scale": 3.0,
    },
}
WHICH = ("strided", "table", "pooled table", "chunked", "coded", "coded shards", "plain pickle", "gzip pickle", "wide")


def stream(store: actshard.Store, shuffle: str | None, asked: str) -> actshard.Stream:
    """A stream whose states are recorded."""
    options = dict(ASKED[asked])
    if store.d_model > 100 and "memory" in options:
        options["memory"] = "128KiB"
    if len(store.layers) == 1 and options.pop("interleave", False):
        options["layer"] = list(store.layers)
    return store.stream(options.pop("layer", store.layers[0]), 2, shuffle=shuffle, **options)


def stores(folder: Path) -> dict[str, actshard.Store]:
    """The opened datasets."""
    return {layout: opened(LAYOUTS[layout](folder / layout.replace(" ", "_"))) for layout in WHICH}


def found(folder: Path) -> dict[str, Any]:
    """States after two batches, and digests of the remaining batches of that epoch and of the next."""
    made: dict[str, Any] = {}
    for layout, store in stores(folder).items():
        for shuffle in SHUFFLES:
            for asked in ASKED:
                running = stream(store, shuffle, asked)
                loop = iter(running)
                for _ in range(2):
                    next(loop)
                state = running.state_dict()
                made[f"{layout}, {shuffle}, {asked}"] = {
                    "state": json.loads(json.dumps(state)),
                    "left": rows(loop),
                    "next": rows(running),
                }
    return made


def resumed(folder: Path, recorded: dict[str, Any]) -> dict[str, Any]:
    """The same for streams that load the recorded states."""
    made: dict[str, Any] = {}
    for layout, store in stores(folder).items():
        for shuffle in SHUFFLES:
            for asked in ASKED:
                name = f"{layout}, {shuffle}, {asked}"
                fresh = stream(store, shuffle, asked)
                fresh.load_state_dict(recorded[name]["state"])
                made[name] = {"state": fresh.state_dict(), "left": rows(fresh), "next": rows(fresh)}
    return made
