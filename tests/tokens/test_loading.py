"""Guarantee: a tokenizer is read once while its files have the same contents, and never returned after a change."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tokens.conftest import GPT2, LLAMA

import actshard
from actshard import tokens
from actshard.tokens import tokenizer as loading
from conftest import GOLDEN

LEVANTER = GOLDEN / "levanter"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer whose files changed an hour ago; no tokenizer is loaded yet."""
    monkeypatch.setattr(loading, "_loaded", {})
    shutil.copytree(LEVANTER / LLAMA, tmp_path / "tok")
    age(tmp_path / "tok")
    return tmp_path / "tok"


def age(folder: Path, seconds: int = 3600) -> None:
    for file in folder.iterdir():
        changed = time.time_ns() - seconds * 10**9
        os.utime(file, ns=(changed, changed))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tokenizers that were read from files."""
    made: list[Any] = []
    read = loading._read

    def counted(*args: Any, **options: Any) -> Any:
        made.append(read(*args, **options))
        return made[-1]

    monkeypatch.setattr(loading, "_read", counted)
    return made


def test_a_tokenizer_is_read_once(folder: Path, reads: list[Any]) -> None:
    first = tokens.load_tokenizer(folder)
    assert tokens.load_tokenizer(folder) is first
    assert tokens.load_tokenizer(str(folder)) is first
    (folder / "tokenizer.json").touch()  # with the same contents
    assert tokens.load_tokenizer(folder) is first
    age(folder, 60)
    shutil.copyfile(folder / "tokenizer.json", folder / "copy")
    (folder / "copy").replace(folder / "tokenizer.json")  # another file number
    assert tokens.load_tokenizer(folder) is first
    assert len(reads) == 1


def test_unchanged_files_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_CLOCK_STEP", 0)
    first = tokens.load_tokenizer(folder)
    monkeypatch.setattr(loading.Location, "read", lambda *_: pytest.fail("read again"))
    assert tokens.load_tokenizer(folder) is first


def other_eos(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace("<|end_of_text|>", "<|begin_of_text|>"))


def other_vocabulary(folder: Path) -> None:
    shutil.copyfile(LEVANTER / GPT2 / "tokenizer.json", folder / "tokenizer.json")


def new_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    file = folder / "tokenizer_config.json"
    file.write_text("{}")


@pytest.mark.parametrize("change", [other_eos, other_vocabulary, new_template])
def test_a_change_of_any_file_is_noticed(folder: Path, change: Callable[[Path], None]) -> None:
    before = tokens.load_tokenizer(folder)
    change(folder)
    after = tokens.load_tokenizer(folder)
    assert after.digest() != before.digest()
    loading._loaded.clear()
    assert tokens.load_tokenizer(folder).digest() == after.digest()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_change_that_keeps_size_and_time_is_noticed(
    is_new: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_new:  # the clock of the file system may not have advanced between two changes
        age(folder, 0)
        monkeypatch.setattr(loading, "_version_of", lambda file: (str(file), time.time_ns()))
    else:
        monkeypatch.setattr(loading, "_CLOCK_STEP", 0)
    file = folder / "tokenizer_config.json"
    text, stat = file.read_text(), file.stat()
    before = tokens.load_tokenizer(folder)
    file.write_text(text.replace('"bos_token"', '"xos_token"'))
    os.utime(file, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    assert before.bos_id is not None
    assert tokens.load_tokenizer(folder).bos_id is None


def pad(backend: Any) -> None:
    backend.enable_padding(pad_id=0, pad_token="x")


def truncate(backend: Any) -> None:
    backend.enable_truncation(2)


def add(backend: Any) -> None:
    backend.add_tokens(["another one"])


def normalize(backend: Any) -> None:
    from tokenizers.normalizers import Lowercase

    backend.normalizer = Lowercase()


@pytest.mark.parametrize("change", [pad, truncate, add, normalize])
def test_a_tokenizer_that_a_program_changed_is_not_returned(folder: Path, change: Callable[[Any], None]) -> None:
    """The library's object can be changed, and would change the rows of later builds."""
    before = tokens.load_tokenizer(folder)
    ids = before.encode(["A text of Some words another one"])
    change(before.backend)
    assert tokens.load_tokenizer(folder).encode(["A text of Some words another one"]) == ids


def test_names_are_those_of_the_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger contains the name as given; a relative one belongs to its working directory."""
    monkeypatch.chdir(folder.parent)
    assert tokens.load_tokenizer("tok").name == "tok"
    assert tokens.load_tokenizer(folder).name == str(folder)
    (folder.parent / "elsewhere").mkdir()
    shutil.copytree(LEVANTER / GPT2, folder.parent / "elsewhere/tok")
    before = tokens.load_tokenizer("tok").digest()
    monkeypatch.chdir("elsewhere")
    assert tokens.load_tokenizer("tok").digest() != before
    monkeypatch.chdir(folder)
    with pytest.raises(actshard.MissingFileError):
        tokens.load_tokenizer("tok")


def test_two_tokenizers_are_kept(folder: Path, reads: list[Any]) -> None:
    for place in (folder, LEVANTER / GPT2, folder, LEVANTER / GPT2):
        tokens.load_tokenizer(place)
    assert len(reads) == 2
    tokens.load_tokenizer(LEVANTER / LLAMA)  # the third: the one that was used least recently goes
    tokens.load_tokenizer(LEVANTER / GPT2)
    assert len(reads) == 3
    tokens.load_tokenizer(folder)
    assert len(reads) == 4


def test_every_use_of_a_tokenizer_that_truncates_is_a_warning(folder: Path) -> None:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(7)
    backend.save(str(folder / "tokenizer.json"))
    for _ in range(2):
        with pytest.warns(actshard.ActshardWarning, match="truncates texts to 7 tokens"):
            tokens.load_tokenizer(folder)
