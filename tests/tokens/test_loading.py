"""Guarantee: builds and plans read the files of a tokenizer once, notice every change, and share no object with their callers."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tokens.conftest import GPT2, LLAMA, write_lines

import actshard
from actshard import tokens
from actshard.plan.plan import Plan
from actshard.tokens import tokenizer as loading
from conftest import GOLDEN
from waiting import PATIENCE

LEVANTER = GOLDEN / "levanter"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer whose files a process may remember at once; none is loaded yet."""
    loading._load_once.cache_clear()
    monkeypatch.setattr(loading, "_CLOCK_STEP", 0)
    shutil.copytree(LEVANTER / LLAMA, tmp_path / "tok")
    return tmp_path / "tok"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tokenizers that were read from files."""
    names: list[str] = []
    read = loading._read_files

    def counted(name: str, *args: Any, **options: Any) -> Any:
        names.append(name)
        return read(name, *args, **options)

    monkeypatch.setattr(loading, "_read_files", counted)
    return names


def test_builds_and_plans_read_a_tokenizer_once(folder: Path, tmp_path: Path, reads: list[str]) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(50)])
    for number in (1, 2, 1):
        tokens.build_cache(lines, tmp_path / f"c{number}", folder, jobs=1)
    plan = actshard.plan.tokenize(lines, tmp_path / "p", folder, tasks=10)
    for task in range(len(plan)):
        Plan.from_dict(plan.as_dict(), tmp_path).run(task)
    assert reads == [str(folder)]


def test_every_caller_has_an_object_of_its_own(folder: Path, tmp_path: Path) -> None:
    """The library's object can be changed; that must not change the rows of builds, or the object of another caller."""
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "some words of a text"}])
    before = tokens.build_cache(lines, tmp_path / "c1", folder)[0]["input_ids"].tolist()
    one, two = tokens.load_tokenizer(folder), tokens.load_tokenizer(folder)
    one.backend.enable_truncation(2)
    one.backend.add_tokens(["some words"])
    assert two.backend.truncation is None
    assert two.digest() == loading.shared_tokenizer(folder).digest() != one.digest()
    assert tokens.build_cache(lines, tmp_path / "c2", folder)[0]["input_ids"].tolist() == before


def other_eos(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace("<|end_of_text|>", "<|begin_of_text|>"))


def same_size_and_time(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    stat = file.stat()
    file.write_text(file.read_text().replace('"bos_token"', '"xos_token"'))
    os.utime(file, ns=(stat.st_mtime_ns, stat.st_mtime_ns))


def other_vocabulary(folder: Path) -> None:
    shutil.copyfile(LEVANTER / GPT2 / "tokenizer.json", folder / "tokenizer.json")


def new_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text("{}")


@pytest.mark.parametrize("change", [other_eos, other_vocabulary, new_template, same_size_and_time])
def test_a_change_of_any_file_is_noticed(folder: Path, change: Callable[[Path], None]) -> None:
    before = loading.shared_tokenizer(folder).digest()
    change(folder)
    assert loading.shared_tokenizer(folder).digest() == tokens.load_tokenizer(folder).digest() != before


def test_files_that_may_change_without_a_new_time_are_read_again(
    folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_CLOCK_STEP", 3600 * 10**9)
    assert loading.shared_tokenizer(folder) is not loading.shared_tokenizer(folder)
    assert len(reads) == 2


def test_names_are_those_of_the_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger contains the name as given; a relative one belongs to its working directory."""
    monkeypatch.chdir(folder.parent)
    assert loading.shared_tokenizer("tok").name == "tok"
    assert loading.shared_tokenizer(folder).name == str(folder)
    shutil.copytree(LEVANTER / GPT2, folder.parent / "elsewhere/tok")
    before = loading.shared_tokenizer("tok").digest()
    monkeypatch.chdir("elsewhere")
    assert loading.shared_tokenizer("tok").digest() != before
    monkeypatch.chdir(folder)
    with pytest.raises(actshard.MissingFileError):
        loading.shared_tokenizer("tok")


@pytest.mark.parametrize("load", [tokens.load_tokenizer, loading.shared_tokenizer])
def test_every_use_of_a_tokenizer_that_truncates_is_a_warning(folder: Path, load: Callable[[Path], Any]) -> None:
    backend = tokens.load_tokenizer(folder).backend
    backend.enable_truncation(7)
    backend.save(str(folder / "tokenizer.json"))
    for _ in range(2):
        with pytest.warns(actshard.ActshardWarning, match="truncates texts to 7 tokens"):
            load(folder)


def test_a_process_that_is_forked_during_a_load_can_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, parent = threading.Event(), threading.Event(), os.getpid()
    read = loading._read_files

    def held(*args: Any, **options: Any) -> Any:
        if os.getpid() == parent:
            begun.set()
            assert may_end.wait(PATIENCE)
        return read(*args, **options)

    monkeypatch.setattr(loading, "_read_files", held)
    thread = threading.Thread(target=loading.shared_tokenizer, args=(folder,))
    thread.start()
    assert begun.wait(PATIENCE)
    child = multiprocessing.get_context("fork").Process(target=loading.shared_tokenizer, args=(folder,))
    child.start()
    child.join(PATIENCE)
    code = child.exitcode
    child.kill()
    may_end.set()
    thread.join()
    assert code == 0, "it waits for a lock that no thread of it holds"
