"""The secret of a job: from its launcher's environment, or from a file of the user.

    synkhronos launch, rule  ── drawn ──▶ environment of mpirun ──▶ that of each process (take)
    a user's mpirun or srun              ~/.config/synkhronos/secret, on each machine

It is never in a command line, which all users of a machine can read. The environment of a process
can be read by its user and by root (``/proc/PID/environ``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from typing import MutableMapping

TRUST = "SYNKHRONOS_TRUST_NETWORK"  # not empty: MPI sums arrays between machines, unchecked
VARIABLE = "SYNKHRONOS_SECRET"
EXPORTED = ("-x", VARIABLE)  # for mpirun
_BYTES = 32
# At a port of btl/tcp, any program on a machine of the job passes for one of its processes.
_ON_ONE_MACHINE = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
# Transports of Open MPI within one machine: with these alone no process has a port.
_WITHOUT_PORTS = {"self", "sm", "vader"}


class NoSecret(RuntimeError):
    """The processes of a job have no secret, or not the same; the message says what to do."""


def new() -> str:
    """Return a secret for `VARIABLE`."""
    return secrets.token_hex(_BYTES)


def take(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Remove the secret from an environment, so that no other program inherits it; return it."""
    return environment.pop(VARIABLE, None)


def open_no_ports(environment=os.environ) -> None:
    """Let Open MPI use shared memory alone, if mpirun has all processes on this machine.

    A setting of the user's has precedence.

    >>> variables = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    >>> open_no_ports(variables)
    >>> variables["OMPI_MCA_btl"]
    'self,sm'
    """
    size = environment.get("OMPI_COMM_WORLD_SIZE")
    if size is not None and size == environment.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        for name, value in _ON_ONE_MACHINE.items():
            environment.setdefault(name, value)


def has_ports(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether processes of other machines, or of other users, can send to this one.

    >>> has_ports({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}), has_ports({})
    (False, True)
    """
    ways = environment.get("OMPI_MCA_btl", "").split(",")
    return environment.get("OMPI_MCA_pml") != "ob1" or not _WITHOUT_PORTS.issuperset(ways)


def of_job(given: str | None, n_processes: int) -> bytes | None:
    """Return the secret of a job; None if its processes need none.

    `given` is what `take` has returned. Raises NoSecret.
    """
    if n_processes == 1 or not has_ports():
        return None
    return _decoded(given) if given is not None else of_user()


def of_user() -> bytes:
    """Return the secret in the user's file; make the file if there is none."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = os.path.join(folder, "synkhronos", "secret")
    try:
        if not os.path.lexists(path):
            _make(path)
        return _read(path)
    except OSError as error:
        raise NoSecret(f"{path} can't be read or made ({error.strerror}). {ADVICE}") from None


def _make(path):
    """Write the file under another name, then link it to `path`, where others may read it."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    written = f"{path}.{secrets.token_hex(8)}"
    file = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "w") as out:
            out.write(new() + "\n")
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(written, path)
    finally:
        os.unlink(written)


def _read(path):
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(file, encoding="ascii", errors="replace") as text:
        status = os.fstat(file)
        is_own = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
        if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
            raise NoSecret(
                f"{path} must be a file of yours that no other user can read: remove it, and the "
                "next job makes a new one."
            )
        return _decoded(text.read(1024).strip(), path)


def _decoded(text, source=VARIABLE):
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < _BYTES:
        raise NoSecret(f"{source} must have at least {2 * _BYTES} hexadecimal digits. {ADVICE}")
    return secret


ADVICE = (
    f"All processes of a job need the same secret: `synkhronos launch` gives them one. With your "
    f"own mpirun write `export {VARIABLE}=$(openssl rand -hex {_BYTES})`, and then `mpirun -x "
    f"{VARIABLE} ...`, or `srun ...`."
)
