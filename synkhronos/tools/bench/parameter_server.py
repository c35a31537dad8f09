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

import argparse
import contextlib
import functools
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

from synkhronos.tools.bench import collectives, kvstore, options, overlap, peers

SIZES = "1K,1M,16M,64M"
TURNS = 5
REPETITIONS = 400  # of one system in one turn, at most
TIMED_FIRST = 3
KEY_BYTES = 1024  # of each of many keys
# Microseconds: bytes -> medians; and for one of 64 keys of 1 KiB.
RECORDED = {
    "mshadow-ps*": {1 << 10: 74, 1 << 20: 353, 1 << 24: 7030, 1 << 26: 35700, "key": 25},
    "MXNet local*": {1 << 10: 100, 1 << 20: 544, 1 << 24: 8900, 1 << 26: 41100, "key": 28.6},
    "MXNet device*": {1 << 10: 100, 1 << 20: 515, 1 << 24: 9100, 1 << 26: 43800, "key": 31.7},
}

_clock = time.perf_counter


class WrongResult(Exception):
    """A sum is wrong."""


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--sizes", type=collectives.parse_sizes, default=SIZES, help=f"bytes of an array ({SIZES})"
    )
    parser.add_argument(
        "--keys", type=options.count, default=64, help="keys of 1 KiB in one round (64)"
    )
    parser.add_argument("--devices", type=options.count, default=2, help="of the store (2)")
    parser.add_argument(
        "--seconds", type=options.positive, default=1.0, metavar="S",
        help="time for each system and size (1)",
    )  # fmt: skip
    parser.add_argument(
        "--no-peers", action="store_true", help="leave MXNet out, and the recorded figures"
    )
    parser.add_argument(
        "--peer-python", action="append", type=collectives.python_path, default=[], metavar="PATH",
        help="a Python to look for MXNet in before this one; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    overlap.add_arguments(parser)


def main(arguments) -> int:
    """Measure, print, and return the exit status."""
    if arguments.overlap:
        return overlap.main(arguments)
    busy = options.busy_cores()
    if busy > 0.2:
        print(f"others keep {busy:.1f} cores busy: this tells little about speed", file=sys.stderr)
    results = {"devices": arguments.devices, "cores": os.cpu_count(), "busy_cores": busy}
    results["missing"], results["cells"] = {}, []
    try:
        with contextlib.ExitStack() as stack:
            systems = [_OneCaller(arguments.devices), _DeviceThreads(arguments.devices)]
            if not arguments.no_peers:
                systems += _mxnet(arguments, stack, results)
            for system in systems:
                stack.callback(system.forget)
            _measure(arguments, systems, results)
    except (WrongResult, kvstore.KVStoreError) as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2))
    return 0


def _mxnet(arguments, stack, results):
    try:
        python = peers.find("mxnet", [*arguments.peer_python, sys.executable])
        process = stack.enter_context(kvstore.KVStore(python))
    except (peers.PeerError, kvstore.KVStoreError) as error:
        results["missing"]["MXNet"] = str(error)
        print(f"not compared with MXNet: {error}", file=sys.stderr)
        return []
    results["mxnet"] = process.version
    return [_MXNet(process, kind, arguments.devices) for kind in kvstore.KINDS]


def _measure(arguments, systems, results):
    say = functools.partial(print, flush=True)
    recorded = [] if arguments.no_peers or arguments.devices != 2 else list(RECORDED)
    names = [system.name for system in systems]
    head = f"{'':>16}" + "".join(f"{name:>27}" for name in names)
    say(f"{arguments.devices} devices, {os.cpu_count()} cores, us: median (p10 to p90)")
    say(head + "".join(f"{name:>15}" for name in recorded))
    rows = [(f"{nbytes:,} bytes", nbytes, 1, nbytes) for nbytes in arguments.sizes]
    rows.append((f"{arguments.keys} keys, each", KEY_BYTES, arguments.keys, "key"))
    for title, nbytes, n_keys, entry in rows:
        found = measure(systems, nbytes, n_keys, arguments.seconds)
        line = f"{title:>16}"
        for name, seconds in found.items():
            cell = _cell(name, nbytes, n_keys, seconds)
            results["cells"].append(cell)
            line += f"{_text(cell):>27}"
        is_there = n_keys in (1, 64)
        known = [RECORDED[name].get(entry) if is_there else None for name in recorded]
        say(line + "".join(f"{'-' if each is None else f'{each:g}':>15}" for each in known))
    apart = 1e6 * np.percentile(systems[1].apart, [10, 50, 90])
    results["apart_us"] = apart.tolist()
    say("device threads begin {1:.0f} us apart ({0:.0f} to {2:.0f})".format(*apart))
    results["issue"] = {}
    for nbytes in (arguments.sizes[0], arguments.sizes[-1]):
        found = measure_issue(arguments.devices, nbytes, arguments.seconds)
        results["issue"][nbytes] = found
        parts = [f"{name} {_text(cell)}" for name, cell in found.items()]
        say(f"issue, {nbytes:,} bytes: {', '.join(parts)}")


