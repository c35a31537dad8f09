"""PyMC's samplers and optimizers on ranks, compared with the same on plain models."""

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")

from support import pymc_models as models  # noqa: E402

import synkhronos as synk  # noqa: E402
from synkhronos.extensions import pymc as parallel  # noqa: E402

pytestmark = models.MARKS

SHORT = {
    "draws": 40,
    "tune": 40,
    "chains": 1,
    "cores": 1,
    "random_seed": 1,
    "progressbar": False,
    "compute_convergence_checks": False,
    "nuts_sampler": "pymc",
}


def draws_of(idata, name="weights"):
    return idata.posterior[name].values


def test_same_draws_as_the_plain_model():
    model = models.make(models.with_master_terms)
    with model:
        expected = draws_of(pm.sample(**SHORT))
    with parallel.likelihood(model, ranks=2):
        found = draws_of(pm.sample(**SHORT))
    # Rounding grows along a chain, but not far in so few draws.
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow("draws")
def test_same_posterior_as_the_plain_model():
    model = models.make(models.hierarchical)
    options = {**SHORT, "draws": 300, "tune": 200}
    with model:
        expected = pm.sample(**{**options, "random_seed": 2}).posterior["a"]
    with parallel.likelihood(model, ranks=2):
        found = pm.sample(**options).posterior["a"]
    sd = expected.std(("chain", "draw"))
    # With at least 100 effective draws, both means are within 5 errors of another.
    error = np.sqrt(2 / 100)
    difference = found.mean(("chain", "draw")) - expected.mean(("chain", "draw"))
    assert float(abs(difference / sd).max()) < 5 * error
    assert float(abs(found.std(("chain", "draw")) / sd - 1).max()) < 5 * error


CHAINS = """
import numpy as np, pymc as pm
from support import pymc_models as models
from synkhronos.extensions import pymc as parallel

if __name__ == "__main__":
    model = models.make(models.with_master_terms)
    options = {options}
    with parallel.likelihood(model, ranks=2):
        expected = pm.sample(**options).posterior["weights"]
        # Workers of this process, which chains must leave alone, are there.
        options.update(cores=2, mp_ctx="{start_method}")
        found = pm.sample(**options).posterior["weights"]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
"""


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_chains_in_processes(script, start_method):
    options = {**SHORT, "draws": 10, "tune": 10, "chains": 2}
    script(CHAINS.format(options=options, start_method=start_method), timeout=300)


def test_find_map():
    model = models.make(models.logistic)
    with model:
        expected = pm.find_MAP(progressbar=False)
    with parallel.likelihood(model, ranks=2):
        found = pm.find_MAP(progressbar=False)
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-6)


@pytest.mark.parametrize("method", ["advi", "fullrank_advi"])
def test_fit(method):
    model = models.make(models.logistic)
    options = {"n": 50, "method": method, "progressbar": False, "random_seed": 1}
    with model:
        expected = pm.fit(**options).hist
    with parallel.likelihood(model, ranks=2):
        found = pm.fit(**options).hist
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_sequential_monte_carlo():
    model = models.make(models.with_master_terms)
    options = {"draws": 30, "chains": 1, "cores": 1, "random_seed": 1, "progressbar": False}
    options["compute_convergence_checks"] = False
    with model:
        expected = draws_of(pm.sample_smc(**options))
    with parallel.likelihood(model, ranks=2):
        found = draws_of(pm.sample_smc(**options))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_samplers_without_gradients():
    model = models.make(models.with_master_terms)
    options = {**SHORT, "draws": 5, "tune": 5}
    with model:
        expected = draws_of(pm.sample(step=pm.Slice(), **options))
    with parallel.likelihood(model, ranks=2):
        found = draws_of(pm.sample(step=pm.Slice(), **options))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_is_computed_row_by_row():
    model = models.make(models.logistic)
    options = {"progressbar": False}
    with model:
        draws = pm.sample(**{**SHORT, "draws": 5, "tune": 5})
    with parallel.likelihood(model, ranks=2):
        predicted = pm.sample_posterior_predictive(draws, random_seed=1, **options)
        pm.compute_log_likelihood(draws, **options)
    assert predicted.posterior_predictive["y"].shape == (1, 5, models.ROWS)
    assert draws.log_likelihood["y"].shape == (1, 5, models.ROWS)


def test_beside_a_session():
    synk.fork(2)
    with models.equal_on_ranks(models.make(models.logistic)):
        pass
    synk.status()
    synk.close()


def test_numba():
    import pytensor

    numba = pytensor.config.change_flags(mode="NUMBA")
    with numba, models.equal_on_ranks(models.make(models.two_lengths)):
        pass
