"""lmprobe's loading functions, on local folders.

>>> from actshard.compat.lmprobe import ActivationStore, load_activation_dataset, load_activations

``dataset`` is a folder with ``index/`` and ``tensors/``, where lmprobe takes a repository id;
``huggingface_hub.snapshot_download`` downloads one. Arguments and results are those of lmprobe 0.10.3. These cases are correct
here and silently wrong in lmprobe:

- full-sequence datasets return each prompt's own rows, independent of earlier cache contents;
- ``load_activation_dataset`` supports shards without tokens, which have no file;
- prompts with the same text keep their own rows and labels when all prompts are loaded.

Poolings that are not stored are computed from full sequences: "last_token", "mean", "first_token",
"max", "min", and "all", which returns all tokens of prompts that have equally many. Results are copies.
``token`` and ``show_progress`` are accepted and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard
from actshard.base._arguments import local_path
from actshard.base.errors import (
    ArgumentError,
    MissingExtraError,
    MissingFileError,
    NotStoredError,
    UnsupportedError,
    boundary,
)

__all__ = ["ActivationStore", "load_activation_dataset", "load_activations"]


_WAYS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "last_token": lambda rows: rows[-1],
    "mean": lambda rows: rows.mean(axis=0),
    "first_token": lambda rows: rows[0],
    "max": lambda rows: rows.max(axis=0),
    "min": lambda rows: rows.min(axis=0),
    "all": lambda rows: rows,
}
"""Poolings of the rows of a prompt, ``(tokens, d_model)``."""


class LostError(MissingFileError):
    """Requested prompts or poolings are not in the dataset."""


def _open(dataset: str | PathLike[str]) -> actshard.Store:
    path = local_path(dataset, "dataset")
    with boundary(path, "look at"):
        if not path.exists():
            raise MissingFileError(
                "expected a folder with index/ and tensors/, found nothing. Download a repository with "
                "huggingface_hub.snapshot_download.",
                path=path,
            )
    return actshard.open(path, format="lmprobe")


def _layers(store: actshard.Store, layers: list[int] | None) -> list[int]:
    if layers is None:
        return sorted(int(layer) for layer in store.layers)
    if missing := set(layers) - set(store.layers):
        raise ArgumentError(f"Layers {sorted(missing)} not in dataset. Available: {sorted(store.layers)}")
    return sorted(layers)


def _places(store: actshard.Store, prompts: list[str] | None) -> NDArray[np.int64]:
    """Returns the example number of each prompt; for equal texts the last one, as in lmprobe."""
    if prompts is None:
        return np.arange(store.num_examples)
    index_by_text = {text: i for i, text in enumerate(store.read_columns(["text"])["text"].to_pylist())}
    missing = [p for p in prompts if p not in index_by_text]
    if missing:
        raise LostError(
            f"No activations for {len(missing)} prompt(s): {missing[:3]!r}"
            + (f" ... and {len(missing) - 3} more" if len(missing) > 3 else ""),
            path=store.path,
        )
    return np.array([index_by_text[p] for p in prompts], np.int64)


def _stored_pooling(store: actshard.Store) -> str | None:
    """Returns the pooling of a pooled dataset; None for full sequences."""
    hidden = store.metadata.get("tensors", {}).get("hidden_layers", {})
    if hidden.get("storage") == "full_sequence":
        return None
    return str(hidden.get("pooling", "last_token"))


def _pooled(store: actshard.Store, layer: int, examples: NDArray[np.int64], pooling: str) -> NDArray[np.float32]:
    stored = _stored_pooling(store)
    if stored == pooling or (stored is None and pooling == "last_token"):
        return store.last_tokens(layer, examples, dtype="float32")
    if stored is not None:
        raise LostError(
            f'pooling="{pooling}" cannot be computed: the dataset only contains rows pooled by "{stored}"',
            path=store.path,
        )
    shape: tuple[int, ...] = (store.d_model,)
    if pooling == "all":
        counts = store.token_counts[examples]
        if (wrong := np.flatnonzero(counts != counts[:1])).size:
            raise ArgumentError(
                f'pooling="all": expected prompts with equally many tokens, found {counts[0]} and {counts[wrong[0]]}. '
                "actshard.open(...).sequences returns the tokens of each prompt."
            )
        shape = (*counts[:1].tolist(), store.d_model)
    pooled = np.empty((len(examples), *shape), np.float32)
    for first in range(0, len(examples), 256):
        block = examples[first : first + 256]
        for i, rows in enumerate(store.sequences(block, layer, dtype="float32"), first):
            pooled[i] = _WAYS[pooling](rows)
    return pooled


def load_activations(
    dataset: str | PathLike[str],
    *,
    prompts: list[str] | None = None,
    layers: list[int] | None = None,
    pooling: str = "last_token",
    token: str | None = None,
    as_dict: bool = True,
    return_labels: bool = False,
    show_progress: bool = True,
) -> Any:
    """Returns pooled activations: ``{layer: (n_prompts, d_model)}`` float32; ``(n_prompts, n_layers, d_model)`` if not ``as_dict``.

    Args:
        dataset: a folder.
        prompts: texts; None means all, in index order.
        layers: names; None means all. Results are sorted by layer.
        pooling: how tokens are reduced to one vector per prompt. "all": ``(n_prompts, tokens, d_model)`` for each layer.
        token: ignored.
        as_dict: return a dict by layer instead of one array.
        return_labels: return ``(activations, labels)``; labels are an array, or None if a prompt has no label.
        show_progress: ignored.

    Raises:
        ArgumentError: (a ValueError) the dataset has no such layer, or the pooling is unknown.
        LostError: (a FileNotFoundError) the dataset has no such prompt, or the pooling cannot be computed.
    """
    store = _open(dataset)
    if pooling not in (*_WAYS, _stored_pooling(store)):
        raise ArgumentError(f"pooling: expected one of {list(_WAYS)}, found {pooling!r}")
    if not store.layers:
        raise LostError("the dataset contains no hidden states to pool", path=store.path)
    names = _layers(store, layers)
    examples = _places(store, prompts)
    pooled_by_layer = {layer: _pooled(store, layer, examples, pooling) for layer in names}
    activations: object = pooled_by_layer if as_dict else np.stack(list(pooled_by_layer.values()), axis=1)
    return (activations, _labels(store, examples)) if return_labels else activations


def _labels(store: actshard.Store, examples: NDArray[np.int64]) -> NDArray[np.generic] | None:
    if "label" not in store.info()["columns"]:
        return None
    every = store.read_columns(["label"])["label"].to_pylist()
    labels = [every[i] for i in examples.tolist()]
    return None if any(label is None for label in labels) else np.array(labels)


def load_activation_dataset(
    repo_id: str | PathLike[str],
    *,
    tensors: list[str] | None = None,
    layers: list[int] | None = None,
    token: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns raw tensors in their stored dtypes, by safetensors key, and the dataset's metadata. Requires torch.

    Keys are ``hidden.layer_N``, ``logits_topk.values``, ``logits_topk.indices`` and ``router.layer_N``. Rows are in index order.
    For full sequences the tokens of a prompt are consecutive, and ``np.cumsum(store.token_counts)`` gives the prompts' boundaries
    (lmprobe returns all last tokens first, then the others).

    Args:
        repo_id: a folder.
        tensors: ``["hidden_layers"]``, ``["logits_topk"]``, ``["router_logits"]`` or several; None means all. Types that the
            dataset does not contain are left out.
        layers: hidden layers; None means all.
        token: ignored.
    """
    try:
        from actshard.torch import tensor
    except MissingExtraError as error:
        raise MissingExtraError.of("load_activation_dataset", "torch") from error
    store = _open(repo_id)
    stored_tensors = store.metadata.get("tensors", {})
    # Missing types are left out, as in lmprobe.
    names = list(stored_tensors) if tensors is None else [t for t in tensors if t in stored_tensors]
    tensors_by_name: dict[str, object] = {}
    if "hidden_layers" in names:
        for layer in store.layers if layers is None else [x for x in store.layers if x in layers]:
            if _stored_pooling(store) is None:
                parts = store.sequences(np.arange(store.num_examples), layer)
                rows = np.concatenate(parts) if parts else np.zeros((0, store.d_model), store.dtype)
            else:
                rows = store.last_tokens(layer)
            tensors_by_name[f"hidden.layer_{layer}"] = tensor(rows)
    if "logits_topk" in names:
        values, indices = store.logits()
        tensors_by_name |= {"logits_topk.values": tensor(values), "logits_topk.indices": tensor(indices)}
    if "router_logits" in names:
        for layer in stored_tensors["router_logits"].get("layers", ()):
            tensors_by_name[f"router.layer_{layer}"] = tensor(store.router(layer))
    return tensors_by_name, json.loads(json.dumps(store.metadata))


