"""Turns records into rows of a cache, one batch at a time, with encoding separated from work that holds the GIL.

A processor works in three steps. ``prepare`` reads records and collects the texts to encode. ``encode`` calls the tokenizers
library, which uses all processors and releases the GIL. ``finish`` builds flat arrays. A row does not depend on its batch.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.errors import ArgumentError, FormatError
from actshard.tokens import tokenizer as templates
from actshard.tokens.columns import ColumnBlock
from actshard.tokens.formats import ChatFormat, PrebuiltFormat, RowFormat, SupervisedFormat, TextFormat
from actshard.tokens.sources import Record, RowProblem
from actshard.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import DTypeLike


IDS = "input_ids"
MASKS = "assistant_masks"
WEIGHTS = "loss_weights"
_FORBIDDEN = ("tokenize", "return_assistant_tokens_mask", "return_dict")
_INT32 = np.iinfo(np.int32)


@dataclass
class Prepared:
    """A batch before encoding: data kept per record, and the texts of all records."""

    numbers: list[int]
    needs: list[Any]
    texts: list[str]
    problems: list[RowProblem]
    rows: RowsOfBatch | None = None
    """The rows, if they need no encoding."""


@dataclass
class RowsOfBatch:
    """A batch of rows: for each field all elements concatenated, and the number of elements of each row."""

    elements: dict[str, NDArray[np.generic]]
    lengths: dict[str, NDArray[np.int64]]
    problems: list[RowProblem]

    def __len__(self) -> int:
        return len(next(iter(self.lengths.values())))


class Processor(ABC):
    """Makes rows of one format."""

    columns: tuple[str, ...]
    """Keys of a record that are read."""
    fields: dict[str, np.dtype[Any]]
    """Stored fields and their dtypes."""

    takes_blocks: bool = False
    """Whether columns are lists of numbers, which :meth:`of_block` takes at once."""

    now: time.struct_time | None = None
    """The time passed to chat templates; None: the time of rendering."""

    tells_time: bool = False
    """Whether rows depend on :attr:`now`, according to the processor's own template. Templates in records are not considered."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    def prepare(self, records: Sequence[Record], what: str) -> Prepared:
        """Reads records. Unusable ones become problems."""
        prepared = Prepared([], [], [], [])
        for number, record in records:
            if isinstance(record, RowProblem):
                prepared.problems.append(record)
                continue
            try:
                needs, texts = self.look(record)
                for text in texts:
                    _check_unicode(text)
                    if self.tokenizer is not None and (problem := self.tokenizer.problem_of(text)) is not None:
                        raise _BadRecordError(problem)
            except _BadRecordError as bad:
                prepared.problems.append(RowProblem(number, str(bad), what))
                continue
            prepared.numbers.append(number)
            prepared.needs.append((len(texts), needs))
            prepared.texts += texts
        return prepared

    def prepare_block(self, first: int, block: ColumnBlock, what: str) -> Prepared:
        """Reads a block whose first record has the number ``first``. If one is unusable, they are read one by one."""
        rows = self.of_block(block)
        if rows is None:
            return self.prepare(block.rows(first), what)
        return Prepared([], [], [], [], rows)

    def of_block(self, block: ColumnBlock) -> RowsOfBatch | None:
        """The rows of a block; None if a record is unusable."""
        return None

    def encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Token ids of texts."""
        return self._tokenizer.encode_arrays(texts) if texts else []

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ArgumentError("this format needs a tokenizer")
        return self.tokenizer

    def finish(self, prepared: Prepared, encoded: list[NDArray[np.int64]], what: str) -> RowsOfBatch:
        """Builds flat arrays from a prepared batch and its token ids."""
        if prepared.rows is not None:
            return prepared.rows
        flat: dict[str, list[NDArray[np.generic]]] = {name: [] for name in self.fields}
        lengths: dict[str, list[int]] = {name: [] for name in self.fields}
        problems = list(prepared.problems)
        position = 0
        for number, (texts, needs) in zip(prepared.numbers, prepared.needs, strict=True):
            ids = encoded[position : position + texts]
            position += texts
            try:
                row = self.make(needs, ids)
            except _BadRecordError as bad:
                problems.append(RowProblem(number, str(bad), what))
                continue
            for name, values in row.items():
                flat[name].append(values)
                lengths[name].append(len(values))
        problems.sort(key=lambda p: p.number)
        elements = {name: self._joined(values, self.fields[name]) for name, values in flat.items()}
        return RowsOfBatch(elements, {name: np.array(n, np.int64) for name, n in lengths.items()}, problems)

    def _joined(self, values: list[NDArray[np.generic]], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        if not values:
            return np.empty(0, dtype)
        return self._cast(np.concatenate(values), dtype)

    @staticmethod
    def _cast(values: NDArray[np.generic], dtype: np.dtype[Any]) -> NDArray[np.generic]:
        if dtype.kind in "iu" and values.size and values.dtype != dtype:
            low, high = int(values.min()), int(values.max())
            if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
                raise ArgumentError(f"dtype: token ids from {low} to {high} do not fit {dtype}")
        return np.ascontiguousarray(values, dtype)

    @abstractmethod
    def look(self, record: Mapping[str, object]) -> tuple[object, list[str]]:
        """Returns data to keep for a record, and the texts to encode."""

    @abstractmethod
    def make(self, needs: object, encoded: list[NDArray[np.int64]]) -> dict[str, NDArray[np.generic]]:
        """Returns the row of a record, from the data kept and the token ids of its texts."""

    @abstractmethod
    def metadata(self) -> dict[str, object]:
        """The ``preprocessor_metadata`` that Levanter would write."""


class _BadRecordError(Exception):
    """A record is unusable; the message gives the reason."""


def _check_unicode(text: str, what: str = "its text") -> None:
    """Rejects lone surrogates, which JSON can contain but a tokenizer cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _BadRecordError(
            f"{what}: expected Unicode text, found the lone surrogate \\u{ord(text[error.start]):04x} at character {error.start}"
        ) from error


