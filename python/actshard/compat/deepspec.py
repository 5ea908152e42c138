"""DeepSpec's dataset of target caches, over any store with token ids.

>>> from actshard.compat.deepspec import CacheCollator, CacheDataset, validate_train_cache     # was: from deepspec.data import ...

Samples, batches, dtypes and attributes are those of deepseek-ai/DeepSpec afdfa7c
(``deepspec/data/target_cache_dataset.py``), so its sampler and trainers work unchanged. A batch of a ``DataLoader`` is one
parallel read. Differences:

- ``cache_dir`` may be any store, its path or its URL: speculators, SpecForge, Zarr; also versions 3 and 4 of the fork;
- damaged records, and records whose tensors overlap or leave gaps, raise an error that names the file. DeepSpec checks with
  ``assert``, which ``python -O`` removes, and returns bytes of other samples where it does not check;
- ``max_open_shards`` is accepted and ignored.

Requires torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from numpy.typing import DTypeLike

from actshard import Layer, Store
from actshard.base.errors import ArgumentError, FormatError, OutOfRangeError
from actshard.compat.drafts import DraftExamples, DraftSample, Layers
from actshard.torch._tensors import data, tensor, torch

__all__ = ["CacheCollator", "CacheDataset", "WrongCacheError", "validate_train_cache"]


class WrongCacheError(FormatError, AssertionError):
    """The cache is not the one that the draft model was configured for."""


class CacheDataset(data.Dataset):
    """Map-style dataset of sequences of S tokens.

    Items: ``input_ids`` int32 ``(S,)``, ``loss_mask`` uint8 ``(S,)``, ``target_hidden_states`` bfloat16 ``(S, L * hidden_size)``,
    ``target_last_hidden_states`` bfloat16 ``(S, hidden_size)``. All are copies.

    Args:
        cache_dir: a folder, a URL, or an open store.
        max_open_shards: ignored.
        layers: layers, in the order in which they are concatenated; a mapping ``{name: number}`` for stores that do not record
            the numbers of their layers in the model. None: all but ``last``.
        last: the layer of last hidden states.
        input_ids: the column of token ids.
        loss_mask: the column of masks; None: every token counts.
        dtype: ``"bfloat16"`` converts states of another dtype. None: another dtype is an error.
        target_model_name_or_path: the model's name, for stores that do not record it.

    Attributes:
        manifest: DeepSpec's manifest; for other stores the fields that trainers compare.
        num_samples, hidden_size, target_layer_ids, num_target_layers, cache_dir: as DeepSpec's.

    Raises:
        NotStoredError, LayerError: the store has no such column or layer.
        DtypeError: states are not bfloat16.
        ArgumentError: the numbers of the layers are unknown.
    """

    def __init__(
        self,
        cache_dir: Store | str | PathLike[str],
        max_open_shards: int = 4,
        *,
        layers: Layers | None = None,
        last: Layer = "last",
        input_ids: str = "input_ids",
        loss_mask: str | None = "loss_mask",
        dtype: DTypeLike | None = None,
        target_model_name_or_path: str | None = None,
    ) -> None:
        super().__init__()
        self._examples = DraftExamples(
            cache_dir, "int32", "uint8", layers=layers, last=last, input_ids=input_ids, loss_mask=loss_mask, dtype=dtype
        )
        store = self._examples.store
        self._examples.require("bfloat16", "target_hidden_states: expected bfloat16")
        self.cache_dir = str(store.path)
        self.max_open_shards = max_open_shards
        self.num_samples = len(self._examples)
        self.hidden_size = self._examples.width
        self.target_layer_ids = list(self._numbers(layers))
        self.num_target_layers = len(self.target_layer_ids)
        self.manifest = self._manifest(target_model_name_or_path)

    def _numbers(self, layers: Layers | None) -> Sequence[int]:
        recorded = self._examples.store.metadata.get("target_layer_ids")
        if layers is None and self._examples.store.format == "deepspec" and isinstance(recorded, list):
            return [int(layer) for layer in recorded]  # not the layers' names, which differ for repeated numbers
        if self._examples.numbers is None:
            names = ", ".join(f"{layer!r}: ..." for layer in self._examples.layers)
            raise ArgumentError(
                f"layers: the numbers of these layers in the model are not recorded; pass layers={{{names}}}",
                path=self._examples.store.path,
            )
        return self._examples.numbers

    def _manifest(self, model: str | None) -> dict[str, object]:
        store = self._examples.store
        manifest = dict(store.metadata) if store.format == "deepspec" else {}
        model = model or store.contents.model
        model_field = {} if model is None else {"target_model_name_or_path": model}
        return manifest | model_field | {
            "num_samples": self.num_samples,
            "hidden_size": self.hidden_size,
            "target_layer_ids": self.target_layer_ids,
        }  # fmt: skip

    def __len__(self) -> int:
        return self.num_samples

    def close(self) -> None:
        """Closes the store."""
        self._examples.store.close()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        for index in indices:
            if not 0 <= int(index) < self.num_samples:
                raise OutOfRangeError(f"index {index} is out of range: there are {self.num_samples} samples")
        return [_sample(sample) for sample in self._examples.read(indices)]


def _sample(sample: DraftSample) -> dict[str, torch.Tensor]:
    assert sample.last is not None, "the class always names a last layer"
    return {
        "input_ids": tensor(sample.ids),
        "loss_mask": tensor(sample.mask),
        "target_hidden_states": tensor(sample.states),
        "target_last_hidden_states": tensor(sample.last),
    }


class CacheCollator:
    """Pads samples with zeros to the longest, and adds ``attention_mask`` int64."""

    def __call__(self, features: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Returns ``input_ids``, ``loss_mask``, ``attention_mask`` ``(B, S)`` and the states ``(B, S, width)``."""
        batch = {key: _padded(features, key) for key in ("input_ids", "loss_mask")}
        lengths = torch.tensor([len(item["input_ids"]) for item in features])
        places = torch.arange(batch["input_ids"].shape[1])
        batch["attention_mask"] = (places < lengths[:, None]).to(torch.long)
        return batch | {key: _padded(features, key) for key in ("target_hidden_states", "target_last_hidden_states")}


def _padded(features: Sequence[dict[str, torch.Tensor]], key: str) -> torch.Tensor:
    first = features[0][key]
    longest = max(len(item[key]) for item in features)
    out = torch.zeros((len(features), longest, *first.shape[1:]), dtype=first.dtype)
    for row, item in zip(out, features, strict=True):
        row[: len(item[key])] = item[key]
    return out


def validate_train_cache(*, train_dataset: Any, draft_model: Any, target_model_name_or_path: object) -> None:
    """Compares a dataset's layers, width and model with a draft model's configuration, as DeepSpec does.

    Raises:
        WrongCacheError: (an AssertionError) they differ.
    """
    manifest = train_dataset.manifest
    for field, actual, expected in (
        (
            "target_layer_ids",
            [int(layer) for layer in manifest["target_layer_ids"]],
            [int(layer) for layer in draft_model.target_layer_ids],
        ),
        ("hidden_size", int(manifest["hidden_size"]), int(draft_model.config.hidden_size)),
        (
            "target_model_name_or_path",
            str(manifest.get("target_model_name_or_path")),
            str(target_model_name_or_path),
        ),
    ):
        if actual != expected:
            raise WrongCacheError(
                f"field {field!r}: expected {expected}, from the draft model's configuration, found {actual}",
                path=train_dataset.cache_dir,
            )
