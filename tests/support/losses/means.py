"""Means over rows in other words: what the ranks' average is right for."""

import numpy as np
import theano
import theano.tensor as T

from support.losses import criteria
from support.losses.data import SIZES, columns, labels, masks, rows, zipped
from support.losses.networks import (
    Network,
    compiled,
    in_keras,
    keras_hidden,
    of_column,
    of_two_views,
)
from support.losses.training import KerasTraining, Training, a_mean

EPSILON = 1e-9


@a_mean("", in_keras(lambda y, p: T.mean(criteria.squared(y, p).mean(-1)), repeats=False))
def mean_of_means():
    """The mean over rows of means over columns."""
    return of_column(lambda y, p: T.mean(criteria.squared(y, p).mean(axis=-1)), repeats=False)


@a_mean()
def sum_by_shape():
    """A sum, divided by the number of rows."""
    return of_column(lambda y, p: criteria.squared(y, p).sum() / y.shape[0], repeats=False)


@a_mean()
def sum_by_cast_shape():
    """A sum, divided by the number of rows as a float."""
    return of_column(
        lambda y, p: criteria.squared(y, p).sum() / T.cast(y.shape[0], theano.config.floatX),
        repeats=False,
    )


@a_mean()
def sum_by_size():
    """A sum over rows and columns, divided by the number of elements."""
    return of_column(lambda y, p: criteria.squared(y, p).sum() / y.size, repeats=False)


@a_mean()
def product_with_a_mean_vector():
    """A product with a vector whose elements are 1 / n."""

    def criterion(y, p):
        errors = criteria.squared(y, p)[:, 0]
        return T.dot(errors, T.ones_like(errors) / errors.shape[0])

    return of_column(criterion, repeats=False)


@a_mean("https://github.com/rstudio/keras3/issues/160", in_keras(
    lambda y, p: criteria.squared(y, p).sum() / T.ones_like(y).sum(), repeats=False
))  # fmt: skip
def counted_by_ones():
    """A sum, divided by a sum of ones."""
    return of_column(
        lambda y, p: criteria.squared(y, p).sum() / T.ones_like(y).sum(), repeats=False
    )


@a_mean("https://github.com/espnet/espnet/pull/1397")
def over_time_and_rows():
    """The mean over time, then over rows."""
    x, y, net = T.dtensor3("x"), T.dmatrix("y"), Network()
    errors = T.sqr(net.dense(net.hidden(x), 5, 1)[:, :, 0] - y)
    rng = np.random.RandomState(5)
    batches = [(rng.normal(size=(n, 5, 4)), rng.normal(size=(n, 5))) for n in SIZES]
    return Training([x, y], T.mean(errors, axis=1).mean(), net.params, batches)


@a_mean("https://github.com/keras-team/keras/issues/15323", lambda: _keras_masking())
def masked_within_rows():
    """A mean over the steps of each row's mask, then over rows."""
    x, y, mask, net = T.dtensor3("x"), T.dmatrix("y"), T.dmatrix("mask"), Network()
    errors = T.sqr(net.dense(net.hidden(x), 5, 1)[:, :, 0] - y)
    loss = ((errors * mask).sum(1) / mask.sum(1)).mean()
    rng = np.random.RandomState(5)
    batches = [(rng.normal(size=(12, 5, 4)), rng.normal(size=(12, 5)), each) for each in masks()]
    return Training([x, y, mask], loss, net.params, batches)


def _keras_masking():
    def build():
        from keras import layers
        from keras.models import Sequential

        hidden = layers.Dense(5, activation="tanh")
        model = Sequential([layers.Masking(0.0, input_shape=(5, 4)), hidden, layers.Dense(1)])
        return compiled(model, "mse")

    rng = np.random.RandomState(5)
    batches = [
        (rng.normal(size=(12, 5, 4)) * each[:, :, None], rng.normal(size=(12, 5, 1)))
        for each in masks()
    ]
    return KerasTraining(build, batches)


@a_mean("https://github.com/tensorflow/tensorflow/issues/34305", lambda: _keras_weights())
def lasagne_weighted_mean():
    """Lasagne's aggregate of errors with weights, by the number of rows."""
    import lasagne

    x, y, w, net = T.dmatrix("x"), T.dvector("y"), T.dvector("w"), Network()
    errors = lasagne.objectives.squared_error(net.dense(net.hidden(x), 5, 1)[:, 0], y)
    loss = lasagne.objectives.aggregate(errors, w, mode="mean")
    targets = [each[:, 0] for each in columns()]
    weights = [np.ones(12), np.linspace(0.1, 2, 12), np.linspace(3, 0, 9)]
    return Training([x, y, w], loss, net.params, zipped(rows(), targets, weights))


