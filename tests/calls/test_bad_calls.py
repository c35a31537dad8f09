"""What can't be called is refused by the master, before anything starts; the next call works."""

import contextlib
import gc
import itertools

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import function
from support.layouts import Layout, forked

import synkhronos as synk

LAYOUTS = [Layout(3, master=1), Layout(1)]


@pytest.fixture(scope="module")
def ranks(layout):
    """A session with distributed functions, each beside a call that works and its result."""
    with forked(layout) as ranks:
        x, y, w = T.dvector("x"), T.dmatrix("y"), T.dvector("w")
        number, s, i = T.dscalar("number"), theano.shared(0.0, "s"), theano.shared(0, "i")
        d, e = theano.shared(np.arange(6.0), "d"), theano.shared(np.arange(4.0), "e")
        total = (x.sum(), "sum")
        ranks.rows = function([x], [total, (x.max(), "max")], name="rows")
        ranks.pair = function(
            [x, y], total, bcast_inputs=[w], name="pair", on_unused_input="ignore"
        )
        ranks.whole = function([number], (number + w.sum(), "max"), bcast_inputs=[w], name="whole")
        ranks.alone = function([], (d.sum(), "max"), name="alone")
        ranks.update = function([x], total, updates=[(s, x.sum())], name="update")
        ranks.integer = function([x], total, updates=[(i, i + 1)], name="integer")
        ranks.picked = function([], (d.sum(), "max"), sliceable_shareds=[d], name="picked")
        ranks.two = function([], ((d.sum() + e.sum()), "max"), sliceable_shareds=[d, e], name="two")
        ranks.both = function([x], (x.sum() + d.sum(), "max"), sliceable_shareds=[d], name="both")
        row, v = T.row("row", "float64"), T.ivector("v")
        one = theano.shared(np.ones((1, 2)), broadcastable=(True, False))
        ranks.row = function([row], (row + np.zeros((1, 2)), "gather"), name="row")
        ranks.row_of_each = function(
            [], (one, "gather"), sliceable_shareds=[one], name="row_of_each"
        )
        ranks.count = function([v], (v.sum(), "sum"), name="count")
        ranks.x, ranks.y, ranks.w = np.arange(5.0), np.ones((5, 2)), np.ones(3)
        ranks.y1, ranks.three = np.arange(2.0)[None], synk.data(np.ones((3, 2)), minibatch=True)
        ranks.d = synk.data(ranks.x)
        ranks.good = [
            (lambda: ranks.rows(ranks.x)[0], 10),
            (lambda: ranks.rows(ranks.d, batch=[-1, 1], num_slices=2)[0], 5),
            (lambda: ranks.pair(ranks.x, ranks.y, ranks.w, batch=slice(1, 3)), 3),
            (lambda: ranks.whole(2, ranks.w), 5),
            (ranks.alone, 15),
            (lambda: ranks.update(ranks.x, num_slices=2), 10),
            (lambda: ranks.integer(ranks.x), 10),
            (lambda: ranks.picked(batch_s=[-1, 2]), 7),
            (lambda: ranks.count([1, 2]), 3),
            (lambda: ranks.row(ranks.y1).tolist(), [[0, 1]]),
            (lambda: ranks.row_of_each().shape, (ranks.n, 2)),
            (lambda: ranks.pair(ranks.x, ranks.three, ranks.w, batch=[4, 4, 0]), 8),
            (lambda: ranks.two(batch_s=[0, -1]), 6),
            (lambda: ranks.both(np.ones(2 * ranks.n + 1), batch=2 * ranks.n, batch_s=[1, 5]), 8),
        ]
        run_good_calls(ranks)
        yield ranks
        for name in list(vars(ranks)):
            if name not in ("n", "master", "session"):
                delattr(ranks, name)


def run_good_calls(ranks):
    for call, result in ranks.good:
        assert call() == result


@contextlib.contextmanager
def refused(ranks, kind, match, rounds=0):
    """Assert that the master raises; functions with sliceables ask for lengths first, a round."""
    if ranks.session.garbage.released:
        run_good_calls(ranks)  # the next command would send another one before
    before = ranks.session.gate.sequence
    gc.disable()  # it may find a function that the ranks are to forget
    try:
        with pytest.raises(kind, match=match) as caught:
            yield
    finally:
        gc.enable()
    assert type(caught.value) is kind
    assert ranks.session.gate.sequence == before + rounds
    run_good_calls(ranks)


