"""Draw the losses that pages show as small pictures: python docs/small_pictures.py"""

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent


def losses():
    """Return the loss at each epoch that a page shows, by the name of the picture."""
    runs = json.loads((DOCS / "figures.json").read_text(encoding="utf-8"))
    digits, keras = ("\n".join(runs[name]["output"]) for name in ("digits", "keras"))
    recurrent = (DOCS / "examples" / "recurrent.txt").read_text(encoding="utf-8")
    texts = {
        "digits": re.findall(r"^epoch +(\d+)   loss ([\d.]+)   test", digits, re.M),
        "keras": re.findall(r"^Epoch (\d+)/10\n - \d+s - loss: ([\d.]+)", keras, re.M),
        "recurrent": re.findall(
            r"^epoch +(\d+)   loss ([\d.]+)", recurrent.split("serial")[0], re.M
        ),
    }
    return {name: [(int(n), float(loss)) for n, loss in found] for name, found in texts.items()}


def draw(points, path):
    """Draw the loss against the epoch."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(3.2, 2), dpi=100, layout="constrained").add_subplot()
    axes.plot(*zip(*points), "o-", markersize=4)
    axes.set(xlabel="epoch", ylabel="loss", ylim=0)
    axes.figure.savefig(path)


if __name__ == "__main__":
    for name, points in losses().items():
        draw(points, DOCS / f"{name}.png")
