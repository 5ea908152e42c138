"""The blocks of README.md and of the pages of docs run as written."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer

import doc_scenes as scenes
from actshard.cli import app
from doc_blocks import ROOT, blocks, checked_blocks, pages
from hub import hub
from served import served


class Page(NamedTuple):
    """A page: its scene, how many results it states at least, and texts of blocks that are others here."""

    scene: scenes.Scene = scenes.nothing
    least: int = 0
    heavy: int = 0
    """How many results, with the blocks that need heavy libraries."""
    instead: tuple[tuple[str, str], ...] = ()


FORMATS = {
    "angelslim": Page(scenes.deepspec_cache),
    "automodel": Page(scenes.with_cache("draft/automodel_eagle3_dense", "eagle3_cache")),
    "deepspec": Page(scenes.deepspec),
    "eagle": Page(scenes.deepspec_cache),
    "hallulens": Page(scenes.hallulens),
    "hf_arrow": Page(scenes.hf_arrow),
    "jkminder": Page(scenes.pairs),
    "latents": Page(scenes.sparse_latents, 11),
    "layout": Page(scenes.described),
    "modelopt": Page(scenes.deepspec_cache),
    "plain": Page(scenes.plain),
    "planes": Page(),
    "specforge": Page(scenes.with_cache("draft/specforge_dflash_gz", "hidden_states"), 1),
    "speculators": Page(scenes.with_cache("draft/speculators_bf16", "training_data"), 1),
    "torch": Page(scenes.torch_file),
    "zarr": Page(scenes.batches),
}
PAGES = {
    "README.md": Page(least=2),
    "docs/arrays.md": Page(scenes.common, 15),
    "docs/capture.md": Page(scenes.requests, 6),
    "docs/concepts.md": Page(scenes.common, 4),
    "docs/drafts.md": Page(scenes.drafts, 0, 8),
    "docs/frameworks.md": Page(scenes.common, 0, 8),
    "docs/joining.md": Page(scenes.joining, 10),
    "docs/looking.md": Page(scenes.common, 1),
    "docs/plans.md": Page(scenes.plans, 1),
    "docs/reading.md": Page(scenes.reading, 18),
    "docs/replace/index.md": Page(scenes.any_format),
    "docs/replace/levanter.md": Page(scenes.golden("levanter/text_gpt2style_single/cache/train", "cache/web/train")),
    "docs/replace/lmprobe.md": Page(scenes.golden("lmprobe/pooled_f32", "tense")),
    "docs/replace/pickle.md": Page(scenes.pickled),
    "docs/replace/saev.md": Page(scenes.saev),
    "docs/replace/zarr.md": Page(scenes.golden("zarr/single_consolidated/activations.zarr", "activations.zarr")),
    "docs/sequences.md": Page(scenes.sequences, 8),
    "docs/start.md": Page(least=4),
    "docs/streams.md": Page(scenes.streams, instead=(('"cuda"', '"cpu"'),)),
    "docs/tokens.md": Page(scenes.documents, instead=(("4096", "16"),)),
    "docs/verify.md": Page(scenes.verifying),
    "docs/writing.md": Page(scenes.batches),
    **{f"docs/formats/{name}.md": page for name, page in FORMATS.items()},
}
HEAVY = {
    **{name: page for name, page in PAGES.items() if any(block.needs for block in blocks(name))},
    "docs/capture.md": Page(scenes.prompts, 6, 13, (("openai-community/gpt2", "tiny"),)),
    "docs/start.md": Page(scenes.tiny_model, 4, 5, (("openai-community/gpt2", "tiny"),)),
}
"""Pages with blocks that need heavy libraries."""
_LONG = ("docs/start.md",)
"""Pages whose blocks take seconds of processor time."""
RENAMED = pytest.mark.filterwarnings("ignore:.*not the hash of its metadata:actshard.ActshardWarning")
"""Dumps have the names that a page gives them, and not those of their hashes."""
SHELL = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


@RENAMED
@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.slow) if p in _LONG else p for p in PAGES])
def test_the_blocks_of_a_page_run_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if all(block.needs or block.reason for block in blocks(page)):
        pytest.skip("all blocks need heavy libraries")
    monkeypatch.chdir(tmp_path)
    scene, least, _, instead = PAGES[page]
    assert checked_blocks(page, scene(tmp_path), instead=instead) >= least


@pytest.mark.peers
@RENAMED
@pytest.mark.parametrize("page", HEAVY)
def test_all_blocks_of_a_page_run_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scene, _, least, instead = HEAVY[page]
    assert checked_blocks(page, scene(tmp_path), heavy=True, instead=instead) >= least


@RENAMED
def test_the_blocks_of_the_page_of_remote_data_run_against_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    scenes.saev(tmp_path)
    dump = tmp_path / "saev/shards/ab12cd34"
    (tmp_path / "served/bucket/run/saev/shards").mkdir(parents=True)
    shutil.copytree(dump, tmp_path / "served/bucket/run/saev/shards/ab12")
    shutil.copytree(dump, tmp_path / "local/run")
    scenes.golden("levanter/text_gpt2style_single/cache/train", "served/bucket/tokenized/fineweb")(tmp_path)
    (tmp_path / "scratch").mkdir()
    with served(tmp_path / "served") as server, hub() as lab:
        lab.add("lab/acts", dump)
        environment: dict[str, Any] = {
            "HF_ENDPOINT": lab.url, "HF_HOME": str(tmp_path / "hf"), "ACTSHARD_CACHE": str(tmp_path / "cache"),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "AWS_REGION": "x",
            "AWS_ACCESS_KEY_ID": "AKIAPUBLIC", "AWS_SECRET_ACCESS_KEY": "hushhush",
        }  # fmt: skip
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        given = {"states": np.zeros((2, 1, 3, 4096), np.float32)}
        checked_blocks("docs/remote.md", given, instead=[('"/scratch"', '"scratch"')])


def test_every_page_with_blocks_is_run_and_every_omission_has_a_reason() -> None:
    assert set(pages()) == {*PAGES, "docs/remote.md"}
    reasons = [(page, block.reason) for page in pages() for block in blocks(page) if block.reason]
    assert len(reasons) <= 6, reasons


def test_the_readme_is_short_and_begins_with_two_commands_for_a_fresh_machine() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    assert text.index("make demo") < text.index("make test") < text.index("```python")


def commands(block: str) -> Iterator[list[str]]:
    """Calls of ``actshard`` in a block of shell, as lists of words."""
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        for word in [word for word in words if word.startswith("actshard ")]:  # sh -c 'actshard ...', --wrap '...'
            yield shlex.split(word.partition(" && ")[0])
        while "actshard" in words:
            words = words[words.index("actshard") :]
            end = next((i for i, word in enumerate(words) if word in ("&&", "|", ";")), len(words))
            yield words[:end]
            words = words[end:]


@pytest.mark.parametrize("page", [page for page in SHELL if "```sh" in (ROOT / page).read_text(encoding="utf-8")])
def test_commands_and_options_of_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert set(re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)) <= targets
        for words in commands(block):
            command: Any = typer.main.get_command(app)
            rest = words[1:]
            while hasattr(command, "commands") and rest:
                assert rest[0] in command.commands or rest[0].startswith("--"), words
                command, rest = command.commands.get(rest[0], command), rest[1:]
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            assert {word.partition("=")[0] for word in rest if re.match("--?[a-z]", word)} <= known, words
