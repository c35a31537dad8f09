"""The training functions of models that leave their momentum SGD to ``theanompi.lib.opt``.

One call of ``model.train_iter_fn(subb_ind)`` with several ranks and sync type "cdd"::

    get_vel(subb_ind)          vels[i] = gradient of p_i: mean over the rows of this sub-batch,
                                         and eta p_i for parameters of type 'W'
    the exchange, by BSP       vels2[i] = sum over ranks of w_r vels[i],  w_r = k rows_r / rows
    descent_vel()              G = vels2[i] / k;  v <- mu v + G;  p <- p - lr v

The momentum comes after the exchange, so all ranks keep equal velocities, and the parameters are
those of momentum SGD on all rows in one process, with even and uneven batches [1]_. `lr` stays out
of the velocity: a change of it acts at once, as in "momentum correction" [2]_. With one rank, and
where ranks average or swap parameters (sync types "avg", "swap"), one function does a local step.

For parameters of type 'b' the learning rate is 2 lr, and nothing decays. Parameters that are named
gamma or beta are those of a batch normalization: nothing decays, and beta has 2 lr.

.. [1] He Ma, Fei Mao and Graham W. Taylor, "Theano-MPI: a Theano-based Distributed Training
   Framework", arXiv:1605.08325, 2016.
.. [2] Priya Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677, 2017.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from typing import Any, List, Tuple

import numpy as np
import theano
import theano.tensor as T

from synkhronos import _host
from synkhronos._wording import shown

SYNC_TYPES = ("cdd", "avg", "swap")
Updates = List[Tuple[Any, Any]]


class TrainIteration:
    """Does one training step for each call: ``train_iter_fn`` of a model.

    Attributes
    ----------
    rows : int
        The rows of the last call; or its labels, if a row has several. 0 before the first call.
    is_pending : bool
        Whether gradients have been computed that no `finish` has applied yet.
    """

    def __init__(self, get_vel: Any, descent_vel: Any = None, rows: Any = None):
        self._get_vel, self._descent_vel, self._rows = get_vel, descent_vel, rows
        self.is_pending = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Finish the step before, then compute gradients; return cost and error."""
        self.finish()
        outputs = self._get_vel(*args, **kwargs)
        self.is_pending = self._descent_vel is not None
        return outputs

    def finish(self) -> None:
        """Apply the gradients that the exchange has summed, if there are any."""
        if self.is_pending:
            self.is_pending = False
            self._descent_vel()

    @property
    def rows(self) -> int:
        """The rows, or labels, of the last call."""
        return 0 if self._rows is None else int(self._rows.get_value())


def pre_model_iter_fn(
    model: Any, k: Any = None, f_train: bool = True, f_val: bool = True, sync_type: Any = None
) -> None:
    """Compile a model's training and validation functions; set them as its attributes.

    Parameters
    ----------
    model : object
        Has ``x, y, cost, error, params, shared_x_slice, shared_y_slice, subb_ind, mu, eta,
        use_momentum, use_nesterov_momentum``, ``shared_lr`` and perhaps a symbolic ``lr``,
        ``grads`` and ``weight_types``. Its ``compile_train(*dicts)``, if there is one, compiles
        what these arguments of ``theano.function`` say, and appends them to
        ``compiled_train_fn_list``. Its ``compile_val()`` sets or returns ``val_fn``.
    k : int, optional
        The number of workers; by default that of the model's ``config["size"]`` or ``size``, else
        1. A sync type in its place, as in older models, is taken for `sync_type`.
    f_train, f_val : bool, optional
        Whether to compile the training functions, and the validation function.
    sync_type : str, optional
        "cdd", "avg" or "swap". By default the model's ``sync_type``, else "cdd".

    Returns
    -------
    None
        The model gets ``vels, vels2, velocities, get_vel, descent_vel, train_iter_fn`` (a
        `TrainIteration`) and ``val_iter_fn``.

    Raises
    ------
    TypeError
        If `k` is no integer.
    ValueError
        If `k` is below 1, or `sync_type` is unknown.
    AttributeError
        If the model lacks one of the attributes above; the message lists them.

    Examples
    --------
    One rank of two, whose exchange is done by hand; the other one has seen equal rows:

    >>> from types import SimpleNamespace
    >>> w, x, y = theano.shared(np.ones(1), "w"), T.dmatrix("x"), T.dvector("y")
    >>> model = SimpleNamespace(
    ...     x=x, y=y, params=[w], weight_types=["W"], cost=T.dot(x, w).mean(), error=y.mean(),
    ...     shared_x_slice=theano.shared(np.ones((4, 1))), shared_y_slice=theano.shared(np.ones(4)),
    ...     shared_lr=theano.shared(np.float32(0.5)), subb_ind=T.iscalar(), mu=0.0, eta=0.0,
    ... )
    >>> pre_model_iter_fn(model, k=2, f_val=False)
    >>> cost, error = model.train_iter_fn(0)
    >>> model.vels2[0].set_value(2 * model.vels[0].get_value())
    >>> model.train_iter_fn.finish()
    >>> float(cost), model.train_iter_fn.rows, w.get_value().tolist()
    (1.0, 4, [0.5])
    """
    if isinstance(k, str):
        k, sync_type = None, k
    k = _number_of_workers(model, k)
    if f_train:
        _check(model)
        pre, post = prepare_update_dict(model, 1 if _steps_locally(model, sync_type) else k)
        model._synkhronos_functions = 1 + bool(post) + bool(f_val)  # to say which one compiles
        _compile(model, pre, post)
        choose_iter_fn(model)
    if f_val:
        _compile_validation(model)


