"""A signal before one line of the master's code, for tests that try every line."""

import contextlib
import os
import signal
import sys
import threading
import weakref

import pytest

from synkhronos import collectives, session
from synkhronos._calls import request
from synkhronos._machine import interrupts, processes, shared_memory
from synkhronos._session import current, registry
from synkhronos._session import session as session_module
from synkhronos.comm import variable_collectives, variable_memory
from synkhronos.comm.shared import gate


class Timeout(Exception):
    """An exception that can't be pickled, or made of a message alone."""

    def __init__(self, message, seconds=None):
        super().__init__(message)
        self.lock = threading.Lock()


class OutOfTime(TimeoutError):
    """An error as the system's."""


class Preempted(BaseException):
    """No Exception, as KeyboardInterrupt."""


FILES = {
    module.__file__
    for module in (
        session,
        current,
        session_module,
        interrupts,
        processes,
        gate,
        registry,
        request,
        shared_memory,
        collectives,
        variable_memory,
        variable_collectives,
    )
}


def in_strides(some):
    """Return a mark for a test that tries every line, and in the quick tier one in so many."""
    every = pytest.param(1, id="every line", marks=pytest.mark.slow("a signal at each line"))
    return pytest.mark.parametrize("stride", [pytest.param(some, id="some lines"), every])


SOME_AND_EVERY_LINE = in_strides(15)


def is_in_finalizer(frame):
    """Return whether a finalizer runs this frame: Python drops its exceptions, Ctrl-C too."""
    while frame is not None:
        if frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


def signal_at_line(number, do, signum):
    """Call `do`, and send a signal before the line of FILES with this number, from 0.

    A line counts once, however often it runs. Returns whether it came to that line, and prints
    which it is: pytest shows that of a test that fails.
    """
    own, previous, lines = os.getpid(), sys.gettrace(), set()

    def trace(frame, event, _):
        code = frame.f_code
        if code.co_filename not in FILES or os.getpid() != own or is_in_finalizer(frame):
            return None
        line = code, frame.f_lineno
        if event == "line" and line not in lines:
            lines.add(line)
            if len(lines) == number + 1:
                place = f"{os.path.relpath(code.co_filename)}:{frame.f_lineno}"
                print(f"{signal.Signals(signum).name} at line {number}: {place}, {code.co_name}")
                os.kill(own, signum)
        return trace

    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(previous)
    return len(lines) > number


def interrupt_at_begin(function, do):
    """Call `do`, with a Ctrl-C before the first line of a function; return what it raised."""

    def trace(frame, event, _):
        if event == "call" and frame.f_code is function.__code__:
            sys.settrace(previous)
            os.kill(os.getpid(), signal.SIGINT)

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(previous)
    raise AssertionError("the function was not called, or the Ctrl-C was lost")


def interrupt_at_line(number, do):
    """Call `do`, with a Ctrl-C before a line; return whether the line was reached."""
    try:
        came_to_it = signal_at_line(number, do, signal.SIGINT)
    except KeyboardInterrupt:
        return True
    assert not came_to_it, "the Ctrl-C was lost"
    return False


@contextlib.contextmanager
def handler_that_raises(kind):
    """Have SIGUSR1 raise exceptions of a class in a with block; yield the list of them."""
    raised = []

    def stop(signum, frame):
        raised.append(kind(f"the {len(raised)}th"))
        raise raised[-1]

    previous = signal.signal(signal.SIGUSR1, stop)
    interrupts._handled._until = 0.0  # so that it is known at once
    try:
        yield raised
    finally:
        signal.signal(signal.SIGUSR1, previous)


def raise_at_line(number, do, raised):
    """Call `do`, with SIGUSR1 before a line; return whether the line was reached.

    Fails unless the exception comes out that the handler of `handler_that_raises` has raised.
    """
    try:
        came_to_it = signal_at_line(number, do, signal.SIGUSR1)
    except BaseException as error:
        assert raised and error is raised[-1], f"another exception came out: {error!r}"
        return True
    assert not came_to_it, "the exception was lost"
    return False
