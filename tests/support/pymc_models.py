"""PyMC models with little data, by name; and evaluations of their log-probability."""

import contextlib

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.blocking import DictToArrayBijection
from pytensor.graph.op import Op

from synkhronos.extensions import pymc as parallel

MARKS = [  # of a file of tests
    pytest.mark.filterwarnings("default"),  # PyMC and its libraries warn of many things
    pytest.mark.usefixtures("no_session"),
]
ROWS, GROUPS = 90, 5

random = np.random.default_rng(0)
X = random.normal(size=(ROWS, 3))
GROUP = random.integers(0, GROUPS, ROWS)
Y = X @ [1.0, -1.0, 0.5] + random.normal(size=ROWS)
HITS = random.integers(0, 2, ROWS)
COUNTS = random.poisson(2.0, ROWS)
LOG_FACTORIALS = np.array([np.log(np.arange(1, each + 1)).sum() for each in COUNTS])
KINDS = random.integers(0, 4, ROWS)
CENSORED = random.random(ROWS) < 0.3


def logistic():
    weights, bias = pm.Normal("weights", shape=3), pm.Normal("bias")
    pm.Bernoulli("y", logit_p=bias + pm.math.dot(X, weights), observed=HITS)


def hierarchical():
    mu, sigma = pm.Normal("mu"), pm.HalfNormal("sigma")
    a = pm.Normal("a", mu, sigma, shape=GROUPS)
    pm.Normal("y", a[GROUP] + X[:, 0], pm.HalfNormal("noise"), observed=Y)


def not_centered():
    z = pm.Normal("z", shape=GROUPS)
    a = pm.Deterministic("a", pm.Normal("mu") + z * pm.HalfNormal("sigma"))
    pm.StudentT("y", nu=4, mu=a[GROUP], sigma=1.0, observed=Y)


def with_coordinates():
    model = pm.modelcontext(None)
    model.add_coords({"row": range(ROWS), "group": range(GROUPS)})
    group = pm.Data("group_of_row", GROUP, dims="row")
    a = pm.Normal("a", dims="group")
    pm.Normal("y", a[group], pm.HalfNormal("noise"), observed=Y, dims="row")


def student():
    x, y = pm.Data("x", X), pm.Data("y_data", Y)
    mu = x @ pm.Normal("weights", shape=3)
    nu, sigma = pm.Gamma("nu", 2, 0.1), pm.HalfNormal("sigma")
    pm.StudentT("y", nu=nu, mu=mu, sigma=sigma, observed=y, shape=x.shape[0])


def row_number():
    # The number of all rows is part of each row's likelihood.
    x = pm.Data("x", X[:, 0])
    pm.Normal("y", pm.Normal("weight") * x / x.shape[0], 1.0, observed=Y)


def poisson():
    # Data that are standardized in the graph are computed from all rows, once.
    x = (X - X.mean(axis=0)) / X.std(axis=0)
    pm.Poisson("y", pm.math.exp(pm.math.dot(x, pm.Normal("weights", shape=3))), observed=COUNTS)


def asymmetric_laplace():
    kappa, mu = pm.HalfNormal("kappa"), pm.Normal("mu")
    pm.AsymmetricLaplace("y", b=1.0, kappa=kappa, mu=mu, observed=Y)


def standardized_in_the_graph():
    x, y = pm.Data("x", X), pm.Data("y_data", Y)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    pm.Normal("y", x @ pm.Normal("weights", shape=3), 1.0, observed=y)


def transposed():
    pm.Normal("y", pm.math.dot(pm.Normal("weights", shape=3), X.T.copy()), 1.0, observed=Y)


def negative_binomial():
    mu = pm.math.exp(X[:, 0] * pm.Normal("weight"))
    pm.NegativeBinomial("y", mu=mu, alpha=pm.HalfNormal("alpha"), observed=COUNTS)


