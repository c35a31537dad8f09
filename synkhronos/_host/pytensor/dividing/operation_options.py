"""Options of PyTensor's operations that the rules know: see `base.dividing.known_options`.

A class has those of its base classes, too. The table covers all releases that Synkhronos runs on,
and PyMC's classes.
"""

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
