"""The running call, for operations that reduce over the ranks.

    replica ──▶ reducing(comm, weights, rank) ──▶ compiled function ──▶ perform: current_call()

The host library runs the operations and passes them no communicator; they find it here.
"""

import contextlib
import contextvars

_current = contextvars.ContextVar("synkhronos call", default=None)

# Return the `Call` that this rank runs. In a plain function of the host library, or in another
# thread, return None: no other rank takes part, and this one has all rows.
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
        # The host library replaces it by an exception of its own, without our attributes.
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
