"""Functions of vectors, compared with NumPy's and SciPy's."""

import math

import numpy as np
import pytest
import scipy.special

pytest.importorskip("pymc", minversion="6")

import pytensor
import pytensor.tensor as pt

from synkhronos.extensions.pymc.vectorized import including

pytestmark = pytest.mark.numba

_SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 5e-324, 1e-310, 2.0**-1022, 1.7e308]
_EDGES = [709.7, 709.8, 710.0, 1e5, -708.5, -744.4, -745.2, -746.0, -1e5, -0.5, -1.5, -1 + 2.0**-53]


def compiled(*operations, x=None):
    mode = pytensor.compile.mode.get_default_mode()
    if including(mode) is mode:
        pytest.skip("needs numba, which make test-numba runs, and a processor with AVX2")
    x = pt.vector("x") if x is None else x
    function = pytensor.function([x], [each(x) for each in operations], mode=including(mode))
    nodes = function.maker.fgraph.toposort()
    found = [node for node in nodes if "ectorized" in str(node.op)]
    assert [node.inputs[0].ndim for node in found] == [1] * len(operations)
    return function


def check(name, given, found, right, allowed):
    wrong = np.abs(found - right) > allowed  # False for NaN
    wrong |= np.isnan(found) != np.isnan(right)
    wrong |= np.isinf(right) & (found != right)
    assert not wrong.any(), (name, given[wrong], found[wrong], right[wrong])


@np.errstate(all="ignore")
def test_are_as_precise_as_numpy():
    function, softplus = compiled(pt.exp, pt.log, pt.log1p, pt.sigmoid), compiled(pt.softplus)
    given = numbers()
    e = np.exp(-np.abs(given))
    expected = [
        np.exp(given), np.log(given), np.log1p(given),
        1 / (1 + np.exp(-given)), np.maximum(given, 0) + np.log1p(e),
    ]  # fmt: skip
    for name, found, right in zip(
        ["exp", "log", "log1p", "sigmoid", "softplus"],
        [*function(given), *softplus(given)],
        expected,
    ):
        check(name, given, found, right, 2 * np.spacing(np.abs(right)))


@np.errstate(all="ignore")
def test_one_exponential_gives_what_several_give():
    mode = pytensor.compile.mode.get_default_mode()
    if including(mode) is mode:
        pytest.skip("needs numba, which make test-numba runs, and a processor with AVX2")
    x, y = pt.vectors("x", "y")
    outputs = [f(each) for f in (pt.sigmoid, pt.softplus) for each in (x - y, y - x, -x, x)]
    function = pytensor.function([x, y], outputs, mode=including(mode), on_unused_input="ignore")
    nodes = function.maker.fgraph.toposort()
    assert sum("ectorized" in str(node.op) for node in nodes) == 4  # exp and log1p, of x, of x - y
    given = numbers()
    for name, found, sign in zip("abcdefgh", function(given, 0 * given), [1, -1, -1, 1] * 2):
        at = sign * (given - 0 * given if name in "abef" else given)
        e = np.exp(-np.abs(at))
        right = np.where(at >= 0, 1, e) / (1 + e)
        right = right if name in "abcd" else np.maximum(at, 0) + np.log1p(e)
        check(name, given, found, right, 4 * np.spacing(np.abs(right)))


def numbers():
    random = np.random.default_rng(0)
    scales = [1e-300, 1e-17, 1e-8, 0.1, 1.0, 10.0, 300.0, 1e10, 1e300]
    return np.concatenate([_SPECIAL, _EDGES, *(s * random.standard_normal(5000) for s in scales)])


@np.errstate(all="ignore")
def test_gamma_functions_are_as_precise_as_what_they_are_computed_from():
    """The result cancels near 1 and 2, where log gamma is 0, and below 0."""
    function = compiled(pt.gammaln, pt.psi)
    random = np.random.default_rng(0)
    scales = [1e-300, 1e-8, 0.1, 1.0, 3.0, 10.0, 300.0, 1e5, 1e10, 1e20, 1e300]
    special = [-2.0, -3.0, -1e20, -1e306, 2.5e305, 1e-290, -1e-290, 1e-300, -1e-300, 2.0**51 + 0.5]
    given = [s * random.standard_normal(5000) for s in scales]
    given = np.concatenate([_SPECIAL, _EDGES, special, *given])
    # SciPy's is inf where it is 709 to 744.
    log_gamma = scipy.special.gammaln(given)
    log_gamma = np.where(np.abs(given) < 1e-290, -np.log(np.abs(given)), log_gamma)
    # SciPy's digamma has errors of 1e-13 below 0, but the right poles.
    digamma = scipy.special.psi(given)
    below = (given < 0) & np.isfinite(digamma)
    reflected, cotangent = (
        scipy.special.psi(1 - given),
        np.pi / np.tan(np.pi * (given - np.round(given))),
    )
    digamma = np.where(below, reflected - cotangent, digamma)
    size = np.where(below, np.abs(reflected) + np.abs(cotangent), np.abs(digamma))
    found = function(given)
    check("log gamma", given, found[0], log_gamma, 10 * np.spacing(np.fmax(np.abs(log_gamma), 1)))
    check("digamma", given, found[1], digamma, 10 * np.spacing(np.fmax(size, 1)))


@np.errstate(all="ignore")
def test_error_functions_are_as_precise_as_the_c_library():
    function = compiled(pt.erfcx, pt.erfc)
    random = np.random.default_rng(0)
    given = [s * random.standard_normal(5000) for s in (1e-300, 1e-8, 0.1, 1.0, 10.0, 1e10, 1e300)]
    given = np.concatenate([_SPECIAL, _EDGES, [26.5, 27.0, -26.6, -26.7, 29.9, -29.9], *given])
    erfcx, erfc = scipy.special.erfcx(given), np.array([math.erfc(each) for each in given])
    found = function(given)
    allowed = 12 + np.where(
        given < 0, given**2, 0
    )  # SciPy's has exp(x^2), of a square that is rounded
    check("erfcx", given, found[0], erfcx, allowed * np.spacing(np.abs(erfcx)))
    check("erfc", given, found[1], erfc, 6 * np.spacing(np.abs(erfc)))


def test_matrices_of_few_columns_are_one_vector():
    """Loops of two numbers are not vectorized: each number would take longer than in C."""

    def slope(x):  # of softmax: its exponentials are seen late
        return pytensor.grad(pt.special.softmax(x, axis=1)[:, 0].sum(), x)

    function = compiled(lambda x: pt.exp(x).sum(axis=1), slope, x=pt.matrix("x", shape=(None, 2)))
    given = np.random.default_rng(0).standard_normal((7, 2))
    for x in (given, np.asfortranarray(given), given[::2], given[:1]):
        total, slopes = function(x)
        np.testing.assert_allclose(total, np.exp(x).sum(axis=1), rtol=1e-15)
        p = scipy.special.softmax(x, axis=1).prod(axis=1)
        np.testing.assert_allclose(slopes, np.stack([p, -p], axis=1), rtol=1e-14)
