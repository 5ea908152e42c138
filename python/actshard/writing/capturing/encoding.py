"""Turns records into examples: token ids, special tokens and character offsets, by the tokenizer that the caller passes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.errors import ArgumentError, MissingExtraError
from actshard.base.location import Location
from actshard.writing.capturing.records import CHAT, IDS, MASK, Row, are_integers

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

_ENDS = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
"""Special tokens of transformers' tokenizers, also where one is unk_token_id: tokenizers of bytes have no unknown words."""


@dataclass(frozen=True)
class Example:
    """An input, as passed to ``tokens=`` functions.

    Attributes:
        number: its number in the dataset, from 0.
        text: its text; None if the input contains token ids.
        ids: ``(T,)`` int64 token ids.
        special: ``(T,)`` bool: tokens that the tokenizer added to a text, such as BOS; in chats and token ids all special tokens of
            the tokenizer, such as ``<|im_start|>``, except for unknown words.
        offsets: ``(T, 2)`` int64 ranges of characters in ``text``; None if the tokenizer has none.
        columns: the other columns of the input.
        problem: why the example has no states; None: it has.
    """

    number: int
    text: str | None
    ids: NDArray[np.int64]
    special: NDArray[np.bool_]
    offsets: NDArray[np.int64] | None = None
    columns: Mapping[str, object] = field(default_factory=dict)
    problem: str | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Encoding:
    """Token ids of a text; if the tokenizer returns them, ranges of characters, and 1 for tokens that it added."""

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]] | None = None
    special: Sequence[int] | None = None


class ChatError(ArgumentError):
    """A chat template refuses a chat."""


