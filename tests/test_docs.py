"""Everything the documentation refers to exists."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.compute
import pytest

import actshard
from actshard import codes

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


def test_the_page_of_benchmarks_equals_the_records_that_it_names() -> None:
    report = runpy.run_path(str(ROOT / "benches/report.py"))
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    records = report["named"](page)
    assert records
    said = "run python -m benches.report " + " ".join(records)
    assert page == report["page"](records), said
    assert (ROOT / "docs/pictures/benchmarks.svg").read_text(encoding="utf-8") == report["picture"](records), said
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == report["readme"](readme, records), said
    rows, _ = report["load"](records)
    tables = [line for line in page.splitlines() if line.startswith("| ")]
    groups = [
        line
        for line in page.splitlines()
        if line.startswith("## ") and line not in ("## Machine", "## How long it takes")
    ]
    assert len(tables) == len(rows) + len(groups), "every row is in one table"


def described(shape: str) -> Any:
    """The shape or value that a comment begins with; None if it begins with words."""
    try:
        return ast.literal_eval(shape.partition(";")[0].strip())
    except (SyntaxError, ValueError):
        return None


def written(folder: Path) -> actshard.Store:
    """The store that pages of arrays and frameworks speak of."""
    rng = np.random.default_rng(0)
    columns = {"label": np.arange(200) % 2, "verb": [f"verb {i // 10}" for i in range(200)]}
    with actshard.create(folder / "data", "zarr", layers=[2, 5], d_model=64) as writer:
        writer.append(rng.normal(size=(200, 2, 12, 64)).astype(np.float32), columns=columns)
    return actshard.open(folder / "data")


def checked_blocks(page: str, given: dict[str, Any], heavy: bool = False) -> int:
    """Runs a page's blocks and compares results with their comments; returns the number of comparisons.

    Args:
        page: its path.
        given: names that the blocks use.
        heavy: run the blocks that begin with ``# needs:`` and a list of libraries, too; else leave them out.
    """
    names: dict[str, Any] = {"np": np, "actshard": actshard, **given}
    checked = 0
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        needs = re.match(r"# needs: (.*)\n", block)
        if needs and not heavy:
            continue
        for library in needs[1].split(", ") if needs else ():
            pytest.importorskip(library)
        for statement in ast.parse(block).body:
            source = ast.get_source_segment(block, statement) or ""
            comment = block.splitlines()[(statement.end_lineno or 0) - 1].partition("# ")[2]
            if not isinstance(statement, ast.Expr):
                exec(source, names)
                continue
            found, expected = eval(source, names), described(comment)
            if expected is not None or comment == "None":
                checked += 1
                if isinstance(expected, list) and not isinstance(found, list):
                    found = found.tolist() if hasattr(found, "tolist") else list(found)
                assert getattr(found, "shape", found) == expected, source
    return checked


def test_the_blocks_of_the_page_of_arrays_run_as_written(tmp_path: Path) -> None:
    assert checked_blocks("docs/arrays.md", {"store": written(tmp_path)}) > 15


def test_the_light_blocks_of_the_page_of_frameworks_run_as_written(tmp_path: Path) -> None:
    checked_blocks("docs/frameworks.md", {"store": written(tmp_path)})


@pytest.mark.peers
def test_all_blocks_of_the_page_of_frameworks_run_as_written(tmp_path: Path) -> None:
    assert checked_blocks("docs/frameworks.md", {"store": written(tmp_path)}, heavy=True) > 8


def test_the_blocks_of_the_page_of_several_datasets_run_as_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stores = {}
    for name, format, n, columns in (
        ("a", "zarr", 200, {"label": np.arange(200) % 2}),
        ("b", "pickle", 50, {"split": ["train"] * 50}),
        ("chat", "zarr", 200, {}),
    ):
        with actshard.create(tmp_path / name, format, layers=[2, 5], d_model=64) as writer:
            texts = {} if name == "b" else {"prompt": [f"prompt {i}" for i in range(n)]}
            writer.append(rng.normal(size=(n, 2, 12, 64)).astype(np.float32), columns=columns | texts)
        stores[name] = actshard.open(tmp_path / name)
    assert checked_blocks("docs/joining.md", {"pc": pyarrow.compute, **stores}) > 10


def test_the_blocks_of_the_page_of_sequences_run_as_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with actshard.create(tmp_path / "data", "lmprobe", layers=[2, 5], d_model=64) as writer:
        for i in range(300):
            tokens = 1 + 83 * i % 96
            ids, supervised = rng.integers(0, 1000, tokens), np.arange(tokens) % 10 > 4
            columns = {"label": [i % 2], "input_ids": [ids.tolist()], "loss_mask": [supervised.astype(int).tolist()]}
            writer.append([rng.normal(size=(2, tokens, 64)).astype(np.float16)], columns=columns)
    assert checked_blocks("docs/sequences.md", {"store": actshard.open(tmp_path / "data")}) > 8


def drafts(folder: Path) -> dict[str, Any]:
    """The store and the folder that the page of draft models speaks of."""
    rng = np.random.default_rng(0)
    with actshard.create(
        folder / "data", "deepspec", layers=[2, 18, 33, "last"], d_model=64, dtype="bfloat16"
    ) as writer:
        for i in range(40):
            tokens = 3 + 5 * i % 22
            ids, mask = rng.integers(0, 1000, tokens).tolist(), rng.integers(0, 2, tokens).tolist()
            states = rng.normal(size=(4, tokens, 64)).astype(ml_dtypes.bfloat16)
            writer.append([states], columns={"input_ids": [ids], "loss_mask": [mask]})
    return {"store": actshard.open(folder / "data"), "folder": folder}


@pytest.mark.peers
def test_the_blocks_of_the_page_of_draft_models_run_as_written(tmp_path: Path) -> None:
    assert checked_blocks("docs/drafts.md", drafts(tmp_path), heavy=True) > 8


def test_the_blocks_of_the_page_of_plans_run_as_written(tmp_path: Path) -> None:
    written(tmp_path)
    src = next(path for path in tmp_path.iterdir() if path.is_dir())
    given = {"src": src, "dst": tmp_path / "planned", "folder": tmp_path}
    assert checked_blocks("docs/plans.md", given) > 1
