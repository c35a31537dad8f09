"""Delay of Ctrl-C over steps that it would leave half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. Between the system
call that returns a descriptor and the line that stores the descriptor, it would be lost for as long
as the process runs; the same holds for memory and for child processes.
"""

import contextlib
import signal
import threading


@contextlib.contextmanager
def interrupts_held():
    """Delay a Ctrl-C until the end of the block; give a list, which is not empty once one came.

    A Ctrl-C in the block is recorded, and raised once when the block ends, also if the block ends
    with another exception. A wait in the block must be short: it can't be interrupted.

    A handler records it, not a signal mask: a mask holds for one thread, and the system would give
    the signal to another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield ()  # Python raises KeyboardInterrupt in the main thread only
        return
    if signal.getsignal(signal.SIGINT) is None:
        yield ()  # a handler outside of Python, which Python could not set again
        return
    held = []
    previous = signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield held
    finally:
        # First the handler, so that the signal reaches the one of the user's program. Blocks nest:
        # in an inner block `previous` is the handler of the outer one, which records the signal.
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)


def raises_keyboard_interrupt() -> bool:
    """Return whether a Ctrl-C raises KeyboardInterrupt, and no handler of the script's answers."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
