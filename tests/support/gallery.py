"""Outputs of the demos as docs/gallery.rst shows them."""

import contextlib
import importlib
import io
import json
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "gallery.rst"
# Lines that depend on the command and on the settings of the user.
VARIES = ("$ ", "Computing with floatX=")


def module_of(demo, monkeypatch):
    """Return the module of a demo, until the end of a test."""
    monkeypatch.syspath_prepend(str(PAGE.parents[1]))
    return importlib.import_module(f"demos.{demo.replace('/', '.')}")


def unsaid(demo, out):
    """Return the lines of a demo's sample that its output lacks, whatever the numbers are."""
    said = {masked(line) for line in [*out.splitlines(), *sentences_about_speed()]}
    return [line for line in sample(demo) if masked(line) not in said]


def sample(demo):
    """Return the lines that are shown below the command of a demo."""
    runs = json.loads(PAGE.with_name("figures.json").read_text(encoding="utf-8"))
    named = [run for run in runs.values() if f"demos/{demo}.py" in run["command"]]
    block = "\n".join(line for run in named for line in run["output"])
    if not named:
        text = PAGE.read_text(encoding="utf-8")
        output = r"\n\n\.\. code-block:: text\n\n((?:(?:    .*)?\n)+)"
        [block] = re.findall(rf"^    python demos/{demo}\.py.*{output}", text, re.MULTILINE)
    lines = [line.strip() for line in block.splitlines()]
    return [line for line in lines if line not in ("", "...") and not line.startswith(VARIES)]


def masked(line):
    """Return a line without its numbers, plurals, widths and paths of pictures."""
    line = re.sub(r"^Drew .*", "Drew", line)
    line = re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?", "#", line)
    line = re.sub(r"\b(rank|thread|slice)s\b", r"\1", line)
    return re.sub(r"#( #)+", "#", " ".join(line.split()))


def sentences_about_speed():
    """Return the demos' sentences for fast and for slow ranks: chance decides between them."""
    from demos._reports import report_speedup
    from demos._shared import Log

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for library in ("Theano", "Keras"):
            serial = Log(f"serial {library}, 1 thread", seconds=[2.0])
            for seconds in (1.0, 3.0):
                report_speedup(Log("ranks", seconds=[seconds]), [serial], 2)
    return out.getvalue().splitlines()
