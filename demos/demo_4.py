"""batch and minibatch: use some rows of the inputs, chosen before they are scattered.

    python demos/demo_4.py [--ranks 2]

The data of a whole training run stay in shared memory; each call names the rows that it uses.
"""

import sys
from pathlib import Path

import numpy as np
import theano.tensor as T

import synkhronos as synk

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demos._arguments import parse_lesson
from demos._shared import fork

N_ROWS = 1001
BATCH_SIZE = 100


def main(argv=()):
    """Run the steps; return the number of ranks, and the number of checked calls."""
    n_ranks = fork(parse_lesson(argv, __doc__), "demo_4")
    print(f"Ranks: {n_ranks}")

    x, w, y = T.matrix("x"), T.vector("w"), T.vector("y")
    z = T.dot(x, y) * w
    f = synk.function([x, w], [(z.sum(), "sum"), z.mean(), (z, "gather")], bcast_inputs=[y])

    random = np.random.RandomState(0)
    x_array = random.rand(N_ROWS, 3).astype(x.dtype)
    w_array = random.rand(N_ROWS).astype(w.dtype)
    y_array = random.rand(3).astype(y.dtype)
    x_data, w_data, y_data = f.build_inputs(x_array, w_array, y_array)
    checked = []

    def check(results, expected):
        for result, wanted in zip(results, expected):
            np.testing.assert_allclose(result, wanted, rtol=1e-4)
        checked.append(len(results[2]))

    # 1. Select rows with batch: from all scattered inputs, not from y, which is broadcast. The
    #    ranks share the selected rows evenly. A number n selects the first n rows; anything else
    #    selects the rows that it selects from a NumPy array.
    batches = {
        "the first rows": BATCH_SIZE,
        "a slice": slice(200, 300),
        "every 10th row": slice(None, None, 10),
        "the last rows": slice(-BATCH_SIZE, None),
        "random rows": random.randint(N_ROWS, size=BATCH_SIZE),
        "a few, one twice": [1000, 7, 7, -1],
        "a mask": w_array > 0.5,
    }
    for name, batch in batches.items():
        rows = slice(batch) if isinstance(batch, int) else batch
        check(
            f(x_data, w_data, y_data, batch=batch),
            f.as_theano(x_array[rows], w_array[rows], y_array),
        )
        print(f"{name:17} {checked[-1]:4} rows: equal to Theano's")

    #    Consecutive rows are used in place, without a copy. Rows that are picked one by one are
    #    copied: all ranks do so at the same time, each for itself. A shuffled epoch needs no
    #    shuffled copy of the data, just a list of row numbers.
    order = random.permutation(N_ROWS)
    total = 0.0
    for start in range(0, N_ROWS, BATCH_SIZE):
        total += f(x_data, w_data, y_data, batch=order[start : start + BATCH_SIZE])[0]
    np.testing.assert_allclose(total, f.as_theano(x_array, w_array, y_array)[0], rtol=1e-4)
    print("Batch test passed.")

    # 2. minibatch: a Data that holds just the rows of the batch, in its order. Here each batch gets
    #    new weights, while x stays in its memory.
    w_batch = synk.data(var=w, minibatch=True)
    for start in range(0, N_ROWS, BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        w_batch.set_value(random.rand(len(rows)).astype(w.dtype))
        check(
            f(x_data, w_batch, y_data, batch=rows),
            f.as_theano(x_array[rows], w_batch.data, y_array),
        )
    print("Minibatch test passed.")

    # 3. Both with slices: each rank computes its rows in four parts, one after the other.
    for batch in batches.values():
        check(
            f(x_data, w_data, y_data, batch=batch, num_slices=4),
            f(x_data, w_data, y_data, batch=batch),
        )
    check(
        f(x_data, w_batch, y_data, batch=rows, num_slices=4),
        f(x_data, w_batch, y_data, batch=rows),
    )
    print("Sliced batch test passed.")

    synk.close()
    return {"ranks": n_ranks, "checked": len(checked)}


if __name__ == "__main__":
    main(sys.argv[1:])
