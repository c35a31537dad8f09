r"""The model of ``synkhronos bench scaling`` beside published figures, and of many machines.

Published are those of Theano-MPI (Ma, Mao and Taylor 2016, arXiv:1605.08325; the table of its
README, Tesla K80, seconds for 5120 images, computing + communicating), and that of Synkhronos
(Stooke and Abbeel 2017, arXiv:1710.04162: ResNet-50, 7.5 times as fast on the 8 GPUs of a DGX-1).

With figures of a network, from ``synkhronos bench machines --json FILE`` or given, it says what 8
to 64 machines would give, each with as many devices as were measured; nothing is measured. On one
machine a step takes T(n) with its n devices. On M machines it takes

    T(n) + K + L (M - 1) O + N        K: a call's messages to all machines, and back
    N = max(R - h min(R, C), 0)       R: the reduction between machines, h: hidden by overlap
    R = L + (M - 1) O + 2 L + D / B   for more than 32 KiB (12 KiB on 12 machines), in chunks
    R = L + (M - 1) (O + S / B)       for less, which travels with its announcement

with C the compute time, S the bytes of the gradients, L the latency of the network, B its bandwidth
in each direction, and O the time of a carrier for one message. D is what the busiest machine sends:
its values of all chunks that others reduce, and its own results to all others.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

from synkhronos.comm.mpi.all_reduce import chunk_bytes
from synkhronos.comm.mpi.transfers import small_for_all
from synkhronos.tools.bench import frame, scaling

LOAD_MATTERS = False  # nothing is measured
MACHINES = (8, 16, 32, 64)
MESSAGE_SECONDS = 30e-6  # assumed, for a small message that a carrier sends and one that it gets

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "kb": 1e3, "mb": 1e6, "gb": 1e9}


_IMAGES = 5120

# Model, rows per GPU, numbers of its gradients; seconds (computing, communicating) on 1, 2, 4, 8.
# fmt: off
_THEANO_MPI = [
    ("AlexNet", 128, 60_965_224, (20.50, 0), (10.35, 0.78), (5.13, 0.54), (2.63, 0.61)),
    ("GoogLeNet", 32, 13_378_280, (63.89, 0), (31.40, 1.00), (15.51, 0.71), (7.69, 0.80)),
    ("VGG16", 16, 138_357_544, (358.29, 0), (176.08, 13.90), (90.44, 9.28), (55.12, 12.59)),
    ("VGG16", 32, 138_357_544, (343.37, 0), (169.12, 7.14), (86.97, 4.80), (43.29, 5.41)),
    ("ResNet50", 64, 25_557_032, (163.15, 0), (80.09, 0.81), (40.25, 0.56), (20.12, 0.57)),
]
# fmt: on
_SYNKHRONOS = {8: 7.5}  # GPUs: speedup, ResNet-50


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.add_argument(
        "file", metavar="FILE.json", nargs="?", help="output of `synkhronos bench training --json`"
    )
    parser.add_argument("--network", metavar="FILE", help="output of `synkhronos bench machines`")
    what = "of the network between machines; with --network in place of its"
    parser.add_argument("--latency", type=seconds, metavar="TIME", help=f"such as 100us, {what}")
    parser.add_argument("--bandwidth", type=rate, metavar="RATE", help=f"such as 100Mbit, {what}")


def measure(args, report):
    """Show what the model gives."""
    curves = report.results = published()
    if args.file:
        curves += scaling.read(args.file, scaling.measured)
    cable, fit = scaling.read(args.network, measured) if args.network else (None, [])
    if args.network or args.latency or args.bandwidth:
        cable = with_figures(cable, args.latency, args.bandwidth)
        for curve in curves:
            curve["machines"] = speedups(curve, cable)
    report.show(scaling.text(curves))
    if cable is not None:
        report.show("\n" + text(curves, cable, fit))


plot = scaling.plot


def published():
    """Return the curves of Theano-MPI, with the bandwidth of its 8 GPUs, and of Synkhronos."""
    curves = []
    for model, rows, numbers, *seconds in _THEANO_MPI:
        steps = _IMAGES / rows  # steps of one GPU
        compute = seconds[0][0] / steps
        bandwidth = scaling.fit_bandwidth(8, 4 * numbers, seconds[-1][1] / (steps / 8))
        points = {n: seconds[0][0] / sum(each) for n, each in zip(scaling.DEVICES, seconds)}
        name = f"Theano-MPI {model}-{rows}b"
        curves.append(scaling.curve_of(name, compute, 4 * numbers, bandwidth, 0.0, points))
    # The paper gives the speedup only. All of the loss, 0.5 of 7.5, is taken as communication.
    compute, nbytes = curves[-1]["compute"], curves[-1]["bytes"]
    [(n, speedup)] = _SYNKHRONOS.items()
    bandwidth = scaling.fit_bandwidth(n, nbytes, compute * (n / speedup - 1))
    name = "Synkhronos ResNet-50"
    return [*curves, scaling.curve_of(name, compute, nbytes, bandwidth, 0.0, _SYNKHRONOS)]


@dataclass(frozen=True)
class Cable:
    """The network between the machines.

    Attributes
    ----------
    latency : float
        Seconds of a small message.
    bandwidth : float
        Bytes per second, in each direction.
    call : float
        Seconds that a call costs on `machines` machines.
    machines : int
    hidden : float
        The share of a reduction as long as the compute time that overlap hides.
    """

    latency: float
    bandwidth: float
    call: float
    machines: int = 2
    hidden: float = 0.0


def seconds(text: str) -> float:
    """Return the seconds in a text such as ``100us``, ``0.1ms`` or ``1s``.

    >>> seconds("250us")
    0.00025
    """
    return _quantity(text, _SECONDS, "a time such as 100us, 0.1ms or 1s")


def rate(text: str) -> float:
    """Return the bytes per second in a text such as ``100Mbit``, ``10Gbit`` or ``1.2GB``.

    >>> rate("100Mbit")
    12500000.0
    """
    return _quantity(text, _RATES, "an amount for each second, such as 100Mbit, 10Gbit or 1.2GB")


def _quantity(text, units, expected):
    number = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text.strip().lower()[len(number) :]
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        value = 0
    if not 0 < value < 1e15:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def measured(results):
    """Return the cable of a file of ``synkhronos bench machines``, and how well the model fits.

    The bandwidth is that of the largest all_reduce of Synkhronos. The second result has bytes, and
    the seconds of the model and of the measurement, for each all_reduce.
    """
    layout = min(results["layouts"], key=lambda each: sum(each["counts"]))
    n, latency = len(layout["counts"]), layout["network"]["latency"]
    rows = {row.get("bytes", 0): row["synkhronos"]["median"] for row in layout["rows"]}
    largest = max(rows)
    if n < 2:
        raise ValueError("it has one machine only")
    if largest <= small_for_all(n):
        raise ValueError(f"it has no all_reduce of more than {small_for_all(n)} bytes")
    # Each of these reductions is a call, too.
    moving = rows[largest] - rows[0] - 3 * latency - (n - 1) * MESSAGE_SECONDS
    bandwidth = busiest_bytes(n, largest) / max(moving, 1e-9)
    balanced = [step for step in layout["steps"] if step["hidden"] is not None]
    balanced = sorted(balanced, key=lambda step: (step["bytes"], -_distance(step)))
    hidden = min(max(balanced[-1]["hidden"], 0.0), 1.0) if balanced else 0.0
    cable = Cable(float(latency), bandwidth, float(rows[0]), n, hidden)
    fit = [(b, cable.call + reduction_seconds(n, b, cable), rows[b]) for b in sorted(rows) if b]
    return cable, fit


def _distance(step):
    """Return how far a step's compute time is from the time of its communication."""
    return abs(math.log(step["compute"]["median"] / step["communication"]["median"]))


