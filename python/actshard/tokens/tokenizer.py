"""Tokenizers: wraps the ``tokenizers`` library, and reads the configuration files that Levanter reads."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base._arguments import is_file_url, local_path
from actshard.base._json import read_json, show
from actshard.base.errors import ArgumentError, FormatError, MissingExtraError, MissingFileError, boundary, warn
from actshard.base.location import Location

if TYPE_CHECKING:
    import jinja2
    import tokenizers


PASSTHROUGH = "passthrough"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files of a tokenizer in a folder; the first may have another name."""
_LONGEST_RUN = 25_000
"""Runs of white space, or of other characters, from this length on are split: encoding time is quadratic in a run's length."""
_LONG_RUNS = re.compile(rf"\s{{{_LONGEST_RUN},}}|\S{{{_LONGEST_RUN},}}")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its special tokens. Create one with :func:`load_tokenizer`.

    Attributes:
        name: the name or path given, as stored in the ledger.
        vocab_size: number of tokens, added tokens included.
        bos_token, eos_token: text of the special tokens, or None.
        bos_id, eos_id: their ids, or None.
        chat_template: the tokenizer's Jinja template, or None.
    """

    name: str
    vocab_size: int
    bos_token: str | None = None
    eos_token: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    chat_template: str | None = None
    backend: tokenizers.Tokenizer | None = field(default=None, repr=False, compare=False)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without adding special tokens. Texts are encoded in parallel."""
        return list(self._encode(texts))

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """As :meth:`encode`. Each text's ids are converted before the next one's are fetched, which takes half the time."""
        return [np.frombuffer(array("q", ids), np.int64) for ids in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> Iterator[list[int]]:
        if self.backend is None:
            for text in texts:
                yield _integers(text, self.vocab_size)
            return
        encode = getattr(self.backend, "encode_batch_fast", None) or self.backend.encode_batch
        if all(len(text) <= _LONGEST_RUN for text in texts):
            for encoding in encode(list(texts), add_special_tokens=False):
                yield encoding.ids
            return
        parts = [pieces(text) for text in texts]
        flat = iter(encode([p for text_pieces in parts for p in text_pieces], add_special_tokens=False))
        for text_pieces in parts:
            yield [i for _ in text_pieces for i in next(flat).ids]

    def problem_of(self, text: str) -> str | None:
        """Why the passthrough tokenizer cannot encode a text; None if it can, and for other tokenizers."""
        if self.backend is None:
            try:
                _integers(text, self.vocab_size)
            except FormatError as error:
                return error.detail
        return None

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text, and the range of characters ``(start, end)`` of each token."""
        if self.backend is None:
            raise ArgumentError("the passthrough tokenizer has no character offsets")
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        if self.backend is None:
            return " ".join(str(i) for i in ids)
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def as_dict(self) -> dict[str, Any]:
        """The whole tokenizer as JSON-compatible data, to send to another process."""
        text = None if self.backend is None else _serialized(self.backend, self.name)
        fields = ("name", "vocab_size", "bos_token", "eos_token", "bos_id", "eos_id", "chat_template")
        return {**{name: getattr(self, name) for name in fields}, "tokenizer": text}

    @staticmethod
    def from_dict(made: dict[str, Any]) -> Tokenizer:
        """The tokenizer that :meth:`as_dict` serialized."""
        fields = dict(made)
        text = fields.pop("tokenizer")
        return Tokenizer(**fields, backend=None if text is None else _library().from_str(text))

    def digest(self) -> str:
        """SHA-256 of everything that affects token ids; the name is excluded.

        Serializes the vocabulary each time: any part of the library's object may have been replaced, even by one of equal size.

        Raises:
            ArgumentError: the object was changed so that rows would depend on their batch or process, or has parts that other
                processes cannot have.
        """
        _check_backend(self.backend, self.name)
        content = json.dumps({**self.as_dict(), "name": ""}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def has_special(self, name: str) -> bool:
        """Whether encoding the text of a special token, ``"bos"`` or ``"eos"``, ends with its id. False without such a token."""
        text, number = getattr(self, f"{name}_token"), getattr(self, f"{name}_id")
        return text is not None and number is not None and self.encode([f" {text}"])[0][-1:] == [number]


@dataclass(frozen=True)
class _SharedTokenizer(Tokenizer):
    """A tokenizer that only :func:`shared_tokenizer` returns: nothing changes it, so its digest is computed once."""

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return super().digest()


def pieces(text: str) -> list[str]:
    """Splits a text as Levanter does: runs of 25,000 or more characters are cut into pieces of 25,000."""
    if len(text) <= _LONGEST_RUN:
        return [text]
    parts, last = [], 0
    for run in _LONG_RUNS.finditer(text):
        if run.start() > last:
            parts.append(text[last : run.start()])
        parts += [
            run.group()[start : start + _LONGEST_RUN] for start in range(0, run.end() - run.start(), _LONGEST_RUN)
        ]
        last = run.end()
    if last < len(text):
        parts.append(text[last:])
    return parts or [text]


def _integers(text: str, vocab_size: int) -> list[int]:
    try:
        ids = [int(word) for word in text.split()]
    except ValueError as error:
        raise FormatError(f"the passthrough tokenizer expects integers separated by white space: {error}") from error
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(number for number in ids if not 0 <= number < vocab_size)
        raise FormatError(f"the passthrough tokenizer has a vocabulary of {vocab_size:,} tokens, found the id {wrong}")
    return ids


def _library() -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise MissingExtraError.of("tokenizing", "tokens") from error
    return Library


def load_tokenizer(
    tokenizer: object,
    *,
    vocab_size: int | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        tokenizer: a folder with ``tokenizer.json`` (and ``tokenizer_config.json``, ``chat_template.jinja``), the path of a
            ``tokenizer.json``, a ``tokenizers.Tokenizer``, a fast tokenizer of transformers, or ``"passthrough"``: texts contain
            token ids separated by white space.
        vocab_size: vocabulary size of ``"passthrough"``.
        bos_token: overrides the tokenizer's own; a bare ``tokenizers.Tokenizer`` has none.
        eos_token: likewise.
        chat_template: likewise.

    Raises:
        MissingFileError, FormatError: the files are missing, or the library cannot read them.
        MissingExtraError: the ``tokenizers`` library is not installed.
        ArgumentError: an unsupported object, or the vocabulary lacks a given special token.
    """
    loaded = _load(tokenizer, vocab_size, needs_template=chat_template is None)
    if loaded is not tokenizer:
        _warn_of_truncation(loaded)
    if chat_template is not None:
        loaded = replace(loaded, chat_template=chat_template)
    for name, token in (("bos", bos_token), ("eos", eos_token)):
        if token is not None:
            token_id = None if loaded.backend is None else loaded.backend.token_to_id(token)
            if token_id is None:
                raise ArgumentError(f"{name}_token: {loaded.name} has no token {token!r}")
            fields: dict[str, Any] = {f"{name}_token": token, f"{name}_id": token_id}
            loaded = replace(loaded, **fields)
    return loaded


def shared_tokenizer(tokenizer: object) -> Tokenizer:
    """As :func:`load_tokenizer`, but this process reads unchanged files once.

    For builds and plans, which neither change the library's object nor return it: a change by one caller would be one for all.
    """
    if not isinstance(tokenizer, str | os.PathLike) or tokenizer == PASSTHROUGH:
        return load_tokenizer(tokenizer)
    name, file = _find_files(tokenizer)
    # Before they are read: a change in between is noticed by the next call.
    states = tuple(_state_of(path) for path in (file, *map(file.with_name, FILES[1:])))
    if max(max(state[:2]) for state in states) > time.time_ns() - _CLOCK_STEP:
        return load_tokenizer(tokenizer)
    shared = _load_once(name, file.absolute(), states)
    _warn_of_truncation(shared)
    return shared


@lru_cache(
    maxsize=2
)  # one of 129,280 tokens takes 70 MB; this holds no lock while it loads, so that processes may be forked
def _load_once(name: str, file: Path, states: tuple[tuple[int, int, str], ...]) -> Tokenizer:
    tokenizer = _read_files(name, file, needs_template=True)
    return _SharedTokenizer(**{part.name: getattr(tokenizer, part.name) for part in fields(tokenizer)})


_CLOCK_STEP = 2_000_000_000
"""A file may change without a new time in this number of nanoseconds after its last change (FAT: 2 s)."""


def _state_of(file: Path) -> tuple[int, int, str]:
    """Times of change of a file and of its entry, which programs cannot set, and its version; zeros without a file."""
    stat = Location.at(file).found()
    if stat is None:
        return 0, 0, ""
    with boundary(file, "look into"):
        return stat.modified, file.stat().st_ctime_ns, stat.version


def _load(tokenizer: Any, vocab_size: int | None, *, needs_template: bool) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str) and tokenizer == PASSTHROUGH:
        if vocab_size is None or vocab_size < 1:
            raise ArgumentError("the passthrough tokenizer needs vocab_size=, at least 1")
        return Tokenizer(PASSTHROUGH, vocab_size)
    if isinstance(tokenizer, str | os.PathLike):
        return _read_files(*_find_files(tokenizer), needs_template=needs_template)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # transformers
        bos, eos = tokenizer.bos_token, tokenizer.eos_token
        return _new_tokenizer(backend, str(tokenizer.name_or_path), bos, eos, getattr(tokenizer, "chat_template", None))
    inner: Any = getattr(tokenizer, "_tokenizer", None)
    if hasattr(inner, "token_to_id") and hasattr(tokenizer, "name_or_path"):  # Levanter's
        template = getattr(tokenizer, "chat_template", None)
        return _new_tokenizer(inner, str(tokenizer.name_or_path), tokenizer.bos_token, tokenizer.eos_token, template)
    if hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "token_to_id"):
        return _new_tokenizer(tokenizer, "", None, None, None)
    raise ArgumentError(
        "tokenizer: expected a folder, a tokenizer.json, a tokenizers.Tokenizer or a fast tokenizer of transformers, found "
        f"{type(tokenizer).__name__}"
    )


