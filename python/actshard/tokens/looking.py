"""``look`` and ``summarize``: lengths, token counts, packing and repeated documents of a token cache.

Documents are read in blocks. If a cache has more than ``limit`` tokens, only some runs of whole documents are read; lengths and
packing always cover all documents. Equal documents are found by a 64-bit sum of hashes of (token, position).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base.errors import ArgumentError, FormatError, MissingFileError, NotStoredError, warn
from actshard.base.location import Location
from actshard.tokens.cache import TokenCache
from actshard.tokens.examples import PackedTokenDataset
from actshard.tokens.processing import MASKS, WEIGHTS
from actshard.tokens.recipe import tokenizer_differs
from actshard.tokens.tokenizer import PASSTHROUGH, Tokenizer, load_tokenizer

LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Common lengths of training examples."""
SUMMARY_LENGTHS = (1024, 2048, 4096, 8192)
"""The lengths for which :func:`summarize` computes padding by default."""
_BLOCK = 1 << 20
"""Tokens per read."""
_RUNS = 64
"""Number of runs of documents that are read from a large cache."""
_IDS = 1 << 24
"""Ids from this one on are counted together, because vocabularies are smaller."""
_FEW = 10


@dataclass(frozen=True)
class Fill:
    """Documents packed into examples of one length, as :class:`PackedTokenDataset` does by default.

    Attributes:
        length: tokens per example.
        examples: number of examples.
        fill: fraction of positions that contain tokens, not padding; NaN without examples.
        cut: number of tokens that are lost because their documents are longer than an example.
        alone: as ``fill``, if each document is an example of its own.
    """

    length: int
    examples: int
    fill: float
    cut: int
    alone: float

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; padding is a fraction of all positions."""
        return {
            "length": self.length,
            "alone": 1 - self.alone,
            "packed": 1 - self.fill,
            "packed_examples": self.examples,
            "cut": self.cut,
        }


class DocumentLengths(NamedTuple):
    """Tokens of the documents of a cache: shortest, median, 95th percentile (lengths that occur), longest; 0 without documents."""

    min: int
    median: int
    p95: int
    max: int


@dataclass(frozen=True)
class CacheSummary:
    """The result of :func:`summarize`.

    Attributes:
        documents, tokens: number of documents and of tokens.
        lengths: tokens of documents.
        tokenizer: the tokenizer's name or path in the ledger; None if there is none.
        vocab_size: its number of tokens, from the ledger; None if unknown.
        fills: what is padding and what is cut, for each requested length of examples.
    """

    documents: int
    tokens: int
    lengths: DocumentLengths
    tokenizer: str | None
    vocab_size: int | None
    fills: tuple[Fill, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "lengths": self.lengths._asdict(),
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "padding": [fill.as_dict() for fill in self.fills],
        }


@dataclass(frozen=True, eq=False)
class CacheLook:
    """The result of :func:`look`.

    Attributes:
        documents, tokens: number of documents and of tokens.
        lengths: ``(documents,)`` int64, tokens of each document.
        read_documents, read_tokens: number of documents and tokens that were read for the following attributes.
        counts: int64, occurrences of each token id, from 0 on.
        outside: occurrences of negative ids and of ids of at least 2**24.
        first, last: the most common first and last tokens of documents, as (id, number of documents), most common first.
        repeated: number of non-empty documents that are equal to an earlier one.
        repeats: the most common of them, as (number of the first such document, occurrences), most common first.
        fills: packing, for each requested length.
    """

    documents: int
    tokens: int
    lengths: NDArray[np.int64]
    read_documents: int
    read_tokens: int
    counts: NDArray[np.int64]
    outside: int
    first: tuple[tuple[int, int], ...]
    last: tuple[tuple[int, int], ...]
    repeated: int
    repeats: tuple[tuple[int, int], ...]
    fills: tuple[Fill, ...]

    @property
    def is_sample(self) -> bool:
        """Whether some documents were not read."""
        return self.read_documents < self.documents

    @property
    def distinct(self) -> int:
        """Number of distinct token ids below 2**24."""
        return int(np.count_nonzero(self.counts))

    def commonest(self, n: int) -> list[tuple[int, int]]:
        """The n most common token ids and their counts, most common first; for equal counts, smaller ids first."""
        order = np.argsort(-self.counts, kind="stable")[:n]
        return [(int(i), int(self.counts[i])) for i in order if self.counts[i]]


def look(
    cache: TokenCache,
    *,
    lengths: Sequence[int] = LENGTHS,
    limit: int = 200_000_000,
    progress: Callable[[int, int], object] | None = None,
) -> CacheLook:
    """Reads a cache's documents and counts their tokens.

    Takes 16 bytes of memory per document.

    Args:
        cache: an open cache.
        lengths: lengths of examples for which packing is computed.
        limit: maximum number of tokens to read.
        progress: called with (tokens done, total tokens) from time to time.

    Raises:
        FormatError: the cache's files are damaged.
    """
    _arguments.check_progress(progress)
    limit = _arguments.whole(limit, "limit", 1)
    sizes = [_arguments.whole(length, "lengths", 1) for length in lengths]
    offsets = _offsets(cache)
    view = cache.view(cache.token_field) if len(offsets) > 1 else None
    runs = _runs(offsets, limit)
    total = sum(int(offsets[end] - offsets[first]) for first, end in runs)
    tally = _Tally(offsets)
    for first, end in runs:
        for start in range(int(offsets[first]), int(offsets[end]), _BLOCK):
            assert view is not None
            stop = min(start + _BLOCK, int(offsets[end]))
            tally.add(view.elements(start, stop).astype(np.int64).reshape(-1), start)
            if progress is not None:
                progress(tally.tokens, total)
    numbers = np.concatenate([np.arange(first, end) for first, end in runs]) if runs else np.zeros(0, np.int64)
    repeated, repeats = _repeats(tally.sums, offsets, numbers)
    return CacheLook(
        documents=len(offsets) - 1,
        tokens=int(offsets[-1] - offsets[0]),
        lengths=np.diff(offsets),
        read_documents=len(numbers),
        read_tokens=tally.tokens,
        counts=tally.counts,
        outside=tally.outside,
        first=_commonest(tally.first),
        last=_commonest(tally.last),
        repeated=repeated,
        repeats=repeats,
        fills=tuple(_fill(cache, length, offsets) for length in sizes),
    )


def summarize(cache: TokenCache, lengths: Sequence[int] = SUMMARY_LENGTHS) -> CacheSummary:
    """Counts a cache's documents, and the padding of examples of some lengths. Reads the ledger and offsets, but no tokens.

    Args:
        cache: an open cache.
        lengths: lengths of examples, in tokens.

    Raises:
        FormatError: the cache's offsets are damaged.
    """
    sizes = [_arguments.whole(length, "lengths", 1) for length in lengths]
    offsets = _offsets(cache)
    documents = np.diff(offsets)
    quantiles = np.quantile(documents, (0, 0.5, 0.95, 1), method="inverted_cdf") if len(documents) else np.zeros(4)
    name, vocabulary = (cache.ledger.preprocessor.get(key) for key in ("tokenizer", "vocab_size"))
    return CacheSummary(
        documents=len(documents),
        tokens=int(offsets[-1] - offsets[0]),
        lengths=DocumentLengths(*map(int, quantiles)),
        tokenizer=name if isinstance(name, str) and name else None,
        vocab_size=vocabulary if isinstance(vocabulary, int) else None,
        fills=tuple(_fill(cache, length, offsets) for length in sizes),
    )


def _offsets(cache: TokenCache) -> NDArray[np.int64]:
    """``(documents + 1,)`` int64, the first token of each document."""
    return cache.view(cache.token_field).offsets if len(cache) and cache.fields else np.zeros(1, np.int64)


def _runs(offsets: NDArray[np.int64], limit: int) -> list[tuple[int, int]]:
    """Runs of documents with about ``limit`` tokens in total: (first, end)."""
    documents, total = len(offsets) - 1, int(offsets[-1] - offsets[0])
    if total <= limit:
        return [(0, documents)] if documents else []
    starts = offsets[0] + np.arange(_RUNS) * total // _RUNS
    first = np.searchsorted(offsets, starts)
    end = np.maximum(np.searchsorted(offsets, starts + limit // _RUNS, side="right") - 1, first)
    # Each run has at least one document of any length; runs do not overlap.
    end = np.minimum(np.maximum(end, first + 1), np.append(first[1:], documents))
    return [(int(a), int(b)) for a, b in zip(first, end, strict=True) if a < b]


class _Tally:
    """Counts of the blocks that were read."""

    def __init__(self, offsets: NDArray[np.int64]) -> None:
        self._offsets = offsets
        self.tokens = self.outside = 0
        self.counts = np.zeros(0, np.int64)
        self.sums = np.zeros(len(offsets) - 1, np.uint64)
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def add(self, ids: NDArray[np.int64], start: int) -> None:
        """Adds a block of ids that begins at element ``start``."""
        self.tokens += len(ids)
        valid_ids = ids[(ids >= 0) & (ids < _IDS)]
        self.outside += len(ids) - len(valid_ids)
        counts = np.bincount(valid_ids, minlength=len(self.counts))
        counts[: len(self.counts)] += self.counts
        self.counts = counts
        offsets = self._offsets
        a = int(np.searchsorted(offsets, start, side="right")) - 1
        b = int(np.searchsorted(offsets, start + len(ids), side="left"))
        documents = np.arange(a, b)[np.diff(offsets[a : b + 1]) > 0]
        begins, ends = offsets[documents], offsets[documents + 1]
        cuts = np.maximum(begins - start, 0)
        where = np.arange(start, start + len(ids)) - np.repeat(begins, np.diff(np.append(cuts, len(ids))))
        self.sums[documents] += np.add.reduceat(_hashes(ids, where), cuts)
        _count(self.first, ids[(begins - start)[begins >= start]])
        _count(self.last, ids[(ends - 1 - start)[ends <= start + len(ids)]])


def _hashes(ids: NDArray[np.int64], where: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A 64-bit hash of each (token, position), by applying splitmix64 twice."""
    with np.errstate(over="ignore"):
        hashes = _splitmix(ids.view(np.uint64) + _splitmix(where.view(np.uint64)))
    return hashes


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return hashes


