"""Data that one thread, or a signal handler, resizes or frees while a call with them runs."""

import signal
import threading
import time

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.faults import bounded
from support.helpers import function, on_ranks
from support.layouts import Layout
from support.threads import in_thread

import synkhronos as synk
from synkhronos._session import commands, staging
from synkhronos._session.replica import RunFunction
from synkhronos._session.session import Session

LAYOUTS = [Layout(2), Layout(3, master=1)]
pytestmark = pytest.mark.faults

ROWS = 5000  # of two pages and more, as SIGBUS comes for whole pages
OLD, NEW = np.arange(1.0, ROWS + 1), np.full(3 * ROWS, 7.0)

CHANGES = {
    "free": lambda d: d.free_memory(),
    "longer": lambda d: d.set_value(NEW),
    "length": lambda d: d.set_length(len(NEW)),
    "free and fill": lambda d: (d.free_memory(), d.set_value(NEW)),
}


class Calls:
    """Calls with a Data; each returns the values of it that ranks have read."""

    def __init__(self, n):
        x = T.dvector("x")
        self.n = n
        self.f = function([x], (x, "gather"))
        self.variable = theano.shared(np.zeros(1), "variable")

    def function(self, d):
        return self.f(d)

    def rows(self, d):
        rows = slice(0, min(len(d), 10))
        return self.f(d, batch=rows)

    def scatter(self, d):
        synk.scatter(self.variable, d)
        return synk.gather(self.variable, nd_up=0)

    def set_value(self, d):
        synk.set_value(self.n - 1, self.variable, d)
        return synk.get_value(self.n - 1, self.variable)

    def some_rows(self, d):
        synk.set_value(self.n - 1, self.variable, d, batch=slice(1, 4))
        return synk.get_value(self.n - 1, self.variable)


@pytest.fixture(scope="module")
def calls(ranks):
    return Calls(ranks.n)


def in_other_thread(do, *args):
    in_thread(do, *args).result()


def in_handler(do, *args):
    previous = signal.signal(signal.SIGUSR1, lambda *_: do(*args))
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)


@pytest.fixture
def before_commands(monkeypatch):
    """Return a function: what it is given runs once, before the next command that reads a Data."""
    pending, original = [], Session.run

    def run(self, command, *arguments):
        if pending and isinstance(command, (RunFunction, commands.Assign)):
            pending.pop()()
        return original(self, command, *arguments)

    monkeypatch.setattr(Session, "run", run)
    yield pending.append
    assert not pending


@pytest.mark.parametrize("elsewhere", [in_other_thread, in_handler])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["function", "rows", "scatter"])
def test_a_call_goes_on_with_what_it_was_given(calls, before_commands, name, change, elsewhere):
    call, d = getattr(calls, name), synk.data(OLD)
    expected = call(d)
    np.testing.assert_array_equal(expected, OLD[: len(expected)])
    before_commands(lambda: elsewhere(CHANGES[change], d))
    np.testing.assert_array_equal(call(d), expected)
    after = d.data.copy()
    np.testing.assert_array_equal(call(d), after[: len(expected)] if name == "rows" else after)


@pytest.mark.parametrize("name", ["set_value", "some_rows"])
def test_a_value_for_a_worker_is_what_it_was(calls, before_commands, name):
    call, d = getattr(calls, name), synk.data(OLD)
    expected = call(d)
    before_commands(lambda: in_other_thread(d.free_memory))
    np.testing.assert_array_equal(call(d), expected)


def test_memory_goes_when_the_call_ends(calls, ranks, before_commands):
    x = T.dvector("x")
    f = function([x], (x.sum(), "sum"))
    d = synk.data(OLD)
    held = ranks.session.held
    before_commands(d.free_memory)
    assert f(d) == OLD.sum()
    assert not held
    with pytest.raises(TypeError, match="1 input"):
        f(d, d)
    with pytest.raises(ValueError, match="batch"):
        f(d, batch=[ROWS])
    assert not held


def test_a_data_that_another_thread_fills_is_not_emptied_by_a_call(calls, monkeypatch):
    """A call with an empty Data gives it no memory, which could replace that of another thread."""
    d, original = synk.data(dtype="float64", ndim=1), staging.GrowingArray.empty

    def empty(self):
        found = original(self)
        in_other_thread(d.set_value, OLD)
        return found

    monkeypatch.setattr(staging.GrowingArray, "empty", empty)
    assert len(calls.function(d)) == 0
    np.testing.assert_array_equal(calls.function(d), OLD)


@pytest.mark.parametrize("name", ["function", "rows", "scatter", "set_value"])
def test_threads_that_resize_and_free_while_others_call(calls, ranks, name):
    """No call fails, and none reads anything but zeros and numbers that were written."""
    d, errors, end, made = synk.data(OLD), [], time.monotonic() + 0.3, [0, 0]
    call = getattr(calls, name)

    def until_the_end(do):
        def loop():
            random = np.random.RandomState(threading.get_ident() % 2**32)
            try:
                while (time.monotonic() < end or 0 in made) and not errors:
                    do(random)
            except Exception as error:
                errors.append(error)

        return threading.Thread(target=loop)

    def resize(random):
        n_rows = random.randint(1, 4 * ROWS)
        change = random.randint(5)
        if change == 0:
            d.free_memory()
        elif change == 1:
            d.set_length(n_rows)
        elif change == 2:
            d.set_shape((n_rows,), oversize=1.5)
        else:
            d.set_value(np.full(n_rows, float(random.randint(1, 9))))
        made[0] += 1

    def write(random):
        d[: random.randint(1, ROWS)] = random.randint(1, 9)

    def use(random):
        made[1] += 1
        try:
            found = call(d)
        except ValueError as error:
            assert name == "rows" and "beyond the rows" in str(error)
            return
        assert (found == np.rint(found)).all()
        assert found.min(initial=0) >= 0 and found.max(initial=0) <= ROWS

    threads = [until_the_end(do) for do in (resize, resize, write, use, use)]
    with bounded(20):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert min(made) > 0, made
    d.set_value(OLD)
    np.testing.assert_array_equal(calls.function(d), OLD)
    assert len(on_ranks(lambda: 1)) == ranks.n
