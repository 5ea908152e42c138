"""``actshard convert --dry-run``: reports files, sizes and losses of a conversion without writing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike, DTypeLike

from actshard import formats
from actshard.base import _arguments
from actshard.base.errors import ActshardError, ArgumentError, NotStoredError, boundary
from actshard.base.layers import Layer
from actshard.formats.target import Target
from actshard.reading.inputs import fingerprint
from actshard.reading.store import Store
from actshard.writing.converting.planning import (
    OVERFLOW,
    Loss,
    SourceSelection,
    TargetSettings,
    check_request,
    configure_target,
    conversion_record,
    list_losses,
    prepare_columns,
    refuse_target_within,
    source,
)
from actshard.writing.converting.predicting import predict
from actshard.writing.converting.segments import Layout


@dataclass(frozen=True)
class Preview:
    """Preview of a conversion to one format."""

    format: str
    path: Path
    examples: int
    layers: tuple[Layer, ...]
    rows: int
    dtype: str | None
    shards: int
    """Number of files that contain rows."""
    files: int
    """Number of all files (inodes)."""
    bytes: int
    """Bytes of all files."""
    uncertainty: int
    """Bytes by which two samples of a compressed result disagree about ``bytes``."""
    losses: tuple[Loss, ...]
    refused: str | None = None
    """Why the conversion is not possible, with a remedy; None if it is."""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "path": str(self.path),
            "layers": list(self.layers),
            "losses": [x.as_dict() for x in self.losses],
        }


def preview(
    src: object,
    dst: str | os.PathLike[str],
    format: str | None = None,
    *,
    layers: Layer | Sequence[Layer] | Mapping[Layer, Layer] | None = None,
    examples: ArrayLike | slice | None = None,
    columns: Iterable[str] | Mapping[str, str] | None = None,
    tokens: _arguments.Kept = "all",
    dtype: DTypeLike | None = None,
    pad: bool = False,
    truncate: bool = False,
    tokens_per_example: int | None = None,
    shard_bytes: int | str | None = None,
    src_format: str | None = None,
    overflow: _arguments.Overflow = "refuse",
    storage_options: Mapping[str, object] | None = None,
    cache: str | os.PathLike[str] | int | bool | None = None,
    **options: object,
) -> list[Preview]:
    """Returns previews of :func:`actshard.convert` for one format, or for all formats (None). Writes nothing to ``dst``.

    Small conversions are written to a temporary folder, so that files and bytes are exact, and values too large for a narrower
    ``dtype`` are counted. Of larger ones, samples are written; see :mod:`~actshard.writing.converting.predicting`.
    """
    if not _arguments.is_one_of(overflow, OVERFLOW):
        raise ArgumentError(f"overflow: expected {' or '.join(map(repr, OVERFLOW))}, found {overflow!r}")
    root = _arguments.local_path(dst, "dst")
    with boundary(root, "convert"):
        store = source(src, src_format, "auto", storage_options, cache)
        digest = fingerprint(store)
        selection = SourceSelection(layers, examples, columns, tokens, pad, truncate)
        settings = TargetSettings(dtype, tokens_per_example, shard_bytes, None, options, None)
        return [
            _preview(store, root, name, format is not None, selection, settings, overflow, digest)
            for name in ((format,) if format is not None else formats.written())
        ]


def _preview(
    store: Store,
    root: Path,
    name: str,
    only: bool,
    selection: SourceSelection,
    settings: TargetSettings,
    overflow: str,
    digest: str,
) -> Preview:
    """Preview for one format. ``only``: the user named this format, so errors about the source are raised."""
    # check_request() raises for unknown names.
    kind = formats.get(name).target() if name in formats.written() else Target
    if not only:
        format_options = {k: v for k, v in settings.options.items() if k in kind.format_options}
        shard_bytes = settings.shard_bytes if kind.takes_shard_bytes else None
        settings = replace(settings, options=format_options, shard_bytes=shard_bytes)
    try:
        request = check_request(store, name, selection, cast=settings.dtype is not None)
        target = configure_target(request, root, settings)
        refuse_target_within(request, target)
        target.request = conversion_record(request, overflow, settings, digest)
        columns = prepare_columns(request, target, every=True)  # before the lengths, which are then cached
        layout = Layout.of(request, target)
        layout.settle(request, target)
        if not kind.ragged:
            settings = replace(settings, tokens_per_example=target.tokens)
        size = predict(request, target, layout, settings, overflow)
        return Preview(
            name,
            root if target.names_itself else target.place(),
            request.count,
            request.names,
            int(layout.rows(len(request.layers)).sum()),
            str(target.dtype),
            size.shards,
            size.files,
            size.bytes,
            size.uncertainty,
            tuple(list_losses(request, target, columns, size.overflows)),
        )
    except ActshardError as error:
        if only and not isinstance(error, ArgumentError | TypeError | NotStoredError):
            raise
        return Preview(name, root, 0, (), 0, None, 0, 0, 0, 0, (), refused=error.detail)
