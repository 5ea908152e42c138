"""saev's loaders: indexed, ordered and shuffled."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import logging
import os
import pathlib
import shutil
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

import actshard
from actshard.base.errors import (
    ActshardError,
    ActshardWarning,
    ArgumentError,
    MissingExtraError,
    MissingFileError,
    OutOfRangeError,
    UnsupportedError,
    from_os,
)
from actshard.base.location import Location
from actshard.compat.saev.dumps import (
    IndexedConfig,
    IndexMap,
    Metadata,
    NotDoneError,
    OrderedConfig,
    ShardInfo,
    ShuffledConfig,
    WrongError,
    expect,
)
from actshard.streaming import Stream
from actshard.streaming.readable import content_range

# ``use_tmpdir``: copies a dump to this machine's local disk.


def copy_to_tmpdir(source: pathlib.Path, logger: logging.Logger) -> pathlib.Path:
    """Copies a dump to ``$TMPDIR`` once per job and node, and returns the copy's path. Other processes wait for the first.

    The copy is renamed when complete. The file ``.copy_complete`` marks it as a copy.
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
            # Left by a killed process, or by an old release that copied directly into the target.
            copy = target.with_name(f".{target.name}.copying")
            for folder in (copy, target):
                if folder.exists():
                    shutil.rmtree(folder)
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
    """Holds an exclusive lock, waiting for other processes. The system releases locks of dead processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


try:
    import torch
except ImportError as error:
    raise MissingExtraError.of("actshard.compat.saev", "torch") from error

_SLOT_OVERHEAD = 28
"""Bytes per row that a window needs in addition to the row, so that it has as many rows as upstream's reservoir."""


class NotSavedError(MissingFileError, RuntimeError):
    """The dump's folder does not exist."""


class LoaderError(ActshardError, RuntimeError):
    """Reading failed; ``__cause__`` is the error."""

    kind = "loader"


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


def _open(folder: pathlib.Path) -> tuple[Metadata, actshard.Store]:
    """Opens a dump with all of upstream's checks, in upstream's order, before any iteration."""
    if Location.at(folder).kind() != "folder":
        raise NotSavedError(f"Activations are not saved at '{folder}'.")
    md = Metadata.load(folder)
    ShardInfo.load(folder).validate(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ActshardWarning)  # upstream does not check the folder's name
        return md, actshard.open(folder, format="saev")


