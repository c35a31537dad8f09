"""Theano for `_host/base/dividing`: its classes and functions, under names PyTensor's have too."""

from theano import change_flags, scalar, tensor
from theano.compile.function_module import _pickle_Function as pickle_function
from theano.compile.pfunc import rebuild_collect_shared
from theano.gof import FunctionGraph
from theano.tensor import get_vector_length
from theano.tensor.basic import integer_dtypes

from synkhronos._host.base.rewriting import IN_STEPS, Fuse, including
from synkhronos._host.theano.graph import all_reduce
from synkhronos._host.theano.library import RewriteDatabaseQuery, Scan, SortOp, get_mode, optdb
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
    query = RewriteDatabaseQuery(["canonicalize", "ShapeOpt", "fast_compile"])
    optdb.query(query).optimize(graph)


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


_CONVOLUTION = "convdim border_mode subsample filter_flip kshp filter_dilation num_groups unshared"
_POOLING = "ignore_border mode ndim"

# Options of operations that the rules know: see `base.dividing.division`. A class has those of its
# base classes, too.
OPTIONS = {
    "ARange": "dtype",
    "AbstractBatchNormInference": "axes",
    "AbstractBatchNormTrain": "axes",
    "AbstractBatchNormTrainGrad": "axes",
    "AbstractConv": f"{_CONVOLUTION} imshp",
    "AbstractConv_gradInputs": f"{_CONVOLUTION} imshp",
    "AbstractConv_gradWeights": f"{_CONVOLUTION} imshp",
    "AdvancedIncSubtensor": "inplace set_instead_of_inc",
    "AdvancedIncSubtensor1": "inplace set_instead_of_inc",
    "AllocEmpty": "dtype",
    "ArgSortOp": "kind order",
    "Argmax": "axis",
    "Assert": "msg",
    "CAReduce": "scalar_op axis",
    "CAReduceDtype": "dtype acc_dtype",
    "ConvOp": (
        "imshp kshp nkern bsize dx dy output_mode unroll_batch unroll_kern unroll_patch "
        "imshp_logical kshp_logical kshp_logical_top_aligned verbose version direction_hint openmp"
    ),
    "CumOp": "axis mode",
    "DiffOp": "n axis",
    "DimShuffle": "input_broadcastable new_order inplace",
    "DownsampleFactorMaxGradGrad": _POOLING,
    "Elemwise": "scalar_op inplace_pattern",
    "IfElse": "n_outs as_view gpu name",
    "Images2Neibs": "mode",
    "IncSubtensor": "idx_list inplace set_instead_of_inc",
    "Join": "view",
    "MakeVector": "dtype",
    "MaxAndArgmax": "axis",
    "Pool": _POOLING,
    "PoolGrad": _POOLING,
    "RandomFunction": "fn outtype inplace ndim_added",
    "Rebroadcast": "axis",
    "RepeatOp": "axis",
    "Reshape": "ndim",
    "Scan": "inputs outputs info typeConstructor",
    "Shape_i": "i",
    "SortOp": "kind order",
    "SparseBlockGemv": "inplace",
    "SparseBlockOuter": "inplace",
    "Split": "len_splits",
    "Subtensor": "idx_list",
    "TopKOp": "axis sorted return_values return_indices idx_dtype",
    "mrg_uniform_base": "output_type inplace",
}
