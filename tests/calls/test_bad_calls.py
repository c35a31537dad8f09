"""What can't be called is refused by the master, before anything starts; the next call works."""

import contextlib
import gc

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
        ranks.x, ranks.y, ranks.w = np.arange(5.0), np.ones((5, 2)), np.ones(3)
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


def test_unknown_and_repeated_keywords(ranks):
    with refused(ranks, ValueError, "has no input 'z'. It takes: x, y, w"):
        ranks.pair(ranks.x, ranks.y, z=ranks.w)
    with refused(ranks, ValueError, "got input 'x' twice"):
        ranks.pair(ranks.x, ranks.y, x=ranks.x)


@pytest.mark.parametrize(
    "make", [lambda: synk.data(np.ones(5, "float32")), lambda: synk.data(np.ones((5, 1)))]
)
def test_data_of_another_dtype_or_number_of_axes(ranks, make):
    value = make()
    with refused(ranks, TypeError, "A Data is never cast"):
        ranks.rows(value)


def test_casts_that_lose_precision(ranks):
    v = T.ivector("v")
    g = function([v], (v.sum(), "sum"), name="g")
    assert g([1, 2]) == 3
    for value in (np.array([1.5, 2]), [1.5], np.array([2**40])):
        with refused(ranks, TypeError, "Input 'v' of Function 'g'"):
            g(value)
    assert g([1, 2]) == 3


# batch


def test_batch_beyond_the_shorter_input(ranks):
    for batch in (5, [4], slice(0, 5), [-5]):
        with refused(ranks, ValueError, "4"):
            ranks.pair(ranks.x, np.ones((4, 2)), ranks.w, batch=batch)


def test_unequal_lengths_without_a_batch(ranks):
    with refused(ranks, ValueError, "same length along axis 0, got: 'x' 5, 'y' 4. With"):
        ranks.pair(ranks.x, np.ones((4, 2)), ranks.w)
    minibatch = synk.data(np.ones((4, 2)), minibatch=True)
    with refused(ranks, ValueError, "same length"):
        ranks.pair(ranks.x, minibatch, ranks.w)


def test_minibatch_data_that_are_too_short(ranks):
    minibatch = synk.data(np.ones((3, 2)), minibatch=True)
    for batch in (4, [0, 0, 1, 1], slice(1, 5), np.ones(5, bool)):
        with refused(ranks, ValueError, "Input 'y' of .*minibatch of 3 rows, but batch selects"):
            ranks.pair(ranks.x, minibatch, ranks.w, batch=batch)
    assert ranks.pair(ranks.x, minibatch, ranks.w, batch=[4, 4, 0]) == 8
    # Where all are minibatches, they have to have the rows themselves.
    with refused(ranks, ValueError, "3"):
        ranks.pair(synk.data(ranks.x, minibatch=True), minibatch, ranks.w, batch=4)


def test_rows_of_inputs_that_have_exactly_one(ranks):
    row, s = T.row("row", "float64"), theano.shared(np.ones((1, 3)), broadcastable=(True, False))
    f = function([row], (row + np.zeros((1, 3)), "gather"), name="f")
    g = function([], (s, "gather"), sliceable_shareds=[s], name="g")
    value = np.arange(3.0)[None]
    for batch in (None, 1, [0], [-1], slice(0, 1)):
        assert f(value, batch=batch).tolist() == value.tolist()
    for batch in (0, [0, 0], [], slice(1, 1)):
        for given in (value, synk.data(value)):
            with refused(ranks, ValueError, "Input 'row' of Function 'f' .*exactly one row, but"):
                f(given, batch=batch)
    for batch_s in (None, [0], slice(-1, None)):
        assert g(batch_s=batch_s).shape == (ranks.n, 3)
    for batch_s in ([0, 0], slice(0, 0)):
        with refused(ranks, ValueError, "Function 'g' is broadcastable .*exactly one", rounds=1):
            g(batch_s=batch_s)


