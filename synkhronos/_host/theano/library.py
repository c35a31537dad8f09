"""Theano for `_host/base`: its classes and functions, under names that PyTensor's have too."""

import copy

import theano as library
import theano.tensor as tensor
from numpy.random import RandomState
from theano import clone as clone_replace
from theano import function as compile_serially
from theano import gof
from theano.compile.builders import OpFromGraph
from theano.compile.function_module import Function as CompiledFunction
from theano.compile.function_module import convert_function_input
from theano.compile.io import In, Out, SymbolicInput
from theano.compile.mode import Mode, get_mode, optdb
from theano.compile.ops import DeepCopyOp, Shape, Shape_i, ViewOp
from theano.compile.ops import Rebroadcast as Retype  # it fixes lengths of axes to 1
from theano.compile.sharedvalue import SharedVariable
from theano.gof import Apply, Constant, Container, Variable
from theano.gof import Optimizer as GraphRewriter
from theano.gof import Query as RewriteDatabaseQuery
from theano.gof import SeqOptimizer as SequentialGraphRewriter
from theano.gof.graph import ancestors, clone_get_equiv, io_toposort
from theano.gof.graph import inputs as graph_inputs
from theano.gof.toolbox import Feature, ReplaceValidate
from theano.gradient import DisconnectedType, grad_undefined
from theano.ifelse import IfElse
from theano.printing import Print
from theano.sandbox.rng_mrg import mrg_uniform_base
from theano.scan_module.scan_op import Scan
from theano.scan_module.scan_utils import equal_computations
from theano.tensor import Dot, Reshape, ScalarFromTensor, TensorFromScalar, TensorType
from theano.tensor.basic import Alloc, AllocEmpty, ARange, Argmax, Join, Split
from theano.tensor.elemwise import CAReduce, DimShuffle, Elemwise, Prod
from theano.tensor.extra_ops import CpuContiguous, CumOp, RepeatOp
from theano.tensor.opt import Assert, MakeVector
from theano.tensor.raw_random import RandomFunction
from theano.tensor.sharedvar import TensorSharedVariable
from theano.tensor.sort import ArgSortOp, SortOp
from theano.tensor.subtensor import AdvancedSubtensor, AdvancedSubtensor1, IncSubtensor, Subtensor

title = "Theano"
tuple_forms = (
    "(variable, value), (name, variable, value), (name, variable) or ((variable, update), value)"
)
CONVERTS_UPDATES = False  # whether `function` converts updates to the types of their variables
# Operations that draw random numbers: their first two inputs are a state and a size.
DRAWS = mrg_uniform_base, RandomFunction
# For messages: a size that has an item for each row.
SIZES = (
    "as in binomial(x.shape), and no other axis depends on it. (normal() of MRG_RandomStreams "
    "draws them in one row: take that of RandomStreams.)"
)

HasInnerGraph = Scan, OpFromGraph
NotScalarConstantError = tensor.NotScalarConstantError
get_scalar_constant_value = tensor.get_scalar_constant_value
tensor_type = TensorType  # of a dtype, and of fixed axes, which have the length 1


class Operation(gof.Op):
    """An operation whose derivatives have PyTensor's names."""

    def L_op(self, inputs, outputs, gradients):
        """Return the gradients with respect to the inputs."""
        return self.pullback(inputs, outputs, gradients)

    def R_op(self, inputs, eval_points):
        """Return the directional derivatives of the outputs, None for those that have none."""
        return self.pushforward(inputs, None, eval_points)

    def pullback(self, inputs, outputs, cotangents):
        """Raise NotImplementedError, unless an operation has gradients."""
        raise NotImplementedError(f"{self} has no gradient.")

    def pushforward(self, inputs, outputs, tangents):
        """Raise NotImplementedError, unless an operation has directional derivatives."""
        raise NotImplementedError(f"{self} has no directional derivative.")


def inner_outputs(op):
    """Return the outputs of the graph inside of a scan or an OpFromGraph; none of any other."""
    inner = getattr(op, "outputs", None) or getattr(op, "local_outputs", None) or ()
    return [each for each in inner if isinstance(each, Variable)]


def without_tuple(given):
    """Return the variable or In that a tuple stands for; None if Theano refuses the tuple."""
    if not isinstance(given, (list, tuple)):
        return given
    # Theano sets the value of an In that stands in a tuple.
    parts = [copy.copy(part) if isinstance(part, SymbolicInput) else part for part in given]
    try:
        return convert_function_input(tuple(parts))
    except Exception:  # Theano's message may fail in any way
        return None


def machine_of(function):
    """Return what runs the operations of a compiled function."""
    return function.fn


def clients_of(fgraph, variable):
    """Return the pairs (node, position of its input) that read a variable."""
    return variable.clients


def sorted_nodes(fgraph, orderings):
    """Return the nodes of a graph, each after its inputs and after its nodes in `orderings`."""
    return gof.graph.io_toposort(fgraph.inputs, fgraph.outputs, orderings)


def indices_of(node):
    """Return the indices of a Subtensor: variables and slices."""
    return tensor.subtensor.get_idx_list(node.inputs, node.op.idx_list)


def taken_rows(node):
    """Return the row numbers by which a node selects rows of its first input; else None."""
    return node.inputs[1] if isinstance(node.op, AdvancedSubtensor1) else None


def in_place_rewriter(op, rewrite):
    """Return a rewriter of nodes: ``rewrite(node)`` returns an operation in place, or None."""

    @gof.local_optimizer([op])
    def in_place(node):
        new = rewrite(node) if isinstance(node.op, op) else None
        if new is None or not hasattr(node.fgraph, "destroyers"):
            return False
        return new(*node.inputs, return_list=True)

    return gof.TopoOptimizer(in_place, failure_callback=gof.TopoOptimizer.warn_inplace)


def register(name, rewriter, position, *tags):
    """Register a rewriter for the modes that include one of its tags."""
    optdb.register(name, rewriter, position, *tags)
