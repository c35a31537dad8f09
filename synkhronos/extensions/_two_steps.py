"""Training functions of two steps, with a collective between them; `train` exports them."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np

from synkhronos import collectives, functions
from synkhronos._hints import SharedVariable, TwoStepRule, Variable
from synkhronos._host import library
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos.extensions._gradients import check_tensor


def make_train_function(
    loss: Variable,
    params: Sequence[SharedVariable],
    x: Variable,
    y: Variable,
    update_rule: TwoStepRule,
    *args: Any,
    **kwargs: Any,
) -> Callable[..., np.ndarray]:
    """Return a function that trains in two steps, with a collective between them.

    Parameters
    ----------
    loss : scalar variable
        A mean over rows.
    params : list of shared variables
    x, y : theano variable
        The inputs.
    update_rule : callable
        One of :mod:`synkhronos.extensions.updates`.
    *args, **kwargs
        For the rule.

    Returns
    -------
    callable
        ``train_minibatch(x_data, y_data, batch=None, num_slices=1)`` returns the loss over all
        rows.

    Raises
    ------
    SessionError
        Before :func:`synkhronos.fork`.
    TypeError
        For an `x` or `y` that is no tensor variable, an `update_rule` of one step or that is no
        rule, and arguments that don't fit the rule.
    ValueError
        As the rule.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> from synkhronos.extensions import train, updates
    >>> synk.fork(2)
    2
    >>> x, y, w = T.dmatrix("x"), T.dvector("y"), theano.shared(np.zeros(2), "w")
    >>> loss = ((T.dot(x, w) - y) ** 2).mean()
    >>> train_minibatch = train.make_train_function(loss, [w], x, y, updates.sgd, 0.25)
    >>> float(train_minibatch(np.eye(2), np.ones(2)))
    1.0
    >>> synk.gather(w)
    array([[0.25, 0.25],
           [0.25, 0.25]])
    >>> synk.close()
    """
    grad_updates, param_updates, grad_shared = _two_steps(
        x, y, update_rule, loss, params, args, kwargs
    )
    compute = functions.function([x, y], loss, updates=grad_updates)
    update = functions.function([], updates=param_updates)

    def train_minibatch(x_data, y_data, batch=None, num_slices=1):
        value = compute(x_data, y_data, batch=batch, num_slices=num_slices)
        collectives.all_reduce(grad_shared, op="avg")
        update()
        return value

    return train_minibatch


def make_train_function_theano(
    loss: Variable,
    params: Sequence[SharedVariable],
    x: Variable,
    y: Variable,
    update_rule: TwoStepRule,
    *args: Any,
    **kwargs: Any,
) -> Callable[..., np.ndarray]:
    """Return a function as of :func:`make_train_function`, for one process without ranks.

    Parameters
    ----------
    loss, params, x, y, update_rule, *args, **kwargs
        As in :func:`make_train_function`.

    Returns
    -------
    callable
        ``train_minibatch(x_data, y_data)`` returns the loss.

    Raises
    ------
    TypeError, ValueError
        As :func:`make_train_function`.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> from synkhronos.extensions import train, updates
    >>> x, y, w = T.dmatrix("x"), T.dvector("y"), theano.shared(np.zeros(2), "w")
    >>> loss = ((T.dot(x, w) - y) ** 2).mean()
    >>> train_minibatch = train.make_train_function_theano(loss, [w], x, y, updates.sgd, 0.25)
    >>> float(train_minibatch(np.eye(2), np.ones(2))), w.get_value().tolist()
    (1.0, [0.25, 0.25])
    """
    grad_updates, param_updates, _ = _two_steps(x, y, update_rule, loss, params, args, kwargs)
    compile_function = recurses_deep(library.function)
    compute = compile_function([x, y], loss, updates=grad_updates)
    update = compile_function([], updates=param_updates)

    def train_minibatch(x_data, y_data):
        value = compute(x_data, y_data)
        update()
        return value

    return train_minibatch


def _two_steps(x, y, update_rule, loss, params, args, kwargs):
    check_tensor("x", x)
    check_tensor("y", y)
    if not callable(update_rule):
        raise TypeError(f"update_rule must be one of extensions.updates, got {update_rule!r}.")
    updates = update_rule(loss, params, *args, **kwargs)
    if not isinstance(updates, (tuple, list)) or len(updates) != 3:
        name = getattr(update_rule, "__name__", repr(update_rule))
        raise TypeError(
            "update_rule must return (grad_updates, param_updates, grad_shared), as those of "
            f"synkhronos.extensions.updates do; {name} returned {type(updates).__name__}. Rules of "
            "one step are for make_train_step."
        )
    return updates
