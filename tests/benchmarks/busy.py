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
from synkhronos.tools import turns
from synkhronos.tools.bench import call, frame, options

_SETTLE_SECONDS = 0.5  # in which busy processes have started and the system has spread them


def add_arguments(parser):
    """Add the options of this benchmark."""
    options.add(parser, "--ranks", options.count, 2, "ranks of the session")
    what = "measure beside 0 and so many busy processes"
    options.add(parser, "--busy", options.counts, [1, 2, 4], what)
    options.add(parser, "--seconds", options.positive, 2.0, "time for each figure")


def measure(args, report):
    """Measure each number of busy processes, and show the table."""
    loads = [0, *args.busy]
    report.results.update(ranks=args.ranks, busy=[])
    with contextlib.ExitStack() as stack:
        calls = _ours(args.ranks, stack)
        calls["Pipe"] = stack.enter_context(call.Echo())
        calls.update(_pools(args.ranks, stack))
        for load in loads:
            measured = turns.Turns(args.seconds, most=10**6)
            measured.add_calls(calls)
            with kept_busy(load):
                measured.take_all(f"calls beside {load} busy processes")
            for name, rounds in measured.rounds_of.items():
                figures = {
                    "busy": load,
                    "system": name,
                    "mean_us": 1e6 * float(np.mean(np.concatenate(rounds))),
                    "best_us": 1e6 * float(min(map(np.mean, rounds))),
                }
                report.results["busy"].append(figures)
    report.show(_text(report.results["busy"], calls, loads, args.ranks))


@contextlib.contextmanager
def kept_busy(n_processes):
    """Yield so many processes that never wait, and end them."""
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
            time.sleep(_SETTLE_SECONDS)
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def _ours(n_ranks, stack):
    from synkhronos._host import library
    from synkhronos._host import tensor as T

    synk = stack.enter_context(frame.session(n_ranks, "cpu"))
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


def _text(figures, systems, loads, n_ranks):
    cell = {(figure["busy"], figure["system"]): figure for figure in figures}
    table = frame.Table("", *map(str, loads), first=20, least=18)
    cores = os.cpu_count()
    title = f"Busy processes beside; {n_ranks} ranks, {cores} cores, us, mean (best)"
    lines = [title, table.head]
    for name in systems:
        row = [cell[load, name] for load in loads]
        shown = [f"{one['mean_us']:.1f} ({one['best_us']:.1f})" for one in row]
        lines.append(table.line(f"  {name}", *shown))
    return "\n".join(lines)
