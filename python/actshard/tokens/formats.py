"""Row formats: how records become rows. Levanter's formats as frozen dataclasses, and as the ``format:`` block of its YAML."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from actshard.base._arguments import is_one_of
from actshard.base._json import show
from actshard.base.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import DataclassInstance

_Made = TypeVar("_Made")
_NAMES: dict[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "null",
    Mapping: "an object",
    collections.abc.Callable: "a function",
}


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has a type. A string is not a sequence, and a bool is not a number."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in args)
    if origin is tuple or origin is collections.abc.Sequence:
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and args[-1] is not ...:
            return len(value) == len(args) and all(map(_fits, value, args))
        return all(_fits(element, args[0]) for element in value)
    if origin is collections.abc.Mapping:
        return isinstance(value, Mapping) and all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if origin is collections.abc.Callable:
        return callable(value)
    if hint in (int, float):
        number = int | np.integer if hint is int else int | float | np.integer | np.floating
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, hint)


def _type_name(hint: object) -> str:
    """A type's name in error messages."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_name(member) for member in args))
    if origin in (tuple, collections.abc.Sequence):
        inner = {str: "strings", int: "integers", float: "numbers"}.get(args[0], "")
        return f"a list of {inner}" if inner else "a list"
    if origin is collections.abc.Mapping:
        inner = {int: "integers", float: "numbers"}.get(args[1], "")
        return f"an object of {inner}" if inner else "an object"
    return _NAMES.get(origin or hint, getattr(hint, "__name__", str(hint)))


@functools.cache
def _hints(cls: object) -> dict[str, object]:
    return get_type_hints(cls)


def check_types(config: DataclassInstance) -> None:
    """Checks a dataclass's fields against their type annotations.

    Raises:
        ArgumentTypeError: names the first field with a value of another type.
    """
    hints = _hints(config.__class__)
    for attribute in fields(config):
        value = getattr(config, attribute.name)
        if not _fits(value, hints[attribute.name]):
            raise ArgumentTypeError(
                f"{attribute.name}: expected {_type_name(hints[attribute.name])}, found {show(value)}"
            )


class FormatBase:
    """Base class of formats. Caches of other subclasses can be read but not built."""

    type: ClassVar[str] = ""

    @property
    def token_data_key(self) -> str:
        """The field that contains token ids."""
        return "input_ids"


@dataclass(frozen=True)
class TextFormat(FormatBase):
    """Plain text; stored as ``input_ids``.

    Args:
        text_key: the record's key of the text.
        special_tokens: ``"always"``: adds bos and eos to every text, as Levanter does. ``"if_missing"``: adds them only where
            the text lacks them, as Levanter's documentation states.
    """

    type: ClassVar[str] = "text"
    text_key: str = "text"
    special_tokens: str = "always"

    def __post_init__(self) -> None:
        check_types(self)
        if not is_one_of(self.special_tokens, ("always", "if_missing")):
            raise ArgumentError(f"special_tokens must be 'always' or 'if_missing', not {self.special_tokens!r}")


@dataclass(frozen=True)
class ChatFormat(FormatBase):
    """Conversations; stored as ``input_ids`` and ``assistant_masks``.

    Args:
        messages_field: the record's key of the list of messages. Levanter's documentation calls it ``messages_key``.
        chat_template: a Jinja template; default: the tokenizer's own.
        system_prompt: the record's key of a system prompt to prepend; None for no system prompt.
        chat_template_kwargs: the record's key of variables for the template.
        pack: for reading; see :class:`~actshard.tokens.ChatDataset`.
        mask_user_turns: only assistant tokens count in the loss. The template must mark them with ``{% generation %}``.
        encoding: ``"pieces"``: text inside and outside ``{% generation %}`` is encoded separately, as Levanter does.
            ``"whole"``: the whole text is encoded at once and tokens are marked by their characters, as Hugging Face and older
            Levanter do.
        require_assistant: a conversation without marked tokens is an error, also with ``mask_user_turns=False``, as in Levanter.
            False keeps such conversations, as Levanter's documentation states for templates without ``{% generation %}``.
    """

    type: ClassVar[str] = "chat"
    messages_field: str = "messages"
    chat_template: str | None = None
    system_prompt: str | None = None
    chat_template_kwargs: str | None = "chat_template_kwargs"
    pack: bool | int | str | None = None
    mask_user_turns: bool = True
    encoding: str = "pieces"
    require_assistant: bool = True
    messages_key: str | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_types(self)
        check_pack(self.pack)
        if self.messages_key is not None:
            if self.messages_field not in ("messages", self.messages_key):
                raise ArgumentError("messages_field and messages_key are the same option; give only one")
            object.__setattr__(self, "messages_field", self.messages_key)
        if not is_one_of(self.encoding, ("pieces", "whole")):
            raise ArgumentError(f"encoding must be 'pieces' or 'whole', not {self.encoding!r}")


