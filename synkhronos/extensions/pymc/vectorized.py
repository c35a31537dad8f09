"""Functions of whole vectors, for the functions that ranks run in numba.

    exp         x = n log 2 + r, |r| <= log(2) / 2; the series of exp(r); 2 to the n by its exponent
    log         x = 2 to the k times m, 1/sqrt(2) <= m < sqrt(2); with s = (m - 1) / (m + 1) the
                series of log(m) = 2 artanh(s)
    log1p       log(1 + x), corrected by (x - ((1 + x) - 1)) / (1 + x)
    log gamma   (x - 1/2) (log(t) - 1) + log(L(x)), where t = x + g - 1/2; Lanczos' L is a sum of
                c[k] / (x + k), here one fraction, whose numerator makes it exact at 1 to 9
    digamma     log(y) - 1/(2 y) - the series of B[2k] / (2k y^2k), where y = x + 8; less the sum of
                1 / (x + k) for k from 0 to 7
    erfcx       exp(x^2) erfc(x): a polynomial in t = (x - 4) / (x + 4), over 1 + 2 x; for erfc
                times exp(-x^2), where x^2 is in two parts

Log gamma and digamma are reflected below 0: gamma(x) gamma(-x) = -pi / (x sin(pi x)), and the
derivative; erfc(x) = 2 - erfc(-x).

numba calls the C library for each number: log(1 + exp(x)) takes 15 ns, log gamma 12. The functions
here have no branches and no calls, so LLVM computes several numbers at once, in 1 to 4 ns. They
are within two units in the last place of NumPy's, erfcx and erfc within five of the right values;
log gamma and digamma within ten, of 1 where they are less, and of what is subtracted below 0.
numba can use Intel's functions of that kind, but not as it comes from PyPI.

References
----------
Muller et al., "Handbook of Floating-Point Arithmetic", for the reduction by log(2) in two parts.
Lanczos, "A Precision Approximation of the Gamma Function", SIAM Numerical Analysis B 1 (1964).
Schonfelder, "Chebyshev Expansions for the Error and Related Functions", Math. Comp. 32 (1978).
Abramowitz and Stegun, "Handbook of Mathematical Functions", 6.1.17, 6.3.6, 6.3.7 and 6.3.18.
"""

import math

import llvmlite.binding
import numba
import numpy as np
import pytensor.tensor as pt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from pytensor.compile.mode import Mode
from pytensor.graph.rewriting.basic import dfs_rewriter, graph_rewriter, node_rewriter
from pytensor.link.numba.dispatch.scalar import scalar_op_cache_key
from pytensor.link.numba.linker import NumbaLinker
from pytensor.scalar import basic as scalar
from pytensor.scalar import math as scalar_math
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.rewriting.elemwise import fuse_seqopt

from synkhronos.extensions.pymc.columns import take_apart

try:
    from pytensor.link.numba.dispatch.scalar import register_scalar_funcify
except ImportError:  # PyTensor 3.2 and older
    from pytensor.link.numba.dispatch.basic import (
        register_funcify_and_cache_key as register_scalar_funcify,
    )

_VERSION = 11  # to be raised with each change of the functions: numba keeps their code on disk
_NAME = "synkhronos_vectorized"

_LOG2 = math.log(2)
_LOG2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # log(2) to 32 bits: exact times an integer
_LOG2_LOW = 1.9082149292705877e-10  # the rest
_PER_LOG2 = 1 / _LOG2
_ROUND = 1.5 * 2.0**52  # added and subtracted, it rounds to integers, and has them in its last bits
# Coefficients of polynomials, that of the highest power first.
_EXP = tuple(1 / math.factorial(k) for k in range(13, 1, -1))
_ARTANH = tuple(2 / (2 * k + 1) for k in range(11, 0, -1))
_SINE = tuple((-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k + 1) for k in range(10, -1, -1))
_G = 9.1875  # with 9 terms L is within 2e-17 of the function that it stands for
_L_ABOVE = (
    0.0002564539435475401, 0.020045315109618562, 0.6963583810139449, 14.111346635412936,
    183.8304865000473, 1596.5198159000804, 9243.550137099406, 34404.618311306825,
    74698.25801637761, 72080.98144136526,
)  # fmt: skip
# Of w = x (x + n), in which products such as x (x + n), (x + 1) (x + n - 1) are w plus a number.
_L_BELOW = 1.0, 34.0, 369.0, 1260.0  # times w (x + 4) it is the product of x to x + 8
_SHIFT = 1.0, 28.0, 252.0, 720.0  # times w it is the product of x to x + 7
_SLOPE = 4.0, 84.0, 504.0, 720.0  # the derivative of that
_BERNOULLI = (  # B[2k] / (2k)
    -3617 / 8160, 1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12,
)  # fmt: skip
_ERFCX = (  # of t, on -1 to 1: within 5e-17
    9.311744978232572e-10, 1.5738283774192037e-09, -1.234686604382353e-08, -1.6371779763566967e-08,
    1.0633855618594884e-07, 7.115337800585303e-08, -8.210939042560568e-07, 2.9801353803031333e-07,
    5.706604414895734e-06, -1.1225101875659178e-05, -2.4397746422436416e-05, 0.00015062309720018628,
    -0.00019925714661091188, -0.000757773707063825, 0.005031970067657489, -0.016197733981455194,
    0.03716751552655567, -0.06633036582031154, 0.0937328349990944, -0.10103906603586531,
    0.06809705425466908, 0.015379652102610473, -0.1396211168405623, 1.2329951186255526,
)  # fmt: skip
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
def _polynomial(x, coefficients):
    p = coefficients[0]
    for each in coefficients[1:]:
        p = p * x + each
    return p


