"""``Recipe``: everything that the bytes of a token cache depend on, as data, and the cache's ledger.

Used by ``build_cache`` and by a plan's commit: equal recipes give equal caches. A recipe contains only a tokenizer's digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from actshard.base import errors
from actshard.base.errors import ExistsError
from actshard.base.location import Location
from actshard.tokens import formats, placing
from actshard.tokens import ledger as ledgers
from actshard.tokens.formats import ChatFormat, RowFormat
from actshard.tokens.ledger import CONSOLIDATED, OURS, SHARDED, Ledger
from actshard.tokens.sources import AnySource

ARRAYS = ("offsets", "data")


@dataclass(frozen=True)
class Recipe:
    """The inputs and options of a cache.

    Attributes:
        sources: files of records, in the order of their rows.
        format: the format of the rows.
        tokenizer: the tokenizer's digest; None for formats without one.
        options: ``dtype``, ``enforce_eos`` and ``enforce_bos``.
        skip: whether unusable records are skipped.
        layout, storage, keep_shards: as for :func:`~actshard.tokens.build_cache`.
        fields: stored fields and their dtypes.
        metadata: the ledger's ``preprocessor_metadata``.
        tells_time: whether rows depend on the time of the build.
    """

    sources: Sequence[AnySource]
    format: RowFormat
    tokenizer: str | None
    options: Mapping[str, object]
    skip: bool
    layout: str
    storage: str
    keep_shards: bool
    fields: Mapping[str, np.dtype[np.generic]]
    metadata: Mapping[str, object]
    tells_time: bool

    # -- identities ------------------------------------------------------------------------------------------------

    @cached_property
    def settings(self) -> dict[str, object]:
        """Everything that affects rows. The tokenizer, which may have megabytes, is included as a digest."""
        return settings_of(self.format, self.tokenizer, self.options, skip=self.skip)

    def identity(self, source: AnySource, now: Sequence[object] | None) -> str:
        """Identifies a source's shard. ``now`` is the time passed to chat templates."""
        inputs = {"settings": self.settings, "source": source.identity(), "storage": self.shard_storage}
        return digest(inputs | {"now": now} if self.tells_time else inputs)

    def whole(self) -> dict[str, object]:
        """Identifies a finished cache."""
        return {
            "settings": digest(self.settings),
            "sources": digest([source.identity() for source in self.sources]),
            "layout": self.layout,
            "storage": self.storage,
        }

    @property
    def shard_storage(self) -> str:
        """Storage of shards. Shards to be consolidated are plain, so that rows are compressed only once, at the end."""
        return self.storage if self.layout == SHARDED else "plain"

    @property
    def reads_shards(self) -> bool:
        """Whether shards are read again for consolidation. A single plain shard is linked instead."""
        return self.layout == CONSOLIDATED and (len(self.sources) > 1 or self.storage != "plain")

    # -- the finished cache ----------------------------------------------------------------------------------------

    def found(
        self, out: Path, *, overwrite: bool = False, remedy: str = "pass overwrite=True to replace it"
    ) -> Ledger | None:
        """The ledger of the finished cache at a path if it was built from this recipe; None if there is no cache.

        Raises:
            ExistsError: another cache exists, and ``overwrite`` is False.
        """
        if not os.path.lexists(out / ledgers.NAME):
            return None
        try:
            ledger = ledgers.read(out)
        except errors.ActshardError as error:
            if overwrite:
                return None
            raise ExistsError(f"an unreadable cache exists ({error.detail}); {remedy}", path=out) from error
        differs = self._difference(ledger)
        if differs is None:
            try:
                ledgers.check_files(Location.at(out), ledger)
                return ledger
            except errors.ActshardError as error:  # of a shard's ledger, or a missing file
                differs = f"is damaged ({error})"
        if not overwrite:
            raise ExistsError(f"a finished cache exists that {differs}; {remedy}", path=out)
        return None

    def _difference(self, ledger: Ledger) -> str | None:
        """The first difference between a finished cache and this recipe, as text; None if they are equal."""
        differs = name_difference(ledger, self.metadata)
        differs = differs or settings_difference(ledger, self.parts, self.metadata, self.settings)
        if differs is not None:
            return f"was built with {differs}"
        metadata = ledger.actshard
        if metadata is None:  # written by Levanter: only the names of shards can be compared
            names = [source.shard for source in self.sources]
            if list(ledger.finished_shards) != names:
                return f"has the shards {_short(list(ledger.finished_shards))} instead of {_short(names)}"
            return None
        for key, value in self.whole().items():
            if metadata.get(key) == value or (key == "settings" and "parts" in metadata):
                continue
            what = {
                "settings": "was built with other settings",
                "sources": "was built from other files, or from older versions of these",
            }
            return what.get(key, f"has the {key} {metadata.get(key)} instead of {value}")
        return None

    @property
    def parts(self) -> dict[str, str]:
        """A digest of each part of the settings."""
        return parts_of(self.format, self.tokenizer, {**self.options, "on_error": "skip" if self.skip else "raise"})

    @property
    def kept(self) -> list[str]:
        """Names of the shards that the finished cache contains."""
        return [source.shard for source in self.sources] if self.keep_shards or self.layout == SHARDED else []

    @property
    def entries(self) -> list[str]:
        """Entries of the finished cache's folder, without the ledger."""
        fields = list(dict.fromkeys(name.split("/")[0] for name in self.fields))
        return self.kept if self.layout == SHARDED else fields + self.kept

    def refuse_foreign(self, out: Path) -> None:
        """Raises ExistsError for files in the way. Called before a build, which may take hours."""
        try:
            existing = placing.owned(out)
        except errors.ActshardError as error:
            raise ExistsError(
                f"cannot replace this cache: its ledger cannot be read ({error.detail}), so its files are unknown; "
                "remove the folder, or choose another",
                path=out,
            ) from error
        arrays = [f"{name}/{part}" for name in self.fields for part in ARRAYS]
        inner = [f"{shard}/{path}" for shard in self.kept for path in (ledgers.NAME, *arrays)]
        placing.refuse_foreign(out, [ledgers.NAME, *(arrays if self.layout == CONSOLIDATED else []), *inner], existing)

    # -- ledgers ---------------------------------------------------------------------------------------------------

    def ledger(
        self,
        rows: Mapping[str, int],
        counts: Mapping[str, Mapping[str, int]],
        skipped: Mapping[str, int],
        now: Sequence[object] | None,
    ) -> Ledger:
        """The ledger of the finished cache.

        Args:
            rows: number of rows by shard, in the order of the sources.
            counts: number of elements by shard and field.
            skipped: number of unusable records by shard, without zeros.
            now: the time passed to chat templates.
        """
        metadata: dict[str, object] = {**self.whole(), "parts": self.parts}
        if skipped:
            metadata["skipped"] = dict(skipped)
        if self.tells_time and now is not None:
            metadata["now"] = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.struct_time(tuple(now)))
        names = sorted(self.fields)
        by_shard = {shard: {name: counts[shard].get(name, 0) for name in names} for shard in rows}
        return Ledger(
            total_num_rows=sum(rows.values()),
            shard_rows=dict(rows),
            is_finished=True,
            finished_shards=tuple(rows),
            field_counts={name: sum(c[name] for c in by_shard.values()) for name in names},
            field_counts_by_shard=by_shard if self.layout == SHARDED else {},
            layout=self.layout,
            metadata={"preprocessor_metadata": dict(self.metadata)},
            extra={OURS: metadata},
        )


