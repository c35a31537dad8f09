"""Means of those rows, or steps, that count: masks and weights."""

import numpy as np
import theano.tensor as T

from support.losses import criteria
from support.losses.data import MIXED, columns, labels, masks, rows, two_class_columns, zipped
from support.losses.networks import Network, in_keras, of_column
from support.losses.training import Training, no_mean


@no_mean("https://github.com/Lasagne/Lasagne/pull/127")
def masked_sequences():
    """Errors at the steps of a mask, divided by the number of these steps."""
    x, y, mask, net = T.dtensor3("x"), T.dmatrix("y"), T.dmatrix("mask"), Network()
    p = net.dense(net.hidden(x), 5, 1)[:, :, 0]
    loss = (T.sqr(p - y) * mask).sum() / mask.sum()
    rng = np.random.RandomState(5)
    batches = [(rng.normal(size=(12, 5, 4)), rng.normal(size=(12, 5)), each) for each in masks()]
    return Training([x, y, mask], loss, net.params, batches)


@no_mean("https://github.com/PrimeIntellect-ai/prime-rl/pull/1960")
def selected_rows():
    """The mean of errors that are selected by a mask."""
    x, y, mask, net = T.dmatrix("x"), T.dvector("y"), T.lvector("mask"), Network()
    errors = T.sqr(net.dense(net.hidden(x), 5, 1)[:, 0] - y)
    chosen = [np.ones(12), np.array(MIXED[12]), np.array(MIXED[9])]
    targets = [each[:, 0] for each in columns()]
    batches = zipped(rows(), targets, [each.astype("int64") for each in chosen])
    return Training([x, y, mask], errors[mask.nonzero()].mean(), net.params, batches)


@no_mean("https://github.com/huggingface/transformers/pull/34191")
def ignored_labels():
    """Cross entropy of the rows with a label, averaged over these; others have the label -1."""
    x, y, net = T.dmatrix("x"), T.lvector("y"), Network()
    given = T.neq(y, -1).nonzero()[0]
    p = T.nnet.softmax(net.dense(net.hidden(x), 5, 2)[given])
    loss = T.nnet.categorical_crossentropy(p, y[given]).mean()
    targets = labels()
    targets[1][:4], targets[2][6:8] = -1, -1
    return Training([x, y], loss, net.params, zipped(rows(), targets))


@no_mean("https://github.com/Lasagne/Lasagne/issues/876")
def lasagne_normalized_sum():
    """Lasagne's aggregate with the mode normalized_sum."""
    import lasagne

    x, y, w, net = T.dmatrix("x"), T.dvector("y"), T.dvector("w"), Network()
    errors = lasagne.objectives.squared_error(net.dense(net.hidden(x), 5, 1)[:, 0], y)
    loss = lasagne.objectives.aggregate(errors, w, mode="normalized_sum")
    weights = [np.ones(12), np.linspace(0.1, 2, 12), np.linspace(3, 0.2, 9)]
    targets = [each[:, 0] for each in columns()]
    return Training([x, y, w], loss, net.params, zipped(rows(), targets, weights))


@no_mean("https://github.com/pytorch/pytorch/issues/61309")
def weighted_classes():
    """Cross entropy with weights of classes, divided by the sum of the rows' weights."""
    x, y, net = T.dmatrix("x"), T.lvector("y"), Network()
    weights = T.constant(np.array([1.0, 4.0]))[y]
    p = T.nnet.softmax(net.dense(net.hidden(x), 5, 2))
    loss = (weights * T.nnet.categorical_crossentropy(p, y)).sum() / weights.sum()
    return Training([x, y], loss, net.params, zipped(rows(), labels()))


@no_mean("https://github.com/keras-team/keras/issues/2546")
def divided_by_mean_mask():
    """The mean of masked errors, divided by the mean of the mask, as in Keras 1."""
    x, y, mask, net = T.dtensor3("x"), T.dmatrix("y"), T.dmatrix("mask"), Network()
    errors = T.sqr(net.dense(net.hidden(x), 5, 1)[:, :, 0] - y) * mask
    rng = np.random.RandomState(6)
    batches = [(rng.normal(size=(12, 5, 4)), rng.normal(size=(12, 5)), each) for each in masks()]
    return Training([x, y, mask], errors.mean() / mask.mean(), net.params, batches)


