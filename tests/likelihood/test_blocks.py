"""What a likelihood() block says, and what it leaves alone."""

import contextlib

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")
pt = pytest.importorskip("pytensor.tensor")

from support import pymc_models as models  # noqa: E402

from synkhronos import PortingWarning, SessionError  # noqa: E402
from synkhronos.extensions import pymc as parallel  # noqa: E402

pytestmark = models.MARKS

X, Y = models.X, models.Y
N = len(Y)


def weights():
    return pm.Normal("weights", shape=3)


def centred():
    mean = pt.dot(X, weights())
    pm.Normal("y", mean - mean.mean(), 1.0, observed=Y)


def mean_of_log_probabilities():
    x, y = pm.Data("x", X), pm.Data("outcome", Y)
    pm.Potential("y", pm.logp(pm.Normal.dist(x @ weights(), 1.0), y).mean())


def process():
    lengthscale = pm.HalfNormal("lengthscale")
    process = pm.gp.Marginal(cov_func=pm.gp.cov.ExpQuad(3, lengthscale))
    process.marginal_likelihood("y", X, Y, sigma=1.0)


def summand_outside():
    sigma = pm.HalfNormal("sigma")
    rest = ((Y - pt.dot(X, weights())) ** 2).sum() / (2 * sigma**2)
    pm.Potential("y", -N * pt.log(sigma) - rest)


