"""Functions on any number of ranks give what plain Theano gives for the same data."""

import contextlib
import copy
import pickle

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.expected import reduced
from support.helpers import MODE, Call, function, on_ranks, shares
from support.layouts import Layout

import synkhronos as synk
from synkhronos import session as _session
from synkhronos._arithmetic.operations import OPERATIONS
from synkhronos._wording import count

pytestmark = pytest.mark.usefixtures("ranks")


def sequence():
    return _session._Current.session.gate.sequence


def rows(n, dtype="float64"):
    return (np.arange(3 * n).reshape(n, 3) * 7 % 11 - 4).astype(dtype)


def busy(x, n):
    return [share for share in shares(x, n) if len(share)]


def test_a_rank_without_rows_does_not_run(ranks):
    x = T.dvector("x")

    def refuse_nothing(x):
        assert len(x), "ran without rows"
        return [len(x)]

    f = function([x], (Call(refuse_nothing)(x), "gather"))
    for n_rows in range(1, 6):
        expected = [len(s) for s in busy(np.zeros(n_rows), ranks.n)]
        np.testing.assert_array_equal(f(np.zeros(n_rows)), expected)


def test_none_is_the_masters_own_result_or_that_of_the_first_rank_with_rows(ranks):
    x = T.dvector("x")
    f = function([x], [(x.sum(), None), (x.sum(), "sum"), (2 * x, None)])
    for n_rows in range(1, 9):
        given = np.arange(n_rows) + 1.0
        own = shares(given, ranks.n)[ranks.master]
        own = own if len(own) else busy(given, ranks.n)[0]
        for _ in range(2):
            result = f(given)
            assert result[0] == own.sum()
            assert result[1] == given.sum()
            np.testing.assert_array_equal(result[2], 2 * own)


@pytest.mark.numba
def test_gather_stacks_scalars_and_joins_uneven_rows(ranks):
    x = T.dvector("x")
    f = function([x], [(x.sum(), "gather"), (x[x > 3], "gather")])
    for n_rows in range(1, 10):
        given = np.arange(float(n_rows))
        sums, large = f(given)
        np.testing.assert_array_equal(sums, [s.sum() for s in busy(given, ranks.n)])
        np.testing.assert_array_equal(large, given[given > 3])


@pytest.mark.layouts(Layout(2), Layout(3, master=1))
def test_gather_of_ragged_results_is_a_list(ranks):
    x = T.dvector("x")
    f = function([x], (T.alloc(x.sum(), 1, x.shape[0]), "gather"))
    given = np.arange(5.0)
    result = f(given)
    assert isinstance(result, list)
    for part, share in zip(result, shares(given, ranks.n)):
        np.testing.assert_array_equal(part, np.full((1, len(share)), share.sum()))
    again = f(given + 1)
    assert result[-1][0, 0] == shares(given, ranks.n)[-1].sum()  # not overwritten by the next call
    assert again[-1][0, 0] != result[-1][0, 0]


def test_bcast_inputs_go_whole_to_every_rank(ranks):
    x, w, b = T.dmatrix("x"), T.dvector("w"), T.dscalar("b")
    f = function([x], [(T.dot(x, w) + b, "gather"), (w.sum(), "gather")], bcast_inputs=[w, b])
    given, weights = rows(7), np.array([1.0, 2.0, -1.0])
    dots, sums = f(given, weights, 0.5)
    np.testing.assert_array_equal(dots, given.dot(weights) + 0.5)
    np.testing.assert_array_equal(sums, [2.0] * len(busy(given, ranks.n)))
    np.testing.assert_array_equal(f(w=weights, b=0.5, x=given)[0], dots)


def test_only_bcast_inputs_run_every_rank_with_equal_weight(ranks):
    w = T.dvector("w")
    f = function([], [(w.sum(), "sum"), w.sum()], bcast_inputs=[w])
    total, average = f([1.0, 2.0])
    assert total == 3 * ranks.n
    np.testing.assert_allclose(average, 3, rtol=1e-15)


