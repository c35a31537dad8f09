"""Policy gradients."""

import theano.tensor as T

from support.losses.data import columns, labels, rows, zipped
from support.losses.networks import Network
from support.losses.training import Training, no_mean


@no_mean("https://github.com/openai/baselines/issues/323")
def normalized_advantages():
    """A policy gradient with advantages by their mean and deviation in the minibatch."""
    x, action, advantage, net = T.dmatrix("x"), T.lvector("action"), T.dvector("a"), Network()
    p = T.nnet.softmax(net.dense(net.hidden(x), 5, 2))
    weights = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    loss = -(T.log(p[T.arange(p.shape[0]), action]) * weights).mean()
    advantages = [each[:, 0] for each in rows(width=1, repeats=True, seed=8)]
    return Training([x, action, advantage], loss, net.params, zipped(rows(), labels(), advantages))


@no_mean("https://github.com/hill-a/stable-baselines/issues/697")
def proximal_policy():
    """PPO: a clipped ratio with normalized advantages, an entropy and a value loss."""
    x, action, old, returns = T.dmatrix("x"), T.lvector("action"), T.dvector("old"), T.dvector("r")
    net = Network()
    h = net.hidden(x)
    p, value = T.nnet.softmax(net.dense(h, 5, 2)), net.dense(h, 5, 1)[:, 0]
    a = (returns - returns.mean()) / (returns.std() + 1e-8)
    ratio = p[T.arange(p.shape[0]), action] / old
    gain = T.minimum(ratio * a, T.clip(ratio, 0.8, 1.2) * a).mean()
    entropy = -(p * T.log(p)).sum(1).mean()
    loss = T.sqr(value - returns).mean() / 2 - gain - 0.01 * entropy
    batches = zipped(
        rows(),
        labels(),
        [0.3 + each[:, 0] / 3 for each in columns(seed=12)],
        [each[:, 0] for each in rows(width=1, repeats=True, seed=8)],
    )
    return Training([x, action, old, returns], loss, net.params, batches)


@no_mean("https://doi.org/10.1007/BF00992696")
def by_episodes():
    """A policy gradient summed over steps, by the number of episodes that end."""
    x, action, returns, ends, net = (
        T.dmatrix("x"), T.lvector("action"), T.dvector("r"), T.dvector("ends"), Network()
    )  # fmt: skip
    p = T.nnet.softmax(net.dense(net.hidden(x), 5, 2))
    loss = -(T.log(p[T.arange(p.shape[0]), action]) * returns).sum() / ends.sum()
    returned = [each[:, 0] for each in rows(width=1, seed=8)]
    batches = zipped(rows(), labels(), returned, labels(kind=float))
    return Training([x, action, returns, ends], loss, net.params, batches, rate=0.02)
