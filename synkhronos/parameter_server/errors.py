"""Exceptions of the parameter server: what raises each, and what to do then.

Wrong arguments raise the built-in ``TypeError`` and ``ValueError`` in the caller's thread, and
leave the store as it was.
"""

from __future__ import annotations


class ParameterServerError(RuntimeError):
    """A call of the parameter server has failed; the base class of the others."""


class OutOfTurn(ParameterServerError):
    """A call came in a state that does not allow it.

    Examples: a second push of a device in one round, a second pull while one waits, a call before
    ``init`` or a second ``init``. The message names the key and the device, and what to call first.
    """


class StoreClosed(ParameterServerError):
    """The store is closed: raised by later calls, and by waits that a close has cancelled."""


class RoundTimeout(ParameterServerError, TimeoutError):
    """A wait has reached its timeout. The push or pull goes on; you may wait for it again.

    Attributes
    ----------
    key : int or str
    missing : list of int
        The devices of this process that have not pushed in this round.
    """

    def __init__(self, message, key=None, missing=()):
        super().__init__(message)
        self.key = key
        self.missing = list(missing)


class CallbackFailed(ParameterServerError):
    """A callback or an updater has raised; its exception is the ``__cause__``."""


class WeightsDiffer(ParameterServerError):
    """Weights of a device differ from those of the server.

    Attributes
    ----------
    error : float
        The sum of the absolute differences divided by that of the absolute weights.
    """

    def __init__(self, message, error=float("nan")):
        super().__init__(message)
        self.error = error


class ProcessLost(ParameterServerError):
    """A process of the job has died, or has left before the others.

    Attributes
    ----------
    rank : int or None
        The number of the worker, or of the server.
    host : str
    reason : str
    """

    def __init__(self, message, rank=None, host="", reason=""):
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.reason = reason


class WorkerLost(ProcessLost):
    """A worker has died or left, so that a round of ``dist_sync`` can't be closed."""


class ServerLost(ProcessLost):
    """A server has died, and with it the weights that it kept. The store can't go on."""
