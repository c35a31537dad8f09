"""Let functions recurse as deep as a graph is: in a thread with a large stack.

Python's limit of recursion is one for all threads, and each thread has a stack of its own. A limit
that is high enough for a deep graph is too high for the stack of most threads: endless recursion
of the script would end the process there, and not raise RecursionError. So the limit is raised only
while a function runs that needs it::

    @recurses_deep
    def dump(...)     in the thread of the caller ──▶ its result
                                                  ──▶ RecursionError ──▶ again, in a thread of STACK
                                                      bytes with a limit of LEVELS ──▶ its result

Such a function must do the same if it is called again after a RecursionError. It runs in the other
thread at once if it is known to need more levels, and where the stack of the caller's thread is too
small for the limit that Python has. Meanwhile the caller waits, and may hold no lock that the
function takes. The limit holds for all other threads of the script, too.
"""

import contextlib
import contextvars
import ctypes
import functools
import sys
import threading

from synkhronos._machine.interrupts import interrupts_held

LEVELS = 50_000
STACK = 256 << 20  # bytes of addresses: the system adds memory where the stack is used
_SMALLEST_STACK = 64 << 20  # where addresses are scarce (ulimit -v)
_SMALL_STACK = 1 << 20
# Bytes of the stack that a level takes in pickles; in older Pythons, in functions of Python.
_LEVEL = 160 if sys.version_info >= (3, 11) else 600

_starting = threading.RLock()  # held while the size of new stacks, or the limit, is changed


class _OfThread(threading.local):
    """Facts about a thread."""

    is_deep = False  # whether it is a thread with a large stack
    stack = None  # the size of its stack, once it was looked up


def _bytes_of_stack():
    """Return the size of the stack of the calling thread; 0 if the C library does not say."""
    libc = ctypes.CDLL(None)
    try:
        find, read, drop = (
            libc.pthread_getattr_np,
            libc.pthread_attr_getstack,
            libc.pthread_attr_destroy,
        )
    except AttributeError:
        return 0
    attributes = ctypes.create_string_buffer(256)  # larger than pthread_attr_t on any processor
    begin, size = ctypes.c_void_p(), ctypes.c_size_t()
    if find(ctypes.c_ulong(threading.get_ident()), attributes):
        return 0
    read(attributes, ctypes.byref(begin), ctypes.byref(size))
    drop(attributes)
    return size.value


_here = _OfThread()


def recurses_deep(do, levels=0):
    """Let a function recurse as deep as a graph of some thousand operations.

    Give the number of levels that it needs if it would not raise a RecursionError for lack of them.
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
        # With the caller's context, such as that of a `synk.parallel` block.
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
                    self._start()
                self._wait()
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            # Tracebacks keep this frame.
            self._error = self._result = None

    def _start(self):
        try:
            self._start_with(STACK)
        except RuntimeError:
            self._start_with(_SMALLEST_STACK)

    def _start_with(self, size):
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
            # A Ctrl-C, or an exception of another signal handler. The call ends with it; a second
            # one ends the wait for that.
            self._interrupt()
            self._over.wait()
            raise
        self._thread.join()  # not before: if a Ctrl-C came in it, it would not wait again

    def _interrupt(self):
        """Raise KeyboardInterrupt in the call, unless it is at its end."""
        with self._ending:
            if not self._takes_no_interrupt:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(KeyboardInterrupt)
                )


class _Limit:
    """The limit of recursion while it is raised: by how many calls, and what it was before."""

    calls = 0
    before = None


@contextlib.contextmanager
def _raised_limit():
    """Raise the limit of recursion inside a with block; several threads may do so at once."""
    is_raised = False
    try:
        with interrupts_held(), _starting:
            if not _Limit.calls:
                _Limit.before = sys.getrecursionlimit()
                sys.setrecursionlimit(max(_Limit.before, LEVELS))
            _Limit.calls += 1
            is_raised = True
        yield
    finally:
        with interrupts_held(), _starting:
            _Limit.calls -= is_raised
            # Not if the script has set another one meanwhile.
            is_ours = is_raised and sys.getrecursionlimit() == max(_Limit.before, LEVELS)
            if is_ours and not _Limit.calls:
                sys.setrecursionlimit(_Limit.before)
