"""Sums over the rows of matrices and the pixels of images, several columns or channels at once.

Theano adds one number after the other, and each addition waits for the one before it. Here the
additions of several columns alternate. Each column adds the same numbers in the same order with
the same precision as in Theano, so the results are the same, bit for bit.
"""

from theano import gof
from theano.tensor.elemwise import Sum

from synkhronos._host.theano.faster.c_code import FLOATS, allocate

_CODE = r"""
namespace {

// x is (rows, columns). The sums of a tile stay in the L1 cache.
template <typename Acc, typename In, typename Out>
void synkhronos_sum_rows(const In* x, Out* out, npy_intp rows, npy_intp columns) {
    const npy_intp width = 512;
    Acc sums[width];
    for (npy_intp first = 0; first < columns; first += width) {
        const npy_intp n = std::min(width, columns - first);
        for (npy_intp i = 0; i < n; ++i) sums[i] = 0;
        const In* row = x + first;
        npy_intp r = 0;
        for (; r + 4 <= rows; r += 4, row += 4 * columns) {
            const In *a = row, *b = a + columns, *c = b + columns, *d = c + columns;
            // From left to right: the order of the rows.
            for (npy_intp i = 0; i < n; ++i) sums[i] = sums[i] + a[i] + b[i] + c[i] + d[i];
        }
        for (; r < rows; ++r, row += columns)
            for (npy_intp i = 0; i < n; ++i) sums[i] += row[i];
        for (npy_intp i = 0; i < n; ++i) out[first + i] = (Out) sums[i];
    }
}

// x is (rows, channels, pixels); this sums K of the channels.
template <int K, typename Acc, typename In, typename Out>
void synkhronos_sum_channels(
        const In* x, Out* out, npy_intp rows, npy_intp channels, npy_intp pixels) {
    Acc sums[K];
    for (int k = 0; k < K; ++k) sums[k] = 0;
    for (npy_intp r = 0; r < rows; ++r) {
        const In* at = x + r * channels * pixels;
        for (npy_intp i = 0; i < pixels; ++i)
            for (int k = 0; k < K; ++k) sums[k] += at[k * pixels + i];
    }
    for (int k = 0; k < K; ++k) out[k] = (Out) sums[k];
}

template <typename Acc, typename In, typename Out>
void synkhronos_sum(const In* x, Out* out, npy_intp rows, npy_intp channels, npy_intp pixels) {
    if (pixels == 1) return synkhronos_sum_rows<Acc>(x, out, rows, channels);
    npy_intp c = 0;
    for (; c + 8 <= channels; c += 8)
        synkhronos_sum_channels<8, Acc>(x + c * pixels, out + c, rows, channels, pixels);
    for (; c + 4 <= channels; c += 4)
        synkhronos_sum_channels<4, Acc>(x + c * pixels, out + c, rows, channels, pixels);
    for (; c < channels; ++c)
        synkhronos_sum_channels<1, Acc>(x + c * pixels, out + c, rows, channels, pixels);
}

}
"""


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
