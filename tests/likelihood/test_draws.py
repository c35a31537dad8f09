"""What PyMC computes of each draw, in several processes, compared with PyMC's own functions."""

import contextlib
import os
import signal

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")

import xarray  # noqa: E402
from support import pymc_models as models  # noqa: E402

import synkhronos as synk  # noqa: E402
from synkhronos.extensions import pymc as parallel  # noqa: E402

pytestmark = models.MARKS

N_CHAINS, N_DRAWS = 2, 7


def posterior_of(model, seed=0):
    """Return draws of a normal distribution, as if they came from a sampler."""
    random = np.random.default_rng(seed)
    with model:
        points = pm.draw(model.free_RVs, random_seed=random)
    values = {}
    for rv, point in zip(model.free_RVs, points):
        noise = random.normal(size=(N_CHAINS, N_DRAWS, *point.shape))
        values[rv.name] = point * np.exp(0.1 * noise)
    dims = {name: [f"{name}_{i}" for i in range(each.ndim - 2)] for name, each in values.items()}
    variables = {name: (("chain", "draw", *dims[name]), each) for name, each in values.items()}
    coords = {"chain": range(N_CHAINS), "draw": range(100, 100 + N_DRAWS)}
    return xarray.DataTree.from_dict({"posterior": xarray.Dataset(variables, coords)})


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_log_likelihood_has_the_bits_of_pymcs(ranks):
    model = models.make(models.hierarchical)
    idata = posterior_of(model)
    with model:
        expected = pm.compute_log_likelihood(idata, extend_inferencedata=False, progressbar=False)
    with parallel.likelihood(model, ranks=2):
        found = parallel.compute_log_likelihood(idata, ranks=ranks, progressbar=False)
    assert found is idata
    xarray.testing.assert_equal(found["log_likelihood"].to_dataset(), expected)


def test_predictive_samples_follow_from_the_seed_and_have_pymcs_distribution():
    model = models.make(models.hierarchical)
    idata = posterior_of(model)
    given = {"ranks": 2, "progressbar": False}
    with model:
        expected = pm.sample_posterior_predictive(idata, random_seed=1, progressbar=False)
        first, again, other = (
            parallel.sample_posterior_predictive(idata, random_seed=seed, **given)
            for seed in (1, 1, 2)
        )
    assert {*first.children} == {*expected.children}
    found, wanted = (each["posterior_predictive"].to_dataset() for each in (first, expected))
    xarray.testing.assert_equal(found, again["posterior_predictive"].to_dataset())
    [name] = found
    assert found[name].dims == wanted[name].dims
    assert all(found[dim].equals(wanted[dim]) for dim in wanted[name].dims)
    assert not found[name].equals(other["posterior_predictive"][name])
    halves = found[name].values[:, :3], found[name].values[:, -3:]
    assert not np.array_equal(*halves)  # each process has random numbers of its own
    error = 5 * float(wanted[name].std()) * np.sqrt(2 / wanted[name].size)
    assert abs(float(found[name].mean() - wanted[name].mean())) < error


def test_an_interrupt_leaves_no_draws_out(monkeypatch):
    model = models.make(models.hierarchical)
    idata = posterior_of(model)
    sample, n_calls = pm.sample_posterior_predictive, []

    def interrupted(*args, **kwargs):
        n_calls.append(1)
        with contextlib.suppress(KeyboardInterrupt):  # as PyMC does, which returns zeros then
            if len(n_calls) == 2:
                os.kill(os.getpid(), signal.SIGINT)
        return sample(*args, **kwargs)

    monkeypatch.setattr(pm, "sample_posterior_predictive", interrupted)
    with model, pytest.raises(KeyboardInterrupt):
        parallel.sample_posterior_predictive(idata, ranks=2, progressbar=False)
    with model:
        seeds = [np.random.default_rng(3) for _ in range(2)]
        first, again = (
            parallel.sample_posterior_predictive(
                idata.isel(draw=slice(None, None, -1)), ranks=2, random_seed=seed, progressbar=False
            )["posterior_predictive"].to_dataset()
            for seed in seeds
        )
    xarray.testing.assert_equal(first, again)


def test_errors_and_deaths_end_the_processes():
    model = models.make(models.hierarchical)
    idata = posterior_of(model)
    with model:
        with pytest.raises(ValueError, match="sample_dims can't be given"):
            parallel.compute_log_likelihood(idata, sample_dims=["draw"])
        with pytest.raises(TypeError, match="a group 'posterior'"):
            parallel.compute_log_likelihood(idata["posterior"].to_dataset())
        with pytest.raises(KeyError, match="nowhere"):
            parallel.compute_log_likelihood(idata, var_names=["nowhere"], ranks=2)
        model_logp, master = model.logp, os.getpid()

        def dies_on_workers(*args, **kwargs):
            if os.getpid() != master:
                os.kill(os.getpid(), signal.SIGKILL)
            return model_logp(*args, **kwargs)

        pm.stats.log_density.remove_value_transforms, whole = (
            lambda model: (dies_on_workers(), whole(model))[1],
            pm.stats.log_density.remove_value_transforms,
        )
        try:
            with pytest.raises(synk.WorkerDied, match="rank 1"):
                parallel.compute_log_likelihood(idata, ranks=2, progressbar=False)
        finally:
            pm.stats.log_density.remove_value_transforms = whole
