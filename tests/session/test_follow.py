"""Values that the script sets in the master alone: told of, or followed by the other ranks."""

import copy
import gc
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import scipy.sparse
import theano
import theano.sparse
import theano.tensor as T
from support.helpers import function
from support.layouts import ON_DEVICES, Layout, forked
from theano.gof import Container
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos import PortingWarning
from synkhronos import session as _session

pytestmark = pytest.mark.skipif(ON_DEVICES, reason="forks with options of its own")
LAYOUTS = pytest.mark.parametrize(
    "n, master", [(2, 0), pytest.param(3, 1, marks=pytest.mark.thorough)]
)
WAYS = {
    "set_value": lambda w, v: w.set_value(v),
    "set_value, borrowed": lambda w, v: w.set_value(v, borrow=True),
    "value": lambda w, v: setattr(w.container, "value", v),
    "data": lambda w, v: setattr(w.container, "data", v),
}
IN_PLACE = {
    "borrowed": lambda w, v: w.get_value(borrow=True).__setitem__(slice(None), v),
    "value in place": lambda w, v: w.container.value.__setitem__(slice(None), v),
}
STREAMS = {
    "MRG": lambda seed: MRG_RandomStreams(seed),
    "RandomStreams": lambda seed: RandomStreams(seed),
}


def made():
    x, w = T.dvector("x"), theano.shared(np.ones(2), "w")
    return w, function([x], [(w, "gather"), (x.sum() * w, "sum")], name="f")


def check(n, w, f, value):
    rows = np.arange(float(n))
    joined, total = f(rows)
    np.testing.assert_array_equal(joined, np.concatenate([value] * n))
    np.testing.assert_array_equal(total, rows.sum() * value)
    for rank in range(n):
        np.testing.assert_array_equal(synk.get_value(rank, w), value)


@LAYOUTS
@pytest.mark.parametrize("way", [*WAYS, *IN_PLACE])
def test_other_ranks_follow(n, master, way):
    with forked(Layout(n, master), follow=True):
        w, f = made()
        check(n, w, f, np.ones(2))
        for value in (np.array([2.0, 3.0]), np.array([4.0, 5.0])):
            {**WAYS, **IN_PLACE}[way](w, value)
            check(n, w, f, value)
            synk.distribute()
            check(n, w, f, value)


def test_a_value_that_becomes_nan_is_followed():
    """All values were taken for equal to NaN, so only the master had it."""
    w = theano.shared(np.ones(2), "w")
    with forked(Layout(2), follow=True):
        f = function([], (w, "gather"))
        f()
        w.get_value(borrow=True)[0] = np.nan
        np.testing.assert_array_equal(f(), [np.nan, 1, np.nan, 1])


@LAYOUTS
def test_a_collective_sees_what_was_set_before_it(n, master):
    with forked(Layout(n, master), follow=True):
        w, f = made()
        f(np.ones(n))
        w.set_value([6.0, 8.0])
        synk.all_reduce(w)
        check(n, w, f, np.array([6.0, 8.0]))
        w.set_value([1.0, 2.0])
        synk.set_value(0, w, [3.0, 4.0])
        expected = [[1.0, 2.0]] * n
        expected[0] = [3.0, 4.0]
        np.testing.assert_array_equal(synk.gather(w), expected)


@LAYOUTS
@pytest.mark.parametrize("kind", STREAMS)
def test_seeds_are_followed_by_streams_of_the_ranks(n, master, kind):
    with forked(Layout(n, master), follow=True):
        streams, x = STREAMS[kind](3), T.dvector("x")
        draw = function([x], (streams.uniform((2,), ndim=1) + 0 * x.sum(), "gather"))
        first, second = draw(np.ones(n)), draw(np.ones(n))
        assert len({*first, *second}) == 4 * n
        streams.seed(3)
        np.testing.assert_array_equal(draw(np.ones(n)), first)
        np.testing.assert_array_equal(draw(np.ones(n)), second)


@LAYOUTS
def test_what_has_a_value_for_each_rank_is_left_alone(n, master):
    for follow in (False, True):
        with forked(Layout(n, master), follow=follow):
            w, f = made()
            synk.scatter(w, np.arange(2.0 * n))
            w.set_value([7.0, 7.0])
            f(np.ones(n))
            expected = np.arange(2.0 * n).reshape(n, 2)
            expected[master] = 7
            np.testing.assert_array_equal(synk.gather(w), expected)
            synk.broadcast(w)  # from now on it has one value again
            w.set_value([8.0, 9.0])
            if follow:
                check(n, w, f, np.array([8.0, 9.0]))
            else:
                with pytest.warns(PortingWarning):
                    f(np.ones(n))


@LAYOUTS
@pytest.mark.parametrize("way", WAYS)
def test_the_next_call_tells_once(n, master, way):
    with forked(Layout(n, master)):
        w, f = made()
        other = function([], (theano.shared(1.0, "other"), None))
        f(np.ones(n))
        WAYS[way](w, np.array([2.0, 3.0]))
        other()  # does not use it
        with pytest.warns(PortingWarning, match=r"variable w was set in the master") as told:
            f(np.ones(n))
        assert "synk.broadcast(w) after w.set_value(...)" in str(told[0].message)
        assert len(told) == 1 and told[0].filename == __file__
        np.testing.assert_array_equal(synk.gather(w)[master], [2, 3])
        np.testing.assert_array_equal(synk.gather(w)[(master + 1) % n], [1, 1])
        WAYS[way](w, np.array([5.0, 5.0]))
        f(np.ones(n))  # told already; warnings are errors here