@no_mean("https://github.com/keras-team/keras/issues/7394")
def nonzero_weights():
    """Weighted errors, divided by the part of weights that are not 0, as in Keras 2.0."""
    x, y, w, net = T.dmatrix("x"), T.dvector("y"), T.dvector("w"), Network()
    errors = w * T.sqr(net.dense(net.hidden(x), 5, 1)[:, 0] - y)
    loss = (errors / T.neq(w, 0).mean()).mean()
    weights = [np.linspace(0.1, 2, 12), np.linspace(0, 1, 12) * MIXED[12], np.array(MIXED[9], "d")]
    targets = [each[:, 0] for each in columns()]
    return Training([x, y, w], loss, net.params, zipped(rows(), targets, weights))


@no_mean("https://github.com/keras-team/keras/issues/545")
def no_weight_in_a_part():
    """A weighted mean; later all weights of the first half are 0."""
    x, y, w, net = T.dmatrix("x"), T.dvector("y"), T.dvector("w"), Network()
    errors = w * T.sqr(net.dense(net.hidden(x), 5, 1)[:, 0] - y)
    weights = [np.ones(12), (np.arange(12) > 6).astype(float), np.linspace(0, 1, 9)]
    targets = [each[:, 0] for each in columns()]
    batches = zipped(rows(), targets, weights)
    return Training([x, y, w], errors.sum() / w.sum(), net.params, batches)


@no_mean("https://github.com/d2l-ai/d2l-en/issues/2076")
def recurrent_masked():
    """A recurrent network by scan, with the mean over the steps of a mask."""
    x, y, mask, net = T.dtensor3("x"), T.dmatrix("y"), T.dmatrix("mask"), Network()
    p = net.dense(net.states(x), 5, 1)[:, :, 0].T
    loss = (T.sqr(p - y) * mask).sum() / mask.sum()
    rng = np.random.RandomState(7)
    batches = [(rng.normal(size=(12, 5, 4)), rng.normal(size=(12, 5)), each) for each in masks()]
    return Training([x, y, mask], loss, net.params, batches)


@no_mean("https://github.com/fizyr/keras-retinanet/issues/709", in_keras(
    criteria.focal, repeats=False, targets=two_class_columns
))  # fmt: skip
def focal_by_positives():
    """The focal loss, summed, and divided by the number of positives, at least 1."""
    return of_column(criteria.focal, repeats=False, targets=two_class_columns())


@no_mean("https://arxiv.org/abs/1504.06375", in_keras(
    criteria.balanced, repeats=False, targets=two_class_columns
))  # fmt: skip
def balanced_classes():
    """Cross entropy with each class weighted by the share of the other in the minibatch."""
    return of_column(criteria.balanced, repeats=False, targets=two_class_columns())


@no_mean("https://arxiv.org/abs/1505.07818")
def two_domains():
    """The mean over rows of one domain, and that over rows of the other."""
    x, y, domain, net = T.dmatrix("x"), T.dvector("y"), T.dvector("domain"), Network()
    h = net.hidden(x)
    errors = T.sqr(net.dense(h, 5, 1)[:, 0] - y)
    doubt = T.nnet.softplus((1 - 2 * domain) * net.dense(h, 5, 1)[:, 0])
    loss = (errors * domain).sum() / domain.sum() + doubt.mean()
    targets = [each[:, 0] for each in columns()]
    batches = zipped(rows(), targets, labels(kind=float))
    return Training([x, y, domain], loss, net.params, batches)


@no_mean()
def self_normalized_weights():
    """Importance weights that a softmax over the minibatch normalizes."""
    x, y, score, net = T.dmatrix("x"), T.dvector("y"), T.dvector("score"), Network()
    errors = T.sqr(net.dense(net.hidden(x), 5, 1)[:, 0] - y)
    weights = T.exp(score - score.max())
    scores = [np.zeros(12), np.linspace(-2, 1, 12), np.linspace(1, -3, 9)]
    targets = [each[:, 0] for each in columns()]
    batches = zipped(rows(), targets, scores)
    return Training([x, y, score], (weights * errors).sum() / weights.sum(), net.params, batches)
