r"""Update rules in two steps, with the gradients in one flat vector between them.

    grads ──▶ flat vector of each rank ── all_reduce ──▶ the same vector ──▶ params
    f1: grad_updates                                         f2: param_updates

Every rule returns ``(grad_updates, param_updates, grad_shared)``::

    grad_updates, param_updates, grad_shared = adam(loss, params)
    compute = synk.function([x, y], loss, updates=grad_updates)
    update = synk.function([], updates=param_updates)
    ...
    compute(x_data, y_data)
    synk.all_reduce(grad_shared)
    update()

`loss` must be a mean over rows. Each rank's gradients are weighted with its rows, so the average
over the ranks is that over all rows, also where these do not divide evenly. One vector costs one
round whatever the number of parameters, and it never moves: the gradients are written into it where
it lies in shared memory.

The mathematics is that of :mod:`synkhronos.extensions.rules`; the names and what they return are
those of the 2017 package.
"""

import functools
import inspect
import sys

import numpy as np
import theano
import theano.tensor as T

from synkhronos import ops
from synkhronos._checks import whole_number
from synkhronos.extensions import rules
from synkhronos.extensions._gradients import (
    check_loss,
    check_params,
    check_shareds,
    check_tensor,
    check_variables,
    derive,
)

__all__ = [
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "apply_momentum",
    "apply_nesterov_momentum",
    "flat_unflat_grads",
    "flatten_vars",
    "momentum",
    "nesterov_momentum",
    "nonflat_grads",
    "rmsprop",
    "sgd",
    "sgd_nonflat",
    "unflatten_vars",
    "vars_flat_size",
]


def vars_flat_size(shared_vars) -> int:
    """Return how many elements shared variables have together.

    >>> import numpy as np, theano
    >>> vars_flat_size([theano.shared(np.zeros((2, 3))), theano.shared(1.0)])
    7
    """
    variables = check_shareds("shared_vars", shared_vars)
    return sum(int(np.prod(_shape(variable), dtype=np.int64)) for variable in variables)


def flatten_vars(variables, into=None):
    """Return the elements of all variables as one vector.

    Parameters
    ----------
    variables : list of tensor variables, or of pairs (tensor variable, number of elements)
        Pairs where `into` is given.
    into : vector, optional
        What to write them into, one after another. The expression is a chain of
        ``T.set_subtensor``: as the update of `into`, Theano evaluates it in place, and the vector
        stays where it is in memory. Without it the result is a new vector.
    """
    if into is None:
        variables = check_variables("variables", variables)
        if not variables:
            raise ValueError("variables is empty: there is nothing to flatten.")
        return T.concatenate([variable.flatten() for variable in variables])
    begin = 0
    result = check_tensor("into", into)
    for variable, size in _check_sizes(variables):
        part = T.cast(variable.flatten(), into.dtype)
        result = T.set_subtensor(result[begin : begin + size], part)
        begin += size
    return result


def unflatten_vars(flat, shared_vars):
    """Return parts of a vector with the shapes and dtypes of shared variables.

    Parameters
    ----------
    flat : vector of length ``vars_flat_size(shared_vars)``
    shared_vars : list of shared variables

    Returns
    -------
    list of tensor variables
        Views of `flat`, where the dtypes are the same.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> shareds = [theano.shared(np.zeros((2, 2))), theano.shared(np.zeros(1))]
    >>> matrix, vector = unflatten_vars(T.arange(5.0), shareds)
    >>> matrix.eval().tolist(), vector.eval().tolist()
    ([[0.0, 1.0], [2.0, 3.0]], [4.0])
    """
    parts, begin = [], 0
    check_tensor("flat", flat)
    for variable in check_shareds("shared_vars", shared_vars):
        shape = _shape(variable)
        size = int(np.prod(shape, dtype=np.int64))
        part = flat[begin : begin + size].reshape(shape, ndim=len(shape))
        parts.append(T.cast(T.patternbroadcast(part, variable.broadcastable), variable.dtype))
        begin += size
    return parts


def flat_unflat_grads(loss, params):
    """Return a shared vector for the gradients, what to update it with, and its parts.

    Parameters
    ----------
    loss : scalar
        A mean over rows.
    params : list of shared variables
        They keep their shapes; the vector has the dtype that holds all of theirs.

    Returns
    -------
    flat_shared : shared vector
        Zeros, named ``flat_grad_s``.
    flat_grad : vector
        The update of `flat_shared`: the gradients, written into it in place, times what each rank
        weighs (:func:`synkhronos.ops.rank_weight`).
    unflat_grads : list of tensor variables
        The parts of `flat_shared`, in the shapes of `params`.
    """
    params = check_params(params)
    dtype = np.result_type(*[param.dtype for param in params])
    flat = theano.shared(np.zeros(vars_flat_size(params), dtype), "flat_grad_s")
    pairs = [(g, vars_flat_size([p])) for g, p in zip(_weighted_grads(loss, params), params)]
    return flat, flatten_vars(pairs, into=flat), unflatten_vars(flat, params)


