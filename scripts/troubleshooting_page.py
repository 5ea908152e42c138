"""Writes the generated part of docs/troubleshooting.md: every exception and every code, with what to do.

python scripts/troubleshooting_page.py

tests/test_docs.py fails while the page differs from the sources.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

from actshard.base import codes, errors
from actshard.formats import registry

PAGE = Path(__file__).parents[1] / "docs/troubleshooting.md"
BEGIN = "<!-- Written by scripts/troubleshooting_page.py. -->\n"
END = "<!-- End of the written part. -->\n"

REMEDIES = {
    "ActshardError": "Catch it to catch all exceptions of actshard.",
    "OutOfRangeError": "Compare the index with `len(store)` and `store.token_counts`.",
    "LayerError": "Use a name of `store.layers`. Names are not positions.",
    "NotStoredError": "See `store.table.column_names` and `actshard info PATH` for what the dataset contains.",
    "DtypeError": "Pass a supported `dtype=`, or the dtype that the message names.",
    "ArgumentError": "Correct the argument; the message has the values that are allowed.",
    "ArgumentTypeError": "Correct the type of the argument.",
    "ClosedError": "Open the store again, or use a second stream for a second loop.",
    "InterruptedReadError": "Call again if you did not cancel it.",
    "DiskFullError": "Make room, then make the same call with `resume=True`.",
    "ExistsError": "Choose another path, or continue the dataset with `resume=True`.",
    "LockedError": "Wait for the process that the message names, or end it.",
    "ChangedInputError": "Make the plan again.",
    "TasksFailedError": "Read `error.errors`, repair the cause, and run the plan again: only what is not done is run.",
    "LostWorkerError": "Run the plan again, with more memory or time if the engine ended the process.",
    "NoMemoryError": "Pass a smaller `memory=`, `batch_size` or selection, or use a machine with more memory.",
    "InternalError": "Report it, with the traceback and `actshard.build_info()`.",
    "MissingExtraError": "Install the extra that the message names.",
}
"""What to do about exceptions that no finding of `verify` describes."""


def render(page: str) -> str:
    """The page with its generated part written anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(_parts()) + "\n" + END + after


def _parts() -> Iterable[str]:
    yield "\n## Exceptions\n"
    yield "All are attributes of `actshard`. `error.kind` is stable; `error.path` and `error.offset` are the place.\n"
    yield "| exception | also a | kind | meaning | what to do |"
    yield "|---|---|---|---|---|"
    known = {code.name: code for code in _known()}
    for cls in _classes():
        also = ", ".join(
            f"`{base.__name__}`" for base in cls.__bases__ if base not in (errors.ActshardError, Exception)
        )
        meaning = _plain((inspect.getdoc(cls) or "").split("\n\n")[0])
        remedy = REMEDIES.get(cls.__name__) or _sentence(known[str(cls.code)].remedy)
        yield f"| `{cls.__name__}` | {also or '-'} | `{cls.kind}` | {meaning} | {remedy} |"
    yield "\n## Codes\n"
    yield (
        "Findings of `actshard verify`, warnings of `actshard.open`, and warnings of calls. The same codes are tables in\n"
        "[verify](verify.md#findings).\n"
    )
    for code in sorted(known.values(), key=lambda code: code.name):
        yield f"### `{code.name}`\n"
        yield f"*{code.severity}.* {code.meaning} {code.consequence}\n"
        yield f"**Do:** {_sentence(code.remedy)}\n"


def _known() -> Iterable[codes.Code]:
    yield from (code for group in codes.FINDINGS.values() for code in group)
    yield from codes.CALLS
    for format in registry.installed().values():
        if type(format).__module__.startswith("actshard."):
            yield from (*format.findings, *format.calls)


def _classes() -> Iterable[type[errors.ActshardError]]:
    found = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.ActshardError)]
    yield from sorted(found, key=lambda cls: (cls is not errors.ActshardError, cls.__name__))


def _plain(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