class IndexedDataset(torch.utils.data.Dataset):
    """Map-style dataset of rows. Every stored token has a number, including padding.

    An item is ``{"act": (d_model,) float32, "example_idx": int, "token_idx": int}``, plus ``"token_label": int`` if the token has a
    label, plus ``"layer": int`` (the layer's name) with ``layer="all"``. ``token_idx`` counts content tokens; -1 is CLS.
    :class:`IndexMap` defines the order. ``__getitems__`` reads a whole batch at once.
    """

    Example = Example

    def __init__(self, cfg: IndexedConfig) -> None:
        expect("cfg", cfg, IndexedConfig, "an IndexedConfig")
        self.cfg = cfg
        self.md, self._store = _open(cfg.shards)
        self.index_map = IndexMap(self.md, cfg.tokens, cfg.layer)
        self.labels_mmap = self._store.labels
        self._cls = int(self.md.cls_token)

    def transform(self, act: NDArray[np.float32]) -> Any:
        """Converts a row to a tensor; subclasses may override it."""
        return torch.from_numpy(act)

    @property
    def layer_idx(self) -> int:
        """Index of the chosen layer.

        Raises:
            ArgumentError: with ``layer="all"``.
        """
        if self.cfg.layer == "all":
            raise ArgumentError('layer="all": layer_idx is undefined for several layers; each item contains its layer')
        return self.index_map.layer_idx_lookup[self.cfg.layer]

    @property
    def d_model(self) -> int:
        """Elements per row."""
        return self.md.d_model

    def __len__(self) -> int:
        return len(self.index_map)

    def __getitem__(self, i: int) -> dict[str, Any]:
        example, token, layer_position = self.index_map.place(i)
        layer = self.md.layers[layer_position]
        sample = {
            "act": self.transform(self._store.gather(layer, example, token)[0]),
            "example_idx": example,
            "token_idx": token - self._cls,
        }
        if self.labels_mmap is not None and token >= self._cls:
            sample["token_label"] = int(self.labels_mmap[example, token - self._cls])
        if self.cfg.layer == "all":
            sample["layer"] = layer
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        numbers = np.asarray(indices, np.int64)
        n = len(self)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= n):
            bad = int(numbers[(numbers < 0) | (numbers >= n)][0])
            raise OutOfRangeError(f"Index {bad} out of range for dataset of length {n}")
        m = self.index_map
        rest, layer_positions = np.divmod(numbers, m._layers)
        examples, tokens = np.divmod(rest, m._count)
        tokens = tokens + m._first
        if m.layer == "all":
            rows = np.empty((len(numbers), self.d_model), np.float32)
            for k, layer in enumerate(self.md.layers):
                part = np.flatnonzero(layer_positions == k)
                rows[part] = self._store.gather(layer, examples[part], tokens[part])
        else:
            rows = self._store.gather(m.layer, examples, tokens)
        plain = type(self).transform is IndexedDataset.transform
        acts = torch.from_numpy(rows).unbind() if plain else [self.transform(row) for row in rows]
        places = (examples.tolist(), (tokens - self._cls).tolist())
        samples = [{"act": a, "example_idx": e, "token_idx": t} for a, e, t in zip(acts, *places, strict=True)]
        if self.labels_mmap is not None and self.cfg.tokens != "special":
            labels = self.labels_mmap[examples, np.maximum(tokens - self._cls, 0)].tolist()
            for item, label in zip(samples, labels, strict=True):
                if item["token_idx"] >= 0:
                    item["token_label"] = label
        if m.layer == "all":
            for item, k in zip(samples, layer_positions.tolist(), strict=True):
                item["layer"] = self.md.layers[k]
        return samples


class _Reservoir:
    """The part of upstream's buffer interface that monitoring uses."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader

    def fill(self) -> float:
        """Filled fraction of the buffer: 1 during a loop, because a window is filled before its first batch; else 0."""
        live = self._loader._live
        return 1.0 if live is not None and live.reads else 0.0


class _Loader:
    """Base class of the ordered and shuffled loaders."""

    ExampleBatch = ExampleBatch
    cfg: OrderedConfig | ShuffledConfig

    def __init__(self) -> None:
        self._live: Any = None

    @property
    def n_batches(self) -> int:
        """Number of batches per pass."""
        return len(self)

    @property
    def n_samples(self) -> int:
        """Number of rows per pass, before ``drop_last``."""
        return self._n_samples

    @property
    def batch_size(self) -> int:
        """Rows per batch."""
        return self.cfg.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is dropped."""
        return self.cfg.drop_last

    @property
    def reservoir(self) -> _Reservoir:
        """The buffer's interface for monitoring."""
        return _Reservoir(self)

    @property
    def manager_pid(self) -> int:
        """Always -1, upstream's value without a running manager process."""
        return -1

    _n_samples: int

    def __len__(self) -> int:
        full, rest = divmod(self.n_samples, self.cfg.batch_size)
        return full + bool(rest and not self.cfg.drop_last)

    def _batches(self, stream: Stream) -> Iterator[Any]:
        """Yields a stream's batches. Raises LoaderError, as upstream does. Ends an earlier loop over this loader."""
        if self._live is not None:
            self._live.close("another loop over this loader was begun; create one loader per loop")
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
        """Stops reading; may be called at any time. The next loop starts at the first batch."""
        self._stop()


