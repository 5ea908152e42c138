"""``decode_rows``: documents of a token cache as text, divided where the loss mask changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard import _arguments
from actshard._arguments import many
from actshard.errors import ArgumentError, FormatError, MissingFileError, warn
from actshard.location import Location
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
    0; then the first token of a document is masked, too. Without masks and weights no token is masked.

    Args:
        cache: an open cache.
        n: number of documents.
        tokenizer: a tokenizer, or an argument of :func:`load_tokenizer`; default: that of the cache's ledger.
        tokens: maximum number of tokens of each document to decode.

    Returns:
        At most ``n`` documents.

    Raises:
        ArgumentError: the ledger names no tokenizer.
        MissingFileError: it names one that is not on this machine.
        FormatError: the tokenizer has no token of an id; or masks have other row lengths than the tokens.
    """
    count, limit = _arguments.whole(n, "n", 1), _arguments.whole(tokens, "tokens", 1)
    if tokenizer is None:
        tokenizer = recorded_tokenizer(cache)
    elif not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    if (difference := tokenizer_difference(cache, tokenizer)) is not None:
        warn(f"{cache.path}: {difference}", code="cache-settings")
    rows = cache.rows(range(min(count, len(cache))))
    return [_decoded(cache, number, row, tokenizer, limit) for number, row in enumerate(rows)]


def recorded_tokenizer(cache: TokenCache) -> Tokenizer:
    """Loads the tokenizer that a cache's ledger names.

    Raises:
        ArgumentError: it names none.
        MissingFileError: it is not on this machine.
        Errors of :func:`load_tokenizer`.
    """
    options = cache.ledger.preprocessor
    name, size = options.get("tokenizer"), options.get("vocab_size")
    if not isinstance(name, str) or not name:
        raise ArgumentError(
            "tokenizer: the cache's ledger names none; pass tokenizer= (--tokenizer), the one that made its ids",
            path=cache.path,
        )
    if name == PASSTHROUGH:
        return load_tokenizer(PASSTHROUGH, vocab_size=size if isinstance(size, int) else None)
    if not Location.at(name).exists():
        raise MissingFileError(
            f"expected the cache's tokenizer {name!r} at this path, found none; pass tokenizer= (--tokenizer), the folder of its "
            "copy on this machine",
            path=cache.path,
        )
    return load_tokenizer(name)


def tokenizer_difference(cache: TokenCache, tokenizer: Tokenizer) -> str | None:
    """A text if a cache was built with another tokenizer; None if it was not, or if its ledger has no digest."""
    # A prebuilt cache was made with none: its ids may come from any.
    if not cache.ledger.preprocessor.get("tokenizer") or not tokenizer_differs(cache.ledger, tokenizer.digest()):
        return None
    name = tokenizer.name or "this one"
    return f"the cache was built with another tokenizer than {name}, or other special tokens or chat template: texts may be wrong"


def _decoded(
    cache: TokenCache, number: int, row: Mapping[str, NDArray[Any]], tokenizer: Tokenizer, limit: int
) -> DecodedRow:
    ids = row[cache.token_field].reshape(-1)
    masked = _masked(cache, number, row)[:limit]
    shown = [int(i) for i in ids[:limit]]
    _check_ids(shown, number, tokenizer, cache.path)
    ends = [*(np.flatnonzero(np.diff(masked)) + 1).tolist(), len(shown)] if shown else []
    text, spans = tokenizer.decode(shown), []
    first, begin = 0, 0
    for end in ends:
        # Cut from the whole text: decoders treat a text's first token differently, and tokens may be parts of characters.
        stop = len(text) if end == len(shown) else max(begin, _common_length(text, tokenizer.decode(shown[:end])))
        spans.append(TextSpan(text[begin:stop], end - first, bool(masked[first])))
        first, begin = end, stop
    return DecodedRow(number, len(ids), tuple(spans))


def _common_length(text: str, other: str) -> int:
    """Number of equal characters at the beginning of two texts."""
    differing = (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return next(differing, min(len(text), len(other)))


def _masked(cache: TokenCache, number: int, row: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """Whether each token of a row has no loss; see :func:`decode_rows`."""
    count = row[cache.token_field].size
    recorded = cache.ledger.preprocessor.get("loss_weights_key")
    weights = recorded if isinstance(recorded, str) else WEIGHTS
    name = next((name for name in (MASKS, weights) if name in row), None)
    if name is None:
        return np.zeros(count, np.bool_)
    is_zero = row[name].reshape(-1) == 0
    if len(is_zero) != count:
        raise FormatError(
            f"row {number}: expected {many(count, 'value')} in '{name}', one for each token, found {len(is_zero):,}",
            path=cache.path,
        )
    return is_zero if name == MASKS else np.concatenate([np.ones(min(count, 1), np.bool_), is_zero[:-1]])


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
