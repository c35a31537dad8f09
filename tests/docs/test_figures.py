"""Measured numbers of the pages come from docs/figures.json, which `make figures` writes."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
from benchmarks import BENCHMARKS, figures

from synkhronos._machine import load
from synkhronos.tools.bench import frame

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.rst")}
PAGES["README"] = (ROOT / "README.md").read_text(encoding="utf-8")
OURS = runpy.run_path(str(ROOT / "docs" / "figures.py"))
KNOWN = OURS["read"]()
USES = re.compile(r":figure:`([\w.]+)`|\.\. printed:: (\w+)|<!-- (?:figure|printed) ([\w.]+)")

# Times, speeds, and how many times as fast something is, with what stands before the unit.
NUMBER = r"(?<![\w.`/=-])\d[\d,]*(?:\.\d+)?"
WORDS = "(?:half|twice|thrice|two|three|four|five|ten|dozens?|hundreds?)"
UNIT = (
    r"(?:ns|us|µs|ms|s|(?:nano|micro|milli)?seconds?|minutes?|hours?|%|per ?cent|"
    r"[kMG]?B/s|[MG]bit/s|(?:rows|images|draws|steps)/s|"
    r"times (?:as (?:fast|long|many)|faster|slower|longer))"
)
MEASURED = re.compile(
    rf"{NUMBER}(?:(?:,| to| or|,? and|-) ?{NUMBER})* ?-?{UNIT}(?!\w)|"
    rf"\b{WORDS} times (?:as (?:fast|long)|faster|slower)|"
    rf"\b(?:gain(?:s|ed)?|speedups? of) {NUMBER}"
)

# Limits, settings, and numbers of other papers, by their pages.
ALLOWED = {
    "README": "2 minutes; 5 minutes; 10 to 30 seconds; 5 to 15 seconds",
    "cluster_tutorial": "8 seconds",
    "gallery": "5 ms",
    "internals": "100 microseconds; 2 milliseconds; 8 seconds",
    "parameter_server": "8 seconds; 10 seconds; 100 Mbit/s",
    # Those of a machine with 16 CPUs, of which figures.json has nothing.
    "performance": "3 %; 4 %; 8 %; 29 %; 30 %; 41 %; three times as long; 2 to 250 milliseconds; "
    "2 milliseconds; 100 microseconds; 20 microseconds; 7.5 times as fast; speedup of 7.5; "
    "30 microseconds; 20 minutes",
    "checks": "0.3 s",
    "pymc": "15 %; 0.02 milliseconds",
    "rules": "8 seconds; 30 seconds; 1 hour",
    "rules_api": "30 s",
    "saving": "60 seconds; 90 seconds",
    "security": "5 s; 60 s",
    "several_machines": "1 second; 3 seconds; 8 seconds; 8 s; 10 seconds; 20 seconds; 60 seconds; "
    "120 s; 300 seconds; 3 minutes; 100 Mbit/s; 50 us; 10 Gbit/s; 15 us; 0.5 ns; 0.1 ms; 0.1 %",
}


def prose(text):
    """Return a page without code, output, options of directives, and figures of the file."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- (figure|printed) .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *>>> (.+\n)*", "", text, flags=re.MULTILINE)
    kept, block = [], None
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if block is not None and (not line.strip() or indent > block):
            continue
        block = None
        if re.match(r" *\.\. (code-block|math|image|printed|literalinclude)::", line) or (
            line.endswith("::") and not line.lstrip().startswith("..")
        ):
            block = indent
            line = line.rstrip(":") if ".. " not in line else ""
        kept.append("" if re.match(r"\s*:[\w-]+:( |$)", line) else line)
    text = re.sub(r"``.*?``|:figure:`.*?`", "", "\n".join(kept), flags=re.DOTALL)
    return re.sub(r"\s+", " ", text)


def measured(text):
    """Return the numbers in a page that look measured."""
    return {found[0] for found in MEASURED.finditer(prose(text))}


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"changes"}))
def test_no_measured_number_stands_in_a_page(page):
    """Write :figure:`run.number`, or <!-- figure run.number --> in README.md."""
    allowed = set(filter(None, ALLOWED.get(page, "").split("; ")))
    assert measured(PAGES[page]) == allowed


