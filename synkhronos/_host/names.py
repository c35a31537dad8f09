"""The names that `synkhronos._host` offers to other packages.

Those from `base` are written once, the others once for each host library. Importing this module
imports the host library.
"""

from synkhronos._host.base.chosen_library import (
    CompiledFunction,
    Constant,
    In,
    Mode,
    Out,
    RandomState,
    SharedVariable,
    Variable,
    library,
    tensor,
    title,
    tuple_forms,
)

# The rules of a host library import those of `base.dividing`, so they come first.
if title == "Theano":
    from synkhronos._host.theano import device_arrays, variables
    from synkhronos._host.theano.compiling import compile_function, expression_of, run
    from synkhronos._host.theano.dividing import intercept
    from synkhronos._host.theano.graph import all_reduce
    from synkhronos._host.theano.overlapping import overlap_reductions
    from synkhronos._host.theano.pickling import dump, load
    from synkhronos._host.theano.sparse import decomposed, sparse_parts
else:
    from synkhronos._host.pytensor import device_arrays, variables
    from synkhronos._host.pytensor.compiling import compile_function, expression_of, run
    from synkhronos._host.pytensor.dividing import intercept
    from synkhronos._host.pytensor.graph import all_reduce, overlap_reductions
    from synkhronos._host.pytensor.pickling import dump, load
    from synkhronos._host.pytensor.sparse import decomposed, sparse_parts

from synkhronos._host.base.calls import reducing
from synkhronos._host.base.cells import (
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
from synkhronos._host.base.dividing.alone import Mistake, examine
from synkhronos._host.base.dividing.division import CannotDivide, divide
from synkhronos._host.base.dividing.serial_functions import count_alone
from synkhronos._host.base.dividing.steps import AS_SERIAL, divide_step
from synkhronos._host.base.functions import (
    as_update,
    cast_value,
    caster,
    compiling,
    computes_by_element,
    default_updates,
    destroyed_inputs,
    fixed_axes,
    is_computed_from,
    is_mode,
    is_repeatable,
    is_reusing_memory,
    is_total,
    is_watched,
    line_of,
    operation_name,
    same_updates,
    shared_in,
    swapped,
    updated_variables,
    updates_by_default,
    uses,
    variables_read,
    without_default_updates,
)
from synkhronos._host.base.rank_operations import RankWeight, communicates
from synkhronos._host.base.rows import (
    Rows,
    axes_of_rows,
    compile_number,
    divides,
    input_of_values,
    numbers_of_rows,
    sliced_by_inputs,
    without_row_numbers,
)
from synkhronos._host.base.serial_random import draws_of_all_rows, is_state_equal, keep_state_equal
from synkhronos._host.base.sparse_matrices import put_together, sparse_format, take_apart
from synkhronos._host.base.specifications import is_kept, read_input, read_output, storage

copy_from_device = device_arrays.copy_from_device
copy_to_device = device_arrays.copy_to_device
device_context = device_arrays.device_context
empty_like = device_arrays.empty_like
empty_on_device = device_arrays.empty_on_device
import_device_backend = device_arrays.import_device_backend
is_on_device = device_arrays.is_on_device
join_on_device = device_arrays.join_on_device
open_device = device_arrays.open_device
refuse_open_device = device_arrays.refuse_open_device
require_open_device = device_arrays.require_open_device
scale_on_device = device_arrays.scale_on_device
take_on_device = device_arrays.take_on_device
to_device = device_arrays.to_device
to_host = device_arrays.to_host

fix_axes = variables.fix_axes
is_array_variable = variables.is_array_variable
is_random_state = variables.is_random_state
lengths = variables.lengths
lives_on_device = variables.lives_on_device
on_device = variables.on_device
on_host = variables.on_host
replace = variables.replace
rows_from = variables.rows_from
shared_on_host = variables.shared_on_host
shared_zeros = variables.shared_zeros
spread_random_state = variables.spread_random_state
