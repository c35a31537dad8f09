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

The measurements are those of ``synkhronos bench training --json``; nothing is measured here. Those
of the largest n are used. Only where each rank is one device, those of all n are: on GPUs, and with
``--ranks 1,2,4,8 --one-core-each``, with ``--weak`` or without. Then everything is fitted to all: C
is the time of the slowest rank, so waiting is part of it, and grows by a share with each doubling
of n, because cores share their memory, and the slowest of more ranks is slower; L and B are fitted
to the time of the collectives; and O has a part that grows with n - 1. Then a table has the model's
time of a step for each n beside the measured one, and what the fit to the least n > 1 alone gives.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from synkhronos.tools.bench import frame

LOAD_MATTERS = False  # nothing is measured
DEVICES = (1, 2, 4, 8, 16, 32, 64)
LATENCY = 20e-6  # seconds, for each other device: a barrier, and the start of a kernel
# The exceptions that a file raises that `bench training` did not write.
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


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
        found = json.loads(Path(file).read_text(), parse_constant=_refuse_constant)
    except (OSError, *NONSENSE) as error:
        raise frame.Failed(f"cannot use {file}: {type(error).__name__}: {error}") from None
    try:
        return understand(found)
    except NONSENSE as error:
        raise frame.Failed(
            f"cannot use {file}: it is not what the benchmark writes with --json "
            f"({type(error).__name__}: {error})"
        ) from None


def _refuse_constant(name):
    raise ValueError(f"{name} is no figure")


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


class Sample(NamedTuple):
    """A measured step on n ranks: seconds of its parts, and of all."""

    n: int
    rows: float  # of each rank
    compute: float
    reduce: float
    other: float
    seconds: float


def measured(results):
    """Return curves for the networks of ``bench training``.

    A file of several sizes of minibatches gives several curves.
    """
    # Of --weak, each number of ranks is found on its own, with the same rows for each rank.
    groups = {}
    for key, found in results["networks"].items():
        weak = found.get("weak")
        groups.setdefault(key if weak is None else (found["title"], weak), []).append(found)
    # Otherwise fewer ranks have more threads each, or share a GPU.
    names = results.get("devices", ["cpu"])
    are_apart = results.get("one_core") or (len({*names}) == len(names) and "cpu" not in names)
    first = 1 if are_apart else 2
    n_sizes = len({found.get("weak", found.get("batch")) for [found, *_] in groups.values()})
    curves = []
    for group in groups.values():
        found, weak = group[0], "weak" in group[0]
        title = found["title"] + (
            f", {found['weak' if weak else 'batch']} rows" if n_sizes > 1 else ""
        )
        title = "".join(c if c.isprintable() else "?" for c in title)
        samples, points = [], {}
        update = min(each.get("update", 0.0) for each in group)  # none in files of earlier versions
        for each in group:
            systems = each["systems"]
            serial = systems.get(f"serial, {names[0]}", systems["serial, 1 thread"])
            for system in systems.values():
                if system["form"] == "one" and system["number"] >= first:
                    samples.append(_sample(system, each.get("batch", 1), update, are_apart))
                    points[system["number"]] = serial["seconds"] / system["seconds"]
        samples = sorted(samples) if are_apart else sorted(samples)[-1:]
        if not samples or samples[-1].n < 2:
            raise ValueError("it has no measurement of two ranks or more")
        curves.append(_fitted(title, samples, 4 * found["numbers"], update, points))
        curves[-1]["strong"] = _strong(curves[-1])
        least = [each for each in samples if each.n > 1][:1]
        alone = _fitted(title, least, 4 * found["numbers"], update, {})
        curves[-1]["steps"] = [
            {
                "ranks": each.n,
                "rows": each.rows * each.n,
                "measured": each.seconds,
                "model": _modelled(curves[-1], each),
                "least": _modelled(alone, each),
            }
            for each in samples
        ]
    return curves


def _sample(system, batch, update, are_apart):
    n, seconds, shares = system["number"], system["seconds"], system["shares"]
    compute = max(0.0, seconds * (shares["compute"] + shares["input"]) - update)
    compute += seconds * shares["waiting"] * are_apart
    other = seconds * (shares["call"] + shares["waiting"] * (not are_apart))
    return Sample(n, batch / n, compute, seconds * shares["collectives"], other, seconds)


