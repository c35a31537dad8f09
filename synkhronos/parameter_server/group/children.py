"""Starts the ranks of a group on this machine, without mpirun."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import select
import signal
import socket
import subprocess
from typing import Any, Sequence

from synkhronos._machine import heartbeats
from synkhronos._machine.processes import end_with_parent, life_of, status_of
from synkhronos.parameter_server.group import membership, one_machine
from synkhronos.parameter_server.group.watched import AFTER_FAILURE, Lines, WatchedRanks


class Children(WatchedRanks):
    """The ranks of a group on this machine: child processes, one for each of `commands`.

    A rank finds its group with `membership.join`.
    """

    def __init__(self, commands: Sequence[Sequence[str]], **more: Any) -> None:
        super().__init__(**more)
        self.limits_of_ranks = resource.getrlimit(resource.RLIMIT_NOFILE)
        one_machine.allow_descriptors(len(commands))
        self._commands = commands
        limit = heartbeats.limit(self._environment.get(heartbeats.VARIABLE))
        self._ends_stopped = limit < float("inf")
        self._processes: list[subprocess.Popen] = []

    @contextlib.contextmanager
    def _begun(self):
        setup = self._group_setup()
        try:
            for rank, command in enumerate(self._commands):
                value, descriptors = setup.place(rank)
                process = subprocess.Popen(
                    command,
                    env={**membership.without_mpi(self._environment), membership.VARIABLE: value},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=descriptors,
                    preexec_fn=functools.partial(_prepare_child, os.getpid(), self.limits_of_ranks),
                )
                self._processes.append(process)
                known = self.ranks[rank]
                known.pid, known.host = process.pid, socket.gethostname()
                self._listen(process.stdout.fileno(), (rank, 1, Lines()))
                self._listen(process.stderr.fileno(), (rank, 2, Lines()))
        except BaseException:
            self._end_all()
            raise
        finally:
            setup.close()
        yield

    def _group_setup(self):
        """Return the object whose descriptors the ranks inherit to join their group."""
        return one_machine.GroupSetup(len(self._commands))

    def _take(self, stream, data, is_end=False):
        rank, number, lines = stream
        for line in lines.take(data, is_end):
            text = self._without_marks(line) if number == 2 else line
            if text:
                self._show(number, rank, text)

    def _take_mark(self, rank: int, kind: bytes, text: str) -> None:
        """Take a message about a rank."""

    def _look(self):
        """Note the ranks that have ended. They are reaped at the end, with their process groups."""
        running = []
        for rank, process in enumerate(self._processes):
            if self.ranks[rank].status is None:
                status = status_of(process.pid, reaps=False)
                if status is None:
                    running.append(process.pid)
                else:
                    self._read_rest(rank)
                    self._note_end(rank, status)
        may_end = self.failed and running and self._ends_stopped
        if may_end and all(life_of(pid) == "stopped" for pid in running):
            self._end_after(AFTER_FAILURE)  # it may be that nobody continues them

    def _read_rest(self, rank):
        """Read the last lines of a rank that has ended, before its end is reported."""
        for fd in [fd for fd, stream in self._streams.items() if stream[0] == rank]:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if poll.poll(0):
                self._read(fd)  # as much as a pipe holds

    def _is_over(self):
        self._look()
        return all(rank.status is not None for rank in self.ranks)

    def _ask_to_end(self):
        self._end(signal.SIGUSR1)

    def _end(self, number):
        for rank, process in enumerate(self._processes):
            if self.ranks[rank].status is None:  # so it is not reaped yet
                os.kill(process.pid, number)

    def _end_all(self):
        self._look()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        for rank, process in enumerate(self._processes):
            process.wait()
            if self.ranks[rank].status is None:
                self._note_end(rank, process.returncode)
            process.stdout.close()
            process.stderr.close()


def _prepare_child(parent, limits):
    """Prepare the process that becomes a rank: it ends when this command is killed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.setpgid(0, 0)  # a Ctrl-C in the terminal is for the command
    end_with_parent(parent, signal.SIGKILL)
