"""A long validation pass, whole and in slices, beside serial Theano; and picking rows by number.

The pass goes through 784-800-800-10, in float32. Times are medians. The peak memory is that of the
master's own memory, beyond what ranks share. Rows are picked from a large Data of images, by all
ranks for a function that reads one number of each, and by one numpy.take.
"""

import re
from pathlib import Path

import numpy as np

from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options

_UNITS = (800, 800)
_IMAGE = (3, 128, 128)  # shape of a row in the data set that rows are picked from
_PICKED = 256
_PICKS = 40


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add_session(parser)
    options.add(parser, "--rows", options.count, 60_000, "rows of the pass")
    options.add(parser, "--slices", options.count, 10, "slices of each rank")
    options.add(parser, "--passes", options.count, 7, "passes to time")
    options.add(parser, "--megabytes", options.count, 1500, "size of what rows are picked from")


def measure(args, report):
    """Measure both, and show the tables."""
    report.results.update(measure_pass(args))
    report.results.update(measure_picks(args))
    report.show(_text(report.results, args))


def measure_pass(args):
    """Time the pass: serially with one thread and with all, and on all ranks, whole and sliced."""
    from threadpoolctl import threadpool_limits

    from synkhronos._host import tensor as T
    from synkhronos._machine import devices
    from synkhronos.tools.bench import networks

    with frame.session(args.ranks, args.device) as synk:
        network = networks.Mlp(_UNITS)
        hits = T.eq(T.argmax(network.scores, axis=1), network.y).mean()
        f = synk.function([network.x, network.y], [network.loss, hits])
        data = f.build_inputs(*network.rows(args.rows))
        arrays = [each.data for each in data]

        def serial(threads):
            with threadpool_limits(threads):
                f._compiled(*arrays)

        calls = {
            "serial_1_thread": lambda: serial(1),
            "serial_all_threads": lambda: serial(devices.usable_cores()),
            "whole": lambda: f(*data),
            "sliced": lambda: f(*data, num_slices=args.slices),
        }
        passes = turns.Turns(None, rounds=args.passes, most=1)
        passes.add_calls(calls)
        figures = passes.take_all("passes")
        with turns.shown("the peak memory of a pass"):
            peaks = {name: _peak_bytes(calls[name]) for name in ("whole", "sliced")}
    return {
        **{f"{name}_s": found["median"] for name, found in figures.items()},
        **{f"{name}_peak_bytes": peak for name, peak in peaks.items()},
    }


def _peak_bytes(call):
    """Return the growth of this process's own memory during a call, at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, see proc(5)
    before = _status("VmRSS") - _status("RssShmem")
    call()
    return max(0, _status("VmHWM") - _status("RssShmem") - before)


def _status(field):
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def measure_picks(args):
    """Time picking random rows of a large array: by all ranks, and by one NumPy take."""
    from synkhronos._host import tensor as T

    row_bytes = 4 * int(np.prod(_IMAGE))
    rows = max(1, args.megabytes * 1_000_000 // row_bytes)
    random = np.random.RandomState(0)
    with frame.session(args.ranks, args.device) as synk:
        x = T.tensor4("x", "float32")
        f = synk.function([x], (x[:, 0, 0, 0].sum(), "sum"))
        data = synk.data(var=x)
        data.set_shape((rows, *_IMAGE))
        with turns.shown(f"{args.megabytes:,} MB of images"):
            data.data.fill(1)
        buffer = np.empty((_PICKED, *_IMAGE), "float32")

        def pick():
            return random.randint(0, rows, _PICKED)

        picks = turns.Turns(None, rounds=_PICKS, most=1)
        picks.add_calls(
            {
                "ranks": lambda: f(data, batch=pick()),
                "take": lambda: np.take(data.data, pick(), axis=0, out=buffer, mode="clip"),
            }
        )
        figures = picks.take_all("picks")
    return {
        f"picked_by_{name}_bytes_per_s": _PICKED * row_bytes / found["median"]
        for name, found in figures.items()
    }


def _text(found, args):
    one, many, whole, sliced = (
        found[f"{name}_s"] for name in ("serial_1_thread", "serial_all_threads", "whole", "sliced")
    )
    title = f"A pass over {args.rows:,} rows"
    table = frame.Table(title, "seconds", "/ 1 thread", "/ all threads", first=32)
    lines = [table.head]
    for title, seconds in (
        ("serial, 1 thread", one),
        ("serial, all threads", many),
        (f"{args.ranks} ranks, whole", whole),
        (f"{args.ranks} ranks, {args.slices} slices", sliced),
    ):
        ratios = f"{one / seconds:.2f}", f"{many / seconds:.2f}"
        lines.append(table.line(f"  {title}", f"{seconds:.3f}", *ratios))
    megabytes = [found[f"{name}_peak_bytes"] / 1e6 for name in ("whole", "sliced")]
    ranks, take = (found[f"picked_by_{name}_bytes_per_s"] / 1e9 for name in ("ranks", "take"))
    lines += [
        f"Slicing costs {100 * (sliced / whole - 1):.1f} %. Peak memory of a rank: "
        "{:.0f} MB whole, {:.0f} MB sliced".format(*megabytes),
        f"{_PICKED} random rows of {args.megabytes} MB of images: one numpy.take {take:.2f} GB/s, "
        f"{args.ranks} ranks {ranks:.2f} GB/s ({ranks / take:.2f} times faster)",
    ]
    return "\n".join(lines)
