"""Workers do not keep open what a script has opened before ``fork()`` and closes after it."""

import pytest

pytestmark = pytest.mark.faults

CONNECTIONS = """
import os, socket, subprocess
import synkhronos as synk

program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
source, sink = os.pipe()
listener = socket.create_server(("127.0.0.1", 0))
address = listener.getsockname()
peer = socket.create_connection(address)
accepted, _ = listener.accept()
synk.fork(3)
print(program.communicate(b"text", timeout=60)[0])
os.close(sink)
os.set_blocking(source, False)
print(os.read(source, 1))
accepted.close()
listener.close()
peer.settimeout(20)
print(peer.recv(1))
socket.create_server(address).close()
"""


def test_pipes_connections_and_ports_that_the_script_closes_are_closed(script):
    assert script(CONNECTIONS).stdout.splitlines() == ["b'text'", "b''", "b''"]


LOCKS = """
import fcntl, os, socket, struct
import synkhronos as synk

whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
KINDS = {
    "flock": lambda file: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
    "open file": lambda file: fcntl.fcntl(file, 37, whole_file),  # F_OFD_SETLK
}
socket.setdefaulttimeout(9)
before = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
before.setblocking(True)
files = {name: open(name, "w") for name in KINDS}
for name, lock in KINDS.items():
    lock(files[name])
synk.fork(2)
for name, lock in KINDS.items():
    for _ in range(2):
        with open(name, "w") as other:
            try:
                lock(other)
                print("not locked")
            except BlockingIOError:
                print("locked")
        files[name].close()
print(os.get_blocking(before.fileno()))
"""


def test_locks_are_those_of_the_script(script):
    assert script(LOCKS).stdout.splitlines() == [*["locked", "not locked"] * 2, "True"]


KEPT = """
import logging, logging.handlers, multiprocessing, os, sys

import synkhronos as synk

log = logging.getLogger("synkhronos")
log.setLevel(logging.INFO)
queue = multiprocessing.get_context("fork").Queue()
source, sink = os.pipe()
log.addHandler(logging.handlers.QueueHandler(queue))
log.addHandler(logging.StreamHandler(os.fdopen(sink, "w")))
own, printed = os.pipe()
sys.stderr = os.fdopen(printed, "w", buffering=1)
table = open("table", "w+")
table.write("of the script")
table.flush()
copy_of_stderr = os.dup(2)
synk.fork(2)
os.set_blocking(source, False)
workers = {rank.pid for rank in synk.status().ranks} - {os.getpid()}
messages = [queue.get(timeout=20).getMessage() for _ in range(3)]
lines = os.read(source, 1 << 16).decode()
for pid in workers:
    assert any(f"process {pid} on cpu" in each for each in messages), messages
    assert f"process {pid} on cpu" in lines, lines
    for kept in (table.fileno(), copy_of_stderr, printed):
        ours, theirs = os.fstat(kept), os.stat(f"/proc/{pid}/fd/{kept}")
        assert (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
print("kept")
"""


def test_the_log_and_ordinary_files_stay_open_in_workers(script):
    assert script(KEPT).stdout == "kept\n"