def _fitted(title, samples, nbytes, update, points):
    """Return the curve whose parts are fitted to the samples."""
    most, several = samples[-1], len(samples) > 1
    reduced = [each for each in samples if each.n > 1]
    compute, contention = _fit(
        [each.compute for each in samples],
        [each.rows for each in samples],
        [each.rows * math.log2(each.n) for each in samples] if several else None,
    )
    moved = [2 * (each.n - 1) / each.n * nbytes for each in reduced]
    if len(reduced) > 1:
        waits = [each.n - 1 for each in reduced]
        per_byte, latency = _fit([each.reduce for each in reduced], moved, waits)
        bandwidth = 1 / max(per_byte, 1e-15)
    else:
        latency, bandwidth = LATENCY, fit_bandwidth(most.n, nbytes, most.reduce)
    overhead, waiting = _fit(
        [each.other for each in samples],
        [1.0] * len(samples),
        [each.n - 1 for each in samples] if several else None,
    )
    curve = curve_of(
        title, compute * most.rows, nbytes, bandwidth, overhead, points, most.n, update,
        latency=latency, waiting=waiting, contention=contention / compute if compute else 0.0,
    )  # fmt: skip
    return {**curve, "rows": most.rows}


def _fit(seconds, one, two):
    """Return a, b >= 0 of the least relative errors of a one + b two; b is 0 without two."""
    import numpy as np
    from scipy.optimize import nnls

    scales = np.maximum(seconds, 1e-9)
    columns = np.stack([one] if two is None else [one, two], axis=1)
    found = nnls(columns / scales[:, None], seconds / scales)[0]
    return (*found.tolist(), 0.0)[:2]


def _modelled(curve, sample):
    """Return the modelled time of a step with the rows of a sample."""
    return step_of(curve, curve["compute"] * sample.rows / curve["rows"], sample.n)


def curve_of(
    name, compute, nbytes, bandwidth, overhead, points, n_ranks=8, update=0.0, *,
    latency=LATENCY, waiting=0.0, contention=0.0,
):  # fmt: skip
    """Return a curve: what the model is fitted to, and the speedups, measured and modelled.

    For each other device `waiting` is added to the overhead, and with each doubling of the devices
    `contention`, a share of it, to the compute time.
    """
    curve = {
        "name": name,
        "ranks": n_ranks,
        "compute": compute,
        "update": update,
        "bytes": nbytes,
        "bandwidth": bandwidth,
        "overhead": overhead,
        "latency": latency,
        "waiting": waiting,
        "contention": contention,
        "measured": {str(n): speedup for n, speedup in points.items()},
    }
    curve["model"] = {str(n): (n * compute + update) / step_of(curve, compute, n) for n in DEVICES}
    return curve


def step_of(curve, compute, n=None):
    """Return the modelled time of a step in which a device computes for some seconds.

    Those are without contention.
    """
    n = curve["ranks"] if n is None else n
    return step_seconds(
        n,
        compute * (1 + curve["contention"] * math.log2(n)),
        curve["bytes"],
        curve["bandwidth"],
        curve["latency"],
        overhead=curve["overhead"] + curve["waiting"] * (n - 1),
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
    for curve in curves:
        if len(curve.get("steps", ())) > 1:
            lines += _steps(curve)
    return "\n".join(lines)


def _steps(curve):
    """Return the table of times of a step, of the model and measured."""
    lines = [
        f"\n{curve['name']}: {curve['bandwidth'] / 1e9:.2f} GB/s; each other rank adds "
        f"{1e6 * curve['latency']:.1f} us to a reduction, {1e6 * curve['waiting']:.1f} us to the "
        f"rest, and each doubling {100 * curve['contention']:.1f} % to computing"
    ]
    heads = "rows", "measured", "model", "error", "fit to least n", "error"
    table = frame.Table("milliseconds of a step on n ranks", *heads, first=34)
    lines.append(table.head)
    for each in curve["steps"]:
        cells = [f"{each['rows']:.0f}", f"{1e3 * each['measured']:.2f}"]
        for name in ("model", "least"):
            cells.append(f"{1e3 * each[name]:.2f}")
            cells.append(f"{100 * (each[name] / each['measured'] - 1):+.1f} %")
        lines.append(table.line(f"  {each['ranks']}", *cells))
    return lines


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
