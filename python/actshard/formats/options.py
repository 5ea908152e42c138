"""Types of the options that :func:`actshard.create` and :func:`actshard.convert` pass to a format.

For type checkers and editors. Each format's ``Target.format_options`` documents meaning, default and limits of its options, and
rejects other options at run time. A test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from actshard.base.layers import Layer

DraftKindName = Literal["eagle3", "dspark", "dflash"]
"""Kinds of files of draft-model examples."""


FormatVersion = Literal[2, 3, 4]
"""Versions of a format: 2 or 3 of Zarr, 2 or 4 of DeepSpec's target caches."""


ScaleKind = Literal["token", "whole", "layer", "channel", "block32", "block64"]
"""Kinds of scales: Zarr stores have no "whole", and speculators' files no blocks."""


class SaevOptions(TypedDict, total=False):
    """Options of saev."""

    protocol: Literal["2.1", "2.0"]
    cls_token: bool
    max_tokens_per_shard: int


class LmprobeOptions(TypedDict, total=False):
    """Options of lmprobe."""

    storage: Literal["pooled", "full_sequence"]
    pooling: str
    model: str
    revision: str


class ZarrOptions(TypedDict, total=False):
    """Options of Zarr stores."""

    version: FormatVersion
    pack: Literal["lossless", "zstd", "blosc"]
    scales: ScaleKind
    chunk_tokens: int
    t_max: int


class PickleOptions(TypedDict, total=False):
    """Options of pickle shards."""

    compress: bool
    level: int
    machine_id: int
    total_machines: int
    samples_per_machine: int


class DeepspecOptions(TypedDict, total=False):
    """Options of DeepSpec target caches."""

    version: FormatVersion
    index_record_size: Literal[56, 60, 64]
    last: Layer | None
    layer_ids: Sequence[int]


class SpeculatorsOptions(TypedDict, total=False):
    """Options of speculators' training data."""

    last: Layer | None
    scales: ScaleKind


class SpecForgeOptions(TypedDict, total=False):
    """Options of SpecForge hidden states."""

    kind: DraftKindName
    last: Layer | None
    file_group_size: int
    gz: bool


class AutomodelOptions(TypedDict, total=False):
    """Options of NeMo Automodel caches."""

    shard_size: int
    last: Layer | None
    layer_ids: Sequence[int]
    pad_token_id: int


class ModeloptOptions(TypedDict, total=False):
    """Options of Model-Optimizer hidden states."""

    last: Layer | None


class AngelSlimOptions(TypedDict, total=False):
    """Options of AngelSlim hidden states."""

    kind: DraftKindName
    last: Layer | None
    file_group_size: int


class EagleOptions(TypedDict, total=False):
    """Options of EAGLE hidden states."""

    last: Layer | None


class HfArrowOptions(TypedDict, total=False):
    """Options of Arrow directories."""

    rows: Literal["sequences", "vectors"]


class NpyOptions(TypedDict, total=False):
    """Folders of .npy files have no options."""


class SafetensorsOptions(TypedDict, total=False):
    """Folders of .safetensors files have no options."""


class FormatOptions(
    SaevOptions,
    LmprobeOptions,
    ZarrOptions,
    PickleOptions,
    DeepspecOptions,
    SpeculatorsOptions,
    SpecForgeOptions,
    AutomodelOptions,
    ModeloptOptions,
    AngelSlimOptions,
    EagleOptions,
    HfArrowOptions,
    NpyOptions,
    SafetensorsOptions,
    total=False,
):
    """The options of all formats that are written."""
