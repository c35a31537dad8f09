"""Functions of training that have serial values on all ranks, whatever they compute.

    serial outputs and updates ── can be divided ──▶ function_as_serial
                               ├─ has no rule ────▶ undivided: each rank computes the whole
                               └─ reduces itself ──▶ function_of_each_rank

If one of the first two raises `CannotDivide`, the caller takes the next.
"""

from __future__ import annotations

import numpy as np

from synkhronos import _host, functions, ops
from synkhronos._calls import signature
from synkhronos._calls.proof import place_of
from synkhronos._calls.recipe import rows_of
from synkhronos._host import tensor as T
from synkhronos._host.base.chosen_library import Elemwise, ViewOp, ancestors, inner_outputs
from synkhronos._host.base.functions import is_by, nodes_of
from synkhronos._wording import advise, count


def _examined(source, **kwargs):
    return _host.examine(
        rows_of(source.inputs, source.sliceables),
        [each.variable for each in source.inputs],
        source.outputs.variables,
        givens=source.keywords["givens"],
        draws_all=source.draws_all,
        **kwargs,
    )


def is_average(inputs, loss, options, own_statistics=False, others=()):
    """Return whether the average of the ranks' losses is the loss of all rows, and so its gradient.

    The derivatives of an average are the averages of derivatives, unless an operation changes them.
    With `own_statistics` batch normalizations may use each rank's own rows. Warn of a reduction, in
    the loss or `others`, that does not make the serial value.
    """
    source = functions.checked(inputs, [loss, *others], **options)
    found = _examined(source, own_statistics=own_statistics)
    for mistake in found.mistakes[:1]:
        right = mistake.relation.right_mode
        instead = f"write ops.all_reduce(x, {right!r}), or " if right else ""
        advise(
            f"ops.all_reduce(x, {mistake.op!r}) in a step{place_of(mistake.variable)} is not "
            f"what serial {_host.title} computes: {instead}leave it out, as the step is divided "
            "over the ranks in any case."
        )
    return (
        found.outputs[0].right_mode == "avg" and found.n_rows is None and not _clips_gradients(loss)
    )


def warn_unless_average(with_rows, inputs, loss, options):
    """Warn if the average of the devices' losses, with a store, is not the loss of all rows."""
    rows, givens = dict.fromkeys(with_rows, 0), options.get("givens") or ()
    [relation] = _host.examine(rows, inputs, [loss], givens=givens).outputs
    if relation.right_mode == "avg" or (relation.is_open and not relation.reason):
        return
    what = "sums over rows" if relation.right_mode == "sum" else "something of all rows together"
    advise(
        f"With a store the loss should be a mean over rows: each device trains with that of its "
        f"own rows, and the loss computes {what}{place_of(relation.cause)}, so this is another "
        f"step than that of serial {_host.title}. Divide a sum by x.shape[0]; other losses are "
        "divided in a session, by make_train_step without store=."
    )


def divided(inputs, outputs, updates, options):
    """Return the divided step, from the arguments of `function_as_serial`."""
    source = functions.checked(inputs, outputs, updates=updates, **options)
    return _host.divide_step(
        rows_of(source.inputs, source.sliceables),
        [each.variable for each in source.inputs],
        _pairs(outputs)[0],
        source.updates,
        source.keywords["givens"],
        options.get("no_default_updates", False),
        source.draws_all,
    )


def function_as_serial(inputs, outputs, updates, options):
    """Return a function of all ranks with the values of serial Theano, or raise CannotDivide.

    `inputs` and `options` are those of :func:`synkhronos.function`, and `updates` pairs. Outputs
    with a mode, (variable, mode), are reduced by it; the others have their serial values.
    """
    asked, is_list = _pairs(outputs)
    step = divided(inputs, outputs, updates, options)
    options = {"check": 0, **options}
    if step.is_divided:
        pairs, updates = step.outputs, step.updates
        options = {**options, "givens": None, "no_default_updates": True}
    else:
        modes = [mode for _, mode in step.outputs]
        pairs = [(variable, mode) for (variable, _), mode in zip(asked, modes)]
    axes = dict(options.get("axes") or {})
    axes.update((variable, axis) for (variable, _), axis in zip(pairs, step.axes) if axis)
    options["axes"] = axes or None
    source = functions.checked(inputs, pairs if is_list else pairs[0], updates=updates, **options)
    if step.remainders and any(each.parts for each in source.inputs):
        raise _host.CannotDivide("reshapes rows, and has a sparse input")
    try:
        conditions = Conditions(
            [each.variable for each in source.inputs if each.storage is None],
            step.n_rows,
            step.remainders,
            step.is_divided,
        )
    except ValueError as error:
        raise _host.CannotDivide(str(error)) from None
    return functions.make(source._replace(conditions=conditions or None, is_proved=True))