def zero_inflated():
    mu = pm.math.exp(pm.math.dot(X, pm.Normal("weights", shape=3)))
    pm.ZeroInflatedPoisson("y", pm.Beta("psi", 1, 1), mu, observed=COUNTS)


def mixture():
    pm.NormalMixture("y", pm.Dirichlet("w", np.ones(2)), pm.Normal("mu", shape=2), observed=Y)


def categorical():
    logits = pm.math.dot(X, pm.Normal("weights", shape=(3, 4)))
    pm.Categorical("y", logit_p=logits, observed=KINDS)


def multivariate():
    chol, _, _ = pm.LKJCholeskyCov("chol", n=3, eta=2, sd_dist=pm.HalfNormal.dist(shape=3))
    pm.MvNormal("y", pm.Normal("mu", shape=3), chol=chol, observed=X)


def censored():
    normal = pm.Normal.dist(pm.Normal("mu") + X[:, 0], 1.0)
    pm.Censored("y", normal, lower=-1.0, upper=1.0, observed=np.clip(Y, -1, 1))


def custom():
    def logp(value, mu):
        return -((value - mu) ** 2)

    pm.CustomDist("y", pm.Normal("bias") + X[:, 0], logp=logp, observed=Y)


class Squares(Op):
    """-(value - mu) ** 2, which PyTensor can't look into."""

    itypes, otypes = [pt.dvector, pt.dvector], [pt.dvector]

    def perform(self, node, inputs, outputs):
        value, mu = inputs
        outputs[0][0] = -((value - mu) ** 2)

    def pullback(self, inputs, outputs, gradients):
        value, mu = inputs
        return [gradients[0] * 2 * (mu - value), gradients[0] * 2 * (value - mu)]


@parallel.row_wise
class RowWiseSquares(Squares):
    """The same, said to compute each row by itself."""


def of_its_own_operation(squares=RowWiseSquares):
    def logp(value, mu):
        return squares()(value, mu)

    pm.CustomDist("y", pm.Normal("bias") + X[:, 0], logp=logp, observed=Y)


def with_master_terms():
    weights = pm.Normal("weights", shape=3)
    pm.Deterministic("squares", weights**2)
    pm.Potential("more", -ROWS * weights[0] ** 2)
    pm.Normal("y", pm.math.dot(X, weights), pm.HalfNormal("sigma"), observed=Y)


def two_lengths():
    mu, sigma = pm.Normal("mu"), pm.HalfNormal("sigma")
    pm.Normal("y", mu, sigma, observed=Y)
    pm.Poisson("counts", pm.math.exp(mu) * sigma, observed=COUNTS[:33])


def discrete_parameter():
    switch = pm.DiscreteUniform("switch", 0, ROWS - 1)
    early, late = pm.Exponential("early", 1), pm.Exponential("late", 1)
    rate = pm.math.switch(switch >= np.arange(ROWS), early, late)
    pm.Poisson("y", rate, observed=COUNTS)


def truncated():
    mu, sigma = X[:, 0] * pm.Normal("mu"), pm.HalfNormal("sigma")
    pm.TruncatedNormal("y", mu, sigma, lower=-5.0, observed=Y)
    pm.Truncated("above", pm.Normal.dist(mu, sigma), upper=5.0, observed=Y)


def hurdle():
    pm.HurdlePoisson(
        "y", pm.Beta("psi", 1, 1), pm.math.exp(X[:, 0] * pm.Normal("b")), observed=COUNTS
    )


def one_probability():
    pm.Categorical("y", p=pm.Dirichlet("p", np.ones(4)), observed=KINDS)


def missing():
    a = pm.Normal("a", shape=GROUPS)
    y = np.where(CENSORED, np.nan, Y)
    pm.Normal("y", X @ pm.Normal("weights", shape=3) + a[GROUP], 1.0, observed=y)


