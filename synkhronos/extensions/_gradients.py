"""What is to be trained, checked: a loss or its gradients, and the parameters."""

import numpy as np
import theano
import theano.tensor as T


def gradients(loss_or_grads, params):
    """Return pairs (parameter, its gradient), in the parameter's dtype.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of tensor variables
    params : list of shared variables of floats

    Raises
    ------
    TypeError
        For parameters that are no shared variables, or not of floats, and a loss that is no scalar.
    ValueError
        For no parameters, the same one twice, and too many or too few gradients.
    """
    params = check_params(params)
    if isinstance(loss_or_grads, (list, tuple)):
        grads = list(loss_or_grads)
        if len(grads) != len(params):
            raise ValueError(
                f"loss_or_grads must have one gradient for each of {len(params)} params, got "
                f"{len(grads)}."
            )
    else:
        grads = T.grad(check_loss(loss_or_grads), params)
    return [(param, T.cast(grad, param.dtype)) for param, grad in zip(params, grads)]


def check_loss(loss):
    """Return the loss; raise TypeError if it is no scalar of floats."""
    if not isinstance(loss, theano.Variable):
        raise TypeError(f"loss must be a scalar variable, got {loss!r}.")
    if getattr(loss, "ndim", None) != 0 or np.dtype(loss.dtype).kind != "f":
        raise TypeError(
            f"loss must be a scalar of floats, got {loss} of type {loss.type}: take the mean."
        )
    return loss


def check_params(params):
    """Return the parameters as a list; raise for what can't be trained."""
    if isinstance(params, theano.Variable):
        raise TypeError(f"params must be a list of shared variables, got {params!r} alone.")
    params = list(params)
    for param in params:
        if not isinstance(param, theano.compile.SharedVariable):
            raise TypeError(f"params must be a list of shared variables, got {param!r} in it.")
        if np.dtype(getattr(param, "dtype", "O")).kind != "f":
            raise TypeError(f"params must be of floats, got {param} of type {param.type}.")
    if not params:
        raise ValueError("params is empty: there is nothing to train.")
    if len(set(params)) < len(params):
        twice = next(p for i, p in enumerate(params) if p in params[:i])
        raise ValueError(f"params has {twice} twice.")
    return params
