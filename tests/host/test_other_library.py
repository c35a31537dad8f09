"""Graphs of the library that is not the host of this process are refused with a sentence."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import host_library
from support.layouts import Layout

import synkhronos as synk

LAYOUTS = [Layout(2)]
OTHER = {"theano": "pytensor", "pytensor": "theano"}[host_library.NAME]
SENTENCE = (
    r"It is of (Theano|PyTensor), but the host library of this process is (PyTensor|Theano): write "
    rf"the graph with .*, or set SYNKHRONOS_HOST={OTHER} before"
)


class Foreign:
    """A variable of the other library."""

    __module__ = f"{OTHER}.tensor.variable"


x, y = T.dvector("x"), Foreign()


def shared():
    return theano.shared(np.zeros(3), "s")


@pytest.mark.parametrize(
    "call",
    [
        lambda: synk.function([y], x.sum()),
        lambda: synk.function([x], y),
        lambda: synk.function([x], [x.sum(), (y, "sum")]),
        lambda: synk.function([x], x.sum(), bcast_inputs=[y]),
        lambda: synk.function([x], x.sum(), updates=[(y, x)]),
        lambda: synk.function([x], x.sum(), updates=[(shared(), y)]),
        lambda: synk.function([x], x.sum(), givens=[(y, x)]),
        lambda: synk.function([x], x.sum(), mode=y),
        lambda: synk.broadcast(y),
        lambda: synk.all_reduce([shared(), y]),
        lambda: synk.get_value(1, y),
        lambda: synk.data(var=y),
        lambda: synk.ops.all_reduce(y),
    ],
)
def test_it_is_refused(ranks, call):
    with pytest.raises(TypeError, match=SENTENCE):
        call()
