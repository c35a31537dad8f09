"""One rank's life: wait at the start barrier, run the command, arrive at the finish barrier.

The master runs the same commands with a Worker of its own, of which it doesn't use `main`.
"""

import contextlib
import cProfile
import functools
import gc
import os
import signal

from synkhronos import _host
from synkhronos._machine.devices import keep_freed_memory, kind, limit_threads
from synkhronos._machine.files import new_file
from synkhronos._machine.log import log, name_rank
from synkhronos._machine.processes import ForkedProcess, leave_signals_to_parent
from synkhronos._session.results import Results
from synkhronos._wording import count, sentence
from synkhronos.comm import Aborted
from synkhronos.comm.transports import connect


class Worker:
    """The state of one rank: its device, communicator, shared variables and functions."""

    def __init__(self, rank, gate, devices, threads, on_release=None):
        self.rank, self.n_ranks = rank, gate.n_ranks
        self.is_master = rank == gate.master_rank  # its process runs the user's script
        self.gate = gate
        self.devices = devices
        self.threads = threads
        self.equal_weights = (1,) * gate.n_ranks
        self.comm = connect(self, on_release)
        self.fetch = self.comm.memory.fetch  # returns an array that a command refers to
        self.results = Results(self)
        self.replicas = {}
        self.variables = {}
        self.at_end = contextlib.ExitStack()  # a leader closes it at the end of the session
        self.running = True
        self.recorder = None  # a SpanRecorder while a profile is on
        self._restore_threads = None
        name_rank(rank, self._is_in_a_call)

    @property
    def device(self) -> str:
        return self.devices[self.rank]

    @property
    def is_like_master(self) -> bool:
        """Whether functions that the master has compiled run on this rank's device."""
        return kind(self.device) == kind(self.devices[self.gate.master_rank])

    def _is_in_a_call(self):
        # The master is also busy outside of calls: with plain Theano functions, and as_theano.
        return self.n_ranks > 1 and (not self.is_master or self.gate.is_in_call)

    def bind(self) -> int:
        """Open the device, limit the threads to this rank's cores, and return the process id."""
        self.limit_threads()
        if self.device == "cpu":
            keep_freed_memory()
        else:
            is_first = kind(self.device) not in map(kind, self.devices[: self.rank])
            _host.open_device(self.device, self.rank, self.threads, is_first)
        self.gate.introduce(self.device)
        pid, threads = os.getpid(), count(self.threads, "thread")
        log.info("process %d on %s, with %s", pid, self.device, threads)
        return pid

    def limit_threads(self) -> None:
        """Limit the threads of BLAS and OpenMP to this rank's part of the cores, until `unbind`."""
        if self._restore_threads is None:
            self._restore_threads = limit_threads(self.threads)

    def unbind(self) -> None:
        """Restore the limits of threads, and log without a rank from now on."""
        name_rank(None)
        if self._restore_threads is not None:
            self._restore_threads()

    def main(self, profile: bool) -> None:
        """Run commands in a worker process, until `Quit`."""
        # Ctrl-C goes to every process of the terminal; only the master's script may answer it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        leave_signals_to_parent()
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        self.gate.become_worker(self.rank)
        # SIGINT was blocked before the fork. The master's program may block SIGIO, which must
        # arrive here: it ends this process when the master has died.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGIO})
        if profile:
            self._loop_with_profile(os.getcwd())  # an operation may change the folder later
        else:
            self._loop()

    def _loop_with_profile(self, folder):
        path = os.path.join(folder, f"synk_worker_{self.rank}.prof")
        profiler = cProfile.Profile()
        profiler.runcall(self._loop)
        try:
            # Don't follow a link of this name: other users may write to the folder.
            with new_file(path, follow=False) as file:
                profiler.dump_stats(os.dup(file.fileno()))  # dump_stats closes the descriptor
        except OSError as error:
            log.error("%s was not saved: %s", path, sentence(error))

    def record(self, recorder) -> None:
        """Set the Recorder of this rank; None ends the recording."""
        self.recorder = self.gate.recorder = recorder

    def _loop(self):
        while self.running:
            reply = error = None
            try:
                record = self.recorder is not None
                command = self.next_recorded() if record else self.gate.next_command()
                reply = command.run(self)
            except Aborted:
                pass
            except BaseException as caught:
                error = caught
            if self.recorder is not None:
                # Before the barrier: after it the master may begin the next call at once.
                self.recorder.mark("finish")
            try:
                self.gate.worker_finish(reply, error)
            except BaseException as unsent:  # pickling may run code of the user's
                # The reply may have told the master of a new layout of outputs: lay all out anew.
                self.comm.close()
                self.gate.worker_finish(error=unsent)
            del reply, error  # tracebacks would keep arrays alive while this rank waits

    def next_recorded(self):
        """Wait for the next command, and record the wait."""
        with self.recorder.span("start"):
            return self.gate.next_command()


def start_workers(processes, gate, ranks, devices, threads, profile):
    """Fork a process for each other rank of `ranks`; add rank -> ForkedProcess to `processes`."""
    for rank in ranks:
        if rank != gate.rank:
            life = functools.partial(_be_worker, rank, gate, devices, threads, profile)
            processes[rank] = ForkedProcess(life, gate.descriptors)
            gate.watch(rank, processes[rank])


def _be_worker(rank, gate, devices, threads, profile):
    # The collector doesn't touch the master's objects, so their pages stay shared with the master,
    # and the collections of `Forget` are short.
    gc.freeze()
    Worker(rank, gate, devices, threads).main(profile)