def _number_of_workers(model, k):
    if k is None:
        config = getattr(model, "config", None)
        k = config.get("size") if isinstance(config, dict) else None
        k = getattr(model, "size", None) if k is None else k
        k = 1 if k is None else k
    try:
        number = operator.index(k)
    except TypeError:
        raise TypeError(f"k must be the number of workers, an integer, got {shown(k)}.") from None
    if number < 1:
        raise ValueError(f"k must be the number of workers, at least 1, got {number}.")
    return number


def _steps_locally(model, sync_type):
    sync_type = getattr(model, "sync_type", None) if sync_type is None else sync_type
    sync_type = "cdd" if sync_type is None else sync_type
    if sync_type not in SYNC_TYPES:
        raise ValueError(
            f"sync_type must be one of {', '.join(SYNC_TYPES)}, got {shown(sync_type)}."
        )
    return sync_type != "cdd"


NEEDED = ["x", "y", "cost", "error", "params", "subb_ind", "mu", "eta"]
NEEDED += ["shared_x_slice", "shared_y_slice", "shared_lr"]


def _check(model):
    missing = [name for name in NEEDED if not hasattr(model, name)]
    if missing:
        raise AttributeError(
            f"{type(model).__name__} lacks {', '.join(missing)}, which pre_model_iter_fn needs to "
            "build training functions. Set them in __init__, or compile functions of your own in "
            "compile_iter_fns."
        )
    grads = getattr(model, "grads", None)
    if grads is not None and len(grads) != len(model.params):
        raise ValueError(
            f"grads must have one gradient for each of the {len(model.params)} params of "
            f"{type(model).__name__}, got {len(grads)}."
        )


def prepare_update_dict(model: Any, k: int = 1) -> tuple[Updates, Updates]:
    """Return the updates of the first and of the second function, as ``use_momentum`` says."""
    if getattr(model, "use_momentum", False):
        nesterov = getattr(model, "use_nesterov_momentum", False)
        return BSP_MSGD(model, nesterov, k)
    return BSP_SGD(model, k)


def BSP_MSGD(
    model: Any, use_nesterov_momentum: bool = False, k: int = 1
) -> tuple[Updates, Updates]:
    """Return the updates of momentum SGD on `k` workers; reset the model's velocities.

    Parameters
    ----------
    model : object
        As for `pre_model_iter_fn`.
    use_nesterov_momentum : bool, optional
        With v <- mu v + G, the step is -lr (mu v + G) in place of -lr v.
    k : int, optional
        The number of workers.

    Returns
    -------
    updates_pre, updates_post : lists of (shared variable, expression)
        With one worker all are in the first list.

    References
    ----------
    Yurii Nesterov, "A method for solving the convex programming problem with convergence rate
    O(1/k^2)", 1983, in the form of Sutskever et al., ICML 2013.
    """
    return _updates(model, k, model.mu, use_nesterov_momentum)


_BSP_MSGD = BSP_MSGD  # Theano-MPI's name for the order of steps that both have here


def BSP_SGD(model: Any, k: int = 1) -> tuple[Updates, Updates]:
    """Return the updates of SGD without momentum on `k` workers, as `BSP_MSGD` does."""
    return _updates(model, k, None, False)


def _updates(model, k, mu, nesterov):
    """Return both lists of updates, and give the model `vels`, `vels2` and `velocities`."""
    gradients = _gradients(model)
    model.vels, model.vels2, model.velocities, pre, post = [], [], [], [], []
    for parameter, kind, gradient in zip(model.params, _kinds(model), gradients):
        if k > 1:
            model.vels.append(_zeros(parameter, "vel"))
            model.vels2.append(_zeros(parameter, "vel2"))
            pre.append((model.vels[-1], gradient))
            gradient = model.vels2[-1] / np.asarray(k, parameter.dtype)
        step = gradient
        if mu is not None:
            velocity = _zeros(parameter, "velocity")
            model.velocities.append(velocity)
            moved = mu * velocity + gradient
            step = mu * moved + gradient if nesterov else moved
            post.append((velocity, moved))
        post.append((parameter, parameter - _rate(model, parameter, kind) * step))
    pre, post = (pre, post) if k > 1 else (post, [])
    return fix_update_bcasts(pre), fix_update_bcasts(post)


