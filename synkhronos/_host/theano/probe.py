"""Import Theano and time its matrix product, in a process of its own, for ``synkhronos info``.

Each stage prints one line of JSON, so after a crash the earlier stages' lines are there.
"""

import json
import os
import statistics
import sys
import time

SIZE = 1200
ROUNDS = 7


def report(**facts):
    """Print the facts that a stage found."""
    print(json.dumps(facts), flush=True)


def import_theano():
    """Report the versions, the flags that matter and the compile cache."""
    import numpy
    import scipy
    import theano

    cache = theano.config.compiledir
    report(
        theano=theano.__version__,
        theano_path=os.path.dirname(theano.__file__),
        numpy=numpy.__version__,
        scipy=scipy.__version__,
        cxx=theano.config.cxx,
        ldflags=theano.config.blas.ldflags,
        device=theano.config.device,
        floatX=theano.config.floatX,
        cache=cache,
        cache_writable=os.access(cache, os.W_OK),
    )


def time_products():
    """Report the GFLOP/s of a float32 matrix product by Theano and by NumPy, measured in turns."""
    import numpy as np
    import theano
    import theano.tensor as T

    a, b = np.random.RandomState(0).rand(2, SIZE, SIZE).astype("float32")
    x, y = T.fmatrices(2)
    product = theano.function([x, y], T.dot(x, y))
    if not np.allclose(product(a, b), a.dot(b), rtol=1e-3):
        raise ArithmeticError("Theano's matrix product differs from NumPy's")
    seconds = {"theano": [], "numpy": []}
    for _ in range(ROUNDS):
        for name, multiply in (("theano", product), ("numpy", np.dot)):
            start = time.perf_counter()
            multiply(a, b)
            seconds[name].append(time.perf_counter() - start)
    report(gflops={k: 2e-9 * SIZE**3 / statistics.median(v) for k, v in seconds.items()})


if __name__ == "__main__":
    import runpy

    # A checkout that is not installed has no .pth file: the argument is its import support.
    runpy.run_path(sys.argv[1])["install"]()
    import_theano()
    time_products()
