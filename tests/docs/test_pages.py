"""The pages of docs/: each is in one group of the sidebar, and what they name is there."""

import re
import runpy
from pathlib import Path

import pytest

import synkhronos
from synkhronos import parameter_server, resuming
from synkhronos.__main__ import main
from synkhronos.extensions import train, update_rules

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


def test_our_names_in_the_cheat_sheet_are_there(capsys):
    text = (DOCS / "cheat_sheet.rst").read_text(encoding="utf-8")
    ours = re.findall(r"\n     - (.*)(?=\n\n|\n   \*|$)", text)  # the last column of each row
    homes = {"synk": synkhronos, "train": train, "update_rules": update_rules}
    homes.update(ps=parameter_server, store=parameter_server.Store, state=resuming.RunState)
    names = re.findall(rf"\b({'|'.join(homes)})\.(?!py\b)(\w+)", "\n".join(ours))
    assert len(names) > 40
    assert [name for home, name in names if not hasattr(homes[home], name)] == []
    for command in ("launch", "run"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        options = re.findall(rf"``synkhronos {command} (.*?)``", text)
        options = [each for line in options for each in re.findall(r"--[\w-]+", line)]
        printed = capsys.readouterr().out
        assert options and [each for each in options if each not in printed] == []


def test_small_pictures_have_the_losses_that_pages_show(tmp_path):
    script = runpy.run_path(str(DOCS / "small_pictures.py"))
    for name, points in script["losses"]().items():
        assert len(points) > 2 and points[-1][1] < points[0][1] / 4, name
        script["draw"](points, tmp_path / "drawn.png")
        assert f"figure:: {name}.png" in (DOCS / "gallery.rst").read_text(encoding="utf-8")
