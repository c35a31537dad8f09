"""A validation pass over many rows, whole and in slices; and picking rows by number."""

import json
import re
import statistics
import time
from pathlib import Path

import numpy as np

from synkhronos.tools.bench import options

ROWS, WIDTHS = 60_000, (784, 800, 800, 10)
PASSES = 7
IMAGE = (3, 128, 128)  # shape of a row in the data set that rows are picked from


def add_arguments(parser):
    """Add the options of this benchmark."""
    for name, default, what in (
        ("--ranks", 2, "ranks of the session"),
        ("--rows", ROWS, "rows of the pass"),
        ("--slices", 10, "slices of each rank"),
        ("--passes", PASSES, "passes to time"),
        ("--megabytes", 1500, "size of the data that rows are picked from"),
    ):
        parser.add_argument(
            name, type=options.count, default=default, help=f"{what} (default: {default})"
        )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def main(args) -> int:
    """Measure, print, and return the exit status."""
    results = {**measure_pass(args), **measure_picks(args)}
    print(json.dumps(results, indent=2)) if args.json else _print(results, args)
    return 0


def measure_pass(args):
    """Time the pass: serially with one thread and with all, and on all ranks, whole and sliced."""
    from threadpoolctl import threadpool_limits

    import synkhronos as synk
    from synkhronos._host import library
    from synkhronos._host import tensor as T
    from synkhronos._machine import devices

    random = np.random.RandomState(0)
    x, y = T.matrix("x", "float32"), T.ivector("y")
    layer = x
    for n_in, n_out in zip(WIDTHS, WIDTHS[1:]):
        layer = layer if layer is x else T.nnet.relu(layer)
        layer = T.dot(layer, library.shared(random.randn(n_in, n_out).astype("float32") * 0.05))
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(layer), y).mean()
    hits = T.eq(T.argmax(layer, axis=1), y).mean()

    synk.fork(args.ranks)
    try:
        f = synk.function([x, y], [loss, hits])
        images = random.rand(args.rows, WIDTHS[0]).astype("float32")
        data_x, data_y = f.build_inputs(images, np.zeros(args.rows, "int32"))
        arrays = data_x.data, data_y.data
        serial = f._compiled

        def with_threads(threads):
            with threadpool_limits(threads):
                serial(*arrays)

        calls = {
            "serial_1_thread": lambda: with_threads(1),
            "serial_all_threads": lambda: with_threads(devices.usable_cores()),
            "whole": lambda: f(data_x, data_y),
            "sliced": lambda: f(data_x, data_y, num_slices=args.slices),
        }
        seconds = {name: [] for name in calls}
        for repetition in options.progress("passes", range(args.passes + 1)):
            for name, call in calls.items():
                begin = time.perf_counter()
                call()
                if repetition:
                    seconds[name].append(time.perf_counter() - begin)
        with options.shown("the peak memory of a pass"):
            peaks = {name: _peak_bytes(calls[name]) for name in ("whole", "sliced")}
    finally:
        synk.close()
    return {
        **{f"{name}_s": statistics.median(times) for name, times in seconds.items()},
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
    """Time picking 256 random rows of a large array: by all ranks, and by one NumPy take."""
    import synkhronos as synk
    from synkhronos._host import tensor as T

    row_bytes = 4 * int(np.prod(IMAGE))
    rows = args.megabytes * 1_000_000 // row_bytes
    random = np.random.RandomState(0)
    synk.fork(args.ranks)
    try:
        x = T.tensor4("x", "float32")
        # The function reads one number of each image, so that picking takes most of the time.
        f = synk.function([x], (x[:, 0, 0, 0].sum(), "sum"))
        data = synk.data(var=x)
        data.set_shape((rows, *IMAGE))
        with options.shown(f"{args.megabytes:,} MB of images"):
            data.data.fill(1)
        buffer = np.empty((256, *IMAGE), "float32")
        batches = [random.randint(0, rows, 256) for _ in range(40)]
        picks = {
            "ranks": lambda batch: f(data, batch=batch),
            "take": lambda batch: np.take(data.data, batch, axis=0, out=buffer, mode="clip"),
        }
        seconds = {name: [] for name in picks}
        for batch in options.progress("picks", batches):
            for name, pick in picks.items():
                begin = time.perf_counter()
                pick(batch)
                seconds[name].append(time.perf_counter() - begin)
    finally:
        synk.close()
    taken = 256 * row_bytes
    return {
        f"picked_by_{name}_bytes_per_s": taken / statistics.median(times[5:])
        for name, times in seconds.items()
    }


def _print(results, args):
    sliced = results["sliced_s"]
    one, many = results["serial_1_thread_s"], results["serial_all_threads_s"]
    layers = "-".join(map(str, WIDTHS))
    print(f"A pass over {args.rows:,} rows through {layers}, float32; {args.ranks} ranks, medians")
    print(f"  serial, 1 thread         {one:8.3f} s")
    print(f"  serial, all threads      {many:8.3f} s")
    print(f"  ranks, whole             {results['whole_s']:8.3f} s")
    print(
        f"  ranks, {args.slices} slices         {sliced:8.3f} s  ({one / sliced:.2f} and "
        f"{many / sliced:.2f} times faster than serial)"
    )
    print(f"  slicing costs            {100 * (sliced / results['whole_s'] - 1):8.1f} %")
    whole_mb, sliced_mb = (results[f"{name}_peak_bytes"] / 1e6 for name in ("whole", "sliced"))
    print(f"  peak memory of a rank    {whole_mb:8.0f} MB whole, {sliced_mb:.0f} MB sliced")
    ranks, take = (results[f"picked_by_{name}_bytes_per_s"] / 1e9 for name in ("ranks", "take"))
    ratio = ranks / take
    print(f"256 random rows of {args.megabytes} MB of images")
    print(f"  one numpy.take           {take:8.2f} GB/s")
    print(f"  picked by {args.ranks} ranks        {ranks:8.2f} GB/s  ({ratio:.2f} times faster)")
