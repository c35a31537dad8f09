"""The mover: the process beside a worker's script that exchanges messages with the servers.

    script ── Unix socket ──┐                       ┌── server
           memory ── mapped ┘ mover ═══ group ══════├── server

Theano's C code keeps Python's lock while it computes, so that no thread of the script's process
could move data then. The mover starts the script as its child, and ends with its exit status.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

from synkhronos._machine.processes import how_ended
from synkhronos._machine.shared_memory import Segments
from synkhronos.comm.channel import Channel, Closed
from synkhronos.comm.handlers import Handlers
from synkhronos.launch import INTERRUPTED
from synkhronos.parameter_server.group.interface import Group
from synkhronos.parameter_server.remote import placement
from synkhronos.parameter_server.remote.buffers import Buffers
from synkhronos.parameter_server.remote.protocol import Failure, Post
from synkhronos.parameter_server.remote.queues import Transfer
from synkhronos.parameter_server.remote.server import LOOK_SECONDS

_HELD_SECONDS = 0.0005  # how long a reply that nobody may wait for is held back
_PATIENCE = 10.0  # seconds for the servers to answer at the end


@dataclass
class _Pull:
    """A pull whose answer is not complete."""

    missing: int  # elements
    error: Failure | None = None
    begun: float = 0.0  # time.monotonic() of the first chunk, while spans are recorded


@dataclass
class _ScriptKey:
    """A key of the script."""

    name: int | str
    size: int
    parts: list[placement.KeyPart]
    buffers: Buffers
    pulls: dict[int, _Pull] = field(default_factory=dict)
    refused: tuple | None = None

    def n_on(self, server: int) -> int:
        """Return the number of elements that a server keeps."""
        return sum(part.end - part.begin for part in self.parts if part.server == server)


@dataclass
class _Question:
    """Something that the script has asked the servers."""

    name: str
    missing: set[int]  # servers
    values: dict[int, Any] = field(default_factory=dict)
    error: Failure | None = None


class Mover:
    """The loop of a mover, in a group whose first ranks are the servers, and the others movers.

    ``start(socket)`` starts the script with this end of a connection, and returns its Popen.
    ``on_following()`` tells the launcher that this one fails because others have died.
    """

    def __init__(
        self,
        group: Group,
        n_servers: int,
        hosts: Sequence[str],
        start: Any,
        on_following: Callable[[], None] = lambda: None,
    ) -> None:
        self._group, self._post, self._on_following = group, Post(group), on_following
        self._n_servers, self._hosts = n_servers, hosts
        self._worker = group.rank - n_servers
        self._segments = Segments()
        self._keys: dict[int, _ScriptKey] = {}
        self._questions: dict[int, _Question] = {}
        self._has_begun = self._has_left = self._has_told_of_death = False
        self._is_cut_off = False  # the script has ended, and with it the memory of a new key
        self._signals: list[int] = []
        self._spans: list[tuple] | None = None  # while they are recorded
        self._replies: list[tuple] = []  # to the script, of this step
        self._is_urgent, self._held_since = False, 0.0
        self._from_script = Handlers(
            key=self._from_script_key,
            push=self._from_script_push,
            pull=self._from_script_pull,
            tell=self._from_script_tell,
            ask=self._from_script_ask,
            withdraw=self._from_script_withdraw,
            close=self._from_script_close,
            record=self._from_script_record,
            spans=self._from_script_spans,
        )
        self._from_server = Handlers(
            chunk=self._from_server_chunk,
            failed=self._from_server_failed,
            answer=self._from_server_answer,
            lost=self._from_server_lost,
            ended=self._from_server_ended,
        )
        own, theirs = socket.socketpair()
        signal.signal(signal.SIGUSR1, lambda number, _: self._signals.append(number))
        self._script = start(theirs)
        theirs.close()
        self._channel: Channel | None = Channel(own)

    def run(self) -> int:
        """Serve the script until it has ended; return its exit status, as Popen has it."""
        was_interrupted = False
        while self._script.poll() is None:
            while self._signals:
                self._signals.pop()
                was_interrupted = True
                self._script.send_signal(signal.SIGINT)
            self._step()
        if self._script.returncode and self._has_told_of_death:
            self._on_following()
        self._end(self._script.returncode)
        if was_interrupted:
            return INTERRUPTED
        return self._script.returncode

    def _step(self):
        """Wait for messages, and handle those that have come."""
        is_unsent = self._channel is not None and self._channel.has_unsent
        is_soon = is_unsent or bool(self._replies)
        also = [] if self._channel is None else [self._channel.fileno()]
        self._group.wait(_HELD_SECONDS if is_soon else LOOK_SECONDS, also)
        self._serve_script()
        for rank, (name, *rest) in self._post.receive():
            if rank < self._n_servers:  # else another mover has ended
                self._from_server[name](rank, *rest)
        self._post.progress()
        self._send_replies()

    def _end(self, status):
        """Handle the script's last messages, and tell the servers that it has ended."""
        while self._serve_script():
            pass
        how = how_ended(status) if status else "has left"
        if not self._has_left:
            self._leave(-1, how, is_dead=bool(status))
        end = time.monotonic() + _PATIENCE
        while self._questions and (not status or time.monotonic() < end):
            self._step()

    def _serve_script(self):
        """Handle the script's messages; return whether there were any."""
        if self._channel is None:
            return False
        try:
            self._channel.flush()
            messages = self._channel.receive()
        except Closed:
            self._channel.close()
            self._channel = None
            return False
        for name, *rest in messages:
            if not self._is_cut_off:
                self._from_script[name](*rest)
        return bool(messages)

    def _reply(self, *message):
        """Send the script a message at the end of this step."""
        self._replies.append(message)
        self._is_urgent = True

    def _reply_later(self, *message):
        """Send a message with the next reply, or soon: each send wakes a thread of the script."""
        if not self._replies:
            self._held_since = time.monotonic()
        self._replies.append(message)

    def _send_replies(self):
        if not self._replies:
            return
        if not self._is_urgent and time.monotonic() - self._held_since < _HELD_SECONDS:
            return
        if self._channel is not None:
            with contextlib.suppress(Closed):  # _serve_script reads what is left, and drops it
                self._channel.post(("all", self._replies))
        self._replies, self._is_urgent = [], False

    def _from_script_key(self, number, name, shape, place, op, has_weight, is_whole):
        [size] = place.shape
        parts = placement.parts(name, size, self._n_servers, is_whole)
        try:
            buffers = Buffers(self._segments.open(place.segment), place)
        except OSError:  # the script's files are closed when it ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._script.wait(_PATIENCE)
            if self._script.returncode is None:
                raise
            self._is_cut_off = True
            return
        self._keys[number] = _ScriptKey(name, size, parts, buffers)
        for part in parts:
            given = name, shape, place.dtype, op, has_weight, is_whole
            self._post.tell(part.server, "key", number, *given)
        if has_weight:
            self._send(number, 0, 0)

    def _from_script_push(self, number, version, priority):
        self._begin()
        if self._keys[number].refused:
            self._reply("sent", number, version)
        else:
            self._send(number, version, priority)

    def _from_script_pull(self, number, version, priority):
        self._begin()
        key = self._keys[number]
        if key.refused:
            self._reply("arrived", number, version, key.refused)
            return
        key.pulls[version] = _Pull(key.size or 1)
        for part in key.parts:
            self._post.tell(part.server, "pull", number, version, priority)

    def _from_script_tell(self, *message):
        """Tell all servers something."""
        for server in range(self._n_servers):
            self._post.tell(server, *message)

    def _from_script_ask(self, number, name, arguments):
        """Ask servers something: `arguments` are those of each."""
        self._questions[number] = _Question(name, set(arguments))
        for server, own in arguments.items():
            self._post.tell(server, name, number, *own)
        self._settle_questions()

    def _from_script_withdraw(self, number):
        """Leave a barrier if it is still open; the script ignores answers to other questions."""
        if number in self._questions and self._questions[number].name == "barrier":
            del self._questions[number]
            self._post.tell(0, "withdraw", number)

    def _from_script_close(self, number):
        self._leave(number, "has left", is_dead=False)

    def _from_script_record(self, is_on):
        """Begin or stop to record what is sent and received, and when."""
        self._spans = [] if is_on else None

    def _from_script_spans(self, number):
        spans, self._spans = self._spans, None if self._spans is None else []
        self._reply("answer", number, spans or [], None)

    def _leave(self, number, how, is_dead):
        """Send all pushes, and then tell the servers that this worker has left."""
        end = time.monotonic() + _PATIENCE
        while self._post.is_sending and not (is_dead and time.monotonic() > end):
            self._step()
        self._has_left = True
        everyone = dict.fromkeys(range(self._n_servers), (how, is_dead))
        self._from_script_ask(number, "gone", everyone)

    def _begin(self):
        if not self._has_begun and self._worker == 0:
            self._from_script_tell("begun")
        self._has_begun = True

    def _send(self, number, version, priority):
        """Queue the array of a push for the servers of its parts."""
        key = self._keys[number]
        array, left = key.buffers.outgoing(version), [len(key.parts)]
        transfers = []

        def on_sent():
            left[0] -= 1
            if not left[0]:
                if self._spans is not None:
                    begun = min(transfer.begun for transfer in transfers)
                    self._spans.append(("send", key.name, begun, time.monotonic(), array.nbytes))
                self._reply_later("sent", number, version)

        for _, begin, end in key.parts:
            transfer = Transfer(number, version, begin, array[begin:end], priority)
            transfer.on_sent, transfer.stream = on_sent, number
            transfers.append(transfer)
        for (server, _, _), transfer in zip(key.parts, transfers):
            self._post.send(server, transfer)

    def _from_server_chunk(self, server, number, version, begin, chunk):
        key = self._keys[number]
        if self._spans is not None and version in key.pulls:
            pull = key.pulls[version]
            pull.begun = pull.begun or time.monotonic()
        key.buffers.incoming(version)[begin : begin + len(chunk)] = chunk
        self._arrive(number, version, len(chunk) or 1)

    def _from_server_failed(self, server, number, version, error):
        key = self._keys[number]
        if version is None:
            key.refused = key.refused or error
            self._reply("arrived", number, None, error)
            for each in list(key.pulls):
                del key.pulls[each]
                self._reply("arrived", number, each, error)
        elif version in key.pulls:
            key.pulls[version].error = key.pulls[version].error or error
            self._arrive(number, version, key.n_on(server) or 1)

    def _arrive(self, number, version, count):
        key = self._keys[number]
        pull = key.pulls.get(version)
        if pull is None:
            return
        pull.missing -= count
        if not pull.missing:
            del key.pulls[version]
            if self._spans is not None and pull.begun:
                nbytes = key.buffers.incoming(version).nbytes
                self._spans.append(("receive", key.name, pull.begun, time.monotonic(), nbytes))
            self._reply("arrived", number, version, pull.error)

    def _from_server_answer(self, server, number, value, error):
        question = self._questions.get(number)
        if question is not None:
            question.missing.discard(server)
            question.values[server] = value
            question.error = question.error or error
            self._settle_questions()

    def _from_server_lost(self, server, worker, host, how):
        self._has_told_of_death = True
        self._reply("lost", "worker", worker, host, how)

    def _settle_questions(self):
        """Answer the questions to which all servers have answered, or have died."""
        for number, question in list(self._questions.items()):
            question.missing -= self._post.dead
            if question.missing:
                continue
            del self._questions[number]
            values = [question.values.get(server) for server in range(self._n_servers)]
            self._reply("answer", number, values, question.error)

    def _from_server_ended(self, server):
        """Tell the script of a server that has died, or whose host is silent."""
        if not self._has_left:  # else the servers end as they should
            self._has_told_of_death = True
            how = self._group.losses.get(server, "has died")
            self._reply("lost", "server", server, self._hosts[server], how)
        self._settle_questions()
