"""Collectives that are called again with the same variables, or nearly so: nothing old is used."""

import types
from typing import NamedTuple

import numpy as np
import pytest
import theano
from support.helpers import on_ranks

import synkhronos as synk
from synkhronos._machine.shared_memory import Segment
from synkhronos._session.commands import Repeated


def many(n, dtype="float64", size=3):
    """Return shared variables of different values."""
    return [theano.shared(np.full(size + i % 2, i, dtype)) for i in range(n)]


def spread(ranks, variables):
    """Give each rank other values; return the values, for each variable those of all ranks."""
    for rank in range(ranks.n):
        for variable in variables:
            synk.set_value(rank, variable, variable.get_value() * 0 + 10 * rank + variable.ndim)
    return [np.array(synk.gather(variable)) for variable in variables]


def test_many_variables_side_by_side(ranks):
    """Also of different dtypes: each run of one dtype is reduced as one array."""
    variables = [*many(5), *many(4, "float32"), *many(3, "int64"), *many(2, "float32", 0), *many(6)]
    variables.append(theano.shared(np.float32(3)))
    for _ in range(3):
        before = spread(ranks, variables)
        synk.all_reduce(variables, "sum")
        for variable, values in zip(variables, before):
            np.testing.assert_array_equal(synk.gather(variable), [values.sum(0)] * ranks.n)
        synk.set_value(0, variables[0], [1.0, 2.0, 3.0])
        values = [variable.get_value() for variable in variables]
        synk.broadcast(variables)
        for gathered, value in zip(synk.gather(variables), values):
            np.testing.assert_array_equal(gathered, [value] * ranks.n)


def count_opened():
    """Return how many segments this rank has mapped since it was first asked."""
    if not hasattr(Segment, "opened"):
        Segment.opened, Segment.uncounted, attach = 0, vars(Segment)["attach"], Segment.attach

        def counting(ref):
            Segment.opened += 1
            return attach(ref)

        Segment.attach = counting
    return Segment.opened


def count_no_longer():
    """Undo what `count_opened` did; return a number."""
    Segment.attach = vars(Segment)["uncounted"]
    del Segment.opened, Segment.uncounted
    return 0


def test_both_memories_of_a_gathered_variable_stay_mapped(ranks):
    """Also where other collectives come between. Counting maps some itself, so it is counted."""
    v, rows, counts = theano.shared(np.zeros(3)), np.arange(3.0 * ranks.n), []
    for step in range(12):
        synk.scatter(v, rows)
        synk.all_gather(v)
        np.testing.assert_array_equal(v.get_value(), rows)
        if step % 3 == 2:
            synk.broadcast(v, rows + 1)
            np.testing.assert_array_equal(synk.gather(v), [rows + 1] * ranks.n)
        if step > 4:
            counts.append(on_ranks(count_opened))
    counts = np.array([*counts, on_ranks(count_opened)])
    on_ranks(count_no_longer)
    assert (np.diff(counts, axis=0) == counts[-1] - counts[-2]).all()


def test_a_gap_between_values_is_no_part_of_them(ranks):
    """Before, larger values were where the gap is now: their sum overflows, which would warn."""
    variables = many(3, "float32", 8)
    huge = np.full(15, np.finfo("float32").max, "float32")
    synk.broadcast(variables, [huge] * 3)
    synk.broadcast(variables, [huge[:3] * 0 + i for i in range(3)])
    with np.errstate(all="raise"):
        for _ in range(2):
            synk.all_reduce(variables, "sum")
    for i, variable in enumerate(variables):
        np.testing.assert_array_equal(variable.get_value(), [i * ranks.n**2] * 3)


def test_one_of_many_gets_another_shape_or_array(ranks):
    variables = many(4)
    for step in range(3):
        synk.broadcast(variables)
        synk.all_reduce(variables)
        for rank in range(ranks.n):
            synk.set_value(rank, variables[step], np.arange(5.0 + step) + rank)
        synk.all_reduce(variables, "sum")
        expected = ranks.n * np.arange(5.0 + step) + sum(range(ranks.n))
        assert np.array_equal(synk.gather(variables)[step], [expected] * ranks.n)
        variables[step].set_value(np.full(6, 7.0))
        synk.broadcast(variables)
        assert np.array_equal(synk.gather(variables[step]), [[7.0] * 6] * ranks.n)