@pytest.mark.parametrize(
    "text",
    [
        "A call takes 17.5 microseconds.",
        "It ran 1.86 times as fast",
        "takes 0.4 to 1.2 ms",
        "which is 5 times\nas fast",
        "- a list: twice times, 93.1 Mbit/s",
        "a gain of 12 %",
        "The ranks gain 1.9 on two cores",
        "   * - a cell\n     - 320 us",
        "::\n\n    f(3)  # 20 ms\n\nand 30 ms",
    ],
)
def test_such_a_number_would_be_found(text):
    assert len(measured(text)) == 1
    assert not measured("``--seconds 3 s``, 512 rows, 2 ranks, version 1.86, :figure:`call.us` us")


def test_the_file_has_the_runs_of_the_command_and_some_by_hand():
    for name, run in KNOWN.items():
        by_command = figures.RUNS.get(name)
        if "commit" in run:
            assert run["command"] == by_command.command
            assert ("output" in run) == by_command.shown
        if by_command:
            assert list(run.get("numbers", {})) == list(by_command.numbers)
    assert set(figures.RUNS) <= set(KNOWN)


def test_pages_use_all_runs_and_no_others():
    used = {"".join(found) for text in PAGES.values() for found in USES.findall(text)}
    there = {f"{name}.{key}" for name, run in KNOWN.items() for key in run.get("numbers", {})}
    there |= {name for name, run in KNOWN.items() if "output" in run}
    assert used <= there
    assert {name.partition(".")[0] for name in used} == set(KNOWN)
    drawn = runpy.run_path(str(ROOT / "docs" / "speedup.py"))["speeds"](KNOWN)
    assert all(network[0] == 1 for network in drawn.values())


def test_the_readme_has_the_figures_of_the_file():
    assert OURS["in_readme"](PAGES["README"], KNOWN) == PAGES["README"]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the file and of README.md, in a folder that takes the place of the source."""
    (tmp_path / "docs").mkdir()
    for name in ("docs/figures.json", "docs/figures.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(frame, "load_of_quiet_second", lambda seconds: load.Load(0.05))
    return tmp_path


def test_each_run_is_written_as_it_ends(copy, monkeypatch, capsys):
    line = "import sys, json; json.dump({'us': 1234.56}, open(sys.argv[2], 'w'))"
    monkeypatch.setattr(figures, "_line", lambda run, python, busy, results, peer: (
        [python, "-c", f"{line}; print('first\\nepoch 1\\nepoch 2')", "--json", str(results)]
        if run.numbers else [python, "-c", "raise SystemExit(3)"]
    ))  # fmt: skip
    runs = {
        "call": figures.Run("typed", {"us": lambda found: found["us"]}, left_out="epoch.*"),
        "digits": figures.Run("fails"),
        "jax": figures.Run("elsewhere", host="samplers"),
        "machines": figures.Run("for long", by_name=True),
    }
    monkeypatch.setattr(figures, "RUNS", runs)
    before = OURS["read"]()
    # The README has other numbers of the run.
    (copy / "README.md").write_text("<!-- figure call.us -->7<!-- end --> us")
    assert frame.main("benchmarks", BENCHMARKS, "figures", []) == 1
    printed = capsys.readouterr()
    assert "digits keeps its former figures: exit status 3" in printed.out
    assert "there is no .venv-samplers: make test-samplers makes it" in printed.out
    assert printed.err.endswith("not measured: digits, jax\n")
    found = json.loads((copy / "docs" / "figures.json").read_text(encoding="utf-8"))
    entry = found.pop("call")
    before.pop("call")
    assert found == before
    assert entry["numbers"] == {"us": 1230} and entry["output"] == ["first", "..."]
    assert (copy / "README.md").read_text() == "<!-- figure call.us -->1,230<!-- end --> us"
    assert frame.main("benchmarks", BENCHMARKS, "figures", ["typo"]) == 2
    (copy / "docs" / "figures.json").write_text('{"call": ')
    assert frame.main("benchmarks", BENCHMARKS, "figures", []) == 2
    assert "git checkout docs/figures.json" in capsys.readouterr().err
