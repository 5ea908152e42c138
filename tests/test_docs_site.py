"""The documentation site documents every public object, and every page has a place in its navigation. `make docs` checks links."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python/actshard"
PUBLIC = (
    "actshard", "actshard.latents", "actshard.plan", "actshard.plot",
    "actshard.tokens", "actshard.torch", "actshard.jax", "actshard.hf", "actshard.formats",
    *sorted(
        f"actshard.compat.{path.stem}"
        for path in (PACKAGE / "compat").iterdir()
        if path.stem not in ("__init__", "drafts", "__pycache__")
    ),
)  # fmt: skip
"""Modules that people import. ``compat.drafts`` has no public names: it is what the modules of draft models share."""


def public(module: str) -> list[str]:
    """``__all__`` of a module, read without importing it, because some need torch."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise AssertionError(f"{module} has no __all__")


def documented() -> Counter[str]:
    """Objects on the API pages, and how often."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md")]
    return Counter(name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_object_is_on_an_api_page(module: str) -> None:
    found = documented()
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    for name in public(module):
        whole = f"{module}.{name}"
        described = f"`{whole}`" in pages and (name == "__version__" or (PACKAGE / name).is_dir())
        assert found[whole] == 1 or described, f"{whole} is on {found[whole]} API pages of docs/api"


def test_formats_of_other_packages_find_their_classes_documented() -> None:
    assert {f"actshard.formats.{name}" for name in ("Format", "Contents", "Options", "Evidence")} <= set(documented())


def pages(nav: Any) -> Iterable[str]:
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from pages(part)


def test_every_page_has_one_place_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    placed = Counter(pages(config["nav"]))
    here = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(placed) - {"CONTRIBUTING.md", "CHANGELOG.md"} == here, "list new pages in mkdocs.yml"
    assert set(placed.values()) == {1}


def test_the_site_is_built_strictly_and_loads_nothing_from_the_network() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["strict"] is True
    assert set(config["validation"]["links"].values()) == {"warn"} == set(config["validation"]["nav"].values())
    assert config["theme"]["font"] is False
    assert not [path for path in config["extra_css"] if "://" in path]
    # With --quiet, mkdocs counts no warnings, and a strict build succeeds with broken links.
    recipe = re.search(r"^docs:.*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe
    assert "mkdocs build --strict" in recipe[1]
    assert not re.search(r"--quiet|-q\b", recipe[1])
