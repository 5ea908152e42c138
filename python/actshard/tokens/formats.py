"""How rows are made of records: Levanter's formats as frozen dataclasses, and as the ``format:`` block of its YAML."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from actshard.errors import ArgumentError


@dataclass(frozen=True)
class TextFormat:
    """Plain text; stored as ``input_ids``.

    Args:
        text_key: the text's key.
        special_tokens: ``"always"``: bos and eos are put around every text, as Levanter does. ``"if_missing"``: only where they are
            not there already, as its documentation says.
    """

    type: ClassVar[str] = "text"
    text_key: str = "text"
    special_tokens: str = "always"

    def __post_init__(self) -> None:
        if self.special_tokens not in ("always", "if_missing"):
            raise ArgumentError(f"special_tokens must be 'always' or 'if_missing', not {self.special_tokens!r}")


@dataclass(frozen=True)
class ChatFormat:
    """Conversations; stored as ``input_ids`` and ``assistant_masks``.

    Args:
        messages_field: the key of the list of messages; ``messages_key`` is the documentation's name of the same.
        chat_template: a Jinja template; the tokenizer's own if not given.
        system_prompt: the key of a system prompt that is put in front; None: there is none.
        chat_template_kwargs: the key of variables for the template.
        pack: for reading: see :class:`~actshard.tokens.ChatDataset`.
        mask_user_turns: only what the assistant says counts: the template must say what that is (``{% generation %}``).
        encoding: ``"pieces"``: what lies between the marks of ``{% generation %}`` is encoded by itself, as Levanter does.
            ``"whole"``: the whole text is, and tokens are marked by their characters, as Hugging Face and older Levanter do.
        require_assistant: a conversation of which no token is marked is an error, also with ``mask_user_turns=False``, as in
            Levanter. False keeps such conversations, as its documentation says for templates without ``{% generation %}``.
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
        if self.messages_key is not None:
            if self.messages_field not in ("messages", self.messages_key):
                raise ArgumentError("messages_field and messages_key are the same; give one of them")
            object.__setattr__(self, "messages_field", self.messages_key)
        if self.encoding not in ("pieces", "whole"):
            raise ArgumentError(f"encoding must be 'pieces' or 'whole', not {self.encoding!r}")


@dataclass(frozen=True)
class PrebuiltFormat:
    """Token ids that are there already; stored under the same keys.

    Args:
        input_ids_key: the key of the ids.
        loss_weights_key: the key of the weights, if there are any.
        loss_weight_transform: for reading: see :class:`~actshard.tokens.PrebuiltLmDataset`.
    """

    type: ClassVar[str] = "prebuilt"
    input_ids_key: str = "input_ids"
    loss_weights_key: str | None = None
    loss_weight_transform: Callable[[Any], Any] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SupervisedFormat:
    """An input and the target that is learnt; stored as ``input_ids`` and ``loss_weights``.

    Args:
        input_key: the key of the input's text.
        target_key: that of the target's.
    """

    type: ClassVar[str] = "supervised"
    input_key: str = "input"
    target_key: str = "target"


Format = TextFormat | ChatFormat | PrebuiltFormat | SupervisedFormat
FORMATS: dict[str, type[Format]] = {cls.type: cls for cls in (TextFormat, ChatFormat, PrebuiltFormat, SupervisedFormat)}


def as_format(given: Format | Mapping[str, Any] | str | None) -> Format:
    """A format: itself, its name, or the ``format:`` block of Levanter's YAML.

    Raises:
        ArgumentError: there is no such format, or it has no such key.
    """
    if given is None:
        return TextFormat()
    if isinstance(given, TextFormat | ChatFormat | PrebuiltFormat | SupervisedFormat):
        return given
    options: dict[str, Any] = {"type": given} if isinstance(given, str) else dict(given)
    name = options.pop("type", TextFormat.type)
    if name not in FORMATS:
        raise ArgumentError(f"format: there is none called {name!r}{nearest(str(name), FORMATS)}: {', '.join(FORMATS)}")
    cls = FORMATS[name]
    return cls(**known(options, [f.name for f in fields(cls)], f"format {name}"))


def as_dict(format: Format) -> dict[str, Any]:
    """A format as plain values, without what is a function."""
    values = {name: value for name, value in asdict(format).items() if not callable(value) and name != "messages_key"}
    return {"type": format.type, **values}


def known(options: Mapping[str, Any], names: list[str], where: str) -> dict[str, Any]:
    """The options, if all of them are known; otherwise an error that suggests the nearest name."""
    for name in options:
        if name not in names:
            raise ArgumentError(f"{where}: unknown key '{name}'{nearest(str(name), names)}; known: {', '.join(names)}")
    return dict(options)


def nearest(name: str, names: Any) -> str:
    """``", did you mean 'x'?"``, if there is a name like it."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