def _find_files(tokenizer: str | os.PathLike[str]) -> tuple[str, Path]:
    """The name to record, and the path of the ``tokenizer.json``."""
    parsed_path = local_path(tokenizer, "tokenizer")  # rejects strings that cannot be file names
    if is_file_url(tokenizer):
        tokenizer = parsed_path
    path = Path(tokenizer).expanduser()
    is_folder = Location.at(path).kind() == "folder"
    file = path / FILES[0] if is_folder else path
    if Location.at(file).kind() != "file":
        hint = "" if is_folder or path.is_absolute() else "; download tokenizers of the Hugging Face hub first"
        raise MissingFileError(f"expected a tokenizer.json, found none{hint}", path=file)
    return os.fspath(tokenizer), file


def _read_files(name: str, file: Path, *, needs_template: bool) -> Tokenizer:
    try:
        backend = _library().from_file(str(file))
    except MissingExtraError:
        raise
    except Exception as error:
        raise FormatError(f"the tokenizers library cannot read this file: {error}", path=file) from error
    config_file = file.with_name(FILES[1])
    config = read_json(config_file) if Location.at(config_file).kind() == "file" else {}
    if not isinstance(config, dict):
        raise FormatError(f"expected an object, found {show(config)}", path=config_file)
    template = config.get("chat_template")
    template_file = Location.at(file.with_name(FILES[2]))
    if not template and template_file.kind() == "file":
        template = template_file.read_utf8()
    if isinstance(template, list):  # named templates; a tokenizer without a default one has no template
        entries = [entry for entry in template if isinstance(entry, dict)]
        if all(isinstance(entry.get("name"), str) for entry in entries):
            template = {entry["name"]: entry.get("template") for entry in entries}.get("default")
    if needs_template and template is not None and not isinstance(template, str):
        raise FormatError(
            f"field 'chat_template': expected a string, found {show(template)}; pass chat_template=",
            path=config_file,
        )
    return _new_tokenizer(backend, name, _token(config, "bos_token"), _token(config, "eos_token"), template)


