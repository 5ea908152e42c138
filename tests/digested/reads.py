"""What a store returns for golden datasets and those written here: shape, table, metadata and values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from actshard import tokens
from digested import GOLDEN, of_arrays, short
from digested.complaints import datasets
from digested.datasets import LAYOUTS, opened


def _or_kind(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except actshard.ActshardError as error:
        return f"refused: {error.kind}"


def _plain(value: Any) -> str:
    return json.dumps(value, default=lambda v: v.tolist() if hasattr(v, "tolist") else repr(v), sort_keys=True)


def of(store: actshard.Store) -> dict[str, str]:
    """Digests of everything that a store returns."""
    table = store.table
    given: dict[str, Callable[[], str]] = {
        "is": lambda: (
            f"{store.format} {list(store.layers)} {len(store)} x {store.d_model} {store.dtype.name} {store.identity}"
        ),
        "metadata": lambda: short(_plain(store.metadata).replace(str(GOLDEN), "golden").encode()),
        "table": lambda: short(f"{table.schema.remove_metadata()}{table.to_pylist()}".encode()),
        "token_counts": lambda: of_arrays(store.token_counts),
        "content_lengths": lambda: of_arrays(store.content_lengths) if store.content_lengths is not None else "none",
        "labels": lambda: of_arrays(store.labels) if store.labels is not None else "none",
        "logits": lambda: of_arrays(*store.logits()),
        "router": lambda: of_arrays(store.router(store.layers[0] if store.layers else 0)),
    }
    for layer in store.layers:
        given[f"sequences of {layer}"] = lambda x=layer: of_arrays(*store.sequences(range(len(store)), x))
        given[f"last_tokens of {layer}"] = lambda x=layer: of_arrays(
            store.last_tokens(x), store.last_tokens(x, [1, 0, 1])
        )
    if len(store.layers):
        first = store.layers[0]
        given["gather as float64"] = lambda: of_arrays(store.gather(first, np.arange(len(store)), 0, dtype="float64"))
        given["stats"] = lambda: of_arrays(
            *(getattr(store.stats(first), name).astype("f4") for name in ("mean", "std"))
        )
    made = {name: _or_kind(ask) for name, ask in given.items()}
    return {name: value for name, value in made.items() if value not in ("refused: not_stored", "none")}


def _of_cache(cache: tokens.TokenCache) -> dict[str, str]:
    digest = hashlib.sha256(_plain(cache.ledger.as_dict()).encode())
    for name in cache.fields:
        view = cache.view(name)
        digest.update(f"{name} {cache.dtype(name).name}".encode())
        digest.update(of_arrays(view.offsets, view.elements()).encode())
    rows = of_arrays(*(row[name] for row in cache.rows(range(len(cache))) for name in cache.fields))
    return {"cache": f"{len(cache)} {digest.hexdigest()[:20]}", "rows": rows}


def found(folder: Path) -> dict[str, Any]:
    """Digests by dataset, or the kind of its error."""
    made: dict[str, Any] = {}
    named = {path.relative_to(GOLDEN).as_posix(): path for path in datasets() if "hostile" not in path.parts}
    for layout, make in LAYOUTS.items():
        path = make(folder / layout.replace(" ", "_"))
        if GOLDEN not in path.parents:
            named[layout] = path
    for name, path in named.items():
        try:
            if name.startswith("levanter"):
                made[name] = _of_cache(tokens.open_cache(path))
            else:
                made[name] = of(opened(path))
        except actshard.ActshardError as error:
            made[name] = f"refused: {error.kind}"
    return made
