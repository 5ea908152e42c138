"""Checks what changed since the last commit on main in a minute: formatting, the nearest tests; of Python also lints and types.

Nearest are the test files that mention the changed functions and modules, rare names first, as many as fit into the time. So it
finds most mistakes early and is no gate: `make test` runs everything.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
ALWAYS = ("tests/test_house.py", "tests/test_golden.py", "tests/test_surface.py")
"""Cheap test files that look at the whole package."""
UNKNOWN_SECONDS = 6.0
"""Processor time of a test file without a record."""
SLOW = re.compile(r"^ *@pytest\.mark\.slow\n(?:(?! *(?:def|class) ).*\n)* *def (\w+)", re.MULTILINE)
"""Names of functions that are marked slow."""
CRATES = {"rust/core/": "actshard-core", "rust/remote/": "actshard-remote", "rust/fuzz/": "actshard-fuzz"}
NO_TESTS = 5
"""Exit status of pytest if all tests of the chosen files are slow."""
COMMON = {"python", "actshard", "rust", "src", "core", "py", "mod", "lib", "init", "test", "tests", "formats", "main"}
"""Words of paths that say nothing about a test."""


def run(*command: str) -> str:
    """The output of a command in the repository."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def base_commit() -> str:
    """The last commit that this branch shares with main."""
    for name in ("main", "origin/main"):
        known = subprocess.run(["git", "rev-parse", "-q", "--verify", name], cwd=ROOT, capture_output=True, check=False)
        if known.returncode == 0:
            return run("git", "merge-base", "HEAD", name).strip()
    return "HEAD"


def changed_lines(base: str) -> dict[str, set[int]]:
    """The changed lines of each changed file, numbered as they are now. Deleted and binary files have none."""
    changes: dict[str, set[int]] = {}
    options = ["--no-renames", "--no-ext-diff", "--no-color"]
    for path in filter(None, run("git", "diff", "--name-only", "-z", *options, base).split("\0")):
        changes[path] = set()
        for line in run("git", "diff", "--unified=0", *options, base, "--", path).splitlines():
            if hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
                first, count = int(hunk[1]), int(hunk[2] or 1)
                changes[path] |= set(range(first, first + max(count, 1)))
    for path in filter(None, run("git", "ls-files", "-z", "--others", "--exclude-standard").split("\0")):
        if (ROOT / path).is_file():
            changes[path] = set(range(1, (ROOT / path).read_bytes().count(b"\n") + 2))
    return changes


def changed_names(path: str, lines: set[int]) -> set[str]:
    """Words of a file's path, and names of the functions and classes that contain changed lines."""
    words = {word for word in re.split(r"[^A-Za-z0-9]+", path.rpartition(".")[0].lower()) if len(word) > 2} - COMMON
    file = ROOT / path
    if not file.is_file() or file.suffix not in (".py", ".rs"):
        return words
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".py":
        try:
            tree = ast.parse(text)
        except SyntaxError:  # ruff shows it
            return words
        return words | {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            if not lines.isdisjoint(range(node.lineno, (node.end_lineno or 0) + 1))
        }
    name = ""
    for number, line in enumerate(text.splitlines(), 1):
        if declaration := re.match(r"\s*(?:pub(?:\(\w+\))? )?(?:const |unsafe )*(?:fn|struct|enum|trait) (\w+)", line):
            name = declaration[1]
        if number in lines and name:
            words.add(name)
    return words


def rank_tests(names: set[str], texts: dict[str, str]) -> dict[str, float]:
    """Test files that contain some of the names, with their scores, best first. A name in few files counts more."""
    words = {path: set(re.findall(r"\w+", text)) for path, text in texts.items()}
    scores: dict[str, float] = {}
    for name in names:
        paths = [path for path, known in words.items() if name in known]
        for path in paths:
            scores[path] = scores.get(path, 0) + math.log(1 + len(texts) / len(paths))
        # A word of a test file's own name counts most, and again more if few files have it: pickle more than machine.
        titled = [path for path in texts if name in Path(path).stem.split("_")]
        for path in titled:
            scores[path] = scores.get(path, 0) + 2 * math.log(1 + len(texts) / len(titled))
    return dict(sorted(scores.items(), key=lambda item: (-item[1], item[0])))


