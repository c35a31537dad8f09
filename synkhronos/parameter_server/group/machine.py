"""The process of mpirun on each machine of a group: starts the ranks, and sends their messages.

    launcher ◀── start, line, status ── machine ◀── stdout, stderr, exit status ── rank
             ─── SIGUSR1, SIGTERM ────▶         ─── SIGUSR1, SIGTERM ───────────▶

One of its threads is the `carrier`. The process ends with status 0 whatever its
ranks do, so that mpirun ends no others. The launcher gets a mark about each end, and decides.
"""

from __future__ import annotations

import contextlib
import itertools
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
from synkhronos.launch import guard
from synkhronos.launch.streams import mark
from synkhronos.parameter_server.group.children import Children


def command(token: str, counts: Sequence[int], line: Sequence[str]) -> list[str]:
    """Return the command of each machine of a run: `line` is the command of each rank.

    `counts` has the number of ranks of each machine, which are numbered from machine to machine;
    `token` begins the marks for the launcher.
    """
    run = json.dumps({"token": token, "counts": list(counts), "line": list(line)})
    return module_command("synkhronos.parameter_server.group.machine", run, unbuffered=True)


def main(argument: str) -> None:
    """Run the ranks of this machine to their end, then end this process."""
    for number in guard.FORWARDED:  # before the ranks start and after they have ended
        signal.signal(number, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    run = json.loads(argument)
    ends = itertools.accumulate(run["counts"])
    ranks = [list(range(end - count, end)) for end, count in zip(ends, run["counts"])]
    mpi_thread = _MpiThread(ranks)
    here = ranks[mpi_thread.carrier.machine]
    machine = _Machine(mpi_thread, here, [run["line"]] * len(here), run["token"])
    machine.limits_of_ranks = limits
    mpi_thread.carrier.on_lost = machine.tell_lost
    machine.run()
    mpi_thread.end()


class _MpiThread(threading.Thread):
    """The thread that begins and ends MPI, and then is the carrier."""

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
        except BaseException:  # this machine may have no MPI
            traceback.print_exc()
            if self.carrier is not None:
                self.carrier.fail()
        finally:
            self._has_begun.set()

    def _carry(self):
        from synkhronos.comm.mpi import secret

        own_secret = secret.take()  # also removes it, so that the ranks don't inherit it
        from synkhronos.comm.mpi import mpi_library
        from synkhronos.comm.mpi.mesh import Mesh, Unreachable
        from synkhronos.parameter_server.group.carrier import GroupCarrier

        try:
            with mpi_library.begun(mpi_library.MPI.THREAD_FUNNELED) as comm:
                mesh = Mesh(comm, secret.of_job(own_secret, comm.size))
        except (secret.NoSecret, Unreachable) as error:
            sys.stderr.write(f"{socket.gethostname()}: {error}\n")
            sys.stderr.flush()
            os._exit(1)  # MPI_Finalize would wait for others, and MPI_Abort prints a page
        self.carrier = GroupCarrier(mesh, self._ranks)
        self._has_begun.set()
        self.carrier.run()

    def end(self) -> None:
        """End this process when the ranks of all machines have ended."""
        self.join()
        os._exit(0)


class _Machine(Children):
    """The ranks of this machine, whose numbers in the run are `numbers`."""

    heard = guard.FORWARDED

    def __init__(
        self,
        mpi_thread: _MpiThread,
        numbers: Sequence[int],
        commands: Sequence[Sequence[str]],
        token: str,
    ) -> None:
        super().__init__(commands, names=[""] * len(numbers), environment=os.environ, token=token)
        self._carrier, self._numbers, self._token = mpi_thread.carrier, numbers, token
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

    def tell_lost(self, number: int, why: str) -> None:
        """Tell the launcher of a rank whose machine is lost."""
        self._tell(number, "lost", why)

    def _show(self, stream, rank, text):
        # Always with a newline, also after a piece of a very long line: a mark begins a line.
        end = b"" if text.endswith(b"\n") else b"\n"
        self._write(stream, mark(self._token, self._numbers[rank], "line", end="") + text + end)

    def _without_marks(self, text):
        return text  # the launcher takes them

    def _note_end(self, rank, status):
        self.ranks[rank].status = status
        self._tell(self._numbers[rank], "status", status)

    def _interrupt(self, number):
        self._end(number)

    def _is_over(self):
        if os.getppid() != self._daemon:  # mpirun's daemon has ended, so the launcher has, too
            self._end(signal.SIGKILL)
        return super()._is_over()

    def say(self, sentence: str) -> None:
        """Say nothing: the launcher does."""


if __name__ == "__main__":
    main(sys.argv[1])
