"""One term for one thing: docs, docstrings, comments and messages use the words of the glossary, and no confusing ones."""

from __future__ import annotations

import re

import pytest

from prose import DOCS, HOME, Prose, everywhere, markdown, python, rust

INSTEAD = {
    # Terms of the glossary, and the names that are not used for them.
    r"data sets?": "dataset",
    r"data types?": "dtype",
    r"mini-batch(es)?": "batch",
    r"memory mapped": "memory-mapped",
    r"check sums?": "checksum",
    r"filesystems?": "file system",
    r"(HuggingFace|Huggingface)": "Hugging Face",
    r"(NumPy|Numpy)": "numpy",
    r"(PyArrow|Pyarrow)": "pyarrow",
    r"(PyTorch tensors?)": "torch tensor",
    r"(NANs?|Nans?)": "NaN",
    r"(is|are) no numbers?": "NaN",
    # Things do not speak, know or want.
    r"(tells?|told)": "reports, returns, describes, contains",
    r"says?": "reports, contains, is",
    r"(?<!you )wants?": "requires, needs",
    # Words of other languages' grammar.
    r"(whoever|nobody|somebody)": "the subject: the reader, a process",
    r"by lot": "at random",
    r"of (ours|theirs)": "the owner's name",
    r"beside": "next to, relative to, compared with",
    r"let go of": "freed, released",
    r"(?<!there )(is|are) none": "there is no",
    r"what \w+ \w+ (is|are)": "the noun",
}
"""Regular expressions of words that are not used, and what is used instead."""
_ALL = re.compile("|".join(rf"(?P<w{i}>\b{word}\b)" for i, word in enumerate(INSTEAD)))


def found(prose: Prose) -> list[str]:
    """The words of a text that are not used, with what is used instead."""
    made = []
    for match in _ALL.finditer(prose.text):
        word = list(INSTEAD)[int((match.lastgroup or "w0")[1:])]
        made.append(
            f"{prose.path.relative_to(HOME)}:{prose.line}: {match[0]!r}, use {INSTEAD[word]}: {prose.text.strip()}"
        )
    return made


@pytest.mark.slow
def test_words_that_readers_stumble_over_are_not_used() -> None:
    assert not [line for prose in everywhere() for line in found(prose)]


@pytest.mark.parametrize("name", ["README.md", "docs/concepts.md"])
def test_prose_is_read_without_code(name: str) -> None:
    lines = list(markdown(HOME / name))
    assert len(lines) > 20
    assert not any("import actshard" in each.text or "](" in each.text for each in lines)


def test_prose_of_modules_has_docstrings_comments_and_messages() -> None:
    kinds = {each.kind for each in python(HOME / "python/actshard/reading/store.py")}
    assert kinds == {"docstring", "comment", "message"}
    kinds = {each.kind for each in rust(HOME / "rust/core/src/scan/look.rs")}
    assert {"docstring", "comment"} <= kinds


def test_every_term_of_the_glossary_is_used() -> None:
    """A term that no other page uses is not a term."""
    rows = [line for line in (HOME / "docs/concepts.md").read_text().splitlines() if line.startswith("| **")]
    terms = [term for row in rows for term in re.findall(r"\*\*([^*]+)\*\*", row.split("|")[1])]
    assert len(terms) > 20
    others = "\n".join((HOME / name).read_text() for name in DOCS if name != "docs/concepts.md").lower()
    assert [term for term in terms if not re.search(rf"\b{re.escape(term.lower())}", others)] == []


def test_pages_use_terms_of_the_glossary_for_public_names() -> None:
    """Attributes that the glossary defines are written as code or as the term, never in another spelling."""
    other = {r"\bd model\b": "d_model", r"\bworld size\b": "world_size", r"\bsafe ?tensor\b": "safetensors"}
    wrong = [
        f"{each}: use {use}"
        for name in DOCS
        for each in markdown(HOME / name)
        for word, use in other.items()
        if re.search(word, each.text)
    ]
    assert not wrong
