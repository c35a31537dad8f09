"""The PortingWarnings of a function: when it is made, and in each call."""

import warnings

from synkhronos import PortingWarning


def told_in(step):
    """Return what a step returns, and the messages of its PortingWarnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PortingWarning)
        result = step()
    return result, [str(each.message) for each in caught if each.category is PortingWarning]


def told(make, *args, calls=3):
    """Make a function, and call it; return it, the messages of its making, and those of each call.

    Warnings other than PortingWarning are dropped.
    """
    f, making = told_in(make)
    return f, making, [told_in(lambda: f(*args))[1] for _ in range(calls)]
