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

With figures of a network, from ``synkhronos bench machines --json`` or given, it says what 8 to 64
machines would give, each with as many devices as were measured: see the model in
`synkhronos.tools.bench.clusters`.

The measurements are those of ``synkhronos bench training --json``, beside published ones: those of
Theano-MPI (Ma, Mao and Taylor 2016, arXiv:1605.08325; the table of its README, Tesla K80, seconds
for 5120 images, computing + communicating), and that of Synkhronos (Stooke and Abbeel 2017,
arXiv:1710.04162: ResNet-50, 7.5 times as fast on the 8 GPUs of a DGX-1).
"""

import argparse
import json
import sys
from pathlib import Path

from synkhronos.tools.bench import clusters, options

DEVICES = (1, 2, 4, 8, 16, 32, 64)
LATENCY = 20e-6  # seconds, for each other device: a barrier, and the start of a kernel

# model, rows per GPU, bytes of its gradients: {GPUs: (seconds computing, communicating)}
THEANO_MPI = {
    ("AlexNet", 128, 4 * 60_965_224): {
        1: (20.50, 0),
        2: (10.35, 0.78),
        4: (5.13, 0.54),
        8: (2.63, 0.61),
    },
    ("GoogLeNet", 32, 4 * 13_378_280): {
        1: (63.89, 0),
        2: (31.40, 1.00),
        4: (15.51, 0.71),
        8: (7.69, 0.80),
    },
    ("VGG16", 16, 4 * 138_357_544): {
        1: (358.29, 0),
        2: (176.08, 13.90),
        4: (90.44, 9.28),
        8: (55.12, 12.59),
    },
    ("VGG16", 32, 4 * 138_357_544): {
        1: (343.37, 0),
        2: (169.12, 7.14),
        4: (86.97, 4.80),
        8: (43.29, 5.41),
    },
    ("ResNet50", 64, 4 * 25_557_032): {
        1: (163.15, 0),
        2: (80.09, 0.81),
        4: (40.25, 0.56),
        8: (20.12, 0.57),
    },
}
IMAGES = 5120
# The exceptions that a file raises that `bench training` did not write.
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
SYNKHRONOS = {8: 7.5}  # GPUs: speedup, ResNet-50


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "file",
        metavar="FILE.json",
        nargs="?",
        help="output of `synkhronos bench training --json`; without it published results only",
    )
    parser.add_argument(
        "--network",
        metavar="FILE",
        help="output of `synkhronos bench machines --json FILE`, for a model of 8 to 64 machines",
    )
    parser.add_argument(
        "--latency",
        type=clusters.seconds,
        metavar="TIME",
        help="of the network between machines, such as 100us; with --network in place of its",
    )
    parser.add_argument(
        "--bandwidth",
        type=clusters.rate,
        metavar="RATE",
        help="of the network in each direction, such as 100Mbit or 1.2GB; with --network in place "
        "of its",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--plot", metavar="FILE.png", help="draw efficiency against devices")


def main(args) -> int:
    """Fit, print, and return the exit status."""
    if not options.can_plot(args.plot):
        return 1
    curves = published()
    cable, fit, file = None, [], args.file
    try:
        if args.file:
            curves += measured(json.loads(Path(args.file).read_text()))
        file = args.network
        if args.network:
            cable, fit = clusters.measured(json.loads(Path(args.network).read_text()))
    except (OSError, *NONSENSE) as error:
        print(f"cannot use {file}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if args.network or args.latency or args.bandwidth:
        try:
            cable = clusters.with_figures(cable, args.latency, args.bandwidth)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        for curve in curves:
            curve["machines"] = clusters.speedups(curve, _on_devices(curve), cable)
    print(json.dumps(curves, indent=2) if args.json else text(curves))
    if cable is not None and not args.json:
        print("\n" + clusters.text(curves, cable, fit))
    if args.plot:
        plot(curves, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    return 0


def _on_devices(curve):
    """Return a function: compute time -> the time of a step on the devices of one machine."""
    return lambda compute: step_seconds(
        curve["ranks"],
        compute,
        curve["bytes"],
        curve["bandwidth"],
        overhead=curve["overhead"],
        update=curve["update"],
    )


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


def published():
    """Return the curves of Theano-MPI, with the bandwidth of its 8 GPUs, and of Synkhronos."""
    curves = []
    for (model, rows, nbytes), table in THEANO_MPI.items():
        steps = IMAGES / rows  # steps of one GPU
        compute = table[1][0] / steps
        bandwidth = fit_bandwidth(8, nbytes, table[8][1] / (steps / 8))
        points = {n: table[1][0] / sum(seconds) for n, seconds in table.items()}
        name = f"Theano-MPI {model}-{rows}b"
        curves.append(_curve(name, compute, nbytes, bandwidth, 0.0, points))
    # The paper gives the speedup only. All of the loss, 0.5 of 7.5, is taken as communication.
    (_, _, nbytes), (n, speedup) = ("ResNet50", 64, 4 * 25_557_032), next(iter(SYNKHRONOS.items()))
    compute = THEANO_MPI["ResNet50", 64, nbytes][1][0] / (IMAGES / 64)
    bandwidth = fit_bandwidth(n, nbytes, compute * (n / speedup - 1))
    curves.append(_curve("Synkhronos ResNet-50", compute, nbytes, bandwidth, 0.0, SYNKHRONOS))
    return curves


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
        curves.append(_curve(title, compute, nbytes, bandwidth, overhead, points, n, update))
        curves[-1]["strong"] = _strong(curves[-1])
    return curves


def _curve(name, compute, nbytes, bandwidth, overhead, points, n_ranks=8, update=0.0):
    other = {"overhead": overhead, "update": update}
    return {
        "name": name,
        "ranks": n_ranks,
        "compute": compute,
        "update": update,
        "bytes": nbytes,
        "bandwidth": bandwidth,
        "overhead": overhead,
        "measured": {str(n): speedup for n, speedup in points.items()},
        "model": {
            str(n): (n * compute + update) / step_seconds(n, compute, nbytes, bandwidth, **other)
            for n in DEVICES
        },
    }


def _strong(curve):
    """Return the speedups if n devices divide the rows that were measured."""
    rows = curve["ranks"] * curve["compute"]  # the time of all rows on one device
    other = {"overhead": curve["overhead"], "update": curve["update"]}
    return {
        str(n): (rows + curve["update"])
        / step_seconds(n, rows / n, curve["bytes"], curve["bandwidth"], **other)
        for n in DEVICES
    }


def text(curves):
    """Return the table of speedups, measured and modelled."""
    head = f"{'speedup on n devices':42}{'compute':>10}{'MB':>7}{'GB/s':>7}"
    lines = [head + "".join(f"{n:>8}" for n in DEVICES)]
    for curve in curves:
        line = f"{curve['name'][:34]:34}{'weak' if 'strong' in curve else 'model':>8}"
        line += f"{1e3 * curve['compute']:7.1f} ms{curve['bytes'] / 1e6:7.1f}"
        line += f"{curve['bandwidth'] / 1e9:7.2f}"
        lines.append(line + "".join(f"{curve['model'][str(n)]:8.2f}" for n in DEVICES))
        if "strong" in curve:
            cells = "".join(f"{curve['strong'][str(n)]:8.2f}" for n in DEVICES)
            lines.append(f"{'':34}{'strong':>8}{'':24}{cells}")
        found = [curve["measured"].get(str(n)) for n in DEVICES]
        cells = "".join(f"{'' if each is None else format(each, '.2f'):>8}" for each in found)
        lines.append(f"{'':34}{'measured':>8}{'':24}{cells}".rstrip())
    return "\n".join(lines)


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
