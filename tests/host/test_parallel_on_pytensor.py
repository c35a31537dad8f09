"""`parallel` on PyTensor: how its functions are caught, and those that PyMC compiles."""

import concurrent.futures
import functools
import inspect

import numpy as np
import pytest
from support import host_library
from support.layouts import Layout

pytest.importorskip("pytensor", reason="Theano's suites have their own tests of parallel()")

import pytensor
import pytensor.tensor as pt
from pytensor import function as under_another_name

import synkhronos as synk
from synkhronos.porting import ParallelFunction

LAYOUTS = [Layout(2)]
RANDOM = np.random.RandomState(0)
X, Y, BETA = RANDOM.randn(9, 3), RANDOM.randn(9), RANDOM.randn(3)
partial = functools.partial(pytensor.function, name="f")
compile_in_python = functools.partial(pytensor.function, mode=host_library.MODE)


@pytest.fixture
def pm():
    return pytest.importorskip("pymc")


def test_functions_under_all_names_are_caught_and_others_are_not(ranks):
    x = pt.dvector("x")
    signature = inspect.signature(pytensor.function)
    with synk.parallel():
        made = [under_another_name([x], x.sum(), mode=host_library.MODE)]
        made += [partial([x], x.sum(), mode=host_library.MODE)]
        made += [pytensor.compile.function([x], x.sum(), mode=host_library.MODE)]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            made.append(pool.submit(compile_in_python, [x], x.sum()).result())
        assert x.sum().eval({x: [1, 2]}, mode=host_library.MODE) == 3
        assert inspect.signature(pytensor.function) == signature
    made.append(compile_in_python([x], x.sum()))
    kinds = [type(each) is ParallelFunction for each in made]
    assert kinds == [True, True, True, False, False]
    assert [float(each([1, 2, 3])) for each in made] == [6] * 5


def reason_of(name):
    """Return why a function is not divided."""
    return next(each.reason for each in synk.parallel_report().functions if each.name == name)


def test_the_report_names_the_line_of_the_script(ranks):
    x = pt.dvector("x")
    with synk.parallel():
        f = compile_in_python([x], x.sum())
    assert f.name.startswith(f"{__file__}:")


def test_a_fixed_length_is_not_divided(ranks):
    x = pt.tensor("x", shape=(9, 3))
    with synk.parallel():
        f = compile_in_python([x], x.sum(), name="fixed")
    assert type(f) is not ParallelFunction and f(X) == pytest.approx(X.sum())
    assert "has no input with rows" in reason_of("fixed")


def operations():
    """Return inputs with rows, and outputs that need rules of PyTensor's own operations."""
    x, stack, w = pt.dmatrix("x"), pt.dtensor3("stack"), pytensor.shared(X[:3], "w")
    y = pt.ivector("y")
    square = pt.specify_shape(x, (None, 3))
    matrices = stack @ stack.transpose(0, 2, 1) + pt.eye(3)
    loss = pt.logsumexp(x @ w, axis=1).sum() + pt.linalg.cholesky(matrices)[:, 0, 0].mean()
    outputs = [
        *(pt.join_dims(stack), pt.join_dims(stack, 1), pt.split_dims(x, (3, 1), axis=1)),
        *(pt.special.softmax(x, axis=-1), square.sum(axis=0), matrices, pt.linalg.inv(matrices)),
        *(stack @ w[:2], stack.transpose(1, 0, 2) @ w[:2], stack[:, [0, 2]], stack[:, :, [1]]),
        *(w[:, y], w[y], w[y, :2], pt.set_subtensor(stack[:, [0, 2]], x[:, :2, None])),
        *pytensor.grad(loss, [x, stack, w]),
    ]
    return [x, stack, y], outputs


def test_operations_that_pytensor_alone_has(ranks):
    inputs, outputs = operations()
    values = [X, RANDOM.randn(9, 3, 2), RANDOM.randint(0, 3, 9).astype("int32")]
    for place, output in enumerate(outputs):
        expected = compile_in_python(inputs, output, on_unused_input="ignore")(*values)
        with synk.parallel():
            f = compile_in_python(inputs, output, on_unused_input="ignore", name=f"{place}")
        assert type(f) is ParallelFunction, (output, reason_of(f"{place}"))
        np.testing.assert_allclose(f(*values), expected, rtol=1e-9, atol=1e-12)
        assert f._theano is None, "it was computed serially"


