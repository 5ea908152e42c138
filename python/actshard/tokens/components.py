"""Components of a configuration: where a dataset's records come from, where its caches are, which examples are made of it.

Field names and defaults are Levanter's. Keys that are not known are errors.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actshard.base._json import show
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ArgumentTypeError,
    FormatError,
    MissingExtraError,
    from_reader,
    warn,
)
from actshard.base.location import Location
from actshard.tokens.cache import TokenCache
from actshard.tokens.examples import (
    CausalLmDataset,
    ChatDataset,
    PackedTokenDataset,
    PrebuiltLmDataset,
    TokenSeqDataset,
)
from actshard.tokens.formats import (
    FORMATS,
    ChatFormat,
    FormatBase,
    PrebuiltFormat,
    SupervisedFormat,
    TextFormat,
    as_format,
    check_pack,
    check_types,
    known,
    of_levanter,
    within,
)
from actshard.tokens.processing import WEIGHTS
from actshard.tokens.sources import RowSource
from actshard.tokens.stream import Examples

if TYPE_CHECKING:
    from actshard.tokens.sources import AnySource


class DatasetSourceConfigBase(ABC):
    """Source of a component's records."""

    @abstractmethod
    def sources(self, split: str) -> list[AnySource | str]:
        """The sources for :func:`build_cache`; empty if the split does not exist."""


@dataclass(frozen=True)
class UrlDatasetSourceConfig(DatasetSourceConfigBase):
    """Files of records.

    Attributes:
        train_urls, validation_urls: paths and globs of each split.
        tags, cache_dir, format: accepted as in Levanter; the component's settings apply.
    """

    train_urls: tuple[str, ...] = ()
    validation_urls: tuple[str, ...] = ()
    tags: tuple[str, ...] | None = None
    cache_dir: str | None = None
    format: FormatBase = field(default_factory=TextFormat)

    def __post_init__(self) -> None:
        check_types(self)

    def sources(self, split: str) -> list[AnySource | str]:
        """The sources for :func:`build_cache`; empty if the split does not exist."""
        return list(self.train_urls if split == "train" else self.validation_urls)


@dataclass(frozen=True)
class HfDatasetSourceConfig(DatasetSourceConfigBase):
    """A dataset of the Hugging Face hub, read with the ``datasets`` library (extra ``datasets``).

    Attributes:
        id, name, revision: of the dataset. A branch, a tag or no revision is resolved to its commit when a build begins: a cache
            of one commit is never continued with records of another.
        stream: read while downloading.
        splits: the splits to use; None: all.
        tags, cache_dir, format: accepted as in Levanter; the component's settings apply.
    """

    id: str
    name: str | None = None
    revision: str | None = None
    stream: bool = True
    splits: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    cache_dir: str | None = None
    format: FormatBase = field(default_factory=TextFormat)

    def __post_init__(self) -> None:
        check_types(self)

    def sources(self, split: str) -> list[AnySource | str]:
        """One source per shard of the dataset; empty if the split does not exist.

        Raises:
            FormatError: the library cannot load the dataset; the message gives the reason.
            MissingExtraError: the library is not installed.
        """
        if self.splits is not None and split not in self.splits:
            return []
        try:
            import datasets
        except ImportError as error:
            raise MissingExtraError.of(f"the dataset {self.id} of the Hugging Face hub", "datasets") from error
        version = self._version()
        revision = self.revision if Location.at(self.id).kind() == "folder" else version or self.revision

        def names() -> Any:
            return datasets.get_dataset_split_names(self.id, config_name=self.name, revision=revision)

        def load() -> Any:
            options = {"name": self.name, "revision": revision}
            return datasets.load_dataset(self.id, split=split, streaming=self.stream, **options)

        if split not in self._call_library(names):
            return []
        dataset = self._call_library(load)
        identity = f"{self.id}/{self.name}/{version or self.revision}/{split}"
        shards = getattr(dataset, "num_shards", None) if self.stream else None
        if not shards or not hasattr(dataset, "shard"):
            return [RowSource("data", load, told=identity)]

        def part(i: int) -> Callable[[], Any]:
            return lambda: load().shard(num_shards=shards, index=i)

        return [RowSource(str(i), part(i), told=f"{identity}/{i}") for i in range(shards)]

    def _call_library(self, ask: Callable[[], object]) -> Any:
        try:
            return ask()
        except Exception as error:  # raised by the library, its dependencies or a dataset's script
            if isinstance(error, ActshardError):
                raise
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or isinstance(error, MemoryError):  # not an error of the dataset
                raise from_reader(error, None, f"load {self.id}", "") from error
            raise FormatError(
                f"the datasets library cannot load {self.id}: {type(error).__name__}: {str(error)[:500]}"
            ) from error

    def _version(self) -> str | None:
        """The hub commit, or a digest of a local folder's file list; None if unknown."""
        folder = Location.at(Path(self.id))
        if folder.kind() == "folder":
            file_stats = [(file.relative_to(folder), file.stat()) for file, _ in folder.files()]
            fingerprints = [(name, stat.size, stat.modified) for name, stat in file_stats]
            return hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()[:40]
        if self.revision is not None and re.fullmatch(r"[0-9a-f]{40}", self.revision):
            return self.revision
        try:
            from huggingface_hub import HfApi

            sha = HfApi().dataset_info(self.id, revision=self.revision, timeout=30).sha
        except Exception:  # no network, or no such dataset: loading will raise
            sha = None
        if not isinstance(sha, str):
            warn(
                f"{self.id}: its commit is unknown, so a change of the dataset between two runs of a build would not be "
                "detected; pass a commit as revision=",
                code="unknown-revision",
            )
            return None
        return sha


