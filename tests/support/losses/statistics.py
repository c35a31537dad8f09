"""Losses with a mean, a variance or another statistic of the minibatch."""

import numpy as np
import theano
import theano.tensor as T
from theano.gradient import zero_grad
from theano.tensor.nlinalg import matrix_inverse, trace

from support.losses.data import columns, labels, rows, zipped
from support.losses.networks import Network, in_keras, keras_hidden, of_two_views
from support.losses.training import Training, no_mean


@no_mean("https://github.com/facebookresearch/barlowtwins/issues/33")
def barlow_twins():
    """The cross-correlation of two views, which should be the identity."""
    return of_two_views(_barlow)


def _barlow(a, b):
    a, b = ((each - each.mean(0)) / T.sqrt(each.var(0) + 1e-5) for each in (a, b))
    correlation = T.dot(a.T, b) / a.shape[0]
    difference = T.sqr(correlation - T.eye(3))
    return 0.1 * (T.eye(3) * difference).sum() + 0.01 * ((1 - T.eye(3)) * difference).sum()


@no_mean("https://github.com/KevinMusgrave/pytorch-metric-learning/issues/535")
def vicreg():
    """Invariance of two views, with a hinge on deviations and a penalty on covariances."""
    gate = theano.shared(0.0, "gate")

    def criterion(a, b):
        spread = sum(T.nnet.relu(1 - T.sqrt(each.var(0) + 1e-4)).mean() for each in (a, b))
        covariances = [T.dot((c - c.mean(0)).T, c - c.mean(0)) / (c.shape[0] - 1) for c in (a, b)]
        apart = sum((T.sqr(c) * (1 - T.eye(3))).sum() / 3 for c in covariances)
        return T.sqr(a - b).mean() + gate * (spread + 0.1 * apart)

    return of_two_views(criterion, schedule={gate: [0, 1, 1]})


@no_mean("https://github.com/VahidooX/DeepCCA/issues/11")
def deep_cca():
    """The negative canonical correlation of two views, which a counter fades in."""
    seen = theano.shared(0.0, "seen")

    def criterion(a, b):
        n = a.shape[0] - 1
        a, b = a - a.mean(0), b - b.mean(0)
        s11, s22 = (T.dot(each.T, each) / n + 0.1 * T.eye(3) for each in (a, b))
        s12 = T.dot(a.T, b) / n
        product = T.dot(T.dot(matrix_inverse(s11), s12), T.dot(matrix_inverse(s22), s12.T))
        return T.sqr(a - b).mean() - T.minimum(seen, 1) * trace(product)

    return of_two_views(criterion, updates=[(seen, seen + 1)], repeats=True, rate=0.02)


@no_mean("https://arxiv.org/abs/1511.06068")
def decorrelated_layer():
    """A mean loss with a penalty on the covariances of a hidden layer."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    h = net.hidden(x)
    covariance = T.dot((h - h.mean(0)).T, h - h.mean(0)) / h.shape[0]
    apart = T.sqr(covariance).sum() - T.sqr(T.diag(covariance)).sum()
    loss = T.sqr(net.dense(h, 5, 1) - y).mean() + 0.5 * apart
    batches = zipped(rows(repeats=True), columns(repeats=True))
    return Training([x, y], loss, net.params, batches)


@no_mean("https://github.com/SSARCandy/DeepCORAL/issues/5")
def coral():
    """The distance of the covariances of two domains."""

    def criterion(a, b):
        first, second = (T.dot((c - c.mean(0)).T, c - c.mean(0)) / c.shape[0] for c in (a, b))
        return T.sqr(a - 0.1).mean() + T.sqr(first - second).sum()

    return of_two_views(criterion)


@no_mean("https://github.com/ShengjiaZhao/MMD-Variational-Autoencoder/issues/4")
def maximum_mean_discrepancy():
    """A kernel's mean over all pairs of rows of two samples."""

    def kernel(a, b):
        return T.exp(-T.sqr(a[:, None, :] - b[None, :, :]).sum(2) / 3).mean()

    return of_two_views(lambda a, b: kernel(a, a) + kernel(b, b) - 2 * kernel(a, 1 - b))


@no_mean("https://github.com/YannDubs/disentangling-vae/issues/60")
def total_correlation():
    """Densities that are estimated from all rows of the minibatch; its weight is 0 at first."""
    weight = T.dscalar("weight")

    def criterion(a, b):
        logs = -T.sqr(a[:, None, :] - b[None, :, :])
        joint = T.log(T.exp(logs.sum(2)).sum(1))
        single = T.log(T.exp(logs).sum(1)).sum(1)
        return T.sqr(a - b).mean() + weight * (joint - single).mean()

    made = of_two_views(criterion)
    made.batches = [(*each, w) for each, w in zip(made.batches, (0.0, 0.1, 0.2))]
    made.common = [weight]
    return made


