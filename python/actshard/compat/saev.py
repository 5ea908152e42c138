"""``saev.data``'s loaders, reading through actshard.

>>> from actshard.compat.saev import ShuffledConfig, ShuffledDataLoader          # was: from saev.data import ...

Fields, keys, types and errors are those of OSU-NLP-Group/saev as of March 2026. What is better here:

- no process is started: reading is on threads, begins at once and ends with the loop;
- :class:`ShuffledDataLoader` gives the same order for the same seed, and another in each pass;
- it takes ``tokens="special"`` and ``"all"`` and ``layer="all"``, which upstream accepts and then fails over, and honours
  ``drop_last``, which upstream ignores;
- :class:`IndexedDataset` reads special tokens right (upstream divides where it should take the remainder), takes ``"all"``, and
  reads whole batches with ``__getitems__``;
- a dump does not have to lie in ``.../saev/shards/``;
- rows of zeros that fill up shorter examples are left out by the loaders, where actshard wrote the dump.

What is otherwise: ``n_threads``, ``min_buffer_fill``, ``batch_timeout_s``, ``log_every_s`` and ``debug`` are accepted and have no
effect: a window is filled before its first batch, and there is nothing to wait for. ``buffer_size`` batches are how much the
shuffled loader holds. Upstream's ``data`` field is a pickle; it is never unpickled here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import enum
import fcntl
import json
import logging
import math
import os
import pathlib
import re
import shutil
import stat
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, TypedDict

import numpy as np
from numpy.typing import NDArray

import actshard
from actshard.errors import (
    ActshardError,
    ActshardWarning,
    ArgumentError,
    ArgumentTypeError,
    MissingExtraError,
    MissingFileError,
    OutOfRangeError,
    UnsafePickleError,
    UnsupportedError,
    from_os,
)
from actshard.formats.saev.read import hashes
from actshard.stream import Stream

try:
    import torch
except ImportError as error:
    raise MissingExtraError.of("actshard.compat.saev", "torch") from error

__all__ = [
    "Example",
    "ExampleBatch",
    "Index",
    "IndexMap",
    "IndexedConfig",
    "IndexedDataset",
    "Metadata",
    "OrderedConfig",
    "OrderedDataLoader",
    "PixelAgg",
    "Shard",
    "ShardInfo",
    "ShuffledConfig",
    "ShuffledDataLoader",
    "make_ordered_config",
]

Tokens = Literal["special", "content", "all"]
_SCRATCH = pathlib.Path("$SAEV_SCRATCH/saev/shards/abcdefg")
_SLOT_OVERHEAD = 28
"""Bytes that a pool takes per row beside it; so that a pool holds as many rows as upstream's reservoir."""


class NotSavedError(MissingFileError, RuntimeError):
    """No such folder."""


class WrongError(ArgumentError, AssertionError):
    """A setting that does not fit the dump."""


class LoaderError(ActshardError, RuntimeError):
    """Reading failed; ``__cause__`` is the error."""

    kind = "loader"


class NotDoneError(UnsupportedError, RuntimeError):
    """What saev's loader does not do either."""