def _count(counts: dict[int, int], ids: NDArray[np.int64]) -> None:
    for value, times in zip(*map(np.ndarray.tolist, np.unique(ids, return_counts=True)), strict=True):
        counts[value] = counts.get(value, 0) + times


def _commonest(counts: dict[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_FEW])


def _repeats(
    sums: NDArray[np.uint64], offsets: NDArray[np.int64], numbers: NDArray[np.int64]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Returns the number of documents that repeat an earlier one, and the most common of them."""
    lengths = np.diff(offsets)[numbers]
    numbers = numbers[lengths > 0]
    # The length is part of the key, because documents of different lengths differ.
    with np.errstate(over="ignore"):
        keys = sums[numbers] ^ _splitmix(np.diff(offsets)[numbers].view(np.uint64))
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    repeats = np.flatnonzero(counts > 1)
    order = repeats[np.lexsort((numbers[first[repeats]], -counts[repeats]))][:_FEW]
    return int((counts - 1).sum()), tuple((int(numbers[first[i]]), int(counts[i])) for i in order)


def _fill(cache: TokenCache, length: int, offsets: NDArray[np.int64]) -> Fill:
    examples = len(PackedTokenDataset(cache, length)) if len(offsets) > 1 else 0
    lengths = np.diff(offsets)
    packed_tokens = int(np.minimum(lengths, length).sum())
    fill, alone = (packed_tokens / (count * length) if count else math.nan for count in (examples, len(lengths)))
    return Fill(length, examples, fill, int(lengths.sum()) - packed_tokens, alone)


# ``decode_rows``: documents of a token cache as text, divided where the loss mask changes.


SHOWN_TOKENS = 512
"""Default maximum number of tokens of a document that are decoded."""


@dataclass(frozen=True)
class TextSpan:
    """The text of consecutive tokens of a document that are all masked, or all not.

    Attributes:
        text: the text. A character whose bytes belong to tokens of two spans is part of the second one.
        tokens: number of tokens.
        masked: whether the tokens have no loss: they are not targets of training.
    """

    text: str
    tokens: int
    masked: bool


@dataclass(frozen=True)
class DecodedRow:
    """A document of a token cache as text.

    Attributes:
        row: its number.
        tokens: number of tokens of the document.
        spans: its text, divided where the loss mask changes.
    """

    row: int
    tokens: int
    spans: tuple[TextSpan, ...]

    @property
    def text(self) -> str:
        """The text of all spans."""
        return "".join(span.text for span in self.spans)

    @property
    def decoded_tokens(self) -> int:
        """Number of tokens that were decoded."""
        return sum(span.tokens for span in self.spans)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "row": self.row,
            "tokens": self.tokens,
            "decoded_tokens": self.decoded_tokens,
            "text": self.text,
            "spans": [vars(span) for span in self.spans],
        }


def decode_rows(
    cache: TokenCache,
    n: int = 5,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    *,
    tokens: int = SHOWN_TOKENS,
) -> list[DecodedRow]:
    """Decodes the first documents of a cache.

    A token is masked if its ``assistant_masks`` value is 0; or if the loss weight of the position before it, which predicts it, is
    0. The first token of a document, which nothing in the document predicts, is masked, too. Without masks and weights no token
    is masked. Only the tokens to decode are read.

    Args:
        cache: an open cache.
        n: number of documents.
        tokenizer: a tokenizer, or an argument of :func:`load_tokenizer`; default: that of the cache's ledger.
        tokens: maximum number of tokens of each document to decode.

    Returns:
        At most ``n`` documents.

    Raises:
        NotStoredError: the cache has no ids of tokens.
        ArgumentError: the ledger names no tokenizer.
        MissingFileError: it names one that is not on this machine.
        FormatError: the tokenizer has no token of an id; or masks have other row lengths than the tokens.
    """
    count, limit = min(_arguments.whole(n, "n", 1), len(cache)), _arguments.whole(tokens, "tokens", 1)
    decoder = decoder_of(cache, tokenizer)
    if (difference := tokenizer_difference(cache, decoder)) is not None:
        warn(f"{cache.path}: {difference}", code="cache-settings")
    if count == 0:
        return []
    lengths, ids = read_beginnings(cache, cache.token_field, count, limit)
    masks = _masks(cache, lengths, limit)
    return [
        _decoded(cache, number, int(lengths[number]), ids[number], masks[number], decoder) for number in range(count)
    ]


def decoder_of(cache: TokenCache, tokenizer: Tokenizer | str | os.PathLike[str] | None = None) -> Tokenizer:
    """Loads a tokenizer to decode a cache with; None or an empty name: the one that the cache's ledger names.

    Raises:
        NotStoredError: the cache has no ids of tokens.
        ArgumentError: the ledger names no tokenizer.
        MissingFileError: it is not on this machine.
        Errors of :func:`load_tokenizer`.
    """
    if cache.fields and cache.dtype(cache.token_field).kind not in "iu":
        fields = ", ".join(f"{name} ({cache.dtype(name)})" for name in cache.fields)
        raise NotStoredError(f"expected a field of token ids, which are integers, found {fields}", path=cache.path)
    options = cache.ledger.preprocessor
    name, size = tokenizer or options.get("tokenizer"), options.get("vocab_size")
    if isinstance(name, str) and name == PASSTHROUGH:
        return load_tokenizer(PASSTHROUGH, vocab_size=size if isinstance(size, int) and size > 0 else 1 << 32)
    if tokenizer:
        return load_tokenizer(tokenizer)
    if not isinstance(name, str) or not name:
        raise ArgumentError(
            "tokenizer: the cache's ledger names none; pass tokenizer= (--tokenizer), the one that made its ids",
            path=cache.path,
        )
    if not Location.at(name).exists():
        raise MissingFileError(
            f"expected the cache's tokenizer {name!r} at this path, found none; pass tokenizer= (--tokenizer), the folder of its "
            "copy on this machine",
            path=cache.path,
        )
    return load_tokenizer(name)


def tokenizer_difference(cache: TokenCache, tokenizer: Tokenizer) -> str | None:
    """A text if a cache was built with another tokenizer; None if it was not, or if its ledger has no digest."""
    options = cache.ledger.preprocessor
    # A prebuilt cache was made with none: its ids may come from any.
    if not options.get("tokenizer") or not tokenizer_differs(cache.ledger, tokenizer.digest()):
        return None
    name, size = tokenizer.name or "this one", options.get("vocab_size")
    if isinstance(size, int) and size != tokenizer.vocab_size:
        return (
            f"the cache was built with another tokenizer, of {many(size, 'token')}, than {name}, of "
            f"{many(tokenizer.vocab_size, 'token')}: texts may be wrong"
        )
    return (
        f"the cache was built with another tokenizer than {name}: with another vocabulary, so that texts are wrong; or with other "
        "special tokens or another chat template, which do not change texts"
    )


def read_beginnings(
    cache: TokenCache, name: str, count: int, limit: int
) -> tuple[NDArray[np.int64], list[NDArray[np.generic]]]:
    """``(count,)`` int64 lengths of the first rows of a field, and at most ``limit`` elements of each; reads no others."""
    field = cache.field(name)
    bounds = field.bounds(0, count).view(np.int64)
    starts, lengths = bounds[:-1], np.diff(bounds)
    ends = starts + np.minimum(lengths, limit)
    # Rows up to one that is cut are contiguous.
    firsts = [0, *(np.flatnonzero(lengths > limit) + 1).tolist()]
    rows: list[NDArray[np.generic]] = []
    for first, end in zip(firsts, [*firsts[1:], count], strict=True):
        if first < end:
            flat = field.elements(int(starts[first]), int(ends[end - 1] - starts[first]))
            rows += np.split(flat, starts[first + 1 : end] - starts[first])
    return lengths, rows


def _decoded(
    cache: TokenCache,
    number: int,
    tokens: int,
    ids: NDArray[np.generic],
    masked: NDArray[np.bool_],
    tokenizer: Tokenizer,
) -> DecodedRow:
    shown: list[int] = ids.tolist()
    _check_ids(shown, number, tokenizer, cache.path)
    ends = [*(np.flatnonzero(np.diff(masked)) + 1).tolist(), len(shown)] if shown else []
    text, spans = tokenizer.decode(shown), []
    first, begin = 0, 0
    for end in ends:
        # Cut from the whole text: decoders treat a text's first token differently, and tokens may be parts of characters.
        stop = len(text) if end == len(shown) else max(begin, _common_length(text, tokenizer.decode(shown[:end])))
        spans.append(TextSpan(text[begin:stop], end - first, bool(masked[first])))
        first, begin = end, stop
    return DecodedRow(number, tokens, tuple(spans))


def _common_length(text: str, decoded: str) -> int:
    """Number of equal characters at the beginning of two texts."""
    differing = (i for i, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b)
    return next(differing, min(len(text), len(decoded)))


def _masks(cache: TokenCache, lengths: NDArray[np.int64], limit: int) -> list[NDArray[np.bool_]]:
    """Whether each of the first tokens of the first rows has no loss; see :func:`decode_rows`."""
    recorded = cache.ledger.preprocessor.get("loss_weights_key")
    weights = recorded if isinstance(recorded, str) else WEIGHTS
    name = next((name for name in (MASKS, weights) if name in cache.fields), None)
    if name is None:
        return [np.zeros(min(length, limit), np.bool_) for length in lengths.tolist()]
    mask_lengths, rows = read_beginnings(cache, name, len(lengths), limit)
    for row in np.flatnonzero(mask_lengths != lengths):
        raise FormatError(
            f"row {row}: expected {many(int(lengths[row]), 'value')} in '{name}', one for each token, found "
            f"{int(mask_lengths[row]):,}",
            path=cache.path,
        )
    masks = [row == 0 for row in rows]
    if name != MASKS:  # a weight is of the position before a token, which predicts it
        masks = [np.roll(mask, 1) for mask in masks]
    for mask in masks:
        mask[:1] = True
    return masks


def _check_ids(ids: list[int], number: int, tokenizer: Tokenizer, path: Path) -> None:
    """Raises FormatError for an id without a token, which the library would leave out of the text."""
    if tokenizer.backend is None:
        return
    for i in sorted(set(ids)):
        if not 0 <= i < 1 << 32 or tokenizer.backend.id_to_token(i) is None:
            raise FormatError(
                f"row {number}: expected ids of tokens of {tokenizer.name or 'the tokenizer'}, found {i}; pass the tokenizer that "
                "made the cache's ids",
                path=path,
            )
