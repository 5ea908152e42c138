"""Every verb takes a local path, rejects others in one line, and creates nothing in that case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
import actshard.tokens
from actshard.base._arguments import local_path
from conftest import GOLDEN, refuses
from shell import run_command


def create(path: Any) -> None:
    actshard.create(path, "zarr", layers=[0], d_model=2).abort()


VERBS: dict[str, Callable[[Any], object]] = {
    "open": actshard.open,
    "create": create,
    "verify": actshard.verify,
    "merge": actshard.merge,
    "merge parts": lambda path: actshard.merge("made", [path]),
    "convert to": lambda path: actshard.convert("source", path, "zarr"),
    "convert from": lambda path: actshard.convert(path, "made", "zarr"),
}
OF_URLS = ("open", "verify", "convert from", "convert to", "create")
"""Those that take URLs of datasets: tests/test_urls.py, tests/test_url_commands.py, tests/test_pushing.py."""
BAD = {
    "s3://bucket/x": "expected a local path here",
    "gs://bucket/cache/train": "expected a local path here",
    "hf://datasets/a/b": "expected a local path here",
    Path("s3://bucket/x"): "Pass a URL as a str",  # pathlib changed s3:// to s3:/
    "a\0b": "null",
    "a\ud800b": "lone surrogate",
    "x" * 5000: "too long",
    "a/" * 3000: "too long",
    "~nosuchuser/x": "user or home folder does not exist",
    "": "empty string",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with actshard.create("source", "zarr", layers=[0], d_model=2) as writer:
        writer.append(np.ones((2, 1, 3, 2), np.float32))
    return tmp_path


@pytest.mark.parametrize("verb", VERBS)
def test_a_path_that_cannot_be_local_is_refused_and_nothing_is_made(here: Path, verb: str) -> None:
    for path, words in BAD.items():
        if verb in OF_URLS and isinstance(path, str) and "://" in path:
            continue
        with refuses(actshard.ArgumentError, None, words):
            VERBS[verb](path)
    for path in (3, b"source", None, 1.5, object()):
        with refuses(actshard.ArgumentTypeError, None, "expected a path") as caught:
            VERBS[verb](path) if path is not None or verb != "merge parts" else VERBS[verb](2)
        assert isinstance(caught.value, TypeError)
    assert [p.name for p in here.iterdir()] == ["source"]


def test_secrets_of_urls_are_in_no_message() -> None:
    for url in (
        "https://host/x?X-Sig=SECRET",
        "ftp://user:SECRET@host/x",
        "https:/host/x?X-Sig=SECRET#SECRET",
        "s3://SECRET@",
    ):
        with pytest.raises(actshard.ArgumentError, match=r"expected a local path here|expected https://") as caught:
            local_path(url)
        assert "SECRET" not in str(caught.value)
        assert "host/x" in str(caught.value) or "@" in url


def test_file_urls_are_local_paths(here: Path) -> None:
    (here / "a b%").symlink_to(here / "source")
    for url in (f"file://{here}/source", f"FILE://localhost{here}/a%20b%25", f"file://{here}/a b%25"):
        assert len(actshard.open(url)) == 2
        assert actshard.verify(url).ok
    actshard.convert(f"file://{here}/source", f"file://{here}/made", "zarr")
    assert len(actshard.open(here / "made")) == 2
    assert local_path("file:///a%FFb") == Path("/a\udcffb")
    assert actshard.plan.verify(f"file://{here}/made", tasks=1).arguments["path"] == str(here / "made")


def test_file_urls_of_other_hosts_are_refused() -> None:
    for url in ("file://", "file://host/x", "file://tmp", "file://localhost"):
        with refuses(
            actshard.ArgumentError, None, "path: expected file:///PATH with three slashes, or a path, found file://"
        ):
            actshard.open(url)
    for url in ("file:///a%00b", "file:///a\0b"):
        with refuses(actshard.ArgumentError, None, "null byte"):
            actshard.open(url)


def test_a_url_with_one_slash_is_told_the_right_start() -> None:
    """``pathlib`` is only named where a Path was given."""
    with refuses(actshard.ArgumentError, None, r"path: expected s3://..., found s3:/b/x with one slash$"):
        actshard.open("s3:/b/x")
    with refuses(actshard.ArgumentError, None, "found s3:/b/x with one slash: pathlib.Path removes the other one"):
        actshard.open(Path("s3://b/x"))
    with refuses(actshard.ArgumentError, None, r"path: expected file:///..., found file:/b/x with one slash$"):
        actshard.open("file:/b/x")
    with refuses(
        actshard.ArgumentError, None, "expected file:///..., found file:/b/x with one slash: pathlib.Path removes the"
    ):
        actshard.open(Path("file:///b/x"))


def test_a_url_of_an_unknown_kind_lists_the_kinds_that_open() -> None:
    with refuses(
        actshard.ArgumentError, None, "found the URL foo://x. Copy the data to a local folder, or pass s3://, gs://"
    ):
        actshard.open("foo://x")


def test_names_that_only_look_like_urls_are_local(here: Path) -> None:
    assert local_path("./gs:/x") == here / "gs:/x"
    assert local_path("a:b") == here / "a:b"
    assert local_path("x/s3://y") == here / "x/s3:/y"
    assert local_path("c:/x") == here / "c:/x"
    assert local_path("\udcff") == here / "\udcff"  # a name that is not UTF-8
    assert local_path("~").is_absolute()


def test_the_command_line_refuses_remote_paths_in_one_line(here: Path) -> None:
    for words in (["merge", "s3://b/x"], ["info", "ftp://b/x"], ["convert", "source", "ftp://b/x", "--to", "zarr"]):
        done = run_command(*words, cwd=here)
        assert done.returncode not in (0, 2), words
        assert "expected a local path here" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert [p.name for p in here.iterdir()] == ["source"]


def test_the_files_of_a_token_cache_are_named_by_file_urls(here: Path) -> None:
    (here / "a b").mkdir()
    for name in ("x", "y"):
        (here / "a b" / f"{name}.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (here / "chat").write_text("{{ messages[0].content }}{% generation %}b{% endgeneration %}")
    tokenizer = f"file://{GOLDEN}/levanter/tokenizers/bpe_gpt2style"
    (here / "c.yaml").write_text(
        f"tokenizer: {tokenizer}\ncache_dir: file://{here}/caches\ncomponents:\n  web:\n    format:\n      type: text\n"
        f"      text_key: messages\n    source:\n      type: url\n      train_urls: ['file://{here}/t.jsonl']\n"
    )
    (here / "t.jsonl").write_text('{"messages": "a"}\n')
    named = ["--tokenizer", tokenizer, "--format", "chat", "--chat-template", f"file://{here}/chat", "-q"]
    for words in (
        ["tokenize", f"file://{here}/a%20b/*.jsonl", "--out", f"file://{here}/urls/train", *named],
        ["tokenize", "a b/*.jsonl", "--out", "paths/train", *named],
        ["tokenize", "--config", f"file://{here}/c.yaml", "-q"],
    ):
        done = run_command(*words, cwd=here)
        assert done.returncode == 0, done.stderr
    urls, paths, web = (here / name for name in ("urls/train", "paths/train", "caches/web/train"))
    assert [len(actshard.tokens.open_cache(path)) for path in (urls, paths, web)] == [2, 2, 1]
    assert (urls / "shard_ledger.json").read_bytes() == (paths / "shard_ledger.json").read_bytes()
    with refuses(actshard.ArgumentError, None, "sources: expected file:///PATH with three slashes"):
        actshard.tokens.build_cache("file://host/a.jsonl", here / "no", format="prebuilt")
