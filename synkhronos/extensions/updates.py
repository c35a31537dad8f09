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

`loss` must be a mean over rows. Each rank's gradients are weighted with its number of rows, so the
average over the ranks equals that over all rows, also where rows do not divide evenly. One vector
takes one round for any number of parameters. The gradients are written into it in place, in shared
memory.

The mathematics is that of :mod:`synkhronos.extensions.update_rules`; names and results are those of
the 2017 package.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, Callable, Sequence

import numpy as np

from synkhronos import ops
from synkhronos._hints import SharedVariable, Variable
from synkhronos._host import fix_axes, library, shared_zeros
from synkhronos._host import tensor as T
from synkhronos._wording import whole_number
from synkhronos.extensions import update_rules
from synkhronos.extensions._gradients import (
    check_loss,
    check_params,
    check_shareds,
    check_tensor,
    check_variables,
    derive,
)
from synkhronos.extensions._hints import (
    Scalar,
    TwoStepRule,
    TwoSteps,
    UpdatePairs,
    Updates,
    UpdatesLike,
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
        parts = check_variables("variables", variables)
        if not parts:
            raise ValueError("variables is empty: there is nothing to flatten.")
        return T.concatenate([part.flatten() for part in parts])
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
    """Mark variables that the script reduces after each call, so that `check=True` skips them."""
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


def sgd_nonflat(
    loss: Variable, params: Sequence[SharedVariable], learning_rate: Scalar
) -> tuple[UpdatePairs, UpdatePairs, list[SharedVariable]]:
    """Step down the gradient, with one shared variable for each gradient, in a list.

    Parameters
    ----------
    loss, params, learning_rate
        As in :func:`sgd`.

    Returns
    -------
    grad_updates, param_updates : list of (shared variable, expression)
    grad_shared : list of shared variables
        ``synk.all_reduce(grad_shared)`` takes one round for all of them too.

    Raises
    ------
    TypeError, ValueError
        As :func:`~synkhronos.extensions.update_rules.sgd`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.array([1.0, 10.0]), "w")
    >>> grad_updates, param_updates, grad_shared = sgd_nonflat((w**2).sum(), [w], 0.1)
    >>> theano.function([], updates=grad_updates)(), theano.function([], updates=param_updates)()
    ([], [])
    >>> grad_shared[0].get_value(), w.get_value()
    (array([ 2., 20.]), array([0.8, 8. ]))
    """
    params = check_params(params)
    shareds, grads = nonflat_grads(loss, params)
    updates = update_rules.sgd(shareds, params, learning_rate)
    return list(zip(shareds, grads)), list(updates.items()), shareds


def apply_momentum(
    param_updates: UpdatesLike,
    momentum: Scalar = 0.9,
    *,
    params: Sequence[SharedVariable] | None = None,
) -> UpdatePairs:
    """Give the steps of a rule a velocity.

    See :func:`synkhronos.extensions.update_rules.apply_momentum`.

    Parameters
    ----------
    param_updates : list of (shared variable, expression)
    momentum : float or scalar variable
    params : list of shared variables, optional
        The variables that get a velocity; by default all of `param_updates`. Give them after rules
        that also update state of their own, such as :func:`adam`.

    Returns
    -------
    list of (shared variable, expression)

    Raises
    ------
    TypeError, ValueError
        As :func:`synkhronos.extensions.update_rules.apply_momentum`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.ones(1), "w")
    >>> train = theano.function([], updates=apply_momentum([(w, w - 0.1)]))
    >>> _ = train(), train()
    >>> w.get_value()  # 1 - 0.1 - (0.9 * 0.1 + 0.1)
    array([0.71])
    """
    return list(update_rules.apply_momentum(param_updates, params, momentum).items())


def apply_nesterov_momentum(
    param_updates: UpdatesLike,
    momentum: Scalar = 0.9,
    *,
    params: Sequence[SharedVariable] | None = None,
) -> UpdatePairs:
    """Give the steps of a rule a velocity that looks ahead.

    See :func:`synkhronos.extensions.update_rules.apply_nesterov_momentum`; arguments and result are
    those of :func:`apply_momentum`.

    Raises
    ------
    TypeError, ValueError
        As :func:`synkhronos.extensions.update_rules.apply_momentum`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> w = theano.shared(np.ones(1), "w")
    >>> dict(apply_nesterov_momentum([(w, w - 0.1)]))[w].eval()  # 1 - 0.9 * 0.1 - 0.1
    array([0.81])
    """
    return list(update_rules.apply_nesterov_momentum(param_updates, params, momentum).items())


def _in_two_steps(rule: Callable[..., Updates], after: str) -> TwoStepRule:
    """Return a rule in two steps, whose example ends with the values `after`."""
    signature = inspect.signature(rule)
    first, *others = signature.parameters.values()

    @functools.wraps(rule, assigned=("__name__", "__qualname__"))
    def two_steps(loss: Variable, params: Any, *args: Any, **kwargs: Any) -> TwoSteps:
        # Checked before the gradients are derived, which takes long.
        try:
            signature.bind(loss, params, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{rule.__name__}(): {error}.") from None
        params = check_params(params)
        flat, flat_grad, grads = flat_unflat_grads(loss, params)
        updates = rule(grads, params, *args, **kwargs)
        return [(flat, flat_grad)], list(updates.items()), flat

    made: Any = two_steps  # a Callable has no __signature__ that could be set
    own = {name: made.__annotations__[name] for name in ("loss", "return")}
    parameters = [first.replace(name="loss", annotation=own["loss"]), *others]
    made.__signature__ = signature.replace(parameters=parameters, return_annotation=own["return"])
    made.__annotations__ = {**{p.name: p.annotation for p in parameters}, **own}
    made.__doc__ = _DOCUMENTATION.format(
        summary=(inspect.getdoc(rule) or "").split("\n\nParameters\n", 1)[0],
        name=rule.__name__,
        after=after,
    )
    del made.__wrapped__
    return made


_DOCUMENTATION = """{summary}

Parameters
----------
loss : scalar variable
    A mean over rows.
params, ...
    As in :func:`synkhronos.extensions.update_rules.{name}`.

Returns
-------
grad_updates, param_updates : list of (shared variable, expression)
    For the function that computes the loss, and for the one that is called after
    ``synk.all_reduce(grad_shared)``.
grad_shared : shared vector
    The gradients of all parameters.

Raises
------
TypeError, ValueError
    As :func:`synkhronos.extensions.update_rules.{name}`.

Examples
--------
>>> import numpy as np, theano
>>> w = theano.shared(np.array([1.0, 10.0]), "w")
>>> grad_updates, param_updates, grad_shared = {name}((w**2).sum(), [w], learning_rate=0.1)
>>> _ = theano.function([], updates=grad_updates)()
>>> grad_shared.get_value()
array([ 2., 20.])
>>> _ = theano.function([], updates=param_updates)()  # on ranks: all_reduce(grad_shared) before
>>> w.get_value().round(4).tolist()
{after}
"""

sgd = _in_two_steps(update_rules.sgd, after="[0.8, 8.0]")
momentum = _in_two_steps(update_rules.momentum, after="[0.8, 8.0]")
nesterov_momentum = _in_two_steps(update_rules.nesterov_momentum, after="[0.62, 6.2]")
adagrad = _in_two_steps(update_rules.adagrad, after="[0.9, 9.9]")
rmsprop = _in_two_steps(update_rules.rmsprop, after="[0.6838, 9.6838]")
adadelta = _in_two_steps(update_rules.adadelta, after="[0.9996, 9.9996]")
adam = _in_two_steps(update_rules.adam, after="[0.9, 9.9]")
adamax = _in_two_steps(update_rules.adamax, after="[0.9, 9.9]")
