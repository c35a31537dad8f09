"""Random numbers of serial Theano on ranks: each draws those of all rows, and takes its own."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import MODE
from support.layouts import Layout
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.extensions import train, update_rules

LAYOUTS = [Layout(2), Layout(3, master=1)]
GENERATORS = pytest.mark.parametrize("generator", [MRG_RandomStreams, RandomStreams])
RANDOM = np.random.RandomState(0)
X = RANDOM.randn(23, 5)
Y = RANDOM.randn(23)


def network(generator):
    """Return inputs, parameters and the loss of a network with two dropout layers."""
    start, streams = np.random.RandomState(1), generator(2)
    x, y = T.dmatrix("x"), T.dvector("y")
    w = theano.shared(start.randn(5, 6), "w")
    v = theano.shared(start.randn(6), "v")
    first = x * streams.binomial(x.shape, p=0.8, dtype="float64")
    hidden = T.tanh(T.dot(first, w))
    kept = streams.binomial((hidden.shape[0], 6), p=0.5, dtype="float64")
    weights_kept = streams.binomial((5, 6), p=0.9, dtype="float64")  # of no rows: equal for all
    loss = ((T.dot(T.tanh(T.dot(first, w * weights_kept)) * kept, v) - y) ** 2).mean()
    return [x, y], [w, v], loss


@GENERATORS
def test_a_network_with_dropout_learns_as_in_serial_theano(ranks, generator):
    (inputs, params, loss), (own, own_params, own_loss) = network(generator), network(generator)
    rules = update_rules.adam(own_loss, own_params, learning_rate=0.1)
    serial = theano.function(own, own_loss, updates=rules, mode=MODE)
    parallel = train.make_train_step(
        inputs,
        loss,
        params,
        update_rules.adam,
        learning_rate=0.1,
        options={"serial_random": True, "mode": MODE},
    )
    for n in (8, 23, 1, 2, 7):  # with 1 or 2 rows some ranks have none
        rows = np.arange(23)[::-1][:n]
        expected = serial(X[rows], Y[rows])
        np.testing.assert_allclose(parallel(X, Y, batch=rows), expected, rtol=1e-10)
        for one, other in zip(params, own_params):
            for values in synk.gather([one]):
                np.testing.assert_allclose(values, other.get_value(), rtol=1e-8)
    states = [v for v in parallel.get_shared() if v.name is None and v not in params]
    assert parallel.update_modes == ["avg"] * len(parallel.update_modes)
    assert len(states) >= 3
    with pytest.raises(ValueError, match=r"has serial_random: serial .* draws"):
        parallel(X, Y, num_slices=2)


@GENERATORS
@pytest.mark.usefixtures("compiled_if_thorough")
def test_the_numbers_themselves(ranks, generator):
    x, p = T.dmatrix("x"), T.dscalar("p")

    def outputs(streams):
        uniform = streams.uniform((x.shape[0], x.shape[1] * 2))
        kept = streams.binomial((x * 2).shape, p=p)
        zeros = T.zeros((x.shape[0], 3))
        flat = x.reshape((x.shape[0], x.shape[1], 1)).flatten(2)
        return [
            uniform,
            kept,
            uniform + 1,
            streams.uniform(zeros.shape),
            streams.uniform(flat.shape),
            streams.uniform((flat.shape[0], x.shape[1])),
            streams.uniform((x.shape[0], x.reshape((x.shape[0], x.shape[1], 1)).shape[1])),
            streams.uniform((x.shape[1],)),
            streams.uniform((4,)),
            streams.uniform(()),
        ]

    f = synk.function(
        [x],
        [(v, "gather") if v.ndim == 2 else v for v in outputs(generator(3))],
        bcast_inputs=[p],
        serial_random=True,
    )
    serial = theano.function([x, p], outputs(generator(3)))
    for n in (5, 2, 23, 0, 4):
        for found, expected in zip(f(X[:n], 0.3), serial(X[:n], 0.3)):
            np.testing.assert_allclose(found, expected)
    assert all(map(np.array_equal, f.as_theano(X, 0.3), serial(X, 0.3)))


@GENERATORS
def test_ranks_without_rows_draw_the_numbers_of_no_rows(ranks, generator):
    x = T.dmatrix("x")
    noisy, own = (x + generator(3).uniform((5,)) for _ in range(2))
    f = synk.function([x], (noisy, "gather"), serial_random=True, mode=MODE)
    serial = theano.function([x], own, mode=MODE)
    for n in (5, 1, 4):
        np.testing.assert_allclose(f(X[:n]), serial(X[:n]))


@pytest.mark.usefixtures("compiled_if_thorough")
def test_givens_and_default_updates(ranks):
    def parts():
        x, d = T.dmatrix("x"), T.dmatrix("d")
        mask = MRG_RandomStreams(5).uniform(d.shape)
        total = theano.shared(0.0, "total")
        total.default_update = total + synk.ops.all_reduce(mask.sum(), "sum")
        return x, d, [mask, (d * mask).sum(axis=1) + total], total

    x, d, (mask, sums), total = parts()
    f = synk.function(
        [x], [(mask, "gather"), (sums, "gather")], givens={d: 2 * x}, serial_random=True
    )
    x, d, own, own_total = parts()
    serial = theano.function([x], own, givens={d: 2 * x})
    for n in (6, 3):
        for found, expected in zip(f(X[:n]), serial(X[:n])):
            np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(total.get_value(), own_total.get_value())


def test_a_checkpoint_keeps_the_states_equal(ranks, tmp_path):
    x = T.dvector("x")
    f = synk.function(
        [x], (RandomStreams(4).uniform(x.shape), "gather"), serial_random=True, mode=MODE
    )
    f(X[:, 0])
    synk.save(tmp_path / "run.npz", f)
    expected = f(X[:, 0])
    synk.load(tmp_path / "run.npz", f)
    assert np.array_equal(f(X[:, 0]), expected)


def test_what_can_not_be_drawn_so_is_refused(ranks):
    x = T.dmatrix("x")
    mrg, numpys = MRG_RandomStreams(1), RandomStreams(1)
    outputs = {
        "draws numbers of size": mrg.normal(x.shape),
        "Axis 0 of their size is x.shape[0]".lower(): mrg.uniform((x.shape[1], x.shape[0])),
        "no other axis depends on it": mrg.uniform((2 * x.shape[0],)),
        "no other axis depends on it. (normal()": mrg.uniform((4, x.T.shape[1])),
        "depends on it. (normal": mrg.uniform((T.zeros((x.shape[0] + 1, 2)).shape[0] + 1,)),
        "the parameters of": numpys.binomial(x.shape, p=1.0 / x.shape[0]),
        "depend on the rows of an input": numpys.binomial(x.shape, p=T.nnet.sigmoid(x)),
        "drawn inside of": theano.scan(lambda row: row * mrg.uniform(row.shape), sequences=[x])[0],
    }
    for phrase, output in outputs.items():
        with pytest.raises(ValueError) as caught:
            synk.function([x], (output, "gather"), serial_random=True)
        assert phrase in str(caught.value).lower() or phrase in str(caught.value)
    size = T.lvector("size")
    with pytest.raises(ValueError, match="draws numbers of size size"):
        synk.function([size], mrg.uniform(size, ndim=1), serial_random=True)
    f = synk.function(
        [x], mrg.uniform(x.reshape((-1, 1)).shape), serial_random=True, mode="FAST_COMPILE"
    )
    with pytest.raises(synk.WorkerError, match="Axis 0 of the size must be that of the rows"):
        f(X)


def test_a_length_that_is_that_of_the_rows_by_chance_is_refused(ranks):
    """As of a gradient: a rank that has as many rows took some of the numbers for its own."""
    x, w, streams = T.dmatrix("x"), theano.shared(np.ones((5, 2))), RandomStreams(1)
    hidden = T.tanh(T.dot(x, w))
    gradient = 2 * T.grad(hidden.sum(), w)
    for like in (x.T, T.dot(x.T, hidden), gradient, hidden.sum(axis=0), T.dot(w.T, x.T)):
        for size in (like.shape, (like.shape[0], 3)[: like.ndim]):
            with pytest.raises(ValueError, match="draws numbers of size"):
                synk.function([x], streams.uniform(size, ndim=like.ndim), serial_random=True)
    back = streams.uniform(T.dot(x.T.T, w).shape) + hidden
    f = synk.function([x], (back, "gather"), serial_random=True, mode=MODE)
    assert f(X[:10]).shape == (10, 2)


def test_a_state_is_either_equal_or_of_each_rank(ranks):
    x = T.dvector("x")
    for one, other in ((True, False), (False, True)):
        draw = RandomStreams(1).uniform(x.shape), "gather"
        first = synk.function([x], draw, serial_random=one, mode=MODE)
        with pytest.raises(ValueError, match=f"serial_random={other}, but another function that"):
            synk.function([x], draw, serial_random=other, mode=MODE)
        assert first(X[:, 0]).shape == (23,)


@pytest.mark.usefixtures("compiled_if_thorough")
def test_the_numbers_of_rows_by_the_index_of_a_minibatch(ranks):
    x, index, data = T.dmatrix("x"), T.lscalar("index"), theano.shared(X, "data")
    masked, own = (x * MRG_RandomStreams(3).binomial(x.shape, p=0.5) for _ in range(2))
    f = synk.function(
        [index], (masked, "gather"), givens={x: data[synk.rows(index, 7)]}, serial_random=True
    )
    serial = theano.function([index], own, givens={x: data[index * 7 : (index + 1) * 7]})
    for i in (0, 2, 1):
        np.testing.assert_array_equal(f(i), serial(i))


def test_rows_on_another_axis_are_refused():
    x = T.dmatrix("x")
    masked = x * MRG_RandomStreams(3).binomial(x.shape, p=0.5)
    with pytest.raises(ValueError, match="serial_random=True draws for rows on axis 0, but axes"):
        synk.function([x], (masked, "gather"), axes={x: 1, masked: 1}, serial_random=True)
