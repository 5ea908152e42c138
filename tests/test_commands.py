"""The command line: panels, examples, completion, and exit statuses of every command."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import actshard
import actshard.tokens
from actshard.base import _arguments
from actshard.cli import app
from actshard.cli._app import EXAMPLES, PANELS
from conftest import GOLDEN
from shell import run_command
from waiting import PATIENCE

FINE = GOLDEN / "lmprobe/fullseq_logits_router"
PLAIN = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


def leaves(group: Any = None, before: str = "") -> dict[str, Any]:
    """All commands that have no subcommands, by their words."""
    group = group or typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        words = f"{before} {name}".strip()
        found |= leaves(command, words) if getattr(command, "commands", None) else {words: command}
    return found


def test_every_command_has_one_panel_and_examples() -> None:
    names = [name for panel in PANELS.values() for name in panel]
    group: Any = typer.main.get_command(app)
    assert sorted(names) == sorted(group.commands)
    assert set(leaves()) | {"plan", "cache"} == set(EXAMPLES)
    shown = CliRunner().invoke(app, ["--help"], env=PLAIN).output
    places = [shown.index(f" {panel} ") for panel in PANELS]
    assert places == sorted(places)


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_shows_the_examples(name: str) -> None:
    done = CliRunner().invoke(app, [*name.split(), "--help"], env=PLAIN)
    assert done.exit_code == 0
    for example in EXAMPLES[name]:
        assert " ".join(example.split()) in " ".join(done.output.split())


EACH = [(name, example) for name, examples in EXAMPLES.items() for example in examples]


@pytest.mark.parametrize(("name", "example"), EACH, ids=[example for _, example in EACH])
def test_every_example_parses(name: str, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of each example are accepted by the command's own parser, and reach that command."""
    words = shlex.split(example, comments=True)
    for redirect in (">", ">>"):
        words = words[: words.index(redirect)] if redirect in words else words
    assert words[0] == "actshard"
    group: Any = typer.main.get_command(app)
    reached: list[str] = []
    for leaf, command in leaves(group).items():
        monkeypatch.setattr(command, "callback", lambda leaf=leaf, **_: reached.append(leaf))
    group.main(words[1:], standalone_mode=False)
    assert len(reached) == 1
    if name in leaves():
        assert reached == [name]
    else:  # the example of a group
        assert " ".join(words[1:]).startswith(reached[0])


READ_ONLY = [
    example
    for name in ("info", "head", "top", "stats", "verify", "convert")
    for example in EXAMPLES[name]
    if "://" not in example and "--guess" not in example and "TARGET" not in example
]


@pytest.mark.parametrize("example", READ_ONLY)
def test_examples_that_only_read_run(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN / "levanter")  # the ledger names the tokenizer relative to it
    data = actshard.open(FINE)
    layer = data.layers[-1]
    places = {"PATH": str(FINE), "CACHE": "chat_llama3style"}
    words = [places.get(word, word) for word in shlex.split(example)[1:]]
    words = [str(layer) if before == "--layer" else word for before, word in zip(["", *words], words, strict=False)]
    words = ["0" if before == "--example" else word for before, word in zip(["", *words], words, strict=False)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dataset without findings, one with a warning, one with an error, and a path that does not exist."""
    root = tmp_path_factory.mktemp("states")
    for name in ("fine", "warning", "error"):
        shutil.copytree(FINE, root / name)
    (root / "warning/tensors/stray.safetensors").write_bytes(b"")
    for file in (root / "error/tensors").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8])
    return {name: root / name for name in ("fine", "warning", "error", "missing")}


# A command that does not check exits with 0 if it did its work, also on a dataset with a warning.
STATUSES = {
    "verify {}": (0, 1, 2, 3),
    "info {}": (0, 0, 3, 3),
    "head {}": (0, 0, 3, 3),
    "top {}": (0, 0, 3, 3),
    "stats {} -q": (0, 0, 3, 3),
    "convert {} --dry-run": (0, 0, 3, 3),
    "stage {} {out} -q": (0, 0, None, 3),
    "convert {} {out} --to zarr -q": (0, 0, 3, 3),
    "plan verify {} --tasks 1 -o {out}.json --work {out} --no-measure": (0, 0, 0, 3),
    "push {} s3://bucket/run -q": (None, None, 3, 3),
}


@pytest.mark.parametrize("line", STATUSES)
def test_exit_statuses(line: str, states: dict[str, Path], tmp_path: Path) -> None:
    for (state, path), expected in zip(states.items(), STATUSES[line], strict=True):
        if expected is None:
            continue
        words = [word.format(path, out=tmp_path / state) for word in line.split()]
        done = run_command(*words)
        assert done.returncode == expected, (state, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        *("--help", "stats --help", "completion bash", "convert", "info {}", "head {}", "top {}", "stats {}"),
        *("stats {} --json", "verify {}", "convert {} --dry-run", "stats {}/missing"),
    ],
)
def test_a_closed_pipe_exits_with_141(line: str) -> None:
    """1 means warnings. The reading end is closed before the command prints, as that of ``| head`` may be."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-W", "ignore", "-m", "actshard.cli", *line.format(FINE).split()]
        done = subprocess.run(command, stdout=writing, stderr=writing, check=False, timeout=PATIENCE)
    finally:
        os.close(writing)
    assert done.returncode == 141