def _kinds(model):
    """Return for each parameter: 'W', 'b', 'gamma' or 'beta'."""
    kinds = getattr(model, "weight_types", None)
    if kinds is None:
        kinds = ["W" if each.ndim > 1 else "b" for each in model.params]
    if len(kinds) != len(model.params) or not set(kinds) <= {"W", "b"}:
        raise ValueError(
            f"weight_types must have a 'W' or a 'b' for each of the {len(model.params)} params, "
            f"got {shown(kinds)}."
        )
    of_batch_norm = ("gamma", "beta")
    return [p.name if p.name in of_batch_norm else kind for p, kind in zip(model.params, kinds)]


def _gradients(model):
    gradients = getattr(model, "grads", None)
    if gradients is None:
        gradients = theano.grad(model.cost, list(model.params))
    return [
        gradient + model.eta * parameter if kind == "W" else gradient
        for parameter, kind, gradient in zip(model.params, _kinds(model), gradients)
    ]


def _rate(model, parameter, kind):
    rate = getattr(model, "lr", model.shared_lr)
    return (2 if kind in ("b", "beta") else 1) * T.cast(rate, parameter.dtype)


def _zeros(parameter, name):
    return _host.shared_zeros(parameter, parameter.dtype, f"{parameter.name or 'parameter'}_{name}")


def fix_update_bcasts(updates: Any) -> Updates:
    """Return updates whose expressions have the type of their variables: broadcasting and dtype.

    Parameters
    ----------
    updates : dict or list of (shared variable, expression)

    Examples
    --------
    >>> column = theano.shared(np.zeros((2, 1), "float32"), broadcastable=(False, True))
    >>> [(_, made)] = fix_update_bcasts([(column, T.dmatrix())])
    >>> made.type == column.type
    True
    """
    fixed = []
    for variable, expression in updates.items() if hasattr(updates, "items") else updates:
        fixed.append((variable, _as_type_of(variable, expression)))
    return fixed


def _as_type_of(variable, expression):
    """Return an expression with the dtype and the broadcastable axes of a variable."""
    expression = T.as_tensor_variable(expression)
    if expression.dtype != variable.dtype:
        expression = T.cast(expression, variable.dtype)
    if expression.broadcastable != variable.broadcastable:
        expression = T.patternbroadcast(expression, variable.broadcastable)
    return expression


def _compile(model, pre, post):
    """Compile one or two functions, by the model's `compile_train` if it has one."""
    model._synkhronos_rows = theano.shared(np.int64(0), "rows")
    # Labels may be of shape (time, batch).
    counted = model.y.size if getattr(model.y, "ndim", 0) else model.x.shape[0]
    rows = [(model._synkhronos_rows, T.cast(counted, "int64"))]
    rate = getattr(model, "lr", model.shared_lr)
    rates = []
    if isinstance(rate, theano.Variable) and rate is not model.shared_lr:
        rates = [(rate, _as_type_of(rate, model.shared_lr))]
    slices = [(model.x, model.shared_x_slice), (model.y, model.shared_y_slice)]
    functions = [
        {
            "inputs": [model.subb_ind],
            "outputs": [model.cost, model.error],
            "updates": OrderedDict(pre + rows),
            "givens": [(x, _as_type_of(x, part)) for x, part in slices] + rates,
            "on_unused_input": "ignore",
            "name": "get_vel",
        }
    ]
    if post:
        functions.append(
            {
                "inputs": [],
                "outputs": [],
                "updates": OrderedDict(post),
                "givens": rates,
                "name": "descent_vel",
            }
        )
    model.compiled_train_fn_list = []
    if callable(getattr(model, "compile_train", None)):
        model.compile_train(*functions)
    if not model.compiled_train_fn_list:
        model.compiled_train_fn_list = [theano.function(**each) for each in functions]
    if len(model.compiled_train_fn_list) != len(functions):
        raise ValueError(
            f"compile_train of {type(model).__name__} must append one compiled function to "
            f"compiled_train_fn_list for each of the {len(functions)} dicts that it is given, but "
            f"has appended {len(model.compiled_train_fn_list)}."
        )


def choose_iter_fn(model: Any) -> None:
    """Set ``get_vel``, ``descent_vel`` and ``train_iter_fn`` from ``compiled_train_fn_list``."""
    compiled = model.compiled_train_fn_list
    model.get_vel, model.descent_vel = (*compiled, None)[:2]
    model.train_iter_fn = TrainIteration(
        model.get_vel, model.descent_vel, getattr(model, "_synkhronos_rows", None)
    )


def _compile_validation(model):
    if not callable(getattr(model, "compile_val", None)):
        raise AttributeError(
            f"{type(model).__name__} lacks compile_val(), which compiles its validation function. "
            "Define it, or call pre_model_iter_fn(..., f_val=False)."
        )
    made = model.compile_val()
    model.val_iter_fn = made if callable(made) else model.val_fn


def _clip_paramlist(param_list: Any, scale: float = 10) -> list[Any]:
    """Return expressions of the parameters, or gradients, clipped to [-scale, scale]."""
    return [T.clip(each, -scale, scale) for each in param_list]
