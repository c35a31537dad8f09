"""Convolutions that copy the pixels of images row by row.

    image ──copy──▶ one column for each place of the filter ──Gemm──▶ outputs

Theano's copy tests each pixel, whether it is inside of the image; so does the addition of columns
in the gradient of images. Here the part of a row inside of the image is copied at once. The matrix
products and the order of additions are Theano's, so the results are the same, bit for bit.
"""

from theano import gof
from theano.tensor.nnet.corr import BaseCorrMM, CorrMM, CorrMM_gradInputs, CorrMM_gradWeights

from synkhronos._host.theano.faster.c_code import beside

_CODE = beside(__file__)


class _RowByRow(BaseCorrMM):
    """Theano's operation with other functions for the copies."""

    def c_support_code(self):
        return super().c_support_code() + _CODE

    def c_support_code_apply(self, node, nodename):
        """Return Theano's code with calls of these copies."""
        code = super().c_support_code_apply(node, nodename)
        # Only calls begin with two parentheses, no definitions.
        code = code.replace("im2col((", "synkhronos_each_place<false>((")
        return code.replace("col2im((", "synkhronos_each_place<true>((")

    def c_code_cache_version(self):
        return (*super().c_code_cache_version(), "row by row", 3)


class RowwiseCorrMM(_RowByRow, CorrMM):
    """A convolution of images with filters."""


class RowwiseCorrMMGradWeights(_RowByRow, CorrMM_gradWeights):
    """The gradient of the filters."""


class RowwiseCorrMMGradInputs(_RowByRow, CorrMM_gradInputs):
    """The gradient of the images."""


_ROWWISE = {
    CorrMM: RowwiseCorrMM,
    CorrMM_gradWeights: RowwiseCorrMMGradWeights,
    CorrMM_gradInputs: RowwiseCorrMMGradInputs,
}


@gof.local_optimizer(list(_ROWWISE))
def copy_row_by_row(node):
    """Replace a convolution that Theano computes as a product of matrices, or its gradient."""
    op = node.op
    if type(op) not in _ROWWISE:
        return False
    settings = {name: getattr(op, name) for name in (*op.__props__, "openmp")}
    # Gradients also take the height and width that their result is to have, if it can't be told.
    one, other, *shape = node.inputs
    given = [one, other, shape] if shape else [one, other]
    return [_ROWWISE[type(op)](**settings)(*given)]
