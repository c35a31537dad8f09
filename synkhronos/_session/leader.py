"""The life of a leader: the first process of each machine other than the master's.

It serves the master's sessions one after another: it starts the ranks of its machine, and is the
first of them.
"""

import functools
import gc
import signal
import socket

from synkhronos import _host
from synkhronos._machine.devices import default_threads, end_openmp_threads, resolve
from synkhronos._machine.interrupts import interrupts_held, raised_here
from synkhronos._machine.log import log
from synkhronos._machine.processes import join_all, kill_all
from synkhronos._machine.shared_memory import check_sharing
from synkhronos._session import commands
from synkhronos._session.rank import Worker, start_workers
from synkhronos._session.replica import RunFunction
from synkhronos._session.results import outputs_of_machine
from synkhronos.comm import Aborted
from synkhronos.comm.mpi import job
from synkhronos.comm.mpi.leader_gate import SessionOver
from synkhronos.comm.mpi.link import JobEnded
from synkhronos.comm.transports import make_gate_of_machines
from synkhronos.errors import WorkerDied

_END_SECONDS = 5.0


def serve(link) -> int:
    """Serve the master's sessions until the job ends; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the script answers it
    try:
        while True:
            _, (name, *content) = link.wait_for_message()
            if name == "wish":
                [wish] = content
                link.tell(0, ("offer", wish.session, job.facts(), *_offer(wish)))
            elif name == "plan":
                _Session(link, *content).run()
    except JobEnded as end:
        if end.is_regular:
            link.join()
            return 0
        log.info("%s", end)  # the script's machine tells the user or the launcher
        link.join(float("inf"))
        return 1
    except Exception as error:
        log.exception("the ranks of this machine can't go on")
        link.end(f"{socket.gethostname()} raised {type(error).__name__}: {error}")
        return 1


def _offer(wish):
    """Return the devices of this machine for a session and None, or () and an error message."""
    try:
        check_sharing()
        # As in fork(). This also loads the BLAS: its threads can be limited only afterwards.
        _host.refuse_open_device()
        return resolve(wish.n_parallel, wish.use_gpu, wish.devices), None
    except Exception as error:
        return (), f"{error}"


class _Session:
    """One session on this machine."""

    def __init__(self, link, plan):
        layout = plan.layout(link.machine)
        gc.freeze()  # as in workers, so that the collections of `Forget` are short
        self._link, self._session = link, plan.session
        gate = self._gate = make_gate_of_machines(plan, link)
        self._processes = {}
        ranks = layout.ranks()
        threads = default_threads(len(ranks)) if plan.threads is None else plan.threads
        if len(ranks) > 1:
            end_openmp_threads(threads)
        self._worker = Worker(ranks[0], gate, plan.devices, threads)
        try:
            self._worker.limit_threads()  # as in the master's `Session`
            with interrupts_held():
                start_workers(self._processes, gate, ranks, plan.devices, threads, plan.profile)
        except BaseException:
            self._worker.unbind()
            raise
        link.send("watch", plan.session, {rank: each.pid for rank, each in self._processes.items()})
        gate.on_answer = self._hear

    def run(self):
        """Run the master's commands until the session is over."""
        quits = False
        try:
            while self._worker.running:
                self._run_command()
            quits = True
        except JobEnded:
            raise
        except WorkerDied as death:
            log.info("%s", death)
            self._link.tell(0, ("died", self._session, str(death), death.rank, death.exitcode))
        except SessionOver:
            pass
        finally:
            if quits:
                join_all(self._processes.values(), _END_SECONDS)
            kill_all(self._processes.values(), _END_SECONDS)
            for process in self._processes.values():
                process.close()
            try:
                self._worker.at_end.close()
            except raised_here(Exception):  # such as the death of an extension's rank
                log.warning("an extension has failed to end", exc_info=True)
            self._worker.unbind()
            self._gate.on_over()
            self._worker.comm.close()
            self._worker.replicas.clear()
            self._gate.close()
            gc.unfreeze()
            gc.collect()  # frees compiled functions, which are cycles

    def _run_command(self):
        gate, worker = self._gate, self._worker
        reply = error = command = None
        try:
            command = worker.next_recorded() if worker.recorder else gate.next_command()
            reply = command.run(worker)
            if not worker.running:
                return  # the master doesn't wait for the end of Quit, and workers may have ended
        except Aborted:
            pass
        except (WorkerDied, SessionOver):
            raise
        except BaseException as caught:
            error = caught
        gate.parts = functools.partial(self._parts, command)
        if worker.recorder is not None:
            worker.recorder.mark("finish")
        gate.worker_finish(reply, error)

    def _parts(self, command):
        """Return the outputs and the exposed values of this machine for the master."""
        if isinstance(command, commands.Expose):
            return (), self._worker.comm.variables.exposed(command.keys, command.rank)
        if isinstance(command, RunFunction):
            return outputs_of_machine(self._worker, command), {}
        return (), {}

    def _hear(self, rank, answer):
        if not self._worker.comm.outputs.hear(rank, answer):
            self._gate.answers.append((rank, answer))