class Encoder:
    """A tokenizer. Its own padding and truncation are not used.

    Attributes:
        name: its name, or its class.
        digest: SHA-256 of everything that determines token ids; None for functions.
        pad_id: id with which shorter examples of a batch are filled; states at these places are never stored.
    """

    def __init__(
        self,
        name: str,
        encode: Callable[[list[str], bool], list[Encoding]],
        digest: str | None,
        specials: frozenset[int],
        pad_id: int = 0,
        chat: Callable[[object], str] | None = None,
    ) -> None:
        self.name, self.digest, self.pad_id = name, digest, pad_id
        self._encode, self._chat = encode, chat
        self._specials = np.array(sorted(specials), np.int64)

    @classmethod
    def of(cls, tokenizer: Any) -> Encoder:
        """Returns the encoder of a tokenizer.

        Args:
            tokenizer: a tokenizer of transformers, a ``tokenizers.Tokenizer``, a folder with ``tokenizer.json`` or that file, or a
                function from a text to token ids.

        Raises:
            ArgumentError: another object. MissingExtraError: tokenizers is not installed.
        """
        if isinstance(tokenizer, str | os.PathLike):
            return _of_library(_load(tokenizer), os.fspath(tokenizer))
        if hasattr(tokenizer, "all_special_ids") and callable(tokenizer):
            return _of_transformers(tokenizer)
        if hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "to_str"):
            return _of_library(tokenizer, type(tokenizer).__name__)
        if callable(tokenizer):
            return _of_function(tokenizer)
        raise ArgumentError(
            "tokenizer: expected a tokenizer of transformers, a tokenizers.Tokenizer, a folder with tokenizer.json or a function "
            f"from a text to token ids, found {type(tokenizer).__name__}"
        )

    def encode(self, texts: list[str], *, special: bool) -> list[Encoding]:
        """Encodes texts; ``special``: with the special tokens that the tokenizer adds, such as BOS."""
        return self._encode(texts, special) if texts else []

    def render(self, messages: object) -> str:
        """The text of a chat, by the tokenizer's chat template. Raises ChatError if the template refuses it."""
        if self._chat is None:
            raise ArgumentError(
                f"tokenizer: {self.name} has no chat template, which examples with {CHAT!r} need; pass the tokenizer of the model "
                "(transformers.AutoTokenizer), or texts"
            )
        try:
            return self._chat(messages)
        except Exception as error:  # templates raise errors of their own, and of Python for absent or other fields
            raise ChatError(f"the chat template refuses it: {type(error).__name__}: {error!s:.200}") from error

    def are_special(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Marks the tokenizer's special tokens by their ids, whether the tokenizer added them or a text contains them."""
        return np.isin(ids, self._specials)


def _of_transformers(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    ends = {number for name in _ENDS if (number := getattr(tokenizer, name, None)) is not None}
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if getattr(token, "special", False)}
    specials = ends | (
        (added | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}
    )  # padding may be unk_token_id
    fast = bool(tokenizer.is_fast)

    def encode(texts: list[str], special: bool) -> list[Encoding]:
        encoded = tokenizer(
            texts, add_special_tokens=special, padding=False, truncation=False, return_attention_mask=False,
            return_token_type_ids=False, return_offsets_mapping=fast, return_special_tokens_mask=fast, verbose=False,
        )  # fmt: skip
        if not fast:
            return [Encoding(ids) for ids in encoded["input_ids"]]
        fields = encoded["input_ids"], encoded["offset_mapping"], encoded["special_tokens_mask"]
        return [Encoding(*values) for values in zip(*fields, strict=True)]

    def render(messages: object) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    content = tokenizer.backend_tokenizer.to_str() if fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    template = getattr(tokenizer, "chat_template", None)
    digest = _digest(without_padding(content) if fast else content, template, type(tokenizer).__name__)
    pad_id = tokenizer.pad_token_id
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    return Encoder(
        name, encode, digest, frozenset(specials), 0 if pad_id is None else int(pad_id), render if template else None
    )


def without_padding(content: str) -> str:
    """A tokenizer's JSON without padding and truncation, which calls change and encoders do not use."""
    fields = json.loads(content)
    fields.pop("padding", None)
    fields.pop("truncation", None)
    return json.dumps(fields, sort_keys=True)


def _of_library(tokenizer: tokenizers.Tokenizer, name: str) -> Encoder:
    library = type(tokenizer).from_str(tokenizer.to_str())  # the caller's object keeps its padding and truncation
    library.no_padding()
    library.no_truncation()

    def encode(texts: list[str], special: bool) -> list[Encoding]:
        encodings = library.encode_batch(texts, add_special_tokens=special)
        return [Encoding(e.ids, e.offsets, e.special_tokens_mask) for e in encodings]

    specials = {number for number, token in library.get_added_tokens_decoder().items() if token.special}
    specials -= {library.token_to_id(text) for text in ("[UNK]", "<unk>")}
    return Encoder(name, encode, _digest(without_padding(library.to_str()), None, ""), frozenset(specials))


def _of_function(function: Callable[[str], object]) -> Encoder:
    def encode(texts: list[str], special: bool) -> list[Encoding]:
        return [Encoding(_checked_ids(function(text), name)) for text in texts]

    name = name_of_function(function)
    return Encoder(name, encode, None, frozenset())


def _checked_ids(encoded: object, name: str) -> list[int]:
    """Token ids that a function returned."""
    values = encoded[IDS] if isinstance(encoded, Mapping) else encoded
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(f"tokenizer: expected that {name} returns a list of token ids, found {values!r:.80}")
    ids: list[int] = array.astype(np.int64).tolist()
    return ids


def name_of_function(function: object) -> str:
    """``module.name`` of a function, or of the class of a callable object."""
    definition = function if hasattr(function, "__qualname__") else type(function)
    return f"{definition.__module__}.{definition.__qualname__}"


def _load(path: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError.of("tokenizing", "tokens") from error
    local_path = Path(path).expanduser()
    file = local_path / "tokenizer.json" if Location.at(local_path).kind() == "folder" else local_path
    if Location.at(file).kind() != "file":
        raise ArgumentError(
            "tokenizer: expected a folder with tokenizer.json, or that file, found none. For a tokenizer of the hub pass "
            f"transformers.AutoTokenizer.from_pretrained({os.fspath(path)!r})"
        )
    try:
        return Tokenizer.from_str(Location.at(file).read_utf8())
    except ValueError as error:
        raise ArgumentError(f"tokenizer: the tokenizers library cannot read the file: {error}", path=file) from error
    except Exception as error:  # the library raises plain Exceptions
        if type(error) is not Exception:
            raise
        raise ArgumentError(f"tokenizer: the tokenizers library cannot read the file: {error}", path=file) from error


def _digest(content: str, template: object, kind: str) -> str:
    text = json.dumps([content, template if isinstance(template, str | None) else repr(template), kind])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Encodings:
    """How records become examples.

    Attributes:
        encoder: the tokenizer; None if all records contain token ids.
        key: the column with the text, the chat or the token ids.
        columns: the columns that examples keep.
        special: whether the tokenizer adds its special tokens to texts. A chat has those of its template.
        most: maximum number of tokens; None: no limit.
        truncate: cut longer examples at their end, instead of leaving them empty.
    """

    encoder: Encoder | None
    key: str
    columns: tuple[str, ...]
    special: bool
    most: int | None
    truncate: bool

    def examples(self, rows: Sequence[Row], first: int) -> list[Example]:
        """The examples of rows, numbered from ``first``. Unusable ones have a ``problem``."""
        texts: list[str | None] = []
        encodings: list[Encoding | str] = []
        for row in rows:
            text, encoding = self._prepare(row)
            texts.append(text)
            encodings.append(encoding)
        for chat in (False, True):
            places = [i for i, text in enumerate(texts) if text and self._is_chat(rows[i]) == chat]
            if places:
                encoded = self._tokenizer().encode([str(texts[i]) for i in places], special=self.special and not chat)
                for i, encoding in zip(places, encoded, strict=True):
                    encodings[i] = replace(encoding, special=None) if chat else encoding  # the template added tokens
        return [
            self._example(first + i, texts[i], encodings[i], {name: row.get(name) for name in self.columns})
            for i, row in enumerate(rows)
        ]

    def _is_chat(self, row: Row) -> bool:
        return not isinstance(row.get(self.key), str)

    def _prepare(self, row: Row) -> tuple[str | None, Encoding | str]:
        """The text to encode, or the token ids of a record, or the problem."""
        value = row.get(self.key) if row else ()  # a record that was []
        if isinstance(value, str):
            return _encodable(value)
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
            return None, _attended(value.tolist(), row.get(MASK))
        if isinstance(value, list | tuple):
            if are_integers(value):
                return None, _attended(value, row.get(MASK))
            if all(isinstance(item, Mapping) for item in value):
                try:
                    text = self._tokenizer().render(list(value))
                except ChatError as error:
                    return None, error.detail
                return _encodable(text)
        return None, f"expected a text, token ids or a chat, found {type(value).__name__}"

    def _tokenizer(self) -> Encoder:
        if self.encoder is None:
            raise ArgumentError("tokenizer: expected a tokenizer for texts, found none. Pass tokenizer=, or token ids")
        return self.encoder

    def _example(
        self, number: int, text: str | None, encoding: Encoding | str, columns: Mapping[str, object]
    ) -> Example:
        if isinstance(encoding, str):
            none = np.zeros(0, np.int64)
            return Example(number, text, none, none.astype(bool), None, columns, encoding)
        ids = np.asarray(encoding.ids, np.int64)
        offsets = None if encoding.offsets is None else np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        problem = None if len(ids) else "it has no tokens"
        if self.most is not None and len(ids) > self.most:
            if not self.truncate:
                problem = f"it has {len(ids)} tokens, more than {self.most}"
                ids, offsets = ids[:0], None
            ids, offsets = ids[: self.most], None if offsets is None else offsets[: self.most]
        if encoding.special is not None:
            special = np.asarray(encoding.special[: len(ids)], bool)
        else:
            special = np.zeros(len(ids), bool) if self.encoder is None else self.encoder.are_special(ids)
        return Example(number, text, ids, special, offsets, columns, problem)


def _encodable(text: str) -> tuple[str | None, str]:
    """The text, and its problem if it has one. UTF-8, and thus tokenizers and columns, have no surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return None, f"its text has a lone surrogate, \\u{ord(text[error.start]):04x}, at character {error.start}"
    return text, "not encoded" if text else "its text is empty"


def _attended(ids: Sequence[int], mask: object) -> Encoding | str:
    """Token ids without padding, by the ``attention_mask`` of their record, or the problem."""
    if mask is None:
        return Encoding(ids)
    array = np.asarray(mask)
    if array.shape != (len(ids),):
        return f"expected {len(ids)} values of {MASK}, one per token, found shape {array.shape}"
    places = np.flatnonzero(array)
    if len(places) and places[-1] - places[0] >= len(places):
        return f"its {MASK} has zeros between tokens"
    return Encoding([ids[i] for i in places.tolist()])
