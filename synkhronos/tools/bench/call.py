"""The time of a call, beside Theano's; the cost of an idle session, a profile, and a Data.

With --busy, the time of a call while other processes keep the cores busy: see `busy`.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import numpy as np

from synkhronos.tools.bench import busy, options


def add_arguments(parser):
    """Add the options of this benchmark."""
    parser.add_argument(
        "--ranks", type=options.count, default=2, help="ranks of the session (default: 2)"
    )
    parser.add_argument(
        "--calls", type=options.count, default=5000, help="calls to time (default: 5000)"
    )
    parser.add_argument(
        "--idle",
        type=options.positive,
        default=10.0,
        metavar="S",
        help="seconds to stay idle (default: 10)",
    )
    parser.add_argument(
        "--megabytes",
        type=options.count,
        default=1000,
        help="size of the Data that ranks share (1000)",
    )
    parser.add_argument(
        "--busy",
        type=options.counts,
        metavar="N,N",
        help="measure only calls beside 0 and so many busy processes (such as 1,2,4), and those of "
        "a Pipe, a Pool and joblib",
    )
    parser.add_argument(
        "--seconds",
        type=options.positive,
        default=2.0,
        metavar="S",
        help="time for each figure of --busy (default: 2)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def main(args) -> int:
    """Measure, print, and return the exit status."""
    if args.busy:
        return _compare_busy(args)
    results = {
        **measure_call(args.ranks, args.calls),
        **measure_profile(args.ranks, args.calls),
        **measure_distribute(args.ranks),
        **measure_idle(args.ranks, args.idle),
        **measure_memory(4, args.megabytes),
    }
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        _print(results, args)
    return 0


def _compare_busy(args):
    echo = _Echo()
    try:
        figures = busy.measure(args.ranks, [0, *args.busy], args.seconds, echo)
    finally:
        echo.close()
    if args.json:
        print(json.dumps({"ranks": args.ranks, "busy": figures}, indent=2))
    else:
        print(busy.text(figures, args.ranks))
    return 0


def measure_call(n_ranks, n_calls):
    """Time a trivial function (one Data in, one number out), and a bare round trip of a pipe.

    Also with other rows of a longer Data in each call, as in a loop over minibatches.
    """
    import synkhronos as synk
    from synkhronos._host import tensor as T

    synk.fork(n_ranks)
    try:
        x = T.matrix("x", "float32")
        f = synk.function([x], x.sum())
        serial = f.as_theano
        data = synk.data(np.ones((2 * n_ranks, 4), "float32"))
        f(data), serial(data)
        trusted, array = f._compiled, data.data
        rows = 2 * n_ranks
        longer = synk.data(np.ones((100 * rows, 4), "float32"))
        begins = itertools.cycle(range(0, len(longer), rows))

        def sliced():
            begin = next(begins)
            f(longer, batch=slice(begin, begin + rows))

        echo = _Echo()
        calls = {
            "call": lambda: f(data),
            "sliced": sliced,
            "theano": lambda: trusted(array),
            "pipe": echo,
        }
        times = {name: [] for name in calls}
        # Interleaved in short runs, so that the same noise disturbs all.
        for _ in options.progress("calls, in hundreds", range(max(1, n_calls // 100))):
            for name, call in calls.items():
                for repetition in range(120):
                    begin = time.perf_counter()
                    call()
                    if repetition >= 20:
                        times[name].append(time.perf_counter() - begin)
        echo.close()
    finally:
        synk.close()
    return {f"{name}_us": 1e6 * statistics.median(values) for name, values in times.items()}


def measure_profile(n_ranks, n_calls, seconds=1e-3):
    """Time calls with a profile and without: short ones, and ones that take about `seconds`."""
    import synkhronos as synk
    from synkhronos._host import tensor as T

    synk.fork(n_ranks)
    try:
        x = T.matrix("x", "float32")
        f = synk.function([x], T.tanh(x).sum())
        short = long = synk.data(np.ones((n_ranks, 1), "float32"))
        f(short)
        columns = 1000
        while min(_seconds(f, long) for _ in range(100)) < seconds:
            long = synk.data(np.ones((n_ranks, columns), "float32"))
            columns += columns // 4
        times = {(name, data): [] for name in ("off", "on") for data in ("short", "long")}
        # In turns, so that the same noise disturbs both.
        rounds = range(max(1, n_calls // 100))
        for _ in options.progress("calls with and without a profile, in rounds", rounds):
            for name, context in (("off", contextlib.nullcontext()), ("on", synk.profile())):
                with context:
                    f(short)
                    times[name, "short"] += [_seconds(f, short) for _ in range(50)]
                    times[name, "long"] += [_seconds(f, long) for _ in range(20)]
    finally:
        synk.close()
    # Minima: other programs disturb a call by more than a profile adds to it.
    least = {key: min(values) for key, values in times.items()}
    return {
        "profile_us": 1e6 * (least["on", "short"] - least["off", "short"]),
        "profile_long_us": 1e6 * least["off", "long"],
        "profile_percent": 100 * (least["on", "long"] / least["off", "long"] - 1),
    }


def _seconds(function, *args):
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


class _Echo:
    """A multiprocessing.Pipe to a process that sends all bytes back."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self._here, there = context.Pipe()
        self._process = context.Process(target=self._answer, args=(there,), daemon=True)
        self._process.start()
        there.close()

    def __call__(self):
        self._here.send_bytes(b"x")
        self._here.recv_bytes()

    def _answer(self, connection):
        self._here.close()
        while connection.recv_bytes() != b"":
            connection.send_bytes(b"x")

    def close(self):
        self._here.send_bytes(b"")
        self._process.join()


