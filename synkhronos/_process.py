"""A forked process, and a sentinel that becomes readable when it ends.

``multiprocessing.Process`` is not used, because its children are also ended by the interpreter exit
of any process that the user forks from the master.
"""

import contextlib
import fcntl
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback


@contextlib.contextmanager
def interrupts_held():
    """Have a Ctrl-C wait until the end.

    By its handler, because a mask of signals holds for one thread only, and another takes it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no Ctrl-C comes here
        return
    if signal.getsignal(signal.SIGINT) is None:
        yield  # it does not come to Python, but to who has embedded it
        return
    held = []
    previous = signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)


_LIVES = {  # letters of /proc/<pid>/stat
    "R": "running",
    "S": "sleeping",
    "D": "waiting for the system",
    "T": "stopped",
    "t": "stopped by a debugger",
}


def life_of(pid: int) -> str:
    """Return what a process is doing, in words: "running", "stopped", ..., "ended" or "gone".

    It is "unknown" to a process that can't look, as one that has no descriptors left.
    """
    try:
        with open(f"/proc/{pid}/stat") as stat:
            letter = stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except OSError:
        return "unknown"
    return _LIVES.get(letter, "ended")


def make_pipe():
    """Return the two ends of a pipe, whose numbers are none of the standard streams'.

    Those are free in a process that was started without, and are given to files later.
    """
    ends = os.pipe()
    if min(ends) > 2:
        return ends
    try:
        return tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    finally:
        for end in ends:
            os.close(end)


@contextlib.contextmanager
def _logging_held(seconds=1.0):
    """Have no other thread write to the log: a child forked meanwhile would wait for it for ever.

    The buffers of files have locks of their own, which no fork renews.
    """
    logger, held, own = logging.getLogger("synkhronos"), [], os.getpid()
    try:
        while logger is not None:
            for handler in logger.handlers:
                if handler.lock is not None and handler.lock.acquire(timeout=seconds):
                    held.append(handler.lock)
            logger = logger.parent if logger.propagate else None
        yield
    finally:
        if os.getpid() == own:  # in the child, logging has renewed them
            for lock in held:
                lock.release()


class ForkedProcess:
    """A child of this process that runs `target` and then ends, without our atexit handlers.

    Attributes
    ----------
    pid : int
    sentinel : int
        A descriptor that becomes readable when the process has ended.
    exitcode : int or None
        The exit status, or minus the signal that ended it; None while it runs, or when somebody
        else has waited for it.
    """

    def __init__(self, target):
        _flush_streams()  # or the child could print it again
        self.sentinel, held_by_child = make_pipe()
        self.exitcode = None
        self._ended = False
        # A Ctrl-C would kill the child before it can say that it does not want any.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _logging_held():
                self.pid = os.fork()
            if self.pid == 0:
                _run_and_exit(target, self.sentinel, [held_by_child])
        except OSError:
            os.close(self.sentinel)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            os.close(held_by_child)

    def is_alive(self) -> bool:
        """Whether it still runs; reaps it if it does not."""
        if not self._ended:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._ended = True
                return False
            if pid:
                self._ended = True
                signalled = os.WIFSIGNALED(status)
                self.exitcode = -os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status)
        return not self._ended

    def join(self, seconds: float) -> bool:
        """Wait for its end, at most so long; return whether it has ended."""
        end = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < end:
            time.sleep(0.001)
        return self._ended

    def send(self, signum: int) -> None:
        """Send it a signal, if it still runs."""
        if self.is_alive():
            os.kill(self.pid, signum)

    def close(self) -> None:
        """Close the sentinel."""
        os.close(self.sentinel)


def join_all(processes, seconds: float) -> None:
    """Wait for the end of all, at most so long together."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(end - time.monotonic())


def kill_all(processes, seconds: float) -> None:
    """Kill those that run, and wait for it at most so long."""
    for process in processes:
        process.send(signal.SIGKILL)
    join_all(processes, seconds)


def _run_and_exit(target, sentinel, held):
    exitcode = 1
    try:
        os.close(sentinel)
        # Only this process: a child of its own would hide its death.
        os.register_at_fork(after_in_child=lambda: held and os.close(held.pop()))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # the terminal's input is the master's
        if nothing:
            os.close(nothing)
        _renew_streams()
        target()
        exitcode = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            _flush_streams()
        finally:
            os._exit(exitcode)


def _flush_streams():
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # a broken pipe, or closed
                stream.flush()


def _renew_streams():
    """Take streams without what the parent's hold: text to be printed, and locks of its threads."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper:
            continue  # it is somebody's own, as in a notebook
        with contextlib.suppress(OSError, ValueError):  # closed
            renewed = open(  # noqa: SIM115
                stream.fileno(),
                "w",
                1 if stream.line_buffering else -1,
                stream.encoding,
                stream.errors,
                closefd=False,
            )
            setattr(sys, name, renewed)
