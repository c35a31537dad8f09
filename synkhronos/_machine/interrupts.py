"""Delay of Ctrl-C over steps that it would leave half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. Between the system
call that returns a descriptor and the line that stores the descriptor, it would be lost for as long
as the process runs; the same holds for memory and for child processes.
"""

import signal
import threading
from _signal import getsignal as _getsignal  # Python's own make enums of all: ten times as slow
from _signal import signal as _signal
from _thread import get_ident

_SIGINT = int(signal.SIGINT)


class interrupts_held:
    """Delays a Ctrl-C until the end of the block; gives a list, not empty once one came.

    A Ctrl-C in the block is recorded, and raised once when the block ends, also if the block ends
    with another exception. A wait in the block must be short: it can't be interrupted.

    A handler records it, not a signal mask: a mask holds for one thread, and the system would give
    the signal to another thread. In other threads than the main one nothing is done: Python raises
    KeyboardInterrupt in the main thread only.
    """

    __slots__ = ("_held", "_previous")

    def __enter__(self):
        self._held = None
        if get_ident() != threading.main_thread().ident:
            return ()
        if _getsignal(_SIGINT) is None:
            return ()  # a handler outside of Python, which Python could not set again
        held = []
        self._previous = _signal(_SIGINT, lambda *args: held.append(args))
        self._held = held
        return held

    def __exit__(self, kind, error, trace):
        held = self._held
        if held is None:
            return
        # First the handler, so that the signal reaches the one of the user's program. Blocks nest:
        # in an inner block `_previous` is the handler of the outer one, which records the signal.
        _signal(_SIGINT, self._previous)
        if held:
            signal.raise_signal(signal.SIGINT)


def raises_keyboard_interrupt() -> bool:
    """Return whether a Ctrl-C raises KeyboardInterrupt, and no handler of the script's answers."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
