"""The time of the first compilation of a network, and of sending many functions to the ranks."""

import json
import os
import statistics
import subprocess
import tempfile

from synkhronos.tools.bench import options

# In a fresh interpreter with an empty compile cache: a step of training, as in `make demo`.
COMPILE = """
import resource, time
import numpy as np
import theano, theano.tensor as T
import synkhronos._host.theano.host
from synkhronos.extensions import update_rules

random = np.random.RandomState(0)
x, y = T.fmatrix("x"), T.ivector("y")
layer, params = x, []
for n_in, n_out in (64, 512), (512, 512), (512, 10):
    layer = T.tanh(layer) if params else layer
    w = theano.shared(random.normal(scale=n_in**-0.5, size=(n_in, n_out)).astype("float32"))
    b = theano.shared(np.zeros(n_out, "float32"))
    params += [w, b]
    layer = T.dot(layer, w) + b
loss = T.nnet.categorical_crossentropy(T.nnet.softmax(layer), y).mean()
updates = update_rules.momentum(loss, params, np.float32(0.1))
begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
step = theano.function([x, y], loss, updates=updates)
seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
losses = [float(step(np.ones((8, 64), "f"), np.arange(8, dtype="int32"))) for _ in range(3)]
cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
print(seconds, cpu, *map(float.hex, losses))
"""
SEND = """
import sys, time
import numpy as np
import theano, theano.tensor as T
import synkhronos as synk

n_ranks, number = map(int, sys.argv[1:])
synk.fork(n_ranks)
x = T.fmatrix("x")

def make():
    w = theano.shared(np.ones((5, 3), "float32"))
    total = T.tanh(T.dot(x, w) + np.float32(0.5)).sum()
    updates = [(w, w - np.float32(0.1) * T.grad(total, w))]
    return synk.function([x], (total, "sum"), updates=updates)

def sent():
    begin = time.perf_counter()
    synk.distribute()
    return time.perf_counter() - begin

first = [make()]
times = [sent()]  # workers look at the compile cache, and load modules
together = [make() for _ in range(number)]
times.append(sent())
one_by_one = 0.0
for _ in range(number):
    first.append(make())
    one_by_one += sent()
print(*times, one_by_one)
synk.close()
"""


def add_arguments(parser):
    """Add the options of this benchmark."""
    for name, default, what in (
        ("--rounds", 3, "rounds of interpreters that compile, and of those that send"),
        ("--ranks", 2, "ranks that functions are sent to"),
        ("--functions", 100, "functions to send"),
    ):
        parser.add_argument(
            name, type=options.count, default=default, help=f"{what} (default: {default})"
        )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def main(args) -> int:
    """Measure, print, and return the exit status."""
    found = {**measure_compiling(args.rounds), **measure_sending(args)}
    print(json.dumps(found, indent=2) if args.json else text(found, args))
    return 0


def measure_compiling(rounds):
    """Return medians of seconds and of the compilers' CPU time: as Theano compiles, and ahead."""
    ways = {"theano": {"SYNKHRONOS_COMPILERS": "0"}, "ahead": {}}
    usual = {name: value for name, value in os.environ.items() if name != "SYNKHRONOS_COMPILERS"}
    times = {name: [] for name in ways}
    results = set()
    for _ in options.progress("compilations", range(rounds)):
        for name, variables in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                given = os.environ.get("THEANO_FLAGS", "")
                flags = ",".join(filter(None, [given, f"base_compiledir={folder}"]))
                seconds, cpu, *losses = _run(
                    COMPILE, env={**usual, **variables, "THEANO_FLAGS": flags}
                )
            times[name].append((float(seconds), float(cpu)))
            results.add(tuple(losses))
    found = {}
    for name in ways:
        found[f"compiled_{name}_s"], found[f"compiled_{name}_cpu_s"] = map(
            statistics.median, zip(*times[name])
        )
    return {**found, "same_results": len(results) == 1}


def measure_sending(args):
    """Return medians of the seconds of `distribute`: one function, many together, one by one."""
    rounds = []
    for _ in options.progress("sessions", range(args.rounds)):
        rounds.append(list(map(float, _run(SEND, str(args.ranks), str(args.functions)))))
    names = "sent_first_s", "sent_together_s", "sent_one_by_one_s"
    return dict(zip(names, map(statistics.median, zip(*rounds))))


def _run(code, *arguments, env=None):
    """Return the words of the last line that a fresh interpreter prints."""
    command = options.interpreter(code, *arguments)
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    if child.returncode:
        raise SystemExit("an interpreter failed: see above")
    return child.stdout.splitlines()[-1].split()


def text(found, args):
    """Return the table."""
    same = "the same" if found["same_results"] else "DIFFERENT"
    before, now = found["compiled_theano_s"], found["compiled_ahead_s"]
    many = f"{args.functions} functions"
    return "\n".join(
        [
            "A step of 64-512-512-10, momentum; empty compile cache    seconds  CPU of compilers",
            f"  SYNKHRONOS_COMPILERS=0, as Theano compiles          {before:11.2f}"
            f"{found['compiled_theano_cpu_s']:18.2f}",
            f"  several compilers, compiled header                  {now:11.2f}"
            f"{found['compiled_ahead_cpu_s']:18.2f}",
            f"  {before / now:.2f} times as fast; results are {same}, bit by bit",
            f"distribute() to {args.ranks} ranks, milliseconds",
            f"  the first function       {1e3 * found['sent_first_s']:10.1f}",
            f"  {many:25}{1e3 * found['sent_together_s']:10.1f}",
            f"  {many + ', one by one':25}{1e3 * found['sent_one_by_one_s']:9.1f}",
        ]
    )
