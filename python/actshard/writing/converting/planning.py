"""Plans a conversion: checks the request, configures the target, and lists losses, before anything is written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from actshard import formats
from actshard.base import _arguments
from actshard.base._arguments import many, name_of
from actshard.base.errors import ArgumentError, NotStoredError, OutOfRangeError
from actshard.base.layers import Layer, plain, several
from actshard.base.location import has_options
from actshard.base.request import Request
from actshard.base.work import refuse_within
from actshard.formats.carrying import ORIGIN, checked_origin
from actshard.formats.target import PATCH_LABELS, Target
from actshard.reading.inputs import fingerprint, store_folders
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.streaming.readable import content_range
from actshard.writing.columns import Decided
from actshard.writing.converting.columns import (
    Columns,
    NumbersMatterError,
    carrying_of,
    choose,
    dropped,
    labels_of,
    left_out,
    without_place,
)
from actshard.writing.creating import Creation, make_target

TOKENS = ("all", "content", "last")
OVERFLOW = ("refuse", "allow")


@dataclass(frozen=True)
class Loss:
    """A property of the source that the result will lack."""

    what: str
    """A stable identifier: dtype, overflow, tokens, padding, columns, texts, layers, labels, logits, router, special_tokens,
    empty_examples, layout, metadata, masks."""
    detail: str

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}"

    def as_dict(self) -> dict[str, str]:
        """Returns plain values for JSON."""
        return {"what": self.what, "detail": self.detail}


@dataclass(frozen=True)
class SourceSelection:
    """What a conversion takes of its source, and how lengths are made equal: arguments of :func:`actshard.convert`."""

    layers: Layer | Sequence[Layer] | Mapping[Layer, Layer] | None = None
    examples: ArrayLike | slice | None = None
    columns: Iterable[str] | Mapping[str, str] | None = None
    tokens: str = "all"
    pad: bool = False
    truncate: bool = False


@dataclass(frozen=True)
class TargetSettings:
    """How a conversion stores its result: arguments of :func:`actshard.convert`.

    Attributes:
        created: time of the result, see :class:`~actshard.formats.target.Spec`.
    """

    dtype: DTypeLike | None
    tokens_per_example: int | None
    shard_bytes: int | str | None
    metadata: Mapping[str, object] | None
    options: Mapping[str, object]
    created: int | None


@dataclass(frozen=True)
class ConversionRequest:
    """A conversion request, checked against the source."""

    store: Store
    format: str
    layers: tuple[Layer, ...]
    names: tuple[Layer, ...]
    """Names of the layers in the result."""
    examples: NDArray[np.int64] | None
    """Example numbers to convert; None: all, in order."""
    tokens: str
    pad: bool
    truncate: bool
    columns: dict[str, str] | None = None
    """Columns to convert, mapped to their names in the result; None: all."""
    cast: bool = False
    """Whether ``dtype=`` was given: rows of any dtype are cast. Otherwise a row of another dtype than the store's is an error."""

    @property
    def kind(self) -> type[Target]:
        """The target class, which declares what its format supports."""
        return formats.get(self.format).target()

    @property
    def groups(self) -> NDArray[np.int64]:
        """Indices of the layers in the source."""
        return np.array([self.store.group_of(la) for la in self.layers], np.int64)

    @property
    def count(self) -> int:
        """Number of examples in the result."""
        return self.store.num_examples if self.examples is None else len(self.examples)

    @cached_property
    def stored(self) -> NDArray[np.int64]:
        """Tokens of each example in the source; of its longest layer if layers differ."""
        return self.stored_of(0, self.count)

    def stored_of(self, first: int, last: int) -> NDArray[np.int64]:
        """:attr:`stored` for positions ``first`` to ``last - 1`` of the result."""
        ids, rows = self.ids(first, last), self.store.rows
        if self.store.contents.units is None:
            return self.without_padding(rows.tokens_of(int(self.groups[0]), np.ascontiguousarray(ids)), ids)
        layer_counts = rows.tokens_of(np.tile(self.groups, len(ids)), np.repeat(ids, len(self.groups)))
        longest: NDArray[np.int64] = (
            self.without_padding(layer_counts, np.repeat(ids, len(self.groups))).reshape(len(ids), -1).max(axis=1)
        )
        return longest

    def without_padding(self, counts: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Subtracts padding from stored token counts.

        A target that stores padded rows with their lengths keeps the padding, unless only last tokens are taken.
        """
        if self.kind.keeps_lengths and self.tokens != "last":
            return counts
        return content_range(self.store, counts, ids)[1]

    def token_ranges(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First token and number of tokens to take of source examples."""
        counts = self.without_padding(self.store.rows.tokens_of(int(self.groups[0]), np.ascontiguousarray(ids)), ids)
        return self.skipped_counts(counts), self.selected_counts(counts)

    def ids(self, first: int, last: int) -> NDArray[np.int64]:
        """Source example numbers of positions ``first`` to ``last - 1`` of the result."""
        return np.arange(first, last) if self.examples is None else self.examples[first:last]

    def selected_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of tokens to take from examples with ``counts`` tokens."""
        if self.tokens == "last":
            return np.minimum(counts, 1)
        if self.tokens == "content":
            return np.maximum(counts - self.store.special_tokens, 0)
        return counts

    def skipped_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of tokens before the first token to take."""
        if self.tokens == "last":
            return np.maximum(counts - 1, 0)
        return np.full_like(counts, self.store.special_tokens if self.tokens == "content" else 0)


def source(
    src: Any,
    format: str | None,
    io: str,
    storage_options: Mapping[str, object] | None = None,
    cache: str | os.PathLike[str] | int | bool | None = None,
    layout: str | os.PathLike[str] | Mapping[str, object] | None = None,
) -> Store:
    """Opens the dataset to convert, unless it is already a store."""
    if isinstance(src, Store):
        if has_options(storage_options):
            raise ArgumentError("storage_options: expected a URL to use them for, found an open store")
        return src
    return open_quietly(src, format, io, "160MiB", storage_options=storage_options, cache=cache, layout=layout)


def check_request(store: Store, format: str, selection: SourceSelection, *, cast: bool = False) -> ConversionRequest:
    """Checks the arguments against the source. ``cast``: see :class:`ConversionRequest`."""
    _arguments.one_of(format, formats.written(), "format")
    layers, examples, tokens = selection.layers, selection.examples, selection.tokens
    if not store.layers:
        raise NotStoredError("contains no hidden states to convert", path=store.path)
    if not _arguments.is_one_of(tokens, TOKENS):
        raise ArgumentError(f"tokens: expected {', '.join(map(repr, TOKENS))}, found {tokens!r}")
    pad, truncate = _arguments.switch(selection.pad, "pad"), _arguments.switch(selection.truncate, "truncate")
    if isinstance(layers, Mapping):
        chosen, names = several(tuple(layers)), several(tuple(layers.values()))
    else:
        chosen = names = store.layers if layers is None else several(layers)
    for layer in chosen:
        store.group_of(layer)
    ids: NDArray[np.int64] | None = None
    if isinstance(examples, slice):
        ids = np.arange(store.num_examples)[examples]
    elif examples is not None:
        array = _arguments.as_array(examples, "examples: expected integers, a slice or a mask")
        if array.dtype == np.bool_ and array.shape == (store.num_examples,):
            ids = np.flatnonzero(array)
        else:
            ids = _arguments.index(examples, "examples")[0]
    if ids is not None and ids.size and (ids.min() < 0 or ids.max() >= store.num_examples):
        raise OutOfRangeError(
            f"examples: expected numbers from 0 to {store.num_examples - 1}, found one out of range",
            path=store.path,
        )
    filtered = store.contents.chosen
    if filtered is not None:  # the dataset and its numbers, so that columns keep their own numbering
        ids, store = filtered.array() if ids is None else filtered.array()[ids], store.whole()
    if ids is not None and not ids.size:
        raise ArgumentError("examples: expected at least one")
    if ids is not None and np.array_equal(ids, np.arange(store.num_examples)):
        ids = None
    columns = choose(store, selection.columns)
    return ConversionRequest(store, format, chosen, names, ids, tokens, pad, truncate, columns, cast)


def configure_target(request: ConversionRequest, dst: str | os.PathLike[str], settings: TargetSettings) -> Target:
    """Returns the target, configured with dtype, tokens per example and metadata."""
    store, format = request.store, request.format
    source_metadata, source_options = described(store, format)
    if request.examples is not None or len(request.layers) < len(store.layers):
        source_options.pop("max_tokens_per_shard", None)  # chosen for all examples; shards would be mostly empty
    if request.tokens != "all":
        source_metadata = _content_only(source_metadata)
    source_options = {k: v for k, v in source_options.items() if k in request.kind.format_options}
    options = request.kind.conversion_options(source_options, settings.options, request.tokens, lambda: _pooled(store))
    result_dtype = store.dtype if settings.dtype is None else _arguments.dtype(settings.dtype)[0]
    counts: NDArray[np.int64] | None = None
    per = settings.tokens_per_example
    if not request.kind.ragged and per is None:
        # Only pad and truncate need all lengths in advance, which may decode the whole source an extra time.
        counts = request.selected_counts(request.stored if request.pad or request.truncate else request.stored_of(0, 1))
        per = int(counts.max() if request.pad else counts.min())
        if per == 0 and not request.pad:
            raise ArgumentError(
                f"an example has no tokens, and {format} requires the same number for all. "
                "Pass pad=True (--pad) to fill it with zeros."
            )
    target = make_target(
        Creation(
            dst,
            format,
            request.names,
            store.d_model,
            result_dtype,
            {**source_metadata, **(settings.metadata or {})},
            request.count,
            per,
            settings.shard_bytes,
            options=options,
            created=settings.created,
        )
    )
    target.content_lengths = partial(_content_lengths, request)
    target.take_dtype(result_dtype)
    if per is not None:
        target.take_tokens(per)
    return target


def _content_lengths(request: ConversionRequest) -> NDArray[np.int64]:
    """Number of tokens of each example without padding, neither the source's nor the target's."""
    return request.selected_counts(content_range(request.store, request.stored, request.ids(0, request.count))[1])


def refuse_target_within(request: ConversionRequest, target: Target) -> None:
    """Raises ArgumentError if the target lies inside of a dataset that is converted. Tasks of a plan need not look again."""
    for folder in store_folders(request.store):
        if folder.is_local:
            refuse_within(target.place(), folder.local)


def conversion_record(
    request: ConversionRequest, overflow: str, settings: TargetSettings, digest: str | None = None
) -> Request:
    """The record of a conversion's request, by the verb or by a plan. :func:`configure_target` has checked the arguments.

    ``digest``: that of the source's files, if it is known.
    """
    store, ids = request.store, request.examples
    dtype, tokens, shard_bytes = settings.dtype, settings.tokens_per_example, settings.shard_bytes
    arguments = {
        "format": request.format,
        "layers": [list(pair) for pair in zip(request.layers, request.names, strict=True)],
        "examples": None if ids is None else f"{len(ids)} numbers, sha256 {_digest(ids)}",
        "columns": None if request.columns is None else [list(pair) for pair in request.columns.items()],
        "tokens": request.tokens,
        "pad": request.pad,
        "truncate": request.truncate,
        "overflow": overflow,
        "dtype": None if dtype is None else name_of(_arguments.dtype(dtype)[0]),
        "tokens_per_example": None if tokens is None else int(tokens),
        "shard_bytes": None if shard_bytes is None else _arguments.size(shard_bytes, "shard_bytes"),
        "metadata": None if settings.metadata is None else dict(settings.metadata),
        "options": {name: value for name, value in settings.options.items() if value is not None},
    }
    return Request.of("convert", arguments, [digest or fingerprint(store)], request.count)


def _digest(numbers: NDArray[np.int64]) -> str:
    return hashlib.sha256(np.ascontiguousarray(numbers, np.int64).tobytes()).hexdigest()[:32]


def prepare_columns(
    request: ConversionRequest, target: Target, *, numbers: bool | None = None, every: bool = False
) -> Columns:
    """Returns the columns to convert, after checking that the target can store them.

    Args:
        request: the request.
        target: its target.
        numbers: see :class:`Columns`.
        every: check all examples and count their texts, for the losses of a conversion that is only planned. Otherwise, if the
            source must be decoded, only the columns of its first unit are checked.

    Raises:
        ArgumentError, NotStoredError: the format cannot store a column's name, type or value.
    """
    columns = columns_for(request, target, numbers=numbers)
    checker = Decided(target, [])
    units = request.store.contents.units
    position = 0
    try:
        while position < request.count:
            ids = request.ids(position, min(position + _COLUMNS_AT_ONCE, request.count))
            unit = None
            if units is not None:
                unit = int(np.searchsorted(units, ids[0], "right")) - 1
                ids = ids[: max(1, int(np.argmin(np.append((ids >= units[unit]) & (ids < units[unit + 1]), False))))]
            try:
                fitted_columns = checker.fit(columns.of(ids, unit, target), position, alike=False)
            except (ArgumentError, NotStoredError) as error:
                remedy = "use columns= (--columns) to rename columns or to leave some out"
                detail = error.detail.removesuffix(".")
                raise type(error)(f"{detail}; {remedy}", path=error.path, code=error.code) from error
            checker.keep(fitted_columns)
            columns.turned |= checker.changes
            position += len(ids)
            if every and target.finds_by_text:
                columns.texts.add(fitted_columns.table, len(ids))
            if unit is not None and not every:
                break
    except NumbersMatterError:
        return prepare_columns(request, target, numbers=True, every=every)
    return columns


_COLUMNS_AT_ONCE = 16_384


def _pooled(store: Store) -> bool:
    """Whether every example is known to have one row. False if counting would require decoding."""
    contents = store.contents
    if contents.one_row_each is not None:
        return contents.one_row_each
    return contents.counts_are_cheap and bool((store.token_counts == 1).all())


def described(store: Store, format: str) -> tuple[dict[str, object], dict[str, object]]:
    """Returns the source's metadata for the target format, as (metadata, options of :func:`actshard.create`).

    Metadata of another format are stored unchanged and restored on conversion back.
    """
    contents, target_carrying = store.contents, formats.get(format).carrying()
    if store.format == format:
        return target_carrying.metadata_again(contents.metadata, contents)
    carrying = carrying_of(contents)
    origin = carrying.origin(contents.metadata)
    if origin is not None and origin.get("format") == format:
        return target_carrying.metadata_again(origin["metadata"], None)
    return target_carrying.metadata_from(
        contents, {"format": store.format, "metadata": carrying.metadata_kept(contents)}
    )


def _content_only(metadata: dict[str, Any]) -> dict[str, object]:
    """Adapts the stored source metadata to examples without special tokens, for a later conversion back."""
    origin = checked_origin(metadata.get(ORIGIN))
    if origin is None or origin.get("format") not in formats.names():
        return metadata
    content_metadata = formats.get(origin["format"]).carrying().content_only(origin["metadata"])
    return {**metadata, ORIGIN: {**origin, "metadata": content_metadata}}


def overflowed(dtype: np.dtype[np.generic] | None, count: int) -> list[Loss]:
    """The loss of finite values that became infinite, if there are any."""
    if not count:
        return []
    return [Loss("overflow", f"{count:,} finite values are too large for {dtype} and are infinite")]


def list_losses(request: ConversionRequest, target: Target, columns: Columns, overflows: int = 0) -> list[Loss]:
    """Lists the properties that the result will lack. ``overflows``: number of finite values that become infinite."""
    store, format = request.store, request.format
    losses: list[Loss] = []
    if target.dtype is not None and target.dtype != store.dtype:
        narrower = target.dtype.itemsize < store.dtype.itemsize or {str(target.dtype), str(store.dtype)} == {
            "float16",
            "bfloat16",
        }
        losses.append(
            Loss(
                "dtype",
                f"{store.dtype} becomes {target.dtype}: " + ("values are rounded" if narrower else "values stay exact"),
            )
        )
    losses += overflowed(target.dtype, overflows)
    counts = request.selected_counts(request.stored)
    if request.tokens != "all":
        lost_tokens = int(request.stored.sum() - counts.sum())
        if lost_tokens:
            losses.append(
                Loss("tokens", f"{many(lost_tokens, 'token', 'is', 'are')} left out: tokens={request.tokens!r}")
            )
    if target.tokens is not None and target.keeping_all is None:
        short, long = counts < target.tokens, counts > target.tokens
        if short.any():
            losses.append(
                Loss(
                    "padding",
                    f"{many(int(short.sum()), 'example', 'is', 'are')} padded with zeros to {many(target.tokens, 'token')}, "
                    + target.padding_note.format(format=format),
                )
            )
        if long.any():
            losses.append(
                Loss(
                    "tokens",
                    f"{many(int(long.sum()), 'example', 'is', 'are')} truncated to {many(target.tokens, 'token')}: "
                    f"{many(int((counts - target.tokens)[long].sum()), 'token', 'is', 'are')} left out",
                )
            )
    losses += _name_losses(request)
    losses += _format_losses(request, target, columns)
    if not target.holds_partial_layers and request.pad and store.contents.lacks_layers:
        losses.append(Loss("layers", "layers that an example lacks are filled with zeros"))
    if target.empty_examples is not None and (counts == 0).any():
        losses.append(
            Loss(
                "empty_examples",
                f"{many(int((counts == 0).sum()), 'example', 'has', 'have')} no tokens: {target.empty_examples}",
            )
        )
    if store.special_tokens and not target.holds_special_tokens and request.tokens == "all":
        losses.append(Loss("special_tokens", "CLS stays as token 0; only the metadata mark it"))
    losses += _column_losses(request, target, columns)
    if target.holds_labels and labels_for(request, target) is None and (labels := _labels(request)) is not None:
        losses.append(
            Loss(
                "labels", f"left out: {labels.shape[1]} for each example are fewer than the tokens that {format} stores"
            )
        )
    losses += _losses_of_parts(request)
    if request.tokens != "all" and target.holds_columns and columns.uncut:
        text = "not cut to the tokens that are kept, although their lists are as long as the examples"
        losses.append(Loss("columns", f"{text}: {', '.join(columns.uncut)}"))
    if request.columns is not None and (out := left_out(store, request.columns)):
        losses.append(Loss("columns", f"left out, because columns= does not list them: {', '.join(out)}"))
    if behind := columns.carrying.left_behind(store.contents):
        losses.append(Loss("columns", f"not converted: {', '.join(behind)}"))
    losses += [Loss("texts", detail) for detail in columns.texts.losses(format)] if target.finds_by_text else []
    keeps_as_columns = target.holds_columns and not target.holds_logits
    if keeps_as_columns and (store.contents.has_logits or store.contents.router_layers):
        losses.append(Loss("layout", "logits and router tensors become columns, which store.logits() does not read"))
    return losses


def _losses_of_parts(request: ConversionRequest) -> list[Loss]:
    """Labels, logits and router tensors of parts that a join of them lacks, because other parts have none or other ones."""
    contents = request.store.contents
    if not contents.joined:
        return []
    ends = np.cumsum([part.num_examples for part in contents.joined])
    ids = request.ids(0, request.count)
    parts = [contents.joined[number] for number in np.unique(np.searchsorted(ends, ids, "right")).tolist()]
    routed = set(contents.router_layers)
    holders = {
        "labels": [] if request.store.labels is not None else [part for part in parts if part.labels is not None],
        "logits": [] if contents.has_logits else [part for part in parts if part.contents.has_logits],
        "router": [part for part in parts if not routed.issuperset(part.contents.router_layers)],
    }
    return [
        Loss(
            what, "left out, because not every part of the join has them alike: " + _names_of([p.path for p in having])
        )
        for what, having in holders.items()
        if having
    ]


def _names_of(paths: Sequence[object]) -> str:
    return ", ".join(map(str, paths[:4])) + (f", and {len(paths) - 4} more" if len(paths) > 4 else "")


def _format_losses(request: ConversionRequest, target: Target, columns: Columns) -> list[Loss]:
    """Losses that the format reports, and metadata that it cannot store."""
    written = columns.names if request.columns is None else list(request.columns.values())
    losses = [Loss(what, detail) for what, detail in target.further_losses(written)]
    losses += _position_losses(request, target)
    if not target.holds_metadata and request.store.format != request.format:
        carrying = columns.carrying
        metadata_names = [
            name for name in carrying.metadata_kept(request.store.contents) if name not in carrying.of_files
        ]
        suffix = ", ..." if len(metadata_names) > 12 else ""
        losses += (
            [Loss("metadata", f"{request.format} has no place for it: {', '.join(metadata_names[:12])}{suffix}")]
            if metadata_names
            else []
        )
    elif target.holds_metadata:
        losses += [Loss("metadata", text) for text in columns.carrying.metadata_left(request.store.contents)]
    return losses


def _position_losses(request: ConversionRequest, target: Target) -> list[Loss]:
    """Reports layers named by position: readers of the result would take the positions for layer numbers of the model."""
    counted = [a for a, b in zip(request.layers, request.names, strict=True) if a == b and isinstance(a, int)]
    has_layer_numbers = "layers" not in request.store.contents.provenance or "layer_ids" in target.spec.options
    if has_layer_numbers or not counted or not target.numbers_layers:
        return []
    shown = ", ".join(map(str, counted))
    text = f"{shown} are positions: {request.store.format} does not store the layers' numbers in the model"
    return [Loss("layers", f"{text}. Pass them: convert(layers={{{counted[0]}: NUMBER, ...}})")]


def _name_losses(request: ConversionRequest) -> list[Loss]:
    """Reports layer names that are strings and are replaced."""
    pairs = zip(request.layers, request.names, strict=True)
    renamed = [f"{plain(a)} becomes {plain(b)}" for a, b in pairs if a != b and isinstance(a, str)]
    suffix = f", and {len(renamed) - 12} more" if len(renamed) > 12 else ""
    return [Loss("layers", f"names are replaced: {', '.join(renamed[:12])}{suffix}")] if renamed else []


def _column_losses(request: ConversionRequest, target: Target, columns: Columns) -> list[Loss]:
    """Columns, logits and router tensors that the target cannot store, or stores as other types."""
    store, format = request.store, request.format
    losses: list[Loss] = []
    if not target.holds_columns:
        lost = dropped(store, request.columns)
        if lost:
            losses.append(
                Loss("columns", f"{format} stores none: {', '.join(lost[:12])}{', ...' if len(lost) > 12 else ''}")
            )
        if store.contents.has_logits:
            losses.append(Loss("logits", f"{format} cannot store them"))
        if store.contents.router_layers:
            losses.append(Loss("router", f"{format} cannot store them"))
    else:
        losses += [Loss("columns", detail) for detail in columns.turned.values()]
        if columns.replaced_routers:
            shown = ", ".join(map(str, columns.replaced_routers))
            losses.append(Loss("router", f"{shown}: left out, because another layer gets that name"))
        if target.only_columns is not None and (lost := without_place(columns, target.only_columns)):
            suffix = ", ..." if len(lost) > 12 else ""
            losses.append(Loss("columns", f"{format} has no place for them: {', '.join(lost[:12])}{suffix}"))
    return losses


def _labels(request: ConversionRequest) -> NDArray[np.uint8] | None:
    """The source's patch labels, unless ``columns=`` does not list a column of them."""
    store = request.store
    is_listed = request.columns is None or request.columns.get(PATCH_LABELS) == PATCH_LABELS
    return labels_of(store) if is_listed or store.labels is not None else None


def labels_for(request: ConversionRequest, target: Target) -> NDArray[np.uint8] | None:
    """Patch labels to convert, uint8 ``(num_examples, patches)``, of the tokens that are kept; None for none."""
    if not target.holds_labels and request.tokens != "last":
        return request.store.labels  # a column of labels is copied as it is, unless it is cut
    labels = _labels(request)
    if labels is None:
        return None
    if request.tokens == "last":
        labels = _last_labels(request, labels)
    if not target.holds_labels:
        return labels
    if target.tokens is None:
        return None
    content = target.tokens - target.special_tokens
    if request.tokens == "last":
        return np.pad(labels, ((0, 0), (0, max(content - 1, 0))))[:, :content]
    return None if labels.shape[1] < content else labels[:, :content]


def _last_labels(request: ConversionRequest, labels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The labels of last tokens, uint8 ``(num_examples, 1)``; 0 for an example without tokens.

    Labels are those of the tokens after the special ones. Formats that do not know how many tokens are special have as many more
    tokens than labels in their longest example.
    """
    examples = np.arange(request.store.num_examples)
    stored = request.store.rows.tokens_of(int(request.groups[0]), examples)
    unlabelled = max(request.store.special_tokens, int((stored - labels.shape[1]).max(initial=0)))
    position = content_range(request.store, stored)[1] - unlabelled - 1
    of_last: NDArray[np.uint8] = np.where(position < 0, 0, labels[examples, np.maximum(position, 0)]).astype(np.uint8)
    return of_last[:, None]


def columns_for(
    request: ConversionRequest, target: Target, numbers: bool | None = None, fillers: Iterable[str] | None = None
) -> Columns:
    """The columns to convert, not yet checked. ``fillers``: as a plan recorded them; None: they are looked for."""
    labels = labels_for(request, target)
    token_ranges = (
        request.token_ranges if request.tokens != "all" or request.store.content_lengths is not None else None
    )
    return Columns(
        request.store,
        target.holds_columns,
        labels,
        is_complete=request.examples is None,
        numbers=numbers,
        chosen=request.columns,
        token_ranges=token_ranges,
        fillers=fillers,
        layers=dict(zip(request.layers, request.names, strict=True)),
    )


def check_lengths(request: ConversionRequest, target: Target, counts: NDArray[np.int64], first: int) -> None:
    """Raises ArgumentError if an example has another length than the target's and pad or truncate does not allow a change.

    ``first`` is the number of the first example of ``counts``, for the message.
    """
    target_tokens = target.tokens
    if target_tokens is None:
        return
    remedies = [
        (
            counts < target_tokens,
            request.pad,
            "pad=True (--pad) pads it with zeros, truncate=True (--truncate) cuts all examples to the shortest",
        ),
        (
            counts > target_tokens,
            request.truncate,
            "truncate=True (--truncate) cuts it, pad=True (--pad) pads all examples to the longest",
        ),
    ]
    if target.keeping_all is not None:
        remedy = f"{target.keeping_all}, tokens='last' keeps one of each example"
        if request.tokens == "last":
            remedy = "an example without tokens has no last one; examples= leaves it out"
        remedies = [(counts != target_tokens, False, remedy)]
    for bad, allowed, remedy in remedies:
        if bad.any() and not allowed:
            i = int(np.flatnonzero(bad)[0])
            raise ArgumentError(
                f"example {first + i}: expected {target_tokens} tokens as {target.format} requires, found {counts[i]}: {remedy}"
            )
