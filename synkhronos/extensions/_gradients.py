"""Gradients of a loss, and checks of losses, parameters and updates."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Sequence

import numpy as np

from synkhronos._calls.signature import check_pairs
from synkhronos._hints import SharedVariable, Variable
from synkhronos._host import library
from synkhronos._host import tensor as T
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._wording import count, shown
from synkhronos.extensions._hints import Scalar


def gradients(loss_or_grads, params):
    """Return pairs (parameter, its gradient in the parameter's dtype), or raise."""
    params = check_params(params)
    if isinstance(loss_or_grads, (list, tuple)):
        grads = check_variables("loss_or_grads", loss_or_grads)
        if len(grads) != len(params):
            raise ValueError(
                f"loss_or_grads must have one gradient for each of {count(len(params), 'param')}, "
                f"got {len(grads)}."
            )
    else:
        grads = derive(check_loss(loss_or_grads), params)
    return [(param, T.cast(grad, param.dtype)) for param, grad in zip(params, grads)]


@recurses_deep
def derive(loss, params):
    """Return the gradients of a loss; raise ValueError for params that it does not depend on."""
    grads = T.grad(loss, params, disconnected_inputs="ignore", return_disconnected="None")
    missing = [str(param) for param, grad in zip(params, grads) if grad is None]
    if missing:
        raise ValueError(
            f"params must be what the loss depends on: it has no derivative by {missing}."
        )
    return grads


def check_loss(loss):
    """Return the loss; raise TypeError if it is no scalar of floats."""
    if not isinstance(loss, Variable):
        raise TypeError(f"loss must be a scalar variable, got {loss!r}.")
    if getattr(loss, "ndim", None) != 0 or np.dtype(loss.dtype).kind != "f":
        raise TypeError(
            f"loss must be a scalar of floats, got {loss} of type {loss.type}: take the mean."
        )
    return loss


def check_params(params):
    """Return the parameters as a list; raise for variables that can't be trained."""
    params = check_shareds("params", params)
    for param in params:
        if np.dtype(getattr(param, "dtype", "O")).kind != "f":
            raise TypeError(f"params must be of floats, got {param} of type {param.type}.")
    if not params:
        raise ValueError("params is empty: there is nothing to train.")
    if len(set(params)) < len(params):
        twice = next(p for i, p in enumerate(params) if p in params[:i])
        raise ValueError(f"params has {twice} twice.")
    return params


def check_shareds(name, variables):
    """Return an argument as a list of shared variables; raise TypeError for anything else."""
    variables = _as_list(name, variables, "shared variables")
    for variable in variables:
        if not isinstance(variable, SharedVariable):
            raise TypeError(f"{name} must be a list of shared variables, got {variable!r} in it.")
    return variables


def check_variables(name, variables):
    """Return an argument as a list of tensor variables; raise TypeError for anything else."""
    variables = _as_list(name, variables, "tensor variables")
    for variable in variables:
        check_tensor(name, variable, "a list of tensor variables", " in it")
    return variables


def check_tensor(name, variable, kind="a tensor variable", where=""):
    """Return a variable that has a dtype and axes; raise TypeError for anything else."""
    if not isinstance(variable, Variable) or not hasattr(variable, "ndim"):
        raise TypeError(f"{name} must be {kind}, got {variable!r}{where}.")
    return variable


def check_number(name, value):
    """Return a number or a scalar variable; raise TypeError for anything else."""
    number = value if isinstance(value, Variable) else np.asarray(value)
    if getattr(number, "ndim", None) != 0 or np.dtype(number.dtype).kind not in "iuf":
        raise TypeError(f"{name} must be a number or a scalar variable, got {shown(value)}.")
    return value


def _as_list(name, values, kind):
    if isinstance(values, Variable) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} must be a list of {kind}, got {values!r}.")
    return list(values)


def check_max_norm(max_norm: Any) -> None:
    """Raise TypeError or ValueError if gradients can't be clipped to this norm."""
    check_number("max_norm", max_norm)
    if not isinstance(max_norm, Variable) and not max_norm > 0:
        raise ValueError(f"max_norm must be above zero, got {max_norm!r}.")


def clip_by_global_norm(grads: Sequence[Variable], max_norm: Scalar) -> list[Variable]:
    r"""Scale all gradients by one factor if their common norm is above `max_norm`.

    .. math:: g_i \leftarrow g_i \min(1, c / \lVert g \rVert), \quad
        \lVert g \rVert^2 = \sum_i \sum g_i^2

    Clip after averaging over the ranks, never before, or ranks clip differently.

    Parameters
    ----------
    grads : list of tensor variables
    max_norm : float or scalar variable
        :math:`c`, above zero.

    Returns
    -------
    list of tensor variables

    Raises
    ------
    TypeError
        For anything but a list of tensor variables, and a norm that is no number or scalar.
    ValueError
        For a norm that is not above zero.

    References
    ----------
    Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", ICML
    2013, arXiv:1211.5063.

    Examples
    --------
    >>> import theano
    >>> grads = [theano.shared(3.0), theano.shared(4.0)]
    >>> [round(float(grad.eval()), 6) for grad in clip_by_global_norm(grads, max_norm=1)]
    [0.6, 0.8]
    """
    grads = check_variables("grads", grads)
    check_max_norm(max_norm)
    # In half precision the square of a norm of 256 would overflow.
    wide = np.result_type("float32", *[grad.dtype for grad in grads]).name
    norm = T.sqrt(sum(T.sqr(T.cast(grad, wide)).sum() for grad in grads))
    limit = T.cast(max_norm, wide)
    factor = limit / T.maximum(norm, limit)
    return [grad * T.cast(factor, grad.dtype) for grad in grads]


def check_rule(update_rule):
    """Raise TypeError for a rule of two steps, which takes no gradients."""
    if getattr(update_rule, "__module__", None) == "synkhronos.extensions.updates":
        raise TypeError(
            "update_rule must take gradients: use synkhronos.extensions.update_rules."
            f"{getattr(update_rule, '__name__', '')}. The rules of extensions.updates are for "
            "make_train_function."
        )


def rule_updates(update_rule, grads, params, args=(), kwargs=()):
    """Return the updates that a rule makes of gradients, checked: shared variable -> expression.

    Raise TypeError for anything but a rule, and for arguments to an object with its own settings.
    """
    if hasattr(update_rule, "get_updates"):
        if args or kwargs:
            raise TypeError(
                f"the training step can't pass {[*args, *kwargs]} on: the settings of "
                f"{type(update_rule).__name__} are its own."
            )
        for param in params:
            # Keras's optimizers give their state this shape. Keras sets it on its own variables.
            if not hasattr(param, "_keras_shape"):
                param._keras_shape = param.get_value(borrow=True).shape
        updates = update_rule.get_updates(loss=_loss_with(grads, params), params=params)
    elif callable(update_rule):
        updates = update_rule(grads, params, *args, **kwargs)
    else:
        raise TypeError(
            "update_rule must be a function (grads, params, ...) or have a method get_updates(loss,"
            f" params), got {update_rule!r}."
        )
    return OrderedDict(check_pairs("What the update rule returns", updates))


def _loss_with(grads, params):
    """Return a surrogate loss with exactly these gradients, for optimizers that differentiate."""
    parts = [(p * library.gradient.disconnected_grad(g)).sum() for p, g in zip(params, grads)]
    return sum(parts)
