"""Delay of signal handlers over steps that their exceptions would leave half done.

Python runs a signal handler between any two bytecodes of the main thread. If the handler raises, as
that of Ctrl-C raises KeyboardInterrupt, the code that it has interrupted ends there. A descriptor
is lost if that happens between the system call that opens it and the line that stores it: it stays
open as long as the process runs. The same holds for memory and for child processes.

A handler's exception is no error of the code that it has interrupted. So code that turns errors
into others says ``except raised_here(Exception)``. An exception is a handler's if its traceback
passes through the code of a handler.
"""

import functools
import inspect
import signal
import sys
import threading
import traceback
from _signal import getsignal as _getsignal  # those of `signal` return enums: ten times as slow
from _signal import signal as _signal
from _thread import get_ident
from time import monotonic
from typing import Optional, Tuple, Type
from weakref import WeakSet

_NUMBERS = sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
_SIGINT = int(signal.SIGINT)
_SECONDS = 0.001  # until the handlers are read again: to read all takes 4 us


class _HandledSignals:
    """The signals that have handlers in Python, as they were at most `_SECONDS` ago."""

    def __init__(self):
        self._numbers, self._until = (), 0.0
        self._codes = WeakSet()  # also of replaced handlers, which may still run

    def numbers(self):
        """Return the numbers of the signals."""
        now = monotonic()
        if now >= self._until:
            self._look()
            self._until = now + _SECONDS
        return self._numbers

    def codes(self):
        """Return the code of all handlers that are set now or were set before."""
        self._look()
        return self._codes

    def _look(self):
        self._numbers = sorted(handled())
        self._codes.update({_code_of(_getsignal(number)) for number in self._numbers} - {None})


def handled():
    """Return the numbers of the signals that have a handler in Python now."""
    return {number for number in _NUMBERS if callable(_getsignal(number))}


_handled = _HandledSignals()


class interrupts_held:
    """Delays signal handlers until the block ends; gives a dict with an item for each signal due.

    The handler of a signal that came in the block is called once, also after an exception. A wait
    in the block must be short: it can't be interrupted.

    In the block another handler records the signals. A signal mask holds for one thread, and the
    system would give the signal to another one. Only the main thread, in which Python runs
    handlers, delays them. Signals without a handler in Python are not delayed.
    """

    __slots__ = ("_held", "_previous")

    def __enter__(self):
        self._held = None
        if get_ident() != threading.main_thread().ident:
            return ()
        outer = getattr(_getsignal(_SIGINT), "__self__", None)
        if outer.__class__ is interrupts_held and outer._held is not None:
            return outer._held  # a block around this one delays everything already
        previous = self._previous = {}
        for number in _handled.numbers():
            handler = _getsignal(number)
            if callable(handler):
                previous[number] = handler
        answer = self._answer
        try:
            for number in previous:
                _signal(number, answer)
            held = self._held = {}
            return held
        except BaseException:  # raised by a handler that is not replaced yet, or was just set
            self._held = None
            self._restore()
            raise

    def _answer(self, number, frame):
        """Record a signal in the block; call the script's handler before the block and after it."""
        if self._held is None:
            self._previous[number](number, frame)
        else:
            self._record(number, frame)

    def _record(self, number, frame):
        self._held[number] = functools.partial(self._previous[number], number, frame)

    def __exit__(self, kind, error, trace):
        held = self._held
        if held is None:
            return
        # Restored first, so that later signals reach the script's handlers or an outer block's.
        try:
            self._restore()
        except BaseException:  # raised by a handler that was restored already
            self._restore()
            raise
        finally:
            self._held = None
            if held:
                _call_all(held)

    def _restore(self):
        for number, handler in self._previous.items():
            # If another handler is set, a handler of the script has set it.
            if getattr(_getsignal(number), "__self__", None) is self:
                _signal(number, handler)


class interrupts_raised_later(interrupts_held):
    """Calls signal handlers at once, but raises their exceptions at the end of the block.

    For long blocks: the dict that it gives has an item for each handler that has raised.
    """

    __slots__ = ()

    def _record(self, number, frame):
        try:
            self._previous[number](number, frame)
        except BaseException as error:
            self._held[number] = functools.partial(_raise, error)


def _call_all(held):
    """Call all delayed handlers, also after one has raised."""
    handler = held.pop(next(iter(held)))
    try:
        # Called directly: raising the signal again would write it to the pipe of `set_wakeup_fd`
        # once more, and asyncio would run its handler twice.
        handler()
    finally:
        if held:
            _call_all(held)


def _raise(error):
    raise error


def raised_here(*kinds: Type[BaseException]) -> Tuple[Type[BaseException], ...]:
    """Return exception classes for an except clause; none if a signal handler has raised.

    >>> try:
    ...     raise TimeoutError
    ... except raised_here(OSError):
    ...     print("the system's")
    the system's
    """
    return () if is_of_handler(sys.exc_info()[1]) else kinds


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler, or a function that it called, has raised an exception."""
    return _frame_of_handler(_frames(error)) is not None


def raised_by_handler(error: BaseException) -> Optional[BaseException]:
    """Return the signal handler's exception that this one is or was raised in handling, or None.

    Host libraries catch it and raise another one. Exceptions raised ``from`` it don't count.
    """
    raised = handler = None
    while True:
        frames = _frames(error)
        frame = _frame_of_handler(frames)
        if frame is not None and handler in (None, frame):
            raised, handler = error, frame
        before = error.__context__
        if before is None or error.__suppress_context__:
            return raised
        # Callers may be handling an earlier exception, which has nothing to do with this one.
        if before.__traceback__ is None or before.__traceback__.tb_frame not in frames:
            return raised
        error = before


def _frames(error):
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _frame_of_handler(frames):
    codes = _handled.codes()
    return next((frame for frame in frames if frame.f_code in codes), None)


def _code_of(handler):
    """Return the code of a handler that is written in Python; None for others."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not inspect.isroutine(handler) and callable(handler):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)  # a method has that of its function
