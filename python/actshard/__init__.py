"""actshard opens, reads, writes and checks activation datasets in several formats.

>>> store = actshard.open("path/to/dataset")            # detects the format: saev, lmprobe, zarr, pickle, ...
>>> store.layers, store.d_model, store.dtype
>>> store.gather(store.layers[0], [0, 1, 2], [0, 0, -1])  # (3, d_model), one row per (example, token)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from actshard._native import build_info
from actshard.converting import Conversion, convert
from actshard.errors import (
    ActshardError,
    ActshardWarning,
    ArgumentError,
    ArgumentTypeError,
    ChangedInputError,
    ClosedError,
    DiskFullError,
    DtypeError,
    ExistsError,
    FileAccessError,
    FormatError,
    HeaderError,
    InternalError,
    InterruptedReadError,
    LayerError,
    LockedError,
    LostWorkerError,
    MissingExtraError,
    MissingFileError,
    NoMemoryError,
    NotAFileError,
    NotStoredError,
    OutOfRangeError,
    OverflowWarning,
    TasksFailedError,
    TruncatedFileError,
    UnfinishedError,
    UnknownFormatError,
    UnsafePickleError,
    UnsupportedError,
)
from actshard.layers import Layer
from actshard.merging import merge
from actshard.opening import concat, open
from actshard.stats import Stats
from actshard.store import Store
from actshard.stream import Batch, Stream
from actshard.stream.sequences import SequenceBatch, SequenceStream
from actshard.verifying import Report, verify
from actshard.writing import Writer, create

if TYPE_CHECKING:
    from actshard import plan, plot, tokens
    from actshard.arrays import LayerArray, Ragged, RowArray
    from actshard.caching import CacheInfo, cache_info, clear_cache
    from actshard.capturing import Captured, CaptureProgress, capture
    from actshard.converting.estimating import Estimate, estimate
    from actshard.mixing import MixedBatch, MixedStores, MixedStream, mix
    from actshard.pairing import PairedBatch, PairedStores, PairedStream, pair
    from actshard.pushing import Pushed, push
    from actshard.reporting import report
    from actshard.runners import run
    from actshard.sampled.separability import Separability
    from actshard.sampled.similarity import Similarity
    from actshard.sampled.spectrum import Spectrum
    from actshard.staging import Staged, stage
    from actshard.stream.supervised import up_to_last

__version__ = build_info()["version"]

__all__ = [
    "ActshardError",
    "ActshardWarning",
    "ArgumentError",
    "ArgumentTypeError",
    "Batch",
    "CacheInfo",
    "CaptureProgress",
    "Captured",
    "ChangedInputError",
    "ClosedError",
    "Conversion",
    "DiskFullError",
    "DtypeError",
    "Estimate",
    "ExistsError",
    "FileAccessError",
    "FormatError",
    "HeaderError",
    "InternalError",
    "InterruptedReadError",
    "Layer",
    "LayerArray",
    "LayerError",
    "LockedError",
    "LostWorkerError",
    "MissingExtraError",
    "MissingFileError",
    "MixedBatch",
    "MixedStores",
    "MixedStream",
    "NoMemoryError",
    "NotAFileError",
    "NotStoredError",
    "OutOfRangeError",
    "OverflowWarning",
    "PairedBatch",
    "PairedStores",
    "PairedStream",
    "Pushed",
    "Ragged",
    "Report",
    "RowArray",
    "Separability",
    "SequenceBatch",
    "SequenceStream",
    "Similarity",
    "Spectrum",
    "Staged",
    "Stats",
    "Store",
    "Stream",
    "TasksFailedError",
    "TruncatedFileError",
    "UnfinishedError",
    "UnknownFormatError",
    "UnsafePickleError",
    "UnsupportedError",
    "Writer",
    "__version__",
    "build_info",
    "cache_info",
    "capture",
    "clear_cache",
    "concat",
    "convert",
    "create",
    "estimate",
    "merge",
    "mix",
    "open",
    "pair",
    "plan",
    "plot",
    "push",
    "report",
    "run",
    "stage",
    "tokens",
    "up_to_last",
    "verify",
]

_ON_FIRST_USE = {
    "LayerArray": "arrays", "Ragged": "arrays", "RowArray": "arrays",
    "CacheInfo": "caching", "cache_info": "caching", "clear_cache": "caching",
    "Estimate": "converting.estimating", "estimate": "converting.estimating",
    "CaptureProgress": "capturing", "Captured": "capturing", "capture": "capturing",
    "MixedBatch": "mixing", "MixedStream": "mixing", "MixedStores": "mixing", "mix": "mixing",
    "PairedBatch": "pairing", "PairedStream": "pairing", "PairedStores": "pairing", "pair": "pairing",
    "Pushed": "pushing", "push": "pushing",
    "report": "reporting",
    "Separability": "sampled.separability", "Similarity": "sampled.similarity", "Spectrum": "sampled.spectrum",
    "run": "runners",
    "Staged": "staging", "stage": "staging",
    "up_to_last": "stream.supervised",
}  # fmt: skip
"""Names that are imported on first use, with their modules, so that ``import actshard`` stays fast."""


def __getattr__(name: str) -> object:
    if name in ("plan", "plot", "tokens"):
        return importlib.import_module(f"actshard.{name}")
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'actshard' has no attribute {name!r}")
    attribute = getattr(importlib.import_module(f"actshard.{_ON_FIRST_USE[name]}"), name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_SLOW = {
    "debug": "this is a debug build of actshard: results are correct, but it is many times slower",
    "demo": "this is a demo build of actshard: not optimized, and without remote stores. Install a complete one: pip install .",
}
if build_info()["profile"] in _SLOW:
    import warnings

    warnings.warn(_SLOW[build_info()["profile"]], RuntimeWarning, stacklevel=2)  # noqa: TID251  # about the build, and no ActshardWarning
