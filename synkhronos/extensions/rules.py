r"""Update rules: from a loss, or its gradients, to the updates of a Theano function.

    rule(loss_or_grads, params, ...) ──▶ OrderedDict: shared variable -> expression

Called as Lasagne's rules are, and with the same mathematics, but without Lasagne. A rule knows
nothing of ranks: given gradients that are averaged over them, it trains on all
(:func:`~synkhronos.extensions.train.average_gradients`), and
:mod:`~synkhronos.extensions.updates` wraps each of them for training in two steps.

In what follows :math:`p` is a parameter, :math:`g` its gradient, :math:`\eta` the learning rate.
All operations are element by element. What a rule keeps of a parameter, such as its velocity,
starts at zero and has the parameter's shape and dtype, but single precision where the parameter has
half, in which 0.999 would be one. Hyperparameters are numbers or scalar variables.
"""

from collections import OrderedDict

import theano.tensor as T

from synkhronos.extensions._gradients import check_params, check_updates
from synkhronos.extensions._precision import (
    counter,
    like,
    number,
    running_mean,
    small_number,
    state_of,
    wide,
    wide_gradients,
)

__all__ = [
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "apply_momentum",
    "apply_nesterov_momentum",
    "momentum",
    "nesterov_momentum",
    "rmsprop",
    "sgd",
]


def sgd(loss_or_grads, params, learning_rate):
    r"""Stochastic gradient descent: :math:`p \leftarrow p - \eta g`.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of tensor variables
        What to minimize, or its gradients, one for each parameter.
    params : list of shared variables of floats
    learning_rate : float or scalar variable

    Returns
    -------
    OrderedDict
        Shared variable -> its next value.

    Raises
    ------
    TypeError, ValueError
        For arguments that don't fit.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> w = theano.shared(np.ones(2), "w")
    >>> train = theano.function([], updates=sgd((w**2).sum(), [w], 0.25))
    >>> _ = train()
    >>> w.get_value()
    array([0.5, 0.5])
    """
    return OrderedDict(
        (param, like(param, param - number(learning_rate, param) * grad))
        for param, grad in wide_gradients(loss_or_grads, params)
    )


def momentum(loss_or_grads, params, learning_rate, momentum=0.9):
    r"""Descend with a velocity: :math:`v \leftarrow \mu v - \eta g`, :math:`p \leftarrow p + v`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`sgd`.
    momentum : float or scalar variable
        :math:`\mu`. The effective step becomes :math:`1 / (1 - \mu)` times as long.

    Returns
    -------
    OrderedDict
    """
    updates = OrderedDict()
    for param, grad in wide_gradients(loss_or_grads, params):
        velocity = state_of(param, "velocity")
        step = number(momentum, param) * velocity - number(learning_rate, param) * grad
        updates[velocity] = step
        updates[param] = like(param, param + step)
    return updates


def nesterov_momentum(loss_or_grads, params, learning_rate, momentum=0.9):
    r"""Descend with a velocity that looks ahead.

    :math:`v \leftarrow \mu v - \eta g`, :math:`p \leftarrow p + \mu v - \eta g`, with the new v.

    Parameters
    ----------
    loss_or_grads, params, learning_rate, momentum
        As in :func:`momentum`.

    Returns
    -------
    OrderedDict

    References
    ----------
    Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep
    learning", ICML 2013, in the form of Bengio, Boulanger-Lewandowski and Pascanu (2012), in which
    the gradient is taken at the parameters themselves.
    """
    updates = OrderedDict()
    for param, grad in wide_gradients(loss_or_grads, params):
        velocity = state_of(param, "velocity")
        mu, descent = number(momentum, param), number(learning_rate, param) * grad
        step = mu * velocity - descent
        updates[velocity] = step
        updates[param] = like(param, param + mu * step - descent)
    return updates


def apply_momentum(updates, params=None, momentum=0.9):
    r"""Give any rule's steps :math:`\Delta` a velocity.

    :math:`v \leftarrow \mu v + \Delta`, :math:`p \leftarrow p + v`.

    Parameters
    ----------
    updates : OrderedDict, or list of (shared variable, expression)
    params : list of shared variables, optional
        Which of the variables in `updates` get one; all of them by default.
    momentum : float or scalar variable

    Returns
    -------
    OrderedDict

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> w = theano.shared(np.ones(1), "w")
    >>> train = theano.function([], updates=apply_momentum(sgd((w**2).sum(), [w], 0.25)))
    >>> _ = train(), train()
    >>> w.get_value()  # 1 - 0.5 - (0.9 * 0.5 + 0.25)
    array([-0.2])
    """
    updates = OrderedDict(check_updates("updates", updates))
    for param in _to_speed_up(updates, params):
        velocity = state_of(param, "velocity")
        step = number(momentum, param) * velocity + (updates[param] - param)
        updates[velocity] = step
        updates[param] = like(param, param + step)
    return updates


def apply_nesterov_momentum(updates, params=None, momentum=0.9):
    r"""Give any rule's steps :math:`\Delta` a velocity that looks ahead.

    :math:`v \leftarrow \mu v + \Delta`, :math:`p \leftarrow p + \mu v + \Delta`, with the new v.

    Parameters
    ----------
    updates, params, momentum
        As in :func:`apply_momentum`.

    Returns
    -------
    OrderedDict
    """
    updates = OrderedDict(check_updates("updates", updates))
    for param in _to_speed_up(updates, params):
        velocity, mu = state_of(param, "velocity"), number(momentum, param)
        descent = updates[param] - param
        step = mu * velocity + descent
        updates[velocity] = step
        updates[param] = like(param, param + mu * step + descent)
    return updates


