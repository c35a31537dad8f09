"""Data is in memory once for all ranks, and what is released is released everywhere."""

import collections
import ctypes
import gc
import os
import resource
import time

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from support.helpers import Call, function, mapped_bytes, on_ranks, shared_memory
from support.layouts import Layout
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import session as _session
from synkhronos._machine import devices
from synkhronos._session.session import run_on_all

MEGABYTE = 1 << 20
SIZE = 32 * MEGABYTE


LAYOUTS = [Layout(3, master=1)]
pytestmark = pytest.mark.usefixtures("ranks")


def workers():
    return _session._Current.session.worker_pids


def carry():
    """Make a call, which carries what was released to the workers."""
    gc.collect()
    on_ranks(lambda: 0)


def total_pss():
    maps = [m for pid in (os.getpid(), *workers()) for m in psutil.Process(pid).memory_maps()]
    return sum(m.pss for m in maps if "/dev/shm" in m.path)


def give_back():
    """Give the system what other tests have freed, which would count for memory that is kept."""
    return ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # NumPy 2.5 advises so
def test_a_shape_that_is_assigned_to_the_array_is_that_of_the_data():
    d = synk.data(np.arange(12.0).reshape(6, 2))
    array = d.data
    x = T.dmatrix("x")
    f = function([x], (x, "gather"))
    for shape in ((4, 3), (6, 2)):
        array.shape = shape
        np.testing.assert_array_equal(f(d), np.arange(12.0).reshape(shape))
        assert f(d).shape == f.as_theano(d).shape == d.shape == shape
    d.data.shape = (12,)
    with pytest.raises(ValueError, match=r"was given the shape \(12,\) in place, but has 2 dim"):
        f(d)
    with pytest.raises(TypeError, match="2 dimensions"):
        d.set_value(np.zeros(5))
    array.shape = (6, 2)
    assert d.data is array and f(d).shape == (6, 2)


def test_data_is_in_memory_once(ranks):
    x = T.bvector("x")
    f = function([x], (Call(lambda x: [x.astype("int64").sum()])(x), "sum"))
    carry()
    before = total_pss()
    d = synk.data(np.ones(SIZE, "int8"))
    bcast = function([], (Call(lambda x: [x.astype("int64").sum()])(x), "sum"), bcast_inputs=[x])
    assert f(d) == SIZE
    assert bcast(d) == SIZE * ranks.n  # every rank has touched every page
    assert total_pss() - before == pytest.approx(SIZE, rel=0.05)


def test_released_data_is_given_back_at_once(ranks):
    x = T.bvector("x")
    f = function([x], (Call(lambda x: [len(x)])(x), "sum"))
    carry()
    mapped = [mapped_bytes(pid) for pid in workers()]
    d = synk.data(np.ones(SIZE, "int8"))
    f(d)
    assert [mapped_bytes(pid) for pid in workers()] >= [m + SIZE for m in mapped]
    # A descriptor of our own tells how much memory the segment takes, also when it is released.
    own = os.dup(d._store.contents.ref.segment.fd)
    try:
        view = d[3:5]
        del d
        gc.collect()
        assert os.fstat(own).st_blocks * 512 >= SIZE
        assert view.tolist() == [1, 1]
        del view
        gc.collect()
        # Given back to the machine before the workers hear of it ...
        assert os.fstat(own).st_blocks == 0
    finally:
        os.close(own)
    carry()
    # ... and then unmapped by them.
    for pid, was in zip(workers(), mapped):
        assert mapped_bytes(pid) < was + MEGABYTE


