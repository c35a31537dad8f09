"""Sums over the rows of matrices and the pixels of images, several columns or channels at once.

Theano adds one number after the other, and each addition waits for the one before it. Here the
additions of several columns alternate. Each column adds the same numbers in the same order with
the same precision as in Theano, so the results are the same, bit for bit.
"""

from theano import gof
from theano.tensor.elemwise import Sum

from synkhronos._host.theano.faster.c_code import FLOATS, allocate, beside

_CODE = beside(__file__)


class InterleavedSum(Sum):
    """A Sum of contiguous arrays that leaves neighbouring axes, such as the channels of images."""

    def c_support_code(self):
        return _CODE

    def c_code(self, node, name, inputs, outputs, sub):
        (x,), (out,) = inputs, outputs
        ndim, kept = node.inputs[0].ndim, _kept(self, node.inputs[0].ndim)
        first, last = kept[0], kept[-1]
        shape = [f"PyArray_DIM({x}, {axis})" for axis in range(ndim)]
        rows, channels, pixels = (
            " * ".join(["(npy_intp) 1", *part])
            for part in (shape[:first], shape[first : last + 1], shape[last + 1 :])
        )
        types = [
            f"npy_{t}" for t in (node.op.acc_dtype, node.inputs[0].dtype, node.outputs[0].dtype)
        ]
        theano = super().c_code(node, name, inputs, outputs, sub)
        return f"""
        if (PyArray_ISCARRAY_RO({x})) {{
            {allocate(out, [shape[axis] for axis in kept], x, sub["fail"])}
            synkhronos_sum<{types[0]}>(
                (const {types[1]}*) PyArray_DATA({x}), ({types[2]}*) PyArray_DATA({out}),
                {rows}, {channels}, {pixels});
        }} else {{
            {theano}
        }}
        """

    def c_code_cache_version_apply(self, node):
        version = super().c_code_cache_version_apply(node)
        return version and (*version, "interleaved", 2)


def _kept(op, ndim):
    """Return the axes that are not summed."""
    axes = range(ndim) if op.axis is None else op.axis
    return [axis for axis in range(ndim) if axis not in axes]


@gof.local_optimizer([Sum])
def interleave(node):
    """Replace a Sum of an array of floats that leaves neighbouring axes."""
    op = node.op
    if type(op) is not Sum or op.axis is None or list(op.axis) != sorted(op.axis) or not op.axis:
        return False
    [x], [out] = node.inputs, node.outputs
    kept = _kept(op, x.ndim)
    covered = (
        kept
        and kept[-1] - kept[0] + 1 == len(kept)
        and x.dtype in FLOATS
        and out.dtype == x.dtype
        and op.acc_dtype in FLOATS
    )
    return [InterleavedSum(op.axis, op.dtype, op.acc_dtype)(x)] if covered else False
