"""The base of the formats for draft models: token ids and masks, and hidden states of which one layer is the model's last."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard.base.errors import ArgumentError
from actshard.base.layers import Layer
from actshard.formats.per_token import LAST, ColumnValues, check_counts, check_lists, made_up_masks, token_values
from actshard.formats.target import Block, Spec, Target, uniform

if TYPE_CHECKING:
    import pyarrow as pa


class TokenTarget(Target):
    """Writes token ids, masks and hidden states of the same tokens."""

    token_types: Mapping[str, DTypeLike]
    """Columns with one value per token, each with an integer dtype that holds the values."""
    reserved: ClassVar[Collection[str]] = ()
    """Metadata fields that describe the files."""
    needs_tokens: ClassVar[bool] = True
    holds_named_layers = True
    splits = "examples"
    needs_columns: ClassVar[tuple[str, ...]] = ("input_ids",)

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.part is not None:
            raise ArgumentError(f"part: not supported by {self.format}; write one dataset")
        if conflicts := sorted(spec.metadata.keys() & set(self.reserved)):
            raise ArgumentError(
                f"metadata: {conflicts[0]!r} describes the files and is written by actshard; leave it out"
            )
        last = spec.options.get("last", LAST)
        if last is not None and last not in spec.layers and "last" in spec.options:
            raise ArgumentError(f"last: expected one of the layers {list(spec.layers)}, found {last!r}")
        self.last = spec.layers.index(last) if last in spec.layers else None
        """Index of the layer that is stored as the last hidden state; None: not stored."""
        self.aux = [k for k in range(len(spec.layers)) if k != self.last]
        """Indices of the other layers, in stored order."""

    def require_last(self, what: str, remedy: str = "") -> None:
        """Raises ArgumentError without a last hidden state. ``what``: what stores it, with the verb."""
        if self.last is None:
            raise ArgumentError(
                f"layers: {what} the last hidden state: name a layer {LAST!r}, or pass last=NAME{remedy}; "
                f"found {list(self.spec.layers)}"
            )

    def layer_ids(self) -> list[int]:
        """The option ``layer_ids``: numbers of the layers of :attr:`aux`; by default their names."""
        ids = self.spec.options.get("layer_ids")
        if ids is None:
            ids = [self.spec.layers[k] for k in self.aux]
        elif not isinstance(ids, list | tuple) or len(ids) != len(self.aux):
            raise ArgumentError(
                f"layer_ids: expected {len(self.aux)} integers, one for each other layer, found {ids!r}"
            )
        if not ids:
            raise ArgumentError(
                f"layers: {self.format} stores other layers besides the last hidden state; found {list(self.spec.layers)}"
            )
        if any(type(x) is not int or not -1 <= x < 1 << 31 for x in ids) or len(set(ids)) < len(ids):
            raise ArgumentError(
                f"layers: expected different integers of at least -1 as target_layer_ids, found {list(ids)}; pass layer_ids=[...]"
            )
        return list(ids)

    @property
    def aux_names(self) -> Sequence[Layer]:
        """Names under which the layers of :attr:`aux` are read."""
        return [self.spec.layers[k] for k in self.aux]

    @property
    def reading(self) -> dict[Layer, Layer]:
        """The layers before the last hidden state, then the last hidden state."""
        names: dict[Layer, Layer] = dict(zip((self.spec.layers[k] for k in self.aux), self.aux_names, strict=True))
        return names if self.last is None else {**names, self.spec.layers[self.last]: LAST}

    def further_losses(self, columns: Sequence[str]) -> list[tuple[str, str]]:
        """The name of the last hidden state, and masks that the source lacks."""
        losses = []
        if self.last is not None and self.spec.layers[self.last] != LAST:
            name = self.spec.layers[self.last]
            losses.append(("layers", f"{self.format} does not record their names: {name} is read as {LAST!r}"))
        return losses + made_up_masks(self.only_columns or (), columns)

    # -- columns ---------------------------------------------------------------------------------------------------

    def check_columns(self, schema: pa.Schema) -> None:
        """Raises for columns that are not lists of integers, and for other columns."""
        check_lists(schema, self.only_columns or (), self.format)

    def check_count(self, n: int, columns: Sequence[str]) -> None:
        """Raises ArgumentError without token ids."""
        if "input_ids" not in columns:
            raise ArgumentError(
                f"columns: {self.format} stores token ids: pass columns={{'input_ids': [...]}}, a list per example"
            )

    def check_values(self, table: pa.Table, first: int) -> None:
        """Raises ArgumentError for nulls, and for values that the files cannot hold."""
        token_values(table, self.token_types, first)

    def tokens_of(self, block: Block) -> tuple[NDArray[np.int64], ColumnValues]:
        """Returns the number of tokens of each example of a block, and the values of its tokens.

        Raises:
            ArgumentError: an example without tokens, or with another number of values than tokens.
        """
        tokens = uniform(block.lengths, self.format, self.spec.layers)
        if (tokens <= 0).any():
            bad = self.n + int(np.flatnonzero(tokens <= 0)[0])
            raise ArgumentError(f"example {bad} has no tokens, and {self.format} requires at least one; leave it out")
        assert block.columns is not None  # as check_count requires
        values = token_values(block.columns, self.token_types, self.n)
        for name, (_, counts) in values.items():
            check_counts(counts, tokens, name, self.n)
        return tokens, values
