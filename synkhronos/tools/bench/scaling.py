r"""A model of how training scales, fitted to measurements and extrapolated to more devices.

The time of a step on n devices is modelled as

    T(n) = C + U + 2 (n-1)/n S / B + L (n-1) + O

with C the compute time of the rows of one device, U the time of the update of all parameters, which
each device computes anew, S the bytes of the gradients, B the bandwidth of the all-reduce, L its
latency, and O all other time of a call, waiting included. Ranks meet at a place in memory where
each looks at all others, and rings of GPUs pass on n - 1 times, so the latency grows with n.

Speedups are over one device that computes the same rows in one step. *weak* gives each device the
same number of rows for every n: (n C + U) / T(n). *strong* divides the rows of the minibatch that
was measured, R in all: C is the time of R/n rows. The model assumes that nothing overlaps; that
every device has its own memory bandwidth, which cores of one machine do not; and that B does not
fall with n, although it does between machines.

The measurements are those of ``synkhronos bench training --json``; nothing is measured here.
"""

import json
from pathlib import Path

from synkhronos.tools.bench import frame

LOAD_MATTERS = False  # nothing is measured
DEVICES = (1, 2, 4, 8, 16, 32, 64)
LATENCY = 20e-6  # seconds, for each other device: a barrier, and the start of a kernel
# The exceptions that a file raises that `bench training` did not write.
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.add_argument(
        "file", metavar="FILE.json", help="output of `synkhronos bench training --json`"
    )


def measure(args, report):
    """Fit the model, and show what it gives."""
    report.results = read(args.file, measured)
    report.show(text(report.results))


def read(file, understand):
    """Return what a function makes of a file with JSON."""
    try:
        return understand(json.loads(Path(file).read_text()))
    except (OSError, *NONSENSE) as error:
        raise frame.Failed(f"cannot use {file}: {type(error).__name__}: {error}") from None


def step_seconds(n, compute, nbytes, bandwidth, latency=LATENCY, overhead=0.0, update=0.0):
    """Return the modelled time of a step on n devices, in seconds.

    Parameters
    ----------
    n : int
    compute : float
        Seconds that one device computes with its rows.
    nbytes : float
        Size of the gradients.
    bandwidth : float
        Bytes per second of the all-reduce: the bus bandwidth of nccl-tests.
    latency, overhead, update : float
        Seconds; the latency for each other device.

    Examples
    --------
    >>> step_seconds(1, 1.0, 100e6, 1e9)
    1.0
    >>> round(step_seconds(2, 1.0, 100e6, 1e9, latency=0), 3)
    1.1
    """
    if n == 1:
        return compute + update + overhead
    moved = 2 * (n - 1) / n * nbytes / bandwidth
    return compute + update + moved + latency * (n - 1) + overhead


def fit_bandwidth(n, nbytes, seconds, latency=LATENCY):
    """Return the bandwidth at which the model's all-reduce takes `seconds` on n devices."""
    return 2 * (n - 1) / n * nbytes / max(seconds - latency * (n - 1), 1e-9)


def measured(results):
    """Return curves for the networks of ``bench training``.

    A file of several sizes of minibatches gives several curves.
    """
    curves = []
    for found in results["networks"].values():
        ranked = [s for s in found["systems"].values() if s["form"] == "one"]
        most = max(ranked, key=lambda system: system["number"])
        n, seconds, shares = most["number"], most["seconds"], most["shares"]
        if n < 2:
            raise ValueError("it has no measurement of two ranks or more")
        update = found.get("update", 0.0)  # files of earlier versions do not have it
        compute = max(0.0, seconds * (shares["compute"] + shares["input"]) - update)
        nbytes = 4 * found["numbers"]
        bandwidth = fit_bandwidth(n, nbytes, seconds * shares["collectives"])
        overhead = seconds * (shares["waiting"] + shares["call"])
        serial = found["systems"]["serial, 1 thread"]["seconds"]
        # One rank uses all cores, so it does not measure one device.
        points = {s["number"]: serial / s["seconds"] for s in ranked if s["number"] > 1}
        title = "".join(c if c.isprintable() else "?" for c in found["title"])
        if len({each.get("batch") for each in results["networks"].values()}) > 1:
            title += f", {found['batch']} rows"
        curves.append(curve_of(title, compute, nbytes, bandwidth, overhead, points, n, update))
        curves[-1]["strong"] = _strong(curves[-1])
    return curves


def curve_of(name, compute, nbytes, bandwidth, overhead, points, n_ranks=8, update=0.0):
    """Return a curve: what the model is fitted to, and the speedups, measured and modelled."""
    curve = {
        "name": name,
        "ranks": n_ranks,
        "compute": compute,
        "update": update,
        "bytes": nbytes,
        "bandwidth": bandwidth,
        "overhead": overhead,
        "measured": {str(n): speedup for n, speedup in points.items()},
    }
    curve["model"] = {str(n): (n * compute + update) / step_of(curve, compute, n) for n in DEVICES}
    return curve


def step_of(curve, compute, n=None):
    """Return the modelled time of a step in which a device computes for some seconds."""
    return step_seconds(
        curve["ranks"] if n is None else n,
        compute,
        curve["bytes"],
        curve["bandwidth"],
        overhead=curve["overhead"],
        update=curve["update"],
    )


def _strong(curve):
    """Return the speedups if n devices divide the rows that were measured."""
    rows = curve["ranks"] * curve["compute"]  # the time of all rows on one device
    return {str(n): (rows + curve["update"]) / step_of(curve, rows / n, n) for n in DEVICES}


def text(curves):
    """Return the table of speedups, measured and modelled."""
    heads = "", "compute", "MB", "GB/s", *map(str, DEVICES)
    table = frame.Table("speedup on n devices", *heads, first=34, least=8)
    lines = [table.head]
    for curve in curves:
        figures = f"{1e3 * curve['compute']:.1f} ms", f"{curve['bytes'] / 1e6:.1f}"
        figures += (f"{curve['bandwidth'] / 1e9:.2f}",)
        name = "weak" if "strong" in curve else "model"
        rows = [(curve["name"][:34], name, *figures, *_cells(curve["model"]))]
        if "strong" in curve:
            rows.append(("", "strong", "", "", "", *_cells(curve["strong"])))
        rows.append(("", "measured", "", "", "", *_cells(curve["measured"])))
        lines += [table.line(*row) for row in rows]
    return "\n".join(lines)


def _cells(speedups):
    found = [speedups.get(str(n)) for n in DEVICES]
    return ["" if each is None else f"{each:.2f}" for each in found]


def plot(curves, path):
    """Draw efficiency against devices: the model as lines, measurements as dots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    panel = figure.subplots()
    for number, curve in enumerate(curves):
        colour = f"C{number % 10}"
        values = [100 * curve["model"][str(n)] / n for n in DEVICES]
        panel.semilogx(DEVICES, values, color=colour, base=2, lw=1.2, label=curve["name"])
        points = {int(n): 100 * speedup / int(n) for n, speedup in curve["measured"].items()}
        panel.semilogx(list(points), list(points.values()), "o", color=colour, base=2)
    panel.set(xlabel="devices", ylabel="speedup / devices, in %", ylim=(60, 112))
    panel.set_xticks(DEVICES, map(str, DEVICES))
    panel.legend(fontsize="small", title="lines: model; dots: measured", ncols=2)
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
