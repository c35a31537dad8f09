"""Max-pooling of images and its gradient, in loops over contiguous memory.

Theano's loops compute the address of each pixel from five indices. These loops compare and add the
same numbers in the same order, so the results are the same, bit for bit, even if a maximum occurs
twice, or is NaN.
"""

from theano import gof
from theano.tensor.signal.pool import MaxPoolGrad, Pool

from synkhronos._host.theano.faster.c_code import FLOATS, allocate, beside

_CODE = beside(__file__)


def _lengths(x, ndim):
    return [f"PyArray_DIM({x}, {axis})" for axis in range(ndim)]


def _windows(node, inputs, x):
    """Return code that declares the windows of both axes, and whether the loops cover them."""
    names = [*inputs[-3:]]
    dtypes = [f"npy_{variable.dtype}" for variable in node.inputs[-3:]]
    size, stride, pad = (
        [f"*({dtype}*) PyArray_GETPTR1({name}, {axis})" for axis in (0, 1)]
        for name, dtype in zip(names, dtypes)
    )
    sized = " && ".join(f"PyArray_DIM({name}, 0) == 2" for name in names)
    ndim = node.inputs[0].ndim
    return f"""
        int covered = {sized} && PyArray_ISCARRAY_RO({x}) && PyArray_SIZE({x}) > 0;
        SynkhronosWindows windows[2] = {{}};
        npy_intp images = 1;
        for (int axis = 0; axis < {ndim - 2}; ++axis) images *= PyArray_DIM({x}, axis);
        if (covered) {{
            windows[0].length = PyArray_DIM({x}, {ndim - 2});
            windows[1].length = PyArray_DIM({x}, {ndim - 1});
            windows[0].size = {size[0]}; windows[1].size = {size[1]};
            windows[0].stride = {stride[0]}; windows[1].stride = {stride[1]};
            windows[0].pad = {pad[0]}; windows[1].pad = {pad[1]};
            for (int axis = 0; axis < 2; ++axis) {{
                const SynkhronosWindows& w = windows[axis];
                covered = covered && w.stride > 0 && w.pad >= 0 && w.pad < w.size;
            }}
        }}
    """


class ContiguousMaxPool(Pool):
    """A max-pooling of two axes; Theano's code pools arrays that are not contiguous."""

    def c_support_code(self):
        return _CODE

    def c_code(self, node, name, inputs, outputs, sub):
        x, z, lengths = inputs[0], outputs[0], _lengths(inputs[0], node.inputs[0].ndim)
        ignore_border = "true" if self.ignore_border else "false"
        theano = super().c_code(node, name, inputs, outputs, sub)
        return f"""
        {_windows(node, inputs, x)}
        for (int axis = 0; covered && axis < 2; ++axis) {{
            SynkhronosWindows& w = windows[axis];
            const npy_intp padded = w.length + 2 * w.pad;
            if ({ignore_border})
                w.count = padded < w.size ? 0 : (padded - w.size) / w.stride + 1;
            else if (w.stride >= w.size)
                w.count = (padded - 1) / w.stride + 1;
            else {{
                const npy_intp beyond = padded - 1 - w.size + w.stride;
                w.count = (beyond < 0 ? 0 : beyond / w.stride) + 1;
            }}
            // Theano refuses padding where borders count.
            covered = w.count > 0 && ({ignore_border} || w.pad == 0);
        }}
        if (covered) {{
            {allocate(z, [*lengths[:-2], "windows[0].count", "windows[1].count"], x, sub["fail"])}
            synkhronos_max_pool(
                (const dtype_{x}*) PyArray_DATA({x}), (dtype_{z}*) PyArray_DATA({z}), images,
                windows[0], windows[1]);
        }} else {{
            {theano}
        }}
        """

    def c_code_cache_version(self):
        return (*super().c_code_cache_version(), "contiguous", self.ignore_border, 2)


class ContiguousMaxPoolGrad(MaxPoolGrad):
    """The gradient of a max-pooling of two axes."""

    def c_support_code(self):
        return _CODE

    def c_code(self, node, name, inputs, outputs, sub):
        (x, z, gz), gx, ndim = inputs[:3], outputs[0], node.inputs[0].ndim
        theano = super().c_code(node, name, inputs, outputs, sub)
        return f"""
        {_windows(node, inputs, x)}
        covered = covered && PyArray_ISCARRAY_RO({z}) && PyArray_ISCARRAY_RO({gz});
        for (int axis = 0; covered && axis < {ndim}; ++axis) {{
            const int pooled = axis - {ndim - 2};
            covered = PyArray_DIM({z}, axis) == PyArray_DIM({gz}, axis)
                && (pooled >= 0 || PyArray_DIM({z}, axis) == PyArray_DIM({x}, axis));
            if (pooled >= 0) {{
                SynkhronosWindows& w = windows[pooled];
                w.count = PyArray_DIM({z}, axis);
                covered = covered && w.count > 0 && w.begin(w.count - 1) < w.length;
            }}
        }}
        if (covered) {{
            {allocate(gx, _lengths(x, ndim), x, sub["fail"])}
            synkhronos_max_pool_grad(
                (const dtype_{x}*) PyArray_DATA({x}), (const dtype_{z}*) PyArray_DATA({z}),
                (const dtype_{gz}*) PyArray_DATA({gz}), (dtype_{gx}*) PyArray_DATA({gx}), images,
                windows[0], windows[1]);
        }} else {{
            {theano}
        }}
        """

    def c_code_cache_version(self):
        return (*super().c_code_cache_version(), "contiguous", 3)


@gof.local_optimizer([Pool, MaxPoolGrad])
def pool_contiguously(node):
    """Replace a max-pooling of two axes of floats, or its gradient."""
    op = node.op
    # Theano also calls this for subclasses, and for variables of other types.
    if type(op) not in (Pool, MaxPoolGrad) or op.mode != "max" or op.ndim != 2:
        return False
    dtypes = {x.dtype for x in [*node.inputs[:-3], *node.outputs]}
    if len(dtypes) > 1 or dtypes.isdisjoint(FLOATS) or op.openmp:
        return False
    if type(op) is Pool:
        return [ContiguousMaxPool(op.ignore_border, "max", 2, openmp=False)(*node.inputs)]
    return [ContiguousMaxPoolGrad(op.ignore_border, 2, openmp=False)(*node.inputs)]
