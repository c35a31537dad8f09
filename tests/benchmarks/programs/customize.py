"""Run at the start of each Python of a foreign program, as its ``sitecustomize``.

It seeds NumPy's and Python's random numbers, times the functions of a serial run (to the file
FUNCTION_TIMES), makes Theano's random numbers constant for NOISE=off, rounds what shared variables
begin with otherwise for ROUNDING=seed, and lets Keras take made data, whose checksums are others.
The programs know nothing of it.
"""

import atexit
import functools
import importlib.abc
import json
import os
import random
import sys
from time import perf_counter

import numpy as np

FIRST_CALLS = 3  # of a function: as in reports of parallel()


def time_functions(module):
    """Sum up the seconds of all calls, and of each function's first three."""
    found = {"seconds": 0.0, "first_seconds": 0.0, "calls": 0}
    call = module.Function.__call__

    @functools.wraps(call)
    def timed(self, *args, **kwargs):
        begin = perf_counter()
        result = call(self, *args, **kwargs)
        seconds = perf_counter() - begin
        number = self.__dict__["_calls_here"] = self.__dict__.get("_calls_here", 0) + 1
        found["calls"] += 1
        found["seconds"] += seconds
        found["first_seconds"] += seconds if number <= FIRST_CALLS else 0
        return result

    module.Function.__call__ = timed
    atexit.register(write, found)


def write(found):
    """Write what was found, in the process that counted it."""
    with open(os.environ["FUNCTION_TIMES"], "w") as file:
        json.dump(found, file)


def still(module):
    """Make all random numbers their expectations."""
    import theano.tensor as T

    for name in "MRG_RandomStreams", "RandomStreams":
        streams = getattr(module, name, None)
        if streams is not None:
            streams.binomial = lambda self, size=None, n=1, p=0.5, ndim=None, dtype="int64", **_: (
                filled(size, T.cast(n * p, dtype))
            )
            streams.normal = lambda self, size=None, avg=0.0, std=1.0, ndim=None, dtype=None, **_: (
                filled(size, T.cast(avg, dtype or floatx()))
            )
            streams.uniform = lambda self, size=None, low=0.0, high=1.0, dtype=None, **_: filled(
                size, T.cast((low + high) / 2, dtype or floatx())
            )


def filled(size, value):
    """Return a value in the shape of what would be drawn."""
    import theano.tensor as T

    return value if size is None or value.ndim else T.alloc(value, *size)


def floatx():
    """Return Theano's usual dtype."""
    import theano

    return theano.config.floatX


def round_otherwise(module):
    """Make each value of the shared variables' begin one unit of the last place more, or less."""
    make, draw = module.shared, np.random.RandomState(int(os.environ["ROUNDING"]))

    @functools.wraps(make)
    def rounded(value, *args, **kwargs):
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            to = draw.choice([-np.inf, np.inf], value.shape).astype(value.dtype)
            value = np.where(value == 0, value, np.nextafter(value, to))
        return make(value, *args, **kwargs)

    module.shared = rounded


def take_made_data(module):
    """Let Keras take the files that are there."""
    module.validate_file = lambda *args, **kwargs: True


class Finder(importlib.abc.MetaPathFinder):
    """Changes modules when they have been imported."""

    def __init__(self, changes):
        self._changes = changes

    def find_spec(self, name, path, target=None):
        """Return the specification that the other finders give, with the change added."""
        change = self._changes.get(name)
        if change is None:
            return None
        others = [each for each in sys.meta_path if each is not self]
        specs = (each.find_spec(name, path, target) for each in others)
        spec = next(spec for spec in specs if spec is not None)
        execute = spec.loader.exec_module

        def then_change(module):
            execute(module)
            change(module)

        spec.loader.exec_module = then_change
        return spec


changes = {"keras.utils.data_utils": take_made_data}
if "FUNCTION_TIMES" in os.environ:
    changes["theano.compile.function_module"] = time_functions
if os.environ.get("NOISE") == "off":
    changes["theano.sandbox.rng_mrg"] = changes["theano.tensor.shared_randomstreams"] = still
if "ROUNDING" in os.environ:
    changes["theano.compile.sharedvalue"] = round_otherwise
sys.meta_path.insert(0, Finder(changes))
np.random.seed(1)
random.seed(1)
