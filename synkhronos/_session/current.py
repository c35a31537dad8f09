"""The current session: all state of sessions at module level is here."""

import threading
from typing import Any, Callable, ContextManager, List, Optional

from synkhronos._session.session import Session
from synkhronos._tracebacks import show_short
from synkhronos.errors import SessionError


class Current:
    """The session that public functions use; `synkhronos.session` begins and ends it."""

    session: Optional[Session] = None
    parent: Optional[int] = None  # the process that forked this one, and keeps the session
    # Sessions that still have memory, which is freed when a call that is in them has returned.
    closed: List[Session] = []  # noqa: RUF012
    report: Any = None  # the counts of the last block of `parallel`
    of_run: Any = None  # the options of `synkhronos run`, which the script's fork() takes
    link: Any = None  # the connection with other machines, in a job on several
    on_loss: Callable[[str], None] = staticmethod(lambda why: None)  # tells a launcher of a death
    lock = threading.RLock()  # held while a session begins or ends
    forking = threading.RLock()  # held while workers are forked; other forks wait for it


def current(caller: str) -> Session:
    """Return the open session, or raise SessionError with the name of its `caller`."""
    session = Current.session
    if session is not None:
        session.require_open()
        return session
    show_short()
    if Current.parent is not None:
        raise SessionError(
            f"{caller} needs workers of its own process: call synkhronos.fork() first. The "
            f"session is of process {Current.parent}, from which this one was forked."
        )
    raise SessionError(
        f"{caller} needs workers: call synkhronos.fork() first. There is no session now."
    )


def call(name: str) -> ContextManager[Session]:
    """Return a context for a call in the current session; `name` is for records and errors."""
    return current(name).call(name)
