"""How long things take. Nothing is compared but the times, and no time is too long."""

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk
from scenarios import Skip, scenario, training
from synkhronos.extensions import update_rules
from synkhronos.tools import turns
from synkhronos.tools.bench.collectives import bus_factor
from synkhronos.tools.bench.networks import NETWORKS

FORKS = True

MIB = 2**20


def settle(*variables):
    """Wait for the master's device to finish what was asked of it."""
    for variable in variables:
        value = variable.container.data
        if hasattr(value, "sync"):
            value.sync()


def medians(run, calls, seconds=2.0):
    """Return the median seconds of each call; they take turns."""
    measured = turns.Turns(seconds, most=1 if run.quick else 300)
    measured.add_calls(calls)
    return {name: each["median"] for name, each in measured.take_all("calls").items()}


def microseconds(seconds):
    """Return a time as text."""
    return f"{1e6 * seconds:,.1f} us"


def tell_rate(run, name, size, seconds):
    """Note a time, and how many bytes pass in it."""
    run.figures[name] = f"{microseconds(seconds):>16}   {size / seconds / 1e9:8.3f} GB/s"


@scenario(limit=240)
def calls(run):
    """A function of a few rows, beside plain Theano on the master's device."""
    x = T.fmatrix("x")
    w = theano.shared(np.ones((16, 16), "float32"))
    rows = np.ones((2 * run.n, 16), "float32")
    data = synk.data(rows)
    empty = synk.function([], [])
    f = synk.function([x], T.dot(x, w).mean())
    plain = theano.function([x], T.dot(x, w).mean())
    plain_empty = theano.function([], [])
    ours, theirs = "dot of few rows of an array, synkhronos", "the same rows, plain Theano"
    found = medians(
        run,
        {
            "no input or output, synkhronos": empty,
            "no input or output, plain Theano": plain_empty,
            "dot of few rows of Data, synkhronos": lambda: f(data),
            ours: lambda: f(rows),
            theirs: lambda: plain(rows),
        },
    )
    run.figures.update({name: microseconds(seconds) for name, seconds in found.items()})
    return f"synkhronos adds {microseconds(found[ours] - found[theirs])} to a call with an array"


@scenario(limit=600)
def collectives(run):
    """Time and bus bandwidth: bytes that pass each rank's link in the best algorithm, by time."""
    for exponent in (10, 20) if run.quick else range(10, 29, 3):
        size = 2**exponent
        for name, seconds in time_collectives(run, size).items():
            factor = bus_factor(name, run.n) if run.n > 1 else 1
            tell_rate(run, f"{name} of {readable(size)}", factor * size, seconds)
    return "GB/s on the bus" if run.n > 1 else "one rank: GB/s of its own bytes"


def time_collectives(run, size):
    """Return the seconds that each collective takes for arrays of `size` bytes."""
    s, part = theano.shared(np.ones(size // 4, "float32")), theano.shared(np.ones(1, "float32"))
    data = synk.data(s.get_value())

    def done(collective, *arguments):
        collective(*arguments)
        settle(arguments[0])

    calls = {
        "all_reduce": lambda: done(synk.all_reduce, s, "max"),
        "reduce": lambda: done(synk.reduce, s, "max"),
        "broadcast": lambda: done(synk.broadcast, s),
        "scatter": lambda: done(synk.scatter, part, data),
    }

    def all_gather(count):
        seconds = []
        for _ in range(count):
            calls["scatter"]()  # makes the variable short again
            seconds.append(turns.seconds_of(done, synk.all_gather, part))
        return seconds

    measured = turns.Turns(1.5, most=1 if run.quick else 300)
    measured.add("all_gather", all_gather)
    measured.add_calls(calls)
    return {name: each["median"] for name, each in measured.take_all("collectives").items()}


def readable(size):
    """Return a number of bytes as text."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


@scenario(limit=600)
def step_of_a_network(run):
    """A training step on all ranks, beside plain Theano on the master's device alone."""
    kind, rows = ("mlp", 64) if run.quick else ("cnn", 512)
    rows *= run.n
    parallel, serial = NETWORKS[kind](), NETWORKS[kind]()
    x, y = serial.rows(rows)
    step = training.in_the_graph(parallel)
    updates = update_rules.momentum(serial.loss, serial.params, **training.RATES)
    plain = theano.function([serial.x, serial.y], serial.loss, updates=updates)
    data = synk.data(x), synk.data(y)

    def run_step():
        step(*data)
        settle(*parallel.params)

    def run_plain():
        plain(x, y)
        settle(*serial.params)

    found = medians(run, {"synkhronos": run_step, "plain Theano, one device": run_plain}, 6)
    for name, seconds in found.items():
        run.figures[f"{kind}, {rows} rows, {name}"] = microseconds(seconds)
    ours, theirs = found.values()
    return f"{theirs / ours:.2f} times the speed of plain Theano on one device"


@scenario(limit=240)
def host_to_device(run):
    """64 MiB from shared memory to every device, beside pygpu's copy to one."""
    if run.kind == "cpu":
        raise Skip("CPU ranks only")
    import pygpu

    size = (1 if run.quick else 64) * MIB
    array = np.ones(size // 4, "float32")
    x, s = T.fvector("x"), theano.shared(np.zeros(size // 4, "float32"))
    context = s.container.data.context
    data = synk.data(array)
    load = synk.function([], updates=[(s, x)], bcast_inputs=[x])

    def run_load():
        load(data)
        settle(s)

    def run_broadcast():
        synk.broadcast(s, data)
        settle(s)

    calls = {
        "input of a function, whole to each rank": run_load,
        "broadcast of Data": run_broadcast,
        "pygpu.asarray of an array, one device": lambda: pygpu.asarray(
            array, context=context
        ).sync(),
        "pygpu's write of an array, one device": lambda: (
            s.container.data.write(array),
            s.container.data.sync(),
        ),
        "NumPy's copy on the host": array.copy,
    }
    for name, seconds in medians(run, calls).items():
        tell_rate(run, name, size, seconds)
