"""``verify`` of sparse latents: headers, splits and sizes; with ``deep`` every entry."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np

from actshard.base._arguments import many, switch
from actshard.base.location import Location, network_io
from actshard.formats.report import Report
from actshard.latents.files import CONFIG, TORCH_MORE, gather, parse_latents, stores_at
from actshard.latents.store import LatentStore, repeats_at

_SHOWN = 20
"""Repeated entries that are reported."""
_TOKENS = 1 << 20
"""Token ids that are compared at a time."""
_MEMORY = 1 << 30


def verify(path: str | os.PathLike[str], *, deep: bool = False) -> Report:
    """Checks the sparse latents at a path: all modules. :func:`actshard.verify` calls it for such a path.

    Args:
        path: as for :func:`actshard.latents.open`.
        deep: read every entry: locations outside of the store, NaN and infinite values, repeated and unsorted entries.
    """
    root = Location.of_any(path)
    report = Report(root.place, None, bool(switch(deep, "deep")))
    check_latents(root, report, lambda what, done, total: None)
    return report


def check_latents(root: Location, report: Report, tell: Callable[[str, int, int], object]) -> None:
    """Adds the findings about all modules at a path to a report."""
    with report.noting(root):
        kind, folders = stores_at(root) or (None, {})
        if kind is None:
            root.stat()
            report.add("unknown-format", root, "no sparse latents")
            return
        report.format = f"{kind} latents"
        for number, (module, folder) in enumerate(folders.items()):
            tell("modules", number, len(folders))
            io = network_io(folder)
            files = report.faults.parse(
                folder,
                partial(parse_latents, kind, module, folder, io=io, memory=_MEMORY, faults=report.faults),
            )
            if files is not None:
                _check_module(LatentStore(files, _MEMORY, io, None), folder, report, tell)


def _check_module(
    store: LatentStore, folder: Location, report: Report, tell: Callable[[str, int, int], object]
) -> None:
    report.count("files", len({path for path, _, _ in store.parts}))
    report.count("entries", store.n_activations)
    for warning in store.warnings:
        report.add(getattr(warning, "code", "reader-warning"), folder, warning)
    required = {"delphi": (CONFIG,), "torch": TORCH_MORE[:3]}.get(store.kind, ())
    for name in required:
        if not (folder / name).exists():
            report.add("layout", folder, f"no {name}, which {store.kind}'s own loader requires")
    if report.deep:
        with report.noting(folder):
            _check_entries(store, report, tell)
            _check_tokens(store, report)
        if report.ok:  # an example is read through locations that were checked
            with report.noting(folder):
                _check_repeats(store, folder, report)


def _check_entries(store: LatentStore, report: Report, tell: Callable[[str, int, int], object]) -> None:
    """Locations, order and values of each part."""
    parts = store.files.parts
    for number, part in enumerate(parts):
        tell("files", number, len(parts))
        nans, infinite, unsorted = [], [], 0
        previous = np.full((1, 3), -1)
        with report.noting(part.path):
            for first, places in store.chunks(part):
                values = part.values(np.arange(first, first + len(places)))
                nans += (first + np.flatnonzero(np.isnan(values))).tolist()[:_SHOWN]
                infinite += (first + np.flatnonzero(np.isinf(values))).tolist()[:_SHOWN]
                steps = np.diff(np.concatenate([previous, places]), axis=0)
                unsorted += int(
                    (
                        (steps[:, 0] < 0)
                        | ((steps[:, 0] == 0) & ((steps[:, 1] < 0) | ((steps[:, 1] == 0) & (steps[:, 2] < 0))))
                    ).sum()
                )
                previous = places[-1:]
                _check_lengths(store, first, places, part.path, report)
                if part.starts is not None:
                    examples = np.searchsorted(part.starts, np.arange(first, first + len(places)), "right") - 1
                    if len(wrong := np.flatnonzero(examples != places[:, 0])):
                        at = int(wrong[0])
                        report.add(
                            "latent-location",
                            part.path,
                            int(places[at, 0]),
                            f"example {examples[at]} by ranges.pt",
                            f"entry {first + at}",
                        )
        for code, entries in (("nan", nans), ("infinite", infinite)):
            if entries:
                report.add(
                    code,
                    part.path,
                    f"entries {', '.join(map(str, entries[:5]))}" + (", ..." if len(entries) > 5 else ""),
                )
        if unsorted:
            report.add(
                "layout",
                part.path,
                f"{many(unsorted, 'entry', plural='entries')} out of order: examples are read more slowly",
            )


def _check_lengths(store: LatentStore, first: int, places: np.ndarray, path: Location, report: Report) -> None:
    lengths = store.files.lengths
    if lengths is not None:
        limits = lengths[places[:, 0]]
        if len(wrong := np.flatnonzero(places[:, 1] >= limits)):
            at = int(wrong[0])
            report.add(
                "latent-location", path, int(places[at, 1]), f"a token below {limits[at]}", f"entry {first + at}"
            )


def _check_tokens(store: LatentStore, report: Report) -> None:
    """Each split has the same token ids: files of two runs have other examples under the same numbers."""
    step = max(_TOKENS // max(store.n_tokens, 1), 1)
    for path, copy in store.files.token_copies[1:]:
        first_path, first_copy = store.files.token_copies[0]
        for first in range(0, store.n_examples, step):
            numbers = np.arange(first, min(first + step, store.n_examples))
            if len(wrong := np.argwhere(gather(copy, numbers) != gather(first_copy, numbers))):
                example, token = (wrong[0] + (first, 0)).tolist()
                text = f"tokens: other ids than in {first_path.name}: the files may be of two runs"
                report.add("format", path, text, place=f"example {example}, token {token}")
                break


def _check_repeats(store: LatentStore, folder: Location, report: Report) -> None:
    shown = 0
    for rows in store.stream(256):
        for k in repeats_at(rows)[: _SHOWN - shown]:
            place = f"example {rows.examples[k]}, token {rows.tokens[k]}, feature {rows.features[k]}"
            report.add("duplicate-latent", folder, "several values", "one", place)
            shown += 1
