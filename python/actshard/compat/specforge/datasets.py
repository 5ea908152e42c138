"""SpecForge's ``OfflineEagle3Dataset``. Source: sgl-project/SpecForge a6b6b02, ``specforge/data/preprocessing.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard import Layer, Store
from actshard.base.errors import MissingExtraError, OutOfRangeError
from actshard.compat.drafts import DraftExamples, DraftSample, Layers
from actshard.torch._tensors import data, tensor, torch

_Sample = dict[str, Any]


def order_of(store: Store) -> NDArray[np.int64]:
    """Example numbers in SpecForge's order: for a SpecForge folder sorted by path as text, otherwise the store's order."""
    if store.format != "specforge" or store.chosen is not None:
        return np.arange(store.num_examples)
    files = store.read_columns(["file"])["file"].to_pylist()
    return np.array(sorted(range(len(files)), key=files.__getitem__), np.int64)


def raw_eagle3(sample: DraftSample) -> _Sample:
    """Returns the tensors of a SpecForge file: ids and masks ``(S,)``, states ``(1, S, ...)``."""
    assert sample.last is not None, "EAGLE-3 examples are read with their last states"
    return {
        "input_ids": tensor(sample.ids),
        "loss_mask": tensor(sample.mask),
        "aux_hidden_state": tensor(sample.states)[None],
        "hidden_state": tensor(sample.last)[None],
    }


class OfflineEagle3Dataset(data.Dataset):
    """Map-style dataset of examples of S tokens, S at most ``max_len``.

    Items: ``attention_mask``, ``loss_mask`` (its last value is 0) and ``input_ids`` int64 ``(1, S)``, ``target`` ``(1, S, H)`` and
    ``hidden_state`` ``(1, S, L * H)`` in the stored dtype. All are copies.

    Args:
        datapath: a store, or the path or URL of one.
        transform: applied to each item.
        max_len: maximum tokens of an example; further tokens are not read.
        ttt_length: overlap of the parts with ``use_usp_preprocess``.
        use_usp_preprocess: split items for sequence parallelism, with SpecForge's own function and process groups.
        layers, last, input_ids, loss_mask, dtype: as in :class:`actshard.compat.deepspec.CacheDataset`.

    Raises:
        NotStoredError, LayerError: the store has no such column or layer.
        MissingExtraError: ``use_usp_preprocess`` without specforge.
    """

    def __init__(
        self,
        datapath: Store | str | PathLike[str],
        transform: Callable[[_Sample], object] | None = None,
        max_len: int = 2048,
        ttt_length: int = 1,
        use_usp_preprocess: bool = False,
        *,
        layers: Layers | None = None,
        last: Layer = "last",
        input_ids: str = "input_ids",
        loss_mask: str | None = "loss_mask",
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__()
        self._examples = DraftExamples(
            datapath, "int64", "int64", layers=layers, last=last, input_ids=input_ids, loss_mask=loss_mask, dtype=dtype
        )
        self._order = order_of(self._examples.store)
        self.transform, self.max_len, self.ttt_length = transform, max_len, ttt_length
        self.use_usp_preprocess = use_usp_preprocess
        self._epoch = 0
        self._parallel = _topology() if use_usp_preprocess else {}

    def __len__(self) -> int:
        return len(self._order)

    def set_epoch(self, epoch: int) -> None:
        """Stores the epoch, as in SpecForge. Items do not depend on it."""
        self._epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[object]:
        n = len(self)
        if bad := [index for index in indices if not -n <= index < n]:
            raise OutOfRangeError(f"index {bad[0]} is out of range: there are {n} samples")
        read = self._examples.read(self._order[np.asarray(indices, np.int64)].tolist(), self.max_len)
        return [self._made(raw_eagle3(sample)) for sample in read]

    def _made(self, raw: _Sample) -> object:
        if self.use_usp_preprocess:
            from specforge.data.preprocessing import OfflineEagle3Dataset as Original

            return Original.process_data_usp(
                raw, self.max_len, ttt_length=self.ttt_length, transform=self.transform, **self._parallel
            )
        loss_mask = raw["loss_mask"][None]
        loss_mask[0, -1:] = 0
        tensors = {
            "attention_mask": torch.ones_like(loss_mask, dtype=torch.long),
            "loss_mask": loss_mask,
            "target": raw["hidden_state"],
            "hidden_state": raw["aux_hidden_state"],
            "input_ids": raw["input_ids"][None],
        }
        return self.transform(tensors) if self.transform else tensors


def _topology() -> dict[str, int]:
    """Ranks and sizes of this process's groups in SpecForge."""
    try:
        from specforge.distributed import get_draft_sp_group, get_sp_ring_group
    except ImportError as error:
        raise MissingExtraError(
            "use_usp_preprocess needs specforge, which is not installed: pip install specforge"
        ) from error

    group, ring = get_draft_sp_group(), get_sp_ring_group()
    distributed = torch.distributed
    return {
        "sp_rank": distributed.get_rank(group),
        "sp_size": distributed.get_world_size(group),
        "ring_rank": distributed.get_rank(ring),
        "sp_ring_size": distributed.get_world_size(ring),
    }


def build_offline_eagle3_dataset(
    hidden_states_path: Store | str | PathLike[str],
    max_len: int = 2048,
    ttt_length: int = 1,
    use_usp_preprocess: bool = False,
    **options: Any,
) -> OfflineEagle3Dataset:
    """Returns the dataset of a store; ``options`` are the keyword arguments of :class:`OfflineEagle3Dataset`."""
    return OfflineEagle3Dataset(
        hidden_states_path,
        max_len=max_len,
        ttt_length=ttt_length,
        use_usp_preprocess=use_usp_preprocess,
        **options,
    )