def missing_in_a_matrix():
    y = np.where(np.arange(3) == GROUP[:, None], np.nan, X)
    pm.Normal("y", X @ pm.Normal("weights", shape=(3, 3)), 1.0, observed=y)


def imputed():
    x = pm.Normal("x", pm.Normal("mean"), 1.0, observed=np.where(CENSORED, np.nan, X[:, 0]))
    pm.Normal("y", pm.Normal("weight") * x, 1.0, observed=Y)


def survival():
    eta, chosen = X @ pm.Normal("weights", shape=3), pm.Data("chosen", np.flatnonzero(CENSORED))
    pm.Gumbel("y", eta[~CENSORED], pm.HalfNormal("beta"), observed=Y[~CENSORED])
    pm.Bernoulli("alive", logit_p=eta[chosen], observed=HITS[CENSORED])
    pm.Normal("steps", eta[1:] - eta[:-1], 1.0, observed=np.diff(Y))


def parameter_for_each_row():
    scale = pm.HalfNormal("scale")
    mu = pm.Normal("a", shape=ROWS) * scale + pm.Normal("steps", shape=ROWS).cumsum()
    pm.Normal("y", mu + X[:, 0], 1.0, observed=Y)


def weighted():
    dist = pm.Normal.dist(X @ pm.Normal("weights", shape=3), pm.HalfNormal("sigma"))
    logp = pm.logp(dist, Y)
    pm.Potential("y", Y**2 * logp)
    pm.Potential("censored", pm.math.dot(CENSORED * 1.0, logp))


def item_response():
    ability, difficulty = pm.Normal("ability", shape=ROWS), pm.Normal("difficulty", shape=3)
    pm.Bernoulli("y", logit_p=ability[:, None] - difficulty, observed=X > 0)


def panel():
    """Rows along the last axis, which is the longest one."""
    a, noise = pm.Normal("a", shape=3), pm.HalfNormal("noise", shape=(3, ROWS))
    pm.Normal("y", a[:, None] + pm.Normal("b") * Y, noise, observed=X.T.copy())


def one_and_one_left():
    mu = pm.Normal("mu")
    pm.Normal("y", mu, 1.0, observed=Y)
    pm.Normal("alone", mu, 1.0, observed=0.5)


DIVIDED = {
    each.__name__: each
    for each in (
        asymmetric_laplace,
        row_number,
        logistic,
        hierarchical,
        not_centered,
        with_coordinates,
        student,
        poisson,
        standardized_in_the_graph,
        transposed,
        negative_binomial,
        zero_inflated,
        mixture,
        categorical,
        multivariate,
        censored,
        custom,
        of_its_own_operation,
        with_master_terms,
        two_lengths,
        truncated,
        hurdle,
        one_probability,
        missing,
        missing_in_a_matrix,
        imputed,
        survival,
        parameter_for_each_row,
        weighted,
        item_response,
        panel,
        discrete_parameter,
        one_and_one_left,
    )
}


def gaussian_process():
    process = pm.gp.Marginal(cov_func=pm.gp.cov.ExpQuad(1, pm.HalfNormal("length")))
    process.marginal_likelihood("y", X=X[:, :1], y=Y, sigma=pm.HalfNormal("noise"))


def autoregression():
    pm.AR("y", [pm.Normal("rho")], init_dist=pm.Normal.dist(), observed=Y)


def random_walk():
    pm.GaussianRandomWalk("y", sigma=pm.HalfNormal("sigma"), init_dist=pm.Normal.dist(), observed=Y)


def sum_of_rows():
    x = pm.Data("x", X[:, 0])
    mu = pm.Normal("weight") * x
    pm.Normal("y", mu - mu.mean(), 1.0, observed=Y)


def as_many_groups_as_rows():
    a = X[:, 0] * pm.Normal("a", shape=ROWS)
    pm.Normal("y", a[random.integers(0, ROWS, ROWS)], 1.0, observed=Y)