def with_figures(cable: Cable | None, latency: float | None, bandwidth: float | None) -> Cable:
    """Return a cable with the figures that are given in place of its own."""
    if cable is None:
        if latency is None or bandwidth is None:
            raise frame.Refused("--latency and --bandwidth go together, without --network")
        return Cable(latency, bandwidth, 2 * latency + MESSAGE_SECONDS)
    if latency is not None:
        cable = replace(cable, latency=latency, call=cable.call + 2 * (latency - cable.latency))
    return cable if bandwidth is None else replace(cable, bandwidth=bandwidth)


def busiest_bytes(machines: int, nbytes: float) -> float:
    """Return the bytes that the machine sends that sends most, in an all-reduce in chunks.

    >>> busiest_bytes(2, 1e6), busiest_bytes(4, 1 << 20) / (1 << 20)
    (1000000.0, 1.5)
    """
    chunk = min(chunk_bytes(nbytes, machines), nbytes)
    own = math.ceil(math.ceil(nbytes / chunk) / machines)
    return nbytes + own * chunk * (machines - 2)


def reduction_seconds(machines: int, nbytes: float, cable: Cable) -> float:
    """Return the modelled time of an all-reduce between machines."""
    others = machines - 1
    if nbytes <= small_for_all(machines):
        return cable.latency + others * (MESSAGE_SECONDS + nbytes / cable.bandwidth)
    announced = cable.latency + others * MESSAGE_SECONDS
    return announced + 2 * cable.latency + busiest_bytes(machines, nbytes) / cable.bandwidth


