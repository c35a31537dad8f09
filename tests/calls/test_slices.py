"""Batches, slices and implicit inputs: what serial Theano computes from the same rows."""

import itertools

import numpy as np
import pytest
import theano
import theano.sparse
import theano.tensor as T
from support.expected import MODES, dtypes_of, reduced, selected
from support.helpers import MODE, Call, function, shares
from support.layouts import ON_DEVICES, forked
from support.replicas import put, replicas

import synkhronos as synk
from synkhronos import WorkerError
from synkhronos._arithmetic.operations import OPERATIONS
from synkhronos._machine.shared_memory import is_in_a_segment

IN_C = [f"c_{mode}" for mode in MODES if mode]


@pytest.fixture(scope="module")
def ranks(layout):
    """A session, with functions that many tests call."""
    with forked(layout) as ranks:
        x, y = T.dvector("x"), T.dvector("y")
        counts = (x.shape[:1], "gather")
        ranks.rows = function([x], [(x, "gather"), counts], name="rows")
        ranks.pairs = function([x, y], [(x, "gather"), (y, "gather"), counts], name="pairs")
        yield ranks
        del ranks.rows, ranks.pairs


@pytest.fixture(scope="module")
def own(ranks):
    """A shared variable with rows of its own on each rank, and a function of it."""
    s = theano.shared(np.zeros(0), "s")
    f = function([], [(s, "gather"), (s.shape[:1], "gather")], sliceable_shareds=[s], name="own")
    parts = [100.0 * rank + np.arange(10) for rank in range(ranks.n)]
    put(s, parts)
    ranks.s, ranks.own, ranks.parts = s, f, parts
    yield ranks
    del ranks.s, ranks.own


def counts_of(parts):
    """Return the number of rows of each rank that has some."""
    return [len(part) for part in parts if len(part)]


def assert_scattered(ranks, found, expected):
    """Assert that the ranks computed the rows `expected`, divided as documented."""
    rows, counts = found
    np.testing.assert_array_equal(rows, expected)
    assert counts.tolist() == (counts_of(shares(np.arange(len(expected)), ranks.n)) or [0])


# batch


X = np.arange(10.0) + 0.5
MASK = X % 3 > 1
BATCHES = [
    None,
    0,
    10,
    np.uint8(4),
    slice(2, 7),
    slice(-4, None),
    slice(None, None, -3),
    slice(7, 2),
]
BATCHES += [[9, 0, 5], (-1, 0, -10), [4] * 5, [], np.array([3, -1, 3]), MASK, MASK.tolist()]
BATCHES += [np.zeros(10, bool), range(8, 1, -3), range(-2, 2)]
BATCHES += [slice(0, 0, -1), slice(2, 2, -1), slice(1, 3, -1)]


@pytest.mark.parametrize("batch", BATCHES, ids=repr)
def test_batch(ranks, batch):
    expected = selected(X, batch)
    assert_scattered(ranks, ranks.rows(X, batch=batch), expected)
    assert_scattered(ranks, ranks.rows(synk.data(X), batch=batch), expected)
    assert_scattered(ranks, ranks.rows(X.tolist(), batch=batch), expected)
    sliced, _ = ranks.rows(X, batch=batch, num_slices=2)
    np.testing.assert_array_equal(sliced, expected)
    assert sliced.dtype == X.dtype


def test_batch_lets_inputs_differ_in_length(ranks):
    x, y = np.arange(10.0), np.arange(100.0, 106)
    for batch in (6, slice(1, 5), [5, 0, -1], [3]):
        first, second, _ = ranks.pairs(x, y, batch=batch)
        # Negative numbers count from the end of the shorter one, for both.
        chosen = selected(np.arange(6), batch)
        np.testing.assert_array_equal(first, x[chosen])
        np.testing.assert_array_equal(second, y[chosen])


