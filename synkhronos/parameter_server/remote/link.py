"""The connection of a worker's script with its mover, through which it reaches the servers.

    script                                  mover
    init_key, push, request, set_updater ──▶
    ask: join, barrier, states; close    ──▶
                                         ◀── answer       of servers
                                         ◀── sent         an array of `outgoing` may change again
                                         ◀── arrived      an array of `incoming` is there
                                         ◀── lost         a worker or a server has died

Replies come in lists, so that the script is woken less often. The script's process never starts
MPI. One of the threads that wait reads the socket for all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import socket
import threading
import time
from typing import Any

import numpy as np

from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.log import log
from synkhronos._machine.shared_memory import Segments
from synkhronos.comm.channel import Channel, Closed
from synkhronos.comm.handlers import Handlers
from synkhronos.parameter_server.errors import (
    CallbackFailed,
    OutOfTurn,
    ParameterServerError,
    RoundTimeout,
    ServerLost,
    StoreClosed,
    WorkerLost,
)
from synkhronos.parameter_server.remote.buffers import Buffers
from synkhronos.parameter_server.remote.protocol import Failure

VARIABLE = "SYNKHRONOS_PARAMETER_SERVER"
_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        CallbackFailed,
        OutOfTurn,
        ParameterServerError,
        ServerLost,
        ValueError,
        WorkerLost,
    )
}


class MoverLink:
    """The connection of this process with its mover; made by `connect`.

    `mode` is "dist_async" or "dist_sync"; `hosts` are those of the workers.
    """

    _has_been_made = False

    def __init__(self, told: dict[str, Any], mode: str) -> None:
        self.rank: int = told["rank"]
        self.hosts: list[str] = told["hosts"]
        self.server_hosts: list[str] = told["server_hosts"]
        self.num_workers, self.num_servers = len(self.hosts), len(self.server_hosts)
        self.mode = mode
        os.set_inheritable(told["descriptor"], False)
        self._socket = socket.socket(fileno=told["descriptor"])
        self._channel = Channel(self._socket)
        self._segments = Segments()
        self._segments.leave()  # the mover may send what is there after this process has ended
        self._buffers: dict[int, Buffers] = {}
        self._sent: dict[int, int] = {}  # the last version that the mover has sent
        self._arrived: list[tuple[int, int | None, Exception | None]] = []
        self._questions = itertools.count()
        self._asked: set[int] = set()  # questions of which the answer is waited for
        self._answers: dict[int, tuple[Any, Any]] = {}
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._is_reading = self._is_shut = False
        self._writing = threading.Lock()
        self._handlers = Handlers(
            sent=self._take_sent,
            arrived=self._take_arrived,
            answer=self._take_answer,
            lost=self._take_lost,
        )

    @staticmethod
    def is_available() -> bool:
        """Return whether this process is a worker of ``synkhronos launch --servers``."""
        return VARIABLE in os.environ

    @classmethod
    def connect(cls, mode: str) -> MoverLink:
        """Connect this process with its mover, for a store of a mode.

        Raise ParameterServerError if this process is not a worker, or has had its store already,
        and ValueError if another worker has made a store of another mode.
        """
        if not cls.is_available():
            raise ParameterServerError(
                f"a {mode!r} store needs servers: start the script with `synkhronos launch "
                "--servers 1 --workers 2 SCRIPT`, or make a 'local' store."
            )
        told = json.loads(os.environ[VARIABLE])
        if cls._has_been_made or told["pid"] != os.getppid():
            raise ParameterServerError(
                "this process can't make a store on the servers: the script's process makes one "
                "in a run, and a process that it has started makes none."
            )
        link = cls(told, mode)
        cls._has_been_made = True
        link._ask_servers("join", {0: (mode,)})
        link._tell("tell", "mode", mode)
        return link

    def init_key(
        self,
        number: int,
        name: int | str,
        shape: tuple[int, ...],
        dtype: Any,
        op: str,
        weight: np.ndarray | None = None,
        is_whole: bool = False,
    ) -> None:
        """Tell the servers of a key; return at once.

        All other calls use `number`, which is this worker's; all workers share the `name`.
        `op` reduces over workers, in dist_sync. `weight`, the first value, is worker 0's, and flat.
        A key that `is_whole` is kept by one server.
        """
        size = math.prod(shape)
        buffers = self._buffers[number] = Buffers.create(self._segments, dtype, size)
        is_given = weight is not None and self.rank == 0
        if is_given:
            buffers.outgoing(0)[...] = weight
        self._tell("key", number, name, tuple(shape), buffers.place, op, is_given, is_whole)
        with self._changed:
            self._sent.setdefault(number, -1 if is_given else 0)
            self._changed.notify_all()

    def outgoing(self, number: int, version: int) -> np.ndarray:
        """Return the array for a push; wait until the push before the last one has been sent."""
        self._wait_for_key(number)
        self._wait(lambda: self._sent[number] >= version - 2, None)
        return self._buffers[number].outgoing(version)

    def is_free(self, number: int, version: int) -> bool:
        """Return whether `outgoing` would return at once."""
        return self._sent[number] >= version - 2

    def push(self, number: int, version: int, priority: int = 0) -> None:
        """Send the array of `outgoing` to the servers; return at once."""
        self._tell("push", number, version, priority)

    def request(self, number: int, version: int, priority: int = 0) -> None:
        """Ask for a value that includes this worker's push of a version; return at once."""
        self._wait_for_key(number)
        self._tell("pull", number, version, priority)

    def incoming(self, number: int, version: int) -> np.ndarray:
        """Return the array into which a requested value comes."""
        return self._buffers[number].incoming(version)

    def next(self, timeout: float | None = None) -> list[tuple[int, int | None, Exception | None]]:
        """Wait for values that were requested; return (number, version, error) of each.

        The value is in ``incoming(number, version)``, unless there is an error. With version None
        the servers have refused the key.
        """
        self._wait(lambda: bool(self._arrived), timeout, raises=lambda: not self._arrived)
        with self._changed:
            found, self._arrived = self._arrived, []
        return found

    def set_updater(self, blob: bytes, parameters: dict[str, str] | None = None) -> None:
        """Send a pickled updater, and parameters for its ``init_updater``, to the servers.

        That of worker 0 counts.
        """
        self._tell("tell", "updater", blob if self.rank == 0 else b"", parameters or {})

    def set_hyper(self, first: dict[int, int], values: dict[str, Any]) -> None:
        """Send changed hyperparameters, which count for versions from ``first[key]`` on.

        For a key that is not in `first` they count at once.
        """
        self._tell("tell", "hyper", first, values)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until all workers have called this."""
        self._ask_servers("barrier", {0: ()}, timeout)

    def missing(self, name: int | str, version: int, timeout: float | None = None) -> list[int]:
        """Return the workers that have not pushed a key in a round."""
        answers = self._ask_servers("missing", self._all(name, version), timeout)
        return sorted({worker for answer in answers for worker in answer or ()})

    def states(self, timeout: float | None = None) -> list[bytes]:
        """Return the state of the updater of each server."""
        return self._ask_servers("states", self._all(), timeout)

    def set_states(self, states: list[bytes], timeout: float | None = None) -> None:
        """Set the state of the updater of each server."""
        if len(states) != self.num_servers:
            raise ValueError(
                f"there are states of {len(states)} servers, but this run has {self.num_servers}: "
                "use as many servers as the run that has saved them."
            )
        arguments = {server: (state,) for server, state in enumerate(states)}
        self._ask_servers("set_states", arguments, timeout)

    def record(self, is_on: bool) -> None:
        """Let the mover begin or stop to record when it sends and receives."""
        self._tell("record", is_on)

    def spans(self, timeout: float | None = None) -> list[tuple]:
        """Return (name, key, begin, end, bytes) of what was sent and received since the last call.

        The name is "send" or "receive"; times are those of ``time.monotonic()``.
        """
        return self._ask("spans", timeout=timeout)

    def close(self, timeout: float | None = None) -> None:
        """Send all pushes, leave the run, and close the connection."""
        if isinstance(self._failure, StoreClosed):
            return
        try:
            if self._failure is None:
                self._ask("close", timeout=timeout)
        finally:
            with self._changed:
                self._failure = StoreClosed("the store is closed.")
                self._changed.notify_all()
            self._shut()

    def _wait_for_key(self, number):
        """Wait until another thread has told of a key: the mover must know it first."""
        if number not in self._sent:
            with self._changed:
                self._changed.wait_for(lambda: number in self._sent or self._failure is not None)

    def _shut(self):
        """Close the socket; a thread that waits for it wakes, and closes it then."""
        with self._changed:
            self._is_shut = True
            if not self._is_reading:
                self._channel.close()
            else:
                with contextlib.suppress(OSError):  # the mover has ended
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _tell(self, *message):
        with self._writing:
            if self._failure is not None:
                raise self._failure
            try:
                self._channel.send(message)
            except Closed:
                self._fail_mover()
                raise self._failure from None

    def _ask(self, name, *rest, timeout=None):
        question = next(self._questions)
        self._asked.add(question)
        try:
            self._tell(name, question, *rest)
            if not self._wait(lambda: question in self._answers, timeout):
                asked = rest[0] if rest else name
                raise RoundTimeout(f"no answer of the servers to {asked} within {timeout:g} s.")
        except BaseException:
            self._withdraw(question)
            raise
        value, error = self._answers.pop(question)
        self._asked.discard(question)
        if error is not None:
            raise make_error(error)
        return value

    def _withdraw(self, question):
        """Withdraw a question, so that a barrier no longer counts this worker."""
        with self._changed:
            self._asked.discard(question)
            self._answers.pop(question, None)
        if self._failure is None:
            with contextlib.suppress(ParameterServerError):  # the mover has ended
                self._tell("withdraw", question)

    def _ask_servers(self, name, arguments, timeout=None):
        """Ask servers, each with its own arguments; return their answers, None of the others."""
        return self._ask("ask", name, arguments, timeout=timeout)

    def _all(self, *arguments):
        return dict.fromkeys(range(self.num_servers), arguments)

    def _wait(self, is_ready, timeout, raises=lambda: True):
        """Wait until a condition holds; return whether it does. One thread reads for all."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not is_ready():
                if self._failure is not None and raises():
                    raise self._failure
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if self._is_reading:
                    self._changed.wait(left)
                    continue
                self._is_reading = True
                self._changed.release()
                try:
                    is_there = self._wait_for_messages(left)
                finally:
                    self._changed.acquire()
                    self._is_reading = False
                    self._changed.notify_all()
                    if self._is_shut:
                        self._channel.close()
                if is_there:
                    self._read()
        return True

    def _wait_for_messages(self, seconds):
        try:
            return self._channel.wait(seconds)
        except (OSError, ValueError):
            return True  # `_read` finds that it is closed

    def _read(self):
        with interrupts_held():  # a Ctrl-C would lose messages that are not taken yet
            try:
                messages = self._channel.receive()
            except (Closed, OSError, ValueError):
                self._fail_mover()
                return
            for _, replies in messages:
                for name, *rest in replies:
                    self._handlers[name](*rest)

    def _fail_mover(self):
        if self._failure is None:
            self._failure = ParameterServerError(
                f"the process beside worker {self.rank} that reaches the servers has died."
            )

    def _take_sent(self, number, version):
        self._sent[number] = version

    def _take_arrived(self, number, version, error):
        self._arrived.append((number, version, error and make_error(error)))

    def _take_answer(self, question, value, error):
        if question in self._asked:
            self._answers[question] = value, error

    def _take_lost(self, kind, rank, host, how):
        if kind == "server":
            text = f"server {rank} on {host} {how}, and with it the weights that it kept."
            self._failure = ServerLost(text, rank, host, how)
        else:
            end = "; the others go on without it" if self.mode == "dist_async" else ""
            log.warning("worker %d on %s %s%s", rank, host, how, end)


def make_error(failure: Failure) -> Exception:
    """Return the exception that a message describes.

    >>> make_error(Failure("WorkerLost", "worker 1 has left", {"rank": 1})).rank
    1
    """
    return _ERRORS[failure.name](failure.text, **(failure.attributes or {}))
