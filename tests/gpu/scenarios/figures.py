"""How long things take. Nothing is compared but the times, and no time is too long."""

import time

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk
from scenarios import Skip, networks, scenario

FORKS = True

MIB = 2**20


def settle(*variables):
    """Wait for the master's device to finish what was asked of it."""
    for variable in variables:
        value = variable.container.data
        if hasattr(value, "sync"):
            value.sync()


def interleaved(run, calls, seconds=2.0, before=None):
    """Return the median seconds of each call, taking turns, as often as fits into `seconds`.

    `before` is called before each of them, and its time does not count.
    """
    measured = [[] for _ in calls]

    def turn():
        for call, own in zip(calls, measured):
            if before is not None:
                before()
            began = time.perf_counter()
            call()
            own.append(time.perf_counter() - began)

    for _ in range(3):  # the first ones set things up
        for own in measured:
            own.clear()
        began = time.perf_counter()
        turn()
    once = time.perf_counter() - began
    for _ in range(4 if run.quick else int(min(max(seconds / once, 6), 1000))):
        turn()
    return [float(np.median(own)) for own in measured]


def microseconds(seconds):
    """Return a time as text."""
    return f"{1e6 * seconds:,.1f} us"


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
    results = interleaved(
        run, [empty, plain_empty, lambda: f(data), lambda: f(rows), lambda: plain(rows)]
    )
    for name, seconds in zip(
        (
            "no input or output, synkhronos",
            "no input or output, plain Theano",
            "dot of few rows of Data, synkhronos",
            "dot of few rows of an array, synkhronos",
            "the same rows on one device, plain Theano",
        ),
        results,
    ):
        run.figures[name] = microseconds(seconds)
    return f"synkhronos adds {microseconds(results[3] - results[4])} to a call with an array"


@scenario(limit=600)
def collectives(run):
    """Time and bus bandwidth: bytes that pass each rank's link in the best algorithm, by time."""
    n = run.n
    shares = {
        "all_reduce": 2 * (n - 1) / n,
        "reduce": 1,
        "broadcast": 1,
        "scatter of Data": (n - 1) / n,
        "all_gather": (n - 1) / n,
    }
    for exponent in (10, 20) if run.quick else range(10, 29, 3):
        size = 2**exponent
        for (name, share), seconds in zip(shares.items(), time_collectives(run, size)):
            rate = (share if n > 1 else 1) * size / seconds / 1e9
            run.figures[f"{name} of {readable(size)}"] = (
                f"{microseconds(seconds):>16}   {rate:8.3f} GB/s"
            )
    return "GB/s on the bus" if n > 1 else "one rank: GB/s of its own bytes"


def time_collectives(run, size):
    """Return the seconds that each collective takes for arrays of `size` bytes."""
    s, part = theano.shared(np.ones(size // 4, "float32")), theano.shared(np.ones(1, "float32"))
    data = synk.data(s.get_value())

    def done(collective, *arguments):
        collective(*arguments)
        settle(arguments[0])

    def scatter():
        done(synk.scatter, part, data)

    calls = [
        lambda: done(synk.all_reduce, s, "max"),
        lambda: done(synk.reduce, s, "max"),
        lambda: done(synk.broadcast, s),
        scatter,
    ]
    # all_gather makes the variable longer: the scatter before it makes it short again.
    all_gather = [lambda: done(synk.all_gather, part)]
    return [
        *interleaved(run, calls, seconds=1.5),
        *interleaved(run, all_gather, seconds=0.5, before=scatter),
    ]


def readable(size):
    """Return a number of bytes as text."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


@scenario(limit=600)
def step_of_a_network(run):
    """A training step on all ranks, beside plain Theano on the master's device alone."""
    kind, rows = ("mlp", 64) if run.quick else ("cnn", 512)
    rows *= run.n
    [(x, y)] = networks.minibatches(kind, 1, rows)
    parallel, serial = networks.Network(kind), networks.Network(kind)
    grads = [synk.ops.all_reduce(grad) for grad in parallel.grads]
    step = synk.function(
        [parallel.x, parallel.y],
        parallel.loss,
        updates=networks.momentum(parallel.params, grads),
    )
    plain = theano.function(
        [serial.x, serial.y],
        serial.loss,
        updates=networks.momentum(serial.params, serial.grads),
    )
    data = synk.data(x), synk.data(y)

    def run_step():
        step(*data)
        settle(*parallel.params)

    def run_plain():
        plain(x, y)
        settle(*serial.params)

    ours, theirs = interleaved(run, [run_step, run_plain], seconds=6)
    run.figures[f"{kind}, {rows} rows, synkhronos"] = microseconds(ours)
    run.figures[f"{kind}, {rows} rows, plain Theano, one device"] = microseconds(theirs)
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
    for name, seconds in zip(calls, interleaved(run, list(calls.values()))):
        run.figures[name] = f"{microseconds(seconds):>16}   {size / seconds / 1e9:8.3f} GB/s"
