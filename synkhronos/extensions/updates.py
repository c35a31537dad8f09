"""Update rules in two steps, with the gradients in one flat vector between them.

    grads ──▶ flat vector of each rank ── all_reduce ──▶ the same vector ──▶ params
    f1: grad_updates                                         f2: param_updates

Every rule returns ``(grad_updates, param_updates, grad_shared)``::

    grad_updates, param_updates, grad_shared = sgd(loss, params, learning_rate=0.1)
    compute = synk.function([x, y], loss, updates=grad_updates)
    update = synk.function([], updates=param_updates)
    ...
    compute(x_data, y_data)
    synk.all_reduce(grad_shared)
    update()

`loss` must be a mean over rows. One vector costs one round whatever the number of parameters, and
it never moves: the gradients are written into it where it lies in shared memory.
"""

import numpy as np
import theano
import theano.tensor as T

__all__ = [
    "flat_unflat_grads",
    "flatten_vars",
    "nonflat_grads",
    "sgd",
    "unflatten_vars",
    "vars_flat_size",
]


def vars_flat_size(shared_vars) -> int:
    """Return how many elements shared variables have together.

    >>> import numpy as np, theano
    >>> vars_flat_size([theano.shared(np.zeros((2, 3))), theano.shared(1.0)])
    7
    """
    return sum(int(np.prod(_shape(variable), dtype=np.int64)) for variable in shared_vars)


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
        return T.concatenate([variable.flatten() for variable in variables])
    begin = 0
    result = into
    for variable, size in variables:
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
    for variable in shared_vars:
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
    params : list of shared variables
        They keep their shapes; the vector has the dtype that holds all of theirs.

    Returns
    -------
    flat_shared : shared vector
        Zeros, named ``flat_grad_s``.
    flat_grad : vector
        The update of `flat_shared`: the gradients, written into it in place.
    unflat_grads : list of tensor variables
        The parts of `flat_shared`, in the shapes of `params`.
    """
    params = _check_params(params)
    dtype = np.result_type(*[param.dtype for param in params])
    flat = theano.shared(np.zeros(vars_flat_size(params), dtype), "flat_grad_s")
    pairs = [(g, vars_flat_size([p])) for g, p in zip(T.grad(loss, params), params)]
    return flat, flatten_vars(pairs, into=flat), unflatten_vars(flat, params)


def nonflat_grads(loss, params):
    """Return a shared variable for the gradient of each parameter, and what to update it with."""
    params = _check_params(params)
    grads = T.grad(loss, params)
    shareds = [
        theano.shared(
            np.zeros_like(param.get_value(borrow=True)),
            f"{param.name or 'param'}_grad_s",
            broadcastable=param.broadcastable,
        )
        for param in params
    ]
    return shareds, grads


def sgd(loss, params, learning_rate):
    r"""Stochastic gradient descent: :math:`p \leftarrow p - \eta\, \partial L / \partial p`.

    Parameters
    ----------
    loss : scalar
        A mean over rows.
    params : list of shared variables
    learning_rate : float or scalar variable

    Returns
    -------
    grad_updates, param_updates : list of (shared variable, expression)
        For the function that computes the loss, and for the one that is called after
        ``synk.all_reduce(grad_shared)``.
    grad_shared : shared vector
        The gradients of all parameters.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x, w = T.dmatrix(), theano.shared(np.zeros(2))
    >>> loss = ((T.dot(x, w) - 1) ** 2).mean()
    >>> grad_updates, param_updates, grad_shared = sgd(loss, [w], 0.25)
    >>> compute = synk.function([x], loss, updates=grad_updates)
    >>> update = synk.function([], updates=param_updates)
    >>> float(compute(np.eye(2)))
    1.0
    >>> synk.all_reduce(grad_shared)
    >>> update()
    []
    >>> synk.gather(w)
    array([[0.25, 0.25],
           [0.25, 0.25]])
    >>> synk.close()
    """
    flat, flat_grad, grads = flat_unflat_grads(loss, params)
    param_updates = [
        (param, param - T.cast(learning_rate, param.dtype) * grad)
        for param, grad in zip(params, grads)
    ]
    return [(flat, flat_grad)], param_updates, flat


def _check_params(params):
    params = list(params)
    for param in params:
        if not isinstance(param, theano.compile.SharedVariable):
            raise TypeError(f"params must be a list of shared variables, got {param!r} in it.")
        if np.dtype(param.dtype).kind != "f":
            raise TypeError(f"params must be of floats, got {param} of dtype {param.dtype}.")
    if not params:
        raise ValueError("params is empty: there is nothing to train.")
    return params


def _shape(variable):
    return variable.get_value(borrow=True).shape
