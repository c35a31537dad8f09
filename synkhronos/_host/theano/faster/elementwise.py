"""Squares that are computed as products, and updates whose loops the compiler vectorizes.

    check each input ──▶ if (...) ──▶ for (i = 0; i < n; i++) p[i] -= rate * m[i] / sqrt(v[i])

Theano's C code of an elementwise expression checks all its inputs before the loop. After so many
branches GCC takes the loop for code that seldom runs, and compiles it for size: in Adam's update of
a parameter not even the square root is vectorized, and the loop takes nine times as long. If GCC
does not guess the probability of branches, it vectorizes the loop. The results have the same bits,
since each element is computed by the same operations.

Only updates that divide or take roots are compiled in this way: others are vectorized already, and
would only take more time to compile.
"""

from theano import config, gof, scalar, tensor
from theano.tensor.elemwise import DimShuffle, Elemwise
from theano.tensor.opt import local_pow_specialize

from synkhronos._host.base.rewriting import Replacer

_SLOW = (scalar.Sqrt, scalar.TrueDiv, scalar.Inv)


class VectorizedElemwise(Elemwise):
    """An Elemwise whose loop GCC vectorizes, however many inputs it has."""

    def c_compile_args(self):
        # Clang may refuse this option.
        options = [] if "clang" in config.cxx else ["-fno-guess-branch-probability"]
        return [*super().c_compile_args(), *options]


class Vectorize(Replacer):
    """Vectorizes the operations that compute updates element by element, if they are slow."""

    def apply(self, fgraph):
        updates = [fgraph.outputs[position] for position in fgraph.update_mapping or ()]
        for node in _elementwise(updates):
            op = node.op
            if not all(node.outputs[0].broadcastable) and _is_slow(op.scalar_op):
                same = VectorizedElemwise(
                    op.scalar_op, op.inplace_pattern, nfunc_spec=op.nfunc_spec
                )
                pairs = list(zip(node.outputs, same(*node.inputs, return_list=True)))
                fgraph.replace_all_validate(pairs, reason="synkhronos_vectorize")


def _elementwise(outputs):
    """Return the nodes that compute outputs by elementwise expressions alone."""
    nodes, left = {}, [x.owner for x in outputs]
    while left:
        node = left.pop()
        # No subclass, such as that of operations on devices.
        if node is not None and node not in nodes and type(node.op) is Elemwise:
            nodes[node] = True
            left += [x.owner for x in node.inputs]
    return list(nodes)


def _is_slow(operation):
    if isinstance(operation, scalar.Composite):
        return any(_is_slow(node.op) for node in operation.fgraph.apply_nodes)
    return isinstance(operation, _SLOW)


@gof.local_optimizer([tensor.pow])
def simplify_power(node):
    """Simplify a power by a constant, such as a square, that Theano's last simplifications made."""
    if node.op != tensor.pow:
        return False
    base, exponent = node.inputs
    shuffle = exponent.owner
    if not (shuffle and isinstance(shuffle.op, DimShuffle)):
        return False
    [number] = shuffle.inputs
    if not isinstance(number, gof.Constant) or number.ndim:
        return False
    folded = tensor.constant(number.data.reshape((1,) * exponent.ndim), dtype=number.dtype)
    return local_pow_specialize.transform(tensor.pow(base, folded).owner)
