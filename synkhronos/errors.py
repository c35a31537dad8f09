"""Exceptions and warnings of Synkhronos: when each is raised, and what to do then.

Wrong arguments raise the built-in ``TypeError`` and ``ValueError``, before any rank runs.
"""

from synkhronos._tracebacks import rendered


class SessionError(RuntimeError):
    """The session is not in a state that allows the call.

    Every public function that needs workers raises it: before :func:`~synkhronos.fork`, after
    :func:`~synkhronos.close`, for an object of an earlier session, or inside another call. The
    message says which of these it is, and what to call first.
    """


class RemoteTraceback(Exception):
    """The traceback of another process, as text: the ``__cause__`` of a :class:`WorkerError`."""

    def __str__(self):
        return "\n" + "".join(str(arg) for arg in self.args)


class WorkerError(RuntimeError):
    """A rank raised while it ran its part of a call.

    Raised in the master once every rank has reached the finish barrier. The session stays usable,
    but some ranks may have applied updates and others not. Functions of
    :func:`~synkhronos.parallel` raise the rank's exception, with this one as its ``__cause__``.
    They apply no updates, except those that serial Theano makes in place before it raises.

    Attributes
    ----------
    rank : int
        The lowest rank that raised.
    host : str
        The name of the machine that it runs on.
    remote_type : str
        The class name of the rank's exception, such as ``"ValueError"``.
    remote_traceback : str
        Its traceback. ``__cause__`` is the exception itself if it was raised in the master, else a
        :class:`RemoteTraceback` that prints this text.
    """

    _pickled = b""  # the class and arguments of the rank's exception

    def __init__(self, message, rank=None, host="", remote_type="", remote_traceback=""):
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback

    _render_traceback_ = rendered


class WorkerDied(RuntimeError):
    """A worker process has ended, and the session with it.

    Raised by the call that notices it, and by every later call until :func:`~synkhronos.close`;
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

    Raised if a :class:`~synkhronos.inputs.Data`, a staged input or an output does not fit, or if a
    limit is reached: file descriptors (``ulimit -n``), addresses (``ulimit -v``), the size of a
    file (``ulimit -f``), inodes of ``/dev/shm``. Free some Data, use smaller arrays, give the
    machine more shared memory (``docker run --shm-size=...``), or raise the limit.
    """

    _lacks_room = False  # whether the machine's shared memory is full, and no limit was reached
    _is_before_ranks = False  # whether it was raised before any rank began the call


class PortingWarning(UserWarning):
    """The script may compute something else than its serial form, or its ranks make it no faster.

    Shown once for each function or variable that it names; the message has the line to write
    instead. ``warnings.filterwarnings("ignore", category=synkhronos.PortingWarning)`` hides it, and
    ``"error"`` raises it in place of the call.
    """
