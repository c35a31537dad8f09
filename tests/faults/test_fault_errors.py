"""Exceptions of every kind, and workers that end by themselves: told by name, and work goes on."""

import functools
import os
import re
import sys
import threading

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.faults import ROWS, bounded, checked
from support.helpers import Call, function
from support.layouts import Layout

import synkhronos as synk
from synkhronos import WorkerDied, WorkerError
from synkhronos._session import replica

pytestmark = pytest.mark.faults


class NeedsArguments(Exception):
    def __init__(self, first, *, second):
        super().__init__(first)
        self.second = second


class NoWords(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


class ExitsWhenRead(Exception):
    def __str__(self):
        raise SystemExit("while it is read")


class Text(str):
    def __reduce__(self):
        raise TypeError("can't be pickled")


class OddText(Exception):
    def __str__(self):
        return Text("odd text")


class NoAttributes(Exception):
    def __getattribute__(self, name):
        raise AttributeError("nothing here")


class Full(Exception):
    def __init__(self):
        super().__init__("full")
        self.rows, self.lock = np.zeros(1_000_000), threading.Lock()


LongName = type("N" * 100_000, (Exception,), {})


def recursion():
    return recursion()


def chain(length):
    error = ValueError("the first")
    for number in range(length):
        error, before = ValueError(f"number {number}"), error
        error.__cause__ = before
    raise error


def cycle():
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    raise one


def raises(make, *args, **kwargs):
    """Return a function that raises: it makes the error there, as not each can be sent."""

    def do():
        raise make(*args, **kwargs)

    return do


# What is raised, and the names it may be reported by: its own, or that of what came of it.
ERRORS = {
    "needs arguments": (raises(NeedsArguments, "one", second="two"), "NeedsArguments|TypeError"),
    "no words": (raises(NoWords), "NoWords|RuntimeError"),
    "text of another class": (raises(OddText), "OddText"),
    "full of what can't be pickled": (raises(Full), "Full|TypeError"),
    "long name": (raises(LongName, "x"), r"N[\s\S]*"),
    "long message": (raises(KeyError, "k" * 10_000_000), "KeyError"),
    "many arguments": (
        raises(OSError, 2, "x" * 100_000, "y" * 100_000),
        "FileNotFoundError|OSError",
    ),
    "surrogates": (raises(ValueError, "\udc80\ud800"), "ValueError"),
    "no message": (raises(ValueError), "ValueError"),
    "stop iteration": (raises(StopIteration, 3), "StopIteration|RuntimeError"),
    "memory": (raises(MemoryError), "MemoryError"),
    "recursion": (recursion, "RecursionError"),
    "a long chain": (lambda: chain(3000), "ValueError|RecursionError"),
    "a circle": (cycle, "ValueError"),
    "worker error": (raises(WorkerError, "mine"), "WorkerError"),
    "session error": (raises(synk.SessionError, "mine"), "SessionError"),
    "no memory": (lambda: np.empty(1 << 60, np.int8), ".*MemoryError"),
}
ONLY_ON_WORKERS = {  # on the master they are for the script, or for pytest
    "no attributes": (raises(NoAttributes, "x"), "NoAttributes|AttributeError"),
    "exits when read": (raises(ExitsWhenRead), "ExitsWhenRead|SystemExit"),
    "exit 0": (raises(SystemExit, 0), "SystemExit"),
    "exit with words": (lambda: sys.exit("words"), "SystemExit"),
    "interrupt": (raises(KeyboardInterrupt), "KeyboardInterrupt"),
    "generator exit": (raises(GeneratorExit), "GeneratorExit"),
    "worker died": (raises(WorkerDied, "mine"), "WorkerDied"),
}


def act(table, kind, rank, rows):
    """Do what a table says on one of the ranks, if its rows are below 100."""
    if rows[0] == 2 * rank:
        TABLES[table][kind][0]()
    return rows


def acting(do):
    x = T.dvector("x")
    return function([x], (Call(do)(x), "gather"))


LAYOUTS = [Layout(2)]


def check(table, kind, rank):
    f, rows = acting(functools.partial(act, table, kind, rank)), np.arange(4.0)
    pids = synk.session.current("a test").worker_pids
    names = TABLES[table][kind][1]
    for _ in range(2):
        with bounded(), pytest.raises(WorkerError) as caught:
            f(rows)
        assert caught.value.rank == rank
        assert re.fullmatch(names, caught.value.remote_type), caught.value.remote_type
        assert len(str(caught.value)) < 1 << 16
        np.testing.assert_array_equal(f(rows + 100), rows + 100)
    assert synk.session.current("a test").worker_pids == pids


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_raises_is_reported(ranks, rank, kind):
    check("errors", kind, rank)


@pytest.mark.parametrize("kind", ONLY_ON_WORKERS)
def test_what_a_worker_raises_does_not_end_it(ranks, kind):
    check("only on workers", kind, 1 - ranks.master)


class Raiser:
    """Raises when a worker reads it."""

    def __init__(self, table, kind):
        self.place = os.getpid(), table, kind

    def __reduce__(self):
        return raise_on_worker, self.place

    def __call__(self, rows):
        return rows


def raise_on_worker(master, table, kind):
    if os.getpid() != master:
        TABLES[table][kind][0]()


TABLES = {"errors": ERRORS, "only on workers": ONLY_ON_WORKERS}


@pytest.mark.parametrize(
    "table, kind",
    [("errors", "no words"), ("errors", "recursion"), ("errors", "long message")]
    + [("only on workers", kind) for kind in ("exit 0", "interrupt")],
)
def test_what_a_worker_raises_when_it_reads_a_function(ranks, table, kind):
    good, bad = acting(np.copy), acting(Raiser(table, kind))
    pids = synk.session.current("a test").worker_pids
    for _ in range(2):
        with bounded(), pytest.raises(WorkerError) as caught:
            bad(np.arange(4.0))
        assert caught.value.rank == 1 - ranks.master
        np.testing.assert_array_equal(good(np.arange(4.0)), np.arange(4.0))
    assert synk.session.current("a test").worker_pids == pids


# What is said of rows.

X, W = T.dmatrix("x"), theano.shared(np.ones((12, 2)))
FIXED = {
    "reshape": X.reshape((12, 2, 1)).sum(axis=2),
    "concatenate": T.concatenate([X, W], axis=1),
    "index": X[T.arange(12), T.zeros_like(T.arange(12))],
    "product": T.dot(W.T, X),
    "assert": T.opt.Assert("not twelve")(X, T.eq(X.shape[0], 12)),
}


@pytest.mark.parametrize("name", FIXED)
def test_errors_about_shapes_say_how_many_rows_the_rank_had(ranks, name):
    f = function([X], (FIXED[name], "max"), name=name)
    f.as_theano(np.ones((12, 2)))
    said = rf"\nRank 0 had {12 // ranks.n} of the 12 rows of this call. If .* write x.shape\[0\] of"
    with pytest.raises(WorkerError, match=said):
        f(np.ones((12, 2)))
    with pytest.raises(WorkerError, match=r"12 rows of this call, in 2 slices. If"):
        f(np.ones((12, 2)), num_slices=2)
    # The master has all rows here, so the number of its rows explains nothing.
    with pytest.raises(WorkerError) as caught:
        f(np.ones((1, 2)))
    assert "rows of this call" not in str(caught.value)


def test_errors_of_other_axes_than_that_of_rows_say_so(ranks):
    total, y, v = theano.shared(0.0), T.dmatrix("y"), theano.shared(np.ones(3))
    f = function([X, y], (T.dot(X, v) + y.sum(axis=1), "gather"), updates=[(total, total + 1)])
    with pytest.raises(WorkerError, match=r"not of the ranks.* 12 .*shapes \(12, 4\), \(12, 2\)\."):
        f(np.ones((12, 4)), np.ones((12, 2)))
    assert total.get_value() == 0
    f = function([X, y], (T.dot(X, y), "gather"))
    with pytest.raises(WorkerError, match=r"had .* of the 12 rows .* belongs in bcast_inputs\."):
        f(np.ones((12, 12)), np.ones((12, 2)))


def test_a_long_call_does_not_run_again_in_one_process(ranks, monkeypatch):
    monkeypatch.setattr(replica, "SECONDS_AGAIN", 0.0)
    f = function([X], (T.dot(X, theano.shared(np.ones(3))), "gather"))
    with pytest.raises(WorkerError, match=r"had .* of the 12 rows"):
        f(np.ones((12, 4)))


def test_other_errors_say_nothing_of_rows(ranks):
    i = T.lvector("i")
    for call in (
        lambda: checked(lambda x: x[0] == 0, ValueError("no such value"))(ROWS),
        lambda: function([i], (W[i], "gather"))([1, 2, 3, 99]),
    ):
        with pytest.raises(WorkerError, match=r"no such value|out of bounds") as caught:
            call()
        assert "of this call" not in str(caught.value)