def settings_of(
    format: RowFormat, tokenizer: str | None, options: Mapping[str, object], *, skip: bool = False
) -> dict[str, object]:
    """Everything that affects rows, as JSON values; ``tokenizer`` is its digest."""
    return {"format": formats.as_dict(format), "tokenizer": tokenizer, **options, "skip": skip}


_OF_READING = ("pack", "mask_user_turns")
"""Fields of formats that do not affect rows."""


def parts_of(format: RowFormat, tokenizer: str | None, options: Mapping[str, object]) -> dict[str, str]:
    """A short digest of each part of a cache's settings: the tokenizer, fields of the format, options."""
    fields = {f"format.{name}": value for name, value in formats.as_dict(format).items() if name not in _OF_READING}
    return {name: digest(value)[:16] for name, value in {"tokenizer": tokenizer, **fields, **options}.items()}


def settings_difference(
    ledger: Ledger, parts: Mapping[str, str], metadata: Mapping[str, object], settings: Mapping[str, object]
) -> str | None:
    """The difference between a finished cache's settings and these, as text; None if they are equal as far as the ledger shows.

    A tokenizer's name is a difference only where its digest may differ: one tokenizer may lie at several paths, and Levanter
    records the hub's name. Where the ledger has no digest, see :func:`name_difference`.

    Args:
        ledger: of the cache.
        parts: of :func:`parts_of`, or some of them.
        metadata: the ``preprocessor_metadata``, compared first, because its values can be shown.
        settings: of :func:`settings_of`, for ledgers of older releases, which have no parts.
    """
    preprocessor, recorded = ledger.preprocessor, ledger.actshard or {}
    stored = recorded.get("parts")
    if isinstance(stored, dict):
        differing = [name for name in parts if stored.get(name) != parts[name]]
        names_count = "tokenizer" in differing
    elif recorded.get("settings") == digest(settings):
        return None
    else:
        differing, names_count = [], _has_digest(ledger)
    for key, expected in metadata.items():
        if preprocessor and preprocessor.get(key) != expected and (key != "tokenizer" or names_count):
            return f"{key} {_short(preprocessor.get(key))} instead of {_short(expected)}"
    return f"other settings: {', '.join(differing)}" if differing else None


