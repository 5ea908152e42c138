"""A dump's metadata and shards as saev's own classes, and the mapping from item numbers to positions."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from actshard.base._json import Fields, read_json
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ArgumentTypeError,
    FormatError,
    MissingFileError,
    OutOfRangeError,
    UnsafePickleError,
    UnsupportedError,
)
from actshard.base.location import Location
from actshard.formats.saev.read import hashes

if TYPE_CHECKING:
    from types import UnionType

    from _typeshed import DataclassInstance


Tokens = Literal["special", "content", "all"]


class WrongError(ArgumentError, AssertionError):
    """A setting that is invalid for the dump."""


def expect(name: str, value: object, kind: type | UnionType, words: str) -> None:
    """Raises ArgumentTypeError unless a value has a type. bool does not count as int."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ArgumentTypeError(f"{name}: expected {words}, found {value!r:.80}")


def expect_integer(name: str, value: Any, least: int | None = None) -> None:
    """Raises unless a value is an integer of at least ``least``."""
    expect(name, value, int | np.integer, "an integer")
    if least is not None and value < least:
        raise ArgumentError(f"{name}: expected an integer of at least {least}, found {value}")


class PixelAgg(enum.Enum):
    """How pixel labels were aggregated to patch labels."""

    MAJORITY = "majority"
    PREFER_FG = "prefer-fg"


_LEAST = {"content_tokens_per_example": 1, "d_model": 1, "n_examples": 0, "max_tokens_per_shard": 1}
"""Smallest values of the numbers in the metadata."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """``metadata.json`` of a dump, protocol 2.1. Fields and their order are upstream's and determine the hash."""

    family: str
    ckpt: str
    layers: tuple[int, ...]
    content_tokens_per_example: int
    cls_token: bool
    d_model: int
    n_examples: int
    max_tokens_per_shard: int
    data: str
    dataset: pathlib.Path
    pixel_agg: PixelAgg = PixelAgg.MAJORITY
    dtype: str = "float32"
    protocol: str = "2.1"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            expect_integer(name, getattr(self, name), least)
        for name in ("family", "ckpt", "data", "dtype", "protocol"):
            expect(name, getattr(self, name), str, "text")
        expect("cls_token", self.cls_token, bool, "a bool")
        expect("pixel_agg", self.pixel_agg, PixelAgg, "a PixelAgg")
        expect("layers", self.layers, tuple, "a tuple of integers")
        for layer in self.layers:
            expect_integer("layers", layer)
        if not self.layers:
            raise WrongError("layers: expected at least one layer")
        if self.examples_per_shard < 1:
            raise WrongError("At least one example per shard must fit; increase max_tokens_per_shard.")

    @classmethod
    def load(cls, shards_dir: pathlib.Path | str) -> Metadata:
        """Reads ``metadata.json``.

        Raises:
            MissingFileError, FormatError: the file is missing, or a field is missing or invalid.
            UnsupportedError: another major version of the protocol.
        """
        path = pathlib.Path(shards_dir) / "metadata.json"
        fields = Fields(read_json(path), path)
        choices = [f.name for f in dataclasses.fields(cls)]
        values = {k: v for k, v in fields.value.items() if k in choices}
        needed = (f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING)
        if lacking := [name for name in needed if name not in values]:
            raise FormatError(
                f"field '{lacking[0]}': missing: expected a dump of protocol 2.1, as saev's own loaders. actshard.open also reads "
                "dumps of older protocols.",
                path=path,
                code="metadata",
            )
        for name, least in _LEAST.items():
            values[name] = fields.integer(name, minimum=least)
        for name in ("family", "ckpt", "data", "dataset", "dtype", "protocol"):
            if name in values:
                values[name] = fields.text(name)
        values["cls_token"] = fields.boolean("cls_token")
        values["layers"] = fields.integers("layers")
        values["dataset"] = pathlib.Path(values["dataset"])
        choices = [agg.value for agg in PixelAgg]
        if values.get("pixel_agg", choices[0]) not in choices:
            raise fields.error("pixel_agg", " or ".join(map(repr, choices)))
        values["pixel_agg"] = PixelAgg(values.get("pixel_agg", choices[0]))
        if not re.fullmatch(r"2\.\d{1,6}(\.\d{1,6})?", values.get("protocol", "2.1")):
            raise UnsupportedError(f"protocol: expected 2.1, found {values['protocol']!r:.50}", path=path)
        return cls(**values)

    def _plain(self) -> dict[str, object]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return values | {"layers": list(self.layers), "dataset": str(self.dataset), "pixel_agg": self.pixel_agg.value}

    def dump(self, shards_root: pathlib.Path | str) -> None:
        """Writes ``metadata.json`` into the folder of this hash below ``shards_root``."""
        folder = pathlib.Path(shards_root) / self.hash
        folder.mkdir(exist_ok=True)
        (folder / "metadata.json").write_text(json.dumps(self._plain(), indent=2, ensure_ascii=False), encoding="utf-8")

    @property
    def hash(self) -> str:
        """The folder's name: the first 8 hex digits of the SHA-256 of the fields as compact JSON, in declaration order."""
        return hashes(self._plain())[0]

    @property
    def tokens_per_example(self) -> int:
        """Content tokens, plus one with CLS."""
        return self.content_tokens_per_example + int(self.cls_token)

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return math.ceil(self.n_examples / self.examples_per_shard)

    @property
    def examples_per_shard(self) -> int:
        """Number of examples in each shard but the last."""
        return self.max_tokens_per_shard // (self.tokens_per_example * len(self.layers))

    @property
    def shard_shape(self) -> tuple[int, int, int, int]:
        """Shape of a shard's array: (examples, layers, tokens, d_model)."""
        return (self.examples_per_shard, len(self.layers), self.tokens_per_example, self.d_model)

    def make_data_cfg(self) -> NoReturn:
        """Not supported: the ``data`` field is a pickle, which may execute code.

        Raises:
            UnsafePickleError: always.
        """
        raise UnsafePickleError("field 'data': is a pickle, which actshard never executes. Use saev's own Metadata.")


