"""The time of each collective, beside Open MPI, gloo, and a copy of the same bytes.

Bytes are those of each rank's array of float32; reductions are sums. As in nccl-tests,
doc/PERFORMANCE.md, the algorithm bandwidth is the size of the whole divided by the time. The whole
is the array of one rank for all_reduce, reduce and broadcast, that of all ranks together for
all_gather, gather and scatter. The bus bandwidth is the algorithm bandwidth times 2(n-1)/n for
all_reduce, (n-1)/n for all_gather, gather and scatter, and 1 for reduce and broadcast. GB are 1e9
bytes. Times are medians, of other systems those of their slowest rank. The systems take turns in
rounds, and sleep in between. Synkhronos is timed in Python, from the call to its return.
"""

import argparse
import contextlib
import functools
import json
import os
import shutil
import statistics
import sys
import time

import numpy as np

from synkhronos.tools.bench import models, options, peers

SIZES = "1K,16K,256K,1M,4M,16M,64M"
ROUNDS = 5  # in which the systems take turns
REPETITIONS = 300  # of one system in one round, at most
TIMED_FIRST = 3  # repetitions; their time says how many more fit into `--seconds`
COLOURS = {"synk": "C3", "Open MPI": "C0", "gloo": "C1", "memcpy": "0.6"}

