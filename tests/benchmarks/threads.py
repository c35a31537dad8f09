"""A step of training on chosen CPUs: what the second threads of cores give.

One rank is on the first CPU, two are on neighbors or far apart, half as many as there are CPUs on
the first half or on every other, and then there is one for each. The threads of a core are
neighbors, or as far apart as there are cores. Not every machine tells which, but the slower of two
lines with as many ranks has them on the same cores. Times are those of the best of ten rounds.
"""

import contextlib
import json
import os
import statistics

from synkhronos._machine import cores
from synkhronos._wording import count
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, options, programs, training


def add_arguments(parser):
    """Add the options of this benchmark."""
    known = options.names(training.NETWORKS, "network")
    options.add(parser, "--networks", known, ["mlp"], "which")
    options.add(parser, "--batch", options.count, training.BATCH, "rows, of all ranks together")
    options.add(parser, "--seconds", options.positive, 5.0, "time for each line")


def measure(args, report):
    """Measure all lines of a network in turns, and show them."""
    allowed = sorted(os.sched_getaffinity(0))
    half = len(allowed) // 2
    chosen = [allowed[:1], allowed[:2], allowed[:: max(1, half)][:2]]
    chosen += [allowed[:half], allowed[::2], allowed]
    report.results["steps"] = []
    for name in args.networks:
        job, measured = training.TrainingTask(name, args.batch), turns.Turns(args.seconds, 10)
        with contextlib.ExitStack() as stack:
            for cpus in {tuple(each): None for each in chosen if each}:
                program = stack.enter_context(_program(job, cpus))
                with turns.shown(f"{name}: {count(len(cpus), 'rank')} compile"):
                    program.ask("losses", count=1)
                measured.add(cpus, lambda n, program=program: program.ask("times", count=n))
            measured.take_all(f"rounds of {name}")
        table = frame.Table(f"{name}, {args.batch} rows", "ranks", "ms/step", "/ 1 rank", first=44)
        report.show(f"{cores.described()}\n{table.head}")
        one = None
        for cpus, rounds in measured.rounds_of.items():
            seconds = min(map(statistics.median, rounds))
            one = one or seconds
            report.results["steps"].append({"network": name, "cpus": cpus, "seconds": seconds})
            cells = str(len(cpus)), f"{1e3 * seconds:.2f}", f"{one / seconds:.2f}"
            report.show(table.line(f"  CPUs {','.join(map(str, cpus))}", *cells))


def _program(job, cpus):
    bound = f"import os; os.sched_setaffinity(0, {cpus})"
    serve = f"{bound}; from synkhronos.tools.bench import training; training.serve()"
    line = programs.interpreter(serve, json.dumps(["one", ["cpu"] * len(cpus), job]))
    return programs.Program(f"{count(len(cpus), 'rank')} on {cpus}", line)
