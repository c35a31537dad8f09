"""PyTensor as the host library: the names that `synkhronos._host` lists and `base` has not."""

import pytensor as library
from numpy.random import Generator as RandomState
from pytensor.compile import Function as CompiledFunction

from synkhronos._host.base.specifications import read_input
from synkhronos._host.pytensor.devices import (
    copy_from_device,
    copy_to_device,
    device_context,
    empty_like,
    empty_on_device,
    import_device_backend,
    is_on_device,
    join_on_device,
    open_device,
    refuse_open_device,
    scale_on_device,
    take_on_device,
    to_device,
    to_host,
)
from synkhronos._host.pytensor.dividing import CannotDivide, divide, intercept
from synkhronos._host.pytensor.functions import compile_function, expression_of, run
from synkhronos._host.pytensor.graph import all_reduce, overlap_reductions
from synkhronos._host.pytensor.pickling import dump, load
from synkhronos._host.pytensor.random_numbers import spread_random_state
from synkhronos._host.pytensor.sparse import decomposed, sparse_parts
from synkhronos._host.pytensor.variables import (
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

title = "PyTensor"
tuple_forms = ""
