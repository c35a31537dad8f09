"""What a recorded function has moved, in bytes, from its arguments and its result."""

from synkhronos import _host


def size(array):
    """Return the size of an array, of NumPy or on a device; 0 for what is no array."""
    try:
        return array.size * array.dtype.itemsize
    except AttributeError:
        return 0


def exchanged(arguments, result):
    """Return the size of what a rank gives to a reduction inside a function."""
    return sum(map(size, arguments[0]))


def deposited(arguments, result):
    """Return the size of outputs that a rank leaves for the master."""
    return sum(map(size, arguments[1]))


def assigned(arguments, result):
    """Return the size of the rows of a value that a rank takes."""
    _, array, *rows = arguments
    if not rows or rows[0] is None:
        return size(array)
    return size(array) // max(len(array), 1) * len(rows[0])


def taken(arguments, result):
    """Return the size of the rows of an input that were copied."""
    rows = arguments[-1]
    # Consecutive rows are a view of where they are.
    return 0 if isinstance(rows, range) and rows.step > 0 else size(result)


def held(arguments, result):
    """Return the size of the shared variables that a collective is about."""
    command, worker = arguments
    if getattr(command, "rank", None) not in (None, worker.rank):
        return 0
    return sum(size(_host.peek(worker.variables[key])) for key in command.keys)


def combined(arguments, results):
    """Return the size of outputs that the master put together."""
    return sum(map(size, results))


def staged(arguments, result):
    """Return the size of an array that was copied into shared memory."""
    return size(arguments[1])
