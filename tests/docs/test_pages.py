"""The pages of docs/: each is in one group of the sidebar."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = (DOCS / "index.rst").read_text(encoding="utf-8")
GROUPS = dict(re.findall(r"toctree::\n   :caption: (\w+)\n   :hidden:\n\n((?:   \w+\n)+)", INDEX))
PAGES = [page for group in GROUPS.values() for page in group.split()]


def test_the_sidebar_has_each_page_once():
    assert list(GROUPS) == ["Start", "Guide", "Training", "Running", "Reference", "Inside"]
    assert sorted(PAGES) == sorted({path.stem for path in DOCS.glob("*.rst")} - {"index"})


@pytest.mark.parametrize("page", PAGES)
def test_the_readme_links_to_each_page(page):
    assert f"](docs/{page}.rst)" in (ROOT / "README.md").read_text(encoding="utf-8")
