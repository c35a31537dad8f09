"""The precision of update rules: dtypes of their hyperparameters and state."""

import numpy as np

from synkhronos._host import Variable, library, shared_zeros
from synkhronos._host import tensor as T
from synkhronos.extensions._gradients import gradients


def wide(variable):
    """Return the dtype to compute in with a variable: its own, or single precision for half."""
    return np.result_type("float32", variable.dtype).name


def wide_gradients(loss_or_grads, params):
    """Return pairs (parameter, its gradient in the dtype to compute in)."""
    return [(p, T.cast(grad, wide(p))) for p, grad in gradients(loss_or_grads, params)]


def like(param, value):
    """Return a value in the parameter's dtype."""
    return T.cast(value, param.dtype)


def state_of(param, what):
    """Return a shared variable of zeros with the shape of a parameter."""
    return shared_zeros(param, wide(param), f"{param.name or 'param'}_{what}")


def counter(pairs):
    """Return a shared variable, at zero, to count the steps."""
    dtype = np.result_type("float32", *[param.dtype for param, _ in pairs])
    return library.shared(np.zeros((), dtype), "time")


def number(value, variable):
    """Return a hyperparameter in the dtype to compute in with a variable."""
    if isinstance(value, Variable):
        if getattr(value, "ndim", None) != 0:
            raise TypeError(f"Hyperparameters must be scalars, got {value} of type {value.type}.")
        return T.cast(value, wide(variable))
    array = np.asarray(value)
    if array.ndim != 0 or array.dtype.kind not in "iuf":
        raise TypeError(f"Hyperparameters must be numbers or scalar variables, got {value!r}.")
    # Theano would round a float64 to floatX, also for parameters of float64.
    return T.constant(array.astype(wide(variable)))


def small_number(value, variable):
    """Return a hyperparameter, or the dtype's smallest number if that would round it to zero."""
    given, tiny = number(value, variable), np.finfo(wide(variable)).tiny
    is_number = not isinstance(value, Variable)
    return number(tiny, variable) if is_number and 0 < value < tiny else given


def running_mean(mean, value, rho):
    """Return rho times the mean plus (1 - rho) times the value."""
    rho = number(rho, mean)
    return rho * mean + (1 - rho) * value
