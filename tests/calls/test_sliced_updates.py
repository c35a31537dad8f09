"""Updates in calls with slices: every slice at the original values, applied once, on every rank."""

from collections import OrderedDict

import numpy as np
import pytest
import scipy.sparse
import theano
import theano.sparse
import theano.tensor as T
from support.expected import MODES, reduced
from support.helpers import MODE, Call, function, shares
from support.layouts import Layout
from support.replicas import put, replicas
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos import WorkerError, _host

LAYOUTS = [Layout(2), Layout(3, master=1)]


def slices_of(x, n, k):
    """Return the slices of each rank's share that are not empty."""
    return [[part for part in shares(share, k) if len(part)] for share in shares(x, n)]


def expected(update, mode, originals, x, n, k):
    """Return what the documented rule makes of one variable on each rank."""
    found = []
    for original, parts in zip(originals, slices_of(x, n, k)):
        values = [update(part, original) for part in parts]
        counts = [len(part) for part in parts]
        found.append(reduced(mode, values, counts) if parts else original)
    return found


def assert_replicas(s, values):
    found = replicas(s)
    assert len(found) == len(values)
    for rank, (a, b) in enumerate(zip(found, values)):
        np.testing.assert_allclose(a, b, rtol=1e-13, err_msg=f"rank {rank}")


@pytest.mark.parametrize("mode", [*MODES, "c_sum"])
@pytest.mark.parametrize("slices", [2, 3, 50])
def test_every_mode(ranks, mode, slices):
    s, x = theano.shared(np.zeros(2), "s"), T.dmatrix("x")
    update = (x * s).sum(0) + x[0]
    f = function([x], updates=[(s, update, mode)])
    for rows in (1, 2, 3, 11):
        originals = [np.array([1.0 + rank, -2.0]) for rank in range(ranks.n)]
        put(s, originals)
        value = np.random.RandomState(rows).randn(rows, 2)
        assert f(value, num_slices=slices) == []
        wanted = expected(
            lambda part, s: (part * s).sum(0) + part[0], mode, originals, value, ranks.n, slices
        )
        assert_replicas(s, wanted)


@pytest.mark.usefixtures("compiled_if_thorough")
def test_gradients_over_slices_are_those_without(ranks):
    w = theano.shared(np.random.RandomState(0).randn(3, 2).astype("float32"), "w")
    g, h = theano.shared(np.zeros((3, 2), "float32")), theano.shared(np.zeros((3, 2), "float32"))
    x = T.fmatrix("x")
    loss = T.tanh(x.dot(w)).sum(1)
    f = synk.function(
        [x], loss.mean(), updates=[(g, T.grad(loss.mean(), w)), (h, T.grad(loss.sum(), w), "sum")]
    )
    value = np.random.RandomState(1).randn(24, 3).astype("float32")
    whole = f(value)
    means, sums = replicas(g), replicas(h)
    assert all(np.abs(part).max() > 1e-3 for part in means)
    for batch, slices in ((None, 3), (None, 100), (list(range(24)), 4)):
        for variable in (g, h):
            variable.set_value(np.zeros((3, 2), "float32"))
        np.testing.assert_allclose(f(value, batch=batch, num_slices=slices), whole, rtol=1e-5)
        for a, b in zip(replicas(g) + replicas(h), means + sums):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("no_default", [False, True, []], ids=repr)
def test_default_updates_are_updates_too(ranks, no_default):
    x, other, s = T.dvector("x"), theano.shared(0.0, "other"), theano.shared(0.0, "s")
    # As Lasagne's batch normalization has it: a clone holds the running mean of the original.
    mean = theano.shared(10.0, "mean")
    running = theano.clone(mean, share_inputs=False)
    running.default_update = 0.5 * running + 0.5 * x.mean()
    other.default_update = other + 1
    f = function(
        [x],
        [((x - mean).sum() + 0 * running, "sum"), (other * 1, None)],
        updates=[(s, x.sum(), "sum")],
        no_default_updates=[other] if no_default == [] else no_default,
    )
    assert f.update_modes == ["sum"]
    value = np.arange(8.0 * ranks.n)
    own = shares(value, ranks.n)
    means = [10.0] * ranks.n
    for slices in (1, 4, 2, 1):
        f(value, num_slices=slices)
        if no_default is not True:
            means = [0.5 * a + 0.5 * part.mean() for a, part in zip(means, own)]
        assert_replicas(mean, means)
        assert_replicas(s, [part.sum() for part in own])
    total, last = f(value, num_slices=3)
    np.testing.assert_allclose(total, sum((part - a).sum() for a, part in zip(means, own)))
    assert last == (4 if no_default is False else 0)


