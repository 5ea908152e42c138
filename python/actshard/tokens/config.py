"""Levanter's data configuration: as frozen dataclasses, and as the YAML that its trainer reads.

Field names, defaults and places of caches are Levanter's, so that one file serves both. Keys that are not known are errors.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from actshard._arguments import local_path
from actshard._json import show
from actshard.errors import (
    ActshardError,
    ActshardWarning,
    ArgumentError,
    ArgumentTypeError,
    FormatError,
    MissingExtraError,
    MissingFileError,
    from_reader,
)
from actshard.location import Location
from actshard.tokens import ledger as ledgers
from actshard.tokens.building import Build, BuildOptions, Watch
from actshard.tokens.cache import TokenCache, open_cache
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
    nearest,
    of_levanter,
    within,
)
from actshard.tokens.mixing import DEFAULT_MIXTURE_BLOCK, STOP_STRATEGIES, Mixture, Permuted, Sliced
from actshard.tokens.orders import (
    DEFAULT_IO_BLOCK,
    DEFAULT_WINDOW_BLOCKS,
    Key,
    permutation,
    prng_key,
    split,
)
from actshard.tokens.processing import WEIGHTS
from actshard.tokens.sources import RowSource
from actshard.tokens.stream import Examples
from actshard.tokens.tokenizer import Tokenizer, load_tokenizer

SPLITS = ("train", "validation")
_OPTIONS = [f.name for f in fields(BuildOptions) if f.name != "enforce_eos"]


class DatasetSourceConfigBase(ABC):
    """Where a component's records come from."""

    @abstractmethod
    def sources(self, split: str) -> list[Any]:
        """What :func:`build_cache` takes; empty if there is none of the split."""


@dataclass(frozen=True)
class UrlDatasetSourceConfig(DatasetSourceConfigBase):
    """Files of records.

    Attributes:
        train_urls, validation_urls: paths and globs of each split.
        tags, cache_dir, format: as in Levanter; the component's own are what counts.
    """

    train_urls: tuple[str, ...] = ()
    validation_urls: tuple[str, ...] = ()
    tags: tuple[str, ...] | None = None
    cache_dir: str | None = None
    format: FormatBase = field(default_factory=TextFormat)

    def __post_init__(self) -> None:
        check_types(self)

    def sources(self, split: str) -> list[Any]:
        """What :func:`build_cache` takes; empty if there is none of the split."""
        return list(self.train_urls if split == "train" else self.validation_urls)


@dataclass(frozen=True)
class HfDatasetSourceConfig(DatasetSourceConfigBase):
    """A dataset of the Hugging Face hub, through the ``datasets`` library (extra ``datasets``).

    Attributes:
        id, name, revision: of the dataset. A branch, a tag or no revision is resolved to its commit when a build begins: caches of
            one commit are not continued with another's records.
        stream: read while downloading.
        splits: those it has; None: all.
        tags, cache_dir, format: as in Levanter; the component's own are what counts.
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

    def sources(self, split: str) -> list[Any]:
        """A source for each of the dataset's shards; empty if it has no such split.

        Raises:
            FormatError: the library cannot load it; the message says why.
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

        if split not in self._asked(names):
            return []
        dataset = self._asked(load)
        told = f"{self.id}/{self.name}/{version or self.revision}/{split}"
        shards = getattr(dataset, "num_shards", None) if self.stream else None
        if not shards or not hasattr(dataset, "shard"):
            return [RowSource("data", load, told=told)]

        def part(i: int) -> Callable[[], Any]:
            return lambda: load().shard(num_shards=shards, index=i)

        return [RowSource(str(i), part(i), told=f"{told}/{i}") for i in range(shards)]

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:  # of the library, of those that it uses, of a dataset's own script
            if isinstance(error, ActshardError):
                raise
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or isinstance(error, MemoryError):  # no fault of the dataset
                raise from_reader(error, None, f"load {self.id}", "") from error
            raise FormatError(
                f"the datasets library cannot load {self.id}: {type(error).__name__}: {str(error)[:500]}"
            ) from error

    def _version(self) -> str | None:
        """The commit of the hub that is read, or a digest of a local folder's files; None if it cannot be known."""
        folder = Location.at(Path(self.id))
        if folder.kind() == "folder":
            found = [(file.relative_to(folder), file.stat()) for file, _ in folder.files()]
            listed = [(name, stat.size, stat.modified) for name, stat in found]
            return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:40]
        if self.revision is not None and re.fullmatch(r"[0-9a-f]{40}", self.revision):
            return self.revision
        try:
            from huggingface_hub import HfApi

            sha = HfApi().dataset_info(self.id, revision=self.revision, timeout=30).sha
        except Exception:  # no hub, no such dataset: loading it says so
            sha = None
        if not isinstance(sha, str):
            warnings.warn(
                ActshardWarning(
                    f"{self.id}: its commit cannot be asked for, so a change of the dataset between two runs of a build would not "
                    "be noticed; give revision= a commit",
                    code="unknown-revision",
                ),
                stacklevel=4,
            )
            return None
        return sha


