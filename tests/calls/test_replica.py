"""What each rank takes of arrays, where it is not seen from the results of ordinary calls."""

import numpy as np
import pytest
import theano.tensor as T
from support.helpers import function


@pytest.mark.parametrize("rows", [slice(0, 0, -1), slice(2, 2, -1), slice(1, 3, -1)])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_no_rows_in_descending_order_are_no_rows(ranks, rows, num_slices):
    x = T.dvector("x")
    result = function([x], (x, "gather"))(np.arange(10.0), batch=rows, num_slices=num_slices)
    assert (result.shape, result.dtype) == ((0,), "float64")
