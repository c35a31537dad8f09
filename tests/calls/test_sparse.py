"""Sparse matrices as inputs, outputs and shared variables: as in plain Theano, for any rows."""

import numpy as np
import pytest
import scipy.sparse
import theano
import theano.tensor as T
from support.layouts import Layout
from theano import In, sparse

import synkhronos as synk
from synkhronos._host import choice

LAYOUTS = [Layout(2), Layout(3, master=1)]
pytestmark = pytest.mark.usefixtures("ranks")

W = np.arange(8.0).reshape(4, 2) - 3


def matrix(n_rows, kind="csr"):
    return scipy.sparse.random(n_rows, 4, 0.4, kind, random_state=n_rows)


def assert_equal(result, expected):
    assert scipy.sparse.issparse(result) and result.format == expected.format
    assert result.shape == expected.shape and result.dtype == expected.dtype
    np.testing.assert_array_equal(result.toarray(), expected.toarray())


@pytest.fixture(scope="module")
def product(ranks):
    x, w, y = sparse.csr_matrix("x"), T.dmatrix("w"), T.dvector("y")
    outputs = [
        (sparse.dot(x, w), "gather"),
        (x * 2, "gather"),
        (sparse.sp_sum(x, axis=0), "sum"),
        sparse.structured_dot(x, w).mean() + y.mean(),
    ]
    f = synk.function([x, y], outputs, bcast_inputs=[w], name="product")
    yield f
    del f


SELECTIONS = [None, 3, slice(1, None, 2), slice(None, None, -1), [4, 0, 0, 2], [False, True] * 3]


@pytest.mark.parametrize("batch", SELECTIONS, ids=str)
@pytest.mark.parametrize("num_slices", [1, 2])
def test_rows_are_those_of_the_matrix(product, batch, num_slices):
    x, y = matrix(6), np.arange(6.0)
    rows = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
    part = x[rows] if isinstance(rows, slice) else x[np.arange(6)[rows]]
    dot, doubled, total, mean = product(x, y, W, batch=batch, num_slices=num_slices)
    expected = product.as_theano(part, y[rows], W)
    np.testing.assert_allclose(dot, expected[0], rtol=1e-14)
    assert_equal(doubled, expected[1])
    np.testing.assert_allclose(total, expected[2], rtol=1e-14)
    np.testing.assert_allclose(mean, expected[3], rtol=1e-14)


@pytest.mark.parametrize("n_rows", range(1, 8))
def test_any_number_of_rows(product, n_rows):
    x = matrix(n_rows)
    dot, doubled, _, _ = product(x, np.zeros(n_rows), W)
    np.testing.assert_allclose(dot, x @ W, rtol=1e-14)
    assert_equal(doubled, x * 2)
    subset = product(x, np.zeros(n_rows), W, output_subset=[2, 1])
    assert_equal(subset[0], x * 2)
    np.testing.assert_allclose(subset[1], np.asarray(x.sum(axis=0)).ravel(), rtol=1e-14)


def test_other_forms_of_the_value_are_converted_as_in_theano(product):
    for value in (matrix(6, "csc"), matrix(6).toarray(), matrix(6, "lil")):
        np.testing.assert_allclose(product(value, np.zeros(6), W)[0], value @ W, rtol=1e-14)
    for wrong in (matrix(6).astype("complex128"), "x", None, [[object()]]):
        with pytest.raises(TypeError, match=r"Input 'x' of Function 'product' takes Sparse"):
            product(wrong, np.zeros(6), W)
    with pytest.raises(ValueError, match="'x' 5, 'y' 6"):
        product(matrix(5), np.zeros(6), W)
    with pytest.raises(TypeError, match=r"build_inputs\(\) makes no Data"):
        product.build_inputs(matrix(6), np.zeros(6), W)
    assert product(matrix(6), np.zeros(6), W)[0].shape == (6, 2)


@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_whole_to_all_ranks(ranks, kind):
    x, y = sparse.matrix(kind, "x", "float64"), T.dmatrix("y")
    f = synk.function([y], [(sparse.dot(y, x), "gather"), (x, None)], bcast_inputs=[x])
    serial = theano.function([y, x], [sparse.dot(y, x), x])
    value, rows = matrix(5, kind), np.arange(25.0).reshape(5, 5)
    for n_rows in (5, 1):  # one row: not on each master
        result, expected = f(rows[:n_rows], value), serial(rows[:n_rows], value)
        np.testing.assert_allclose(result[0], expected[0], rtol=1e-14)
        assert_equal(result[1], expected[1])


