"""Theano-MPI's rules: images per second of each on some ranks, and where the time goes.

Each figure is that of a run of `synkhronos rule`, of a multilayer perceptron on made-up images.
EASGD and ASGD have a server beside the ranks, in a process without a device. The images of all
ranks are counted between the sixth step of the rank that comes last, and the last step of the rank
that ends first. The shares of time are those of the rank that records: computing, waiting for
other ranks (sync), exchanging (comm), waiting for data (wait), and the rest.

At the end BSP on two ranks is compared with `make_train_step` on two ranks, which trains the same
model with the same number of rows: runs in turns, medians of steps.

With --convergence the rules train on scikit-learn's digits instead: validation cost against the
images that all ranks have trained with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from synkhronos import _wording
from synkhronos.rules.options import RULES
from synkhronos.tools.bench import options as checks

_FIRST = 5  # steps of each rank that are not counted
_SECONDS = 1800  # for one run, which compiles
_MODEL = Path(__file__).with_name("perceptron.py")
_SHARES = ("calc", "sync", "comm", "wait")
_DIGITS = {"learning_rate": 0.01, "units": [64], "batch_size": 32}


class RunFailed(Exception):
    """A run has not ended well; the message is for the user."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--rules", type=checks.names(RULES, "rule"), default=list(RULES), metavar="NAMES",
        help=f"which ({','.join(RULES)})",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=_counts, default=[1, 2, 4], metavar="LIST", help="ranks (1,2,4)"
    )
    parser.add_argument("--batch", type=checks.count, default=256, help="rows of a batch (256)")
    parser.add_argument(
        "--steps", type=checks.count, default=60, help="batches of each rank, but for 5 (60)"
    )
    parser.add_argument(
        "--units", type=_counts, default=[512, 512], metavar="LIST", help="of layers (512,512)"
    )
    parser.add_argument(
        "--pairs", type=checks.whole, default=5, metavar="N",
        help="runs of BSP and of make_train_step to compare; 0 for none (5)",
    )  # fmt: skip
    parser.add_argument("--convergence", action="store_true", help="train on digits instead")
    parser.add_argument("--epochs", type=checks.count, default=20, help="of --convergence (20)")
    parser.add_argument("--plot", metavar="FILE", help="draw the curves of --convergence")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")


def _counts(text):
    return [checks.count(each.strip()) for each in text.split(",")]


def main(arguments: argparse.Namespace) -> int:
    """Run the benchmark and print its figures; return the exit status."""
    if arguments.plot and not arguments.convergence:
        print("--plot draws the curves of --convergence: add it", file=sys.stderr)
        return 2
    if not checks.can_plot(arguments.plot):
        return 2
    try:
        figures = _converge(arguments) if arguments.convergence else _measure(arguments)
    except RunFailed as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2))
    return 0


