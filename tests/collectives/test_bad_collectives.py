"""Collectives that can't be are refused by the master: nothing changes, and the next call works."""

import contextlib

import numpy as np
import pytest
import scipy.sparse
import theano
import theano.sparse
from support import host_library
from support.layouts import Layout, forked
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk

LAYOUTS = [Layout(3, master=1), Layout(1)]


@pytest.fixture(scope="module")
def ranks(layout):
    with forked(layout) as ranks:
        ranks.s = theano.shared(np.arange(4.0), "s")
        ranks.m = theano.shared(np.ones((2, 3), "float32"), "m")
        ranks.i = theano.shared(np.arange(3), "i")
        ranks.b = theano.shared(np.array([True]), "b")
        ranks.number = theano.shared(2.0, "number")
        ranks.row = theano.shared(np.ones((1, 2)), "row", broadcastable=(True, False))
        ranks.all = [ranks.s, ranks.m, ranks.i, ranks.b, ranks.number, ranks.row]
        ranks.random = RandomStreams(1).uniform((1,)).rng
        for rank in range(ranks.n):
            synk.set_value(rank, ranks.s, np.arange(4.0) + rank)
        values(ranks)
        synk.get_value(0, ranks.random)
        yield ranks
        for name in list(vars(ranks)):
            if name not in ("n", "master", "session"):
                delattr(ranks, name)


def values(ranks):
    return [synk.get_value(rank, ranks.all) for rank in range(ranks.n)]


@contextlib.contextmanager
def refused(ranks, kind, match):
    """Assert that the master raises before a launch, and that no rank has changed."""
    old, before = values(ranks), ranks.session.gate.sequence
    with pytest.raises(kind, match=match) as caught:
        yield
    assert type(caught.value) is kind
    assert ranks.session.gate.sequence == before
    for was, now in zip(old, values(ranks)):
        for a, b in zip(was, now):
            np.testing.assert_array_equal(a, b)
    assert synk.reduce(ranks.number, "sum", in_place=False) == 2 * ranks.n


VERBS = {
    "broadcast": lambda s: synk.broadcast(s),
    "scatter": lambda s: synk.scatter(s, [1.0]),
    "gather": lambda s: synk.gather(s),
    "all_gather": lambda s: synk.all_gather(s),
    "reduce": lambda s: synk.reduce(s),
    "all_reduce": lambda s: synk.all_reduce(s),
    "set_value": lambda s: synk.set_value(0, s, [1.0]),
    "get_value": lambda s: synk.get_value(0, s),
    "get_lengths": lambda s: synk.get_lengths(s),
    "get_shapes": lambda s: synk.get_shapes(s),
}
each_verb = pytest.mark.parametrize("verb", VERBS)


@each_verb
def test_variables(ranks, verb):
    call = VERBS[verb]
    sparse = theano.sparse.shared(scipy.sparse.csr_matrix(np.eye(2)), "sparse")
    wholes = ("broadcast", "set_value", "get_value")  # they take sparse variables too
    for wrong in (*([] if verb in wholes else [sparse]), theano.shared(object(), "anything")):
        with refused(
            ranks, TypeError, rf"^{verb}\(\) can't take (sparse|Sparse\S+|anything|<.*>), of type"
        ):
            call(wrong)
    for wrong in ([ranks.s, "s"], [ranks.s, [ranks.m]], np.array([ranks.s])):
        with refused(ranks, TypeError, rf"^{verb}\(\) takes a .* shared variable or a list"):
            call(wrong)
    with refused(ranks, ValueError, rf"^{verb}\(\) got s twice"):
        call([ranks.s, ranks.m, ranks.s])


@pytest.mark.parametrize(
    "verb", [v for v in VERBS if v not in ("broadcast", "set_value", "get_value")]
)
def test_random_states_are_no_arrays(ranks, verb):
    with refused(ranks, TypeError, rf"^{verb}\(\) can't take .*: it works on arrays"):
        VERBS[verb](ranks.random)


GIVING = {
    "broadcast": lambda s, v: synk.broadcast(s, v),
    "scatter": lambda s, v: synk.scatter(s, v),
    "set_value": lambda s, v: synk.set_value(0, s, v),
}


