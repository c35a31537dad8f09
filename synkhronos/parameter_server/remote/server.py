"""The process of a server: keeps its part of the keys until all workers have left.

    mover: join, key, chunk, pull, updater, begun, ...  ──▶  `_handlers`, here and in the `Keeper`
    mover: gone (its worker has left, or its script has died)  ──▶  told to the other workers
    a mover that dies itself: told by the group

Server 0 answers what needs one answer: the mode of the store, and barriers.
"""

from __future__ import annotations

import time
from typing import Sequence

from synkhronos._machine.log import log
from synkhronos.comm.handlers import Handlers
from synkhronos.parameter_server.group.interface import Group
from synkhronos.parameter_server.remote.keeping import Gone, Keeper
from synkhronos.parameter_server.remote.protocol import Failure, Post
from synkhronos.parameter_server.remote.queues import Transfer

LOOK_SECONDS = 0.25  # between looks for processes that have died
FINISH_SECONDS = 5.0  # at most, until workers have taken what was sent at the end
FINISH_LOOK_SECONDS = 0.05


class ServerLoop:
    """The loop of a server, in a group whose first ranks are the servers, and the others movers."""

    def __init__(self, group: Group, n_servers: int, hosts: Sequence[str]) -> None:
        self._group, self._post = group, Post(group)
        self._n_servers, self._n_workers = n_servers, group.size - n_servers
        self._rank, self._hosts = group.rank, hosts
        keeper = Keeper(group.rank, n_servers, self._n_workers, self._send, self._fail)
        self._keeper = keeper
        self._at_barrier: dict[int, int] = {}  # worker -> the number of its question
        self._handlers = Handlers(
            join=self._on_join,
            mode=self._on_mode,
            chunk=self._on_chunk,
            barrier=self._on_barrier,
            withdraw=self._on_withdraw,
            missing=self._on_missing,
            states=self._on_states,
            set_states=self._on_set_states,
            gone=self._on_gone,
            ended=self._on_ended,
            key=keeper.on_key,
            pull=keeper.on_request,
            updater=keeper.on_updater,
            hyper=keeper.on_hyper,
            begun=keeper.on_begun,
        )

    def run(self) -> int:
        """Serve until all workers have left; return the exit status."""
        while len(self._keeper.gone) < self._n_workers:
            self._group.wait(LOOK_SECONDS)
            for rank, (name, *rest) in self._post.receive():
                self._handlers[name](rank - self._n_servers, *rest)
            self._post.progress()
        self._finish()
        return 0

    def _finish(self):
        """Send the rest, in particular to workers that wait for the answer to their end."""
        end = time.monotonic() + FINISH_SECONDS
        while self._post.is_sending and time.monotonic() < end:
            self._group.wait(FINISH_LOOK_SECONDS)
            for _ in self._post.receive():  # what has been taken
                pass
            self._post.progress()

    def _tell(self, worker, *message):
        self._post.tell(worker + self._n_servers, *message)

    def _send(self, worker, number, version, begin, array, priority):
        transfer = Transfer(number, version, begin, array, priority)
        self._post.send(worker + self._n_servers, transfer)

    def _fail(self, worker, number, version, error):
        self._tell(worker, "failed", number, version, error)

    def _on_join(self, worker, question, mode):
        """Agree on the mode of the store: the first worker decides."""
        first = self._keeper.mode = self._keeper.mode or mode
        error = None
        if mode != first:
            error = Failure(
                "ValueError",
                f"this worker makes a {mode!r} store, but another one has made a {first!r} store: "
                "all workers of a run must make the same kind.",
            )
        self._tell(worker, "answer", question, None, error)

    def _on_mode(self, worker, mode):
        self._keeper.mode = mode

    def _on_chunk(self, worker, number, version, begin, chunk):
        place = self._keeper.place(worker, number, version, begin, chunk.nbytes)
        if place is not None:
            place[...] = chunk
            self._keeper.arrived(worker, number, version, chunk.nbytes)

    def _on_barrier(self, worker, question):
        self._at_barrier[worker] = question
        self._open_barrier()

    def _on_withdraw(self, worker, question):
        """Stop counting a worker at the barrier: it no longer waits."""
        if self._at_barrier.get(worker) == question:
            del self._at_barrier[worker]

    def _on_missing(self, worker, question, name, version):
        self._answer_with(worker, question, lambda: self._keeper.missing(name, version))

    def _on_states(self, worker, question):
        self._answer_with(worker, question, self._keeper.states)

    def _on_set_states(self, worker, question, states):
        self._answer_with(worker, question, lambda: self._keeper.set_states(states))

    def _answer_with(self, worker, question, ask):
        value, error = None, None
        try:
            value = ask()
        except Exception as problem:
            text = f"server {self._rank}: {type(problem).__name__}: {problem}"
            error = Failure("ParameterServerError", text)
        self._tell(worker, "answer", question, value, error)

    def _on_gone(self, worker, question, how, is_dead):
        """Note that a worker has left, or that its script has died."""
        self._tell(worker, "answer", question, None, None)
        host = self._hosts[worker + self._n_servers]
        self._count_out(Gone(worker, host, how, is_dead))

    def _count_out(self, gone):
        if gone.worker in self._keeper.gone:
            return
        if gone.is_dead and self._rank == 0:
            log.warning("%s", gone)
            for other in range(self._n_workers):
                if other != gone.worker and other not in self._keeper.gone:
                    self._tell(other, "lost", gone.worker, gone.host, gone.how)
        self._keeper.on_gone(gone)
        self._open_barrier()

    def _on_ended(self, worker):
        """Note that a worker is gone because its mover has died or its host is silent."""
        rank = worker + self._n_servers
        how = self._group.losses.get(rank, "has died")
        if worker >= 0:
            how = "has died with its mover" if how == "has died" else how
            self._count_out(Gone(worker, self._hosts[rank], how, True))

    def _open_barrier(self):
        """Answer the workers at a barrier, if it is complete or can't be."""
        gone = self._keeper.gone
        if not self._at_barrier:
            return
        error = None
        if self._keeper.mode == "dist_sync" and gone:
            lost = min(gone.values(), key=lambda each: not each.is_dead)
            text = f"{lost}: a barrier can't be complete without it."
            attributes = {"rank": lost.worker, "host": lost.host, "reason": lost.how}
            error = Failure("WorkerLost", text, attributes)
        elif len({*self._at_barrier, *gone}) < self._n_workers:
            return
        waiting, self._at_barrier = self._at_barrier, {}
        for worker, question in waiting.items():
            self._tell(worker, "answer", question, None, error)
