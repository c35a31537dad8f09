"""Theano ops that do anything on a rank, and functions that compile quickly."""

import contextlib
import functools
import gc
import os
import re
import time
from pathlib import Path

import numpy as np
import psutil
import theano
import theano.tensor as T

import synkhronos as synk
from support import host_library
from support.layouts import ON_DEVICES
from support.waiting import LONG

# Operations on devices have compiled code only, so they need a linker that runs it.
IS_VM = ON_DEVICES and not host_library.ON_PYTENSOR
MODE = theano.Mode("vm", "fast_compile") if IS_VM else host_library.MODE
function = functools.partial(synk.function, mode=host_library.MODE)


class Call(theano.Op):
    """Apply any Python function to an array: ``Call(f)(x)`` is ``f(x)``, computed in Python."""

    __props__ = ("function", "otype")

    def __init__(self, function, otype=T.dvector):
        self.function, self.otype = function, otype

    def make_node(self, *inputs):
        return theano.Apply(self, [T.as_tensor_variable(x) for x in inputs], [self.otype()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.asarray(self.function(*inputs), dtype=self.otype.dtype)


def on_ranks(do, **kwargs):
    """Run ``do()`` on each rank; return the numbers in rank order."""
    dummy = theano.shared(np.zeros(1))
    f = function([], (Call(lambda x: [do()])(dummy), "gather"), **kwargs)
    return f().tolist()


def model(dtype):
    """Return inputs, parameters of several shapes, and a loss."""
    x, y = T.matrix("x", dtype), T.vector("y", dtype)
    w = theano.shared(np.random.RandomState(1).randn(4, 3).astype(dtype), "w")
    b = theano.shared(np.zeros((1, 3), dtype), "b", broadcastable=(True, False))
    s = theano.shared(np.asarray(0.5, dtype), "s")
    return [x, y], [w, b, s], ((T.tanh(T.dot(x, w) + b).sum(axis=1) * s - y) ** 2).mean()


def step_of(inputs, loss, grad_updates, param_updates, shareds, mode=None):
    """Return a training step: gradients, their average over the ranks, and new parameters."""
    compute = synk.function(inputs, loss, updates=grad_updates, mode=mode)
    update = function([], updates=param_updates)

    def step(*args, **kwargs):
        value = compute(*args, **kwargs)
        synk.all_reduce(shareds)
        update()
        return value

    return step


def worker():
    """Return the Worker of the rank that calls this."""
    from synkhronos import session
    from synkhronos._session.rank import Worker

    if session._Current.session is not None:
        return session._Current.session.worker
    [own] = [
        o
        for o in gc.get_objects()
        if isinstance(o, Worker) and o.rank == o.gate.rank != o.gate.master_rank
    ]
    return own


def mapped_bytes(pid):
    """Return the bytes of segments that a process has mapped."""
    total = 0
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            if "/dev/shm/" in line:
                start, end = line.split()[0].split("-")
                total += int(end, 16) - int(start, 16)
    return total


def shared_memory():
    """Return the bytes of the segments that this process and its children hold."""
    segments = {}
    for process in [psutil.Process(), *psutil.Process().children()]:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it is closed
                if os.readlink(link).startswith("/dev/shm/"):
                    found = link.stat()
                    segments[found.st_dev, found.st_ino] = 512 * found.st_blocks
    return sum(segments.values())


def shares(x, n):
    """Return the rows of each rank, computed without the library."""
    edges = np.floor(np.linspace(0, len(x), n + 1)).astype(int)
    return [x[a:b] for a, b in zip(edges[:-1], edges[1:])]


def nameless(value):
    """Return the repr of a value without its address, so that test ids stay the same."""
    return re.sub(r"\\* at\\* 0x[0-9a-f]+", "", repr(value))  # in a pattern, too


def until(file):
    """Return a function of an array that waits until a file exists."""

    def wait(x):
        end = time.monotonic() + LONG
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.005)
        return x

    return wait


def say(request, text):
    """Write a line to the terminal, past pytest's capturing."""
    plugins = request.config.pluginmanager
    terminal = plugins.getplugin("terminalreporter")
    if terminal is None:  # in a process of pytest-xdist
        return
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        terminal.write_line(f" {text}")


kept = []


def square(number):
    return number * number