def tokenizer_differs(ledger: Ledger, tokenizer: str) -> bool:
    """Whether a cache was built with a tokenizer of another digest. False if its ledger has no digest."""
    stored = (ledger.actshard or {}).get("parts")
    return isinstance(stored, dict) and stored.get("tokenizer", digest(tokenizer)[:16]) != digest(tokenizer)[:16]


def _has_digest(ledger: Ledger) -> bool:
    return "settings" in (ledger.actshard or {})


def name_difference(ledger: Ledger, metadata: Mapping[str, object]) -> str | None:
    """The difference between the names of tokenizers, as text, of a cache without a digest; None if there is none."""
    name, expected = ledger.preprocessor.get("tokenizer"), metadata.get("tokenizer")
    if not ledger.preprocessor or _has_digest(ledger) or name == expected:
        return None
    return f"tokenizer {_short(name)} instead of {_short(expected)}"


def shard_ledger(
    name: str, rows: int, elements: Mapping[str, int], identity: str, skipped: int, metadata: Mapping[str, object]
) -> Ledger:
    """The ledger of a shard.

    Args:
        name: the shard.
        rows: number of rows.
        elements: number of elements by field.
        identity: of :meth:`Recipe.identity`.
        skipped: number of unusable records.
        metadata: the preprocessing options.
    """
    extra: dict[str, object] = {"identity": identity}
    if skipped:
        extra["skipped"] = skipped
    return Ledger(
        total_num_rows=rows,
        shard_rows={name: rows},
        is_finished=True,
        finished_shards=(name,),
        field_counts=dict(sorted(elements.items())) if rows else {},
        metadata={"preprocessor_metadata": dict(metadata)},
        extra={OURS: extra},
    )


def local_now(seconds: float | None = None) -> list[object]:
    """A time (default: now) as a list for ``time.struct_time``, with name and offset of the zone, which templates may use."""
    local_time = time.localtime(seconds)
    return [*local_time, local_time.tm_zone, local_time.tm_gmtoff]


def takes_time(format: RowFormat) -> bool:
    """Whether rows of a format may depend on the time: chat templates, including those in records, may use it."""
    return isinstance(format, ChatFormat)


def digest(value: object) -> str:
    """32 hexadecimal digits of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