# num_slices


def test_num_slices_that_are_not_whole_numbers(ranks):
    wrong = [0, -1, 1.5, "2", None, float("nan"), float("inf"), [2], np.array([1, 2]), 2j, object()]
    for slices in (*wrong, False, True, np.True_, X):
        with refused(ranks, ValueError, "num_slices must be an integer >= 1"):
            ranks.rows(ranks.x, num_slices=slices)


def test_nothing_to_slice(ranks):
    with refused(ranks, ValueError, "'whole' has nothing to slice"):
        ranks.whole(1.0, ranks.w, num_slices=2)
    with refused(ranks, ValueError, "'alone' has nothing to slice"):
        ranks.alone(num_slices=2)


def test_updates_of_integers_averaged_over_slices(ranks):
    with refused(ranks, ValueError, "the update of i, of dtype int64, would be averaged"):
        ranks.integer(ranks.x, num_slices=2)


# output_subset


def test_output_subset_of_another_kind(ranks):
    wrong = [0, [0.0], ["0"], "0", [None], [True], [np.True_], {0}, np.array([0]), [[0]], slice(1)]
    for subset in wrong:
        with refused(ranks, TypeError, "output_subset must be a list of integers"):
            ranks.rows(ranks.x, output_subset=subset)


# batch_s


def test_batch_s_beyond_the_shorter_sliceable(ranks):
    for batch_s in ([4], slice(0, 5), [-5]):
        with refused(ranks, ValueError, "batch_s .rank 0..*4", rounds=1):
            ranks.two(batch_s=batch_s)
    with refused(ranks, ValueError, r"same length on a rank, got \[6, 4\] on rank 0", rounds=1):
        ranks.two()


def test_scattered_inputs_and_sliceables_of_unequal_length(ranks):
    message = f"equally many rows on each rank, got .* and .{', '.join(['2'] * ranks.n)}."
    with refused(ranks, ValueError, message, rounds=1):
        ranks.both(np.ones(2 * ranks.n + 1), batch_s=[0, 1])
    with refused(ranks, ValueError, "equally many rows on each rank", rounds=1):
        ranks.both(np.ones(2 * ranks.n))
    with refused(ranks, ValueError, "equally many rows on each rank", rounds=1):
        ranks.both(np.ones(2 * ranks.n), batch=2 * ranks.n - 1, batch_s=slice(2))


# What can't be built.


X = T.dvector("x")
S, U = theano.shared(np.zeros(3), "s"), theano.shared(np.zeros(3), "u")


