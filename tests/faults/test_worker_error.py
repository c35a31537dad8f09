"""A rank raises: the caller is told which and what, and the session goes on."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.faults import ROWS, checked
from support.helpers import function
from support.layouts import Layout

from synkhronos import WorkerError

pytestmark = pytest.mark.faults


LAYOUTS = [Layout(3, master=1)]


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


def test_other_errors_say_nothing_of_rows(ranks):
    i = T.lvector("i")
    for call in (
        lambda: checked(lambda x: x[0] == 0, ValueError("no such value"))(ROWS),
        lambda: function([i], (W[i], "gather"))([1, 2, 3, 99]),
    ):
        with pytest.raises(WorkerError, match=r"no such value|out of bounds") as caught:
            call()
        assert "of this call" not in str(caught.value)
