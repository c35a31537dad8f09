"""Settings of Open MPI, which it reads when it starts: no ports on one machine."""

import contextlib
import os

TRUST = "SYNKHRONOS_TRUST_NETWORK"  # not empty: arrays between machines are not checked
# At a port of btl/tcp, any program on a machine of the job passes for one of its processes.
_ON_ONE_MACHINE = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}


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


@contextlib.contextmanager
def away():
    """Change to another working folder while MPI is loaded or begun.

    UCX, a library of Open MPI, reads ``./ucx.conf``, which may be another user's.
    """
    before = os.open(".", os.O_PATH)
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(before)
        os.close(before)
