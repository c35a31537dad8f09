"""The standard streams and the exit status of a script that `synkhronos launch` runs by mpirun.

    launcher                mpirun                 guard of the first machine       script
    stdin, signals ── frames ──▶ stdin ── frames ──▶ takes them apart ── stdin, signals ──▶
    stdout         ◀──────────────────────────────────────────────────────────────── stdout
    stderr         ◀── without marks ── stderr with marks ◀── start, more, status ── stderr

mpirun does not pass the end of its standard input on, stalls if much waits there, ends the script
at a Ctrl-C, and prints a page about every exit status but 0. So the process that mpirun starts is a
guard: it forks the process that runs the script, asks the launcher for each piece of input, and
ends with status 0 when the script has ended. What mpirun prints before the guard's first mark is
about mpirun.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import selectors
import signal
import struct
import subprocess
import sys
import time
from typing import Callable, Mapping, Sequence

from synkhronos._machine.processes import end_with_parent
from synkhronos.comm.mpi import folders
from synkhronos.launch.signals import signals_of
from synkhronos.tools import mpirun

VARIABLE = "SYNKHRONOS_LAUNCH"
_DATA, _SIGNAL = 0, 1
_HEADER = struct.Struct(">BI")  # kind, number of bytes or of the signal
_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_HEARD = {*_FORWARDED, signal.SIGCHLD}
_PATIENCE = 10.0  # seconds for the script to end after a Ctrl-C
_GRACE = 3.0  # seconds for mpirun to end after the script
_LAST = 2.0  # seconds between SIGTERM and SIGKILL
_SIZE = 1 << 16
_FRAME = 2048  # bytes of input; PRRTE loses itself above 4096


def is_launched() -> bool:
    """Return whether mpirun was started by `synkhronos launch`."""
    return VARIABLE in os.environ


def guard() -> bool:
    """Fork the process that goes on; return True in it, and False in this one when it has ended."""
    token = os.environ.pop(VARIABLE)
    is_first = os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0"
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(source, 0)
        os.close(source)
        os.close(sink)
        return True
    os.close(source)

    def mark(text):
        if is_first:
            with contextlib.suppress(OSError):
                # With a newline: PRRTE keeps the rest of a line until its end.
                os.write(2, f"\0{token} {text}\0\n".encode())

    guarded = _Guarded(child, sink, mark)
    with signals_of(_HEARD) as signals:
        mark("start")
        mark(f"status {guarded.wait(signals)}")
    return False


class _Writer:
    """Writes to a descriptor that may be full for a while."""

    def __init__(self, fd, selector):
        os.set_blocking(fd, False)
        self._fd, self._selector, self._waiting = fd, selector, bytearray()
        self._is_registered = self._ends = False

    @property
    def is_behind(self):
        """Whether much is waiting."""
        return len(self._waiting) > 1 << 20

    def write(self, data):
        self._waiting += data
        self.flush()

    def end(self):
        """Close the descriptor after all has been written."""
        self._ends = True
        self.flush()

    def flush(self):
        """Write what can be written now."""
        if self._fd is None:
            return
        try:
            while self._waiting:
                del self._waiting[: os.write(self._fd, self._waiting[:_SIZE])]
        except BlockingIOError:
            pass
        except OSError:  # nothing reads there any more
            self._waiting.clear()
            self._ends = True
        if bool(self._waiting) != self._is_registered:
            self._is_registered = not self._is_registered
            if self._is_registered:
                self._selector.register(self._fd, selectors.EVENT_WRITE, self.flush)
            else:
                self._selector.unregister(self._fd)
        if self._ends and not self._waiting:
            os.close(self._fd)
            self._fd = None


class _Guarded:
    """The process that runs the script, or the ranks of another machine."""

    def __init__(self, pid, sink, mark):
        self._pid, self._mark = pid, mark
        self._owes_mark = False
        self._status = None
        self._received = bytearray()
        self._selector = selectors.PollSelector()
        self._stdin = _Writer(sink, self._selector)

    def wait(self, signals):
        """Pass on what comes, until the process has ended; return its exit status."""
        self._selector.register(signals, selectors.EVENT_READ, lambda: self._hear(signals))
        self._selector.register(0, selectors.EVENT_READ, self._receive)
        self._look()  # it may have ended before the handler was there
        while self._status is None:
            for key, _ in self._selector.select(1.0):
                key.data()
            if self._owes_mark and not self._stdin.is_behind:
                self._owes_mark = False
                self._mark("more")
            self._look()
        self._selector.close()
        return self._status

    def _look(self):
        pid, status = os.waitpid(self._pid, os.WNOHANG) if self._status is None else (0, 0)
        if pid:
            ended = os.WIFEXITED(status)
            self._status = os.WEXITSTATUS(status) if ended else 128 + os.WTERMSIG(status)

    def _hear(self, signals):
        for number in os.read(signals, 256):
            if number != signal.SIGCHLD:
                self._send(number)

    def _send(self, number):
        if self._status is None:
            os.kill(self._pid, number)

    def _receive(self):
        data = os.read(0, _SIZE)
        if not data:
            self._selector.unregister(0)
            return self._stdin.end()
        self._received += data
        while len(self._received) >= _HEADER.size:
            kind, number = _HEADER.unpack_from(self._received)
            end = _HEADER.size + (number if kind == _DATA else 0)
            if len(self._received) < end:
                return None
            data = bytes(self._received[_HEADER.size : end])
            del self._received[:end]
            if kind == _SIGNAL:
                self._send(number)
            elif data:
                self._stdin.write(data)
                self._owes_mark = True
            else:
                self._stdin.end()
        return None


class Launch:
    """mpirun, from its start to its end.

    Parameters
    ----------
    line : list of str
        The command line of mpirun.
    environment : dict
    failed : callable
        Takes what mpirun printed, if the script did not start; returns a sentence about it.
    """

    def __init__(
        self,
        line: Sequence[str],
        environment: Mapping[str, str],
        failed: Callable[[str], str],
    ) -> None:
        self._token = secrets.token_hex(16)
        self._line, self._failed = line, failed
        self._environment = {**environment, VARIABLE: self._token}
        self._has_started, self._status = False, None
        self._held = bytearray(), bytearray()  # stdout, stderr before the script has started
        self._tail = bytearray()  # of stderr: may be the beginning of a mark
        self._late = bytearray()  # stderr after the script has ended
        self._deadline = float("inf")  # for the next step in ending mpirun
        self._ending = [signal.SIGTERM, signal.SIGKILL]
        self._open = 2  # streams that mpirun has not closed
        self._n_interrupts = 0

    def run(self) -> int:
        """Run it to its end; return the exit status of the script."""
        folder = folders.of_mpirun(self._environment)
        with signals_of(_HEARD) as signals, folder as environment:
            line, environment = mpirun.with_secret(self._line, environment)
            self._selector = selectors.PollSelector()
            self._mpirun = subprocess.Popen(
                line,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is for the script
                preexec_fn=functools.partial(end_with_parent, os.getpid()),
            )
            try:
                self._serve(signals)
            finally:
                self._end_all()
                self._selector.close()
        if not self._has_started:
            print(self._failed(self._printed()), file=sys.stderr)
            return 1
        if self._status is None:
            print("mpirun has ended before the script.", file=sys.stderr)
            return max(self._mpirun.returncode, 1)
        return self._status

    def _printed(self):
        return mpirun.NOISE.sub(b"", bytes(self._held[1]) + bytes(self._held[0])).decode(
            errors="replace"
        )

    def _serve(self, signals):
        out, err = self._mpirun.stdout.fileno(), self._mpirun.stderr.fileno()
        read = selectors.EVENT_READ
        self._to_mpirun = _Writer(os.dup(self._mpirun.stdin.fileno()), self._selector)
        self._mpirun.stdin.close()
        self._selector.register(signals, read, lambda: self._hear(signals))
        self._selector.register(out, read, lambda: self._read(out, self._take_out))
        self._selector.register(err, read, lambda: self._read(err, self._take_err))
        while self._mpirun.poll() is None or self._open:
            if self._mpirun.poll() is not None and self._deadline == float("inf"):
                self._deadline = time.monotonic() + 1  # an agent of mpirun may keep the pipes open
            left = self._deadline - time.monotonic()
            if left <= 0:
                if self._mpirun.poll() is not None:
                    break
                self._end_mpirun()
                continue
            for key, _ in self._selector.select(min(left, 1.0)):
                key.data()
        rest = b"" if self._tail.startswith(b"\0") else self._tail  # half a mark
        self._write(2, mpirun.PAGE.sub(b"", bytes(self._late + rest)))

    def _wait_for_stdin(self):
        """Take the next piece of input, unless a terminal would stop this process for it."""
        try:
            if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
                os.fstat(0)
                self._selector.register(0, selectors.EVENT_READ, self._read_stdin)
        except OSError:  # closed
            self._to_mpirun.write(_HEADER.pack(_DATA, 0))

    def _read_stdin(self):
        self._selector.unregister(0)
        data = os.read(0, _FRAME)
        self._to_mpirun.write(_HEADER.pack(_DATA, len(data)) + data)

    def _hear(self, signals):
        for number in os.read(signals, 256):
            if number == signal.SIGCHLD:
                continue
            self._n_interrupts += number in (signal.SIGINT, signal.SIGTERM)
            if self._n_interrupts and (not self._has_started or self._n_interrupts > 1):
                self._status = self._status or 128 + number
                self._end_mpirun()
                continue
            self._to_mpirun.write(_HEADER.pack(_SIGNAL, number))
            if self._n_interrupts:
                self._end_after(_PATIENCE)

    def _end_after(self, seconds):
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _read(self, fd, take):
        data = os.read(fd, _SIZE)
        if data:
            return take(data)
        self._open -= 1
        return self._selector.unregister(fd)

    def _take_out(self, data):
        if self._has_started:
            self._write(1, data)
        else:
            self._held[0].extend(data)

    def _take_err(self, data):
        """Pass stderr on, but for marks, of which the end may not have come yet."""
        self._tail += data
        while self._tail:
            begin = self._tail.find(b"\0")
            if begin < 0:
                begin = len(self._tail)
            self._pass_err(bytes(self._tail[:begin]))
            del self._tail[:begin]
            prefix = f"\0{self._token} ".encode()
            if not self._tail:
                return
            if not self._tail.startswith(prefix[: len(self._tail)]):
                self._pass_err(b"\0")
                del self._tail[:1]
                continue
            end = self._tail.find(b"\0\n", 1)
            if end < 0:
                return
            self._take_mark(self._tail[len(prefix) : end].decode())
            del self._tail[: end + 2]

    def _pass_err(self, data):
        if self._status is not None:
            self._late.extend(data)
        elif self._has_started:
            self._write(2, data)
        else:
            self._held[1].extend(data)

    def _take_mark(self, mark):
        name, *rest = mark.split()
        if name == "start":
            self._has_started = True
            out, err = map(bytes, self._held)
            self._write(2, mpirun.NOISE.sub(b"", err))
            self._write(1, out)
            self._wait_for_stdin()
        elif name == "more":
            self._wait_for_stdin()
        else:
            self._status = int(rest[0])
            self._deadline = time.monotonic() + _GRACE

    def _write(self, fd, data):
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # the other end has set it so
                time.sleep(0.01)
            except OSError:  # nothing reads there any more, as with `| head`
                self._end_after(_GRACE)
                return

    def _end_mpirun(self):
        """Take the next step in ending mpirun."""
        number = self._ending.pop(0) if len(self._ending) > 1 else self._ending[0]
        self._deadline = time.monotonic() + _LAST
        if number == signal.SIGKILL:
            self._end_all()
        else:
            self._mpirun.send_signal(number)

    def _end_all(self):
        """Kill mpirun and the agents that it has started."""
        mpirun.kill_session(self._mpirun.pid)
        self._mpirun.wait()