@dataclass(frozen=True)
class PrebuiltFormat(FormatBase):
    """Existing token ids; stored under the same keys.

    Args:
        input_ids_key: the record's key of the ids.
        loss_weights_key: the record's key of the loss weights; None if there are none.
        loss_weight_transform: for reading; see :class:`~actshard.tokens.PrebuiltLmDataset`.
    """

    type: ClassVar[str] = "prebuilt"
    input_ids_key: str = "input_ids"
    loss_weights_key: str | None = None
    loss_weight_transform: Callable[[Any], Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def token_data_key(self) -> str:
        """The field that contains token ids."""
        return self.input_ids_key


@dataclass(frozen=True)
class SupervisedFormat(FormatBase):
    """An input and a target to predict; stored as ``input_ids`` and ``loss_weights``.

    Args:
        input_key: the record's key of the input text.
        target_key: the record's key of the target text.
    """

    type: ClassVar[str] = "supervised"
    input_key: str = "input"
    target_key: str = "target"

    def __post_init__(self) -> None:
        check_types(self)


RowFormat = TextFormat | ChatFormat | PrebuiltFormat | SupervisedFormat
FORMATS: dict[str, type[RowFormat]] = {
    cls.type: cls for cls in (TextFormat, ChatFormat, PrebuiltFormat, SupervisedFormat)
}


_LEVANTERS: dict[str, type[RowFormat]] = {
    "TextLmDatasetFormat": TextFormat,
    "ChatLmDatasetFormat": ChatFormat,
    "PrebuiltLmDatasetFormat": PrebuiltFormat,
    "SupervisedLmDatasetFormat": SupervisedFormat,
}


def check_pack(pack: bool | int | str | None) -> None:
    """Raises ArgumentError for an invalid ``pack`` value."""
    if (isinstance(pack, str) and pack != "pad") or (isinstance(pack, int) and pack < 0):
        raise ArgumentError(f"pack: expected true, false, 'pad' or a number of documents, found {show(pack)}")


def of_levanter(config: Any, kinds: Mapping[str, type[Any]]) -> Any:
    """Converts one of Levanter's dataclasses to the class here with the same fields; None for other objects.

    Raises:
        ArgumentError: a field that is unsupported here does not have its default value.
    """
    cls = kinds.get(type(config).__name__)
    if cls is None or not is_dataclass(config):
        return None
    names = {attribute.name for attribute in fields(cls)}
    values = {attribute.name: getattr(config, attribute.name) for attribute in fields(config)}
    for attribute in fields(config):
        if attribute.name not in names and values[attribute.name] != attribute.default:
            raise ArgumentError(
                f"{type(config).__name__}.{attribute.name} is not supported, found {show(values[attribute.name])}"
            )
    return cls(**{name: value for name, value in values.items() if name in names})


def as_format(row_format: FormatBase | Mapping[str, object] | str | None) -> RowFormat:
    """Returns a format from an instance, a name, the ``format:`` block of Levanter's YAML, or one of Levanter's format objects.

    Raises:
        ArgumentError: unknown format or key, or a value of the wrong type.
    """
    if row_format is None:
        return TextFormat()
    if isinstance(row_format, TextFormat | ChatFormat | PrebuiltFormat | SupervisedFormat):
        return row_format
    converted = of_levanter(row_format, _LEVANTERS)
    if converted is not None:
        return converted  # type: ignore[no-any-return]  # one of the classes in _LEVANTERS
    if not isinstance(row_format, str | Mapping):
        raise ArgumentTypeError(
            f"format: expected a format, its name or a dict of its options, found {type(row_format).__name__}; "
            f"supported: {', '.join(FORMATS)}"
        )
    options: dict[str, Any] = (
        {"type": row_format} if isinstance(row_format, str) else {str(k): v for k, v in row_format.items()}
    )
    name = options.pop("type", TextFormat.type)
    if not isinstance(name, str) or name not in FORMATS:
        raise ArgumentError(
            f"format: unknown format {name!r}{nearest(str(name), FORMATS)}; supported: {', '.join(FORMATS)}"
        )
    cls = FORMATS[name]
    where = f"format {name}"
    return within(where, lambda: cls(**known(options, [f.name for f in fields(cls)], where)))


def as_dict(format: RowFormat) -> dict[str, Any]:
    """A format as JSON-compatible values; functions are left out."""
    values = {name: value for name, value in asdict(format).items() if not callable(value) and name != "messages_key"}
    return {"type": format.type, **values}


def within(where: str, make: Callable[[], _Made]) -> _Made:
    """Calls ``make``. Prefixes its ArgumentErrors with the position in a configuration."""
    try:
        return make()
    except ArgumentError as error:
        if error.detail.startswith(where):
            raise
        raise type(error)(f"{where}.{error.detail}") from error


def known(options: Mapping[str, object], names: list[str], where: str) -> dict[str, Any]:
    """Returns the options if all are known. Otherwise raises an error that suggests the closest name."""
    for name in options:
        if name not in names:
            raise ArgumentError(f"{where}: unknown key '{name}'{nearest(str(name), names)}; known: {', '.join(names)}")
    return dict(options)


def nearest(name: str, names: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` if a similar name exists; otherwise empty."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
