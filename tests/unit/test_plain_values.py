"""Values as JSON with arrays beside it: they come back, and others choose no code or memory."""

import json

import numpy as np
import pytest

from synkhronos._machine.plain_values import BIT_GENERATORS, decode, encode


def encoded(value):
    """Return what a file would hold of a value."""
    arrays = {}
    return json.loads(json.dumps(encode(value, arrays, "v"))), arrays


def state_of(kind):
    """Return random numbers of a kind."""
    if kind == "RandomState":
        return np.random.RandomState(3)
    return np.random.Generator(getattr(np.random, kind)(3))


def test_values_come_back():
    values = [("a", 1, 2.5, None, True), [np.arange(6).reshape(2, 3).T, np.array(1j)], {"": "ä"}]
    found = decode(*encoded(values))
    assert found[0] == values[0] and found[2] == values[2] and type(found[0]) is tuple
    for one, other in zip(found[1], values[1]):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    number = decode(*encoded(np.float32(1.5)))
    assert number == 1.5 and type(number) is np.float32


@pytest.mark.parametrize("kind", ["RandomState", *BIT_GENERATORS])
def test_random_numbers_go_on(kind):
    state = state_of(kind)
    state.standard_normal(3), state.random(), state.bytes(4)
    again = decode(*encoded(state))
    assert type(again) is type(state) and again.bytes(12) == state.bytes(12)
    assert again.standard_normal(9).tolist() == state.standard_normal(9).tolist()


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2}, np.array([None]), np.array(["a"]), np.random.RandomState(np.random.PCG64())],
    ids=lambda value: type(value).__name__,
)
def test_what_a_file_can_not_hold_is_refused(value):
    with pytest.raises(TypeError, match="a file can't hold"):
        encode([value], {}, "v")


KEY = encoded(np.random.RandomState(0))[1]["v"]
KEYS = [KEY[:10], KEY[0], KEY.reshape(624, 1), KEY * 0.5, -KEY.astype("i8")]
STATE = [1, "dict", "state", "dict"]
DAMAGES = [
    *[("RandomState", None, key, "key is not that") for key in KEYS],
    ("RandomState", [1], "PCG64", "bit_generator is not that"),
    ("RandomState", [2], 10**9, "pos is not that"),  # NumPy read beyond its memory
    ("RandomState", [3], True, "has_gauss is not that"),
    ("RandomState", [4], np.inf, "gauss is not that"),
    ("PCG64", [0], "test", "NumPy has no bit generator test"),  # a name chose any class
    ("PCG64", [1, "dict", "bit_generator"], "MT19937", "bit_generator is not that"),
    ("PCG64", [*STATE, "inc"], 2**128, "inc is not that"),
    ("PCG64", [*STATE, "inc"], -1, "inc is not that"),
    ("PCG64", [1], 3, "state is not that"),
    ("PCG64", [1], {"run": 3}, "there is no kind of value 'run'"),
    ("Philox", [1, "dict", "buffer_pos"], 10**9, "buffer_pos is not that"),
    ("MT19937", [*STATE, "pos"], 625, "pos is not that"),
]


@pytest.mark.parametrize("kind, path, value, said", DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_random_state_is_refused(kind, path, value, said):
    parts, arrays = encoded(state_of(kind))
    if path is None:
        arrays["v"] = np.asarray(value)
    else:
        [owner] = parts.values()
        for each in path[:-1]:
            owner = owner[each]
        owner[path[-1]] = value
    with pytest.raises(ValueError, match=said):
        decode(parts, arrays)


def test_no_two_arrays_have_one_name():
    """The second one was read in place of the first."""
    value = {"a/0": np.zeros(1), "a": [np.ones(1)], "1": np.full(1, 2.0), "0": np.full(1, 3.0)}
    arrays = {}
    found = decode(encode(value, arrays, "x"), arrays)
    assert len(arrays) == 4 and repr(found) == repr(value)
