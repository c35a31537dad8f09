r"""Training functions from a loss, its parameters and an update rule.

    make_train_step       loss, gradients, rule ──▶ a serial step ──▶ divided over the ranks
    ... with a store      rows ──▶ loss ──▶ gradients ──▶ store.push, store.pull ──▶ rule ──▶ params
    make_train_function   rows ──▶ loss ──▶ gradients in a flat vector
                          synk.all_reduce(vector) ──▶ rule ──▶ params

All train as serial Theano does on the same rows, and leave the same bits on all ranks. The loss of
``make_train_step`` may be anything: if it is a mean over rows, the ranks average their gradients,
else they add up each sum that it is made of. ``make_train_step`` makes one function and takes any
rule: Lasagne's, an optimizer of Keras, those of :mod:`~synkhronos.extensions.update_rules`, your
own. ``make_train_function`` makes two functions, as in the 2017 package.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from typing import Any, Callable, Sequence

import numpy as np

from synkhronos import _host, collectives, functions, ops
from synkhronos._calls.proof import place_of
from synkhronos._calls.signature import check_pairs
from synkhronos._hints import Output, SharedVariable, Variable
from synkhronos._host import CannotDivide, compiling, library
from synkhronos._host import tensor as T
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._wording import advise, sentence, shown, whole_number
from synkhronos.extensions import _dividing, _server_steps
from synkhronos.extensions._gradients import (
    check_loss,
    check_max_norm,
    check_number,
    check_params,
    check_rule,
    check_tensor,
    clip_by_global_norm,
    gradients,
    rule_updates,
)
from synkhronos.extensions._hints import Rule, Scalar, TwoStepRule, Updates, UpdatesLike
from synkhronos.extensions._server_steps import StoredStep

__all__ = [
    "StoredStep",
    "average_gradients",
    "average_updates",
    "clip_by_global_norm",
    "make_train_function",
    "make_train_function_theano",
    "make_train_step",
    "parallel_updates",
    "warm_up",
]


PER_RANK = None, "loss", "normalization"


def make_train_step(
    inputs: list[Variable],
    loss: Variable,
    params: Sequence[SharedVariable],
    update_rule: Rule | None,
    *args: Any,
    max_norm: Scalar | None = None,
    outputs: Sequence[Output] | None = None,
    averages: UpdatesLike | None = None,
    options: dict[str, Any] | None = None,
    store: Any = None,
    devid: int | None = None,
    keys: Sequence[int | str] | None = None,
    batch_rows: int | None = None,
    per_rank: str | None = None,
    **kwargs: Any,
) -> functions.Function | StoredStep:
    """Return one function that takes a step of training on all ranks, as serial Theano would.

    The step is first built as for one process: the loss, its gradients, the rule's updates, and
    default updates, such as running means of a batch normalization. Then it is divided over the
    ranks, so that each value is that of all rows, to rounding: also masked and weighted means,
    sums, norms, and values that use statistics of the minibatch. If an operation has no rule for
    this, a PortingWarning names it, its line and what to write, and each rank computes the whole
    minibatch, which is right but no faster.

    With a `store` of :mod:`synkhronos.parameter_server` it is a step of one device, in this process
    or thread alone, without a session: each gradient is pushed as soon as it is computed, and its
    sum over all devices is awaited in the next call, just before the parameter is first used.

    Parameters
    ----------
    inputs : list of theano variable
        Inputs that are scattered along axis 0, such as x and y.
    loss : scalar variable
        With a `store`, a mean over rows.
    params : list of shared variables
    update_rule : callable or object
        ``rule(grads, params, ...)`` that returns updates, as Lasagne's rules do; or an object with
        a method ``get_updates(loss, params)``, such as an optimizer of Keras.
    *args, **kwargs
        For the rule.
    max_norm : float, optional
        Clip the gradients, averaged over all ranks, to this global norm.
    outputs : list of variable or (variable, mode), optional
        Outputs to return after the loss, with their serial values. A mode is needed only for
        something else, such as ``(loss, "gather")``, the loss of each rank's rows.
    averages : list of (shared variable, expression) or OrderedDict, optional
        Further updates, such as of running statistics; with a `store`, or with `per_rank`, they are
        averaged: see :func:`average_updates`.
    options : dict, optional
        Keywords for :func:`synkhronos.function`, such as ``bcast_inputs`` or ``givens``; with a
        `store` for ``theano.function``, and ``bcast_inputs``.
    store : Store, optional
        Each device makes the step, in its own process or thread, and all call it equally often. If
        the store has an updater, `update_rule` is None: pulls return weights.
    devid : int, optional
        The device of the store, if it has several.
    keys : list of int or str, optional
        The key of each parameter in the store, in the order of first use in the forward pass,
        which is the order of their priorities. By default the parameters' names.
    batch_rows : int, optional
        With a `store`: the number of rows that all devices together have in each step. Without
        it each call pushes its number of rows along, so that devices may have unequally many.
    per_rank : {None, "loss", "normalization"}
        Without a `store`: which values each rank computes from its own rows. ``"loss"``: the ranks
        average the gradients of their own losses, in one round, as PyTorch's
        ``DistributedDataParallel`` does. ``"normalization"``: batch normalizations use the
        statistics of each rank's rows, which saves four rounds for each, and the rest of the loss
        must be a mean over rows. Running statistics are averaged then, so that they are equal on
        all ranks.

    Returns
    -------
    synkhronos.functions.Function
        ``step(*inputs, batch=...)`` returns the loss over all rows, or a list of it and `outputs`.
        With ``num_slices``, for a loss that is a mean over rows, the step is taken for each slice,
        and the results are averaged: the same step only for rules that are linear in the gradient,
        without `max_norm`. With a `store` the step takes the device's own rows and returns their
        loss, and ``step.finish()`` applies the update of the last call.

    Raises
    ------
    SessionError
        Before :func:`synkhronos.fork`, without a `store`.
    TypeError, ValueError
        For arguments that don't fit, and ``per_rank="normalization"`` with a loss that is no mean
        over rows. In a call, for slices of a loss that is no mean over rows.

    Notes
    -----
    ``set_value`` of a parameter, or of a learning rate that is a shared variable, reaches the
    master only: give all ranks the new value with :func:`synkhronos.broadcast`. With a `store` it
    reaches this device only.

    With a `store`, parameters and the rule's state are one step behind between two calls.
    ``get_value`` and ``set_value`` finish the step first. A function of ``theano.function`` that
    uses them raises unless ``step.finish()`` was called. All devices begin with the parameters of
    worker 0, and there of the device that makes the step first. `params` are best in the order of
    the forward pass. Make the steps of all devices in the same order.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> from synkhronos.extensions import train, update_rules
    >>> synk.fork(2)
    2
    >>> x, y, w = T.dmatrix("x"), T.dvector("y"), theano.shared(np.zeros(2), "w")
    >>> loss = ((T.dot(x, w) - y) ** 2).mean()
    >>> step = train.make_train_step([x, y], loss, [w], update_rules.adam, learning_rate=0.1)
    >>> float(step([[1, 2], [3, 4], [5, 6]], [1, 1, 1]))
    1.0
    >>> synk.gather(w).round(3)
    array([[0.1, 0.1],
           [0.1, 0.1]])

    A mean over the items that a mask leaves is that of all ranks' items:

    >>> m = T.dvector("m")
    >>> masked = (m * (T.dot(x, w) - y) ** 2).sum() / m.sum()
    >>> step = train.make_train_step([x, y, m], masked, [w], update_rules.sgd, learning_rate=0.0)
    >>> float(step([[0, 0]] * 4, [0, 2, 4, 6], [1, 1, 1, 0]))  # (0 + 4 + 16) / 3
    6.666666666666667
    >>> synk.close()

    With a store, here of one device:

    >>> from synkhronos import parameter_server as ps
    >>> w.set_value(np.zeros(2))
    >>> with ps.create("local", devices=[0]) as store:
    ...     step = train.make_train_step(
    ...         [x, y], loss, [w], update_rules.adam, learning_rate=0.1, store=store
    ...     )
    ...     print(step([[1, 2], [3, 4], [5, 6]], [1, 1, 1]), w.get_value().round(3))
    1.0 [0.1 0.1]
    """
    if not isinstance(options, (dict, type(None))):
        raise TypeError(f"options must be a dict of keywords for function(), got {shown(options)}.")
    taken = {"inputs", "outputs", "updates"} & set(options or ())
    if taken:
        raise TypeError(
            f"options can't have {sorted(taken)}, which make_train_step gives. For updates of your "
            "own, build the function from parallel_updates."
        )
    if not isinstance(outputs, (list, tuple, type(None))):
        raise TypeError(
            f"outputs must be a list of outputs to return beside the loss, got {shown(outputs)}."
        )
    if not isinstance(per_rank, (str, type(None))) or per_rank not in PER_RANK:
        error = ValueError if isinstance(per_rank, str) else TypeError
        raise error(f"per_rank must be one of {PER_RANK}, got {shown(per_rank)}.")
    if store is not None and not hasattr(store, "pull_req"):
        raise TypeError(
            "store must be a store of the parameter server, or None for a session, got "
            f"{shown(store)}."
        )
    if store is not None and per_rank is not None:
        raise TypeError(
            f"per_rank={per_rank!r}: only without a store. With one each device computes the loss "
            "and the normalizations of its own rows in any case."
        )
    if store is not None:
        with compiling:  # Theano's rules, random numbers and compiler are for one thread at a time
            return _server_steps.make(
                inputs, loss, params, update_rule, args, kwargs, max_norm=max_norm, outputs=outputs,
                averages=averages, options=options, store=store, devid=devid, keys=keys,
                batch_rows=batch_rows,
            )  # fmt: skip
    given = {"devid": devid, "keys": keys, "batch_rows": batch_rows}
    without = [name for name, value in given.items() if value is not None]
    if without:
        raise TypeError(f"{', '.join(without)}: only with a store.")
    if update_rule is None:
        raise TypeError("update_rule must be a rule, got None: only a store has an updater.")
    check_rule(update_rule)
    averages = check_pairs("averages", {} if averages is None else averages)
    returned = loss if outputs is None else [loss, *outputs]
    return _make(
        inputs, loss, check_params(params), returned, averages, options or {}, max_norm, per_rank,
        functools.partial(rule_updates, update_rule, args=args, kwargs=kwargs),
    )  # fmt: skip


def _make(inputs, loss, params, returned, averages, options, max_norm, per_rank, rule):
    """Return the function of a step; ``rule(grads, params)`` returns its updates."""

    def updates(average):
        grads = [grad for _, grad in gradients(loss, params)]
        if average:
            grads = list(map(ops.all_reduce, grads))
        if max_norm is not None:
            grads = clip_by_global_norm(grads, max_norm)
        statistics = average_updates(averages) if per_rank else dict(averages)
        pairs = [*rule(grads, params).items(), *statistics.items()]
        return check_pairs("What the update rule returns and averages", pairs)

    check_loss(loss)
    if max_norm is not None:
        check_max_norm(max_norm)
    if per_rank is None:
        outputs = returned[1:] if isinstance(returned, list) else []
        others = [each[0] if isinstance(each, tuple) else each for each in outputs]
        others += [T.as_tensor_variable(each) for _, each in averages]
        is_average = _dividing.is_average(inputs, loss, options, others=others)
        return _divide(inputs, returned, updates, is_average, options)
    if per_rank == "normalization" and not _dividing.is_average(inputs, loss, options, True):
        raise ValueError(
            'per_rank="normalization", but the loss is no mean over rows, so that ranks can\'t '
            "average their gradients. Leave per_rank out, for the loss of all rows; or write "
            'per_rank="loss", for the average of the ranks\' own losses.'
        )
    return _dividing.function_of_each_rank(inputs, returned, updates(True), {**options, "check": 0})


def _divide(inputs, outputs, updates, is_average, options):
    """Return a step with serial values, else undivided or of each rank's own loss; warn of both."""
    try:
        return _dividing.function_as_serial(inputs, outputs, updates(is_average), options)
    except CannotDivide as error:
        reason = error
    try:
        step = _dividing.undivided(inputs, outputs, updates(False), options)
    except CannotDivide:
        advise(_about_loss(reason))
        return _dividing.function_of_each_rank(inputs, outputs, updates(True), options)
    advise(_about_loss(reason, is_right=True))
    return step


