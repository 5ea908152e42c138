"""Levanter's data configuration, as frozen dataclasses and as the YAML that its trainer reads.

Field names, defaults and cache paths are Levanter's, so that both can use the same file. Unknown keys are errors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base._arguments import local_path, many, whole
from actshard.base._json import show
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    FormatError,
    MissingExtraError,
    MissingFileError,
    warn,
)
from actshard.base.location import Location, is_url
from actshard.base.walking import refuse_taken
from actshard.tokens import ledger as ledgers
from actshard.tokens.building import Build, BuildOptions, Watch
from actshard.tokens.cache import TokenCache, open_cache
from actshard.tokens.components import (
    DatasetComponent,
    HfDatasetSourceConfig,  # noqa: F401 -- pickles may name it here, where it was first
    UrlDatasetSourceConfig,  # noqa: F401 -- pickles of earlier versions name it here
    components_of,
    dataset_for_component,
    known_options,
)
from actshard.tokens.formats import (
    FORMATS,
    PrebuiltFormat,
    as_format,
    check_types,
    known,
    nearest,
    within,
)
from actshard.tokens.mixing import (
    DEFAULT_MIXTURE_BLOCK,
    MOST_MIXTURE_BLOCK,
    STOP_STRATEGIES,
    Mixture,
    Permuted,
    Sliced,
)
from actshard.tokens.orders import (
    DEFAULT_IO_BLOCK,
    DEFAULT_WINDOW_BLOCKS,
    Key,
    permutation,
    prng_key,
    split,
)
from actshard.tokens.processing import processor
from actshard.tokens.recipe import parts_of, settings_difference, settings_of
from actshard.tokens.stream import Examples
from actshard.tokens.tokenizer import Tokenizer, load_tokenizer

SPLITS = ("train", "validation")
PERMUTATIONS = ("feistel", "linear")
_OPTIONS = [f.name for f in fields(BuildOptions) if f.name != "enforce_eos"]


@dataclass(frozen=True)
class BlockShuffleConfig:
    """Levanter's block shuffle; see :func:`permutation`."""

    io_block_size: int = DEFAULT_IO_BLOCK
    window_blocks: int = DEFAULT_WINDOW_BLOCKS
    perm_type: str = "feistel"

    def __post_init__(self) -> None:
        check_types(self)
        if self.perm_type not in PERMUTATIONS:
            raise ArgumentError(f"perm_type: expected {' or '.join(PERMUTATIONS)}, found {self.perm_type!r}")
        for name in ("io_block_size", "window_blocks"):
            whole(getattr(self, name), name, 1)


@dataclass(frozen=True)
class CachePlan:
    """A cache required by a configuration.

    Attributes:
        component, split: the component and split of the cache.
        path: where Levanter expects it.
        sources: sources to build it from; empty: it must exist.
        state: ``"done"``, ``"to build"`` or ``"missing"``.
        cache: the cache, if it was built or opened.
    """

    component: str
    split: str
    path: Path
    sources: tuple[object, ...]
    state: str
    cache: TokenCache | None = field(default=None, compare=False)

    def check_free(self) -> None:
        """Raises ExistsError if the cache cannot be built, because its folder is a dataset."""
        if self.state == "to build" and not Location.at(self.path).is_remote:
            refuse_taken(self.path)


Weights = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]