def minibatch():
    x, y = pm.Minibatch(X[:, 0], Y, batch_size=10)
    pm.Normal("y", pm.Normal("weight") * x, 1.0, observed=y, total_size=ROWS)


def counts_in_bins():
    below = pm.math.invlogit(pm.Normal("mu") + np.linspace(-1, 1, 9))
    p = pt.concatenate([below[:1], below[1:] - below[:-1], 1 - below[-1:]])
    pm.Multinomial("y", 50, p / p.sum(), observed=[5] * 10)


def with_the_number_of_rows():
    mu = pt.dot(X, pm.Normal("weights", shape=X.shape[1]))
    pm.Normal("y", mu.reshape((ROWS, 1)), observed=Y[:, None])


def lagged():
    pm.Normal("y", pm.Normal("rho") * Y[:-1], 1.0, observed=Y[1:])


def missing_and_censored():
    normal = pm.Normal.dist(pm.Normal("weights") * X[:, 0], 1.0)
    y = np.where(CENSORED, np.nan, np.clip(Y, -1, 1))
    pm.Censored("y", normal, lower=-1.0, upper=1.0, observed=y)


def seen_and_censored():
    normal = pm.Normal.dist((pm.Normal("weights") * X[:, 0])[~CENSORED], 1.0)
    pm.Censored("y", normal, lower=-1.0, upper=1.0, observed=np.clip(Y, -1, 1)[~CENSORED])


def all_missing():
    mu = pm.Normal("a", shape=GROUPS)[GROUP]
    pm.Normal("y", mu, observed=np.full(ROWS, np.nan))


def single_number():
    pm.Normal("y", pm.Normal("mu"), 1.0, observed=0.5)


REFUSED = {
    each.__name__: each
    for each in (
        gaussian_process,
        autoregression,
        random_walk,
        sum_of_rows,
        as_many_groups_as_rows,
        minibatch,
        single_number,
    )
}


def make(definition):
    """Return the model that a function defines."""
    with pm.Model(model=None) as model:  # of its own, also inside of another model's block
        definition()
    return model


def points(model, count=2):
    """Return points at which the log-probability of a model is finite."""
    start = model.initial_point(random_seed=1)
    draw = np.random.default_rng(2).normal
    return [
        {
            name: value + 0.1 * draw(size=value.shape) if value.dtype.kind == "f" else value
            for name, value in start.items()
        }
        for _ in range(count)
    ]


def logistic_at_a_point():
    """Return a logistic regression, and a point at which its log-probability is finite."""
    model = make(logistic)
    return model, points(model, 1)[0]


def evaluate(model, points):
    """Return the log-probability and its gradients at some points."""
    return evaluator(model)(points)


def evaluator(model):
    """Compile the log-probability and its gradients, and return what evaluates them at points."""
    function = model.logp_dlogp_function(ravel_inputs=True)
    names = [each.name for each in function._grad_vars]

    def evaluate_at(points):
        results = []
        for point in points:
            function.set_extra_values(point)
            given = DictToArrayBijection.map({name: point[name] for name in names})
            results.append([np.array(each) for each in function(given)])
        return results

    return evaluate_at


def assert_equal(results, expected, rtol=1e-10):
    """Check log-probabilities and gradients, relative to the largest gradient."""
    for (logp, gradients), (right, right_gradients) in zip(results, expected):
        np.testing.assert_allclose(logp, right, rtol=rtol)
        scale = np.abs(right_gradients).max()
        np.testing.assert_allclose(gradients / scale, right_gradients / scale, rtol=0, atol=rtol)


@contextlib.contextmanager
def equal_on_ranks(model, ranks=2):
    """Check that a model's likelihood on ranks is that of the plain model, inside of its block."""
    at = points(model)
    expected = evaluate(model, at)
    with parallel.likelihood(model, ranks=ranks) as ours:
        assert_equal(evaluate(model, at), expected)
        yield ours