def test_scalar_inputs_go_to_every_rank(ranks):
    a, x = T.dscalar("a"), T.dvector("x")
    f = function([a, x], (a * x, "gather"))
    np.testing.assert_array_equal(f(3, np.arange(5.0)), 3 * np.arange(5.0))
    only = function([a], (a * 2, "gather"))
    np.testing.assert_array_equal(only(4), [8] * ranks.n)
    np.testing.assert_array_equal(only(synk.data(np.array(5.0))), [10] * ranks.n)


@pytest.mark.numba
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of NumPy 2, in the plain call
def test_lists_scalars_and_arrays_are_cast_as_theano_does(ranks):
    x = T.fvector("x")
    plain = theano.function([x], x * 2, mode=MODE)
    f = function([x], (x * 2, "gather"))
    for value in (
        [1, 2, 3],
        (1.5, 2.5),
        np.array([1, 2], "int8"),
        np.array([1, 2], "float16"),
        np.array([3, 4], "float32"),
        np.arange(10, dtype="float32")[::-2],
    ):
        result = f(value)
        np.testing.assert_array_equal(result, plain(value))
        assert result.dtype == "float32"
    before = sequence()
    for value in (np.array([1.0, 2.0]), [1e60], "ab", None, [[1, 2]], 3, [1j], object()):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            plain(value)
        with pytest.raises(TypeError) as caught:
            f(value)
        assert "'x'" in str(caught.value) and "vector" in str(caught.value).lower()
    assert sequence() == before
    np.testing.assert_array_equal(f([4]), [8])


def test_broadcastable_inputs_are_checked_before_launch(ranks):
    row, x = T.drow("row"), T.dmatrix("x")
    f = function([x], (x + row, "gather"), bcast_inputs=[row])
    np.testing.assert_array_equal(f(np.ones((4, 3)), np.ones((1, 3))), np.full((4, 3), 2.0))
    before = sequence()
    for bad in (np.ones((2, 3)), synk.data(np.ones((2, 3)))):
        with pytest.raises(TypeError, match="'row'"):
            f(np.ones((4, 3)), bad)
    assert sequence() == before


def test_forms_of_outputs(ranks):
    x = T.dvector("x")
    a = np.arange(4.0)
    for outputs, kind in [
        (x.mean(), np.ndarray),
        ((x.sum(), "sum"), np.ndarray),
        ([x.mean()], list),
    ]:
        f = function([x], outputs)
        result, serial = f(a), f.as_theano(a)
        assert isinstance(result, kind) and isinstance(serial, kind)
        np.testing.assert_allclose(result, serial, rtol=1e-15)
    for nothing in ([], None):
        assert function([x], nothing, on_unused_input="ignore")(a) == []


def test_a_rank_without_rows_keeps_its_variables(ranks):
    x = T.dvector("x")
    s = theano.shared(5.0)
    f = function([x], updates=[(s, x.sum())])
    f([1.0])
    read = function([], (s * 1, "gather"))
    expected = [part.sum() if len(part) else 5 for part in shares(np.ones(1), ranks.n)]
    np.testing.assert_array_equal(read(), expected)


def test_a_function_of_no_inputs_and_an_interrupted_sequence_of_updates(ranks):
    s = theano.shared(np.array(1.0))
    f = function([], (s, "sum"), updates=[(s, s * 2)])
    assert [float(f()) for _ in range(4)] == [ranks.n * k for k in (1, 2, 4, 8)]
    assert s.get_value() == 16


@pytest.mark.parametrize("givens", [dict, list, tuple])
@pytest.mark.numba
def test_givens(ranks, givens):
    x, y = T.dvector("x"), T.dvector("y")
    s = theano.shared(np.arange(3.0), "s")
    f = function([x], [(x.sum(), "sum"), (y.sum(), "gather")], givens=givens([(y, s * 2)]))
    total, of_ranks = f(np.ones(ranks.n))
    assert total == ranks.n
    np.testing.assert_array_equal(of_ranks, [6] * ranks.n)
    assert f.get_shared() == [s]


def test_repr_and_str(ranks):
    x = T.dvector("x")
    f = function([x], [x.mean(), (x, "gather"), (x, None)], bcast_inputs=[], name="three")
    for part in ("three", "x", "'avg'", "'gather'", "None", f"on {count(ranks.n, 'rank')}>"):
        assert part in repr(f)
    assert f._repr_mimebundle_() == {"text/plain": repr(f)}  # what IPython shows
    assert str(f) == "Function 'three'"
    assert __file__ in function([x], x.mean()).name or "helpers" in function([x], x.mean()).name


