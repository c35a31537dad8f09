"""A shared variable's value on every rank, written and read by functions alone."""

import numpy as np
import theano
import theano.tensor as T

from support.helpers import function


def put(s, parts):
    """Set a shared variable on each rank to one of `parts`, in rank order."""
    rank = theano.shared(np.zeros(1, "int64"))
    numbers = T.lvector()
    function([numbers], updates=[(rank, numbers)])(np.arange(len(parts)))
    rows, begin, end = s.type(), T.lvector(), T.lvector()
    edges = np.cumsum([0] + [len(part) for part in parts])
    function(
        [], bcast_inputs=[rows, begin, end], updates=[(s, rows[begin[rank[0]] : end[rank[0]]])]
    )(np.concatenate(parts), edges[:-1], edges[1:])


def replicas(s):
    """Return the value of a shared variable on each rank, in rank order."""
    if s.ndim == 0:
        return function([], (s, "gather"))().tolist()
    rows, lengths = function([], [(s, "gather"), (s.shape[:1], "gather")])()
    return np.split(rows, np.cumsum(lengths)[:-1])