@dataclasses.dataclass(frozen=True)
class Shard:
    """A line of ``shards.json``."""

    name: str
    n_examples: int


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """``shards.json``: the shards, in order."""

    shards: list[Shard] = dataclasses.field(default_factory=list)

    @classmethod
    def load(cls, shards_dir: pathlib.Path | str) -> ShardInfo:
        """Reads ``shards.json``. If it is missing, the error lists the folder's contents."""
        path = pathlib.Path(shards_dir) / "shards.json"
        if not Location.at(path).exists():
            raise MissingFileError(_instead(path.parent), path=path)
        value = read_json(path)
        entries = [
            Fields(entry, path, f"[{i}]") for i, entry in enumerate(value if isinstance(value, list) else [value])
        ]
        return cls([Shard(e.text("name"), e.integer("n_examples", minimum=0)) for e in entries])

    def dump(self, shards_dir: pathlib.Path | str) -> None:
        """Writes ``shards.json``."""
        text = json.dumps([dataclasses.asdict(s) for s in self.shards], indent=2)
        (pathlib.Path(shards_dir) / "shards.json").write_text(text, encoding="utf-8")

    def append(self, shard: Shard) -> None:
        """Adds a shard."""
        self.shards.append(shard)

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, i: Any) -> Any:
        return self.shards[i]

    def __iter__(self) -> Iterator[Shard]:
        yield from self.shards

    def validate(self, shards_dir: pathlib.Path | str) -> None:
        """Checks that every listed file is a non-empty regular file.

        Raises:
            MissingFileError: lists all problems, with saev's texts.
        """
        folder = pathlib.Path(shards_dir)
        wrong: dict[str, list[str]] = {"Missing": [], "Empty": [], "Unreadable": [], "Not regular": []}
        for shard in self.shards:
            path = folder / shard.name
            try:
                stat = Location.at(path).found()
            except ActshardError:
                wrong["Unreadable"].append(str(path.resolve()))
                continue
            if stat is None:
                wrong["Missing"].append(str(path.resolve()))
            elif stat.kind != "file":
                wrong["Not regular"].append(str(path.resolve()))
            elif stat.size == 0:
                wrong["Empty"].append(str(path.resolve()))
        problems = [f"{what} files ({len(paths)}): {', '.join(paths)}" for what, paths in wrong.items() if paths]
        if problems:
            raise MissingFileError(f"Shard validation failed. {'. '.join(problems)}", path=folder.resolve())


