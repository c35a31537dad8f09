"""Forked processes, each with a sentinel that becomes readable when the process ends.

``multiprocessing.Process`` is not used: its exit handler would end the workers also in a process
that the script forks from the master.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings

from synkhronos._machine.descriptors import leave_to_parent
from synkhronos._machine.interrupts import handled, raised_here
from synkhronos._machine.private_copies import without_copies

_PR_SET_PDEATHSIG = 1
_PR_GET_DUMPABLE = 3
_CAP_SYS_PTRACE = 19
# By default these end a process; the script may set a handler for one after the fork.
_OF_BATCH_SYSTEMS = {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}

_LIVES = {  # letters of /proc/<pid>/stat
    "R": "running",
    "S": "sleeping",
    "D": "waiting for the system",
    "T": "stopped",
    "t": "stopped by a debugger",
}


def life_of(pid: int) -> str:
    """Return the state of a process: "running", "stopped", ..., "ended", "gone", or "unknown"."""
    return life_and_memory_of(pid)[0]


def life_and_memory_of(pid: int, parent: int | None = None) -> tuple[str, int | None]:
    """Return `life_of` a process, and the bytes that it uses; "gone" if it has another `parent`."""
    fields = stat_of(pid, gone="") if proc_has_our_numbers() else None
    if fields is None:
        return "unknown", None
    if not fields or parent not in (None, pid, int(fields[2])):
        return "gone", 0
    return _LIVES.get(fields[1], "ended"), int(fields[22]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds_of(pid: int) -> float | None:
    """Return the CPU time that a process has used; None if it is gone or unknown."""
    fields = proc_has_our_numbers() and stat_of(pid)
    return sum(map(int, fields[12:14])) / os.sysconf("SC_CLK_TCK") if fields else None


def stat_of(pid, gone=None):
    """Return the fields of /proc/<pid>/stat from the name on; else None or `gone`, as `_read`."""
    text = _read(f"/proc/{pid}/stat", gone)
    if not text:
        return text
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may have ")" and spaces
    return [name, *rest.split()]


def name_of_signal(number: int) -> str:
    """Return the name of a signal, or its number in words if it has none.

    >>> name_of_signal(9), name_of_signal(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_ended(status: int) -> str:
    """Return in words how a process with this exit status has ended; below 0 is a signal.

    >>> how_ended(3), how_ended(-9)
    ('has ended with exit status 3', 'was killed by SIGKILL (signal 9)')
    """
    if status >= 0:
        return f"has ended with exit status {status}"
    return f"was killed by {name_of_signal(-status)} (signal {-status})"


def shell_status(status: int) -> int:
    """Return an exit status as shells show it: 128 + the signal that has killed the process.

    >>> shell_status(3), shell_status(-9)
    (3, 137)
    """
    return status if status >= 0 else 128 - status


def status_of(pid: int, reaps: bool = True) -> int | None:
    """Return the exit status of a child, below 0 for a signal, and reap it; None while it runs."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | (0 if reaps else os.WNOWAIT))
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


class StopWatch:
    """Measures how long processes have been stopped by SIGSTOP; stops by debuggers don't count.

    Call `seconds` about once a second. After a longer pause the measurement begins anew: then this
    process was stopped, too, for example by a Ctrl-Z to the whole job.
    """

    _LONGEST_PAUSE = 3.0

    def __init__(self):
        # process id -> when it was first and last seen stopped, and its context switches
        self._seen = {}

    def seconds(self, pid: int) -> float:
        """Return for how many seconds a process has been stopped."""
        now = time.monotonic()
        if life_of(pid) != "stopped":
            self._seen.pop(pid, None)
            return 0.0
        text = _read(f"/proc/{pid}/status") or ""  # "" if it can't be read
        switches = [line for line in text.splitlines() if "ctxt_switches" in line]
        first, last, before = self._seen.get(pid, (now, now, switches))
        # Programs that limit CPU use stop and continue a process again and again: it has run since.
        if now - last > self._LONGEST_PAUSE or switches != before:
            first = now
        self._seen[pid] = first, now, switches
        return now - first


def _read(path, gone=None):
    """Return the text of a file in /proc; None if it can't be read, `gone` if it does not exist."""
    try:
        with open(path, errors="replace") as file:  # process names may hold any bytes
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return gone
    except raised_here(OSError):
        return None


def number_in_proc() -> int:
    """Return this process's number in /proc, maybe of another PID namespace, or raise OSError."""
    return int(os.readlink("/proc/self"))


def is_closed_to_others() -> bool:
    """Return whether this user can't open this process's /proc/<pid>/fd, as after setuid."""
    is_dumpable = ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    return not is_dumpable and not _mask_in_status("CapEff") >> _CAP_SYS_PTRACE & 1


def this_machine() -> str:
    """Return a name for this machine that no other has; it changes at the next boot."""
    # Cloned hosts may have the same name, and containers of one host have the same boot id.
    return f"{socket.gethostname()} {(_read('/proc/sys/kernel/random/boot_id') or '').strip()}"


def proc_has_our_numbers() -> bool:
    """Return whether /proc numbers processes as ``os.getpid()`` and ``os.fork()`` do."""
    try:
        return number_in_proc() == os.getpid()
    except raised_here(OSError):
        return False


def take_standard_streams() -> None:
    """Open /dev/null for each closed standard stream, lest C code print into another file there."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd > 2:
            return os.close(fd)
        os.set_inheritable(fd, True)  # as standard streams are


def wait_or_kill(process: subprocess.Popen, seconds: float) -> None:
    """Wait for the end of a child process; kill it if that takes longer."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def make_pipe():
    """Return the two ends of a pipe, with descriptors above 2.

    In a process without standard streams 0, 1 and 2 are free, but belong to code that uses or
    replaces these streams by number.
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
    """Hold the locks of the log's handlers during a fork.

    If another thread wrote meanwhile, the child would inherit the locked buffer of the log's file,
    and wait for it for ever: logging renews only its own locks.
    """
    logger, held, parent = logging.getLogger("synkhronos"), [], os.getpid()
    try:
        while logger is not None:
            for handler in logger.handlers:
                if handler.lock is not None and handler.lock.acquire(timeout=seconds):
                    held.append(handler.lock)
            logger = logger.parent if logger.propagate else None
        yield
    finally:
        if os.getpid() == parent:  # in the child, logging has replaced the locks
            for lock in held:
                lock.release()


class ForkedProcess:
    """A child process that runs `target` and then ends, without this process's atexit handlers.

    `target` uses the `kept` descriptors. The descriptor `sentinel` becomes readable at the end.
    `exitcode` is as in `status_of`; None as well if other code has waited for the process.
    """

    def __init__(self, target, kept=()):
        _flush_streams()  # the child would inherit buffered text, and print it again
        # Only the child keeps the write end, and it never writes. The kernel closes it when the
        # child ends, however it ends; then the read end is readable.
        self.sentinel, held_by_child = make_pipe()
        self.exitcode = None
        self._ended = False
        # The script's signal handlers must not run in the child. The child inherits the mask, and
        # unblocks the signals itself: see leave_signals_to_parent.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, handled() | {signal.SIGINT})
        try:
            with _logging_held(), without_copies(), warnings.catch_warnings():
                # Python 3.12 and JAX warn of forks beside threads, such as those of a BLAS. The
                # child uses no JAX, and of the locks of threads only logging's, held here.
                warnings.simplefilter("ignore", DeprecationWarning)
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                self.pid = os.fork()
            if self.pid == 0:
                _run_and_exit(target, kept, self.sentinel, [held_by_child])
        except OSError:
            os.close(self.sentinel)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            os.close(held_by_child)

    def is_alive(self) -> bool:
        """Return whether the process runs; reap it if it has ended."""
        if not self._ended:
            try:
                self.exitcode = status_of(self.pid)
                self._ended = self.exitcode is not None
            except ChildProcessError:
                self._ended = True
        return not self._ended

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` for the process to end; return whether it has ended."""
        end = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < end:
            time.sleep(0.001)
        return self._ended

    def send(self, signum: int) -> None:
        """Send the process a signal, if it still runs."""
        if self.is_alive():  # the system may give the id of a reaped process to another one
            os.kill(self.pid, signum)

    def close(self) -> None:
        """Close the sentinel; no wait may use it after that."""
        os.close(self.sentinel)


def leave_signals_to_parent() -> None:
    """Ignore, in a child, the signals that the script has a handler for, or may set one for.

    Batch systems send signals to all processes of a job: "write a checkpoint now". If a child's
    handler answered, too, it would write a second one, or raise what looks like a call's error.
    """
    ours, caught = handled(), _mask_in_status("SigCgt")
    # A handler of C code, such as faulthandler's, stays.
    for signum in ours | {each for each in _OF_BATCH_SYSTEMS if not caught >> (each - 1) & 1}:
        # With SIGCHLD ignored, Popen.wait() would not get the exit status of a child.
        kept = signum in (signal.SIGCHLD, signal.SIGIO)
        signal.signal(signum, signal.SIG_DFL if kept else signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # the inherited one is a pipe of the script
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)


def _mask_in_status(name):
    with open("/proc/self/status") as status:
        [mask] = [int(line.split()[1], 16) for line in status if line.startswith(f"{name}:")]
    return mask


def join_all(processes, seconds: float) -> None:
    """Wait for all processes to end, at most `seconds` together."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(end - time.monotonic())


def kill_all(processes, seconds: float) -> None:
    """Kill the processes that run, and wait at most `seconds` for their end."""
    for process in processes:
        process.send(signal.SIGKILL)
    join_all(processes, seconds)


def _run_and_exit(target, kept, sentinel, held):
    exitcode = 1
    try:
        os.close(sentinel)
        leave_to_parent({*kept, *held})
        # The sentinel becomes readable when all copies of `held` are closed. So children of this
        # process close theirs: otherwise they would hide its end.
        os.register_at_fork(after_in_child=lambda: held and os.close(held.pop()))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # only the master reads from the terminal
        if nothing:
            os.close(nothing)
        _renew_streams()
        target()
        multiprocessing_util = sys.modules.get("multiprocessing.util")
        if multiprocessing_util is not None:
            # Let threads of queues, as log handlers use them, send all and end. If one held the
            # queue's lock at the end of this process, no other process could take it.
            multiprocessing_util._run_finalizers()
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
            with contextlib.suppress(OSError, ValueError):  # a broken pipe, a closed stream
                stream.flush()


def _renew_streams():
    """Replace stdout and stderr: the inherited ones may hold unprinted text, and locked locks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper:
            continue  # the script has replaced it, as notebooks do
        with contextlib.suppress(OSError, ValueError):  # a closed stream
            format_ = 1 if stream.line_buffering else -1, stream.encoding, stream.errors
            setattr(sys, name, open(stream.fileno(), "w", *format_, closefd=False))  # noqa: SIM115


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Let the system send this process, between fork and exec, a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # the parent has ended before
        os._exit(1)