def _measure(arguments):
    rows, widths = [], "{:8}{:>6}{:>12}{:>9}{:>9}{:>9}{:>9}{:>9}"
    print(widths.format("rule", "ranks", "images/s", *_SHARES, "rest"))
    runs = [(rule, ranks) for rule in arguments.rules for ranks in arguments.ranks]
    for rule, ranks in checks.progress("runs", runs):
        row = measure(rule, ranks, arguments.steps, arguments.batch, arguments.units)
        rows.append(row)
        shares = [f"{100 * row[name]:.1f} %" for name in (*_SHARES, "rest")]
        print(widths.format(rule, ranks, f"{row['images_per_second']:.0f}", *shares), flush=True)
    figures = {"batch": arguments.batch, "units": arguments.units, "rules": rows}
    if arguments.pairs:
        figures["pairs"] = pairs = []
        for _ in checks.progress("pairs", range(arguments.pairs)):
            one = measure("BSP", 2, arguments.steps, arguments.batch, arguments.units)
            other = _train_step(arguments)
            pairs.append([one["images_per_second_of_steps"], other])
        ratios = sorted(one / other for one, other in pairs)
        figures["ratio"] = statistics.median(ratios)
        print(
            f"\nBSP on 2 ranks, beside make_train_step on 2 ranks: {figures['ratio']:.3f} of its "
            f"images/s (median of {len(ratios)}; {ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
    return figures


def measure(rule: str, ranks: int, steps: int, batch: int, units: list[int]) -> dict:
    """Return the figures of one run of a rule."""
    with tempfile.TemporaryDirectory(prefix="synkhronos-bench-") as folder:
        batches = (steps + _FIRST) * ranks
        settings = {"batch_size": batch, "units": units, "timeline": folder, "workers": ranks}
        given = ["--made-batches", str(batches), "--print-freq", str(2 * ranks)]
        _run(rule, ranks, folder, "made", settings, given)
        timelines = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        shares = shares_of(_recorded(folder)["all_time"])
    rate, of_steps = rates(timelines)
    figures = {"rule": rule, "ranks": ranks, "images_per_second": rate, **shares}
    return {**figures, "images_per_second_of_steps": of_steps}


def rates(timelines: list[list[list[float]]]) -> tuple[float, float]:
    """Return the images per second of all ranks together, and those of median steps.

    Parameters
    ----------
    timelines : list
        For each rank, the time in seconds at which each step ended, and its rows.

    Examples
    --------
    >>> steps = [[float(second), 10] for second in range(12)]
    >>> rates([steps, steps])
    (20.0, 20.0)
    """
    begin = max(steps[_FIRST][0] for steps in timelines)
    end = min(steps[-1][0] for steps in timelines)
    rows = sum(rows for steps in timelines for at, rows in steps if begin < at <= end)
    if end <= begin:
        raise RunFailed("the ranks did not train at the same time: give more --steps.")
    of_steps = sum(
        steps[-1][1] / statistics.median(b[0] - a[0] for a, b in zip(steps[_FIRST:], later))
        for steps, later in ((steps, steps[_FIRST + 1 :]) for steps in timelines)
    )
    return rows / (end - begin), of_steps


def shares_of(rows: list[list[float]]) -> dict:
    """Return the shares of time in the rows of a recorder, but for its first row.

    >>> found = shares_of([[2, 9.0, 9.0, 0, 0, 0], [4, 1.0, 0.5, 0.125, 0.25, 0.0]])
    >>> found["calc"], found["comm"], found["rest"]
    (0.5, 0.25, 0.125)
    """
    sums = [sum(column) for column in zip(*(rows[1:] or rows))]
    if not sums or not sums[1]:
        raise RunFailed("the recorder has no times: give more --steps.")
    found = {name: value / sums[1] for name, value in zip(_SHARES, sums[2:])}
    return {**found, "rest": 1 - sum(found.values())}


def _recorded(folder):
    from synkhronos.rules import recorder

    return recorder.read(Path(folder, "inforec", "inforec.pkl"))


def _run(rule, ranks, folder, data, settings, given):
    """Run `synkhronos rule` to its end."""
    command = [sys.executable, "-m", "synkhronos", "rule", rule, str(_MODEL), "Perceptron"]
    command += ["--devices", ",".join(["cpu"] * ranks), "--snapshot-freq", "0"]
    command += ["--server", "extra"] * (rule in ("EASGD", "ASGD"))
    for name in ("inforec", "snapshot", "log"):
        command += [f"--{name}-path", str(Path(folder, name))]
    for name, value in settings.items():
        command += ["--set", f"{name}={value!r}"]
    done = subprocess.run(
        [*command, *given],
        env={**os.environ, "SYNKHRONOS_DATA": data},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode:
        printed = "\n".join(done.stderr.strip().splitlines()[-20:])
        raise RunFailed(
            f"{rule} on {_wording.count(ranks, 'rank')} has failed ({done.returncode}):\n{printed}"
        )


def _train_step(arguments):
    """Return the images per second of make_train_step on two ranks."""
    command = [sys.executable, "-m", "synkhronos.tools.bench.perceptron", "--ranks", "2"]
    command += ["--steps", str(arguments.steps), "--batch", str(arguments.batch)]
    command += ["--units", json.dumps(arguments.units)]
    flags = os.environ.get("THEANO_FLAGS", "")
    done = subprocess.run(
        command,
        env={**os.environ, "THEANO_FLAGS": f"{flags},floatX=float32,device=cpu".strip(",")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode:
        printed = "\n".join(done.stderr.strip().splitlines()[-20:])
        raise RunFailed(f"make_train_step has failed ({done.returncode}):\n{printed}")
    return json.loads(done.stdout.splitlines()[-1])["images_per_second"]


def _converge(arguments):
    """Train each rule on digits; return, for each number of ranks, images and costs."""
    curves: dict[str, list[list[float]]] = {}
    ranks = max(arguments.ranks)
    print(f"validation cost on scikit-learn's digits, {ranks} ranks, by images trained with")
    for rule in checks.progress("rules", arguments.rules):
        with tempfile.TemporaryDirectory(prefix="synkhronos-bench-") as folder:
            settings = {**_DIGITS, "n_epochs": arguments.epochs, "timeline": folder}
            settings["workers"] = ranks
            _run(rule, ranks, folder, "digits", settings, [])
            rows = _recorded(folder)["val_info"]
        curves[rule] = [[row[0] * _DIGITS["batch_size"], row[1], row[2]] for row in rows]
        for images, cost, error in curves[rule]:
            print(f"{rule:8}{images:>10.0f}{cost:>10.4f}{100 * error:>9.2f} % wrong", flush=True)
    if arguments.plot:
        draw(curves, arguments.plot, ranks)
    return {"ranks": ranks, "epochs": arguments.epochs, "curves": curves}


def draw(curves: dict[str, list[list[float]]], path: str, ranks: int) -> None:
    """Draw the costs of rules against images into a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    for (rule, points), mark in zip(curves.items(), "os^v"):
        axes.plot(*list(zip(*points))[:2], marker=mark, markersize=3, linewidth=1, label=rule)
    axes.set_xlabel("images that all ranks have trained with")
    axes.set_ylabel("validation cost")
    axes.set_yscale("log")
    axes.set_title(f"scikit-learn's digits on {ranks} ranks", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
