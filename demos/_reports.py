"""The reports of the training demos: tables, comparisons and pictures."""

import numpy as np

from demos._shared import count
from demos._tables import table


def times_table(logs, columns):
    """Return a table of the times of runs, with further columns: a cell for each run."""
    rows = [
        [log.label, f"{log.milliseconds:.2f}", f"{sum(log.seconds):.2f}", *cells]
        for log, *cells in zip(logs, *columns.values())
    ]
    return table(["", "ms/minibatch", "training s", *columns], rows)


def report_runs(parallel, serials, n_ranks, columns):
    """Print a table of runs and the speedup of the ranks; return the speedup."""
    speedups = ["", *(f"{log.milliseconds / parallel.milliseconds:.2f}" for log in serials)]
    columns = {**columns, f"speedup of {count(n_ranks, 'rank')}": speedups}
    print("\n" + times_table([parallel, *serials], columns) + "\n")
    return report_speedup(parallel, serials, n_ranks)


def report_speedup(parallel, serials, n_ranks):
    """Print and return the speedup of the ranks over the fastest serial run."""
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


def report_replicas(equal, what="parameters"):
    """Print the result of `demos._shared.replicas_equal`."""
    print(f"The {what} of all ranks are equal, bit by bit: {'yes' if equal else 'NO'}")


def plot_runs(file, logs, accuracy="validation accuracy"):
    """Draw the losses of runs, their accuracies, if any, and their speeds."""
    from matplotlib.figure import Figure

    curves = {"training loss": [log.losses for log in logs]}
    if any(log.accuracies for log in logs):
        curves[f"{accuracy} in %"] = [100 * np.array(log.accuracies) for log in logs]
    n_panels = len(curves) + 1
    figure = Figure(figsize=(4 * n_panels, 3.5), layout="constrained")
    *panels, last = figure.subplots(1, n_panels)
    for axes, (title, runs) in zip(panels, curves.items()):
        _draw_curves(axes, title, runs, [log.label for log in logs])
    panels[-1].legend()
    _draw_rates(last, logs)
    figure.savefig(file, dpi=120)
    print(f"Drew {file}")


def _draw_curves(axes, title, runs, labels):
    from matplotlib.ticker import MaxNLocator

    # Each curve is narrower than the one below it, so that curves that coincide are all visible.
    widths = np.linspace(1 + 1.5 * (len(runs) - 1), 1, len(runs))
    for values, label, width in zip(runs, labels, widths):
        axes.plot(range(1, len(values) + 1), values, ".-", linewidth=width, label=label)
    axes.set(xlabel="epoch", ylabel=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_rates(axes, logs):
    """Draw a bar for each run, in the color of its curves."""
    colors = [f"C{number}" for number in range(len(logs))]
    bars = axes.bar(range(len(logs)), [log.rows_per_second for log in logs], color=colors)
    axes.set(xticks=[], ylabel="rows per second")
    first = next((log for log in logs if log.is_serial), None)
    if first is not None:
        speedups = [log.rows_per_second / first.rows_per_second for log in logs]
        axes.bar_label(bars, [f"{speedup:.2f}" for speedup in speedups])
        axes.margins(y=0.1)
        axes.set_xlabel(f"speedup over {first.label}")