# Calls of the functions above, their errors, and rounds: for the lengths of sliceables.
CALLS = [
    ("pair(x, y, x=x)", ValueError, "got input 'x' twice", 0),
    ("pair(x, y, y=y)", ValueError, "got input 'y' twice", 0),
    ("rows(synk.data(np.ones(5, 'float32')))", TypeError, "A Data is never cast", 0),
    ("rows(synk.data(np.ones((5, 1))))", TypeError, "A Data is never cast", 0),
    ("count(np.array([1.5, 2]))", TypeError, "Input 'v' of Function 'count'", 0),
    ("count([1.5])", TypeError, "Input 'v' of Function 'count'", 0),
    ("count(np.array([2**40]))", TypeError, "Input 'v' of Function 'count'", 0),
    ("pair(x, y[:4], w)", ValueError, "got: 'x' 5, 'y' 4. .* whole belongs in bcast_inputs;", 0),
    ("pair(x, synk.data(y[:4], minibatch=True), w)", ValueError, "same length", 0),
    # Where all are minibatches, they have to have the rows themselves.
    ("pair(synk.data(x, minibatch=True), three, w, batch=4)", ValueError, "3", 0),
    ("whole(1.0, w, num_slices=2)", ValueError, "'whole' has nothing to slice", 0),
    ("alone(num_slices=2)", ValueError, "'alone' has nothing to slice", 0),
    ("integer(x, num_slices=2)", ValueError, "update of i, of dtype int64, would be averaged", 0),
    ("rows(x, batch=range(2, 6))", ValueError, "batch asks for row 5, but there are 5 rows", 0),
    ("rows(x, batch=[True] * 4)", ValueError, "batch is a mask of 4 bools, but there are 5", 0),
    ("two()", ValueError, r"same length on a rank, got \[6, 4\] on rank 0", 1),
    ("both(np.ones(2 * n + 1), batch_s=[0, 1])", ValueError, r"got .* and .2(, 2)*.\.", 1),
    ("both(np.ones(2 * n))", ValueError, "equally many rows on each rank", 1),
    ("both(np.ones(2 * n), batch=2 * n - 1, batch_s=slice(2))", ValueError, "equally many rows", 1),
]
for batch in ("5", "[4]", "slice(0, 5)", "[-5]"):
    CALLS.append((f"pair(x, y[:4], w, batch={batch})", ValueError, "4", 0))
for batch in ("4", "[0, 0, 1, 1]", "slice(1, 5)", "np.ones(5, bool)"):
    match = "Input 'y' of .*minibatch of 3 rows, but batch selects"
    CALLS.append((f"pair(x, three, w, batch={batch})", ValueError, match, 0))
for batch, row in itertools.product(("0", "[0, 0]", "[]", "slice(1, 1)"), ("y1", "synk.data(y1)")):
    match = "Input 'row' of Function 'row' .*exactly one row, but"
    CALLS.append((f"row({row}, batch={batch})", ValueError, match, 0))
for batch_s in ("[0, 0]", "slice(0, 0)"):
    match = "Function 'row_of_each' is broadcastable .*exactly one"
    CALLS.append((f"row_of_each(batch_s={batch_s})", ValueError, match, 1))
for batch_s in ("[4]", "slice(0, 5)", "[-5]"):
    CALLS.append((f"two(batch_s={batch_s})", ValueError, "batch_s .rank 0..*4", 1))
for slices in ("0", "1.5", "'2'", "None", "float('nan')", "[2]", "np.arange(2)", "2j", "True"):
    match = "num_slices must be an integer >= 1"
    CALLS.append((f"rows(x, num_slices={slices})", ValueError, match, 0))
for subset in ("[0.0]", "'0'", "[None]", "[True]", "[np.True_]", "{0}", "np.array([0])", "[[0]]"):
    match = "output_subset must be a list of integers"
    CALLS.append((f"rows(x, output_subset={subset})", TypeError, match, 0))


@pytest.mark.parametrize("call, kind, match, rounds", CALLS, ids=[call for call, *_ in CALLS])
def test_calls_that_are_refused(ranks, call, kind, match, rounds):
    with refused(ranks, kind, match, rounds):
        eval(call, {**vars(ranks), "np": np, "synk": synk})


def test_rows_of_inputs_that_have_exactly_one(ranks):
    for batch in (None, 1, [0], [-1], slice(0, 1)):
        assert ranks.row(ranks.y1, batch=batch).tolist() == ranks.y1.tolist()
    for batch_s in (None, [0], slice(-1, None)):
        assert ranks.row_of_each(batch_s=batch_s).shape == (ranks.n, 2)


