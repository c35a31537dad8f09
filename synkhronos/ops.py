"""Operations for Theano graphs that work across ranks."""

from __future__ import annotations

import contextlib

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import blocks
from synkhronos._hints import Variable
from synkhronos._host.choice import advice
from synkhronos._wording import shown, whole_number

__all__ = ["all_reduce", "rank_weight"]  # and `rows`, which users find in the package itself


def all_reduce(x: Variable, op: str = "avg") -> Variable:
    r"""Reduce a variable over the ranks, element by element, while the function runs.

    In a function made by :func:`synkhronos.function` the result is, on every rank,

    .. math:: y = \sum_r w_r x_r / \sum_r w_r \quad \text{for "avg"},

    where the weight :math:`w_r` is the number of rows that rank r computes from, or 1 if nothing is
    scattered; the other operations have no weights. Averaged gradients of a mean loss are therefore
    the gradients over all rows. An update rule that is given them trains on all ranks, and the
    ranks stay equal bit by bit (on devices of one kind). Elsewhere, as in ``theano.function``,
    `all_reduce` is the identity.

    Reductions run together where they can: the gradients of a whole model take one round. A rank
    without rows takes part, too: it computes with one row of the batch, which no result contains.

    Parameters
    ----------
    x : tensor variable
        Of the same shape on all ranks.
    op : str
        ``"avg"``, ``"sum"`` or another of the :ref:`operations <operations>`.

    Returns
    -------
    tensor variable
        Of the type of `x`. The gradient of an average is averaged and that of a sum is summed: the
        gradient of the mean, or the sum, of all ranks' losses. The other operations have none.

    Raises
    ------
    TypeError
        For anything but a tensor, for a dtype that `op` does not take, and, when a function is
        made, for an `all_reduce` inside of a ``scan``.
    ValueError
        For another `op`; in a call, on every rank, if the shapes differ.

    Examples
    --------
    Gradient descent on all ranks; the rule is that of one process:

    >>> import numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x, w = T.matrix(dtype="float64"), theano.shared(np.zeros(2))
    >>> loss = ((T.dot(x, w) - 1) ** 2).mean()
    >>> g = synk.ops.all_reduce(T.grad(loss, w))
    >>> train = synk.function([x], loss, updates=[(w, w - 0.25 * g)])
    >>> float(train(np.eye(2)))
    1.0
    >>> synk.gather(w)
    array([[0.25, 0.25],
           [0.25, 0.25]])
    >>> synk.close()
    """
    op = blocks.parse_op(op)
    if not isinstance(x, _host.Variable) or not _host.is_array_variable(x):
        raise TypeError(
            f"all_reduce() takes a tensor variable, got {x!r}. Several are reduced one by one, "
            "[all_reduce(x) for x in ...], and take one round all the same."
            f"{advice(x, _host.title)}"
        )
    return _host.all_reduce(x, op)


def rank_weight() -> Variable:
    r"""Return a scalar variable: the weight of this rank's rows, while the function runs.

    On rank r it is :math:`w_r n / \sum_s w_s`, with n ranks and the weights of `all_reduce`: 1 on
    every rank if all have equally many rows, and outside of a session. If a mean over a rank's rows
    is multiplied by it, the unweighted average over the ranks is the mean over all rows. So a
    function can store the products in shared variables, and ``synk.all_reduce`` average them later.

    Returns
    -------
    scalar variable of float64

    Examples
    --------
    The mean of three rows, of which rank 0 has one:

    >>> import numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x, s = T.vector(dtype="float64"), theano.shared(0.0)
    >>> f = synk.function([x], updates=[(s, synk.ops.rank_weight() * x.mean())])
    >>> f([1, 2, 3])
    []
    >>> synk.all_reduce(s)
    >>> round(float(s.get_value()), 12)
    2.0
    >>> synk.close()
    """
    return _host.RankWeight()()


def rows(
    index: int | Variable, size: int | Variable, length: int | Variable | None = None
) -> Variable:
    r"""Return the row numbers of a minibatch, which :func:`synkhronos.function` divides over ranks.

    Serial scripts select a minibatch with ``data[index * size : (index + 1) * size]``, of which all
    ranks would compute all rows. With ``data[rows(index, size)]`` each rank selects its part. The
    function has rows then, as if it had scattered inputs: averages are weighted, and ``batch`` and
    ``num_slices`` are allowed. In ``theano.function`` the row numbers are all of

    .. math:: \{i s, \; i s + 1, \; \ldots, \; \min((i + 1) s, l) - 1\}.

    Parameters
    ----------
    index : int or variable
        The number of the minibatch, from 0: an integer, a shared variable, or an expression of
        inputs that all ranks get whole (those without axes, and `bcast_inputs`), also of an
        ``In(index, value=0, update=index + 1)``.
    size : int or variable
        The number of rows in a minibatch.
    length : int or variable, optional
        The number of all rows: the last minibatch ends there. By default each has `size` rows.

    Returns
    -------
    vector variable of int64

    Raises
    ------
    TypeError
        For anything but integers and variables of integers without axes.
    ValueError
        For negative numbers; when a function is made, for arguments that are scattered, and rows
        inside of a ``scan``; in a call, for rows that a shared variable does not have.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x, index = T.dvector("x"), T.lscalar("index")
    >>> data = theano.shared(np.arange(10.0))
    >>> f = synk.function(
    ...     [index], [x.mean(), (x, "gather")], givens={x: data[synk.rows(index, 4, length=10)]}
    ... )
    >>> [result.tolist() for result in f(1)]
    [5.5, [4.0, 5.0, 6.0, 7.0]]
    >>> [result.tolist() for result in f(2)]
    [8.5, [8.0, 9.0]]
    >>> synk.close()
    """
    operands = [("index", index), ("size", size)]
    if length is not None:
        operands.append(("length", length))
    return _host.Rows()(*[_integer(name, value) for name, value in operands])


def _integer(name, value):
    what = shown(value)
    if isinstance(value, _host.Variable):
        is_number = _host.is_array_variable(value) and not value.ndim
        if is_number and np.dtype(value.dtype).kind in "iu":
            return value
        what = f"{value} of type {value.type}"
    else:
        with contextlib.suppress(TypeError):
            return whole_number(name, value, 0, (1 << 63) - 1)
    raise TypeError(
        f"{name} must be an integer, or a variable of integers without axes, got {what}."
    )
