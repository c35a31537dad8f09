"""A logistic regression of 50,000 rows, sampled with the likelihood on all cores."""

import numpy as np
import pymc as pm

from synkhronos.extensions import pymc as parallel

draw = np.random.default_rng(1)
x = draw.normal(size=(50_000, 5))
y = draw.random(50_000) < 1 / (1 + np.exp(-(x @ [1.0, -1.0, 0.5, 0.0, 0.25] - 0.5)))

with pm.Model() as model:
    intercept = pm.Normal("intercept", 0, 1)
    slopes = pm.Normal("slopes", 0, 1, shape=5)
    pm.Bernoulli("y", logit_p=intercept + x @ slopes, observed=y)

with parallel.likelihood(model, ranks=2) as divided:
    print(divided)
    idata = pm.sample(200, tune=200, chains=2, cores=1, random_seed=1, progressbar=False)

print(idata.posterior["slopes"].mean(("chain", "draw")).round(2).to_numpy())
