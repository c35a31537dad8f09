"""A PortingWarning says once what a script computes otherwise on ranks, or computes on each."""

import warnings

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.compiling import IN_PYTHON
from support.helpers import function
from support.layouts import Layout

import synkhronos as synk

LAYOUTS = [Layout(2), Layout(1)]
pytestmark = pytest.mark.usefixtures("ranks")

X, V = T.dmatrix("x"), T.ivector("v")
WEIGHTS = theano.shared(np.ones((3, 4)), "weights")
OF_EACH_ROW = {
    "itself": X,
    "sum": X.sum(axis=1),
    "class": T.argmax(X, axis=1),
    "compared": T.neq(T.argmax(X, axis=1), V),
    "softmax": T.nnet.softmax(T.dot(X, WEIGHTS)),
    "scan": theano.scan(lambda row: row.sum(), sequences=X)[0],
    "flat": X.flatten(),
    "joined": T.concatenate([X, X]),
    "transposed": X.T,
    "indexed": WEIGHTS[V],
    "ends": X[1:],
}
ONE_FOR_ALL = {
    "mean": X.mean(axis=0),
    "total": X.sum(),
    "gram": T.dot(X.T, X),
    "classes": T.zeros(12) + X.mean(),
    "histogram": T.extra_ops.bincount(V, minlength=12),
    "weights": WEIGHTS + X.mean(),
    "shape": X.shape,
    "one": X.sum(axis=0, keepdims=True),
}
MODES = pytest.mark.parametrize("mode", ["FAST_COMPILE", IN_PYTHON], ids=["quick", "rewritten"])


@MODES
@pytest.mark.parametrize("name", OF_EACH_ROW)
@pytest.mark.usefixtures("quickly_compiled")  # for what is inside of scan
def test_an_average_of_what_each_row_has_is_told_once(ranks, name, mode):
    f = synk.function(
        [X, V], [X.mean(), OF_EACH_ROW[name]], mode=mode, name="f", on_unused_input="ignore"
    )
    value = np.arange(36.0).reshape(12, 3), np.arange(12, dtype="int32") % 3
    f(value[0][:1], value[1][:1])  # one rank computes all rows: the result is right
    if ranks.n == 1:
        f(*value)
        return
    with pytest.warns(synk.PortingWarning, match=r"Output 1 of Function 'f' .* 'gather'") as told:
        f(*value)
    assert len(told) == 1 and told[0].filename == __file__
    assert ("axes={variable: 1}" in str(told[0].message)) == (name == "transposed")
    f(*value)


@MODES
def test_averages_of_something_else_are_not_warned_of(mode):
    outputs = list(ONE_FOR_ALL.values())
    f = synk.function([X, V], outputs, mode=mode, on_unused_input="ignore")
    # As many rows as classes, on each rank, and then another number.
    for rows in (24, 36, 12):
        f(np.ones((rows, 3)), np.zeros(rows, "int32"))


def test_other_modes_and_outputs_that_are_not_asked_for_are_not_warned_of(ranks):
    f = function([X], [X.mean(), X, (X, "gather"), (X, "sum"), (X, None)])
    f(np.ones((12, 3)), output_subset=[0, 2, 3, 4])
    if ranks.n > 1:
        with pytest.warns(synk.PortingWarning, match="Output 1 of"):
            f(np.ones((12, 3)))


def test_an_error_about_unequal_parts_comes_in_place_of_the_warning(ranks):
    f = function([X], X)
    if ranks.n > 1:
        with pytest.raises(ValueError, match="mode 'gather'"):
            f(np.ones((ranks.n + 1, 3)))


def test_rows_of_sliceable_variables_count_too(ranks):
    s = theano.shared(np.arange(6.0), "s")
    f = function([], [s * 2, s.mean()], sliceable_shareds=[s], name="f")
    if ranks.n > 1:
        with pytest.warns(synk.PortingWarning, match="Output 0 of Function 'f' has"):
            f()
    f()


def test_a_warning_that_is_an_error_comes_before_the_call(ranks):
    calls = theano.shared(0, "calls")
    f = function([X], X, updates=[(calls, calls + 1)])
    if ranks.n > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(synk.PortingWarning):
                f(np.ones((12, 3)))
        assert calls.get_value() == 0
    f(np.ones((12, 3)))
    assert calls.get_value() == 1


# Nothing is scattered

DATA = theano.shared(np.arange(36.0).reshape(12, 3), "pictures")
LABELS = T.cast(theano.shared(np.arange(12.0) % 3, "labels"), "int32")
INDEX, B = T.lscalar("index"), 4


def minibatch(variable):
    return variable[INDEX * B : (INDEX + 1) * B]


IDIOMS = {
    "givens": {"outputs": X.mean(), "givens": {X: minibatch(DATA)}},
    "two givens": {
        "outputs": T.neq(T.argmax(X, 1), V).mean(),
        "givens": [(X, DATA[INDEX : INDEX + 4]), (V, LABELS[INDEX : INDEX + 4])],
    },
    "output": {"outputs": minibatch(DATA).mean()},
    "labels": {"outputs": minibatch(LABELS).sum()},
    "update": {"updates": [(WEIGHTS, WEIGHTS + minibatch(DATA).mean())]},
}


@pytest.mark.parametrize("name", IDIOMS)
def test_ranks_that_all_slice_the_same_rows_are_told_of_once(ranks, name):
    f = function([INDEX], name="f", **IDIOMS[name])
    if ranks.n > 1:
        with pytest.warns(synk.PortingWarning, match=r"'f' divides no rows: .*synk\.rows") as told:
            f(0)
        assert len(told) == 1 and told[0].filename == __file__
    f(1)


STATE = theano.shared(np.zeros((12, 3)), "state")
NOT_DIVIDED = {
    "reset": ([], {"updates": [(WEIGHTS, 0 * WEIGHTS)]}),
    "rate": ([T.dscalar("rate")], {"updates": [(WEIGHTS, 2 * WEIGHTS)]}),
    "one row": ([INDEX], {"outputs": DATA[INDEX].sum()}),
    "first rows": ([INDEX], {"outputs": DATA[:INDEX].sum()}),
    "last rows": ([INDEX], {"outputs": (DATA[INDEX:], None)}),
    "fixed rows": ([INDEX], {"outputs": DATA[0:4].sum() + INDEX}),
    "own state": (
        [INDEX],
        {"outputs": STATE[INDEX : INDEX + 4].sum(), "updates": [(STATE, STATE + 1)]},
    ),
    "sliceable": ([INDEX], {"outputs": minibatch(DATA).sum(), "sliceable_shareds": [DATA]}),
    "reduces": ([INDEX], {"outputs": synk.ops.all_reduce(minibatch(DATA).sum())}),
    "whole": ([], {"outputs": minibatch(DATA).sum(), "bcast_inputs": [INDEX]}),
    "scattered": ([INDEX, X], {"outputs": minibatch(DATA).sum() + X.sum()}),
    "columns": ([INDEX], {"outputs": DATA[:, INDEX : INDEX + 1].sum()}),
}


@pytest.mark.parametrize("name", NOT_DIVIDED)
def test_functions_that_divide_nothing_for_a_reason_are_not_warned_of(name):
    inputs, kwargs = NOT_DIVIDED[name]
    kwargs = {"outputs": None, "on_unused_input": "ignore", **kwargs}
    function(inputs, **kwargs)(
        *[1, np.ones((6, 3))][: len(inputs) + len(kwargs.get("bcast_inputs", []))]
    )
