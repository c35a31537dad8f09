"""One rank alone: its own transport, whose memory is private and goes as soon as it is dropped."""

import gc
import resource
import weakref

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from support.helpers import function

import synkhronos as synk
from synkhronos._session.current import Current

ROWS = 6_000_000  # of float64: 48 MB, which malloc always gives back to the system


@pytest.fixture
def one_rank(no_session):
    assert synk.fork(1) == 1
    x = T.dvector("x")
    yield function([x], (x.sum(), "sum"))


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def grown_since(before):
    return (resident() - before) / (8 * ROWS)


def test_memory_of_data_goes_though_a_function_has_used_it(one_rank):
    one_rank(np.ones(3))
    before = resident()
    d = synk.data(np.ones(ROWS))
    assert one_rank(d) == one_rank(d) == ROWS
    assert grown_since(before) > 0.9
    d.set_value(np.ones(2 * ROWS))
    assert one_rank(d) == 2 * ROWS and grown_since(before) < 2.5
    d.free_memory()
    assert grown_since(before) < 0.5
    d.set_value(np.ones(ROWS))
    assert one_rank(d) == ROWS
    del d
    assert grown_since(before) < 0.5


def test_memory_of_arrays_goes_with_the_session(one_rank):
    before = resident()
    assert one_rank(np.ones(ROWS)) == ROWS
    assert grown_since(before) > 0.9
    synk.close()
    assert grown_since(before) < 0.5


def test_no_process_and_no_descriptor_is_added(no_session):
    before = psutil.Process().num_fds()
    synk.fork(1)
    d = synk.data(np.ones(10))
    assert psutil.Process().children() == [] and psutil.Process().num_fds() == before
    status = synk.status()
    assert status.shared == 0 and status.data[0].home == "private memory" and len(d) == 10


def test_more_than_the_machine_has_is_refused(one_rank):
    with pytest.raises(synk.SharedMemoryFull, match="No room for 80,000,000,000,000 bytes"):
        synk.data(dtype="float64", shape=(10**13,))
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms, limit[1]))
    try:
        with pytest.raises(synk.SharedMemoryFull, match="No room"):
            synk.data(dtype="float64", shape=(10**9,))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert one_rank([1, 2]) == 3


def test_references_keep_no_memory(one_rank):
    memory = Current.session.comm.memory
    block = memory.create(80)
    reference, array = block.reference("float64", (10,)), block.array("float64", (10,))
    assert memory.fetch(reference).base is array.base
    owner = weakref.ref(array.base)
    del block, array
    gc.collect()
    assert owner() is None and reference.shape == (10,)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_old_value_that_is_returned_stays_as_it_was(no_session, n):
    synk.fork(n)
    w = theano.shared(np.arange(3.0), "w")
    f = function([], [(w, None)], updates=[(w, w * 0.5)])
    synk.broadcast(w)
    [old] = f()
    synk.broadcast(w, [9.0, 9.0, 9.0])
    assert old.tolist() == [0, 1, 2]