def test_boolean_masks_have_serial_values(ranks):
    """A rank would take the items of its part of a mask from a whole array."""
    x, y, stack = pt.dmatrix("x"), pt.dvector("y"), pt.dtensor4("stack")
    w, v = pytensor.shared(Y, "w"), pytensor.shared(RANDOM.randn(2, 9), "v")
    two_axes = np.array([[True, False, True], [True, True, False]])
    moved = stack.transpose(1, 2, 0, 3)
    outputs = [
        *(w[y > 0].sum(), w[y > 0].mean(), v[:, y > 0].sum(axis=1), v.T[y > 0, :1].sum()),
        *(x[x > 0].sum(), pt.inc_subtensor(pt.zeros(9)[y > 0], 1), moved[two_axes]),
        *(stack.transpose(3, 1, 2, 0)[:, two_axes], moved[:, np.ones((3, 9), "bool")]),
        pt.set_subtensor(stack.transpose(1, 2, 0, 3)[two_axes], 0),
    ]
    outputs.append(x[:, np.array([True, False, True])])
    given = [x, y, stack]
    values = [X, Y, RANDOM.randn(9, 2, 3, 2)]
    for place, output in enumerate(outputs):
        expected = compile_in_python(given, output, on_unused_input="ignore")(*values)
        with synk.parallel():
            f = compile_in_python(given, output, on_unused_input="ignore", name=f"mask {place}")
        np.testing.assert_allclose(f(*values), expected, rtol=1e-12)
        is_last = output is outputs[-1]
        assert (type(f) is ParallelFunction) == is_last
        assert is_last or "items that a mask selects" in reason_of(f"mask {place}")


def regression(pm):
    """Return inputs, and what a script computes of a linear regression's rows."""
    x, y, beta = pt.dmatrix("x"), pt.dvector("y"), pt.dvector("beta")
    terms = pm.logp(pm.Normal.dist(x @ beta, 2.0), y)
    return [x, y, beta], [terms, terms.sum(), pytensor.grad(terms.sum(), beta)]


def test_functions_of_pymc_have_serial_values(ranks, pm):
    expected = pm.compile(*regression(pm), mode=host_library.MODE)(X, Y, BETA)
    with synk.parallel():
        f = pm.compile(*regression(pm), mode=host_library.MODE)
    assert type(f) is ParallelFunction
    for result, serial in zip(f(X, Y, BETA), expected):
        np.testing.assert_allclose(result, serial, rtol=1e-12)
    assert f._theano is None, "it was computed serially"


def test_each_rank_draws_the_outcomes_of_its_rows(ranks, pm):
    def drawing():
        x, beta = pt.dmatrix("x"), pt.dscalar("beta")
        outcome = pm.Normal.dist(x.sum(axis=1) * beta, 2.0)
        return pm.compile([x, beta], outcome, random_seed=3, mode=host_library.MODE)

    expected = drawing()(X, 0.3)
    with synk.parallel():
        f = drawing()
    first, second = f(X, 0.3), f(X, 0.3)
    np.testing.assert_array_equal(first[:4], expected[:4])  # rank 0 keeps the stream
    assert first.shape == (9,) and not np.isin(first[4:], expected).any()
    assert not np.isin(first, second).any()


def test_functions_of_a_model_stay_serial(ranks, pm):
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=3)
        pm.Normal("y", pt.constant(X) @ beta, 1.0, observed=Y)
    expected = model.compile_logp(mode=host_library.MODE)({"beta": BETA})
    with synk.parallel():
        f = model.compile_logp(mode=host_library.MODE, name="logp")
        total = f({"beta": BETA})
    assert total == pytest.approx(expected) and reason_of("logp")


def test_options_of_additions_to_items_have_serial_values(ranks):
    """Without duplicates an item gets only the last of the rows: a rank does not know which."""
    x, y, some = pt.dmatrix("x"), pt.lvector("y"), [0, 0, 1]
    zeros, row = pt.zeros(3), pytensor.shared(BETA, "row")
    last = functools.partial(pt.inc_subtensor, ignore_duplicates=True)
    outputs = [
        *(last(zeros[y], x[:, 0]), last(row[y], 1), last(row[y], y)),
        *(last(x[pt.arange(y.shape[0]), y], y), last(x[:, some], 1), last(x[:, some], x)),
        *(last(zeros[some], x.sum(axis=0)), last(x.sum(axis=0)[some], BETA)),
    ]
    values = [X, RANDOM.randint(0, 3, 9)]
    for place, output in enumerate(outputs):
        expected = compile_in_python([x, y], output, on_unused_input="ignore")(*values)
        with synk.parallel():
            f = compile_in_python([x, y], output, on_unused_input="ignore", name=f"add {place}")
        np.testing.assert_allclose(f(*values), expected, rtol=1e-12)
        assert (type(f) is ParallelFunction) == (place >= 3), output
    [advice] = {each.instead for each in synk.parallel_report().functions if each.name == "add 0"}
    assert "leave out ignore_duplicates" in advice
