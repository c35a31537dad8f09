"""Log-probabilities and gradients on ranks, compared with those of the plain models."""

import os

import numpy as np
import pytest

pm = pytest.importorskip("pymc", minversion="6")

from support import pymc_models as models  # noqa: E402

from synkhronos.errors import SessionError  # noqa: E402
from synkhronos.extensions import pymc as parallel  # noqa: E402
from synkhronos.extensions.pymc import checks, runs  # noqa: E402

pytestmark = models.MARKS


COMPILED = {"logistic", "parameter_for_each_row"}  # with numba, too, in make test-numba


@pytest.mark.every
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[pytest.mark.numba] if each in COMPILED else [])
        for each in models.DIVIDED
    ],
)
def test_equal_to_the_plain_model(name):
    model = models.make(models.DIVIDED[name])
    with models.equal_on_ranks(model) as ours:
        assert set(ours.left) <= {"alone"} and len(ours.worker_pids) == 1
        divided = {each.replace("_observed", "") for each in ours.divided}
        assert divided >= ({"y", "censored"} if name == "weighted" else {"y"})
    assert "logp" not in vars(model)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "name", ["hierarchical", "panel", "parameter_for_each_row", "discrete_parameter"]
)
def test_rows_in_blocks(name, ranks, monkeypatch):
    monkeypatch.setattr(runs, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(runs, "_BYTES_PER_RESULT", 1)
    model = models.make(models.DIVIDED[name])
    with models.equal_on_ranks(model, ranks) as ours:
        [of_rank, *_] = ours._evaluator._runs["gradients"]
        assert len(of_rank) > len(ours.divided)
        model.compile_logp()(model.initial_point())
        rows = [of[0][0]._arguments[-1] for of in ours._evaluator._runs.values()]
        assert len(rows) == 2 and rows[0] is rows[1]  # they are kept once for all kinds


def test_observed_variables_beside_a_potential():
    """PyMC scales the likelihood without potentials, in SMC and variational inference."""
    with pm.Model() as model:
        mean = pm.math.dot(models.X, pm.Normal("weights", shape=3))
        pm.Normal("y", mean, observed=models.Y)
        pm.Potential("weighted", models.Y**2 * pm.logp(pm.Normal.dist(mean), models.Y))
    [point] = models.points(model, 1)
    expected = [model.compile_fn(each)(point) for each in (model.datalogp, model.observedlogp)]
    with parallel.likelihood(model, ranks=2) as ours:
        assert ours.divided == ["y", "weighted"]
        found = [model.compile_fn(each)(point) for each in (model.datalogp, model.observedlogp)]
        assert len(ours.worker_pids) == 1
        models.evaluate(model, [point])
        assert len(ours.worker_pids) == 2
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_numbers_of_ranks(ranks):
    with models.equal_on_ranks(models.make(models.two_lengths), ranks) as ours:
        assert ours.ranks == ranks
        assert ours.divided == ["y", "counts"]
        assert len(ours.worker_pids) == ranks - 1


def test_more_ranks_than_rows():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu"), 1.0, observed=[1.0, 2.0, 4.0])
    with models.equal_on_ranks(model, 4):
        pass


def test_a_value_that_is_rounded_where_python_runs_the_operations():
    """Its function is compiled, then: PyTensor's `Reciprocal` rounds Python numbers to 32 bits."""
    asked = []

    def compare(*values):
        plains = [lambda value=value: asked.append(value) or value for value in values]
        checks._compare_value(-100.0, plains, 1e-8)

    compare(-100.0, -100.0)
    assert asked == [-100.0]
    compare(-100.0000001, -100.0)
    with pytest.raises(checks.NotByRows, match=r"it is -100\.0 where PyMC computes -99\.9"):
        compare(-100.0000001, -99.9)


def test_a_likelihood_that_ranks_do_not_make_faster(caplog, monkeypatch):
    model = models.make(models.logistic)
    for ranks, pays, told in [(1, 60.0, False), (2, 0.0, False), (2, 60.0, True)]:
        caplog.clear()
        monkeypatch.setattr(parallel, "_PAYS", pays)  # in seconds
        with parallel.likelihood(model, ranks=ranks):
            assert ("milliseconds: ranks pay from about 60000 on" in caplog.text) == told


@pytest.mark.parametrize(
    "times, ranks, told",  # plain, alone, on ranks, and with the way to them
    [
        (
            (10e-6, 10e-6, 20e-6, 28e-6),
            0,
            "0.010 milliseconds in plain PyMC, 0.034 in this",
        ),
        ((90e-6, 40e-6, 50e-6, 52e-6), 1, "this process computes them alone. With ranks=2"),
        ((90e-6, 65e-6, 50e-6, 52e-6), 2, None),
        ((90e-6, 80e-6, 40e-6, 42e-6), 0, "plain PyMC computes them"),  # others may use the cores
        ((9e-3, 6e-3, 90e-3, 90e-3), 2, None),  # others use them now
        ((9e-3, 9.5e-3, 5e-3, 5e-3), 0, "plain PyMC computes them"),  # others may use them later
        (None, None, None),  # measured
    ],
)
def test_a_block_takes_what_is_fastest(times, ranks, told, caplog, monkeypatch):
    monkeypatch.setattr(parallel, "resolve", lambda *_: ["cpu"] * 2)
    if times:
        monkeypatch.setattr(parallel, "seconds_in_turns", lambda calls: dict(zip(calls, times)))
    model = models.make(models.logistic)
    points = models.points(model)
    expected = models.evaluate(model, points)
    with parallel.likelihood(model) as ours:
        ranks = len(ours.divided) and ours.ranks if ranks is None else ranks
        assert (ours.ranks, ours.divided) == (max(ranks, 1), ["y"] if ranks else [])
        assert ours.worker_pids == [] and ("logp" in vars(model)) == bool(ranks)
        models.assert_equal(models.evaluate(model, points), expected)
        assert len(ours.worker_pids) == max(ranks, 1) - 1
    warnings = [each.getMessage() for each in caplog.records if "plain" in each.getMessage()]
    assert len(warnings) == (ranks < 2)
    assert told is None or told in warnings[0]


@pytest.mark.parametrize("slow", [0.0, 600.0])
def test_what_takes_long_is_told_once(slow, caplog, monkeypatch):
    monkeypatch.setattr("synkhronos._machine.log._SLOW", slow)
    with parallel.likelihood(models.make(models.one_and_one_left), ranks=2):
        pass
    told = [
        each for each in ("y", "alone") if f"compiling the likelihood of {each!r}" in caplog.text
    ]
    assert told == ([] if slow else ["y", "alone"])
    assert caplog.text.count("compiling") == len(told)


def test_what_plain_pymc_takes_is_measured():
    model = models.make(models.logistic)
    [point] = models.points(model, 1)
    with model:
        logp, *_ = checks.plain_call(model, [model["y"]], point)()
    expected = model.compile_fn(model.observedlogp)(point)
    np.testing.assert_allclose(logp, expected, rtol=1e-12)


@pytest.mark.parametrize("begin, dtype", [(0, "uint8"), (-models.GROUPS, "int64")])
def test_numbers_of_groups_are_small_where_none_is_negative(begin, dtype):
    with pm.Model() as model:
        a = pm.Normal("a", shape=models.GROUPS)
        pm.Normal("y", a[models.GROUP + begin], 1.0, observed=models.Y)
    with models.equal_on_ranks(model) as ours:
        [term] = ours._evaluator.terms
        assert sorted(each.variable.dtype for each in term.rows) == sorted([dtype, "float64"])


def test_only_the_likelihood_of_rows_is_divided(caplog):
    model = models.make(models.one_and_one_left)
    with parallel.likelihood(model, ranks=2) as ours:
        assert ours.divided == ["y"]
        assert list(ours.left) == ["alone"]
    assert "the likelihood of 'alone' stays in this process" in caplog.text


@pytest.mark.every
@pytest.mark.parametrize("name", models.REFUSED)
def test_refused(name):
    model = models.make(models.REFUSED[name])
    message = r"No likelihood of this model can be divided.*y"
    with pytest.raises(ValueError, match=message), parallel.likelihood(model, ranks=2):
        pass
    assert "logp" not in vars(model)


def test_reasons():
    reasons = {
        models.single_number: "it has no rows",
        models.all_missing: "y_observed: it has 0 rows",
        models.minibatch: "minibatches",
        models.autoregression: r"depends on the one before.*y\[:-1\]",
        models.random_walk: r"depends on the one before.*y\[:-1\]",
        models.missing_and_censored: r"missing values together.*observed=y\[seen\]",
        models.as_many_groups_as_rows: "selected from .* 'a': select rows of data",
        models.counts_in_bins: "computes sign of a sum over rows",
        models.with_the_number_of_rows: "another shape, computed from 'weights'.* write -1",
        lambda: models.of_its_own_operation(models.Squares): "Squares may .* with row_wise",
    }
    for definition, reason in reasons.items():
        model = models.make(definition)
        with pytest.raises(ValueError, match=reason), parallel.likelihood(model, ranks=2):
            pass


@pytest.mark.parametrize("definition", [models.lagged, models.seen_and_censored])
def test_what_to_write_instead_is_divided(definition):
    with models.equal_on_ranks(models.make(definition)) as ours:
        assert not ours.left


def test_without_gradients():
    model = models.make(models.logistic)
    [point, other] = models.points(model)
    plain = model.compile_logp()
    with parallel.likelihood(model, ranks=2):
        logp, both = model.compile_logp(), model.logp_dlogp_function(ravel_inputs=True)
        nodes = [node.op for node in logp.f.maker.fgraph.toposort()]
        [op] = [each for each in nodes if hasattr(each, "evaluator")]
        assert op.kind == "value"
        for each in (point, other):
            np.testing.assert_allclose(logp(each), plain(each), rtol=1e-12)
        assert both is not None


def test_parts_of_the_log_probability():
    model = models.make(models.with_master_terms)
    [point] = models.points(model, 1)

    def parts():
        graphs = [model.varlogp, model.datalogp, model.observedlogp, model.potentiallogp]
        graphs += [model.logp(jacobian=False), model.logp(vars=[model["y"]])]
        graphs += [each.sum() for each in model.logp(sum=False)]
        return np.array(model.compile_fn(graphs, inputs=model.value_vars)(point))

    expected = parts()
    with parallel.likelihood(model, ranks=2):
        np.testing.assert_allclose(parts(), expected, rtol=1e-12)


def plain_model(x):
    model = models.make(models.student)
    pm.set_data({"x": x, "y_data": x[:, 0]}, model=model)
    return model


def test_data_of_other_lengths():
    model = models.make(models.student)
    points = models.points(model)
    with parallel.likelihood(model, ranks=2):
        first = models.evaluate(model, points)
        function = model.compile_logp()
        for rows in (31, 200):
            x = np.random.default_rng(rows).normal(size=(rows, 3))
            pm.set_data({"x": x, "y_data": x[:, 0]}, model=model)
            plain = plain_model(x)
            models.assert_equal(models.evaluate(model, points), models.evaluate(plain, points))
            value = plain.compile_logp()(points[0])
            np.testing.assert_allclose(function(points[0]), value, rtol=1e-12)
        pm.set_data({"x": models.X, "y_data": models.Y}, model=model)
        models.assert_equal(models.evaluate(model, points), first)


def test_data_of_unequal_lengths():
    model = models.make(models.student)
    [point] = models.points(model, 1)
    with parallel.likelihood(model, ranks=2):
        function = model.compile_logp()
        function(point)
        pm.set_data({"x": np.zeros((7, 3))}, model=model)
        with pytest.raises(ValueError, match="The data of 'y' have 7 and 90 rows"):
            function(point)


def test_a_parameter_for_each_row_has_the_length_of_the_data():
    with pm.Model() as model:
        x, y = pm.Data("x", models.X[:, 0]), pm.Data("y_data", models.Y)
        pm.Normal("y", pm.Normal("a", shape=models.ROWS) + x, 1.0, observed=y)
    [point] = models.points(model, 1)
    with models.equal_on_ranks(model, 3) as ours:
        assert [term.axes for term in ours._evaluator.terms] == [(0,)]
        pm.set_data({"x": np.zeros(7), "y_data": np.zeros(7)}, model=model)
        with pytest.raises(ValueError, match="The data of 'y' have 7 rows, but 'a' has 90"):
            models.evaluate(model, [point])


def test_an_operation_that_is_not_row_wise_is_found_by_its_numbers():
    @parallel.row_wise
    class Centred(models.Squares):
        def perform(self, node, inputs, outputs):
            value, mu = inputs
            super().perform(node, [value, mu - mu.mean()], outputs)

    model = models.make(lambda: models.of_its_own_operation(Centred))
    reason = "parts don't add up to the whole"
    with pytest.raises(ValueError, match=reason), parallel.likelihood(model, ranks=2):
        pass


def test_one_operation_is_said_to_be_row_wise():
    squares, others = models.Squares(), models.Squares()
    assert parallel.row_wise(squares) is squares
    with models.equal_on_ranks(models.make(lambda: models.of_its_own_operation(lambda: squares))):
        pass
    model = models.make(lambda: models.of_its_own_operation(lambda: others))
    with pytest.raises(ValueError, match="with row_wise"), parallel.likelihood(model, ranks=2):
        pass


def test_functions_of_the_block_refuse_after_it():
    model, point = models.logistic_at_a_point()
    with parallel.likelihood(model, ranks=2):
        function = model.compile_logp()
        function(point)
    with pytest.raises(SessionError, match="after the end of the block"):
        function(point)


OF_32_BITS = """
import numpy as np
from support import pymc_models as models
from synkhronos.extensions import pymc as parallel

model = models.make(models.logistic)  # the outcomes are integers: the sum has 64 bits
at = models.points(model)
at = [{name: value.astype("float32") for name, value in each.items()} for each in at]
expected = models.evaluate(model, at)
with parallel.likelihood(model, ranks=2) as ours:
    models.assert_equal(models.evaluate(model, at), expected, rtol=1e-5)
    print(ours.divided)
for definition in (models.logistic, models.hierarchical):  # data of 64 bits have such a sum
    model = models.make(definition)
    dtype = model.logp().dtype
    with parallel.likelihood(model, ranks=2) as ours:
        print(model.logp().dtype == dtype)
"""


def test_models_of_32_bits(script):
    flags = f"{os.environ.get('PYTENSOR_FLAGS', '')},floatX=float32".strip(",")
    done = script(OF_32_BITS, env={"PYTENSOR_FLAGS": flags})
    assert done.stdout == "['y']\nTrue\nTrue\n"


def test_arguments():
    model = models.make(models.logistic)
    for arguments, error, message in (
        ({"ranks": 0}, ValueError, "ranks"),
        ({"ranks": "2"}, TypeError, "ranks"),
        ({"devices": ["opencl0:0"]}, ValueError, "such as 'cuda0' or 'jax:cpu'"),
        ({"devices": ["cuda0", "cpu"]}, ValueError, "all 'cpu', or all of GPUs"),
        ({"devices": "cuda0"}, TypeError, "devices must be a list"),
        ({"devices": ["cpu"], "ranks": 2}, ValueError, "Give one"),
    ):
        with pytest.raises(error, match=message), parallel.likelihood(model, **arguments):
            pass
    with parallel.likelihood(model, devices=["cpu"] * 2) as ours:
        assert ours.ranks == 2
        with pytest.raises(ValueError, match="in a likelihood"), parallel.likelihood(model):
            pass
    with pytest.raises(TypeError, match=r"op must be an operation of PyTensor, or .* got 3"):
        parallel.row_wise(3)
    with pm.Model() as empty:
        pm.Normal("x")
    with pytest.raises(ValueError, match="no observed"), parallel.likelihood(empty):
        pass


def test_frozen_models_are_refused():
    from pymc.model.transform import optimization

    if not hasattr(optimization, "freeze_model"):
        pytest.skip("this release of PyMC freezes dims and data only")
    model = optimization.freeze_model(models.make(models.logistic))
    with pytest.raises(TypeError, match="before it is frozen"), parallel.likelihood(model):
        pass
