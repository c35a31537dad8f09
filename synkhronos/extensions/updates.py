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
takes one round for any number of parameters. It never moves: the gradients are written into it
where it lies in shared memory.

The mathematics is that of :mod:`synkhronos.extensions.update_rules`; names and results are those of
the 2017 package.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Sequence

from synkhronos._hints import (
    Scalar,
    SharedVariable,
    TwoStepRule,
    TwoSteps,
    UpdatePairs,
    Updates,
    UpdatesLike,
    Variable,
)
from synkhronos.extensions import update_rules
from synkhronos.extensions._flat import (
    flat_unflat_grads,
    flatten_vars,
    nonflat_grads,
    unflatten_vars,
    vars_flat_size,
)
from synkhronos.extensions._gradients import check_params

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

    made: Any = two_steps  # a callable, as which it has no __signature__ to be set
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
