"""Exponentials and logarithms of whole vectors, for the functions that ranks run in numba.

    exp     x = n log 2 + r, |r| <= log(2) / 2; the series of exp(r); 2 to the n by its exponent
    log     x = 2 to the k times m, 1/sqrt(2) <= m < sqrt(2); with s = (m - 1) / (m + 1) the series
            of log(m) = 2 artanh(s)
    log1p   log(1 + x), corrected by (x - ((1 + x) - 1)) / (1 + x)

numba calls the C library for each number: log(1 + exp(x)) takes 15 ns. The functions here have no
branches and no calls, so LLVM computes several numbers at once, in 1 to 3 ns. They are within two
units in the last place of NumPy's. numba can use Intel's functions of that kind, but not as it
comes from PyPI.

References
----------
Muller et al., "Handbook of Floating-Point Arithmetic", for the reduction by log(2) in two parts.
"""

import math

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from pytensor.compile.mode import Mode, optdb
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.link.numba.dispatch.scalar import register_scalar_funcify, scalar_op_cache_key
from pytensor.link.numba.linker import NumbaLinker
from pytensor.scalar import basic as scalar
from pytensor.scalar import math as scalar_math
from pytensor.tensor.elemwise import Elemwise

_VERSION = 1  # to be raised with each change of the functions: numba keeps their code on disk
_NAME = "synkhronos_vectorized"

_LOG2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # log(2) to 32 bits: exact times an integer
_LOG2_LOW = 1.9082149292705877e-10  # the rest
_PER_LOG2 = 1 / math.log(2)
_ROUND = 1.5 * 2.0**52  # added and subtracted, it rounds to integers, and has them in its last bits
_C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12, _C13 = (
    1 / math.factorial(k) for k in range(2, 14)
)
_L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9, _L10, _L11 = (2 / (2 * k + 1) for k in range(1, 12))
_BITS_OF_SQRT_HALF = 0x3FE6A09E667F3BCD
_TINY = 2.0**-1022


# Both options must be named: else a function has those of what calls it, and PyTensor's let LLVM
# reorder sums, which would undo the rounding.
def _compiled(function):
    return numba.njit(
        error_model="numpy",
        fastmath=False,
        forceinline=True,  # a loop with calls is not vectorized
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )(function)


@intrinsic
def _bits(context, x):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def _from_bits(context, x):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@_compiled
def _exp(x):
    near = min(max(x, -746.0), 710.0)
    shifted = near * _PER_LOG2 + _ROUND
    n = shifted - _ROUND
    r = (near - n * _LOG2_HIGH) - n * _LOG2_LOW
    p = _C13 * r + _C12
    p = p * r + _C11
    p = p * r + _C10
    p = p * r + _C9
    p = p * r + _C8
    p = p * r + _C7
    p = p * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = 1.0 + (r + p * r * r)
    k = _bits(shifted) - _bits(_ROUND)
    half = k >> 1  # in two factors: 2 to the k alone may be out of range
    result = p * _from_bits((half + 1023) << 52) * _from_bits((k - half + 1023) << 52)
    return result if x == x else x


@_compiled
def _log_of(x, correction):
    """Return log(x) + correction of a normal number."""
    bits = _bits(x)
    k = (bits - _BITS_OF_SQRT_HALF) >> 52
    n, f = float(k), _from_bits(bits - (k << 52)) - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = _L11 * z + _L10
    p = p * z + _L9
    p = p * z + _L8
    p = p * z + _L7
    p = p * z + _L6
    p = p * z + _L5
    p = p * z + _L4
    p = p * z + _L3
    p = p * z + _L2
    p = p * z + _L1
    square = 0.5 * f * f
    rest = s * (square + p * z)  # log(m) = f - square + rest
    return n * _LOG2_HIGH - ((square - (rest + (n * _LOG2_LOW + correction))) - f)


@_compiled
def _log(x):
    is_tiny = x < _TINY
    result = _log_of(x * 2.0**54 if is_tiny else x, -54 * _LOG2_LOW if is_tiny else 0.0)
    result = result - 54 * _LOG2_HIGH if is_tiny else result
    result = result if x < math.inf else x  # NaN, too
    result = -math.inf if x == 0.0 else result
    return math.nan if x < 0.0 else result


@_compiled
def _log1p_of_positive(x):
    """Return log(1 + x) of 0 to 1."""
    whole = 1.0 + x
    return _log_of(whole, (x - (whole - 1.0)) / whole)


@_compiled
def _log1p(x):
    whole = 1.0 + x
    lost = x - (whole - 1.0) if x < 1.0 else 1.0 - (whole - x)
    result = _log_of(whole, lost / whole)
    result = x if whole == 1.0 else result
    result = result if x < math.inf else x
    result = -math.inf if x == -1.0 else result
    return math.nan if x < -1.0 else result


@_compiled
def _sigmoid(x):
    return 1.0 / (1.0 + _exp(-x))


@_compiled
def _softplus(x):
    return max(x, 0.0) + _log1p_of_positive(_exp(-abs(x)))


def _vectorized(op, function):
    """Return a scalar operation like another one, which numba computes by a function of here."""

    class Vectorized(op):
        # Without code in C it isn't fused with others: then LLVM would not vectorize the loop.
        def supports_c_code(self, inputs, outputs):
            return False

    Vectorized.__name__ = Vectorized.__qualname__ = f"Vectorized{op.__name__}"

    @register_scalar_funcify(Vectorized)
    def lower(op, node, **kwargs):
        return function, scalar_op_cache_key(op, version=_VERSION)

    return Vectorized


_OPERATIONS = {
    op: _vectorized(op, function)
    for op, function in (
        (scalar.Exp, _exp),
        (scalar.Log, _log),
        (scalar.Log1p, _log1p),
        (scalar_math.Sigmoid, _sigmoid),
        (scalar_math.Softplus, _softplus),
    )
}


@node_rewriter([Elemwise])
def vectorize(fgraph, node):
    """Take the operations of here for float64."""
    op, given = node.op.scalar_op, node.inputs[0]
    dtypes = {each.dtype for each in (*node.inputs, *node.outputs)}
    if type(op) not in _OPERATIONS or given.ndim == 0 or dtypes != {"float64"}:
        return False
    name = f"vectorized_{type(op).__name__.lower()}"
    vectorized = _OPERATIONS[type(op)](op.output_types_preference, name=name)
    return [Elemwise(vectorized)(given)]


# After all rewrites that know these functions, such as those for log(1 + exp(x)).
optdb.register(_NAME, dfs_rewriter(vectorize), position=47.5)


def including(mode: Mode) -> Mode:
    """Return a mode that uses the operations of here, if it runs numba where that is faster.

    With vectors of two numbers, as without AVX2, the C library is as fast.
    """
    is_wide = llvmlite.binding.get_host_cpu_features().get("avx2", False)
    pays = is_wide and isinstance(mode.linker, NumbaLinker)
    return mode.including(_NAME) if pays else mode
