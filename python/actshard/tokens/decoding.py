"""``decode_rows``: documents of a token cache as text, divided where the loss mask changes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base.errors import ArgumentError, FormatError, MissingFileError, NotStoredError, warn
from actshard.base.location import Location
from actshard.tokens.cache import TokenCache
from actshard.tokens.processing import MASKS, WEIGHTS
from actshard.tokens.recipe import tokenizer_differs
from actshard.tokens.tokenizer import PASSTHROUGH, Tokenizer, load_tokenizer

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
