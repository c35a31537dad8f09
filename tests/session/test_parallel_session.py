"""`parallel` without a session: the block forks, and closes what it has forked."""

import pytest
import theano
import theano.tensor as T
from support.layouts import ON_DEVICES

import synkhronos as synk

pytestmark = [
    pytest.mark.skipif(ON_DEVICES, reason="forks with options of its own"),
    pytest.mark.usefixtures("quickly_compiled"),
]


def test_a_block_forks_and_closes(no_session):
    x = T.dvector("x")
    with synk.parallel(2) as n:
        f = theano.function([x], x.sum())
        assert n == 2 and f([1, 2, 3]) == 6 and f._theano is None
        assert len(synk.status().ranks) == 2
    assert f([1, 2, 3]) == 6  # in the master
    with pytest.raises(KeyError), synk.parallel(1):
        raise KeyError
    with synk.parallel(2):
        synk.close()
        assert theano.function([x], x.sum())([1, 2]) == 3


def test_functions_work_in_a_session_that_was_started_anew(no_session):
    x, w = T.dvector("x"), theano.shared(2.0)
    with synk.parallel(2):
        f = theano.function([x], w * x.sum())
    synk.fork(3, restart=True)
    w.set_value(3.0)
    assert f([1, 2, 3]) == 18 and f._theano is None
    synk.close()
    assert f([1, 2, 3]) == 18 and f._theano is not None