def softmax_of_groups():
    group = np.repeat(np.arange(N // 3), 3)
    odds = pt.exp(pt.dot(X, weights()))
    sums = pt.inc_subtensor(pt.zeros(N // 3)[group], odds)
    pm.Potential("y", (models.HITS * pt.log(odds / sums[group])).sum())


def loop():
    import pytensor

    series = pytensor.scan(
        lambda y, before, rho: rho * before + y,
        sequences=[pt.as_tensor(Y)],
        outputs_info=[pt.zeros(())],
        non_sequences=[pm.Normal("rho")],
        return_updates=False,
    )
    pm.Normal("y", series, 1.0, observed=Y)


SERIES = np.random.default_rng(4).normal(size=(N, 3))  # in rows, along three times


def level(y, before, rho):
    return rho * before + y


def loop_over_times():
    import pytensor

    y, rho = pm.Data("times", SERIES.T), pm.Normal("rho")
    levels = pytensor.scan(
        level, sequences=[y], outputs_info=[y[0]], non_sequences=[rho], return_updates=False
    )
    pm.Potential("y", -(levels**2).sum())


REASONS = {
    centred: "a sum or a mean over its rows goes into it, computed from 'weights': .*data alone",
    mean_of_log_probabilities: "a sum or a mean over .* as their sum, divided by a number",
    process: "compared with one another.* 'lengthscale': .*HSGP",
    summand_outside: "belongs to no row, computed from 'sigma': put it inside of the sum",
    softmax_of_groups: r"added up in groups.* 'weights': .*softmax\(\(x \* b\)",
    loop: "a loop .* runs over its rows",
    loop_over_times: "side by side in a loop .*, computed from 'rho': .* a for loop of Python",
}


@pytest.mark.parametrize("definition", REASONS, ids=lambda each: each.__name__)
def test_reasons_in_words_of_models(definition):
    model = models.make(definition)
    refused = pytest.raises(ValueError, match=REASONS[definition])
    with refused, parallel.likelihood(model, ranks=2):
        pass


def softmax_in_rows():
    x = X[: N - N % 3].reshape((-1, 3, 3))
    odds = (x * weights()).sum(axis=-1)
    chosen = models.KINDS[: len(x)] % 3
    pm.Categorical("y", pm.math.softmax(odds, axis=1), observed=chosen)


def weighted_mean():
    w = pm.Data("w", np.abs(X[:, 0]))
    pm.Potential("y", (w * pm.logp(pm.Normal.dist(pt.dot(X, weights()), 1.0), Y)).sum() / w.sum())


def scaled_by_the_number_of_rows():
    x, y = pm.Data("x", X), pm.Data("outcome", Y)
    sigma = pm.HalfNormal("sigma") * pt.sqrt(x.shape[0])
    pm.Normal("y", x @ weights(), sigma, observed=y)


def loop_of_python():
    rho, levels = pm.Normal("rho"), [pm.Normal("first") + SERIES[:, 0]]
    for y in SERIES.T:
        levels.append(level(y, levels[-1], rho))
    pm.Potential("y", sum(-(each**2).sum() for each in levels))


@pytest.mark.parametrize(
    "definition", [softmax_in_rows, weighted_mean, scaled_by_the_number_of_rows, loop_of_python]
)
def test_what_to_write_is_divided(definition):
    with models.equal_on_ranks(models.make(definition)) as ours:
        assert not ours.left


def test_what_is_computed_from_all_rows_changes_with_them():
    def definition():
        x, y, w = pm.Data("x", X), pm.Data("outcome", Y), pm.Data("w", np.abs(X[:, 0]))
        logp = pm.logp(pm.Normal.dist(x @ weights() / x.shape[0], 1.0), y)
        pm.Potential("y", (w * logp).sum() / w.sum())

    plain, model = (models.make(definition) for _ in range(2))
    points = models.points(model, 2)
    with parallel.likelihood(model, ranks=2):
        for x in (X, X[:31], np.vstack([X, X])):
            for each in (plain, model):
                pm.set_data({"x": x, "outcome": x[:, 1], "w": x[:, 2] ** 2}, model=each)
            expected = models.evaluate(plain, points)
            models.assert_equal(models.evaluate(model, points), expected)


def test_a_walk_is_refused_without_a_word_of_pytensor(capfd):
    model = models.make(models.random_walk)
    with pytest.raises(ValueError), parallel.likelihood(model, ranks=2):
        pass
    assert "BUG" not in capfd.readouterr().err


def test_other_models_in_a_block():
    model = models.make(models.logistic)
    with parallel.likelihood(model, ranks=2):
        with pm.Model() as other:
            pm.Normal("z")
            with pm.Model() as part:
                pm.Normal("u")
        assert pm.modelcontext(None) is model
    assert (other.parent, part.parent) == (None, other)
    assert "z" not in model.named_vars
    with model, parallel.likelihood(ranks=2), pm.Model() as part:
        pass
    assert part.parent is model  # as without the block
    with pytest.raises(TypeError):
        pm.modelcontext(None)


def test_a_block_is_a_decorator_too_and_says_so_if_it_is_neither(recwarn):
    model = models.make(models.logistic)

    @parallel.likelihood(model, ranks=2)
    def named():
        return pm.modelcontext(None)

    with pytest.raises(TypeError):
        pm.modelcontext(None)
    assert named() is named() is model
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(parallel.likelihood(model, ranks=2)).ranks == 2
    del named
    assert not [each for each in recwarn if "does nothing" in str(each.message)]
    with pytest.warns(PortingWarning, match="does nothing: write `with parallel") as warned:
        parallel.likelihood(model)
    assert warned[0].filename == __file__


def test_variables_that_are_added():
    model = models.make(models.logistic)
    with parallel.likelihood(model, ranks=2):
        pm.Normal("late")
        with pytest.raises(ValueError, match=r"changed in its .* block: late"):
            model.logp()


def test_a_sampler_that_outlives_its_block():
    nutpie = pytest.importorskip("nutpie")
    model = models.make(models.logistic)
    given = {"tune": 20, "chains": 1, "blocking": False, "progress_bar": False}
    told = pytest.raises(SessionError, match=r"sampler was still running .* wait\(\)")
    with told, parallel.likelihood(model, ranks=2):
        compiled = nutpie.compile_pymc_model(model)
        sampler = nutpie.sample(compiled, draws=10**7, **given)
        while not parallel.evaluator.all_evaluators()[0].callers:
            pass
    sampler.abort()
    with parallel.likelihood(model, ranks=2):
        sampler = nutpie.sample(nutpie.compile_pymc_model(model), draws=20, **given)
        assert sampler.wait() is not None


FORKED = """
import multiprocessing
from support import pymc_models as models
from synkhronos.extensions import pymc as parallel


def block():
    model, point = models.logistic_at_a_point()
    with parallel.likelihood(model, ranks=2):
        models.evaluate(model, [point])


if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=block)
    process.start()
    process.join()
    print("ended with", process.exitcode)
"""


def test_a_block_in_a_process_that_was_forked(script):
    """There Python has the number of another main thread, which is no sampler."""
    assert "ended with 0" in script(FORKED, timeout=300).stdout