def _expect(name: str, value: Any, kind: Any, words: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ArgumentTypeError(f"{name}: expected {words}, found {value!r:.80}")


def _integer(name: str, value: Any, least: int | None = None) -> None:
    _expect(name, value, int | np.integer, "an integer")
    if least is not None and value < least:
        raise ArgumentError(f"{name}: expected an integer from {least} on, found {value}")


def _check(cfg: Any) -> None:
    """Types of a configuration's values, when it is made; a path given as text becomes a Path, other sequences of labels a list."""
    for field in dataclasses.fields(cfg):
        name, value = field.name, getattr(cfg, field.name)
        if name == "shards":
            _expect(name, value, str | os.PathLike, "a path")
            object.__setattr__(cfg, name, pathlib.Path(value))
        elif name == "tokens":
            if value not in ("special", "content", "all"):
                raise ArgumentError(f'tokens: expected "special", "content" or "all", found {value!r:.80}')
        elif name == "layer":
            if value != "all":
                _expect(name, value, int | np.integer, 'an integer or "all"')
        elif name == "ignore_labels":
            _expect(name, value, list | tuple, "a list of integers")
            for label in value:
                _integer(name, label)
            object.__setattr__(cfg, name, list(value))
        elif isinstance(field.default, bool):
            _expect(name, value, bool, "a bool")
        elif isinstance(field.default, int):
            _integer(name, value, {"batch_size": 1, "seed": 0}.get(name))
        else:
            _expect(name, value, int | float | np.number, "a number")


class Example(TypedDict, total=False):
    """An item of :class:`IndexedDataset`."""

    act: Any
    example_idx: int
    token_idx: int
    token_label: int
    layer: int


class ExampleBatch(TypedDict, total=False):
    """A batch of the loaders."""

    act: Any
    example_idx: Any
    token_idx: Any
    token_labels: Any
    layer: Any


class PixelAgg(enum.Enum):
    """How pixel labels became patch labels."""

    MAJORITY = "majority"
    PREFER_FG = "prefer-fg"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """``metadata.json`` of a dump, protocol 2.1; fields and their order are upstream's, and decide the hash."""

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
        for name in ("content_tokens_per_example", "d_model", "n_examples", "max_tokens_per_shard"):
            _integer(name, getattr(self, name), 1)
        for name in ("family", "ckpt", "data", "dtype", "protocol"):
            _expect(name, getattr(self, name), str, "text")
        _expect("cls_token", self.cls_token, bool, "a bool")
        _expect("pixel_agg", self.pixel_agg, PixelAgg, "a PixelAgg")
        _expect("layers", self.layers, tuple, "a tuple of integers")
        for layer in self.layers:
            _integer("layers", layer)
        if not self.layers:
            raise WrongError("layers: expected at least one layer")
        if self.examples_per_shard < 1:
            raise WrongError("At least one example per shard must fit; increase max_tokens_per_shard.")

    @classmethod
    def load(cls, shards_dir: pathlib.Path | str) -> Metadata:
        """Reads ``metadata.json``.

        Raises:
            MissingFileError, FormatError: there is none, or a field is missing or damaged.
            UnsupportedError: another major version of the protocol.
        """
        from actshard._json import Fields, read_json

        path = pathlib.Path(shards_dir) / "metadata.json"
        fields = Fields(read_json(path), path)
        known = [f.name for f in dataclasses.fields(cls)]
        values = {k: v for k, v in fields.value.items() if k in known}
        needed = (f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING)
        if lacking := [name for name in needed if name not in values]:
            raise fields.error(lacking[0], "a field of protocol 2.1; actshard.open reads older dumps")
        for name in ("content_tokens_per_example", "d_model", "n_examples", "max_tokens_per_shard"):
            values[name] = fields.integer(name)
        for name in ("family", "ckpt", "data", "dataset", "dtype", "protocol"):
            if name in values:
                values[name] = fields.text(name)
        values["cls_token"] = fields.boolean("cls_token")
        values["layers"] = fields.integers("layers")
        values["dataset"] = pathlib.Path(values["dataset"])
        known = [agg.value for agg in PixelAgg]
        if values.get("pixel_agg", known[0]) not in known:
            raise fields.error("pixel_agg", " or ".join(map(repr, known)))
        values["pixel_agg"] = PixelAgg(values.get("pixel_agg", known[0]))
        if not re.fullmatch(r"2\.\d{1,6}(\.\d{1,6})?", values.get("protocol", "2.1")):
            raise UnsupportedError(f"protocol: expected 2.1, found {values['protocol']!r:.50}", path=path)
        return cls(**values)

    def _plain(self) -> dict[str, Any]:
        made = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return made | {"layers": list(self.layers), "dataset": str(self.dataset), "pixel_agg": self.pixel_agg.value}

    def dump(self, shards_root: pathlib.Path | str) -> None:
        """Writes ``metadata.json`` into the folder of this hash below ``shards_root``."""
        folder = pathlib.Path(shards_root) / self.hash
        folder.mkdir(exist_ok=True)
        (folder / "metadata.json").write_text(json.dumps(self._plain(), indent=2, ensure_ascii=False), encoding="utf-8")

    @property
    def hash(self) -> str:
        """The folder's name: 8 hex digits of the SHA-256 of the fields as compact JSON, in their order."""
        return hashes(self._plain())[0]

    @property
    def tokens_per_example(self) -> int:
        """Content tokens, and one more with CLS."""
        return self.content_tokens_per_example + int(self.cls_token)

    @property
    def n_shards(self) -> int:
        """Shards that hold all examples."""
        return math.ceil(self.n_examples / self.examples_per_shard)

    @property
    def examples_per_shard(self) -> int:
        """Examples in every shard but the last."""
        return self.max_tokens_per_shard // (self.tokens_per_example * len(self.layers))

    @property
    def shard_shape(self) -> tuple[int, int, int, int]:
        """(examples, layers, tokens, d_model) of a shard's array."""
        return (self.examples_per_shard, len(self.layers), self.tokens_per_example, self.d_model)

    def make_data_cfg(self) -> NoReturn:
        """Refused: the ``data`` field is a pickle, which may run anything.

        Raises:
            UnsafePickleError: always.
        """
        raise UnsafePickleError("the field 'data' is a pickle and is not unpickled; saev's own Metadata does that")


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
        """Reads ``shards.json``; says what is there instead if it is missing."""
        from actshard._json import Fields, read_json

        folder = pathlib.Path(shards_dir)
        path = folder / "shards.json"
        if not path.exists():
            raise MissingFileError(_instead(folder), path=path)
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
        """Every listed file is a regular file that holds something.

        Raises:
            MissingFileError: with all that is wrong, in saev's words.
        """
        folder = pathlib.Path(shards_dir)
        wrong: dict[str, list[str]] = {"Missing": [], "Empty": [], "Unreadable": [], "Not regular": []}
        for shard in self.shards:
            path = folder / shard.name
            try:
                found = path.stat()
            except FileNotFoundError:
                wrong["Missing"].append(str(path.resolve()))
            except OSError:
                wrong["Unreadable"].append(str(path.resolve()))
            else:
                if not stat.S_ISREG(found.st_mode):
                    wrong["Not regular"].append(str(path.resolve()))
                elif found.st_size == 0:
                    wrong["Empty"].append(str(path.resolve()))
        said = [f"{what} files ({len(paths)}): {', '.join(paths)}" for what, paths in wrong.items() if paths]
        if said:
            raise MissingFileError(f"Shard validation failed. {'. '.join(said)}", path=folder.resolve())


def _instead(folder: pathlib.Path) -> str:
    """What is there, where shards.json is not."""
    where = folder.resolve(strict=False)
    if not folder.exists():
        return f"Shard directory is missing: '{where}'. Scratch shards may have been cleaned; re-run inference to regenerate them."
    if not folder.is_dir():
        return f"Expected shard directory at '{where}', but it is not a directory."
    acts = sorted(p.name for p in folder.glob("acts*.bin"))
    found = f"Shard directory exists: '{where}'. acts*.bin files found: {len(acts)}."
    if not acts:
        return f"{found} No shard binaries were found. Re-run inference to regenerate shards."
    shown = ", ".join(acts[:5]) + (", ..." if len(acts) > 5 else "")
    return (
        f"{found} Example shard files: {shown}. This looks like an incomplete or older shard layout without shards.json. "
        "Re-run inference to regenerate shards."
    )


@dataclasses.dataclass(frozen=True)
class Index:
    """Where an item is."""

    idx: int
    example_idx: int
    content_token_idx: int
    shard_idx: int
    example_idx_in_shard: int
    layer_idx_in_shard: int
    token_idx_in_shard: int


class IndexMap:
    """From an item's number to its place.

    Content tokens of one layer: ``i = example * content_tokens + token``. ``tokens="all"`` counts stored tokens, CLS first;
    ``"special"`` one per example. With ``layer="all"`` the layers of a token follow each other:
    ``i = (example * tokens + token) * n_layers + layer position``.
    """

    def __init__(self, md: Metadata, tokens: Tokens, layer: int | Literal["all"]) -> None:
        if tokens not in ("special", "content", "all"):
            raise ArgumentError(f'tokens: expected "special", "content" or "all", found {tokens!r}')
        if tokens == "special" and not md.cls_token:
            raise WrongError('tokens="special": the dump has no [CLS] token')
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
        """(example, stored token, position of the layer); checked."""
        i = int(idx)
        if not 0 <= i < len(self):
            raise OutOfRangeError(f"Index {i} out of range for dataset of length {len(self)}")
        i, k = divmod(i, self._layers)
        example, token = divmod(i, self._count)
        return example, token + self._first, k if self.layer == "all" else self.layer_idx_lookup[self.layer]

    def from_global(self, idx: Any) -> Index:
        """The place of an item."""
        example, token, layer = self.place(idx)
        shard, inside = divmod(example, self.md.examples_per_shard)
        return Index(int(idx), example, token - int(self.md.cls_token), shard, inside, layer, token)


@dataclasses.dataclass(frozen=True)
class IndexedConfig:
    """Settings of :class:`IndexedDataset`: a dump's folder, which tokens, which layer (a name, or ``"all"``)."""

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
            raise NotDoneError(f'tokens: the ordered loader reads "content" only, found {self.tokens!r}')


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


def make_ordered_config(shuffled_cfg: ShuffledConfig, **overrides: Any) -> OrderedConfig:
    """An ordered loader's settings from a shuffled one's; ``overrides`` win, and one that there is no field for is a TypeError."""
    names = [f.name for f in dataclasses.fields(OrderedConfig) if hasattr(shuffled_cfg, f.name)]
    return OrderedConfig(**{**{name: getattr(shuffled_cfg, name) for name in names}, **overrides})


def _open(folder: pathlib.Path) -> tuple[Metadata, actshard.Store]:
    """What all loaders do first, in upstream's order; nothing waits until iteration."""
    if not pathlib.Path(folder).is_dir():
        raise NotSavedError(f"Activations are not saved at '{folder}'.")
    md = Metadata.load(folder)
    ShardInfo.load(folder).validate(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ActshardWarning)  # upstream never minds a folder's name
        return md, actshard.open(folder, format="saev")


class IndexedDataset(torch.utils.data.Dataset):
    """Rows by number.

    Every stored token has a number, also those that only fill up shorter examples.

    An item is ``{"act": (d_model,) float32, "example_idx": int, "token_idx": int}``, with ``"token_label": int`` where the dump has
    labels and the token one. With ``layer="all"`` also ``"layer": int``, the layer's name. ``token_idx`` counts content tokens; -1
    is CLS. :class:`IndexMap` tells the order. Loaders that ask for whole batches get them from ``__getitems__`` in one read.
    """

    Example = Example

    def __init__(self, cfg: IndexedConfig) -> None:
        _expect("cfg", cfg, IndexedConfig, "an IndexedConfig")
        self.cfg = cfg
        self.md, self._store = _open(cfg.shards)
        self.index_map = IndexMap(self.md, cfg.tokens, cfg.layer)
        self.labels_mmap = self._store.labels
        self._cls = int(self.md.cls_token)

    def transform(self, act: NDArray[np.float32]) -> Any:
        """What is made of a row; subclasses may do more."""
        return torch.from_numpy(act)

    @property
    def layer_idx(self) -> int:
        """Position of the layer that was chosen.

        Raises:
            ArgumentError: all were.
        """
        if self.cfg.layer == "all":
            raise ArgumentError('layer="all": there is no one position; every item names its layer')
        return self.index_map.layer_idx_lookup[self.cfg.layer]

    @property
    def d_model(self) -> int:
        """Elements per row."""
        return self.md.d_model

    def __len__(self) -> int:
        return len(self.index_map)

    def __getitem__(self, i: int) -> dict[str, Any]:
        example, token, at = self.index_map.place(i)
        layer = self.md.layers[at]
        made = {
            "act": self.transform(self._store.gather(layer, example, token)[0]),
            "example_idx": example,
            "token_idx": token - self._cls,
        }
        if self.labels_mmap is not None and token >= self._cls:
            made["token_label"] = int(self.labels_mmap[example, token - self._cls])
        if self.cfg.layer == "all":
            made["layer"] = layer
        return made

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        numbers = np.asarray(indices, np.int64)
        n = len(self)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= n):
            bad = int(numbers[(numbers < 0) | (numbers >= n)][0])
            raise OutOfRangeError(f"Index {bad} out of range for dataset of length {n}")
        m = self.index_map
        rest, at = np.divmod(numbers, m._layers)
        examples, tokens = np.divmod(rest, m._count)
        tokens = tokens + m._first
        if m.layer == "all":
            rows = np.empty((len(numbers), self.d_model), np.float32)
            for k, layer in enumerate(self.md.layers):
                mine = np.flatnonzero(at == k)
                rows[mine] = self._store.gather(layer, examples[mine], tokens[mine])
        else:
            rows = self._store.gather(m.layer, examples, tokens)
        plain = type(self).transform is IndexedDataset.transform
        acts = torch.from_numpy(rows).unbind() if plain else [self.transform(row) for row in rows]
        places = (examples.tolist(), (tokens - self._cls).tolist())
        made = [{"act": a, "example_idx": e, "token_idx": t} for a, e, t in zip(acts, *places, strict=True)]
        if self.labels_mmap is not None and self.cfg.tokens != "special":
            labels = self.labels_mmap[examples, np.maximum(tokens - self._cls, 0)].tolist()
            for item, label in zip(made, labels, strict=True):
                if item["token_idx"] >= 0:
                    item["token_label"] = label
        if m.layer == "all":
            for item, k in zip(made, at.tolist(), strict=True):
                item["layer"] = self.md.layers[k]
        return made


