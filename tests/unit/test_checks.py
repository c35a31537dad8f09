"""Arguments that many public functions check, and how messages show them."""

import numpy as np
import pytest
import theano.tensor
from support.helpers import nameless

from synkhronos._wording import count, shape_of, shown, truth, whole_number
from synkhronos.inputs import _oversize

X = theano.tensor.dvector("x")
NO_SHAPES = [3, "ab", b"ab", (2, 1.5), (2, True), (2, None), {2, 3}, {2: 3}, X, iter([2, 3])]
NO_OVERSIZES = ["1.5", None, True, X, 0.5, 3, float("nan"), 10**400]


def test_what_is_shown_is_short():
    assert [count(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert shown("ab") == "'ab'"
    assert shown(list(range(1000))) == f"{str(list(range(1000)))[:80]}..."


@pytest.mark.parametrize(
    "check, value, result",
    [
        *[(lambda v: whole_number("it", v, 0, 3), v, 3) for v in (3, np.int8(3), np.array(3))],
        *[(shape_of, v, (2, 3)) for v in ([2, np.int8(3)], np.array([2, 3]), range(2, 4))],
        *[(_oversize, v, 1.0) for v in (1, np.float32(1), np.array(1.0))],
        (lambda v: truth("it", v), np.array([1]), True),
        (lambda v: truth("it", v), [], False),
    ],
    ids=nameless,
)
def test_what_is_taken(check, value, result):
    assert check(value) == result and type(check(value)) is type(result)


@pytest.mark.parametrize(
    "check, value, kind, said",
    [
        *[
            (lambda v: whole_number("it", v, 0), v, TypeError, "it must be an integer, got")
            for v in (True, np.True_, 3.0, "3", None, [3], np.array([3]), X)
        ],
        *[
            (lambda v: whole_number("it", v, 0, 3), v, ValueError, "it must be from 0 to 3, got")
            for v in (-1, 4, 2**70, np.int8(-3))
        ],
        *[(shape_of, v, TypeError, "shape must be a sequence of integers") for v in NO_SHAPES],
        (shape_of, np.array([[2, 3]]), TypeError, "shape must be a sequence of integers"),
        (shape_of, [1] * 33, ValueError, "shape must have at most 32 dimensions, got 33"),
        *[
            (_oversize, v, (TypeError, ValueError), r"oversize must be (a number )?from 1 to 2")
            for v in NO_OVERSIZES
        ],
        (lambda v: truth("it", v), np.ones(2), TypeError, "it must be True or False, got array"),
    ],
    ids=nameless,
)
def test_what_is_refused(check, value, kind, said):
    with pytest.raises(kind, match=said):
        check(value)


def test_what_bool_raises_by_itself_is_not_replaced():
    """An exception of a signal handler, such as a timeout's, could come there."""

    class Late:
        def __bool__(self):
            raise TimeoutError("late")

    with pytest.raises(TimeoutError, match="late"):
        truth("it", Late())
