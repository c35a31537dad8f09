"""PyTensor for `_host/base`: its classes and functions, and some that behave as Theano's do."""

import pytensor as library
from numpy.random import Generator as RandomState
from pytensor import function as compile_serially
from pytensor import tensor
from pytensor.compile import Function as CompiledFunction
from pytensor.compile import SharedVariable
from pytensor.compile.io import In, Out, SymbolicInput
from pytensor.compile.mode import Mode, get_mode, optdb
from pytensor.compile.ops import DeepCopyOp, ViewOp
from pytensor.gradient import DisconnectedType, grad_undefined
from pytensor.graph.basic import Apply, Constant, Variable, clone_get_equiv, equal_computations
from pytensor.graph.features import Feature, ReplaceValidate
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.op import Op as Operation
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import (
    GraphRewriter,
    SequentialGraphRewriter,
    WalkingGraphRewriter,
    node_rewriter,
)
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import graph_inputs, io_toposort, toposort_with_orderings, walk
from pytensor.link.basic import Container
from pytensor.printing import Print
from pytensor.raise_op import CheckAndRaise as Assert
from pytensor.scan.op import Scan
from pytensor.tensor import TensorType
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.basic import get_underlying_scalar_constant_value as get_scalar_constant_value
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.extra_ops import CpuContiguous, CumOp
from pytensor.tensor.extra_ops import Repeat as RepeatOp
from pytensor.tensor.math import Argmax, Dot, Prod
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Reshape, Shape, Shape_i
from pytensor.tensor.shape import SpecifyShape as Retype  # it fixes lengths of axes
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.subtensor import AdvancedSubtensor, IncSubtensor, Subtensor

try:
    from pytensor.conditional.op import IfElse
except ImportError:  # PyTensor 3.2 and older
    from pytensor.ifelse import IfElse

from synkhronos._host.pytensor.device_arrays import to_host as for_scripts

title = "PyTensor"
tuple_forms = ""
CONVERTS_UPDATES = True  # whether `function` converts updates to the types of their variables
# Operations that draw random numbers: their first two inputs are a state and a size.
DRAWS = (RandomVariable,)
# For messages: a size that has an item for each row.
SIZES = "as in size=x.shape, and no other axis depends on it."


def tensor_type(dtype, fixed_axes):
    """Return the type of arrays with a length of 1 along fixed axes, and any along others."""
    return TensorType(dtype, shape=tuple(1 if is_fixed else None for is_fixed in fixed_axes))


def ancestors(variables, blockers=()):
    """Return variables and all that they, but no `blockers`, are computed from, as written."""

    def before(each):
        return each.owner and each not in blockers and each.owner.inputs

    return list(walk(variables, before, bfs=True))


def inner_outputs(op):
    """Return the outputs of the graph inside of a scan or an OpFromGraph; none of any other."""
    op = getattr(op, "core_op", op)
    return op.inner_outputs if isinstance(op, HasInnerGraph) else []


def without_tuple(given):
    """Return an input as it is: PyTensor takes no tuples for inputs."""
    return given


def machine_of(function):
    """Return what runs the operations of a compiled function."""
    return function.vm


def clients_of(fgraph, variable):
    """Return the pairs (node, position of its input) that read a variable."""
    return fgraph.clients[variable]


def sorted_nodes(fgraph, orderings):
    """Return the nodes of a graph, each after its inputs and after its nodes in `orderings`."""
    return list(toposort_with_orderings(fgraph.outputs, orderings=orderings))


def indices_of(node):
    """Return the indices of a Subtensor: variables, integers and slices."""
    return tensor.subtensor.indices_from_subtensor(node.inputs[1:], node.op.idx_list)


def taken_rows(node):
    """Return the row numbers by which a node selects rows of its first input; else None."""
    return indices_of(node)[0] if isinstance(node.op, AdvancedSubtensor) else None


def in_place_rewriter(op, rewrite):
    """Return a rewriter of nodes: ``rewrite(node)`` returns an operation in place, or None."""

    @node_rewriter([op])
    def in_place(fgraph, node):
        new = rewrite(node)
        if new is None or not hasattr(fgraph, "destroyers"):
            return False
        return new(*node.inputs, return_list=True)

    warn = WalkingGraphRewriter.warn_inplace
    return WalkingGraphRewriter(in_place, order="in_to_out", failure_callback=warn)


def register(name, rewriter, position, *tags):
    """Register a rewriter for the modes that include one of its tags."""
    optdb.register(name, rewriter, *tags, position=position)
