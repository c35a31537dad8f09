"""The current session: the state of sessions that is at module level, and nowhere else."""

import threading
from typing import Any, Callable, ContextManager, List, Optional

from synkhronos._session.session import Session
from synkhronos.errors import SessionError


class Current:
    """Holds the session that public functions use; `synkhronos.session` begins and ends it."""

    session: Optional[Session] = None
    parent: Optional[int] = None  # the process whose session this one left when it was forked
    closed: List[Session] = []  # noqa: RUF012 - with memory to free after a call that is still in
    report: Any = None  # what the last block of `parallel` counts
    of_run: Any = None  # the options for fork() of `synkhronos run`, which a script's fork() takes
    link: Any = None  # the connection with other machines, in a job on several
    on_loss: Callable[[str], None] = staticmethod(lambda why: None)  # tells a launcher
    lock = threading.RLock()  # held while a session begins or ends
    forking = threading.RLock()  # held while its workers are forked; other forks wait for it


def current(caller: str) -> Session:
    """Return the open session, or raise SessionError with the name of its `caller`."""
    session = Current.session
    if session is None:
        raise _no_session(caller)
    session.require_open()
    return session


def call(name: str) -> ContextManager[Session]:
    """Return a context for a call of that name in the current session."""
    session = Current.session
    if session is None:
        raise _no_session(name)
    return session.call(name)


def _no_session(caller):
    if Current.parent is not None:
        return SessionError(
            f"{caller} needs workers of its own process: call synkhronos.fork() first. The "
            f"session is of process {Current.parent}, from which this one was forked."
        )
    return SessionError(
        f"{caller} needs workers: call synkhronos.fork() first. There is no session now."
    )
