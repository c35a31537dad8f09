"""The README shows what its example prints, and points at what is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_readme_says(tmp_path):
    code, output = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.S).groups()
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "THEANO_FLAGS": "mode=FAST_COMPILE"},
    )
    assert (child.stdout, child.stderr) == (output, "")


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_links_and_commands_exist(text):
    for link in re.findall(r"\]\((.*?)\)", text):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make ([\w-]+)|`make ([\w-]+)`", text, re.M)
    assert targets
    for target in targets:
        assert f"\n{''.join(target)}: " in makefile


def test_files_of_contributing_exist_and_have_the_names_beside_them():
    [where] = re.findall(r"^## Where to add .*?(?=^## )", CONTRIBUTING, re.M | re.S)
    _, *parts = re.split(r"^\*\*", where, flags=re.M)
    assert len(parts) == 5
    for part in parts:
        quoted = set(re.findall(r"`([\w./]+)`", part))
        paths = {name for name in quoted if "/" in name or name.endswith(".py")}
        source = ""
        for name in paths:
            found = [root / name for root in (ROOT, ROOT / "synkhronos") if (root / name).exists()]
            assert len(found) == 1, name
            source += found[0].read_text(encoding="utf-8") if found[0].is_file() else ""
        for name in quoted - paths:
            assert re.search(rf"\b{name.rpartition('.')[2]}\b", source), name
