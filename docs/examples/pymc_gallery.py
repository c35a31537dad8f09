"""Three models of PyMC's example gallery, with random data of more rows."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from synkhronos.extensions import pymc as parallel


def survival(draw, n_patients=50_000):
    """Return a Weibull regression of times, some of which are known to be longer only."""
    treated = draw.integers(2, size=n_patients)
    log_time = 1 + 0.7 * treated + 0.5 * np.log(draw.exponential(size=n_patients))
    censored = log_time > 1.5
    log_time = np.minimum(log_time, 1.5)
    with pm.Model() as model:
        slopes, scale = pm.Normal("slopes", shape=2), pm.HalfNormal("scale", 1)
        expected = slopes[0] + slopes[1] * treated
        # The logarithm of a Weibull variable has the distribution of a negative Gumbel variable.
        pm.Gumbel("died", -expected[~censored], scale, observed=-log_time[~censored])
        longer = -pt.exp((log_time[censored] - expected[censored]) / scale)
        pm.Potential("lived", longer)
    return model


def radon(draw, n_houses=100_000, n_counties=85):
    """Return a multilevel regression: an intercept for each county, around a line of uranium."""
    county, floor = draw.integers(n_counties, size=n_houses), draw.integers(2, size=n_houses)
    uranium, offsets = draw.normal(size=n_counties), 0.3 * draw.normal(size=n_counties)
    measured = (1.5 + 0.7 * uranium + offsets)[county] - 0.6 * floor + draw.normal(size=n_houses)
    with pm.Model() as model:
        slopes = pm.Normal("slopes", shape=3)
        spread, noise = pm.HalfNormal("spread", 1), pm.HalfNormal("noise", 1)
        centre = slopes[0] + slopes[1] * uranium
        intercepts = pm.Normal("intercepts", centre, spread, shape=n_counties)
        pm.Normal("radon", intercepts[county] + slopes[2] * floor, noise, observed=measured)
    return model


def item_response(draw, n_persons=2_000, n_items=50):
    """Return a model of answers: an ability for each person, a difficulty for each question."""
    ability, difficulty = draw.normal(size=(n_persons, 1)), draw.normal(size=n_items)
    right = draw.random((n_persons, n_items)) < 1 / (1 + np.exp(difficulty - ability))
    with pm.Model() as model:
        ability = pm.Normal("ability", shape=n_persons)
        difficulty = pm.Normal("difficulty", shape=n_items)
        pm.Bernoulli("right", logit_p=ability[:, None] - difficulty, observed=right)
    return model


for build in (survival, radon, item_response):
    model = build(np.random.default_rng(1))
    at = model.initial_point(random_seed=1)
    value, gradient = model.compile_logp()(at), model.compile_dlogp()(at)
    with parallel.likelihood(model, ranks=2) as divided:
        print(f"{build.__name__}: {divided}")
        np.testing.assert_allclose(model.compile_logp()(at), value, rtol=1e-10)
        np.testing.assert_allclose(model.compile_dlogp()(at), gradient, rtol=1e-8, atol=1e-8)
        idata = pm.sample(100, tune=200, chains=1, cores=1, random_seed=1, progressbar=False)
    for name, draws in idata.posterior.data_vars.items():
        print("   ", name, draws.mean(("chain", "draw")).to_numpy().round(2).flat[:3])
