"""Serial PyTensor functions can't be divided over the ranks: that needs a rule for each operation.

``synk.parallel`` asks for it. On PyTensor it is refused at the beginning of its block.
"""


class CannotDivide(Exception):
    """A function can't be divided over the ranks; the message says why, without a subject."""


def divide(inputs, outputs, updates, givens, no_default_updates):
    """Raise NotImplementedError."""
    refuse()


def intercept(make):
    """Raise NotImplementedError."""
    refuse()


def refuse():
    """Raise NotImplementedError with what to write instead."""
    raise NotImplementedError(
        "synk.parallel divides the graphs of Theano only. With PyTensor write synk.function in "
        "place of pytensor.function: it scatters its inputs over the ranks."
    )