def _token(config: dict[str, object], name: str) -> str | None:
    value = config.get(name)
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _warn_of_truncation(tokenizer: Tokenizer) -> None:
    truncation = None if tokenizer.backend is None else tokenizer.backend.truncation
    if truncation is not None:
        warn(
            f"{tokenizer.name or 'the tokenizer'} truncates texts to {truncation.get('max_length')} tokens (truncation in its "
            "tokenizer.json), as Levanter would; call no_truncation() on the tokenizers.Tokenizer to disable it",
            code="tokenizer-truncates",
        )


def _serialized(backend: tokenizers.Tokenizer, name: str) -> str:
    try:
        return backend.to_str()
    except Exception as error:  # of the library: it has no type of its own
        raise ArgumentError(
            f"{name or 'the tokenizer'} cannot be written as a tokenizer.json, which its digest and other processes need: {error}. "
            "Use parts of the tokenizers library instead of ones written in Python"
        ) from error


def _dropout_of(backend: tokenizers.Tokenizer) -> float:
    return getattr(getattr(backend, "model", None), "dropout", None) or 0.0


def _encodes_special(backend: tokenizers.Tokenizer) -> bool:
    return bool(getattr(backend, "encode_special_tokens", False))


def _check_backend(backend: tokenizers.Tokenizer | None, name: str) -> None:
    """Raises ArgumentError for a state with which rows depend on their batch, on chance, or on the process that encodes them."""
    if backend is None:
        return
    what = name or "the tokenizer"
    if backend.padding is not None:
        raise ArgumentError(
            f"{what} pads, so rows would depend on their batch; call no_padding() on the tokenizers.Tokenizer"
        )
    if dropout := _dropout_of(backend):
        raise ArgumentError(
            f"{what} has a dropout of {dropout:g}, so each build would have other rows; set model.dropout to null in its "
            "tokenizer.json"
        )
    if _encodes_special(backend):
        raise ArgumentError(
            f"{what} has encode_special_tokens set, which its serialized form lacks: other processes would encode otherwise; "
            "set it to False"
        )