def measure_distribute(n_ranks):
    """Time the compilation of a network's training function, and its distribution to the workers.

    The second of two such functions is timed, when all C code is in Theano's compile cache.
    """
    import synkhronos as synk
    from synkhronos._host import library
    from synkhronos._host import tensor as T

    synk.fork(n_ranks)
    try:
        for _ in options.progress("functions, compiled and distributed", range(2)):
            x, y = T.matrix("x", "float32"), T.ivector("y")
            layers = [x]
            params = []
            for n_in, n_out in ((784, 512), (512, 512), (512, 10)):
                w = library.shared(np.zeros((n_in, n_out), "float32"))
                b = library.shared(np.zeros(n_out, "float32"))
                params += [w, b]
                layers.append(T.nnet.relu(T.dot(layers[-1], w) + b))
            loss = T.nnet.categorical_crossentropy(T.nnet.softmax(layers[-1]), y).mean()
            updates = [(p, p - np.float32(0.1) * g) for p, g in zip(params, T.grad(loss, params))]
            begin = time.perf_counter()
            f = synk.function([x, y], loss, updates=updates)
            compiled = time.perf_counter()
            synk.distribute()
            distributed = time.perf_counter()
            del f
    finally:
        synk.close()
    return {"compile_s": compiled - begin, "distribute_s": distributed - compiled}


def measure_idle(n_ranks, seconds):
    """Measure the CPU time of an idle session's processes, as a share of one core."""
    import synkhronos as synk

    synk.fork(n_ranks)
    try:
        pids = _all_pids()
        time.sleep(0.2)
        before = sum(map(_cpu_seconds, pids))
        with options.shown(f"an idle session, for {seconds:g} s"):
            time.sleep(seconds)
        used = sum(map(_cpu_seconds, pids)) - before
    finally:
        synk.close()
    return {"idle_cpu_percent": 100 * used / seconds}


def _all_pids():
    from synkhronos._master.current import current

    return [os.getpid(), *current("the benchmark").worker_pids]


def _cpu_seconds(pid):
    # Fields 14 and 15 of proc(5); the name before them, in brackets, may hold spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss(pid):
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/{pid}/smaps_rollup has no line Pss")


def measure_memory(n_ranks, megabytes):
    """Measure the growth of the PSS of all ranks together when all use one large Data."""
    import synkhronos as synk
    from synkhronos._host import tensor as T

    synk.fork(n_ranks)
    try:
        x = T.matrix("x", "float32")
        total = synk.function([x], x.sum(), bcast_inputs=[])
        every = synk.function([], bcast_inputs=[x], outputs=(x.sum(), "max"))
        small = synk.data(np.ones((n_ranks, 1000), "float32"))
        total(small), every(small)
        pids = _all_pids()
        before = sum(map(_pss, pids))
        data = synk.data(var=x)
        data.set_shape((megabytes, 250_000))
        with options.shown(f"a Data of {megabytes:,} MB"):
            data.data.fill(1)
            total(data), every(data)
        grown = sum(map(_pss, pids)) - before
        size = data.data.nbytes
    finally:
        synk.close()
    return {"data_bytes": size, "pss_bytes": grown, "pss_per_data": grown / size}


def _print(results, args):
    overhead = results["call_us"] - results["theano_us"]
    ratio = results["compile_s"] / results["distribute_s"]
    gigabytes = results["data_bytes"] / 1e9
    print(f"One Data in, one number out; {args.ranks} ranks, {os.cpu_count()} cores, medians")
    print(f"  call                     {results['call_us']:8.1f} us")
    print(f"  batch=slice(...)         {results['sliced_us']:8.1f} us")
    print(f"  Theano's own call        {results['theano_us']:8.1f} us")
    print(f"  overhead                 {overhead:8.1f} us")
    print(f"  bare Pipe round trip     {results['pipe_us']:8.1f} us")
    long = f"{results['profile_long_us']:.0f} us"
    print("A profile, on and off in turns; minima")
    print(f"  adds to a call           {results['profile_us']:8.1f} us")
    print(f"  to one of {long:14} {results['profile_percent']:8.2f} %")
    print("A training function of three layers, C code cached")
    print(f"  compile in the master    {results['compile_s']:8.3f} s")
    print(f"  distribute()             {results['distribute_s']:8.3f} s  ({ratio:.1f} times less)")
    print(f"An idle session over {args.idle:g} s")
    print(f"  CPU                      {results['idle_cpu_percent']:8.2f} % of a core")
    print(f"A Data of {gigabytes:.2f} GB, used by 4 ranks")
    print(f"  memory of all (PSS)      {results['pss_per_data']:8.3f} times its size")
