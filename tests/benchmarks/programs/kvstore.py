"""MXNet's KVStore in a process of its own."""

import numpy as np

from benchmarks.programs.serving import clock, serve


class Stores:
    """One store at a time: a method for each thing that the benchmark asks for."""

    def __init__(self, mx):
        self._mx = mx
        self._made = None

    def hello(self):
        """Return the version."""
        return self._mx.__version__

    def times(self, kind, nbytes, n_keys, n_devices, count):
        """Return the seconds of each round of all keys; raise ValueError if a sum is wrong."""
        given = kind, nbytes, n_keys, n_devices
        if self._made is None or self._made[0] != given:
            self._made = None  # of other sizes: their memory
            self._made = given, *self._make(*given)
        return [self._round(*self._made[1:]) for _ in range(count)]

    def _make(self, kind, nbytes, n_keys, n_devices):
        made, shape = self._mx.ndarray.zeros, (nbytes // 4,)
        devices = [self._mx.cpu(device) for device in range(n_devices)]
        arrays = [[made(shape, device) for device in devices] for _ in range(n_keys)]
        store, keys = self._mx.kv.create(kind), list(range(n_keys))
        store.init(keys, [made(shape) for _ in keys])
        return store, keys, arrays

    def _round(self, store, keys, arrays):
        flat = [array for each in arrays for array in each]
        for each in arrays:
            for device, array in enumerate(each):
                array[:] = device + 1
        self._mx.ndarray.waitall()
        begin = clock()
        store.pushpull(keys, arrays)
        for array in flat:
            array.wait_to_read()
        seconds = clock() - begin
        expected = sum(range(1, len(arrays[0]) + 1))
        if not all(np.all(array.asnumpy() == expected) for array in flat):
            raise ValueError("a sum is wrong")
        return seconds


if __name__ == "__main__":
    # MXNet 1.9.1 uses a name that NumPy 1.24 has no more.
    if not hasattr(np, "bool"):
        np.bool = np.bool_
    import mxnet

    serve(Stores(mxnet))
