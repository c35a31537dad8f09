"""The basics: a Theano function that runs on all ranks, checked against Theano itself.

    python demos/demo_1.py [--ranks 2]

Steps: fork, function, distribute, as_theano, build_inputs, call, slices. Any number of ranks will
do.
"""

import sys
from pathlib import Path

import numpy as np
import theano.tensor as T

import synkhronos as synk

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demos._arguments import parse_lesson
from demos._shared import fork

N_ROWS = 1001  # rows that don't divide evenly


def main(argv=()):
    """Run the steps; return the results of Synkhronos and of Theano."""
    # 1. Start the workers, one process for each rank. This process is a rank, too. The line calls
    #    synk.fork() with the arguments of the command line.
    n_ranks = fork(parse_lesson(argv, __doc__), "demo_1")
    print(f"Ranks: {n_ranks}")

    # 2. Write the graph as for serial Theano.
    x = T.matrix("x")
    y = T.vector("y")
    z = (x * y).sum(axis=1)

    # 3. Compile it. The rows of x are scattered over the ranks; y is broadcast: all of it goes to
    #    each rank. Each output says how the ranks' parts become one: "avg" is the default.
    f = synk.function(
        inputs=[x],
        bcast_inputs=[y],
        outputs=[z.mean(), (z.sum(), "sum"), (z.max(), "max")],
    )

    # 4. Send it to the workers. Without this the first call does so.
    synk.distribute()

    # 5. Compute the same with Theano alone, in this process.
    random = np.random.RandomState(0)
    x_array = random.rand(N_ROWS, 3).astype(x.dtype)
    y_array = random.rand(3).astype(y.dtype)
    expected = f.as_theano(x_array, y_array)

    # 6. Put the inputs into shared memory, where every rank reads its rows without a copy. A call
    #    takes plain arrays, too, but copies them into shared memory each time.
    x_data, y_data = f.build_inputs(x_array, y_array)

    # 7. Call it: all ranks run at the same time, and the call returns when all are done.
    results = f(x_data, y_data)

    # The average of the ranks' averages is weighted by their rows, so it is the average of all
    # rows, also if some ranks have more than others.
    results, expected = list(map(float, results)), list(map(float, expected))
    for name, result, wanted in zip(("mean", "sum", "max"), results, expected):
        print(f"{name:4}  Synkhronos {result:.6f}   Theano {wanted:.6f}")
    np.testing.assert_allclose(results, expected, rtol=1e-5)
    print("Basic math test passed.")

    # 8. Compute it in four slices: each rank computes a quarter of its rows at a time, and reduces
    #    the quarters as the ranks' parts are reduced. Arrays between inputs and outputs (here z)
    #    then take a quarter of the memory. Results are the same.
    sliced = list(map(float, f(x_data, y_data, num_slices=4)))
    np.testing.assert_allclose(sliced, expected, rtol=1e-5)
    print("Sliced math test passed.")

    # 9. Stop the workers. The end of the script does so, too.
    synk.close()
    return {"ranks": n_ranks, "results": results, "sliced": sliced, "expected": expected}


if __name__ == "__main__":
    main(sys.argv[1:])
