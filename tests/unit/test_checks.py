"""Arguments that many public functions check, and how messages show them."""

import numpy as np
import pytest
import theano.tensor
from support.helpers import nameless

from synkhronos._wording import count, oversize_of, shape_of, shown, truth, whole_number


@pytest.mark.parametrize("number, text", [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_count(number, text):
    assert count(number, "row") == text


def test_what_is_shown_is_short():
    assert shown("ab") == "'ab'"
    assert shown(list(range(1000))) == f"{str(list(range(1000)))[:80]}..."


@pytest.mark.parametrize("value", [3, np.int8(3), np.array(3)], ids=repr)
def test_whole_numbers(value):
    number = whole_number("it", value, 0, 3)
    assert number == 3 and type(number) is int


X = theano.tensor.dvector("x")


@pytest.mark.parametrize("value", [True, np.True_, 3.0, "3", None, [3], np.array([3]), X], ids=repr)
def test_what_is_no_whole_number(value):
    with pytest.raises(TypeError, match="it must be an integer, got"):
        whole_number("it", value, 0)


@pytest.mark.parametrize("value", [-1, 4, 2**70, np.int8(-3)], ids=repr)
def test_whole_numbers_beyond_the_bounds(value):
    with pytest.raises(ValueError, match="it must be from 0 to 3, got"):
        whole_number("it", value, 0, 3)


@pytest.mark.parametrize(
    "shape", [(2, 3), [2, np.int8(3)], np.array([2, 3]), range(2, 4)], ids=repr
)
def test_shapes(shape):
    assert shape_of(shape) == (2, 3)


@pytest.mark.parametrize(
    "shape",
    [3, "ab", b"ab", (2, "a"), (2, 1.5), (2, True), (2, np.True_), (2, None), {2, 3}, {2: 3}, X]
    + [iter([2, 3]), np.array([[2, 3]])],
    ids=nameless,
)
def test_what_is_no_shape(shape):
    with pytest.raises(TypeError, match="shape must be a sequence of integers"):
        shape_of(shape)
    with pytest.raises(ValueError, match="shape must have at most 32 dimensions, got 33"):
        shape_of([1] * 33)


@pytest.mark.parametrize("value", ["much", "1.5", None, True, X, 0.5, 3, float("nan"), 10**400])
def test_what_is_no_oversize(value):
    with pytest.raises((TypeError, ValueError), match=r"oversize must be (a number )?from 1 to 2"):
        oversize_of(value)


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.array(1.0)], ids=repr)
def test_oversize(value):
    assert oversize_of(value) == 1.0


def test_truth():
    assert truth("it", np.array([1])) is True and truth("it", []) is False
    with pytest.raises(TypeError, match="it must be True or False, got array"):
        truth("it", np.ones(2))
