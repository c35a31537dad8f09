"""Theano as the host library: the names that `synkhronos._host` lists and `base` has not."""

import theano as library
from numpy.random import RandomState

from synkhronos._host.theano.devices import (
    copy_from_device,
    copy_to_device,
    device_context,
    empty_like,
    empty_on_device,
    import_device_backend,
    is_on_device,
    join_on_device,
    refuse_open_device,
    scale_on_device,
    take_on_device,
    to_device,
    to_host,
)
from synkhronos._host.theano.dividing import CannotDivide, divide
from synkhronos._host.theano.functions import compile_function, expression_of, run
from synkhronos._host.theano.graph import all_reduce
from synkhronos._host.theano.intercepting import CompiledFunction, intercept
from synkhronos._host.theano.modes import open_device
from synkhronos._host.theano.overlapping import overlap_reductions
from synkhronos._host.theano.pickling import dump, load
from synkhronos._host.theano.random_numbers import spread_random_state
from synkhronos._host.theano.sparse import decomposed, sparse_parts
from synkhronos._host.theano.specifications import read_input, tuple_forms
from synkhronos._host.theano.variables import (
    cast_value,
    fix_axes,
    fixed_axes,
    is_array_variable,
    is_random_state,
    lengths,
    lives_on_device,
    on_device,
    on_host,
    replace,
    shared_on_host,
    shared_zeros,
)

title = "Theano"
