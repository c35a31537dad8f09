"""States of NumPy's random numbers as plain values for files, and back.

NumPy reads beyond its memory for some values, such as a position of 10**9, and a name chooses a
class: all fields are compared with those of a state that NumPy has made.
"""

import json
import math

import numpy as np

BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_KEY = np.zeros(624, np.uint32)
# The largest values of numbers; those in arrays are limited by their dtypes.
_MOST = {
    "pos": 624,
    "buffer_pos": 4,
    "has_uint32": 1,
    "uinteger": 2**32 - 1,
    "state": 2**128 - 1,
    "inc": 2**128 - 1,
}


def state_parts(state):
    """Return an array, and a list of numbers and words, that make a random state.

    Raises ``TypeError`` for one with a bit generator that `state_of_parts` would not take.
    """
    if isinstance(state, np.random.Generator):
        kind, kinds = type(state.bit_generator).__name__, BIT_GENERATORS
        text = json.dumps(state.bit_generator.state, default=lambda value: value.tolist())
        array, numbers = np.frombuffer(text.encode(), np.uint8), []
    else:
        found = state.get_state(legacy=False)
        kind, kinds = found["bit_generator"], ("MT19937",)
        array = found["state"].get("key")
        numbers = [found["state"].get("pos"), found["has_gauss"], found["gauss"]]
    if kind not in kinds:
        raise TypeError(f"a {type(state).__name__} of {kind} can't be kept in a file")
    return array, [kind, *numbers]


def state_of_parts(array, rest):
    """Return the random state of what `state_parts` has returned; raise ValueError for others."""
    if len(rest) == 1:
        _check_kind(rest[0])
        return generator(rest[0], json.loads(array.tobytes()))
    kind, position, has_gauss, gauss = rest
    is_number = isinstance(gauss, (int, float)) and math.isfinite(gauss)
    if kind != "MT19937" or position not in range(625) or has_gauss not in (0, 1) or not is_number:
        raise ValueError("it is damaged: a RandomState has 624 numbers of uint32, and a position")
    state = np.random.RandomState(0)
    state.set_state((kind, _checked("key", array, _KEY), int(position), int(has_gauss), gauss))
    return state


def generator(kind, state):
    """Return a Generator of the state of its bit generator; raise ValueError for others."""
    _check_kind(kind)
    bits = getattr(np.random, kind)(0)
    bits.state = _checked("state", state, bits.state)
    return np.random.Generator(bits)


def _check_kind(kind):
    if kind not in BIT_GENERATORS or not hasattr(np.random, kind):
        raise ValueError(f"NumPy has no bit generator {kind}")


def _checked(name, given, like):
    """Return a value of a state, or all of it; raise ValueError if its kind or range is another."""
    if isinstance(like, dict):
        if isinstance(given, dict) and given.keys() == like.keys():
            return {key: _checked(key, given[key], each) for key, each in like.items()}
    elif isinstance(like, np.ndarray):
        most = np.iinfo(like.dtype).max
        if isinstance(given, np.ndarray) and given.dtype.kind in "iu":
            given = given.tolist()
        is_right = isinstance(given, list) and len(given) == len(like)
        if is_right and all(type(each) is int and 0 <= each <= most for each in given):
            return np.array(given, like.dtype)
    elif isinstance(like, str):
        if given == like:
            return given
    elif type(given) is int and 0 <= given <= _MOST[name]:
        return given
    raise ValueError(f"it is damaged: {name} is not that of such a random state")