def test_batch_does_not_concern_inputs_that_are_not_scattered(ranks):
    x, factor, whole = T.dvector("x"), T.dscalar("factor"), T.dvector("whole")
    f = function([x, factor], [(factor * x, "gather"), (whole, None)], bcast_inputs=[whole])
    for batch in (2, [3, 0], slice(1, 3)):
        rows, everything = f(np.arange(4.0), 3.0, np.arange(5.0), batch=batch)
        np.testing.assert_array_equal(rows, 3 * selected(np.arange(4.0), batch))
        np.testing.assert_array_equal(everything, np.arange(5.0))


def test_one_data_for_two_inputs_and_two_functions(ranks):
    d = synk.data(np.arange(10.0))
    for batch in (None, [1, 5, 2], 3):
        first, second, _ = ranks.pairs(d, d, batch=batch)
        np.testing.assert_array_equal(first, second)
        assert_scattered(ranks, ranks.rows(d, batch=batch), first)


def test_no_rows(ranks):
    x = T.dmatrix("x")
    f = function([x], [(x.sum(0), "sum"), (x, "gather"), (x.shape[0], None)])
    for found in (f(np.ones((5, 2)), batch=0), f(np.ones((0, 2))), f(np.ones((5, 2)), batch=[])):
        total, rows, count = found
        assert (total.tolist(), rows.shape, int(count)) == ([0, 0], (0, 2), 0)
    sliced = f(np.ones((0, 2)), num_slices=3)
    assert (sliced[0].tolist(), sliced[1].shape, int(sliced[2])) == ([0, 0], (0, 2), 0)


@pytest.mark.skipif(ON_DEVICES, reason="GpuMaxAndArgmax returns something for no rows")
def test_no_rows_of_what_has_no_value_for_none(ranks):
    x = T.dmatrix("x")
    largest = function([x], (x.max(), "max"))
    with pytest.raises(WorkerError):
        largest(np.ones((5, 2)), batch=0)
    assert largest(np.ones((5, 2))) == 1


# minibatch


@pytest.mark.parametrize("kind", ["longer", "exact"])
@pytest.mark.parametrize("batch", [4, slice(5, 8), [9, 2, 4], [3, 3, 3], slice(9, 1, -3), MASK])
def test_minibatch_data_hold_the_rows_in_order(ranks, batch, kind):
    chosen = selected(X, batch)
    own = 100.0 + np.arange(len(chosen))
    rest = [-1.0] * 3 if kind == "longer" else []
    w = synk.data(np.append(own, rest), minibatch=True)
    for inputs in ((X, w), (synk.data(X), w)):
        first, second, counts = ranks.pairs(*inputs, batch=batch)
        assert_scattered(ranks, (first, counts), chosen)
        np.testing.assert_array_equal(second, own)
    second, first, _ = ranks.pairs(w, X, batch=batch, num_slices=2)
    np.testing.assert_array_equal(first, chosen)
    np.testing.assert_array_equal(second, own)


def test_minibatch_data_alone_and_without_a_batch(ranks):
    w = synk.data(np.arange(5.0), minibatch=True)
    assert_scattered(ranks, ranks.rows(w), w.data)
    # As many rows as the batch selects, in order, whichever they are.
    assert_scattered(ranks, ranks.rows(w, batch=[4, 0, 2]), w.data[:3])
    assert_scattered(ranks, ranks.rows(w, batch=slice(3, 5)), w.data[:2])
    first, second, _ = ranks.pairs(w, w, batch=3)
    np.testing.assert_array_equal(first, second)


# batch_s


def rows_of_each(ranks, batch_s):
    if isinstance(batch_s, list) and batch_s and not isinstance(batch_s[0], (int, np.integer)):
        return [selected(part, rows) for part, rows in zip(ranks.parts, batch_s)]
    return [selected(part, batch_s) for part in ranks.parts]


