"""Stan's programs of ``bench pymc``: their densities and gradients, where httpstan is installed."""

import importlib.util

import numpy as np
import pytest

from synkhronos.tools.bench import stan

N, K = 1000, 3


def test_without_stan_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(stan.StanError, match="pip install httpstan"):
        stan.compiled("poisson", tmp_path)


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(stan, "installed", lambda: tmp_path)
    with pytest.raises(stan.StanError, match="stanc can't be run"):
        stan.compiled("poisson", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("g++ compiles Stan's headers")
def test_gradients_of_a_poisson_regression_are_numpys(tmp_path):
    if importlib.util.find_spec("httpstan") is None:
        pytest.skip("httpstan, which has Stan's compiler, is not installed")
    draw = np.random.default_rng(5)
    x, at = draw.normal(size=(N, K)), 0.3 * draw.normal(size=K)
    rate = np.exp(x @ at)
    y = draw.poisson(rate)
    expected = x.T @ (y - rate) - at
    library = stan.compiled("poisson", tmp_path)
    assert stan.compiled("poisson", tmp_path) == library
    for threads in (1, 2):
        with stan.Stan(library, {"n": N, "k": K, "x": x, "y": y}, threads) as program:
            value, gradient = program.evaluate(at)
            assert len(program.times(3)) == 3
            with pytest.raises(stan.StanError, match="has ended"):
                program.evaluate(at[:1])
        np.testing.assert_allclose(gradient, expected, rtol=1e-9)
        assert np.isfinite(value)
