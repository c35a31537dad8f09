r"""Update rules: from a loss, or its gradients, to the updates of a Theano function.

    rule(loss_or_grads, params, ...) ──▶ OrderedDict: shared variable -> expression

Rules are called as Lasagne's are, with the same mathematics, but need no Lasagne. A rule knows
nothing of ranks: given gradients that are averaged over the ranks, it trains on all of them
(:func:`~synkhronos.extensions.train.average_gradients`).
:mod:`~synkhronos.extensions.updates` wraps each rule for training in two steps.

In the formulas :math:`p` is a parameter, :math:`g` its gradient, :math:`\eta` the learning rate.
All operations are element by element. The state that a rule keeps for a parameter, such as its
velocity, starts at zero. It has the parameter's shape and dtype, but single precision where the
parameter has half, which rounds 0.999 to 1. Hyperparameters are numbers or scalar variables.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from typing import Sequence

from synkhronos._calls.signature import check_pairs
from synkhronos._hints import SharedVariable
from synkhronos._host import tensor as T
from synkhronos.extensions._gradients import check_params
from synkhronos.extensions._hints import LossOrGrads, Scalar, Updates, UpdatesLike
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


def sgd(
    loss_or_grads: LossOrGrads, params: Sequence[SharedVariable], learning_rate: Scalar
) -> Updates:
    r"""Step down the gradient: :math:`p \leftarrow p - \eta g`.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of tensor variables
        The loss to minimize, or its gradients, one for each parameter.
    params : list of shared variables of floats
    learning_rate : float or scalar variable

    Returns
    -------
    OrderedDict
        Shared variable -> its next value.

    Raises
    ------
    TypeError
        For a loss that is no scalar of floats, parameters that are no shared variables of floats,
        and hyperparameters that are no numbers or scalars.
    ValueError
        For no parameters, the same one twice, one that the loss does not depend on, and more or
        fewer gradients than parameters.

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


def momentum(
    loss_or_grads: LossOrGrads,
    params: Sequence[SharedVariable],
    learning_rate: Scalar,
    momentum: Scalar = 0.9,
) -> Updates:
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

    Raises
    ------
    TypeError, ValueError
        As :func:`sgd`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.array([1.0, 10.0]), "w")
    >>> train = theano.function([], updates=momentum((w**2).sum(), [w], 0.1))
    >>> _ = train(), train()
    >>> w.get_value()  # 1 - 0.2 - (0.9 * 0.2 + 0.1 * 1.6), and ten times that
    array([0.46, 4.6 ])
    """
    return _descended(loss_or_grads, params, learning_rate, momentum, looks_ahead=False)


def nesterov_momentum(
    loss_or_grads: LossOrGrads,
    params: Sequence[SharedVariable],
    learning_rate: Scalar,
    momentum: Scalar = 0.9,
) -> Updates:
    r"""Descend with a velocity that looks ahead.

    :math:`v \leftarrow \mu v - \eta g`, :math:`p \leftarrow p + \mu v - \eta g`, with the new v.

    Parameters
    ----------
    loss_or_grads, params, learning_rate, momentum
        As in :func:`momentum`.

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`sgd`.

    References
    ----------
    Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep
    learning", ICML 2013, in the form of Bengio, Boulanger-Lewandowski and Pascanu (2012), in which
    the gradient is taken at the parameters themselves.

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.array([1.0, 10.0]), "w")
    >>> nesterov_momentum((w**2).sum(), [w], 0.1)[w].eval()  # 1 - 0.9 * 0.2 - 0.2
    array([0.62, 6.2 ])
    """
    return _descended(loss_or_grads, params, learning_rate, momentum, looks_ahead=True)


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
        As in :func:`sgd`.
    epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`sgd`.

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
        As in :func:`sgd`.
    rho, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`sgd`.

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
        As in :func:`sgd`.
    rho, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`sgd`.

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
        As in :func:`sgd`.
    beta1, beta2, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`sgd`.

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
        As in :func:`sgd`.
    beta1, beta2, epsilon : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`sgd`.

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


def apply_momentum(
    updates: UpdatesLike, params: Sequence[SharedVariable] | None = None, momentum: Scalar = 0.9
) -> Updates:
    r"""Give any rule's steps :math:`\Delta` a velocity.

    :math:`v \leftarrow \mu v + \Delta`, :math:`p \leftarrow p + v`.

    Parameters
    ----------
    updates : OrderedDict, or list of (shared variable, expression)
    params : list of shared variables, optional
        The variables in `updates` that get a velocity; all of them by default.
    momentum : float or scalar variable

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError
        For updates that are no pairs of a shared variable and an expression, and a momentum that is
        no number or scalar.
    ValueError
        For a variable that is updated twice, and `params` that are not updated.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> w = theano.shared(np.ones(1), "w")
    >>> train = theano.function([], updates=apply_momentum(sgd((w**2).sum(), [w], 0.25)))
    >>> _ = train(), train()
    >>> w.get_value()  # 1 - 0.5 - (0.9 * 0.5 + 0.25)
    array([-0.2])
    """
    return _sped_up(updates, params, momentum, looks_ahead=False)


def apply_nesterov_momentum(
    updates: UpdatesLike, params: Sequence[SharedVariable] | None = None, momentum: Scalar = 0.9
) -> Updates:
    r"""Give any rule's steps :math:`\Delta` a velocity that looks ahead.

    :math:`v \leftarrow \mu v + \Delta`, :math:`p \leftarrow p + \mu v + \Delta`, with the new v.

    Parameters
    ----------
    updates, params, momentum
        As in :func:`apply_momentum`.

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError, ValueError
        As :func:`apply_momentum`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.array([1.0, 10.0]), "w")
    >>> updates = sgd((w**2).sum(), [w], 0.1)
    >>> apply_nesterov_momentum(updates)[w].eval()  # 1 - 0.9 * 0.2 - 0.2
    array([0.62, 6.2 ])
    """
    return _sped_up(updates, params, momentum, looks_ahead=True)


def _descended(loss_or_grads, params, learning_rate, momentum, looks_ahead):
    updates = OrderedDict()
    for param, grad in wide_gradients(loss_or_grads, params):
        descent = number(learning_rate, param) * grad
        updates.update(_with_velocity(param, operator.sub, descent, momentum, looks_ahead))
    return updates


def _sped_up(updates, params, momentum, looks_ahead):
    updates = OrderedDict(check_pairs("updates", updates))
    params = list(updates) if params is None else check_params(params)
    for param in params:
        if param not in updates:
            raise ValueError(f"params must be among the variables of updates; {param} is not.")
        step = updates[param] - param
        updates.update(_with_velocity(param, operator.add, step, momentum, looks_ahead))
    return updates


def _with_velocity(param, add, step, momentum, looks_ahead):
    """Return pairs of a velocity and a parameter with their next values; `add` may subtract."""
    velocity, mu = state_of(param, "velocity"), number(momentum, param)
    new = add(mu * velocity, step)
    moved = add(param + mu * new, step) if looks_ahead else param + new
    return [(velocity, new), (param, like(param, moved))]