def assert_picked(ranks, batch_s, f=None, **kwargs):
    rows, counts = (f or ranks.own)(batch_s=batch_s, **kwargs)
    expected = rows_of_each(ranks, batch_s)
    np.testing.assert_array_equal(rows, np.concatenate(expected))
    if "num_slices" not in kwargs:
        assert counts.tolist() == (counts_of(expected) or [0])


@pytest.mark.parametrize(
    "batch_s",
    [None, slice(2, 5), slice(None, None, -2), slice(4, 4), [9, 0, 0], (1, 2), range(3, -2, -1), []]
    + [[np.int64(3), np.int64(1)], np.array([5, -1], "int8")],
    ids=repr,
)
@pytest.mark.parametrize("slices", [{}, {"num_slices": 3}], ids=["whole", "sliced"])
def test_one_selection_for_all_ranks(own, batch_s, slices):
    assert_picked(own, batch_s, **slices)


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: slice(rank, 2 * rank + 1),
        lambda rank: slice(None, None, -rank - 1),
        lambda rank: [rank] * (rank + 1),
        lambda rank: [] if rank == 0 else [-rank, 1],
        lambda rank: [3] if rank == 0 else [],
        lambda rank: np.array([rank, 9 - rank], "int32"),
        lambda rank: slice(0, 3) if rank % 2 else [4, 5, 4],
        lambda rank: np.arange(10) % (rank + 2) == 0,
        lambda rank: range(rank, 9),
        lambda rank: [],
    ],
)
@pytest.mark.parametrize("slices", [{}, {"num_slices": 3}], ids=["whole", "sliced"])
def test_a_selection_for_each_rank(own, make, slices):
    assert_picked(own, [make(rank) for rank in range(own.n)], **slices)


def test_ranks_may_hold_unequal_numbers_of_rows(ranks):
    s, t = theano.shared(np.zeros(0)), theano.shared(np.zeros((0, 2)))
    parts = [np.arange(2.0 * rank + 1) + 100 * rank for rank in range(ranks.n)]
    put(s, parts)
    put(t, [np.stack([part, -part], axis=1) for part in parts])
    f = function([], [(s, "gather"), (t, "gather")], sliceable_shareds=[s, t])
    for call in ({}, {"num_slices": 2}, {"batch_s": [-1]}, {"batch_s": [-1, 0], "num_slices": 2}):
        rows, twice = f(**call)
        picked = call.get("batch_s", slice(None))
        expected = np.concatenate([part[picked] for part in parts])
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(twice, np.stack([expected, -expected], axis=1))
    # None of rank 0's single row is left.
    rows, _ = f(batch_s=[[] if rank == 0 else [-1] for rank in range(ranks.n)])
    np.testing.assert_array_equal(rows, [part[-1] for part in parts[1:]])
    # An average over all rows, wherever they are.
    everything = np.concatenate(parts)
    mean = function([], [s.mean(), (s**2).mean()], sliceable_shareds=[s])
    for call in ({}, {"num_slices": 2}, {"num_slices": 100}):
        np.testing.assert_allclose(
            mean(**call), [everything.mean(), (everything**2).mean()], rtol=1e-14
        )
    if ranks.n > 1:
        plain = function([], s.mean())
        np.testing.assert_allclose(plain(), np.mean([part.mean() for part in parts]), rtol=1e-14)


def test_a_sliceable_that_is_a_given_and_used_directly(own):
    x = T.dvector("x")
    f = function(
        [],
        [(x.sum(), "sum"), (own.s.sum(), "sum"), ((x * own.s).sum(), "sum")],
        givens=[(x, own.s)],
        sliceable_shareds=[own.s],
    )
    for batch_s in (None, slice(0, 2), [3, 3, 7]):
        for slices in (1, 2):
            rows = np.concatenate(rows_of_each(own, batch_s))
            np.testing.assert_allclose(
                f(batch_s=batch_s, num_slices=slices),
                [rows.sum(), rows.sum(), (rows**2).sum()],
                rtol=1e-14,
            )


