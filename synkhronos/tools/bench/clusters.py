r"""A model of training on many machines, for ``synkhronos bench scaling``; nothing is measured.

On one machine a step takes T(n) with its n devices. On M machines it takes

    T(n) + K + L (M - 1) O + N        K: a call's messages to all machines, and back
    N = max(R - h min(R, C), 0)       R: the reduction between machines, h: hidden by overlap
    R = L + (M - 1) O + 2 L + D / B   for more than 32 KiB, in chunks as the carriers make them
    R = L + (M - 1) (O + S / B)       for less, which travels with its announcement

with C the compute time, S the bytes of the gradients, L the latency of the network, B its bandwidth
in each direction, and O the time of a carrier for one message. D is what the busiest machine sends:
its values of all chunks that others reduce, and its own results to all others.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Any

from synkhronos.comm.mpi.all_reduce import CHUNK
from synkhronos.comm.mpi.transfers import SMALL

MACHINES = (8, 16, 32, 64)
MESSAGE_SECONDS = 30e-6  # assumed, for a small message that a carrier sends and one that it gets

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "kb": 1e3, "mb": 1e6, "gb": 1e9}


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


def given(latency: float, bandwidth: float) -> Cable:
    """Return a cable of which only these two figures are known."""
    return Cable(latency, bandwidth, 2 * latency + MESSAGE_SECONDS)


def measured(results: dict[str, Any]) -> tuple[Cable, list[tuple[int, float, float]]]:
    """Return the cable of a file of ``synkhronos bench machines``, and how well the model fits.

    The bandwidth is that of the largest all_reduce of Synkhronos. The second result has bytes, and
    the seconds of the model and of the measurement, for each all_reduce.
    """
    layout = min(results["layouts"], key=lambda each: sum(each["counts"]))
    n, latency = len(layout["counts"]), layout["network"]["latency"]
    rows = {row.get("bytes", 0): row["synkhronos"]["median"] for row in layout["rows"]}
    largest = max(rows)
    if largest <= SMALL:
        raise ValueError(f"it has no all_reduce of more than {SMALL} bytes")
    if n < 2:
        raise ValueError("it has one machine only")
    moved = max(rows[largest] - 3 * latency - (n - 1) * MESSAGE_SECONDS, 1e-9)
    bandwidth = busiest_bytes(n, largest) / moved
    balanced = [step for step in layout["steps"] if step["hidden"] is not None]
    balanced = sorted(balanced, key=lambda step: (step["bytes"], -_distance(step)))
    hidden = min(max(balanced[-1]["hidden"], 0.0), 1.0) if balanced else 0.0
    cable = Cable(float(latency), bandwidth, float(rows[0]), n, hidden)
    fit = [(b, reduction_seconds(n, b, cable), rows[b]) for b in sorted(rows) if b]
    return cable, fit


def _distance(step):
    """Return how far a step's compute time is from the time of its communication."""
    return abs(math.log(step["compute"]["median"] / step["communication"]["median"]))


def with_figures(cable: Cable | None, latency: float | None, bandwidth: float | None) -> Cable:
    """Return a cable with the figures that are given in place of its own."""
    if cable is None:
        if latency is None or bandwidth is None:
            raise ValueError("--latency and --bandwidth go together, without --network")
        return given(latency, bandwidth)
    if latency is not None:
        cable = replace(cable, latency=latency, call=cable.call + 2 * (latency - cable.latency))
    return cable if bandwidth is None else replace(cable, bandwidth=bandwidth)


def busiest_bytes(machines: int, nbytes: float) -> float:
    """Return the bytes that the machine sends that sends most, in an all-reduce in chunks.

    >>> busiest_bytes(2, 1e6), busiest_bytes(4, 4 * CHUNK) / CHUNK
    (1000000.0, 6.0)
    """
    chunk = min(CHUNK, nbytes)
    own = math.ceil(math.ceil(nbytes / chunk) / machines)
    return nbytes + own * chunk * (machines - 2)


def reduction_seconds(machines: int, nbytes: float, cable: Cable) -> float:
    """Return the modelled time of an all-reduce between machines."""
    others = machines - 1
    if nbytes <= SMALL:
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


def speedups(curve, step_of_devices, cable: Cable) -> dict[str, Any]:
    """Return the speedups over one machine that the model gives one network.

    Parameters
    ----------
    curve : dict
        As `synkhronos.tools.bench.scaling` makes it.
    step_of_devices : callable
        Takes a compute time; returns the time of a step on the devices of one machine.
    cable : Cable
    """
    compute, nbytes = curve["compute"], curve["bytes"]
    alone = step_of_devices(compute)
    found = {"step": alone}
    for name, hidden in (("off", 0.0), ("on", cable.hidden)):
        weak, strong = {}, {}
        for n in MACHINES:
            weak[str(n)] = n * alone / step_seconds(n, alone, compute, nbytes, cable, hidden)
            part = compute / n
            seconds = step_seconds(n, step_of_devices(part), part, nbytes, cable, hidden)
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
        lines.append(f"all_reduce on {cable.machines} machines, model / measured, in ms:")
        lines += [f"{b:13,}{1e3 * m:12.3f} /{1e3 * t:12.3f}" for b, m, t in fit]
    devices = "".join(f"{n:>8}" for n in MACHINES)
    lines.append("Speedup over one machine. Weak: each machine has as many rows as one has alone;")
    lines.append("strong: these rows are divided over the machines.")
    lines.append(f"{'':34}{'devices':>8}{'ms':>9}{'overlap':>9}   weak{devices}   strong{devices}")
    for curve in curves:
        found = curve["machines"]
        names = ["off"] + ["on"] * bool(cable.hidden)
        for name in names:
            line = f"{curve['name'][:34]:34}{curve['ranks']:8}{1e3 * found['step']:9.1f}{name:>9}"
            for kind, space in (("weak", 7), ("strong", 9)):
                cells = "".join(f"{found[name][kind][str(n)]:8.2f}" for n in MACHINES)
                line += " " * space + cells
            lines.append(line)
    return "\n".join(lines)
