"""What listens while each command runs, and what files are open, as docs/security.rst lists it."""

import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys

import pytest
from psutil import process_iter
from support import ports, rules
from support.waiting import wait_until

from synkhronos.comm.channel import Channel
from synkhronos.comm.mpi.link import CarrierLink, JobEnded

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


def check(command, variable, folder):
    """Compare what listens, and what files are written, with the page; return what listens."""
    listens = ports.listening(variable)
    assert listens.keys() == ports.of_the_page()[command]
    files = ports.written(variable, {str(folder / "printed")})
    assert files == ports.of_the_page("Files that are open for writing")[command]
    return listens


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
            assert not check("run", variable, folder)


@slow
@rules.needs_mpirun
def test_a_session_of_several_processes_on_one_machine(tmp_path):
    line = [rules.MPIRUN, "-n", "2", *SYNKHRONOS, "run", "-n", "1"]
    with running(tmp_path, line) as variable:
        listens = check("mpiexec ... run", variable, tmp_path)
        assert has_private_memory(variable)
        if os.geteuid() == 0:
            [names] = [where for (name, *_), where in listens.items() if name == "carrier"]
            assert len(names) == 2 and ports.as_nobody(lambda: all(map(is_hung_up, names)))
            lines = [" ".join(each.info["cmdline"] or ()) for each in process_iter(["cmdline"])]
            assert not any(name[1:] in line for name in names for line in lines)


@slow
def test_a_parameter_server_on_one_machine(tmp_path):
    line = [*LAUNCH, "--servers", "1", "--workers", "2"]
    with running(tmp_path, line, STORE, 2) as variable:
        assert not check("launch --workers", variable, tmp_path)


@slow
def test_a_rule_on_one_machine(tmp_path):
    launched = rules.Launched("BSP", 2, tmp_path, settings={"n_epochs": 10**6, "n_rows": 16})
    launched.wait_for("adjusts rank 0")
    try:
        check("rule", launched.variable, tmp_path)
    finally:
        launched.interrupt()
        launched.wait()


@slow
@pytest.mark.mpi
def test_a_session_on_two_hosts(two_hosts, tmp_path):
    line = two_hosts.launch("-n", "1")
    with running(tmp_path, line, environment=two_hosts.environment()) as variable:
        check("launch --hosts", variable, tmp_path)


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
        CarrierLink(name).ask("fetch", (1, 1), 1, None, None, 0)
    os.waitpid(child, 0)
    os.close(reader), os.close(writer)
    assert not unpickled.exists()
