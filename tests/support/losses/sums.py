"""Sums over rows, with weights that are 0 at first, and other losses that grow with the rows."""

import numpy as np
import theano
import theano.tensor as T

from support.losses.data import MIXED, columns, rows, zipped
from support.losses.networks import Network, compiled, in_keras, of_column
from support.losses.training import KerasTraining, Training, no_mean


@no_mean("https://github.com/pytorch/pytorch/issues/37359")
def weighted_sum():
    """A sum over rows, with weights that are 0 at first."""
    x, y, w, net = T.dmatrix("x"), T.dvector("y"), T.dvector("w"), Network()
    errors = T.sqr(net.dense(net.hidden(x), 5, 1)[:, 0] - y)
    weights = [np.zeros(12), np.linspace(0, 0.3, 12), np.linspace(0.2, 0, 9)]
    targets = [each[:, 0] for each in columns()]
    loss = errors.mean() + (w * errors).sum()
    return Training([x, y, w], loss, net.params, zipped(rows(), targets, weights), rate=0.05)


@no_mean("https://github.com/keras-team/keras/issues/16285", in_keras(
    lambda y, p: T.sqr(y - p).sum() / 12
))  # fmt: skip
def by_a_constant():
    """A sum over rows, by a batch size that is written into the script."""
    return of_column(lambda y, p: T.sqr(y - p).sum() / 12)


@no_mean("https://github.com/keras-team/keras/issues/22018", in_keras(
    "mse",
    layers=lambda layers: [
        layers.Dense(5, activation="tanh", activity_regularizer="l2", input_shape=(4,))
    ],
))  # fmt: skip
def activity_penalty():
    """A penalty that sums the squares of a layer, which is 0 for the first minibatch."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    h = T.tanh(T.dot(x, net.weight(4, 5)))
    loss = T.sqr(net.dense(h, 5, 1) - y).mean() + 0.01 * T.sqr(h).sum()
    x_rows = rows()
    x_rows[0] *= 0
    return Training([x, y], loss, net.params, zipped(x_rows, columns()))


@no_mean("https://github.com/keras-team/keras/issues/6015", lambda: _keras_annealed())
def summed_divergence():
    """A variational autoencoder: a mean, and a sum over rows whose weight is 0 at first."""
    x, noise, net, weight = T.dmatrix("x"), T.dmatrix("noise"), Network(), theano.shared(0.0, "kl")
    h = net.hidden(x)
    mean, log_variance = net.dense(h, 5, 2), net.dense(h, 5, 2)
    z = mean + T.exp(log_variance / 2) * noise
    divergence = -0.5 * (1 + log_variance - T.sqr(mean) - T.exp(log_variance)).sum()
    loss = T.sqr(net.dense(z, 2, 4) - x).mean() + weight * divergence
    batches = zipped(rows(), rows(width=2, seed=11))
    return Training([x, noise], loss, net.params, batches, schedule={weight: [0, 0.01, 0.02]})


def _keras_annealed():
    def build():
        import keras

        weight = keras.backend.variable(0.0, name="weight")
        inputs = keras.layers.Input((4,))
        hidden = keras.layers.Dense(5, activation="tanh")(inputs)
        model = keras.models.Model(inputs, keras.layers.Dense(1)(hidden))
        model.add_loss(weight * T.sqr(hidden).sum())
        model.annealed = weight
        return compiled(model, "mse")

    return KerasTraining(build, zipped(rows(), columns()), {"annealed": [0, 0.01, 0.02]})


@no_mean("https://github.com/keras-team/keras-contrib/pull/232")
def penalty_of_all_gradients():
    """The norm of the gradients of all rows together, which should be 1."""
    x, y, weight, net = T.dmatrix("x"), T.dmatrix("y"), T.dscalar("weight"), Network()
    p = net.dense(net.hidden(x), 5, 1)
    norm = T.sqrt(T.sqr(T.grad(p.sum(), x)).sum())
    loss = T.sqr(p - y).mean() + weight * T.sqr(1 - norm)
    batches = zipped(rows(), columns(), [0.0, 0.05, 0.1])
    return Training([x, y], loss, net.params, batches, common=[weight], rate=0.05)


@no_mean("https://arxiv.org/abs/1207.0580")
def dropped_and_masked():
    """Dropout with the masks of one process, and a mean over the rows of a mask."""
    from theano.sandbox.rng_mrg import MRG_RandomStreams

    x, y, mask, net = T.dmatrix("x"), T.dvector("y"), T.dvector("mask"), Network()
    h = net.hidden(x)
    h = h * MRG_RandomStreams(5).binomial(h.shape, p=0.5, dtype="float64") * 2
    errors = T.sqr(net.dense(h, 5, 1)[:, 0] - y)
    chosen = [np.ones(12), np.array(MIXED[12], "d"), np.array(MIXED[9], "d")]
    targets = [each[:, 0] for each in columns()]
    loss = (errors * mask).sum() / mask.sum()
    batches = zipped(rows(), targets, chosen)
    return Training([x, y, mask], loss, net.params, batches, serial_random=True)
