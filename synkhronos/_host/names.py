"""The names that `synkhronos._host` offers to other packages.

Those from `base` are written once, the others once for each host library. Of a module all public
names are offered, unless some are listed. Importing this module imports the host library.
"""
# ruff: noqa: F403

from synkhronos._host.base.chosen_library import *

# The rules of a host library import those of `base.dividing`, so they come first.
if title == "Theano":  # noqa: F405
    from synkhronos._host.theano.compiling import compile_function, expression_of, run
    from synkhronos._host.theano.device_arrays import *
    from synkhronos._host.theano.dividing import intercept
    from synkhronos._host.theano.graph import all_reduce
    from synkhronos._host.theano.overlapping import overlap_reductions
    from synkhronos._host.theano.pickling import dump, load
    from synkhronos._host.theano.sparse import decomposed, sparse_parts
    from synkhronos._host.theano.variables import *
else:
    from synkhronos._host.pytensor.compiling import compile_function, expression_of, run
    from synkhronos._host.pytensor.device_arrays import *
    from synkhronos._host.pytensor.dividing import intercept
    from synkhronos._host.pytensor.graph import all_reduce, overlap_reductions
    from synkhronos._host.pytensor.pickling import dump, load
    from synkhronos._host.pytensor.sparse import decomposed, sparse_parts
    from synkhronos._host.pytensor.variables import *

from synkhronos._host.base.calls import reducing
from synkhronos._host.base.cells import *
from synkhronos._host.base.dividing.alone import Mistake, examine
from synkhronos._host.base.dividing.division import CannotDivide, divide
from synkhronos._host.base.dividing.serial_functions import count_alone
from synkhronos._host.base.dividing.steps import AS_SERIAL, divide_step
from synkhronos._host.base.functions import *
from synkhronos._host.base.rank_operations import RankWeight, communicates
from synkhronos._host.base.rows import *
from synkhronos._host.base.serial_random import draws_of_all_rows, is_state_equal, keep_state_equal
from synkhronos._host.base.sparse_matrices import put_together, sparse_format, take_apart
from synkhronos._host.base.specifications import is_kept, read_input, read_output, storage
