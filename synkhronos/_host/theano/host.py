"""Theano as the host library: each name that `synkhronos._host` lists."""

import theano as library
from numpy.random import RandomState
from theano import tensor
from theano.compile.mode import Mode
from theano.compile.sharedvalue import SharedVariable
from theano.gof import Constant, Variable

from synkhronos._host.calls import reducing
from synkhronos._host.cells import (
    borrows,
    cell,
    lend,
    on_copies,
    peek,
    put,
    read,
    replace_object,
    tell,
    unwatch,
    watch,
)
from synkhronos._host.draws import is_state_equal, keep_state_equal
from synkhronos._host.repeating import is_repeatable
from synkhronos._host.rows import numbers_of_rows
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
from synkhronos._host.theano.functions import (
    as_update,
    caster,
    compile_function,
    expression_of,
    float_dtype,
    is_mode,
    is_reusing_memory,
    run,
    same_updates,
    set_default_update,
    shared_variables,
    swapped,
    variables_read,
)
from synkhronos._host.theano.graph import all_reduce, communicates, rank_weight
from synkhronos._host.theano.intercepting import CompiledFunction, intercept
from synkhronos._host.theano.overlapping import overlap_reductions
from synkhronos._host.theano.pickling import dump, load
from synkhronos._host.theano.random_numbers import (
    spread_random_state,
)
from synkhronos._host.theano.rewriting import open_device
from synkhronos._host.theano.rows import (
    axes_of_rows,
    compile_number,
    normalizes_rows,
    row_numbers,
    sliced_by_inputs,
    without_row_numbers,
)
from synkhronos._host.theano.serial_random import draws_of_all_rows
from synkhronos._host.theano.sparse import (
    decomposed,
    put_together,
    sparse_format,
    sparse_parts,
    take_apart,
)
from synkhronos._host.theano.specifications import (
    Function,
    In,
    Out,
    is_kept,
    keeper,
    read_input,
    read_output,
    tuple_forms,
)
from synkhronos._host.theano.storing import (
    awaited,
    compile_pushing,
    compiling,
    is_computed_from,
    leaves,
    push,
    shared_like,
    substituted,
)
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
from synkhronos._host.updates import (
    default_updates,
    destroyed_inputs,
    updated_variables,
    updates_by_default,
    without_default_updates,
)

title = "Theano"