class _Reservoir:
    """What a monitor asks a loader's buffer."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader

    def fill(self) -> float:
        """The share of the buffer that is filled: windows are filled before their first batch, so 1 within a loop, else 0."""
        live = self._loader._live
        return 1.0 if live is not None and live.reads else 0.0


class _Loader:
    """What both loaders have."""

    ExampleBatch = ExampleBatch
    cfg: OrderedConfig | ShuffledConfig

    def __init__(self) -> None:
        self._live: Any = None

    @property
    def n_batches(self) -> int:
        """Batches per pass."""
        return len(self)

    @property
    def n_samples(self) -> int:
        """Rows per pass, before ``drop_last``."""
        return self._n_samples

    @property
    def batch_size(self) -> int:
        """Rows per batch."""
        return self.cfg.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a short last batch is left out."""
        return self.cfg.drop_last

    @property
    def reservoir(self) -> _Reservoir:
        """The buffer, as far as a monitor asks for it."""
        return _Reservoir(self)

    @property
    def manager_pid(self) -> int:
        """-1: there is no manager process, which upstream says of one that does not run."""
        return -1

    _n_samples: int

    def __len__(self) -> int:
        full, rest = divmod(self.n_samples, self.cfg.batch_size)
        return full + bool(rest and not self.cfg.drop_last)

    def _batches(self, stream: Stream) -> Iterator[Any]:
        """A stream's batches; failures as upstream's users catch them. The loop before, if there is one, fails."""
        if self._live is not None:
            self._live.close("another loop over this loader was begun; make a loader for each")
        live: Any = iter(stream)
        self._live = live
        try:
            while True:
                try:
                    batch = next(live)
                except StopIteration:
                    return
                except ActshardError as error:
                    raise LoaderError(error.detail, path=error.path, offset=error.offset) from error
                yield batch
        finally:
            live.close()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.close()

    def shutdown(self) -> None:
        """Stops reading; may be called at any time. The next loop begins anew."""
        self._stop()