_AGAIN = "Re-run inference to regenerate shards on /fs/scratch."
"""saev's own hint, for programs that look for it: /fs/scratch is its authors' file system."""


def _instead(folder: pathlib.Path) -> str:
    """saev's message for a missing ``shards.json``, with the folder's contents."""
    where = folder.resolve(strict=False)
    kind = Location.at(folder).kind()
    if kind is None:
        return f"Shard directory is missing: '{where}'. Scratch shards may have been cleaned. {_AGAIN}"
    if kind != "folder":
        return f"Expected shard directory at '{where}', but it is not a directory."
    acts = [entry.name for entry in Location.at(folder).entries("acts*.bin")]
    message = f"Shard directory exists: '{where}'. acts*.bin files found: {len(acts)}."
    if not acts:
        return f"{message} No shard binaries were found. {_AGAIN}"
    shown = ", ".join(acts[:5]) + (", ..." if len(acts) > 5 else "")
    message += f" Example shard files: {shown}."
    return f"{message} This looks like an incomplete or older shard layout without shards.json. {_AGAIN}"


@dataclasses.dataclass(frozen=True)
class Index:
    """Position of an item."""

    idx: int
    example_idx: int
    content_token_idx: int
    shard_idx: int
    example_idx_in_shard: int
    layer_idx_in_shard: int
    token_idx_in_shard: int


class IndexMap:
    """Maps an item's number to its position.

    For content tokens of one layer, ``i = example * content_tokens + token``. ``tokens="all"`` counts stored tokens, CLS first;
    ``"special"`` counts one per example. With ``layer="all"`` the layers of a token are consecutive:
    ``i = (example * tokens + token) * n_layers + layer position``.
    """

    def __init__(self, md: Metadata, tokens: Tokens, layer: int | Literal["all"]) -> None:
        if tokens not in ("special", "content", "all"):
            raise ArgumentError(f'tokens: expected "special", "content" or "all", found {tokens!r}')
        if tokens == "special" and not md.cls_token:
            raise WrongError('tokens="special": expected a dump with a [CLS] token, found none')
        if layer != "all" and layer not in md.layers:
            raise WrongError(f"Layer {layer} not in {md.layers}")
        self.md, self.tokens, self.layer = md, tokens, layer
        self.layer_idx_lookup = {name: i for i, name in enumerate(md.layers)}
        self._first = 0 if tokens != "content" else int(md.cls_token)
        self._count = {"special": 1, "content": md.content_tokens_per_example, "all": md.tokens_per_example}[tokens]
        self._layers = len(md.layers) if layer == "all" else 1

    def __len__(self) -> int:
        return self.md.n_examples * self._count * self._layers

    def place(self, idx: Any) -> tuple[int, int, int]:
        """Returns (example, stored token, index of the layer). Raises OutOfRangeError."""
        i = int(idx)
        if not 0 <= i < len(self):
            raise OutOfRangeError(f"Index {i} out of range for dataset of length {len(self)}")
        i, k = divmod(i, self._layers)
        example, token = divmod(i, self._count)
        return example, token + self._first, k if self.layer == "all" else self.layer_idx_lookup[self.layer]

    def from_global(self, idx: Any) -> Index:
        """Returns the position of an item."""
        example, token, layer = self.place(idx)
        shard, example_in_shard = divmod(example, self.md.examples_per_shard)
        return Index(int(idx), example, token - int(self.md.cls_token), shard, example_in_shard, layer, token)


# Settings of the loaders, checked on construction.


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