@_compiled
def _exp(x):
    near = min(max(x, -746.0), 710.0)
    shifted = near * _PER_LOG2 + _ROUND
    n = shifted - _ROUND
    r = (near - n * _LOG2_HIGH) - n * _LOG2_LOW
    p = _polynomial(r, _EXP)
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
    p = _polynomial(z, _ARTANH)
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


@_compiled
def _sine(r):
    """Return sin(pi r) / pi of -1/2 to 1/2."""
    return r * _polynomial(r * r, _SINE)


@_compiled
def _gammaln(x):
    size = abs(x)
    near = min(size, 1e20)  # from where on L is constant
    r = size - np.floor(size + 0.5)
    above = _polynomial(near, _L_ABOVE) * (abs(_sine(r)) if x < 0.0 else 1.0)
    w = near * (near + 8.0)
    below = _polynomial(w, _L_BELOW) * (near + 4.0) * (near + 8.0 if x < 0.0 else w)
    is_tiny = size < 1e-290
    last = _log_of(size * 2.0**200 if is_tiny else above / below, 0.0)
    result = (size - 0.5) * (_log_of(size + (_G - 0.5), 0.0) - 1.0) + last
    result = -result if x < 0.0 else result
    result = 200 * _LOG2 - last if is_tiny else result
    result = math.inf if x <= 0.0 and r == 0.0 else result
    return result if size < math.inf else x


@_compiled
def _digamma(x):
    is_negative = x < 0.0
    size = 1.0 - x if is_negative else x
    near = min(size, 1e30)
    y = size + 8.0
    z = 1.0 / (y * y)
    series = z * _polynomial(z, _BERNOULLI)
    result = _log_of(y, 0.0) - (0.5 / y + series)
    w = near * (near + 7.0)
    result -= (2.0 * near + 7.0) * _polynomial(w, _SLOPE) / (w * _polynomial(w, _SHIFT))
    r = x - np.floor(x + 0.5)
    cotangent = math.pi * (_sine(0.5 - abs(r)) / _sine(r))
    result = result - cotangent if is_negative else result
    result = math.nan if is_negative and r == 0.0 else result
    return result if x < math.inf else x


@_compiled
def _erfcx_of_positive(x):
    near = min(x, 1e18)
    t = (near - 4.0) / (near + 4.0)
    # In two parts: LLVM unrolls short loops alone.
    p = t * _polynomial(t * t, _ERFCX[::2]) + _polynomial(t * t, _ERFCX[1::2])
    return 0.5 * p / (0.5 + x)


@_compiled
def _exp_of_square(x, sign):
    """Return exp(x^2), or exp(-x^2), of a number or of 30, where the result is infinite, or 0."""
    near = min(abs(x), 30.0)
    high = _from_bits((_bits(near) >> 27) << 27)  # its square is exact
    rest = sign * (near - high) * (near + high)
    return _exp(sign * high * high) * (1.0 + rest * (1.0 + rest * (0.5 + rest / 6.0)))


@_compiled
def _erfcx(x):
    positive = _erfcx_of_positive(abs(x))
    result = 2.0 * _exp_of_square(x, 1.0) - positive if x < 0.0 else positive
    return result if x == x else x


@_compiled
def _erfc(x):
    result = _exp_of_square(x, -1.0) * _erfcx_of_positive(abs(x))
    result = 2.0 - result if x < 0.0 else result
    return result if x == x else x


