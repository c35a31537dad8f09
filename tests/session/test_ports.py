"""What listens while each command runs, as docs/security.rst lists it, and who can connect."""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time

import pytest
from psutil import process_iter
from support import ports, rules
from support.waiting import wait_until

from synkhronos.comm.channel import Channel
from synkhronos.comm.mpi.link import JobEnded, Line
from synkhronos.tools import ports as closing

slow = pytest.mark.slow("a run of mpirun")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
SYNKHRONOS = [sys.executable, "-m", "synkhronos"]
LAUNCH = [*SYNKHRONOS, "launch"]
WAITS = """
import os, sys, time
print("up", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
STORE = f"from synkhronos import parameter_server as ps\nstore = ps.create('dist_sync')\n{WAITS}"


@contextlib.contextmanager
def running(folder, line, text=WAITS, n=1, environment=None, status=0):
    """Run a script until the end of a with block; yield a variable that all its processes have."""
    script, end, printed = folder / "script.py", folder / "end", folder / "printed"
    script.write_text(text)
    name, mark = "SYNKHRONOS_TEST_RUN", secrets.token_hex(8)
    given = {**os.environ, **rules.FOR_ROOT, "THEANO_FLAGS": rules.QUICKLY, **(environment or {})}
    with open(printed, "w") as out:
        process = subprocess.Popen(
            [*line, str(script), str(end)],
            cwd=folder,
            env={**given, name: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: printed.read_text().count("up\n") == n or process.poll() is not None)
        assert printed.read_text().count("up\n") == n, printed.read_text()
        yield f"{name}={mark}"
        end.touch()
        assert process.wait(60) == status, printed.read_text()
    finally:
        process.kill()
        process.wait()


def is_hung_up(name):
    """Return whether a carrier ends a connection to its socket without a word."""
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(10)
        end.connect("\0" + name[1:])
        try:
            return end.recv(1) == b""
        except ConnectionResetError:
            return True


def has_private_memory(variable):
    """Return whether no other user could have made the files that processes share by Open MPI."""
    private = r"/dev/shm/mpi-of-synkhronos-\w+/sm_segment\.\S+ \(deleted\)"
    found = ports.memory_of_mpi(variable)
    return len(found) > 1 and all(re.fullmatch(private, path) for path in found)


@slow
def test_a_session_on_one_machine(tmp_path):
    asked = ["run", "-n", "2"], ["launch", "-n", "2"], ["launch", "--hosts", "127.0.0.1:2"]
    for words in asked:
        folder = tmp_path / "".join(words)
        folder.mkdir()
        with running(folder, [*SYNKHRONOS, *words]) as variable:
            assert ports.listening(variable).keys() == ports.of_the_page()["run"] == set()


@slow
@rules.needs_mpirun
def test_a_session_of_several_processes_on_one_machine(tmp_path):
    line = [rules.MPIRUN, "-n", "2", *SYNKHRONOS, "run", "-n", "1"]
    with running(tmp_path, line) as variable:
        listens = ports.listening(variable)
        assert listens.keys() == ports.of_the_page()["mpiexec ... run"]
        assert has_private_memory(variable)
        if os.geteuid() == 0:
            [names] = [where for (name, *_), where in listens.items() if name == "carrier"]
            assert len(names) == 2 and ports.as_nobody(lambda: all(map(is_hung_up, names)))
            lines = [" ".join(each.info["cmdline"] or ()) for each in process_iter(["cmdline"])]
            assert not any(name[1:] in line for name in names for line in lines)


@slow
@as_root
@rules.needs_mpirun
def test_nobody_can_connect_to_a_parameter_server_on_one_machine(tmp_path):
    line = [*LAUNCH, "--servers", "1", "--workers", "2"]
    with running(tmp_path, line, STORE, 2) as variable:
        listens = ports.listening(variable)
        assert listens.keys() == ports.of_the_page()["launch --workers"]
        assert has_private_memory(variable)
        found = [(address, port) for (*_, address), where in listens.items() for port in where]
        assert len(found) == 3
        # The launcher looks now and then whether all processes have connected.
        wait_until(lambda: ports.as_nobody(lambda: not any(map(ports.can_connect, found))))


@slow
def test_a_rule_on_one_machine(tmp_path):
    launched = rules.Launched("BSP", 2, tmp_path, settings={"n_epochs": 10**6, "n_rows": 16})
    launched.wait_for("adjusts rank 0")
    try:
        listens = ports.listening(launched.variable)
    finally:
        launched.interrupt()
        launched.wait()
    assert listens.keys() == ports.of_the_page()["rule"]


@slow
@pytest.mark.mpi
def test_a_session_on_two_hosts(two_hosts, tmp_path):
    line = two_hosts.launch("-n", "1")
    with running(tmp_path, line, environment=two_hosts.environment()) as variable:
        assert ports.listening(variable).keys() == ports.of_the_page()["launch --hosts"]


class Evil:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self._path = str(path)

    def __reduce__(self):
        return open, (self._path, "w")


@as_root
def test_a_rank_takes_nothing_from_a_user_who_has_taken_the_name_of_its_carrier(tmp_path):
    """/proc/net/unix shows the name to all users, and it is free when the carrier has ended."""
    name, unpickled = f"synkhronos-{secrets.token_hex(16)}", tmp_path / "unpickled"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(ports.NOBODY)
            os.setuid(ports.NOBODY)
            end = socket.socket(socket.AF_UNIX)
            end.bind(f"\0{name}")
            end.listen()
            os.write(writer, b"1")
            Channel(end.accept()[0]).send(Evil(unpickled))
        finally:
            os._exit(0)
    assert os.read(reader, 1)
    with pytest.raises(JobEnded):
        Line(name).fetch((1, 1), 1, None, None, 0)
    os.waitpid(child, 0)
    os.close(reader), os.close(writer)
    assert not unpickled.exists()


# What mpirun does, in its way: a port for other machines, and one for its own processes.
LISTENS = """
import socket, sys
ends = [socket.create_server((host, 0)) for host in ("0.0.0.0", "127.0.0.1")]
print(*(end.getsockname()[1] for end in ends), flush=True)
kept = [ends[1].accept() for _ in range(2)]
sys.stdin.read()
"""


@pytest.fixture
def listener():
    """A process that listens on two ports, and their numbers."""
    line = [sys.executable, "-c", LISTENS]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process, [("127.0.0.1", int(port)) for port in process.stdout.readline().split()]
        process.kill()


def test_ports_are_closed_after_all_processes_have_connected(listener):
    process, (for_others, own) = listener
    thread = closing.close(process, 2)
    wait_until(lambda: not ports.can_connect(for_others))
    if os.geteuid() == 0:
        assert ports.as_nobody(lambda: not ports.can_connect(own))
    with socket.create_connection(own), socket.create_connection(own):
        thread.join(30)
        assert not ports.can_connect(own) and not ports.can_connect(for_others)


def test_a_number_that_another_file_has_got_is_passed_over(tmp_path):
    """mpirun may have closed the socket meanwhile: 1 of 200 launches warned of open ports."""
    with open(tmp_path / "file", "w") as file, open("/dev/null") as null:
        assert closing._take(os.getpid(), file.fileno()) is None
        after = os.dup(null.fileno())
        os.close(after)
        assert closing._take(os.getpid(), file.fileno()) is None
        assert os.dup(null.fileno()) == after  # no descriptor is left
        os.close(after)


@contextlib.contextmanager
def nobody(function):
    """Another user, in a process that runs a function and then keeps what it returns."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(ports.NOBODY)
            os.setuid(ports.NOBODY)
            kept = function()
            os.write(writer, b"1")
            time.sleep(60)
            del kept
        finally:
            os._exit(0)
    os.close(writer)
    try:
        assert os.read(reader, 1)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


