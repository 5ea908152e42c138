"""A zarr-python-like interface to Zarr activation stores, and the published text's training dataset.

>>> from actshard.compat.zarr import TrainingDataset, open_group
>>> root = open_group("activations.zarr")
>>> root["arrays/activations"][i, l, 0:n, :]

Read-only. A run (``shards/*.zarr``) opens as one group of concatenated stores. If their ``T_max`` differ, the joined array has the
largest, and samples of the other stores are padded with their fill value. Handles are thread-safe and can be forked and pickled;
unlike in the text, workers need not open their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard
from actshard._native import Rows
from actshard.base import _arguments
from actshard.base._arguments import name_of
from actshard.base.errors import ActshardWarning, ArgumentError, NotStoredError, OutOfRangeError
from actshard.base.location import Location, network_io
from actshard.formats.zarr.arrays import ZarrStore, native, read_array
from actshard.formats.zarr.meta import ArrayMeta
from actshard.formats.zarr.read import members_of

__all__ = ["Array", "Group", "TrainingDataset", "open_consolidated", "open_group"]


def open_group(store: str | PathLike[str], mode: str = "r", **_: object) -> Group:
    """Opens a store or a run; ``mode`` must be ``"r"``.

    Raises:
        ArgumentError: any other mode.
        MissingFileError, FormatError: the store does not exist or is damaged.
    """
    if mode != "r":
        raise ArgumentError(f'mode: expected "r", found {mode!r}; groups are read-only')
    path = _arguments.local_path(store)
    return Group([ZarrStore(member) for member in members_of(Location.at(path))], path, "")


open_consolidated = open_group


class Group:
    """A group of arrays: ``group["arrays/seq_len"]``, ``group["arrays"]["seq_len"]``, ``group.attrs``."""

    def __init__(self, stores: list[ZarrStore], path: Path, prefix: str) -> None:
        self._stores, self._path, self._prefix = stores, path, prefix

    @property
    def attrs(self) -> dict[str, Any]:
        """The root's attributes; for a run those of its first store. Empty for other groups."""
        return {} if self._prefix else dict(self._stores[0].attributes)

    def _names(self) -> list[str]:
        group = self._prefix.rstrip("/")
        return self._stores[0].names(group) if group else [n for n in ("arrays",) if self._stores[0].names(n)]

    def __getitem__(self, name: str) -> Group | Array:
        node = f"{self._prefix}{name}".strip("/")
        if not node:
            return Group(self._stores, self._path, "")
        if ".." in node.split("/") or "\0" in node:
            raise MissingNodeError(
                f"expected one of {self._names()}, found no array or group {node!r}", path=self._path
            )
        metas = [store.array(node) for store in self._stores]
        if all(m is not None for m in metas):
            return Array([m for m in metas if m is not None])
        if self._stores[0].names(node):
            return Group(self._stores, self._path, f"{node}/")
        raise MissingNodeError(f"expected one of {self._names()}, found no array or group {node!r}", path=self._path)

    def __contains__(self, name: str) -> bool:
        try:
            self[name]
        except MissingNodeError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def keys(self) -> list[str]:
        """Names of the arrays and groups in the group."""
        return self._names()

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an array or group, or ``default`` if the name does not exist."""
        try:
            return self[name]
        except MissingNodeError:
            return default

    def members(self) -> tuple[tuple[str, Group | Array], ...]:
        """(name, array or group) pairs."""
        return tuple((name, self[name]) for name in self._names())

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """(name, array) pairs."""
        return ((name, node) for name, node in self.members() if isinstance(node, Array))

    def groups(self) -> Iterator[tuple[str, Group]]:
        """(name, group) pairs."""
        return ((name, node) for name, node in self.members() if isinstance(node, Group))

    def array_keys(self) -> Iterator[str]:
        """Names of the arrays."""
        return (name for name, _ in self.arrays())

    def group_keys(self) -> Iterator[str]:
        """Names of the groups."""
        return (name for name, _ in self.groups())


class MissingNodeError(NotStoredError, KeyError):
    """The group has no such array or group."""


class Array:
    """An n-dimensional array, concatenated along the first axis; ``array[i, l, 0:n, :]`` reads a selection as a copy.

    Supports zarr's basic indexing: integers, slices with a positive step, and one ellipsis. As in zarr, missing chunks read as the
    fill value. Rows beyond a sample's ``seq_len`` have arbitrary contents.
    """

    def __init__(self, metas: list[ArrayMeta]) -> None:
        self._metas = metas
        first = metas[0]
        for meta in metas[1:]:
            if meta.dtype != first.dtype or len(meta.shape) != len(first.shape) or not first.shape:
                raise meta.error(
                    f"expected the dtype and number of dimensions of {first.metadata}, to concatenate them"
                )
            joined = len(first.shape) == 4
            if (
                meta.shape[1:2] != first.shape[1:2]
                or meta.shape[3:] != first.shape[3:]
                or (not joined and meta.shape[1:] != first.shape[1:])
            ):
                raise meta.error(
                    f"field 'shape': expected {list(first.shape)} except for samples and tokens, as in {first.metadata}"
                )
        self.shape: tuple[int, ...] = (sum(m.shape[0] for m in metas), *first.shape[1:]) if first.shape else ()
        if len(first.shape) == 4:
            self.shape = (*self.shape[:2], max(m.shape[2] for m in metas), self.shape[3])
        self.chunks = first.chunks
        self.fill_value: Any = first.fill if first.dtype is None else np.array(first.fill, first.dtype)[()]
        self.dtype: Any = first.dtype if first.dtype is not None else np.dtype(object)
        self._rows: Rows | None = None
        self._whole: Any = None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=object))

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return self.size * int(self.dtype.itemsize)

    @property
    def attrs(self) -> dict[str, Any]:
        """The array's attributes; for a run those of its first store."""
        return self._metas[0].attributes()

    @property
    def path(self) -> str:
        """Path in the store, such as ``arrays/activations``."""
        return self._metas[0].node

    @property
    def name(self) -> str:
        """Absolute path in the store, such as ``/arrays/activations``."""
        return f"/{self._metas[0].node}"

    @property
    def info(self) -> dict[str, Any]:
        """Properties of the array, from its metadata only."""
        return {
            "name": self.name,
            "shape": self.shape,
            "chunks": self.chunks,
            "dtype": self.dtype,
            "fill_value": self.fill_value,
            "codecs": self._metas[0].codecs,
            "stores": len(self._metas),
        }

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array with 0 dimensions")
        return self.shape[0]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_rows": None}

    def __array__(self, dtype: Any = None, copy: object = None) -> NDArray[Any]:
        return np.asarray(self[...], dtype)

    def __getitem__(self, index: Any) -> Any:
        if self.ndim != 4 or self._metas[0].dtype is None:
            if self._whole is None:
                parts = [np.asarray(read_array(m)) for m in self._metas]
                self._whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            block = self._whole[index]
            return block.copy() if isinstance(block, np.ndarray) else block
        selection, drop = self._basic(index)
        samples, layers, tokens, elements = selection
        rows = self._open()
        array = np.empty((len(samples), len(layers), len(tokens), self.shape[3]), self.dtype)
        lengths = self._lengths()
        if array.size and not isinstance(lengths, int) and int(tokens.max()) >= int(lengths[samples].min()):
            self._padded(rows, samples, layers, tokens, array)
        elif array.size:
            everything = isinstance(lengths, int) and np.array_equal(tokens, np.arange(lengths))
            for k, layer in enumerate(layers.tolist()):
                out = array if len(layers) == 1 else None
                if everything:
                    block = rows.gather_whole(layer, samples, out, None)
                else:
                    block = rows.gather(
                        layer, np.repeat(samples, len(tokens)), np.tile(tokens, len(samples)), out, None
                    )
                if out is None:
                    array[:, k] = block.reshape(len(samples), len(tokens), self.shape[3])
        if len(elements) != self.shape[3]:
            array = array[..., elements]
        return array.reshape([n for n, gone in zip(array.shape, drop, strict=True) if not gone])[()]

    def _basic(self, index: object) -> tuple[list[NDArray[np.int64]], list[bool]]:
        """Returns the indices along each dimension, and for each whether an integer index drops it."""
        indices = list(index) if isinstance(index, tuple) else [index]
        if sum(x is Ellipsis for x in indices) > 1 or len([x for x in indices if x is not Ellipsis]) > self.ndim:
            raise ArgumentError(f"too many indices for {self.ndim} dimensions: {index!r}")
        if Ellipsis not in [x if x is Ellipsis else None for x in indices]:
            indices.append(Ellipsis)
        position = next(k for k, x in enumerate(indices) if x is Ellipsis)
        indices[position : position + 1] = [slice(None)] * (self.ndim - len(indices) + 1)
        numbers, drop = [], []
        for k, (x, n) in enumerate(zip(indices, self.shape, strict=True)):
            if isinstance(x, slice):
                if (x.step or 1) < 0:
                    raise ArgumentError(f"expected slices with a positive step, found {x!r}")
                numbers.append(np.arange(*x.indices(n)))
                drop.append(False)
            elif isinstance(x, int | np.integer) and not isinstance(x, bool):
                if not -n <= x < n:
                    raise OutOfRangeError(
                        f"index {x} is out of range for dimension {k} of {n}", path=self._metas[0].metadata
                    )
                numbers.append(np.array([x % n]))
                drop.append(True)
            else:
                raise ArgumentError(f"expected integers, slices or an ellipsis, found {x!r}")
        return numbers, drop

    def _lengths(self) -> int | NDArray[np.uint32]:
        """``T_max`` of each sample's store; one number if all are equal."""
        rooms = [m.shape[2] for m in self._metas]
        if len(set(rooms)) == 1:
            return rooms[0]
        return np.repeat(np.array(rooms, np.uint32), [m.shape[0] for m in self._metas])

    def _padded(
        self,
        rows: Rows,
        samples: NDArray[np.int64],
        layers: NDArray[np.int64],
        tokens: NDArray[np.int64],
        array: NDArray[Any],
    ) -> None:
        """Fills ``array`` with stored tokens, and with the store's fill value beyond its ``T_max``."""
        ends = np.cumsum([m.shape[0] for m in self._metas])
        store = np.searchsorted(ends, samples, side="right")
        room = np.array([m.shape[2] for m in self._metas])[store]
        fills = np.array([m.fill for m in self._metas], self.dtype)[store]
        array[...] = fills[:, None, None, None]
        i, t = np.nonzero(tokens[None, :] < room[:, None])
        for k, layer in enumerate(layers.tolist()):
            array[i, k, t] = rows.gather(layer, samples[i], tokens[t], None, None)

    def _open(self) -> Rows:
        if self._rows is None:
            metas, first = self._metas, self._metas[0]
            assert first.dtype is not None
            self._rows = Rows.chunked(
                [native(m) for m in metas],
                [(m.shape[0], [k]) for k, m in enumerate(metas)],
                [self._lengths()],
                num_groups=self.shape[1],
                width=self.shape[3],
                dtype=name_of(first.dtype),
                decoded_memory=1 << 30,
                descr=first.dtype,
                io=network_io(first.store),
            )
        return self._rows


