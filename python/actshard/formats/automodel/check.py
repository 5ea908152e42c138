"""Checks of NeMo Automodel caches; see docs/formats/automodel.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.errors import ActshardError
from actshard.formats.automodel.files import MANIFEST, WEIGHTS, DraftManifest, StackedTensor, header_of, shards_of
from actshard.formats.automodel.read import StackedCache
from actshard.formats.contents import Options
from actshard.formats.format import Tell
from actshard.formats.per_token import check_token_values
from actshard.formats.report import Report
from actshard.location import Location

_AT_ONCE = 1 << 22
"""Number of indices read at once."""


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks the manifest, the list of shards, every header, token ids, masks, and the indices of a top-k distribution."""
    try:
        manifest = DraftManifest.of(root)
    except ActshardError as error:
        report.error(error, root / MANIFEST, error.code or "metadata")
        return
    shards: list[Location] = []
    with report.noting(root):
        shards = shards_of(root, manifest)
    for number, shard in enumerate(shards):
        tell("shards", number, len(shards))
        with report.noting(shard):
            report.count("files")
            report.count("bytes", shard.regular().size)
            header = header_of(shard, manifest, number)
            if manifest.top_k:
                _check_indices(shard, header["target_probs_indices"], manifest, report)
    if report.ok:
        with report.noting(root):
            cache = StackedCache(root, Options.of(root))
            vocabulary = cache.manifest.fields.value.get("target_vocab_size")
            most = vocabulary if type(vocabulary) is int and 0 < vocabulary < 1 << 31 else 1 << 31
            check_token_values(cache.columns, report, lambda example: shards[example // manifest.shard_size], most)
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
        found: NDArray[Any] = np.frombuffer(shard.read(tensor.start + 4 * first, 4 * n), "<i4")
        wrong = np.flatnonzero((found < 0) | (found >= manifest.draft))
        if wrong.size:
            at = first + int(wrong[0])
            report.add(
                "address-out-of-range",
                shard,
                int(found[wrong[0]]),
                f"an index of the draft vocabulary, 0 to {manifest.draft - 1}",
                f"byte {tensor.start + 4 * at}, tensor 'target_probs_indices'",
            )
            return
