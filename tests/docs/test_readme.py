"""The README shows what its example prints, and points at what is there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_readme_says(tmp_path):
    code, output = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.S).groups()
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (child.stdout, child.stderr) == (output, "")


def test_links_and_commands_exist():
    for link in re.findall(r"\]\((.*?)\)", README):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)|`make (\w+)`", README, re.M):
        assert f"\n{''.join(target)}: " in makefile
