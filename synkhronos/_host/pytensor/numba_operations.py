"""The package's operations for functions that numba compiles: they call back into Python.

    numba's code ──▶ objmode: arrays as NumPy's ──▶ reduce_in_place(ops, *arrays) ──▶ numba's code

Importing this module tells numba of the operations, before it compiles a function.

Numba keeps machine code on disk, under a key that must say what the code does. It contains the
names of the operations, but no serial numbers, which differ between two processes.
"""

import hashlib

import numba
import numpy as np
from pytensor.link.numba.cache import compile_numba_function_src
from pytensor.link.numba.dispatch.basic import (
    get_numba_type,
    numba_njit,
    register_funcify_and_cache_key,
)

from synkhronos._host.base import rows
from synkhronos._host.base.calls import current_weight
from synkhronos._host.base.functions import PythonOperation
from synkhronos._host.base.rank_operations import RankWeight
from synkhronos._host.base.serial_random import OwnRows, WholeSize, drawn_rows
from synkhronos._host.pytensor import graph

_VERSION = 1  # raise it with each change of the code below


@register_funcify_and_cache_key(graph.PyTensorAllReduce)
def _all_reduce(op, node, **kwargs):
    names = [f"x{position}" for position in range(len(node.inputs))]
    copies = "" if op.inplace else "".join(f"    {name} = {name}.copy()\n" for name in names)
    arguments = ", ".join(names)
    source = (
        f"def all_reduce({arguments}):\n"
        f"{copies}"
        "    with objmode():\n"
        f"        reduce_in_place({op.ops!r}, {arguments})\n"
        f"    return {arguments}\n"
    )
    return calling_python(source, graph.reduce_in_place)


@register_funcify_and_cache_key(rows.Rows)
def _rows(op, node, **kwargs):
    names = ["index", "size", "length"][: len(node.inputs)]
    source = (
        f"def numbers({', '.join(names)}):\n"
        "    with objmode(found='int64[::1]'):\n"
        f"        found = numbers_of_rows({', '.join(f'int({name})' for name in names)})\n"
        "    return found\n"
    )
    return calling_python(source, rows.numbers_of_rows)


@register_funcify_and_cache_key(PythonOperation)
def _python_operation(op, node, **kwargs):
    types = [get_numba_type(output.type, layout="C") for output in node.outputs]
    returned = numba.types.Tuple(types)

    def perform(inputs):
        storage = [[None] for _ in node.outputs]
        op.perform(node, inputs, storage)
        pairs = zip(storage, node.outputs)
        return tuple(np.asarray(cell[0], each.type.dtype, order="C") for cell, each in pairs)

    @numba_njit
    def call_perform(*inputs):
        with numba.objmode(outputs=returned):
            outputs = perform(inputs)
        return outputs

    @numba_njit
    def call_perform_for_one(*inputs):
        return call_perform(*inputs)[0]

    return call_perform if len(types) > 1 else call_perform_for_one, None


def calling_python(source, callee):
    """Return numba's function of a source that calls a Python function, and its key on disk.

    The source names the function, ``np`` and ``objmode``.
    """
    # Code that numba has read from disk looks the function up in the module of this __name__.
    names = {"__name__": callee.__module__, "np": np, "objmode": numba.objmode}
    names[callee.__name__] = callee
    key = hashlib.sha256(f"synkhronos {_VERSION} {callee.__module__} {source}".encode()).hexdigest()
    name = source[len("def ") : source.index("(")]
    function = compile_numba_function_src(source, name, names, cache_key=key)
    return numba_njit(function), key


_SOURCES = {  # of operations whose code is always the same: the source, and the callee
    RankWeight: (
        "def rank_weight():\n"
        "    with objmode(weight='float64'):\n"
        "        weight = current_weight()\n"
        "    return np.asarray(weight)\n",
        current_weight,
    ),
    rows.TotalRows: (
        "def total(mine):\n"
        "    with objmode(found='int64'):\n"
        "        found = int(total_rows(int(mine)))\n"
        "    return np.asarray(found)\n",
        rows.total_rows,
    ),
    rows.RowsOfRank: (
        "def bounds(start, stop, length):\n"
        "    with objmode(found='int64[::1]'):\n"
        "        found = bounds_of_rank(int(start), int(stop), int(length))\n"
        "    return np.asarray(found[0]), np.asarray(found[1]), np.asarray(found[2])\n",
        rows.bounds_of_rank,
    ),
    WholeSize: (
        "def whole_size(size):\n"
        "    whole = size.copy()\n"
        "    with objmode(length='int64'):\n"
        "        length = int(drawn_rows(size)[0])\n"
        "    whole[0] = length\n"
        "    return whole\n",
        drawn_rows,
    ),
    OwnRows: (
        "def own_rows(numbers, size):\n"
        "    with objmode(begin='int64', end='int64'):\n"
        "        _, begin, end = map(int, drawn_rows(size))\n"
        "    return numbers[begin:end]\n",
        drawn_rows,
    ),
}
for _kind, _of in _SOURCES.items():
    register_funcify_and_cache_key(_kind)(lambda op, node, of=_of, **kwargs: calling_python(*of))
