"""What the collectives are given: checked before a launch, and put where all ranks see it."""

import pickle

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import blocks
from synkhronos._arithmetic.conversion import as_array
from synkhronos._arithmetic.selection import select_rows
from synkhronos._master.staging import StagedInput
from synkhronos._rank import commands
from synkhronos._wording import count, sentence, shown
from synkhronos.inputs import Data

_KEPT_BYTES = 1 << 24  # up to this size, the shared memory that values were staged in is kept


def check_variables(name, shared_vars, objects=False):
    """Return the variables as a list; with `objects` also those that hold no arrays."""
    variables = list(shared_vars) if isinstance(shared_vars, (list, tuple)) else [shared_vars]
    if not variables:
        raise ValueError(f"{name}() got an empty list of shared variables.")
    for variable in variables:
        if not isinstance(variable, _host.SharedVariable):
            raise TypeError(
                f"{name}() takes a Theano shared variable or a list of them, got {variable!r}."
            )
        if not _host.is_array_variable(variable) and not (
            objects and _host.is_random_state(variable)
        ):
            raise TypeError(
                f"{name}() can't take {variable}, of type {variable.type}: it works on arrays"
                + (" and random states." if objects else ".")
            )
    if len(set(variables)) < len(variables):
        twice = next(v for i, v in enumerate(variables) if v in variables[:i])
        raise ValueError(f"{name}() got {twice} twice.")
    return variables


def check_axis(name, variables):
    for variable in variables:
        if variable.ndim == 0:
            raise TypeError(f"{name} needs an axis 0, which {variable} does not have.")


def check_rows(name, variables):
    check_axis(f"{name}()", variables)
    for variable in variables:
        if _host.fixed_axes(variable)[0]:
            raise TypeError(
                f"{name}() changes the number of rows, but {variable} is broadcastable along "
                "axis 0: it always has one."
            )


def check_reduction(name, shared_vars, op):
    variables = check_variables(name, shared_vars)
    op = blocks.parse_op(op)
    if op == "avg":
        for variable in variables:
            if np.dtype(variable.dtype).kind not in "fc":
                raise TypeError(
                    f"{name}() can't average {variable}, of dtype {variable.dtype}: the result "
                    "would not be of that type. Use op='sum'."
                )
    return variables, op


def check_values(name, shared_vars, variables, values, none=False, rows_may_differ=False):
    """Return one value for each variable: an array of its dtype, or a Data."""
    if isinstance(shared_vars, (list, tuple)):
        if not isinstance(values, (list, tuple)) or len(values) != len(variables):
            given = len(values) if isinstance(values, (list, tuple)) else shown(values)
            raise TypeError(
                f"{name}() got a list of {count(len(variables), 'variable')}: values must be a "
                f"list with one for each, got {given}."
            )
    else:
        values = [values]
    return [
        None if value is None and none else _check_value(name, variable, value, rows_may_differ)
        for variable, value in zip(variables, values)
    ]


def _check_value(name, variable, value, rows_may_differ):
    if not _host.is_array_variable(variable):
        if not isinstance(value, _host.RandomState):
            raise TypeError(f"{name}() takes a RandomState for {variable}, got {shown(value)}.")
        return value
    if isinstance(value, Data):
        value._session.require_open()
        if value.dtype != variable.dtype or value.ndim != variable.ndim:
            raise TypeError(
                f"{name}() can't give {variable}, of type {variable.type}, the value of {value}: "
                "a Data must have the variable's dtype and number of dimensions."
            )
    else:
        try:
            if value is None:
                raise TypeError("None is no array")
            if not isinstance(value, np.ndarray):
                value = as_array(value, variable.dtype, False, str(variable))
            elif np.ma.is_masked(value):
                raise TypeError("a shared variable can't hold its masked items: see its filled()")
            # Broadcastable axes are looked at below.
            value = _host.cast_value(variable, value)
        except Exception as error:
            # Theano's own checks stumble in many ways over what is no array.
            raise TypeError(
                f"{name}() can't give {variable}, of type {variable.type}, the value "
                f"{_describe(value)}: {sentence(error)}"
            ) from error
    shape = value.shape[1:] if rows_may_differ else value.shape
    fixed = _host.fixed_axes(variable)[variable.ndim - len(shape) :]
    if any(one and length != 1 for one, length in zip(fixed, shape)):
        raise TypeError(
            f"{name}() can't give {variable}, of type {variable.type}, a value of shape "
            f"{value.shape}: it must have length 1 where the variable is broadcastable."
        )
    return value


def _describe(value):
    if isinstance(value, np.ndarray):
        return f"of dtype {value.dtype} and shape {value.shape}"
    return shown(value)


def raise_unequal(name, variables, unequal, where=""):
    if unequal is not None:
        position, shapes = unequal
        raise ValueError(
            f"{name}() needs the same shape on all ranks{where}, but {variables[position]} has, "
            f"in rank order, {shapes}."
        )


# What goes to the ranks.


def assign(session, name, variables, values, batch, rank) -> None:
    """Give variables of one rank their values, or each rank its share if `rank` is None."""
    selections = [None] * len(values)
    if batch is not None:
        check_axis(f"{name}(batch=...)", variables)
        selections = [select_rows("batch", batch, len(value)) for value in values]
        for variable, rows in zip(variables, selections):
            if _host.fixed_axes(variable)[0] and len(rows) != 1:
                raise TypeError(
                    f"{name}() can't give {variable}, of type {variable.type}, "
                    f"{count(len(rows), 'row')}: it is broadcastable along axis 0, and always has "
                    "one."
                )
    keys = session.registry.keys_of(variables)
    if rank == session.master_rank:
        for key, value, selection in zip(keys, values, selections):
            commands.assign(session.worker, key, np.asarray(value), selection)
        return
    staged = []
    try:
        refs = tuple(_stage(session, staged, value) for value in values)
        sent = tuple(_send_rows(session, staged, selection) for selection in selections)
        session.run(commands.Assign(keys, refs, sent, rank))
    finally:
        for slot in staged:
            if slot in session.staged and session.staged[slot].nbytes > _KEPT_BYTES:
                del session.staged[slot]


def _stage(session, staged, value):
    if isinstance(value, Data):
        return value._ref(session)
    slot = len(staged), value.dtype, value.ndim
    staged.append(slot)
    if slot not in session.staged:
        session.staged[slot] = StagedInput(session, value.dtype, value.ndim)
    return session.staged[slot].put(value)


def _send_rows(session, staged, rows):
    if rows is None or isinstance(rows, range):
        return rows
    return _stage(session, staged, rows)


def send_objects(session, keys, objects, rank) -> None:
    """Give variables that hold no arrays their values, on one rank, or on all."""
    pickled = pickle.dumps(objects, pickle.HIGHEST_PROTOCOL)
    _block, reference = session.comm.memory.wrap(pickled)
    session.run(commands.SetObject(keys, reference, rank))