@dataclass(frozen=True)
class DatasetComponent:
    """One dataset: where it comes from, where its caches are, what becomes of it.

    Attributes:
        source: None: its caches have to be there.
        cache_dir: where its caches are; below the configuration's, by its name, if not given.
        format: how rows are made.
        pack: documents per example; see :func:`dataset_for_component`.
        tags: as in Levanter.
        split: as in Levanter.
        flat_cache: ``cache_dir`` is itself the cache, of training data.
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
            theirs = of_levanter(self.source, kinds)
            object.__setattr__(self, "source", theirs if theirs is not None else self.source)
        check_types(self)
        check_pack(self.pack)


@dataclass(frozen=True)
class BlockShuffleConfig:
    """Levanter's block shuffle; see :func:`permutation`."""

    io_block_size: int = DEFAULT_IO_BLOCK
    window_blocks: int = DEFAULT_WINDOW_BLOCKS
    perm_type: str = "feistel"

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True)
class CachePlan:
    """A cache that a configuration asks for.

    Attributes:
        component, split: whose it is.
        path: where Levanter looks for it.
        sources: what it is made of; empty: nothing, it has to be there.
        state: ``"done"``, ``"to build"`` or ``"missing"``.
        cache: the cache, if it was built or opened.
    """

    component: str
    split: str
    path: Path
    sources: tuple[Any, ...]
    state: str
    cache: TokenCache | None = field(default=None, compare=False)


Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]