def connected(place, as_ipv6=False, source=None):
    """Return a socket that is connected with a place of this machine."""
    mapped = "::ffff:" if as_ipv6 else ""
    end = socket.socket(socket.AF_INET6 if as_ipv6 else socket.AF_INET)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    end.settimeout(3.0)
    if source is not None:
        end.bind((mapped + source[0], source[1]))
    end.connect((mapped + place[0], place[1]))
    return end


@as_root
@pytest.mark.parametrize("as_ipv6", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_an_mpirun_is_ended_if_another_user_has_connected_before(listener, caplog, n, as_ipv6):
    """Also if so many have connected as there are processes, and by a socket of IPv6."""
    process, (_, own) = listener
    with nobody(lambda: [connected(own, as_ipv6) for _ in range(n)]):
        closing.close(process, 2).join(30)
        assert process.wait(30) == -signal.SIGKILL
        assert "another user has connected to mpirun" in caplog.text


@as_root
@pytest.mark.parametrize("as_ipv6", [False, True])
def test_another_user_can_not_connect_from_the_port_of_a_process_of_this_one(listener, as_ipv6):
    """From 127.0.0.2: the filter compares the address, too."""
    process, (for_others, own) = listener
    with connected(own) as end:
        thread = closing.close(process, 2)
        wait_until(lambda: not ports.can_connect(for_others))
        source = "127.0.0.2", end.getsockname()[1]
        assert not ports.as_nobody(lambda: connected(own, as_ipv6, source))
        assert process.poll() is None
        with connected(own, as_ipv6):  # this user's: the second process
            thread.join(30)
        assert not thread.is_alive() and process.poll() is None


@as_root
def test_another_user_who_connects_as_the_last_port_is_closed_is_found(listener, monkeypatch):
    process, (_, own) = listener
    take_only, others = closing._take_only, contextlib.ExitStack()

    def take_late(sock, ends):
        if sock.getsockname()[1] == own[1] and not others_are_there:
            if ends:
                return  # nothing closes the port before: so the other one gets in
            others_are_there.append(others.enter_context(nobody(lambda: connected(own))))
        take_only(sock, ends)

    others_are_there = []
    monkeypatch.setattr(closing, "_take_only", take_late)
    with others, connected(own), connected(own):
        closing.close(process, 2).join(30)
        assert others_are_there and process.wait(30) == -signal.SIGKILL


def test_ports_that_can_not_be_closed_are_told_of(listener, monkeypatch, caplog):
    def take(pid, number):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(closing, "_take", take)
    closing.close(listener[0], 2).join(30)
    assert "ports that ask for no key" in caplog.text and "not permitted" in caplog.text
    assert all(map(ports.can_connect, listener[1]))
