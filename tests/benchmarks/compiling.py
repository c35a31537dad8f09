"""The time of the first compilation of a network, and of sending functions to the ranks.

Interpreters that compile as Theano does, and ahead, take turns. Times are medians.
"""

import os
import tempfile

import numpy as np

from benchmarks import groups
from synkhronos.tools import turns
from synkhronos.tools.bench import frame, networks, options, programs

# In a fresh interpreter with an empty compile cache: a step of training, as in `make demo`.
COMPILE = """
import resource, time
import numpy as np
import theano, theano.tensor as T
import synkhronos._host.theano.compiling
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
synk.fork(n_ranks, use_gpu=False)
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
    what = "rounds of interpreters that compile, and of those that send"
    options.add(parser, "--rounds", options.count, 3, what)
    options.add(parser, "--ranks", options.count, 2, "ranks that functions are sent to")
    options.add(parser, "--functions", options.count, 100, "functions to send")


def measure(args, report):
    """Measure all, and show the tables."""
    report.results.update(_measure_compiling(args.rounds))
    report.results.update(_measure_sending(args), **_measure_distribute(args.ranks))
    report.show(text(report.results, args))


def _measure_compiling(rounds):
    """Return medians of seconds and of the compilers' CPU time: as Theano compiles, and ahead."""
    ways = {"theano": {"SYNKHRONOS_COMPILERS": "0"}, "ahead": {}}
    usual = {name: value for name, value in os.environ.items() if name != "SYNKHRONOS_COMPILERS"}
    times = {name: [] for name in ways}
    results = set()
    for _ in turns.progress("compilations", range(rounds)):
        for name, variables in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                given = os.environ.get("THEANO_FLAGS", "")
                flags = ",".join(filter(None, [given, f"base_compiledir={folder}"]))
                seconds, cpu, *losses = groups.last_words(
                    programs.interpreter(COMPILE), {**usual, **variables, "THEANO_FLAGS": flags}
                )
            times[name].append((float(seconds), float(cpu)))
            results.add(tuple(losses))
    found = {"same_results": len(results) == 1}
    for name in ways:
        seconds, cpu = np.median(times[name], axis=0).tolist()
        found.update({f"compiled_{name}_s": seconds, f"compiled_{name}_cpu_s": cpu})
    return found


def _measure_sending(args):
    """Return medians of the seconds of `distribute`: one function, many together, one by one."""
    line = programs.interpreter(SEND, str(args.ranks), str(args.functions))
    steps = turns.progress("sessions", range(args.rounds))
    rounds = [list(map(float, groups.last_words(line))) for _ in steps]
    names = "sent_first_s", "sent_together_s", "sent_one_by_one_s"
    return dict(zip(names, np.median(rounds, axis=0).tolist()))


def _measure_distribute(n_ranks):
    """Time the compilation of a network's training function, and its distribution to the workers.

    The second of two such functions is timed, when all C code is in Theano's compile cache.
    """
    from synkhronos.extensions import update_rules

    with frame.session(n_ranks, "cpu") as synk:
        for _ in turns.progress("functions, compiled and distributed", range(2)):
            network = networks.Mlp()
            updates = update_rules.sgd(network.loss, network.params, np.float32(0.1))
            begin = turns.clock()
            f = synk.function([network.x, network.y], network.loss, updates=updates)
            compiled = turns.clock()
            synk.distribute()
            distributed = turns.clock()
            del f
    return {"compile_s": compiled - begin, "distribute_s": distributed - compiled}


def text(found, args):
    """Return the tables."""
    title = "A step of 64-512-512-10, momentum; empty compile cache"
    table = frame.Table(title, "seconds", "CPU of compilers", first=54)
    lines = [table.head]
    ways = "SYNKHRONOS_COMPILERS=0, as Theano compiles", "several compilers, compiled header"
    for name, title in zip(("theano", "ahead"), ways):
        cells = [f"{found[f'compiled_{name}{what}']:.2f}" for what in ("_s", "_cpu_s")]
        lines.append(table.line(f"  {title}", *cells))
    same = "the same" if found["same_results"] else "DIFFERENT"
    times = found["compiled_theano_s"] / found["compiled_ahead_s"]
    lines.append(f"  {times:.2f} times as fast; results are {same}, bit by bit")
    table = frame.Table(f"distribute() to {args.ranks} ranks", "milliseconds", first=40)
    lines.append(table.head)
    many = f"{args.functions} functions"
    for name, title in (
        ("sent_first_s", "the first function"),
        ("sent_together_s", many),
        ("sent_one_by_one_s", f"{many}, one by one"),
        ("distribute_s", "a training function of three layers"),
        ("compile_s", "its compilation in the master"),
    ):
        lines.append(table.line(f"  {title}", f"{1e3 * found[name]:.1f}"))
    return "\n".join(lines)
