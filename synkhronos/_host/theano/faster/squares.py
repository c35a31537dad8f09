"""Squares that are computed as products, not as powers."""

from theano import gof, tensor
from theano.tensor import constant
from theano.tensor.elemwise import DimShuffle
from theano.tensor.opt import local_pow_specialize


@gof.local_optimizer([tensor.pow])
def simplify_power(node):
    """Simplify a power by a constant, such as a square, that Theano's last simplifications made."""
    if node.op != tensor.pow:
        return False
    base, exponent = node.inputs
    shuffle = exponent.owner
    if not (shuffle and isinstance(shuffle.op, DimShuffle)):
        return False
    [scalar] = shuffle.inputs
    if not isinstance(scalar, gof.Constant) or scalar.ndim:
        return False
    folded = constant(scalar.data.reshape((1,) * exponent.ndim), dtype=scalar.dtype)
    return local_pow_specialize.transform(tensor.pow(base, folded).owner)
