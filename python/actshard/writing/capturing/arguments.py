"""Checks the arguments of a capture, and makes its job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import DTypeLike

from actshard.base import _arguments
from actshard.base._arguments import whole
from actshard.base.errors import ArgumentError, ArgumentTypeError
from actshard.base.layers import Layer, one, several
from actshard.formats import registry
from actshard.writing.capturing.choosing import choice_of
from actshard.writing.capturing.job import CaptureJob, InputSettings, ModelSettings, OutputSettings, RunSettings
from actshard.writing.capturing.records import records_of
from actshard.writing.capturing.running import OWN_COLUMNS, CaptureProgress, OnNonfinite


def job_of(
    model: Any,
    texts: Any,
    path: str | os.PathLike[str],
    format: str,
    *,
    layers: Any,
    tokens: Any,
    tokenizer: Any,
    text: str | None,
    columns: Sequence[str] | None,
    dtype: DTypeLike | None,
    special_tokens: bool,
    max_tokens: int | None,
    truncate: bool,
    batch_tokens: int | None,
    memory: int | str,
    on_nonfinite: OnNonfinite,
    resume: bool,
    part: tuple[int, int] | None,
    revision: str | None,
    device: Any,
    model_options: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    pad: bool,
    shard_bytes: int | str | None,
    options: Mapping[str, Any] | None,
    progress: Callable[[CaptureProgress], object] | None,
) -> CaptureJob:
    """Returns the job of a capture, whose arguments are those of :func:`actshard.capture`. It loads the model."""
    _arguments.check_progress(progress)
    if not _arguments.is_one_of(on_nonfinite, ("refuse", "count")):
        raise ArgumentError(f'on_nonfinite: expected "refuse" or "count", found {on_nonfinite!r:.80}')
    _arguments.one_of(format, registry.written(), "format")
    for name, value in (("metadata", metadata), ("options", options), ("model_options", model_options)):
        if value is not None and not isinstance(value, Mapping):
            raise ArgumentTypeError(f"{name}: expected a mapping, found {type(value).__name__}")
    switch = _arguments.switch
    return CaptureJob(
        ModelSettings(model, revision, device, model_options, layers_of(layers), dtype),
        InputSettings(
            records_of(texts),
            tokenizer,
            text,
            column_names(columns),
            switch(special_tokens, "special_tokens"),
            None if max_tokens is None else _arguments.whole(max_tokens, "max_tokens", 1),
            switch(truncate, "truncate"),
            choice_of(tokens),
        ),
        OutputSettings(
            _arguments.local_path(path, "path", "Capture to a local folder and upload it with actshard.push."),
            format,
            dict(metadata or {}),
            part_of(part),
            switch(resume, "resume"),
            {"pad": switch(pad, "pad"), "shard_bytes": shard_bytes, "options": dict(options or {})},
        ),
        RunSettings(
            None if batch_tokens is None else _arguments.whole(batch_tokens, "batch_tokens", 1),
            _arguments.size(memory, "memory"),
            on_nonfinite,
            progress,
        ),
    )


def layers_of(layers: Any) -> tuple[Layer, ...] | None:
    """Checks a ``layers=`` argument: ``"all"`` or names."""
    if isinstance(layers, str) and layers == "all":
        return None
    return several([one(layers)] if isinstance(layers, int | str) else layers)


def part_of(part: Any) -> tuple[int, int] | None:
    """Checks a ``part=`` argument: ``(i, n)`` with 0 <= i < n."""
    if part is None:
        return None
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise ArgumentError(f"part: expected (i, n), found {part!r:.100}")
    count = whole(part[1], "part", 1, 99_999)
    return whole(part[0], "part", 0, count - 1), count


def column_names(columns: Any) -> tuple[str, ...] | None:
    """Checks a ``columns=`` argument: None for all, or names."""
    if columns is None:
        return None
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    bad = next((name for name in names if not isinstance(name, str)), None)
    if bad is not None:
        raise ArgumentTypeError(f"columns: expected names, found {bad!r:.80}")
    conflict = next((name for name in names if name in OWN_COLUMNS), None)
    if conflict is not None:
        raise ArgumentError(f"columns: {conflict!r} is a column that capture writes itself")
    return names
