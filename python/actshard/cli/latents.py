"""``actshard info`` and ``actshard head`` of sparse latents."""

from __future__ import annotations

from typing import Literal

import numpy as np
from rich.markup import escape

import actshard
from actshard import latents
from actshard.base._arguments import many
from actshard.base.errors import UnknownFormatError
from actshard.base.location import Location
from actshard.cli._format import TableColumn, console, one_line, show_facts, show_table
from actshard.latents import LatentStore
from actshard.reading.finding import latents_at
from actshard.reading.store import Store

_NOT_COUNTED = "[dim]not counted: requires reading all locations[/]"
_STRONGEST = 3


def opened(
    location: Location, format: str | None, layout: str | None, incomplete: Literal["error", "skip"]
) -> Store | list[LatentStore]:
    """Opens the dataset at a path, or the sparse latents of all modules, if no format recognises it."""
    try:
        return actshard.open(location, format, layout=layout, incomplete=incomplete)
    except UnknownFormatError:
        if format is not None or latents_at(location) is None:
            raise
    return [latents.open(location, module) for module in latents.modules(location)]


def about(stores: list[LatentStore]) -> dict[str, object]:
    """Returns the properties of all modules as plain values."""
    return {
        "format": f"{stores[0].kind} latents",
        "modules": [
            {
                "module": store.module,
                "path": str(store.path),
                "examples": store.files.num_examples,
                "features": store.files.num_features,
                "tokens": store.files.context,
                "entries": store.n_activations,
                "dtype": str(store.dtype),
                "parts": len(store.parts),
                "token_ids": store.has_tokens,
                "metadata": store.metadata,
                "warnings": [str(warning) for warning in store.warnings],
            }
            for store in stores
        ],
    }


def show_info(stores: list[LatentStore]) -> None:
    """Prints the properties of each module."""
    for store in stores:
        files = store.files
        sizes = [
            _NOT_COUNTED if n is None else f"{n:,}" for n in (files.num_examples, files.context, files.num_features)
        ]
        lines: list[tuple[str, object]] = [
            ("kind", f"sparse latents ({store.kind}); actshard.latents.open reads them"),
            ("path", escape(str(store.path))),
            ("module", escape(store.module)),
            *zip(("examples", "context", "features"), sizes, strict=True),
            ("entries", f"{store.n_activations:,} in {many(len(store.parts), 'part')}"),
            ("dtype", store.dtype),
            ("token ids", "yes" if store.has_tokens else "no"),
        ]
        lines += [(key, escape(one_line(value, 100))) for key, value in store.metadata.items() if value is not None]
        show_facts(lines, store.warnings)


def rows(stores: list[LatentStore], n: int) -> list[dict[str, object]]:
    """Returns the first examples of each module: entries, features, and the entries with the largest values."""
    records: list[dict[str, object]] = []
    for store in stores:
        for example in range(min(n, store.n_examples)):
            entries = store.example(example)
            order = np.argsort(-entries.values.astype(np.float64), kind="stable")[:_STRONGEST]
            records.append(
                {
                    "module": store.module,
                    "example": example,
                    "tokens": store.length(example),
                    "entries": len(entries),
                    "features": len(np.unique(entries.features)),
                    "strongest": [
                        {
                            "feature": int(entries.features[k]),
                            "token": int(entries.tokens[k]),
                            "value": float(entries.values[k]),
                        }
                        for k in order
                    ],
                }
            )
    return records


def show_rows(stores: list[LatentStore], n: int) -> None:
    """Prints the first examples of each module."""
    names = ("module", "example", "tokens", "entries", "features")
    lines = []
    for record in rows(stores, n):
        strongest = record["strongest"]
        assert isinstance(strongest, list)
        texts = [f"{entry['feature']} at {entry['token']}: {entry['value']:.4g}" for entry in strongest]
        lines.append([*(str(record[name]) for name in names), ", ".join(texts)])
    show_table(console(), [*map(TableColumn, names), TableColumn("largest values", least=24, left=True)], lines)
