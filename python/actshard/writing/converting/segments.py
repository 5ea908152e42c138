"""A conversion in segments: tasks of a plan write ranges of examples, or groups of layers, separately; a commit combines them.

A segment is written as by a writer that resumes at its first example. The target's state follows from the lengths of the examples
before, and the segment has a separate folder (:class:`~actshard.formats.target.Apart`). Combined, the segments are the files of
a single writer before it finishes the dataset. The commit then finishes the dataset as that writer does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actshard.formats.target import Block, Target
from actshard.writing.converting.blocks import cuts, groups, lengths_of
from actshard.writing.converting.planning import ConversionRequest


@dataclass(frozen=True)
class Layout:
    """How the examples of a conversion are divided into blocks.

    Attributes:
        lengths: tokens of the result ``(n, layers)``, or ``(n, 1)`` if all layers have the same; -1 for a lacking layer.
        firsts: the first example of each block.
        origins: for each block, the first example of its group. A reader must begin there to get the same blocks.
    """

    lengths: NDArray[np.int64]
    firsts: NDArray[np.int64]
    origins: NDArray[np.int64]

    @classmethod
    def of(cls, request: ConversionRequest, target: Target) -> Layout:
        """Reads the lengths of all examples."""
        lengths, firsts, origins = [], [], []
        same = True
        for position, _, counts, _ in groups(request, target, 0):
            group_lengths = lengths_of(target, counts)
            same = same and bool((group_lengths == group_lengths[:, :1]).all())
            lengths.append(np.ascontiguousarray(group_lengths[:, :1]) if same else group_lengths)
            for first, _ in cuts(target, counts):
                firsts.append(position + first)
                origins.append(position)
        wide = len(request.layers)
        parts = lengths if same else [np.broadcast_to(part, (len(part), wide)) for part in lengths]
        return cls(np.concatenate(parts), np.array(firsts, np.int64), np.array(origins, np.int64))

    def settle(self, request: ConversionRequest, target: Target) -> None:
        """Determines the target's remaining settings from the lengths of the first block, as a writer does."""
        if request.store.contents.counts_are_cheap:
            target.all_lengths = lambda: self.by_layer(len(request.layers))
        end = int(self.firsts[1]) if len(self.firsts) > 1 else request.count
        memory = np.empty((0, request.store.d_model), target.dtype)
        target.settle(Block(memory, self.by_layer(len(request.layers))[:end]))

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each example, of its longest layer."""
        tokens: NDArray[np.int64] = np.maximum(self.lengths, 0).max(axis=1)
        return tokens

    def rows(self, layers: int) -> NDArray[np.int64]:
        """Rows of each example, of all layers."""
        lengths = np.maximum(self.lengths, 0)
        row_counts: NDArray[np.int64] = lengths[:, 0] * layers if lengths.shape[1] == 1 else lengths.sum(axis=1)
        return row_counts

    def by_layer(self, layers: int) -> NDArray[np.int64]:
        """The lengths ``(n, layers)``, a view."""
        return np.broadcast_to(self.lengths, (len(self.lengths), layers))


def balanced(weights: NDArray[np.int64], borders: NDArray[np.int64], tasks: int) -> list[int]:
    """Returns the first numbers of at most ``tasks`` ranges of nearly equal weight. Ranges begin at ``borders``, sorted from 0."""
    ends = np.concatenate([[0], np.cumsum(weights)])
    border_weights = ends[borders]
    ideal_weights = ends[-1] * np.arange(1, tasks) / tasks
    right = np.clip(np.searchsorted(border_weights, ideal_weights), 1, max(len(border_weights) - 1, 1))
    if len(border_weights) == 1:
        return [0]
    nearer = np.where(
        ideal_weights - border_weights[right - 1] <= border_weights[right] - ideal_weights, right - 1, right
    )
    return [int(x) for x in borders[np.unique(np.concatenate([[0], nearer]))]]
