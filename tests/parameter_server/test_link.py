"""A script's end of its mover, with the other end in this process."""

import json
import os
import signal
import socket
import time

import numpy as np
import pytest
from support.threads import in_thread

from synkhronos._machine.shared_memory import Segments
from synkhronos.comm.channel import Channel
from synkhronos.parameter_server import errors
from synkhronos.parameter_server.remote import link as links
from synkhronos.parameter_server.remote.buffers import Buffers
from synkhronos.parameter_server.remote.protocol import Failure


class Mover:
    """The other end of a link, by hand."""

    def __init__(self, mode="dist_sync", rank=0):
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        told = {
            "rank": rank,
            "hosts": ["a", "b"],
            "server_hosts": ["a"],
            "descriptor": theirs.detach(),
        }
        self.link = links.MoverLink(told, mode)

    def get(self, n=1):
        """Return the next messages of the link."""
        found = []
        while len(found) < n:
            assert self.channel.wait(20)
            found += self.channel.receive()
        return found

    def reply(self, *message):
        self.channel.send(("all", [message]))


@pytest.fixture
def mover():
    made = Mover()
    yield made
    made.channel.close()
    made.link._shut()


def test_arrays_are_shared_with_the_mover(mover):
    link = mover.link
    link.init_key(0, "w", (5,), "float64", "sum", np.arange(5.0))
    [(name, number, key, shape, place, op, has_weight, is_whole)] = mover.get()
    assert (name, number, key, op, has_weight) == ("key", 0, "w", "sum", True)
    assert shape == (5,) and not is_whole
    buffers = Buffers(Segments().open(place.segment), place)
    assert buffers.outgoing(0).tolist() == [0, 1, 2, 3, 4]
    buffers.incoming(1)[...] = 7
    assert link.incoming(0, 1).tolist() == [7] * 5
    link.outgoing(0, 1)[...] = 3
    assert buffers.outgoing(1).tolist() == [3] * 5 and buffers.outgoing(0)[1] == 1
    assert all(buffers.outgoing(v).ctypes.data % 64 == 0 for v in (0, 1))


def test_an_array_is_given_again_when_it_was_sent(mover):
    link = mover.link
    link.init_key(0, "w", (5,), "float32", "sum", np.zeros(5))
    link.outgoing(0, 1)
    wait = in_thread(lambda: link.outgoing(0, 2))  # of the initial weight
    time.sleep(0.05)
    mover.reply("sent", 0, 0)
    assert wait.result(20) is link.outgoing(0, 2)
    wait = in_thread(lambda: link.outgoing(0, 3))
    mover.reply("sent", 0, 1)
    assert wait.result(20) is link.outgoing(0, 1)


def test_values_arrive_in_order_and_with_errors(mover):
    link = mover.link
    link.init_key(0, "w", (5,), "float32", "sum")
    mover.reply("arrived", 0, 1, None)
    lost = Failure("WorkerLost", "it has left", {"rank": 1, "reason": "left"})
    mover.reply("arrived", 0, 2, lost)
    (first, (number, version, error)) = link.next(20)
    assert first == (0, 1, None)
    assert (number, version) == (0, 2) and isinstance(error, errors.WorkerLost)
    assert (str(error), error.rank, error.reason) == ("it has left", 1, "left")
    assert link.next(0.01) == []


def test_threads_wait_at_the_same_time_and_one_reads_for_all(mover):
    link = mover.link
    waits = [in_thread(lambda: link.next(20)), in_thread(link.barrier), in_thread(link.states)]
    questions = {name: number for _, number, name, _ in mover.get(2)}
    mover.reply("answer", questions["states"], [b"state"], None)
    assert waits[2].result(20) == [b"state"]
    mover.reply("answer", questions["barrier"], [None], None)
    assert waits[1].result(20) is None
    mover.reply("arrived", 0, 1, None)
    assert waits[0].result(20) == [(0, 1, None)]


def test_a_timeout_ends_a_wait(mover):
    began = time.monotonic()
    with pytest.raises(errors.RoundTimeout, match=r"no answer of the servers to barrier within"):
        mover.link.barrier(0.05)
    assert time.monotonic() - began < 10
    [(_, question, *_), withdrawn] = mover.get(2)
    assert withdrawn == ("withdraw", question)
    mover.reply("answer", question, [None], None)  # too late
    mover.reply("arrived", 0, 1, None)
    assert mover.link.next(20) == [(0, 1, None)]
    wait = in_thread(mover.link.barrier)
    [(_, second, *_)] = mover.get()
    mover.reply("answer", second, [None], None)
    assert wait.result(20) is None and not mover.link._answers


def test_a_ctrl_c_loses_no_message(mover, monkeypatch):
    receive = Channel.receive

    def interrupted(channel):
        found = receive(channel)
        if channel is mover.link._channel:
            signal.raise_signal(signal.SIGINT)
        return found

    mover.reply("arrived", 0, 1, None)
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mover.link.next(20)
    assert mover.link.next(20) == [(0, 1, None)]


def test_a_lost_server_ends_all_waits(mover):
    """In mshadow-ps a wait had no end, and a store that was deleted meanwhile hung too."""
    wait = in_thread(mover.link.next)
    mover.reply("arrived", 0, 1, None)
    mover.reply("lost", "server", 0, "a", "has died")
    assert wait.result(20) == [(0, 1, None)]  # what has come before is not lost
    for call in (mover.link.next, mover.link.barrier, lambda: mover.link.push(0, 1)):
        with pytest.raises(errors.ServerLost, match="server 0 on a has died, and with it the"):
            call()


@pytest.mark.parametrize("mode", ["dist_sync", "dist_async"])
def test_a_lost_worker_is_a_warning(mode, caplog):
    made = Mover(mode)
    made.reply("lost", "worker", 1, "b", "was killed by SIGKILL (signal 9)")
    assert made.link.next(0.1) == []
    end = "; the others go on without it" if mode == "dist_async" else ""
    assert caplog.messages == [f"worker 1 on b was killed by SIGKILL (signal 9){end}"]
    made.channel.close()
    made.link._shut()


def test_the_end_of_the_mover_ends_all_waits(mover):
    wait = in_thread(mover.link.next)
    mover.channel.close()
    with pytest.raises(errors.ParameterServerError, match="that reaches the servers has died"):
        wait.result(20)
    with pytest.raises(errors.ParameterServerError, match="has died"):
        mover.link.request(0, 1)


def test_close_ends_other_waits(mover):
    """In mshadow-ps a store that was deleted while a thread waited hung both."""
    link = mover.link
    waits = [in_thread(link.next), in_thread(link.barrier), in_thread(lambda: link.request(5, 1))]
    assert mover.get() == [("ask", 0, "barrier", {0: ()})]
    closing = in_thread(link.close)
    [(name, question)] = mover.get()
    assert name == "close"
    mover.reply("answer", question, [None], None)
    closing.result(20)
    for wait in waits:
        with pytest.raises(errors.StoreClosed):
            wait.result(20)
    with pytest.raises(errors.StoreClosed):
        link.request(0, 1)
    link.close()


def test_states_of_another_number_of_servers_are_refused(mover):
    with pytest.raises(ValueError, match="states of 3 servers, but this run has 1"):
        mover.link.set_states([b""] * 3)


def test_another_process_can_not_connect(monkeypatch):
    told = {"pid": os.getppid() + 1, "rank": 0}
    monkeypatch.setenv(links.VARIABLE, json.dumps(told))
    assert links.MoverLink.is_available()
    with pytest.raises(
        errors.ParameterServerError, match="a process that it has started makes none"
    ):
        links.MoverLink.connect("dist_sync")