def adagrad(loss_or_grads, params, learning_rate=1.0, epsilon=1e-6):
    r"""Divide by the root of the sum of all squared gradients so far.

    :math:`a \leftarrow a + g^2`, :math:`p \leftarrow p - \eta g / \sqrt{a + \epsilon}`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`sgd`.
    epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    References
    ----------
    Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic
    optimization", JMLR 12 (2011).
    """
    updates = OrderedDict()
    for param, grad in wide_gradients(loss_or_grads, params):
        squares = state_of(param, "squares")
        updates[squares] = squares + grad**2
        root = T.sqrt(updates[squares] + small_number(epsilon, param))
        updates[param] = like(param, param - number(learning_rate, param) * grad / root)
    return updates


def rmsprop(loss_or_grads, params, learning_rate=1.0, rho=0.9, epsilon=1e-6):
    r"""Divide by the root of the running mean of squared gradients.

    :math:`a \leftarrow \rho a + (1-\rho) g^2`,
    :math:`p \leftarrow p - \eta g / \sqrt{a + \epsilon}`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`sgd`.
    rho, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    References
    ----------
    Tieleman and Hinton, "Neural networks for machine learning", lecture 6.5 (2012).
    """
    updates = OrderedDict()
    for param, grad in wide_gradients(loss_or_grads, params):
        squares = state_of(param, "squares")
        updates[squares] = running_mean(squares, grad**2, rho)
        root = T.sqrt(updates[squares] + small_number(epsilon, param))
        updates[param] = like(param, param - number(learning_rate, param) * grad / root)
    return updates


def adadelta(loss_or_grads, params, learning_rate=1.0, rho=0.95, epsilon=1e-6):
    r"""Step by as much as the steps before, in units of the gradient.

    :math:`a \leftarrow \rho a + (1-\rho) g^2`,
    :math:`s = g \sqrt{d + \epsilon} / \sqrt{a + \epsilon}`,
    :math:`p \leftarrow p - \eta s`,
    :math:`d \leftarrow \rho d + (1-\rho) s^2`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`sgd`.
    rho, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    References
    ----------
    Zeiler, "ADADELTA: an adaptive learning rate method", arXiv:1212.5701.
    """
    updates = OrderedDict()
    for param, grad in wide_gradients(loss_or_grads, params):
        squares, steps = state_of(param, "squares"), state_of(param, "steps")
        small = small_number(epsilon, param)
        updates[squares] = running_mean(squares, grad**2, rho)
        step = grad * T.sqrt(steps + small) / T.sqrt(updates[squares] + small)
        updates[param] = like(param, param - number(learning_rate, param) * step)
        updates[steps] = running_mean(steps, step**2, rho)
    return updates


def adam(loss_or_grads, params, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8):
    r"""Divide the running mean of gradients by the root of that of their squares.

    At step t, from 1 on: :math:`m \leftarrow \beta_1 m + (1-\beta_1) g`,
    :math:`v \leftarrow \beta_2 v + (1-\beta_2) g^2`,
    :math:`p \leftarrow p - \eta \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t}
    \frac{m}{\sqrt{v} + \epsilon}`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`sgd`.
    beta1, beta2, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    References
    ----------
    Kingma and Ba, "Adam: a method for stochastic optimization", arXiv:1412.6980, with the order of
    computation that its section 2 recommends.
    """
    updates = OrderedDict()
    pairs = wide_gradients(loss_or_grads, params)
    time = counter(pairs)
    updates[time] = now = time + 1
    correction = T.sqrt(1 - number(beta2, time) ** now) / (1 - number(beta1, time) ** now)
    for param, grad in pairs:
        mean, squares = state_of(param, "mean"), state_of(param, "squares")
        updates[mean] = running_mean(mean, grad, beta1)
        updates[squares] = running_mean(squares, grad**2, beta2)
        rate = number(learning_rate, param) * T.cast(correction, wide(param))
        root = T.sqrt(updates[squares]) + small_number(epsilon, param)
        updates[param] = like(param, param - rate * updates[mean] / root)
    return updates


def adamax(loss_or_grads, params, learning_rate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-8):
    r"""Divide the running mean of gradients by the largest of late.

    At step t, from 1 on: :math:`m \leftarrow \beta_1 m + (1-\beta_1) g`,
    :math:`u \leftarrow \max(\beta_2 u, |g|)`,
    :math:`p \leftarrow p - \frac{\eta}{1-\beta_1^t} \frac{m}{u + \epsilon}`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`sgd`.
    beta1, beta2, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    References
    ----------
    Kingma and Ba, "Adam: a method for stochastic optimization", arXiv:1412.6980, section 7.1.
    """
    updates = OrderedDict()
    pairs = wide_gradients(loss_or_grads, params)
    time = counter(pairs)
    updates[time] = now = time + 1
    correction = 1 / (1 - number(beta1, time) ** now)
    for param, grad in pairs:
        mean, largest = state_of(param, "mean"), state_of(param, "largest")
        updates[mean] = running_mean(mean, grad, beta1)
        updates[largest] = T.maximum(number(beta2, param) * largest, abs(grad))
        rate = number(learning_rate, param) * T.cast(correction, wide(param))
        step = rate * updates[mean] / (updates[largest] + small_number(epsilon, param))
        updates[param] = like(param, param - step)
    return updates


def _to_speed_up(updates, params):
    params = list(updates) if params is None else check_params(params)
    for param in params:
        if param not in updates:
            raise ValueError(f"params must be among the variables of updates; {param} is not.")
    return params