def test_functions_give_back_their_staged_inputs_and_outboxes(ranks):
    carry()
    pids = (os.getpid(), *workers())
    mapped = [mapped_bytes(pid) for pid in pids]
    before = shared_memory()
    x = T.bvector("x")
    f = function([x], (x, "gather"))
    assert len(f(np.ones(SIZE // 4, "int8"))) == SIZE // 4
    assert shared_memory() - before > 0.2 * SIZE
    del f
    carry()
    carry()
    wait_until(lambda: shared_memory() - before < 0.1 * SIZE)
    for pid, was in zip(pids, mapped):
        assert mapped_bytes(pid) <= was + MEGABYTE


def test_released_in_the_middle_of_a_call_stays_until_its_end(ranks):
    """A Data dropped by the master's own part is still read by the others."""
    from support import helpers

    x = T.dvector("x")
    master = os.getpid()

    def slow_sum(x):
        if os.getpid() == master:
            helpers.kept.clear()
            gc.collect()
        else:
            time.sleep(0.2)
        return [x.sum()]

    f = function([x], (Call(slow_sum)(x), "sum"))
    other = function([x], (x.sum(), "sum"))
    helpers.kept.append(synk.data(np.ones(1_000_000)))
    other(helpers.kept[0])  # the workers have it mapped
    given = synk.data(np.ones(1000))
    assert f(given) == 1000
    assert not helpers.kept
    assert other(given) == 1000


def test_shared_variables_are_freed_on_the_workers(ranks):
    def grown(base):
        return [psutil.Process(pid).memory_info().rss - b for pid, b in zip(workers(), base)]

    carry()
    on_ranks(give_back)
    base = [psutil.Process(pid).memory_info().rss for pid in workers()]
    s = theano.shared(np.ones(SIZE // 8), "s")
    f = function([], (s.sum(), "sum"))
    assert f() == SIZE // 8 * ranks.n
    assert min(grown(base)) > 0.8 * SIZE
    del f, s
    carry()
    carry()
    assert max(grown(base)) < 0.5 * SIZE


def test_many_calls_do_not_grow_the_master_or_the_workers(ranks):
    x = T.dvector("x")
    f = function([x], [(x, "gather"), (x.sum(), "sum")])
    pids = (os.getpid(), *workers())
    data = synk.data(np.ones(100))

    def run(turns):
        for turn in range(turns):
            f(data)
            f(np.ones(50 + turn % 20))
        gc.collect()
        return [psutil.Process(pid).memory_info().rss for pid in pids]

    before = run(200)
    after = run(1000)
    for old, new in zip(before, after):
        assert new - old < 4 * MEGABYTE


def test_many_data_of_one_function_are_released(ranks):
    x = T.dvector("x")
    f = function([x], (x.sum(), "sum"))
    f(np.ones(10))
    carry()
    descriptors = len(os.listdir("/proc/self/fd"))
    mapped = [mapped_bytes(pid) for pid in workers()]
    for turn in range(1500):  # more than the slots of the gate
        assert f(synk.data(np.full(10, float(turn)))) == 10 * turn
    carry()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert max(m - was for m, was in zip([mapped_bytes(p) for p in workers()], mapped)) <= 0


def test_ranks_keep_the_memory_of_the_arrays_of_a_step(monkeypatch):
    def faults_of_a_step():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        # Each is below the size from which NumPy asks for huge pages; together they are above what
        # the C library keeps by itself.
        arrays = [np.ones(3 << 20, "uint8") for _ in range(20)]
        del arrays
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def least():
        return min(faults_of_a_step() for _ in range(60))  # the system may take pages away

    pages = 20 * (3 << 20) / resource.getpagesize()
    on_ranks(give_back)
    assert all(faults < 0.1 * pages for faults in on_ranks(least))
    assert devices.keep_freed_memory()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")  # the user's own setting stays
    assert not devices.keep_freed_memory()


def test_what_is_released_while_others_are_collected_waits(ranks):
    """A garbage collection at that moment made the call raise RuntimeError."""

    class Growing(collections.deque):
        def __iter__(self):
            for each in super().__iter__():
                self.append(("functions", -2))
                yield each

        def __getitem__(self, number):
            self.append(("functions", -2))
            return super().__getitem__(number)

    garbage = ranks.session.garbage
    garbage.released, before = Growing([("functions", -1)] * 3), garbage.released
    garbage.collect(ranks.session.gate, run_on_all, ranks.session.worker)
    assert len(garbage.released) == 3
    garbage.released = before
