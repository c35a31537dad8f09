"""One call from barrier to barrier, and what becomes of the exceptions in it."""

from synkhronos.errors import WorkerDied


class Aborted(Exception):
    """Another rank raised: leave the call and go to the finish barrier."""


class Crossing:
    """One crossing, as a context manager: the start barrier and the finish barrier."""

    __slots__ = ("_command", "_gate")

    def __init__(self, gate, command):
        self._gate, self._command = gate, command

    def __enter__(self):
        self._gate.start(self._command)

    def __exit__(self, kind, error, trace):
        gate = self._gate
        if error is None:
            gate.finish()
            if gate._errors:
                gate.raise_errors()
            return False
        gate.abort()
        if not isinstance(error, Exception):
            return False  # Ctrl-C: out at once; the next start waits for the workers
        if isinstance(error, WorkerDied):
            return False
        gate.finish()
        gate.raise_errors(None if isinstance(error, Aborted) else error)