def _about_loss(error, is_right=False):
    """Return the warning for a step that can't be divided; it `is_right` if made undivided."""
    whole = "each rank computes the whole minibatch: the step is right, but no faster than serially"
    own = (
        "the ranks average the gradients of their own losses, which is another step than that "
        f"of serial {_host.title} unless the loss is a mean over rows"
    )
    return (
        f"The step of training can't be divided over the ranks: it {sentence(error)[:-1]}"
        f"{place_of(error.variable)}. So {whole if is_right else own}. {error.instead} If an "
        'average of the ranks\' own losses is what you want, write per_rank="loss".'
    )


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

    It trains as serial Theano does, like :func:`make_train_step`. If the loss is no mean over rows,
    the ranks reduce inside the first step, in place of the collective.

    Parameters
    ----------
    loss : scalar variable
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
    is_average = _dividing.is_average([x, y], check_loss(loss), {})
    if is_average:
        compute = functions.function([x, y], loss, updates=grad_updates, check=0)
    else:
        compute = _divide([x, y], loss, lambda _: list(grad_updates), False, {})
    update = functions.function([], updates=param_updates)

    def train_minibatch(x_data, y_data, batch=None, num_slices=1):
        value = compute(x_data, y_data, batch=batch, num_slices=num_slices)
        if is_average:
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