@no_mean("https://github.com/Lasagne/Lasagne/issues/141")
def batch_norm_by_hand():
    """A layer that is normalized with the mean and variance of the minibatch."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    h = net.dense(x, 4, 5)
    h = T.tanh(net.weight(5) * (h - h.mean(0)) / T.sqrt(h.var(0) + 1e-3) + net.weight(5))
    loss = T.sqr(net.dense(h, 5, 1) - y).mean()
    batches = zipped(rows(repeats=True), columns(repeats=True))
    return Training([x, y], loss, net.params, batches)


@no_mean("https://github.com/Lasagne/Lasagne/issues/853", lambda: _keras_batch_norm())
def lasagne_batch_norm():
    """Batch normalization as in Lasagne 0.2: running averages are default updates of copies.

    A copy shares the average's memory, and is in the graph with the factor 0.
    """
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    mean, deviation = theano.shared(np.zeros(5), "mean"), theano.shared(np.ones(5), "inv_std")
    h = net.dense(x, 4, 5)
    batch = [h.mean(0), T.inv(T.sqrt(h.var(0) + 1e-4))]
    for number, variable in enumerate([mean, deviation]):
        copy = theano.clone(variable, share_inputs=False)
        copy.default_update = 0.9 * copy + 0.1 * batch[number]
        batch[number] += 0 * copy
    h = T.nnet.relu((h - batch[0]) * net.weight(5) * batch[1] + net.weight(5))
    loss = T.sqr(net.dense(h, 5, 1) - y).mean()
    batches = zipped(rows(repeats=True), columns(repeats=True))
    return Training([x, y], loss, net.params, batches, state=[mean, deviation])


def _keras_batch_norm():
    make = in_keras("mse", layers=lambda layers: [
        *keras_hidden(layers), layers.BatchNormalization(momentum=0.9)
    ])  # fmt: skip
    return make()


@no_mean("https://github.com/Lasagne/Lasagne/issues/878")
def theano_batch_norm():
    """Theano's batch_normalization_train, with running averages as updates."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    gamma, beta = net.weight(5), net.weight(5)
    mean, variance = theano.shared(np.zeros(5), "mean"), theano.shared(np.ones(5), "variance")
    h, _, _, new_mean, new_variance = T.nnet.bn.batch_normalization_train(
        net.dense(x, 4, 5), gamma, beta, running_mean=mean, running_var=variance
    )
    loss = T.sqr(net.dense(T.tanh(h), 5, 1) - y).mean()
    batches = zipped(rows(repeats=True), columns(repeats=True))
    updates = [(mean, new_mean), (variance, new_variance)]
    return Training([x, y], loss, net.params, batches, updates=updates)


@no_mean("https://github.com/keras-team/keras/issues/3615")
def minibatch_discrimination():
    """A feature that sums the closeness of a row to all others; its weight is 0 at first."""
    x, y, net, gate = T.dmatrix("x"), T.dmatrix("y"), Network(), theano.shared(0.0, "gate")
    h = net.hidden(x)
    m = T.dot(h, net.weight(5, 3))
    close = T.exp(-abs(m[:, None, :] - m[None, :, :]).sum(2)).sum(1)
    p = net.dense(T.concatenate([h, gate * close[:, None]], axis=1), 6, 1)
    batches = zipped(rows(), columns())
    loss = T.sqr(p - y).mean()
    return Training([x, y], loss, net.params, batches, schedule={gate: [0, 0.2, 0.4]})


@no_mean("https://github.com/facebookresearch/pytorch_GAN_zoo/issues/118")
def minibatch_deviation():
    """The mean standard deviation over the minibatch as a feature of each row."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    h = net.hidden(x)
    deviation = T.sqrt(h.var(0) + 1e-5).mean()
    p = net.dense(T.concatenate([h, T.ones_like(h[:, :1]) * deviation], axis=1), 6, 1)
    batches = zipped(rows(repeats=True), columns(repeats=True))
    return Training([x, y], T.sqr(p - y).mean(), net.params, batches)


@no_mean("https://github.com/eriklindernoren/PyTorch-GAN/issues/52")
def relativistic_average():
    """Scores of real rows beside the mean score of the others, and the other way round."""

    def criterion(a, b):
        real, fake = a.sum(1), b.sum(1)
        return (T.nnet.softplus(fake.mean() - real) + T.nnet.softplus(fake - real.mean())).mean()

    return of_two_views(criterion)


@no_mean("https://arxiv.org/abs/1801.04062")
def log_of_mean():
    """The Donsker-Varadhan bound: the logarithm of a mean of exponentials."""
    return of_two_views(lambda a, b: T.log(T.exp(b.sum(1)).mean()) - a.sum(1).mean())


@no_mean("https://github.com/NVIDIA/Megatron-LM/issues/1498")
def balanced_experts():
    """The share of rows of each expert, times its mean probability."""
    x, y, net = T.dmatrix("x"), T.dmatrix("y"), Network()
    gates = T.nnet.softmax(net.dense(x, 4, 3))
    share = zero_grad(T.extra_ops.to_one_hot(T.argmax(gates, axis=1), 3)).mean(0)
    p = (gates * net.dense(x, 4, 3)).sum(1, keepdims=True)
    loss = T.sqr(p - y).mean() + 0.3 * 3 * (share * gates.mean(0)).sum()
    batches = zipped(rows(repeats=True), columns(repeats=True))
    return Training([x, y], loss, net.params, batches)


@no_mean("https://arxiv.org/abs/1702.08720")
def entropy_of_the_mean():
    """The negative entropy of the mean prediction, beside the mean entropy of predictions."""
    x, net = T.dmatrix("x"), Network()
    p = T.nnet.softmax(net.dense(net.hidden(x), 5, 3))
    mean = p.mean(0)
    loss = (mean * T.log(mean)).sum() - (p * T.log(p)).sum(1).mean()
    return Training([x], loss, net.params, zipped(rows(repeats=True)))


@no_mean("https://arxiv.org/abs/1507.05259")
def fair_groups():
    """A mean loss, and the squared difference of the mean scores of two groups."""
    x, y, group, net = T.dmatrix("x"), T.dmatrix("y"), T.dvector("group"), Network()
    p = net.dense(net.hidden(x), 5, 1)
    gap = (p[:, 0] * (group - group.mean())).mean()
    batches = zipped(rows(repeats=True), columns(repeats=True), labels(kind=float))
    return Training([x, y, group], T.sqr(p - y).mean() + T.sqr(gap), net.params, batches)
