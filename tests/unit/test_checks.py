"""Arguments that many public functions check, and how messages show them."""

import numpy as np
import pytest

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


@pytest.mark.parametrize("value", [True, np.True_, 3.0, "3", None, np.array([3])], ids=repr)
def test_what_is_no_whole_number(value):
    with pytest.raises(TypeError, match="it must be an integer, got"):
        whole_number("it", value, 0)


@pytest.mark.parametrize(
    "shape", [(2, 3), [2, np.int8(3)], np.array([2, 3]), range(2, 4)], ids=repr
)
def test_shapes(shape):
    assert shape_of(shape) == (2, 3)


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.array(1.0)], ids=repr)
def test_oversize(value):
    assert oversize_of(value) == 1.0


def test_truth():
    assert truth("it", np.array([1])) is True and truth("it", []) is False
    with pytest.raises(TypeError, match="it must be True or False, got array"):
        truth("it", np.ones(2))
