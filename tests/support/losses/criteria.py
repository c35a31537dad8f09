"""Losses of targets and outputs of one column, which Keras takes, too."""

import theano.tensor as T

EPSILON = 1e-9


def squared(y, p):
    return T.sqr(y - p)


def focal(y, p):
    right = y * p + (1 - y) * (1 - p)
    return (-T.sqr(1 - right) * T.log(right)).sum() / T.maximum(1, y.sum())


def balanced(y, p):
    share = 1 - y.mean()
    return -(share * y * T.log(p) + (1 - share) * (1 - y) * T.log(1 - p)).mean()


def dice(y, p):
    return 1 - 2 * (y * p).sum() / (y + p).sum()


def tversky(y, p):
    hits = (y * p).sum()
    return 1 - hits / (hits + 0.3 * ((1 - y) * p).sum() + 0.7 * (y * (1 - p)).sum())


def f1(y, p):
    hits = (y * p).sum()
    precision, recall = hits / (p.sum() + EPSILON), hits / (y.sum() + EPSILON)
    return 1 - 2 * precision * recall / (precision + recall + EPSILON)


def r2(y, p):
    return T.sqr(y - p).sum() / T.sqr(y - y.mean()).sum()


def uncorrelated(y, p):
    y, p = y - y.mean(), p - p.mean()
    return 1 - (y * p).sum() / T.sqrt(T.sqr(y).sum() * T.sqr(p).sum())


def discordance(y, p):
    covariance = ((y - y.mean()) * (p - p.mean())).mean()
    return 1 - 2 * covariance / (y.var() + p.var() + T.sqr(y.mean() - p.mean()))


def root(y, p):
    return T.sqrt(T.sqr(y - p).mean())


def noise(y, p):
    return T.log(T.sqr(y - p).mean()) - T.log(T.sqr(y).mean())


def worst(y, p):
    return T.sqr(y - p).max()


def hard(y, p):
    errors = T.sqr(y - p).flatten()
    return T.sort(errors)[errors.shape[0] // 2 :].mean()


def squared_mean(y, p):
    return squared(y, p).mean()
