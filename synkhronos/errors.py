"""The exceptions that are ours: who raises each, and what to do about it.

Wrong arguments raise the built-in ``TypeError`` and ``ValueError``, before anything is launched.
"""


class SessionError(RuntimeError):
    """The session is not in a state that allows the call.

    Raised by every public function that needs workers: before :func:`~synkhronos.fork`, after
    :func:`~synkhronos.close`, when an object of an earlier session is used, or when one call is
    made from inside another. The message says which, and what to call first.
    """


class RemoteTraceback(Exception):
    """The traceback of another process, as text: the ``__cause__`` of a :class:`WorkerError`."""

    def __str__(self):
        return "\n" + "".join(str(arg) for arg in self.args)


class WorkerError(RuntimeError):
    """A rank raised while it ran its part of a call.

    Raised in the master once every rank has reached the finish barrier. The session stays usable;
    updates may have been applied on some ranks and not on others.

    Attributes
    ----------
    rank : int
        The lowest rank that raised.
    host : str
        The name of the machine that it runs on.
    remote_type : str
        The class name of what it raised, such as ``"ValueError"``.
    remote_traceback : str
        Its traceback; ``__cause__`` is the exception itself where it was raised in the master,
        else a :class:`RemoteTraceback` that prints this text.
    """

    def __init__(self, message, rank=None, host="", remote_type="", remote_traceback=""):
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class WorkerDied(RuntimeError):
    """A worker process is gone, and the session with it.

    Raised by the call that noticed, and by every later call, until :func:`~synkhronos.close`;
    after that :func:`~synkhronos.fork` starts a new session. The other workers have been stopped.

    Attributes
    ----------
    rank : int
        The rank that died.
    exitcode : int or None
        Its exit status; a negative number is the signal that killed it.
    """

    def __init__(self, message, rank=None, exitcode=None):
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode


class SharedMemoryFull(MemoryError):
    """There is no room left in the shared memory of this machine.

    Raised when a :class:`~synkhronos.inputs.Data`, a staged input or an output does not fit, and
    when the process has no file descriptor left for it. Free some Data, or give the machine more
    (``/dev/shm``; ``docker run --shm-size=...``) and the process more (``ulimit -n``).
    """
