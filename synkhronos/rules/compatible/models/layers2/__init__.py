"""``theanompi.models.layers2``: weights and layers for model files.

A layer takes the layer before it, or a variable of Theano and ``input_shape``; its ``output`` is an
expression. ``get_params(get_layers(last))`` returns all parameters and their types.
"""

from synkhronos.rules.compatible.models.layers2.dense import (
    FC,
    BatchNormal,
    Dimshuffle,
    Dropout,
    Flatten,
    Softmax,
)
from synkhronos.rules.compatible.models.layers2.images import (
    LRN,
    Conv,
    ConvPoolLRN,
    ConvPoolLRN_bc01,
    Crop,
    CrossChannelNormalization,
    Pool,
    Subtract,
)
from synkhronos.rules.compatible.models.layers2.layer import (
    Layer,
    _first,
    _own_streams,
    count_params,
    extract_weight_types,
    get_layers,
    get_params,
    get_statistics,
    set_seed,
    set_verbose,
)
from synkhronos.rules.compatible.models.layers2.weights import (
    Constant,
    GlorotNormal,
    GlorotUniform,
    HeNormal,
    HeUniform,
    Normal,
    Uniform,
    Weight,
    own,
)

# A script may replace these three: the random state of weights, the seed of random streams, and the
# streams by which `Crop` cuts.
rng = own
seed_this = _first
MRG = _own_streams

__all__ = [
    "FC",
    "LRN",
    "MRG",
    "BatchNormal",
    "Constant",
    "Conv",
    "ConvPoolLRN",
    "ConvPoolLRN_bc01",
    "Crop",
    "CrossChannelNormalization",
    "Dimshuffle",
    "Dropout",
    "Flatten",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Layer",
    "Normal",
    "Pool",
    "Softmax",
    "Subtract",
    "Uniform",
    "Weight",
    "count_params",
    "extract_weight_types",
    "get_layers",
    "get_params",
    "get_statistics",
    "rng",
    "seed_this",
    "set_seed",
    "set_verbose",
]
