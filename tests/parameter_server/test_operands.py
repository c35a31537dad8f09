"""Arrays that rounds read and write: of NumPy, of shared variables, and on devices."""

import gc
import sys

import numpy as np
import pytest
import scipy.sparse
import theano
import theano.sparse
import theano.tensor as T
from support.on_devices import missing

from synkhronos.parameter_server.operands import operand_of

VALUES = np.arange(6, dtype="float32").reshape(2, 3)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a.T,
        lambda a: a[:, ::2],
        lambda a: a[::-1],
        lambda a: np.asfortranarray(a),
        lambda a: a[0, 0, np.newaxis][()],
        lambda a: a[:0],
    ],
    ids=["itself", "transposed", "steps", "backwards", "fortran", "row", "empty"],
)
def test_an_array_of_any_layout_is_written_where_it_is(view):
    array = view(VALUES.copy())
    operand = operand_of(array, "array", writes=True)
    assert (operand.shape, operand.dtype) == (array.shape, array.dtype)
    assert operand.read() is array
    new = np.random.RandomState(0).rand(*array.shape).astype("float32")
    operand.write(new)
    np.testing.assert_array_equal(array, new)
    np.testing.assert_array_equal(operand.read(), new)


def test_a_shared_variable_is_its_own_array():
    value = VALUES.copy()
    variable = theano.shared(value, "w", borrow=True)
    operand = operand_of(variable, "array", writes=True)
    assert (operand.shape, operand.dtype) == ((2, 3), np.dtype("float32"))
    assert operand.read() is value
    operand.write(VALUES + 1)
    np.testing.assert_array_equal(value, VALUES + 1)
    np.testing.assert_array_equal(variable.get_value(), VALUES + 1)


def test_a_shared_variable_is_looked_at_when_it_is_read(quickly_compiled):
    variable = theano.shared(VALUES.copy(), "w")
    operand = operand_of(variable, "array")
    theano.function([], updates=[(variable, variable + 1)])()
    np.testing.assert_array_equal(operand.read(), VALUES + 1)
    variable.set_value(np.zeros((4, 1), "float32"))
    assert operand.shape == operand.read().shape == (4, 1)


def test_a_shared_variable_of_one_number(quickly_compiled):
    variable = theano.shared(1.0, "rate")
    operand = operand_of(variable, "array", writes=True)
    assert operand.shape == operand.read().shape == ()
    # In Python modes the new value may be a number of NumPy, which nothing can be written into.
    variable.container.storage[0] = np.float64(2)
    assert operand.read() == 2 and operand.shape == ()
    operand.write(np.array(3.0))
    assert variable.get_value() == 3
    assert theano.function([], variable * 2)() == 6


def test_a_shared_variable_with_a_new_shape_gets_the_result():
    variable = theano.shared(np.zeros(2, "float32"), "w")
    operand = operand_of(variable, "array", writes=True)
    result = np.ones(3, "float32")
    operand.write(result)
    result[:] = 0  # memory of the store, which goes on using it
    np.testing.assert_array_equal(variable.get_value(), np.ones(3))


def read_only():
    array = VALUES.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "value, error, said",
    [
        ([1.0, 2.0], TypeError, r"gradient must be an array of NumPy, .* got \[1.0, 2.0\]: its"),
        (3.0, TypeError, "numpy.asarray"),
        (np.float32(3), TypeError, "numpy.asarray"),
        ("w", TypeError, "got 'w'[.]"),
        (None, TypeError, "got None[.]"),
        (np.array([None]), TypeError, "must hold numbers, got an array of dtype object"),
        (np.array(["a"]), TypeError, "dtype <U1"),
        (np.ma.masked_array(VALUES, VALUES > 1), TypeError, "filled()"),
        (scipy.sparse.eye(2).tocsr(), TypeError, "must be an array of NumPy"),
        (theano.shared(scipy.sparse.eye(2).tocsr()), TypeError, "that holds an array"),
        (theano.shared([1]), TypeError, "that holds an array"),
        (theano.shared(np.random.RandomState(0)), TypeError, "that holds an array"),
        (theano.shared(np.zeros(2, bool)), TypeError, "dtype bool"),
        (T.vector("g") * 2, TypeError, "a value only inside a compiled function"),
        (read_only(), ValueError, "gradient is read-only"),
        (theano.shared(read_only(), "w", borrow=True), ValueError, "gradient is w, whose array"),
    ],
    ids=range(16),
)
def test_what_can_not_be_written_is_refused(value, error, said):
    if error is TypeError:
        with pytest.raises(error, match=said):
            operand_of(value, "gradient")
    with pytest.raises(error, match=said):
        operand_of(value, "gradient", writes=True)