def test_default_updates_alone(ranks):
    x, calls = T.dvector("x"), theano.shared(0.0, "calls")
    calls.default_update = calls + 1
    f = function([x], [(x.sum(), "sum"), (calls, "max")])
    for number, slices in enumerate((1, 4, 4, 1, 2)):
        assert f(np.ones(8 * ranks.n), num_slices=slices) == [8 * ranks.n, number]
    count = theano.shared(0, "count")
    count.default_update = count + 1
    g = function([x], [(x.sum(), "sum"), (count, "max")])
    with pytest.raises(ValueError, match="the update of count, of dtype int64, would be averaged"):
        g(np.ones(8), num_slices=2)
    assert g(np.ones(8))[1] == 0


@pytest.mark.parametrize("with_input", [False, True], ids=["alone", "with-input"])
@pytest.mark.parametrize("mode", ["avg", "sum", "max", "gather", None])
def test_with_sliceables(ranks, mode, with_input):
    d, s, x = theano.shared(np.zeros(0), "d"), theano.shared(np.zeros(1), "s"), T.dvector("x")
    rows = [np.arange(6.0) * (rank + 1) + 1 for rank in range(ranks.n)]
    put(d, rows)
    weighted = d * x if with_input else 3 * d
    total = T.unbroadcast((weighted.sum() + s.sum()).dimshuffle("x"), 0)
    f = function(
        [x] if with_input else [],
        [(weighted.sum(), "sum")],
        updates=[(s, total, mode)],
        sliceable_shareds=[d],
    )
    for pick in (None, slice(1, 5), [5, 0, 0]):
        for slices in (1, 2, 4):
            put(s, [np.array([100.0 * rank]) for rank in range(ranks.n)])
            picked = [part[slice(None) if pick is None else pick] for part in rows]
            scale = [np.arange(1.0, len(part) + 1) for part in picked]
            inputs = [np.concatenate(scale)] if with_input else []
            [found] = f(*inputs, batch_s=pick, num_slices=slices)
            products = [p * (w if with_input else 3) for p, w in zip(picked, scale)]
            assert found == sum(part.sum() for part in products)
            wanted = []
            for rank, part in enumerate(products):
                cuts = [cut for cut in shares(part, slices) if len(cut)]
                values = [np.array([cut.sum() + 100.0 * rank]) for cut in cuts]
                wanted.append(reduced(mode, values, [len(cut) for cut in cuts]))
            assert_replicas(s, wanted)
            for part, before in zip(replicas(d), rows):
                np.testing.assert_array_equal(part, before)


def test_updates_as_theano_takes_them(ranks):
    # Numbers, arrays and other variables, in a list, a tuple and an OrderedDict.
    x, other = T.dvector("x"), theano.shared(np.arange(3.0))
    a, b, c, d = (theano.shared(np.full(3, 9.0)) for _ in range(4))
    e, i = theano.shared(7.0), theano.shared(np.int64(7))
    pairs = OrderedDict([(a, np.ones(3)), (b, other), (e, 0.5)])
    f = function([x], (x.sum(), "sum"), updates=pairs)
    g = function([x], (x.sum(), "sum"), updates=((c, T.ones(3)), (d, d)))
    assert f.update_modes == ["avg"] * 3 and g.update_modes == ["avg"] * 2
    h = function([x], (x.sum(), "sum"), updates=[(i, 3, "max")])
    for slices in (1, 2):
        for each in (f, g, h):
            assert each(np.ones(8), num_slices=slices) == 8
        wanted = [(a, np.ones(3)), (b, np.arange(3.0)), (c, np.ones(3)), (d, np.full(3, 9.0))]
        for variable, value in [*wanted, (e, 0.5), (i, 3)]:
            assert_replicas(variable, [value] * ranks.n)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "int64", "uint16", "bool"])
