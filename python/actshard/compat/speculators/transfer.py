"""The backend ``"actshard"`` of hs-connectors, and the rows that speculators reads in addition to it.

Interface: hs-connectors 0.9.0, ``hs_connectors/transfer.py``: ``get_cached(i)`` returns ``hidden_states`` ``(S, L + 1, H)``,
whose last layer is the last hidden state, and ``token_ids`` int64 ``(S,)``; or None if row i has no states.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from actshard import Layer, Store
from actshard.base._arguments import local_path
from actshard.base.errors import ArgumentError, MissingExtraError, MissingFileError, UnsupportedError, boundary
from actshard.compat.drafts import DraftExamples, Layers
from actshard.torch._tensors import tensor, torch

try:
    from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
except ImportError as error:
    raise MissingExtraError(
        "actshard.compat.speculators needs hs-connectors, which is not installed: pip install speculators"
    ) from error

_AT_ONCE = 1024
"""Examples whose token ids are read together."""


class StoreTransfer(HiddenStatesTransfer):
    """Hidden states of a store, for ``ArrowDataset(transfer=)`` of speculators. Pickled as the store's path.

    Args:
        store: a store, or the path or URL of one.
        layers: layers, in order; None: all but ``last``.
        last: the layer of last hidden states.
        input_ids: the column of token ids.
    """

    def __init__(
        self,
        store: Store | str | PathLike[str],
        *,
        layers: Layers | None = None,
        last: Layer = "last",
        input_ids: str = "input_ids",
    ) -> None:
        chosen = DraftExamples(store, "int64", "int64", layers=layers, last=last, input_ids=input_ids, loss_mask=None)
        self._examples = DraftExamples(
            chosen.store,
            "int64",
            "int64",
            layers=(*chosen.layers, last),
            last=None,
            input_ids=input_ids,
            loss_mask=None,
        )

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """Reads the states and token ids of an example. Returns None if there is no such example or its file is missing.

        Raises:
            As :meth:`actshard.Store.gather`, for a damaged file.
        """
        if not 0 <= file_idx < len(self._examples):
            return None
        try:
            sample = self._examples.read([file_idx])[0]
        except MissingFileError:
            return None
        states = sample.states.reshape(len(sample.ids), len(self._examples.layers), self._examples.width)
        return {"hidden_states": tensor(states), "token_ids": tensor(sample.ids)}

    def get_generated(self, hs_transfer_params: object) -> dict[str, torch.Tensor] | None:
        """Not supported: a store does not generate states.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "this backend cannot generate hidden states: use --on-missing raise, warn or skip",
            path=self._examples.store.path,
        )


class StoreBackend(HiddenStatesBackend):
    """The backend ``"actshard"``, created from arguments of ``speculators.train``."""

    @staticmethod
    def add_train_args(parser: ArgumentParser) -> None:
        """Adds ``--actshard-store``, ``--actshard-layers`` and ``--actshard-last``."""
        parser.add_argument(
            "--actshard-store", type=str, default=None, help="Path or URL of the store. (Default: the data path.)"
        )
        parser.add_argument(
            "--actshard-layers",
            type=str,
            default=None,
            help="Comma-separated names of the store's layers, in order. (Default: all but the last hidden states.)",
        )
        parser.add_argument(
            "--actshard-last",
            type=str,
            default="last",
            help="The store's layer of last hidden states. (Default: last.)",
        )

    @staticmethod
    def add_launch_args(parser: ArgumentParser) -> None:
        """Adds nothing: vLLM does not write stores."""

    @staticmethod
    def from_train_args(args: Namespace, data_path: str) -> StoreTransfer:
        """Returns the transfer for these arguments.

        Raises:
            LayerError, ArgumentError: the store has no such layer.
        """
        import actshard

        store = actshard.open(args.actshard_store or data_path)
        layer_by_name = {str(layer): layer for layer in store.layers}
        names = [args.actshard_last, *(args.actshard_layers or "").split(",")]
        last, *layers = [layer_by_name.get(name.strip(), name.strip()) for name in names]
        return StoreTransfer(store, layers=None if args.actshard_layers is None else layers, last=last)

    @staticmethod
    def build_kv_transfer_config(args: Namespace) -> dict[str, Any]:
        """Not supported: vLLM does not write stores.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("vLLM cannot write stores: launch it with the backend 'file', and convert its files")


if "actshard" not in HiddenStatesBackend.registry:
    HiddenStatesBackend.register("actshard")(StoreBackend)


def write_rows(
    store: Store | str | PathLike[str],
    folder: str | PathLike[str],
    *,
    input_ids: str = "input_ids",
    loss_mask: str | None = "loss_mask",
) -> Path:
    """Writes a store's examples as rows without hidden states, like ``save_to_disk`` of ``datasets``; returns the folder.

    The folder is for ``speculators.train --data-path``, with the backend ``"actshard"``. Rows contain ``input_ids``, ``loss_mask``
    and ``seq_len``: 12 bytes per token.

    Args:
        store: a store, or the path or URL of one.
        folder: a new or empty folder.
        input_ids: the column of token ids.
        loss_mask: the column of masks; None: every token counts.

    Raises:
        NotStoredError: the store has no such column.
        ArgumentError: the folder is not empty.
    """
    import pyarrow as pa

    from actshard.formats.speculators.write import write_rows as write

    examples = DraftExamples(store, "int32", "int64", last=None, input_ids=input_ids, loss_mask=loss_mask)
    if not len(examples):
        raise ArgumentError("store: expected at least one example, found none", path=examples.store.path)
    parts = []
    for first in range(0, len(examples), _AT_ONCE):
        pairs = examples.tokens(range(first, min(first + _AT_ONCE, len(examples))))
        ends = np.cumsum([0, *(len(ids) for ids, _ in pairs)])
        columns = {
            name: pa.LargeListArray.from_arrays(ends, pa.array(np.concatenate([pair[k] for pair in pairs])))
            for k, name in enumerate(("input_ids", "loss_mask"))
        }
        parts.append(pa.table(columns))
    path = local_path(folder, "folder")
    with boundary(path, "write rows"):
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ArgumentError("folder: expected a new or empty folder, found one with files", path=path)
        write(path, pa.concat_tables(parts), None, {})
    return path
