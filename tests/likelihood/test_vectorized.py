"""Exponentials and logarithms of vectors, compared with NumPy's."""

import numpy as np
import pytest

pytest.importorskip("pymc", minversion="6")

import pytensor
import pytensor.tensor as pt

from synkhronos.extensions.pymc.vectorized import including

pytestmark = pytest.mark.numba

_SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 5e-324, 1e-310, 2.0**-1022, 1.7e308]
_EDGES = [709.7, 709.8, 710.0, 1e5, -708.5, -744.4, -745.2, -746.0, -1e5, -0.5, -1.5, -1 + 2.0**-53]


def test_are_as_precise_as_numpy():
    mode = pytensor.compile.mode.get_default_mode()
    if including(mode) is mode:
        pytest.skip("needs numba, which make test-numba runs, and a processor with AVX2")
    x = pt.vector("x")
    outputs = [pt.exp(x), pt.log(x), pt.log1p(x), pt.sigmoid(x), pt.softplus(x)]
    function = pytensor.function([x], outputs, mode=including(mode))
    names = [str(node.op) for node in function.maker.fgraph.toposort()]
    assert sum("ectorized" in name for name in names) == 5
    random = np.random.default_rng(0)
    scales = [1e-300, 1e-17, 1e-8, 0.1, 1.0, 10.0, 300.0, 1e10, 1e300]
    given = np.concatenate([_SPECIAL, _EDGES, *(s * random.standard_normal(5000) for s in scales)])
    with np.errstate(all="ignore"):
        e = np.exp(-np.abs(given))
        expected = [
            np.exp(given), np.log(given), np.log1p(given),
            1 / (1 + np.exp(-given)), np.maximum(given, 0) + np.log1p(e),
        ]  # fmt: skip
        for name, found, right in zip(
            ["exp", "log", "log1p", "sigmoid", "softplus"], function(given), expected
        ):
            wrong = np.abs(found - right) > 2 * np.spacing(np.abs(right))  # False for NaN
            wrong |= np.isnan(found) != np.isnan(right)
            wrong |= np.isinf(right) & (found != right)
            assert not wrong.any(), (name, given[wrong], found[wrong], right[wrong])
