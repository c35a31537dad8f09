"""synk.rows: row numbers that ranks divide, with the tutorials' givens, against serial Theano."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import MODE, function, shares
from support.layouts import Layout

import synkhronos as synk
from synkhronos import ops

LAYOUTS = [Layout(2), Layout(3, master=1)]
pytestmark = pytest.mark.usefixtures("ranks")

ROWS = np.random.RandomState(0).normal(size=(50, 4))
CLASSES = np.arange(50.0) % 3
X, Y, INDEX = T.dmatrix("x"), T.ivector("y"), T.lscalar("index")


@pytest.fixture
def data():
    return theano.shared(ROWS, "pictures"), theano.shared(CLASSES, "classes")


def classifier():
    """Return the parameters, the loss and the errors of a logistic regression."""
    w, b = theano.shared(np.zeros((4, 3)), "w"), theano.shared(np.zeros(3), "b")
    p = T.nnet.softmax(T.dot(X, w) + b)
    loss = -T.mean(T.log(p)[T.arange(Y.shape[0]), Y])
    return [w, b], loss, T.neq(T.argmax(p, axis=1), Y).mean()


@pytest.mark.usefixtures("compiled_if_thorough")
def test_the_idiom_of_the_tutorials_trains_as_serial_theano(ranks, data):
    pictures, labels = data[0], T.cast(data[1], "int32")
    params, loss, errors = classifier()
    B = 8
    serial = theano.function(
        [INDEX],
        [loss, errors],
        updates=[(p, p - 0.3 * T.grad(loss, p)) for p in params],
        givens={X: pictures[INDEX * B : (INDEX + 1) * B], Y: labels[INDEX * B : (INDEX + 1) * B]},
    )
    expected = [serial(index) for _ in range(2) for index in range(6)]
    trained = [p.get_value() for p in params]

    params, loss, errors = classifier()
    train = synk.function(
        [INDEX],
        [loss, errors],
        updates=[(p, p - 0.3 * ops.all_reduce(T.grad(loss, p))) for p in params],
        givens={X: pictures[synk.rows(INDEX, B)], Y: labels[synk.rows(INDEX, B)]},
    )
    found = [train(index) for _ in range(2) for index in range(6)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for p, value in zip(params, trained):
        for rank in range(ranks.n):
            here = p.get_value() if rank == ranks.master else synk.get_value(rank, p)
            np.testing.assert_allclose(here, value, rtol=1e-11, atol=1e-13)


def test_each_rank_computes_its_share(ranks, data):
    rows = data[0][synk.rows(INDEX, 9, length=50)]
    f = function([INDEX], [(rows, "gather"), (rows.shape[0], "gather"), rows.mean()])
    for index in (0, 5, 2, 5):
        chosen = ROWS[9 * index : 9 * index + 9]
        found, counts, mean = f(index)
        np.testing.assert_array_equal(found, chosen)
        assert counts.tolist() == [len(each) for each in shares(chosen, ranks.n) if len(each)]
        np.testing.assert_allclose(mean, chosen.mean())
        np.testing.assert_allclose(f(index, num_slices=2)[2], chosen.mean())
        np.testing.assert_array_equal(f(index, batch=[3, 0])[0], chosen[[3, 0]])
        np.testing.assert_array_equal(f(index, output_subset=[0])[0], chosen)
    assert f(6)[0].shape == (0, 4)  # beyond the length: as an empty slice


def test_arguments_may_be_expressions(ranks, data):
    size, starts, counter = T.iscalar("size"), T.lvector("starts"), theano.shared(1, "counter")
    numbers = [
        synk.rows(INDEX + 1, size),
        synk.rows(starts[INDEX], size),
        synk.rows(counter, size, length=3 * size),
        synk.rows(4, 3),
    ]
    f = function(
        [INDEX, size],
        [(data[0][each], "gather") for each in numbers],
        bcast_inputs=[starts],
        updates=[(counter, counter + 1)],
    )
    found = [f(1, 3, starts) for starts in ([0, 4], synk.data([0, 4]))]
    for counted, (one, two, three, four) in zip([1, 2], found):
        np.testing.assert_array_equal(one, ROWS[6:9])
        np.testing.assert_array_equal(two, ROWS[12:15])
        np.testing.assert_array_equal(three, ROWS[3 * counted : 3 * counted + 3])
        np.testing.assert_array_equal(four, ROWS[12:15])


def test_givens_may_replace_the_index(data):
    other = T.lscalar("other")
    f = function(
        [other],
        (X, "gather"),
        givens=[(X, data[0][synk.rows(INDEX, 5)]), (INDEX, 2 * other)],
        on_unused_input="ignore",
    )
    np.testing.assert_array_equal(f(2), ROWS[20:25])


def test_a_shared_counter_needs_no_input(data):
    counter = theano.shared(0, "counter")
    rows = data[0][synk.rows(counter, 10)]
    f = function([], rows.sum(axis=0).mean() / rows.shape[0], updates=[(counter, counter + 1)])
    for index in range(5):
        np.testing.assert_allclose(f(), ROWS[10 * index : 10 * index + 10].mean(), atol=1e-15)


def test_the_user_does_not_see_the_input(ranks, data):
    whole = T.dvector("whole")
    rows = [data[0][synk.rows(INDEX, 5)], data[1][synk.rows(INDEX, 5)]]
    total = rows[0].sum() + rows[1].sum() + 0 * whole.sum()
    f = function([INDEX], (total, "sum"), bcast_inputs=[whole], name="f")
    assert repr(f).startswith("<Function 'f'(index, whole) -> ['sum']")
    expected = ROWS[10:15].sum() + CLASSES[10:15].sum()
    built = f.build_inputs(2, [1.0])
    assert [each.name for each in built] == ["index", "whole"]
    for args, kwargs in [((2, [1.0]), {}), ((2,), {"whole": [1.0]}), (built, {})]:
        np.testing.assert_allclose(f(*args, **kwargs), expected)
        np.testing.assert_allclose(f.as_theano(*args, **kwargs), expected)
    assert len(f._recipe.inputs) == 3  # equal row numbers are one input
    with pytest.raises(TypeError, match=r"takes 2 inputs \(index, whole\), got 3"):
        f(2, [1.0], [1, 2])
    with pytest.raises(TypeError, match="Input 'index' of Function 'f' takes"):
        f("two", [1.0])


def test_calls_with_rows_are_checked(ranks, data):
    picked = data[0][synk.rows(INDEX, 5)]
    f = function([INDEX], [picked.mean(), (picked, "gather")], check=True)
    for index in (0, 3, 1):
        f(index)
    if ranks.n > 1:
        with pytest.warns(synk.PortingWarning, match=r"Write \(output, 'sum'\)"):
            wrong = function([INDEX], picked.sum(), check=1)
        wrong(2)


@pytest.mark.usefixtures("compiled_if_thorough")
def test_theano_function_takes_all_rows(data):
    rows = synk.rows(INDEX, 4, length=50)
    f = theano.function([INDEX], [data[0][rows], rows.shape[0], rows])
    for index in (0, 12, 13):
        found, length, numbers = f(index)
        np.testing.assert_array_equal(found, ROWS[4 * index : 4 * index + 4])
        assert length == len(numbers) == len(found)
    with pytest.raises(ValueError, match="negative"):
        f(-1)
    w = theano.shared(np.ones(50))
    g = theano.function([INDEX], T.grad((w[rows] ** 2).sum(), w))
    assert np.asarray(g(1)).tolist() == [0] * 4 + [2] * 4 + [0] * 42


def test_rows_that_do_not_exist_are_refused_before_the_call(ranks, data):
    labels = T.cast(data[1], "int32")
    for source in (data[0], labels):
        total = source[synk.rows(INDEX, 17)].sum()
        f = synk.function([INDEX], (total, "sum"), name="f", mode=MODE)
        before = ranks.session.gate.sequence
        with pytest.raises(
            ValueError, match=r"rows\(2, 17\) in Function 'f' ends at row 50, but .*length=50\)"
        ):
            f(2)
        with pytest.raises(ValueError, match=r"Function 'f': .* negative"):
            f(-1)
        assert ranks.session.gate.sequence == before
        f(1)


def test_rows_that_can_not_be_divided_are_refused(data):
    x, pictures = T.lvector("x"), data[0]
    with pytest.raises(ValueError, match=r"rows\(\) in Function 'f' depends on x: its arguments"):
        function([x], pictures[synk.rows(x[0], 2)].sum(), name="f")
    with pytest.raises(ValueError, match=r"rows\(\) in Function 'f' depends on index: "):
        function([x], pictures[synk.rows(INDEX, 2)].sum() + x.sum(), name="f")
    sums, _ = theano.scan(lambda i: pictures[synk.rows(i, 2)].sum(), sequences=T.arange(3))
    with pytest.raises(ValueError, match="inside of a scan"):
        function([], sums.sum())
    inner = theano.OpFromGraph([INDEX], [synk.rows(INDEX, 2)])  # each rank would take all rows
    with pytest.raises(ValueError, match=r"inside of OpFromGraph.*Call it before"):
        function([INDEX], pictures[inner(INDEX)].sum())


def test_unused_inputs_are_refused_as_by_theano(data):
    other = T.dscalar("other")
    rows = data[0][synk.rows(INDEX, 2)]
    with pytest.raises(theano.compile.UnusedInputError, match="other"):
        function([other, INDEX], rows.mean())
    function([other, INDEX], rows.mean(), on_unused_input="ignore")(1.0, 0)


def test_rows_of_unequal_number_are_refused(data):
    total = data[0][synk.rows(INDEX, 2)].sum() + data[0][synk.rows(INDEX, 3)].sum()
    f = function([INDEX], (total, "sum"), name="f")
    with pytest.raises(ValueError, match=r"must have the same length .*'rows\(\)' [23], 'rows"):
        f(0)
    x = T.dvector("x")
    g = function([INDEX, x], (data[0][synk.rows(INDEX, 2)].sum() + x.sum(), "sum"), name="g")
    np.testing.assert_allclose(g(0, [1, 2]), ROWS[:2].sum() + 3)
    with pytest.raises(ValueError, match="must have the same length"):
        g(0, [1, 2, 3])


def test_an_index_that_ranks_keep_counts_by_itself(ranks, data):
    pictures, _ = data
    index = theano.In(INDEX, value=1, update=INDEX + 1)
    serial = theano.function(
        [index], X.sum(axis=1), givens={X: pictures[INDEX * 6 : INDEX * 6 + 6]}, mode=MODE
    )
    f = synk.function(
        [index],
        (X.sum(axis=1), "gather"),
        givens={X: pictures[synk.rows(INDEX + 1 - 1, 6)]},
        check=True,
        mode=MODE,
    )
    for given in ((), (), (5,), ()):
        np.testing.assert_allclose(f(*given), serial(*given))
    f[INDEX] = serial[INDEX] = 2
    np.testing.assert_allclose(f(), serial())
    np.testing.assert_allclose(f.copy()(), pictures.get_value()[6:12].sum(axis=1))
