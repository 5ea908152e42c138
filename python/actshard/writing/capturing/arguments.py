"""Checks the arguments of a capture: four groups of settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from numpy.typing import DTypeLike

from actshard.base import _arguments
from actshard.base._arguments import whole
from actshard.base.errors import ArgumentError, ArgumentTypeError
from actshard.base.layers import Layer, one, several
from actshard.formats import registry
from actshard.writing.capturing.choosing import choice_of
from actshard.writing.capturing.job import InputSettings, ModelSettings, OutputSettings, RunSettings
from actshard.writing.capturing.records import records_of
from actshard.writing.capturing.running import OWN_COLUMNS, CaptureProgress, OnNonfinite

if TYPE_CHECKING:
    import torch


def model_settings(
    model: object,
    layers: object,
    dtype: DTypeLike | None,
    revision: str | None,
    device: torch.device | str | int | None,
    options: Mapping[str, object] | None,
) -> ModelSettings:
    """Checks the arguments that name a model, as of :func:`actshard.capture`."""
    return ModelSettings(model, revision, device, _mapping(options, "model_options"), layers_of(layers), dtype)


def input_settings(
    texts: object,
    tokens: object,
    tokenizer: object,
    text: str | None,
    columns: Sequence[str] | None,
    *,
    special_tokens: bool,
    max_tokens: int | None,
    truncate: bool,
) -> InputSettings:
    """Checks the arguments that name the texts and how they are encoded."""
    return InputSettings(
        records_of(texts),
        tokenizer,
        text,
        column_names(columns),
        _arguments.switch(special_tokens, "special_tokens"),
        None if max_tokens is None else whole(max_tokens, "max_tokens", 1),
        _arguments.switch(truncate, "truncate"),
        choice_of(tokens),
    )


def output_settings(
    path: str | os.PathLike[str],
    format: str,
    metadata: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
    *,
    pad: bool,
    shard_bytes: int | str | None,
    part: tuple[int, int] | None = None,
    resume: bool,
) -> OutputSettings:
    """Checks the arguments that describe the dataset."""
    _arguments.one_of(format, registry.written(), "format")
    return OutputSettings(
        _arguments.local_path(path, "path", "Capture to a local folder and upload it with actshard.push."),
        format,
        dict(_mapping(metadata, "metadata") or {}),
        dict(_mapping(options, "options") or {}),
        _arguments.switch(pad, "pad"),
        shard_bytes,
        part_of(part),
        _arguments.switch(resume, "resume"),
    )


def run_settings(
    batch_tokens: int | None,
    memory: int | str,
    on_nonfinite: OnNonfinite,
    progress: Callable[[CaptureProgress], object] | None = None,
) -> RunSettings:
    """Checks the arguments of running a model."""
    _arguments.check_progress(progress)
    if not _arguments.is_one_of(on_nonfinite, ("refuse", "count")):
        raise ArgumentError(f'on_nonfinite: expected "refuse" or "count", found {on_nonfinite!r:.80}')
    return RunSettings(
        None if batch_tokens is None else whole(batch_tokens, "batch_tokens", 1),
        _arguments.size(memory, "memory"),
        on_nonfinite,
        progress,
    )


def _mapping(value: Mapping[str, object] | None, name: str) -> Mapping[str, object] | None:
    if value is not None and not isinstance(value, Mapping):
        raise ArgumentTypeError(f"{name}: expected a mapping, found {type(value).__name__}")
    return value


def layers_of(layers: object) -> tuple[Layer, ...] | None:
    """Checks a ``layers=`` argument: ``"all"`` or names."""
    if isinstance(layers, str) and layers == "all":
        return None
    return several([one(layers)] if isinstance(layers, int | str) else layers)


def part_of(part: object) -> tuple[int, int] | None:
    """Checks a ``part=`` argument: ``(i, n)`` with 0 <= i < n."""
    if part is None:
        return None
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise ArgumentError(f"part: expected (i, n), found {part!r:.100}")
    count = whole(part[1], "part", 1, 99_999)
    return whole(part[0], "part", 0, count - 1), count


def column_names(columns: Iterable[object] | None) -> tuple[str, ...] | None:
    """Checks a ``columns=`` argument: None for all, or names."""
    if columns is None:
        return None
    names: list[str] = []
    for name in (columns,) if isinstance(columns, str) else columns:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"columns: expected names, found {name!r:.80}")
        if name in OWN_COLUMNS:
            raise ArgumentError(f"columns: {name!r} is a column that capture writes itself")
        names.append(name)
    return tuple(names)
