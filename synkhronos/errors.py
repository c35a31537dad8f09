"""Exceptions and warnings of Synkhronos: what raises each, and what to do then.

Wrong arguments raise the built-in ``TypeError`` and ``ValueError``, before a rank runs anything.
"""


class SessionError(RuntimeError):
    """The session is not in a state that allows the call.

    Raised by every public function that needs workers: before :func:`~synkhronos.fork`, after
    :func:`~synkhronos.close`, when an object of an earlier session is used, or when one call is
    made from inside another. The message says which of these, and what to call first.
    """


class RemoteTraceback(Exception):
    """The traceback of another process, as text: the ``__cause__`` of a :class:`WorkerError`."""

    def __str__(self):
        return "\n" + "".join(str(arg) for arg in self.args)


class WorkerError(RuntimeError):
    """A rank raised while it ran its part of a call.

    Raised in the master once every rank has reached the finish barrier. The session stays usable;
    updates may have been applied on some ranks and not on others. Functions of
    :func:`~synkhronos.parallel` raise the rank's exception, with this one as its ``__cause__``, and
    apply no update, but for those that serial Theano makes in place before it raises.

    Attributes
    ----------
    rank : int
        The lowest rank that raised.
    host : str
        The name of the machine that it runs on.
    remote_type : str
        The class name of the rank's exception, such as ``"ValueError"``.
    remote_traceback : str
        Its traceback. ``__cause__`` is the exception itself if the master raised it, else a
        :class:`RemoteTraceback` that prints this text.
    """

    _pickled = b""  # the class and arguments of the rank's exception

    def __init__(self, message, rank=None, host="", remote_type="", remote_traceback=""):
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class WorkerDied(RuntimeError):
    """A worker process has ended, and the session with it.

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
    """The shared memory of this machine is full.

    Raised when a :class:`~synkhronos.inputs.Data`, a staged input or an output does not fit, and
    when the process has no file descriptor left for it (``ulimit -n``), no address (``ulimit -v``),
    may make no file so large (``ulimit -f``), or ``/dev/shm`` has no inode left. Free some Data,
    use smaller arrays, or allow the machine more shared memory (``docker run --shm-size=...``) or
    the process more.
    """

    _lacks_room = False  # whether the machine's shared memory is full; else a limit is reached
    _is_before_ranks = False  # whether no rank had begun the call, so that it has no effect


class PortingWarning(UserWarning):
    """The script may not do what its serial form did, or gains nothing from its ranks.

    Shown once for each function or variable that it names; the message has the line to write
    instead. ``warnings.filterwarnings("ignore", category=synkhronos.PortingWarning)`` hides it, and
    ``"error"`` raises it in place of the call.
    """
