"""What a rank's error and its death do to the session; the death comes last, because it ends it."""

import os
import signal
import threading
import time

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk
from scenarios import Skip, scenario
from scenarios.compare import close, refused, same, true

FORKS = True

SECONDS = 10  # within which a death must be noticed
MESSAGE = "negative, as the check wants it"


class RefuseNegative(theano.Op):
    """The identity, but for arrays with a negative number, which raise."""

    __props__ = ()

    def make_node(self, x):
        x = T.as_tensor_variable(x)
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        if (inputs[0] < 0).any():
            raise ValueError(MESSAGE)
        outputs[0][0] = inputs[0].copy()


class ProcessId(theano.Op):
    """The process that computes: as many of its ids as the input has rows."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [T.as_tensor_variable(x)], [T.lvector()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.full(len(inputs[0]), os.getpid())


def in_the_last_row(run, value):
    """Return rows of ones, with another number in the part of the last rank."""
    rows = np.ones((4 * run.n, 3), "float32")
    rows[-1] = value
    return rows


@scenario()
def error_before_a_reduction(run):
    """A rank raises while the others wait for it in a reduction of the same function."""
    x = T.fmatrix("x")
    f = synk.function([x], synk.ops.all_reduce(RefuseNegative()(2 * x).mean(axis=0)))
    for _ in range(3):
        began = time.perf_counter()
        error = refused(Exception, lambda: f(in_the_last_row(run, -1)), "a rank that raises")
        seconds = time.perf_counter() - began
        true(seconds < SECONDS, f"the others came out of the reduction after {seconds:.1f} s")
        true(MESSAGE in str(error), f"the message does not have the reason: {error}")
        if run.n > 1:
            same((type(error), error.rank), (synk.WorkerError, run.n - 1), "the error")
        rows = in_the_last_row(run, 3)
        close(f(rows), 2 * rows.mean(axis=0), "the next call")


def kill_while(run, repeat):
    """Kill the last rank while `repeat` is called again and again; return how it was noticed."""
    x = T.fmatrix("x")
    pids = synk.function([x], (ProcessId()(x), "gather"))(in_the_last_row(run, 1))
    true(len(set(pids)) == run.n, f"{len(set(pids))} processes for {run.n} ranks")
    killed = []

    def kill():
        killed.append(time.perf_counter())
        os.kill(int(pids[-1]), signal.SIGKILL)

    repeat()  # so that nothing is set up while the rank dies
    timer = threading.Timer(0.5, kill)
    timer.start()
    try:
        while not killed or time.perf_counter() < killed[0] + SECONDS:
            repeat()
    except synk.WorkerDied as death:
        seconds = time.perf_counter() - killed[0]
        same(death.rank, run.n - 1, "the rank that died")
        true(seconds < SECONDS, f"noticed after {seconds:.1f} s")
        refused(synk.WorkerDied, repeat, "the next call")
        return f"noticed after {seconds:.2f} s"
    finally:
        timer.join()
    raise AssertionError(f"calls went on for {SECONDS} s after the death of a rank")


@scenario(limit=60)
def death_in_a_collective(run):
    """A rank is killed in all_reduce."""
    if run.n == 1:
        raise Skip("one rank only")
    s = theano.shared(np.ones(2**18 if run.quick else 2**22, "float32"))
    return kill_while(run, lambda: synk.all_reduce(s, "max"))


@scenario(limit=60)
def death_in_a_function(run):
    """A rank is killed in a function that reduces."""
    if run.n == 1:
        raise Skip("one rank only")
    x = T.fmatrix("x")
    f = synk.function([x], synk.ops.all_reduce(T.dot(x, x.T).sum()))
    rows = np.ones((64 * run.n, 64), "float32")
    return kill_while(run, lambda: f(rows))