def nonflat_grads(loss, params):
    """Return a shared variable for the gradient of each parameter, and what to update it with.

    The latter are weighted as in :func:`flat_unflat_grads`.
    """
    params = check_params(params)
    shareds = [
        theano.shared(
            np.zeros(_shape(param), param.dtype),
            f"{param.name or 'param'}_grad_s",
            broadcastable=param.broadcastable,
        )
        for param in params
    ]
    return shareds, _weighted_grads(loss, params)


def sgd_nonflat(loss, params, learning_rate):
    """Stochastic gradient descent with one shared variable for each gradient, in a list.

    Parameters
    ----------
    loss, params, learning_rate
        As in :func:`sgd`.

    Returns
    -------
    grad_updates, param_updates : list of (shared variable, expression)
    grad_shared : list of shared variables
        ``synk.all_reduce(grad_shared)`` takes one round for all of them too.
    """
    params = check_params(params)
    shareds, grads = nonflat_grads(loss, params)
    updates = rules.sgd(shareds, params, learning_rate)
    return list(zip(shareds, grads)), list(updates.items()), shareds


def apply_momentum(param_updates, momentum=0.9, *, params=None):
    """Give the steps of a rule a velocity: :func:`synkhronos.extensions.rules.apply_momentum`.

    Parameters
    ----------
    param_updates : list of (shared variable, expression)
    momentum : float or scalar variable
    params : list of shared variables, optional
        Which variables get one; by default all of `param_updates`, so name them after rules that
        also update what they keep, such as :func:`adam`.

    Returns
    -------
    list of (shared variable, expression)
    """
    return list(rules.apply_momentum(param_updates, params, momentum).items())


def apply_nesterov_momentum(param_updates, momentum=0.9, *, params=None):
    """Give the steps of a rule a velocity that looks ahead.

    See :func:`synkhronos.extensions.rules.apply_nesterov_momentum`; arguments and result are those
    of :func:`apply_momentum`.
    """
    return list(rules.apply_nesterov_momentum(param_updates, params, momentum).items())


def _in_two_steps(rule):
    """Return a rule that has the gradients reduced between two functions."""
    signature = inspect.signature(rule)
    first, *others = signature.parameters.values()

    @functools.wraps(rule)
    def two_steps(loss, params, *args, **kwargs):
        # A wrong argument is told of here, before the gradients are derived.
        try:
            signature.bind(loss, params, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{rule.__name__}(): {error}.") from None
        params = check_params(params)
        flat, flat_grad, grads = flat_unflat_grads(loss, params)
        updates = rule(grads, params, *args, **kwargs)
        return [(flat, flat_grad)], list(updates.items()), flat

    two_steps.__module__ = __name__
    two_steps.__signature__ = signature.replace(parameters=[first.replace(name="loss"), *others])
    two_steps.__doc__ = _DOCUMENTATION.format(
        summary=inspect.getdoc(rule).split("\n\nParameters\n", 1)[0], name=rule.__name__
    )
    del two_steps.__wrapped__
    return two_steps


_DOCUMENTATION = """{summary}

Parameters
----------
loss : scalar variable
    A mean over rows.
params, ...
    As in :func:`synkhronos.extensions.rules.{name}`.

Returns
-------
grad_updates, param_updates : list of (shared variable, expression)
    For the function that computes the loss, and for the one that is called after
    ``synk.all_reduce(grad_shared)``.
grad_shared : shared vector
    The gradients of all parameters.
"""

sgd = _in_two_steps(rules.sgd)
momentum = _in_two_steps(rules.momentum)
nesterov_momentum = _in_two_steps(rules.nesterov_momentum)
adagrad = _in_two_steps(rules.adagrad)
rmsprop = _in_two_steps(rules.rmsprop)
adadelta = _in_two_steps(rules.adadelta)
adam = _in_two_steps(rules.adam)
adamax = _in_two_steps(rules.adamax)


def _weighted_grads(loss, params):
    weight = T.cast(ops.rank_weight(), check_loss(loss).dtype)
    return derive(loss * weight, params)


def _check_sizes(variables):
    for pair in variables if isinstance(variables, (list, tuple)) else [variables]:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise TypeError(
                "variables must be a list of pairs (tensor variable, number of elements) where "
                f"into is given, got {pair!r}."
            )
        check_tensor("variables", pair[0], "a list of pairs (tensor variable, number of elements)")
        whole_number("The number of elements in variables", pair[1], 0, sys.maxsize)
    return variables


def _shape(variable):
    return variable.get_value(borrow=True).shape
