"""Training examples from a token cache: windows, packs and rows, as batches of numpy arrays.

Each class yields the examples of Levanter's class of the same name (``docs/formats/levanter.md``), without JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base.errors import ArgumentError, FormatError, NotStoredError, warn
from actshard.base.location import Location
from actshard.tokens.cache import TOKENS, TokenCache
from actshard.tokens.stream import Streamed

PACKED_SEGMENTS = 64
"""Default limit of documents per example."""
STRATEGIES = ("left", "right", "raise", "drop")
_AT_MOST_ROWS = 1 << 31


@dataclass(frozen=True)
class TokenBatch:
    """A batch of b examples of P tokens.

    Attributes:
        tokens: (b, P) int32.
        loss_weight: (b, P) float32: weight of the prediction *made at* a position, that is, of the next token.
        segment_ids: (b, P) int32, or None if documents are not kept apart. A position attends to earlier positions with the same
            id. In packed examples: row numbers of the cache, -1 for padding.
        max_segments: limit of documents per example, for THD lengths; None for windows.
    """

    tokens: NDArray[np.int32]
    loss_weight: NDArray[np.float32]
    segment_ids: NDArray[np.int32] | None = None
    max_segments: int | None = None

    def __repr__(self) -> str:
        segments = "" if self.segment_ids is None else ", with segments"
        return f"<actshard.tokens.TokenBatch of {' x '.join(map(str, self.tokens.shape))} tokens{segments}>"

    def __len__(self) -> int:
        return len(self.tokens)

    def _runs(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        if self.segment_ids is None or self.max_segments is None:
            raise NotStoredError("THD lengths exist only for packed examples with segment ids")
        most = self.max_segments + 1
        lengths, counts = _native.run_lengths(np.ascontiguousarray(self.segment_ids), most)
        return lengths.reshape(len(self), most), counts

    @property
    def thd_segment_lengths(self) -> NDArray[np.int32]:
        """Lengths of runs of equal segment ids, including padding, followed by zeros: (b, max_segments + 1) int32."""
        return self._runs()[0]

    @property
    def thd_num_segments(self) -> NDArray[np.int32]:
        """Number of runs of equal segment ids: (b,) int32."""
        return self._runs()[1]

    @staticmethod
    def merged(parts: Sequence[tuple[NDArray[np.int64], TokenBatch]], n: int) -> TokenBatch:
        """Merges batches of ``n`` examples in total. Each part is given with the positions of its examples."""
        if not parts:
            return TokenBatch(np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))
        if len(parts) == 1:
            ((order, only),) = parts
            ranks = np.argsort(order)
            segments = None if only.segment_ids is None else only.segment_ids[ranks]
            return replace(only, tokens=only.tokens[ranks], loss_weight=only.loss_weight[ranks], segment_ids=segments)
        widths = {batch.tokens.shape[1] for _, batch in parts}
        if len(widths) > 1:
            raise ArgumentError(f"expected examples of equal lengths in a batch, found lengths {sorted(widths)}")
        with_segments = {batch.segment_ids is not None for _, batch in parts}
        if len(with_segments) > 1:
            raise ArgumentError("expected segment ids in all datasets of a batch or in none")
        width = widths.pop()
        tokens, weights = np.empty((n, width), np.int32), np.empty((n, width), np.float32)
        segments = np.empty((n, width), np.int32) if with_segments.pop() else None
        limits = {batch.max_segments for _, batch in parts}
        for places, batch in parts:
            tokens[places], weights[places] = batch.tokens, batch.loss_weight
            if segments is not None and batch.segment_ids is not None:
                segments[places] = batch.segment_ids
        return TokenBatch(tokens, weights, segments, limits.pop() if len(limits) == 1 else None)


Batch = TokenBatch
"""The old name, which existing programs and pickles use. Not to be confused with ``actshard.Batch``, a batch of a stream."""


class Windows(Protocol):
    """Windows of fixed length, from which :class:`CausalLmDataset` makes examples."""

    cache: TokenCache
    seq_len: int
    input_ids_key: str
    loss_weights_key: str | None

    def __len__(self) -> int: ...


class TokenSeqDataset(Streamed):
    """Consecutive windows of ``seq_len`` tokens, across documents and shards. A shorter rest is left out.

    ``get_batch(indices)`` returns (b, seq_len) int32, a copy.

    Args:
        cache: an open cache.
        seq_len: tokens per window.
        loss_weights_key: a field of weights, split into windows likewise, for :class:`CausalLmDataset`.
        input_ids_key: the field of tokens; default: the cache's ``token_field``.
    """

    settings: ClassVar[tuple[str, ...]] = ("seq_len", "input_ids_key", "loss_weights_key")

    def __init__(
        self, cache: TokenCache, seq_len: int, loss_weights_key: str | None = None, *, input_ids_key: str | None = None
    ) -> None:
        self.cache = cache
        self.seq_len = _arguments.whole(seq_len, "seq_len", 1)
        self.input_ids_key = input_ids_key or cache.token_field
        self.loss_weights_key = loss_weights_key
        tokens = self._tokens
        self._length = tokens.num_elements // self.seq_len if tokens else 0
        if loss_weights_key is not None and tokens is not None:
            _check_lengths(
                cache, [self.input_ids_key, loss_weights_key], totals_only=not Location.at(cache.path).is_local
            )

    def __len__(self) -> int:
        return self._length

    @property
    def _tokens(self) -> _native.TokenField | None:
        # Not stored: a native field cannot be pickled, the cache can.
        return _field_or_empty(self.cache, self.input_ids_key)

    def starts(self, indices: Sequence[int] | NDArray[np.generic]) -> NDArray[np.int64]:
        """Offsets of windows, in elements: (n,) int64."""
        return self.cache.numbers(indices, self._length, "window") * self.seq_len

    def get_batch(self, indices: Sequence[int] | NDArray[np.generic]) -> NDArray[np.int32]:
        """Reads windows: (b, seq_len) int32, a copy.

        Raises:
            OutOfRangeError: an index is out of range.
            FormatError: a token does not fit int32.
        """
        windows: NDArray[np.int32] = self._read(indices, weights=False)[0]
        return windows

    def weights(self, indices: Sequence[int] | NDArray[np.generic]) -> NDArray[np.float32]:
        """Reads the stored loss weights of windows: (b, seq_len) float32, a copy."""
        if self.loss_weights_key is None:
            raise NotStoredError("no loss weights: create the windows with loss_weights_key=", path=self.cache.path)
        starts = self.starts(indices)
        field = self.cache.field(self.loss_weights_key)
        rows = [np.asarray(field.elements(int(s), self.seq_len), np.float32) for s in starts]
        return np.stack(rows) if rows else np.empty((0, self.seq_len), np.float32)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        window: NDArray[np.int32] = self.get_batch([index])[0]
        return window

    def _read(
        self,
        indices: Sequence[int] | NDArray[np.generic],
        *,
        weights: bool,
        segments: bool = False,
        eos: int | None = None,
    ) -> tuple[Any, Any, Any]:
        tokens = self._tokens
        if tokens is None:
            self.starts(indices)
            return np.empty((0, self.seq_len), np.int32), np.empty((0, self.seq_len), np.float32), None
        field = None if self.loss_weights_key is None or not weights else self.cache.field(self.loss_weights_key)
        return tokens.windows(
            _arguments.flat(indices, "window"),
            self.seq_len,
            self._length,
            self.seq_len,
            loss="all" if field is None else "weights",
            field=field,
            weights=weights,
            segments=segments,
            eos=eos,
        )


def _field_or_empty(cache: TokenCache, name: str) -> _native.TokenField | None:
    """A field; None if the cache has no rows, and thus possibly no fields."""
    return None if not len(cache) and name not in cache.fields else cache.field(name)


class CausalLmDataset(Streamed):
    """Windows as examples. Every position but the last predicts the next token.

    Args:
        windows: a :class:`TokenSeqDataset`. Its weights, if any, multiply the loss.
        eos_id: the token that ends a document; None: documents are not kept apart.
        block_cross_document_attention: False leaves segment ids out.
    """

    settings: ClassVar[tuple[str, ...]] = ("windows", "eos_id", "block_cross_document_attention")

    def __init__(
        self, windows: TokenSeqDataset, *, eos_id: int | None = None, block_cross_document_attention: bool = True
    ) -> None:
        self.windows = windows
        self.eos_id = eos_id
        self.block_cross_document_attention = block_cross_document_attention
        if eos_id is not None and block_cross_document_attention:
            _warn_of_no_eos(windows.cache, eos_id)

    @property
    def cache(self) -> TokenCache:
        """The cache of the windows."""
        return self.windows.cache

    def __len__(self) -> int:
        return len(self.windows)

    def get_batch(self, indices: Sequence[int] | NDArray[np.generic]) -> TokenBatch:
        """Returns examples; see :class:`TokenBatch`."""
        has_segments = self.block_cross_document_attention and self.eos_id is not None
        arrays = self.windows._read(indices, weights=True, segments=has_segments, eos=self.eos_id)
        return TokenBatch(*arrays)

    def __getitem__(self, index: int) -> TokenBatch:
        return self.get_batch([index])


def _warn_of_no_eos(cache: TokenCache, eos_id: int) -> None:
    """Warns if documents cannot be kept apart because the cache was built without eos tokens."""
    if cache.ledger.preprocessor.get("append_eos") is False:
        warn(
            f"{cache.path}: was built without eos tokens (append_eos: false), so eos_id={eos_id} separates documents only "
            "where their texts contain it; build the cache with a tokenizer that has an eos token",
            code="no-eos",
        )


def segments_of(pack: bool | int | str | None) -> int:
    """Limit of documents per example: 64 for True and None, one for False, 0 and ``"pad"``, otherwise the number."""
    if pack is None or pack is True:
        return PACKED_SEGMENTS
    if pack is False or pack == "pad":
        return 1
    if isinstance(pack, str) or not isinstance(pack, int | np.integer) or pack < 0:
        raise ArgumentError(f"pack must be True, False, 'pad' or a number of documents per example, not {pack!r}")
    return int(pack) or 1


class _Packed(Streamed):
    """Examples of whole rows, packed greedily in order: a row goes to the current example if it fits, else to a new one."""

    settings: ClassVar[tuple[str, ...]] = (
        "max_length",
        "max_segments",
        "slice_strategy",
        "block_cross_document_attention",
        "loss_mask_padding",
        "_loss",
        "_input_ids_key",
        "_loss_key",
    )

    def __init__(
        self,
        cache: TokenCache,
        max_length: int,
        *,
        pack: bool | int | str | None,
        slice_strategy: str,
        input_ids_key: str,
        loss: str,
        loss_key: str | None,
        block_cross_document_attention: bool,
        loss_mask_padding: bool,
    ) -> None:
        _arguments.one_of(slice_strategy, STRATEGIES, "slice_strategy")
        self.cache = cache
        self.max_length = _arguments.whole(max_length, "max_length", 1)
        self.max_segments = segments_of(pack)
        self.slice_strategy = slice_strategy
        self.block_cross_document_attention = block_cross_document_attention
        self.loss_mask_padding = loss_mask_padding
        self._loss = loss
        self._input_ids_key, self._loss_key = input_ids_key, loss_key
        if len(cache) >= _AT_MOST_ROWS and block_cross_document_attention:
            raise ArgumentError(f"segment ids are 32-bit row numbers, but the cache has {len(cache)} rows")
        self._plan(cache, input_ids_key, loss_key)

    def _plan(self, cache: TokenCache, input_ids_key: str, loss_key: str | None) -> None:
        keys = [input_ids_key] + [key for key in (loss_key, *self._also(cache)) if key and key != input_ids_key]
        empty = _field_or_empty(cache, input_ids_key) is None
        fields = [] if empty else _check_lengths(cache, list(dict.fromkeys(keys)))
        flat = _native.pack_rows(fields[:1], self.max_length, self.max_segments, self.slice_strategy)
        self.pack_ranges: NDArray[np.int64] = flat.reshape(-1, 2)
        """Start and end row of each example, end exclusive: (n, 2) int64."""

    def _also(self, cache: TokenCache) -> tuple[str, ...]:
        """Further fields whose row lengths limit packing."""
        return ()

    def __len__(self) -> int:
        return len(self.pack_ranges)

    def get_batch(self, indices: Sequence[int] | NDArray[np.generic]) -> TokenBatch:
        """Returns examples; see :class:`TokenBatch`.

        Raises:
            OutOfRangeError: an index is out of range.
        """
        packs = np.ascontiguousarray(self.pack_ranges[self.cache.numbers(indices, len(self), "example")])
        tokens = _field_or_empty(self.cache, self._input_ids_key)
        if tokens is None:
            empty = np.empty((0, self.max_length), np.int32)
            return TokenBatch(empty, empty.astype(np.float32), empty, self.max_segments)
        weights = None if self._loss_key is None else self.cache.field(self._loss_key)
        arrays = tokens.packed(
            packs,
            self.max_length,
            loss=self._loss if weights is not None else "all",
            field=weights,
            segments=self.block_cross_document_attention,
            right=self.slice_strategy == "right",
            mask_padding=self.loss_mask_padding,
        )
        return TokenBatch(*arrays, max_segments=self.max_segments)

    def __getitem__(self, index: int) -> TokenBatch:
        return self.get_batch([index])


def _check_lengths(cache: TokenCache, keys: Sequence[str], *, totals_only: bool = False) -> list[_native.TokenField]:
    """Fields whose values belong together, token by token. Raises FormatError if a row has another length in one of them.

    Compares all offsets, or with ``totals_only`` only their ends: windows of a remote cache need no offsets.
    """
    fields = [cache.field(key) for key in keys]
    if len({field.num_elements for field in fields}) > 1 or not (totals_only or _equally_long(fields)):
        raise FormatError(
            f"the rows of {' and '.join(map(repr, keys))} have different lengths, so their values belong to other tokens; "
            "`actshard verify` names the first row",
            path=cache.path,
        )
    return fields


def _equally_long(fields: list[_native.TokenField]) -> bool:
    if len(fields) < 2:
        return True
    first, rows = fields[0], fields[0].num_rows
    return all(
        np.array_equal(first.bounds(start, min(1 << 18, rows - start)), field.bounds(start, min(1 << 18, rows - start)))
        for start in range(0, rows, 1 << 18)
        for field in fields[1:]
    )


class PackedTokenDataset(_Packed):
    """Documents packed into examples of ``max_length`` tokens. Documents are never split across examples.

    Args:
        cache: an open cache. May be sharded, which Levanter (June 2026) does not support.
        max_length: tokens per example.
        pack: limit of documents per example: True: 64; an integer; False or ``"pad"``: one.
        slice_strategy: for documents longer than an example: ``"left"`` keeps the beginning, ``"right"`` the end, ``"raise"``
            raises FormatError, ``"drop"`` leaves the document out.
        loss_weights_key: a field of weights that multiply the loss.
        input_ids_key: the field of tokens; default: the cache's ``token_field``.
        block_cross_document_attention: False leaves segment ids out.
        loss_mask_padding: True (Levanter since July 2026): padding, and the last token before it, have weight 0. False (June
            2026): without stored weights they have weight 1.

    Raises:
        FormatError: ``slice_strategy="raise"`` and a document is too long.
    """

    def __init__(
        self,
        cache: TokenCache,
        max_length: int,
        *,
        pack: bool | int | str | None = True,
        slice_strategy: str = "left",
        loss_weights_key: str | None = None,
        input_ids_key: str | None = None,
        block_cross_document_attention: bool = True,
        loss_mask_padding: bool = True,
    ) -> None:
        super().__init__(
            cache,
            max_length,
            pack=pack,
            slice_strategy=slice_strategy,
            input_ids_key=input_ids_key or cache.token_field,
            loss="weights",
            loss_key=loss_weights_key,
            block_cross_document_attention=block_cross_document_attention,
            loss_mask_padding=loss_mask_padding,
        )


class ChatDataset(_Packed):
    """Conversations packed into examples of ``max_length`` tokens.

    Args:
        cache: an open cache of conversations.
        max_length: tokens per example.
        pack: limit of conversations per example: True: 64; an integer; False or ``"pad"``: one conversation, padded (as Levanter's
            documentation describes; Levanter of June 2026 fails there).
        mask_user_turns: only assistant tokens count, by the mask shifted to the positions that predict them.
        slice_strategy: as for :class:`PackedTokenDataset`.
        input_ids_key: the field of tokens.
        assistant_masks_key: the field of masks.
        block_cross_document_attention: False leaves segment ids out.
        loss_mask_padding: as for :class:`PackedTokenDataset`.
    """

    settings: ClassVar[tuple[str, ...]] = (*_Packed.settings, "mask_user_turns", "_masks_key")

    def __init__(
        self,
        cache: TokenCache,
        max_length: int,
        *,
        pack: bool | int | str | None = True,
        mask_user_turns: bool = True,
        slice_strategy: str = "left",
        input_ids_key: str = TOKENS,
        assistant_masks_key: str = "assistant_masks",
        block_cross_document_attention: bool = True,
        loss_mask_padding: bool = True,
    ) -> None:
        self.mask_user_turns = mask_user_turns
        self._masks_key = assistant_masks_key
        super().__init__(
            cache,
            max_length,
            pack=pack,
            slice_strategy=slice_strategy,
            input_ids_key=input_ids_key,
            loss="mask",
            loss_key=assistant_masks_key if mask_user_turns else None,
            block_cross_document_attention=block_cross_document_attention,
            loss_mask_padding=loss_mask_padding,
        )

    def _also(self, cache: TokenCache) -> tuple[str, ...]:
        return (self._masks_key,) if self._masks_key in cache.fields else ()


class PrebuiltLmDataset(Streamed):
    """Rows as examples, without packing, padding or truncation.

    Args:
        cache: an open cache.
        seq_len: required length of every row; None: the length of the first row of a batch.
        input_ids_key: the field of tokens; default: from the cache's ledger.
        loss_weights_key: the field of weights; default: from the ledger. ``""``: none.
        loss_weight_transform: applied to the stored weights of each row, (P,), before the causal mask, as in Levanter. A row's
            weights do not depend on its batch.
        eos_id: the token that ends a document; None: no segment ids.
        block_cross_document_attention: False leaves segment ids out.
    """

    settings: ClassVar[tuple[str, ...]] = (
        "seq_len",
        "input_ids_key",
        "loss_weights_key",
        "eos_id",
        "block_cross_document_attention",
    )

    def __init__(
        self,
        cache: TokenCache,
        seq_len: int | None = None,
        *,
        input_ids_key: str | None = None,
        loss_weights_key: str | None = None,
        loss_weight_transform: Callable[[NDArray[np.float32]], object] | None = None,
        eos_id: int | None = None,
        block_cross_document_attention: bool = True,
    ) -> None:
        self.cache = cache
        self.seq_len = None if seq_len is None else _arguments.whole(seq_len, "seq_len", 1)
        self.input_ids_key = input_ids_key or cache.token_field
        recorded = cache.ledger.preprocessor.get("loss_weights_key")
        key = (recorded if recorded in cache.fields else None) if loss_weights_key is None else loss_weights_key
        self.loss_weights_key = key or None
        self.loss_weight_transform = loss_weight_transform
        self.eos_id = eos_id
        self.block_cross_document_attention = block_cross_document_attention

    def __len__(self) -> int:
        return len(self.cache)

    def get_batch(self, indices: Sequence[int] | NDArray[np.generic]) -> TokenBatch:
        """Returns examples; see :class:`TokenBatch`.

        Raises:
            FormatError: rows of different lengths, or of a length other than ``seq_len``; weights of another length than tokens.
            OutOfRangeError: an index is out of range.
        """
        rows = self.cache.numbers(indices, len(self), "row")
        field = _field_or_empty(self.cache, self.input_ids_key)
        if field is None or not len(rows):
            width = self.seq_len or 0
            return TokenBatch(np.empty((0, width), np.int32), np.empty((0, width), np.float32))
        starts, length = self._extents(field, rows, self.seq_len, self.input_ids_key)
        has_segments = self.block_cross_document_attention and self.eos_id is not None
        tokens, weights, segments = field.windows(
            starts,
            1,
            field.num_elements + 1,
            length,
            loss="all",
            field=None,
            weights=True,
            segments=has_segments,
            eos=self.eos_id,
        )
        if self.loss_weights_key is not None:
            weight_field = self.cache.field(self.loss_weights_key)
            self._extents(weight_field, rows, length, self.loss_weights_key)
            stored = weight_field.rows(rows)[0].reshape(len(rows), length)
            row_weights = stored if self.loss_weight_transform is None else self._transformed(stored)
            # Selected, not multiplied: where the mask is 0, a negative weight becomes 0.0, as with XLA, not -0.0.
            weights = np.where(weights != 0, row_weights.astype(np.float32, copy=False), np.float32(0))
        return TokenBatch(tokens, weights, segments)

    def _transformed(self, weights: NDArray[np.generic]) -> NDArray[np.float32]:
        assert self.loss_weight_transform is not None
        row_weights = np.empty(weights.shape, np.float32)
        for i, row in enumerate(weights):
            transformed_row = np.asarray(self.loss_weight_transform(row))
            if transformed_row.shape != row.shape:
                raise ArgumentError(f"loss_weight_transform: expected shape {row.shape}, found {transformed_row.shape}")
            row_weights[i] = transformed_row
        return row_weights

    def _extents(
        self, field: _native.TokenField, rows: NDArray[np.int64], length: int | None, name: str
    ) -> tuple[NDArray[np.int64], int]:
        bounds = field.extents(rows).view(np.int64).reshape(-1, 2)
        starts = np.ascontiguousarray(bounds[:, 0])
        lengths = bounds[:, 1] - bounds[:, 0]
        width = int(lengths[0]) if length is None else length
        wrong = np.flatnonzero(lengths != width)
        if len(wrong):
            raise FormatError(
                f"row {int(rows[wrong[0]])} has {int(lengths[wrong[0]])} elements of '{name}', expected {width}: prebuilt rows "
                "are examples, which must have equal lengths in a batch",
                path=self.cache.path,
            )
        return starts, width

    def __getitem__(self, index: int) -> TokenBatch:
        return self.get_batch([index])
