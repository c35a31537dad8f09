"""nutpie, which pm.sample takes where it is installed, on ranks."""

import logging

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")
nutpie = pytest.importorskip("nutpie")

from support import pymc_models as models  # noqa: E402

from synkhronos.extensions import pymc as parallel  # noqa: E402

pytestmark = models.MARKS


def draws_of(**options):
    given = {"draws": 10, "tune": 10, "random_seed": 1, "progressbar": False, "quiet": True}
    given.update(compute_convergence_checks=False, nuts_sampler="nutpie")
    return pm.sample(**given, **options).posterior["weights"].values


def test_several_blocks():
    model = models.make(models.with_master_terms)
    with model:
        expected = draws_of(chains=3, cores=1)
    for options in ({"chains": 1, "cores": 1}, {"chains": 3, "cores": 2}):
        with parallel.likelihood(model, ranks=2) as ours:
            for _ in range(2):
                found = draws_of(**options)
                np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-6)
            assert len(ours.worker_pids) == 1


@pytest.mark.parametrize("gradients", ["pytensor", "jax"])
def test_compiled_for_jax(gradients):
    pytest.importorskip("jax")
    model = models.make(models.with_master_terms)
    given = {"draws": 5, "tune": 5, "chains": 2, "cores": 2, "seed": 1, "progress_bar": False}

    def sample(**options):
        return nutpie.sample(nutpie.compile_pymc_model(model, **options), **given)

    expected = sample().posterior["weights"]
    with parallel.likelihood(model, ranks=2) as ours:
        found = sample(backend="jax", gradient_backend=gradients, freeze_model=False)
        assert len(ours.worker_pids) == 1
    np.testing.assert_allclose(found.posterior["weights"], expected, rtol=1e-6)


def test_a_frozen_copy_is_told_of(caplog):
    model = models.make(models.with_master_terms)
    with parallel.likelihood(model, ranks=2), caplog.at_level(logging.WARNING, "synkhronos"):
        nutpie.compile_pymc_model(model, freeze_model=True)
    assert "ranks have computed nothing" in caplog.text
    assert "freeze_model=False" in caplog.text


DEATH = """
import os, signal
import pymc as pm
from support import pymc_models as models
from synkhronos import WorkerDied
from synkhronos.extensions import pymc as parallel

model, point = models.logistic_at_a_point()
try:
    with parallel.likelihood(model, ranks=2) as ours:
        models.evaluate(model, [point])
        os.kill(ours.worker_pids[0], signal.SIGKILL)
        pm.sample(chains=2, cores=2, nuts_sampler="nutpie", progressbar=False)
except WorkerDied as death:
    assert "rank 1" in str(death)
    print("ended")
"""


def test_a_worker_that_dies(script):
    # In a process of its own: nutpie leaves descriptors of a sampling that fails.
    assert "ended" in script(DEATH, timeout=300).stdout
