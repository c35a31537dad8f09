"""The names that `synkhronos._host` lists and that are the same for both host libraries."""

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
from synkhronos._host.base.functions import (
    as_update,
    caster,
    float_dtype,
    is_mode,
    is_reusing_memory,
    same_updates,
    set_default_update,
    shared_variables,
    swapped,
    variables_read,
)
from synkhronos._host.base.graph import communicates, rank_weight
from synkhronos._host.base.library import (
    Constant,
    Function,
    In,
    Mode,
    Out,
    SharedVariable,
    Variable,
    tensor,
)
from synkhronos._host.base.repeating import is_repeatable
from synkhronos._host.base.rows import (
    axes_of_rows,
    compile_number,
    normalizes_rows,
    numbers_of_rows,
    row_numbers,
    sliced_by_inputs,
    without_row_numbers,
)
from synkhronos._host.base.serial_random import (
    draws_of_all_rows,
    is_state_equal,
    keep_state_equal,
)
from synkhronos._host.base.sparse import put_together, sparse_format, take_apart
from synkhronos._host.base.specifications import is_kept, read_output, storage
from synkhronos._host.base.storing import (
    awaited,
    compile_pushing,
    compiling,
    is_computed_from,
    leaves,
    push,
    shared_like,
    substituted,
)
from synkhronos._host.base.updates import (
    default_updates,
    destroyed_inputs,
    updated_variables,
    updates_by_default,
    without_default_updates,
)
