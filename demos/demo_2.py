"""Data: arrays in shared memory, which all ranks read and the script writes.

    python demos/demo_2.py [--ranks 2]

Steps: make, write, change the length, replace and grow, cast, release.
"""

import sys
from pathlib import Path

import numpy as np
import theano.tensor as T

import synkhronos as synk

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demos._arguments import parse_lesson
from demos._shared import fork


def main(argv=()):
    """Run the steps; return the number of ranks, and the sums that they computed."""
    n_ranks = fork(parse_lesson(argv, __doc__), "demo_2")
    print(f"Ranks: {n_ranks}")

    # A function shows what the ranks read from a Data.
    x = T.matrix("x", dtype="float32")
    total = synk.function([x], (x.sum(), "sum"))
    sums = []

    def check(data, name):
        sums.append(float(total(data)))
        np.testing.assert_allclose(sums[-1], data.data.sum(dtype="float64"), rtol=1e-5)
        print(f"{name} test passed.")

    # 1. Make a Data. Its dtype and number of dimensions are fixed from here on.
    values = np.arange(20, dtype="float32").reshape(5, 4)
    d = synk.data(values, name="d")
    print(f"{d}: length {len(d)}, size {d.size}, room for {d.alloc_size} items")
    check(d, "Making")

    # 2. Write to it. It takes any index that a NumPy array takes, and d.data is a NumPy array of
    #    the same memory. The ranks see what was written; nothing is sent.
    view = d.data
    d[0] = 100
    d[1:3, ::2] += 1
    view[-1] = -5
    assert d[4, 0] == -5 and view[0, 0] == 100
    check(d, "Writing")

    # 3. Change its length. The memory stays allocated, so the rows come back with the length.
    d.set_length(2)
    print(f"{d}: room for {d.alloc_size} items")
    d.set_length(5)
    assert np.array_equal(d.data, view)
    check(d, "Changing the length")

    # 4. Replace all of it by an array of another shape. The old memory is used again if it is
    #    large enough. If not, new memory is allocated, on request more than is needed:
    d.set_value(np.ones((2000, 10), "float32"), oversize=1.1)
    assert (d.size, d.alloc_size) == (20_000, 22_000)
    d.set_value(np.ones((2100, 10), "float32"))
    assert (d.size, d.alloc_size) == (21_000, 22_000)
    print(f"{d}: room for {d.alloc_size} items")
    check(d, "Replacing")

    #    The view from before is an array of the old memory. It can still be read, but no rank sees
    #    what is written to it: after a change of shape take a new view.
    view[...] = 7
    assert d[0, 0] == 1

    # 5. Growing keeps the old rows; new rows are zero unless the memory was used before.
    d.set_length(3000)
    assert np.array_equal(d[:2100], np.ones((2100, 10))) and not d[2100:].any()
    check(d, "Growing")

    # 6. Values are cast up to the dtype of the Data, and down only with force_cast.
    d.set_value(np.arange(8, dtype="uint8").reshape(2, 4))
    doubles = np.full((2, 4), 0.1)
    try:
        d.set_value(doubles)
    except TypeError as refusal:
        print(f"TypeError: {refusal}")
    d.set_value(doubles, force_cast=True)
    assert d.dtype == "float32" and np.array_equal(d.data, doubles.astype("float32"))
    check(d, "Casting")

    # 7. The memory is freed when the last reference is gone, or here. The Data stays usable.
    d.free_memory()
    assert (d.shape, d.alloc_size) == ((0, 0), 0)
    d.set_value(np.ones((100, 8), "float32"))
    assert d.alloc_size == 800
    check(d, "Releasing")

    synk.close()
    return {"ranks": n_ranks, "sums": sums}


if __name__ == "__main__":
    main(sys.argv[1:])