def _new_tokenizer(
    backend: tokenizers.Tokenizer, name: str, bos: str | None, eos: str | None, template: object
) -> Tokenizer:
    if backend.padding is not None:  # rows would depend on their batch
        backend = _library().from_str(_serialized(backend, name))
        backend.no_padding()
    _check_backend(backend, name)
    tokenizer = Tokenizer(
        name=name,
        vocab_size=int(backend.get_vocab_size(with_added_tokens=True)),
        bos_token=bos,
        eos_token=eos,
        bos_id=None if bos is None else backend.token_to_id(bos),
        eos_id=None if eos is None else backend.token_to_id(eos),
        chat_template=template if isinstance(template, str) else None,
        backend=backend,
    )
    # Catches any state of the library's object that makes rows depend on their batch.
    texts = ["a", "a text of some more words and 123 numbers"]
    if tokenizer.encode(texts) != [ids for text in texts for ids in tokenizer.encode([text])]:
        raise ArgumentError(
            f"{name or 'the tokenizer'} encodes a text differently in a batch than alone, so rows would depend on their batch; "
            "disable sampling in its tokenizer.json"
        )
    return tokenizer


# Chat templates: renders messages to text, with the assistant's parts marked.


GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Detects whether a template marks assistant text. A plain search, as in Levanter."""
_MARK = f"\ue000{secrets.randbits(128):039d}"
"""Random, so that no text of a conversation contains it. Digits, because filters change letters."""
_BEGIN, _END = f"{_MARK}+\ue001", f"{_MARK}-\ue001"
_MARKS = re.compile(f"({re.escape(_BEGIN)}|{re.escape(_END)})")
_PIECE_OF_MARK = re.compile("\ue000[0-9]{6}|[0-9]{6}[+-]\ue001")
"""Part of a mark that a filter or a slice of the template left. Texts contain private characters, but not so."""
_NONE_IF_ABSENT = ("reasoning_content", "tool_calls")


class TemplateProblemError(Exception):
    """A template cannot render a conversation: an error in the row or in the template."""


class Message(dict[str, Any]):
    """A message: ``m.content`` equals ``m['content']``. Absent ``reasoning_content`` and ``tool_calls`` read as None."""

    def __getattr__(self, name: str) -> object:
        if name in self:
            return self[name]
        if name in _NONE_IF_ABSENT:
            return None
        raise AttributeError(name)


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    try:
        import jinja2
        from jinja2 import nodes, sandbox
        from jinja2.ext import Extension
    except ImportError as error:
        raise MissingExtraError.of("a chat template", "tokens") from error

    # jinja2's types are not installed where mypy runs, so the base class is Any.
    class Generation(Extension):  # type: ignore[misc]  # jinja2 may be missing, so that mypy sees Any
        """``{% generation %}...{% endgeneration %}``: marks the text between them."""

        tags = {"generation"}  # noqa: RUF012 -- declared this way by jinja2

        def parse(self, parser: jinja2.parser.Parser) -> object:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.SandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, extensions=[Generation]
    )
    environment.globals.update(raise_exception=raise_exception, strftime_now=time.strftime)
    return environment


@functools.lru_cache(maxsize=256)
def _compiled(template: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise FormatError(f"chat template: line {error.lineno}: {error.message}") from error


def compile_template(template: str) -> None:
    """Checks that a template compiles.

    Raises:
        FormatError: a syntax error; the message contains the line number.
        MissingExtraError: jinja2 is not installed.
    """
    _environment()
    _compiled(template)


def render(
    template: str,
    messages: Sequence[Any],
    bos_token: str,
    eos_token: str,
    variables: Mapping[str, object],
    now: time.struct_time | None = None,
) -> list[tuple[str, bool]]:
    """Renders a conversation. Returns non-empty pieces of text in order, each with whether it is the assistant's.

    ``strftime_now`` formats ``now``; default: the time of the call.

    Raises:
        TemplateProblemError: the template raised an error, or uses an undefined variable.
    """
    import jinja2

    try:
        compiled = _compiled(template)
        typed_messages = [Message(m) for m in messages]
        time_variables = {} if now is None else {"strftime_now": lambda format: time.strftime(format, now)}
        text = compiled.render(
            messages=typed_messages,
            add_generation_prompt=False,
            bos_token=bos_token,
            eos_token=eos_token,
            **{**time_variables, **variables},
        )
    except FormatError as error:
        raise TemplateProblemError(error.detail) from error
    except jinja2.UndefinedError as error:
        why = re.sub(r"'[\w.]*\.Message object'", "a message", str(error))
        raise TemplateProblemError(f"the chat template uses an undefined value: {why}") from error
    except jinja2.TemplateError as error:
        raise TemplateProblemError(f"the chat template raised: {error}") from error
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise TemplateProblemError(f"the chat template failed on this conversation: {error}") from error
    pieces, depth = [], 0
    is_intact = not _PIECE_OF_MARK.search(_MARKS.sub("", text))
    for part in _MARKS.split(text):
        if part in (_BEGIN, _END):
            depth += 1 if part == _BEGIN else -1
            is_intact &= depth >= 0
        elif part:
            pieces.append((part, depth > 0))
    if not is_intact or depth:
        raise TemplateProblemError(
            "the chat template cuts or changes the text of a {% generation %} block, with a slice or a filter; do that inside of "
            "the block"
        )
    return pieces