def measure(systems, nbytes, n_keys, seconds):
    """Return the seconds of all rounds of each system; the systems take turns."""
    counts, times = {}, {system: [] for system in systems}
    for system in systems:
        first = system.times(nbytes, n_keys, TIMED_FIRST)
        counts[system] = int(min(max(seconds / TURNS / min(first), 1), REPETITIONS))
    for _ in options.progress(f"{n_keys} x {nbytes:,} bytes", range(TURNS)):
        for system, count in counts.items():
            warm = 1 + count // 10  # the caches are full of another system's arrays
            times[system] += system.times(nbytes, n_keys, warm + count)[warm:]
    for system in systems:
        system.forget()
    return {system.name: found for system, found in times.items()}


def _cell(name, nbytes, n_keys, seconds):
    low, middle, high = (1e6 / n_keys * np.percentile(seconds, p) for p in (10, 50, 90))
    return {
        "system": name,
        "bytes": nbytes,
        "keys": n_keys,
        "rounds": len(seconds),
        "p10_us": low,
        "us": middle,
        "p90_us": high,
    }


def _text(cell):
    digits = 0 if cell["us"] >= 1000 else 1
    return "{} ({} to {})".format(*(f"{cell[n]:.{digits}f}" for n in ("us", "p10_us", "p90_us")))


class _System:
    """A system that is timed; its arrays and keys are kept from one turn to the next."""

    def __init__(self, n_devices):
        self._n_devices = n_devices
        self._made = None

    def times(self, nbytes, n_keys, repetitions):
        """Return the seconds of each round of all keys."""
        if self._made is None:
            self._made = self._make(nbytes, n_keys)
        return self._rounds(repetitions)

    def forget(self):
        """Free what is kept."""
        if self._made is not None:
            self._made.close()
        self._made = None


class _OneCaller(_System):
    name = "one caller"

    def _make(self, nbytes, n_keys):
        from synkhronos import parameter_server as ps

        store = ps.create("local", devices=range(self._n_devices))
        self._keys = list(range(n_keys)) if n_keys > 1 else 0
        self._arrays = _arrays(nbytes, n_keys, self._n_devices)
        self._given = self._arrays if n_keys > 1 else self._arrays[0]
        values = [arrays[0] for arrays in self._arrays]
        store.init(self._keys, values if n_keys > 1 else values[0])
        return store

    def _rounds(self, repetitions):
        seconds = []
        for _ in range(repetitions):
            for arrays in self._arrays:
                for device, array in enumerate(arrays):
                    array.fill(device + 1)
            begin = _clock()
            self._made.pushpull(self._keys, self._given).wait()
            seconds.append(_clock() - begin)
            for arrays in self._arrays:
                for array in arrays:
                    check(array, self._n_devices)
        return seconds

    def forget(self):
        """Free what is kept, the arrays too."""
        super().forget()
        self._arrays = self._given = None


