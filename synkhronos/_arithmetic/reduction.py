"""Reduction of the parts that the ranks computed to one result.

``sum prod min max`` combine element by element. ``avg`` weights each part with its number of rows,
so that it equals the mean over all rows. ``gather`` joins parts in rank order, along axis 0 or that
of a `Gather`; it stacks 0-d parts, and returns a list of parts that differ in other axes. ``None``
takes the first part as it is.
"""

import functools
from typing import NamedTuple

import numpy as np

from synkhronos._arithmetic.blocks import plain_name
from synkhronos._arithmetic.operations import HALF, OPERATIONS, constant, divides, wide


class Gather(str):
    """The mode "gather" for an output whose rows are on another axis than 0."""

    def __new__(cls, mode="gather", axis=0):
        """Return the mode, equal to the string."""
        self = super().__new__(cls, mode)
        self.axis = axis
        return self


def axis_of(mode):
    """Return the axis along which a mode joins the parts."""
    return getattr(mode, "axis", 0)


def _beyond(shape, axis):
    """Return the lengths of all other axes."""
    return (*shape[:axis], *shape[axis + 1 :])


def parse_mode(mode):
    """Return a mode without ``c_``, which asks for the CPU; raise ValueError for anything else."""
    if mode is None:
        return None
    plain = plain_name(mode, (*OPERATIONS, "gather"))
    if plain is None:
        raise ValueError(
            f"{mode!r} is not a reduce mode. Expected one of {', '.join(OPERATIONS)}, gather, the "
            "same with the prefix 'c_' (reduced by the CPU), or None."
        )
    return plain


def result_dtype(mode, dtype, float_dtype):
    """Return the dtype of a reduced output: that of its parts, but a float for averages."""
    if mode is None:
        return None
    dtype = np.dtype(dtype)
    is_rounded = divides(mode) and dtype.kind not in OPERATIONS[mode].kinds
    return np.dtype(float_dtype) if is_rounded else dtype


def combine(mode, parts, weights, dtype):
    """Reduce the parts of one output, in rank order, to a new array or the first part.

    There is a part for each rank that computed, at least one. `weights` are their numbers of rows;
    only the ratios matter. For the `dtype` see `result_dtype`. If shapes differ, the message of the
    ValueError begins with its verb: the caller puts the output's name before it.
    """
    if mode is None:
        return parts[0]
    if mode == "gather":
        return _gather(parts, axis_of(mode))
    if len(parts) == 1:
        return parts[0].astype(dtype, copy=False)
    shape = parts[0].shape
    for part in parts:
        if part.shape != shape:
            raise ValueError(_about_shapes(mode, [part.shape for part in parts]))
    within = dtype if dtype.char != HALF else wide(dtype)
    if parts[0].dtype is not within:
        parts = [part.astype(within) for part in parts]
    operation, divisor = OPERATIONS[mode], 1
    if operation.divides:
        divisor = len(weights)
        if weights.count(weights[0]) != divisor:
            parts = [part * within.type(weight) for part, weight in zip(parts, weights)]
            divisor = sum(weights)
    first, second, *others = parts
    result = operation.combine(first, second, out=np.empty(shape, within))
    for part in others:
        operation.combine(result, part, out=result)
    if divisor != 1:
        # Divided last: numbers of rows and their sums are often exact where the ratios are not. Not
        # in place without axes: NumPy then looks for overlaps, for longer than it divides.
        quotient = result if shape else np.empty(shape, within)
        result = np.divide(result, constant(within, divisor), out=quotient)
    return result if within is dtype else result.astype(dtype)


class Partial(NamedTuple):
    """The combined parts of several ranks; for an average weighted, but not divided yet."""

    part: np.ndarray
    n_parts: int


def combine_some(mode, parts, weights):
    """Combine the parts of one machine's ranks to a `Partial`, for `combine_of_machines`.

    Return None if they can't be combined here: for a mode that does not combine element by element,
    for parts of different shapes, and for an average of integers, whose dtype the master knows.
    """
    dtype = parts[0].dtype
    if mode in (None, "gather") or len({part.shape for part in parts}) > 1:
        return None
    if divides(mode) and dtype.kind not in OPERATIONS[mode].kinds:
        return None
    return Partial(np.asarray(_reduced(mode, parts, weights, wide(dtype))), len(parts))


