"""Functions that JAX compiles for a rank's device.

    cells, and a key from each Generator ──▶ jax.jit ──▶ cells, outputs
              AllReduce: reduce_in_place ◀──▶ arrays of the CPU, in the order of the graph

Random states stay NumPy's: each call draws a key, so ranks have numbers of their own and go on from
call to call. Code is compiled for each division of the rows, if it depends on that.
"""

import contextlib
import contextvars
import copy
import re
import threading
import warnings

import jax
import numpy as np
import pytensor.link.jax.dispatch  # noqa: F401 - it registers the conversions
from jax.experimental import io_callback
from numpy.random import Generator
from pytensor.compile.mode import Mode, predefined_modes
from pytensor.link.jax.dispatch import jax_funcify, jax_typify
from pytensor.link.jax.dispatch.shape import JAXShapeTuple
from pytensor.link.jax.linker import JAXLinker as PlainLinker
from pytensor.link.utils import fgraph_to_python
from pytensor.tensor.random.type import RandomType

from synkhronos._host.base.calls import current_weight, rows_of_ranks
from synkhronos._host.base.chosen_library import Constant, MakeVector
from synkhronos._host.base.functions import is_by, line_of, operation_name
from synkhronos._host.base.rank_operations import RankWeight, is_or_has
from synkhronos._host.base.rows import Rows, TotalRows, total_rows
from synkhronos._host.base.serial_random import OwnRows, WholeSize, drawn_rows
from synkhronos._host.pytensor import graph
from synkhronos._host.pytensor.device_arrays import to_device
from synkhronos._host.pytensor.library import WalkingGraphRewriter, node_rewriter, register

# The context of the running call, and its errors: JAX may call back from a thread of its own.
_call = [contextvars.copy_context(), []]
_one_at_a_time = threading.RLock()  # functions of other threads would replace `_call`


class JAXLinker(PlainLinker):
    """Compiles functions whose arrays stay on the device, in the cells of their variables."""

    def fgraph_convert(self, fgraph, **kwargs):
        self.scalar_shape_inputs = tuple(
            position
            for position, variable in enumerate(fgraph.inputs)
            if fgraph.clients[variable]
            and all(isinstance(node.op, JAXShapeTuple) for node, _ in fgraph.clients[variable])
        )
        kwargs.update(type_conversion_fn=jax_typify, fgraph_name="jax_funcified_fgraph")
        kwargs["storage_map"] = {}  # else PyTensor keeps a copy of each shared value on the device
        return fgraph_to_python(fgraph, _converted, **kwargs)

    def create_thunk_inputs(self, storage_map):
        return [(storage_map[variable],) for variable in self.fgraph.inputs]  # the cells themselves

    def jit_compile(self, fn):
        fgraph, lengths = self.fgraph, self.scalar_shape_inputs
        states = {i for i, x in enumerate(fgraph.inputs) if isinstance(x.type, RandomType)}
        updated = [(i, o) for o, i in getattr(fgraph, "update_mapping", {}).items() if i in states]
        dtypes = [getattr(output.type, "dtype", None) for output in fgraph.outputs]
        uses_rows = any(is_or_has(each, tuple(_OF_ROWS)) for each in fgraph.apply_nodes)

        def compute(rows, *inputs):
            outputs = zip(fn(*inputs) or (), dtypes)
            return [x if dtype is None else jax.numpy.asarray(x, dtype) for x, dtype in outputs]

        compiled = jax.jit(compute, static_argnums=(0, *(i + 1 for i in lengths)))

        def call(*cells):
            inputs, after = [], {}
            for i, cell in enumerate(cells):
                if i in states:
                    after[i] = Generator(copy.deepcopy(cell[0].bit_generator))
                    inputs.append({"jax_state": after[i].integers(0, 1 << 32, 2, np.uint32)})
                elif i in lengths:
                    inputs.append(int(cell[0]))
                else:
                    cell[0] = to_device(cell[0])
                    inputs.append(cell[0])
            with _one_at_a_time:
                _call[:] = contextvars.copy_context(), []
                try:
                    outputs = compiled(rows_of_ranks() if uses_rows else None, *inputs)
                    jax.block_until_ready(outputs)  # then all reductions have been made
                    for error in _call[1]:
                        raise error
                finally:
                    _call[:] = contextvars.Context(), []  # its errors keep the arrays of frames
            for i, output in updated:
                outputs[output] = after[i]
            return outputs or None

        return call


