"""actshard opens, reads, writes and checks activation datasets in several formats.

>>> store = actshard.open("path/to/dataset")            # detects the format: saev, lmprobe, zarr, pickle, ...
>>> store.layers, store.d_model, store.dtype
>>> store.gather(store.layers[0], [0, 1, 2], [0, 0, -1])  # (3, d_model), one row per (example, token)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from actshard._native import build_info
from actshard.base.errors import (
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
from actshard.base.layers import Layer
from actshard.looking.stats import Stats
from actshard.reading.opening import concat, open
from actshard.reading.store import Store
from actshard.reading.verifying import Report, verify
from actshard.streaming import Batch, Stream
from actshard.streaming.normalizer import Normalizer
from actshard.streaming.sequences import SequenceBatch, SequenceStream
from actshard.writing import Writer, create
from actshard.writing.converting import Conversion, convert
from actshard.writing.merging import merge

if TYPE_CHECKING:
    from actshard import latents, plan, plot, tokens
    from actshard.looking.reporting import report
    from actshard.looking.sampled.separability import Separability
    from actshard.looking.sampled.similarity import Similarity
    from actshard.looking.sampled.spectrum import Spectrum
    from actshard.plan.runners import run
    from actshard.reading.arrays import LayerArray, Ragged, RowArray
    from actshard.reading.caching import CacheInfo, cache_info, clear_cache
    from actshard.streaming.mixing import MixedBatch, MixedStores, MixedStream, mix
    from actshard.streaming.pairing import PairedBatch, PairedStores, PairedStream, pair
    from actshard.streaming.selection import up_to_last
    from actshard.writing.capturing import Captured, CaptureProgress, capture
    from actshard.writing.converting.estimating import Estimate, estimate
    from actshard.writing.pushing import Pushed, push
    from actshard.writing.staging import Staged, stage

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
    "Normalizer",
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
    "latents",
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

_MODULES = {
    "looking.reporting": ("report",),
    "looking.sampled.separability": ("Separability",),
    "looking.sampled.similarity": ("Similarity",),
    "looking.sampled.spectrum": ("Spectrum",),
    "plan.runners": ("run",),
    "reading.arrays": ("LayerArray", "Ragged", "RowArray"),
    "reading.caching": ("CacheInfo", "cache_info", "clear_cache"),
    "streaming.mixing": ("MixedBatch", "MixedStream", "MixedStores", "mix"),
    "streaming.pairing": ("PairedBatch", "PairedStream", "PairedStores", "pair"),
    "streaming.selection": ("up_to_last",),
    "writing.capturing": ("CaptureProgress", "Captured", "capture"),
    "writing.converting.estimating": ("Estimate", "estimate"),
    "writing.pushing": ("Pushed", "push"),
    "writing.staging": ("Staged", "stage"),
}
_ON_FIRST_USE = {name: module for module, names in _MODULES.items() for name in names}
"""Names that are imported on first use, with their modules, so that ``import actshard`` stays fast."""


def __getattr__(name: str) -> object:
    if name in ("latents", "plan", "plot", "tokens"):
        return importlib.import_module(f"actshard.{name}")
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'actshard' has no attribute {name!r}")
    attribute = getattr(importlib.import_module(f"actshard.{_ON_FIRST_USE[name]}"), name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


_SLOW = {
    "debug": "this is a debug build of actshard: results are correct, but it is many times slower",
    "demo": "this is a demo build of actshard: not optimized, and without remote stores. Install a complete one: pip install .",
}
if build_info()["profile"] in _SLOW:
    import warnings

    warnings.warn(_SLOW[build_info()["profile"]], RuntimeWarning, stacklevel=2)  # noqa: TID251  # about the build, and no ActshardWarning
