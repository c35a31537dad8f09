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

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import groups
from synkhronos import _wording
from synkhronos.rules import recorder
from synkhronos.rules.options import RULES
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options, programs

_FIRST = 5  # steps of each rank that are not counted
_SECONDS = 1800  # for one run, which compiles
_MODEL = Path(__file__).with_name("programs") / "perceptron.py"
_SHARES = ("calc", "sync", "comm", "wait")
_DIGITS = {"learning_rate": 0.01, "units": [64], "batch_size": 32}


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(parser, "--rules", options.names(RULES, "rule"), list(RULES), "which")
    options.add(parser, "--ranks", options.counts, [1, 2, 4], "ranks")
    options.add(parser, "--batch", options.count, 256, "rows of a batch")
    options.add(parser, "--steps", options.count, 60, "batches of each rank, but for 5")
    options.add(parser, "--units", options.counts, [512, 512], "of layers")
    what = "runs of BSP and of make_train_step to compare; 0 for none"
    options.add(parser, "--pairs", options.whole, 5, what)
    parser.add_argument("--convergence", action="store_true", help="train on digits instead")
    options.add(parser, "--epochs", options.count, 20, "of --convergence")


def measure(args, report):
    """Run the rules, and show their figures."""
    if args.plot and not args.convergence:
        raise frame.Refused("--plot draws the curves of --convergence: add it")
    if args.convergence:
        _converge(args, report)
        return
    found = report.results
    found.update(batch=args.batch, units=args.units, rules=[])
    shares = (*_SHARES, "rest")
    table = frame.Table("rule", "ranks", "images/s", *shares, first=8, least=9)
    report.show(table.head)
    runs = [(rule, ranks) for rule in args.rules for ranks in args.ranks]
    for rule, ranks in turns.progress("runs", runs):
        row = run_of(rule, ranks, args)
        found["rules"].append(row)
        cells = [f"{100 * row[name]:.1f} %" for name in shares]
        report.show(table.line(rule, str(ranks), f"{row['images_per_second']:.0f}", *cells))
    if args.pairs:
        found["pairs"] = pairs = []
        for _ in turns.progress("pairs", range(args.pairs)):
            pairs.append([run_of("BSP", 2, args)["images_per_second_of_steps"], _train_step(args)])
        ratios = sorted(one / other for one, other in pairs)
        found["ratio"] = statistics.median(ratios)
        report.show(
            f"\nBSP on 2 ranks, beside make_train_step on 2 ranks: {found['ratio']:.3f} of its "
            f"images/s (median of {len(ratios)}; {ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


def run_of(rule: str, ranks: int, args) -> dict:
    """Return the figures of one run of a rule."""
    with tempfile.TemporaryDirectory(prefix="synkhronos-bench-") as folder:
        batches = (args.steps + _FIRST) * ranks
        settings = {"batch_size": args.batch, "units": args.units}
        settings.update(timeline=folder, workers=ranks)
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
        raise frame.Failed("the ranks did not train at the same time: give more --steps.")
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
        raise frame.Failed("the recorder has no times: give more --steps.")
    found = {name: value / sums[1] for name, value in zip(_SHARES, sums[2:])}
    return {**found, "rest": 1 - sum(found.values())}


def _recorded(folder):
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
        env=groups.environment(SYNKHRONOS_DATA=data),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode:
        printed = "\n".join(done.stderr.strip().splitlines()[-20:])
        ranks = _wording.count(ranks, "rank")
        raise frame.Failed(f"{rule} on {ranks} has failed ({done.returncode}):\n{printed}")


def _train_step(args):
    """Return the images per second of make_train_step on two ranks."""
    given = json.dumps({"ranks": 2, "steps": args.steps, "batch": args.batch, "units": args.units})
    flags = f"{os.environ.get('THEANO_FLAGS', '')},floatX=float32,device=cpu".strip(",")
    name, line = "make_train_step", [sys.executable, str(_MODEL), given]
    with programs.Program(name, line, groups.environment(THEANO_FLAGS=flags)) as program:
        return program.hear()


def _converge(args, report):
    """Train each rule on digits; show images, costs and errors."""
    ranks = max(args.ranks)
    report.results.update(ranks=ranks, epochs=args.epochs, curves={})
    report.show(f"validation cost on scikit-learn's digits, {ranks} ranks, by images trained with")
    for rule in turns.progress("rules", args.rules):
        with tempfile.TemporaryDirectory(prefix="synkhronos-bench-") as folder:
            settings = {**_DIGITS, "n_epochs": args.epochs, "timeline": folder, "workers": ranks}
            _run(rule, ranks, folder, "digits", settings, [])
            rows = _recorded(folder)["val_info"]
        curve = [[row[0] * _DIGITS["batch_size"], row[1], row[2]] for row in rows]
        report.results["curves"][rule] = curve
        for images, cost, error in curve:
            report.show(f"{rule:8}{images:>10.0f}{cost:>10.4f}{100 * error:>9.2f} % wrong")


def plot(results, path):
    """Draw the costs of rules against images."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    for (rule, points), mark in zip(results["curves"].items(), "os^v"):
        axes.plot(*list(zip(*points))[:2], marker=mark, markersize=3, linewidth=1, label=rule)
    axes.set_xlabel("images that all ranks have trained with")
    axes.set_ylabel("validation cost")
    axes.set_yscale("log")
    axes.set_title(f"scikit-learn's digits on {results['ranks']} ranks", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