def test_variables_keep_their_dtype(ranks, dtype):
    s = theano.shared(np.zeros(2, dtype))
    x = T.TensorType(dtype, (False,))()
    for mode in ("sum", "min", "prod", "max", None) + (("avg",) if "float" in dtype else ()):
        f = function([x], updates=[(s, x[:2], mode)])
        f(np.ones(4 * ranks.n, dtype), num_slices=2)
        assert s.get_value(borrow=True).dtype == dtype
        wanted = 2 if mode == "sum" and dtype != "bool" else 1
        assert all((part == wanted).all() and part.dtype == dtype for part in replicas(s))


def test_variables_of_fixed_length_1_stay_so(ranks):
    s = theano.shared(np.zeros((1, 3)), broadcastable=(True, False))
    x = T.dmatrix("x")
    f = function([x], updates=[(s, x.sum(0, keepdims=True), "sum")])
    use = function([x], (x + s, "gather"))
    value = np.random.RandomState(0).randn(4 * ranks.n, 3)
    f(value, num_slices=3)
    rows = [part.sum(0) for part in shares(value, ranks.n)]
    np.testing.assert_allclose(use(np.zeros((ranks.n, 3))), rows, rtol=1e-12)


@pytest.mark.parametrize("shape", [(), (1, 3)], ids=["0-d", "row"])
def test_what_can_not_be_gathered_over_slices_is_refused(ranks, shape):
    s = theano.shared(np.zeros(shape), broadcastable=tuple(n == 1 for n in shape))
    x = T.dmatrix("x")
    value = x.sum() if not shape else x.sum(0, keepdims=True)
    f = function([x], updates=[(s, value, "gather")])
    before = ranks.session.gate.sequence
    with pytest.raises(ValueError, match="gather"):
        f(np.ones((8, 3)), num_slices=2)
    assert ranks.session.gate.sequence <= before + 1  # it may have been distributed
    assert s.get_value().shape == shape
    f(np.ones((12, 3)))
    assert s.get_value().sum() == 36 / ranks.n


def test_an_error_in_a_slice_leaves_every_variable_as_it_was_on_that_rank(ranks):
    def refuse(x):
        if 3 in x:
            raise ArithmeticError("row 3")
        return x

    s, t, x = theano.shared(np.zeros(1)), theano.shared(1.0), T.dvector("x")
    f = function([x], updates=[(s, Call(refuse)(x)[:1], "sum"), (t, x.sum(), "sum")])
    bad = np.tile(np.arange(4.0), ranks.n)
    with pytest.raises(WorkerError, match="row 3"):
        f(bad, num_slices=4)
    assert_replicas(s, [np.zeros(1)] * ranks.n)
    assert_replicas(t, [1.0] * ranks.n)
    f(bad + 10, num_slices=4)
    assert_replicas(s, [np.array([46.0])] * ranks.n)
    assert_replicas(t, [46.0] * ranks.n)


def test_an_update_that_can_not_be_accumulated_leaves_every_variable_as_it_was(ranks):
    s, t, x = theano.shared(1.0, "s"), theano.shared(np.ones((2, 2)), "t"), T.dmatrix("x")
    f = function([x], updates=[(s, x.sum(), "sum"), (t, x[:, : x.shape[0]], "gather")])
    with pytest.raises(WorkerError, match=r"The update of t can't be gathered: .*beyond axis 0"):
        f(np.ones((3 * ranks.n, 3)), num_slices=2)
    g = function([x], updates=[(s, x.sum(), "sum"), (t, x, "max")])
    with pytest.raises(WorkerError, match=r"The update of t can't be reduced with 'max': .*shapes"):
        g(np.ones((3 * ranks.n, 3)), num_slices=2)
    assert_replicas(s, [1.0] * ranks.n)
    assert_replicas(t, [np.ones((2, 2))] * ranks.n)


def test_updates_of_what_is_no_tensor_are_refused_with_slices(ranks):
    x = T.dmatrix("x")
    s = theano.shared(scipy.sparse.csr_matrix(np.zeros((2, 2))), "s")
    f = function([x], updates=[(s, theano.sparse.csr_from_dense(x))])
    f(np.ones((2 * ranks.n, 2)))
    with pytest.raises(ValueError, match=r"the update of (s|Sparse\S+), .*can't be accumulated"):
        f(np.zeros((2 * ranks.n, 2)), num_slices=2)
    np.testing.assert_array_equal(s.get_value().toarray(), np.ones((2, 2)))


# Random numbers.


