"""Check selections of rows, the arguments ``batch`` and ``batch_s``, and bring them into two forms.

    None, int, slice, range -> range           consecutive rows, or every n-th: a view, no copy
    list, array, mask       -> int64 array     any rows; each rank copies its own

Nothing here knows of ranks or shared memory.
"""

import contextlib
import operator
import sys

import numpy as np

from synkhronos._wording import count, is_bool, sentence, shown

ANY_LENGTH = sys.maxsize  # the length for a check without rows: all indices are within it

_BOOLS = {bool, np.bool_}
_SEQUENCES = {list, tuple, range, np.ndarray}


def select_rows(name, selection, length, wrong_dtype=ValueError):
    """Return the selected rows of `length` rows, as a range or an array of indices >= 0.

    `selection` is None (all rows), an int n (the first n), a slice, a range (the rows that it
    counts), or a list, tuple or 1-d array of integers, or of bools, one for each row.

    Raises TypeError for another kind of selection, `wrong_dtype` for a list or array of another
    dtype, ValueError for another shape and for rows that don't exist. `name` is the argument's.
    """
    if selection is None:
        return range(length)
    if isinstance(selection, slice):
        return _from_slice(name, selection, length)
    if isinstance(selection, range):
        return _from_range(name, selection, length)
    if isinstance(selection, (list, tuple)) or _has_axes(selection):
        return _from_array(name, selection, length, wrong_dtype)
    try:
        if is_bool(selection):
            raise TypeError
        first = operator.index(selection)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, a slice, or a list or array of integers or bools, got "
            f"{shown(selection)}."
        ) from None
    if not 0 <= first <= length:
        raise ValueError(
            f"{name}={shown(first)} asks for the first {first} rows, but {_there_are(length)}."
        )
    return range(first)


def _there_are(length):
    return f"there {'is' if length == 1 else 'are'} {count(length, 'row')}"


def _check_bounds(name, lowest, highest, length):
    if not -length <= lowest <= highest < length:
        wrong = highest if highest >= length else lowest
        raise ValueError(f"{name} asks for row {shown(wrong)}, but {_there_are(length)}.")


def _from_slice(name, selection, length):
    try:
        if any(map(is_bool, (selection.start, selection.stop, selection.step))):
            raise TypeError("bools are no bounds")
        rows = range(length)[selection]
        bounds = [b for b in (selection.start, selection.stop) if b is not None]
        outside = any(not -length <= operator.index(bound) <= length for bound in bounds)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}={selection} is not a slice of rows: {sentence(error)}") from None
    if outside:
        raise ValueError(f"{name}={selection} reaches beyond the rows: {_there_are(length)}.")
    return rows


def _from_range(name, selection, length):
    if not selection:
        return range(0)
    lowest, highest = sorted((selection[0], selection[-1]))
    _check_bounds(name, lowest, highest, length)
    if lowest >= 0:
        return selection
    if highest < 0:
        return range(selection.start + length, selection.stop + length, selection.step)
    # The rows go on from the last to the first, or back, as no range of indices >= 0 does.
    picks = np.array(selection, np.int64)
    picks[picks < 0] += length
    return picks


def _has_axes(selection):
    return isinstance(selection, np.ndarray) and selection.ndim > 0


def _is_nested(selection):
    return not _SEQUENCES.isdisjoint(map(type, selection)) and any(
        isinstance(item, (list, tuple, range)) or _has_axes(item) for item in selection
    )


def _from_array(name, selection, length, wrong_dtype):
    is_array = isinstance(selection, np.ndarray)
    # NumPy would warn of a list of lists of unequal length, so it gets no nested lists.
    is_nested = not is_array and _is_nested(selection)
    picks = None if is_nested else np.asarray(selection)
    if np.ma.is_masked(selection):
        raise wrong_dtype(f"{name} has masked items, which are no rows.")
    if is_nested or picks.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got {shown(selection)}.")
    if picks.size == 0 and not is_array:
        picks = picks.astype(np.int64)
    if picks.dtype.kind == "f" and not is_array:
        # NumPy makes floats of a list with signed and unsigned 64-bit integers.
        with contextlib.suppress(TypeError, OverflowError):
            picks = np.array(list(map(operator.index, selection)), np.int64)
    if picks.dtype == bool:
        if length not in (len(picks), ANY_LENGTH):
            raise ValueError(
                f"{name} is a mask of {count(len(picks), 'bool')}, but {_there_are(length)}: it "
                "must have one for each."
            )
        return np.flatnonzero(picks)
    if not is_array and not _BOOLS.isdisjoint(map(type, selection)):
        raise wrong_dtype(f"{name} must hold integers or bools, not both: {shown(selection)}.")
    if picks.dtype.kind not in "iu":
        raise wrong_dtype(f"{name} must hold integers or bools, got dtype {picks.dtype}.")
    if picks.size:
        _check_bounds(name, int(picks.min()), int(picks.max()), length)
    picks = picks.astype(np.int64)
    picks[picks < 0] += length
    return picks


def select_each(name, selection, lengths):
    """Return the selected rows of each rank; `lengths` are the numbers of rows of the ranks.

    `selection` holds for all ranks, or is a list with one for each: None, a slice, a range, or a
    list or array of integers.
    """
    n_ranks = len(lengths)
    of_ranks = [selection] * n_ranks
    if isinstance(selection, (list, tuple)):
        # An array of no dimensions is a number like any other.
        kinds = {
            isinstance(item, (slice, range, list, tuple)) or _has_axes(item) for item in selection
        }
        if kinds == {True}:
            of_ranks = list(selection)
            if len(of_ranks) != n_ranks:
                raise TypeError(
                    f"{name} must be one selection for all ranks, or one for each of the {n_ranks}"
                    f", got {len(of_ranks)}."
                )
        elif len(kinds) > 1:
            raise TypeError(f"{name} mixes numbers and selections: {shown(selection)}.")
    elif not (selection is None or isinstance(selection, (slice, range)) or _has_axes(selection)):
        raise TypeError(
            f"{name} must be a slice, a list or array of integers, or a list with one of these for "
            f"each rank, got {shown(selection)}."
        )
    return [
        select_rows(f"{name} (rank {rank})", rows, length, TypeError)
        for rank, (rows, length) in enumerate(zip(of_ranks, lengths))
    ]