_clock = time.perf_counter


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--ranks", type=options.count, default=2, help="ranks of each system (default: 2)"
    )
    parser.add_argument(
        "--sizes", type=parse_sizes, default=SIZES, help=f"bytes of a rank's array ({SIZES})"
    )
    parser.add_argument(
        "--collectives",
        type=options.names(peers.COLLECTIVES, "collective"),
        default=list(peers.COLLECTIVES),
        metavar="NAMES",
        help=f"which ({','.join(peers.COLLECTIVES)})",
    )
    parser.add_argument(
        "--peers", action="store_true", help="compare with Open MPI and gloo where installed"
    )
    parser.add_argument(
        "--peer-python",
        action="append",
        type=python_path,
        default=[],
        metavar="PATH",
        help="a Python to look for mpi4py and torch in before this one; may be repeated",
    )
    parser.add_argument(
        "--seconds",
        type=options.positive,
        default=0.3,
        metavar="S",
        help="time for each system, size and collective (default: 0.3)",
    )
    parser.add_argument(
        "--gigabytes",
        type=options.positive,
        default=1.0,
        metavar="G",
        help="size of the Data to scatter (default: 1)",
    )
    parser.add_argument(
        "--no-models", action="store_true", help="leave out ResNet-50, many variables and the Data"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--plot", metavar="FILE.png", help="draw time against bytes")


def parse_sizes(text):
    """Return the numbers of bytes in a list such as ``1K,2.5M,1G``; K is 1024."""
    sizes = []
    for word in text.split(","):
        number, unit = word.strip().upper().rstrip("IB"), 1
        if number[-1:] in ("K", "M", "G"):
            number, unit = number[:-1], 1024 ** (1 + "KMG".index(number[-1]))
        try:
            size = float(number) * unit
        except ValueError:
            size = 0
        if size < 4 or size % 4:
            raise argparse.ArgumentTypeError(
                f"{word!r} is no number of bytes: expected some float32, such as 4, 1K or 2.5M"
            )
        sizes.append(int(size))
    return sizes


def python_path(text):
    """Return the path of a program."""
    path = shutil.which(text)
    if path is None:
        raise argparse.ArgumentTypeError(f"there is no program {text!r}")
    return path


def main(args) -> int:
    """Measure, print, and return the exit status."""
    import synkhronos as synk

    if not options.can_plot(args.plot):  # checked before the measurements, which take minutes
        return 1
    results = {"ranks": args.ranks, "cores": os.cpu_count(), "missing": {}, "cells": []}
    results["busy_cores"] = busy = options.busy_cores()
    if busy > 0.2:
        print(f"others keep {busy:.1f} cores busy: this tells little about speed", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        synk.fork(args.ranks)
        stack.callback(synk.close)
        systems = [_Synk(args.ranks), _Copy(args.ranks)]
        try:
            systems[1:1] = _start_peers(args, stack, results["missing"]) if args.peers else []
            _measure(args, systems, results)
        except peers.PeerError as error:
            print(error, file=sys.stderr)
            return 1
    if args.json:
        print(json.dumps(results, indent=2))
    if args.plot:
        plot(results, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    return 0


def _start_peers(args, stack, missing):
    started = []
    pythons = [*args.peer_python, sys.executable]
    for kind, name in peers.NAMES.items():
        try:
            python = peers.find(kind, pythons)
            started.append(stack.enter_context(peers.Peers(kind, python, args.ranks)))
        except peers.PeerError as error:
            missing[name] = str(error)
            print(f"not compared with {name}: {error}", file=sys.stderr)
    return started


def _measure(args, systems, results):
    results["versions"] = {s.name: s.version for s in systems if isinstance(s, peers.Peers)}
    say = (lambda text: None) if args.json else functools.partial(print, flush=True)
    for collective in args.collectives:
        for system in systems:
            system.check(collective)
        say(f"{collective}; {args.ranks} ranks, {os.cpu_count()} cores, float32, medians")
        say(f"{'bytes':>13}  {'':10}{'us':>11}{'algbw GB/s':>12}{'busbw GB/s':>12}")
        for nbytes in args.sizes:
            seconds = measure(systems, collective, nbytes, args.seconds)
            for name in seconds:
                cell = _cell(args.ranks, collective, nbytes, name, seconds)
                results["cells"].append(cell)
                say(_line(cell))
    if not args.no_models:
        ranks = [system for system in systems if isinstance(system, peers.Peers)]
        results["model"] = models.measure_model(ranks, 10 * args.seconds)
        say(models.model_text(results["model"]))
        results["many"] = models.measure_many(models.MANY, 10 * args.seconds)
        say(models.many_text(results["many"]))
        for name, size in (("small scatter", models.SMALL), ("scatter", args.gigabytes)):
            results[name] = models.measure_scatter(args.ranks, size, 10 * args.seconds)
            say(models.scatter_text(results[name]))


def measure(systems, collective, nbytes, seconds):
    """Return the median time of each system's slowest rank. The systems take turns."""
    counts, times = {}, {}
    for system in systems:
        first = system.times(collective, nbytes, TIMED_FIRST)
        fits = seconds / ROUNDS / max(map(min, first))
        counts[system] = int(min(max(fits, 1), REPETITIONS))
        times[system] = [[] for _ in first]
    for _ in range(ROUNDS):
        for system, count in counts.items():
            # First the caches are full of another system's arrays, and the ranks sleep.
            warm = 1 + count // 10
            for total, new in zip(times[system], system.times(collective, nbytes, warm + count)):
                total += new[warm:]
    return {s.name: max(map(statistics.median, ranks)) for s, ranks in times.items()}


def whole_bytes(collective, nbytes, n_ranks):
    """Return the number of bytes that a collective moves, as nccl-tests counts them."""
    return nbytes * (n_ranks if collective in ("all_gather", "gather", "scatter") else 1)


def bus_factor(collective, n_ranks):
    """Return the bus bandwidth for an algorithm bandwidth of 1; see PERFORMANCE.md."""
    if collective in ("reduce", "broadcast"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (n_ranks - 1) / n_ranks


def _cell(n_ranks, collective, nbytes, name, seconds):
    bandwidth = whole_bytes(collective, nbytes, n_ranks) / seconds[name] / 1e9
    return {
        "collective": collective,
        "bytes": nbytes,
        "system": name,
        "seconds": seconds[name],
        "algbw": bandwidth,
        "busbw": None if name == "memcpy" else bandwidth * bus_factor(collective, n_ranks),
        "ratio": seconds[name] / seconds["synk"],
    }


def _line(cell):
    name, bus = cell["system"], cell["busbw"]
    size = f"{cell['bytes']:13,}" if name == "synk" else " " * 13
    line = f"{size}  {name:10}{1e6 * cell['seconds']:11.1f}{cell['algbw']:12.3g}"
    line += f"{'-':>12}" if bus is None else f"{bus:12.3g}"
    return line if name == "synk" else f"{line}   {name} / synk {cell['ratio']:.3g}x"


class _Synk:
    """Synkhronos: collectives on a vector of each rank."""

    name = "synk"

    def __init__(self, n_ranks):
        self._n_ranks = n_ranks
        self._prepared = None

    def times(self, collective, nbytes, repetitions):
        """Return, for the master alone, the seconds of each repetition."""
        if self._prepared is None or self._prepared[0] != (collective, nbytes):
            self._prepared = None  # frees its memory before more is allocated
            self._prepared = (collective, nbytes), *self._prepare(collective, nbytes)
        _, call, before = self._prepared
        seconds = []
        for _ in range(repetitions):
            before()
            begin = _clock()
            result = call()
            seconds.append(_clock() - begin)
            del result  # freed outside the measured time
        return [seconds]

    def _prepare(self, collective, nbytes):
        """Return the call that is timed, and one to make before each of them, untimed."""
        import synkhronos as synk
        from synkhronos._host import library

        vector = library.shared(np.zeros(nbytes // 4, "float32"))
        synk.broadcast(vector)
        if collective not in ("all_gather", "scatter"):
            return self._call(collective, vector), lambda: None
        data = synk.data(dtype="float32", shape=(nbytes // 4 * self._n_ranks,))
        data.data.fill(0)
        if collective == "scatter":
            return self._call(collective, vector, data), lambda: None
        # Each all_gather leaves longer arrays. The scatter cuts them before the next.
        return self._call(collective, vector), lambda: synk.scatter(vector, data)

    def _call(self, collective, vector, data=None):
        import synkhronos as synk

        return {
            "all_reduce": lambda: synk.all_reduce(vector, op="sum"),
            "reduce": lambda: synk.reduce(vector, op="sum"),
            "broadcast": lambda: synk.broadcast(vector),
            "all_gather": lambda: synk.all_gather(vector),
            "gather": lambda: synk.gather(vector),
            "scatter": lambda: synk.scatter(vector, data),
        }[collective]

    def check(self, collective):
        """Raise PeerError if the results are not what they should be."""
        import synkhronos as synk
        from synkhronos._host import library

        examples = [peers.example(collective, r, self._n_ranks) for r in range(self._n_ranks)]
        vector = library.shared(np.zeros(0, "float32"))
        for rank, (mine, _, _) in enumerate(examples):
            synk.set_value(rank, vector, mine[:0] if collective == "scatter" else mine)
        result = self._call(collective, vector, synk.data(examples[0][1]))()
        for rank, (_, _, expected) in enumerate(examples):
            found = synk.get_value(rank, vector) if result is None else result.ravel()
            if expected is not None and not np.array_equal(found, expected):
                raise peers.PeerError(f"Synkhronos computed a wrong {collective} on rank {rank}.")
        # All ranks attach the vector's segments now, while they exist.
        synk.broadcast(vector)


class _Copy:
    """One copy of the same bytes, by one process, between arrays whose pages exist."""

    name = "memcpy"

    def __init__(self, n_ranks):
        self._n_ranks = n_ranks
        self._source = self._target = np.zeros(0, np.uint8)

    def times(self, collective, nbytes, repetitions):
        """Return the seconds of each repetition."""
        size = whole_bytes(collective, nbytes, self._n_ranks)
        if self._source.size != size:
            self._source, self._target = np.full(size, 0, np.uint8), np.full(size, 0, np.uint8)
        seconds = []
        for _ in range(repetitions):
            begin = _clock()
            np.copyto(self._target, self._source)
            seconds.append(_clock() - begin)
        return [seconds]

    def check(self, collective):
        """Do nothing: a copy has no result to check."""


def plot(results, path):
    """Draw a panel for each collective: time against bytes, both logarithmic."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cells = results["cells"]
    collectives = list(dict.fromkeys(cell["collective"] for cell in cells))
    n_columns = min(3, len(collectives))
    n_rows = -(-len(collectives) // n_columns)
    figure, axes = pyplot.subplots(
        n_rows, n_columns, figsize=(4.4 * n_columns, 3.6 * n_rows + 0.5), squeeze=False
    )
    for panel, collective in zip(axes.flat, collectives):
        for name in dict.fromkeys(cell["system"] for cell in cells):
            own = [c for c in cells if (c["collective"], c["system"]) == (collective, name)]
            x, y = [c["bytes"] for c in own], [1e6 * c["seconds"] for c in own]
            style = {"ls": "--", "lw": 1.2} if name == "memcpy" else {"marker": "o", "ms": 4}
            label = {"synk": "Synkhronos", "memcpy": "memcpy of the same bytes"}.get(name, name)
            panel.loglog(x, y, color=COLOURS[name], label=label, **style)
        panel.set_title(collective)
        panel.set_xlabel("bytes of a rank's array")
        panel.set_ylabel("time (us)")
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(collectives) :]:
        panel.remove()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / (3.6 * n_rows + 0.5)))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