@pytest.mark.parametrize("verb", GIVING)
def test_values(ranks, verb):
    give = GIVING[verb]
    s, m, i = ranks.s, ranks.m, ranks.i
    wrong = [
        (s, np.ones((2, 2))),
        (s, 3.0),
        (s, "ab"),
        (s, [[1.0]]),
        (s, [1j]),
        (s, object()),
        (s, np.array([None, 1])),
        (s, [[1.0], [1.0, 2.0]]),
        (m, np.ones((2, 2))),  # float64 does not go into float32
        (m, np.ones(3, "float32")),
        (i, [1.5]),
        (i, np.ones(2)),
        (i, [2**70]),
        (ranks.b, [2]),
        (s, synk.data(np.ones(3, "float32"))),
        (m, synk.data(np.ones(3, "float32"))),
    ]
    if verb != "scatter":
        wrong += [(ranks.row, np.ones((1, 2), "complex64")), (ranks.row, np.ones(2))]
    for variable, value in wrong:
        with refused(ranks, TypeError, rf"^{verb}\(\) can't give {variable}, of type"):
            give(variable, value)
    if verb != "scatter":
        for value in (np.ones((2, 2)), synk.data(np.ones((3, 2)))):
            with refused(ranks, TypeError, "must have length 1 where the variable is broadcast"):
                give(ranks.row, value)
        with refused(ranks, TypeError, rf"^{verb}\(\) takes a (RandomState|Generator) for "):
            give(ranks.random, np.ones(3))
    if verb != "broadcast":
        with refused(ranks, TypeError, rf"^{verb}\(\) can't give s, of type .* None"):
            give(s, None)
    for value in (np.ones(4), 3, [[1.0]], [[1.0], [[1]], [1]], ()):
        with refused(ranks, TypeError, rf"^{verb}\(\) got a list of 2 variables: values must be"):
            give([s, m], value)
    with refused(ranks, TypeError, rf"^{verb}\(\) can't give m, of type"):
        give([s, m], [np.zeros(4), np.ones(4)])


def test_batch(ranks):
    with refused(ranks, ValueError, "^batch=5"):
        synk.scatter([ranks.s, ranks.i], [np.ones(5), np.arange(4)], batch=5)
    with refused(ranks, TypeError, "axis 0, which number does not have"):
        synk.set_value(0, ranks.number, 1.0, batch=1)
    with refused(ranks, TypeError, "2 rows: it is broadcastable along axis 0"):
        synk.set_value(0, ranks.row, np.ones((1, 2)), batch=[0, 0])
    with refused(ranks, TypeError, "got batch, but .* has no rows"):
        synk.set_value(0, ranks.random, host_library.random_state(1), batch=1)


def test_axes(ranks):
    for call, name in [
        (lambda: synk.scatter(ranks.number, 1.0), r"scatter\(\)"),
        (lambda: synk.all_gather([ranks.s, ranks.number]), r"all_gather\(\)"),
        (lambda: synk.gather(ranks.number, nd_up=0), r"gather\(nd_up=0\)"),
        (lambda: synk.get_lengths([ranks.s, ranks.number]), "get_lengths"),
    ]:
        with refused(ranks, TypeError, f"^{name} needs an axis 0, which number does not have"):
            call()
    for call in (
        lambda: synk.scatter(ranks.row, np.ones((1, 2))),
        lambda: synk.all_gather(ranks.row),
    ):
        with refused(ranks, TypeError, "but row is broadcastable along axis 0"):
            call()


def test_shapes_that_differ_between_ranks(ranks):
    if ranks.n == 1:
        pytest.skip("one rank has one shape")
    s, m = theano.shared(np.ones(2), "ragged"), theano.shared(np.ones((2, 2)), "matrix")
    synk.set_value(0, s, np.ones(3))
    synk.set_value(ranks.n - 1, m, np.ones((2, 3)))
    t = theano.shared(np.ones(2), "even")
    calls = [
        (lambda: synk.all_reduce([t, s], "sum"), r"all_reduce.* ragged has, .*\(3,\), \(2,"),
        (lambda: synk.reduce(s, "sum"), "reduce.* ragged has"),
        (lambda: synk.reduce([t, s], "sum", in_place=False), "reduce.* ragged has"),
        (lambda: synk.all_gather([t, m]), "all_gather.* beyond axis 0, but matrix has"),
    ]
    for call, match in calls:
        for _ in range(2):
            with pytest.raises(ValueError, match=match):
                call()
            assert synk.gather(t).tolist() == [[1, 1]] * ranks.n
            assert synk.get_lengths(s) == [3] + [2] * (ranks.n - 1)
            assert synk.get_shapes(m) == [(2, 2)] * (ranks.n - 1) + [(2, 3)]
            assert synk.reduce(t, "sum", in_place=False).tolist() == [ranks.n] * 2
