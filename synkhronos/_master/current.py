"""The session that is current: the only state of the package."""

import threading
from typing import ContextManager, List, Optional

from synkhronos._master.session import Session
from synkhronos.errors import SessionError


class Current:
    """Hold the session that public functions use; `session` begins and ends it."""

    session: Optional[Session] = None
    closed: List[Session] = []  # noqa: RUF012 - that calls are still in
    lock = threading.RLock()  # is taken where one begins or ends


def current(caller: str) -> Session:
    """Return the open session, or raise SessionError, saying what `caller` needs."""
    session = _session_for(caller)
    session.require_open()
    return session


def call(name: str) -> ContextManager[Session]:
    """Return a context in which the current session is in a call of that name."""
    return _session_for(name).call(name)


def _session_for(caller):
    session = Current.session
    if session is None:
        raise SessionError(
            f"{caller} needs workers: call synkhronos.fork() first. There is no session now."
        )
    return session
