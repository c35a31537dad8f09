"""A program of Stan, evaluated in a process of its own."""

import ctypes
import sys

import numpy as np

from benchmarks.programs.serving import seconds_of_each, serve

_SLICES = 8  # of the rows, for each thread: Stan's guide advises several


class Model:
    """A program with its data: a method for each thing that the benchmark asks for."""

    def __init__(self, library, data, threads):
        self._library = library
        library.make_model.restype = ctypes.c_void_p
        library.evaluate.restype = ctypes.c_double
        data = {**data, "grain": max(1, len(data["y"]) // (_SLICES * threads))}
        arrays = {name: np.asarray(value) for name, value in data.items()}
        integers = {name: each for name, each in arrays.items() if each.dtype.kind in "iu"}
        reals = {name: each for name, each in arrays.items() if name not in integers}
        kinds = (reals, np.float64), (integers, np.intc)
        given = [part for kind in kinds for part in _arguments(*kind)]
        self._model = ctypes.c_void_p(library.make_model(threads, *given))
        self._size = library.number_of_parameters(self._model)

    def evaluate(self, at):
        """Return the log density and its gradient at unconstrained parameters."""
        value, gradient = self._evaluate(at)
        return value, gradient.tolist()

    def _evaluate(self, at):
        at, gradient = np.ascontiguousarray(at, float), np.empty(self._size)
        if at.shape != gradient.shape:
            raise ValueError(f"expected {self._size} parameters, got an array of {at.shape}")
        addresses = [ctypes.c_void_p(each.ctypes.data) for each in (at, gradient)]
        return self._library.evaluate(self._model, self._size, *addresses), gradient

    def times(self, count):
        """Return the seconds of each of `count` evaluations, where all parameters are 0.01."""
        at = np.full(self._size, 0.01)
        return seconds_of_each(lambda: self._evaluate(at), count)


def _arguments(arrays, dtype):
    """Return the arguments of C for arrays of one dtype, which they keep alive."""
    flat = [np.asarray(each, dtype).ravel(order="F") for each in arrays.values()]
    n, lengths = len(arrays), [length for each in arrays.values() for length in each.shape]
    names = (ctypes.c_char_p * n)(*[name.encode() for name in arrays])
    values = (ctypes.c_void_p * n)(*[each.ctypes.data for each in flat])
    values.kept = flat
    ndim = (ctypes.c_int * n)(*[each.ndim for each in arrays.values()])
    return n, names, values, ndim, (ctypes.c_size_t * max(len(lengths), 1))(*lengths)


if __name__ == "__main__":
    library, path, threads = sys.argv[1:]
    with np.load(path) as data:
        serve(Model(ctypes.CDLL(library), dict(data), int(threads)))
