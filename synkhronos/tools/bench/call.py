"""The time of a call, beside Theano's; the cost of an idle session, a profile, and a Data.

A call has one Data in and one number out. "Pipe" is a bare round trip of a multiprocessing.Pipe.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np

from synkhronos._machine.processes import cpu_seconds_of
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options

_IN_A_ROUND = 100  # calls of each kind
_LONG_CALL_SECONDS = 1e-3  # of a call with a profile and without
_RANKS_OF_A_DATA = 4


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add_session(parser)
    options.add(parser, "--calls", options.count, 5000, "calls to time")
    options.add(parser, "--idle", options.positive, 10.0, "seconds to stay idle")
    options.add(parser, "--megabytes", options.count, 1000, "size of the Data that ranks share")


def measure(args, report):
    """Measure all, and show the tables."""
    found = report.results
    where = args.ranks, args.device
    found.update(measure_call(*where, args.calls), **measure_profile(*where, args.calls))
    found.update(measure_idle(*where, args.idle))
    found.update(measure_memory(_RANKS_OF_A_DATA, args.device, args.megabytes))
    report.show(_text(found, args))


def measure_call(n_ranks, device, n_calls):
    """Time a trivial function, and a bare round trip of a pipe.

    Also with other rows of a longer Data in each call, as in a loop over minibatches.
    """
    from synkhronos._host import tensor as T

    rows = 2 * n_ranks
    with frame.session(n_ranks, device) as synk, Echo() as echo:
        x = T.matrix("x", "float32")
        f = synk.function([x], x.sum())
        data, longer = (synk.data(np.ones((n, 4), "float32")) for n in (rows, 100 * rows))
        trusted, array = f._compiled, data.data
        begins = itertools.cycle(range(0, len(longer), rows))

        def sliced():
            begin = next(begins)
            f(longer, batch=slice(begin, begin + rows))

        f(data), f.as_theano(data)
        calls = turns.Turns(None, max(1, n_calls // _IN_A_ROUND), _IN_A_ROUND)
        calls.add_calls(
            {
                "call": lambda: f(data),
                "sliced": sliced,
                "theano": lambda: trusted(array),
                "pipe": echo,
            }
        )
        figures = calls.take_all("calls, in hundreds")
    return {f"{name}_us": 1e6 * found["median"] for name, found in figures.items()}


class Echo:
    """A multiprocessing.Pipe to a process that sends all bytes back."""

    def __enter__(self):
        context = multiprocessing.get_context("fork")
        self._here, there = context.Pipe()
        self._process = context.Process(target=self._answer, args=(there,), daemon=True)
        self._process.start()
        there.close()
        return self

    def __call__(self):
        """Make a round trip."""
        self._here.send_bytes(b"x")
        self._here.recv_bytes()

    def _answer(self, connection):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark
        self._here.close()
        while connection.recv_bytes() != b"":
            connection.send_bytes(b"x")

    def __exit__(self, *exception):
        self._here.send_bytes(b"")
        self._process.join()


def measure_profile(n_ranks, device, n_calls):
    """Time calls with a profile and without: short ones, and ones that take a millisecond."""
    from synkhronos._host import tensor as T

    with frame.session(n_ranks, device) as synk:
        x = T.matrix("x", "float32")
        f = synk.function([x], T.tanh(x).sum())
        short = long = synk.data(np.ones((n_ranks, 1), "float32"))
        f(short)
        columns = 1000
        while min(turns.seconds_of(f, long) for _ in range(100)) < _LONG_CALL_SECONDS:
            long = synk.data(np.ones((n_ranks, columns), "float32"))
            columns += columns // 4

        def times(data, recorded):
            def take(count):
                with synk.profile() if recorded else contextlib.nullcontext():
                    return [turns.seconds_of(f, data) for _ in range(count)]

            return take

        calls = turns.Turns(None, max(1, n_calls // _IN_A_ROUND), _IN_A_ROUND // 2)
        for name, data in (("short", short), ("long", long)):
            for recorded in (False, True):
                calls.add((name, recorded), times(data, recorded))
        figures = calls.take_all("calls with and without a profile, in rounds")
    # Minima: other programs disturb a call by more than a profile adds to it.
    least = {key: found["least"] for key, found in figures.items()}
    return {
        "profile_us": 1e6 * (least["short", True] - least["short", False]),
        "profile_long_us": 1e6 * least["long", False],
        "profile_percent": 100 * (least["long", True] / least["long", False] - 1),
    }


def measure_idle(n_ranks, device, seconds):
    """Measure the CPU time of an idle session's processes, as a share of one core."""
    with frame.session(n_ranks, device):
        pids = _all_pids()
        time.sleep(0.2)
        before = sum(map(cpu_seconds_of, pids))
        with turns.shown(f"an idle session, for {seconds:g} s"):
            time.sleep(seconds)
        used = sum(map(cpu_seconds_of, pids)) - before
    return {"idle_cpu_percent": 100 * used / seconds}


def measure_memory(n_ranks, device, megabytes):
    """Measure the growth of the PSS of all ranks together when all use one large Data."""
    from synkhronos._host import tensor as T

    with frame.session(n_ranks, device) as synk:
        x = T.matrix("x", "float32")
        total = synk.function([x], x.sum(), bcast_inputs=[])
        every = synk.function([], bcast_inputs=[x], outputs=(x.sum(), "max"))
        small = synk.data(np.ones((n_ranks, 1000), "float32"))
        total(small), every(small)
        pids = _all_pids()
        before = sum(map(_pss, pids))
        data = synk.data(var=x)
        data.set_shape((megabytes, 250_000))
        with turns.shown(f"a Data of {megabytes:,} MB"):
            data.data.fill(1)
            total(data), every(data)
        grown = sum(map(_pss, pids)) - before
        size = data.data.nbytes
    return {"data_bytes": size, "pss_bytes": grown, "pss_per_data": grown / size}


def _all_pids():
    from synkhronos._session.current import current

    return [os.getpid(), *current("the benchmark").worker_pids]


def _pss(pid):
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/{pid}/smaps_rollup has no line Pss")


def _text(found, args):
    lines = [
        f"One Data in, one number out; {args.ranks} ranks, {os.cpu_count()} cores, medians",
        ("call", "call_us", "us"),
        ("batch=slice(...)", "sliced_us", "us"),
        ("Theano's own call", "theano_us", "us"),
        ("overhead", found["call_us"] - found["theano_us"], "us"),
        ("bare Pipe round trip", "pipe_us", "us"),
        "A profile, on and off in turns; minima",
        ("adds to a call", "profile_us", "us"),
        (f"to one of {found['profile_long_us']:.0f} us", "profile_percent", "%"),
        f"An idle session over {args.idle:g} s",
        ("CPU", "idle_cpu_percent", "% of a core"),
        f"A Data of {found['data_bytes'] / 1e9:.2f} GB, used by {_RANKS_OF_A_DATA} ranks",
        ("memory of all (PSS)", "pss_per_data", "times its size"),
    ]
    return "\n".join(each if isinstance(each, str) else _line(found, *each) for each in lines)


def _line(found, title, figure, unit):
    value = found[figure] if isinstance(figure, str) else figure
    digits = {"us": 1, "%": 2, "% of a core": 2}.get(unit, 3)
    return f"  {title:24} {value:8.{digits}f} {unit}"
