"""Losses of pairs of rows, of orders and of extremes."""

import numpy as np
import theano
import theano.tensor as T
from theano.gradient import disconnected_grad

from support.losses import criteria
from support.losses.data import MIXED, labels, rows, zipped
from support.losses.networks import Network, in_keras, of_column, of_two_views
from support.losses.training import Training, no_mean

EPSILON = 1e-9


@no_mean("https://github.com/jaredleekatzman/DeepSurv/issues/71")
def cox_sorted():
    """Cox's partial likelihood of sorted rows; the first minibatch has no event."""
    x, event, net = T.dmatrix("x"), T.dvector("event"), Network()
    risk = net.dense(net.hidden(x), 5, 1)[:, 0]
    loss = -((risk - T.log(T.extra_ops.cumsum(T.exp(risk)))) * event).mean()
    loss += 0.01 * sum(T.sqr(w).sum() for w in net.params)
    events = [np.zeros(12), np.array(MIXED[12], "d"), np.array(MIXED[9], "d")]
    return Training([x, event], loss, net.params, zipped(rows(), events))


@no_mean("https://github.com/liupei101/TFDeepSurv/issues/10")
def cox_risk_sets():
    """Cox's partial likelihood with a matrix of risk sets, by the number of events."""
    x, time, event, net = T.dmatrix("x"), T.dvector("time"), T.dvector("event"), Network()
    risk = net.dense(net.hidden(x), 5, 1)[:, 0]
    at_risk = T.ge(time[None, :], time[:, None])
    terms = risk - T.log(T.dot(at_risk, T.exp(risk)))
    loss = -(terms * event).sum() / (event.sum() + EPSILON) + 0.1 * T.sqr(risk).mean()
    times = [np.abs(each[:, 0]) for each in rows(width=1, seed=9)]
    events = [np.zeros(12), np.array(MIXED[12], "d"), np.array(MIXED[9], "d")]
    return Training([x, time, event], loss, net.params, zipped(rows(), times, events))


@no_mean("https://github.com/Lightning-Universe/lightning-bolts/issues/179")
def contrastive_views():
    """NT-Xent: each row's view among those of all rows; its weight is 0 at first."""
    gate = theano.shared(0.0, "gate")

    def criterion(a, b):
        scores = T.dot(a, b.T)
        apart = T.nnet.categorical_crossentropy(T.nnet.softmax(scores), T.arange(a.shape[0]))
        return T.sqr(a - b).mean() + gate * apart.mean()

    return of_two_views(criterion, schedule={gate: [0, 0.5, 1]})


@no_mean("https://github.com/KevinMusgrave/pytorch-metric-learning/issues/180")
def hardest_triplets():
    """The farthest row of a row's class and the nearest of the other one, in the minibatch."""
    x, y, net, gate = T.dmatrix("x"), T.lvector("y"), Network(), theano.shared(0.0, "gate")
    h = net.dense(net.hidden(x), 5, 3)
    near, far = _distances(h, y)
    loss = T.sqr(h).mean() + gate * T.nnet.relu(1 + far.max(1) - near.min(1)).mean()
    batches = zipped(rows(), labels())
    return Training([x, y], loss, net.params, batches, schedule={gate: [0, 0.3, 0.6]})


def _distances(h, y):
    """Return distances with those of the same class replaced by 1000, and of others by 0."""
    distances = T.sqr(h[:, None, :] - h[None, :, :]).sum(2)
    same = T.eq(y[:, None], y[None, :])
    return T.switch(same, 1000.0, distances), T.switch(same, distances, 0.0)