def test_a_value_and_a_dict(ranks):
    x, y = sparse.csr_matrix("x"), T.dscalar("y")
    made = {"rows": (x * y, "gather"), "sum": (sparse.sp_sum(x), "sum")}
    f = synk.function([In(x, value=matrix(6)), In(y, value=2.0)], made)
    assert_equal(f()["rows"], matrix(6) * 2)
    assert_equal(f(matrix(3), 3)["rows"], matrix(3) * 3)
    f[x] = matrix(2)
    assert_equal(f(output_subset=["rows"])["rows"], matrix(2) * 2)
    assert_equal(f(x=matrix(5), output_subset=["rows"])["rows"], matrix(5) * 2)
    assert_equal(f[x], matrix(6))
    assert f.output_modes == ["gather", "sum"]


@pytest.mark.slow("compiles operations on sparse matrices")
def test_training_on_rows(ranks):
    x, y = sparse.csr_matrix("x"), T.dmatrix("y")
    values = []
    for is_parallel in (False, True):
        w = theano.shared(W.copy())
        loss = ((sparse.dot(x, w) - y) ** 2).mean()
        slope = T.grad(loss, w)
        make = theano.function
        if is_parallel:
            make, slope = synk.function, synk.ops.all_reduce(slope)
        step = make([x, y], loss, updates=[(w, w - 0.1 * slope)])
        losses = [float(step(matrix(7), np.ones((7, 2)))) for _ in range(3)]
        values.append([*losses, *w.get_value().ravel()])
    np.testing.assert_allclose(values[1], values[0], rtol=1e-12)


def test_shared_variables(ranks):
    y = T.dmatrix("y")
    s = theano.shared(matrix(5), "s")
    f = synk.function([y], (sparse.dot(y, s), "gather"))
    double = synk.function([], [(s, None)], updates=[(s, s * 2)])
    rows = np.arange(20.0).reshape(4, 5)
    np.testing.assert_allclose(f(rows), rows @ matrix(5), rtol=1e-14)
    assert_equal(double()[0], matrix(5))
    np.testing.assert_allclose(f(rows), rows @ matrix(5) * 2, rtol=1e-14)
    np.testing.assert_allclose(f(rows, num_slices=2), rows @ matrix(5) * 2, rtol=1e-14)
    for rank in range(ranks.n):
        assert_equal(synk.get_value(rank, s), matrix(5) * 2)
    synk.broadcast(s, matrix(5, "csc"))
    np.testing.assert_allclose(f(rows), rows @ matrix(5), rtol=1e-14)
    s.set_value(matrix(5) * 3)
    synk.broadcast(s)
    np.testing.assert_allclose(f(rows), rows @ matrix(5) * 3, rtol=1e-14)
    synk.set_value(ranks.n - 1, s, matrix(3))
    assert_equal(synk.get_value(ranks.n - 1, s), matrix(3))
    with pytest.raises(TypeError, match=r"broadcast\(\) can't give (s|Sparse\S+), of type Sparse"):
        synk.broadcast(s, "x")
    with pytest.raises(TypeError, match=r"all_reduce\(\) can't take (s|Sparse\S+), of type Sparse"):
        synk.all_reduce(s)


X, C = sparse.csr_matrix("x"), sparse.csc_matrix("c")
REFUSED = {
    "csc rows": (lambda: synk.function([C], (C, None)), "whose rows can't be scattered"),
    "update": (lambda: synk.function([In(X, value=matrix(1), update=X)], []), "shared variable"),
    "avg": (lambda: synk.function([X], X), "dense_from_sparse"),
    "sum": (
        lambda: synk.function([X], (X, "sum")),
        rf"as {choice.choose()}\.sparse\.dense_from_sparse\(variable\)",
    ),
    "csc gather": (lambda: synk.function([], (C, "gather"), bcast_inputs=[C]), "in the format csr"),
    "value": (lambda: synk.function([In(X, value="x")], (X, None)), "can't have the value 'x'"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.layouts(Layout(2))
def test_what_is_refused_names_what_to_write(ranks, name):
    make, words = REFUSED[name]
    with pytest.raises(TypeError, match=words):
        make()
