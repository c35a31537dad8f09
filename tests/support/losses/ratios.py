"""Ratios of sums over the minibatch."""

import theano.tensor as T

from support.losses import criteria
from support.losses.data import columns, rows, zipped
from support.losses.networks import Network, in_keras, of_column
from support.losses.training import Training, no_mean


@no_mean(
    "https://github.com/qubvel-org/segmentation_models.pytorch/issues/712",
    in_keras(criteria.dice),
)
def dice():
    """One minus the Dice coefficient of all rows together."""
    return of_column(criteria.dice)


@no_mean("https://arxiv.org/abs/1706.05721", in_keras(criteria.tversky))
def tversky():
    """One minus the Tversky index of all rows together."""
    return of_column(criteria.tversky)


@no_mean("https://github.com/keras-team/keras/issues/5794", in_keras(criteria.f1))
def f1_of_batch():
    """One minus a soft F1: precision and recall of the minibatch."""
    return of_column(criteria.f1)


@no_mean(
    "https://github.com/keras-team/keras/issues/4592",
    in_keras("mse", metrics=[lambda y, p: 1 - criteria.f1(y, p)]),
)
def f1_as_output():
    """A mean loss, beside which the F1 of the minibatch is returned."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    p = T.nnet.sigmoid(net.dense(net.hidden(x), 5, 1))
    batches = zipped(rows(repeats=True), columns(repeats=True))
    outputs = [(1 - criteria.f1(y, p), "avg")]
    return Training([x, y], criteria.squared(y, p).mean(), net.params, batches, outputs=outputs)


@no_mean("https://github.com/keras-team/keras/issues/7249", in_keras(criteria.r2))
def r_squared():
    """Squared errors by the variance of the targets in the minibatch."""
    return of_column(criteria.r2)


@no_mean(
    "https://github.com/tensorflow/tensorflow/issues/37495",
    in_keras(criteria.uncorrelated),
)
def pearson_correlation():
    """One minus the correlation of targets and outputs."""
    return of_column(criteria.uncorrelated)


@no_mean("https://arxiv.org/abs/2003.10724", in_keras(criteria.discordance))
def concordance():
    """One minus Lin's concordance coefficient."""
    return of_column(criteria.discordance)


@no_mean("https://github.com/keras-team/keras/issues/7947", in_keras(criteria.root))
def root_of_mean():
    """The square root of the mean squared error."""
    return of_column(criteria.root)


@no_mean("https://arxiv.org/abs/1811.02508", in_keras(criteria.noise))
def signal_to_noise():
    """The logarithm of the noise by the signal, each a mean over the minibatch."""
    return of_column(criteria.noise)
