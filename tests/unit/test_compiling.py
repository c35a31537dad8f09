"""What tests compile: the graph of FAST_RUN in Python, and C code in `thorough` combinations."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling
from support.layouts import ON_DEVICES
from theano.sandbox import rng_mrg

pytestmark = pytest.mark.skipif(ON_DEVICES, reason="operations on devices have compiled code only")


def ops(f):
    return [str(node.op) for node in f.maker.fgraph.toposort()]


def is_compiled(f):
    """Return whether the operations of a function run as C code."""
    return any(hasattr(thunk, "cthunk") for thunk in f.fn.thunks)


def made(mode=None):
    x = T.dvector("x")
    mode = mode and theano.Mode(theano.gof.vm.VM_Linker(use_cloop=False), mode)
    return theano.function([x], T.tanh(x * 2 + 1), mode=mode)


def test_in_python_the_graph_is_that_of_fast_run():
    with compiling.in_python():
        f = made()
    with compiling.quickly():
        g = made()
    assert ops(f) == ops(made("fast_run")) != ops(g)
    assert not is_compiled(f) and not is_compiled(g) and is_compiled(made("fast_run"))
    assert f([1.0]) == g([1.0]) == np.tanh(3)


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_thorough_combinations_compile(request, number):
    before = theano.compile.mode.get_default_mode()
    request.getfixturevalue("compiled_if_thorough")
    assert (theano.compile.mode.get_default_mode() is before) == (number == 2)


def test_constants_are_computed_in_python(monkeypatch):
    monkeypatch.setattr(theano.gof.cmodule.ModuleCache, "module_from_key", None)
    f = theano.function([], T.exp(T.arange(3.0)) + T.ones((2, 3)), mode="FAST_COMPILE")
    assert isinstance(f.maker.fgraph.outputs[0].owner.inputs[0], theano.Constant)
    np.testing.assert_allclose(f(), np.exp([range(3)] * 2) + 1)


def test_streams_begin_with_the_states_that_theano_gives_them(quickly_compiled):
    streams = rng_mrg.MRG_RandomStreams(2147462578)
    expected = [streams.rstate]
    for _ in range(4):
        expected.append(rng_mrg.ff_2p72(expected[-1]))
    following = rng_mrg.ff_2p134(streams.rstate)
    np.testing.assert_array_equal(streams.get_substream_rstates(5, "float64"), expected)
    np.testing.assert_array_equal(streams.rstate, following)