@dataclass(frozen=True)
class DatasetComponent:
    """One dataset: its source, caches and format.

    Attributes:
        source: None: the caches must exist.
        cache_dir: folder of its caches; default: its name below the configuration's ``cache_dir``.
        format: how records become rows.
        pack: documents per example; no effect on prebuilt rows, each of which is an example, as in Levanter.
        tags: as in Levanter.
        split: as in Levanter.
        flat_cache: ``cache_dir`` is itself the cache of the training split.
    """

    source: DatasetSourceConfigBase | None = None
    cache_dir: str | None = None
    format: FormatBase = field(default_factory=TextFormat)
    pack: bool | int | str | None = None
    tags: tuple[str, ...] | None = None
    split: str = "validation"
    flat_cache: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, FormatBase):
            object.__setattr__(self, "format", as_format(self.format))
        if self.source is not None and not isinstance(self.source, DatasetSourceConfigBase):
            kinds = {cls.__name__: cls for cls in (UrlDatasetSourceConfig, HfDatasetSourceConfig)}
            converted = of_levanter(self.source, kinds)
            object.__setattr__(self, "source", converted if converted is not None else self.source)
        check_types(self)
        check_pack(self.pack)


def dataset_for_component(
    component: DatasetComponent,
    cache: TokenCache,
    seq_len: int,
    *,
    eos_id: int | None = None,
    block_cross_document_attention: bool = True,
    loss_mask_padding: bool = True,
) -> Examples:
    """Creates a component's examples as Levanter does.

    Text and supervised rows become windows, or packed examples with ``pack``. Conversations are packed. Prebuilt rows are
    examples.
    """
    form, block_attention = component.format, block_cross_document_attention
    if isinstance(form, ChatFormat):
        return ChatDataset(
            cache,
            seq_len,
            pack=component.pack if component.pack is not None else form.pack,
            mask_user_turns=form.mask_user_turns,
            block_cross_document_attention=block_attention,
            loss_mask_padding=loss_mask_padding,
        )
    if isinstance(form, PrebuiltFormat):
        return PrebuiltLmDataset(
            cache,
            seq_len,
            input_ids_key=form.input_ids_key,
            loss_weights_key=form.loss_weights_key or "",
            loss_weight_transform=form.loss_weight_transform,
            eos_id=eos_id,
            block_cross_document_attention=block_attention,
        )
    if not isinstance(form, TextFormat | SupervisedFormat):
        raise ArgumentTypeError(f"format: expected one of {', '.join(FORMATS)}, found {type(form).__name__}")
    weights = WEIGHTS if isinstance(form, SupervisedFormat) else None
    if component.pack:
        return PackedTokenDataset(
            cache,
            seq_len,
            pack=component.pack,
            loss_weights_key=weights,
            block_cross_document_attention=block_attention,
            loss_mask_padding=loss_mask_padding,
        )
    return CausalLmDataset(
        TokenSeqDataset(cache, seq_len, weights), eos_id=eos_id, block_cross_document_attention=block_attention
    )


def known_options(options: object, cls: type, where: str) -> dict[str, Any]:
    """Options by name, each a field of the class.

    Raises:
        ArgumentError: no mapping, or an unknown key; the message names the nearest.
    """
    if not isinstance(options, Mapping):
        raise ArgumentError(f"{where}: expected an object, found {show(options)}")
    return known({str(key): value for key, value in options.items()}, [f.name for f in fields(cls)], where)


def components_of(name: str, component: object) -> dict[str, DatasetComponent]:
    """Parses a component."""
    where = f"data.components.{name}"
    if not isinstance(component, Mapping):
        raise ArgumentError(f"{where}: expected an object, found {show(component)}")
    options = dict(component)
    kind = options.pop("type", "cached")
    if kind == "concat":
        raise ArgumentError(f"{where}: type 'concat' is not supported; list its children as components")
    if kind != "cached":
        raise ArgumentError(f"{where}: type must be 'cached', not {kind!r}")
    options = known_options(options, DatasetComponent, where)
    options["format"] = within(where, lambda: as_format(options.get("format")))
    source = options.get("source")
    if source is not None:
        options["source"] = _source(source, f"{where}.source")
        form = options["source"].format
        if form not in (TextFormat(), options["format"]):
            raise ArgumentError(f"{where}.source.format: Levanter uses the component's format; move this there")
    options["tags"] = _texts(options.get("tags"), f"{where}.tags")
    return {name: within(where, lambda: DatasetComponent(**options))}


def _source(source: object, where: str) -> UrlDatasetSourceConfig | HfDatasetSourceConfig:
    if not isinstance(source, Mapping):
        raise ArgumentError(f"{where}: expected an object, found {show(source)}")
    options = dict(source)
    kind = options.pop("type", "url")
    kinds: dict[str, type[UrlDatasetSourceConfig | HfDatasetSourceConfig]] = {
        "url": UrlDatasetSourceConfig,
        "hf": HfDatasetSourceConfig,
    }
    if not isinstance(kind, str) or kind not in kinds:
        raise ArgumentError(f"{where}: type must be 'url' or 'hf', not {kind!r}")
    cls = kinds[kind]
    options = known_options(options, cls, where)
    for name in ("train_urls", "validation_urls", "tags", "splits"):
        if name in options:
            options[name] = _texts(options[name], f"{where}.{name}") or (() if name.endswith("urls") else None)
    if kind == "hf" and not isinstance(options.get("id"), str):
        raise ArgumentError(f"{where}: expected the dataset's id, found {show(options.get('id'))}")
    if "format" in options:
        options["format"] = within(where, lambda: as_format(options["format"]))
    return within(where, lambda: cls(**options))


def _texts(value: object, where: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable) or any(not isinstance(x, str) for x in value):
        raise ArgumentError(f"{where}: expected a list of strings, found {show(value)}")
    return tuple(value)