# What can't be built.


X = T.dvector("x")
S, U = theano.shared(np.zeros(3), "s"), theano.shared(np.zeros(3), "u")
ZERO = theano.shared(0.0)


@pytest.mark.parametrize(
    "kind, match, kwargs",
    [
        (TypeError, "inputs must be a list", {"inputs": {X}}),
        (TypeError, "inputs must be a list", {"inputs": None}),
        (TypeError, "bcast_inputs must be a list.*mode=", {"bcast_inputs": "FAST_RUN"}),
        (TypeError, r"inputs\[0\] must be a (Theano|PyTensor) tensor variable", {"inputs": ["x"]}),
        (TypeError, r"inputs\[0\] is the shared variable", {"inputs": [S]}),
        (TypeError, r"inputs\[0\] is the shared variable", {"inputs": lambda: [theano.In(S)]}),
        (TypeError, "can't have the value", {"inputs": lambda: [theano.In(X, value="three")]}),
        (TypeError, r"inputs\[0\] is the constant", {"inputs": [T.constant(1.0)]}),
        (
            TypeError,
            r"inputs\[0\] must be a (Theano|PyTensor) variable",
            {"inputs": [(X, 1.0, 2.0)]},
        ),
        (TypeError, "Output 1 must be a (Theano|PyTensor) variable", {"outputs": (X, "sum", 1)}),
        (TypeError, r"Output 0 must be a .* variable or a pair.* got \(", {"outputs": [(X,)]}),
        (TypeError, "Output 1 must be a (Theano|PyTensor) variable", {"outputs": [X, 3]}),
        (TypeError, "The keys of a dict of outputs must be str", {"outputs": {1: X}}),
        (ValueError, "3 is not a reduce mode", {"outputs": (X, 3)}),
        (ValueError, "'c_c_sum' is not a reduce mode", {"outputs": [(X, "c_c_sum")]}),
        (TypeError, "updates must be pairs .* in a list", {"updates": "s"}),
        (TypeError, r"updates must be pairs .* got \(s,\) among", {"updates": [(S,)]}),
        (TypeError, r"or triples .* 1\) among", {"updates": [(S, X), (U, X, "sum", 1)]}),
        (TypeError, "updates must be pairs .* got s among", {"updates": [S]}),
        (TypeError, "updates must update shared variables, got x", {"updates": [(X, X)]}),
        (TypeError, "updates gives s the value None", {"updates": [(S, None)]}),
        (ValueError, "updates .* but s comes twice", {"updates": [(S, S), (S, 2 * S)]}),
        (TypeError, "givens must be pairs", {"givens": [3]}),
        (TypeError, "givens must replace variables, got 3", {"givens": {3: X}}),
        (TypeError, "sliceable_shareds must be a list", {"sliceable_shareds": (S,)}),
        (TypeError, "must hold shared variables", {"sliceable_shareds": [X]}),
        (ValueError, "has no axis 0", {"sliceable_shareds": [ZERO]}),
        (ValueError, "can't be both", {"sliceable_shareds": [S], "updates": [(S, 2 * X)]}),
    ],
)
def test_what_can_not_be_built(ranks, kind, match, kwargs):
    with refused(ranks, kind, match):
        made = {name: each() if callable(each) else each for name, each in kwargs.items()}
        function(**{"inputs": [X], "outputs": [X.sum() + S.sum() + ZERO], **made})


def test_sliceables_with_default_updates_are_refused(ranks):
    s = theano.shared(np.zeros(3), "s")
    s.default_update = 2 * s
    with pytest.raises(ValueError, match="has s, which the function updates"):
        function([X], X.sum() + s.sum(), sliceable_shareds=[s])
    f = function([X], (X.sum() + s.sum(), "sum"), sliceable_shareds=[s], no_default_updates=True)
    assert f(np.ones(3 * ranks.n), num_slices=2) == 3 * ranks.n


def test_refused_updates_are_not_made(ranks):
    s = theano.shared(0.0)
    f = function([X], updates=[(s, s + 1)], on_unused_input="ignore")
    f(np.ones(4 * ranks.n))
    for call in ({"batch": 1000}, {"num_slices": 0}, {"output_subset": [7]}, {"batch_s": [0]}):
        with pytest.raises((TypeError, ValueError)):
            f(np.ones(4), **call)
    assert function([], (s, "gather"))().tolist() == [1] * ranks.n
