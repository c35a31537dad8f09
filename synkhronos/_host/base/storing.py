"""Operations that push to a parameter server and wait for it, while a function computes.

`node_order` shows the order in which they are computed, and says what their ports are. A token is a
number that means nothing.
"""

import threading

import numpy as np

from synkhronos._host.base.deep_graphs import compiling_deep
from synkhronos._host.base.library import (
    Apply,
    Constant,
    GraphRewriter,
    Operation,
    SharedVariable,
    TensorSharedVariable,
    TensorType,
    Variable,
    ancestors,
    clone_get_equiv,
    compile_serially,
    get_mode,
    graph_inputs,
    in_place_rewriter,
    register,
    tensor,
    tensor_type,
)
from synkhronos._host.base.node_order import InOrder, in_push_order
from synkhronos._host.base.rewriting import including
from synkhronos._host.base.updates import updates_by_default

# Two threads can't compile at once: Theano switches a cache of constants off meanwhile.
compiling = threading.RLock()
_TOKEN = np.asarray(0)


class _PortOperation(Operation):
    """An operation with a port; its last output is a token, which orders it among the others."""

    __props__ = ("port",)

    def __init__(self, port):
        self.port = port

    def do_constant_folding(self, *graph_and_node):
        """Return False: it acts on the parameter server each time."""
        return False


class Push(_PortOperation):
    """Pushes an array when it is computed.

    In place, the array belongs to the parameter server from then on: no other node reads it, and
    the library lets go of it. Otherwise a copy is pushed.
    """

    __props__ = ("port", "inplace")

    def __init__(self, port, inplace=False):
        super().__init__(port)
        self.inplace = inplace
        if inplace:
            self.destroy_map = {0: [0]}

    def make_node(self, x, token):
        """Return the node, for an array and the token of the operation that comes before."""
        return Apply(self, [tensor.as_tensor_variable(x), token], [tensor.lscalar()])

    def perform(self, node, inputs, output_storage):
        """Push the array."""
        self.push(inputs[0])
        output_storage[0][0] = _TOKEN

    def push(self, array):
        """Push an array, or a copy."""
        if not self.inplace or not array.flags.carray:
            array = array.copy(order="C")
        self.port.push(array)

    def make_py_thunk(self, node, storage_map, compute_map, no_recycling, debug=False):
        """Return a thunk that also takes the array out of the library's storage, if in place.

        Where the library keeps its arrays from one call to the next, it would compute the next
        gradient in this one.
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
        return Apply(self, [], [tensor_type(self.dtype, self.broadcastable)(), tensor.lscalar()])

    def perform(self, node, inputs, output_storage):
        """Wait."""
        output_storage[0][0] = self.port.wait()
        output_storage[1][0] = _TOKEN

    def infer_shape(self, node, shapes):
        """Return the shape, which is known before the result is there."""
        return [tuple(tensor.constant(np.int64(length)) for length in self.shape), ()]


def push(port, x, token=None):
    """Return the token of a push; a function that is to push has the token as an output.

    Parameters
    ----------
    port : object
    x : tensor variable
    token : variable, optional
        Of the operation that must come before.
    """
    return Push(port)(x, tensor.constant(_TOKEN) if token is None else token)


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
    outputs = [each for each in expressions if isinstance(each, Variable)]
    memo = dict(values)
    for each in outputs:
        if each.owner is None:
            memo.setdefault(each, each)  # it would be cloned
    clone_get_equiv([], outputs, copy_orphans=False, memo=memo)
    return [memo[each] if isinstance(each, Variable) else each for each in expressions]


def leaves(expressions):
    """Return all variables that expressions, and default updates in them, are computed from.

    Constants are left out.
    """
    found, left = {}, [each for each in expressions if isinstance(each, Variable)]
    while left:
        new = [
            each
            for each in graph_inputs(left)
            if each not in found and not isinstance(each, Constant)
        ]
        found.update(dict.fromkeys(new))
        left = [update for _, update in updates_by_default(new)]
    return list(found)


def is_computed_from(expression, variables):
    """Return whether an expression is computed from one of some variables."""
    return not set(variables).isdisjoint(ancestors([expression]))


def shared_like(variable):
    """Return a new shared variable of a variable's type, with its value if it is shared."""
    name = f"{variable.name or 'value'}_kept"
    if isinstance(variable, SharedVariable):
        return type(variable)(
            name=name, type=variable.type, value=variable.get_value(), strict=True
        )
    if not isinstance(variable.type, TensorType):
        raise TypeError(f"can't keep a value of {variable}, of type {variable.type}.")
    value = np.zeros([1] * variable.ndim, variable.dtype)
    return TensorSharedVariable(name=name, type=variable.type, value=value, strict=True)


def compile_pushing(inputs, outputs, updates, **options):
    """Return a compiled function whose nodes come in the order of pushes."""
    mode = including(get_mode(options.pop("mode", None)), "synkhronos_store", _Order())
    options.update(updates=updates, mode=mode)
    compile_deep = compiling_deep(compile_serially, [*outputs, *(value for _, value in updates)])
    with compiling:  # here, not in what may run in another thread
        return compile_deep(inputs, outputs, **options)


def _in_place(node):
    if node.op.inplace or isinstance(node.inputs[0], Constant):
        return None
    return Push(node.op.port, inplace=True)


class _Order(GraphRewriter):
    """Gives a graph the order of `_PushOrder`, if it pushes or waits."""

    def apply(self, fgraph):
        if any(isinstance(node.op, _PortOperation) for node in fgraph.apply_nodes):
            _PushOrder().constrain(fgraph)


class _PushOrder(InOrder):
    """Each push as early as possible, each wait as late."""

    def arranged(self, nodes, before):
        """Return the nodes in the order of pushes."""
        return in_push_order(nodes, before, Push, Await)


# In place after elementwise operations, as the AllReduce; in order when the graph is complete.
register("synkhronos_push_in_place", in_place_rewriter(Push, _in_place), 80, "synkhronos_store")
register("synkhronos_push_order", _Order(), 201, "synkhronos_store")
