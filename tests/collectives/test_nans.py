"""NaNs with different bits on the ranks: a reduction gives all ranks the same ones."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import function
from support.layouts import ON_DEVICES, Layout

import synkhronos as synk
from synkhronos._arithmetic.blocks import with_one_nan
from synkhronos._session import commands
from synkhronos.comm.arrays import reduce_alike
from synkhronos.comm.mpi.all_reduce import reduce_all

pytestmark = pytest.mark.skipif(ON_DEVICES, reason="a device computes NaNs in its own way")
LAYOUTS = [Layout(2), Layout(3, master=1), Layout(4)]
SIZES = [1, 5, 9, 33, 100, 1001, 20000]  # each rank reduces for itself, but the last in shares
DTYPES = ["float32", "float64"]


def nans(size, dtype, rank):
    """Return NaNs with a sign and a payload of a rank."""
    array = np.full(size, np.nan, dtype)
    array.view(f"u{array.itemsize}")[...] += np.array(rank + 1, f"u{array.itemsize}")
    return -array if rank % 2 else array


def differing(ranks, variables):
    """Return the names of variables whose bytes differ between the ranks."""
    everyone = ([synk.get_value(rank, v) for rank in range(ranks.n)] for v in variables)
    everyone = [[np.asarray(value).tobytes() for value in values] for values in everyone]
    return {v.name for v, values in zip(variables, everyone) if len({*values}) > 1}


@pytest.mark.parametrize("op", ["avg", "prod", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_in_graphs_and_what_is_computed_from_them(ranks, dtype, op):
    for size in SIZES:
        x = T.matrix("x", dtype=dtype)
        v, w, p = (theano.shared(np.ones(size, dtype), name) for name in "vwp")
        reduced, rate = synk.ops.all_reduce(x[0] * 2, op), np.asarray(0.1, dtype)
        updates = [(v, reduced), (w, w + synk.ops.all_reduce(x[0], op)), (p, p - rate * reduced)]
        f = function([x], [], updates=updates)
        rows = np.stack([nans(size, dtype, rank) for rank in range(ranks.n)])
        for _ in range(3):
            f(rows)
            assert not differing(ranks, [v, w, p]), size
        assert np.isnan(p.get_value()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives(ranks, dtype):
    for size in SIZES:
        variables = [theano.shared(np.ones(size, dtype), name) for name in "vw"]
        for op in ("avg", "prod", "min"):
            for rank in range(ranks.n):
                synk.set_value(rank, variables, [nans(size, dtype, rank + i) for i in range(2)])
            assert differing(ranks, variables) == {"v", "w"}
            synk.all_reduce(variables, op=op)
            assert not differing(ranks, variables), (op, size)


def at(array, begin):
    """Return a copy of an array that begins so many items behind a multiple of 64 bytes."""
    memory = np.zeros(array.nbytes + 512, np.uint8)
    begin = -memory.ctypes.data % 64 + begin * array.itemsize
    copy = memory[begin : begin + array.nbytes].view(array.dtype)
    copy[...] = array
    return copy


@pytest.mark.parametrize("dtype", [*DTYPES, "complex64"])
def test_results_are_the_same_wherever_arrays_lie(dtype):
    """As in a sum of NumPy they are not: see `with_one_nan`."""
    for size in SIZES[:-1]:
        sources = [nans(size, dtype, rank) for rank in range(3)]
        found = set()
        for begin in range(8):
            moved = [at(each, begin * rank) for rank, each in enumerate(sources)]
            target = at(sources[0], begin)
            assert reduce_alike("sum", sources, target, 3) is target
            found |= {target.tobytes(), reduce_alike("avg", moved, None, 3).tobytes()}
            reduce_all([[each] for each in moved], ("sum",), 3, False, [target])
            found.add(target.tobytes())
        assert len(found) == 1, size


def test_arrays_without_nans_are_not_copied():
    for array in (np.zeros(3), np.zeros(3, "int8"), np.zeros(0), np.array(1.0), np.zeros(2, "?")):
        assert with_one_nan(array) is array
    array = np.array([[-0.0, np.inf], [-np.nan, 1]])
    one = with_one_nan(array)
    assert one.tobytes() == np.array([[-0.0, np.inf], [np.nan, 1]]).tobytes()
    assert np.signbit(array[1, 0]) and with_one_nan(array[1, :1].reshape(())).shape == ()


def test_the_bits_of_nans_make_no_difference_between_ranks(ranks, tmp_path):
    v, path = theano.shared(np.ones(9), "v"), str(tmp_path / "v.npz")
    for rank in range(ranks.n):
        synk.set_value(rank, v, nans(9, "float64", rank))
    [hashes] = ranks.session.ask_of_each(commands.Hashes, [v])
    assert differing(ranks, [v]) and len({*hashes}) == 1
    synk.save(path, v)  # without a PortingWarning
    synk.load(path, v)
    assert not differing(ranks, [v])
    with synk.resume(str(tmp_path / "run.npz"), v) as state:
        synk.set_value(1, v, nans(9, "float64", 5))
        state.tick()
    synk.set_value(1, v, -np.zeros(9))
    [hashes] = ranks.session.ask_of_each(commands.Hashes, [v])
    assert len({*hashes}) == 2
