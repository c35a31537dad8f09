"""The pages of docs/: each is in one group of the sidebar, and figures are those of the runs."""

import re
import runpy
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


def test_the_picture_of_the_first_page_has_the_measured_speeds(tmp_path):
    script = runpy.run_path(str(DOCS / "speedup.py"))
    found = script["speeds"]((DOCS / "performance.rst").read_text(encoding="utf-8"))
    assert list(found) == ["mlp", "cnn", "ResNet-8"]
    named = re.search(r":alt: (.*?)\n\n", INDEX, re.DOTALL)[1]
    for network in found.values():
        assert network["serial, 1 thread"] == 1
        for system in ("serial, 2 threads", "2 ranks"):
            assert f"{network[system]:.2f}" in named
    script["draw"](found, tmp_path / "speedup.png")
    assert (tmp_path / "speedup.png").stat().st_size > 10_000
