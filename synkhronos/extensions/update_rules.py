r"""Update rules: from a loss, or its gradients, to the updates of a Theano function.

    rule(loss_or_grads, params, ...) ──▶ OrderedDict: shared variable -> expression

Rules are called as Lasagne's are, with the same mathematics, but need no Lasagne. A rule knows
nothing of ranks: given gradients that are averaged over the ranks, it trains on all of them
(:func:`~synkhronos.extensions.train.average_gradients`).
:mod:`~synkhronos.extensions.updates` wraps each rule for training in two steps.

In the formulas :math:`p` is a parameter, :math:`g` its gradient, :math:`\eta` the learning rate.
All operations are element by element. The state that a rule keeps for a parameter, such as its
velocity, starts at zero. It has the parameter's shape and dtype, but single precision where the
parameter has half, in which 0.999 would be one. Hyperparameters are numbers or scalar variables.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Sequence

from synkhronos._hints import LossOrGrads, Scalar, SharedVariable, Updates, UpdatesLike
from synkhronos.extensions._adaptive import adadelta, adagrad, adam, adamax, rmsprop
from synkhronos.extensions._gradients import check_params, check_updates
from synkhronos.extensions._precision import like, number, state_of, wide_gradients

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
    loss_or_grads: LossOrGrads,
    params: Sequence[SharedVariable],
    learning_rate: Scalar,
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
    updates = OrderedDict()
    for param, grad in wide_gradients(loss_or_grads, params):
        velocity = state_of(param, "velocity")
        step = number(momentum, param) * velocity - number(learning_rate, param) * grad
        updates[velocity] = step
        updates[param] = like(param, param + step)
    return updates


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
    updates = OrderedDict()
    for param, grad in wide_gradients(loss_or_grads, params):
        velocity = state_of(param, "velocity")
        mu, descent = number(momentum, param), number(learning_rate, param) * grad
        step = mu * velocity - descent
        updates[velocity] = step
        updates[param] = like(param, param + mu * step - descent)
    return updates


def apply_momentum(
    updates: UpdatesLike,
    params: Sequence[SharedVariable] | None = None,
    momentum: Scalar = 0.9,
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
    updates = OrderedDict(check_updates("updates", updates))
    for param in _to_speed_up(updates, params):
        velocity = state_of(param, "velocity")
        step = number(momentum, param) * velocity + (updates[param] - param)
        updates[velocity] = step
        updates[param] = like(param, param + step)
    return updates


def apply_nesterov_momentum(
    updates: UpdatesLike,
    params: Sequence[SharedVariable] | None = None,
    momentum: Scalar = 0.9,
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
    updates = OrderedDict(check_updates("updates", updates))
    for param in _to_speed_up(updates, params):
        velocity, mu = state_of(param, "velocity"), number(momentum, param)
        descent = updates[param] - param
        step = mu * velocity + descent
        updates[velocity] = step
        updates[param] = like(param, param + mu * step + descent)
    return updates


def _to_speed_up(updates, params):
    params = list(updates) if params is None else check_params(params)
    for param in params:
        if param not in updates:
            raise ValueError(f"params must be among the variables of updates; {param} is not.")
    return params
