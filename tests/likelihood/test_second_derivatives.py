"""Second derivatives on ranks, compared with those of plain models."""

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")

import pytensor  # noqa: E402
import pytensor.tensor as pt  # noqa: E402
from support import pymc_models as models  # noqa: E402

from synkhronos.extensions import pymc as parallel  # noqa: E402

pytestmark = models.MARKS


def products(model):
    """Return a function of a point: the Hessian of the log-probability times a direction."""
    variables = model.continuous_value_vars
    gradients = pytensor.grad(model.logp(), variables)
    along = [pt.cos(i + pt.arange(each.size)) for i, each in enumerate(gradients)]
    slope = sum((each.ravel() * one).sum() for each, one in zip(gradients, along))
    return model.compile_fn(pytensor.grad(slope, variables))


def assert_equal(found, expected):
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-12 * np.abs(right).max())


@pytest.mark.parametrize("definition", [models.two_lengths, models.parameter_for_each_row])
def test_products_with_the_hessian(definition):
    model = models.make(definition)
    points = models.points(model)
    function = products(model)
    expected = [function(point) for point in points]
    plain = models.evaluate(model, points)
    with parallel.likelihood(model, ranks=2) as ours:
        function = products(model)
        for point, right in zip(points, expected):
            assert_equal(function(point), right)
        models.assert_equal(models.evaluate(model, points), plain)  # the kinds take turns
        assert_equal(function(points[0]), expected[0])
        assert len(ours.worker_pids) == 1


@pytest.mark.slow("compilers")
def test_find_hessian():
    model, point = models.logistic_at_a_point()
    with model:
        expected = pm.find_hessian(point, negate_output=False)
    with parallel.likelihood(model, ranks=2):
        assert_equal([pm.find_hessian(point, negate_output=False)], [expected])


def test_third_derivatives_are_refused():
    model = models.make(models.logistic)
    [weights, _] = model.value_vars
    with parallel.likelihood(model, ranks=2):
        second = pytensor.grad(pytensor.grad(model.logp(), weights).sum(), weights)
        with pytest.raises(NotImplementedError, match="Ranks compute no third derivatives"):
            pytensor.grad(second.sum(), weights)


def test_second_derivatives_that_pytensor_lacks():
    with pm.Model() as model:
        gamma = pm.Gamma.dist(pm.HalfNormal("alpha"), 1.0)
        pm.Censored("y", gamma, lower=0.1, upper=1.0, observed=np.clip(np.abs(models.Y), 0.1, 1))
    refused = pytest.raises(NotImplementedError, match="PyTensor has no second derivatives")
    with parallel.likelihood(model, ranks=2), refused:
        model.d2logp()


@pytest.mark.parametrize("gradients", ["pytensor", "jax"])
def test_pymc_extras(gradients):
    extras = pytest.importorskip("pymc_extras")
    model = models.make(models.logistic)

    def fits():
        given = {"progressbar": False, "random_seed": 1, "gradient_backend": gradients}
        given.update(freeze_model=False, use_hessp=True)
        with model:
            yield extras.find_MAP("trust-ncg", **given).fit["mean_vector"].values
            yield extras.fit_laplace("trust-ncg", **given).fit["covariance_matrix"].values

    expected = [*fits()]
    with parallel.likelihood(model, ranks=2) as ours:
        found = [*fits()]
        assert len(ours.worker_pids) == 1
    for one, right in zip(found, expected):
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-8 * np.abs(right).max())


def test_gradients_by_data_are_refused():
    def definition():
        x = pm.Data("x", models.X[:, 0])
        slope = pm.Normal("slope")
        pm.Potential("outside", -slope * x[0])  # its part of the gradient alone would be wrong
        pm.Normal("y", slope * x, 1, observed=models.Y)

    model = models.make(definition)
    with parallel.likelihood(model, ranks=2) as ours:
        assert ours.divided == ["y"]
        with pytest.raises(pytensor.gradient.NullTypeGradError, match="no gradients by data"):
            pytensor.grad(model.logp(), model["x"])
