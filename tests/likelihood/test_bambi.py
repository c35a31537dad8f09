"""Models that bambi builds, on ranks."""

import numpy as np
import pytest

pytest.importorskip("pymc", minversion="6")
bambi = pytest.importorskip("bambi")

import pandas as pd  # noqa: E402
from support import pymc_models as models  # noqa: E402

from synkhronos.extensions import pymc as parallel  # noqa: E402

pytestmark = models.MARKS

DATA = pd.DataFrame(
    {
        "x": models.X[:, 0],
        "z": models.X[:, 1],
        "y": models.Y,
        "hit": models.HITS,
        "many": models.COUNTS,
        "positive": np.abs(models.Y) + 0.1,
        "group": [f"g{each}" for each in models.GROUP],
        "kind": pd.Categorical(models.KINDS, ordered=True),
    }
)


@pytest.mark.parametrize(
    "formula, family",
    [
        ("hit ~ x + z", "bernoulli"),
        ("y ~ x + (x | group)", "gaussian"),
        ("many ~ x + z", "negativebinomial"),
        ("y ~ x + z", "t"),
        ("y ~ bs(x, df=5)", "gaussian"),
        ("kind ~ x", "cumulative"),
        ("kind ~ x", "categorical"),
        ("positive ~ x", "gamma"),
    ],
)
def test_equal_to_the_plain_model(formula, family):
    model = bambi.Model(formula, DATA, family=family)
    model.build()
    with models.equal_on_ranks(model.backend.model) as ours:
        assert not ours.left


def test_fit():
    model = bambi.Model("hit ~ x + z", DATA, family="bernoulli")
    model.build()
    given = {"draws": 10, "tune": 10, "chains": 1, "cores": 1, "random_seed": 1}
    given.update(progressbar=False, compute_convergence_checks=False)
    expected = model.fit(**given).posterior["x"].values
    with parallel.likelihood(model.backend.model, ranks=2) as ours:
        found = model.fit(**given).posterior["x"].values
        assert len(ours.worker_pids) == 1
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_model_of_bambi_has_one_of_pymc():
    model = bambi.Model("hit ~ x", DATA, family="bernoulli")
    refused = pytest.raises(TypeError, match=r"type bambi\.models\.Model. .* model\.backend\.model")
    with refused, parallel.likelihood(model, ranks=2):
        pass