def test_a_sliceable_that_is_named_twice(own):
    f = function([], (own.s, "gather"), sliceable_shareds=[own.s, own.s])
    for batch_s in (None, slice(1, 7), [5, 4, 3, 2]):
        for slices in (1, 3):
            expected = np.concatenate(rows_of_each(own, batch_s))
            np.testing.assert_array_equal(f(batch_s=batch_s, num_slices=slices), expected)


@pytest.mark.parametrize("slices", [1, 2, 7])
def test_scattered_inputs_together_with_sliceables(own, slices):
    x = T.dvector("x")
    f = function(
        [x],
        [((x * own.s).sum(), "sum"), (x, "gather"), (own.s, "gather"), (x - own.s).mean()],
        sliceable_shareds=[own.s],
    )

    def check(found, x, s):
        np.testing.assert_array_equal(found[1], x)
        np.testing.assert_array_equal(found[2], s)
        np.testing.assert_allclose(found[0], (x * s).sum(), rtol=1e-13)
        np.testing.assert_allclose(found[3], (x - s).mean(), rtol=1e-13)

    value = np.random.RandomState(1).randn(10 * own.n)
    check(f(value, num_slices=slices), value, np.concatenate(own.parts))
    three = [value[3 * rank : 3 * rank + 3] for rank in range(own.n)]
    for batch_s in (slice(2, 5), [9, 0, 0], [[rank, 1, 2] for rank in range(own.n)]):
        check(
            f(np.concatenate(three), batch_s=batch_s, num_slices=slices),
            np.concatenate(three),
            np.concatenate(rows_of_each(own, batch_s)),
        )
    # Both: `batch` selects rows of the input, and `batch_s` rows on each rank.
    picks = np.arange(3 * own.n) * 2
    check(
        f(value, batch=picks, batch_s=[-1, 4, 4], num_slices=slices),
        value[picks],
        np.concatenate(rows_of_each(own, [-1, 4, 4])),
    )


def test_sliceables_stay_as_they_are_after_calls_and_errors(own):
    def refuse(s):
        if 103 in s or (own_rank_is_alone and 3 in s):
            raise ArithmeticError("row 3")
        return s

    own_rank_is_alone = own.n == 1
    f = function([], (Call(refuse)(own.s), "gather"), sliceable_shareds=[own.s])
    for call in (
        {"batch_s": [1, 3, 5]},
        {"batch_s": slice(2, 5), "num_slices": 3},
        {"num_slices": 4},
        {},
    ):
        with pytest.raises(WorkerError, match="row 3"):
            f(**call)
        for part, expected in zip(replicas(own.s), own.parts):
            np.testing.assert_array_equal(part, expected)
        np.testing.assert_array_equal(own.s.get_value(), own.parts[own.master])
        np.testing.assert_array_equal(
            f(batch_s=slice(4, None), num_slices=2),
            np.concatenate([part[4:] for part in own.parts]),
        )


# num_slices


SLICES = [1, 2, 3, 5, 100]


def expected_of(serial, x, mode, n, master, slices):
    """Return what a call should: `serial` of every slice, reduced over slices and ranks."""
    results, counts = {}, {}
    for rank, share in enumerate(shares(x, n)):
        parts = [part for part in shares(share, slices) if len(part)]
        if parts:
            results[rank] = reduced(mode, [serial(p) for p in parts], list(map(len, parts)))
            counts[rank] = len(share)
    if mode is None:
        return results[master if master in results else min(results)]
    return reduced(mode, list(results.values()), list(counts.values()))


@pytest.mark.parametrize("rows", [1, 2, 3, 11])
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("batch", [None, "reversed"])
def test_all_modes_over_slices_and_ranks(modes, rows, slices, batch):
    ranks, f, serial = modes
    x = np.random.RandomState(rows).uniform(-2, 2, (rows, 2))
    chosen = x if batch is None else x[::-1]
    found = f(x, batch=None if batch is None else list(range(rows - 1, -1, -1)), num_slices=slices)
    assert f.output_modes == MODES + MODES[:-1]
    for position, mode in enumerate(f.output_modes):
        expected = expected_of(serial, chosen, mode, ranks.n, ranks.master, slices)
        np.testing.assert_allclose(found[position], expected, rtol=1e-13, err_msg=f"{mode}")
        assert isinstance(found[position], np.ndarray) and found[position].dtype == np.float64