@pytest.mark.parametrize(
    "kind, match, kwargs",
    [
        (TypeError, "inputs must be a list", {"inputs": X}),
        (TypeError, "inputs must be a list", {"inputs": {X}}),
        (TypeError, "inputs must be a list", {"inputs": None}),
        (TypeError, "bcast_inputs must be a list", {"bcast_inputs": X}),
        (TypeError, "bcast_inputs must be a list.*mode=", {"bcast_inputs": "FAST_RUN"}),
        (TypeError, r"inputs\[0\] must be a (Theano|PyTensor) tensor variable", {"inputs": ["x"]}),
        (TypeError, r"inputs\[0\] is the shared variable", {"inputs": [S]}),
        (TypeError, r"inputs\[0\] is the constant", {"inputs": [T.constant(1.0)]}),
        (
            TypeError,
            r"inputs\[0\] must be a (Theano|PyTensor) variable",
            {"inputs": [(X, 1.0, 2.0)]},
        ),
        (TypeError, "Output 1 must be a (Theano|PyTensor) variable", {"outputs": (X, "sum", 1)}),
        (TypeError, "Output 0 must be a variable or a pair.*length 1", {"outputs": [(X,)]}),
        (TypeError, "Output 1 must be a (Theano|PyTensor) variable", {"outputs": [X, 3]}),
        (TypeError, "The keys of a dict of outputs must be str", {"outputs": {1: X}}),
        (ValueError, "'mean' is not a reduce mode", {"outputs": (X, "mean")}),
        (ValueError, "3 is not a reduce mode", {"outputs": (X, 3)}),
        (ValueError, "'c_c_sum' is not a reduce mode", {"outputs": [(X, "c_c_sum")]}),
        (TypeError, "updates must be a list", {"updates": {S}}),
        (TypeError, "updates must be a list", {"updates": "s"}),
        (TypeError, r"updates\[0\] must be", {"updates": [(S,)]}),
        (TypeError, r"updates\[1\] must be", {"updates": [(S, X), (U, X, "sum", 1)]}),
        (TypeError, r"updates\[0\] must be", {"updates": [S]}),
        (TypeError, r"updates\[0\] must update a shared variable", {"updates": [(X, X)]}),
        (TypeError, r"updates\[0\] must give s an expression", {"updates": [(S, None)]}),
        (ValueError, r"updates\[1\] updates s a second time", {"updates": [(S, S), (S, 2 * S)]}),
        (TypeError, "givens must be pairs", {"givens": [3]}),
        (TypeError, "givens must replace variables, got 3", {"givens": {3: X}}),
        (ValueError, "'add' is not a reduce mode", {"updates": [(S, X, "add")]}),
        (TypeError, "sliceable_shareds must be a list", {"sliceable_shareds": S}),
        (TypeError, "sliceable_shareds must be a list", {"sliceable_shareds": (S,)}),
        (TypeError, "must hold shared variables", {"sliceable_shareds": [X]}),
        (ValueError, "has u, which the function does not use", {"sliceable_shareds": [U]}),
        (ValueError, "has no axis 0", {"sliceable_shareds": "scalar"}),
        (ValueError, "can't be both", {"sliceable_shareds": [S], "updates": [(S, 2 * X)]}),
    ],
)
def test_what_can_not_be_built(ranks, kind, match, kwargs):
    scalar = theano.shared(1.0)
    if kwargs.get("sliceable_shareds") == "scalar":
        kwargs = {"sliceable_shareds": [scalar]}
    with refused(ranks, kind, match):
        function(**{"inputs": [X], "outputs": [X.sum() + S.sum() + scalar], **kwargs})


def test_what_theano_takes_for_inputs_but_ranks_do_not(ranks):
    for given, match in (
        (lambda: theano.In(S), r"inputs\[0\] is the shared variable"),
        (lambda: theano.In(X, value="three"), "can't have the value"),
    ):
        with refused(ranks, TypeError, match):
            function([given()], X.sum())


def test_sliceables_with_default_updates_are_refused(ranks):
    s = theano.shared(np.zeros(3), "s")
    s.default_update = 2 * s
    with pytest.raises(ValueError, match="has s, which the function updates"):
        function([X], X.sum() + s.sum(), sliceable_shareds=[s])
    f = function([X], (X.sum() + s.sum(), "sum"), sliceable_shareds=[s], no_default_updates=True)
    assert f(np.ones(3 * ranks.n), num_slices=2) == 3 * ranks.n


def test_no_sliceables_in_every_form(ranks):
    for none in (None, [], ()):
        f = function([X], (X.sum() + S.sum(), "sum"), sliceable_shareds=none)
        assert f(np.ones(4)) == 4
        with pytest.raises(TypeError, match="no sliceable_shareds"):
            f(np.ones(4), batch_s=slice(1))


def test_refused_updates_are_not_made(ranks):
    s = theano.shared(0.0)
    f = function([X], updates=[(s, s + 1)], on_unused_input="ignore")
    f(np.ones(4 * ranks.n))
    for call in ({"batch": 1000}, {"num_slices": 0}, {"output_subset": [7]}, {"batch_s": [0]}):
        with pytest.raises((TypeError, ValueError)):
            f(np.ones(4), **call)
    assert function([], (s, "gather"))().tolist() == [1] * ranks.n
