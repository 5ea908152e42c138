"""Release: workflows run what a developer can run, and the files that name the version agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

import actshard

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(workflow: Path) -> list[str]:
    """The commands of all steps of a workflow, one for each job of the matrix."""
    commands = []
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        names = job.get("strategy", {}).get("matrix", {}).get("job", [""])
        for step in job["steps"]:
            commands += [step["run"].replace("${{ matrix.job }}", name) for name in names if "run" in step]
    return commands


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_of_the_makefile(workflow: Path) -> None:
    """Anything else could not be reproduced on a developer's machine; rustup is what a container lacks."""
    commands = steps(workflow)
    assert commands
    for command in commands:
        words = command.split()
        if words[0] == "make":
            assert words[1] in TARGETS, command
        elif words[0] == ".ci/run":
            assert (ROOT / ".ci/run").stat().st_mode & 0o111
            assert words[1] in TARGETS, command
        else:
            assert words[:2] == ["curl", "-sSf"], command
            assert "rustup.rs" in command


def test_every_job_of_a_local_run_is_a_job_of_the_workflow() -> None:
    jobs = re.search(r"set -- (.*)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)[1].split()  # type: ignore[index]
    workflow = steps(ROOT / ".github/workflows/ci.yml")
    assert {f".ci/run {job}" for job in jobs} <= set(workflow)
    assert {"test", "test-slow"} <= set(jobs)


def test_every_target_is_phony_and_explained() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())  # type: ignore[index]
    assert phony == TARGETS
    explained = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in TARGETS - {"clean", "help"}:
        assert re.search(rf"^{target} +\S", explained, re.MULTILINE), target


def test_options_of_maturin_exist() -> None:
    """Wheels are built for releases only, which is late to learn that a newer maturin has dropped an option."""
    maturin = Path(sys.executable).parent / "maturin"
    if not maturin.exists():
        pytest.skip("this environment was not made by make")
    used = re.findall(r"/maturin (\w+)([^\n>]*)", (ROOT / "Makefile").read_text())
    assert {verb for verb, _ in used} == {"build", "develop", "sdist"}
    for verb, options in used:
        known = subprocess.run([str(maturin), verb, "--help"], capture_output=True, text=True, check=True).stdout
        for option in re.findall(r"--[a-z-]+", options):
            assert re.search(rf"(?<!\S){option}\b", known), f"maturin {verb} has no {option}"


def test_the_source_distribution_has_all_that_a_build_needs(tmp_path: Path) -> None:
    if not (ROOT / ".venv/.base").exists():
        pytest.skip("make has made no environment in this folder")
    subprocess.run(["make", "--silent", "sdist", f"DIST={tmp_path}"], cwd=ROOT, check=True)
    (made,) = tmp_path.iterdir()
    with tarfile.open(made) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    listed = [
        "git",
        "ls-files",
        "rust/core",
        "rust/remote",
        "rust/py",
        "python",
        "Cargo.toml",
        "Cargo.lock",
        "pyproject.toml",
    ]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(tracked) > 300
    lacking = {name for name in tracked if "/tests/" not in name and "/benches/" not in name} - found
    assert not lacking


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert actshard.__version__ == version
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version  # type: ignore[index]


def test_metadata_names_no_address_that_may_not_exist() -> None:
    assert "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for manifest in [ROOT / "Cargo.toml", *ROOT.glob("rust/*/Cargo.toml")]:
        assert not re.search(r"^(repository|homepage|documentation)\b", manifest.read_text(), re.MULTILINE), manifest


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.name
)
def test_forms_ask_for_what_the_command_line_has(form: Path) -> None:
    """A form that asks for a command's output names a command and options that exist."""
    held = yaml.safe_load(form.read_text())
    assert held["name"]
    assert held["body"]
    for command in re.findall(r"`actshard ([^`]*)`", form.read_text()):
        words = command.replace("PATH", "").split()
        done = subprocess.run(
            [str(Path(sys.executable).parent / "actshard"), words[0], *(["--help"] if words[0][0] != "-" else [])],
            capture_output=True,
            text=True,
            check=True,
        )
        for option in words[1:]:
            assert option in done.stdout, command
