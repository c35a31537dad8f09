"""Operations for Theano graphs that work across ranks."""

from __future__ import annotations

from synkhronos import _host
from synkhronos._arithmetic import blocks
from synkhronos._hints import Variable

__all__ = ["all_reduce", "rank_weight"]


def all_reduce(x: Variable, op: str = "avg") -> Variable:
    r"""Reduce a variable over the ranks, element by element, while the function runs.

    In a function made by :func:`synkhronos.function` the result is, on every rank,

    .. math:: y = \sum_r w_r x_r / \sum_r w_r \quad \text{for "avg"},

    where the weight :math:`w_r` is the number of rows that rank r computes from, or 1 if nothing is
    scattered; the other operations have no weights. Averaged gradients of a mean loss are therefore
    the gradients over all rows. An update rule that is given them trains on all ranks, and the
    ranks stay equal bit by bit (on devices of one kind). Elsewhere, as in ``theano.function``,
    `all_reduce` is the identity.

    Reductions that can run together do: the gradients of a whole model take one round. A rank
    without rows takes part: it computes with one row of the batch, which no result contains.

    Parameters
    ----------
    x : tensor variable
        Of the same shape on all ranks.
    op : {"avg", "sum", "prod", "min", "max"}

    Returns
    -------
    tensor variable
        Of the type of `x`. The gradient of an average is averaged and that of a sum is summed: the
        gradient of the mean, or the sum, of all ranks' losses. The other operations have none.

    Raises
    ------
    TypeError
        For anything but a tensor, for an average of integers or bools, and, when a function is
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
        )
    return _host.all_reduce(x, op)


def rank_weight() -> Variable:
    r"""Return a scalar variable: the weight of this rank's rows, while the function runs.

    On rank r it is :math:`w_r n / \sum_s w_s`, with n ranks and the weights of `all_reduce`: 1 on
    every rank if all have equally many rows, and outside of a session. Multiply a mean over a
    rank's rows with it: the unweighted average over the ranks is then the mean over all rows. So
    ``synk.all_reduce`` can later average such products that a function stored in shared variables.

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
    return _host.rank_weight()
