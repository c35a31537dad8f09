"""The process of mpirun on each machine of a group: it starts the ranks, and carries for them.

    launcher ◀── start, line, status ── machine ◀── stdout, stderr, exit status ── rank
             ─── SIGUSR1, SIGTERM ────▶         ─── SIGUSR1, SIGTERM ───────────▶

A thread of it speaks MPI (`comm.mpi.group_carrier`). It ends with status 0 whatever its ranks do,
so that mpirun ends none of them: the launcher does, which is told of each end by a mark.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from typing import Sequence

from synkhronos._machine.devices import module_command
from synkhronos.comm.heartbeats import silent
from synkhronos.launch import guard
from synkhronos.launch.children import Children
from synkhronos.launch.streams import mark


def command(token: str, counts: Sequence[int], line: Sequence[str]) -> list[str]:
    """Return the command of each machine of a run.

    Parameters
    ----------
    token : str
        Begins the marks for the launcher.
    counts : list of int
        How many ranks each machine has; their numbers go on from one machine to the next.
    line : list of str
        The command of each rank.
    """
    told = json.dumps({"token": token, "counts": list(counts), "line": list(line)})
    return module_command("synkhronos.launch.machine", told, unbuffered=True)


def main(argument: str) -> None:
    """Run the ranks of this machine to their end, and this process."""
    for number in guard.FORWARDED:  # before and after the ranks, they are for nobody
        signal.signal(number, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = json.loads(argument)
    ends = [sum(told["counts"][: number + 1]) for number in range(len(told["counts"]))]
    ranks = [list(range(end - count, end)) for end, count in zip(ends, told["counts"])]
    carrying = _Carrying(ranks)
    here = ranks[carrying.carrier.machine]
    machine = _Machine(carrying, here, [told["line"]] * len(here), told["token"])
    machine.limits_of_ranks = limits
    carrying.carrier.on_lost = machine.tell_lost
    machine.run()
    carrying.end()


class _Carrying(threading.Thread):
    """The thread that speaks MPI, from its start to its end."""

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        super().__init__(daemon=True)
        self._ranks, self._has_begun, self.carrier = ranks, threading.Event(), None
        self.start()
        self._has_begun.wait()
        if self.carrier is None:
            os._exit(1)

    def run(self) -> None:
        try:
            self._carry()
        except BaseException:  # MPI may be missing here
            traceback.print_exc()
            if self.carrier is not None:
                self.carrier.fail()
        finally:
            self._has_begun.set()

    def _carry(self):
        from synkhronos.comm.mpi import secret

        given = secret.take()  # not for what this process starts
        from synkhronos.comm.mpi import mpi_library
        from synkhronos.comm.mpi.group_carrier import GroupCarrier

        MPI = mpi_library.MPI
        mpi_library.begin(MPI.THREAD_FUNNELED)
        try:
            comm = secret.checked(MPI.COMM_WORLD, given)
        except secret.NoSecret as error:
            sys.stderr.write(f"{socket.gethostname()}: {error}\n")
            sys.stderr.flush()
            os._exit(1)  # the end of MPI would wait for others, and MPI_Abort prints a page
        self.carrier = GroupCarrier(comm, self._ranks)
        self._has_begun.set()
        self.carrier.run()
        if not self.carrier.has_lost:
            mpi_library.end()

    def end(self) -> None:
        """End this process when all ranks have ended, also on other machines."""
        self.join()
        os._exit(0)  # after a loss MPI's end would wait for others


class _Machine(Children):
    """The ranks of this machine, whose numbers in the run are `numbers`."""

    heard = guard.FORWARDED

    def __init__(
        self,
        carrying: _Carrying,
        numbers: Sequence[int],
        commands: Sequence[Sequence[str]],
        token: str,
    ) -> None:
        super().__init__(commands, names=[""] * len(numbers), environment=os.environ, token=token)
        self._carrier, self._numbers, self._token = carrying.carrier, numbers, token
        self._daemon = os.getppid()

    def _group_setup(self):
        return self._carrier

    @contextlib.contextmanager
    def _begun(self):
        with super()._begun():
            for rank, known in enumerate(self.ranks):
                self._tell(self._numbers[rank], "start", f"{known.pid} {known.host}")
            yield

    def _tell(self, number, kind, text):
        self._write(2, mark(self._token, number, kind, text))

    def tell_lost(self, number: int) -> None:
        """Tell the launcher of a rank of a machine that is silent."""
        self._tell(number, "lost", silent())

    def _show(self, stream, rank, text):
        # With a newline, also behind a piece of a very long line: the next mark begins a line.
        end = b"" if text.endswith(b"\n") else b"\n"
        self._write(stream, mark(self._token, self._numbers[rank], "line", end="") + text + end)

    def _without_marks(self, text):
        return text  # they are for the launcher

    def _note_end(self, rank, status):
        self.ranks[rank].status = status
        self._tell(self._numbers[rank], "status", status)

    def _interrupt(self, number):
        self._end(number)

    def _is_over(self):
        if os.getppid() != self._daemon:  # without it nothing reaches the launcher
            self._end(signal.SIGKILL)
        return super()._is_over()

    def say(self, sentence: str) -> None:
        """Say nothing: the launcher does."""


if __name__ == "__main__":
    main(sys.argv[1])
