"""The README shows what its example prints, and points at what is there."""

import re
import textwrap
from pathlib import Path

import pytest
from support.running import python

import synkhronos

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", *(f".github/{name}.md" for name in ("CONTRIBUTING", "SECURITY")))
ACTIONS = "../../actions/"  # of the repository's host, which the README's place leads to

EXAMPLES = re.findall(r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", README, re.S)


@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=["Example", "Train"])
def test_the_examples_print_what_the_readme_says(tmp_path, code, output):
    child = python("-c", code, cwd=tmp_path, THEANO_FLAGS="mode=FAST_COMPILE")
    assert (child.stdout, child.stderr) == (output, "")


def test_the_first_page_has_the_same_example():
    index = (ROOT / "docs" / "index.rst").read_text(encoding="utf-8")
    assert textwrap.indent(EXAMPLES[0][0], "    ") in index


@pytest.mark.parametrize("page", PAGES)
def test_links_and_commands_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r'(?:\]\(|src=")(?!https:)(.*?)[)"]', text):
        file = f".github/workflows/{link.split('/')[4]}" if link.startswith(ACTIONS) else None
        assert (ROOT / (file or (ROOT / page).parent / link)).exists(), link
    check_targets(re.findall(r"^make ([\w-]+)|`make ([\w-]+)`", text, re.M), page)


@pytest.mark.parametrize("workflow", ["ci", "pages", "release"])
def test_workflows_run_what_is_there(workflow):
    text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text(encoding="utf-8")
    found = re.findall(r"run: make ([\w-]+)|target: \"([\w-]+)\"", text)
    check_targets(found, workflow)
    assert "python-version" in text


def check_targets(found, where):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert found or where == ".github/SECURITY.md"
    for target in found:
        assert f"\n{''.join(target)}: " in makefile, (where, target)


def test_no_line_begins_with_a_comment_that_would_end_its_paragraph():
    """In Markdown a comment at the begin of a line is a block of its own."""
    assert not re.findall(r"^<!-- figure", README, re.MULTILINE)


def test_the_version_is_the_same_wherever_it_is_written():
    version = synkhronos.__version__
    minor, _, _ = version.rpartition(".")
    assert f"version = {{{version}}}" in README and f"Version {minor}, " in README
    assert f"\nversion: {version}\n" in (ROOT / "docs" / "CITATION.cff").read_text()
    recipe = ROOT / ".ci" / "conda" / "recipe.yaml"
    assert f"\n  version: {version}\n" in recipe.read_text(encoding="utf-8")
    assert f"\n{minor}\n---" in (ROOT / "docs" / "changes.rst").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["development", "internals"])
def test_files_that_pages_for_developers_name_are_there(page):
    text = (ROOT / "docs" / f"{page}.rst").read_text(encoding="utf-8")
    files = set(re.findall(r"[\w/]+\.py\b", text)) - {"rules/name.py"}
    folders = {name for name in re.findall(r"``([\w/]+)``", text) if "/" in name}
    assert len(files) > 5
    for name in files | folders:
        stores = ROOT / "synkhronos" / "parameter_server"
        roots = ROOT, ROOT / "synkhronos", stores, stores / "group", stores / "remote"
        models = ROOT / "synkhronos" / "extensions" / "pymc"
        assert any((root / name).exists() for root in (*roots, models)), name
