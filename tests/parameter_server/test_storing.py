"""Operations that push and wait in a graph: their order, and the memory that they push."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling

from synkhronos._host.base.functions import updates_by_default
from synkhronos.extensions import _store_operations

NO_OPTIMIZER = theano.Mode(theano.gof.vm.VM_Linker(use_cloop=False, c_thunks=False), None)
MODES = [compiling.IN_PYTHON, "FAST_COMPILE", NO_OPTIMIZER]

pytestmark = pytest.mark.usefixtures("quickly_compiled")


class Port:
    """Stands in for a key of a store: it writes down what is asked of it."""

    def __init__(self, position, log):
        self.position, self.log = position, log
        self.array = None

    def push(self, array):
        self.log.append(("push", self.position))
        self.array = array

    def wait(self):
        self.log.append(("wait", self.position))
        return self.array


def network(side="right"):
    """Return inputs, loss and parameters of three layers."""
    random = np.random.RandomState(3)
    x, y, params = T.dmatrix("x"), T.ivector("y"), []
    layer = x if side == "right" else x.T
    for number, shape in enumerate([(4, 5), (5, 6), (6, 3)]):
        values = random.normal(size=shape)
        w = theano.shared(values if side == "right" else values.T.copy(), f"w{number}")
        b = theano.shared(np.zeros(shape[1]), f"b{number}")
        params += [w, b]
        right = side == "right"
        layer = T.dot(layer, w) + b if right else T.dot(w, layer) + b.dimshuffle(0, "x")
        if number < 2:
            layer = T.nnet.sigmoid(layer)
    layer = layer if side == "right" else layer.T
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(layer), y).mean()
    return [x, y], loss, params


def steps(side, mode, log):
    """Return functions that compute gradients, and that first apply those of the call before."""
    inputs, loss, params = network(side)
    ports = [Port(position, log) for position in range(len(params))]
    pulled = [
        _store_operations.awaited(port, param.get_value().shape, param.dtype, param.broadcastable)
        for port, param in zip(ports, params)
    ]
    new = {param: param - 0.5 * array for param, (array, _) in zip(params, pulled)}
    grads = T.grad(loss, params)
    later, *grads_later = _store_operations.substituted([loss, *grads], new)
    first = [_store_operations.push(port, grad) for port, grad in zip(ports, grads)]
    tokens = [token for _, token in pulled]
    second = [_store_operations.push(*each) for each in zip(ports, grads_later, tokens)]
    return (
        _store_operations.compile_pushing(inputs, [loss, *first], [], mode=mode),
        _store_operations.compile_pushing(inputs, [later, *second], list(new.items()), mode=mode),
        params,
    )


DATA = np.random.RandomState(1).normal(size=(7, 4)), np.arange(7, dtype="int32") % 3


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("mode", MODES, ids=["fast_run", "fast_compile", "no_optimizer"])
def test_layers_push_from_the_last_to_the_first_and_wait_just_before_their_use(side, mode):
    log = []
    first, second, _ = steps(side, mode, log)
    first(*DATA)
    assert [position // 2 for _, position in log] == [2, 2, 1, 1, 0, 0]
    log.clear()
    second(*DATA)
    assert log[:6] == [("wait", position) for position in range(6)]
    assert [position // 2 for _, position in log[6:]] == [2, 2, 1, 1, 0, 0]
    nodes = second.maker.fgraph.toposort()
    waits = [at for at, node in enumerate(nodes) if isinstance(node.op, _store_operations.Await)]
    products = [at for at, node in enumerate(nodes) if str(node.op).lower().startswith("dot")]
    # The first product of two layers comes before the wait for the weights of the next one.
    assert waits[0] < products[0] < waits[2] < products[1] < waits[4] < products[2]


@pytest.mark.parametrize("mode", MODES, ids=["fast_run", "fast_compile", "no_optimizer"])
def test_a_step_that_is_applied_in_the_next_call_equals_that_of_theano(mode):
    first, second, params = steps("right", mode, [])
    values = [param.get_value() for param in params]
    losses = [float(f(*DATA)[0]) for f in (first, second, second, second)]
    for param, value in zip(params, values):
        param.set_value(value)
    inputs, loss, own = network()
    updates = [(param, param - 0.5 * grad) for param, grad in zip(own, T.grad(loss, own))]
    with compiling.in_python():
        serial = theano.function(inputs, loss, updates=updates)
    assert losses == pytest.approx([float(serial(*DATA)) for _ in range(4)], rel=1e-12)


@pytest.mark.parametrize("allow_gc", [True, False])
def test_a_pushed_array_is_never_written_by_a_later_call(allow_gc):
    x, port = T.dmatrix("x"), Port(0, [])
    linker = theano.gof.vm.VM_Linker(use_cloop=False, c_thunks=False, allow_gc=allow_gc)
    token = _store_operations.push(port, T.dot(x, x))
    f = _store_operations.compile_pushing([x], [token], [], mode=theano.Mode(linker, "fast_run"))
    assert any(getattr(node.op, "inplace", False) for node in f.maker.fgraph.apply_nodes)
    f(np.eye(3))
    array = port.array
    f(2 * np.eye(3))
    assert np.array_equal(array, np.eye(3)) and port.array is not array


def test_an_input_a_constant_and_a_shared_variable_are_copied():
    x, w, ports = T.dvector("x"), theano.shared(np.ones(2)), [Port(k, []) for k in range(3)]
    pushed = [x, w, T.constant(np.ones(2))]
    tokens = [_store_operations.push(port, each) for port, each in zip(ports, pushed)]
    f = _store_operations.compile_pushing([x], tokens, [], mode=compiling.IN_PYTHON)
    given = np.array([3.0, 4.0])
    f(given)
    for port in ports:
        port.array += 1
    assert given.tolist() == [3, 4] and w.get_value().tolist() == [1, 1]
    f(given)
    assert ports[2].array.tolist() == [1, 1]


def test_what_another_node_reads_is_as_it_was_computed():
    x, port = T.dmatrix("x"), Port(0, [])

    class Zeroing(Port):
        def push(self, array):
            array[...] = 0

    product = T.dot(x, x)
    token = _store_operations.push(Zeroing(0, []), product)
    outputs = [product, (product**2).sum(), token]
    f = _store_operations.compile_pushing([x], outputs, [], mode=compiling.IN_PYTHON)
    same, total, _ = f(2 * np.eye(2))
    assert same.tolist() == [[4, 0], [0, 4]] and total == 32
    assert port.array is None


def test_arrays_in_other_orders_are_pushed_as_contiguous_ones():
    x, port = T.dmatrix("x"), Port(0, [])
    f = _store_operations.compile_pushing(
        [x], [_store_operations.push(port, T.dot(x, x).T)], [], mode=MODES[0]
    )
    f(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert port.array.flags.carray
    assert port.array.tolist() == [[7, 15], [10, 22]]


def test_only_the_expressions_are_substituted_not_what_takes_the_place():
    w = theano.shared(1.0, "w")
    new = w + 1
    [found, same, text] = _store_operations.substituted([10 * w, w, "text"], {w: new})
    assert (found.eval(), same.eval(), text) == (20, 2, "text")
    assert same is new


def test_leaves_include_those_of_default_updates():
    count, rate, x = theano.shared(0.0, "count"), theano.shared(1.0, "rate"), T.dscalar("x")
    count.default_update = count + rate
    assert set(_store_operations.leaves([x * count + 3, "text"])) == {x, count, rate}
    [(variable, update)] = updates_by_default([count, rate])
    assert variable is count and update.eval() == 1


def test_a_shared_variable_like_another_has_its_type_and_a_value_of_its_own():
    row = theano.shared(np.ones((1, 2), "float32"), broadcastable=(True, False))
    like = _store_operations.shared_like(row)
    assert like.type == row.type and like.get_value().tolist() == [[1, 1]]
    assert _store_operations.shared_like(T.frow("x")).type == T.frow
    with pytest.raises(TypeError, match=r"can't keep a value of .*Generic"):
        _store_operations.shared_like(theano.gof.generic())
