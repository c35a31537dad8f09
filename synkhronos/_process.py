"""A forked process, and a sentinel that becomes readable when it ends.

``multiprocessing.Process`` is not used, because its children are also ended by the interpreter exit
of any process that the user forks from the master.
"""

import contextlib
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
    held = []
    previous = signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)


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
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # or the child would print it again
        self.sentinel, held_by_child = os.pipe()
        self.exitcode = None
        self._ended = False
        # A Ctrl-C would kill the child before it can say that it does not want any.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
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
        os.close(nothing)
        target()
        exitcode = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(exitcode)
