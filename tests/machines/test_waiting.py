"""The waits of a carrier: it sleeps while nothing can have come, where sockets can tell."""

import contextlib
import os
import resource
import socket
import time

from support.waiting import LONG

from synkhronos.comm.mpi import waiting
from synkhronos.comm.mpi.waiting import Waiting


@contextlib.contextmanager
def sockets():
    """Yield a Waiting, the other end of a rank's socket, and that of a TCP connection."""
    with contextlib.ExitStack() as stack:
        ours, rank = map(stack.enter_context, socket.socketpair())
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted, _ = server.accept()
        stack.enter_context(accepted)
        accepted.send(b"1")  # a connection through which nothing has come is not waited for
        client.send(client.recv(1))
        accepted.recv(1)
        idle = Waiting()
        idle.add(ours.fileno())
        idle.find_sockets()
        client.setblocking(False)
        yield idle, ours, rank, accepted, client


def rest(idle):
    """Let the moment pass in which it does not sleep."""
    time.sleep(0.2)
    assert idle.for_ranks(False) == []


def test_it_wakes_for_a_rank_and_for_mpi(monkeypatch):
    monkeypatch.setattr(waiting, "_SLEEP_SECONDS", 2.0 * LONG)
    with sockets() as (idle, ours, rank, accepted, client):
        time.sleep(0.2)
        rank.send(b"1")
        assert idle.for_ranks(False) == [ours.fileno()]
        ours.recv(1)
        idle._last -= 8 * LONG  # it would sleep for long
        accepted.send(b"1")
        begin = time.monotonic()
        assert idle.for_ranks(False) == []
        assert idle._told == [client.fileno()] and time.monotonic() - begin < LONG
        client.recv(1)
        idle.note(False, True)


def test_it_sleeps_less_while_data_are_under_way():
    with sockets() as (idle, *_):
        rest(idle)
        begin = time.monotonic()
        for _ in range(10):
            idle.for_ranks(True)
        assert time.monotonic() - begin >= 10 * waiting._LONGEST / 2
        idle.note(True, False)
        assert idle.for_ranks(False) == []  # at once


def test_it_does_not_rely_on_sockets_that_do_not_tell():
    with sockets() as (idle, *_):
        for _ in range(waiting._MISSES):
            assert idle._tells
            rest(idle)
            idle.note(False, True)
        assert not idle._tells


def test_a_socket_that_only_disturbs_is_left_out():
    with sockets() as (idle, _, _, accepted, _):
        accepted.send(b"1")  # which nothing reads
        time.sleep(0.2)
        for _ in range(waiting._BARREN + 1):
            assert idle.for_ranks(False) == []
            assert idle._told
            idle.note(False, False)
        idle.for_ranks(False)
        assert not idle._told
        idle.find_sockets()
        idle.for_ranks(False)
        assert not idle._told


def test_sockets_that_were_closed_are_forgotten():
    with sockets() as (idle, ours, _, accepted, client):
        assert {accepted.fileno(), client.fileno()} <= set(idle._of_mpi)
        fd = client.fileno()
        client.close()
        time.sleep(0.2)
        idle.for_ranks(False)
        idle.find_sockets()
        assert fd not in idle._of_mpi
        assert ours.fileno() not in idle._of_mpi


def test_without_a_free_descriptor_the_known_sockets_stay():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with sockets() as (idle, *_):
        known = dict(idle._of_mpi)
        first_free = os.dup(0)
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
        try:
            idle.find_sockets()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert idle._of_mpi == known


def test_connections_through_which_nothing_comes_are_not_waited_for():
    with sockets() as (idle, *_), contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent = [stack.enter_context(socket.create_connection(server.getsockname()))]
        silent.append(stack.enter_context(server.accept()[0]))
        idle.find_sockets()
        assert server.fileno() in idle._of_mpi
        assert not {each.fileno() for each in silent} & set(idle._of_mpi)
        silent[0].send(b"1")
        idle.find_sockets()
        assert silent[1].fileno() in idle._of_mpi


def test_it_sleeps_when_no_rank_is_left():
    idle = Waiting()
    for is_busy in (False, True):
        assert idle.for_ranks(is_busy) == []
        time.sleep(0.02)