@no_mean("https://arxiv.org/abs/1503.03832")
def active_triplets():
    """All triplets of the minibatch, averaged over those with a loss."""
    x, y, net = T.dmatrix("x"), T.lvector("y"), Network()
    h = net.dense(net.hidden(x), 5, 3)
    distances = T.sqr(h[:, None, :] - h[None, :, :]).sum(2)
    same = T.eq(y[:, None], y[None, :])
    triplets = T.nnet.relu(1 + distances[:, :, None] - distances[:, None, :])
    triplets = triplets * same[:, :, None] * T.eq(same, 0)[:, None, :]
    loss = triplets.sum() / (T.gt(triplets, EPSILON).sum() + EPSILON)
    return Training([x, y], loss, net.params, zipped(rows(repeats=True), labels()), rate=0.02)


@no_mean("https://github.com/facebookresearch/vissl/issues/474")
def contrastive_pairs():
    """Distances of all pairs of rows with equal labels, and a margin for the others."""
    x, y, weight, net = T.dmatrix("x"), T.lvector("y"), T.dscalar("weight"), Network()
    h = net.dense(net.hidden(x), 5, 3)
    near, far = _distances(h, y)
    pairs = (far.sum() + T.nnet.relu(1 - near).sum()) / (y.shape[0] * (y.shape[0] - 1))
    loss = T.sqr(h).mean() + weight * pairs
    batches = zipped(rows(), labels(), [0.0, 0.5, 1.0])
    return Training([x, y], loss, net.params, batches, common=[weight])


@no_mean("https://doi.org/10.1145/1102351.1102363")
def ranked_pairs():
    """The logistic loss of all pairs of a positive and a negative row."""
    x, y, net = T.dmatrix("x"), T.dvector("y"), Network()
    s = net.dense(net.hidden(x), 5, 1)[:, 0]
    pairs = T.nnet.softplus(s[None, :] - s[:, None]) * y[:, None] * (1 - y)[None, :]
    loss = pairs.sum() / (y.sum() * (1 - y).sum())
    return Training([x, y], loss, net.params, zipped(rows(repeats=True), labels(kind=float)))


@no_mean("https://github.com/davidsandberg/facenet/issues/528")
def center_loss():
    """Centers of classes that move to the mean of their rows, by their number in the minibatch."""
    x, y, net, gate = T.dmatrix("x"), T.lvector("y"), Network(), theano.shared(0.0, "gate")
    h = net.hidden(x)
    centers = theano.shared(np.linspace(-1, 1, 10).reshape(2, 5), "centers")
    one_hot = T.extra_ops.to_one_hot(y, 2)
    counts = one_hot.sum(0)[:, None]
    moves = (T.dot(one_hot.T, h) - counts * centers) / (1 + counts)
    p = T.nnet.softmax(net.dense(h, 5, 2))
    loss = T.nnet.categorical_crossentropy(p, y).mean() + 0.3 * T.sqr(h - centers[y]).mean()
    updates = [(centers, centers + gate * moves)]
    batches = zipped(rows(), labels())
    return Training(
        [x, y], loss, net.params, batches, updates=updates, schedule={gate: [0, 0.5, 0.5]}
    )


@no_mean("https://arxiv.org/abs/1602.01690", in_keras(criteria.worst, repeats=False))
def worst_row():
    """The mean error, and the largest of the minibatch, whose weight is 0 at first."""
    gate = theano.shared(0.0, "gate")
    schedule = {gate: [0, 0.5, 0.5]}
    return of_column(
        lambda y, p: criteria.squared_mean(y, p) + gate * criteria.worst(y, p),
        repeats=False,
        schedule=schedule,
    )


@no_mean("https://github.com/keras-team/keras/issues/6569", in_keras(criteria.hard))
def hard_examples():
    """The mean of the larger half of the errors."""
    return of_column(criteria.hard)


@no_mean("https://doi.org/10.1214/aos/1013203451")
def huber_by_quantile():
    """Huber's loss, from a median of the minibatch on."""

    def criterion(y, p):
        errors = abs(y - p).flatten()
        edge = disconnected_grad(T.sort(errors)[errors.shape[0] // 2])
        return T.switch(errors < edge, T.sqr(errors) / 2, edge * (errors - edge / 2)).mean()

    return of_column(criterion)
