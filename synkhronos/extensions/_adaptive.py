"""Update rules that fit the step to each element of a parameter; `update_rules` has all rules."""

from __future__ import annotations

from collections import OrderedDict
from typing import Sequence

from synkhronos._hints import LossOrGrads, Scalar, SharedVariable, Updates
from synkhronos._host import tensor as T
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


def adagrad(
    loss_or_grads: LossOrGrads,
    params: Sequence[SharedVariable],
    learning_rate: Scalar = 1.0,
    epsilon: Scalar = 1e-6,
) -> Updates:
    r"""Divide each gradient by the root of the sum of its squares so far.

    :math:`a \leftarrow a + g^2`, :math:`p \leftarrow p - \eta g / \sqrt{a + \epsilon}`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`~synkhronos.extensions.update_rules.sgd`.
    epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`~synkhronos.extensions.update_rules.sgd`.

    References
    ----------
    Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic
    optimization", JMLR 12 (2011).

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.array([1.0, 10.0]), "w")
    >>> adagrad((w**2).sum(), [w], 0.1)[w].eval().round(3)  # at first 0.1, whatever the gradient
    array([0.9, 9.9])
    """
    updates = OrderedDict()
    for param, grad in wide_gradients(loss_or_grads, params):
        squares = state_of(param, "squares")
        updates[squares] = squares + grad**2
        root = T.sqrt(updates[squares] + small_number(epsilon, param))
        updates[param] = like(param, param - number(learning_rate, param) * grad / root)
    return updates


def rmsprop(
    loss_or_grads: LossOrGrads,
    params: Sequence[SharedVariable],
    learning_rate: Scalar = 1.0,
    rho: Scalar = 0.9,
    epsilon: Scalar = 1e-6,
) -> Updates:
    r"""Divide each gradient by the root of the running mean of its squares.

    :math:`a \leftarrow \rho a + (1-\rho) g^2`,
    :math:`p \leftarrow p - \eta g / \sqrt{a + \epsilon}`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`~synkhronos.extensions.update_rules.sgd`.
    rho, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`~synkhronos.extensions.update_rules.sgd`.

    References
    ----------
    Tieleman and Hinton, "Neural networks for machine learning", lecture 6.5 (2012).

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.array([1.0, 10.0]), "w")
    >>> rmsprop((w**2).sum(), [w], 0.1)[w].eval().round(3)  # at first 0.1 / sqrt(1 - 0.9)
    array([0.684, 9.684])
    """
    updates = OrderedDict()
    for param, grad in wide_gradients(loss_or_grads, params):
        squares = state_of(param, "squares")
        updates[squares] = running_mean(squares, grad**2, rho)
        root = T.sqrt(updates[squares] + small_number(epsilon, param))
        updates[param] = like(param, param - number(learning_rate, param) * grad / root)
    return updates


def adadelta(
    loss_or_grads: LossOrGrads,
    params: Sequence[SharedVariable],
    learning_rate: Scalar = 1.0,
    rho: Scalar = 0.95,
    epsilon: Scalar = 1e-6,
) -> Updates:
    r"""Scale each gradient so that the step is as large as the steps before it.

    :math:`a \leftarrow \rho a + (1-\rho) g^2`,
    :math:`s = g \sqrt{d + \epsilon} / \sqrt{a + \epsilon}`,
    :math:`p \leftarrow p - \eta s`,
    :math:`d \leftarrow \rho d + (1-\rho) s^2`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`~synkhronos.extensions.update_rules.sgd`.
    rho, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`~synkhronos.extensions.update_rules.sgd`.

    References
    ----------
    Zeiler, "ADADELTA: an adaptive learning rate method", arXiv:1212.5701.

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.array([1.0, 10.0]), "w")
    >>> adadelta((w**2).sum(), [w], 1.0)[w].eval().round(3)  # at first sqrt(1e-6 / (1 - 0.95))
    array([0.996, 9.996])
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


def adam(
    loss_or_grads: LossOrGrads,
    params: Sequence[SharedVariable],
    learning_rate: Scalar = 0.001,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
) -> Updates:
    r"""Divide the running mean of gradients by the root of that of their squares.

    At step t, from 1 on: :math:`m \leftarrow \beta_1 m + (1-\beta_1) g`,
    :math:`v \leftarrow \beta_2 v + (1-\beta_2) g^2`,
    :math:`p \leftarrow p - \eta \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t}
    \frac{m}{\sqrt{v} + \epsilon}`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`~synkhronos.extensions.update_rules.sgd`.
    beta1, beta2, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`~synkhronos.extensions.update_rules.sgd`.

    References
    ----------
    Kingma and Ba, "Adam: a method for stochastic optimization", arXiv:1412.6980, with the order of
    computation that its section 2 recommends.

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.array([1.0, 10.0]), "w")
    >>> adam((w**2).sum(), [w], 0.1)[w].eval().round(3)  # at first 0.1, whatever the gradient
    array([0.9, 9.9])
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


def adamax(
    loss_or_grads: LossOrGrads,
    params: Sequence[SharedVariable],
    learning_rate: Scalar = 0.002,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
) -> Updates:
    r"""Divide the running mean of gradients by the decaying maximum of their absolute values.

    At step t, from 1 on: :math:`m \leftarrow \beta_1 m + (1-\beta_1) g`,
    :math:`u \leftarrow \max(\beta_2 u, |g|)`,
    :math:`p \leftarrow p - \frac{\eta}{1-\beta_1^t} \frac{m}{u + \epsilon}`.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in :func:`~synkhronos.extensions.update_rules.sgd`.
    beta1, beta2, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`~synkhronos.extensions.update_rules.sgd`.

    References
    ----------
    Kingma and Ba, "Adam: a method for stochastic optimization", arXiv:1412.6980, section 7.1.

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.array([1.0, 10.0]), "w")
    >>> adamax((w**2).sum(), [w], 0.1)[w].eval().round(3)  # at first 0.1, whatever the gradient
    array([0.9, 9.9])
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