def _ids(token: int | None) -> NDArray[np.int64]:
    """One id, or none."""
    return np.array([] if token is None else [token], np.int64)


def _text(record: Mapping[str, object], key: str) -> str:
    value = record.get(key, _ABSENT)
    if isinstance(value, str):
        _check_unicode(value, f"field '{key}'")
        return value
    if value is _ABSENT:
        raise _BadRecordError(f"expected the key '{key}', found {_keys(record)}")
    raise _BadRecordError(f"field '{key}': expected a string, found {_short(value)}")


_ABSENT = object()


def _keys(record: Mapping[str, object]) -> str:
    return ", ".join(f"'{key}'" for key in list(record)[:8]) or "no keys"


def _short(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


class TextProcessor(Processor):
    """``input_ids``: bos, the text, a space and eos."""

    def __init__(
        self, format: TextFormat, tokenizer: Tokenizer, dtype: DTypeLike | None, *, eos: bool, bos: bool
    ) -> None:
        super().__init__(tokenizer)
        self.format = format
        self.columns = (format.text_key,)
        self.fields = {IDS: np.dtype(dtype or np.int64)}
        self._bos = bos and tokenizer.bos_id is not None
        self._eos = eos and tokenizer.eos_id is not None
        self._head = _ids(tokenizer.bos_id if self._bos else None)
        self._tail = f" {tokenizer.eos_token}" if self._eos else ""
        self._if_missing = format.special_tokens == "if_missing"

    def look(self, record: Mapping[str, object]) -> tuple[object, list[str]]:
        text = _text(record, self.format.text_key)
        if self._if_missing and self._eos and text.endswith(str(self._tokenizer.eos_token)):
            return None, [text]
        return None, [text + self._tail]

    def make(self, needs: object, encoded: list[NDArray[np.int64]]) -> dict[str, NDArray[np.generic]]:
        (ids,) = encoded
        if not self._head.size or (self._if_missing and np.array_equal(ids[:1], self._head)):
            return {IDS: ids}
        return {IDS: np.concatenate((self._head, ids))}

    def metadata(self) -> dict[str, object]:
        return {
            "tokenizer": self._tokenizer.name,
            "vocab_size": self._tokenizer.vocab_size,
            "return_attention_mask": False,
            "padding": False,
            "max_length": None,
            "append_bos": self._bos,
            "append_eos": self._eos,
        }


class ChatProcessor(Processor):
    """``input_ids`` and ``assistant_masks`` of a conversation rendered by a chat template."""

    def __init__(self, format: ChatFormat, tokenizer: Tokenizer, dtype: DTypeLike | None) -> None:
        super().__init__(tokenizer)
        self.format = format
        columns = (format.messages_field, format.system_prompt, format.chat_template_kwargs)
        self.columns = tuple(dict.fromkeys(name for name in columns if name is not None))
        self.fields = {IDS: np.dtype(dtype or np.int32), MASKS: np.dtype(np.int32)}
        template = format.chat_template or tokenizer.chat_template
        if template is None:
            raise ArgumentError(f"chat: {tokenizer.name or 'the tokenizer'} has no chat template; pass chat_template=")
        if format.mask_user_turns and not templates.GENERATION.search(template):
            raise ArgumentError(
                "chat: the template must mark the assistant's text, which the loss includes, with {% generation %} ... "
                "{% endgeneration %}; or set mask_user_turns=False and require_assistant=False to include all tokens"
            )
        templates.compile_template(template)
        self.template = template
        self.tells_time = "strftime_now" in template
        self._bos, self._eos = tokenizer.bos_token or "", tokenizer.eos_token or ""

    def look(self, record: Mapping[str, object]) -> tuple[object, list[str]]:
        messages = self._messages(record)
        template, variables = self._template(record)
        try:
            pieces = templates.render(template, messages, self._bos, self._eos, variables, self.now)
        except templates.TemplateProblemError as problem:
            raise _BadRecordError(str(problem)) from problem
        if self.format.encoding == "whole":
            _check_unicode("".join(text for text, _ in pieces))
            return pieces, []
        return [is_generation for _, is_generation in pieces], [text for text, _ in pieces]

    def _messages(self, record: Mapping[str, object]) -> list[object]:
        key = self.format.messages_field
        if key not in record:
            raise _BadRecordError(f"expected the key '{key}', found {_keys(record)}")
        messages = record[key]
        if not isinstance(messages, list | tuple):
            raise _BadRecordError(f"field '{key}': expected a list of messages, found {_short(messages)}")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise _BadRecordError(
                    f"field '{key}[{i}]': expected a message with role and content, found {_short(message)}"
                )
        system = None if self.format.system_prompt is None else record.get(self.format.system_prompt)
        if system is None:
            return list(messages)
        if not isinstance(system, Mapping):
            return [{"role": "system", "content": system}, *messages]
        if "content" not in system:
            raise _BadRecordError(
                f"field '{self.format.system_prompt}': expected 'content' in a system prompt, found {_keys(system)}"
            )
        return [{**system, "role": "system"}, *messages]

    def _template(self, record: Mapping[str, object]) -> tuple[str, dict[str, object]]:
        key = self.format.chat_template_kwargs
        arguments = None if key is None else record.get(key)
        if arguments is None:
            return self.template, {}
        if not isinstance(arguments, Mapping):
            raise _BadRecordError(
                f"field '{key}': expected an object of variables for the template, found {_short(arguments)}"
            )
        variables = dict(arguments)
        for name in _FORBIDDEN:
            if name in variables:
                raise _BadRecordError(f"field '{key}': may not set '{name}'")
        template = variables.pop("chat_template", self.template)
        variables.pop("add_generation_prompt", None)
        if not isinstance(template, str):
            raise _BadRecordError(f"field '{key}.chat_template': expected a template, found {_short(template)}")
        for name in ("messages", "bos_token", "eos_token"):
            if name in variables:
                raise _BadRecordError(f"field '{key}': may not set '{name}', which is set automatically")
        return template, variables

    def make(self, needs: Any, encoded: list[NDArray[np.int64]]) -> dict[str, NDArray[np.generic]]:
        if self.format.encoding == "whole":
            ids, masks = self._whole(needs)
        else:
            ids = np.concatenate([_ids(None), *encoded])
            masks = np.repeat(np.array(needs, np.int64), np.array([len(part) for part in encoded], np.int64))
        if self.format.require_assistant and not masks.any():
            raise _BadRecordError(
                "no token of this conversation is marked as the assistant's ({% generation %} in the template); "
                "require_assistant=False keeps such conversations"
            )
        return {IDS: ids, MASKS: masks}

    def _whole(self, pieces: list[tuple[str, bool]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Encodes the whole text. A token is marked if one of its characters is (Hugging Face's char_to_token from both ends)."""
        ids, offsets = self._tokenizer.encode_with_offsets("".join(text for text, _ in pieces))
        masks = [0] * len(ids)
        start = 0
        for text, is_generation in pieces:
            end = start + len(text)
            if is_generation:
                for i, (first, last) in enumerate(offsets):
                    if first < end and last > start:
                        masks[i] = 1
            start = end
        return np.array(ids, np.int64), np.array(masks, np.int64)

    def metadata(self) -> dict[str, object]:
        return {
            "tokenizer": self._tokenizer.name,
            "vocab_size": self._tokenizer.vocab_size,
            "chat_template": self.template,
            "messages_field": self.format.messages_field,
            "system_prompt_field": self.format.system_prompt,
            "chat_template_kwargs_field": self.format.chat_template_kwargs,
        }


class PrebuiltProcessor(Processor):
    """Existing ids and weights, checked and cast."""

    takes_blocks = True

    def __init__(self, format: PrebuiltFormat, dtype: DTypeLike | None) -> None:
        super().__init__(None)
        self.format = format
        self.fields = {format.input_ids_key: np.dtype(dtype or np.int32)}
        if format.loss_weights_key is not None:
            self.fields[format.loss_weights_key] = np.dtype(np.float32)
        if format.loss_weights_key == format.input_ids_key:
            raise ArgumentError("prebuilt: input_ids_key and loss_weights_key must differ")
        self.columns = tuple(self.fields)

    def of_block(self, block: ColumnBlock) -> RowsOfBatch | None:
        if block.elements.keys() != self.fields.keys():
            return None
        elements = {}
        for name, dtype in self.fields.items():
            numbers = block.elements[name]
            if name == self.format.input_ids_key:
                if numbers.size and (numbers.dtype.kind not in "iu" or not self._fits(numbers)):
                    return None
            elif not np.array_equal(block.lengths[name], block.lengths[self.format.input_ids_key]):
                return None
            with np.errstate(over="ignore"):
                elements[name] = numbers.astype(dtype, copy=False)
            if dtype.kind == "f" and not np.isfinite(elements[name]).all():
                return None
        return RowsOfBatch(elements, dict(block.lengths), [])

    def _fits(self, ids: NDArray[np.generic]) -> bool:
        """Whether all ids are from 0 to the largest of the dtype."""
        return int(ids.min()) >= 0 and int(ids.max()) <= np.iinfo(self.fields[self.format.input_ids_key]).max

    def look(self, record: Mapping[str, object]) -> tuple[object, list[str]]:
        ids = self._array(record, self.format.input_ids_key)
        if ids.size and ids.dtype.kind not in "iu":
            raise _BadRecordError(
                f"field '{self.format.input_ids_key}': expected integers, found {ids.dtype}, such as {ids.flat[0]}"
            )
        limits = np.iinfo(self.fields[self.format.input_ids_key])
        low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        if low < 0 or high > limits.max:  # ids are never negative, even if the dtype is signed
            wrong = high if high > limits.max else low
            raise _BadRecordError(
                f"field '{self.format.input_ids_key}': expected ids from 0 to {limits.max}, found {wrong}"
            )
        row: dict[str, NDArray[np.generic]] = {
            self.format.input_ids_key: ids.astype(self.fields[self.format.input_ids_key], copy=False)
        }
        key = self.format.loss_weights_key
        if key is not None:
            weights = self._array(record, key)
            if weights.size and weights.dtype.kind not in "iuf":
                raise _BadRecordError(f"field '{key}': expected numbers, found {weights.dtype}")
            if len(weights) != len(ids):
                raise _BadRecordError(
                    f"field '{key}': expected {len(ids)} weights, as many as '{self.format.input_ids_key}' has ids, found "
                    f"{len(weights)}"
                )
            with np.errstate(over="ignore"):
                row[key] = weights.astype(np.float32, copy=False)
            if not (finite := np.isfinite(row[key])).all():
                raise _BadRecordError(f"field '{key}': expected finite float32 weights, found {weights[~finite][0]}")
        return row, []

    @staticmethod
    def _array(record: Mapping[str, object], key: str) -> NDArray[np.generic]:
        if key not in record:
            raise _BadRecordError(f"expected the key '{key}', found {_keys(record)}")
        value = record[key]
        if not isinstance(value, list | tuple | np.ndarray):
            raise _BadRecordError(f"field '{key}': expected a list of numbers, found {_short(value)}")
        if isinstance(value, list | tuple) and bool in set(map(type, value)):
            raise _BadRecordError(f"field '{key}': expected numbers, found true or false")
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise _BadRecordError(f"field '{key}': expected a list of numbers: {error}") from error
        if array.ndim != 1:
            raise _BadRecordError(f"field '{key}': expected a 1-D list, found one with {array.ndim} axes")
        if array.dtype.kind not in "iuf" and array.size:
            raise _BadRecordError(f"field '{key}': expected numbers, found {_short(value)}")
        return array

    def make(self, needs: Any, encoded: list[NDArray[np.int64]]) -> dict[str, NDArray[np.generic]]:
        return dict(needs)

    def metadata(self) -> dict[str, object]:
        return {"input_ids_key": self.format.input_ids_key, "loss_weights_key": self.format.loss_weights_key}


class SupervisedProcessor(Processor):
    """``input_ids`` and ``loss_weights``: the weight is 1 where the next token belongs to the target."""

    def __init__(
        self, format: SupervisedFormat, tokenizer: Tokenizer, dtype: DTypeLike | None, *, eos: bool, bos: bool
    ) -> None:
        super().__init__(tokenizer)
        self.format = format
        self.columns = (format.input_key, format.target_key)
        self.fields = {IDS: np.dtype(dtype or np.int32), WEIGHTS: np.dtype(np.float32)}
        self._bos = bos and tokenizer.bos_id is not None
        self._eos = eos and tokenizer.eos_token is not None

    def look(self, record: Mapping[str, object]) -> tuple[object, list[str]]:
        target = _text(record, self.format.target_key)
        tail = f" {self._tokenizer.eos_token}" if self._eos else ""
        return None, [_text(record, self.format.input_key), target + tail]

    def make(self, needs: object, encoded: list[NDArray[np.int64]]) -> dict[str, NDArray[np.generic]]:
        prompt, target = encoded
        head = _ids(self._tokenizer.bos_id if self._bos else None)
        ids = np.concatenate((head, prompt, target))
        first = max(len(head) + len(prompt) - 1, 0)
        if first >= len(ids) - 1:
            raise _BadRecordError(f"field '{self.format.target_key}': the target has no tokens")
        weights = np.zeros(len(ids), np.float32)
        weights[first:-1] = 1
        return {IDS: ids, WEIGHTS: weights}

    def metadata(self) -> dict[str, object]:
        return {
            "tokenizer": self._tokenizer.name,
            "vocab_size": self._tokenizer.vocab_size,
            "input_field": self.format.input_key,
            "target_field": self.format.target_key,
            "append_bos": self._bos,
            "append_eos": self._eos,
        }


def processor(
    format: RowFormat,
    tokenizer: Tokenizer | None,
    dtype: DTypeLike | None = None,
    *,
    enforce_eos: bool = True,
    enforce_bos: bool = True,
) -> Processor:
    """Returns the processor of a format."""
    if isinstance(format, PrebuiltFormat):
        return PrebuiltProcessor(format, dtype)
    if tokenizer is None:
        raise ArgumentError(f"format {format.type} needs a tokenizer")
    if isinstance(format, ChatFormat):
        return ChatProcessor(format, tokenizer, dtype)
    if isinstance(format, SupervisedFormat):
        return SupervisedProcessor(format, tokenizer, dtype, eos=enforce_eos, bos=enforce_bos)
    return TextProcessor(format, tokenizer, dtype, eos=enforce_eos, bos=enforce_bos)


def processor_of(format: RowFormat, tokenizer: Tokenizer | None, options: Mapping[str, Any]) -> Processor:
    """Returns the processor of a format, with ``dtype``, ``enforce_eos`` and ``enforce_bos`` as JSON values."""
    return processor(
        format,
        tokenizer,
        None if options["dtype"] is None else np.dtype(options["dtype"]),
        enforce_eos=options["enforce_eos"],
        enforce_bos=options["enforce_bos"],
    )


def raised(problem: RowProblem, path: Path | None) -> FormatError:
    """The error of a problem, as users see it."""
    return problem.error(path)
