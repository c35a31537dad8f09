"""Draw docs/speedup.png from the measurements in performance.rst: python docs/speedup.py."""

import re
from pathlib import Path

HERE = Path(__file__).parent
COLOURS = {"serial, 1 thread": "0.75", "serial, 2 threads": "0.5", "2 ranks": "C3"}


def speeds(page):
    """Return {network: {system: rows per second, divided by those of serial Theano}}."""
    found = {}
    for line in page.splitlines():
        title = re.match(r"    (\S+).*; minibatches of (\d+) rows", line)
        if title:
            network = {}
            if title[2] == "512":
                found[title[1]] = network
        row = re.match(r"      (\S.*?)  +[\d.]+ +(\d+) +[\d.]+ +[\d.]+", line)
        if row and row[1] in COLOURS:
            network[row[1]] = int(row[2]) / network.get("rows", int(row[2]))
            network.setdefault("rows", int(row[2]))
    for network in found.values():
        del network["rows"]
    return found


def draw(found, path):
    """Draw one group of bars for each network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    panel = figure.subplots()
    for number, (system, colour) in enumerate(COLOURS.items()):
        places = [group + 0.28 * (number - 1) for group in range(len(found))]
        heights = [network[system] for network in found.values()]
        bars = panel.bar(places, heights, 0.26, color=colour, label=label(system))
        panel.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=12)
    names = {"mlp": "perceptron", "cnn": "small CNN"}
    panel.set_xticks(range(len(found)), [names.get(name, name) for name in found], fontsize=13)
    panel.set_ylabel("speed of training", fontsize=13)
    panel.margins(y=0.08)
    panel.set_yticks([0, 1, 2])
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=3, loc="outside upper center", frameon=False, fontsize=11, columnspacing=1)
    figure.savefig(path, dpi=200)


def label(system):
    return system.replace("serial", "Theano") if "serial" in system else f"Synkhronos, {system}"


if __name__ == "__main__":
    draw(speeds((HERE / "performance.rst").read_text(encoding="utf-8")), HERE / "speedup.png")
