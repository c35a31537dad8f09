"""Data that change before and after a model is compiled, in each sampler, as in plain models."""

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")

from support import pymc_models as models  # noqa: E402

from synkhronos.extensions import pymc as parallel  # noqa: E402

pytestmark = models.MARKS

random = np.random.default_rng(0)
X = random.normal(size=(90, 2))
LONGER = random.normal(size=(130, 2))
SAMPLED = {"draws": 15, "tune": 15, "chains": 2, "cores": 2, "seed": 1, "progress_bar": False}


def outcome(x, slope):
    """Return outcomes of the rows of x: plain numbers, and new arrays in each call."""
    return x @ [slope, -1.0] + np.sin(np.arange(len(x)))


def make_model():
    with pm.Model() as model:
        x, y = pm.Data("x", X), pm.Data("outcome", outcome(X, 2.0))
        weights = pm.Normal("weights", shape=2)
        # They use the data in this process, which must be those that the ranks have.
        pm.Deterministic("residual", (y - x @ weights).mean())
        pm.Potential("prior", -(y.mean() ** 2))
        pm.Normal("y", x @ weights, pm.HalfNormal("noise"), observed=y)
    return model


def set_data(model, x, slope):
    with model:
        pm.set_data({"x": x, "outcome": outcome(x, slope)})


def compare(steps):
    """Compare the results of steps, for a model in a block, with those for a plain model."""
    model = make_model()
    with model:
        expected = steps(model)
    model = make_model()
    with model, parallel.likelihood(model, ranks=2):
        found = steps(model)
    assert len(found) == len(expected)
    for one, right in zip(found, expected):
        np.testing.assert_allclose(one, right, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", ["NUMBA", "FAST_COMPILE", "JAX"])
def test_functions_of_pytensor(mode):
    if mode == "JAX":
        pytest.importorskip("jax")

    def steps(model):
        found, point = [], model.initial_point()
        set_data(model, X, 0.5)
        function = model.compile_fn([model.logp(), model.dlogp()], mode=mode)
        for x, slope in ((X, 1.0), (X, -1.0), (LONGER, 3.0)):
            found += function(point)
            set_data(model, x, slope)
        return found + list(function(point))

    compare(steps)


@pytest.mark.parametrize("options", [{}, {"backend": "jax", "freeze_model": False}])
def test_nutpie(options):
    nutpie = pytest.importorskip("nutpie")
    if options:
        pytest.importorskip("jax")

    def draws(compiled):
        posterior = nutpie.sample(compiled, **SAMPLED).posterior
        return [posterior["weights"].values, posterior["residual"].values]

    def steps(model):
        set_data(model, X, 0.5)
        compiled = nutpie.compile_pymc_model(model, **options)
        found = draws(compiled)
        for slope in (1.0, -1.0, 3.0):  # arrays of one size take the place of one another
            found += draws(compiled.with_data(outcome=outcome(X, slope)))
        longer = {"x": LONGER, "outcome": outcome(LONGER, 4.0)}
        found += draws(compiled.with_data(**longer))
        set_data(model, X, 5.0)
        found += draws(compiled)  # which has its own copy of the data
        return found + draws(nutpie.compile_pymc_model(model, **options))

    compare(steps)


def test_functions_of_jax():
    jax = pytest.importorskip("jax")
    from pymc.sampling.jax import get_jaxified_logp

    def steps(model):
        values = [jax.numpy.asarray(each) for each in model.initial_point().values()]
        functions, found = [], []
        for x, slope in ((X, 0.5), (X, 1.0), (LONGER, 3.0)):
            set_data(model, x, slope)
            functions.append(jax.jit(jax.value_and_grad(get_jaxified_logp(model))))
            functions[-1](values)  # compiles: its data are constants from now on
        for function in (*functions, *functions[::-1]):
            found += jax.tree_util.tree_leaves(function(values))
        return found

    compare(steps)


@pytest.mark.parametrize("sampler", ["pymc", "nutpie", "numpyro"])
def test_samplings(sampler):
    if sampler != "pymc":
        pytest.importorskip(sampler)
    given = {"draws": 15, "tune": 15, "chains": 1, "cores": 1, "random_seed": 1}
    given.update(progressbar=False, compute_convergence_checks=False, nuts_sampler=sampler)

    def steps(model):
        found = []
        for x, slope in ((X, 0.5), (X, 1.0), (LONGER, 3.0)):
            set_data(model, x, slope)
            found.append(pm.sample(**given).posterior["weights"].values)
        return found

    compare(steps)