class Conditions:
    """The conditions of one function, whose calls send the inputs `variables`.

    A call must have `n_rows` rows (None: any number); the expressions `remainders` of the shapes of
    its inputs must be 0; and with `is_whole` it can't be cut into slices. ValueError is raised for
    remainders that depend on the values of inputs.
    """

    def __init__(self, variables, n_rows, remainders, is_whole):
        self._variables, self._n_rows, self._is_whole = variables, n_rows, is_whole
        self._remainders = None
        self._right = set()  # the shapes that were checked: only new ones are computed with
        if remainders:
            self._remainders = _host.compile_function(
                variables,
                remainders,
                mode=_host.Mode("py", "fast_run"),  # optimized, so that shapes need no values
                on_unused_input="ignore",
                no_default_updates=True,
            )
            used = _host.input_of_values(self._remainders, len(variables))
            if used is not None:
                raise ValueError(f"has a shape that depends on the values of {used}")

    def __bool__(self):
        return bool(self._is_whole or self._remainders or self._n_rows is not None)

    def check(self, owner, shapes, rows, num_slices):
        """Raise ValueError if a call breaks a condition; `shapes` has its inputs' shapes."""
        if self._is_whole and num_slices > 1:
            raise ValueError(
                f"num_slices={num_slices}, but {owner} computes something of all rows together, "
                "which its slices don't add up to: such as a mean over those that a mask leaves, "
                "or a batch normalization. Leave num_slices out; or make it with "
                'per_rank="loss", for the average of each slice\'s own loss.'
            )
        if self._n_rows not in (None, rows):
            raise ValueError(
                f"{owner} reshapes to {count(self._n_rows, 'row')}, or declares so many as the "
                f"batch size of a convolution, but the call has {rows}. Write x.shape[0] of an "
                "input x in place of the number, or None in an input_shape."
            )
        if self._remainders is None or shapes in self._right:
            return
        pairs = zip(self._variables, shapes)
        zeros = [np.broadcast_to(np.zeros((), each.dtype), shape) for each, shape in pairs]
        if any(self._remainders(*zeros)):
            raise ValueError(
                f"{owner} reshapes its rows so that ranks can't keep them whole, with inputs of "
                f"the shapes {', '.join(map(str, shapes))}. Reshape to (x.shape[0], ...)."
            )
        self._right.add(shapes)


def undivided(inputs, outputs, updates, options):
    """Return a function that each rank computes with all rows, which is right but not faster.

    Raise CannotDivide if ranks have rows of their own in any case, or for some random states.
    """
    source = functions.checked(inputs, outputs, updates=updates, **options)
    pairs, is_list = _pairs(outputs)
    expressions = [*(variable for variable, _ in pairs), *(value for _, value in source.updates)]
    if isinstance(source.sliceables, (list, tuple)) or _host.divides(expressions):
        raise _host.CannotDivide("has rows of each rank, or reduces by itself")
    rows = {
        position: each.axis
        for position, each in enumerate(source.inputs)
        if each.is_scattered and getattr(each.variable, "ndim", 0)
    }
    pairs = [(variable, None) for variable, _ in pairs]
    options = {
        **options,
        "bcast_inputs": [*inputs, *(options.get("bcast_inputs") or ())],
        "axes": None,
        "check": 0,
        "serial_random": True,  # all ranks draw the same numbers
    }
    whole = functions.checked([], pairs if is_list else pairs[0], updates=updates, **options)
    try:
        return functions.make(whole._replace(is_proved=True, rows_of_all=rows))
    except ValueError as error:
        raise _host.CannotDivide(str(error)) from error


def function_of_each_rank(inputs, outputs, updates, options):
    """Return a function that each rank computes as it is, with the rank's own rows.

    Outputs without a mode get the one that makes the serial value, or else are averaged. Updates
    that would differ between ranks, such as running statistics, are averaged, or added up if they
    add sums over rows to their variable.
    """
    asked, is_list = _pairs(outputs)
    source = functions.checked(inputs, outputs, updates=updates, **options)
    leaves_defaults = options.get("no_default_updates", False)
    found = _examined(
        source, updates=source.updates, no_default_updates=leaves_defaults, trusts=True
    )
    pairs = []
    for (variable, mode), relation, has_rows in zip(asked, found.outputs, found.are_rows):
        if mode == _host.AS_SERIAL:
            mode = "gather" if has_rows else relation.right_mode or "avg"
        pairs.append((variable, mode))
    new = dict(updates)
    for target, _, differs in found.updates:
        if differs and _host.is_array_variable(target):
            value = new.get(target, getattr(target, "default_update", None))
            new[target] = _equal(source, target, T.as_tensor_variable(value))
    return functions.function(
        inputs, pairs if is_list else pairs[0], updates=list(new.items()), **options
    )


def _equal(source, target, value):
    """Return an update that is equal on all ranks, for one that would differ between them."""
    added = _added_to(target, value)
    if added is not None:
        asked = source._replace(outputs=signature.OutputSignature([added]))
        mode = _examined(asked, own_statistics=True).outputs[0].right_mode
        if mode in ("sum", "avg"):
            return target + ops.all_reduce(added, mode)
    return ops.all_reduce(value) if str(value.dtype).startswith("float") else value


def _pairs(outputs):
    """Return outputs as pairs (variable, mode), and whether they are a list."""
    is_list = isinstance(outputs, list)
    listed = outputs if is_list else [outputs]
    pairs = [each if isinstance(each, tuple) else (each, _host.AS_SERIAL) for each in listed]
    return [(_host.read_output(variable), mode) for variable, mode in pairs], is_list


def _clips_gradients(expression):
    """Return whether an expression clips gradients on their way to the parameters."""
    return any(
        (isinstance(node.op, ViewOp) and type(node.op).__name__ not in _LINEAR_VIEWS)
        or any(map(_clips_gradients, inner_outputs(node.op)))
        for node in nodes_of([expression])
    )


def _added_to(variable, value):
    """Return the expression that a sum, `value`, adds to a variable; None if it is no such sum."""
    is_sum = is_by(value, Elemwise) and type(value.owner.op.scalar_op).__name__ == "Add"
    if not is_sum or variable not in value.owner.inputs:
        return None
    rest = list(value.owner.inputs)
    rest.remove(variable)
    if not rest or variable in ancestors(rest):
        return None
    return rest[0] if len(rest) == 1 else T.add(*rest)


# Views whose gradients are linear in those of their outputs: these clip nothing.
_LINEAR_VIEWS = {
    "ViewOp", "ConsiderConstant", "ZeroGrad", "UndefinedGrad", "DisconnectedGrad", "GradScale",
}  # fmt: skip
