"""speculators' ``ArrowDataset`` over any store. Source: speculators 0.9.0, ``speculators/train/data.py``."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal

from numpy.typing import DTypeLike

from actshard import Layer, Store
from actshard.base.errors import (
    ArgumentError,
    MissingExtraError,
    MissingFileError,
    OutOfRangeError,
    UnsupportedError,
    warn,
)
from actshard.compat.drafts import DraftExamples, DraftSample, Layers
from actshard.torch._tensors import tensor, torch

try:
    from speculators.train.data import BaseDataset
    from speculators.train.recovery import SampleUnavailable
except ImportError as error:
    raise MissingExtraError(
        "actshard.compat.speculators.ArrowDataset needs speculators 0.9 or newer: pip install speculators"
    ) from error


class ArrowDataset(BaseDataset):
    """speculators' dataset of training samples, over any store.

    Items: ``hidden_states`` ``(S, L * H)``, ``input_ids`` int64 ``(S,)``, ``verifier_last_hidden_states`` ``(S, H)``,
    ``loss_mask`` int64 ``(S,)``, ``lengths`` int64 ``(1,)``, ``position_ids`` int64 ``(S,)``. States have the stored dtype;
    speculators' collate function converts them. All are copies.

    Args:
        max_len: as in speculators; does not affect items.
        datapath: a store, or the path or URL of one.
        transfer: must be None, because states come from the store.
        vllm_endpoint, model, request_timeout, max_retries, generation_validation_retries, max_consecutive_generation_failures:
            accepted and ignored, because nothing is generated.
        on_missing: for examples with a missing file: ``"skip"``, ``"warn"`` (and skip) or ``"raise"``; ``"generate"`` also raises.
        train_ratio: the fraction of examples in the training split, which consists of the first ones.
        split: ``"train"`` or ``"val"``.
        hidden_states_dtype: dtype of collated batches, as in speculators.
        layers, last, input_ids, loss_mask, dtype: as in :class:`actshard.compat.deepspec.CacheDataset`.

    Raises:
        NotStoredError, LayerError: the store has no such column or layer.
        ArgumentError: (a ValueError) the split is empty.
    """

    def __init__(
        self,
        max_len: int,
        datapath: Store | str | PathLike[str],
        transfer: None = None,
        vllm_endpoint: str = "http://localhost:8000/v1",
        on_missing: Literal["generate", "skip", "warn", "raise"] = "generate",
        train_ratio: float = 1.0,
        split: Literal["train", "val"] = "train",
        hidden_states_dtype: object = torch.bfloat16,
        model: str | None = None,
        request_timeout: float | None = None,
        max_retries: int = 0,
        generation_validation_retries: int = 2,
        max_consecutive_generation_failures: int = 20,
        *,
        layers: Layers | None = None,
        last: Layer = "last",
        input_ids: str = "input_ids",
        loss_mask: str | None = "loss_mask",
        dtype: DTypeLike | None = None,
    ) -> None:
        if transfer is not None:
            raise ArgumentError(
                "transfer: expected None, because hidden states come from the store; speculators' own ArrowDataset takes a transfer"
            )
        if on_missing not in ("generate", "skip", "warn", "raise"):
            raise ArgumentError(f'on_missing: expected "generate", "skip", "warn" or "raise", found {on_missing!r}')
        self._examples = DraftExamples(
            datapath, "int64", "int64", layers=layers, last=last, input_ids=input_ids, loss_mask=loss_mask, dtype=dtype
        )
        self.on_missing = on_missing
        self.start_file_idx, self._stop = _split(len(self._examples), train_ratio, split)
        super().__init__(max_len=max_len, hidden_states_dtype=hidden_states_dtype)

    def __len__(self) -> int:
        return self._stop - self.start_file_idx

    def _compute_approx_lengths(self) -> list[int]:
        counts: list[int] = self._examples.lengths()[self.start_file_idx : self._stop].tolist()
        return counts

    def _get_raw_data(self, index: int) -> object:
        try:
            return _raw(self._examples.read([self._number(index)])[0])
        except MissingFileError as error:
            if self.on_missing == "generate":
                raise UnsupportedError(
                    f"sample {index} has no hidden states, and a store cannot generate them: {error.detail}. "
                    'Pass on_missing="skip" to skip it',
                    path=error.path,
                ) from error
            if self.on_missing == "raise":
                raise
            if self.on_missing == "skip":
                return SampleUnavailable()
            text = f"Failed to load hidden states for sample {index}. Skipping..."
            warn(text, code="missing-file")
            return SampleUnavailable(reason=f"Hidden states unavailable for sample {index}")

    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise OutOfRangeError(f"index {index} is out of range: there are {len(self)} samples")
        return int(index) + self.start_file_idx

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Reads the samples of a batch, in one parallel read."""
        try:
            samples = self._examples.read([self._number(index) for index in indices])
        except MissingFileError:
            return [self[index] for index in indices]
        return [_whole(_raw(sample)) for sample in samples]


def _split(n: int, train_ratio: float, split: str) -> tuple[int, int]:
    """First example and end of a split, computed as in speculators."""
    if not 0.0 < train_ratio <= 1.0:
        raise ArgumentError(f"train_ratio: expected more than 0 and at most 1, found {train_ratio!r}")
    boundary = int(n * train_ratio)
    start, stop = (0, boundary) if split == "train" else (boundary, n)
    if start >= stop:
        raise ArgumentError(f"train_ratio: {train_ratio} of {n} examples leaves none for the split {split!r}")
    return start, stop


def _raw(sample: DraftSample) -> dict[str, object]:
    assert sample.last is not None, "the class always names a last layer"
    return {
        "hidden_states": tensor(sample.states),
        "input_ids": tensor(sample.ids),
        "verifier_last_hidden_states": tensor(sample.last),
        "loss_mask": tensor(sample.mask),
    }


def _whole(raw: dict[str, Any]) -> dict[str, Any]:
    """Adds the entries that ``BaseDataset.__getitem__`` adds."""
    tokens = len(raw["input_ids"])
    return raw | {
        "lengths": torch.tensor([tokens], dtype=torch.long),
        "position_ids": torch.arange(tokens, dtype=torch.long),
    }
