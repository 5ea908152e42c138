"""Properties of layers from a fixed sample of rows: spectrum, similarity, and how well they separate labels.

The statistics of ``stats`` are sums, which one pass over all rows makes. Those here need all pairs of columns or of rows: they are
made from a sample that depends only on the number of rows and on a seed.

``spectrum``: the sample and its covariance. ``similarity``, ``separability``: one result each. Only numpy is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from actshard.base import _arguments
from actshard.base.layers import Layer
from actshard.looking.stats import Stats
from actshard.streaming.readable import Readable, SelectedRows
from actshard.streaming.selection import Limit, Mask, Selection, Tokens, memory_for_flags

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from actshard.looking.sampled.separability import Separability
    from actshard.looking.sampled.similarity import Similarity
    from actshard.looking.sampled.spectrum import RowsRead, Spectrum


# Methods of :class:`~actshard.Store` that look at samples of rows.


class SampledVerbs:
    """The part of a store that looks at samples of its rows."""

    def stats(
        self: Readable,
        layer: Layer,
        *,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        max_norm: Limit = None,
        min_token: int = 0,
        rows: int | None = None,
        seed: int = 0,
        save: bool | str | os.PathLike[str] = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> Stats:
        """Computes statistics of columns and of row norms in one parallel pass; see :class:`actshard.Stats`.

        Sums are float64 over blocks of a fixed size, so results are bitwise equal for any number of threads.

        ``save`` writes them as JSON and safetensors. They are reused while the dataset's files have the same names, sizes and
        modification times. Of more than 4,096 files, evenly spaced ones are checked. ``stream(center="mean")`` reuses them too.

        Args:
            layer: a name from :attr:`layers`.
            tokens: as in :meth:`stream`.
            ignore_labels: as in :meth:`stream`.
            keep: as in :meth:`stream`.
            max_norm: as in :meth:`stream`.
            min_token: as in :meth:`stream`.
            rows: number of rows to sample, one at a random place of each of ``rows`` equal ranges, as in :meth:`spectrum`; all, if
                there are fewer. None: all rows. Takes up to 9 bytes of memory for each row of the layer.
            seed: another seed gives another sample.
            save: True writes to the folder ``NAME.stats`` next to the dataset, or to the user's cache folder for a URL and if
                that folder is not writable. Or a folder. Statistics of other rows have other files.
            progress: called with (rows done, total rows) from time to time.

        Raises:
            As :meth:`stream`; DtypeError if rows are not floats; FileAccessError if no folder of ``save`` can be written.
        """
        from actshard.looking.sampled.spectrum import count_of, spread
        from actshard.looking.saved import kept_or_made

        _arguments.check_progress(progress)
        selection, seed = Selection(tokens, ignore_labels, keep, max_norm, min_token), _arguments.whole(seed, "seed")
        name = self.layers[self.group_of(layer)]
        chosen: Selection | SelectedRows = selection  # resolved only if no file has its statistics
        if rows is not None:
            with memory_for_flags(self):
                every = selection.resolve(self, [name])
                chosen = every.take(spread(every.count, count_of(rows, "rows"), seed))
        elif selection.arguments is None:
            chosen = selection.resolve(self, [name])

        def compute() -> Stats:
            resolved = chosen.resolve(self, [name]) if isinstance(chosen, Selection) else chosen
            return self.stats_of(name, resolved, progress)

        return compute() if save is False else kept_or_made(self, name, chosen, save, compute)

    def stats_of(
        self: Readable, layer: Layer, rows: SelectedRows, progress: Callable[[int, int], object] | None = None
    ) -> Stats:
        """Computes statistics of a layer's rows. Internal."""
        group, total, native = self.group_of(layer), rows.count, rows.native
        report = None if progress is None else lambda count: progress(count, total)
        return Stats.of(self.rows.stats(group, native, report), self.layers[group])

    def spectrum(
        self: Readable,
        layer: Layer,
        *,
        rows: int = 16_384,
        directions: int = 8,
        seed: int = 0,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        max_norm: Limit = None,
        min_token: int = 0,
        progress: RowsRead | None = None,
    ) -> Spectrum:
        """Computes the eigenvalues of a layer's covariance, its effective rank, and its principal directions.

        From ``rows`` rows, one at a random place of each of ``rows`` equal ranges of the dataset: the choice depends only on the
        number of rows in the dataset and on the seed. Memory: 4 bytes for each value of the sample (8 for float64;
        8 more if there are fewer rows than columns), and about 40 times the square of the smaller one of ``rows`` and ``d_model``.
        Time grows with its cube.

        Args:
            layer: a name from :attr:`Store.layers`.
            rows: rows of the sample; all, if the dataset has fewer. An effective rank cannot exceed it.
            directions: principal directions to return, at most.
            seed: another seed gives another sample.
            tokens: as in :meth:`stream`.
            ignore_labels: as in :meth:`stream`.
            keep: as in :meth:`stream`.
            max_norm: as in :meth:`stream`.
            min_token: as in :meth:`stream`.
            progress: called with (rows done, total rows) from time to time.

        Raises:
            As :meth:`stream`; ArgumentError if ``rows`` or ``directions`` is out of range.
        """
        from actshard.looking.sampled.spectrum import spectrum_of

        selection = Selection(tokens, ignore_labels, keep, max_norm, min_token)
        return spectrum_of(self, layer, rows, directions, seed, selection, progress)

    def similarity(
        self: Readable,
        layers: Layer | Sequence[Layer] | None = None,
        *,
        other: Readable | None = None,
        other_layers: Layer | Sequence[Layer] | None = None,
        rows: int = 4_096,
        seed: int = 0,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        max_norm: Limit = None,
        min_token: int = 0,
        progress: RowsRead | None = None,
    ) -> Similarity:
        """Compares layers with each other on the same sample of rows: by linear CKA, and by cosines.

        Memory: 512 rows of each layer, and 2 MiB a layer. Time grows with ``rows`` and the number of layers.

        Args:
            layers: names from :attr:`Store.layers`; None: all.
            other: another store with the same examples and tokens, such as another model's: its layers are compared with those of
                this store. ``d_model`` may differ: then there are no cosines.
            other_layers: names of its layers; None: all.
            rows: as in :meth:`spectrum`.
            seed: as in :meth:`spectrum`.
            tokens: as in :meth:`stream`.
            ignore_labels: as in :meth:`stream`.
            keep: as in :meth:`stream`.
            max_norm: as in :meth:`stream`.
            min_token: as in :meth:`stream`.
            progress: as in :meth:`spectrum`; counts the rows of all layers.

        Raises:
            As :meth:`stream`; NotStoredError if two layers have different numbers of tokens of an example.
        """
        from actshard.looking.sampled.similarity import similarity_of

        selection = Selection(tokens, ignore_labels, keep, max_norm, min_token)
        return similarity_of(self, layers, other, other_layers, rows, seed, selection, progress)

    def separability(
        self: Readable,
        label: str | ArrayLike,
        layers: Layer | Sequence[Layer] | None = None,
        *,
        pool: Literal["last", "mean"] = "last",
        examples: int = 2_048,
        test: float = 0.25,
        seed: int = 0,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        max_norm: Limit = None,
        min_token: int = 0,
        progress: RowsRead | None = None,
    ) -> Separability:
        """Measures how well a linear probe separates the classes of a label in each layer, on examples that it has not seen.

        A ridge classifier, whose penalty generalized cross-validation on the training examples chooses: deterministic, and without
        settings. A quick look that compares layers, not the best probe.

        Args:
            label: the name of a column with one value per example, or one value per example. Null and NaN are left out.
                Or an array ``(num_examples, content tokens)`` with a label for each token, such as saev's
                :attr:`Store.labels`: then the sample has tokens, and no example has tokens on both sides of the split.
            layers: names from :attr:`Store.layers`; None: all.
            pool: what stands for an example: the last of its selected rows, by default that of its last content token; or their
                mean, which reads all of them. Not for labels of tokens.
            examples: examples of the sample, or tokens for labels of tokens; all, if the dataset has fewer.
            test: share of each class that is held out, between 0 and 1; for labels of tokens, share of the examples.
            seed: another seed gives another sample and another split.
            tokens: as in :meth:`stream`. Special tokens have no labels of tokens.
            ignore_labels: as in :meth:`stream`.
            keep: as in :meth:`stream`.
            max_norm: as in :meth:`stream`.
            min_token: as in :meth:`stream`.
            progress: called with (examples done, total examples) of all layers.

        Raises:
            As :meth:`stream`; NotStoredError if the dataset has no such column; ArgumentError if the values are no classes.
        """
        from actshard.looking.sampled.separability import separability_of

        selection = Selection(tokens, ignore_labels, keep, max_norm, min_token)
        return separability_of(self, label, layers, pool, examples, test, seed, selection, progress)
