"""Likelihoods in which rows come together, if only for some parameters, stay in the master."""

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")
pt = pytest.importorskip("pytensor.tensor")

from support import pymc_models as models  # noqa: E402

from synkhronos.extensions import pymc as parallel  # noqa: E402
from synkhronos.extensions.pymc import terms  # noqa: E402

pytestmark = models.MARKS

N = 40
draw = np.random.default_rng(3)
X, Y = draw.normal(size=N), draw.normal(size=N)
PAIR = np.repeat(np.arange(N // 2), 2)


def slope():
    return pm.Normal("w") * X


def normal(mean, observed=Y):
    pm.Normal("y", mean, 1.0, observed=observed)


def centred_for_some_parameters():
    mean = slope()
    normal(pt.switch(pm.Bernoulli("z", 0.3), mean - mean.mean(), mean))


def rolled_for_some_parameters():
    normal(pt.roll(slope(), pm.Bernoulli("lag", 0.3)))


def largest_far_away():
    mean = slope()
    normal(mean + pt.maximum(mean.max() - 30, 0))


def sorted_rows():
    normal(pt.sort(pm.Normal("w") * np.sort(X)))


def cumulative_sum_along_both_axes():
    rows = pm.Normal("w") * draw.normal(size=(2, N))
    normal(pt.cumsum(pt.cumsum(rows, axis=0), axis=1), draw.normal(size=(2, N)))


def centred_zeros():
    mean = pm.Normal("w") * pm.Data("x", np.zeros(N))
    normal(mean - mean.mean())


def pairs_side_by_side():
    normal((slope().reshape((-1, 2)) - pm.Normal("m", shape=2)).ravel())


def divided_by_the_number_of_rows():
    def logp(value, mean):
        return -((value - mean) ** 2) / value.shape[0]

    pm.CustomDist("y", slope(), logp=logp, observed=Y)


def summand_of_no_row():
    def logp(value, mean):
        return pt.sum(-((value - mean) ** 2)) - mean[0] ** 2

    pm.CustomDist("y", slope(), logp=logp, observed=Y)


MIXED = [
    centred_for_some_parameters,
    rolled_for_some_parameters,
    largest_far_away,
    sorted_rows,
    cumulative_sum_along_both_axes,
    centred_zeros,
    pairs_side_by_side,
    divided_by_the_number_of_rows,
    summand_of_no_row,
]


@pytest.mark.parametrize("definition", MIXED, ids=lambda each: each.__name__)
def test_refused_by_the_graph(definition):
    model = models.make(definition)
    with pytest.raises(terms.NotByRows):
        terms.cut(model, model.observed_RVs[0])


def picked_rows():
    normal(slope()[draw.permutation(N)])


def ordered():
    cut_points = np.array([-1.0, 1.0])
    pm.OrderedLogistic("y", eta=slope(), cutpoints=cut_points, observed=draw.integers(0, 3, N))


def softmax():
    scores = X[:, None] * pm.Normal("w", shape=3)
    pm.Categorical("y", logit_p=scores, observed=draw.integers(0, 3, N))


def truncated():
    pm.Truncated("y", pm.Normal.dist(slope(), 1.0), lower=-5, upper=5, observed=Y)


def mixture_of_regressions():
    parts = [pm.Normal.dist(slope(), 1.0), pm.StudentT.dist(nu=3, mu=pm.Normal("b") * X, sigma=2.0)]
    pm.Mixture("y", pm.Dirichlet("p", np.ones(2)), parts, observed=Y)


def independent_vectors():
    pm.MvNormal("y", pm.Normal("mu", shape=3), np.eye(3), observed=draw.normal(size=(N, 3)))


def multinomial():
    counts = draw.multinomial(5, [0.2, 0.3, 0.5], size=N)
    pm.Multinomial("y", 5, pm.Dirichlet("p", np.ones(3)), observed=counts)


def mean_of_data():
    normal(pm.Normal("w") * pm.Data("x", X).mean())


def numbers_of_rows():
    x = pm.Data("x", X)
    normal(pm.Normal("w") * x + pt.arange(x.shape[0]))


ROW_BY_ROW = [
    picked_rows,
    ordered,
    softmax,
    truncated,
    mixture_of_regressions,
    independent_vectors,
    multinomial,
    mean_of_data,
    numbers_of_rows,
]


@pytest.mark.parametrize("definition", ROW_BY_ROW, ids=lambda each: each.__name__)
def test_divided(definition):
    with models.equal_on_ranks(models.make(definition), 3) as divided:
        assert divided.divided == ["y"]


def test_functions_of_the_data_alone_are_data():
    """The log of a factorial takes longer than all else of a Poisson regression."""
    model = models.make(models.poisson)
    [y] = model.observed_RVs
    term = terms.cut(model, y)
    [factorials] = [
        rows.data for rows in term.rows if rows.variable.dtype == "float64" and rows.data.ndim == 1
        and np.allclose(terms.values_of([rows.data])[0], models.LOG_FACTORIALS)
    ]  # fmt: skip
    assert factorials.owner is not None


def test_copies_of_a_model_are_plain():
    import cloudpickle

    model = models.make(models.logistic)
    points = models.points(model)
    expected = models.evaluate(model, points)
    with parallel.likelihood(model, ranks=2):
        copy = cloudpickle.loads(cloudpickle.dumps(model))
    models.assert_equal(models.evaluate(copy, points), expected)
    with parallel.likelihood(copy, ranks=2):
        models.assert_equal(models.evaluate(copy, points), expected)


def test_matrices_in_products_alone_are_kept_by_columns():
    """A product with a vector takes less time so; an operation on elements would take more."""

    def is_factor(define):
        with pm.Model() as model:
            define()
        term = terms.cut(model, model.observed_RVs[0])
        return {each.variable.ndim: each.is_factor for each in term.rows}

    matrix = draw.normal(size=(N, 3))

    def weights():
        return pm.Normal("weights", shape=3)

    assert is_factor(lambda: normal(pm.math.dot(matrix, weights()))) == {2: True, 1: False}
    assert is_factor(lambda: normal(pm.Data("x", matrix) @ weights())) == {2: True, 1: False}
    assert is_factor(lambda: normal((matrix * weights()).sum(axis=1))) == {2: False, 1: False}
    both = is_factor(lambda: normal(pm.math.dot(matrix, weights()) + pt.tanh(matrix * 1)[:, 0]))
    assert both[1] is False
