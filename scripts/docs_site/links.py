"""A hook of mkdocs: files of the repository that pages link to, and that are not below docs/, become part of the site.

CONTRIBUTING.md and CHANGELOG.md become pages. Other files (records of benchmarks, licences) are copied to ``files/``. Links to
them are changed in the site only, so that the same pages also work in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that stand at the root of the repository, and the files that pages link to."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in [f for f in files if f.src_uri.endswith(".md")]:
        for _, target, _, _ in LINK.findall(page.content_string):
            inside = outside(page.src_uri, target)
            if inside and files.get_file_from_path(f"files/{inside}") is None:
                files.append(File.generated(config, f"files/{inside}", abs_src_path=str(ROOT / inside)))
    return files


def outside(page: str, target: str) -> str | None:
    """Returns the path in the repository of a link's target that is a file and no page of the site, or None."""
    if "://" in target or target.startswith("mailto:"):
        return None
    found = in_repository(page, target)
    return found if not found.startswith("docs/") and found not in PAGES and (ROOT / found).is_file() else None


def in_repository(page: str, target: str) -> str:
    """Returns the path of a link's target relative to the repository's root."""
    folder = "" if page in PAGES else posixpath.dirname(f"docs/{page}")
    return posixpath.normpath(posixpath.join(folder, target))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes links that lead out of docs/, or from a page at the root of the repository into it."""
    here = page.file.src_uri

    def changed(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        inside = outside(here, target)
        to = f"files/{inside}" if inside else in_repository(here, target)
        to = "index.md" if to == "docs" else to.removeprefix("docs/")
        return f"{before}{posixpath.relpath(to, posixpath.dirname(here) or '.')}{anchor or ''}{after}"

    return "".join(part if part.startswith("```") else LINK.sub(changed, part) for part in FENCE.split(markdown))