def step_seconds(
    machines: int, alone: float, compute: float, nbytes: float, cable: Cable, hidden: float = 0.0
) -> float:
    """Return the modelled time of a step that takes `alone` seconds on one machine.

    Examples
    --------
    >>> cable = Cable(latency=0.0, bandwidth=1e8, call=0.0)
    >>> round(step_seconds(2, 1.0, 0.9, 1e8, cable), 3)
    2.0
    >>> round(step_seconds(2, 1.0, 0.9, 1e8, cable, hidden=0.5), 3)
    1.55
    """
    reduction = reduction_seconds(machines, nbytes, cable)
    call = cable.call + (machines - cable.machines) * MESSAGE_SECONDS
    return alone + call + max(reduction - hidden * min(reduction, compute), 0.0)


def speedups(curve, cable):
    """Return the speedups over one machine that the model gives one network."""
    compute, nbytes = curve["compute"], curve["bytes"]
    alone = scaling.step_of(curve, compute)
    found = {"step": alone}
    for name, hidden in (("off", 0.0), ("on", cable.hidden)):
        weak, strong = {}, {}
        for n in MACHINES:
            weak[str(n)] = n * alone / step_seconds(n, alone, compute, nbytes, cable, hidden)
            part = compute / n
            seconds = step_seconds(n, scaling.step_of(curve, part), part, nbytes, cable, hidden)
            strong[str(n)] = alone / seconds
        found[name] = {"weak": weak, "strong": strong}
    return found


def text(curves, cable: Cable, fit) -> str:
    """Return the table of speedups that the model gives."""
    lines = [
        f"A model, no measurement: machines with {1e3 * cable.latency:.3f} ms and "
        f"{8e-6 * cable.bandwidth:.1f} Mbit/s between them; a call costs {1e3 * cable.call:.2f} ms "
        f"on {cable.machines}."
    ]
    if fit:
        lines.append(f"all_reduce, a call, on {cable.machines} machines, model / measured, in ms:")
        lines += [f"{b:13,}{1e3 * m:12.3f} /{1e3 * t:12.3f}" for b, m, t in fit]
    lines.append("Speedup over one machine. Weak: each machine has as many rows as one has alone;")
    lines.append("strong: these rows are divided over the machines.")
    machines = [str(n) for n in MACHINES]
    heads = "devices", "ms", "overlap", "weak", *machines, "strong", *machines
    table = frame.Table("", *heads, first=34, least=8)
    lines.append(table.head)
    for curve in curves:
        found = curve["machines"]
        first = curve["name"][:34], str(curve["ranks"]), f"{1e3 * found['step']:.1f}"
        for name in ["off"] + ["on"] * bool(cable.hidden):
            weak, strong = (
                [f"{found[name][kind][n]:.2f}" for n in machines] for kind in ("weak", "strong")
            )
            lines.append(table.line(*first, name, "", *weak, "", *strong))
    return "\n".join(lines)
