"""Let functions recurse as deep as a graph is, in a thread with a large stack.

Python's recursion limit holds for all threads, and each thread has a stack of its own. A limit that
is high enough for a deep graph is too high for the stack of most threads: endless recursion in the
script would crash the process instead of raising RecursionError. So the limit is raised only while
a function runs that needs it::

    @recurses_deep
    def dump(...)     in the thread of the caller ──▶ its result
                                                  ──▶ RecursionError ──▶ again, in a thread of STACK
                                                      bytes with a limit of LEVELS ──▶ its result

It must be safe to call such a function again after a RecursionError. The function runs in the other
thread at once if it is known to need more levels, or if the stack of the caller's thread is too
small for Python's limit. The caller waits meanwhile, and may hold no lock that the function takes.
All other threads of the script have the raised limit, too.
"""

import contextlib
import contextvars
import ctypes
import functools
import sys
import threading
from types import SimpleNamespace

from synkhronos._machine.interrupts import interrupts_held

LEVELS = 50_000
STACK = 256 << 20  # bytes of addresses; memory is allocated only for the used part
_SMALLEST_STACK = 64 << 20  # if addresses are scarce (ulimit -v)
_SMALL_STACK = 1 << 20
# Bytes of the stack for each level: in pickles, or, before Python 3.11, in Python functions.
_LEVEL = 160 if sys.version_info >= (3, 11) else 600

_limit = SimpleNamespace(calls=0, before=None)  # how many calls have raised it, and from what
_starting = threading.RLock()  # held while the size of new stacks, or the limit, is changed


class _ThreadFacts(threading.local):
    is_deep = False  # whether this thread has a large stack
    stack = None  # the size of its stack, once it was looked up


def _bytes_of_stack():
    """Return the size of the stack of the calling thread; 0 if the C library does not say."""
    libc, begin, size = ctypes.CDLL(None), ctypes.c_void_p(), ctypes.c_size_t()
    attributes = ctypes.create_string_buffer(256)  # larger than pthread_attr_t on any processor
    if libc.pthread_getattr_np(ctypes.c_ulong(threading.get_ident()), attributes):
        return 0
    libc.pthread_attr_getstack(attributes, ctypes.byref(begin), ctypes.byref(size))
    libc.pthread_attr_destroy(attributes)
    return size.value


_here = _ThreadFacts()


def recurses_deep(do, levels=0):
    """Let a function recurse as deep as a graph of some thousand operations.

    `levels` is the number that it needs, if it would not raise RecursionError for lack of them.
    """

    @functools.wraps(do)
    def run(*args, **kwargs):
        if _here.is_deep:
            return do(*args, **kwargs)
        if levels <= sys.getrecursionlimit() and _has_room_for_the_limit():
            try:
                return do(*args, **kwargs)
            except Exception as error:
                if not _is_too_deep(error):
                    raise
        return _DeepCall(functools.partial(do, *args, **kwargs)).run()

    return run


def _has_room_for_the_limit():
    """Return whether the calling thread can recurse up to Python's limit."""
    if _here.stack is None:
        _here.stack = _bytes_of_stack()
    return _here.stack >= max(_SMALL_STACK, sys.getrecursionlimit() * _LEVEL)


def _is_too_deep(error):
    """Return whether an exception is a RecursionError, or was raised because of one."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, RecursionError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


class _DeepCall:
    """One call, in a thread with a large stack."""

    def __init__(self, do):
        # In the caller's context, such as that of a `synk.parallel` block.
        self._do = functools.partial(contextvars.copy_context().run, do)
        self._thread = None
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._takes_no_interrupt = False
        self._result = self._error = None

    def run(self):
        """Start the thread and wait for its end; return what the call returns, or raise that."""
        try:
            with _raised_limit():
                with interrupts_held():
                    try:
                        self._start(STACK)
                    except RuntimeError:
                        self._start(_SMALLEST_STACK)
                self._wait()
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            self._error = self._result = None  # tracebacks keep this frame

    def _start(self, size):
        # Daemon: after a second Ctrl-C the interpreter may end before the thread does.
        self._thread = threading.Thread(target=self._run, name="deep graphs", daemon=True)
        with _starting:
            before = threading.stack_size(size)
            try:
                self._thread.start()
            finally:
                now = threading.stack_size(before)
                if now != size:  # another thread has set it meanwhile
                    threading.stack_size(now)

    def _run(self):
        _here.is_deep = True
        try:
            try:
                self._result = self._do()
            finally:
                with self._ending:
                    self._takes_no_interrupt = True
        except BaseException as error:
            self._error = error
        self._over.set()

    def _wait(self):
        try:
            self._over.wait()
        except BaseException:
            # A signal handler, such as that of Ctrl-C, has raised. End the call, and wait for its
            # end; a second exception ends this wait.
            self._interrupt()
            self._over.wait()
            raise
        self._thread.join()  # short now: a join that a Ctrl-C has ended could not be repeated

    def _interrupt(self):
        """Raise KeyboardInterrupt in the call, unless the call has ended."""
        with self._ending:
            if not self._takes_no_interrupt:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(KeyboardInterrupt)
                )


@contextlib.contextmanager
def _raised_limit():
    """Raise the recursion limit in a with block; several threads may do so at once."""
    is_raised = False
    try:
        with interrupts_held(), _starting:
            if not _limit.calls:
                _limit.before = sys.getrecursionlimit()
                sys.setrecursionlimit(max(_limit.before, LEVELS))
            _limit.calls += 1
            is_raised = True
        yield
    finally:
        with interrupts_held(), _starting:
            _limit.calls -= is_raised
            # The script may have set another limit meanwhile, which stays.
            is_ours = is_raised and sys.getrecursionlimit() == max(_limit.before, LEVELS)
            if is_ours and not _limit.calls:
                sys.setrecursionlimit(_limit.before)
