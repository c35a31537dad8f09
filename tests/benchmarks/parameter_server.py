"""The parameter server: the latency of a round of all devices, and the cost of issuing it.

Arrays are of float32, one for each device, and are filled anew before each round: a round is a push
and a pull of every device in place, until the last one has the sum, which is checked. "one caller"
is `pushpull` with a list of arrays. "device threads" is the guide's way, a thread for each device:
from the first call of the thread that begins last to the end of the last wait. Python runs one
thread at a time, so they begin some time apart, which is printed. "issue" are the calls alone.
Figures are medians, and the 10th and 90th percentiles, in microseconds. The systems take turns.

Where MXNet can be imported, its KVStore is timed beside it, with kinds "local" and "device".
Columns marked * are recorded figures, not of this run: mshadow-ps, and MXNet 1.9.1, with 2 devices
on another machine with 2 cores.
"""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks import groups
from synkhronos import parameter_server as ps
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options

SIZES = "1K,1M,16M,64M"
_KEY_BYTES = 1024  # of each of many keys
_MOST = 400  # repetitions of one system in one turn
# Microseconds: bytes -> medians; and for one of 64 keys of 1 KiB.
_RECORDED = {
    "mshadow-ps*": {1 << 10: 74, 1 << 20: 353, 1 << 24: 7030, 1 << 26: 35700, "key": 25},
    "MXNet local*": {1 << 10: 100, 1 << 20: 544, 1 << 24: 8900, 1 << 26: 41100, "key": 28.6},
    "MXNet device*": {1 << 10: 100, 1 << 20: 515, 1 << 24: 9100, 1 << 26: 43800, "key": 31.7},
}


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(parser, "--sizes", options.sizes, SIZES, "bytes of an array")
    options.add(parser, "--keys", options.count, 64, "keys of 1 KiB in one round")
    options.add(parser, "--devices", options.count, 2, "of the store")
    options.add(parser, "--seconds", options.positive, 1.0, "time for each system and size")
    parser.add_argument(
        "--no-peers", action="store_true", help="leave MXNet out, and the recorded figures"
    )
    groups.add_python(parser)


def measure(args, report):
    """Measure rounds, and the calls that issue them; show the tables."""
    report.results.update(devices=args.devices, cells=[])
    with contextlib.ExitStack() as stack:
        systems = [_OneCaller(args.devices), _DeviceThreads(args.devices)]
        if not args.no_peers:
            with groups.telling("MXNet", report):
                python = groups.find("mxnet", args.peer_python)
                process = stack.enter_context(groups.program("MXNet", python, "kvstore"))
                report.results["mxnet"] = process.ask("hello")
                kinds = ("local", "device")
                systems += [_MXNet(process, kind, args.devices) for kind in kinds]
        for system in systems:
            stack.callback(system.forget)
        _measure_rounds(args, systems, report)
        _measure_issue(args, report)


def _measure_rounds(args, systems, report):
    recorded = {} if args.no_peers or args.devices != 2 else _RECORDED
    names = [system.name for system in systems]
    widths = [27] * len(names) + [15] * len(recorded)
    table = frame.Table("", *names, *recorded, first=16, least=15, widths=widths)
    title = f"{args.devices} devices, {os.cpu_count()} cores, us: median (p10 to p90)"
    report.show(f"{title}\n{table.head}")
    rows = [(f"{nbytes:,} bytes", nbytes, 1, nbytes) for nbytes in args.sizes]
    rows.append((f"{args.keys} keys, each", _KEY_BYTES, args.keys, "key"))
    for title, nbytes, n_keys, entry in rows:
        measured = turns.Turns(args.seconds, most=_MOST)
        for each in systems:
            measured.add(each.name, lambda n, each=each: each.times(nbytes, n_keys, n))  # noqa: B023
        figures = measured.take_all(f"{n_keys} x {nbytes:,} bytes")
        for system in systems:
            system.forget()
        cells = [_cell(name, nbytes, n_keys, found) for name, found in figures.items()]
        report.results["cells"] += cells
        is_there = n_keys in (1, 64)
        known = [figures.get(entry) if is_there else None for figures in recorded.values()]
        known = ["-" if each is None else f"{each:g}" for each in known]
        report.show(table.line(f"{title:>16}", *map(_text, cells), *known))
    apart = [1e6 * turns.spread(systems[1].apart)[each] for each in ("p10", "median", "p90")]
    report.results["apart_us"] = apart
    report.show("device threads begin {1:.0f} us apart ({0:.0f} to {2:.0f})".format(*apart))


def _cell(name, nbytes, n_keys, found):
    us = {each: 1e6 / n_keys * found[each] for each in ("p10", "median", "p90")}
    cell = {"system": name, "bytes": nbytes, "keys": n_keys, "rounds": found["count"]}
    return {**cell, "p10_us": us["p10"], "us": us["median"], "p90_us": us["p90"]}


def _text(cell):
    digits = 0 if cell["us"] >= 1000 else 1
    return "{} ({} to {})".format(*(f"{cell[n]:.{digits}f}" for n in ("us", "p10_us", "p90_us")))


class _System:
    """A system that is timed; its store and arrays are kept from one turn to the next."""

    def __init__(self, n_devices):
        self._n_devices, self._store = n_devices, None

    def times(self, nbytes, n_keys, repetitions):
        """Return the seconds of each round of all keys."""
        if self._store is None:
            self._arrays = _arrays(nbytes, n_keys, self._n_devices)
            self._store = ps.create("local", devices=range(self._n_devices))
            self._prepare()
        return self._rounds(repetitions)

    def forget(self):
        """Free what is kept."""
        if self._store is not None:
            self._store.close()
        self._store = self._arrays = None


