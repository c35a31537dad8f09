"""Set and get values of shared variables on single ranks; get their lengths and shapes.

Like the functions of `collectives`, each takes one shared variable, or a list of them in one round.
"""

from __future__ import annotations

import pickle
from typing import List, Tuple, Union

import numpy as np

from synkhronos import _host
from synkhronos._calls import collective
from synkhronos._hints import RandomState, Rows, SharedVariables, Values
from synkhronos._session import commands
from synkhronos._session.current import call
from synkhronos._wording import whole_number

__all__ = ["get_lengths", "get_shapes", "get_value", "set_value"]

Value = Union[np.ndarray, RandomState]
Shapes = List[Tuple[int, ...]]


def set_value(
    rank: int, shared_vars: SharedVariables, values: Values, batch: Rows | None = None
) -> None:
    """Set shared variables on one rank to values of any shape.

    Parameters
    ----------
    rank : int
        Any rank, the master's too.
    shared_vars : shared variable or list of them
    values : array_like, Data, or list of these with one for each variable
    batch : int, slice, range, list, or array of integers or bools, optional
        The rows of each value to use.

    Raises
    ------
    SessionError, TypeError, ValueError
        As :func:`~synkhronos.broadcast`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> s = theano.shared(np.zeros(2))
    >>> synk.set_value(1, s, np.arange(5.0), batch=slice(2, 4))
    >>> synk.get_value(0, s), synk.get_value(1, s)
    (array([0., 0.]), array([2., 3.]))
    >>> synk.close()
    """
    with call("set_value()") as session:
        rank = whole_number("rank", rank, 0, session.n_ranks - 1)
        variables = collective.check_variables("set_value", shared_vars, objects=True)
        checked_values = collective.check_values(
            "set_value", shared_vars, variables, values, rows_may_differ=batch is not None
        )
        collective.set_on_rank(session, "set_value", variables, checked_values, batch, rank)


def get_value(rank: int, shared_vars: SharedVariables) -> Value | tuple[Value, ...]:
    """Return the values of shared variables on one rank.

    Parameters
    ----------
    rank : int
        Any rank, the master's too.
    shared_vars : shared variable or list of them

    Returns
    -------
    numpy.ndarray or tuple of them
        Copies; a tuple for a list, also for a list of one.

    Raises
    ------
    SessionError, TypeError, ValueError
        As :func:`~synkhronos.broadcast`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> s = theano.shared(np.zeros(2))
    >>> synk.set_value(1, s, [3.0, 4.0, 5.0])
    >>> synk.get_value(1, s)
    array([3., 4., 5.])
    >>> synk.close()
    """
    with call("get_value()") as session:
        rank = whole_number("rank", rank, 0, session.n_ranks - 1)
        variables = collective.check_variables("get_value", shared_vars, objects=True)
        keys = session.registry.keys_of(variables)
        arrays = [k for k, v in zip(keys, variables) if _host.is_array_variable(v)]
        if arrays:
            session.run(commands.Expose(tuple(arrays), rank))
        results = []
        for key in keys:
            if key in arrays:
                results.append(session.comm.variables.value_of(rank, key).copy())
            else:
                results.append(pickle.loads(session.ask(commands.GetObject(key, rank))[rank]))
        return tuple(results) if isinstance(shared_vars, (list, tuple)) else results[0]


def get_lengths(shared_vars: SharedVariables) -> list[int] | tuple[list[int], ...]:
    """Return the lengths of shared variables along axis 0, on every rank.

    Parameters
    ----------
    shared_vars : shared variable or list of them
        Of at least one dimension.

    Returns
    -------
    list of int, or tuple of these
        In rank order; a tuple for a list of variables, also for a list of one.

    Raises
    ------
    SessionError, TypeError, ValueError
        As :func:`~synkhronos.broadcast`; TypeError also for variables without axes.

    Examples
    --------
    >>> import numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> s = theano.shared(np.zeros(2))
    >>> synk.set_value(1, s, [3.0, 4.0, 5.0])
    >>> synk.get_lengths(s)
    [2, 3]
    >>> synk.close()
    """
    with call("get_lengths()") as session:
        variables = collective.check_variables("get_lengths", shared_vars)
        collective.check_axis("get_lengths", variables)
        shapes = session.ask_of_each(commands.Shapes, variables)
        lengths = tuple([shape[0] for shape in each] for each in shapes)
        return lengths if isinstance(shared_vars, (list, tuple)) else lengths[0]


def get_shapes(shared_vars: SharedVariables) -> Shapes | tuple[Shapes, ...]:
    """Return the shapes of shared variables, on every rank.

    Parameters
    ----------
    shared_vars : shared variable or list of them

    Returns
    -------
    list of tuple, or tuple of these
        In rank order; a tuple for a list of variables, also for a list of one.

    Raises
    ------
    SessionError, TypeError, ValueError
        As :func:`~synkhronos.broadcast`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> s = theano.shared(np.zeros(2))
    >>> synk.set_value(1, s, [3.0, 4.0, 5.0])
    >>> synk.get_shapes(s)
    [(2,), (3,)]
    >>> synk.close()
    """
    with call("get_shapes()") as session:
        variables = collective.check_variables("get_shapes", shared_vars)
        shapes = session.ask_of_each(commands.Shapes, variables)
        return tuple(shapes) if isinstance(shared_vars, (list, tuple)) else shapes[0]