def recorded_seconds(texts: dict[str, str]) -> dict[str, float]:
    """Processor time of the tests of each file that are not slow, as earlier runs recorded it (tests/durations.py)."""
    record = ROOT / ".pytest_cache/v/actshard/durations"
    slow = {path: set(SLOW.findall(text)) for path, text in texts.items()}
    seconds: dict[str, float] = {}
    if record.exists():
        for test, spent in json.loads(record.read_text()).items():
            path, _, name = test.partition("[")[0].partition("::")
            if path in slow and name.rpartition("::")[2] not in slow[path]:
                seconds[path] = seconds.get(path, 0) + spent
    return seconds


def choose_tests(changes: dict[str, set[int]], limit: float) -> tuple[list[str], int]:
    """Test files to run within seconds of processor time, and how many more mention what changed."""
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py")}
    names = {name for path, lines in changes.items() for name in changed_names(path, lines)}
    changed = [path for path in changes if path in texts]
    ranked = list(dict.fromkeys([*changed, *ALWAYS, *rank_tests(names, texts)]))
    spent, chosen = 0.0, []
    seconds = recorded_seconds(texts)
    for path in ranked:
        cost = seconds.get(path, UNKNOWN_SECONDS)
        if spent + cost <= limit or path in changed:
            spent += cost
            chosen.append(path)
    return chosen, len(ranked) - len(chosen)


def commands(changes: dict[str, set[int]], tests: list[str]) -> Iterable[list[str]]:
    """The checks for the changed files, cheapest first."""
    python = [path for path in changes if path.endswith((".py", ".pyi")) and (ROOT / path).is_file()]
    rust = [path for path in changes if path.startswith("rust/") or path.startswith("Cargo.")]
    if python:
        yield [f"{BIN}/ruff", "format", "--check", *python]
        yield [f"{BIN}/ruff", "check", *python]
    if rust:
        yield ["cargo", "fmt", "--all", "--check"]
        crates = {crate for path in rust for folder, crate in CRATES.items() if path.startswith(folder)}
        for crate in sorted(crates):
            yield ["cargo", "test", "--quiet", "--package", crate]
    if any(path.startswith(("python/", "tests/typed/")) for path in python):
        yield [f"{BIN}/mypy"]
    if tests:
        yield [sys.executable, "-m", "pytest", "--numprocesses=auto", "--dist=worksteal", "-x", "-m",
               "not slow and not machine and not engines and not peers and not levanter and not servers", *tests]  # fmt: skip


def main() -> int:
    """Runs the checks until one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="compare with this commit; by default the last one shared with main")
    parser.add_argument("--seconds", type=float, default=30, help="time for tests (default: 30)")
    parser.add_argument("--list", action="store_true", help="list the tests, run nothing")
    options = parser.parse_args()
    base = options.base or base_commit()
    changes = changed_lines(base)
    if not changes:
        print(f"quick: no file differs from {run('git', 'log', '-1', '--format=%h %s', base).strip()}")
        return 0
    tests, left_out = choose_tests(changes, options.seconds * (os.cpu_count() or 1))
    print(
        f"quick: {len(changes)} changed files, {len(tests)} test files; {left_out} more mention them: make test",
        flush=True,
    )
    if options.list:
        print("\n".join(tests))
        return 0
    start = time.monotonic()
    for command in commands(changes, tests):
        print(f"quick: {' '.join(map(os.path.basename, command[:2]))}", flush=True)
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status and not (status == NO_TESTS and "pytest" in command):
            return status
    print(f"quick: passed in {time.monotonic() - start:.0f} s. It is no gate: run make test before a push")
    return 0


if __name__ == "__main__":
    sys.exit(main())
