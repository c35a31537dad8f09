"""`parallel` on Theano: options of operations that PyTensor does not have."""

import numpy as np
import pytest
from support import compiling, host_library
from support.layouts import Layout

if host_library.ON_PYTENSOR:
    pytest.skip("it is about Theano", allow_module_level=True)

import theano
import theano.tensor as T
from theano.compile.ops import Rebroadcast
from theano.tensor.nnet import conv2d
from theano.tensor.raw_random import RandomFunction
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos.porting import ParallelFunction

LAYOUTS = [Layout(2), Layout(3, master=1)]
ROWS = 7


def reason_of(name):
    """Return why a function is not divided."""
    return next(each.reason for each in synk.parallel_report().functions if each.name == name)


def permuted(state, size):
    return state.permutation(int(size[0]))


def drawn_by_the_script(n):
    state = theano.shared(np.random.RandomState(3), "state")
    return RandomFunction(permuted, T.lvector)(state, T.stack([n]))[1]


DRAWS = {
    "without replacement": lambda n: RandomStreams(3).choice((n,), a=ROWS, replace=False),
    "perhaps without": lambda n: RandomStreams(3).choice((n,), a=ROWS, replace=n > 10),
    "by a function of the script": drawn_by_the_script,
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_that_depend_on_one_another_are_not_divided(ranks, name):
    """Each rank would draw some numbers that another rank has drawn."""
    x = T.dmatrix("x")
    with compiling.quickly(), synk.parallel():
        f = theano.function([x], DRAWS[name](x.shape[0]), name=name)
    assert type(f) is not ParallelFunction and "not for each row" in reason_of(name)
    assert sorted(f(np.zeros((ROWS, 2)))) == [*range(ROWS)]


def test_draws_with_replacement_are_divided(ranks):
    x = T.dmatrix("x")
    with compiling.quickly(), synk.parallel():
        f = theano.function([x], RandomStreams(3).choice((x.shape[0],), a=3))
    assert type(f) is ParallelFunction and set(f(np.zeros((50, 2)))) == {0, 1, 2}


IMAGES = {
    "images": lambda x, images: images,
    "reshaped rows": lambda x, images: x.reshape((-1, 1, 4, 4)),
}


@pytest.mark.slow("compiles convolutions")
@pytest.mark.parametrize("name", IMAGES)
def test_a_convolution_says_how_many_images_a_call_must_have(ranks, name):
    """Theano takes the number that it was given for that of all images."""
    rng = np.random.RandomState(0)
    x, images, filters = T.dmatrix("x"), T.dtensor4("images"), theano.shared(rng.randn(2, 1, 3, 3))
    outputs = conv2d(IMAGES[name](x, images), filters, (ROWS, 1, 4, 4))
    outputs = [outputs.mean(), outputs.shape, T.grad(T.sqr(outputs).mean(), filters)]
    serial = theano.function([x, images], outputs, mode="FAST_RUN", on_unused_input="ignore")
    with synk.parallel():
        f = theano.function([x, images], outputs, mode="FAST_RUN", on_unused_input="ignore")
    assert type(f) is ParallelFunction
    for n_rows in (ROWS, ROWS + 2):
        values = [rng.randn(n_rows, 16), rng.randn(n_rows, 1, 4, 4)]
        for result, expected in zip(f(*values), serial(*values)):
            np.testing.assert_allclose(result, expected, rtol=1e-9)
        assert (f._theano is None) == (n_rows == ROWS)


@pytest.mark.slow("compiles convolutions")
def test_a_number_of_images_is_wrong_on_ranks(ranks, extensions):
    """Each has fewer, so means over images are too small: told by function, right in a step."""
    images, filters = T.dtensor4("images"), theano.shared(np.ones((2, 1, 3, 3)))
    loss = T.sqr(conv2d(images, filters, (12, 1, 4, 4))).mean()
    values, options = np.ones((12, 1, 4, 4)), {"mode": "FAST_RUN"}
    f = synk.function([images], (loss, "avg"), check="first", **options)
    with pytest.warns(synk.PortingWarning, match="is not what serial Theano computes"):
        f(values)
    rule = extensions.update_rules.sgd
    step = extensions.train.make_train_step([images], loss, [filters], rule, 0.1, options=options)
    assert step(values) == pytest.approx(81)
    with pytest.raises(ValueError, match="12 rows"):
        step(values[:10])


def test_row_numbers_of_which_there_must_be_one_are_not_divided(ranks):
    x = T.dmatrix("x")
    with compiling.quickly(), synk.parallel():
        f = theano.function([x], x[Rebroadcast((0, True))(T.arange(x.shape[0]))])
    with pytest.raises(ValueError, match="Dimension 0"):
        f(np.ones((ranks.n, 2)))
