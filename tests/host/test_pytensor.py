"""Facts about PyTensor that the ranks rely on, or refuse."""

import json

import numpy as np
import pytest
from support import host_library
from support.helpers import on_ranks, worker
from support.layouts import Layout

import synkhronos as synk
from synkhronos import _systems

if not host_library.ON_PYTENSOR:
    pytest.skip("it is about PyTensor", allow_module_level=True)

import pytensor
import pytensor.tensor as pt
from numpy.random import MT19937, PCG64, SFC64, Generator, Philox

LAYOUTS = [Layout(1), Layout(3, master=1)]
X = np.arange(30.0).reshape(10, 3)


def test_a_scattered_input_has_no_fixed_number_of_rows(ranks):
    x = pt.tensor("x", shape=(10, 3))
    with pytest.raises(ValueError, match=r"x is scattered, .* has always 10 rows.*with None"):
        synk.function([x], x.sum(), mode=host_library.MODE)
    synk.function([], (x.sum(), None), bcast_inputs=[x], mode=host_library.MODE)


def test_rows_along_another_axis_are_counted_there(ranks):
    x = pt.tensor("x", shape=(3, None))
    f = synk.function([x], (x.sum(), "sum"), axes={x: 1}, mode=host_library.MODE)
    assert f(X.T) == X.sum()
    y = pt.tensor("y", shape=(3, 10))
    with pytest.raises(ValueError, match="has always 10 rows"):
        synk.function([y], (y.sum(), "sum"), axes={y: 1}, mode=host_library.MODE)


def test_other_lengths_than_those_of_the_type_are_refused(ranks):
    x = pt.tensor("x", shape=(None, 3))
    f = synk.function([x], (x.sum(), "sum"), mode=host_library.MODE)
    assert f(X) == f(synk.data(X)) == X.sum()
    for wrong in (X[:, :2], synk.data(X[:, :2].copy())):
        with pytest.raises(TypeError):
            f(wrong)


def test_shared_variables_of_a_fixed_shape_keep_it(ranks):
    s = pytensor.shared(X, "s", shape=X.shape)
    with pytest.raises(ValueError, match=r"sliceable_shareds has s, .* has always 10 rows"):
        synk.function([], (s.sum(), "sum"), sliceable_shareds=[s], mode=host_library.MODE)
    for call in (lambda: synk.scatter(s, X), lambda: synk.all_gather(s)):
        with pytest.raises(TypeError, match="changes the number of rows, but s always has 10"):
            call()
    with pytest.raises(TypeError, match="can't give s"):
        synk.set_value(0, s, X[:5])
    synk.broadcast(s)
    assert (synk.gather(s) == np.stack([X] * ranks.n)).all()


def test_a_tuple_as_an_input_is_told_what_to_write_instead(ranks):
    x = pt.dvector("x")
    with pytest.raises(TypeError, match=r"must be a PyTensor variable or an In, got \(x,") as said:
        synk.function([(x, np.ones(2))], x.sum(), mode=host_library.MODE)
    assert "PyTensor takes no tuples: give the value in each call, or write In(" in str(said.value)
    kept = pytensor.In(x, value=pytensor.shared(np.ones(2)))
    assert synk.function([], (x.sum(), None), bcast_inputs=[kept], mode=host_library.MODE)() == 2


def test_updaters_name_the_library_of_their_functions():
    updaters = pytest.importorskip("synkhronos.parameter_server.updaters")
    x, s = pt.dvector("x"), pytensor.shared(np.ones(2), "s")
    step = pytensor.function([x], updates=[(s, s - x)], mode=host_library.MODE)
    with pytest.raises(TypeError, match="got a compiled PyTensor function: write theano_updater"):
        updaters.as_updater(step)
    with pytest.raises(TypeError, match="must be a compiled PyTensor function, got"):
        updaters.theano_updater({0: len}, {0: s})
    assert updaters.theano_updater({0: step}, {0: s}).kind == "PyTensor functions of 0"


@pytest.mark.parametrize("mode", ["JAX", "PYTORCH"])
def test_modes_whose_arrays_are_not_numpys_are_refused(ranks, mode):
    x = pt.dvector("x")
    with pytest.raises(ValueError, match=f"mode {mode} can't run.*mode='NUMBA'") as said:
        synk.function([x], x.sum(), mode=mode)
    assert _systems.advice("JAX") in str(said.value)


@pytest.mark.parametrize("bits", [MT19937, PCG64, Philox, SFC64])
def test_each_rank_draws_from_a_stream_of_its_own(ranks, bits):
    state = pt.random.shared_rng(Generator(bits(5)))
    new, drawn = state.normal(size=(4,))
    f = synk.function([], (drawn, "gather"), updates={state: new}, mode=host_library.MODE)
    values = [f().reshape(ranks.n, 4) for _ in range(2)]
    serial = Generator(bits(5))
    for each in values:
        assert (each[0] == serial.normal(size=4)).all()
    assert len(np.unique(values)) == 2 * ranks.n * 4


def test_random_states_of_other_kinds_are_refused(ranks, tmp_path):
    state, path = pytensor.shared(Generator(PCG64(5)), "state"), str(tmp_path / "saved.npz")
    entry = {"name": "state", "dtype": None, "ndim": None, "relation": "equal"}
    for value, why in [
        ({"random": ["key", "MT19937", 624, 0, 0.0]}, "it is a RandomState, and not a Generator"),
        ({"generator": ["BitGenerator", 1]}, "NumPy has no bit generator BitGenerator"),
    ]:
        about = {"version": 1, "what": "a checkpoint", "variables": [{**entry, "values": [value]}]}
        np.savez(path, about=json.dumps(about), key=np.zeros(624, np.uint32))
        with pytest.raises(ValueError, match=rf"'state' \(a random state\) in .*{why}"):
            synk.load(path, state)


def test_the_ranks_have_the_masters_settings(ranks):
    x = pt.dvector("x")
    with pytensor.config.change_flags(numba__fastmath=False):
        f = synk.function([x], (x.sum(), "sum"), mode=host_library.MODE)
        assert f(np.ones(4)) == 4
        found = on_ranks(lambda: float(pytensor.config.numba__fastmath))
    assert found == [0.0] * ranks.n


def test_numba_compiles_in_the_master_and_workers_find_its_code(ranks):
    x, s = pt.dmatrix("x"), pytensor.shared(np.zeros(3), "s")
    f = synk.function([x], (x.sum(), "sum"), updates=[(s, s + x.sum(0))], mode="NUMBA")
    synk.distribute()

    def compiled():
        [replica] = [each for each in worker().replicas.values() if _is_numba(each)]
        stats = replica.variants["plain"].vm.jit_fn.stats
        return sum(stats.cache_misses.values())

    def _is_numba(replica):
        return any(hasattr(each.vm, "jit_fn") for each in replica.variants.values())

    misses = on_ranks(compiled)
    assert [m for rank, m in enumerate(misses) if rank != ranks.master] == [0.0] * (ranks.n - 1)
    assert f(X) == X.sum()
    assert f(np.asfortranarray(X)) == X.sum()
    before = s.container.storage[0]
    synk.all_reduce(s, "sum")
    assert (s.get_value() == 2 * X.sum(0)).all()
    assert on_ranks(compiled) == misses, "another memory layout was compiled for"
    f(X)
    assert ranks.n == 1 or s.container.storage[0] is not before
    home = s.container.storage[0]
    f(X)
    assert s.container.storage[0] is home, "the update is not in place"
