"""Connections of other users to the ports of a job's carriers: the job goes on."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
from support import hosts
from support.running import python_path
from support.waiting import LONG, wait_until

from synkhronos.comm.mpi import strangers

SCRIPT = """
import os, sys
import numpy as np, theano, theano.tensor as T
import synkhronos as synk
theano.config.mode = "FAST_COMPILE"
synk.fork(1)
x = T.dmatrix("x")
f = synk.function([x], [(x.sum(), "sum")])
assert f(np.ones((4, 4)))[0] == 16
print("begun", flush=True)
while not os.path.exists(sys.argv[1]):
    assert f(np.ones((4, 4)))[0] == 16
print("right", flush=True)
"""
# More connections than a process may have files, each with two bytes; and then one after another.
STRANGER = """
import encodings.idna, os, socket, sys, time
os.setgid(65534), os.setuid(65534)
held, address, end = [], (sys.argv[1], int(sys.argv[2])), time.monotonic() + 10
trickle = socket.create_connection(address)
while time.monotonic() < end:
    with_room = len(held) < 900
    try:
        trickle.send(b"O")
    except OSError:
        pass
    try:
        held.append(socket.create_connection(address, 1))
        held[-1].send(b"OP")
    except OSError:
        time.sleep(0.01)
    if not with_room:
        held.pop(0).close()
print(len(held))
"""


@pytest.mark.mpi
@pytest.mark.slow("hosts")
@pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")
def test_a_job_goes_on_under_half_open_connections(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    end = tmp_path / "end"
    with hosts.up(3) as these:
        line = these.launch(tmp_path / "script.py", end, hosts=",".join(these.addresses[:2]))
        environment = these.environment(PYTHONPATH=python_path(hosts.ROOT / "tests"))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        job = subprocess.Popen(line, env=environment, **pipes)
        assert job.stdout.readline() == "begun\n"
        inside = ["ip", "netns", "exec", f"synk{these.net}-3", sys.executable, "-c", STRANGER]
        stranger = [*inside, these.addresses[1], str(port_of_carrier(these, 2))]
        done = subprocess.run(stranger, timeout=LONG, capture_output=True, text=True)
        assert int(done.stdout) > 0, done
        end.touch()
        out, err = job.communicate(timeout=LONG)
    assert (out, job.returncode) == ("right\n", 0), err
    assert re.fullmatch(
        rf"A program on 10\.{these.net}\.0\.3 connected to port \d+ of synk{these.net}-2, which is "
        r"MPI's, and sent a part of a message, and waited\. Its connection has been closed, .*\n",
        err,
    )


def port_of_carrier(these, number):
    """Return the port on which MPI listens on a host."""
    [pid] = [pid for pid, line in these.programs(number).items() if "mpi.carrier" in line]
    sockets = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    with open(f"/proc/{pid}/net/tcp") as lines:
        rows = [line.split() for line in lines]
    [port] = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return int(port.rpartition(":")[2], 16)


@contextlib.contextmanager
def served(monkeypatch, n_bytes):
    """Yield the address of a thread that reads so many bytes of each connection, and what it read.

    A thread of `strangers.Strangers` watches it, as that of a carrier.
    """
    monkeypatch.setattr(strangers, "_SEARCH_SECONDS", 0.1)
    monkeypatch.setattr(strangers, "_REST_SECONDS", 3.0)
    read = []

    def serve():
        watch = strangers.Strangers()
        watch._silence_seconds = 0.5
        watch.start()
        while b"end" not in read:
            connection, _ = server.accept()
            with connection:
                read.append(connection.recv(n_bytes, socket.MSG_WAITALL))

    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname(), read
        with socket.create_connection(server.getsockname()) as last:
            last.send(b"end")
            last.shutdown(socket.SHUT_WR)
            thread.join(LONG)


def test_connections_that_wait_are_closed_and_the_port_rests(monkeypatch, caplog):
    with served(monkeypatch, 24) as (address, read), contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(address)).send(b"OP")
        wait_until(lambda: len(read) == 40)
        assert read == [b"OP"] * 40
        with pytest.raises(OSError):
            socket.create_connection(address, 0.2)
        with socket.create_connection(address, LONG) as later:  # the system asks again
            later.send(b"a" * 24)
            wait_until(lambda: len(read) == 41)
    assert read[40] == b"a" * 24
    assert len(caplog.messages) == 1


def test_connections_through_which_nothing_comes_are_closed(monkeypatch, caplog):
    with served(monkeypatch, 4096) as (address, read), socket.create_connection(address):
        wait_until(lambda: read)
    assert read[0] == b"" and "sent nothing" in caplog.messages[0]


def test_a_connection_of_the_job_that_pauses_is_kept(monkeypatch, caplog):
    with served(monkeypatch, 4096) as (address, read), socket.create_connection(address) as peer:
        peer.send(b"a" * 24)
        time.sleep(1.5)
        assert not read
        peer.send(b"a" * 4072)
        wait_until(lambda: read)
    assert read[0] == b"a" * 4096 and not caplog.messages