def parallel_updates(
    loss: Variable,
    params: Sequence[SharedVariable],
    update_rule: Rule,
    *args: Any,
    max_norm: Scalar | None = None,
    **kwargs: Any,
) -> Updates:
    """Return the updates of a rule whose gradients are averaged over the ranks.

    Parameters
    ----------
    loss, params, update_rule, *args, max_norm, **kwargs
        As in :func:`make_train_step`.

    Returns
    -------
    OrderedDict
        Shared variable -> expression: the ``updates`` of a :func:`synkhronos.function`.

    Raises
    ------
    TypeError
        For an `update_rule` that is no rule, is one of :mod:`synkhronos.extensions.updates`, or
        returns no updates, for arguments to an object that has settings of its own, and as
        :func:`average_gradients`.
    ValueError
        As :func:`average_gradients`, and for a variable that is updated twice.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> from synkhronos.extensions import update_rules
    >>> synk.fork(2)
    2
    >>> x, w = T.dvector("x"), theano.shared(0.0, "w")
    >>> updates = parallel_updates(((w - x) ** 2).mean(), [w], update_rules.sgd, learning_rate=0.5)
    >>> f = synk.function([x], updates=updates)
    >>> f([10, 20, 60])
    []
    >>> synk.gather(w).round(6).tolist()
    [30.0, 30.0]
    >>> synk.close()
    """
    params = check_params(params)
    check_rule(update_rule)
    grads = average_gradients(loss, params, max_norm)
    return rule_updates(update_rule, grads, params, args, kwargs)


