"""Everything the documentation refers to exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from actshard.base import codes
from actshard.cli import app

ROOT = Path(__file__).parents[1]


def test_every_fault_in_the_ledger_is_held_by_a_test_that_exists() -> None:
    sources = [
        p.read_text() for folder in ("tests", "rust") for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".rs")
    ]
    names = set(re.findall(r"\b(?:def|fn|class) (\w+)", "\n".join(sources)))
    rows = [r for r in (ROOT / "docs/correctness.md").read_text().splitlines() if r.startswith("| ")]
    found = 0
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) != 4 or cells[0] == "symptom" or set(cells[0]) <= {"-"}:
            continue
        held = re.findall(r"`([^`]+)`", cells[3])
        assert held, row
        for name in held:
            there = name in names or any((ROOT / base / name).is_file() for base in ("", "tests", "tests/tokens"))
            assert there, f"{name}: {row}"
        found += 1
    assert found > 40


def test_links_between_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tables_of_codes_are_those_of_the_sources() -> None:
    script = runpy.run_path(str(ROOT / "scripts/verify_page.py"))
    page = (ROOT / "docs/verify.md").read_text(encoding="utf-8")
    assert page == script["render"](page), "run python scripts/verify_page.py"
    for code in (*codes.findings(), *codes.calls()):
        assert page.count(f"| `{code}` |") == 1, code


def test_troubleshooting_lists_all_exceptions_and_codes_of_the_sources() -> None:
    script = runpy.run_path(str(ROOT / "scripts/troubleshooting_page.py"))
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert page == script["render"](page), "run python scripts/troubleshooting_page.py"
    for code in (*codes.findings(), *codes.calls()):
        assert page.count(f"\n### `{code}`\n") == 1, code


def test_pictures_are_those_that_their_scripts_draw() -> None:
    folder = ROOT / "docs/pictures"
    for name in ("architecture", "concepts"):
        drawn = runpy.run_path(str(folder / f"{name}.py"))["picture"]()
        assert (folder / f"{name}.svg").read_text(encoding="utf-8") == drawn, f"run python docs/pictures/{name}.py"
    script = runpy.run_path(str(folder / "bytes.py"))
    assert {path.stem for path in (folder / "bytes").iterdir()} == set(script["DIAGRAMS"])
    for name in script["DIAGRAMS"]:
        drawn = (folder / f"bytes/{name}.svg").read_text(encoding="utf-8")
        assert drawn == script["drawn"](name), "run python docs/pictures/bytes.py"
        assert f"](../pictures/bytes/{name}.svg)" in (ROOT / f"docs/formats/{name}.md").read_text(encoding="utf-8")


def test_pictures_have_a_title_and_colours_of_their_own_for_dark_pages() -> None:
    for path in (ROOT / "docs/pictures").rglob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert "<title>" in text, path.name
        assert "prefers-color-scheme: dark" in text or 'fill="#fff"' in text, path.name


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    shown = re.findall(r"^actshard ([a-z-]+)", page, re.MULTILINE)
    there = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    there += [group.name for group in app.registered_groups if group.name]
    assert set(shown) == set(there), "docs/commands.md has one line for each command"


def test_the_page_of_benchmarks_equals_the_records_that_it_names() -> None:
    report = runpy.run_path(str(ROOT / "benches/report.py"))
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    records = report["named"](page)
    assert records
    said = "run python -m benches.report " + " ".join(records)
    assert page == report["page"](records), said
    assert (ROOT / "docs/pictures/benchmarks.svg").read_text(encoding="utf-8") == report["picture"](records), said
    assert (ROOT / "docs/pictures/ten.svg").read_text(encoding="utf-8") == report["bars"](records), said
    for other, table in report["tables"](records).items():
        text = other.read_text(encoding="utf-8")
        assert table in text, f"{other.name}: {said}"
        assert text == report["renewed"](text, table), f"{other.name}: {said}"
    rows, _ = report["load"](records)
    tables = [line for line in page.splitlines() if line.startswith("| ")]
    groups = [
        line
        for line in page.splitlines()
        if line.startswith("## ") and line not in ("## Machine", "## How long it takes", "## What limits these numbers")
    ]
    assert len(tables) == len(rows) + len(groups), "every row is in one table"


def test_no_text_has_marks_of_an_unfinished_merge() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [
        str(page) for page in pages if re.search("^(<{7}|>{7}) ", page.read_text(encoding="utf-8"), re.MULTILINE)
    ] == []