@pytest.fixture(scope="module")
def modes(ranks):
    x = T.dmatrix("x")
    expression = (x**2).sum(0) + x[0]
    f = function([x], [(expression, mode) for mode in MODES + IN_C])
    return ranks, f, theano.function([x], expression, mode=MODE)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "bool"])
@pytest.mark.parametrize("slices", [1, 3])
def test_results_keep_their_dtype(ranks, dtype, slices):
    x = T.TensorType(dtype, (False,))()
    # An average of arrays: NumPy 1 computes scalars of float16 in float32.
    values = {"avg": x[0].dimshuffle("x"), "gather": x, None: x[0]}
    values.update({op: x[0] for op in OPERATIONS if op != "avg" and dtypes_of(op, [dtype])})
    f = function([x], [(value, mode) for mode, value in values.items()])
    value = np.array([1, 0, 1, 1, 0, 1], dtype)
    for batch in (None, 1, 2):
        found = dict(zip(values, f(value, batch=batch, num_slices=slices)))
        averaged = theano.config.floatX if np.dtype(dtype).kind in "biu" else dtype
        for mode, result in found.items():
            assert result.dtype == (averaged if mode == "avg" else dtype), mode
        np.testing.assert_array_equal(found["gather"], value[:batch])
        firsts = expected_of(lambda part: part[0], value[:batch], "avg", ranks.n, 0, slices)
        tolerance = 2e-3 if dtype == "float16" else 1e-6
        np.testing.assert_allclose(found["avg"], firsts, rtol=tolerance)
    if dtype == "float16":  # whose sums over slices, and over ranks, are not finite
        [average] = f(np.full(6, 6e4, dtype), num_slices=slices, output_subset=[0])
        assert average == [6e4]


def test_num_slices_may_be_any_whole_number(ranks):
    for slices in (10**12, 2**70, 2.0, np.int64(2), np.float32(2), 1.0):
        assert_scattered(ranks, (ranks.rows(X, num_slices=slices)[0], ranks.rows(X)[1]), X)


def test_shapes_that_differ_between_slices_are_refused(ranks):
    x = T.dvector("x")
    f = function([x], [x.sum(), (x, "sum")])
    with pytest.raises(WorkerError, match=r"Output 1 can't be reduced with 'sum': .*mode 'gather'"):
        f(np.zeros(3 * ranks.n), num_slices=2)
    with pytest.raises(WorkerError, match="Output 1 can't be reduced with 'sum'"):
        f(np.zeros(3 * ranks.n), num_slices=2, output_subset=[1])
    np.testing.assert_array_equal(f(np.ones(2 * ranks.n))[1], [ranks.n] * 2)


def test_slices_that_are_gathered_agree_beyond_axis_0(ranks):
    x = T.dvector("x")
    f = function([x], (T.outer(x, x), "gather"))
    with pytest.raises(WorkerError, match=r"Output 0 can't be gathered: .*\[.1, 1., .2, 2.\]"):
        f(np.ones(3 * ranks.n), num_slices=2)
    assert f(np.ones(4 * ranks.n), num_slices=2).shape == (4 * ranks.n, 2)


def test_results_that_are_no_tensors(ranks):
    x = T.dmatrix("x")
    f = function([x], (theano.sparse.csr_from_dense(x), None))
    value = np.arange(16.0 * ranks.n).reshape(-1, 2)
    own = shares(value, ranks.n)[ranks.master]
    for slices, rows in ((1, own), (2, own[4:])):
        np.testing.assert_array_equal(f(value, num_slices=slices).toarray(), rows)


