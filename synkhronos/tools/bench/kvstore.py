"""MXNet's KVStore, timed in a process of its own: the benchmark's side, and the script it runs.

    KVStore ──▶ python kvstore.py        one line of JSON to its input: what to time
            ◀──                          one line of JSON: the seconds of each round

It may run in another Python, without Synkhronos: as a script it imports nothing of it.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np

KINDS = ("local", "device")
START_SECONDS, ANSWER_SECONDS = 90, 300


class KVStoreError(RuntimeError):
    """MXNet did not start, failed, computed a wrong result, or did not answer."""


class KVStore:
    """A process that times MXNet's KVStore, from ``__enter__`` to ``__exit__``.

    Parameters
    ----------
    python : str
        An interpreter that can import MXNet.
    """

    def __init__(self, python):
        self._python = python

    def __enter__(self):
        self._process = subprocess.Popen(
            [self._python, "-u", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        self._errors = ""
        # Read always: a full pipe would stop the process.
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        try:
            self.version = self._answer(START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(START_SECONDS if exception == (None, None, None) else 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        self._process.stderr.close()

    def times(self, kind, nbytes, n_keys, n_devices, repetitions):
        """Return the seconds of each round of all keys, each checked."""
        request = [kind, nbytes, n_keys, n_devices, repetitions]
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise KVStoreError(self._failure()) from None
        return self._answer(ANSWER_SECONDS)

    def _answer(self, seconds):
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise KVStoreError(self._failure())
        found = json.loads(line)
        if isinstance(found, dict):
            raise KVStoreError(f"MXNet's KVStore: {found['error']}")
        return found

    def _read_errors(self):
        for line in self._process.stderr:
            self._errors = (self._errors + line)[-2000:]

    def _failure(self):
        self._process.wait()
        self._reader.join()
        last = self._errors.strip().splitlines()[-1:] or ["it ended"]
        return f"MXNet's KVStore can't be timed: {last[0]}"


def serve(mx, requests, answers):
    """Answer requests, one a line, until their end."""
    print(json.dumps(mx.__version__), file=answers, flush=True)
    stores = {}
    for line in requests:
        try:
            found = _time(mx, stores, *json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers, flush=True)


def _time(mx, stores, kind, nbytes, n_keys, n_devices, repetitions):
    if (kind, nbytes, n_keys) not in stores:
        stores.clear()  # of other sizes: their memory
        stores[kind, nbytes, n_keys] = _Store(mx, kind, nbytes, n_keys, n_devices)
    return [stores[kind, nbytes, n_keys].round() for _ in range(repetitions)]


class _Store:
    def __init__(self, mx, kind, nbytes, n_keys, n_devices):
        self._mx = mx
        self._store = mx.kv.create(kind)
        self._keys = list(range(n_keys)) if n_keys > 1 else 0
        shape = (nbytes // 4,)
        devices = [mx.cpu(device) for device in range(n_devices)]
        made = mx.ndarray.zeros
        self._arrays = [[made(shape, device) for device in devices] for _ in range(n_keys)]
        self._given = self._arrays if n_keys > 1 else self._arrays[0]
        zeros = [made(shape) for _ in range(n_keys)]
        self._store.init(self._keys, zeros if n_keys > 1 else zeros[0])

    def round(self):
        """Return the seconds of one round; raise ValueError if a sum is wrong."""
        flat = [array for arrays in self._arrays for array in arrays]
        for arrays in self._arrays:
            for device, array in enumerate(arrays):
                array[:] = device + 1
        self._mx.ndarray.waitall()
        begin = time.perf_counter()
        self._store.pushpull(self._keys, self._given)
        for array in flat:
            array.wait_to_read()
        seconds = time.perf_counter() - begin
        expected = sum(range(1, len(self._arrays[0]) + 1))
        for array in flat:
            if not np.all(array.asnumpy() == expected):
                raise ValueError("a sum is wrong")
        return seconds


if __name__ == "__main__":
    # MXNet 1.9.1 uses a name that NumPy 1.24 has no more.
    if not hasattr(np, "bool"):
        np.bool = np.bool_
    import mxnet

    serve(mxnet, sys.stdin, sys.stdout)
