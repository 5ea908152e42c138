"""An extension of griffe, which reads docstrings for the API pages.

Roles (``:class:`~actshard.Store```) become links where the site documents the object, and code elsewhere. Members whose docstring
says that they are internal are left out. A Raises section that names another function's errors gets the base class as its type.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Object

UNNAMED = re.compile(r"(?m)^    (?=(?:As|Errors of|The error itself,) )")
EXAMPLE = re.compile(r"(?m)(?<=\n\n)>>> (?:.+\n?)+")
LITERAL = re.compile(r"(?m)(?:^ *\.\. code-block:: \w+|(?<=:):)\n\n(?=    )")
ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data|obj):`([^`]+)`")


class Docstrings(Extension):
    """Changes docstrings as they are loaded."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Replaces roles by links, marks examples as code, and completes Raises sections."""
        if obj.docstring:
            text = UNNAMED.sub("    ActshardError: ", obj.docstring.value)
            text = EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", LITERAL.sub("\n\n", text))
            obj.docstring.value = ROLE.sub(link, text)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Removes internal members, and the signature of a class that functions make: its arguments are not documented."""
        for name in [n for n, m in cls.members.items() if not m.is_alias and internal(m)]:
            cls.del_member(name)
        init = cls.members.get("__init__")
        if init is not None and not any(of.docstring and "Args:" in of.docstring.value for of in (cls, init)):
            cls.del_member("__init__")


def internal(member: Object) -> bool:
    """Returns whether a docstring says that its object is internal."""
    return bool(member.docstring) and bool(re.search(r"\bInternal\.", member.docstring.value))


def link(match: re.Match[str]) -> str:
    """A link that is plain code where no page documents its target."""
    target = match[1]
    shown = target.rpartition(".")[2] if target.startswith("~") else target
    return f'<autoref identifier="{target.lstrip("~")}" optional><code>{shown}</code></autoref>'
