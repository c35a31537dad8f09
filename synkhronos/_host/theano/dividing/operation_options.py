"""Options of Theano's operations that the rules know: see `base.dividing.known_options`.

A class has those of its base classes, too.
"""

_CONVOLUTION = "convdim border_mode subsample filter_flip kshp filter_dilation num_groups unshared"
_POOLING = "ignore_border mode ndim"

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