def _vectorized(op, function):
    """Return a scalar operation like another one, which numba computes by a function of here."""

    class VectorizedScalar(op):
        # Without code in C it isn't fused with others: then LLVM would not vectorize the loop.
        def supports_c_code(self, inputs, outputs):
            return False

    VectorizedScalar.__name__ = VectorizedScalar.__qualname__ = f"Vectorized{op.__name__}"

    @register_scalar_funcify(VectorizedScalar)
    def lower(op, node, **kwargs):
        return function, scalar_op_cache_key(op, version=_VERSION)

    return VectorizedScalar


_OPERATIONS = {
    op: _vectorized(op, function)
    for op, function in (
        (scalar.Exp, _exp),
        (scalar.Log, _log),
        (scalar.Log1p, _log1p),
        (scalar_math.Sigmoid, _sigmoid),
        (scalar_math.Softplus, _softplus),
        (scalar_math.GammaLn, _gammaln),
        (scalar_math.Psi, _digamma),
        (scalar_math.Erfcx, _erfcx),
        (scalar_math.Erfc, _erfc),
    )
}


@node_rewriter([Elemwise])
def vectorize(fgraph, node):
    """Take the operations of here for float64."""
    op, given = node.op.scalar_op, node.inputs[0]
    if type(op) not in _OPERATIONS or not _takes(node):
        return False
    name = f"vectorized_{type(op).__name__.lower()}"
    vectorized = Elemwise(_OPERATIONS[type(op)](op.output_types_preference, name=name))
    if given.ndim == 1:
        return [vectorized(given)]
    # The innermost loop may be of two numbers, as over the parts of a mixture.
    lengths = zip(given.type.shape, given.shape)
    shape = [length if known is None else known for known, length in lengths]
    return [vectorized(given.ravel()).reshape(shape)]


@graph_rewriter
def share_exponentials(fgraph):
    """Compute sigmoid and softplus of x and -x from one exponential, where there are several.

    Log-likelihoods of odds have all four. With e = exp(-|x|) and l = log(1 + e) these are 1 or e,
    over 1 + e, and l or |x| + l.
    """
    groups = {}
    for node in fgraph.toposort():
        kind = type(getattr(node.op, "scalar_op", None))
        if kind in (scalar_math.Sigmoid, scalar_math.Softplus) and _takes(node):
            base, is_negative = _base_of(node.inputs[0], groups)
            groups.setdefault(base, []).append((node, kind, is_negative))
    for (x, _), members in groups.items():
        if len(members) < 2:
            continue
        e = pt.exp(-pt.abs(x))
        log_sum = pt.log1p(e)
        for node, kind, is_negative in members:
            is_above = x < 0 if is_negative else x >= 0  # the argument is not negative
            if kind is scalar_math.Sigmoid:
                new = pt.switch(is_above, 1.0, e) / (1.0 + e)
            else:
                new = pt.switch(is_above, pt.abs(x), 0.0) + log_sum
            fgraph.replace_validate(node.outputs[0], new, reason=_NAME)


def _base_of(variable, known):
    """Return a base with its operands, and whether the variable is the negative of the base."""
    node = variable.owner
    kind = type(getattr(node and node.op, "scalar_op", None))
    if kind is scalar.Neg:
        return (node.inputs[0], None), True
    if kind is scalar.Sub:  # PyTensor makes b - a of the negative of a - b
        for base, others in known:
            if others == (*reversed(node.inputs),):
                return (base, others), True
        return (variable, (*node.inputs,)), False
    return (variable, None), False


def _takes(node):
    """Return whether an operation is one of arrays of float64."""
    dtypes = {each.dtype for each in (*node.inputs, *node.outputs)}
    return dtypes == {"float64"} and not all(node.inputs[0].type.broadcastable)


# After all rewrites that know these functions, such as those for log(1 + exp(x)), and after softmax
# and its gradient have become operations like others; before operations are fused.
fuse_seqopt.register(f"{_NAME}_columns", take_apart, _NAME, position=0.68)
fuse_seqopt.register(f"{_NAME}_shared", share_exponentials, _NAME, position=0.69)
fuse_seqopt.register(f"{_NAME}_each", dfs_rewriter(vectorize), _NAME, position=0.7)


def including(mode: Mode) -> Mode:
    """Return a mode that uses the operations of here, if it runs numba where that is faster.

    With vectors of two numbers, as without AVX2, the C library is as fast.
    """
    is_wide = llvmlite.binding.get_host_cpu_features().get("avx2", False)
    pays = is_wide and isinstance(mode.linker, NumbaLinker)
    return mode.including(_NAME) if pays else mode
