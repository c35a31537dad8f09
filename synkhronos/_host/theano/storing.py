"""Operations that push to a parameter server and wait for it, while a function computes.

`push_order` shows the order in which they are computed, and says what their ports are.
"""

import threading

import numpy as np
import theano
from theano import gof
from theano.compile import mode as modes
from theano.compile.sharedvalue import SharedVariable
from theano.gof.type import generic
from theano.tensor import TensorType, as_tensor_variable, constant
from theano.tensor.sharedvar import TensorSharedVariable

from synkhronos._host.base.deep_graphs import compiling_deep
from synkhronos._host.base.push_order import in_push_order
from synkhronos._host.theano.overlapping import InOrder
from synkhronos._host.base.updates import updates_by_default

# Theano can't compile in two threads at once: it switches a cache of constants off meanwhile.
compiling = threading.RLock()


class _PortOperation(gof.Op):
    """An operation with a port; its last output is a token, which orders it among the others."""

    __props__ = ("port",)

    def __init__(self, port):
        self.port = port

    def do_constant_folding(self, node):
        """Return False: it acts on the parameter server each time."""
        return False


class Push(_PortOperation):
    """Pushes an array when it is computed.

    In place, the array belongs to the parameter server from then on: no other node reads it, and
    Theano lets go of it. Otherwise a copy is pushed.
    """

    __props__ = ("port", "inplace")

    def __init__(self, port, inplace=False):
        super().__init__(port)
        self.inplace = inplace
        if inplace:
            self.destroy_map = {0: [0]}

    def make_node(self, x, token):
        """Return the node, for an array and the token of the operation that comes before."""
        return gof.Apply(self, [as_tensor_variable(x), token], [generic()])

    def perform(self, node, inputs, output_storage):
        """Push the array."""
        array = inputs[0]
        if not self.inplace or not array.flags.carray:
            array = array.copy(order="C")
        self.port.push(array)

    def make_py_thunk(self, node, storage_map, compute_map, no_recycling, debug=False):
        """Return a thunk that also takes the array out of Theano's storage, if it is in place.

        Where Theano keeps its arrays from one call to the next, it would compute the next gradient
        in this one.
        """
        thunk = super().make_py_thunk(node, storage_map, compute_map, no_recycling, debug)
        if not self.inplace:
            return thunk

        def push_and_forget():
            thunk()
            thunk.inputs[0][0] = None

        vars(push_and_forget).update(vars(thunk))
        return push_and_forget


class Await(_PortOperation):
    """Waits for the result of the last push through its port.

    Parameters
    ----------
    shape : tuple of int
    dtype : str
    broadcastable : tuple of bool
    """

    __props__ = ("port", "shape", "dtype", "broadcastable")

    def __init__(self, port, shape, dtype, broadcastable):
        super().__init__(port)
        self.shape, self.dtype, self.broadcastable = shape, dtype, broadcastable

    def make_node(self):
        """Return the node; its outputs are the result and a token."""
        return gof.Apply(self, [], [TensorType(self.dtype, self.broadcastable)(), generic()])

    def perform(self, node, inputs, output_storage):
        """Wait."""
        output_storage[0][0] = self.port.wait()

    def infer_shape(self, node, shapes):
        """Return the shape, which is known before the result is there."""
        return [tuple(constant(np.int64(length)) for length in self.shape), None]


def push(port, x, token=None):
    """Return the token of a push; a function that is to push has the token as an output.

    Parameters
    ----------
    port : object
    x : tensor variable
    token : variable, optional
        Of the operation that must come before.
    """
    return Push(port)(x, gof.Constant(generic, None) if token is None else token)


def awaited(port, shape, dtype, broadcastable):
    """Return an expression of the result of the last push, and a token."""
    return Await(port, tuple(shape), dtype, tuple(broadcastable))(return_list=True)


def substituted(expressions, values):
    """Return expressions with some variables replaced, in the expressions alone.

    `swapped` would replace them in their values too, and make a second copy of each Await.

    Parameters
    ----------
    expressions : list
        Anything that is no variable stays as it is.
    values : dict
        Variable -> the expression in its place, of the same type.
    """
    outputs = [each for each in expressions if isinstance(each, gof.Variable)]
    memo = dict(values)
    for each in outputs:
        if each.owner is None:
            memo.setdefault(each, each)  # it would be cloned
    gof.graph.clone_get_equiv([], outputs, copy_orphans=False, memo=memo)
    return [memo[each] if isinstance(each, gof.Variable) else each for each in expressions]


def leaves(expressions):
    """Return all variables that expressions, and default updates in them, are computed from.

    Constants are left out.
    """
    found, left = {}, [each for each in expressions if isinstance(each, gof.Variable)]
    while left:
        new = [
            each
            for each in gof.graph.inputs(left)
            if each not in found and not isinstance(each, gof.Constant)
        ]
        found.update(dict.fromkeys(new))
        left = [update for _, update in updates_by_default(new)]
    return list(found)


def is_computed_from(expression, variables):
    """Return whether an expression is computed from one of some variables."""
    return not set(variables).isdisjoint(gof.graph.ancestors([expression]))


def shared_like(variable):
    """Return a new shared variable of a variable's type, with its value if it is shared."""
    name = f"{variable.name or 'value'}_kept"
    if isinstance(variable, SharedVariable):
        return type(variable)(name, variable.type, variable.get_value(), strict=True)
    if not isinstance(variable.type, TensorType):
        raise TypeError(f"can't keep a value of {variable}, of type {variable.type}.")
    value = np.zeros([1] * variable.ndim, variable.dtype)
    return TensorSharedVariable(name, variable.type, value, strict=True)


def compile_pushing(inputs, outputs, updates, **options):
    """Return a compiled function whose nodes come in the order of pushes."""
    mode = modes.get_mode(options.pop("mode", None))
    if isinstance(mode.provided_optimizer, gof.Query):
        mode = mode.including("synkhronos_store")
    else:
        mode = mode.clone(optimizer=gof.SeqOptimizer([mode.optimizer, _Order()]))
    options.update(updates=updates, mode=mode)
    compile_deep = compiling_deep(theano.function, [*outputs, *(value for _, value in updates)])
    with compiling:  # here, not in what may run in another thread
        return compile_deep(inputs, outputs, **options)


@gof.local_optimizer([Push])
def _in_place(node):
    # Only in graphs in which Theano tracks the operations that destroy their inputs.
    if (
        isinstance(node.op, Push)
        and not node.op.inplace
        and hasattr(node.fgraph, "destroyers")
        and not isinstance(node.inputs[0], gof.Constant)
    ):
        return Push(node.op.port, inplace=True)(*node.inputs, return_list=True)
    return False


class _Order(gof.Optimizer):
    """Gives a graph the order of `_PushOrder`, if it pushes or waits."""

    def apply(self, fgraph):
        if not any(isinstance(node.op, _PortOperation) for node in fgraph.apply_nodes):
            return
        _PushOrder().constrain(fgraph)


class _PushOrder(InOrder):
    """Each push as early as possible, each wait as late."""

    def arranged(self, nodes, before):
        """Return the nodes in the order of pushes."""
        return in_push_order(nodes, before, Push, Await)


# In place after elementwise operations, as the AllReduce; in order when the graph is complete.
modes.optdb.register(
    "synkhronos_push_in_place",
    gof.TopoOptimizer(_in_place, failure_callback=gof.TopoOptimizer.warn_inplace),
    80,
    "synkhronos_store",
)
modes.optdb.register("synkhronos_push_order", _Order(), 201, "synkhronos_store")
