"""Graphs of narrow matrices as vectors, compared with the graphs as they are."""

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")

import pytensor  # noqa: E402
import pytensor.tensor as pt  # noqa: E402
from pytensor.compile.mode import Mode  # noqa: E402
from pytensor.tensor import basic, subtensor  # noqa: E402
from support import pymc_models as models  # noqa: E402

from synkhronos.extensions.pymc import terms  # noqa: E402
from synkhronos.extensions.pymc.runs import compiled  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # PyMC and its libraries warn of many things

APART = Mode(linker="py", optimizer="fast_run").including("synkhronos_vectorized")
APART = APART.excluding("composite_elemwise_fusion", "inplace")  # Python would run them by number
AS_IT_IS = APART.excluding("synkhronos_vectorized_columns")
TOGETHER = (
    basic.Join,
    basic.Split,
    subtensor.AdvancedSubtensor,
    subtensor.AdvancedIncSubtensor,
    subtensor.IncSubtensor,
)


def ordered():
    cuts = pm.Normal("cuts", 0, 2, shape=3, initval=[-1.0, 0.0, 1.0])
    weights = pm.Normal("weights", shape=3)
    eta = pm.math.dot(models.X, weights)
    pm.OrderedLogistic("y", eta=eta, cutpoints=cuts, observed=models.KINDS, compute_p=False)


def softmax():
    weights = pm.Normal("weights", shape=(3, 4))
    p = pm.math.softmax(pm.math.dot(models.X, weights), axis=1)
    pm.Categorical("y", p=p, observed=models.KINDS)


def of_listed_parts():
    mu = pm.Normal("mu", [-1.0, 1.0], shape=2)
    eta = pm.math.dot(models.X, pm.Normal("weights", shape=3))
    parts = [pm.Normal.dist(mu[0] + eta, 1.0), pm.StudentT.dist(4, mu=mu[1]), pm.Laplace.dist(0, 9)]
    pm.Mixture("y", w=pm.Dirichlet("w", np.ones(3)), comp_dists=parts, observed=models.Y)


@pytest.mark.parametrize(
    "model", [ordered, softmax, of_listed_parts, models.mixture, models.zero_inflated]
)
def test_likelihoods_and_gradients_are_the_same(model):
    made = models.make(model)
    term = terms.cut(made, made.observed_RVs[0])
    apart, as_it_is = (compiled(term, True, mode=mode) for mode in (APART, AS_IT_IS))
    found = pytensor.function(
        made.value_vars, made.replace_rvs_by_values(list(term.frontier)), on_unused_input="ignore"
    )
    data = terms.values_of([rows.data for rows in term.rows])
    rows = [each.arranged(array) for array, each in zip(data, term.rows)]
    results = []
    for point in models.points(made, 3):
        values = found(**point)
        [result], [expected] = apart(*values, *rows), as_it_is(*values, *rows)
        np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-11)
        results.append(result)
    assert np.isfinite(results[0]).all()
    left = [node for node in apart.maker.fgraph.apply_nodes if isinstance(node.op, TOGETHER)]
    narrow = [node for node in left if node.outputs[0].type.shape[-1:] != (None,)]
    if model is not softmax:  # its columns are multiplied with the data
        assert not [node for node in narrow if node.outputs[0].ndim == 2], narrow


def check(outputs, **given):
    """Compare outputs that are apart with those as they are; return the graph that is apart."""
    inputs = list(given)
    functions = [
        pytensor.function([variables[name] for name in inputs], outputs, mode=mode)
        for mode in (APART, AS_IT_IS)
    ]
    results = [function(*given.values()) for function in functions]
    for found, expected in zip(*results):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    return functions[0].maker.fgraph


variables = {
    "a": pt.vector("a", dtype="float64"),
    "b": pt.vector("b", dtype="float32"),
    "y": pt.vector("y", dtype="int64"),
    "w": pt.vector("w", shape=(3,), dtype="float64"),
    "one": pt.vector("one", shape=(1,), dtype="float64"),
    "wide": pt.matrix("wide", dtype="float64"),
    "scalar": pt.scalar("scalar", dtype="float64"),
}
random = np.random.default_rng(0)
A, B, W = random.normal(size=7), random.normal(size=7).astype("float32"), random.normal(size=3)
NUMBERS = np.array([0, 2, 1, 2, 0, -3, -1])


def table():
    """Return a matrix of three columns, of a row and a column."""
    return pt.exp(variables["a"][:, None] * variables["w"][None, :])


def test_all_reductions_and_what_needs_the_matrix():
    x = table()
    outputs = [x.sum(axis=1), x.max(axis=1), x.prod(axis=1), x.sum(), x.sum(axis=0), x.min()]
    outputs += [(x > 1).all(), (x > 1).any(axis=1), (x > 1).sum(axis=1), x, x.T, pt.dot(x.T, x)]
    check(outputs, a=A, w=W)


def test_joins_splits_sets_and_dtypes():
    a, b = variables["a"], variables["b"]
    x = pt.join(1, pt.ones((a.shape[0], 1)), pt.stack([b, b + 1], axis=1), a[:, None])
    first, second = pt.split(x, splits_size=[1, 3], axis=1)
    changed = pt.set_subtensor(x[:, 1:3], a[:, None])
    added = pt.inc_subtensor(x[:, ::2], x[:, :2])
    check([first, second.sum(axis=1), changed.sum(axis=1), added[:, -1], x[:, 1]], a=A, b=B)


def test_what_is_as_wide_or_as_long_as_it_turns_out():
    a, one, wide, scalar = (variables[name] for name in ("a", "one", "wide", "scalar"))
    x = table()
    n = a.shape[0]
    zeros = pt.zeros((n,))
    filled = pt.exp(pt.stack([zeros, a, zeros], axis=1) + variables["w"][None, :])
    outputs = [
        *(filled, pt.grad(filled.sum(), variables["w"]), (x + wide).sum(axis=1)),
        pt.set_subtensor(x[:, 1], one).sum(axis=0),
        pt.set_subtensor(pt.zeros((n, 3))[:, 1], one) + x,
        pt.inc_subtensor(x[pt.arange(n), pt.zeros_like(a, dtype="int64")], scalar),
        pt.inc_subtensor(pt.zeros((n, 3))[pt.arange(2), [0, 1]], [1.0, 2.0]) + x,
        *(x[pt.arange(2), [0, 1]], x[:, 1:1].sum(axis=0)),
    ]
    given = {"one": np.ones(1), "wide": np.ones((len(A), 3)), "scalar": np.array(2.0)}
    check(outputs, a=A, w=W, **given)


def test_selections_of_rows_are_choices():
    x, y = table(), variables["y"]
    rows = pt.arange(y.shape[0])
    picked = pt.log(x)[rows, y] + x[rows[:, None], y[:, None]][:, 0]
    outputs = [picked, pt.grad(picked.sum(), variables["w"])]
    graph = check(outputs, a=A, w=W, y=NUMBERS)
    assert not [each for each in graph.apply_nodes if isinstance(each.op, TOGETHER[2:4])]
    function = pytensor.function([*map(variables.get, "awy")], outputs, mode=APART)
    for wrong in (3, -4):
        with pytest.raises(AssertionError, match="out of bounds for 3 columns"):
            function(A, W, np.where(NUMBERS == 1, wrong, NUMBERS))
