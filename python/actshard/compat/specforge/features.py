"""A store as SpecForge's ``FeatureStore``, with the references of its examples.

Interface: sgl-project/SpecForge a6b6b02 (specforge 0.2.0), ``specforge/runtime/data_plane/feature_store.py`` and
``offline_reader.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from os import PathLike
from typing import Any

from numpy.typing import DTypeLike

import actshard
from actshard import Layer, Store
from actshard.base.errors import ArgumentError, LayerError, MissingExtraError, UnsupportedError
from actshard.compat.drafts import DraftExamples, Layers
from actshard.compat.specforge.datasets import order_of
from actshard.torch._tensors import tensor, torch

try:
    from specforge.runtime.contracts import SCHEMA_VERSION, FeatureHandle, SampleRef
    from specforge.runtime.data_plane.feature_store import FeatureStore
except ImportError as error:
    raise MissingExtraError(
        "actshard.compat.specforge.StoreFeatures needs specforge 0.2, which is not installed: pip install specforge"
    ) from error

_KEYS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "eagle3": (("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"), "hidden_state"),
    "dflash": (("input_ids", "loss_mask", "hidden_states"), None),
    "domino": (("input_ids", "loss_mask", "hidden_states"), None),
    "dspark": (("input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"), "hidden_state"),
}
"""For each strategy, the features of a sample and ``target_repr``."""
_STATES, _LAST = ("aux_hidden_state", "hidden_states"), ("hidden_state", "target_last_hidden_states")
_SCHEME = "actshard://"


class StoreFeatures(FeatureStore):
    """Features of a store's examples, as in SpecForge's own files.

    Args:
        source: a store, or the path or URL of one.
        layers, last, input_ids, loss_mask, dtype: as in :class:`actshard.compat.deepspec.CacheDataset`. A store without the layer
            ``last`` supports only strategies that do not need it (dflash, domino).
    """

    retain_on_release = True
    """Samples can be read again after their release."""

    def __init__(
        self,
        source: Store | str | PathLike[str],
        *,
        layers: Layers | None = None,
        last: Layer = "last",
        input_ids: str = "input_ids",
        loss_mask: str | None = "loss_mask",
        dtype: DTypeLike | None = None,
    ) -> None:
        store = source if isinstance(source, Store) else actshard.open(source)
        last_layer = None if last == "last" and last not in store.layers else last
        self._examples = DraftExamples(
            store,
            "int64",
            "int64",
            layers=layers,
            last=last_layer,
            input_ids=input_ids,
            loss_mask=loss_mask,
            dtype=dtype,
        )
        self._order = order_of(store)
        self._leases = itertools.count()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_leases": itertools.count()}

    def refs(
        self,
        strategy: str = "eagle3",
        *,
        run_id: str = "offline",
        ttt_length: int = 7,
        max_len: int = 2048,
        target_model_version: str = "unknown",
        tokenizer_version: str = "unknown",
    ) -> list[Any]:
        """Returns references of all samples, in the form and order of SpecForge's ``OfflineManifestReader.read()``.

        Raises:
            ArgumentError: an unknown strategy.
            LayerError: the strategy needs last hidden states, which the store does not have.
        """
        if strategy not in _KEYS:
            raise ArgumentError(f"strategy: expected one of {', '.join(_KEYS)}, found {strategy!r:.100}")
        keys, target = _KEYS[strategy]
        if self._examples.last is None and set(keys) & set(_LAST):
            raise LayerError(
                f"{strategy} needs last hidden states, and the store has no layer 'last'; pass last=NAME to StoreFeatures",
                path=self._examples.store.path,
            )
        return [
            SampleRef(
                sample_id=f"{run_id}:{index:08d}",
                run_id=run_id,
                source_task_id=None,
                feature_store_uri=f"{_SCHEME}{example}",
                feature_keys={key: key for key in keys},
                feature_specs={},
                strategy=strategy,
                schema_version=SCHEMA_VERSION,
                target_model_version=target_model_version,
                tokenizer_version=tokenizer_version,
                metadata={
                    "format": f"offline_{strategy}",
                    "target_repr": target,
                    "schema_version": SCHEMA_VERSION,
                    "ttt_length": ttt_length,
                    "max_len": max_len,
                    "file_index": index,
                },
            )
            for index, example in enumerate(self._order.tolist())
        ]

    def get(
        self, sample_ref: Any, *, device: torch.device | str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Returns the features of a sample, and a handle for :meth:`release`.

        Raises:
            ArgumentError: the reference is not one of :meth:`refs`, or it requests unknown features.
            As :meth:`actshard.Store.gather`, for a damaged file.
        """
        uri, requested_names = sample_ref.feature_store_uri, list(names or sample_ref.feature_keys)
        number = uri.removeprefix(_SCHEME)
        if number == uri or not number.isdecimal():
            raise ArgumentError(f"sample_ref: expected a reference of StoreFeatures.refs(), found {uri!r:.200}")
        if unknown := sorted(set(requested_names) - {"input_ids", "loss_mask", *_STATES, *_LAST}):
            raise ArgumentError(f"sample_ref: expected features of SpecForge's files, found {unknown[0]!r:.100}")
        with_last = bool(set(requested_names) & set(_LAST))
        sample = self._examples.read([int(number)], last=with_last)[0]
        if with_last and sample.last is None:
            raise ArgumentError("sample_ref: requests last hidden states, which the store does not have")
        arrays = {"input_ids": sample.ids, "loss_mask": sample.mask} | dict.fromkeys(_STATES, sample.states[None])
        if sample.last is not None:
            arrays |= dict.fromkeys(_LAST, sample.last[None])
        tensors = {name: tensor(arrays[name]).to(device) for name in requested_names}
        handle = FeatureHandle(sample_ref.sample_id, 0, f"{sample_ref.sample_id}:0:{next(self._leases)}")
        return tensors, handle

    def put(self, tensors: object, *, sample_id: str, metadata: object) -> object:
        """Not supported: the store is read-only.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("a store is read-only: write one with actshard.create", path=self._examples.store.path)

    def release(self, handle: object, *, reason: str = "consumed") -> None:
        """Does nothing, because samples are not kept in memory."""

    def abort(self, sample_id: str, *, reason: str = "aborted") -> None:
        """Does nothing, because samples are not kept in memory."""

    def health(self) -> dict[str, Any]:
        """Returns the fields of SpecForge's local store that apply to a reader."""
        return {"resident_samples": 0, "resident_bytes": 0, "samples": len(self._order)}
