"""The likelihood of PyMC models on ranks beside Stan's reduce_sum with as many threads.

See ``synkhronos bench pymc``. Stan programs of the same models are compiled first, for minutes.
"""

import contextlib
import os
from pathlib import Path

import numpy as np

from benchmarks import stan
from synkhronos.tools import turns
from synkhronos.tools.bench import pymc


def add_arguments(parser):
    """Add the options of this benchmark."""
    pymc.add_arguments(parser)


def measure(args, report):
    """Measure all, and show the tables."""
    libraries = {}
    for name in args.models:
        with turns.shown(f"compiling {name}.stan"):
            libraries[name] = stan.compiled(name, _cache())

    def beside(name, data):
        found = _evaluation(name, libraries[name], data, args)
        one, all_threads = found["stan_us"], found["stan_ranks_us"]
        report.show(
            f"Stan, {name}: one thread {one / 1e3:.3f} ms, {args.ranks[0]} threads with reduce_sum "
            f"{all_threads / 1e3:.3f} ms ({one / all_threads:.2f})"
        )
        return found

    pymc.measure_beside(beside, args, report)


def _cache():
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "synkhronos"


def _evaluation(name, library, data, args):
    """Return the microseconds of an evaluation by Stan: with one thread, and one for each rank."""
    from synkhronos.extensions.pymc.advice import QUANTILE

    measured = turns.Turns(args.seconds)
    with contextlib.ExitStack() as stack:
        for threads in dict.fromkeys([1, args.ranks[0]]):
            program = stack.enter_context(stan.running(library, data, threads))
            measured.add(threads, lambda n, program=program: program.ask("times", count=n))
        measured.take_all(f"{name}, {data['n']:,} rows: Stan")
    us = [
        1e6 * float(np.percentile(np.concatenate(rounds), QUANTILE))
        for rounds in measured.rounds_of.values()
    ]
    return {"stan_us": us[0], "stan_ranks_us": us[-1]}
