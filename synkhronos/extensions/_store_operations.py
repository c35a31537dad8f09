"""Operations that push to a parameter server and wait for it, while a function computes.

    Await 0 ──▶ new W0 ──▶ layer 0 ─┐                         ┌─▶ gradient of W0 ──▶ Push 0
                     Await 1 ──▶ new W1 ──▶ layer 1 ──▶ loss ─┴─▶ gradient of W1 ──▶ Push 1
    ─────────────────────────────────── time ───────────────────────────────────▶
      wait 0, layer 0, wait 1, layer 1, loss, gradient 1, push 1, gradient 0, push 0, the rest

Each Await waits for the result that the Push of the previous call has requested. In a host
library's own order all waits would come first, and many gradients late. `_PushOrder` puts each push
as early as possible, and each wait as late.

The operations pass a token, a dummy number, from one to the next, so that none is moved before
another. A port connects an operation with the parameter server. It is an object with these
attributes:

    position      the place of its array in the order of first use: 0 is used first
    push(array)   begin to send the array, and ask for the result, which may land in the array
    wait()        return the result of the last push

References
----------
Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on
GPU Clusters", USENIX ATC 2017, section 3.1: wait-free backpropagation.
"""

import numpy as np

from synkhronos._host.base.chosen_library import (
    Apply,
    Constant,
    GraphRewriter,
    SharedVariable,
    TensorSharedVariable,
    TensorType,
    Variable,
    clone_get_equiv,
    compile_serially,
    get_mode,
    graph_inputs,
    in_place_rewriter,
    register,
    tensor,
    tensor_type,
)
from synkhronos._host.base.functions import (
    PythonOperation,
    compiling,
    compiling_deep,
    updates_by_default,
)
from synkhronos._host.base.rewriting import InOrder, including, n_needed

_TOKEN = np.asarray(0)


class _PortOperation(PythonOperation):
    """An operation with a port; its last output is a token."""

    __props__ = ("port",)

    def __init__(self, port):
        self.port = port


class Push(_PortOperation):
    """Pushes an array when it is computed.

    If `inplace`, the array itself is pushed, and belongs to the parameter server from then on: no
    other node reads it, and the library drops it. Otherwise a copy is pushed.
    """

    __props__ = ("port", "inplace")

    def __init__(self, port, inplace=False):
        super().__init__(port)
        self.inplace = inplace
        if inplace:
            self.destroy_map = {0: [0]}

    def make_node(self, x, token):
        return Apply(self, [tensor.as_tensor_variable(x), token], [tensor.lscalar()])

    def perform(self, node, inputs, output_storage):
        [array, _] = inputs
        if not self.inplace or not array.flags.carray:
            array = array.copy(order="C")
        self.port.push(array)
        output_storage[0][0] = _TOKEN

    def make_py_thunk(self, node, storage_map, compute_map, no_recycling, debug=False):
        """Return a thunk that, if in place, also removes the array from the library's storage.

        A library that keeps its arrays from call to call would write the next gradient to it.
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
    """Waits for the result of the last push through its port; its outputs are that and a token."""

    __props__ = ("port", "shape", "dtype", "broadcastable")

    def __init__(self, port, shape, dtype, broadcastable):
        super().__init__(port)
        self.shape, self.dtype, self.broadcastable = shape, dtype, broadcastable

    def make_node(self):
        return Apply(self, [], [tensor_type(self.dtype, self.broadcastable)(), tensor.lscalar()])

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = self.port.wait()
        output_storage[1][0] = _TOKEN

    def infer_shape(self, node, shapes):
        """Return the shape, which is known before the result is there."""
        return [tuple(tensor.constant(np.int64(length)) for length in self.shape), ()]


def push(port, x, token=None):
    """Return the token of a push of `x`: a function pushes if it has this token as an output.

    If a `token` is given, the push comes after the operation that returned it.
    """
    return Push(port)(x, tensor.constant(_TOKEN) if token is None else token)


def awaited(port, shape, dtype, broadcastable):
    """Return an expression of the result of the last push, and a token."""
    return Await(port, tuple(shape), dtype, tuple(broadcastable))(return_list=True)


def substituted(expressions, values):
    """Return expressions with variables replaced by `values`, a dict to expressions of their types.

    Unlike `swapped`, it replaces nothing within the values, which would make a second copy of each
    Await. What is no variable stays as it is.
    """
    outputs = [each for each in expressions if isinstance(each, Variable)]
    memo = dict(values)
    for each in outputs:
        if each.owner is None:
            memo.setdefault(each, each)  # else it would be cloned
    clone_get_equiv([], outputs, copy_orphans=False, memo=memo)
    return [memo[each] if isinstance(each, Variable) else each for each in expressions]


def leaves(expressions):
    """Return the inputs, but no constants, of expressions and of the default updates in them."""
    inputs, left = {}, [each for each in expressions if isinstance(each, Variable)]
    while left:
        left = [each for each in graph_inputs(left) if not isinstance(each, Constant)]
        new = [each for each in left if each not in inputs]
        inputs.update(dict.fromkeys(new))
        left = [update for _, update in updates_by_default(new)]
    return list(inputs)


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
    """Return a compiled function whose nodes come in the order of `_PushOrder`."""
    mode = including(get_mode(options.pop("mode", None)), "synkhronos_store", _Order())
    options.update(updates=updates, mode=mode)
    compile_deep = compiling_deep(compile_serially, [*outputs, *(value for _, value in updates)])
    with compiling:  # here: `compile_deep` may run another thread
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
    """Each push as early as possible, each wait as late: the order of the picture."""

    def arranged(self, nodes, before):
        place = {node: number for number, node in enumerate(nodes)}
        count, last_wait = n_needed(nodes, before), {}
        for node in nodes:
            position = node.op.port.position if isinstance(node.op, Await) else -np.inf
            last_wait[node] = max([position, *(last_wait[each] for each in before(node))])
        # A gradient that needs few operations can be pushed first, such as that of the last layer.
        pushes = [node for node in nodes if isinstance(node.op, Push)]
        pushes.sort(key=lambda node: (count[node], place[node]))
        arranged = {}  # as a set that keeps its order
        for push_node in pushes:
            stack = [(push_node, False)]
            while stack:
                node, is_ready = stack.pop()
                if node in arranged:
                    continue
                if is_ready:
                    arranged[node] = True
                    continue
                stack.append((node, True))
                # Nodes that wait for the last array are computed last, so they are stacked first.
                token = node.inputs[-1].owner if isinstance(node.op, Push) else None
                new = [each for each in before(node) if each not in arranged]
                new.sort(key=lambda x: (x is token, last_wait[x], place[x]), reverse=True)
                stack += [(each, False) for each in new]
        return [*arranged, *(node for node in nodes if node not in arranged)]


# Pushes work in place after elementwise operations, as AllReduces; the order is set at the end.
register("synkhronos_push_in_place", in_place_rewriter(Push, _in_place), 80, "synkhronos_store")
register("synkhronos_push_order", _Order(), 201, "synkhronos_store")