@pytest.mark.parametrize("copy_of", [pickle.dumps, copy.deepcopy])
def test_a_copy_is_refused_in_words(ranks, copy_of):
    f = function([], theano.shared(1.0), name="one")
    with pytest.raises(
        TypeError, match=r"Function 'one' can't be pickled or copied: .*pool of .*function\(\)"
    ):
        copy_of(f)
    with pytest.raises(TypeError, match="A session can't be pickled or copied"):
        copy_of([f._session])
    assert f() == 1


class Text(str):
    """A kind of str that the workers do not know: it was made after the fork, in a test."""

    __slots__ = ()
    __reduce__ = None  # nor could it be sent


def test_subclasses_of_str_are_as_good_as_strings(ranks):
    s = theano.shared(2.0)
    f = function([], (s, Text("c_sum")), name=Text("f"))
    assert type(f.name) is str and repr(f).startswith("<Function 'f'()")
    assert f() == 2 * ranks.n
    synk.all_reduce(s, op=Text("sum"))
    assert synk.get_value(ranks.n - 1, s) == 2 * ranks.n


def test_any_name_is_shown_as_text(ranks):
    assert function([], theano.shared(1.0), name=5).name == "5"
    x = T.dvector("x")
    assert str(function([x], x.sum(), name=x)) == "Function 'x'"


def test_as_theano_applies_updates_to_the_master_only(ranks):
    x = T.dvector("x")
    s = theano.shared(1.0, "s")
    f = function([x], (x.sum(), "sum"), updates=[(s, s + x.sum())])
    synk.distribute()
    assert f.as_theano([1, 2]) == 3
    assert f.as_theano(synk.data([1.0, 2.0], dtype="float64", ndim=1)) == 3
    assert s.get_value() == 7
    read = function([], (s * 1, "gather"))
    np.testing.assert_array_equal(read(), [7 if r == ranks.master else 1 for r in range(ranks.n)])
    with pytest.raises(TypeError, match="'x'"):
        f.as_theano([[1.0]])
    with pytest.raises(TypeError, match="1 input "):
        f.as_theano()


def test_as_theano_takes_the_data_that_calls_take(ranks):
    x, row = T.dvector("x"), T.row("row", "float64")
    f = function([x, row], [(x, "gather"), (row, "gather")], name="f")
    good = synk.data(np.ones(2)), synk.data(np.ones((1, 3)))
    for bad in (np.ones(2, "float32"), np.ones((2, 2)), np.ones(2, "int64")):
        with pytest.raises(TypeError, match=r"Input 'x' of Function 'f' .* A Data is never cast"):
            f.as_theano(synk.data(bad), good[1])
    with pytest.raises(TypeError, match=r"Input 'row' .*must have length 1"):
        f.as_theano(good[0], synk.data(np.ones((2, 3))))
    assert [part.shape for part in f.as_theano(*good)] == [(2,), (1, 3)]


def test_build_inputs(ranks):
    x, y = T.fmatrix("x"), T.ivector("y")
    f = function([x], (x.sum() + y.sum(), "sum"), bcast_inputs=[y], name="f")
    a, b = f.build_inputs(np.ones((4, 2), "uint8"), [1, 2], minibatch=[True, False], oversize=1.5)
    assert (a.name, a.dtype, a.shape, a.alloc_size, a.minibatch) == (
        "x",
        "float32",
        (4, 2),
        12,
        True,
    )
    assert (b.name, b.dtype, b.shape, b.alloc_size, b.minibatch) == ("y", "int32", (2,), 3, False)
    assert f(a, b) == 8 + 3 * ranks.n
    c, d = f.build_inputs(y=[1], x=np.ones((1, 1)), force_cast=True)
    assert (c.name, d.name, c.dtype) == ("x", "y", "float32")
    only = function([x], (x.sum(), "sum")).build_inputs(np.ones((2, 2), "f4"))
    assert isinstance(only, synk.data(np.ones(2)).__class__)
    assert function([], (y.sum(), "sum"), givens=[(y, T.zeros((2,), "int32"))]).build_inputs() == ()
    with pytest.raises(TypeError, match=r"'x'.*float64"):
        f.build_inputs(np.ones((2, 2)), [1])
    with pytest.raises(TypeError, match="'y'"):
        f.build_inputs(np.ones((2, 2), "f4"), [[1]])


