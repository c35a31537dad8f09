"""Convert values to JSON and arrays, and back: numbers, strings, lists, arrays, random states.

    encode({"a": np.ones(2)}, arrays, "x")  ──▶  {"dict": {"a": {"array": "x/a"}}}, arrays["x/a"]
    decode(encoded, arrays)                 ──▶  {"a": array([1., 1.])}

A file may hold anything. For a random state with a position of 10**9, for example, NumPy would read
beyond its memory. So all fields are compared with those of a state that NumPy has made.
"""

import math
import random

import numpy as np

BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_NUMBERS = "biufc"  # kinds of dtypes
# The largest values of fields that are numbers. The dtype limits those in arrays.
_MOST = {
    "pos": 624,
    "buffer_pos": 4,
    "has_uint32": 1,
    "has_gauss": 1,
    "uinteger": 2**32 - 1,
    "state": 2**128 - 1,
    "inc": 2**128 - 1,
}


def encode(value, arrays, name):
    """Return a value as JSON; put its arrays into `arrays`. Raise TypeError for other values."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in _NUMBERS:
        arrays[name] = np.asarray(value)
        return {"array" if isinstance(value, np.ndarray) else "number": name}
    if isinstance(value, np.random.Generator):
        kind = type(value.bit_generator).__name__
        if kind not in BIT_GENERATORS:
            raise TypeError(f"a file can't hold random numbers of {kind}")
        return {"generator": [kind, encode(value.bit_generator.state, arrays, name)]}
    if isinstance(value, np.random.RandomState):
        state = value.get_state(legacy=False)
        kind, bits = state["bit_generator"], state["state"]
        if kind != "MT19937":
            raise TypeError(f"a file can't hold random numbers of {kind}")
        arrays[name] = bits["key"]
        return {"random": [name, kind, bits["pos"], state["has_gauss"], state["gauss"]]}
    if type(value) is random.Random:
        version, words, gauss = value.getstate()
        arrays[name] = np.array(words, np.uint32)
        return {"python_random": [name, version, gauss]}
    if isinstance(value, (list, tuple)):
        items = [encode(each, arrays, f"{name}/{at}") for at, each in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        # Keys that are no identifiers could name another array: {"a/0": ..., "a": [...]}.
        names = [key if key.isidentifier() else at for at, key in enumerate(value)]
        pairs = zip(names, value.items())
        return {"dict": {key: encode(each, arrays, f"{name}/{at}") for at, (key, each) in pairs}}
    raise TypeError(f"a file can't hold a {type(value).__name__}")


def decode(encoded, arrays):
    """Return the value that `encode` was given; raise any kind of Exception for other JSON."""
    if not isinstance(encoded, dict):
        return encoded
    [(kind, value)] = encoded.items()
    if kind == "number":
        return arrays[value][()]
    if kind == "array":
        return arrays[value]
    if kind == "generator":
        return _generator(value[0], decode(value[1], arrays))
    if kind == "random":
        name, *rest = value
        return _random_state(arrays[name], *rest)
    if kind == "python_random":
        return _python_random(arrays[value[0]], *value[1:])
    if kind == "dict":
        return {key: decode(each, arrays) for key, each in value.items()}
    if kind not in ("list", "tuple"):
        raise ValueError(f"there is no kind of value {kind!r}")
    items = [decode(each, arrays) for each in value]
    return items if kind == "list" else tuple(items)


def names_of(encoded):
    """Yield the names of the arrays that an encoded value refers to."""
    if isinstance(encoded, list):
        for item in encoded:
            yield from names_of(item)
    elif isinstance(encoded, dict):
        for kind, value in encoded.items():
            if kind in ("array", "number"):
                yield value
            elif kind in ("random", "python_random"):
                yield value[0]
            else:
                yield from names_of(list(value.values()) if isinstance(value, dict) else value)


def _python_random(words, version, gauss):
    generator = random.Random(0)
    known_version, known_words, _ = generator.getstate()
    *key, position = _checked("words", words, np.array(known_words, np.uint32)).tolist()
    if version != known_version or position > _MOST["pos"]:
        raise ValueError("a state of random.Random is not one that Python has made")
    gauss = None if gauss is None else _checked("gauss", gauss, 0.0)
    generator.setstate((version, (*key, position), gauss))
    return generator


def _random_state(key, kind, position, has_gauss, gauss):
    state, bits = np.random.RandomState(0), {"key": key, "pos": position}
    fields = {"bit_generator": kind, "state": bits, "has_gauss": has_gauss, "gauss": gauss}
    state.set_state(_checked("state", fields, state.get_state(legacy=False)))
    return state


def _generator(kind, state):
    if kind not in BIT_GENERATORS or not hasattr(np.random, kind):
        raise ValueError(f"NumPy has no bit generator {kind}")
    bits = getattr(np.random, kind)(0)
    bits.state = _checked("state", state, bits.state)
    return np.random.Generator(bits)


def _checked(name, value, like):
    """Return a field of a state, or all of it; raise ValueError unless its kind and range fit."""
    if isinstance(like, dict):
        if isinstance(value, dict) and value.keys() == like.keys():
            return {key: _checked(key, value[key], each) for key, each in like.items()}
    elif isinstance(like, np.ndarray):
        most = np.iinfo(like.dtype).max
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            value = value.tolist()
        is_right = isinstance(value, list) and len(value) == len(like)
        if is_right and all(type(each) is int and 0 <= each <= most for each in value):
            return np.array(value, like.dtype)
    elif isinstance(like, str):
        if value == like:
            return value
    elif isinstance(like, float):
        if isinstance(value, float) and math.isfinite(value):
            return value
    elif type(value) is int and 0 <= value <= _MOST[name]:
        return value
    raise ValueError(f"{name} is not that of such a random state")