@dataclass(frozen=True)
class LmDataConfig:
    """Levanter's ``data:`` block. Names and defaults are Levanter's (June 2026); paths are of this machine.

    Attributes:
        tokenizer: a folder with ``tokenizer.json``, or ``"passthrough"``.
        vocab_size: of ``"passthrough"``.
        cache_dir: where components' caches are, each by its name.
        enforce_eos: whether texts end in eos.
        components: datasets by name.
        train_weights: of the mixture; or a list of (first step, weights). All 1 if not given.
        shuffle: True (a permutation of all), False, or a :class:`BlockShuffleConfig`.
        permutation_type: ``"feistel"`` or ``"linear"``.
        block_cross_document_attention: whether documents are kept apart.
        stop_strategy, mixture_block_size: see :class:`Mixture`.
        target_budget, experiment_budget: training on the part of each dataset that the second is of the first.
        max_train_batches: at most so many batches of a dataset.
        num_validation_sequences: so many examples of a dataset's training split are its validation split.
        shuffle_before_trainval_split: whether those are taken from all over it.
        loss_mask_padding: True: padding of packed examples, and the last token before it, count nothing, as in Levanter since July
            2026. False: they count 1 without stored weights, as in June 2026. Levanter's YAML has no such key: what it does
            is a matter of its version.
    """

    tokenizer: str = "gpt2"
    vocab_size: int | None = None
    cache_dir: str | None = "cache/"
    cache_options: Mapping[str, Any] = field(default_factory=dict)
    enforce_eos: bool = True
    auto_build_caches: bool = True
    chat_template: str | None = None
    shuffle: bool | BlockShuffleConfig = field(default_factory=BlockShuffleConfig)
    permutation_type: str = "feistel"
    block_cross_document_attention: bool = True
    components: Mapping[str, DatasetComponent] = field(default_factory=dict)
    train_weights: Weights | None = None
    stop_strategy: str = "restart"
    target_budget: int | None = None
    experiment_budget: int | None = None
    mixture_block_size: int = DEFAULT_MIXTURE_BLOCK
    max_train_batches: Mapping[str, int] | None = None
    num_validation_sequences: Mapping[str, int] | None = None
    shuffle_before_trainval_split: bool = True
    loss_mask_padding: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        if self.stop_strategy not in STOP_STRATEGIES:
            raise ArgumentError(
                f"stop_strategy must be one of {', '.join(STOP_STRATEGIES)}, not {self.stop_strategy!r}"
            )
        if self.components and self.train_weights is None:
            object.__setattr__(self, "train_weights", dict.fromkeys(self.components, 1.0))
        for weights in self._stages():
            for name, weight in weights.items():
                if not 0 <= weight < float("inf"):
                    raise ArgumentError(f"train_weights.{name}: expected a number of at least 0, found {weight}")
                if name not in self.components:
                    raise ArgumentError(
                        f"train_weights: no component is called '{name}'{nearest(name, self.components)}"
                    )
        if self.chat_template is not None:
            warnings.warn(
                ActshardWarning(
                    "data.chat_template is not used, by Levanter neither: put it into a component's format",
                    code="unused-setting",
                ),
                stacklevel=3,
            )

    def _stages(self) -> list[Mapping[str, float]]:
        weights = self.train_weights
        if weights is None:
            return []
        return [weights] if isinstance(weights, Mapping) else [stage for _, stage in weights]

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a YAML file: this block itself, or a trainer's configuration with a ``data:`` block.

        Raises:
            FormatError: it is no YAML, or says something that is not known; the message suggests the nearest key.
            MissingFileError: there is no such file.
            MissingExtraError: pyyaml is not installed.
        """
        try:
            import yaml
        except ImportError as error:
            raise MissingExtraError.of("reading YAML", "tokens", path) from error
        file = Location.of(path)
        if file.kind() != "file":
            raise MissingFileError("expected a YAML file, found nothing", path=file)
        text = file.read_utf8()
        try:
            made = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise FormatError(f"expected YAML: {error}", path=file) from error
        if not isinstance(made, dict):
            raise FormatError(f"expected an object, found {show(made)}", path=file)
        try:
            return cls.from_dict(made["data"] if isinstance(made.get("data"), dict) else made)
        except ArgumentError as error:
            raise FormatError(error.detail, path=file) from error

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """What YAML says, as plain values."""
        options = _known(given, cls, "data")
        components = options.get("components") or {}
        if not isinstance(components, Mapping):
            raise ArgumentError(f"data.components: expected an object, found {show(components)}")
        made: dict[str, DatasetComponent] = {}
        for name, component in components.items():
            made |= _components(str(name), component)
        options["components"] = made
        shuffle = options.get("shuffle")
        if isinstance(shuffle, Mapping):
            where = "data.shuffle"
            options["shuffle"] = within(where, lambda: BlockShuffleConfig(**_known(shuffle, BlockShuffleConfig, where)))
        elif shuffle is not None and not isinstance(shuffle, bool):
            raise ArgumentError(f"data.shuffle: expected true, false or a block shuffle, found {show(shuffle)}")
        for name in ("cache_options", "shuffle"):
            if options.get(name, 0) is None:
                del options[name]  # "name:" without a value
        return within("data", lambda: cls(**options))

    @cached_property
    def the_tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded."""
        return load_tokenizer(self.tokenizer, vocab_size=self.vocab_size)

    def cache_path(self, name: str, split: str) -> Path:
        """Where Levanter looks for a cache."""
        component = self.components[name]
        if component.cache_dir is not None:
            root = local_path(component.cache_dir, f"components.{name}.cache_dir")
        elif self.cache_dir is not None:
            root = local_path(self.cache_dir, "cache_dir") / name
        else:
            raise ArgumentError(f"component '{name}' has no cache_dir, and the configuration has none")
        return root if component.flat_cache else root / split

    def _has_weight(self, name: str) -> bool:
        return any(weights.get(name, 0) > 0 for weights in self._stages())

    def plans(self, components: Iterable[str] | None = None) -> list[CachePlan]:
        """Every cache of both splits, and whether it is there."""
        chosen = list(self.components) if components is None else list(components)
        made = []
        for name in chosen:
            if name not in self.components:
                raise ArgumentError(f"no component is called '{name}'{nearest(name, self.components)}")
            component = self.components[name]
            for which in SPLITS:
                if component.flat_cache and which != "train":
                    continue
                path = self.cache_path(name, which)
                sources = () if component.source is None else tuple(component.source.sources(which))
                done = ledgers.exists(path)
                asked = which == "train" and (component.source is None or self._has_weight(name))
                if not sources and not done and not asked:
                    continue
                state = "done" if done else "to build" if sources else "missing"
                made.append(CachePlan(name, which, path, sources, state))
        return made

    def build(
        self,
        components: Iterable[str] | None = None,
        *,
        splits: Sequence[str] = SPLITS,
        progress: Callable[[CachePlan], Watch | None] | None = None,
        **options: Any,
    ) -> list[CachePlan]:
        """Builds every cache that is not there, where Levanter looks for it.

        Args:
            components: names; all if not given.
            splits: train, validation, or both.
            progress: called with each cache before it is built; returns what :func:`build_cache` takes.
            **options: of :func:`build_cache`: layout, storage, dtype, on_error, jobs, keep_shards, overwrite.

        Returns:
            All of them: ``state`` is ``"built"``, ``"done"`` (it was there) or ``"missing"`` (no source, no cache).
        """
        made = []
        for plan in self.plans(components):
            if plan.split not in splits:
                continue
            watch = progress(plan) if progress is not None and plan.sources else None
            made.append(self.build_plan(plan, watch, **options))
        return made

    def build_plan(self, plan: CachePlan, progress: Watch | None = None, **options: Any) -> CachePlan:
        """Builds one of :meth:`plans`; options are those of :meth:`build`."""
        if not plan.sources:
            return plan
        form = self.components[plan.component].format
        build = Build(
            plan.sources,
            plan.path,
            None if isinstance(form, PrebuiltFormat) else self.the_tokenizer,
            form,
            BuildOptions(enforce_eos=self.enforce_eos, **known(options, _OPTIONS, "build")),
            progress,
        )
        cache = build.run()
        state = "built" if build.built else "done"
        return CachePlan(plan.component, plan.split, plan.path, plan.sources, state, cache)

    def open(self, name: str, split: str = "train") -> TokenCache:
        """A component's cache, open."""
        return open_cache(self.cache_path(name, split))

    def _datasets(self, which: str, seq_len: int) -> dict[str, Examples]:
        made: dict[str, Examples] = {}
        for name, component in self.components.items():
            if (which == "train" and not self._has_weight(name)) or (component.flat_cache and which != "train"):
                continue
            if which != "train" and not ledgers.exists(self.cache_path(name, which)):
                continue
            made[name] = dataset_for_component(
                component,
                self.open(name, which),
                seq_len,
                eos_id=self.the_tokenizer.eos_id,
                block_cross_document_attention=self.block_cross_document_attention,
                loss_mask_padding=self.loss_mask_padding,
            )
        return made

    def train_sets(
        self, seq_len: int, *, key: int | Key | NDArray[Any] = 0, batch_size: int | None = None
    ) -> dict[str, Examples]:
        """Components' training examples in Levanter's order: split, shuffled, cut to their budgets.

        Args:
            seq_len: tokens of an example.
            key: the shuffles' seed or key.
            batch_size: for ``max_train_batches``.
        """
        made = self._datasets("train", seq_len)
        for name, held in (self.num_validation_sequences or {}).items():
            if name in made:
                made[name] = self._trainval(made[name], held)[0]
        if self.shuffle is not False:
            current = prng_key(key)
            for name, dataset in made.items():
                current, sub = split(current)
                made[name] = self._shuffled(dataset, sub)
        if self.experiment_budget is not None and self.target_budget is not None:
            if self.experiment_budget > self.target_budget:
                raise ArgumentError(
                    f"experiment_budget {self.experiment_budget} exceeds target_budget {self.target_budget}"
                )
            ratio = self.experiment_budget / self.target_budget
            made = {name: Sliced(dataset, 0, int(len(dataset) * ratio)) for name, dataset in made.items()}
        for name, batches in (self.max_train_batches or {}).items():
            if name in made:
                if batch_size is None:
                    raise ArgumentError("max_train_batches needs batch_size=")
                if batches * batch_size > len(made[name]):
                    raise ArgumentError(
                        f"max_train_batches: {batches} batches of '{name}' are more than its {len(made[name])} examples"
                    )
                made[name] = Sliced(made[name], 0, batches * batch_size)
        return made

    def _shuffled(self, dataset: Examples, key: Key) -> Examples:
        if isinstance(self.shuffle, BlockShuffleConfig):
            order = permutation(
                "block",
                len(dataset),
                key,
                io_block_size=self.shuffle.io_block_size,
                window_blocks=self.shuffle.window_blocks,
                perm_type=self.shuffle.perm_type,
            )
        else:
            order = permutation(self.permutation_type, len(dataset), key)
        return Permuted(dataset, order)

    def _trainval(self, dataset: Examples, held: int) -> tuple[Examples, Examples]:
        if held > len(dataset):
            raise ArgumentError(f"num_validation_sequences: {held} are more than the dataset's {len(dataset)} examples")
        if self.shuffle_before_trainval_split:
            dataset = Permuted(dataset, permutation("feistel", len(dataset), 0))
        cut = len(dataset) - held
        return Sliced(dataset, 0, cut), Sliced(dataset, cut, len(dataset))

    def train_set(self, seq_len: int, batch_size: int, *, key: int | Key | NDArray[Any] = 0) -> Mixture:
        """The mixture that Levanter trains on: ``get_batch(range(step * batch_size, (step + 1) * batch_size))``."""
        mix, shuffle = split(prng_key(key))
        weights = self.train_weights
        if weights is None:
            raise ArgumentError("there are no components to train on")
        if not isinstance(weights, Mapping):
            weights = [(step * batch_size, stage) for step, stage in weights]
        return Mixture(
            self.train_sets(seq_len, key=shuffle, batch_size=batch_size),
            weights if not isinstance(weights, Mapping) else {n: w for n, w in weights.items() if w > 0},
            block_size=self.mixture_block_size,
            key=mix,
            stop_strategy=self.stop_strategy,
        )

    def validation_sets(self, seq_len: int) -> dict[str, Examples]:
        """Components' validation examples."""
        made = self._datasets("validation", seq_len)
        if self.num_validation_sequences:
            train = self._datasets("train", seq_len)
            for name, held in self.num_validation_sequences.items():
                made[name] = self._trainval(train[name], held)[1]
        return made


