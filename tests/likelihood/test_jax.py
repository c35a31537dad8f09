"""Likelihoods on ranks in functions of JAX, compared with plain models."""

import os
import signal

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")
jax = pytest.importorskip("jax")

from pymc.sampling.jax import get_jaxified_logp  # noqa: E402
from support import pymc_models as models  # noqa: E402

from synkhronos import WorkerDied, WorkerError  # noqa: E402
from synkhronos.extensions import pymc as parallel  # noqa: E402
from synkhronos.extensions.pymc import pace  # noqa: E402

pytestmark = models.MARKS


@pytest.fixture(autouse=True)
def ranks_compute(monkeypatch):
    """Let ranks compute also where other programs keep the cores busy."""
    monkeypatch.setattr(pace.Pace, "note", lambda self, seconds: None)


def values(model, point):
    """Return a point as JAX's functions of a model take it."""
    return [jax.numpy.asarray(point[each.name]) for each in model.value_vars]


def everything(model, points):
    """Return value, gradients and the Hessian, of one point and of all points at once."""
    logp = get_jaxified_logp(model)
    at = [values(model, point) for point in points]
    batch = [jax.numpy.stack(each) for each in zip(*at)]
    both, second = jax.value_and_grad(logp), jax.hessian(logp)
    functions = [logp, jax.jit(both), jax.jit(second)]
    found = [function(at[0]) for function in functions]
    found += [jax.jit(jax.vmap(function))(batch) for function in (both, second)]
    return jax.tree_util.tree_leaves(found)


@pytest.mark.parametrize("definition", [models.with_coordinates, models.two_lengths])
def test_equal_to_the_plain_model(definition):
    model = models.make(definition)
    points = models.points(model, 3)
    expected = everything(model, points)
    with parallel.likelihood(model, ranks=2) as ours:
        found = everything(model, points)
        assert len(ours.worker_pids) == 1
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-10 * np.abs(right).max())


def test_value_and_gradients_are_one_evaluation(monkeypatch):
    model, point = models.logistic_at_a_point()
    with parallel.likelihood(model, ranks=2) as ours:
        kinds, evaluate = [], type(ours._evaluator).evaluate

        def watched(self, kind, values, sources=None):
            kinds.append(kind)
            return evaluate(self, kind, values)

        monkeypatch.setattr(type(ours._evaluator), "evaluate", watched)
        both = jax.jit(jax.value_and_grad(get_jaxified_logp(model)))
        for _ in range(3):
            jax.block_until_ready(both(values(model, point)))
    assert kinds == ["gradients"] * 3


def test_a_worker_that_dies():
    model, point = models.logistic_at_a_point()
    at = values(model, point)
    for _ in range(2):
        killed = pytest.raises(WorkerDied, match=r"rank 1 .* was killed")
        with killed, parallel.likelihood(model, ranks=2) as ours:
            both = jax.jit(jax.value_and_grad(get_jaxified_logp(model)))
            jax.block_until_ready(both(at))
            os.kill(ours.worker_pids[0], signal.SIGKILL)
            while True:
                jax.block_until_ready(both(at))


@pytest.mark.parametrize("raised", [ArithmeticError, KeyboardInterrupt])
def test_an_error_in_a_callback(monkeypatch, raised):
    model, point = models.logistic_at_a_point()
    expected = WorkerError if raised is ArithmeticError else KeyboardInterrupt
    with pytest.raises(expected), parallel.likelihood(model, ranks=2) as ours:
        both = jax.jit(jax.value_and_grad(get_jaxified_logp(model)))
        jax.block_until_ready(both(values(model, point)))
        compute = type(ours._evaluator).compute

        def failing(self, rank, kind):
            if rank == 0 and raised is KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGINT)
            elif rank == 0:
                raise raised("of rank 0")
            compute(self, rank, kind)

        monkeypatch.setattr(type(ours._evaluator), "compute", failing)
        while True:
            jax.block_until_ready(both(values(model, point)))


@pytest.mark.slow("compilers")
@pytest.mark.parametrize("method", ["vectorized", "parallel"])
@pytest.mark.parametrize("sampler", ["numpyro", "blackjax"])
def test_sampler(sampler, method):
    pytest.importorskip(sampler)
    options = {
        "draws": 5,
        "tune": 5,
        "chains": 2,
        "random_seed": 1,
        "progressbar": False,
        "compute_convergence_checks": False,
        "nuts_sampler": sampler,
        "nuts": {"chain_method": method},
    }
    model = models.make(models.with_master_terms)
    try:
        with model:
            expected = pm.sample(**options).posterior["weights"].values
    except TypeError as error:
        pytest.skip(f"this PyMC can't sample with this {sampler}: {error}")
    with parallel.likelihood(model, ranks=2):
        found = pm.sample(**options).posterior["weights"].values
    np.testing.assert_allclose(found, expected, rtol=1e-6)
