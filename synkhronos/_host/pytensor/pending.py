"""Operations of the host that are not there for PyTensor yet."""

import contextlib
import threading


class CannotDivide(Exception):
    """Raised for a serial function that can't be divided over ranks."""


compiling = threading.RLock()


def _pending(*args, **kwargs):
    raise NotImplementedError("This is not available on PyTensor yet.")


all_reduce = awaited = compile_number = compile_pushing = divide = draws_of_all_rows = _pending
intercept = is_computed_from = leaves = numbers_of_rows = push = rank_weight = _pending
row_numbers = shared_like = substituted = updates_by_default = _pending


def overlap_reductions(overlap):
    """Do nothing."""


def communicates(function):
    """Return False."""
    return False


@contextlib.contextmanager
def reducing(*args):
    """Do nothing."""
    yield


def axes_of_rows(function, rows_of):
    """Return no axes."""
    return [() for _ in function.maker.fgraph.outputs]


def sliced_by_inputs(expressions, inputs):
    """Return none."""
    return []


def without_row_numbers(expressions, givens, inputs):
    """Return expressions as they are."""
    return expressions, [], True
