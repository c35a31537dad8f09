"""PyTensor for `_host/base/dividing`: its classes and functions, under names Theano's have too."""

from dataclasses import replace
from types import SimpleNamespace

from pytensor import scalar, tensor
from pytensor.compile.executor import _pickle_Function as pickle_function
from pytensor.compile.rebuild import rebuild_collect_shared
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor import get_vector_length
from pytensor.tensor.type import integer_dtypes

from synkhronos._host.pytensor.graph import all_reduce
from synkhronos._host.pytensor.library import RewriteDatabaseQuery, Scan, SortOp, optdb
from synkhronos._host.pytensor.variables import is_array_variable, is_random_state, lengths

STEPS_REDUCE = False  # whether ranks may reduce in a step of a scan


def as_row(x):
    """Return an array as the only row of one that may have any number of rows."""
    return tensor.shape_padleft(x)


def gradient_of_sort(argsort, gradient):
    """Return the gradient of a sort by what an ArgSortOp says."""
    node = SortOp(**argsort.op._props_dict()).make_node(*argsort.inputs)
    return node.op.pullback(node.inputs, node.outputs, [gradient])[0]


def joined(node):
    """Return the axis of a Join, a number, and its arrays."""
    return node.op.axis, node.inputs


def of_type(expression, kind):
    """Return an expression as a variable of a type: cast, and with its fixed lengths."""
    return kind.filter_variable(tensor.cast(expression, kind.dtype))


def simplify(graph):
    """Simplify a FunctionGraph of lengths."""
    query = RewriteDatabaseQuery(include=["canonicalize", "ShapeOpt", "fast_compile"])
    optdb.query(query).rewrite(graph)


def loop_of(op):
    """Return the parts of a scan, under the names that Theano's has."""
    info, step = op.info, op.fgraph.unfreeze()
    return SimpleNamespace(
        name=op.name or "scan",
        inputs=step.inputs,
        outputs=step.outputs,
        n_seqs=info.n_seqs,
        n_outs=info.n_mit_mot + info.n_mit_sot + info.n_sit_sot,  # kept for several steps
        n_shared_outs=info.n_untraced_sit_sot,
        as_while=info.as_while,
        var_mappings=op.get_oinp_iinp_iout_oout_mappings(),
    )


def scan_like(op, inputs, outputs, reduces):
    """Return a scan with another graph of its step, and perhaps with more inputs at the end."""
    more = len(inputs) - op.info.n_inner_inputs
    info = replace(op.info, n_non_seqs=op.info.n_non_seqs + more)
    names = "mode", "truncate_gradient", "name", "allow_gc", "strict"
    return Scan(inputs, outputs, info, **{name: getattr(op, name) for name in names})


# Options of operations that the rules know: see `base.dividing.division`. A class has those of its
# base classes, too. The table covers all releases that Synkhronos runs on, and PyMC's classes.
OPTIONS = {
    "ARange": "dtype",
    "AdvancedIncSubtensor": "idx_list inplace set_instead_of_inc ignore_duplicates",
    "AdvancedSubtensor": "idx_list",
    "AllocEmpty": "dtype",
    "ArgSortOp": "kind axis",
    "Argmax": "axis",
    "Blockwise": "core_op signature",
    "CAReduce": "scalar_op axis dtype acc_dtype upcast_discrete_output",
    "CheckAndRaise": "msg exc_type",
    "CheckParameterValue": "can_be_replaced_by_ninf",
    "CumOp": "axis mode",
    "DimShuffle": "input_ndim new_order",
    "Elemwise": "scalar_op inplace_pattern",
    "ExtractDiag": "offset axis1 axis2 view",
    "IfElse": "as_view n_outs",
    "IncSubtensor": "idx_list inplace set_instead_of_inc destroyhandler_tolerate_aliased",
    "Join": "axis",
    "JoinDims": "start_axis n_axes",
    "MakeVector": "dtype",
    "MvNormalRV": "method",
    "NonZeroDimsCAReduce": "initial",
    "OpFromGraph": "*",  # any: its graph is divided
    "Prod": "no_zeros_in_input",
    "RandomVariable": "name signature dtype inplace",
    "Repeat": "axis",
    "Reshape": "ndim",
    "Scan": (
        "inputs outputs info mode typeConstructor truncate_gradient name profile allow_gc strict"
    ),
    "ScanInfo": (
        "n_seqs mit_mot_in_slices mit_mot_out_slices mit_sot_in_slices sit_sot_in_slices n_nit_sot "
        "n_untraced_sit_sot n_non_seqs as_while"
    ),
    "Shape_i": "i",
    "SortOp": "kind axis",
    "Split": "len_splits axis",
    "SplitDims": "axis",
    "Subtensor": "idx_list",
}
