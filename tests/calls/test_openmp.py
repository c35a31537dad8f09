"""A script may compute with OpenMP before ``fork()``: ranks start threads of their own."""

import copy
import logging

import pytest

from synkhronos._machine import devices

BEGIN = """
import ctypes, os
import numpy as np
import theano, theano.tensor as T
import synkhronos as synk
"""


def test_ranks_start_threads_of_their_own(script):
    # A parallel region of GNU's OpenMP, without a compiler. A worker that kept the threads of the
    # script would wait for them for ever.
    script(
        BEGIN
        + """
from support.helpers import on_ranks

def threads(number=3):
    import ctypes
    seen = []
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(1))
    ctypes.CDLL("libgomp.so.1").GOMP_parallel(region, None, number, 0)
    return len(seen)

def computing():
    return {*os.listdir("/proc/self/task")}

before = computing()
assert threads() == 3
begun = computing() - before
assert len(begun) == 2
synk.fork(2, threads_per_rank=1)
assert not begun & computing()
assert on_ranks(threads) == [3, 3]
synk.close()
assert threads() == 3  # and again, from a master that has computed
synk.fork(3)
assert on_ranks(threads) == [3, 3, 3]
"""
    )


@pytest.mark.slow("compiles C code")
def test_functions_that_use_openmp(script):
    script(
        BEGIN
        + """
theano.config.openmp, theano.config.openmp_elemwise_minsize = True, 10
x = T.dvector()
mode = theano.Mode("cvm", "fast_run")
plain = theano.function([x], T.exp(x) + x, mode=mode)
assert any(getattr(node.op, "openmp", False) for node in plain.maker.fgraph.apply_nodes)
rows = np.linspace(0, 1, 100_000)
before = plain(rows)
synk.fork(2, threads_per_rank=2)
f = synk.function([x], (T.exp(x) + x, "gather"), mode=mode)
for _ in range(10):
    np.testing.assert_array_equal(f(rows), before)
""",
        env={"OMP_NUM_THREADS": "2", "THEANO_FLAGS": "mode=FAST_COMPILE"},
    )


def test_an_old_library_has_one_thread_in_workers(script):
    script(
        BEGIN
        + """
from support.helpers import on_ranks
from synkhronos._machine import devices

def threads():
    import ctypes
    return ctypes.CDLL("libgomp.so.1").omp_get_max_threads()

threads()
devices._end_threads_of = lambda path: False  # as that of a libgomp before GCC 9
synk.fork(3, threads_per_rank=2)
assert on_ranks(threads) == [2, 1, 1]
"""
    )


@pytest.mark.parametrize(
    "path, level", [("/lib/libgomp.so.1", "WARNING"), ("/lib/libgomp-a34b3233.so.1.0.0", "DEBUG")]
)
def test_an_old_library_is_told_where_theano_uses_it(monkeypatch, caplog, path, level):
    monkeypatch.setattr(devices, "_end_threads_of", lambda path: False)
    gnu = {"user_api": "openmp", "prefix": "libgomp", "filepath": path}
    monkeypatch.setattr("threadpoolctl.threadpool_info", lambda: [gnu])
    monkeypatch.setattr(devices, "_lasting_threads", copy.copy(devices._lasting_threads))
    caplog.set_level(logging.DEBUG, logger="synkhronos")
    devices.end_openmp_threads(1)
    assert not caplog.records
    devices.end_openmp_threads(4)
    [record] = caplog.records
    assert record.levelname == level
    assert "one thread in each worker, not 4" in record.getMessage()
    assert "call synk.fork() before" in record.getMessage()


def test_a_library_that_is_gone_has_not_ended_its_threads():
    assert not devices._end_threads_of("/nowhere/libgomp.so.1")
    assert not devices._end_threads_of("libc.so.6")  # without the function
