"""Flat vectors that hold the elements of several variables; gradients in shared variables.

`updates` exports the public functions.
"""

from __future__ import annotations

import sys
from typing import Sequence

import numpy as np

from synkhronos import ops
from synkhronos._hints import SharedVariable, Variable
from synkhronos._host import fix_axes, library, shared_zeros
from synkhronos._host import tensor as T
from synkhronos._wording import whole_number
from synkhronos.extensions._gradients import (
    check_loss,
    check_params,
    check_shareds,
    check_tensor,
    check_variables,
    derive,
)


def vars_flat_size(shared_vars: Sequence[SharedVariable]) -> int:
    """Return the number of elements that shared variables have together.

    Raises
    ------
    TypeError
        For anything but a list of shared variables.

    Examples
    --------
    >>> import numpy as np, theano
    >>> vars_flat_size([theano.shared(np.zeros((2, 3))), theano.shared(1.0)])
    7
    """
    variables = check_shareds("shared_vars", shared_vars)
    return sum(int(np.prod(_shape(variable), dtype=np.int64)) for variable in variables)


def flatten_vars(
    variables: Sequence[Variable] | Sequence[tuple[Variable, int]], into: Variable | None = None
) -> Variable:
    """Return the elements of all variables as one vector.

    Parameters
    ----------
    variables : list of tensor variables, or of pairs (tensor variable, number of elements)
        Pairs where `into` is given.
    into : vector, optional
        The vector that the elements are written into, one variable after another. The expression
        is a chain of ``T.set_subtensor``: as the update of `into`, Theano evaluates it in place,
        and the vector stays where it is in memory. Without `into` the result is a new vector.

    Raises
    ------
    TypeError
        For anything but a list of tensor variables, or of pairs where `into` is given.

    Examples
    --------
    >>> import theano.tensor as T
    >>> matrix, vector = T.ones((2, 2)), T.arange(2.0)
    >>> flatten_vars([matrix, vector]).eval()
    array([1., 1., 1., 1., 0., 1.])
    >>> flatten_vars([(matrix, 4), (vector, 2)], into=T.zeros(6)).eval()
    array([1., 1., 1., 1., 0., 1.])
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


def unflatten_vars(flat: Variable, shared_vars: Sequence[SharedVariable]) -> list[Variable]:
    """Return parts of a vector with the shapes and dtypes of shared variables.

    Parameters
    ----------
    flat : vector of length ``vars_flat_size(shared_vars)``
    shared_vars : list of shared variables

    Returns
    -------
    list of tensor variables
        Views of `flat`, where the dtypes are the same.

    Raises
    ------
    TypeError
        For a `flat` that is no tensor variable, and anything but a list of shared variables.

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
        parts.append(T.cast(fix_axes(part, variable), variable.dtype))
        begin += size
    return parts


def flat_unflat_grads(
    loss: Variable, params: Sequence[SharedVariable]
) -> tuple[SharedVariable, Variable, list[Variable]]:
    """Return a shared vector for the gradients, the expression of its update, and its parts.

    Parameters
    ----------
    loss : scalar
        A mean over rows.
    params : list of shared variables
        The shapes must not change later. The vector has the dtype that holds all of theirs.

    Returns
    -------
    flat_shared : shared vector
        Zeros, named ``flat_grad_s``.
    flat_grad : vector
        The update of `flat_shared`: the gradients, written into it in place, times the weight of
        the rank (:func:`synkhronos.ops.rank_weight`).
    unflat_grads : list of tensor variables
        The parts of `flat_shared`, in the shapes of `params`.

    Raises
    ------
    TypeError, ValueError
        As :func:`~synkhronos.extensions.update_rules.sgd`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> v, w = theano.shared(np.ones((1, 2)), "v"), theano.shared(np.ones(1), "w")
    >>> flat_shared, flat_grad, unflat_grads = flat_unflat_grads(v.sum() + 3 * w.sum(), [v, w])
    >>> flat_shared.get_value(), flat_grad.eval(), [grad.ndim for grad in unflat_grads]
    (array([0., 0., 0.]), array([1., 1., 3.]), [2, 1])
    """
    params = check_params(params)
    dtype = np.result_type(*[param.dtype for param in params])
    flat = library.shared(np.zeros(vars_flat_size(params), dtype), "flat_grad_s")
    _mark_reduced([flat])
    pairs = [(g, vars_flat_size([p])) for g, p in zip(_weighted_grads(loss, params), params)]
    return flat, flatten_vars(pairs, into=flat), unflatten_vars(flat, params)


def nonflat_grads(
    loss: Variable, params: Sequence[SharedVariable]
) -> tuple[list[SharedVariable], list[Variable]]:
    """Return a shared variable for the gradient of each parameter, and its update's expression.

    The gradients are weighted as in :func:`flat_unflat_grads`.

    Raises
    ------
    TypeError, ValueError
        As :func:`~synkhronos.extensions.update_rules.sgd`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.ones(2), "w")
    >>> [grad_shared], [grad] = nonflat_grads((w**2).sum(), [w])
    >>> grad_shared, grad.eval()
    (w_grad_s, array([2., 2.]))
    """
    params = check_params(params)
    shareds = [
        shared_zeros(param, param.dtype, f"{param.name or 'param'}_grad_s") for param in params
    ]
    _mark_reduced(shareds)
    return shareds, _weighted_grads(loss, params)


def _mark_reduced(shareds):
    """Mark variables that the script reduces after each call: `check=True` is not to tell of them.

    What is computed with them is compared.
    """
    for shared in shareds:
        shared.tag.is_reduced_after_call = True


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
