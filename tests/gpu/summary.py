#!/usr/bin/env python3
"""Say what the steps of all.sh found: `summary.py RESULTS`. It needs Python alone.

Each step has left NAME.status there (a line: name, what became of it, seconds), its output in
NAME.txt, and most their figures in NAME.json.
"""

import collections
import json
import re
import sys
from pathlib import Path

# Seconds of the first by those of the second, at most.
GOALS = (
    ("training", "cnn", "1 rank", "PyTorch, ", 2.0),
    ("training", "cnn", "1 rank, without cuDNN", "PyTorch, ", None),
    ("training", "cnn", "1 rank, without cuDNN", "1 rank", None),
    ("training", "mlp", "1 rank", "serial, cuda", 1.05),
    ("training", "mlp", "1 rank", "PyTorch, ", None),
    ("resnet", "", "1 rank, ", "PyTorch, ", 1.5),
)
SCENARIO = re.compile(r"^(ok|FAIL|known|skip) +(\w+) +[\d.]+ s", re.MULTILINE)


def main(folder):
    """Print the summary."""
    files = sorted(folder.glob("*.status"), key=lambda file: file.stat().st_mtime)
    steps = [file.read_text().rstrip("\n").split("\t") for file in files]
    count = collections.Counter(what.split(":")[0] for _, what, _ in steps)
    print(f"Steps: {count['ok']} ok, {count['failed']} failed, {count['left out']} left out\n")
    for name, what, seconds in steps:
        print(f"{name:18} {seconds:>4} s  {what}{of_check(folder / f'{name}.txt')}")
        if what.startswith("failed"):
            print(end_of(folder / f"{name}.txt"))
    lines = [*goals(folder), *collectives(folder), *likelihoods(folder)]
    if lines:
        print("\nTimes by those of others; a goal is the largest that is wanted")
        print("\n".join(lines))
    for name in ("jax", "jax-large", "jax-draws"):
        said = text_of(folder / f"{name}.txt")
        rows = re.findall(
            r"^(?:  \w+ +[\d,]{4,} .*|.*: value and .*|.*(?:chains: ).*)$", said, re.MULTILINE
        )
        if rows:
            print(f"\n{name}:\n" + "\n".join(rows))
    for name in ("threads", "scaling-strong", "scaling-strong-cnn", "scaling-weak"):
        said = text_of(folder / f"{name}.txt").strip()
        if said:
            print(f"\n{name.replace('scaling-', '')}: {said}")


def of_check(file):
    """Return how many scenarios of a check ended in each way, and the names of those that failed.

    From the output, because the JSON has whole groups only.
    """
    found = SCENARIO.findall(text_of(file))
    count = collections.Counter(status for status, _ in found)
    failed = ", ".join(name for status, name in found if status == "FAIL")
    said = ", ".join(f"{number} {status}" for status, number in count.items())
    return (f"; {said}" if said else "") + (f": {failed}" if failed else "")


def end_of(file, lines=4):
    """Return the last lines of an output, indented."""
    return "\n".join(f"    | {line[:150]}" for line in text_of(file).splitlines()[-lines:])


def text_of(file):
    """Return what is in a file, if it is there."""
    return file.read_text(errors="replace") if file.exists() else ""


def figures(folder, name):
    """Return the figures of a step, or {}: it may have been ended while it wrote them."""
    try:
        return json.loads(text_of(folder / f"{name}.json"))
    except ValueError:
        return {}


def goals(folder):
    """Yield a line for each ratio of `GOALS` whose times are both there."""
    for step, network, ours, theirs, goal in GOALS:
        found = figures(folder, step)
        found = found.get("networks", {}).get(network, {}) if network else found
        systems = found.get("systems", {})
        pair = named(systems, ours), named(systems, theirs)
        if None in pair:
            continue
        seconds = [systems[name]["seconds"] for name in pair]
        ratio = seconds[0] / seconds[1]
        title = f"{network or step}: {' / '.join(pair)}"
        line = f"  {title:58} {1e3 * seconds[0]:8.2f} / {1e3 * seconds[1]:.2f} ms = {ratio:.2f}"
        if not network:
            line += "; images/s: " + " / ".join(f"{systems[name]['images']:.0f}" for name in pair)
        if goal:
            line += f"; goal {goal}: {'reached' if ratio <= goal else 'MISSED'}"
        yield line


def named(systems, name):
    """Return the system of this name, or the first whose name begins so."""
    return name if name in systems else next((x for x in systems if x.startswith(name)), None)


def collectives(folder):
    """Yield a line for each number of ranks: all_reduce beside Open MPI."""
    for file in sorted(folder.glob("collectives-*.json"), key=lambda file: file.stat().st_mtime):
        found = figures(folder, file.stem)
        cells = [each for each in found.get("cells", []) if each["collective"] == "all_reduce"]
        times = collections.defaultdict(dict)
        for each in cells:
            times[each["bytes"]][each["system"]] = 1e6 * each["seconds"]
        said = [
            f"{size:,} B: {of['synk']:.1f} / {of['Open MPI']:.1f}"
            for size, of in times.items()
            if {"synk", "Open MPI"} <= set(of)
        ]
        yield f"  all_reduce, {found.get('ranks')} ranks, us, / Open MPI   {'; '.join(said)}"


def likelihoods(folder):
    """Yield a line for each number of ranks: gains over plain PyMC."""
    found, said = figures(folder, "pymc"), collections.defaultdict(list)
    for each in found.get("evaluations", []) + found.get("pays", []):
        gain = f"{each['model']} {each['rows']:,}: {each['gain_of_ranks']:.2f}"
        said[each["ranks"]].append(gain)
    for ranks, gains in said.items():
        yield f"  PyMC, {ranks} ranks, speed / plain   {'; '.join(gains)}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