def combine_of_machines(mode, parts, weights, dtype):
    """Reduce as `combine` does. If ranks share a `Partial`, the first has it, the others None."""
    if not any(isinstance(part, Partial) for part in parts):
        return combine(mode, parts, weights, dtype)
    shapes, weighted = [], []
    for part, weight in zip(parts, weights):
        if isinstance(part, Partial):
            shapes += [part.part.shape] * part.n_parts
            weighted.append((part.part, 1))
        elif part is not None:
            shapes.append(part.shape)
            weighted.append((part, weight))
    if len({*shapes}) > 1:
        raise ValueError(_about_shapes(mode, shapes))
    within, total = wide(dtype), sum(weights)
    result = _reduced(mode, *zip(*weighted), within)
    return np.asarray(result / within.type(total) if divides(mode) else result, dtype)


def _reduced(mode, parts, weights, within):
    """Return the reduction in the dtype `within`, without the division of an average."""
    parts = [part.astype(within, copy=False) for part in parts]
    if divides(mode):
        parts = [part * within.type(weight) for part, weight in zip(parts, weights)]
    return functools.reduce(OPERATIONS[mode].combine, parts)


def _about_shapes(mode, shapes):
    return (
        f"can't be reduced with {mode!r}: the ranks computed different shapes, {shapes}. Reduce "
        "over axis 0 in the graph, or use the mode 'gather'."
    )


def _gather(parts, axis):
    if parts[0].ndim == 0:
        return np.array(parts, dtype=parts[0].dtype)
    if len({_beyond(part.shape, axis) for part in parts}) > 1:
        return [part.copy() for part in parts]  # copied, because their memory is used again
    return np.concatenate(parts, axis)


class Accumulator:
    """Reduces the values of one output over slices, one by one; mode None keeps the last value.

    `rows` is the number of rows of all slices together, `what` the output's name in messages.
    """

    def __init__(self, mode, rows, what):
        self._mode, self._rows, self._what = mode, rows, what
        self._total = None

    def add(self, value, rows):
        """Add the value of a slice that has `rows` rows."""
        if self._mode == "gather":
            self._total = [value] if self._total is None else [*self._total, value]
            return
        if divides(self._mode):
            # Integers are averaged in float64.
            within = wide(value.dtype) if value.dtype.kind in "fc" else np.dtype(np.float64)
            # With `dtype`: NumPy 1 would compute in the array's float16.
            value = np.multiply(value, within.type(rows), dtype=within)
        elif self._mode is not None and value.dtype.char == HALF:
            value = value.astype(wide(value.dtype))
        if self._total is None or self._mode is None:
            self._total = value
        elif np.shape(self._total) != np.shape(value):
            raise ValueError(
                f"{self._what} can't be reduced with {self._mode!r}: the slices gave different "
                f"shapes, {np.shape(self._total)} and {np.shape(value)}. Reduce over axis 0 in the "
                "graph, or use the mode 'gather'."
            )
        else:
            self._total = OPERATIONS[self._mode].combine(self._total, value)

    def result(self):
        """Return the reduced value."""
        if self._mode is None:
            return self._total  # may be of any type, as it is not reduced
        if self._mode == "gather":
            shapes, axis = [part.shape for part in self._total], axis_of(self._mode)
            if len({_beyond(shape, axis) for shape in shapes}) > 1:
                # No list of parts, because a rank hands over one array for each output.
                raise ValueError(
                    f"{self._what} can't be gathered: the slices gave shapes that differ beyond "
                    f"axis {axis}, {shapes}. Call the function without num_slices."
                )
            return _gather(self._total, axis)
        if divides(self._mode):
            self._total = self._total / self._total.dtype.type(self._rows)
        return np.asarray(self._total)