def average_gradients(
    loss: Variable, params: Sequence[SharedVariable], max_norm: Scalar | None = None
) -> list[Variable]:
    """Return the gradients of a loss, averaged over all rows on all ranks.

    In a :func:`synkhronos.function` the gradients equal those of serial Theano on the same rows, up
    to rounding, and are the same on every rank; one round averages all of them. Elsewhere they are
    plain gradients.

    Parameters
    ----------
    loss : scalar variable
        A mean over rows.
    params : list of shared variables
    max_norm : float, optional
        See :func:`clip_by_global_norm`.

    Returns
    -------
    list of tensor variables
        Pass them to an update rule:
        ``lasagne.updates.adam(average_gradients(loss, params), params)``.

    Raises
    ------
    TypeError
        For a loss that is no scalar of floats, parameters that are no shared variables of floats,
        and a norm that is no number or scalar.
    ValueError
        For no parameters, the same one twice, one that the loss does not depend on, and a norm that
        is not above zero.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> w = theano.shared(np.ones(2), "w")
    >>> [grad] = average_gradients((w**2).sum(), [w], max_norm=1)
    >>> theano.function([], grad)()
    array([0.70710678, 0.70710678])
    """
    grads = [ops.all_reduce(grad) for _, grad in gradients(loss, params)]
    return grads if max_norm is None else clip_by_global_norm(grads, max_norm)