class OrderedDataLoader(_Loader):
    """All content tokens of a layer in stored order.

    Batches are dicts of ``act`` (b, d_model) float32, ``example_idx`` and ``token_idx`` (b,) int64, and ``token_labels`` (b,) int64
    where the dump has labels. Every loop begins with the first batch.

    Raises:
        RuntimeError: (:class:`LoaderError`) while iterating: ``layer="all"``, or a shard that disappeared.
    """

    def __init__(self, cfg: OrderedConfig) -> None:
        super().__init__()
        _expect("cfg", cfg, OrderedConfig, "an OrderedConfig")
        self.cfg: OrderedConfig = cfg
        self.md, self._store = _open(cfg.shards)
        if cfg.layer != "all" and cfg.layer not in self.md.layers:
            raise WrongError(f"Layer {cfg.layer} not in {self.md.layers}")
        layers = len(self.md.layers) if cfg.layer == "all" else 1
        lengths = self._store.content_lengths
        content = self.md.n_examples * self.md.content_tokens_per_example if lengths is None else int(lengths.sum())
        self._n_samples = content * layers
        self._cls = int(self.md.cls_token)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        cfg = self.cfg
        if cfg.layer == "all":
            raise NotDoneError('layer="all": the ordered loader reads one layer; store.stream("all", ...) reads all')
        stream = self._store.stream(cfg.layer, cfg.batch_size, drop_last=cfg.drop_last)
        for batch in self._batches(stream):
            made = {
                "act": torch.from_numpy(batch.activations),
                "example_idx": torch.from_numpy(batch.examples),
                "token_idx": torch.from_numpy(batch.tokens - self._cls),
            }
            if batch.labels is not None:
                made["token_labels"] = torch.from_numpy(batch.labels.astype(np.int64))
            yield made