class _OneCaller(_System):
    name = "one caller"

    def _prepare(self):
        self._store.init(list(range(len(self._arrays))), [each[0] for each in self._arrays])

    def _rounds(self, repetitions):
        # One key alone is given without lists, as users do.
        several = len(self._arrays) > 1
        keys = list(range(len(self._arrays))) if several else 0
        given = self._arrays if several else self._arrays[0]
        seconds = []
        for _ in range(repetitions):
            for arrays in self._arrays:
                for device, array in enumerate(arrays):
                    array.fill(device + 1)
            begin = turns.clock()
            self._store.pushpull(keys, given).wait()
            seconds.append(turns.clock() - begin)
            for arrays in self._arrays:
                for array in arrays:
                    check(array, self._n_devices)
        return seconds


class _DeviceThreads(_System):
    name = "device threads"

    def __init__(self, n_devices):
        super().__init__(n_devices)
        self.apart = []  # seconds between the first thread's begin and the last one's

    def _prepare(self):
        for device in range(self._n_devices):
            for key, arrays in enumerate(self._arrays):
                self._store.init_key(arrays[device].shape, key, device)

    def _rounds(self, repetitions):
        together = _Together(self._n_devices)
        with ThreadPoolExecutor(self._n_devices) as pool:
            threads = [
                pool.submit(self._run, device, repetitions, together)
                for device in range(self._n_devices)
            ]
        errors = [thread.exception() for thread in threads]
        for error in errors:
            # Others are of threads that have waited for the one that failed.
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        rounds = [list(zip(*each)) for each in zip(*(thread.result() for thread in threads))]
        self.apart += [max(begun) - min(begun) for begun, _ in rounds]
        return [max(ended) - max(begun) for begun, ended in rounds]

    def _run(self, device, repetitions, together):
        store, spans = self._store, []
        arrays = [(key, each[device]) for key, each in enumerate(self._arrays)]
        try:
            for _ in range(repetitions):
                for _, array in arrays:
                    array.fill(device + 1)
                together.start()
                begin = turns.clock()
                for key, array in arrays:
                    store.push(array, key, device)
                    store.pull_req(array, key, device)
                for key, _ in arrays:
                    store.pull_wait(key, device)
                spans.append((begin, turns.clock()))
                for _, array in arrays:
                    check(array, self._n_devices)
        except BaseException:
            together.abort()
            raise
        return spans


class _Together:
    """Lets threads begin at the same time, as nearly as Python can."""

    def __init__(self, n_threads):
        self._barrier = threading.Barrier(n_threads, self._set)
        self.abort = self._barrier.abort

    def _set(self):
        self._at = turns.clock() + 2e-4  # until then the others have left the barrier

    def start(self):
        """Wait for all threads, then for a common time."""
        self._barrier.wait()
        time.sleep(max(0, self._at - turns.clock()))


class _MXNet(_System):
    def __init__(self, process, kind, n_devices):
        super().__init__(n_devices)
        self.name, self._kind, self._process = f"MXNet {kind}", kind, process

    def times(self, nbytes, n_keys, repetitions):
        """Return the seconds of each round of all keys."""
        given = {"kind": self._kind, "nbytes": nbytes, "n_keys": n_keys, "count": repetitions}
        return self._process.ask("times", n_devices=self._n_devices, **given)


def _measure_issue(args, report):
    """Show what the calls of one thread take that plays all devices, one after the other."""
    report.results["issue"] = {}
    for nbytes in (args.sizes[0], args.sizes[-1]):
        times = issue(args.devices, nbytes, args.seconds)
        found = {name: _cell(name, nbytes, 1, turns.spread(each)) for name, each in times.items()}
        report.results["issue"][nbytes] = found
        parts = [f"{name} {_text(cell)}" for name, cell in found.items()]
        report.show(f"issue, {nbytes:,} bytes: {', '.join(parts)}")


def issue(n_devices, nbytes, seconds):
    """Return the seconds of each kind of call."""
    [arrays] = _arrays(nbytes, 1, n_devices)
    names = ("push", "pull_req", "last push", "last pull_req")
    times = {name: [] for name in names if n_devices > 1 or name.startswith("last")}
    end = turns.clock() + seconds
    with ps.create("local", devices=range(n_devices)) as store:
        for device in range(n_devices):
            store.init_key((nbytes // 4,), 0, device)
        while turns.clock() < end or len(times["last push"]) < 3:
            for device, array in enumerate(arrays):
                array.fill(device + 1)
            for device, array in enumerate(arrays):
                last = "last " * (device == n_devices - 1)
                times[f"{last}push"].append(turns.seconds_of(store.push, array, 0, device))
                times[f"{last}pull_req"].append(turns.seconds_of(store.pull_req, array, 0, device))
            for device, array in enumerate(arrays):
                store.pull_wait(0, device)
                check(array, n_devices)
    return times


def _arrays(nbytes, n_keys, n_devices):
    """Return for each key an array of each device."""
    return [[np.zeros(nbytes // 4, np.float32) for _ in range(n_devices)] for _ in range(n_keys)]


def check(array, n_devices):
    """Raise an error if an array is not the sum of those that hold 1, 2 and so on.

    >>> check(np.full(3, 6.0), n_devices=3)
    """
    expected = n_devices * (n_devices + 1) // 2
    if not (array == expected).all():
        wrong = array[array != expected][0]
        raise frame.Failed(f"a sum is wrong: {wrong} in place of {expected}")