class OrderedDataLoader(_Loader):
    """Yields all content tokens of a layer in stored order.

    Batches are dicts of ``act`` (b, d_model) float32, ``example_idx`` and ``token_idx`` (b,) int64, and ``token_labels`` (b,) int64
    if the dump has labels. Every loop starts at the first batch.

    Raises:
        RuntimeError: (:class:`LoaderError`) while iterating: ``layer="all"``, or a shard that disappeared.
    """

    def __init__(self, cfg: OrderedConfig) -> None:
        super().__init__()
        expect("cfg", cfg, OrderedConfig, "an OrderedConfig")
        self.cfg: OrderedConfig = cfg
        self.md, self._store = _open(cfg.shards)
        if cfg.layer != "all" and cfg.layer not in self.md.layers:
            raise WrongError(f"Layer {cfg.layer} not in {self.md.layers}")
        layers = len(self.md.layers) if cfg.layer == "all" else 1
        first, stop = content_range(self._store, self._store.token_counts)
        self._n_samples = int((stop - first).sum()) * layers
        self._cls = int(self.md.cls_token)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        cfg = self.cfg
        if cfg.layer == "all":
            raise NotDoneError(
                'layer="all": the ordered loader reads one layer. Use store.stream("all", ...) to read all.'
            )
        stream = self._store.stream(cfg.layer, cfg.batch_size, drop_last=cfg.drop_last)
        for batch in self._batches(stream):
            tensors = {
                "act": torch.from_numpy(batch.activations),
                "example_idx": torch.from_numpy(batch.examples),
                "token_idx": torch.from_numpy(batch.tokens - self._cls),
            }
            if batch.labels is not None:
                tensors["token_labels"] = torch.from_numpy(batch.labels.astype(np.int64))
            yield tensors


class ShuffledDataLoader(_Loader):
    """Yields tokens in a random order.

    Batches are dicts of ``act`` (b, d_model) float32, ``example_idx`` and ``token_idx`` (b,) int32. ``token_idx`` counts content
    tokens; -1 is CLS. With ``layer="all"`` each row is of one layer, and ``layer`` (b,) int32 contains the layers' names.

    The order is that of ``store.stream(shuffle="window")`` with a window of ``buffer_size`` batches. It depends only on ``seed``
    and the pass. After a ``break`` the next loop starts the same pass again.
    """

    def __init__(self, cfg: ShuffledConfig) -> None:
        super().__init__()
        expect("cfg", cfg, ShuffledConfig, "a ShuffledConfig")
        self.cfg: ShuffledConfig = cfg
        self.logger = logging.getLogger("shuffled.DataLoader")
        if Location.at(cfg.shards).kind() != "folder":
            raise NotSavedError(f"Activations are not saved at '{cfg.shards}'.")
        self._shards_path = copy_to_tmpdir(pathlib.Path(cfg.shards), self.logger) if cfg.use_tmpdir else cfg.shards
        if cfg.scale_norm:
            raise UnsupportedError('scale_norm is not implemented. Use store.stream(scale="sqrt-d").')
        self.metadata, self._store = _open(self._shards_path)
        IndexMap(self.metadata, cfg.tokens, cfg.layer)  # checks tokens and layer
        labels = pathlib.Path(self._shards_path) / "labels.bin"
        if cfg.ignore_labels and not Location.at(labels).exists():
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
            tensors = {
                "act": torch.from_numpy(batch.activations),
                "example_idx": torch.from_numpy(batch.examples.astype(np.int32)),
                "token_idx": torch.from_numpy((batch.tokens - self._cls).astype(np.int32)),
            }
            if self.cfg.layer == "all":
                tensors["layer"] = torch.from_numpy(batch.layers.astype(np.int32))
            yield tensors

    def shutdown(self) -> None:
        """Stops reading; may be called at any time. The next loop starts at the first batch."""
        super().shutdown()
        self._last_reservoir_fill = None
