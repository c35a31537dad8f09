"""Draw docs/speedup.png from figures.json: python docs/speedup.py."""

import json
from pathlib import Path

HERE = Path(__file__).parent
NETWORKS = {"mlp": "perceptron", "cnn": "small CNN", "resnet": "ResNet-8"}
COLOURS = {"Theano, 1 thread": "0.75", "Theano, 2 threads": "0.5", "Synkhronos, 2 ranks": "C3"}


def speeds(runs):
    """Return, for each network, the speeds of the systems, divided by that of Theano."""
    numbers = runs["training"]["numbers"]
    return {
        title: (1, numbers[f"{name}_threads"], numbers[f"{name}_over_one"])
        for name, title in NETWORKS.items()
    }


def draw(found, path):
    """Draw one group of bars for each network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3), layout="constrained")
    panel = figure.subplots()
    for number, (system, colour) in enumerate(COLOURS.items()):
        places = [group + 0.28 * (number - 1) for group in range(len(found))]
        heights = [network[number] for network in found.values()]
        bars = panel.bar(places, heights, 0.26, color=colour, label=system)
        panel.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=12)
    panel.set_xticks(range(len(found)), list(found), fontsize=13)
    panel.set_ylabel("speed of training", fontsize=13)
    panel.margins(y=0.08)
    panel.set_yticks(range(1 + int(panel.get_ylim()[1])))
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=3, loc="outside upper center", frameon=False, fontsize=11, columnspacing=1)
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    draw(speeds(json.loads((HERE / "figures.json").read_text())), HERE / "speedup.png")