class TrainingDataset:
    """The text's map-style training dataset: samples, each with a few random layers.

    Items are ``{"i": int, "layers": (k,) int64, "seq_len": int, "activations": (k, seq_len, H)}``. The layers depend only on seed,
    epoch and sample, so they are the same in every worker. ``__getitems__`` reads a whole batch at once: a ``DataLoader`` with
    ``collate_fn=TrainingDataset.collate`` reads k slices of each of b samples in one call. A batch is a list, as lengths differ.

    Args:
        path: a store or a run.
        layers_per_sample: number of layers per sample; 2 in the text.
        seed: seed of the choice of layers.
    """

    def __init__(self, path: str | PathLike[str], *, layers_per_sample: int = 2, seed: int = 0) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ActshardWarning)
            self._store = actshard.open(path, format="zarr")
        if not 1 <= layers_per_sample <= len(self._store.layers):
            raise ArgumentError(
                f"layers_per_sample: expected 1 to {len(self._store.layers)}, found {layers_per_sample}"
            )
        self.layers_per_sample, self.seed, self.epoch = layers_per_sample, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which changes the random layers."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._store)

    def layers_of(self, i: int) -> NDArray[np.int64]:
        """Returns the layers of a sample in this epoch."""
        random = np.random.default_rng([self.seed, self.epoch, i])
        return random.choice(np.array(self._store.layers), self.layers_per_sample, replace=False)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        k = self.layers_per_sample
        chosen = [self.layers_of(int(i)) for i in indices]
        rows = self._store.sequences(
            np.repeat(np.asarray(indices, np.int64), k), np.concatenate(chosen).tolist() if chosen else []
        )
        samples = []
        for n, (i, layers) in enumerate(zip(indices, chosen, strict=True)):
            part = rows[n * k : (n + 1) * k]
            samples.append({"i": int(i), "layers": layers, "seq_len": len(part[0]), "activations": _stacked(part)})
        return samples

    @staticmethod
    def collate(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Collate function that returns the list of items unchanged."""
        return items


def _stacked(rows: list[NDArray[np.generic]]) -> NDArray[np.generic]:
    """Stacks rows; returns a view if they are consecutive in one block of memory."""
    first, base = rows[0], rows[0].base
    size = first.nbytes
    together = all(
        r.base is base and r.__array_interface__["data"][0] == first.__array_interface__["data"][0] + n * size
        for n, r in enumerate(rows)
    )
    if together and isinstance(base, np.ndarray) and size:
        start = (first.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // base.strides[0]
        return base[start : start + len(rows) * len(first)].reshape(len(rows), *first.shape)
    return np.stack(rows)