def test_what_is_only_read_may_be_read_only():
    np.testing.assert_array_equal(operand_of(read_only(), "array").read(), VALUES)
    variable = theano.shared(read_only(), borrow=True)
    np.testing.assert_array_equal(operand_of(variable, "array").read(), VALUES)


def test_numpy_alone_imports_no_theano(script):
    script(
        "import sys, numpy as np\n"
        "from synkhronos.parameter_server.operands import operand_of\n"
        "operand_of(np.zeros(2), 'array').read()\n"
        "try:\n"
        "    operand_of([1], 'array')\n"
        "except TypeError:\n"
        "    assert 'theano' not in sys.modules and 'pygpu' not in sys.modules\n"
        "else:\n"
        "    raise AssertionError\n"
    )


ON_A_DEVICE = """
import numpy as np, pygpu, theano
from synkhronos import _host
from synkhronos.parameter_server.operands import operand_of

_host.open_device("opencl0:0", 0, 1)
values = np.arange(6, dtype="float32").reshape(2, 3)
variable = theano.shared(values, "w")
assert _host.lives_on_device(variable)
device = pygpu.array(values, context=_host.device_context())
for value in (variable, device, device.T, device[:, ::2], device[0, 0], device[:0]):
    operand = operand_of(value, "array", writes=True)
    present = operand.read()
    assert operand.shape == present.shape and operand.dtype == present.dtype == "float32"
    held = _host.peek(variable) if value is variable else value
    new = np.asarray(np.random.RandomState(0).rand(*present.shape))
    operand.write(new.astype("float32").T.copy().T)
    np.testing.assert_array_equal(np.asarray(held), new.astype("float32"))
    operand.write(2 * new)  # of another dtype
    np.testing.assert_array_equal(operand.read(), (2 * new).astype("float32"))
assert _host.peek(variable) is operand_of(variable, "array")._variable.container.storage[0]
try:
    operand_of(device.astype("bool"), "array")
except TypeError as error:
    assert "bool" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.opencl
@pytest.mark.slow("waits for a process that opens a device of PoCL")
def test_arrays_on_a_device(script):
    if missing("opencl"):
        pytest.skip(f"{missing('opencl')}: run `make opencl`")
    script(ON_A_DEVICE, env={"THEANO_FLAGS": ""})


STORE_ON_A_DEVICE = """
import numpy as np, pygpu, theano
from synkhronos import _host
from synkhronos import parameter_server as ps
from synkhronos.extensions import update_rules

_host.open_device("opencl0:0", 0, 1)
values = np.float32([[1, 2], [3, 4]])
array = pygpu.array(values, context=_host.device_context())
variable = theano.shared(10 * values, "w")
assert _host.lives_on_device(variable)
with ps.create("local", devices=[0, 1]) as store:
    for device, each in enumerate((array, variable)):
        store.init_key((2, 2), 0, device)
        store.push(each, 0, device)
        store.pull_req(each, 0, device)
    for device in (0, 1):
        store.pull_wait(0, device, timeout=30)
    for each in (np.asarray(array), variable.get_value()):
        np.testing.assert_array_equal(each, 11 * values)
    store.init("one caller", np.zeros((2, 2), "float32"))
    store.pushpull("one caller", [array, variable]).wait(30)
    for each in (np.asarray(array), variable.get_value()):
        np.testing.assert_array_equal(each, 22 * values)
with ps.create("local") as store:
    store.set_optimizer(update_rules.momentum, learning_rate=0.5)
    store.init("w", variable)
    for expected in (22, 0, -41.8):  # the gradient is 44, the momentum 0.9
        np.testing.assert_allclose(store.pull("w").wait(30), expected * values, rtol=1e-5)
        store.push("w", [array, array])
"""


@pytest.mark.opencl
@pytest.mark.slow("waits for a process that opens a device of PoCL")
def test_a_store_of_arrays_on_a_device(script):
    if missing("opencl"):
        pytest.skip(f"{missing('opencl')}: run `make opencl`")
    script(STORE_ON_A_DEVICE, env={"THEANO_FLAGS": "floatX=float32"})


def test_an_operand_holds_the_array_alone():
    array = VALUES.copy()
    before = sys.getrefcount(array)
    operand = operand_of(array, "array")
    assert sys.getrefcount(array) == before + 1
    del operand
    gc.collect()
    assert sys.getrefcount(array) == before