class ShuffledDataLoader(_Loader):
    """Tokens in a random order.

    Batches are dicts of ``act`` (b, d_model) float32, ``example_idx`` and ``token_idx`` (b,) int32. ``token_idx`` counts content
    tokens, -1 is CLS. With ``layer="all"`` rows are of one layer each, and ``layer`` (b,) int32 says which.

    The order is that of ``store.stream(shuffle="window")`` with a pool of ``buffer_size`` batches. It depends on ``seed`` alone;
    every pass has another, and one that was left early is begun again.
    """

    def __init__(self, cfg: ShuffledConfig) -> None:
        super().__init__()
        _expect("cfg", cfg, ShuffledConfig, "a ShuffledConfig")
        self.cfg: ShuffledConfig = cfg
        self.logger = logging.getLogger("shuffled.DataLoader")
        if not pathlib.Path(cfg.shards).is_dir():
            raise NotSavedError(f"Activations are not saved at '{cfg.shards}'.")
        self._shards_path = _copy_to_tmpdir(pathlib.Path(cfg.shards), self.logger) if cfg.use_tmpdir else cfg.shards
        if cfg.scale_norm:
            raise UnsupportedError('scale_norm is not implemented; store.stream(scale="sqrt-d") is')
        self.metadata, self._store = _open(self._shards_path)
        IndexMap(self.metadata, cfg.tokens, cfg.layer)  # says what does not fit
        labels = pathlib.Path(self._shards_path) / "labels.bin"
        if cfg.ignore_labels and not labels.exists():
            raise MissingFileError("ignore_labels filtering requested but labels.bin not found", path=labels)
        row = self.metadata.d_model * 4
        self._stream = self._store.stream(
            cfg.layer,
            cfg.batch_size,
            shuffle="window",
            seed=cfg.seed,
            tokens=cfg.tokens,
            ignore_labels=cfg.ignore_labels,
            interleave=cfg.layer == "all",
            drop_last=cfg.drop_last,
            memory=max(cfg.buffer_size, 1) * cfg.batch_size * (row + _SLOT_OVERHEAD),
        )
        self._n_samples = self._stream.num_rows
        self._cls = int(self.metadata.cls_token)
        self._last_reservoir_fill: float | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._last_reservoir_fill = 1.0 if self.cfg.min_buffer_fill > 0 else None
        for batch in self._batches(self._stream):
            made = {
                "act": torch.from_numpy(batch.activations),
                "example_idx": torch.from_numpy(batch.examples.astype(np.int32)),
                "token_idx": torch.from_numpy((batch.tokens - self._cls).astype(np.int32)),
            }
            if self.cfg.layer == "all":
                made["layer"] = torch.from_numpy(batch.layers.astype(np.int32))
            yield made

    def shutdown(self) -> None:
        """Stops reading; may be called at any time. The next loop begins anew."""
        super().shutdown()
        self._last_reservoir_fill = None