STREAMS = [MRG_RandomStreams, RandomStreams]


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("updated", [False, True], ids=["plain", "with-updates"])
def test_masks_differ_in_every_slice_and_rank_and_call(ranks, streams, updated):
    random = streams(seed=11)
    x, s = T.dvector("x"), theano.shared(np.zeros(1), "s")
    numbers = random.uniform((x.shape[0],), dtype="float64")
    updates = [(s, numbers * x, "gather")] if updated else None
    f = function([x], [(numbers, "gather"), (numbers * x, "gather")], updates=updates)
    serial_random = streams(seed=11)
    serial = theano.function([x], serial_random.uniform((x.shape[0],), dtype="float64"), mode=MODE)
    seen = []
    rows = 8 * ranks.n
    for slices in (1, 4, 1, 2):
        value = np.arange(1.0, rows + 1)
        drawn, masked = f(value, num_slices=slices)
        assert drawn.shape == (rows,)
        # The same numbers everywhere in the graph of one slice: outputs and updates agree.
        np.testing.assert_array_equal(masked, drawn * value)
        if updated:
            np.testing.assert_array_equal(np.concatenate(replicas(s)), masked)
        # Rank 0 draws what Theano draws, slice after slice.
        own = np.concatenate([serial(part) for part in shares(value[:8], slices)])
        np.testing.assert_array_equal(drawn[:8], own)
        seen.extend(drawn)
    assert len(set(seen)) == len(seen) == 4 * rows


@pytest.mark.parametrize("streams", STREAMS)
def test_states_that_are_updated_by_hand_move_on_in_every_slice(ranks, streams):
    random = streams(seed=3)
    x, s = T.dvector("x"), theano.shared(0.0)
    numbers = random.uniform((x.shape[0],), dtype="float64")
    f = function(
        [x],
        (numbers, "gather"),
        updates=[*(tuple(update[:2]) for update in random.updates()), (s, numbers.sum(), "sum")],
        no_default_updates=True,
    )
    drawn = np.concatenate([f(np.ones(6 * ranks.n), num_slices=3) for _ in range(2)])
    assert len(set(drawn)) == 12 * ranks.n
    assert_replicas(s, drawn[6 * ranks.n :].reshape(ranks.n, 6).sum(1))


# What is compiled.


@pytest.fixture
def compiled(monkeypatch):
    """The functions that were compiled since."""
    made, original = [], _host.library.function

    def counting(*args, **kwargs):
        made.append(kwargs.get("name"))
        return original(*args, **kwargs)

    monkeypatch.setattr(_host.library, "function", counting)
    makers, make = [], theano.compile.function_module.FunctionMaker.__init__

    def counting_too(self, *args, **kwargs):
        makers.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(theano.compile.function_module.FunctionMaker, "__init__", counting_too)
    yield made
    assert len(makers) == len(made)


def test_plain_calls_compile_nothing_and_slices_only_where_there_are_updates(ranks, compiled):
    x, s, d = T.dvector("x"), theano.shared(0.0), theano.shared(np.arange(8.0))
    without = function([x], [(x.sum(), "sum"), (x, "gather")], name="without")
    updated = function([x], (x.sum(), "sum"), updates=[(s, x.sum(), "sum")], name="updated")
    sliceable = function([], (d.sum(), "sum"), sliceable_shareds=[d], name="sliceable")
    random = MRG_RandomStreams(seed=1).uniform((x.shape[0],))
    masks = function([x], (random, "gather"), name="masks")
    assert compiled == ["without", "updated", "sliceable", "masks"]
    value = np.ones(8)
    for batch in (None, [0, 1, 2], slice(2, 6)):
        for slices in (1, 2, 2, 3, 5):
            without(value, batch=batch, num_slices=slices)
            masks(value, batch=batch, num_slices=slices)
            sliceable(batch_s=None if batch is None else [0, 1], num_slices=slices)
        without(value, output_subset=[1], num_slices=2)
        updated(value, batch=batch)
        updated(value, batch=batch, output_subset=[])
    synk.distribute()
    assert len(compiled) == 4
    updated(value, num_slices=2)
    assert compiled[4:] == ["updated"]
    for slices in (2, 3, 1, 8):
        updated(value, num_slices=slices)
        updated(value, batch=[1, 2, 3, 4], num_slices=slices, output_subset=[0])
    assert len(compiled) == 5
