"""Checks of NeMo Automodel caches; see docs/formats/automodel.md."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base.location import Location
from actshard.formats.automodel.files import WEIGHTS, DraftManifest, StackedTensor
from actshard.formats.automodel.read import StackedCache
from actshard.formats.contents import Options
from actshard.formats.format import Tell
from actshard.formats.per_token import check_token_values
from actshard.formats.report import Report

_AT_ONCE = 1 << 22
"""Number of indices read at once."""


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks the manifest, the list of shards, every header, token ids, masks, and the indices of a top-k distribution."""
    cache = report.faults.parse(root, lambda: StackedCache(root, Options.of(root), report.faults))
    shards, headers = ([], []) if cache is None else (cache.shards, cache.headers)
    for number, (shard, header) in enumerate(zip(shards, headers, strict=True)):
        tell("shards", number, len(shards))
        report.count("files")
        if header and cache is not None:
            report.count("bytes", shard.regular().size)
            if cache.manifest.top_k:
                with report.noting(shard):
                    _check_indices(shard, header["target_probs_indices"], cache.manifest, report)
    if report.ok and cache is not None:
        with report.noting(root):
            vocabulary = cache.manifest.fields.value.get("target_vocab_size")
            most = vocabulary if type(vocabulary) is int and 0 < vocabulary < 1 << 31 else 1 << 31
            size = cache.manifest.shard_size
            check_token_values(cache.columns, report, lambda example: shards[example // size], most)
    for name in WEIGHTS:
        if (root / name).exists():
            with report.noting(root / name):
                _native.safetensors_header(root / name)
    if root.lists:
        for entry in root.entries("*.tmp"):
            report.add("unlisted-file", root / entry.name, "a temporary file of an interrupted writer")


def _check_indices(shard: Location, tensor: StackedTensor, manifest: DraftManifest, report: Report) -> None:
    """Checks that indices are within the draft vocabulary."""
    total = int(np.prod(tensor.shape, dtype=np.int64))
    for first in range(0, total, _AT_ONCE):
        n = min(_AT_ONCE, total - first)
        indices: NDArray[np.int32] = np.frombuffer(shard.read(tensor.start + 4 * first, 4 * n), "<i4")
        wrong = np.flatnonzero((indices < 0) | (indices >= manifest.draft))
        if wrong.size:
            position = first + int(wrong[0])
            report.add(
                "address-out-of-range",
                shard,
                int(indices[wrong[0]]),
                f"an index of the draft vocabulary, 0 to {manifest.draft - 1}",
                f"byte {tensor.start + 4 * position}, tensor 'target_probs_indices'",
            )
            return