def test_a_list_that_changes(ranks):
    first, second, third = variables = many(3)
    synk.broadcast(variables)
    for _ in range(2):
        synk.all_reduce(variables, "sum")
    before = first.get_value(), third.get_value()
    variables[2] = other = theano.shared(np.ones(2))
    synk.all_reduce(variables, "sum")
    assert np.array_equal(first.get_value(), ranks.n * before[0])
    assert np.array_equal(third.get_value(), before[1])
    assert np.array_equal(other.get_value(), [ranks.n] * 2)
    with pytest.raises(ValueError, match="twice"):
        synk.all_reduce([first, second, first])
    assert isinstance(synk.gather([first, second]), tuple)
    assert isinstance(synk.gather(first), np.ndarray)


class Variable:
    """Stands for a shared variable: Python gives the next one the number of one that is gone."""

    __slots__ = ("__weakref__",)


def test_a_variable_that_is_gone_is_not_found():
    repeated, made = Repeated(types.SimpleNamespace(version=0)), []
    while not made:
        variable = Variable()
        number = id(variable)
        repeated.keep(("all_reduce", "sum", True), variable, "command")
        assert repeated.find(("all_reduce", "sum", True), variable) == "command"
        assert repeated.find(("all_reduce", "sum", True), [variable]) is None
        assert repeated.find(("all_reduce", "avg", True), variable) is None
        del variable
        # One of the next objects gets its memory, and so its number, if nothing else has got it.
        made = [each for each in [Variable() for _ in range(1000)] if id(each) == number]
    assert repeated.find(("all_reduce", "sum", True), made[0]) is None


def test_arguments_are_checked_each_time(ranks):
    s = theano.shared(np.ones(2))
    synk.all_reduce(s, "sum", True)
    for op in ("mean", None, 1, ["sum"], np.array(["sum"])):
        with pytest.raises(ValueError, match="op must be one of"):
            synk.all_reduce(s, op)
    with pytest.raises(TypeError, match="nccl"):
        synk.all_reduce(s, "sum", np.ones(2))
    synk.gather(s, 1)
    for nd_up in (True, 1.0, 2, "1"):
        with pytest.raises(ValueError, match="nd_up"):
            synk.gather(s, nd_up)
    data = synk.data(np.arange(4.0))
    synk.scatter(s, data)
    with pytest.raises(TypeError, match="list"):
        synk.scatter([s], data)
    other = synk.data(np.arange(4, dtype="float32"))
    with pytest.raises(TypeError, match="dtype"):
        synk.scatter(s, other)


def test_scatter_of_a_data_that_changes(ranks):
    s, data = theano.shared(np.zeros(1)), synk.data(np.arange(8.0))
    for _ in range(2):
        synk.scatter(s, data)
        assert np.array_equal(synk.gather(s, nd_up=0), np.arange(8.0))
    data[...] = 5
    synk.scatter(s, data)
    assert np.array_equal(synk.gather(s, nd_up=0), [5] * 8)
    data.set_value(np.arange(30.0))
    synk.scatter(s, data)
    assert np.array_equal(synk.gather(s, nd_up=0), np.arange(30.0))
    data.set_length(9)
    synk.scatter(s, data)
    assert np.array_equal(synk.gather(s, nd_up=0), np.arange(9.0))


class Params(NamedTuple):
    w: object
    b: object


class Variables(list):
    """A list of a library's own type, which scripts may change."""


def test_tuples_and_lists_of_other_types(ranks):
    w, b = theano.shared(np.ones(2)), theano.shared(np.ones(3))
    for times in (1, 2):
        synk.all_reduce(Params(w, b), "sum")
        assert np.array_equal(synk.gather(Params(w, b))[1], [[ranks.n**times] * 3] * ranks.n)
        synk.broadcast(Params(w, b))
    some = Variables([w])
    synk.all_reduce(some, "sum")
    some.append(b)
    synk.all_reduce(some, "sum")
    assert np.array_equal(synk.gather(w), [[ranks.n**4] * 2] * ranks.n)
    assert np.array_equal(synk.gather(b), [[ranks.n**3] * 3] * ranks.n)


def test_gathered_shapes_that_cannot_be_joined(ranks):
    """Also where the first ranks' could be."""
    s = theano.shared(np.zeros((1, 1)))
    shapes = [(2, 3), (1, 3), (2, 4), (2, 3)][: ranks.n]
    for rank, shape in enumerate(shapes):
        synk.set_value(rank, s, np.full(shape, float(rank)))
    for _ in range(2):
        gathered = synk.gather(s, nd_up=0)
        if ranks.n > 2:
            assert [value.shape for value in gathered] == shapes
        else:
            assert gathered.shape == (sum(rows for rows, _ in shapes), 3)
