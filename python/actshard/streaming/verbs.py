"""Methods of :class:`~actshard.Store` that make streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from numpy.typing import DTypeLike

from actshard.base.layers import Layer
from actshard.streaming import Stream
from actshard.streaming.normalizer import Normalizer
from actshard.streaming.readable import Readable
from actshard.streaming.rescaling import Center, Divide, Normalize, Rescaling, RowOrder, Scale, Shuffle, normalizer
from actshard.streaming.selection import Limit, Mask, Selection, Tokens
from actshard.streaming.sequences import SequenceStream, TooLong

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class StreamVerbs:
    """The part of a store that streams rows and whole sequences."""

    def stream(
        self: Readable,
        layer: Layer | Sequence[Layer] | Literal["all"],
        batch_size: int,
        *,
        shuffle: Shuffle = None,
        seed: int = 0,
        epoch: int = 0,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        max_norm: Limit = None,
        min_token: int = 0,
        interleave: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dtype: DTypeLike | None = None,
        center: Center = None,
        scale: Scale = None,
        divide: Divide = None,
        normalize: Normalize = None,
        memory: int | str = "1GiB",
        reuse: bool = False,
        buffers: list[NDArray[np.generic]] | None = None,
    ) -> Stream:
        """Returns a stream of batches for a training loop.

        Background threads read, shuffle and copy, at most one batch ahead of the loop. Batches depend only on the settings, not on
        the number of threads, workers or machines.

        Args:
            layer: a name from :attr:`Store.layers`, a list of names, or ``"all"``. Several layers share one order.
            batch_size: rows per batch (an aligned row has all its layers). The last batch of an epoch may be shorter.
            shuffle: ``None``: stored order, example after example. ``"window"`` (recommended): reads pieces of examples, of at
                least 64 KiB, in random order into a window of ``memory`` bytes, and returns the window's rows in random order
                while the next window is filled. ``"exact"``: a pseudo-random permutation of all rows; needs no memory, but fast
                random reads.
            seed: seed of all random orders, together with the epoch.
            epoch: number of the first epoch. Each epoch has another order; the number increments after each.
            tokens: ``"content"`` (all except special tokens), ``"all"``, ``"last"`` or ``"special"`` (saev's CLS).
            ignore_labels: patch labels (0 to 255) whose rows are left out (saev).
            keep: rows to read: a bool per example, a bool array per example (one flag per stored token, or per content token), a
                2-D bool array, the name of a list column (``"loss_mask"``: tokens whose entry is not 0), or a function of
                :attr:`Store.table` that returns flags, such as :func:`actshard.up_to_last`.
            max_norm: leaves out rows with a larger L2 norm (as stored, before ``center`` and ``scale``) in any of the layers, and
                rows with NaN or infinite values (only these if it is infinity). A number, or ``"10x median"``: 10 times the
                layer's median norm. The median is
                over all content rows with finite norms, regardless of the selection (the mean of the middle two for an even
                number). Reads each layer once per store, when the stream is created, and keeps 8 bytes per row in memory.
                ``stream.left_out`` gives the number of rows left out.
            min_token: leaves out tokens before this position in their example (``batch.tokens``): 1 leaves out first tokens, which
                are often attention sinks.
            interleave: for several layers: False returns ``(b, n_layers, d_model)``, each row with all its layers; True returns
                ``(b, d_model)``, each row of one layer, named in ``batch.layers``.
            drop_last: drop an incomplete last batch.
            rank: index of this process's share, 0 to ``world_size - 1``.
            world_size: number of shares. Shares are disjoint, together contain all rows, and have equally many batches. If
                ``batch_size * world_size`` is the same, the first k batches of all ranks together contain the same rows for any
                ``world_size``, except with ``shuffle="window"``.
            dtype: dtype of the batches, as in :meth:`Store.gather`.
            center: ``(d_model,)`` or ``(n_layers, d_model)``: subtracted from each row. ``"mean"``: each layer's mean over the
                stream's rows, as computed by :meth:`Store.stats`; or, if they are of the same rows,
                saved earlier by ``store.stats(layer, save=True)``. The names of statistics below work in the same way.
            scale: a number, ``(d_model,)`` or ``(n_layers, d_model)``: each row is then multiplied by it. ``"unit-norm"`` and
                ``"sqrt-d"`` scale each row to an L2 norm of 1 or sqrt(d_model); rows of zeros, and rows with NaN or infinite
                values, are unchanged. ``"mean-sqrt-d"``: one factor per layer, so that the mean squared norm of its rows minus
                ``center`` is d_model.
            divide: like ``scale``, but each row is divided by it; ``"std"``: by each column's standard deviation, or by 1 if that
                is 0. All of this is computed in float32, or in float64 if the stored rows or the batches are float64, or if a
                number exceeds float32's range.
            normalize: ``store.normalizer(layer)``, which direct reads accept too. Or ``store.stats(layer)``, or ``"stats"`` for
                those of the stream's rows: subtracts the mean and divides by the standard deviation, so that columns have mean 0
                and variance 1. Columns without variance are only centred. A list has one of them per layer.
            memory: size of a window in bytes, or as ``"512MiB"``. The order of ``shuffle="window"`` depends on it.
            reuse: write batches into three arrays in turn: a batch is valid until the next one is requested.
            buffers: like ``reuse``, with your own buffers: at least two arrays or (pinned) tensors of a full batch's shape.

        Returns:
            A :class:`~actshard.Stream`. Its batches are copies, unless ``reuse`` or ``buffers`` is given.

        Raises:
            LayerError, ArgumentError, DtypeError: the layer does not exist; an argument is invalid.
            NotStoredError: the dataset has no labels or special tokens, or the layers have different tokens.
            Errors of :meth:`Store.gather`: while iterating, with file and offset.
        """
        return Stream(
            self,
            layer,
            batch_size,
            Selection(tokens, ignore_labels, keep, max_norm, min_token),
            Rescaling(center, scale, divide, normalize),
            RowOrder(shuffle, seed, epoch, drop_last, rank, world_size),
            interleave=interleave,
            dtype=dtype,
            memory=memory,
            reuse=reuse,
            buffers=buffers,
        )

    def sequences_stream(
        self: Readable,
        layer: Layer | Sequence[Layer] | Literal["all"],
        batch_tokens: int,
        *,
        pack: bool = True,
        fixed_shape: bool = False,
        too_long: TooLong = "error",
        columns: Sequence[str] = (),
        shuffle: Shuffle = None,
        seed: int = 0,
        epoch: int = 0,
        tokens: Literal["content", "all"] = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        max_norm: Limit = None,
        min_token: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dtype: DTypeLike | None = None,
        center: Center = None,
        scale: Scale = None,
        divide: Divide = None,
        normalize: Normalize = None,
        memory: int | str = "1GiB",
    ) -> SequenceStream:
        """Returns a stream of batches of whole sequences: for probes, draft models and transformers on activations.

        An example is only split or cut if ``too_long`` requests it. Every epoch and every rank has ``len(stream)`` batches. The
        lengths in each batch are fixed when the stream is created. The examples with these lengths, and the order of batches,
        change in each epoch.

        Args:
            layer: a name from :attr:`Store.layers`, a list of names, or ``"all"``.
            batch_tokens: maximum tokens of a batch; includes padding, if sequences are padded.
            pack: True: sequences are concatenated, ``(n, d_model)``; ``batch.offsets`` or ``batch.segment_ids`` keep attention
                within sequences. False: sequences of similar length are padded to the longest,
                ``(b, T, d_model)``.
            fixed_shape: pad packed batches to ``batch_tokens`` rows, for compilers that need fixed shapes.
            too_long: examples of more than ``batch_tokens`` tokens: ``"error"``; ``"truncate"`` keeps their first tokens;
                ``"split"`` makes sequences of at most ``batch_tokens`` tokens; ``"drop"`` leaves them out.
                ``stream.left_out`` gives the numbers of lost examples and tokens.
            columns: columns of :attr:`Store.table` for ``batch.columns``: numbers, one per example or a list with one per token
                (stored or content), such as ``input_ids`` or ``loss_mask``. Kept in memory.
            shuffle: ``None``: nearly stored order; nearby sequences are packed together. ``"exact"``: a random permutation; each
                sequence is one read. ``"window"``: for data that is decoded in units (a shard, a chunk): random units form
                windows of ``memory`` bytes, which are read at once. Windows consist of the same sequences in all epochs.
            seed: seed of all random orders, together with the epoch.
            epoch: number of the first epoch.
            tokens: ``"content"`` (all except special tokens) or ``"all"``.
            ignore_labels: as in :meth:`Store.stream`. Tokens that this or one of the next three leaves out leave no gap.
            keep: as in :meth:`Store.stream`.
            max_norm: as in :meth:`Store.stream`.
            min_token: as in :meth:`Store.stream`.
            drop_last: drop the batches (fewer than ``world_size``) that cannot be divided equally among ranks. Otherwise some
                batches are halved, so that all ranks have equally many.
            rank: index of this process's share, 0 to ``world_size - 1``.
            world_size: number of shares, which are disjoint.
            dtype: dtype of the batches, as in :meth:`Store.gather`.
            center: as in :meth:`Store.stream`. Named statistics include tokens that ``too_long`` leaves out.
            scale: as in :meth:`Store.stream`.
            divide: as in :meth:`Store.stream`.
            normalize: as in :meth:`Store.stream`.
            memory: size of a window, and of the rows decoded at once. Batches depend on it, except with ``shuffle="exact"`` and in
                stored order of data that is not decoded.

        Returns:
            A :class:`~actshard.SequenceStream`. Its batches are new arrays; two are read ahead.

        Raises:
            ArgumentError: an argument is invalid; an example is too long, and ``too_long`` is ``"error"``.
            As :meth:`Store.stream`.
        """
        return SequenceStream(
            self,
            layer,
            batch_tokens,
            Selection(tokens, ignore_labels, keep, max_norm, min_token),
            Rescaling(center, scale, divide, normalize),
            RowOrder(shuffle, seed, epoch, drop_last, rank, world_size),
            pack=pack,
            fixed_shape=fixed_shape,
            too_long=too_long,
            columns=columns,
            dtype=dtype,
            memory=memory,
        )

    def normalizer(
        self: Readable,
        layer: Layer,
        *,
        center: Center = None,
        scale: Scale = None,
        divide: Divide = None,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        max_norm: Limit = None,
        min_token: int = 0,
    ) -> Normalizer:
        """Returns one rescaling for streams, direct reads and rows in memory.

        ``norm = store.normalizer(5)`` subtracts the mean and divides by the standard deviation, as ``normalize="stats"`` does.
        ``store.stream(5, 4096, normalize=norm)``, ``test.last_tokens(5, normalize=norm)`` and ``norm(rows)`` apply it.

        Args:
            layer: a name from :attr:`Store.layers`.
            center: as in :meth:`stream`. Named statistics here and below are of the rows that the other arguments select.
            scale: as in :meth:`stream`.
            divide: as in :meth:`stream`.
            tokens: as in :meth:`stream`.
            ignore_labels: as in :meth:`stream`.
            keep: as in :meth:`stream`.
            max_norm: as in :meth:`stream`.
            min_token: as in :meth:`stream`.

        Raises:
            ArgumentError: an argument is invalid; a number is not finite.
            As :meth:`Store.stats`.
        """
        selection = Selection(tokens, ignore_labels, keep, max_norm, min_token)
        return normalizer(self, layer, selection, Rescaling(center, scale, divide))
