"""Messages that are checked: forged, changed, repeated or misdirected ones are dropped."""

import os
import stat
import sys

import numpy as np
import pytest
from support import launching
from support.running import run

from synkhronos.comm.mpi import secret
from synkhronos.comm.mpi.sealed import TRAILER, Seal, Sealed

KEY, TAG = b"of this job", 7


def seals(key=KEY, size=3):
    return [Seal(key, rank, size) for rank in range(size)]


def opened(found):
    return [(tag, bytes(payload)) for tag, payload in found]


def test_messages_come_in_their_order_even_if_they_overtake_one_another():
    zero, one, _ = seals()
    frames = [zero.close(1, tag, bytes([tag]) * tag) for tag in range(4)]
    assert one.open(0, 2, frames[2]) == one.open(0, 1, frames[1]) == []
    assert opened(one.open(0, 0, frames[0])) == [(0, b""), (1, b"\1"), (2, b"\2\2")]
    assert opened(one.open(0, 3, frames[3])) == [(3, b"\3\3\3")]


@pytest.mark.parametrize("payload", [b"", b"x" * 70, np.arange(6.0).reshape(2, 3), np.ones(2, "?")])
def test_a_message_is_a_copy_of_what_was_sent(payload):
    zero, one, _ = seals()
    frame = zero.close(1, TAG, payload)
    assert len(frame) == memoryview(payload).nbytes + TRAILER
    expected = bytes(payload)
    if isinstance(payload, np.ndarray):
        payload[...] = 0
    assert opened(one.open(0, TAG, frame)) == [(TAG, expected)]
    with pytest.raises(ValueError, match="contiguous"):
        zero.close(1, TAG, np.ones((3, 3))[:, 0])


def test_only_what_was_sent_so_is_taken_and_only_once():
    zero, one, two = seals()
    message = zero.close(1, TAG, b"payload")
    changed = message.copy()
    changed[2] ^= 1
    renumbered = message.copy()
    renumbered[len(b"payload") + 31] ^= 1
    of_two, of_another_job = two.close(1, TAG, b"payload"), seals(b"other")[0].close(1, TAG, b"")
    wrong = {
        "nothing": (0, TAG, message[:0]),
        "zeros": (0, TAG, np.zeros(len(message), np.uint8)),
        "changed": (0, TAG, changed),
        "with another number": (0, TAG, renumbered),
        "shorter": (0, TAG, message[:-1]),
        "without its begin": (0, TAG, message[1:]),
        "longer": (0, TAG, np.append(message, message[:1])),
        "in another name": (2, TAG, message),
        "in this name": (0, TAG, of_two),
        "of another kind": (0, TAG + 1, message),
        "of another job": (0, TAG, of_another_job),
    }
    for what, arguments in wrong.items():
        assert one.open(*arguments) is None, what
    assert two.open(0, TAG, message) is None  # it is for another process
    assert zero.open(1, TAG, message) is None  # it has come back to its sender
    assert opened(one.open(0, TAG, message)) == [(TAG, b"payload")]  # no wrong one has counted
    assert one.open(0, TAG, message) is None  # a second time
    late = zero.close(1, TAG, b"second"), zero.close(1, TAG, b"third")
    assert one.open(0, TAG, late[1]) == [] and one.open(0, TAG, late[1]) is None
    assert opened(one.open(0, TAG, late[0])) == [(TAG, b"second"), (TAG, b"third")]
    assert opened(one.open(2, TAG, of_two)) == [(TAG, b"payload")]


# The secret.


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "synkhronos" / "secret"


def test_the_file_of_the_secret_is_made_for_its_user_alone(file):
    before = os.umask(0)
    try:
        made = secret.of_user()
    finally:
        os.umask(before)
    assert len(made) == 32 and secret.of_user() == made
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [each.name for each in file.parent.iterdir()] == ["secret"]


def test_a_process_that_was_faster_has_made_the_secret(file, monkeypatch):
    found = secret.of_user()
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    assert secret.of_user() == found and len(list(file.parent.iterdir())) == 1


def test_a_file_that_others_can_read_or_have_made_is_refused(file, tmp_path):
    secret.of_user()
    file.chmod(0o640)
    with pytest.raises(secret.NoSecret, match="that no other user can read: remove it"):
        secret.of_user()
    file.chmod(0o600)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(secret.NoSecret, match="mpirun -x SYNKHRONOS_SECRET"):
        secret.of_user()
    file.unlink()
    file.write_text("0123")
    file.chmod(0o600)
    with pytest.raises(secret.NoSecret, match="must have at least 64 hexadecimal digits"):
        secret.of_user()
    if os.geteuid() == 0:
        os.chown(file, 65534, 65534)
        with pytest.raises(secret.NoSecret, match="a file of yours"):
            secret.of_user()