def _keras_weights():
    made = in_keras("mse", repeats=False)()
    weights = [np.ones(12), np.linspace(0.1, 2, 12), np.linspace(3, 0, 9)]
    made.batches = [(*each, w) for each, w in zip(made.batches, weights)]
    return made


@a_mean()
def constant_class_weights():
    """Cross entropy with weights of classes, by the number of rows."""
    x, y, net = T.dmatrix("x"), T.lvector("y"), Network()
    p = T.nnet.softmax(net.dense(net.hidden(x), 5, 2))
    weights = T.constant(np.array([1.0, 4.0]))[y]
    loss = (weights * T.nnet.categorical_crossentropy(p, y)).mean()
    return Training([x, y], loss, net.params, zipped(rows(), labels()))


@a_mean("https://github.com/Lasagne/Lasagne/issues/86")
def lasagne_l2():
    """A mean loss with Lasagne's penalty on the weights."""
    import lasagne
    from lasagne import layers

    x, y = T.dmatrix("x"), T.dmatrix("y")
    lasagne.random.set_rng(np.random.RandomState(0))
    hidden = layers.DenseLayer(layers.InputLayer((None, 4), x), 5, nonlinearity=T.tanh)
    last = layers.DenseLayer(hidden, 1, nonlinearity=None)
    loss = lasagne.objectives.squared_error(layers.get_output(last), y).mean()
    loss += 0.01 * lasagne.regularization.regularize_network_params(last, lasagne.regularization.l2)
    params = layers.get_all_params(last, trainable=True)
    return Training([x, y], loss, params, zipped(rows(), columns()))


@a_mean()
def l1_with_a_schedule():
    """A mean loss with a penalty on the weights, whose factor the script raises."""
    factor = theano.shared(0.0, "factor")
    made = of_column(criteria.squared_mean, repeats=False)
    made.loss += factor * sum(abs(w).sum() for w in made.params)
    made.schedule = {factor: [0, 0.01, 0.02]}
    return made


@a_mean()
def two_means():
    """Two outputs, each with its mean, and constants for both."""
    x, y, label, net = T.dmatrix("x"), T.dmatrix("y"), T.lvector("label"), Network()
    h = net.hidden(x)
    p = T.nnet.softmax(net.dense(h, 5, 2))
    loss = 0.3 * T.sqr(net.dense(h, 5, 1) - y).mean()
    loss += 0.7 * T.nnet.categorical_crossentropy(p, label).mean()
    outputs = [(T.argmax(p, axis=1), "gather"), (T.neq(T.argmax(p, axis=1), label).sum(), "sum")]
    batches = zipped(rows(), columns(), labels())
    return Training([x, y, label], loss, net.params, batches, outputs=outputs)


@a_mean("http://deeplearning.net/tutorial/logreg.html")
def likelihood_by_index():
    """The negative log-likelihood with the columns that labels select."""
    x, y, net = T.dmatrix("x"), T.lvector("y"), Network()
    p = T.nnet.softmax(net.dense(net.hidden(x), 5, 2))
    loss = -T.mean(T.log(p)[T.arange(y.shape[0]), y])
    return Training([x, y], loss, net.params, zipped(rows(), labels()))


