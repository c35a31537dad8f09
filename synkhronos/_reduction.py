"""From the parts that the ranks computed to one result.

``sum prod min max`` combine element by element; ``avg`` weighs each part with the rows that it
was computed from, so that it equals the mean over all rows; ``gather`` joins along axis 0 in rank
order (0-d parts are stacked); ``None`` takes the first part as it is.
"""

import numpy as np

MODES = ("avg", "sum", "prod", "min", "max", "gather")

_COMBINE = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def parse_mode(mode):
    """Return the plain mode: the name without the prefix ``c_``, which asks for the CPU's way.

    Raises ``ValueError`` for anything that is not a mode.
    """
    if mode is None:
        return None
    plain = mode[2:] if isinstance(mode, str) and mode.startswith("c_") else mode
    if not isinstance(plain, str) or plain not in MODES:
        raise ValueError(
            f"{mode!r} is not a reduce mode. Expected one of {', '.join(MODES)}, the same with "
            "the prefix 'c_' (reduced by the CPU), or None."
        )
    return plain


def average_dtype(dtype, float_dtype):
    """Return the dtype that an average of `dtype` values is computed in."""
    return np.dtype(dtype) if np.dtype(dtype).kind in "fc" else np.dtype(float_dtype)


def combine(mode, parts, weights, float_dtype, what="output"):
    """Reduce the parts of one output, in rank order, to one array.

    Parameters
    ----------
    mode : str or None
        A plain mode, see :data:`MODES`.
    parts : list of numpy.ndarray
        One for each rank that computed, at least one. The result never shares memory with any
        but the first, which may be overwritten.
    weights : list of int
        The number of rows behind each part; only their ratios matter.
    float_dtype : str
        The dtype for averages of integers and bools (Theano's floatX).
    what : str
        Names the output in error messages.

    Raises
    ------
    ValueError
        When the shapes do not allow it.
    """
    if mode == "gather":
        return _gather(parts, what)
    first = parts[0]
    if mode is None:
        return first
    if mode == "avg":
        dtype = average_dtype(first.dtype, float_dtype)
        if len(parts) == 1:
            return first.astype(dtype, copy=False)
        _check_shapes(mode, parts, what)
        return _average(parts, weights, dtype)
    if len(parts) == 1:
        return first
    _check_shapes(mode, parts, what)
    combined = _COMBINE[mode]
    if first.dtype == np.float16:
        wide = [part.astype(np.float32) for part in parts]
        return np.asarray(_fold(combined, wide)).astype(np.float16)
    return np.asarray(_fold(combined, parts))


def _fold(ufunc, parts):
    total = ufunc(parts[0], parts[1])
    for part in parts[2:]:
        total = ufunc(total, part)
    return total


def _average(parts, weights, dtype):
    # Half precision is summed in single: its 11 bits would lose a rank's whole contribution.
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    whole = sum(weights)
    total = np.multiply(parts[0], wide.type(weights[0] / whole), dtype=wide)
    for part, weight in zip(parts[1:], weights[1:]):
        total = total + np.multiply(part, wide.type(weight / whole), dtype=wide)
    return np.asarray(total).astype(dtype, copy=False)


def _gather(parts, what):
    if parts[0].ndim == 0:
        return np.array(parts, dtype=parts[0].dtype)
    trailing = {part.shape[1:] for part in parts}
    if len(trailing) > 1:
        raise ValueError(
            f"{what} can't be gathered: the ranks computed shapes "
            f"{[part.shape for part in parts]}, which differ beyond axis 0."
        )
    return np.concatenate(parts)


def _check_shapes(mode, parts, what):
    shape = parts[0].shape
    for part in parts[1:]:
        if part.shape != shape:
            raise ValueError(
                f"{what} can't be reduced with {mode!r}: the ranks computed different shapes, "
                f"{[part.shape for part in parts]}. Reduce over axis 0 in the graph, or use the "
                "mode 'gather'."
            )
