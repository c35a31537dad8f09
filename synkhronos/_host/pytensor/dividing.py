"""Serial PyTensor functions can't be divided over the ranks: that needs a rule for each operation.

``synk.parallel`` asks for it. On PyTensor its block is refused before it begins.
"""

from __future__ import annotations

from typing import NoReturn


class CannotDivide(Exception):
    """A function can't be divided over the ranks; the message says why, without a subject."""


def intercept(make) -> NoReturn:
    """Raise NotImplementedError with what to write instead."""
    raise NotImplementedError(
        "synk.parallel divides the graphs of Theano only. With PyTensor write synk.fork(), and "
        "synk.function(...) in place of pytensor.function(...): it scatters its inputs over the "
        "ranks, and synk.ops.all_reduce averages gradients over them."
    )


def divide(inputs, outputs, updates, givens, no_default_updates) -> NoReturn:
    """Raise CannotDivide."""
    raise CannotDivide("is PyTensor's, for whose operations there are no rules")