def test_the_secret_leaves_the_environment_of_the_script():
    environment = {secret.VARIABLE: secret.new(), "OTHER": "1"}
    given = secret.take(environment)
    assert len(given) == 64 and environment == {"OTHER": "1"} and secret.take(environment) is None


# Real processes of MPI: process 0 sends forged messages beside those that were checked.

PROCESSES = """
import numpy as np
from synkhronos.comm.mpi import folders
from synkhronos.comm.mpi.mpi_library import MPI
with folders.of_segment():
    MPI.Init()
from synkhronos.comm.mpi.sealed import Sealed

comm = MPI.COMM_WORLD
sealed = Sealed(comm, b"secret")
rank, size = sealed.rank, sealed.size

forged = []

def forge(nbytes):
    forged.append(comm.Isend([np.zeros(nbytes, np.uint8), MPI.BYTE], 1, 7))

if rank == 0:
    for nbytes in (0, 100, 8000, 5 << 20):  # shorter, longer, and asked for before it is sent
        forge(nbytes)
        sealed.Isend(np.full(1 << 18, float(nbytes)), 1, 7)
    sealed.Isend(np.arange(3.0), 1, 8)
    sealed.Isend(b"last", 1, 9)
if rank == 1:
    status, large, small = MPI.Status(), np.zeros(1 << 18), np.zeros(3)
    sealed.Recv(small, 0, 8)
    for nbytes in (0, 100, 8000, 5 << 20):
        coming = sealed.Irecv(large, 0, 7)
        while not coming.Test():
            pass
        assert (large == nbytes).all()
    while not sealed.Iprobe(MPI.ANY_SOURCE, 9, status):
        pass
    assert status.source == 0 and not sealed.Iprobe(0, 7)
    assert list(small) == [0, 1, 2] and status.Get_count(MPI.BYTE) == 4

assert sealed.allgather((rank, "x")) == [(each, "x") for each in range(size)]
print("right", flush=True)
MPI.Finalize()
"""


LOCAL = ["--host", "localhost:3", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
PORTS = ["--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"]
NO_PORTS = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm"]


def mpirun(folder, *arguments, ways=PORTS):
    environment = {**os.environ, **launching.FOR_ROOT, "XDG_CONFIG_HOME": str(folder)}
    return run(launching.MPIRUN, *LOCAL, *ways, *arguments, env=environment, cwd=folder)


@launching.needs_mpirun
def test_forged_messages_between_processes_are_dropped_and_told_of_once(tmp_path):
    done = mpirun(tmp_path, "-n", "3", sys.executable, "-c", PROCESSES)
    assert done.stdout.count("right") == 3, done.stderr
    assert done.stderr.count("dropped a message in the name of process 0") == 1, done.stderr


CHECKED = """
import os
from synkhronos.comm.mpi import folders, secret
from synkhronos.comm.mpi.mpi_library import MPI
with folders.of_segment():
    MPI.Init()
try:
    print(type(secret.checked(MPI.COMM_WORLD, secret.take())).__name__, flush=True)
except secret.NoSecret as error:
    print(error, flush=True)
"""


@launching.needs_mpirun
def test_processes_take_the_users_secret_or_are_refused_if_theirs_differ(tmp_path):
    """The key of a job needs one secret; processes of one machine without ports need none."""
    script = [sys.executable, "-c", CHECKED]
    made = mpirun(tmp_path, "-n", "2", *script)
    assert made.stdout.split() == ["Sealed"] * 2, made.stderr
    (tmp_path / "synkhronos" / "secret").unlink()
    one = ["-n", "1", "-x", f"SYNKHRONOS_SECRET={'0' * 64}", *script]
    other = ["-n", "1", "-x", f"SYNKHRONOS_SECRET={'1' * 64}", *script]
    refused = mpirun(tmp_path, *one, ":", *other)
    for rank in (0, 1):
        said = f"process {rank} of this job has another secret than this one. All processes of"
        assert said in refused.stdout, refused.stderr
    plain = mpirun(tmp_path, "-n", "2", *script, ways=NO_PORTS)
    assert plain.stdout.split() == ["Intracomm"] * 2, plain.stderr
    assert not (tmp_path / "synkhronos" / "secret").exists()


def test_what_was_taken_from_another_job_with_the_same_secret_is_no_message_of_this_one():
    """The key of a job is made of numbers that its processes have drawn."""
    one, other = (Sealed(_Alone(), b"secret")._seal for _ in range(2))
    assert one.open(0, TAG, other.close(0, TAG, b"")) is None
    assert opened(one.open(0, TAG, one.close(0, TAG, b""))) == [(TAG, b"")]


class _Alone:
    rank, size = 0, 1

    def Allgather(self, own, everyone):
        everyone[0] = own