@dataclass(frozen=True)
class LmDataConfig:
    """Levanter's ``data:`` block. Names and defaults are Levanter's (June 2026). Sources are local; caches may be URLs.

    Attributes:
        tokenizer: a folder with ``tokenizer.json``, or ``"passthrough"``.
        vocab_size: vocabulary size of ``"passthrough"``.
        cache_dir: folder of the components' caches, each in a subfolder with its name. Or its URL, for caches that exist; options
            of its storage are those of the environment.
        enforce_eos: whether to append eos to texts.
        components: datasets by name.
        train_weights: weights of the mixture by name, or a list of (first step, weights); default: 1 for all.
        shuffle: True (a permutation of all examples), False, or a :class:`BlockShuffleConfig`.
        permutation_type: ``"feistel"`` or ``"linear"``.
        block_cross_document_attention: whether documents are kept apart.
        stop_strategy, mixture_block_size: see :class:`Mixture`.
        target_budget, experiment_budget: train on a fraction experiment_budget / target_budget of each dataset.
        max_train_batches: limit on batches by dataset.
        num_validation_sequences: number of training examples held out for validation, by dataset.
        shuffle_before_trainval_split: whether to shuffle before holding out.
        loss_mask_padding: True: padding of packed examples, and the last token before it, have weight 0, as in Levanter since July
            2026. False: without stored weights they have weight 1, as in June 2026. Levanter's YAML has no such key, because it
            depends on Levanter's version.
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
        _arguments.one_of(self.stop_strategy, STOP_STRATEGIES, "stop_strategy")
        if self.components and self.train_weights is None:
            object.__setattr__(self, "train_weights", dict.fromkeys(self.components, 1.0))
        self._check_names()
        self._check_ranges()
        if self.chat_template is not None:
            warn(
                "data.chat_template is ignored, as in Levanter; set it in a component's format",
                code="unused-setting",
            )

    def _check_names(self) -> None:
        """Checks names and values of all settings by component."""
        settings = [("train_weights", stage, sys.float_info.max) for stage in self._stages()]
        settings += [
            (name, getattr(self, name) or {}, 1 << 62) for name in ("max_train_batches", "num_validation_sequences")
        ]
        for field_name, values, most in settings:
            for name, value in values.items():
                if name not in self.components:
                    raise ArgumentError(f"{field_name}: unknown component '{name}'{nearest(name, self.components)}")
                if not 0 <= value <= most:
                    raise ArgumentError(f"{field_name}.{name}: expected a number of at least 0, found {value}")

    def _check_ranges(self) -> None:
        if self.permutation_type not in PERMUTATIONS:
            raise ArgumentError(
                f"permutation_type: expected {' or '.join(PERMUTATIONS)}, found {self.permutation_type!r}"
            )
        whole(self.mixture_block_size, "mixture_block_size", 1, MOST_MIXTURE_BLOCK)
        budgets = (self.experiment_budget, self.target_budget)
        if None not in budgets:
            whole(self.target_budget, "target_budget", 1)
            whole(self.experiment_budget, "experiment_budget", 0)
            if (self.experiment_budget or 0) > (self.target_budget or 0):
                raise ArgumentError(
                    f"experiment_budget: expected at most target_budget={self.target_budget}, found {self.experiment_budget}"
                )
            conflicting = [name for name in ("max_train_batches", "num_validation_sequences") if getattr(self, name)]
            if conflicting:
                raise ArgumentError(f"{conflicting[0]}: expected none together with budgets, as in Levanter")

    def _stages(self) -> list[Mapping[str, float]]:
        weights = self.train_weights
        if weights is None:
            return []
        return [weights] if isinstance(weights, Mapping) else [stage for _, stage in weights]

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a YAML file: this block, or a trainer's configuration with a ``data:`` block.

        Raises:
            FormatError: invalid YAML or unknown keys; the message suggests the closest key.
            MissingFileError: the file does not exist.
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
            config = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise FormatError(f"expected YAML: {error}", path=file) from error
        if not isinstance(config, dict):
            raise FormatError(f"expected an object, found {show(config)}", path=file)
        try:
            return cls.from_dict(config["data"] if isinstance(config.get("data"), dict) else config)
        except ArgumentError as error:
            raise FormatError(error.detail, path=file) from error

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> Self:
        """Converts plain values, as read from YAML."""
        options = known_options(given, cls, "data")
        components = options.get("components") or {}
        if not isinstance(components, Mapping):
            raise ArgumentError(f"data.components: expected an object, found {show(components)}")
        parsed_components: dict[str, DatasetComponent] = {}
        for name, component in components.items():
            parsed_components |= components_of(str(name), component)
        options["components"] = parsed_components
        shuffle = options.get("shuffle")
        if isinstance(shuffle, Mapping):
            where = "data.shuffle"
            options["shuffle"] = within(
                where, lambda: BlockShuffleConfig(**known_options(shuffle, BlockShuffleConfig, where))
            )
        elif shuffle is not None and not isinstance(shuffle, bool):
            raise ArgumentError(f"data.shuffle: expected true, false or a block shuffle, found {show(shuffle)}")
        for name in ("cache_options", "shuffle"):
            if options.get(name, 0) is None:
                del options[name]  # "name:" without a value
        return within("data", lambda: cls(**options))

    @cached_property
    def the_tokenizer(self) -> Tokenizer:
        """The loaded tokenizer."""
        return load_tokenizer(self.tokenizer, vocab_size=self.vocab_size)

    def cache_path(self, name: str, split: str) -> Path:
        """Path at which Levanter expects a cache; behind a URL, its location, which has the methods of a path that are needed."""
        component = self.components[name]
        if component.cache_dir is not None:
            root = self._root(component.cache_dir, f"components.{name}.cache_dir")
        elif self.cache_dir is not None:
            root = self._root(self.cache_dir, "cache_dir") / name
        else:
            raise ArgumentError(f"component '{name}': expected a cache_dir, here or in the configuration, found none")
        return root if component.flat_cache else root / split

    def _root(self, path: str, what: str) -> Path:
        if not is_url(path):
            return local_path(path, what)
        if path not in self._roots:
            self._roots[path] = Location.of_any(path)
        return self._roots[path].place

    @cached_property
    def _roots(self) -> dict[str, Location]:
        """Locations of URLs, cached so that each store is asked for its properties only once."""
        return {}

    def _has_weight(self, name: str) -> bool:
        return any(weights.get(name, 0) > 0 for weights in self._stages())

    def plans(self, components: Iterable[str] | None = None) -> list[CachePlan]:
        """All caches of both splits, with their states."""
        chosen = list(self.components) if components is None else list(components)
        cache_plans = []
        for name in chosen:
            if name not in self.components:
                raise ArgumentError(f"unknown component '{name}'{nearest(name, self.components)}")
            component = self.components[name]
            for which in SPLITS:
                if component.flat_cache and which != "train":
                    continue
                path = self.cache_path(name, which)
                sources = () if component.source is None else tuple(component.source.sources(which))
                is_built = ledgers.exists(path)
                is_required = which == "train" and (component.source is None or self._has_weight(name))
                if not sources and not is_built and not is_required:
                    continue
                state = "done" if is_built else "to build" if sources else "missing"
                cache_plans.append(CachePlan(name, which, path, sources, state))
        return cache_plans

    def build(
        self,
        components: Iterable[str] | None = None,
        *,
        splits: Sequence[str] = SPLITS,
        progress: Callable[[CachePlan], Watch | None] | None = None,
        **options: object,
    ) -> list[CachePlan]:
        """Builds all missing caches at the paths that Levanter expects.

        Args:
            components: names; default: all.
            splits: train, validation, or both.
            progress: called with each cache before it is built; returns the ``progress`` argument of :func:`build_cache`.
            **options: options of :func:`build_cache`: layout, storage, dtype, on_error, jobs, keep_shards, overwrite.

        Returns:
            All caches. ``state`` is ``"built"``, ``"done"`` (it existed) or ``"missing"`` (no source and no cache).
        """
        caches = []
        chosen = [plan for plan in self.plans(components) if plan.split in splits]
        for plan in chosen:
            plan.check_free()
        for plan in chosen:
            watch = progress(plan) if progress is not None and plan.sources else None
            caches.append(self.build_plan(plan, watch, **options))
        return caches

    def build_plan(self, plan: CachePlan, progress: Watch | None = None, **options: Any) -> CachePlan:
        """Builds one cache of :meth:`plans`. Options are those of :meth:`build`."""
        if not plan.sources:
            return plan
        if Location.at(plan.path).is_remote:
            if plan.state == "done":
                return plan
            raise ArgumentError(
                "caches are built in local folders: build it with a local cache_dir, and upload it with actshard.push",
                path=plan.path,
            )
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
        """Opens a component's cache."""
        return open_cache(self.cache_path(name, split))

    def _datasets(self, which: str, seq_len: int, names: Iterable[str] | None = None) -> dict[str, Examples]:
        """Examples of a split by component: of these; by default of those with a weight, or with a validation cache."""
        datasets: dict[str, Examples] = {}
        if names is None:
            names = [name for name in self.components if which != "train" or self._has_weight(name)]
        for name in names:
            component = self.components[name]
            if component.flat_cache and which != "train":
                continue
            if which != "train" and not ledgers.exists(self.cache_path(name, which)):
                continue
            cache = self.open(name, which)
            self._warn_of_difference(component, cache)
            datasets[name] = dataset_for_component(
                component,
                cache,
                seq_len,
                eos_id=self.the_tokenizer.eos_id,
                block_cross_document_attention=self.block_cross_document_attention,
                loss_mask_padding=self.loss_mask_padding,
            )
        return datasets

    def _warn_of_difference(self, component: DatasetComponent, cache: TokenCache) -> None:
        """Warns if a cache was built with another tokenizer or format than the configuration's."""
        if type(component.format) not in FORMATS.values():  # of another package: cannot be built here
            return
        form = as_format(component.format)
        tokenizer = None if isinstance(form, PrebuiltFormat) else self.the_tokenizer
        try:
            metadata = processor(form, tokenizer, enforce_eos=self.enforce_eos).metadata()
        except ActshardError:  # for example without a chat template: caches can be read, not built
            metadata = {}
        digest = None if tokenizer is None else tokenizer.digest()
        settings = settings_of(form, digest, BuildOptions(enforce_eos=self.enforce_eos).of_rows())
        differs = settings_difference(cache.ledger, parts_of(form, digest, {}), metadata, settings)
        if differs is not None:
            warn(f"{cache.path}: the cache was built with {differs}, as in the configuration", code="cache-settings")

    def train_sets(
        self, seq_len: int, *, key: int | Key | NDArray[np.generic] = 0, batch_size: int | None = None
    ) -> dict[str, Examples]:
        """Training examples by component, processed in Levanter's order: split, shuffled, reduced to budgets.

        Args:
            seq_len: tokens per example.
            key: seed or key of the shuffles.
            batch_size: for ``max_train_batches``.
        """
        datasets = self._datasets("train", seq_len)
        for name, validation_count in (self.num_validation_sequences or {}).items():
            if name in datasets:
                datasets[name] = self._trainval(datasets[name], validation_count)[0]
        if self.shuffle is not False:
            current = prng_key(key)
            for name, dataset in datasets.items():
                current, sub = split(current)
                datasets[name] = self._shuffled(dataset, sub)
        if self.experiment_budget is not None and self.target_budget is not None:
            ratio = self.experiment_budget / self.target_budget
            datasets = {name: Sliced(dataset, 0, int(len(dataset) * ratio)) for name, dataset in datasets.items()}
        for name, batches in (self.max_train_batches or {}).items():
            if name in datasets:
                if batch_size is None:
                    raise ArgumentError("max_train_batches: expected batch_size=, found none")
                if batches * batch_size > len(datasets[name]):
                    raise ArgumentError(
                        f"max_train_batches: {batches} batches of '{name}' exceed its {many(len(datasets[name]), 'example')}"
                    )
                datasets[name] = Sliced(datasets[name], 0, batches * batch_size)
        return datasets

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

    def _trainval(self, dataset: Examples, validation_count: int) -> tuple[Examples, Examples]:
        if validation_count > len(dataset):
            raise ArgumentError(
                f"num_validation_sequences: {validation_count} exceeds the dataset's {len(dataset)} examples"
            )
        if self.shuffle_before_trainval_split:
            dataset = Permuted(dataset, permutation("feistel", len(dataset), 0))
        cut = len(dataset) - validation_count
        return Sliced(dataset, 0, cut), Sliced(dataset, cut, len(dataset))

    def train_set(self, seq_len: int, batch_size: int, *, key: int | Key | NDArray[np.generic] = 0) -> Mixture:
        """The mixture for training in Levanter: ``get_batch(range(step * batch_size, (step + 1) * batch_size))``."""
        mix, shuffle = split(prng_key(key))
        weights = self.train_weights
        if weights is None:
            raise ArgumentError("expected components to train on, found none")
        if not isinstance(weights, Mapping):
            weights = [(step * batch_size, stage) for step, stage in weights]
        return Mixture(
            self.train_sets(seq_len, key=shuffle, batch_size=batch_size),
            weights,
            block_size=self.mixture_block_size,
            key=mix,
            stop_strategy=self.stop_strategy,
        )

    def validation_sets(self, seq_len: int) -> dict[str, Examples]:
        """Validation examples by component."""
        datasets = self._datasets("validation", seq_len)
        if self.num_validation_sequences:
            train = self._datasets("train", seq_len, self.num_validation_sequences)
            for name, validation_count in self.num_validation_sequences.items():
                datasets[name] = self._trainval(train[name], validation_count)[1]
        return datasets
