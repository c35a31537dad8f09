"""Messages that were changed, repeated or misdirected are noticed. And the secret of a job."""

import os
import stat
import sys

import numpy as np
import pytest
from support import launching
from support.running import run

from synkhronos.comm.mpi import secret
from synkhronos.comm.mpi.sealed import MAC, Seal

KEY, TAG, PAYLOAD = b"of this job", 7, b"payload"


def seal(sender=0, receiver=1, key=KEY, with_gmac=True):
    return Seal(key, sender, receiver, with_gmac)


@pytest.mark.parametrize("with_gmac", [True, False])
@pytest.mark.parametrize("payload", [b"", b"x" * 70, np.zeros(9, "u1"), np.ones(1 << 20, "u1")])
def test_only_what_was_sent_so_is_taken_and_only_once(with_gmac, payload):
    mac = seal(with_gmac=with_gmac).next(TAG, payload)
    assert len(mac) == MAC and seal(with_gmac=with_gmac).is_next(TAG, payload, mac)
    changed = bytearray(payload)
    changed[:1] = b"\3" if len(changed) else b"more"
    wrong = {
        "changed": (seal(), TAG, changed, mac),
        "longer": (seal(), TAG, bytes(payload) + b"\0", mac),
        "with another MAC": (seal(), TAG, payload, bytes([mac[0] ^ 1]) + mac[1:]),
        "without its end": (seal(), TAG, payload, mac[:-1]),
        "without one": (seal(), TAG, payload, b""),
        "of another kind": (seal(), TAG + 1, payload, mac),
        "in another name": (seal(sender=2), TAG, payload, mac),
        "for another process": (seal(receiver=2), TAG, payload, mac),
        "back to its sender": (seal(1, 0), TAG, payload, mac),
        "of another job": (seal(key=b"another"), TAG, payload, mac),
    }
    for what, (given, *arguments) in wrong.items():
        assert not given.is_next(*arguments), what
    theirs, late = seal(with_gmac=with_gmac), seal(with_gmac=with_gmac)
    assert theirs.is_next(TAG, payload, mac) and not theirs.is_next(TAG, payload, mac)
    late.next(TAG, b"the first")
    assert not seal(with_gmac=with_gmac).is_next(TAG, PAYLOAD, late.next(TAG, PAYLOAD))


def test_the_macs_are_those_of_cryptography_and_of_hashlib():
    assert seal().next(TAG, PAYLOAD) != seal(with_gmac=False).next(TAG, PAYLOAD)
    ours, theirs = seal(with_gmac=False), seal()
    assert not theirs.is_next(TAG, PAYLOAD, ours.next(TAG, PAYLOAD))


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


LOCAL = ["--host", "localhost:3", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
PORTS = ["--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"]
NO_PORTS = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm"]
CONNECTED = """
import os
from synkhronos.comm.mpi import folders, secret
from synkhronos.comm.mpi.mesh import Mesh
from synkhronos.comm.mpi.mpi_library import MPI
with folders.of_segment():
    MPI.Init()
try:
    mesh = Mesh(MPI.COMM_WORLD, secret.of_job(secret.take(), MPI.COMM_WORLD.size))
    print(mesh.size, flush=True)
except secret.NoSecret as error:
    print(error, flush=True)
"""


def mpirun(folder, *arguments, ways=PORTS):
    environment = {**os.environ, **launching.FOR_ROOT, "XDG_CONFIG_HOME": str(folder)}
    return run(launching.MPIRUN, *LOCAL, *ways, *arguments, env=environment, cwd=folder)


@launching.needs_mpirun
def test_processes_take_the_users_secret_or_are_refused_if_theirs_differ(tmp_path):
    """The key of a job needs one secret; processes of one machine without ports need none."""
    script = [sys.executable, "-c", CONNECTED]
    made = mpirun(tmp_path, "-n", "3", *script)
    assert made.stdout.split() == ["3"] * 3, made.stderr
    (tmp_path / "synkhronos" / "secret").unlink()
    one = ["-n", "1", "-x", f"SYNKHRONOS_SECRET={'0' * 64}", *script]
    other = ["-n", "1", "-x", f"SYNKHRONOS_SECRET={'1' * 64}", *script]
    refused = mpirun(tmp_path, *one, ":", *other)
    for rank in (0, 1):
        said = f"process {rank} of this job has another secret than this one. All processes of"
        assert said in refused.stdout, refused.stderr
    plain = mpirun(tmp_path, "-n", "2", *script, ways=NO_PORTS)
    assert plain.stdout.split() == ["2"] * 2, plain.stderr
    assert not (tmp_path / "synkhronos" / "secret").exists()
