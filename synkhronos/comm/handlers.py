"""Tables of the methods that take messages."""


class Handlers(dict):
    """Name of a message -> the method that takes it; raises ValueError for other names.

    >>> Handlers(push=print, pull=print)["puhs"]
    Traceback (most recent call last):
    ValueError: the message 'puhs' is unknown here: known are push, pull.
    """

    def __missing__(self, name):
        known = ", ".join(self)
        raise ValueError(f"the message {name!r} is unknown here: known are {known}.")