def test_one_function_with_inputs_of_many_shapes(ranks):
    x = T.dmatrix("x")
    f = function([x], (x, "gather"))
    rng = np.random.RandomState(0)
    shapes = [(rng.randint(1, 40), rng.randint(1, 5)) for _ in range(40)]
    for shape in [*shapes, (4 * ranks.n, 3), (2 * ranks.n, 6), (3 * ranks.n, 4)]:
        a = rng.rand(*shape)
        np.testing.assert_array_equal(f(a), a)
        np.testing.assert_array_equal(f(a, batch=[-1, 0, 0]), a[[-1, 0, 0]])


@pytest.mark.layouts(Layout(2))
def test_many_inputs_and_many_outputs(ranks):
    xs = [T.dvector(f"x{i}") for i in range(60)]
    f = function(xs, [(x + i, "gather") for i, x in enumerate(xs)] * 5)
    result = f(*[np.arange(4.0)] * 60)
    assert len(result) == 300
    for i in (0, 59):
        np.testing.assert_array_equal(result[i + 240], np.arange(4.0) + i)


def mean(p, y):
    return p.mean()


def cross_entropy(p, y):
    return T.nnet.categorical_crossentropy(T.nnet.softmax(p), y).mean()


@pytest.mark.layouts(Layout(2), Layout(3, master=1))
@pytest.mark.parametrize("loss", [mean, pytest.param(cross_entropy, marks=pytest.mark.thorough)])
def test_compiled_code_gives_what_theano_gives(ranks, loss):
    x, y = T.dmatrix("x"), T.lvector("y")
    rng = np.random.RandomState(1)
    w = theano.shared(rng.randn(6, 4), "w")
    found = loss(T.tanh(T.dot(x, w)), y)
    f = synk.function([x, y], [found, T.grad(found, w)], on_unused_input="ignore")
    a, labels = rng.randn(23, 6), rng.randint(0, 4, 23)
    for result, plain in zip(f(a, labels), f.as_theano(a, labels)):
        np.testing.assert_allclose(result, plain, rtol=1e-12, atol=1e-15)


def test_outputs_of_other_types_only_as_the_masters_own(ranks):
    x = T.dvector("x")
    length = x.shape[0] - 1
    part = theano.tensor.type_other.MakeSlice()(0, length)
    with pytest.raises(TypeError, match="None"):
        function([x], part)
    assert function([x], (T.as_tensor_variable(length), "sum"))([1, 2, 3]) == sum(
        len(p) - 1 for p in busy(np.ones(3), ranks.n)
    )


@pytest.mark.parametrize("mode", OPERATIONS)
@pytest.mark.layouts(Layout(2), Layout(3, master=1))
def test_unequal_shapes_of_a_reduced_output_are_refused(ranks, mode):
    x = T.dvector("x")
    f = function([x], (x, mode), name="uneven")
    with pytest.raises(ValueError, match="different shapes") as caught:
        f(np.ones(ranks.n + 1))
    assert "Output 0" in str(caught.value) and "uneven" in str(caught.value)
    expected = reduced(mode, [1.0] * ranks.n, [1] * ranks.n)
    is_averaged = mode == "avg"
    with pytest.warns(synk.PortingWarning) if is_averaged else contextlib.nullcontext():
        np.testing.assert_allclose(f(np.ones(ranks.n)), [expected], rtol=1e-15)


@pytest.mark.layouts(Layout(3, master=1))
def test_every_rank_sees_its_own_rows_in_rank_order(ranks):
    import os
    import socket
    import zlib

    def process():
        """Return a number of this process; two machines may number processes alike."""
        return os.getpid() + (zlib.crc32(socket.gethostname().encode()) << 20)

    x = T.dvector("x")
    f = function([x], [(x, "gather"), (Call(lambda x: [process()])(x), "gather")])
    _, found = f(np.arange(7.0))
    assert found.astype(int).tolist() == [int(number) for number in on_ranks(process)]
    assert found[ranks.master] == process()
    assert len(set(found)) == ranks.n
