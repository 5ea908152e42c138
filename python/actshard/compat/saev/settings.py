"""Settings of the loaders, checked on construction."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING, Literal

import numpy as np

from actshard.base.errors import (
    ArgumentError,
    UnsupportedError,
)
from actshard.compat.saev.dumps import Tokens, expect, expect_integer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SCRATCH = pathlib.Path("$SAEV_SCRATCH/saev/shards/abcdefg")


class NotDoneError(UnsupportedError, RuntimeError):
    """An option that saev's loader does not implement either."""


def _check(cfg: DataclassInstance) -> None:
    """Checks the types of a configuration's values. Converts the path to Path and labels to a list."""
    for field in dataclasses.fields(cfg):
        name, value = field.name, getattr(cfg, field.name)
        if name == "shards":
            expect(name, value, str | os.PathLike, "a path")
            object.__setattr__(cfg, name, pathlib.Path(value))
        elif name == "tokens":
            if value not in ("special", "content", "all"):
                raise ArgumentError(f'tokens: expected "special", "content" or "all", found {value!r:.80}')
        elif name == "layer":
            if value != "all":
                expect(name, value, int | np.integer, 'an integer or "all"')
        elif name == "ignore_labels":
            expect(name, value, list | tuple, "a list of integers")
            for label in value:
                expect_integer(name, label)
            object.__setattr__(cfg, name, list(value))
        elif isinstance(field.default, bool):
            expect(name, value, bool, "a bool")
        elif isinstance(field.default, int):
            expect_integer(name, value, {"batch_size": 1, "seed": 0}.get(name))
        else:
            expect(name, value, int | float | np.number, "a number")


@dataclasses.dataclass(frozen=True)
class IndexedConfig:
    """Settings of :class:`IndexedDataset`: a dump's folder, the tokens, and a layer (a name or ``"all"``)."""

    shards: pathlib.Path = _SCRATCH
    tokens: Tokens = "content"
    layer: int | Literal["all"] = -2
    debug: bool = False

    def __post_init__(self) -> None:
        _check(self)


@dataclasses.dataclass(frozen=True)
class OrderedConfig:
    """Settings of :class:`OrderedDataLoader`."""

    shards: pathlib.Path = _SCRATCH
    tokens: Literal["content"] = "content"
    layer: int | Literal["all"] = -2
    batch_size: int = 1024 * 16
    batch_timeout_s: float = 30.0
    drop_last: bool = False
    buffer_size: int = 64
    debug: bool = False
    log_every_s: float = 30.0

    def __post_init__(self) -> None:
        _check(self)
        if self.tokens != "content":
            raise NotDoneError(f'tokens: expected "content", which the ordered loader requires, found {self.tokens!r}')


@dataclasses.dataclass(frozen=True)
class ShuffledConfig:
    """Settings of :class:`ShuffledDataLoader`."""

    shards: pathlib.Path = _SCRATCH
    tokens: Tokens = "content"
    layer: int | Literal["all"] = -1
    batch_size: int = 1024 * 16
    drop_last: bool = False
    scale_norm: bool = False
    ignore_labels: list[int] = dataclasses.field(default_factory=list)
    n_threads: int = 4
    buffer_size: int = 64
    min_buffer_fill: float = 0.0
    batch_timeout_s: float = 30.0
    seed: int = 17
    debug: bool = False
    log_every_s: float = 30.0
    use_tmpdir: bool = False

    def __post_init__(self) -> None:
        _check(self)


def make_ordered_config(shuffled_cfg: ShuffledConfig, **overrides: object) -> OrderedConfig:
    """Builds an ordered loader's settings from a shuffled one's and ``overrides``. An unknown override is a TypeError."""
    names = [f.name for f in dataclasses.fields(OrderedConfig) if hasattr(shuffled_cfg, f.name)]
    return OrderedConfig(**{**{name: getattr(shuffled_cfg, name) for name in names}, **overrides})
