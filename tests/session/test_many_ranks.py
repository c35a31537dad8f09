"""More ranks than cores: the results of plain Theano."""

import os
import signal

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import host_library
from support.expected import reduced
from support.helpers import Call, function

import synkhronos as synk
from synkhronos import WorkerDied, WorkerError
from synkhronos._arithmetic.operations import OPERATIONS
from synkhronos._session.current import current

MANY = 16
MODES = ("sum", "avg", "max", "min", "prod", "gather")
RANDOM = np.random.default_rng(7)


@pytest.mark.faults
@pytest.mark.slow("16 ranks take turns on the cores")
def test_many_ranks_compute_what_plain_theano_does(no_session):
    synk.fork(MANY, threads_per_rank=1)
    x, s = T.dmatrix("x"), theano.shared(RANDOM.normal(size=3), "s")
    terms = [x.sum(0), x.mean(0), x.max(0), x.min(0), T.exp(x / 50).prod(0), 2 * x + s]
    f = function([x], list(zip(terms, MODES)))
    plain = theano.function([x], terms, mode=host_library.MODE)
    rows = RANDOM.normal(size=(5 * MANY + 3, 3))
    data = synk.data(rows)

    def check(chosen, *args, **kwargs):
        for found, expected in zip(f(*args, **kwargs), plain(chosen)):
            np.testing.assert_allclose(found, expected, rtol=1e-9)

    check(rows, rows)
    check(rows, data, num_slices=3)
    check(rows[10:60], data, batch=slice(10, 60))
    check(rows[::-7], data, batch=list(range(len(rows)))[::-7])

    # What the ranks reduce inside of a function: each has only its share of the large arrays.
    large = [(T.outer(k * x.sum(0), T.arange(9000.0))).flatten() for k in (1.0, -2.0, 0.5)]
    total = theano.shared(np.zeros(3), "total")
    updates = {total: total + synk.ops.all_reduce(x.sum(0), op="sum")}
    g = function([x], [(synk.ops.all_reduce(y, op="sum"), None) for y in large], updates=updates)
    for _ in range(2):
        for found, expected in zip(g(data), theano.function([x], large)(rows)):
            np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_allclose(synk.gather(total), np.tile(2 * rows.sum(0), (MANY, 1)))

    for size in (1, 300):  # the master reduces little, the ranks share what is more
        values = RANDOM.normal(size=(MANY * size, 11)) + 1
        parts = values.reshape(MANY, size, 11)
        v = theano.shared(values[:1])
        for op in OPERATIONS:
            expected = reduced(op, parts, [1] * MANY)
            synk.scatter(v, values)
            np.testing.assert_allclose(synk.reduce(v, op, in_place=False), expected)
            synk.all_reduce(v, op)
            np.testing.assert_allclose(synk.gather(v), np.stack([expected] * MANY))
        for _ in range(3):  # in turns in two memories of each rank
            synk.scatter(v, values)
            np.testing.assert_array_equal(synk.gather(v, nd_up=0), values)
            synk.all_gather(v)
            np.testing.assert_array_equal(synk.gather(v), np.stack([values] * MANY))
        synk.broadcast(v, values[:2])
        np.testing.assert_array_equal(synk.get_value(MANY - 1, v), values[:2])

    def trouble(row):
        if row[0] == 11:
            raise KeyError("eleven")
        # Only the master's script hears it.
        if row[0] < 0:
            os.kill(os.getpid(), signal.SIGINT)
        return row

    z = T.dvector("z")
    h = function([z], (Call(trouble)(z), "gather"))
    with pytest.raises(WorkerError, match=f"Rank 11 of {MANY}"):
        h(np.arange(1.0 * MANY))
    with pytest.raises(KeyboardInterrupt):
        h(-np.ones(MANY))
    np.testing.assert_array_equal(h(np.ones(MANY)), np.ones(MANY))
    os.kill(current("the test").worker_pids[8], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 9 "):
        f(data), f(data)
    synk.close()
    assert synk.fork(MANY) == MANY
