"""A Ctrl-C that waits until memory, descriptors and processes can't be lost by it."""

import contextlib
import signal
import threading


@contextlib.contextmanager
def interrupts_held():
    """Delay a Ctrl-C until the end of the block.

    A handler does it. A signal mask holds for one thread only, and another thread would take the
    signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets a KeyboardInterrupt
        return
    if signal.getsignal(signal.SIGINT) is None:
        yield  # the program that embeds Python handles it
        return
    held = []
    previous = signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)