def _copy_to_tmpdir(source: pathlib.Path, logger: logging.Logger) -> pathlib.Path:
    """A copy on this machine's own disk, made once per job: by the first process of a node, while the others wait.

    The folder has its name when it is whole. ``.copy_complete`` in it says that it is one of these.
    """
    root = os.environ.get("TMPDIR")
    if not root:
        logger.warning("use_tmpdir=True but $TMPDIR not set; using original path")
        return source
    target = pathlib.Path(root) / os.environ.get("SLURM_JOB_ID", "nojob") / "saev" / "shards" / source.name
    marker = target / ".copy_complete"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if marker.exists():
                logger.info("Reusing existing TMPDIR copy: %s", target)
                return target
            # Of a process that was killed; or of a release that copied into the folder itself.
            copy = target.with_name(f".{target.name}.copying")
            for left in (copy, target):
                if left.exists():
                    shutil.rmtree(left)
            copy.mkdir()
            files = [f for f in source.iterdir() if f.is_file()]
            with concurrent.futures.ThreadPoolExecutor(min(8, len(files)) or 1) as pool:
                list(pool.map(lambda f: shutil.copy2(f, copy / f.name), files))
            (copy / marker.name).touch()
            copy.rename(target)
    except OSError as error:
        raise from_os(error, error.filename or target, "copy to $TMPDIR") from error
    return target


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Waits until no other process has it; the lock of one that died is free."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