def average_updates(updates: UpdatesLike) -> Updates:
    """Return updates with new values that are averaged over all rows on all ranks.

    Use it for running statistics, such as those of a batch normalisation: otherwise each rank has
    those of its own rows. In the function that trains they take no round of their own.

    Parameters
    ----------
    updates : OrderedDict, or list of (shared variable, expression)

    Returns
    -------
    OrderedDict

    Raises
    ------
    TypeError
        For anything but pairs of a shared variable and an expression.
    ValueError
        For a variable that is updated twice.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x, mean = T.dvector("x"), theano.shared(0.0, "mean")
    >>> f = synk.function([x], updates=average_updates([(mean, 0.9 * mean + 0.1 * x.mean())]))
    >>> f([10, 20, 60])
    []
    >>> synk.gather(mean).round(6).tolist()
    [3.0, 3.0]
    >>> synk.close()
    """
    return OrderedDict(
        (variable, ops.all_reduce(T.as_tensor_variable(value)))
        for variable, value in check_pairs("updates", updates)
    )


def warm_up(rate: Scalar, factor: Scalar, steps: int) -> Variable:
    r"""Return a learning rate that grows in a straight line, for large minibatches.

    It is `rate` in the first step and `factor` times `rate` after `steps` steps: the linear scaling
    rule with gradual warm-up. `factor` is the size of the minibatch divided by the size of the
    smaller one that `rate` was found for.

    Parameters
    ----------
    rate : float
        The learning rate for the smaller minibatch.
    factor : float
        Often the number of ranks.
    steps : int
        Minibatches until the full rate is reached, at least 1; the paper takes five epochs.

    Returns
    -------
    scalar variable of floatX
        For any rule. It counts the calls of all functions that use it: the counter is a shared
        variable with a default update, the same on all ranks.

    Raises
    ------
    TypeError
        For a `rate` or `factor` that is no number or scalar, and `steps` that are no integer.
    ValueError
        For less than one step.

    References
    ----------
    Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", arXiv:1706.02677,
    sections 2.1 and 2.2.

    Examples
    --------
    >>> import theano
    >>> rate = theano.function([], warm_up(0.1, factor=8, steps=4))
    >>> [round(float(rate()), 3) for _ in range(6)]
    [0.1, 0.275, 0.45, 0.625, 0.8, 0.8]
    """
    check_number("rate", rate)
    check_number("factor", factor)
    steps = whole_number("steps", steps, 1, 1 << 53)  # a float64 counts no further
    # A float, because updates of slices are averaged, and integers can't be.
    step = library.shared(np.zeros(()), "warm_up_step")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting default_update", DeprecationWarning)
        step.default_update = step + 1
    done = T.minimum(T.cast(step, library.config.floatX) / steps, 1)
    return T.cast(rate * (1 + (factor - 1) * done), library.config.floatX)
