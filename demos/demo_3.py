"""Shared variables: every rank has its own, and nothing synchronizes them behind your back.

    python demos/demo_3.py [--ranks 2]

Steps: give each rank its rows, look at all of them, update locally, update alike, slice.
"""

import sys
from pathlib import Path

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demos._arguments import parse_lesson
from demos._shared import fork

ROWS_PER_RANK = 100


def main(argv=()):
    """Run the steps; return the number of ranks, and the number of rows of each."""
    n_ranks = fork(parse_lesson(argv, __doc__), "demo_3")
    print(f"Ranks: {n_ranks}")

    # One row more than divides evenly: the last rank gets it.
    values = np.random.RandomState(0).rand(ROWS_PER_RANK * n_ranks + 1, 3)
    values = values.astype(theano.config.floatX)

    # 1. Give each rank its rows. A shared variable starts with the master's value on every rank.
    #    Here an update replaces it by the rows that the rank gets of x. They stay on that rank.
    s = theano.shared(values[:0], "s")
    x = T.matrix("x")
    load = synk.function([x], updates=[(s, x)])
    load(values)

    # 2. Look at all of them. "gather" joins the ranks' arrays in rank order; numbers are stacked.
    gather = synk.function([], [(s, "gather"), (s.shape[0], "gather")])
    everything, lengths = gather()
    print(f"Rows of s on each rank: {lengths.tolist()}")
    assert np.array_equal(everything, values)
    assert np.array_equal(s.get_value(), values[: lengths[0]])  # get_value is the master's own
    print("Scatter-gather test passed.")

    # 3. Update locally. Each rank knows its own rows only, so each subtracts the mean of its own.
    ends = lengths.cumsum()[:-1]
    subtract_own_mean = synk.function([], updates=[(s, s - s.mean(axis=0))])
    subtract_own_mean()
    expected = [rows - rows.mean(axis=0) for rows in np.split(values, ends)]
    np.testing.assert_allclose(gather()[0], np.concatenate(expected), atol=1e-5)
    print("Local update test passed.")

    # 4. Update alike. To subtract the mean of all rows, get it here, and broadcast it to every
    #    rank. s is named as sliceable, so its rows count: "avg" weights each rank with its number
    #    of rows, and the result is the mean of all rows. (Otherwise all ranks weigh the same.)
    load(values)
    m = T.vector("m")
    mean = synk.function([], s.mean(axis=0), sliceable_shareds=[s])
    subtract = synk.function([], bcast_inputs=[m], updates=[(s, s - m)])
    subtract(mean())
    centered = values - values.mean(axis=0)
    np.testing.assert_allclose(gather()[0], centered, atol=1e-5)
    print("Broadcast update test passed.")

    # 5. Slice. Each rank computes its rows in four parts, one after the other, which needs less
    #    memory in between. Outputs are the same...
    w = theano.shared(np.ones(3, values.dtype), "w")
    loss = T.sqr(T.dot(s, w)).mean()
    compute = synk.function([], loss, sliceable_shareds=[s])
    wanted = np.square(centered.sum(axis=1)).mean()
    np.testing.assert_allclose(compute(), wanted, rtol=1e-4)
    np.testing.assert_allclose(compute(num_slices=4), wanted, rtol=1e-4)
    print("Sliced output test passed.")

    #    ... and so are updates. Every part is computed with the old values. The results are
    #    averaged by rows (or reduced by the mode that the update names), and applied once.
    g = theano.shared(np.zeros(3, values.dtype), "g")
    store = synk.function([], updates=[(g, T.grad(loss, w), "avg")], sliceable_shareds=[s])
    gradients = synk.function([], (g, "gather"))
    store()
    whole = gradients()
    store(num_slices=4)
    np.testing.assert_allclose(gradients(), whole, rtol=1e-4, atol=1e-6)
    own = [2 * rows.sum(axis=1).dot(rows) / len(rows) for rows in np.split(centered, ends)]
    np.testing.assert_allclose(whole, np.concatenate(own), rtol=1e-4, atol=1e-6)
    print("Sliced update test passed.")

    synk.close()
    return {"ranks": n_ranks, "lengths": lengths.tolist()}


if __name__ == "__main__":
    main(sys.argv[1:])
