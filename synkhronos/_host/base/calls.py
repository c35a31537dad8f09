"""The call that this rank computes for, as operations of compiled functions see it.

    replica ──▶ reducing(comm, weights, rank) ──▶ compiled function ──▶ perform: current_call()

An operation is part of a function that the host library calls, so it is given no communicator.
"""

import contextlib
import contextvars

_current = contextvars.ContextVar("synkhronos call", default=None)

# Return the `Call` that this rank computes for. Elsewhere, as in a function that is not the ranks'
# or in another thread, None: there is no other rank to reduce with, and one rank has all rows.
current_call = _current.get


class Call:
    """The state of a running call: the communicator, and the weights of the ranks."""

    def __init__(self, comm, weights, rank, recorder):
        self.landing_place = comm.landing_place
        self.rank = rank
        self.weights = weights
        self.weight = weights[rank] * len(weights) / sum(weights)
        self.failures = []
        self._comm, self._recorder = comm, recorder

    def reduce(self, arrays, ops, targets, bucket=None):
        """Return the reduced arrays; see `Arrays.exchange`, and `Arrays.end` for a bucket."""
        if bucket is None:
            return self._recorded(arrays, self._comm.exchange, arrays, ops, self.weights, targets)
        everything = bucket, arrays, ops, self.weights, targets
        return self._recorded(arrays, self._comm.end, *everything)

    def begin(self, bucket, arrays, ops):
        """Begin to reduce a bucket; see `Arrays.begin`."""
        self._recorded((), self._comm.begin, bucket, arrays, ops, self.weights)

    def _recorded(self, moved, method, *arguments):
        try:
            if self._recorder is None:
                return method(*arguments)
            with self._recorder.span("reduce") as span:
                results = method(*arguments)
                span.moved(*moved)
                return results
        except BaseException as error:
            self.failures.append(error)
            raise


@contextlib.contextmanager
def reducing(comm, weights, rank, recorder=None):
    """Send AllReduces through a communicator inside a with block."""
    call = Call(comm, weights, rank, recorder)
    token = _current.set(call)
    try:
        yield
        comm.end_all()
    except BaseException:
        # The library raises another exception in its place, without the attributes of ours.
        if call.failures:
            raise call.failures[0] from None
        raise
    finally:
        _current.reset(token)


def rows_of_ranks():
    """Return the numbers of rows of all ranks in the running call, and this rank; else None, 0."""
    call = current_call()
    return (None, 0) if call is None else (call.weights, call.rank)


def current_weight() -> float:
    """Return the weight of this rank in the running call; outside of a call, 1."""
    call = current_call()
    return 1.0 if call is None else float(call.weight)
