"""Check the arguments of collectives before a command is sent; put values into shared memory."""

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import blocks
from synkhronos._arithmetic.conversion import as_array
from synkhronos._arithmetic.operations import check_kind
from synkhronos._arithmetic.selection import select_rows
from synkhronos._calls.signature import describe_value, require
from synkhronos._machine.interrupts import raised_here
from synkhronos._session import commands
from synkhronos._session.staging import Contents, send_objects
from synkhronos._wording import count, sentence, shown
from synkhronos.inputs import Data

_KEPT_BYTES = 1 << 24  # of shared memory for copies of values, at most, stay for the next call


def check_variables(name, shared_vars, objects=False):
    """Return the variables as a list; `objects` allows sparse ones and random states, too."""
    variables = list(shared_vars) if isinstance(shared_vars, (list, tuple)) else [shared_vars]
    if not variables:
        raise ValueError(f"{name}() got an empty list of shared variables.")
    what = f"{name}() takes a {_host.title} shared variable or a list of them"
    for variable in variables:
        require(what, variable, _host.SharedVariable)
        if not _host.is_array_variable(variable) and not (
            objects and (_host.is_random_state(variable) or _host.sparse_format(variable))
        ):
            raise TypeError(
                f"{name}() can't take {variable}, of type {variable.type}: it works on arrays"
                + (", sparse matrices and random states." if objects else ".")
            )
    if len(set(variables)) < len(variables):
        twice = next(v for i, v in enumerate(variables) if v in variables[:i])
        raise ValueError(f"{name}() got {twice} twice.")
    return variables


def check_axis(name, variables):
    """Raise TypeError for variables without axes."""
    for variable in variables:
        if variable.ndim == 0:
            raise TypeError(f"{name} needs an axis 0, which {variable} does not have.")


def check_rows(name, variables):
    """Raise TypeError for variables whose number of rows can't change."""
    check_axis(f"{name}()", variables)
    for variable in variables:
        length = _host.lengths(variable)[0]
        if length is None:
            continue
        why = f"always has {length} by its type {variable.type}. Make it without shape=, or with "
        why += f"None in place of {length}"
        if length == 1:
            why = "is broadcastable along axis 0: it always has one"
        raise TypeError(f"{name}() changes the number of rows, but {variable} {why}.")


def check_reduction(name, shared_vars, op):
    """Return the variables as a list, and the operation; raise if it doesn't take a dtype."""
    variables = check_variables(name, shared_vars)
    op = blocks.parse_op(op)
    for variable in variables:
        check_kind(f"{name}()", op, variable.dtype, str(variable))
    return variables, op


def check_values(name, shared_vars, variables, values, none=False, rows_may_differ=False):
    """Return a value for each variable: an array of its dtype, Contents of a Data, or an object.

    With `none` a value may be None. With `rows_may_differ` axis 0 may have any length.
    """
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
    is_array = _host.is_array_variable(variable)
    if not is_array and not _host.sparse_format(variable):
        kind = _host.RandomState
        require(f"{name}() takes a {kind.__name__} for {variable}", value, kind)
        return value
    if is_array and isinstance(value, Data):
        value._session.require_open()
        if value.dtype != variable.dtype or value.ndim != variable.ndim:
            what = f"the value of {value}: a Data must have the variable's dtype and number of"
            raise _cannot_give(name, variable, f"{what} dimensions.")
        value = value._hold(value._session)
    else:
        try:
            if not is_array:
                return _host.caster(variable, False, None)(value)
            if not isinstance(value, np.ndarray):
                value = as_array(value, variable.dtype, False, str(variable))
            elif np.ma.is_masked(value):
                raise TypeError("a shared variable can't hold its masked items: see its filled()")
            # Lengths along broadcastable axes are checked below.
            value = _host.cast_value(variable, value)
        except raised_here(Exception) as error:
            # Theano's checks raise errors of many kinds for values that are no arrays.
            what = f"{describe_value(value)}: {sentence(error)}"
            raise _cannot_give(name, variable, what) from error
    shape = value.shape[1:] if rows_may_differ else value.shape
    lengths = _host.lengths(variable)[variable.ndim - len(shape) :]
    wrong = {fixed for fixed, length in zip(lengths, shape) if fixed not in (None, length)}
    if wrong:
        why = ": it must have length 1 where the variable is broadcastable" * (wrong == {1})
        raise _cannot_give(name, variable, f"a value of shape {value.shape}{why}.")
    return value


