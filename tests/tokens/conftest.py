"""Fixtures for tests of token caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "levanter"
LLAMA = "tokenizers/bpe_llama3style"
GPT2 = "tokenizers/bpe_gpt2style"

BUILDS: dict[str, tuple[list[str], str | None, dict[str, Any]]] = {
    "text_gpt2style_single": (["train.jsonl"], GPT2, {"type": "text"}),
    "text_llama3style_multishard": (
        ["part0.jsonl", "part1.jsonl.gz", "part2.parquet", "part3.jsonl", "part4.jsonl.zst"],
        LLAMA,
        {"type": "text", "text_key": "body"},
    ),
    "text_wordpiece_nospecial": (["train.jsonl"], "tokenizers/wordpiece_bertstyle", {"type": "text"}),
    "chat_llama3style": (["train.jsonl"], LLAMA, {"type": "chat"}),
    "chat_kwargs_override": (
        ["train.jsonl"],
        LLAMA,
        {"type": "chat", "chat_template": (GOLDEN / "chat_kwargs_override" / "chat_template.jinja").read_text()},
    ),
    "prebuilt_weights": (
        ["part0.jsonl", "part1.parquet"],
        None,
        {"type": "prebuilt", "loss_weights_key": "loss_weights"},
    ),
    "supervised_llama3style": (["train.jsonl"], LLAMA, {"type": "supervised"}),
}


@pytest.fixture
def in_golden(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the golden folder the working directory, because ledgers contain tokenizer paths as given."""
    monkeypatch.chdir(GOLDEN)
    return GOLDEN


def expected(variant: str, file: str = "expected.npz") -> dict[str, np.ndarray]:
    """Arrays read by Levanter."""
    with np.load(GOLDEN / variant / file) as found:
        return dict(found)


def crc32c(data: bytes) -> int:
    """CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def write_lines(path: Path, records: list[Any]) -> Path:
    """Writes records as JSON lines."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path
