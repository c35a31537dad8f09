"""Selections that hypothesis draws, and the results that NumPy computes for them."""

import numpy as np
from hypothesis import strategies as st

UFUNC = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


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
        return np.average(np.array(values, "float64"), axis=0, weights=counts)
    return UFUNC[mode].reduce(np.array(values), axis=0)


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