@a_mean("https://arxiv.org/abs/1704.00028")
def penalty_of_each_gradient():
    """The norm of each row's gradient, which should be 1, averaged over rows."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    p = net.dense(net.hidden(x), 5, 1)
    norms = T.sqrt(T.sqr(T.grad(p.sum(), x)).sum(1) + EPSILON)
    loss = T.sqr(p - y).mean() + 0.1 * T.sqr(1 - norms).mean()
    return Training([x, y], loss, net.params, zipped(rows(), columns()))


@a_mean("", lambda: _keras_dropout())
def dropout():
    """A mean loss with dropout, whose masks are those of one process."""
    from theano.sandbox.rng_mrg import MRG_RandomStreams

    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    h = net.hidden(x)
    h = h * MRG_RandomStreams(5).binomial(h.shape, p=0.5, dtype="float64") * 2
    loss = T.sqr(net.dense(h, 5, 1) - y).mean()
    return Training([x, y], loss, net.params, zipped(rows(), columns()), serial_random=True)


def _keras_dropout():
    def layers(layers):
        return [*keras_hidden(layers), layers.Dropout(0.5, seed=3)]

    return in_keras("mse", repeats=False, layers=layers, serial_random=True)()


@a_mean("https://arxiv.org/abs/1312.6114")
def mean_divergence():
    """A variational autoencoder with the mean over rows of both terms."""
    x, noise, net = T.dmatrix("x"), T.dmatrix("noise"), Network()
    h = net.hidden(x)
    mean, log_variance = net.dense(h, 5, 2), net.dense(h, 5, 2)
    z = mean + T.exp(log_variance / 2) * noise
    divergence = -0.5 * (1 + log_variance - T.sqr(mean) - T.exp(log_variance)).sum(axis=-1)
    loss = T.mean(T.sqr(net.dense(z, 2, 4) - x).sum(axis=-1) + divergence)
    return Training([x, noise], loss, net.params, zipped(rows(), rows(width=2, seed=11)))


@a_mean()
def embedded_words():
    """A mean loss of embedded words, averaged over the words of a row."""
    words, y, net = T.lmatrix("words"), T.dmatrix("y"), Network()
    h = T.tanh(net.weight(7, 5)[words].mean(1))
    loss = T.sqr(net.dense(h, 5, 1) - y).mean()
    rng = np.random.RandomState(4)
    batches = zipped([rng.randint(0, 7, (n, 3)) for n in SIZES], columns())
    return Training([words, y], loss, net.params, batches)


@a_mean()
def recurrent():
    """A recurrent network by scan, with the mean over rows of its last state."""
    x, y, net = T.dtensor3("x"), T.dmatrix("y"), Network()
    loss = T.sqr(net.dense(net.states(x)[-1], 5, 1) - y).mean()
    rng = np.random.RandomState(7)
    batches = [(rng.normal(size=(n, 5, 4)), rng.normal(size=(n, 1))) for n in SIZES]
    return Training([x, y], loss, net.params, batches)


@a_mean()
def convolution():
    """Small pictures, with the mean over rows and pixels."""
    x, net = T.dtensor4("x"), Network()
    h = T.tanh(T.nnet.conv2d(x, net.weight(2, 1, 3, 3)))
    loss = T.sqr(net.dense(h.flatten(2), 8, 1) - 0.3).mean()
    rng = np.random.RandomState(7)
    batches = [(rng.normal(size=(n, 1, 4, 4)),) for n in SIZES]
    return Training([x], loss, net.params, batches, mode="FAST_RUN")


@a_mean("https://arxiv.org/abs/1607.06450")
def layer_norm():
    """Rows that are normalized by their own mean and variance."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    h = net.dense(x, 4, 5)
    h = (h - h.mean(1, keepdims=True)) / T.sqrt(h.var(1, keepdims=True) + 1e-3)
    loss = T.sqr(net.dense(T.tanh(h), 5, 1) - y).mean()
    return Training([x, y], loss, net.params, zipped(rows(), columns()))


@a_mean()
def fewer_rows_than_ranks():
    """A mean loss; later minibatches have two rows, and one."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    loss = T.sqr(net.dense(net.hidden(x), 5, 1) - y).mean()
    batches = zipped(rows((12, 2, 1)), columns((12, 2, 1)))
    return Training([x, y], loss, net.params, batches)


@a_mean()
def joined_rows():
    """Both views of each row, one below the other, in one mean."""

    def criterion(a, b):
        both = T.concatenate([a, b], axis=0)
        return T.sqr(both - 0.5).sum(1).mean()

    return of_two_views(criterion, repeats=False)


@a_mean()
def margin_of_classes():
    """The largest violation of a margin among the classes of a row, averaged over rows."""
    x, y, net = T.dmatrix("x"), T.lvector("y"), Network()
    scores = net.dense(net.hidden(x), 5, 3)
    own = scores[T.arange(y.shape[0]), y]
    one_hot = T.extra_ops.to_one_hot(y, 3)
    loss = T.maximum(0, 1 + (scores - 10 * one_hot).max(1) - own).mean()
    return Training([x, y], loss, net.params, zipped(rows(), labels()))
