"""Theano for `_host/base/dividing`: its classes and functions, under names PyTensor's have too."""

from theano import change_flags, scalar, tensor
from theano.compile.function_module import _pickle_Function as pickle_function
from theano.compile.mode import get_mode, optdb
from theano.compile.pfunc import rebuild_collect_shared
from theano.gof import FunctionGraph, Query
from theano.scan_module.scan_op import Scan
from theano.tensor import NotScalarConstantError, get_scalar_constant_value, get_vector_length
from theano.tensor.basic import integer_dtypes
from theano.tensor.sort import SortOp

from synkhronos._host.base.rewriting import IN_STEPS, Fuse, including
from synkhronos._host.theano.dividing.operation_options import OPTIONS
from synkhronos._host.theano.graph import all_reduce
from synkhronos._host.theano.variables import is_array_variable, is_random_state, lengths

STEPS_REDUCE = True  # whether ranks may reduce in a step of a scan


def as_row(x):
    """Return an array as the only row of one that may have any number of rows."""
    return tensor.unbroadcast(tensor.shape_padleft(x), 0)


def gradient_of_sort(argsort, gradient):
    """Return the gradient of a sort by what an ArgSortOp says."""
    op = argsort.op
    with change_flags(compute_test_value="off"):
        return SortOp(op.kind, op.order).grad(argsort.inputs, [gradient])[0]


def joined(node):
    """Return the axis of a Join, a variable, and its arrays."""
    return node.inputs[0], node.inputs[1:]


def of_type(expression, kind):
    """Return an expression as a variable of a type: cast, and with its axes of length 1."""
    return tensor.patternbroadcast(tensor.cast(expression, kind.dtype), kind.broadcastable)


def simplify(graph):
    """Simplify a FunctionGraph of lengths."""
    optdb.query(Query(["canonicalize", "ShapeOpt", "fast_compile"])).optimize(graph)


def loop_of(op):
    """Return what a scan does: Theano's has it all."""
    return op


def scan_like(op, inputs, outputs, reduces):
    """Return a scan with another graph of its step, in which ranks may reduce."""
    info = dict(op.info)
    if reduces:
        mode = including(get_mode(info["mode"]), IN_STEPS, Fuse())
        info.update(mode=mode, reduces_in_steps=True)
    return Scan(inputs, outputs, info)
