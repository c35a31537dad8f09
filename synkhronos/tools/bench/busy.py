"""Small calls while other processes keep the cores busy, beside a Pipe, a Pool and joblib.

Each sums the halves of a small array on two processes, but for the Pipe, whose other end sends a
byte back, and the all-reduce. They take turns in rounds. The mean is that of all calls of all
rounds, the best is the lowest mean of a round. A system that is not measured sleeps.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np

from synkhronos._machine.processes import end_with_parent
from synkhronos.tools.bench import options

ROUNDS = 5
WARM_CALLS = 10
SETTLE_SECONDS = 0.5  # in which busy processes have started and the system has spread them

_clock = time.perf_counter


@contextlib.contextmanager
def kept_busy(n_processes):
    """Run so many processes that never wait, in a context."""
    started = []
    try:
        for _ in range(n_processes):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-S", "-c", "while True: pass"],
                    stdin=subprocess.DEVNULL,
                    preexec_fn=functools.partial(end_with_parent, os.getpid(), signal.SIGKILL),
                )
            )
        if started:
            time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def measure(n_ranks, loads, seconds, echo):
    """Return, for each number of busy processes, the mean and the best of each system's calls.

    Parameters
    ----------
    n_ranks : int
        Ranks of the session, and processes of the pools.
    loads : list of int
        The numbers of busy processes.
    seconds : float
        The time for each figure.
    echo : callable
        Makes a round trip of a pipe.
    """
    with contextlib.ExitStack() as stack:
        calls = {**_ours(n_ranks, stack), "Pipe": echo, **_pools(n_ranks, stack)}
        figures = []
        for load in loads:
            with kept_busy(load):
                rounds = {name: [] for name in calls}
                steps = [name for _ in range(ROUNDS) for name in calls]
                for name in options.progress(f"calls beside {load} busy processes", steps):
                    rounds[name].append(_round(calls[name], seconds / ROUNDS))
            for name, each in rounds.items():
                figures.append(
                    {
                        "busy": load,
                        "system": name,
                        "mean_us": 1e6 * sum(s for s, _ in each) / sum(n for _, n in each),
                        "best_us": 1e6 * min(s / n for s, n in each),
                    }
                )
    return figures


def _round(call, seconds):
    """Call for so many seconds; return the time that the calls took, and their number."""
    for _ in range(WARM_CALLS):
        call()
    count, begin = 0, _clock()
    while True:
        call()
        count += 1
        took = _clock() - begin
        if took > seconds:
            return took, count


def _ours(n_ranks, stack):
    import synkhronos as synk
    from synkhronos._host import library
    from synkhronos._host import tensor as T

    synk.fork(n_ranks)
    stack.callback(synk.close)
    x = T.matrix("x", "float32")
    f = synk.function([x], x.sum())
    data = synk.data(np.ones((2 * n_ranks, 4), "float32"))
    vector = library.shared(np.zeros(256, "float32"))
    synk.broadcast(vector)
    return {
        "call": lambda: f(data),
        "all_reduce, 1 KiB": lambda: synk.all_reduce(vector, op="sum"),
    }


def _pools(n_processes, stack):
    rows = np.ones((2 * n_processes, 4), "float32")
    parts = np.array_split(rows, n_processes)
    pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(n_processes))
    calls = {"Pool": lambda: sum(pool.map(np.sum, parts))}
    with contextlib.suppress(ImportError):
        joblib = importlib.import_module("joblib")
        parallel = stack.enter_context(joblib.Parallel(n_jobs=n_processes))
        one_sum = joblib.delayed(np.sum)
        calls["joblib"] = lambda: sum(parallel([one_sum(part) for part in parts]))
    return calls


def text(figures, n_ranks):
    """Return a table: a line for each system, its mean and best for each number of processes."""
    loads = list(dict.fromkeys(figure["busy"] for figure in figures))
    cell = {(figure["busy"], figure["system"]): figure for figure in figures}
    lines = [
        f"Busy processes beside; {n_ranks} ranks, {os.cpu_count()} cores, us, mean (best)",
        f"{'':20}" + "".join(f"{load:>18}" for load in loads),
    ]
    for name in dict.fromkeys(figure["system"] for figure in figures):
        row = [cell[load, name] for load in loads]
        shown = [f"{one['mean_us']:.1f} ({one['best_us']:.1f})" for one in row]
        lines.append(f"  {name:18}" + "".join(f"{each:>18}" for each in shown))
    return "\n".join(lines)
