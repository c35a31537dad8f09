"""Parts of messages and warnings, and checks of arguments for several public functions."""

import difflib
import operator
import re
import sys
import warnings

import numpy as np

from synkhronos._escapes import printable
from synkhronos.errors import PortingWarning

MAX_DIMENSIONS = 32  # NumPy's limit
MOST_CHARACTERS = 80  # longer names are cut in tables and pictures


def count(number, noun):
    """Return a number with its noun, in the plural except for 1: "1 row", "2 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shown(value, length=80):
    """Return the representation of any value for an error message, cut to `length` characters."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


def sentence(error):
    """Return the message of an exception, with a full stop at its end; see `printable`."""
    text = printable(str(error).strip()) or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def is_bool(value):
    """Return whether a value is a bool: arguments that are numbers refuse bools."""
    return isinstance(value, (bool, np.bool_))


def truth(name, value):
    """Return an argument as a bool; raise TypeError if it has no truth value."""
    if value is True or value is False:  # outside the try, so that no signal handler raises in it
        return value
    try:
        return bool(value)
    except (TypeError, ValueError):  # raised by variables, and by arrays of several items
        raise TypeError(f"{name} must be True or False, got {shown(value)}.") from None


def whole_number(name, value, lowest, highest=None):
    """Return an argument as an int; raise unless it is an integer from `lowest` to `highest`."""
    try:
        if is_bool(value):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {shown(value)}.") from None
    if number < lowest or (highest is not None and number > highest):
        limits = f"from {lowest} to {highest}" if highest is not None else f"at least {lowest}"
        raise ValueError(f"{name} must be {limits}, got {shown(number)}.")
    return number


def seconds(name, value):
    """Return an argument that is a time in seconds, or None; raise for anything else."""
    if value is None:
        return None
    if is_bool(value) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number of seconds or None, got {shown(value)}.")
    if not value >= 0:
        raise ValueError(f"{name} must not be negative, got {shown(value)}.")
    return float(value)


def shape_of(shape):
    """Return an argument `shape` as a tuple of int; raise for anything but a few integers."""
    try:
        # Other types can look like sequences of integers: sets, bytes, variables of a graph.
        if not isinstance(shape, (list, tuple, range, np.ndarray)) or any(map(is_bool, shape)):
            raise TypeError
        lengths = tuple(operator.index(n) for n in shape)
    except TypeError:
        raise TypeError(f"shape must be a sequence of integers, got {shown(shape)}.") from None
    if len(lengths) > MAX_DIMENSIONS:
        raise ValueError(
            f"shape must have at most {MAX_DIMENSIONS} dimensions, got {len(lengths)}: "
            f"{shown(shape)}."
        )
    return lengths


def one_line(name) -> str:
    """Return a name on one line, with unprintable characters escaped and a long name cut."""
    text = printable(str(name), kept="")
    if len(text) <= MOST_CHARACTERS:
        return text
    # Cut in the middle: the name of a nameless function is a path, and ends with a line number.
    return f"{text[: MOST_CHARACTERS // 2 - 3]}...{text[-MOST_CHARACTERS // 2 :]}"


def nearest(name, known) -> str:
    """Return " Perhaps you meant X." for a name that is near a known one, or an empty string.

    >>> nearest("alhpa", ["alpha", "tau"])
    ' Perhaps you meant alpha.'
    """
    by_small = {each.lower(): each for each in known}
    found = difflib.get_close_matches(str(name).lower(), by_small, 1)
    return f" Perhaps you meant {by_small[found[0]]}." if found else ""


def without_folder(name) -> str:
    """Return a name, without the folder if it is an absolute path with a line number."""
    text = str(name)
    return text.rpartition("/")[2] if re.fullmatch(r"/.*:\d+", text, re.DOTALL) else text


def line_of_user():
    """Return the file, the line and the module's name of the script's call into the package."""
    frame = sys._getframe(1)
    inside = ("synkhronos.", "theano.", "pytensor.")
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(inside):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")


def advise(message: str) -> None:
    """Warn with a PortingWarning that points to the script's line, even if it was shown before."""
    file, line, module = line_of_user()
    warnings.warn_explicit(message, PortingWarning, file, line, module)
