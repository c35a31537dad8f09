"""What the training demos share: arguments, the fork, logs, tables and curves."""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

import synkhronos as synk


@dataclass
class Log:
    """What one training run measured."""

    label: str
    losses: list = field(default_factory=list)  # of training, one for each epoch
    accuracies: list = field(default_factory=list)  # likewise; may stay empty
    seconds: list = field(default_factory=list)  # one for each minibatch
    values: list = field(default_factory=list)  # of the parameters, at the end; may stay empty

    @property
    def milliseconds(self):
        """The median over the minibatches: other programs on the machine disturb it least."""
        return 1e3 * float(np.median(self.seconds))


def add_common_arguments(parser, parallel=True):
    """Add --seed and --plot, and for what runs on ranks --ranks and --devices."""
    add = parser.add_argument
    if parallel:
        add("--ranks", type=positive, metavar="N", help="how many (one for each GPU or else core)")
        add("--devices", type=names, metavar="A,B", help="one for each rank, as in cpu,cpu")
    add("--seed", type=int, default=1, metavar="N", help="of all random numbers (1)")
    add("--plot", type=Path, metavar="FILE.png", help="draw the curves of training")


def positive(text):
    """Return a number from the command line that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def names(text):
    """Return the names from the command line that commas divide."""
    return text.split(",")


def fork(arguments, program):
    """Fork as the arguments say, and return the number of ranks; or exit with a sentence."""
    try:
        return synk.fork(arguments.ranks, devices=arguments.devices)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        sys.exit(f"{program}: {error}")


def usable_threads():
    """Return how many threads BLAS uses when nobody limits it."""
    return max([pool["num_threads"] for pool in threadpool_info()], default=1)


def count(number, what):
    """Return "1 rank" or "2 ranks"."""
    return f"{number} {what}{'s' * (number != 1)}"


def table(titles, rows):
    """Return lines with one cell for each title: the first on the left, all others on the right."""
    lines = [[str(cell) for cell in row] for row in [titles, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip()
        for first, *others in lines
    )


def report_speedup(parallel, serials, n_ranks):
    """Print how fast the ranks were; return the speedup against serial Theano at its best."""
    ranks = count(n_ranks, "rank")
    best = min(serials, key=lambda log: log.milliseconds)
    speedup = best.milliseconds / parallel.milliseconds
    if speedup > 1:
        print(f"Speedup {speedup:.2f} over the fastest serial run ({best.label}).")
    else:
        print(
            f"No speedup: {ranks} took {1 / speedup:.2f} times as long as {best.label}.\n"
            "Larger minibatches (--batch) give the ranks more to do between two exchanges;\n"
            "more ranks than cores, or other programs on the machine, take it away."
        )
    return speedup


def plot_curves(file, logs, accuracy="validation accuracy"):
    """Draw the losses of runs, and their accuracies where they have them, on the same axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    curves = [("training loss", [log.losses for log in logs])]
    if any(log.accuracies for log in logs):
        percent = [100 * np.array(log.accuracies) for log in logs]
        curves.append((f"{accuracy} in %", percent))
    figure = Figure(figsize=(4 * len(curves), 3.5), layout="constrained")
    all_axes = np.atleast_1d(figure.subplots(1, len(curves)))
    # Curves that coincide must all be seen: each is drawn narrower than the one below it.
    widths = np.linspace(1 + 1.5 * (len(logs) - 1), 1, len(logs))
    for axes, (title, runs) in zip(all_axes, curves):
        for log, values, width in zip(logs, runs, widths):
            axes.plot(range(1, len(values) + 1), values, ".-", linewidth=width, label=log.label)
        axes.set(xlabel="epoch", ylabel=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    all_axes[-1].legend()
    figure.savefig(file, dpi=120)
    print(f"Drew {file}")
