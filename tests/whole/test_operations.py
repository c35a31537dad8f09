"""One table of operations: the same bits wherever arrays are added, multiplied or compared."""

import numpy as np
import pytest
from support.expected import combined, dtypes_of

from synkhronos._arithmetic.blocks import plan, reduce_block
from synkhronos._arithmetic.operations import OPERATIONS, ReduceOperation, wide
from synkhronos._arithmetic.reduction import Accumulator, combine, combine_of_machines, combine_some
from synkhronos.comm.mpi.all_reduce import reduce_all, reduce_into_first
from synkhronos.parameter_server import reductions
from synkhronos.parameter_server.remote.keeping import Keeper

DTYPES = ["f2", "f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


def in_stores(op):
    """Return the name of an operation in stores."""
    return "mean" if op == "avg" else op


def reference(op, arrays):
    """Return what NumPy makes of arrays in their order, of float16 in float32, rounded once."""
    dtype = arrays[0].dtype
    arrays = [each.astype("f4" if dtype == "f2" else dtype) for each in arrays]
    total = combined("sum" if op == "avg" else op, arrays)
    if op == "avg":
        total = total / total.dtype.type(len(arrays))
    return total.astype(dtype)


def collective(op, arrays):
    out = np.empty_like(arrays[0])
    reduce_block(op, arrays, out, len(arrays))
    for place in range(min(2, len(arrays))):  # into the first array, or the second
        own = arrays[:place] + [arrays[place].copy()] + arrays[place + 1 :]
        reduce_block(op, own, own[place], len(arrays))
        assert own[place].tobytes() == out.tobytes()
    return out


def planned_collective(op, arrays):
    out = arrays[0].copy()
    for step, arguments in plan(op, [[out, *arrays[1:]]], 1, 0, root=0):
        step(*arguments)
    return out


def outputs(op, arrays):
    return combine(op, arrays, [1] * len(arrays), arrays[0].dtype)


def outputs_of_machines(op, arrays):
    weights = [1] * len(arrays)
    parts = [combine_some(op, arrays[:2], weights[:2]), None, *arrays[2:]]
    return combine_of_machines(op, parts, weights, arrays[0].dtype)


def slices(op, arrays):
    total = Accumulator(op, len(arrays), "it")
    for each in arrays:
        total.add(each, 1)
    return total.result().astype(arrays[0].dtype)


def machines(op, arrays):
    """All arrays but the last are of ranks of the first machine."""
    boxes = [[each.astype(wide(each.dtype))] for each in arrays]
    first, last = boxes[:-1], boxes[-1]
    reduce_into_first(first, (op,), range(len(first)), 1, 0)
    out = [np.empty_like(last[0])]
    reduce_all([first[0], last], (op,), len(arrays), False, out)
    return out[0].astype(arrays[0].dtype)


def local_store(op, arrays):
    small, large = np.empty_like(arrays[0]), np.empty_like(arrays[0])
    reduce_block(in_stores(op), arrays, small, len(arrays))
    reductions.Reduction(in_stores(op), arrays, large).run()
    np.testing.assert_array_equal(small, large)
    return large


def dist_sync(op, arrays):
    got, failed = [], []
    keeper = Keeper(
        0, 1, len(arrays), lambda *answer: got.append(answer[4]), lambda *why: failed.append(why)
    )
    keeper.mode, array = "dist_sync", arrays[0]
    for worker, each in enumerate(arrays):
        keeper.on_key(worker, 0, "w", each.shape, each.dtype, in_stores(op), False)
        keeper.on_begun(worker)
    for worker in reversed(range(len(arrays))):
        keeper.place(worker, 0, 1, 0, array.nbytes)[...] = arrays[worker]
        keeper.arrived(worker, 0, 1, array.nbytes)
    keeper.on_request(0, 0, 1, 0)
    assert not failed
    return got[0]


IN_STORES = [local_store, dist_sync]
PLACES = [collective, planned_collective, outputs, outputs_of_machines, slices, machines]
PLACES += IN_STORES


def is_taken(place, op, dtype):
    """Return whether a place takes arrays of a dtype for an operation; others are refused."""
    row, kind = OPERATIONS[op], np.dtype(dtype).kind
    # Outputs have averages of integers, as floats.
    return kind in row.kinds and (kind in row.kinds_in_stores or place not in IN_STORES)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_every_place_gives_the_same_bits(place, op):
    rng = np.random.RandomState(5)
    for dtype in (each for each in DTYPES if is_taken(place, op, each)):
        cases = [(100 * rng.standard_normal((n, 33))).astype(dtype) for n in (2, 3, 4, 7)]
        if dtype == "f2":
            cases += [np.array([[2048.0]] + [[1.0]] * 6, "f2"), np.array([[6e4]] * 2, "f2")]
        for case in cases:
            with np.errstate(over="ignore", invalid="ignore"):  # products of float16, in all
                before = [each.copy() for each in case]
                wanted, got = reference(op, list(case)), place(op, list(case))
            np.testing.assert_array_equal(list(case), before)
            if dtype[0] == "c" and op == "avg":  # NumPy divides complex numbers in two ways
                np.testing.assert_allclose(got, wanted, rtol=1e-6)
            else:
                np.testing.assert_array_equal(got, wanted, f"{op} of {dtype}")
            assert got.dtype == wanted.dtype


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_identity_of_an_operation_changes_nothing(op):
    for dtype in dtypes_of(op, DTYPES):
        values = (100 * np.random.RandomState(5).standard_normal(50)).astype(dtype)
        if dtype[0] in "iu":
            values[:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
        elif dtype[0] in "fc":
            values[:2] = -np.inf, np.inf
        neutral = np.full(50, OPERATIONS[op].identity(values.dtype), values.dtype)
        for one, other in ((values, neutral), (neutral, values)):
            with np.errstate(invalid="ignore"):
                got = OPERATIONS[op].combine(one, other)
            got, wanted = (got[2:], values[2:]) if dtype[0] == "c" else (got, values)
            np.testing.assert_array_equal(got, wanted, f"{op} of {dtype}")


def test_an_operation_that_is_added_to_the_table_works_everywhere(monkeypatch):
    row = ReduceOperation(lambda a, b, out=None: np.fmax(a, b, out=out), lambda dtype: -9)
    monkeypatch.setitem(OPERATIONS, "largest", row)
    arrays = [np.array([1.0, np.nan]), np.array([np.nan, 2.0]), np.array([0.0, 1.0])]
    for place in PLACES:
        np.testing.assert_array_equal(place("largest", arrays), [1, 2])
    boxes = [[np.zeros(3)], [np.zeros(3)]]
    reduce_into_first(boxes, ("largest",), [], 1, 0)  # no rank of a machine has rows
    np.testing.assert_array_equal(boxes[0][0], [-9] * 3)


def test_an_operation_that_is_not_in_the_table_is_refused_everywhere():
    for place in PLACES:
        with pytest.raises(KeyError, match="'median' is no operation: the table has avg, sum"):
            place("median", [np.ones(2)] * 3)
    with pytest.raises(KeyError, match="'median' is no operation"):
        reduce_into_first([[np.zeros(3)]], ("median",), [], 1, 0)


def test_averages_of_integers_are_refused():
    for n in (2, 3):  # of a power of two, a product with a reciprocal
        with pytest.raises(TypeError):
            collective("avg", [np.ones(2, int)] * n)
