"""fork(restart=True): a cell of a notebook that is run again, with functions made before."""

import gc
import os
import signal
import weakref

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import function
from support.threads import in_thread
from support.waiting import wait_until
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk
from synkhronos import SessionError, WorkerDied
from synkhronos import session as _session

pytestmark = pytest.mark.usefixtures("no_session")

X = np.arange(12.0)


def accumulating():
    """Return a function with an output and updates, and the variable that it updates."""
    x, total = T.dvector("x"), theano.shared(0.0, "total")
    added = synk.ops.all_reduce(x.sum(), "sum")
    f = function([x], (x.sum(), "sum"), updates=[(total, total + added, "sum")])
    assert f(X) == 66
    return f, total


@pytest.mark.parametrize("before, after", [((1, 0), (2, 0)), ((2, 1), (3, 0)), ((3, 0), (1, 0))])
def test_functions_join_the_new_session(before, after):
    assert synk.fork(before[0], master_rank=before[1], restart=True) == before[0]
    f, total = accumulating()
    assert f(X, num_slices=2) == 66
    pids = _session._Current.session.worker_pids
    assert synk.fork(after[0], master_rank=after[1], restart=True) == after[0]
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    in_slices = 66 + 66 + 66  # each of the two slices adds its sum to the old value, 66
    assert synk.gather(total).tolist() == [in_slices] * after[0]
    assert f(X, num_slices=2) == 66 and f(X) == 66
    assert f(X, batch=slice(2, 4)) == 5 and f(synk.data(X)) == 66
    assert synk.gather(total).tolist() == [2 * in_slices + 66 + 66 + 5 + 66] * after[0]
    assert repr(f).endswith(f"on {after[0]} rank{'s' * (after[0] > 1)}>")


def test_copies_and_values_are_those_of_the_new_session():
    x, k = T.dvector("x"), T.dscalar("k")
    synk.fork(2)
    inputs = [x, theano.In(k, value=1.0, update=k + 1)]
    f, g = (function(inputs, (x * k, "gather")) for _ in range(2))
    f(X)
    synk.fork(3, restart=True)
    assert f.copy()(X, 2.0).tolist() == (2 * X).tolist()
    g[k] = 5.0
    assert g(X).tolist() == (5 * X).tolist() and g[k] == 6
    synk.close()
    for refused in (f.copy, lambda: g.value.__setitem__(k, 5.0)):
        with pytest.raises(SessionError, match="session that was closed"):
            refused()


def test_nothing_is_compiled_again(monkeypatch):
    from theano.gof.cmodule import GCC_compiler

    x, s = T.dvector("x"), theano.shared(1.0, "s")
    synk.fork(2)
    f = synk.function([x], (T.tanh(x * s).sum(), "sum"), updates=[(s, s + 1, "max")])
    expected = [float(f(X, num_slices=k)) for k in (1, 2)]

    def refuse(*args, **kwargs):
        raise AssertionError("compiles")

    monkeypatch.setattr(theano, "function", refuse)  # workers are forked with these
    monkeypatch.setattr(GCC_compiler, "compile_str", refuse)
    synk.fork(2, restart=True)
    s.set_value(1.0)
    assert [float(f(X, num_slices=k)) for k in (1, 2)] == expected


def test_a_session_closed_before_counts_too_but_only_with_restart():
    synk.fork(2)
    f, _ = accumulating()
    synk.close()
    with pytest.raises(SessionError, match="session that was closed"):
        f(X)
    synk.fork(2)
    with pytest.raises(SessionError, match="session that was closed"):
        f(X)
    with pytest.raises(SessionError, match=r"In a notebook write fork\(restart=True\)"):
        synk.fork(2)
    synk.fork(3, restart=True)
    assert f(X) == 66
    synk.close()
    with pytest.raises(SessionError, match="session that was closed"):
        f(X)
    synk.fork(2, restart=True)
    assert f(X) == 66 and f.as_theano(X) == 66


def test_a_broken_session_is_replaced():
    synk.fork(2)
    f, total = accumulating()
    os.kill(_session._Current.session.worker_pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        while True:
            f(X)
    before = total.get_value()
    synk.fork(2, restart=True)
    assert f(X) == 66 and synk.gather(total).tolist() == [before + 66] * 2


def test_wrong_arguments_leave_the_session():
    synk.fork(2)
    f, _ = accumulating()
    for kwargs in ({"n_parallel": 0}, {"devices": ["gpu"]}, {"master_rank": 7}):
        with pytest.raises(ValueError):
            synk.fork(restart=True, **kwargs)
    assert f(X) == 66


def test_data_must_be_made_again():
    synk.fork(2)
    f, _ = accumulating()
    d = synk.data(X)
    synk.fork(2, restart=True)
    with pytest.raises(SessionError, match="session that was closed"):
        f(d)
    assert f(synk.data(d.data)) == 66


def test_random_streams_go_on_and_differ():
    draw = MRG_RandomStreams(1).uniform((1, 3))
    serial = theano.function([], MRG_RandomStreams(1).uniform((1, 3)), mode="FAST_COMPILE")
    synk.fork(2)
    f = function([], (draw, "gather"))
    first = f()
    synk.fork(3, restart=True)
    second = f()
    assert np.array_equal([first[0], second[0]], [serial()[0], serial()[0]])
    assert len(np.unique([*first, *second])) == 15


def test_threads_that_call_at_once_make_it_join_once():
    synk.fork(2)
    f, total = accumulating()
    for _ in range(3):
        synk.fork(2, restart=True)
        total.set_value(0.0)
        calls = [in_thread(f, X) for _ in range(4)]
        assert [float(call.result()) for call in calls] == [66.0] * 4
        assert synk.gather(total).tolist() == [264.0] * 2


def test_the_closed_session_is_let_go():
    synk.fork(2)
    f, _ = accumulating()
    session = weakref.ref(_session._Current.session)
    synk.fork(2, restart=True)
    f(X)
    gc.collect()
    assert session() is None


def test_a_profile_and_the_status_show_it():
    synk.fork(2)
    with synk.profile():
        f, _ = accumulating()
        synk.fork(2, restart=True)
    with synk.profile() as recorded:
        f(X)
    assert f.name.rpartition("/")[2] in recorded.summary()
    assert len(synk.status().functions) == 1


def test_calls_that_are_checked_and_values_that_are_followed():
    synk.fork(2, check=True, follow=True)
    x, w = T.dvector("x"), theano.shared(1.0, "w")
    f = function([x], (w * x.sum(), "sum"))
    gone = function([x], (w * x[::1].sum(), "avg"), name="gone")
    synk.fork(2, restart=True, follow=True)
    for value in (2.0, 3.0, 4.0, 5.0):
        w.set_value(value)
        assert f(X) == 66 * value
    with pytest.warns(synk.PortingWarning, match="gone"):
        assert gone(X) == 33 * 5.0
