"""batch_s: use some rows of the shared variables, chosen on each rank from its own rows.

    python demos/demo_5.py [--ranks 2]

The data of a training run stay on the ranks, each with its part; a call names the rows to use.
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
BATCH_SIZE = 30  # rows of each rank


def main(argv=()):
    """Run the steps; return the number of ranks, and the number of checked calls."""
    n_ranks = fork(parse_lesson(argv, __doc__), "demo_5")
    print(f"Ranks: {n_ranks}")

    random = np.random.RandomState(0)
    x_array = random.rand(ROWS_PER_RANK * n_ranks + 1, 3).astype(theano.config.floatX)
    w_array = random.rand(len(x_array)).astype(theano.config.floatX)

    # 1. Scatter rows into two shared variables, once. Each rank keeps its part.
    s_x = theano.shared(x_array[:0], "s_x")
    s_w = theano.shared(w_array[:0], "s_w")
    x, w = T.matrix("x"), T.vector("w")
    load = synk.function([x, w], updates=[(s_x, x), (s_w, w)])
    load(x_array, w_array)

    # 2. Make a function of the shared variables, without inputs. batch_s and num_slices apply to
    #    the variables that are named as sliceable: y is used whole.
    y = theano.shared(random.rand(3).astype(theano.config.floatX), "y")
    z = T.dot(s_x, y) * s_w
    f = synk.function([], [(z.sum(), "sum"), z.mean(), (z, "gather")], sliceable_shareds=[s_x, s_w])

    #    To check it: the rows of each rank, and Theano's function of the rows that the ranks use.
    lengths = synk.function([], (s_x.shape[0], "gather"))()
    ends = lengths.cumsum()[:-1]
    x_parts, w_parts = np.split(x_array, ends), np.split(w_array, ends)
    serial = theano.function([x, w], [z.sum(), z.mean(), z], givens=[(s_x, x), (s_w, w)])
    checked = []

    def check(batch_s, each, **kwargs):
        expected = serial(
            np.concatenate([part[rows] for part, rows in zip(x_parts, each)]),
            np.concatenate([part[rows] for part, rows in zip(w_parts, each)]),
        )
        for result, wanted in zip(f(batch_s=batch_s, **kwargs), expected):
            np.testing.assert_allclose(result, wanted, rtol=1e-4)
        checked.append(len(expected[2]))

    # 3. Select rows with batch_s: None for all rows of each rank; one selection, which each rank
    #    makes from its own rows; or a list with one selection for each rank, also of different
    #    lengths.
    picks = [random.randint(length, size=BATCH_SIZE + rank) for rank, length in enumerate(lengths)]
    slices = [slice(rank % 20, BATCH_SIZE) for rank in range(n_ranks)]
    common = random.randint(lengths.min(), size=BATCH_SIZE)
    selections = {
        "all rows": (None, [slice(None)] * n_ranks),
        "one slice": (slice(10, 40), [slice(10, 40)] * n_ranks),
        "one array": (common, [common] * n_ranks),
        "one list": ([5, 0, 5], [[5, 0, 5]] * n_ranks),
        "a slice for each": (slices, slices),
        "an array for each": (picks, picks),
    }
    for name, (batch_s, each) in selections.items():
        check(batch_s, each)
        print(f"{name:17} {checked[-1]:4} rows: equal to Theano's")
    print("Batch_s test passed.")

    # 4. With slices, too: each rank computes its rows in four parts, one after the other.
    for batch_s, each in selections.values():
        check(batch_s, each, num_slices=4)
    print("Sliced batch_s test passed.")

    # 5. Use all rows once in random order, without moving rows between the ranks.
    orders = [random.permutation(length) for length in lengths]
    total = 0.0
    for start in range(0, max(lengths), BATCH_SIZE):
        total += f(batch_s=[order[start : start + BATCH_SIZE] for order in orders])[0]
    np.testing.assert_allclose(total, serial(x_array, w_array)[0], rtol=1e-4)
    print("Shuffled pass test passed.")

    synk.close()
    return {"ranks": n_ranks, "checked": len(checked)}


if __name__ == "__main__":
    main(sys.argv[1:])
