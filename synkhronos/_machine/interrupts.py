"""Delay of signal handlers over steps that their exceptions would leave half done.

Python runs a signal handler between any two bytecodes of the main thread. What it raises, as a
Ctrl-C raises KeyboardInterrupt, ends what runs there. Between the system call that returns a
descriptor and the line that stores the descriptor, it would be lost for as long as the process
runs; the same holds for memory and for child processes.

What a handler raises is the script's, and no error of the code that it has interrupted: code that
turns errors into others says ``except raised_here(Exception)``. An exception is a handler's if its
traceback passes through the code of a handler.
"""

import functools
import inspect
import signal
import sys
import threading
from _signal import getsignal as _getsignal  # Python's own make enums of all: ten times as slow
from _signal import signal as _signal
from _thread import get_ident
from time import monotonic
from typing import Optional, Tuple, Type
from weakref import WeakSet

_NUMBERS = sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
_SIGINT = int(signal.SIGINT)
_SECONDS = 0.001  # for so long it is known which signals have handlers: looking at all takes 4 us


class _Handled:
    """The signals that have handlers in Python; a handler may have been set since `_SECONDS`."""

    def __init__(self):
        self._numbers, self._until = (), 0.0
        self._codes = WeakSet()  # of all handlers that were seen: one may be replaced as it runs

    def numbers(self):
        """Return the numbers of these signals."""
        now = monotonic()
        if now >= self._until:
            self._look()
            self._until = now + _SECONDS
        return self._numbers

    def codes(self):
        """Return the code of handlers, those that are set now and those that were seen before."""
        self._look()
        return self._codes

    def _look(self):
        self._numbers = sorted(handled())
        self._codes.update({_code_of(_getsignal(number)) for number in self._numbers} - {None})


def handled():
    """Return the numbers of the signals that have a handler in Python now."""
    return {number for number in _NUMBERS if callable(_getsignal(number))}


_handled = _Handled()


class interrupts_held:
    """Delays signal handlers until the end of the block; gives a dict, not empty once one is due.

    A signal in the block is recorded, and its handler called once when the block ends, also if the
    block ends with another exception. A wait in the block must be short: it can't be interrupted.

    A handler records it, not a signal mask: a mask holds for one thread, and the system would give
    the signal to another thread. In other threads than the main one nothing is done: Python runs
    handlers in the main thread only. Signals without a handler in Python do what they always do.
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
        except BaseException:  # of a handler that is not replaced yet, or was set a moment ago
            self._held = None
            self._restore()
            raise

    def _answer(self, number, frame):
        """Record a signal in the block; before and after it, do what the script's handler does."""
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
        # First the handlers, so that later signals reach those of the user's program, or those of
        # an outer block.
        try:
            self._restore()
        except BaseException:  # of a signal whose handler was restored first
            self._restore()
            raise
        finally:
            self._held = None
            if held:
                _call_all(held)

    def _restore(self):
        for number, handler in self._previous.items():
            # Else a handler of the script has set another one.
            if getattr(_getsignal(number), "__self__", None) is self:
                _signal(number, handler)


class interrupts_raised_later(interrupts_held):
    """Calls signal handlers in the block as always, but raises what they raise when it ends.

    For long blocks: the dict that it gives is not empty once a handler has raised.
    """

    __slots__ = ()

    def _record(self, number, frame):
        try:
            self._previous[number](number, frame)
        except BaseException as error:
            self._held[number] = functools.partial(_raise, error)


def _call_all(held):
    """Call what was held back, in turn; what they raise comes when all have been called."""
    handler = held.pop(next(iter(held)))
    try:
        # Not by raising the signal: it would also be written to the pipe of `set_wakeup_fd` once
        # more, as asyncio's, which would run its handler twice.
        handler()
    finally:
        if held:
            _call_all(held)


def _raise(error):
    raise error


def raised_here(*kinds: Type[BaseException]) -> Tuple[Type[BaseException], ...]:
    """Return the kinds of exceptions for an except clause; none for what a signal handler raised.

    Examples
    --------
    >>> try:
    ...     raise TimeoutError
    ... except raised_here(OSError):
    ...     print("the system's")
    the system's
    """
    return () if is_of_handler(sys.exc_info()[1]) else kinds


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler, or what it called, has raised an exception."""
    return _frame_of_handler(_frames(error)) is not None


def raised_by_handler(error: BaseException) -> Optional[BaseException]:
    """Return the exception of a signal handler that an exception is, or stands for; else None.

    Where code catches it and raises another one by mistake, or with a longer message as host
    libraries do, the other one stands for it. One that is raised ``from`` it does not.
    """
    found = of = None
    while True:
        frames = _frames(error)
        frame = _frame_of_handler(frames)
        if frame is not None and of in (None, frame):
            found, of = error, frame
        before = error.__context__
        if before is None or error.__suppress_context__:
            return found
        # One that was caught outside of here, and is still handled there, is an earlier matter.
        if before.__traceback__ is None or before.__traceback__.tb_frame not in frames:
            return found
        error = before


def _frames(error):
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def _frame_of_handler(frames):
    codes = _handled.codes()
    return next((frame for frame in frames if frame.f_code in codes), None)


def _code_of(handler):
    """Return the code of a handler in Python; None if it is another thing."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not inspect.isroutine(handler) and callable(handler):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)  # a method has that of its function
