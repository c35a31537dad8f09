"""Integers of 64 bits, in Data, calls and collectives: held exactly, or refused."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.layouts import Layout

import synkhronos as synk

LAYOUTS = [Layout(2), Layout(3, master=1)]
pytestmark = pytest.mark.usefixtures("ranks", "quickly_compiled")


@pytest.mark.parametrize(
    "value, dtype",
    [
        ([0, 2**63 - 1, -(2**63)], "int64"),
        ([0, 2**63, 2**64 - 1], "uint64"),
        ([2**53 + 1, 1.0, np.uint64(2)], "int64"),
        ([[2**64 - 1, True], [3.0, np.int8(4)]], "uint64"),
        (2**63, "uint64"),
    ],
    ids=repr,
)
def test_integers_of_64_bits_are_held_exactly(value, dtype):
    exactly = np.array(value, object)
    assert (synk.data(value, dtype=dtype).data.astype(object) == exactly).all()
    shared = theano.shared(np.zeros_like(exactly, dtype))
    synk.broadcast(shared, value)
    assert (shared.get_value().astype(object) == exactly).all()
    x = T.TensorType(dtype, (False,) * exactly.ndim)()
    assert (synk.function([], (x, "max"), [x])(value).astype(object) == exactly).all()


@pytest.mark.parametrize(
    "value, dtype",
    [
        ([-1, 2**63], "uint64"),
        (np.int64(-1), "uint64"),
        ([2**63], "int64"),
        ([[np.uint64(2**63)]], "int64"),
        ([2**64], "uint64"),
    ],
    ids=repr,
)
def test_integers_of_64_bits_that_do_not_fit_are_refused_in_calls(value, dtype):
    x = T.TensorType(dtype, (False,) * np.ndim(value))("x")
    serial = theano.function([x], x)
    with pytest.raises((TypeError, OverflowError)):
        serial(value)
    f = synk.function([], (x, "max"), [x])
    with pytest.raises(TypeError, match=r"Input 'x' of .* takes (TensorType|Scalar|Vector|Matrix)"):
        f(value)
    shared = theano.shared(np.zeros_like(value, dtype), "s")
    with pytest.raises(TypeError, match=r"broadcast\(\) can't give s"):
        synk.broadcast(shared, value)
    assert not shared.get_value().any()
