"""Checks of arguments that many public functions make."""

import operator


def sentence(error):
    """Return what something else has raised, as words that end with a full stop."""
    text = str(error).strip() or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def whole_number(name, value, lowest, highest=None):
    """Return an argument as an int, from `lowest` to `highest`.

    Raises ``TypeError`` for what is no integer, ``ValueError`` for one beyond the limits.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}.") from None
    if number < lowest or (highest is not None and number > highest):
        limits = f"from {lowest} to {highest}" if highest is not None else f"at least {lowest}"
        raise ValueError(f"{name} must be {limits}, got {number}.")
    return number
