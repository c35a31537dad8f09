"""The time of each collective, beside a copy of the same bytes.

Bytes are those of each rank's array of float32; reductions are sums. As in nccl-tests,
doc/PERFORMANCE.md, the algorithm bandwidth is the size of the whole divided by the time. The whole
is the array of one rank for all_reduce, reduce and broadcast, that of all ranks together for
all_gather, gather and scatter. The bus bandwidth is the algorithm bandwidth times 2(n-1)/n for
all_reduce, (n-1)/n for all_gather, gather and scatter, and 1 for reduce and broadcast. GB are 1e9
bytes. Times are medians. The systems take turns in rounds. Synkhronos is timed in Python, from the
call to its return.
"""

import os

import numpy as np

from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter")
SIZES = "1K,16K,256K,1M,4M,16M,64M"
_COLOURS = {"synk": "C3", "Open MPI": "C0", "gloo": "C1", "memcpy": "0.6"}


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add_session(parser)
    options.add(parser, "--sizes", options.sizes, SIZES, "bytes of a rank's array")
    known = options.names(COLLECTIVES, "collective")
    options.add(parser, "--collectives", known, list(COLLECTIVES), "which")
    what = "time for each system, size and collective"
    options.add(parser, "--seconds", options.positive, 0.3, what)


def measure(args, report):
    """Measure without other libraries."""
    measure_beside([], args, report)


def measure_beside(peers, args, report):
    """Measure Synkhronos, a copy, and other systems with the methods of these two in between."""
    cells = report.results["cells"] = []
    report.results["ranks"] = args.ranks
    with frame.session(args.ranks, args.device):
        systems = [_Synk(args.ranks), *peers, _Copy(args.ranks)]
        for collective in args.collectives:
            for system in systems:
                if not system.check(collective):
                    raise frame.Failed(f"{system.name} computed a wrong {collective}.")
            table = frame.Table("bytes", "", "us", "algbw GB/s", "busbw GB/s", "/ synk", first=16)
            title = f"{collective}; {args.ranks} ranks, {os.cpu_count()} cores, float32, medians"
            report.show(f"{title}\n{table.head}")
            for nbytes in args.sizes:
                seconds = _seconds(systems, collective, nbytes, args.seconds)
                for name in seconds:
                    cells.append(_cell(args.ranks, collective, nbytes, name, seconds))
                    report.show(_line(table, cells[-1]))


def _seconds(systems, collective, nbytes, seconds):
    """Return the median time of each system."""
    measured = turns.Turns(seconds)
    for system in systems:
        measured.add(system.name, lambda n, each=system: each.times(collective, nbytes, n))
    figures = measured.take_all(f"{collective} of {nbytes:,} bytes")
    return {name: found["median"] for name, found in figures.items()}


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


def _line(table, cell):
    is_first, bus = cell["system"] == "synk", cell["busbw"]
    return table.line(
        f"{cell['bytes']:13,}" if is_first else "",
        cell["system"],
        f"{1e6 * cell['seconds']:.1f}",
        f"{cell['algbw']:.3g}",
        "-" if bus is None else f"{bus:.3g}",
        "" if is_first else f"{cell['ratio']:.3g}x",
    )


def example(collective, rank, n_ranks):
    """Return a rank's array, the arrays of all ranks joined, and the rank's result.

    The result is None where a collective doesn't define the rank's result.
    """
    each = [np.arange(1000, dtype="float32") % 7 + other for other in range(n_ranks)]
    joined, total = np.concatenate(each), np.sum(each, axis=0, dtype="float32")
    results = {
        "all_reduce": total,
        "reduce": None if rank else total,
        "broadcast": each[0],
        "all_gather": joined,
        "gather": None if rank else joined,
        "scatter": each[rank],
    }
    return each[rank], joined, results[collective]


class _Synk:
    """Synkhronos: collectives on a vector of each rank."""

    name = "synk"

    def __init__(self, n_ranks):
        self._n_ranks = n_ranks
        self._prepared = None

    def times(self, collective, nbytes, repetitions):
        """Return the seconds of each repetition."""
        if self._prepared is None or self._prepared[0] != (collective, nbytes):
            self._prepared = None  # frees its memory before more is allocated
            self._prepared = (collective, nbytes), *self._prepare(collective, nbytes)
        _, call, before = self._prepared
        seconds = []
        for _ in range(repetitions):
            before()
            begin = turns.clock()
            result = call()
            seconds.append(turns.clock() - begin)
            del result  # freed outside the measured time
        return seconds

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
        """Return whether the results are what they should be on all ranks."""
        import synkhronos as synk
        from synkhronos._host import library

        examples = [example(collective, rank, self._n_ranks) for rank in range(self._n_ranks)]
        vector = library.shared(np.zeros(0, "float32"))
        for rank, (mine, _, _) in enumerate(examples):
            synk.set_value(rank, vector, mine[:0] if collective == "scatter" else mine)
        result = self._call(collective, vector, synk.data(examples[0][1]))()
        is_right = True
        for rank, (_, _, expected) in enumerate(examples):
            found = synk.get_value(rank, vector) if result is None else result.ravel()
            is_right &= expected is None or np.array_equal(found, expected)
        # All ranks attach the vector's segments now, while they exist.
        synk.broadcast(vector)
        return is_right


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
        copy = np.copyto, self._target, self._source
        return [turns.seconds_of(*copy) for _ in range(repetitions)]

    def check(self, collective):
        """Return True: a copy has no result to check."""
        return True


def plot(results, path):
    """Draw a panel for each collective: time against bytes, both logarithmic."""
    from matplotlib.figure import Figure

    cells = results["cells"]
    collectives = list(dict.fromkeys(cell["collective"] for cell in cells))
    n_columns = min(3, len(collectives))
    n_rows = -(-len(collectives) // n_columns)
    figure = Figure(figsize=(4.4 * n_columns, 3.6 * n_rows + 0.5))
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    for panel, collective in zip(axes.flat, collectives):
        for name in dict.fromkeys(cell["system"] for cell in cells):
            own = [c for c in cells if (c["collective"], c["system"]) == (collective, name)]
            x, y = [c["bytes"] for c in own], [1e6 * c["seconds"] for c in own]
            style = {"ls": "--", "lw": 1.2} if name == "memcpy" else {"marker": "o", "ms": 4}
            label = {"synk": "Synkhronos", "memcpy": "memcpy of the same bytes"}.get(name, name)
            panel.loglog(x, y, color=_COLOURS[name], label=label, **style)
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