def test_results_are_the_callers_own(ranks):
    x, s = T.dvector("x"), theano.shared(np.arange(6.0))
    f = function([x], [(x, None), (s, None), (x, "gather"), (x, None)])
    d, array = synk.data(np.arange(6.0)), np.arange(6.0)
    calls = {}, {"num_slices": 2}, {"batch": 1}, {"batch": [0]}
    for given, call in itertools.product((d, array), calls):
        found = f(given, **call)
        kept = [part.copy() for part in found]
        f(np.full(6, 7.0), **call)
        for part, before in zip(found, kept):
            np.testing.assert_array_equal(part, before)
            part[:] = -1
        assert d.data.tolist() == array.tolist() == list(range(6))
        assert all((part == np.arange(6.0)).all() for part in replicas(s))
        for a, b in zip(f(given, **call), kept):
            np.testing.assert_array_equal(a, b)


# output_subset


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("mode", ["FAST_COMPILE", "FAST_RUN"])
def test_updates_are_made_whatever_outputs_are_asked_for(ranks, slices, mode):
    x, s = T.dvector("x"), theano.shared(0.0)
    f = synk.function([x], [(x.sum(), "sum"), x.mean()], updates=[(s, x.sum(), "sum")], mode=mode)
    for number, subset in enumerate(([], [1], [0, 1], None)):
        x = np.arange(8.0) + number
        f(x, output_subset=subset, num_slices=slices)
        assert replicas(s) == [part.sum() for part in shares(x, ranks.n)]


def test_output_subset_with_sliceables_and_a_single_output(own):
    f = function([], [(own.s.sum(), "sum"), (own.s, "gather")], sliceable_shareds=[own.s])
    [rows] = f(batch_s=[3, 1], output_subset=[1], num_slices=2)
    np.testing.assert_array_equal(rows, np.concatenate([part[[3, 1]] for part in own.parts]))
    x = T.dvector("x")
    single = function([x], (x.sum(), "sum"))
    assert single(np.ones(4), output_subset=[0]) == 4
    assert single(np.ones(4), output_subset=[]) == []


@pytest.mark.skipif(not theano.config.cxx, reason="Python's virtual machine computes all outputs")
def test_outputs_that_are_not_asked_for_are_not_computed(ranks):
    def refuse(x):
        raise ArithmeticError("computed")

    x = T.dvector("x")
    f = synk.function([x], [(x.sum(), "sum"), (Call(refuse)(x), "gather")])
    assert f(np.ones(4), output_subset=[0]) == [4]
    assert f(np.ones(4), output_subset=[0], num_slices=2) == [4]
    with pytest.raises(WorkerError, match="computed"):
        f(np.ones(4), output_subset=[1])


# Where the rows are while a function runs.


def address(x):
    return [x.__array_interface__["data"][0]]


def is_in_shared_memory(x):
    return [is_in_a_segment(x)]


def of_all_ranks(what, x):
    return (Call(what, T.lvector)(x), "gather")


@pytest.mark.one_machine
def test_consecutive_rows_are_used_where_they_are(ranks):
    x = T.dmatrix("x")
    f = function([x], [of_all_ranks(address, x), of_all_ranks(is_in_shared_memory, x)])
    d = synk.data(np.random.randn(40, 3))
    begin = d.data.ctypes.data
    for batch, first, step in (
        (None, 0, 1),
        (20, 0, 1),
        (slice(8, 32), 8, 1),
        (slice(0, 40, 2), 0, 2),
    ):
        rows = len(selected(d.data, batch))
        addresses, shared = f(d, batch=batch)
        assert shared.tolist() == [ranks.n > 1] * ranks.n  # one rank alone shares no memory
        share = rows * ranks.master // ranks.n
        assert addresses[ranks.master] == begin + 24 * (first + step * share)
    addresses, shared = f(d, batch=list(range(8, 32)))
    assert shared.tolist() == [0] * ranks.n