class _DeviceThreads(_System):
    name = "device threads"

    def __init__(self, n_devices):
        super().__init__(n_devices)
        self.apart = []  # seconds between the first thread's begin and the last one's

    def _make(self, nbytes, n_keys):
        from synkhronos import parameter_server as ps

        self._arrays = list(zip(*_arrays(nbytes, n_keys, self._n_devices)))
        store = ps.create("local", devices=range(self._n_devices))
        for device in range(self._n_devices):
            for key in range(n_keys):
                store.init_key((nbytes // 4,), key, device)
        return store

    def _rounds(self, repetitions):
        together = _Together(self._n_devices)
        spans = [[] for _ in range(self._n_devices)]
        errors = []
        arguments = [
            (device, repetitions, together, spans[device], errors)
            for device in range(self._n_devices)
        ]
        threads = [threading.Thread(target=self._run, args=each) for each in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        rounds = [list(zip(*each)) for each in zip(*spans)]
        self.apart += [max(begun) - min(begun) for begun, _ in rounds]
        return [max(ended) - max(begun) for begun, ended in rounds]

    def _run(self, device, repetitions, together, spans, errors):
        store, arrays = self._made, list(enumerate(self._arrays[device]))
        try:
            for _ in range(repetitions):
                for _, array in arrays:
                    array.fill(device + 1)
                together.start()
                begin = _clock()
                for key, array in arrays:
                    store.push(array, key, device)
                    store.pull_req(array, key, device)
                for key, _ in arrays:
                    store.pull_wait(key, device)
                spans.append((begin, _clock()))
                for _, array in arrays:
                    check(array, self._n_devices)
        except threading.BrokenBarrierError:
            pass  # another device has failed
        except Exception as error:
            errors.append(error)
            together.abort()

    def forget(self):
        """Free what is kept, the arrays too."""
        super().forget()
        self._arrays = None


class _Together:
    """Lets threads begin at the same time, as nearly as Python can."""

    def __init__(self, n_threads):
        self._barrier = threading.Barrier(n_threads, self._set)
        self.abort = self._barrier.abort

    def _set(self):
        self._at = _clock() + 2e-4  # until then the others have left the barrier

    def start(self):
        """Wait for all threads, then for a common time."""
        self._barrier.wait()
        time.sleep(max(0, self._at - _clock()))


class _MXNet(_System):
    def __init__(self, process, kind, n_devices):
        super().__init__(n_devices)
        self.name, self._kind, self._process = f"MXNet {kind}", kind, process

    def times(self, nbytes, n_keys, repetitions):
        """Return the seconds of each round of all keys."""
        return self._process.times(self._kind, nbytes, n_keys, self._n_devices, repetitions)


def measure_issue(n_devices, nbytes, seconds):
    """Return what the calls of one thread take that plays all devices, one after the other."""
    from synkhronos import parameter_server as ps

    [arrays] = _arrays(nbytes, 1, n_devices)
    names = ("push", "pull_req", "last push", "last pull_req")
    times = {name: [] for name in names if n_devices > 1 or name.startswith("last")}
    end = _clock() + seconds
    with ps.create("local", devices=range(n_devices)) as store:
        for device in range(n_devices):
            store.init_key((nbytes // 4,), 0, device)
        while _clock() < end or len(times["last push"]) < TIMED_FIRST:
            for device, array in enumerate(arrays):
                array.fill(device + 1)
            for device, array in enumerate(arrays):
                last = "last " * (device == n_devices - 1)
                begin = _clock()
                store.push(array, 0, device)
                pushed = _clock()
                store.pull_req(array, 0, device)
                pulled = _clock()
                times[f"{last}push"].append(pushed - begin)
                times[f"{last}pull_req"].append(pulled - pushed)
            for device, array in enumerate(arrays):
                store.pull_wait(0, device)
                check(array, n_devices)
    return {name: _cell(name, nbytes, 1, found) for name, found in times.items()}


def _arrays(nbytes, n_keys, n_devices):
    """Return for each key an array of each device."""
    return [[np.zeros(nbytes // 4, np.float32) for _ in range(n_devices)] for _ in range(n_keys)]


def check(array, n_devices):
    """Raise WrongResult if an array is not the sum of those that hold 1, 2 and so on.

    >>> check(np.full(3, 6.0), n_devices=3)
    """
    expected = n_devices * (n_devices + 1) // 2
    if not (array == expected).all():
        wrong = array[array != expected][0]
        raise WrongResult(f"a sum is wrong: {wrong} in place of {expected}")