@pytest.mark.parametrize("command", [*leaves(), "plan", "cache", "none-of-these"])
def test_usage_errors_exit_with_3(command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--no-such-option"])
    assert done.exit_code == 3, done.output


@pytest.mark.parametrize("option", [("--dry-run",), ("--component", "web")])
def test_options_of_a_configuration_do_not_build_without_one(option: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    tokenizer = GOLDEN / "levanter/tokenizers/bpe_llama3style"
    done = run_command("tokenize", tmp_path / "a.jsonl", "--tokenizer", tokenizer, "--out", tmp_path / "c", *option)
    assert (done.returncode, (tmp_path / "c").exists()) == (3, False)
    assert f"{option[0]}: expected --config FILE with it" in done.stderr


def test_a_token_cache_does_not_hide_a_dataset(tmp_path: Path) -> None:
    """Its path would open as the cache. Where others wrote one, the format's name opens the dataset."""
    path = tmp_path / "d"
    with actshard.create(path, "zarr", layers=[0], d_model=4) as writer:
        writer.append(np.zeros((2, 1, 3, 4), np.float32))
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    for words in (("tokenize", "--out"), ("plan", "tokenize", "--cache")):
        done = run_command(*words[:-1], tmp_path / "a.jsonl", "--format", "prebuilt", words[-1], path)
        assert done.returncode == 3
        assert "is a dataset (zarr); choose another folder for the token cache" in done.stderr
    for words in (("tokenize", "--out=~/d"), ("plan", "tokenize", "--cache=~/d"), ("tokenize", f"--out=file://{path}")):
        done = run_command(*words[:-1], tmp_path / "a.jsonl", "--format", "prebuilt", words[-1], HOME=str(tmp_path))
        assert "is a dataset (zarr); choose another folder for the token cache" in done.stderr
    assert not list(path.glob("*ledger*"))
    actshard.tokens.build_cache(tmp_path / "a.jsonl", tmp_path / "cache", format="prebuilt")
    shutil.copytree(tmp_path / "cache", path, dirs_exist_ok=True)
    assert len(actshard.open(path, "zarr")) == 2
    with pytest.raises(actshard.ArgumentError, match="found a token cache"):
        actshard.open(path, "lmprobe")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, tmp_path: Path) -> None:
    done = run_command("completion", shell)
    assert done.returncode == 0
    assert "_ACTSHARD_COMPLETE" in done.stdout
    if shutil.which(shell):
        (tmp_path / "script").write_text(done.stdout)
        assert subprocess.run([shell, "-n", str(tmp_path / "script")], check=False).returncode == 0
    assert run_command("completion", "csh").returncode == 3


@pytest.mark.slow
def test_completion_completes_commands_and_options() -> None:
    def complete(line: str) -> list[str]:
        words = line.split(" ")
        asked = {"_ACTSHARD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        script = Path(sys.executable).with_name("actshard")
        found = subprocess.run([script], capture_output=True, text=True, check=True, env={**os.environ, **asked})
        return found.stdout.split()

    assert complete("actshard sta") == ["stats", "status", "stage"]
    assert complete("actshard plan st") == ["stats", "stage"]
    assert "--layer" in complete("actshard stats --la")


def test_one_of_a_kind_is_singular(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", "npy", layers=[0], d_model=4) as writer:
        writer.append(np.ones((1, 1, 1, 4), np.float32))
    said = " ".join(run_command("verify", tmp_path / "d", "--deep").stdout.split())
    assert re.search(r"1 files|1 examples|1 rows", said) is None
    assert re.search(r"in .*1 example\b.*, 1 row\b", said)
    assert [_arguments.counted(n, "addresses") for n in (0, 1, 2)] == ["0 addresses", "1 address", "2 addresses"]
    store = actshard.open(tmp_path / "d")
    assert "1 batch of (4, 4)" in repr(store.stream(0, 4))


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """JSON has neither NaN nor Infinity (RFC 8259), which Python writes by default."""
    rows = np.ones((3, 1, 2, 4), np.float32)
    rows[0], rows[1, :, :, 0] = np.nan, np.inf
    with actshard.create(tmp_path / "run", "npy", layers=[0], d_model=4) as writer:
        writer.append(rows)

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    for words in (["head"], ["top"], ["stats"], ["verify", "--deep"], ["info"]):
        done = CliRunner().invoke(app, [*words, str(tmp_path / "run"), "--json"])
        made = json.loads(done.stdout, parse_constant=refuse)
        if words == ["head"]:
            assert [row["norms"]["0"] for row in made] == [None, None, 2.0]