def _cannot_give(name, variable, what):
    return TypeError(f"{name}() can't give {variable}, of type {variable.type}, {what}")


def copy_borrowed(session, values):
    """Return arrays that stay as they are while variables are set: copy views of variables."""
    holds = session.comm.memory.holds
    values = [v.copy() if isinstance(v, np.ndarray) and holds(v) else v for v in values]
    return [v.array if isinstance(v, Contents) else v for v in values]


def raise_unequal(name, variables, unequal, where=""):
    """Raise ValueError unless `unequal` is None: (position of a variable, shapes on the ranks)."""
    if unequal is not None:
        position, shapes = unequal
        raise ValueError(
            f"{name}() needs the same shape on all ranks{where}, but {variables[position]} has, "
            f"in rank order, {shapes}."
        )


def broadcast(session, variables, values, nccl=True):
    """Set variables to values on all ranks; a None stands for the master's value.

    Return the command that broadcasts those with arrays.
    """
    keys = session.registry.keys_of(variables)
    arrays, new, objects = [], {}, {}
    for key, variable, value in zip(keys, variables, copy_borrowed(session, values)):
        if not _host.is_array_variable(variable):
            objects[key] = _host.peek(variable) if value is None else value
            continue
        arrays.append(key)
        if value is not None:
            new[key] = value
    commands.assign_all(session.worker, tuple(new), new.values(), [None] * len(new))
    command = commands.Broadcast(tuple(arrays), session.master_rank, nccl)
    if arrays:
        session.run(command)
    if objects:
        send_objects(session, tuple(objects), list(objects.values()))
    session.changes.note_equal(keys)
    return command


def set_on_rank(session, name, variables, values, batch, rank):
    """Set variables, also those that hold no arrays, on one rank."""
    pairs = list(zip(variables, values))
    arrays = [pair for pair in pairs if _host.is_array_variable(pair[0])]
    objects = [pair for pair in pairs if not _host.is_array_variable(pair[0])]
    if objects and batch is not None:
        raise TypeError(f"{name}() got batch, but {objects[0][0]} has no rows.")
    if arrays:
        assign(session, name, *map(list, zip(*arrays)), batch, rank)
    if objects:
        keys = session.registry.keys_of([variable for variable, _ in objects])
        session.changes.note_apart(keys)
        send_objects(session, keys, [value for _, value in objects], rank)


def assign(session, name, variables, values, batch, rank):
    """Set variables on one rank; if `rank` is None, scatter the rows of the values to all ranks.

    Return the command; None for the master's own variables, which need none.
    """
    selections = [None] * len(values)
    if batch is not None:
        check_axis(f"{name}(batch=...)", variables)
        selections = [select_rows("batch", batch, value.shape[0]) for value in values]
        for variable, rows in zip(variables, selections):
            length = _host.lengths(variable)[0]
            if length not in (None, len(rows)):
                why = ": it is broadcastable along axis 0, and always has one" * (length == 1)
                raise _cannot_give(name, variable, f"{count(len(rows), 'row')}{why}.")
    keys = session.registry.keys_of(variables)
    session.changes.note_apart(keys)
    if rank == session.master_rank:
        values = copy_borrowed(session, values)
        commands.assign_all(session.worker, keys, map(np.asarray, values), selections)
        return None
    plain = [value for value in values if not isinstance(value, Contents)]
    plain += [rows for rows in selections if not _is_sent(rows)]
    try:
        # Valid until the next collective, which overwrites the copies.
        staged = iter(session.staged.put(plain))
        refs = tuple([v.ref if isinstance(v, Contents) else next(staged) for v in values])
        sent = tuple([rows if _is_sent(rows) else next(staged) for rows in selections])
        command = commands.Assign(keys, refs, sent, rank)
        session.run(command)
        return command
    finally:
        # After a Ctrl-C workers may still read the values: then the session frees this memory only
        # when they have left the call.
        if session.staged.nbytes > _KEPT_BYTES:
            session.staged.clear()


def _is_sent(rows):
    """Return whether a command holds these rows itself: None for all, or a range."""
    return rows is None or isinstance(rows, range)