class ActivationStore:
    """Pooled activations of a whole dataset in memory, with labels, and train/test folds by prompt text."""

    def __init__(self) -> None:
        self.last_profile_: dict[str, float] | None = None
        self.clear()

    @classmethod
    def from_dataset(
        cls,
        dataset: str | PathLike[str],
        *,
        layers: list[int] | None = None,
        pooling: str = "last_token",
        token: str | None = None,
    ) -> ActivationStore:
        """Loads a folder; arguments as in :func:`load_activations`."""
        store = cls()
        data, labels = load_activations(dataset, layers=layers, pooling=pooling, return_labels=True)
        store._data, store._labels = data, labels
        store._prompts = _open(dataset).read_columns(["text"])["text"].to_pylist()
        store._prompt_to_idx = {p: i for i, p in enumerate(store._prompts)}
        store._loaded = True
        return store

    @classmethod
    def from_cache(cls, *_: object, **__: object) -> ActivationStore:
        """Not supported: lmprobe's cache is private. Use lmprobe's ActivationStore.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "from_cache is not supported: it reads lmprobe's private cache. Use lmprobe's ActivationStore."
        )

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise RuntimeError("ActivationStore is not loaded. Use from_dataset() to create a loaded store.")

    def _indices(self, prompts: list[str]) -> NDArray[np.int64]:
        missing = [p for p in prompts if p not in self._prompt_to_idx]
        if missing:
            suffix = f" ... and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ArgumentError(f"{len(missing)} prompt(s) not found in store: {missing[:3]!r}{suffix}")
        return np.array([self._prompt_to_idx[p] for p in prompts], np.int64)

    @property
    def is_loaded(self) -> bool:
        """Whether a dataset is loaded."""
        return self._loaded

    @property
    def prompts(self) -> list[str]:
        """All texts, in index order."""
        return list(self._prompts)

    @property
    def labels(self) -> NDArray[Any] | None:
        """Labels of all prompts, or None."""
        return self._labels

    @property
    def layers(self) -> list[int]:
        """The loaded layers, sorted."""
        return sorted(self._data)

    @property
    def memory_bytes(self) -> int:
        """Bytes of activations in memory."""
        return sum(a.nbytes for a in self._data.values())

    def get_activations(self, prompts: list[str] | None = None, layer: int | list[int] | None = None) -> NDArray[Any]:
        """Returns ``(n_prompts, n_layers * d_model)`` for some prompts and layers, a copy; None means all.

        With the pooling "all": ``(n_prompts, tokens, n_layers * d_model)``.
        """
        self._check_loaded()
        names = self.layers if layer is None else [layer] if isinstance(layer, int) else layer
        for name in names:
            if name not in self._data:
                raise ArgumentError(f"Layer {name} not loaded. Available: {self.layers}")
        indices = slice(None) if prompts is None else self._indices(prompts)
        return np.concatenate([self._data[name][indices] for name in names], axis=-1)

    def get_labels(self, prompts: list[str] | None = None) -> NDArray[Any] | None:
        """Returns labels of some prompts, or None if the dataset has no labels."""
        if self._labels is None or prompts is None:
            return self._labels
        return np.asarray(self._labels[self._indices(prompts)])

    def get_fold(
        self, train_prompts: list[str], test_prompts: list[str], layer: int | list[int] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Returns ``(X_train, y_train, X_test, y_test)``."""
        x_train, x_test = (self.get_activations(p, layer) for p in (train_prompts, test_prompts))
        y_train, y_test = self.get_labels(train_prompts), self.get_labels(test_prompts)
        if y_train is None or y_test is None:
            raise NoLabelsError("get_fold() requires labels, which this dataset does not have")
        return x_train, y_train, x_test, y_test

    def clear(self) -> None:
        """Frees the loaded data."""
        self._data: dict[int, NDArray[np.generic]] = {}
        self._prompts: list[str] = []
        self._labels: NDArray[np.generic] | None = None
        self._prompt_to_idx: dict[str, int] = {}
        self._loaded = False

    def __enter__(self) -> ActivationStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __repr__(self) -> str:
        if not self._loaded:
            return "ActivationStore(not loaded)"
        return (
            f"ActivationStore({len(self._prompts)} prompts, layers={self.layers}, {self.memory_bytes / 2**20:.1f} MB)"
        )


class NoLabelsError(NotStoredError, RuntimeError):
    """A fold was requested from a dataset without labels."""