def _converted(op, node, **kwargs):
    """Return JAX's function of a node. If JAX can't compute it, the error names the node."""
    # PyTensor warns of each assertion that JAX leaves out, also of its own.
    with _named(node), warnings.catch_warnings(action="ignore"):
        return _named(node)(jax_funcify(op, node=node, **kwargs))


@contextlib.contextmanager
def _named(node):
    try:
        yield
    except (NotImplementedError, TypeError, IndexError) as error:
        kinds = NotImplementedError, jax.errors.JAXTypeError, jax.errors.JAXIndexError
        # Slices and shapes that depend on values raise plain errors.
        if not isinstance(error, kinds) and not re.search("static start|concrete", str(error)):
            raise
        line, reason = line_of(node.outputs[0]), str(error).partition("\n")[0]
        raise NotImplementedError(
            "JAX, with which ranks on devices compute, can't compute the operation "
            f"{operation_name(node)}{line and f', made in {line}'}: {reason}"
        ) from error


@jax_funcify.register(graph.PyTensorAllReduce)
def _all_reduce(op, node, **kwargs):
    def reduce(*inputs):
        arrays, (context, errors) = [np.array(each) for each in inputs], _call
        if not errors:
            try:
                context.run(graph.reduce_in_place, op.ops, *arrays)
            except BaseException as error:  # JAX would log it, and raise another
                errors.append(error)
        return arrays

    def all_reduce(*inputs):
        # A constant may be a number of Python.
        arrays = [jax.numpy.asarray(each, x.type.dtype) for each, x in zip(inputs, node.inputs)]
        like = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]
        reduced = io_callback(reduce, like, *arrays, ordered=True)
        return reduced if len(reduced) > 1 else reduced[0]

    return all_reduce


@jax_funcify.register(Rows)
def _rows(op, node, **kwargs):
    _, size, *length = node.inputs
    if length or not isinstance(size, Constant):
        raise NotImplementedError("the size must be a constant, without a length")
    numbers = jax.numpy.arange(int(size.data))
    return lambda index, number: jax.numpy.asarray(index, "int64") * number + numbers


_OF_ROWS = {  # computed while JAX compiles for a division of the rows
    RankWeight: lambda: jax.numpy.asarray(current_weight()),
    TotalRows: lambda mine: jax.numpy.asarray(total_rows(mine), "int64"),
    WholeSize: lambda size: (int(drawn_rows(size)[0]), *size[1:]),
    OwnRows: lambda numbers, size: numbers[slice(*drawn_rows(size)[1:])],
}
for _kind, _function in _OF_ROWS.items():
    jax_funcify.register(_kind, lambda op, function=_function, **kwargs: function)


class WholeSizeOfLengths(WholeSize, JAXShapeTuple):
    """A WholeSize that JAX takes for the size of random numbers."""


@node_rewriter([WholeSize, OwnRows])
def _with_lengths(fgraph, node):
    """Replace a size, an array, by a tuple of lengths: JAX must know them when it compiles."""
    *numbers, size = node.inputs
    if not is_by(size, MakeVector):
        return False
    op = node.op if numbers else WholeSizeOfLengths()
    return [op(*numbers, JAXShapeTuple()(*size.owner.inputs))]


register("synkhronos_jax", WalkingGraphRewriter(_with_lengths, order="in_to_out"), 90, "jax")
# Plain functions have it, too: others can't read the values that functions of ranks have updated.
predefined_modes["JAX"] = Mode(JAXLinker(), predefined_modes["JAX"].provided_optimizer)