@LAYOUTS
def test_what_is_right_is_not_told_of(n, master):
    with forked(Layout(n, master)):
        w, f = made()
        w.set_value([3.0, 4.0])
        f(np.ones(n))  # not distributed before
        w.set_value([3.0, 4.0])
        f(np.ones(n))  # the same value
        w.set_value([5.0, 4.0])
        synk.broadcast(w)
        f(np.ones(n))
        w.set_value([np.nan, 6.0])
        synk.all_reduce(w)
        f(np.ones(n))
        replace = function([], updates=[(w, 2 * theano.shared(np.arange(2.0)))])
        w.set_value([7.0, 7.0])
        replace()  # it does not read w
        w.set_value([np.nan, np.nan])
        synk.broadcast(w, [1.0, 2.0])
        check(n, w, f, np.array([1.0, 2.0]))


@LAYOUTS
@pytest.mark.parametrize("kind", STREAMS)
def test_seeds_of_the_master_alone_are_told_of(n, master, kind):
    with forked(Layout(n, master)):
        streams, x = STREAMS[kind](3), T.dvector("x")
        draw = function([x], (streams.uniform((2,), ndim=1) + 0 * x.sum(), "gather"))
        draw(np.ones(n))
        streams.seed(3)
        with pytest.warns(PortingWarning, match="other ranks go on with their streams"):
            draw(np.ones(n))
        draw(np.ones(n))


@pytest.mark.parametrize("follow", [False, True])
def test_two_variables_with_one_container(follow):
    with forked(Layout(2), follow=follow):
        w, f = made()
        twin = w.clone()
        g = function([], (twin, "gather"))
        f(np.ones(2)), g()
        for call in (lambda: f(np.ones(2))[0], g):
            w.set_value(w.get_value() + 1)
            if follow:
                np.testing.assert_array_equal(call(), np.tile(w.get_value(), 2))
            else:
                with pytest.warns(PortingWarning):
                    call()


@LAYOUTS
def test_equal_values_that_are_no_arrays_are_not_told_of(n, master):
    with forked(Layout(n, master)):
        matrix = theano.shared(scipy.sparse.csr_matrix(np.eye(3)), "matrix")
        streams = RandomStreams(3)
        total = function([], (theano.sparse.sp_sum(matrix), None))
        draw = function([], (streams.uniform((2,)), None), serial_random=True)
        total(), draw()
        matrix.set_value(scipy.sparse.csr_matrix(np.eye(3)))
        [state] = draw.get_shared()
        state.set_value(state.get_value())
        total(), draw()
        matrix.set_value(2 * scipy.sparse.csr_matrix(np.eye(3)))
        with pytest.warns(PortingWarning, match="variable matrix was set in the master"):
            total()
        streams.seed(5)
        with pytest.warns(PortingWarning, match=r"Write synk.broadcast\(variable\)"):
            draw()


def test_a_change_is_told_of_by_the_first_function_that_uses_it():
    with forked(Layout(2)):
        (w, f), (v, g) = made(), made()
        f(np.ones(2)), g(np.ones(2))
        w.set_value([2.0, 3.0])
        for _ in range(3):
            g(np.ones(2))
        v.set_value([2.0, 3.0])
        for h in (g, f):
            with pytest.warns(PortingWarning, match="set in the master"):
                h(np.ones(2))
        changes = _session._Current.session.changes
        assert not changes.pending
        w.set_value([4.0, 3.0])
        del w, f, h
        gc.collect()
        g(np.ones(2))
        assert not changes.pending


def test_a_warning_that_is_an_error_leaves_the_session_usable():
    with forked(Layout(2)):
        w, f = made()
        f(np.ones(2))
        w.set_value([2.0, 3.0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(PortingWarning):
                f(np.ones(2))
        f(np.ones(2))


def test_what_could_not_be_followed_is_followed_by_the_next_call(monkeypatch):
    with forked(Layout(2), follow=True):
        w, f = made()
        f(np.ones(2))
        w.set_value([2.0, 3.0])
        session = _session._Current.session
        with monkeypatch.context() as patch:
            patch.setattr(session, "run", lambda command: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                f(np.ones(2))
        check(2, w, f, np.array([2.0, 3.0]))


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.sample(1)
def test_variables_are_those_of_theano_for_others(follow):
    with forked(Layout(2), follow=follow):
        w, f = made()
        f(np.ones(2))
        for twin in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), copy.copy(w)):
            assert twin.get_value().tolist() == [1, 1]
        assert type(copy.deepcopy(w).container) is Container
        data = pickle.dumps([w, w.container])
        program = (
            "import pickle, sys; w, c = pickle.load(sys.stdin.buffer); assert w.container is c"
        )
        subprocess.run([sys.executable, "-c", program], input=data, check=True)
        with pytest.raises(ValueError, match="Container name"):
            w.set_value("text")
        assert f(np.ones(2))[0].tolist() == [1, 1, 1, 1]
    assert type(w.container) is Container


def test_one_rank_has_nothing_to_follow():
    with forked(Layout(1), follow=True):
        w, f = made()
        f(np.ones(1))
        w.set_value([2.0, 2.0])
        assert f(np.ones(1))[0].tolist() == [2, 2]
        assert type(w.container) is Container
