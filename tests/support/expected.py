"""Selections that hypothesis draws, and the results that NumPy computes for them."""

import functools

import numpy as np
from hypothesis import strategies as st

from synkhronos._arithmetic.operations import OPERATIONS

_NUMPY = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
MODES = [*OPERATIONS, "gather", None]


def combined(op, arrays):
    """Return arrays combined in their order, by NumPy where it has the operation."""
    return functools.reduce(_NUMPY.get(op) or OPERATIONS[op].combine, arrays)


def tolerance(op, dtype):
    """Return the relative error that another order of arrays may make; 0 for whole numbers."""
    is_exact = op in _NUMPY or op == "avg" or np.dtype(dtype).kind not in "fc"
    return 0 if is_exact else 4 * np.finfo(dtype).eps


def dtypes_of(op, dtypes):
    """Return those dtypes that an operation takes."""
    return [each for each in dtypes if np.dtype(each).kind in OPERATIONS[op].kinds]


@st.composite
def batches(draw, rows):
    kind = draw(st.sampled_from(["none", "count", "slice", "list", "array", "mask"]))
    if kind == "count":
        return draw(st.integers(0, rows))
    if kind == "slice":
        bound = st.none() | st.integers(-rows, rows)
        step = draw(st.sampled_from([None, None, 1, 2, 3, -1, -2]))
        return slice(draw(bound), draw(bound), step)
    if kind in ("list", "array"):
        picks = draw(st.lists(st.integers(-rows, rows - 1), max_size=9)) if rows else []
        if kind == "list":
            return picks
        return np.array(picks, draw(st.sampled_from(["int8", "int32", "int64"])))
    if kind == "mask":
        return np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), bool)
    return None


def plain(mode):
    return mode[2:] if mode and mode.startswith("c_") else mode


def reduced(mode, values, counts):
    """Reduce the values of slices, or of ranks, to one."""
    mode = plain(mode)
    if mode is None:
        return values[-1]
    if mode == "gather":
        return np.stack(values) if np.ndim(values[0]) == 0 else np.concatenate(values)
    if mode == "avg":
        wide = np.result_type(values[0], "float64")
        return np.average(np.array(values, wide), axis=0, weights=counts)
    return combined(mode, np.array(values))


def selected(x, batch):
    """Return what a batch selects, in NumPy's words."""
    if batch is None:
        return x
    if isinstance(batch, (int, np.integer)):
        return x[:batch]
    if isinstance(batch, (list, tuple, range)):
        batch = list(batch)
        return x[np.array(batch, bool if batch and isinstance(batch[0], bool) else int)]
    return x[batch]