def dataset_for_component(
    component: DatasetComponent,
    cache: TokenCache,
    seq_len: int,
    *,
    eos_id: int | None = None,
    block_cross_document_attention: bool = True,
    loss_mask_padding: bool = True,
) -> Examples:
    """The examples that Levanter makes of a component.

    Text and supervised rows are windows, or packed if ``pack`` says so; conversations are packed; prebuilt rows are examples.
    """
    form, apart = component.format, block_cross_document_attention
    if isinstance(form, ChatFormat):
        return ChatDataset(
            cache,
            seq_len,
            pack=component.pack if component.pack is not None else form.pack,
            mask_user_turns=form.mask_user_turns,
            block_cross_document_attention=apart,
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
            block_cross_document_attention=apart,
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
            block_cross_document_attention=apart,
            loss_mask_padding=loss_mask_padding,
        )
    return CausalLmDataset(
        TokenSeqDataset(cache, seq_len, weights), eos_id=eos_id, block_cross_document_attention=apart
    )


def _known(given: Any, cls: type, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{where}: expected an object, found {show(given)}")
    return known({str(key): value for key, value in given.items()}, [f.name for f in fields(cls)], where)


def _components(name: str, given: Any) -> dict[str, DatasetComponent]:
    """A component; the children of one that concatenates others, each by its own name."""
    where = f"data.components.{name}"
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{where}: expected an object, found {show(given)}")
    options = dict(given)
    kind = options.pop("type", "cached")
    if kind == "concat":
        raise ArgumentError(
            f"{where}: components that concatenate others are not read; list its children as components"
        )
    if kind != "cached":
        raise ArgumentError(f"{where}: type must be 'cached', not {kind!r}")
    options = _known(options, DatasetComponent, where)
    options["format"] = within(where, lambda: as_format(options.get("format")))
    source = options.get("source")
    if source is not None:
        options["source"] = _source(source, f"{where}.source")
        form = options["source"].format
        if form not in (TextFormat(), options["format"]):
            raise ArgumentError(f"{where}.source.format: Levanter reads the component's format; move it there")
    options["tags"] = _texts(options.get("tags"), f"{where}.tags")
    return {name: within(where, lambda: DatasetComponent(**options))}


def _source(given: Any, where: str) -> UrlDatasetSourceConfig | HfDatasetSourceConfig:
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{where}: expected an object, found {show(given)}")
    options = dict(given)
    kind = options.pop("type", "url")
    kinds: dict[str, type[UrlDatasetSourceConfig | HfDatasetSourceConfig]] = {
        "url": UrlDatasetSourceConfig,
        "hf": HfDatasetSourceConfig,
    }
    if not isinstance(kind, str) or kind not in kinds:
        raise ArgumentError(f"{where}: type must be 'url' or 'hf', not {kind!r}")
    cls = kinds[kind]
    options = _known(options, cls, where)
    for name in ("train_urls", "validation_urls", "tags", "splits"):
        if name in options:
            options[name] = _texts(options[name], f"{where}.{name}") or (() if name.endswith("urls") else None)
    if kind == "hf" and not isinstance(options.get("id"), str):
        raise ArgumentError(f"{where}: expected the dataset's id, found {show(options.get('id'))}")
    if "format" in options:
        options["format"] = within(where, lambda: as_format(options["format"]))
    return within(where, lambda: cls(**options))


def _texts(value: Any, where: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable) or any(not isinstance(x, str) for x in value):
        raise ArgumentError(f"{where}: expected a list of texts, found {show(value)}")
    return tuple(value)
